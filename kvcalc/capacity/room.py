"""Room for sequences: `fit`'s answer for many settings of an engine at once, and for one GPU after another.

Nothing is decided anew: terms, budgets and plans are those of `fit`, evaluated over arrays of `max_num_seqs` where the engine's
rules take arrays. All figures are exact integers, as there.
"""

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.capacity.engines import Plan
from kvcalc.capacity.engines.content import content_of
from kvcalc.capacity.memory_terms import stage_weights
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
    """A request on one GPU's replica, with the plan of each pipeline stage; one of all that hold the same layers."""

    request: Request
    plans: dict[int, Plan]

    def left(self, counts: Whole) -> Whole:
        """Bytes [stages with a plan, counts] that the terms leave, set up for so many sequences of the replica.

        At the end of the range that answers, negative where there are too few.
        """
        import numpy as np

        request, engine = self.request, self.request.options.rules
        each = -(-counts // request.run.parallelism.dp)
        found = np.empty((len(self.plans), len(counts)), dtype=np.int64)
        for row, stage in zip(found, self.plans, strict=True):
            if engine.takes_arrays:
                row[:] = request.left(request.terms(request.start(stage, each), request.end))
            else:
                starts = (request.start(stage, int(n)) for n in each)
                row[:] = [request.left(request.terms(start, request.end)) for start in starts]
        return found

    @property
    def over(self) -> int:
        """Bytes by which the language model's weights alone exceed a GPU's share, at most what all terms do; 0 where they fit."""
        request = self.request
        run, asked = request.run, request.options
        if not asked.rules.takes_arrays or asked.cpu_offload_gb or asked.weight_bytes is not None:
            return 0  # weights that are elsewhere, or not counted by the same rule
        held = (stage_weights(run.model, run.formats, run.parallelism, stage) for stage in self.plans)
        return max(0, max(held) - ceil(run.gpu.usable_bytes * request.utilization))

    def transfer_seconds(self, length: int) -> float:
        """Seconds of one sequence's cache on a GPU's link to another replica, where it is most. Raises UserError without one."""
        gpu, ranks = self.request.run.gpu, self.request.run.parallelism
        kept = self.request.options.rules.content
        most = max(content_of(self.request.held, ranks, n, kept).needed(1, length) for n in self.plans)
        return most / transfer_rate(gpu)

    def sequences(self, left: Whole, length: int) -> Whole:
        """`fit`'s capacity_sequences: sequences of `length` tokens that the replica holds with so many bytes left."""
        import numpy as np

        caches = np.maximum(left, 0)
        shared = self.request.options.shared_prefix
        held = [plan.many_sequences(cache, length, shared) for plan, cache in zip(self.plans.values(), caches, strict=True)]
        fewest: Whole = np.min(held, axis=0)
        return fewest * self.request.run.parallelism.dp


def transfer_rate(gpu: Gpu) -> float:
    """Bytes a second at which a GPU's part of a cache goes to another replica. Raises UserError where none is given."""
    rate = gpu.link_bytes_per_s or gpu.outer_link
    if not rate:
        raise UserError(f"{gpu.name} gives no rate of a link over which a prompt's cache could go to another replica")
    return rate


class Rooms:
    """The rooms of a model under one precision and ranks, on any GPU. Raises UserError as `fit` does."""

    def __init__(self, deployment: Deployment, options: FitOptions) -> None:
        self.options, self.dtype = options, deployment.precision.kv_cache_dtype
        self.run, self.release, _ = started(deployment, options)
        self._known: dict[int, Room] = {}

    def on(self, gpu: Gpu) -> Room:
        """The room on a replica of these GPUs; the cache's layout hangs on a GPU only by the tokens of a pass."""
        run, asked = msgspec.structs.replace(self.run, gpu=gpu), self.options
        ranks, engine = run.parallelism, asked.rules
        length = asked.longest(run.model)
        chosen = engine.defaults(gpu, ranks, self.release, asked.max_num_batched_tokens, run.model, length)
        if chosen.tokens not in self._known:
            request = request_of(run, asked, self.dtype, self.release)
            plans = {stage: engine.plan(request.held, ranks, request.settings, stage) for stage in _unlike(run)}
            self._known[chosen.tokens] = Room(request, plans)
        request, plans = self._known[chosen.tokens]
        return Room(request._replace(run=run, utilization=asked.gpu_memory_utilization or chosen.utilization), plans)
