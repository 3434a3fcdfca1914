"""The capacity of a deployment: a KV cache budget, and the sequences and lengths that fit.

Every figure is for one GPU on the pipeline stage that fits the smallest number of sequences. Only
numbers of sequences are for the complete replica, like `--batch-size`.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.arithmetic import minimum, rounded_up
from kvcalc.capacity.engines.engine import Engine, EngineSettings
from kvcalc.capacity.engines.layout import (
    CacheLayout,
    Content,
    LayerCache,
    NoCache,
    Remarks,
    content_of,
    largest_fitting,
)
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.memory_budget import (
    CONTEXT_BYTES,
    ESTIMATES,
    Budget,
    EngineStartup,
    MemoryBreakdown,
    SizesByName,
    budget,
    draft_weights,
    mtp_weights,
    offloaded_bytes,
)
from kvcalc.errors import UserError, shown_briefly
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.weights import Formats
from kvcalc.model.model import Model, check_vocabulary
from kvcalc.model.pipeline import check, stages
from kvcalc.model.precision import Precision, stored_as
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import MAX_TOKENS, format_bytes

UTILIZATION_STEPS = 10_000
# From 128 requests on, vLLM's sampler needs 38 instead of 50 bytes per logit. Search both sides of
# 128, because memory drops there.
SAMPLER_STEP = 128


class CapacityLimits(NamedTuple):
    """The smallest resources that fit the requested sequences, and the largest settings that fit.

    Attributes:
        cache: Smallest KV cache that fits them: bytes per GPU of the stage that needs the most.
        utilization: Smallest gpu_memory_utilization that fits them, to 0.0001; None if above 1.
        sequences: Largest max_num_seqs of the replica (all data-parallel ranks) at which that many
            sequences of the requested length fit; 0 if none fits.
        length: Largest max_model_len in tokens at which the requested sequences fit. 0 means that
            no token fits, None that memory sets no limit.
    """

    cache: int
    utilization: float | None
    sequences: int
    length: int | None


class Fit(msgspec.Struct, frozen=True, dict=True):
    """The capacity of a deployment: its memory, its KV cache budget, and how many sequences fit.

    All bytes are for one GPU of the pipeline stage that limits the sequences. Numbers of
    sequences are for the replica (all data-parallel ranks), unless stated otherwise.

    Attributes:
        requested: The deployment as requested.
        deployment: The deployment with the data types and formats that the engine really uses.
        options: The options of the request.
        settings: The engine's settings, with all defaults filled in.
        release: The rules of the engine's version; None if the engine has no versions.
        max_num_seqs: Sequences of one data-parallel (dp) rank for which the engine is set up.
        utilization: Share of the memory that the engine may use, from 0 to 1.
        utilization_basis: Memory to which the share refers: "total"; "free", without the memory in
            use before the weights load; or "remaining", the memory that all other parts leave.
        length: Tokens of each sequence: `max_model_len`, or the model's own maximum.
        layers: Every layer with its stored cache entries, including layers of a draft model.
        extra_weights: Bytes of a draft model ("draft weights") and of multi-token-prediction layers
            ("MTP weights") on each GPU of the last pipeline stage.
        remarks: Remarks for the user on the engine's choices.
        has_chosen_length: Whether the length is the longest that fits, because the request states
            none.
    """

    requested: TimedDeployment
    deployment: TimedDeployment
    options: FitOptions
    settings: EngineSettings
    release: Any
    max_num_seqs: int
    utilization: float
    utilization_basis: str
    length: int
    layers: list[LayerCache]
    extra_weights: SizesByName
    remarks: Remarks = ()
    has_chosen_length: bool = False

    def __str__(self) -> str:
        return (
            f"{self.model.name} on {self.ranks.gpus}× {self.gpu.name} ({self.engine.name}): "
            f"{self.sequences:,} sequence{'s' * (self.sequences != 1)} of {self.length:,} tokens, "
            f"{format_bytes(self.kv_budget)} for the cache of a GPU"
        )

    _repr_pretty_ = shown_briefly

    @property
    def model(self) -> Model:
        return self.deployment.model

    @property
    def gpu(self) -> Gpu:
        return self.deployment.gpu

    @property
    def ranks(self) -> Parallelism:
        return self.deployment.parallelism

    @property
    def formats(self) -> Formats:
        return self.deployment.formats

    @property
    def engine(self) -> Engine:
        return self.options.rules

    @property
    def estimate(self) -> str:
        """Return which KV cache budget the options select: the "low", "middle" or "high" estimate.
        Published starts of an engine differ in their memory. "low" is the smallest budget."""
        return self.options.estimate

    @property
    def has_given_cache(self) -> bool:
        """Return whether the options state the size of the KV cache, in bytes or in blocks."""
        return self.options.has_given_cache

    @property
    def num_requested(self) -> int:
        """Return the requested sequences per data-parallel rank, rounded up: 10 on 4 give 3."""
        return self.ranks.sequences(self.options.requested_num_seqs)

    def startup(self, stage: int, sequences: Any = None, length: int = 0) -> EngineStartup:
        """Return the state of one GPU when the engine starts, as the input of `memory`.

        Args:
            stage: Index of the GPU's pipeline stage.
            sequences: Sequences of one dp rank that must fit; also the engine's max_num_seqs. An
                int or integer array. None means both numbers as in the request.
            length: Tokens of each sequence; 0 means the requested length.
        """
        options, tokens = self.options, self.settings.max_num_batched_tokens
        if sequences is None:
            max_num_seqs, fitting = self.max_num_seqs, self.num_requested
            prompts = max(fitting, self.ranks.sequences(options.max_num_seqs or 0))
        else:
            max_num_seqs = fitting = prompts = sequences
        context = 0
        if self.engine.has_context_buffers:
            context = (length or self.length) * (fitting if self.settings.kv_unified else 1)
        return EngineStartup(
            model=self.model,
            precision=self.deployment.precision,
            ranks=self.ranks,
            gpu=self.gpu,
            stage=stage,
            utilization_basis=self.utilization_basis,
            tokens=tokens,
            sequences=minimum(max_num_seqs, tokens),
            prompts=prompts,
            release=self.release,
            options=options,
            cpu_experts=self.model.layers if options.cpu_moe else options.n_cpu_moe,
            extra=self.extra_weights if stage == self.ranks.pp - 1 else {},
            context=context,
        )

    def memory(self, start: EngineStartup, estimate: str) -> MemoryBreakdown:
        """Return the bytes of one GPU outside the KV cache: weights, activations and overhead.

        Corrections from an engine's start-up log (`--from-log`) are added. Sizes in the options,
        such as `weight_bytes`, replace the predicted sizes.

        Args:
            start: The GPU when the engine starts, from `startup`.
            estimate: Estimate of the KV cache budget: "low" (least budget), "middle" or "high".
        """
        options = self.options
        terms = self.engine.memory(start, estimate)
        if options.from_log:
            terms = options.from_log.apply(terms, start)
        if options.memory_in_use:
            startup = terms.startup | {"other processes": options.memory_in_use}
            terms = terms._replace(startup=startup)
        offloaded = offloaded_bytes(
            start.model, start.formats, start.ranks, start.stage, options.cpu_offload_gb
        )
        terms = terms._replace(language=max(0, terms.language - offloaded))
        sizes = options.weight_bytes, options.activation_bytes, options.overhead_bytes
        weights, activation, overhead = sizes
        if weights is not None:
            terms = terms._replace(language=weights, extra={}, host=0)
        if activation is not None:
            terms = terms._replace(activation=activation, peak="given")
        if overhead is not None:
            terms = terms._replace(overhead={"given": overhead})
        return terms if None in sizes else terms._replace(margin=0.0)

    def budget_of(
        self, terms: MemoryBreakdown, utilization: float = 0.0, gpu: Gpu | None = None
    ) -> Budget:
        """Return how the memory of one GPU is divided, in bytes, including the KV cache budget.

        Args:
            terms: Bytes of the GPU outside the KV cache.
            utilization: Share of the memory that the engine may use; 0 means the request's own.
            gpu: GPU model; None means the request's own.
        """
        return budget(
            memory=(gpu or self.gpu).usable_bytes,
            utilization=utilization or self.utilization,
            terms=terms,
            basis=self.utilization_basis,
            excludes_activations=self.engine.excludes_activations,
        )

    def remaining_bytes(
        self, terms: MemoryBreakdown, utilization: float = 0.0, gpu: Gpu | None = None
    ) -> Any:
        """Return the bytes of one GPU for the KV cache, after the safety margin of `terms`.

        The result is negative if memory is missing. It is an array if `terms` has arrays.

        Args:
            terms: Bytes of the GPU outside the KV cache.
            utilization: Share of the memory that the engine may use; 0 means the request's own.
            gpu: GPU model; None means the request's own.
        """
        margin = int(terms.margin * (gpu or self.gpu).memory_bytes)
        if self.utilization_basis == "remaining":  # the cache is a share of this estimate
            margin = int(margin * (utilization or self.utilization))
        return self.budget_of(terms, utilization, gpu).cache - margin

    @cached_property
    def missing_free_bytes(self) -> int:
        """Return the bytes of one GPU that the engine needs to start, but other processes use.
        The result is 0 if enough is free, or if the engine does not check it. vLLM refuses to start
        if less memory is free than its share of the total, after it has made its CUDA context
        (v1/worker/utils.py: request_memory, 0.33)."""
        memory, in_use = self.gpu.usable_bytes, self.options.memory_in_use
        is_checked = self.engine.checks_free_memory and self.utilization_basis == "total"
        if not (in_use and is_checked):
            return 0
        share: int = rounded_up(memory * self.utilization)
        return max(0, share + CONTEXT_BYTES + in_use - memory)

    def cache_bytes(self, stage: int, terms: MemoryBreakdown) -> int:
        """Return the bytes of one GPU's KV cache: the size in the options, or the remaining memory.

        The result is 0 if the engine cannot start because other processes use its memory.

        Args:
            stage: Index of the GPU's pipeline stage.
            terms: Bytes of the GPU outside the KV cache.
        """
        options = self.options
        if self.missing_free_bytes:
            return 0
        if options.num_gpu_blocks_override:
            return options.num_gpu_blocks_override * (self.plans[stage].bytes_per_block or 0)
        remaining = max(0, self.remaining_bytes(terms))
        given = options.kv_cache_memory_bytes or remaining
        return min(given, remaining) if self.engine.limits_given_cache else given

    def planner(self) -> Callable[[int], CacheLayout]:
        """Return a function from a pipeline stage's index to the cache layout of one of its GPUs.
        A caller may lay out only distinct stages. `plans` lays out all of them."""
        if not any(layer.parts for layer in self.layers):
            return lambda stage: NoCache(self.max_num_seqs)
        return self.engine.plan(self.layers, self.ranks, self.settings)

    @cached_property
    def plans(self) -> list[CacheLayout]:
        """Return the cache layout of one GPU of each pipeline stage, in the order of the stages."""
        return [*map(self.planner(), range(self.ranks.pp))]

    @cached_property
    def stage_terms(self) -> dict[str, list[MemoryBreakdown]]:
        """Return the bytes of one GPU outside the KV cache: by estimate, then by pipeline stage.
        The estimates are "low", "middle" and "high"; engines without a range have only "middle"."""
        starts = [self.startup(stage) for stage in range(self.ranks.pp)]
        estimates = ESTIMATES if self.engine.has_memory_range else ("middle",)
        return {name: [self.memory(start, name) for start in starts] for name in estimates}

    @cached_property
    def stage(self) -> int:
        """Return the index of the pipeline stage that fits the smallest number of sequences."""
        capacities = []
        for stage, terms in enumerate(self.stage_terms[self.estimate]):
            plan, cache = self.plans[stage], self.cache_bytes(stage, terms)
            sequences = plan.max_sequences(cache, self.length, self.options.shared_prefix)
            capacities.append((sequences, plan.concurrency(cache, self.length), cache, stage))
        return min(capacities)[-1]

    @property
    def plan(self) -> CacheLayout:
        """Return one GPU's cache layout on `stage`, the stage that limits the sequences."""
        return self.plans[self.stage]

    @cached_property
    def content(self) -> Content:
        """Return a layout that computes the bytes of stored rows only, without blocks and padding.
        It is for one GPU of `stage`, the pipeline stage that limits the sequences."""
        return content_of(self.layers, self.ranks, self.stage, self.engine.content)

    @cached_property
    def notes(self) -> Remarks:
        return (*self.remarks, *self.plan.notes)

    @property
    def terms(self) -> MemoryBreakdown:
        """Return the bytes of one GPU outside the KV cache by use, in the middle estimate.
        The GPU is of `stage`, the pipeline stage that limits the sequences."""
        return self.stage_terms["middle"][self.stage]

    @property
    def estimate_terms(self) -> MemoryBreakdown:
        """Return the bytes of one GPU outside the KV cache by use, in the requested estimate.
        The GPU is of `stage`, the pipeline stage that limits the sequences."""
        return self.stage_terms[self.estimate][self.stage]

    @property
    def budget(self) -> Budget:
        return self.budget_of(self.terms)

    @property
    def estimate_budget(self) -> Budget:
        return self.budget_of(self.estimate_terms)

    @cached_property
    def remaining(self) -> SizesByName:
        """Return the bytes of one GPU that the KV cache gets by estimate: "low", "middle", "high".
        The GPU is of `stage`, the stage that limits the sequences. Bytes are negative if other
        memory exceeds the engine's share. A cache size in the options does not count."""
        return {
            name: self.remaining_bytes(stage_terms[self.stage])
            for name, stage_terms in self.stage_terms.items()
        }

    @cached_property
    def kv_budget(self) -> int:
        """Return the bytes of KV cache on one GPU of `stage`, which limits the sequences.
        A size in the options counts, else the requested estimate. The result is at least 0."""
        return self.cache_bytes(self.stage, self.estimate_terms)

    def budget_at(self, estimate: str) -> int:
        """Return the bytes of one GPU's KV cache on `stage` in the low, middle or high estimate.
        A cache size in the options is returned for each estimate. The result is at least 0."""
        if self.has_given_cache or self.missing_free_bytes:
            return self.kv_budget
        return max(0, self.remaining[estimate])

    @cached_property
    def capacity(self) -> int:
        """Return how many sequences of `self.length` tokens the KV cache of the replica stores.
        The engine is set up for `max_num_seqs`, requested or default. The result may exceed it."""
        sequences: int = self.plan.max_sequences(
            self.kv_budget, self.length, self.options.shared_prefix
        )
        return sequences * self.ranks.dp

    @cached_property
    def sequences(self) -> int:
        """Return how many sequences of `self.length` tokens fit in the replica, as requested.
        The engine is set up for this number (`max_num_seqs`). `self.estimate` is the estimate."""
        return self.sequences_at(self.estimate)

    def sequences_at(self, estimate: str) -> int:
        """Return how many sequences of `self.length` tokens fit in the replica in one estimate.

        The memory of an engine with this number as `max_num_seqs` counts, because some buffers grow
        with it.

        Args:
            estimate: "low", "middle" or "high" KV cache budget. They are equal for an engine
                without a range.
        """
        if estimate not in self.stage_terms:
            estimate = self.estimate
        limit: int = min(
            plan.max_sequences(
                self.cache_bytes(stage, self.stage_terms[estimate][stage]),
                self.length,
                self.options.shared_prefix,
            )
            for stage, plan in enumerate(self.plans)
        )
        if limit and not self._can_start(limit, estimate):
            fitting = largest_fitting(lambda count: self._can_start(count, estimate), limit)
            limit = max(fitting, min(limit, self.num_requested))
        return limit * self.ranks.dp

    def _can_start(self, count: int, estimate: str = "") -> bool:
        """Return whether `count` sequences per rank fit, if the engine is set up for `count`."""
        return self._can_store(count, self.length, count, estimate or self.estimate)

    def _can_store(
        self, count: int, length: int, max_num_seqs: int | None, estimate: str
    ) -> bool:
        """Return whether every stage stores `count` sequences of `length` tokens per rank."""
        for stage, plan in enumerate(self.plans):
            terms = self.memory(self.startup(stage, max_num_seqs, length), estimate)
            cache = self.cache_bytes(stage, terms)
            if plan.needed(count, length, self.options.shared_prefix) > plan.pool(cache):
                return False
        return True

    def _max_length(self, max_num_seqs: int | None = None) -> int | None:
        """Return the largest length in tokens at which all requested sequences fit.

        It is for the requested estimate. 0: no token fits. None: no limit, as the cache stops
        growing before the memory is full.

        Args:
            max_num_seqs: Setting of the engine per dp rank; None means `self.max_num_seqs`.
        """
        count = self.num_requested
        if self.engine.has_context_buffers:
            length = largest_fitting(
                lambda tokens: self._can_store(count, tokens, max_num_seqs, self.estimate)
            )
            return None if length == MAX_TOKENS else length
        lengths = []
        for stage, plan in enumerate(self.plans):
            terms = self.memory(self.startup(stage, max_num_seqs), self.estimate)
            cache = self.cache_bytes(stage, terms)
            lengths.append(plan.max_length(cache, count, self.options.shared_prefix))
        return min((length for length in lengths if length is not None), default=None)

    @cached_property
    def longest_length(self) -> int | None:
        """Return the largest tokens per sequence at which all requested sequences fit; 0 if none.
        None means that memory sets no limit. The model's own maximum does not count."""
        return self._max_length()

    @property
    def longest_context(self) -> int | None:
        """Return the largest length that memory and model allow, in tokens; None without a limit.
        The model's maximum does not count if the request exceeds it. Example: 203,776 tokens fit in
        the memory, and the model was made for 40,960. The result is 40,960, or 203,776 if 102,400
        were requested."""
        maximum = self.model.max_context
        if maximum is None or self.length > maximum:
            return self.longest_length
        return maximum if self.longest_length is None else min(self.longest_length, maximum)

    @cached_property
    def needed(self) -> CapacityLimits:
        """Return the smallest cache and utilization, and the largest settings, for the request."""
        options, shared = self.options, self.options.shared_prefix
        caches = [plan.needed(self.num_requested, self.length, shared) for plan in self.plans]
        terms = self.stage_terms[self.estimate]

        def is_short(steps: int) -> bool:
            return any(
                self.remaining_bytes(stage_terms, steps / UTILIZATION_STEPS) < cache
                for stage_terms, cache in zip(terms, caches)
            )

        utilization = (largest_fitting(is_short, UTILIZATION_STEPS) + 1) / UTILIZATION_STEPS
        limit = MAX_TOKENS if self._can_start(SAMPLER_STEP) else SAMPLER_STEP - 1
        has_request = options.max_num_seqs or options.users or options.require
        return CapacityLimits(
            cache=max(caches),
            utilization=utilization if utilization <= 1 else None,
            sequences=largest_fitting(self._can_start, limit) * self.ranks.dp,
            length=self._max_length(self.num_requested if has_request else None),
        )

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of KV cache that the requested sequences need on one GPU.
        The GPU is of `stage`, the pipeline stage that limits the sequences."""
        return self.plan.needed(self.num_requested, self.length, self.options.shared_prefix)

    @property
    def shortage_bytes(self) -> int:
        """Return the bytes by which one GPU's memory outside the cache exceeds the engine's share.
        The result is 0 if it does not. If other processes use memory that the engine needs to
        start, return `missing_free_bytes`."""
        return self.missing_free_bytes or max(0, -self.remaining[self.estimate])

    @property
    def lacks_memory(self) -> bool:
        """Return whether memory outside the KV cache exceeds the engine's share on any stage."""
        terms = self.stage_terms[self.estimate]
        return any(self.remaining_bytes(stage_terms) < 0 for stage_terms in terms)

    @property
    def excess_bytes(self) -> int:
        """Return the bytes by which a cache size in the options exceeds the rest of a GPU's memory.
        The result is 0 if the cache fits, or if the options state no size."""
        *_, last_part = self.memory_parts().values()
        return max(0, -last_part) if self.has_given_cache else 0

    @property
    def fits(self) -> bool:
        """Return whether all requested sequences fit in the replica.
        A cache size in the options counts unchanged, even if it exceeds the remaining memory."""
        has_memory = self.has_given_cache or self.shortage_bytes == 0
        return has_memory and self.sequences >= self.options.requested_num_seqs

    @property
    def starts(self) -> bool:
        """Return whether the engine would start; False if it refuses because no sequence fits.
        Some engines refuse if not even one sequence of `length` tokens fits. Others give True."""
        return bool(self.sequences) or not self.engine.refuses_below_one_sequence

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes of KV cache on one GPU that the requested sequences leave free.
        The GPU is of `stage`, which limits the sequences. Missing bytes are negative."""
        if self.missing_free_bytes:
            return -self.missing_free_bytes
        shortage = 0 if self.has_given_cache else self.shortage_bytes
        return int(self.plan.pool(self.kv_budget)) - shortage - self.needed_bytes

    @property
    def margin_bytes(self) -> int:
        """Return the bytes that the requested estimate keeps free on one GPU as a safety margin.
        The result is positive in the low estimate and negative in the high estimate."""
        return int(self.estimate_budget.cache) - self.remaining[self.estimate]

    def memory_parts(self) -> SizesByName:
        """Return the parts of one GPU's memory in bytes, by name, in the request's estimate.
        Names are, for example, "weights", "activations" and "CUDA graphs". The sum of the parts is
        the GPU's memory. "KV cache" is negative if the other parts exceed the engine's share. The
        last part is outside the share: "left free", "missing" (negative), or with SGLang
        "activations and CUDA graphs"."""
        terms, budget = self.estimate_terms, self.estimate_budget
        parts = {**terms.startup, "weights": terms.language, **terms.extra}
        if not budget.excludes_activations:
            parts |= {"activations": terms.activation, **terms.overhead}
        if self.margin_bytes:
            parts["margin"] = self.margin_bytes
        remaining = self.remaining[self.estimate]
        name = "KV cache" if self.needed.cache else "free in the share"
        parts[name] = self.kv_budget if self.has_given_cache else remaining
        rest = budget.memory - sum(parts.values())
        if rest:
            name = "left free" if rest > 0 else "missing"
            parts["activations and CUDA graphs" if budget.excludes_activations else name] = rest
        return parts


def resolve_deployment(
    deployment: TimedDeployment, options: FitOptions
) -> tuple[TimedDeployment, Any, Remarks]:
    """Return the deployment as the engine really runs it, the rules of its version, and remarks.

    Args:
        deployment: The deployment as requested.
        options: The options of `fit`, which name the engine and its version.

    Returns:
        The deployment with the engine's data types and formats. The rules of the engine's version;
        None if the engine has no versions. Remarks for the user on the engine's choices.

    Raises:
        UserError: The engine cannot run the deployment.
    """
    model, ranks, engine = deployment.model, deployment.parallelism, options.rules
    check(model, ranks)
    if ranks.dcp > 1 and not engine.spreads_context:
        raise UserError(f"no rules for decode-context parallelism under {engine.title}")
    precision, remarks = engine.supported_precision(model, deployment.precision)
    release, remark = engine.release(options.engine_version)
    gpu, log = deployment.gpu, options.from_log
    if log and log.gpu == gpu.name:
        gpu = replace(gpu, memory_bytes=log.memory_bytes)
    run = replace(deployment, gpu=gpu, precision=precision, model=stored_as(model, precision))
    return run, release, (*remarks, remark) if remark else remarks


def make_fit(
    requested: TimedDeployment,
    run: TimedDeployment,
    options: FitOptions,
    release: Any,
    remarks: Remarks = (),
) -> Fit:
    """Return the capacity of a resolved deployment: the second half of `fit`, with all defaults.

    Args:
        requested: The deployment as requested.
        run, release, remarks: Results of `resolve_deployment`: the deployment as the engine runs
            it, the rules of the engine's version, and remarks for the user.
        options: The options of the request.
    """
    engine, ranks = options.rules, run.parallelism
    defaults = engine.defaults(
        run.gpu, ranks, release, options.max_num_batched_tokens, run.model
    )
    draft_tokens = defaults.draft_tokens if options.mtp or options.draft else 0
    settings = replace(
        options,
        max_num_batched_tokens=defaults.tokens,
        max_in_flight_batches=options.max_in_flight_batches or defaults.in_flight_batches,
        num_speculative_tokens=options.num_speculative_tokens or draft_tokens,
        mamba_ssm_cache_dtype=options.state_dtype,
    )
    length = options.longest_sequence(run.model)
    layers, extra_weights = _layer_caches(run, settings, options.mtp), {}
    if not any(layer.parts for layer in layers):  # a pass takes whole sequences
        settings = replace(settings, max_num_batched_tokens=max(defaults.tokens, length))
    if options.mtp:
        extra_weights["MTP weights"] = mtp_weights(run.model, run.formats, ranks)
    if draft := options.draft:
        check_vocabulary(run.model, draft, engine.max_vocabulary_difference, engine.title)
        precision, _ = engine.supported_precision(
            draft, Precision(kv_cache_dtype=requested.precision.kv_cache_dtype)
        )
        drafts = _layer_caches(replace(run, model=draft, precision=precision), settings)
        layers += [layer._replace(stage=ranks.pp - 1) for layer in drafts]
        extra_weights["draft weights"] = draft_weights(draft, precision, ranks)
    max_num_seqs = options.max_num_seqs or defaults.sequences * ranks.dp
    return Fit(
        requested=requested,
        deployment=run,
        options=options,
        settings=settings,
        release=release,
        max_num_seqs=ranks.sequences(max(max_num_seqs, options.require)),
        utilization=options.gpu_memory_utilization or defaults.utilization,
        utilization_basis=options.utilization_of or engine.utilization_basis,
        length=length,
        layers=layers,
        extra_weights=extra_weights,
        remarks=remarks,
    )


def _layer_caches(
    run: TimedDeployment, settings: FitOptions, mtp: bool = False
) -> list[LayerCache]:
    """Return every layer of a model as the engine stores it, on its pipeline stage. With `mtp`,
    prediction layers are on the last stage."""
    model, ranks = run.model, run.parallelism
    parts = {
        kind: settings.rules.stored_parts(model, kind, run.formats, ranks, settings)
        for kind in model.kinds
    }
    kinds = [(stage.number, kind) for stage in stages(model, ranks.pp) for kind in stage.order]
    if mtp and model.mtp:
        kinds += [(ranks.pp - 1, model.mtp.kind)] * model.mtp.layers
    return [LayerCache(model, kind, stage, parts[kind]) for stage, kind in kinds]


def fit(deployment: TimedDeployment, options: FitOptions | None = None) -> Fit:
    """Return the capacity of a deployment: its KV cache budget, and the sequences that fit.

    Args:
        deployment: Model, GPU, precision and parallelism.
        options: Engine, its settings, and the requested sequences; None for the defaults.

    Raises:
        UserError: The engine cannot run the deployment with these options.
    """
    options = options or FitOptions()
    for argument, kind in ((deployment, TimedDeployment), (options, FitOptions)):
        if not isinstance(argument, kind):
            raise UserError(
                f"{argument!r:.80} is no {kind.__name__.removeprefix('Timed')}",
                "`kvcalc.deploy(model, gpu).fit()` takes names",
            )
    run, release, remarks = resolve_deployment(deployment, options)
    result = make_fit(deployment, run, options, release, remarks)
    _ = result.stage  # an engine may refuse the layers
    return result
