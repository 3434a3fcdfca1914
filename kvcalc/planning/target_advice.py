"""Advice for targets that nothing meets: changes of options, each tried before it is given."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.planning.best_configs import BestConfigs
from kvcalc.planning.grid import Candidate
from kvcalc.planning.quality import narrower_formats, stored
from kvcalc.planning.search import run_search
from kvcalc.planning.search_space import MAX_GPUS, Requirement, SearchSpace
from kvcalc.records import Record

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
    closest = answer.closest
    if closest is None:
        return []
    if closest.capacity >= closest.max_num_seqs:
        changes = iter([TargetChange([], answer.need, _around(closest, space))])
    else:
        changes = _memory_changes(closest, space)
    texts: list[str] = []
    for change in changes:
        if texts and change.words[0].startswith("--max-gpus"):
            continue  # fewer GPUs are enough
        result = change.search()
        if result and not result.best and result.closest:
            change = _relax_limits(change, result.closest)
            result = change.search()
        if result and result.best:
            texts.append(" ".join(change.words))
    return texts


def _around(candidate: Candidate, space: SearchSpace) -> SearchSpace:
    """Return the part of a space with a candidate's model, GPU, parallelism, formats and draft."""
    deployment = candidate.deployment
    ranks = deployment.parallelism
    return msgspec.structs.replace(
        space,
        models=(deployment.model,),
        gpus=(deployment.gpu,),
        tp=(ranks.tp,),
        pp=(ranks.pp,),
        dp=(ranks.dp,),
        ep=(ranks.ep,),
        precisions=(deployment.precision,),
        drafts=(candidate.speculation,),
        disaggregate=(bool(candidate.prefill_replicas),),
    )


def _memory_changes(candidate: Candidate, space: SearchSpace) -> Iterator[TargetChange]:
    """Yield changes if a candidate lacks memory: more GPUs, fewer users, narrower formats."""
    need, deployment, around = (
        candidate.need,
        candidate.deployment,
        _around(candidate, space),
    )
    for factor in GPU_FACTORS:
        max_gpus = space.max_gpus * factor
        if max_gpus <= MAX_GPUS:
            larger = msgspec.structs.replace(
                space, models=around.models, gpus=around.gpus, max_gpus=max_gpus
            )
            yield TargetChange([f"--max-gpus {max_gpus}"], need, larger)
    users = candidate.capacity * candidate.replicas
    if need.users and users:
        fewer = msgspec.structs.replace(need, users=users)
        yield TargetChange([f"--users {users}"], fewer, around)
        return
    formats = stored(deployment.model, deployment.precision)
    exceeds_memory = candidate.remaining_bytes < 0
    narrower = narrower_formats(formats, deployment.gpu, is_weights_only=exceeds_memory)
    for field, name in narrower.items():
        precision = msgspec.structs.replace(deployment.precision, **{field: name})
        narrow = msgspec.structs.replace(around, precisions=(precision,))
        yield TargetChange([f"--{field.replace('_', '-')} {name}"], need, narrow)


def _relax_limits(change: TargetChange, candidate: Candidate) -> TargetChange:
    """Return a change with looser limits where the candidate misses them."""
    need, space, words = candidate.need, change.space, [*change.words]
    limits: Record = {}
    for name, seconds in (("max_ttft", candidate.ttft), ("max_tpot", candidate.tpot)):
        if getattr(need, name) and seconds and seconds > getattr(need, name):
            # rounded up to one decimal: 0.00453 s gives 4.6 ms
            milliseconds = -int(-seconds * 10_000 // 1) / 10
            limits[name] = milliseconds / 1000
            words.append(f"--{name.replace('_', '-')} {milliseconds:g}ms")
    total = candidate.total_tokens_per_s
    if need.min_throughput and need.users and total and total < need.min_throughput:
        limits["min_throughput"] = float(int(total))
        words.append(f"--min-throughput {int(total)}")
    if candidate.gpus > space.max_gpus:
        words.append(f"--max-gpus {candidate.gpus}")
        space = msgspec.structs.replace(space, max_gpus=candidate.gpus)
    return TargetChange(words, msgspec.structs.replace(need, **limits), space)
