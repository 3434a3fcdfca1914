"""The search of `plan`, from requirements to the best configurations, and the file of
candidates."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file:
            self._file.close(
                keep=kind is None or (kind is KeyboardInterrupt and self.count > 0)
            )

    def write(self, batch: CandidateBatch) -> None:
        """Count the candidates of a batch, and write a row for each."""
        if self._file:
            rows = [
                candidate_record(candidate, self._prices.get(candidate.gpu, 0.0))
                for candidate in batch.candidates()
            ]
            if self._is_csv:
                lines = [",".join(map(_cell, row.values())) for row in rows]
                if not self.count:
                    lines.insert(0, ",".join(rows[0]))
            else:
                lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
            self._file.write("".join(f"{line}\n" for line in lines))
        self.count += len(batch.index)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"' if set(value) & set(',"\n') else value
    return repr(value)


class SearchResult(NamedTuple):
    """The result of a plan.

    Attributes:
        answers: By model, then by requirement.
        remarks: What was left out, and why.
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
        unpriced = [gpu.name for gpu in space.gpus if gpu.name not in prices]
        gpus = tuple(gpu for gpu in space.gpus if gpu.name in prices)
        if not gpus:
            raise UserError(
                f"prices of {', '.join(prices)}, and none of these GPUs is looked at"
            )
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
        if grid.remarks:
            raise UserError(next(iter(grid.remarks)))
        raise UserError(
            f"nothing to look at with {space.max_gpus} GPUs", hint="Raise --max-gpus"
        )
    return SearchResult(space, answers, [*remarks, *_fold(grid.remarks)])


def _fold(remarks: Iterable[str]) -> list[str]:
    """Return one remark for all that differ only in numbers, with the number of the others."""
    similar: dict[str, list[str]] = {}
    for text in remarks:
        similar.setdefault(re.sub(r"\d[\d,.]*", "0", text), []).append(text)
    return [
        first + (f" (and {len(more)} more like this)" if more else "")
        for first, *more in similar.values()
    ]
