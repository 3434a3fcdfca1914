"""Room for sequences: `fit`'s answer for many settings of an engine and many kinds of GPU at once.

Nothing is decided anew: terms, budgets and plans are those of `fit`, evaluated over arrays of `max_num_seqs` where the engine's
rules take arrays. All figures are exact integers, as there.
"""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.capacity.engines import Plan
from kvcalc.capacity.engines.content import content_of
from kvcalc.capacity.engines.engine import Defaults
from kvcalc.capacity.memory_terms import Start, budget
from kvcalc.capacity.options import FitOptions
from kvcalc.capacity.request import Request, request_of, started
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.model.pipeline import stages
from kvcalc.timing.deployment import Deployment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Whole = NDArray[np.int64]
else:
    Whole = Any


def _unlike(run: Deployment) -> list[int]:
    """The first pipeline stage of each sequence of layers, the first and the last stage apart from the others."""
    every = stages(run.model, run.parallelism.pp)
    return sorted({(s.order, s.first, s.last): s.number for s in reversed(every)}.values())


class Room(NamedTuple):
    """A request on replicas of several kinds of GPU, with the plan of each pipeline stage; one of all that hold the same layers.

    places: of these GPUs among those that were asked about. shares: of each one's memory, that the engine may take.
    """

    request: Request
    plans: "Plans"
    gpus: list[Gpu]
    places: list[int]
    shares: list[float]

    def told_apart(self, start: Start) -> dict[object, list[int]]:
        """The GPUs by what the engine's terms go by of one, at that start."""
        found: dict[object, list[int]] = {}
        for at, gpu in enumerate(self.gpus):
            told = self.request.options.rules.told(msgspec.structs.replace(start, gpu=gpu))
            found.setdefault(told, []).append(at)
        return found

    def transfer_seconds(self, length: int) -> list[float]:
        """Seconds of one sequence's cache on each GPU's link to another replica, where it is most; NaN without a link."""
        request, kept = self.request, self.request.options.rules.content
        held = (content_of(request.held, request.run.parallelism, stage, kept) for stage in self.plans)
        most = max(content.needed(1, length) for content in held)
        return [most / rate if (rate := transfer_link(gpu)) else nan for gpu in self.gpus]

    def sequences(self, left: Whole, length: int) -> Whole:
        """`fit`'s capacity_sequences [GPUs, counts]: sequences of `length` tokens that a replica holds."""
        import numpy as np

        caches = np.maximum(left, 0)
        shared = self.request.options.shared_prefix
        held = [plan.many_sequences(cache, length, shared) for plan, cache in zip(self.plans.values(), caches, strict=True)]
        fewest: Whole = np.min(held, axis=0)
        return fewest * self.request.run.parallelism.dp


class _Stage(NamedTuple):
    """A stage of a room as it starts, on those of its GPUs `at` some places. rows [GPUs, counts]: what is left on all of them,
    to be taken from `columns` of what is asked for.
    """

    room: Room
    start: Start
    at: list[int]
    rows: Whole
    columns: Any


def left_in(rooms: Sequence[tuple[Room, Whole]]) -> list[Whole]:
    """What the terms leave in rooms of one model and engine, each set up for so many sequences of the replica.

    For each the bytes [stages with a plan, GPUs, counts], at the end of the range that answers, negative where there are too
    few. Where an engine's rules take arrays, all stages are asked about at once that differ in their weights alone.
    """
    import numpy as np

    found = [np.empty((len(room.plans), len(room.gpus), len(counts)), dtype=np.int64) for room, counts in rooms]
    every = np.unique(np.concatenate([counts for _, counts in rooms]))
    together: dict[object, list[_Stage]] = {}
    for (room, counts), rows in zip(rooms, found, strict=True):
        rules, dp = room.request.options.rules, room.request.run.parallelism.dp
        asked: list[Any] = [every] if rules.aside else counts.tolist()
        for number, row in zip(room.plans, rows, strict=True):
            for place, count in enumerate(asked):
                start = room.request.start(number, -(-count // dp))
                mine, columns = (row, np.searchsorted(every, counts)) if rules.aside else (row[:, place : place + 1], [0])
                for told, at in room.told_apart(start).items():
                    key: Any = len(together)
                    if rules.aside:
                        key = told, rules.aside(start), start.tokens, *(room.gpus[n].name for n in at)
                    together.setdefault(key, []).append(_Stage(room, start, at, mine, columns))
    for stages_alike in together.values():
        for stage, left in zip(stages_alike, _left(stages_alike), strict=True):
            stage.rows[stage.at] = left[:, stage.columns] if left.shape[1] > 1 else left  # some hang on no sequences
    return found


def _left(alike: Sequence[_Stage]) -> Whole:
    """Bytes [stages, GPUs, counts] left in stages whose terms differ in their weights alone."""
    import numpy as np

    request, gpus = alike[0].room.request, [alike[0].room.gpus[at] for at in alike[0].at]
    starts = [msgspec.structs.replace(stage.start, gpu=gpus[0]) for stage in alike]
    each = request.terms_of(starts, request.end)
    usable: Any
    usable, whole = np.array([(gpu.usable_bytes, gpu.memory_bytes) for gpu in gpus]).T[:, :, None]
    shares: Any = np.array([[stage.room.shares[at] for at in stage.at] for stage in alike])[:, :, None]
    weights: Any = np.array([terms.weights for terms in each])[:, None, None]
    sums = weights, each[0].activation, sum(each[0].overhead.values())
    found = budget(usable, shares, *sums, request.of, each[0].taken, request.options.rules.outside)
    left: Whole = found.cache - (each[0].margin * whole).astype(np.int64)
    return left


def transfer_link(gpu: Gpu) -> float | None:
    """Bytes a second at which a GPU's part of a cache goes to another replica; None where nothing gives it."""
    return gpu.link_bytes_per_s or gpu.outer_link


def transfer_rate(gpu: Gpu) -> float:
    """That rate. Raises UserError where none is given."""
    if not (rate := transfer_link(gpu)):
        raise UserError(f"{gpu.name} gives no rate of a link over which a prompt's cache could go to another replica")
    return rate


Plans = dict[int, Plan]  # by pipeline stage
Layouts = dict[tuple[int, int, int, Defaults], Plans]  # by tp, dcp and pp, and what an engine chooses on a GPU


class Told(NamedTuple):
    """What decides the rooms of some GPUs: the engine's choices on each, and the longest sequence where buffers grow with it."""

    chosen: tuple[Defaults, ...]
    length: int


class Rooms:
    """The rooms of a model under one precision and ranks, on any GPUs. Raises UserError as `fit` does.

    layouts: those of the same model, precision and options under other ranks, to be used again: data and expert parallelism
    change none.
    """

    def __init__(self, deployment: Deployment, options: FitOptions, layouts: Layouts | None = None) -> None:
        self.options, self.dtype = options, deployment.precision.kv_cache_dtype
        self.run, self.release, _ = started(deployment, options)
        self._layouts: Layouts = {} if layouts is None else layouts
        self._requests: dict[tuple[Defaults, int], Request] = {}

    def told(self, gpus: Sequence[Gpu], length: int) -> Told:
        """What the engine goes by on these GPUs where the longest sequence has so many tokens."""
        run, asked = self.run, self.options
        given = run.parallelism, self.release, asked.max_num_batched_tokens, run.model, length
        return Told(tuple(asked.rules.defaults(gpu, *given) for gpu in gpus), length if asked.rules.grows else 0)

    def on(self, gpus: Sequence[Gpu], told: Told, length: int) -> list[Room]:
        """The rooms on replicas of these GPUs, for sequences of at most `length` tokens, of which that is told.

        The cache's layout hangs on a GPU only by what the engine chooses on it.
        """
        found: dict[Defaults, Room] = {}
        for place, (gpu, chosen) in enumerate(zip(gpus, told.chosen, strict=True)):
            alike = chosen._replace(utilization=0.0, sequences=0)
            if alike not in found:
                key = alike, told.length
                if key not in self._requests:
                    self._requests[key] = self._request(gpu, length)
                request = self._requests[key]
                found[alike] = Room(request, self._plans(alike, request), [], [], [])
            room = found[alike]
            room.gpus.append(gpu)
            room.places.append(place)
            room.shares.append(self.options.gpu_memory_utilization or chosen.utilization)
        return [*found.values()]

    def _request(self, gpu: Gpu, length: int) -> Request:
        run, asked = msgspec.structs.replace(self.run, gpu=gpu), msgspec.structs.replace(self.options, max_model_len=length)
        return request_of(run, asked, self.dtype, self.release)

    def _plans(self, chosen: Defaults, request: Request) -> Plans:
        """The plan of each pipeline stage where the engine chooses that, of which the request was made."""
        run, ranks = self.run, self.run.parallelism
        chosen = chosen if request.windowed else chosen._replace(tokens=0, flights=0)
        key = ranks.tp, ranks.dcp, ranks.pp, chosen
        if key not in self._layouts:
            planner = request.planner()
            self._layouts[key] = {stage: planner(stage) for stage in _unlike(run)}
        return self._layouts[key]
