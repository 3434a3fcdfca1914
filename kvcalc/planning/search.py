"""The search of `plan`, from requirements to the best configurations, and the file of
candidates."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from kvcalc.arithmetic import grouped
from kvcalc.errors import UserError, list_few
from kvcalc.library.files import OutputFile
from kvcalc.planning.best_configs import BestConfigs, CandidateRanking, candidate_record
from kvcalc.planning.grid import Candidate, CandidateBatch, SearchGrid
from kvcalc.planning.search_space import MAX_GPUS, SearchSpace
from kvcalc.planning.variants import narrower_formats
from kvcalc.question.plan_options import Requirement

SUFFIXES = (".csv", ".jsonl")


class CandidateFile:
    """Writes all candidates of a search to a CSV or JSON-lines file. It is a context manager.

    A candidate is a deployment with a number of replicas. An existing file at `path` is replaced
    only at the end. After Ctrl-C, the new file has all complete batches. If there are none, the
    existing file stays.

    Args:
        path: A path that ends in .csv or .jsonl. "-" writes JSON lines to standard output. With "",
            nothing is written and the candidates are only counted.
        prices: Price per hour of one GPU of each model, by the name of the GPU model. Without a
            price, costs are empty.

    Attributes:
        count: Number of candidates that were written or counted so far.

    Raises:
        UserError: The path ends in neither .csv nor .jsonl.
    """

    count = 0

    def __init__(self, path: str, prices: Mapping[str, float]) -> None:
        if path and path != "-" and not path.lower().endswith(SUFFIXES):
            raise UserError(f"points {path!r} should end in {' or '.join(SUFFIXES)}")
        self._prices = prices
        self._is_csv = path.lower().endswith(".csv")
        self._file = OutputFile(path) if path else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._file:
            self._file.close(
                keep=kind is None or (kind is KeyboardInterrupt and self.count > 0)
            )

    def write(self, batch: CandidateBatch) -> None:
        """Write one line for each candidate of a batch, and add their number to `count`.

        Args:
            batch: Deployments with numbers of replicas, and their memory and times.
        """
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
    """The result of a search for the best deployments.

    Attributes:
        space: The search space: models, GPU models, parallelism and data types that were combined.
        answers: One result for each model and requirement (load and targets). All requirements of
            the first model come first.
        remarks: Sentences about deployments that were left out, with the reason.
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
    """Return at most five best deployments of a search space for each model and requirement.

    All combinations in the search space are tried. The best meets all targets at the lowest price
    per hour, or without prices with the fewest GPUs. Among equals, it has the least memory.

    Args:
        needs: The requirements: each has a load (users or requests per second, lengths) and
            targets.
        space: The search space: models, GPU models, parallelism and data types to combine.
        prices: Price per hour of one GPU of each model, by the name of the GPU model. GPU models
            without a price are left out. None or empty ranks by the number of GPUs.
        on_batch: Called with each batch of candidates (deployments with replicas), for example to
            write them to a file.

    Raises:
        UserError: No combination can be tried, or none of the GPU models has a price.
    """
    remarks = []
    if prices:
        gpus = tuple(gpu for gpu in space.gpus if gpu.name in prices)
        if not gpus:
            raise UserError(
                f"prices of {', '.join(prices)}, and none of these GPUs is looked at"
            )
        unpriced = [gpu.name for gpu in space.gpus if gpu.name not in prices]
        if unpriced:
            remarks.append(f"left out, as no price is given: {list_few(unpriced)}")
        space = replace(space, gpus=gpus)
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
        raise UserError(f"nothing to look at with {space.max_gpus} GPUs", "Raise --max-gpus")
    # remarks that differ only in numbers are one remark
    similar = grouped((re.sub(r"\d[\d,.]*", "0", text), text) for text in grid.remarks)
    for first, *others in similar.values():
        remarks.append(first + (f" (and {len(others)} more like this)" if others else ""))
    return SearchResult(space, answers, remarks)


GPU_FACTORS = (2, 4, 8, 16)  # larger numbers of GPUs to try


class TargetChange(NamedTuple):
    """A changed search, in which a deployment may meet the targets that were missed before.

    Attributes:
        words: Command-line options that make the change, such as "--users 32", except
            `--max-gpus`.
        need: The requirement (load and targets) after the change.
        space: The search space after the change.
    """

    words: list[str]
    need: Requirement
    space: SearchSpace

    def search(self) -> BestConfigs | None:
        """Return the best deployments after the change; None if no deployment can be tried.

        Prices are ignored: fewer GPUs are better.
        """
        try:
            return run_search([self.need], self.space).answers[0]
        except UserError:
            return None


def changes_that_help(answer: BestConfigs, space: SearchSpace) -> list[str]:
    """Return command-line options, such as "--max-tpot 4.6ms", with which the targets can be met.

    Each text is one alternative. It loosens a target, allows more GPUs, reduces the number of
    users, or selects narrower data types. It is tried on the GPU model of the deployment that
    misses the targets most narrowly. Alternatives with which no deployment meets the targets are
    left out, so the list may be empty.

    Args:
        answer: The result of a search in which no deployment meets the targets.
        space: The search space of this result.
    """
    texts: list[str] = []
    for change in _changes(answer.closest, space) if answer.closest else ():
        if texts and not change.words:
            continue  # fewer GPUs are enough
        result = change.search()
        if result and not result.best and result.closest:
            change = _relax_limits(change, result.closest)
            result = change.search()
        if result and result.best:
            num_gpus = result.best[0].gpus  # the smallest number
            if num_gpus > space.max_gpus:
                change.words.insert(0, f"--max-gpus {num_gpus}")
            texts.append(" ".join(change.words))
    return texts


def _changes(candidate: Candidate, space: SearchSpace) -> Iterator[TargetChange]:
    """Yield changes: looser limits, or if the candidate lacks memory, more GPUs, fewer users or
    narrower formats.
    """
    need, deployment = candidate.need, candidate.deployment
    ranks = deployment.parallelism
    models, gpus = (deployment.model,), (deployment.gpu,)
    same_deployment = replace(
        space,
        models=models,
        gpus=gpus,
        tp=(ranks.tp,),
        pp=(ranks.pp,),
        dp=(ranks.dp,),
        ep=(ranks.ep,),
        precisions=(deployment.precision,),
        drafts=(candidate.speculation,),
        disaggregate=(bool(candidate.prefill_replicas),),
    )
    if candidate.capacity >= candidate.max_num_seqs:
        yield TargetChange([], need, same_deployment)
        return
    for factor in GPU_FACTORS:
        max_gpus = space.max_gpus * factor
        if max_gpus <= MAX_GPUS:
            larger = replace(space, models=models, gpus=gpus, max_gpus=max_gpus)
            yield TargetChange([], need, larger)
    users = candidate.capacity * candidate.replicas
    if need.users and users:
        yield TargetChange([f"--users {users}"], replace(need, users=users), same_deployment)
        return
    for field, name in narrower_formats(deployment, candidate.remaining_bytes < 0).items():
        precision = replace(deployment.precision, **{field: name})
        narrower = replace(same_deployment, precisions=(precision,))
        yield TargetChange([f"--{field.replace('_', '-')} {name}"], need, narrower)


def _relax_limits(change: TargetChange, candidate: Candidate) -> TargetChange:
    """Return the change with looser limits for all targets that the candidate misses."""
    need, space, words = candidate.need, change.space, [*change.words]
    limits: dict[str, Any] = {}
    for time, limit in need.time_limits.items():
        seconds = getattr(candidate, time)
        if seconds and seconds > limit:
            # rounded up to one decimal: 0.00453 s gives 4.6 ms
            milliseconds = -int(-seconds * 10_000 // 1) / 10
            limits[f"max_{time}"] = milliseconds / 1000
            words.append(f"--max-{time} {milliseconds:g}ms")
    total = int(candidate.total_tokens_per_s or 0)
    if need.min_throughput and need.users and 0 < total < need.min_throughput:
        limits["min_throughput"] = float(total)
        words.append(f"--min-throughput {total}")
    if candidate.gpus > space.max_gpus:
        space = replace(space, max_gpus=min(candidate.gpus, MAX_GPUS))
    return TargetChange(words, replace(need, **limits), space)
