"""The grid of a plan, a block at a time: splits over several kinds of GPU under one need, in every number of replicas.

A point's capacity is `fit`'s at the low end of its range, its times `latency`'s; what fails first is its reason. Blocks are
made a stretch after the other, so that a grid of any size takes the memory of one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.room import Layouts, Room, Rooms, Told, left_in
from kvcalc.errors import UserError, few
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.pipeline import check
from kvcalc.model.precision import Precision
from kvcalc.planning.block import Block, Held, block_of
from kvcalc.planning.need import BATCHES, Lengths, Need
from kvcalc.planning.space import Space, Speculated
from kvcalc.planning.timed import Timed, Times
from kvcalc.serving.speculation import draft_model
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import Deployment

POINTS = 1 << 14  # of a block, about: their arrays stay in the CPU's cache
STEPS = 1 << 22  # of whole answers, whose seconds are kept at a time
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


class Cut(NamedTuple):
    """A model cut over ranks in one precision, on any GPU. counts: sequences of a replica that make a point."""

    base: Deployment
    rooms: Rooms
    counts: Array


Fleet = list[tuple[Cut, Deployment]]  # deployments side by side, those of one cut together


class Grid:
    """All blocks of a space under some needs. remarks: what was left out and why, once it has been walked through."""

    def __init__(self, needs: Sequence[Need], space: Space) -> None:
        self.needs, self.space = needs, space
        self.remarks: dict[str, None] = {}
        self.laws = self._calibrations()
        self._layouts: dict[object, Layouts] = {}

    def _calibrations(self) -> dict[str, Calibration | None]:
        """What times rest on, by GPU: its own calibration, whatever the other GPUs have.

        Of GPUs without the calibration that is asked for none is looked at.
        """
        found = []
        for gpu in self.space.gpus:
            try:
                run = Deployment(self.space.models[0], gpu, engine=self.space.options.engine)
                found.append(run.under(self.space.calibration, self.space.calibration_from))
            except UserError as error:
                if not self.space.calibration or len(self.space.gpus) == 1:
                    raise
                self.remarks[str(error)] = None
        return {deployment.gpu.name: deployment.calibration for deployment in found}

    def blocks(self) -> Iterator[Block]:
        """Every block of one deployment: by model, ranks of a stage, precision, stages, GPU and need (fastest)."""
        return (block for stretch in self.stretches() for block in self.one_by_one(stretch))

    def one_by_one(self, stretch: Iterable[Block]) -> list[Block]:
        """The blocks of one deployment in those of a stretch, by stages, GPU and need (fastest)."""
        places = {gpu.name: place for place, gpu in enumerate(self.space.gpus)}
        return sorted(
            (one for block in stretch for one in block.alone()),
            key=lambda one: (one.deployment.parallelism.pp, places[one.deployment.gpu.name]),
        )

    def stretches(self) -> Iterator[list[Block]]:
        """Every block: those of some GPUs at a time, by need (fastest)."""
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

        cuts = [*self._cuts(part)]
        if not cuts:
            return
        timed = Timed(np.unique(np.concatenate([cut.counts for cut in cuts])))
        gpus = [gpu for gpu in self.space.gpus[part.start : part.stop] if gpu.name in self.laws]
        steps = sum(lengths.output for lengths in {need.lengths for need in self.needs})
        several = max(1, STEPS // max(1, steps * len(timed.counts)))
        for at in range(0, len(gpus), several):
            timed.forget()
            for fleet in self._fleets(cuts, gpus[at : at + several]):
                yield self._blocks(fleet, timed, part.speculated)

    def _cuts(self, part: Part) -> Iterator[Cut]:
        """The splits of a part that an engine takes."""
        model, speculated = self.space.models[part.model], part.speculated
        layouts = self._layouts.setdefault((part.model, part.precision, speculated), {})
        for ranks in part.splits:
            base = Deployment(
                model,
                self.space.gpus[0],
                part.precision,
                ranks,
                nodes=self.space.nodes,
                engine=self.space.options.engine,
                engine_version=self.space.options.engine_version,
            )
            options = self.space.options_of(self.needs[0])
            try:
                if speculated:
                    options = speculated.options(model, options)
                    if model.mtp or speculated.draft != "mtp":
                        check(draft_model(model, speculated.draft), ranks)
                yield Cut(base, Rooms(base, options, layouts), self._counts(ranks))
            except UserError as error:
                self.remarks[str(error)] = None

    def _counts(self, ranks: Parallelism) -> Array:
        """Sequences of a replica that make a point under any of the needs."""
        import numpy as np

        most = self.space.max_gpus // ranks.gpus
        return np.array(sorted({n for need in self.needs for n in need.batches(most)}), dtype=np.int64)

    def _fleets(self, cuts: Iterable[Cut], gpus: Sequence[Gpu]) -> Iterator[Fleet]:
        """All deployments on some GPUs, by split and GPU (fastest), as many at a time as make a block of moderate size."""
        fleet: Fleet = []
        points = 0
        for cut in cuts:
            most = self.space.max_gpus // cut.base.parallelism.gpus
            each = max(min(most, need.users) if need.users else len(BATCHES) for need in self.needs)
            for gpu in gpus:
                if not self.space.takes(gpu, cut.base.parallelism):
                    continue
                if fleet and points + each > POINTS:
                    yield fleet
                    fleet, points = [], 0
                fleet.append((cut, msgspec.structs.replace(cut.base, gpu=gpu, calibration=self.laws[gpu.name])))
                points += each
        if fleet:
            yield fleet

    def _blocks(self, fleet: Fleet, timed: Timed, speculated: Speculated | None) -> list[Block]:
        """The blocks of deployments, by need (fastest); those that are refused are left out."""
        try:
            held = self._held(fleet, timed, speculated)
        except UserError as error:
            if len(fleet) == 1:
                self.remarks[str(error)] = None
                return []
            half = len(fleet) // 2
            return [block for some in (fleet[:half], fleet[half:]) for block in self._blocks(some, timed, speculated)]
        return [
            block_of(need, held[need.lengths, apart], self.space.max_gpus, timed.counts, speculated, apart)
            for need in self.needs
            for apart in self.space.disaggregate
            if held[need.lengths, apart].deployments
        ]

    def _held(self, fleet: Fleet, timed: Timed, speculated: Speculated | None) -> dict[tuple[Lengths, bool], Held]:
        """What is known of deployments, by the lengths of requests and whether prompts are processed apart."""
        import numpy as np

        deployments, counts, found = [one for _, one in fleet], timed.counts, {}
        cuts = {id(cut): cut for cut, _ in fleet}
        gpus = {key: [one.gpu for cut, one in fleet if cut is mine] for key, mine in cuts.items()}
        beside: dict[tuple[Told, ...], list[tuple[Cut, int, Room, Array]]] = {}
        for lengths in dict.fromkeys(need.lengths for need in self.needs):
            told = tuple(cut.rooms.told(gpus[key], lengths.context) for key, cut in cuts.items())
            if told not in beside:
                beside[told] = self._rooms(cuts.values(), gpus.values(), told, lengths.context)
            least = np.zeros((len(fleet), len(counts)), dtype=np.int64)
            capacity, sent = least.copy(), np.zeros(len(fleet))
            for cut, first, room, left in beside[told]:
                places = np.array(room.places) + first
                here = np.ix_(places, np.searchsorted(counts, cut.counts))
                least[here] = left.min(axis=0)
                capacity[here] = room.sequences(left, lengths.context)
                sent[places] = room.transfer_seconds(lengths.prompt) if True in self.space.disaggregate else 0.0
            times = timed.on(deployments, lengths, capacity, speculated)
            found[lengths, False] = Held(deployments, least, capacity, times, np.zeros(len(fleet)))
            found[lengths, True] = self._linked(Held(deployments, least, capacity, times, sent))
        return found

    @staticmethod
    def _rooms(
        cuts: Iterable[Cut], gpus: Iterable[Sequence[Gpu]], told: Iterable[Told], length: int
    ) -> list[tuple[Cut, int, Room, Array]]:
        """The rooms of cuts on GPUs, with the place of the first of them in the fleet, and what is left there."""
        found, first = [], 0
        for cut, mine, chosen in zip(cuts, gpus, told, strict=True):
            found += [(cut, first, room) for room in cut.rooms.on(mine, chosen, length)]
            first += len(mine)
        return [(*one, left) for one, left in zip(found, left_in([(room, cut.counts) for cut, _, room in found]), strict=True)]

    def _linked(self, held: Held) -> Held:
        """Those of deployments that have a link over which a prompt's cache could go to another replica."""
        import numpy as np

        at = np.flatnonzero(~np.isnan(held.sent))
        if len(at) < len(held.deployments):
            without = dict.fromkeys(one.gpu.name for one, sent in zip(held.deployments, held.sent, strict=True) if np.isnan(sent))
            self.remarks[f"{few([*without])}: prompts not apart, as no rate of a link to another replica is known"] = None
            times = Times(held.times.ttft[at], held.times.tpot[at], None if held.times.e2e is None else held.times.e2e[at])
            held = Held([held.deployments[n] for n in at], held.left[at], held.capacity[at], times, held.sent[at])
        return held
