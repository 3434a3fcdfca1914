"""Advice for a need that nothing meets: changes of options, each tried before it is given."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.planning.best import Answer
from kvcalc.planning.need import Need
from kvcalc.planning.precisions import narrower, stored
from kvcalc.planning.reasons import Point
from kvcalc.planning.search import searched
from kvcalc.planning.space import MOST_SPLIT, Space
from kvcalc.storage.quality import loss_of

MAX_GPU_FACTOR = 16  # how many times as many GPUs are tried, doubling


class Change(NamedTuple):
    """Options to type, and the question that they make."""

    words: list[str]
    need: Need
    space: Space


def changes_that_help(answer: Answer, space: Space) -> list[str]:
    """Return the options that make the answer yes, each alternative as one text; nothing if no change helps.

    Each alternative is searched on the kind of GPU that comes nearest, and is kept only if a configuration meets the need.
    """
    near = answer.nearest
    if near is None:
        return []
    fits = near.block.capacity[near.at] >= near.block.counts[near.at]
    candidates = [Change([], answer.need, _around(near, space))] if fits else _memory_changes(near, space)
    texts: list[str] = []
    for change in candidates:
        if texts and change.words[0].startswith("--max-gpus"):
            continue  # fewer GPUs are enough
        if words := _tried(change):
            texts.append(" and ".join(words))
    return texts


def _tried(change: Change) -> list[str]:
    """Return the words of a change, with the limits that still have to give; nothing if it does not help."""
    found = _search(change)
    if found and not found.best and found.nearest:
        limits, need, space = _limits(found.nearest, change.space)
        change = Change([*change.words, *limits], need, space)
        found = _search(change)
    return change.words if found and found.best else []


def _search(change: Change) -> Answer | None:
    try:
        return searched([change.need], change.space).answers[0]
    except UserError:
        return None


def _around(point: Point, space: Space) -> Space:
    """Return the part of a space that holds a point: its model, kind of GPU, split, formats and draft."""
    block, deployment = point.block, point.deployment
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
        drafts=(block.speculated,),
        disaggregate=(bool(block.prefill[point.at]),),
    )


def _memory_changes(point: Point, space: Space) -> Iterator[Change]:
    """Yield what could be changed if a point lacks memory: more GPUs, fewer users, narrower formats."""
    block, need, around = point.block, point.block.need, _around(point, space)
    for factor in (2**n for n in range(1, MAX_GPU_FACTOR.bit_length())):
        count = space.max_gpus * factor
        if count <= MOST_SPLIT:
            more = msgspec.structs.replace(space, models=around.models, gpus=around.gpus, max_gpus=count)
            yield Change([f"--max-gpus {count}"], need, more)
    held = int(block.capacity[point.at] * block.replicas[point.at])
    if need.users and held:
        yield Change([f"--users {held}"], msgspec.structs.replace(need, users=held), around)
        return
    deployment = point.deployment
    formats = stored(deployment.model, deployment.precision)
    for option, what, name in narrower(formats, deployment.gpu, weights_alone=bool(block.left[point.at] < 0)):
        field = {"cache": "kv_cache_dtype", "weights": "quantization"}[what]
        precision = msgspec.structs.replace(deployment.precision, **{field: name})
        smaller = msgspec.structs.replace(around, precisions=(precision,))
        yield Change([f"{option} {name} ({loss_of(what, name)})"], need, smaller)


def _limits(point: Point, space: Space) -> tuple[list[str], Need, Space]:
    """Return the options for the limits that a point misses, and the need and space with these."""
    block, at, need = point.block, point.at, point.block.need
    words, wider = [], {}
    for name, seconds in (("max_ttft", block.ttft[at]), ("max_tpot", block.tpot[at])):
        if getattr(need, name) and seconds > getattr(need, name):
            milliseconds = _tenths_up(float(seconds))
            wider[name] = milliseconds / 1000
            words.append(f"--{name.replace('_', '-')} {milliseconds:g}ms")
    if need.min_throughput and need.users and block.total[at] < need.min_throughput:
        wider["min_throughput"] = float(int(block.total[at]))
        words.append(f"--min-throughput {int(block.total[at])}")
    if point.gpus > space.max_gpus:
        words.append(f"--max-gpus {point.gpus}")
        space = msgspec.structs.replace(space, max_gpus=point.gpus)
    return words, msgspec.structs.replace(need, **wider), space


def _tenths_up(seconds: float) -> float:
    """Return milliseconds, rounded up to one digit behind the point: 0.00453 s gives 4.6."""
    return -int(-seconds * 10_000 // 1) / 10
