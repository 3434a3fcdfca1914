"""The search of `plan`, from requirements to the best configurations, and the file of
candidates."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import NamedTuple, Self

import msgspec

from kvcalc.errors import UserError, few
from kvcalc.library.files import Growing
from kvcalc.planning.best_configs import BestConfigs, CandidateRanking, candidate_record
from kvcalc.planning.grid import CandidateBatch, SearchGrid
from kvcalc.planning.search_space import Requirement, SearchSpace

SUFFIXES = (".csv", ".jsonl")


class CandidateFile:
    """A file of all candidates, written batch by batch. It replaces the target at the end.

    After Ctrl-C the file has all batches that were complete. If there are none, the target stays.

    Args:
        path: Ends in .csv or .jsonl. `-` is standard output in JSON lines, and with '' the
            candidates are only counted.
        prices: Price per hour of each GPU model.

    Raises:
        UserError: The path has another suffix.
    """

    def __init__(self, path: str, prices: Mapping[str, float]) -> None:
        if path and path != "-" and not path.lower().endswith(SUFFIXES):
            raise UserError(f"points {path!r} should end in {' or '.join(SUFFIXES)}")
        self.count = 0
        self._prices = prices
        self._is_csv = path.lower().endswith(".csv")
        self._file = Growing(path) if path else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._file:
            is_stopped = kind is KeyboardInterrupt and self.count > 0
            self._file.close(keep=kind is None or is_stopped)

    def write(self, batch: CandidateBatch) -> None:
        """Count the candidates of a batch, and write a row for each."""
        if self._file:
            rows = [
                candidate_record(candidate, self._prices.get(candidate.gpu, 0.0))
                for candidate in batch.candidates()
            ]
            text = StringIO()
            if self._is_csv:
                writer = csv.writer(text, lineterminator="\n")
                writer.writerows([] if self.count else [rows[0]])
                writer.writerows(row.values() for row in rows)
            else:
                for row in rows:
                    text.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.write(text.getvalue())
        self.count += len(batch.index)


class SearchResult(NamedTuple):
    """The result of a plan.

    Attributes:
        answers: By model, then by requirement.
        remarks: Deployments that were left out, and why.
    """

    space: SearchSpace
    answers: list[BestConfigs]
    remarks: list[str]


def run_search(
    needs: Sequence[Requirement],
    space: SearchSpace,
    prices: Mapping[str, float] | None = None,
    on_batch: Callable[[CandidateBatch], object] | None = None,
) -> SearchResult:
    """Try all candidates of a space.

    Args:
        prices: Price per hour of each GPU model. Models without a price are left out.
        on_batch: Called with each batch.

    Raises:
        UserError: There is no candidate.
    """
    remarks = []
    if prices:
        gpus = tuple(gpu for gpu in space.gpus if gpu.name in prices)
        if not gpus:
            names = ", ".join(prices)
            raise UserError(f"prices of {names}, and none of these GPUs is looked at")
        unpriced = [gpu.name for gpu in space.gpus if gpu.name not in prices]
        if unpriced:
            remarks.append(f"left out, as no price is given: {few(unpriced)}")
        space = msgspec.structs.replace(space, gpus=gpus)
    grid = SearchGrid(needs, space)
    rankings = {
        (model.name, need): CandidateRanking(need, space, prices)
        for model in space.models
        for need in needs
    }
    for batch in grid.batches():
        rankings[batch.deployments[0].model.name, batch.need].add(batch)
        if on_batch:
            on_batch(batch)
    answers = [ranking.result() for ranking in rankings.values()]
    if not any(answer.num_tried for answer in answers):
        for refusal in grid.remarks:
            raise UserError(refusal)
        message = f"nothing to look at with {space.max_gpus} GPUs"
        raise UserError(message, hint="Raise --max-gpus")
    # remarks that differ only in numbers are one remark
    similar: dict[str, list[str]] = {}
    for text in grid.remarks:
        similar.setdefault(re.sub(r"\d[\d,.]*", "0", text), []).append(text)
    for first, *others in similar.values():
        remarks.append(first + (f" (and {len(others)} more like this)" if others else ""))
    return SearchResult(space, answers, remarks)
