"""The grid of a plan, a block at a time: one deployment under one need, in every number of replicas.

A point's capacity is `fit`'s at the low end of its range, its times `latency`'s; what fails first is its reason. Blocks are
made one after the other, so that a grid of any size takes the memory of one block.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.memory_terms import GIB
from kvcalc.capacity.room import Room, Rooms
from kvcalc.errors import UserError, few
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space, Speculated
from kvcalc.planning.timed import Timed, Times
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import Deployment, on_one_basis

FAR = 1e9
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here

MEETS, MEMORY, UNKNOWN, TTFT, TPOT, THROUGHPUT, GPUS = range(7)  # why a point fails, what is looked at first before the rest


class Block(NamedTuple):
    """Points of one deployment under one need, by replicas.

    counts: sequences that a replica is set up for. capacity: that fit. total: output tokens per second of all replicas at the
    asked load, rate: of one replica. failing: the first of the limits that does not hold. excess: by what factor the worst of
    them is missed, 1 where all hold. left: bytes of a GPU that the terms leave for the cache. prefill:
    replicas for prompts alone, beside those that decode; 0 where each does both.
    """

    need: Need
    deployment: Deployment
    replicas: Array
    counts: Array
    capacity: Array
    left: Array
    ttft: float
    tpot: Array
    e2e: Array | None
    rate: Array
    total: Array
    failing: Array
    excess: Array
    speculated: Speculated | None
    prefill: Array

    @property
    def gpus(self) -> Array:
        """GPUs of all replicas, those for prompts alone among them."""
        return (self.replicas + self.prefill) * self.deployment.parallelism.gpus

    @property
    def rate_per_gpu(self) -> Array:
        """Output tokens per second of a GPU, those for prompts alone among them."""
        return self.rate / (self.deployment.parallelism.gpus * ((self.replicas + self.prefill) / self.replicas))


class Part(NamedTuple):
    """A share of a grid: one model in one precision, over splits that differ in their stages alone, on a run of the GPUs.

    model: its place in the space. start, stop: of the GPUs.
    """

    model: int
    precision: Precision
    splits: list[Parallelism]
    speculated: Speculated | None
    start: int
    stop: int


class Grid:
    """All blocks of a space under some needs. remarks: what was left out and why, once it has been walked through."""

    def __init__(self, needs: Sequence[Need], space: Space) -> None:
        self.needs, self.space = needs, space
        self.remarks: dict[str, None] = {}
        self.laws = self._calibrations()

    def _calibrations(self) -> dict[str, Calibration | None]:
        """What times rest on, by GPU: one basis for all, unless a mixture is meant or a stack is asked for.

        Of GPUs without the stack that is asked for none is looked at.
        """
        found = []
        for gpu in self.space.gpus:
            try:
                found.append(Deployment(self.space.models[0], gpu).under(self.space.stack))
            except UserError as error:
                if not self.space.stack or len(self.space.gpus) == 1:
                    raise
                self.remarks[str(error)] = None
        if not self.space.mixed:
            found, remark = on_one_basis(found)
            self.remarks |= {remark: None} if remark else {}
        return {deployment.gpu.name: deployment.calibration for deployment in found}

    def blocks(self) -> Iterator[Block]:
        """Every block: by model, ranks of a stage, precision, GPU, stages and need (fastest)."""
        for part in self.parts():
            yield from self.blocks_of(part)
        self.note_links()

    def parts(self, least: int = 1) -> Iterator[Part]:
        """The grid in its order, each part with all GPUs unless there are then fewer parts than `least`."""
        alike: dict[tuple[int, Parallelism], list[Parallelism]] = {}
        for number, model in enumerate(self.space.models):
            for ranks in self.space.splits(model):
                alike.setdefault((number, msgspec.structs.replace(ranks, pp=1)), []).append(ranks)
        formats = [*product(self.space.precisions, self.space.drafts)]
        count = len(self.space.gpus)
        step = max(1, count * len(alike) * len(formats) // least)
        for (number, _), splits in alike.items():
            for precision, speculated in formats:
                for start in range(0, count, step):
                    yield Part(number, precision, splits, speculated, start, start + step)

    def note_links(self) -> None:
        """Remark on GPUs whose replicas one link has to join."""
        most = self.space.max_gpus
        alone = [g.name for g in self.space.gpus if g.link_domain and g.link_domain < most and not g.outer_link]
        if alone:
            limit = "replicas no larger than one link joins, as no rate between nodes is known"
            self.remarks[f"{few(alone)}: {limit}; --inter-node-bandwidth gives one"] = None

    def blocks_of(self, part: Part) -> Iterator[Block]:
        """The blocks of a part, whose passes have the same layers."""
        import numpy as np

        model, speculated, where = self.space.models[part.model], part.speculated, []
        for ranks in part.splits:
            base = Deployment(model, self.space.gpus[0], part.precision, ranks, nodes=self.space.nodes)
            options = self.space.options_of(self.needs[0])
            try:
                options = speculated.options(model, options) if speculated else options
                where.append((base, Rooms(base, options), self._counts(ranks)))
            except UserError as error:
                self.remarks[str(error)] = None
        if not where:
            return
        timed = Timed(np.unique(np.concatenate([counts for *_, counts in where])))
        for gpu in self.space.gpus[part.start : part.stop]:
            for base, rooms, counts in where:
                if gpu.name in self.laws and self.space.takes(gpu, base.parallelism):
                    chosen = msgspec.structs.replace(base, gpu=gpu, calibration=self.laws[gpu.name])
                    try:
                        yield from self._blocks(chosen, rooms.on(gpu), timed, counts, speculated)
                    except UserError as error:
                        self.remarks[str(error)] = None

    def _counts(self, ranks: Parallelism) -> Array:
        """Sequences of a replica that make a point under any of the needs."""
        import numpy as np

        most = self.space.max_gpus // ranks.gpus
        return np.array(sorted({n for need in self.needs for n in need.batches(most)}), dtype=np.int64)

    def _blocks(
        self, deployment: Deployment, room: Room, timed: Timed, counts: Array, speculated: Speculated | None
    ) -> Iterator[Block]:
        """One deployment under every need."""
        import numpy as np

        over = room.over
        left = np.full((1, len(counts)), -over) if over else room.left(counts)
        known: dict[object, tuple[Array, Times]] = {}
        for need in self.needs:
            lengths = need.lengths
            if lengths not in known:
                capacity = room.sequences(left, lengths.context) if not over else counts * 0
                known[lengths] = capacity, timed.on(deployment, lengths, counts, capacity >= counts, speculated)
            held = counts, left.min(axis=0), *known[lengths]
            for apart in self.space.disaggregate:
                sent = room.transfer_seconds(lengths.prompt) if apart else None
                yield block_of(need, deployment, self.space.max_gpus, *held, speculated, sent)


def block_of(
    need: Need,
    deployment: Deployment,
    max_gpus: int,
    counts: Array,
    left: Array,
    capacity: Array,
    times: Times,
    speculated: Speculated | None = None,
    sent: float | None = None,
) -> Block:
    """The points of a deployment under a need, from what is known of it at each number of sequences.

    sent: seconds of a prompt's cache on the link to another replica, where prompts are processed apart; they come in between
    the first token and the second, and add to the first as a user sees it. Prompts then stop no steps: a replica makes
    n·out tokens in the time of out − 1 steps, and so many prompts a second keep ⌈rate · TTFT⌉ replicas busy.
    """
    import numpy as np

    most = max_gpus // deployment.parallelism.gpus
    if need.users:
        replicas = np.arange(1, min(most, need.users) + 1)
        at = np.searchsorted(counts, -(-need.users // replicas))
    else:
        at = np.searchsorted(counts, need.batches(most))
    chosen, holds = counts[at], capacity[at]
    step, tpot = times.tpot[at], np.where(holds >= chosen, times.tpot[at], np.nan)
    e2e = None if times.e2e is None else times.e2e[at]
    ttft, output = times.ttft + (sent or 0.0), need.lengths.output
    if sent is not None:
        e2e = ttft + (output - 1) * tpot
    each = 1 / tpot if e2e is None else output / e2e  # output tokens per second of one sequence
    rate = chosen * each if sent is None else chosen * output / ((output - 1) * tpot)
    if need.users:
        total = need.users * each
    else:
        asked = np.maximum(need.rate * need.lengths.output, need.min_throughput)
        replicas = np.maximum(1, np.ceil(asked / np.where(rate > 0, rate, np.inf))).astype(np.int64)
        total = np.minimum(asked, replicas * rate)
    prefill = replicas * 0
    if sent is not None:
        started = np.nan_to_num(total / need.lengths.output * times.ttft)
        prefill = np.maximum(1, np.ceil(started)).astype(np.int64)
    figures = chosen, holds, left[at], ttft, tpot, e2e, rate, total
    block = Block(need, deployment, replicas, *figures, replicas * 0, total * 0, speculated, prefill)
    failing, excess = judged(block._replace(tpot=step), max_gpus)
    return block._replace(failing=failing, excess=excess)


def judged(block: Block, max_gpus: int) -> tuple[Array, Array]:
    """What each point fails at first, and by what factor it misses the worst of its limits; FAR and more where none fits."""
    import numpy as np

    need, failing, excess = block.need, np.zeros(block.counts.shape, dtype=np.int8), np.ones(block.counts.shape)
    none = FAR - block.left / GIB  # where not one sequence fits, what lacks the fewest bytes is nearest
    missed = [(MEMORY, np.where(block.capacity > 0, block.counts / np.maximum(block.capacity, 1), none))]
    unknown = (np.isnan(block.ttft) and bool(need.max_ttft)) | (
        np.isnan(block.total) & bool(not need.users or need.min_throughput)
    )
    missed += [(UNKNOWN, np.where(unknown & (block.capacity >= block.counts), FAR, 0.0))]
    missed += [(TTFT, np.full(block.counts.shape, np.nan_to_num(block.ttft / need.max_ttft)))] if need.max_ttft else []
    missed += [(TPOT, np.nan_to_num(block.tpot / need.max_tpot))] if need.max_tpot else []
    missed += [(THROUGHPUT, np.nan_to_num(need.min_throughput / block.total))] if need.min_throughput and need.users else []
    missed += [(GPUS, block.gpus / max_gpus)] if not need.users or block.prefill.any() else []
    for limit, ratio in missed:
        failing = np.where((failing == MEETS) & (ratio > 1), limit, failing)
        excess = np.maximum(excess, ratio)
    return failing, excess
