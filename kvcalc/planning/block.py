"""A block of a plan: points of one model under one need, over several kinds of GPU and numbers of stages, side by side."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from kvcalc.capacity.memory_terms import GIB
from kvcalc.planning.need import BATCHES, Need
from kvcalc.planning.space import Speculated
from kvcalc.planning.timed import Times
from kvcalc.timing.deployment import Deployment

FAR = 1e9
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here

MEETS, MEMORY, UNKNOWN, TTFT, TPOT, THROUGHPUT, GPUS = range(7)  # why a point fails, what is looked at first before the rest


class Held(NamedTuple):
    """What is known of deployments at each number of sequences. sent: as `block_of` has it, 0 where prompts are not apart."""

    deployments: list[Deployment]
    left: Array
    capacity: Array
    times: Times
    sent: Array


class Block(NamedTuple):
    """Points of deployments that differ by GPU and pipeline stages, under one need, by deployment and replicas (fastest).

    which: the deployment of each point. each: GPUs of one replica. counts: sequences that a replica is set up for. capacity:
    that fit. total: output tokens per second of all replicas at the asked load, rate: of one replica. failing: the first of
    the limits that does not hold. excess: by what factor the worst of them is missed, 1 where all hold. left: bytes of a GPU
    that the terms leave for the cache. prefill: replicas for prompts alone, beside those that decode; 0 where each does both.
    """

    need: Need
    deployments: list[Deployment]
    which: Array
    each: Array
    replicas: Array
    counts: Array
    capacity: Array
    left: Array
    ttft: Array
    tpot: Array
    e2e: Array | None
    rate: Array
    total: Array
    failing: Array
    excess: Array
    speculated: Speculated | None
    prefill: Array

    @property
    def deployment(self) -> Deployment:
        """That of the first point."""
        return self.deployments[int(self.which[0])]

    def only(self, at: Any) -> "Block":
        """Some of the points, by their places or a slice of them, as a block of its own."""
        points = {name: figure[at] for name, figure in self._asdict().items() if hasattr(figure, "dtype")}
        return self._replace(**points)

    def alone(self) -> Iterator["Block"]:
        """The points of one deployment after the other."""
        import numpy as np

        edges = np.searchsorted(self.which, np.arange(len(self.deployments) + 1)).tolist()
        return (self.only(slice(*ends)) for ends in pairwise(edges))

    @property
    def gpus(self) -> Array:
        """GPUs of all replicas, those for prompts alone among them."""
        return (self.replicas + self.prefill) * self.each

    @property
    def rate_per_gpu(self) -> Array:
        """Output tokens per second of a GPU, those for prompts alone among them."""
        return self.rate / (self.each * ((self.replicas + self.prefill) / self.replicas))


def block_of(
    need: Need, held: Held, max_gpus: int, counts: Array, speculated: Speculated | None = None, apart: bool = False
) -> Block:
    """The points of deployments under a need, from what is known of them at each number of sequences.

    apart: prompts are processed on replicas of their own; `sent` seconds of a prompt's cache on the link to another come in
    between the first token and the second, and add to the first as a user sees it. Prompts then stop no steps: a replica
    makes n·out tokens in the time of out − 1 steps, and so many prompts a second keep ⌈rate · TTFT⌉ replicas busy.
    """
    import numpy as np

    sizes, times = np.array([one.parallelism.gpus for one in held.deployments]), held.times
    points = np.minimum(max_gpus // sizes, need.users) if need.users else sizes * 0 + len(BATCHES)
    which = np.repeat(np.arange(len(sizes)), points)
    replicas = np.arange(1, len(which) + 1) - np.repeat(np.cumsum(points) - points, points)
    chosen = -(-need.users // replicas) if need.users else np.tile(BATCHES, len(sizes))
    places = which, np.searchsorted(counts, chosen)
    holds, left, step = (figures[places] for figures in (held.capacity, held.left, times.tpot))
    step = np.where(holds > 0, step, np.nan)
    tpot = np.where(holds >= chosen, step, np.nan)
    e2e = None if times.e2e is None else times.e2e[places]
    first, output = np.where(holds > 0, times.ttft[which], np.nan), need.lengths.output
    ttft = first + held.sent[which]
    if apart:
        e2e = ttft + (output - 1) * tpot
    each = 1 / tpot if e2e is None else output / e2e  # output tokens per second of one sequence
    rate = chosen * output / ((output - 1) * tpot) if apart else chosen * each
    if need.users:
        total = need.users * each
    else:
        asked = np.maximum(need.rate * need.lengths.output, need.min_throughput)
        replicas = np.maximum(1, np.ceil(asked / np.where(rate > 0, rate, np.inf))).astype(np.int64)
        total = np.minimum(asked, replicas * rate)
    prefill = replicas * 0
    if apart:
        prefill = np.maximum(1, np.ceil(np.nan_to_num(total / output * first))).astype(np.int64)
    figures = chosen, holds, left, ttft, tpot, e2e, rate, total
    block = Block(need, held.deployments, which, sizes[which], replicas, *figures, replicas * 0, total * 0, speculated, prefill)
    failing, excess = judged(block._replace(tpot=step), max_gpus)
    return block._replace(failing=failing, excess=excess)


def judged(block: Block, max_gpus: int) -> tuple[Array, Array]:
    """What each point fails at first, and by what factor it misses the worst of its limits; FAR and more where none fits.

    Where memory falls short and a step was not timed, a limit on its time may be missed by any factor: such a point comes after
    all that were timed, by half of FAR.
    """
    import numpy as np

    need, failing, excess = block.need, np.zeros(block.counts.shape, dtype=np.int8), np.ones(block.counts.shape)
    none = FAR - block.left / GIB  # where not one sequence fits, what lacks the fewest bytes is nearest
    missed = [(MEMORY, np.where(block.capacity > 0, block.counts / np.maximum(block.capacity, 1), none))]
    unknown = (np.isnan(block.ttft) & bool(need.max_ttft)) | (np.isnan(block.total) & bool(not need.users or need.min_throughput))
    missed += [(UNKNOWN, np.where(unknown & (block.capacity >= block.counts), FAR, 0.0))]
    missed += [(TTFT, np.nan_to_num(block.ttft / need.max_ttft))] if need.max_ttft else []
    missed += [(TPOT, np.nan_to_num(block.tpot / need.max_tpot))] if need.max_tpot else []
    missed += [(THROUGHPUT, np.nan_to_num(need.min_throughput / block.total))] if need.min_throughput and need.users else []
    missed += [(GPUS, block.gpus / max_gpus)] if not need.users or block.prefill.any() else []
    for limit, ratio in missed:
        failing = np.where((failing == MEETS) & (ratio > 1), limit, failing)
        excess = np.maximum(excess, ratio)
    untimed = (failing == MEMORY) & np.isnan(block.tpot) & (block.capacity > 0) & bool(need.max_tpot)
    return failing, excess + np.where(untimed, FAR / 2, 0.0)
