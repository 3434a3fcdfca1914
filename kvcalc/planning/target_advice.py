"""Advice for targets that nothing meets: changes of options, each tried before it is given."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.planning.best_configs import BestConfigs
from kvcalc.planning.grid import Candidate
from kvcalc.planning.search import run_search
from kvcalc.planning.search_space import MAX_GPUS, Requirement, SearchSpace
from kvcalc.planning.variants import narrower_formats, stored_precision

GPU_FACTORS = (2, 4, 8, 16)  # larger numbers of GPUs to try


class TargetChange(NamedTuple):
    """Options to type, and the search that they make."""

    words: list[str]
    need: Requirement
    space: SearchSpace

    def search(self) -> BestConfigs | None:
        """Return the result, or None if the search is refused."""
        try:
            return run_search([self.need], self.space).answers[0]
        except UserError:
            return None


def changes_that_help(answer: BestConfigs, space: SearchSpace) -> list[str]:
    """Return the options that meet the targets, each alternative as one text.

    Each alternative is searched on the GPU model of the closest miss. It is dropped if no
    candidate meets the targets.
    """
    texts: list[str] = []
    for change in _changes(answer.closest, space) if answer.closest else ():
        if texts and change.words[0].startswith("--max-gpus"):
            continue  # fewer GPUs are enough
        result = change.search()
        if result and not result.best and result.closest:
            change = _relax_limits(change, result.closest)
            result = change.search()
        if result and result.best:
            texts.append(" ".join(change.words))
    return texts


def _changes(candidate: Candidate, space: SearchSpace) -> Iterator[TargetChange]:
    """Yield looser limits, or if a candidate lacks memory: more GPUs, fewer users, narrower
    formats."""
    need, deployment = candidate.need, candidate.deployment
    ranks = deployment.parallelism
    models, gpus = (deployment.model,), (deployment.gpu,)
    same_deployment = msgspec.structs.replace(
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
            larger = msgspec.structs.replace(space, models=models, gpus=gpus, max_gpus=max_gpus)
            yield TargetChange([f"--max-gpus {max_gpus}"], need, larger)
    users = candidate.capacity * candidate.replicas
    if need.users and users:
        fewer = msgspec.structs.replace(need, users=users)
        yield TargetChange([f"--users {users}"], fewer, same_deployment)
        return
    formats = stored_precision(deployment.model, deployment.precision)
    exceeds_memory = candidate.remaining_bytes < 0
    for field, name in narrower_formats(formats, deployment.gpu, exceeds_memory).items():
        precision = msgspec.structs.replace(deployment.precision, **{field: name})
        narrower = msgspec.structs.replace(same_deployment, precisions=(precision,))
        yield TargetChange([f"--{field.replace('_', '-')} {name}"], need, narrower)


def _relax_limits(change: TargetChange, candidate: Candidate) -> TargetChange:
    """Return a change with looser limits where the candidate misses them."""
    need, space, words = candidate.need, change.space, [*change.words]
    limits: dict[str, Any] = {}
    times = (
        ("max_ttft", need.max_ttft, candidate.ttft),
        ("max_tpot", need.max_tpot, candidate.tpot),
    )
    for name, limit, seconds in times:
        if limit and seconds and seconds > limit:
            # rounded up to one decimal: 0.00453 s gives 4.6 ms
            milliseconds = -int(-seconds * 10_000 // 1) / 10
            limits[name] = milliseconds / 1000
            words.append(f"--{name.replace('_', '-')} {milliseconds:g}ms")
    total = int(candidate.total_tokens_per_s or 0)
    if need.min_throughput and need.users and 0 < total < need.min_throughput:
        limits["min_throughput"] = float(total)
        words.append(f"--min-throughput {total}")
    if candidate.gpus > space.max_gpus:
        words.append(f"--max-gpus {candidate.gpus}")
        space = msgspec.structs.replace(space, max_gpus=candidate.gpus)
    return TargetChange(words, msgspec.structs.replace(need, **limits), space)
