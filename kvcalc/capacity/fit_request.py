"""A request to `fit` with every choice made, and the terms and budgets that follow from it for each
pipeline stage.

The inverse of a budget: what just holds the sequences asked for, and the greatest settings that an
engine could be given.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.arithmetic import minimum
from kvcalc.capacity.engines import CacheLayout, Engine, EngineSettings
from kvcalc.capacity.engines.layout import LayerCache, largest
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.memory_budget import (
    Budget,
    EngineStartup,
    MemoryBreakdown,
    budget,
    draft_weights,
    mtp_weights,
    offloaded_bytes,
)
from kvcalc.errors import UserError
from kvcalc.model.model import check_vocabulary
from kvcalc.model.pipeline import check, stages
from kvcalc.model.precision import Precision, stored_as
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import MAX_TOKENS


class FitRequest(NamedTuple):
    """What is asked, with every choice made; `held`: every layer that keeps a cache, drafts
    included."""

    run: TimedDeployment
    options: FitOptions
    settings: EngineSettings
    sequences: int
    release: Any
    utilization: float
    of: str
    length: int
    held: list[LayerCache]
    beside: dict[str, int]

    @property
    def wanted(self) -> int:
        """Sequences asked for, on one of the dp ranks."""
        return self.run.parallelism.sequences(self.options.wanted)

    @property
    def prompts(self) -> int:
        """Return the sequences of one dp rank that a pass may serve: the required ones, or
        `max_num_seqs` if that is more."""
        return self.run.parallelism.sequences(
            max(self.options.wanted, self.options.max_num_seqs or 0)
        )

    @property
    def end(self) -> str:
        return self.options.end

    def plan(self, stage: int) -> CacheLayout:
        """The layout of a stage's cache."""
        return self.planner()(stage)

    def planner(self) -> Callable[[int], CacheLayout]:
        """The layout of each stage's cache."""
        return self.options.rules.plan(self.held, self.run.parallelism, self.settings)

    @property
    def windowed(self) -> bool:
        """Whether anything is kept in part, of which a pass in flight holds more."""
        parts = {id(h.parts): h.parts for h in self.held}
        return any(
            stored.entry.limit
            for resident in parts.values()
            for part in resident
            for stored in part
        )

    def start(self, stage: int, sequences: Any = 0) -> EngineStartup:
        """One stage as it starts, set up for `sequences` and asked for as many where they are
        given; an int or an array."""
        run, requested = self.run, self.options
        given = sequences if not isinstance(sequences, int) or sequences else None
        return EngineStartup(
            model=run.model,
            precision=run.precision,
            ranks=run.parallelism,
            gpu=run.gpu,
            stage=stage,
            of=self.of,
            tokens=self.settings.max_num_batched_tokens,
            sequences=minimum(
                self.sequences if given is None else given,
                self.settings.max_num_batched_tokens,
            ),
            prompts=self.prompts if given is None else given,
            release=self.release,
            eager=requested.enforce_eager,
            loras=requested.max_loras,
            lora_rank=requested.max_lora_rank,
            gpu_layers=requested.n_gpu_layers,
            cpu_experts=run.model.layers if requested.cpu_moe else requested.n_cpu_moe,
            images=requested.images,
            tables_on_host=requested.tables_on_host,
            extra=self.beside if stage == run.parallelism.pp - 1 else {},
            context=self._context(self.wanted if given is None else given),
        )

    def _context(self, sequences: Any) -> Any:
        """Tokens of one cache, where the engine's buffers grow with it."""
        if not self.options.rules.add_context_buffers:
            return 0
        return self.length * (sequences if self.settings.kv_unified else 1)

    def terms(self, start: EngineStartup, end: str) -> MemoryBreakdown:
        """Return the engine's terms, with the given terms in their place."""
        return self._override(start, self.options.rules.memory(start, end))

    def terms_of(self, starts: Sequence[EngineStartup], end: str) -> list[MemoryBreakdown]:
        """Return the terms of stages with equal `memory_key`s, which differ only in their
        weights."""
        rules = self.options.rules
        first = rules.memory(starts[0], end)
        terms = [self._override(starts[0], first)]
        for start in starts[1:]:
            assert rules.weights
            language, extra, host = rules.weights(start)
            own = first._replace(language=language, extra=extra, host=host)
            terms.append(self._override(start, own))
        return terms

    def _override(self, start: EngineStartup, found: MemoryBreakdown) -> MemoryBreakdown:
        """Apply buffers of the context, corrections of a log, and given terms.

        Nothing is uncertain if all three terms are given.
        """
        requested = self.options
        if requested.rules.add_context_buffers:
            found = requested.rules.add_context_buffers(start, found)
        if requested.from_log:
            found = requested.from_log.applied(
                found, start.model.parameters, start.formats.weights_label, start.ranks
            )
        away = offloaded_bytes(
            start.model,
            start.formats,
            start.ranks,
            start.stage,
            requested.cpu_offload_gb,
        )
        found = found._replace(language=max(0, found.language - away))
        if requested.weight_bytes is not None:
            found = found._replace(language=requested.weight_bytes, extra={}, host=0)
        if requested.activation_bytes is not None:
            found = found._replace(activation=requested.activation_bytes, peak="given")
        if requested.overhead_bytes is not None:
            found = found._replace(overhead={"given": requested.overhead_bytes})
        given = None not in (
            requested.weight_bytes,
            requested.activation_bytes,
            requested.overhead_bytes,
        )
        return found._replace(margin=0.0) if given else found

    def budget(self, terms: MemoryBreakdown, utilization: float = 0.0) -> Budget:
        """The budget of those terms under the utilization in force, or another one."""
        sums = terms.weights, terms.activation, sum(terms.overhead.values())
        share = utilization or self.utilization
        return budget(
            self.run.gpu.usable_bytes,
            share,
            *sums,
            self.of,
            terms.taken,
            self.options.rules.outside,
        )

    def left(self, terms: MemoryBreakdown, utilization: float = 0.0) -> int:
        """Bytes that the terms and their margin leave for the cache; negative where there are too
        few."""
        return self.budget(terms, utilization).cache - int(
            terms.margin * self.run.gpu.memory_bytes
        )

    def cache(self, plan: CacheLayout, left: int) -> int:
        """Bytes that a plan works with: as given, or of what is left."""
        requested = self.options
        if requested.num_gpu_blocks_override:
            return requested.num_gpu_blocks_override * (plan.bytes_per_block or 0)
        return requested.kv_cache_memory_bytes or max(0, left)


def started(
    deployment: TimedDeployment, asked: FitOptions
) -> tuple[TimedDeployment, Any, tuple[str, ...]]:
    """A deployment as the engine runs it, in the formats that it stores; the engine's release; and
    what is to be said of both.

    Raises UserError on a request that the engine could not be given.
    """
    model, ranks, engine = deployment.model, deployment.parallelism, asked.rules
    check(model, ranks)
    if ranks.dcp > 1 and not engine.spreads_context:
        raise UserError(f"no rules for decode-context parallelism under {engine.title}")
    precision, notes = engine.stored(model, deployment.precision)
    release, remark = engine.release(asked.engine_version)
    gpu, learned = deployment.gpu, asked.from_log
    if learned and learned.gpu == gpu.name:
        gpu = msgspec.structs.replace(gpu, memory_bytes=learned.memory_bytes)
    run = msgspec.structs.replace(
        deployment, gpu=gpu, precision=precision, model=stored_as(model, precision)
    )
    warns = None if asked.enforce_eager or asked.given else engine.warns
    warning = warns(release, run.model, run.formats, ranks) if warns else ""
    return run, release, (*notes, *filter(None, [remark, warning]))


def request_of(
    run: TimedDeployment, asked: FitOptions, cache_dtype: str, release: Any
) -> FitRequest:
    """The choices that were left to the engine or the model, and the layers; `cache_dtype` as
    asked, for a draft's cache."""
    engine, ranks = asked.rules, run.parallelism
    length = asked.longest(run.model)
    chosen = engine.defaults(run.gpu, ranks, release, asked.max_num_batched_tokens, run.model)
    settings = msgspec.structs.replace(
        asked,
        max_num_batched_tokens=chosen.tokens,
        max_in_flight_batches=asked.max_in_flight_batches or chosen.flights,
        num_speculative_tokens=asked.num_speculative_tokens
        or chosen.drafted * (asked.mtp or asked.draft is not None),
        mamba_ssm_cache_dtype=asked.state_dtype,
        page_tuples=asked.page_tuples or chosen.page_tuples,
    )
    used = asked.gpu_memory_utilization or chosen.utilization
    resident, beside, last = _layers(run, engine, settings, asked.mtp), {}, ranks.pp - 1
    if asked.mtp:
        beside["mtp"] = mtp_weights(run.model, run.formats, ranks)
    if asked.draft:
        check_vocabulary(run.model, asked.draft, engine.unlike_drafts, engine.title)
        precision, _ = engine.stored(asked.draft, Precision(kv_cache_dtype=cache_dtype))
        draft = msgspec.structs.replace(run, model=asked.draft, precision=precision)
        resident += [h._replace(stage=last) for h in _layers(draft, engine, settings)]
        beside["draft"] = draft_weights(asked.draft, precision, ranks)
    if not any(h.parts for h in resident):
        raise UserError(
            f"{run.model.name} keeps no cache: its weights and activations alone take memory"
        )
    own = asked.max_num_seqs or max(asked.require, chosen.sequences * ranks.dp)
    sequences = ranks.sequences(max(own, asked.require))
    return FitRequest(
        run,
        asked,
        settings,
        sequences,
        release,
        used,
        asked.utilization_of or engine.of,
        length,
        resident,
        beside,
    )


def _layers(
    run: TimedDeployment, engine: Engine, settings: EngineSettings, mtp: bool = False
) -> list[LayerCache]:
    """Every layer of a model as the engine stores it, on its pipeline stage; with `mtp` those of
    the prediction on the last."""
    model, ranks, formats = run.model, run.parallelism, run.formats
    parts = {kind: engine.parts(model, kind, formats, ranks, settings) for kind in model.kinds}
    layers = [
        LayerCache(model, kind, stage.number, parts[kind])
        for stage in stages(model, ranks.pp)
        for kind in stage.order
    ]
    if mtp and model.mtp:
        layers += [
            LayerCache(model, model.mtp.kind, ranks.pp - 1, parts[model.mtp.kind])
        ] * model.mtp.layers
    return layers


STEPS = 10_000  # of a utilization
# requests from which vLLM's sampler takes fewer bytes for each: on either side more requests take
# more
SORTED_APART = 128


class CapacityLimits(NamedTuple):
    """The inverse, at the end that answers: what just holds the sequences asked for, and the
    greatest settings that hold.

    cache: bytes on the GPU that needs most. utilization: the least share, in ten thousandths; None
    where it is above 1. sequences: the greatest max_num_seqs of which all fit; length: the greatest
    max_model_len, max_num_seqs being what is asked for, the engine's own where none is. Both with
    the terms that an engine has under that setting; None without such a bound.
    """

    cache: int
    utilization: float | None
    sequences: int
    length: int | None


def needed(request: FitRequest, plans: Sequence[CacheLayout]) -> CapacityLimits:
    """For the plans of the pipeline stages, in order."""
    count, length, shared = (
        request.wanted,
        request.length,
        request.options.shared_prefix,
    )
    caches = [plan.needed(count, length, shared) for plan in plans]
    return CapacityLimits(
        max(caches),
        _utilization(request, caches),
        _sequences(request, plans),
        _length(request, plans),
    )


def _utilization(request: FitRequest, caches: Sequence[int]) -> float | None:
    """The least share with which every stage has its bytes."""
    terms = [request.terms(request.start(stage), request.end) for stage in range(len(caches))]

    def short(steps: int) -> bool:
        return any(
            request.left(t, steps / STEPS) < cache
            for t, cache in zip(terms, caches, strict=True)
        )

    least = largest(short, STEPS) + 1
    return None if least > STEPS else least / STEPS


def held(request: FitRequest, plans: Sequence[CacheLayout], end: str, most: int) -> int:
    """Of so many sequences on a rank, which a cache holds at an end of the range, those that hold
    once asked for.

    An engine that is set up for more of them takes more beside its cache.
    """
    if _holds(request, plans, end, most):
        return most
    fewer = largest(lambda count: _holds(request, plans, end, count), most)
    return max(fewer, min(most, request.wanted))


def _holds(request: FitRequest, plans: Sequence[CacheLayout], end: str, count: int) -> bool:
    """Whether every stage holds so many sequences on a rank, set up for as many."""
    length, shared = request.length, request.options.shared_prefix
    return all(
        plan.needed(count, length, shared) <= plan.pool(_left(request, stage, plan, count, end))
        for stage, plan in enumerate(plans)
    )


def _left(request: FitRequest, stage: int, plan: CacheLayout, sequences: int, end: str) -> int:
    """Bytes for the cache of a stage that is set up for, and asked for, so many sequences on a
    rank; 0: as it is asked."""
    terms = request.terms(request.start(stage, sequences), end)
    return request.cache(plan, request.left(terms))


def _sequences(request: FitRequest, plans: Sequence[CacheLayout]) -> int:
    def holds(count: int) -> bool:
        return _holds(request, plans, request.end, count)

    most = largest(holds) if holds(SORTED_APART) else largest(holds, SORTED_APART - 1)
    return most * request.run.parallelism.dp


def _length(request: FitRequest, plans: Sequence[CacheLayout]) -> int | None:
    requested = request.options
    # 0: the engine's own number
    set_up = (
        request.wanted if requested.max_num_seqs or requested.users or requested.require else 0
    )
    result = (longest(request, stage, plan, set_up) for stage, plan in enumerate(plans))
    return min((length for length in result if length is not None), default=None)


def longest(request: FitRequest, stage: int, plan: CacheLayout, set_up: int = 0) -> int | None:
    """Tokens of the longest sequences of which those asked for fit on a stage; None where no length
    is too long.

    The engine has its terms for that length, set up for so many sequences; 0: as it is asked.
    """
    count, shared, end = request.wanted, request.options.shared_prefix, request.end
    if not request.options.rules.add_context_buffers:
        return plan.longest(_left(request, stage, plan, set_up, end), count, shared)

    def holds(length: int) -> bool:
        left = _left(request._replace(length=length), stage, plan, set_up, end)
        return plan.needed(count, length, shared) <= plan.pool(left)

    most = largest(holds)
    return None if most == MAX_TOKENS else most
