"""`fit`'s answer for many settings of an engine and many GPU models in one call.

Terms, budgets and plans are those of `fit`. They are evaluated over arrays of `max_num_seqs` if the
engine's rules take arrays. All figures are exact integers, as in `fit`.
"""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.capacity.engines import CacheLayout
from kvcalc.capacity.engines.content import content_of
from kvcalc.capacity.engines.engine import Defaults
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.fit_request import FitRequest, request_of, started
from kvcalc.capacity.memory_budget import EngineStartup, budget
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.model.pipeline import stages
from kvcalc.timing.deployment import TimedDeployment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Whole = NDArray[np.int64]
else:
    Whole = Any

Plans = dict[int, CacheLayout]  # by pipeline stage
# by tp, dcp and pp, and the engine's defaults on a GPU
Layouts = dict[tuple[int, int, int, Defaults], Plans]


class BatchedFit(NamedTuple):
    """A request on replicas of several GPU models.

    Attributes:
        plans: Layout of the cache on each distinct pipeline stage.
        places: Indices of `gpus` among the requested GPUs.
        shares: Share of each GPU's memory that the engine may use.
    """

    request: FitRequest
    plans: Plans
    gpus: list[Gpu]
    places: list[int]
    shares: list[float]

    def transfer_seconds(self, length: int) -> list[float]:
        """Return seconds to send one sequence's cache over each GPU's link to another replica; NaN
        without a link."""
        request, content = self.request, self.request.options.rules.content
        cache_bytes = max(
            content_of(request.held, request.run.parallelism, stage, content).needed(1, length)
            for stage in self.plans
        )
        return [
            cache_bytes / rate if (rate := transfer_link(gpu)) else nan for gpu in self.gpus
        ]

    def sequences(self, remaining: Whole, length: int) -> Whole:
        """Return the sequences of `length` tokens that a replica holds [GPUs, counts]: `fit`'s
        capacity_sequences."""
        import numpy as np

        shared = self.request.options.shared_prefix
        stage_sequences = [
            plan.many_sequences(cache_bytes, length, shared)
            for plan, cache_bytes in zip(
                self.plans.values(), np.maximum(remaining, 0), strict=True
            )
        ]
        fewest: Whole = np.min(stage_sequences, axis=0)
        return fewest * self.request.run.parallelism.dp


class _StageRows(NamedTuple):
    """A stage on GPUs with equal terms. `rows` [GPUs, counts] takes `columns` of the results."""

    batch: BatchedFit
    start: EngineStartup
    gpu_indices: list[int]
    rows: Whole
    columns: Any


def remaining_bytes(batches: Sequence[tuple[BatchedFit, Whole]]) -> list[Whole]:
    """Return the bytes that the terms leave for the cache, for batches of one model and engine.

    Each result is [stages with a plan, GPUs, counts], for the given numbers of sequences per
    replica. It is negative if the terms exceed the share. Rules that take arrays run once for all
    stages and GPUs with equal keys.
    """
    import numpy as np

    results = [
        np.empty((len(batch.plans), len(batch.gpus), len(counts)), dtype=np.int64)
        for batch, counts in batches
    ]
    all_counts = np.unique(np.concatenate([counts for _, counts in batches]))
    groups: dict[object, list[_StageRows]] = {}
    for (batch, counts), result in zip(batches, results, strict=True):
        rules, dp = batch.request.options.rules, batch.request.run.parallelism.dp
        for stage, rows in zip(batch.plans, result, strict=True):
            if rules.weights:
                points: list[Any] = [(all_counts, rows, np.searchsorted(all_counts, counts))]
            else:
                points = [(n, rows[:, i : i + 1], [0]) for i, n in enumerate(counts.tolist())]
            for count, point_rows, columns in points:
                start = batch.request.start(stage, -(-count // dp))
                indices: dict[object, list[int]] = {}
                for index, gpu in enumerate(batch.gpus):
                    key = rules.memory_key(msgspec.structs.replace(start, gpu=gpu))
                    indices.setdefault(key, []).append(index)
                for key, gpu_indices in indices.items():
                    start = msgspec.structs.replace(start, gpu=batch.gpus[gpu_indices[0]])
                    groups.setdefault(key if rules.weights else len(groups), []).append(
                        _StageRows(batch, start, gpu_indices, point_rows, columns)
                    )
    for group in groups.values():
        sizes = [len(member.gpu_indices) for member in group]
        parts = np.split(_group_remaining(group, sizes), np.cumsum(sizes)[:-1])
        for member, part in zip(group, parts, strict=True):
            # some terms do not depend on the sequences
            member.rows[member.gpu_indices] = (
                part[:, member.columns] if part.shape[1] > 1 else part
            )
    return results


def _group_remaining(group: Sequence[_StageRows], sizes: Sequence[int]) -> Whole:
    """Return the remaining bytes [GPUs of all members, counts] of stages that differ only in their
    weights."""
    import numpy as np

    request = group[0].batch.request
    terms = request.terms_of([member.start for member in group], request.end)
    gpus = [
        (gpu.usable_bytes, gpu.memory_bytes, member.batch.shares[i])
        for member in group
        for i in member.gpu_indices
        for gpu in (member.batch.gpus[i],)
    ]
    columns: Any = (np.array(column)[:, None] for column in zip(*gpus, strict=True))
    usable, memory, shares = columns
    weights: Any = np.repeat([one.weights for one in terms], sizes)[:, None]
    first = terms[0]
    cache = budget(
        usable,
        shares,
        weights,
        first.activation,
        sum(first.overhead.values()),
        request.of,
        first.taken,
        request.options.rules.outside,
    ).cache
    remaining: Whole = cache - (first.margin * memory).astype(np.int64)
    return remaining


def transfer_link(gpu: Gpu) -> float | None:
    """Return bytes per second of a GPU's link to another replica; None if it is not known."""
    return gpu.link_bytes_per_s or gpu.outer_link


def transfer_rate(gpu: Gpu) -> float:
    """Return bytes per second of a GPU's link to another replica. Raises UserError if it is not
    known."""
    if not (rate := transfer_link(gpu)):
        raise UserError(
            f"{gpu.name} gives no rate of a link over which a prompt's cache could go to "
            "another replica"
        )
    return rate


class BatchedFitBuilder:
    """Makes the batches of a model under one precision and ranks.

    Args:
        layouts: Layouts of the same model, precision and options under other ranks, for reuse. Data
            and expert parallelism do not change them.

    Raises:
        UserError: As `fit`.
    """

    def __init__(
        self,
        deployment: TimedDeployment,
        options: FitOptions,
        layouts: Layouts | None = None,
    ) -> None:
        self.options, self.dtype = options, deployment.precision.kv_cache_dtype
        self.run, self.release, _ = started(deployment, options)
        self._layouts: Layouts = {} if layouts is None else layouts
        self._requests: dict[tuple[Defaults, int], FitRequest] = {}

    def batches(self, gpus: Sequence[Gpu], length: int) -> list[BatchedFit]:
        """Return the batches of replicas of these GPUs, for sequences of at most `length` tokens.

        The layout of the cache depends on a GPU only by the engine's defaults on it.
        """
        batches: dict[Defaults, BatchedFit] = {}
        for place, gpu in enumerate(gpus):
            defaults = self.options.rules.defaults(
                gpu,
                self.run.parallelism,
                self.release,
                self.options.max_num_batched_tokens,
                self.run.model,
            )
            key = defaults._replace(utilization=0.0, sequences=0)
            if key not in batches:
                if (key, length) not in self._requests:
                    self._requests[key, length] = request_of(
                        msgspec.structs.replace(self.run, gpu=gpu),
                        msgspec.structs.replace(self.options, max_model_len=length),
                        self.dtype,
                        self.release,
                    )
                request = self._requests[key, length]
                batches[key] = BatchedFit(request, self._plans(key, request), [], [], [])
            batch = batches[key]
            batch.gpus.append(gpu)
            batch.places.append(place)
            batch.shares.append(self.options.gpu_memory_utilization or defaults.utilization)
        return [*batches.values()]

    def _plans(self, defaults: Defaults, request: FitRequest) -> Plans:
        """Return the plan of one of each group of pipeline stages with equal layers."""
        ranks = self.run.parallelism
        if not request.windowed:
            defaults = defaults._replace(tokens=0, flights=0)
        key = ranks.tp, ranks.dcp, ranks.pp, defaults
        if key not in self._layouts:
            planner, distinct = request.planner(), dict[object, int]()
            for stage in stages(self.run.model, ranks.pp):
                distinct.setdefault((stage.order, stage.first, stage.last), stage.number)
            self._layouts[key] = {stage: planner(stage) for stage in sorted(distinct.values())}
        return self._layouts[key]
