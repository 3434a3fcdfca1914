"""Capacity for many values of `max_num_seqs` and many GPU models in one call.

Memory, budgets and cache layouts come from `fit`, evaluated over arrays of `max_num_seqs`. All
figures are exact integers, as in `fit`.
"""

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.capacity.deployment_fit import Fit, make_fit, resolve_deployment
from kvcalc.capacity.engines.engine import Defaults
from kvcalc.capacity.engines.layout import CacheLayout, content_of
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.model.pipeline import stages
from kvcalc.timing.deployment import TimedDeployment

IntArray = Any  # a NumPy array of int64
Plans = dict[int, CacheLayout]  # by pipeline stage
# by tp, dcp and pp, and the engine's defaults on a GPU
Layouts = dict[tuple[int, int, int, Defaults], Plans]


class BatchedFit(NamedTuple):
    """A deployment on several GPU models with equal cache layouts, evaluated together with arrays.

    A cache layout states how an engine divides the KV cache of one GPU into blocks.

    Attributes:
        fit: The capacity of the deployment on the first of the GPU models.
        plans: Cache layout of one GPU of each pipeline stage, by stage index. If several stages
            have equal layers, only the first is a key.
        gpus: The GPU models.
        gpu_indices: Index of each of `gpus` in the list that `BatchedFitBuilder.batches` got.
        utilizations: Share of its memory that the engine may use, for each of `gpus`, from 0 to 1.
    """

    fit: Fit
    plans: Plans
    gpus: list[Gpu]
    gpu_indices: list[int]
    utilizations: list[float]

    def transfer_seconds(self, length: int) -> list[float]:
        """Return seconds to send one sequence's KV cache to another replica, for each of `gpus`.

        All GPUs of the replica send their part at the same time. The time is the largest part of
        one GPU in bytes ÷ the rate of `transfer_link`. It is NaN for a GPU model without a known
        link.

        Args:
            length: Tokens of the sequence.
        """
        fit = self.fit
        contents = (
            content_of(fit.layers, fit.ranks, stage, fit.engine.content) for stage in self.plans
        )
        size = max(content.needed(1, length) for content in contents)
        return [size / rate if rate else nan for rate in map(transfer_link, self.gpus)]

    def sequences(self, remaining: IntArray, length: int) -> IntArray:
        """Return how many sequences fit in the replica, as an array [GPUs in `gpus`, counts].

        "counts" are the values of `max_num_seqs` that `remaining_bytes` tried. A result may exceed
        its `max_num_seqs`. It is for all data-parallel ranks together. The pipeline stage that fits
        the smallest number of sequences decides.

        Args:
            remaining: Result of `remaining_bytes`: bytes per GPU for the KV cache [stages, GPUs,
                counts].
            length: Tokens of each sequence.
        """
        import numpy as np

        shared = self.fit.options.shared_prefix
        budgets = np.maximum(remaining, 0)
        stage_sequences = [
            plan.max_sequences(cache_bytes, length, shared)
            for plan, cache_bytes in zip(self.plans.values(), budgets)
        ]
        smallest = np.min(np.broadcast_arrays(*stage_sequences), axis=0)
        return smallest.astype(np.int64) * self.fit.ranks.dp

    def remaining_bytes(self, counts: IntArray) -> IntArray:
        """Return the KV cache budget of one GPU in bytes, after weights and working memory.

        The budget is negative if weights and working memory exceed the share that the engine may
        use.

        Args:
            counts: Values of `max_num_seqs` to try: sequences of the whole replica for which the
                engine is set up. More sequences need more working memory.

        Returns:
            Array [stages in `plans`, GPUs in `gpus`, counts].
        """
        import numpy as np

        fit = self.fit
        result = np.empty((len(self.plans), len(self.gpus), len(counts)), dtype=np.int64)
        for rows, stage in zip(result, self.plans):
            start = fit.startup(stage, -(-counts // fit.ranks.dp))
            terms = {}
            for index, gpu in enumerate(self.gpus):
                gpu_start = replace(start, gpu=gpu)
                key = fit.engine.memory_key(gpu_start)
                if key not in terms:
                    terms[key] = fit.memory(gpu_start, fit.estimate)
                rows[index] = fit.remaining_bytes(terms[key], self.utilizations[index], gpu)
        return result


def transfer_link(gpu: Gpu) -> float | None:
    """Return the bytes per second that one GPU sends to another replica; None if not known.

    Disaggregated prefill sends a prompt's KV cache at this rate. It is the rate in one direction of
    the link between GPUs, such as NVLink. For a GPU model without one, it is the rate per GPU
    between nodes.
    """
    return gpu.link_bytes_per_s or gpu.inter_domain_rate


def transfer_rate(gpu: Gpu) -> float:
    """Return the bytes per second that one GPU sends to another replica.

    Disaggregated prefill sends a prompt's KV cache at this rate. It is the rate in one direction of
    the link between GPUs, such as NVLink. For a GPU model without one, it is the rate per GPU
    between nodes.

    Raises:
        UserError: Neither rate is known. `transfer_link` returns None instead.
    """
    if not (rate := transfer_link(gpu)):
        raise UserError(
            f"{gpu.name} gives no rate of a link over which a prompt's cache could go to "
            "another replica"
        )
    return rate


class BatchedFitBuilder:
    """Builds `BatchedFit` objects for one model, precision and parallelism, and many GPU models.

    Args:
        deployment: The deployment. Its GPU model does not matter, because `batches` replaces it.
        options: The options of `fit`. The method `batches` replaces `max_model_len`.
        layouts: Cache layouts to reuse, as a dict that several builders share and extend. The keys
            are (tp, dcp, pp, defaults of the engine). Builders that share it must have equal model,
            precision and options.

    Raises:
        UserError: The engine cannot run the deployment.
    """

    def __init__(
        self, deployment: TimedDeployment, options: FitOptions, layouts: Layouts
    ) -> None:
        self.deployment, self.options = deployment, options
        self.run, self.release, _ = resolve_deployment(deployment, options)
        self._layouts = layouts

    def batches(self, gpus: Sequence[Gpu], length: int) -> list[BatchedFit]:
        """Return one `BatchedFit` for each group of GPU models with equal cache layouts.

        A GPU affects the layout only through the engine's defaults, such as tokens per forward
        pass.

        Args:
            gpus: The GPU models.
            length: Maximum tokens of a sequence, used as `max_model_len`.
        """
        options = replace(self.options, max_model_len=length)
        batches = {}
        for index, gpu in enumerate(gpus):
            defaults = options.rules.defaults(
                gpu,
                self.run.parallelism,
                self.release,
                options.max_num_batched_tokens,
                self.run.model,
            )
            key = defaults._replace(utilization=0.0, sequences=0)
            if key not in batches:
                fit = make_fit(
                    self.deployment, replace(self.run, gpu=gpu), options, self.release
                )
                batches[key] = BatchedFit(fit, self._plans(key, fit), [], [], [])
            batch = batches[key]
            batch.gpus.append(gpu)
            batch.gpu_indices.append(index)
            batch.utilizations.append(options.gpu_memory_utilization or defaults.utilization)
        return [*batches.values()]

    def _plans(self, defaults: Defaults, fit: Fit) -> Plans:
        """Return one cache layout for each group of pipeline stages with equal layers.

        The number of tokens in flight matters only if a window or chunk limits some rows.
        """
        ranks = fit.ranks
        parts = {id(layer.parts): layer.parts for layer in fit.layers}.values()
        entries = (entry for layer_parts in parts for part in layer_parts for entry in part)
        if not any(entry.entry.limit for entry in entries):
            defaults = defaults._replace(tokens=0, in_flight_batches=0)
        key = ranks.tp, ranks.dcp, ranks.pp, defaults
        if key not in self._layouts:
            planner, distinct = fit.planner(), dict[object, int]()
            for stage in stages(fit.model, ranks.pp):
                distinct.setdefault((stage.order, stage.first, stage.last), stage.number)
            self._layouts[key] = {stage: planner(stage) for stage in sorted(distinct.values())}
        return self._layouts[key]
