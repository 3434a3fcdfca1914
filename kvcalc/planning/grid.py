"""The grid of a plan, a block at a time: one split over several kinds of GPU under one need, in every number of replicas.

A point's capacity is `fit`'s at the low end of its range, its times `latency`'s; what fails first is its reason. Blocks are
made a stretch after the other, so that a grid of any size takes the memory of one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.room import Room, Rooms
from kvcalc.errors import UserError, few
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.planning.block import Block, Held, block_of
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space, Speculated
from kvcalc.planning.timed import Timed
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import Deployment, on_one_basis

POINTS = 1 << 14  # of a block, about: their arrays stay in the CPU's cache
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


Rows = Callable[[Block], str]  # what makes the rows of a file


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
        """Every block of one deployment: by model, ranks of a stage, precision, GPU, stages and need (fastest)."""
        return (block for stretch in self.stretches() for block in self.one_by_one(stretch))

    def one_by_one(self, stretch: Iterable[Block]) -> list[Block]:
        """The blocks of one deployment in those of a stretch, by GPU, stages and need (fastest)."""
        places = {gpu.name: place for place, gpu in enumerate(self.space.gpus)}
        return sorted((one for block in stretch for one in block.alone()), key=lambda one: places[one.deployment.gpu.name])

    def stretches(self) -> Iterator[list[Block]]:
        """Every block: those of some GPUs at a time, by stages and need (fastest)."""
        for part in self.parts():
            yield from self.stretches_of(part)
        self.note_links()

    def rows_of(self, stretch: Iterable[Block], rows: Rows | None) -> str:
        """What `rows` makes of the blocks of a stretch, one by one; '' without."""
        return "".join(map(rows, self.one_by_one(stretch))) if rows else ""

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

    def stretches_of(self, part: Part) -> Iterator[list[Block]]:
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
        gpus = [gpu for gpu in self.space.gpus[part.start : part.stop] if gpu.name in self.laws]
        several = max(1, POINTS // self.space.max_gpus)
        for at in range(0, len(gpus), several):
            held: list[dict[object, list[Held]]] = [{} for _ in where]
            for gpu in gpus[at : at + several]:
                for (base, rooms, counts), known in zip(where, held, strict=True):
                    if self.space.takes(gpu, base.parallelism):
                        chosen = msgspec.structs.replace(base, gpu=gpu, calibration=self.laws[gpu.name])
                        try:
                            self._hold(known, chosen, rooms.on(gpu), timed, counts, speculated)
                        except UserError as error:
                            self.remarks[str(error)] = None
            yield [
                block_of(need, known[need.lengths, apart], self.space.max_gpus, counts, speculated, apart)
                for (*_, counts), known in zip(where, held, strict=True)
                for need in self.needs
                for apart in self.space.disaggregate
                if (need.lengths, apart) in known
            ]

    def _counts(self, ranks: Parallelism) -> Array:
        """Sequences of a replica that make a point under any of the needs."""
        import numpy as np

        most = self.space.max_gpus // ranks.gpus
        return np.array(sorted({n for need in self.needs for n in need.batches(most)}), dtype=np.int64)

    def _hold(
        self,
        known: dict[object, list[Held]],
        deployment: Deployment,
        room: Room,
        timed: Timed,
        counts: Array,
        speculated: Speculated | None,
    ) -> None:
        """Add one deployment to what is known, by the lengths of requests and whether prompts are processed apart."""
        import numpy as np

        over = room.over
        left = np.full((1, len(counts)), -over) if over else room.left(counts)
        for lengths in dict.fromkeys(need.lengths for need in self.needs):
            capacity = room.sequences(left, lengths.context) if not over else counts * 0
            times = timed.on(deployment, lengths, counts, capacity >= counts, speculated)
            for apart in self.space.disaggregate:
                sent = room.transfer_seconds(lengths.prompt) if apart else 0.0
                held = Held(deployment, left.min(axis=0), capacity, times, sent)
                known.setdefault((lengths, apart), []).append(held)
