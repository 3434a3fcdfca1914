"""A request to `fit` with every choice made, and the terms and budgets that follow from it for each pipeline stage."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.engines import Engine, EngineSettings, Plan
from kvcalc.capacity.engines.stored import Held
from kvcalc.capacity.memory_terms import Budget, Start, Terms, budget, draft_weights, mtp_weights
from kvcalc.capacity.options import FitOptions
from kvcalc.capacity.placement import offloaded
from kvcalc.errors import UserError
from kvcalc.model.drafts import check_vocabulary
from kvcalc.model.pipeline import check, stages
from kvcalc.model.precision import Precision, stored_as
from kvcalc.timing.deployment import Deployment
from kvcalc.units import minimum

KEPT = 1 << 12  # terms that a model keeps


class Request(NamedTuple):
    """What is asked, with every choice made; `held`: every layer that keeps a cache, drafts included."""

    run: Deployment
    options: FitOptions
    settings: EngineSettings
    sequences: int
    release: Any
    utilization: float
    of: str
    length: int
    held: list[Held]
    beside: dict[str, int]

    @property
    def wanted(self) -> int:
        """Sequences asked for, on one of the dp ranks."""
        return self.run.parallelism.sequences(self.options.wanted)

    @property
    def prompts(self) -> int:
        """Return the sequences of one dp rank that a pass may serve: the required ones, or `max_num_seqs` if that is more."""
        return self.run.parallelism.sequences(max(self.options.wanted, self.options.max_num_seqs or 0))

    @property
    def end(self) -> str:
        return self.options.end

    def plan(self, stage: int) -> Plan:
        """The layout of a stage's cache."""
        return self.planner()(stage)

    def planner(self) -> Callable[[int], Plan]:
        """The layout of each stage's cache."""
        return self.options.rules.plan(self.held, self.run.parallelism, self.settings)

    @property
    def windowed(self) -> bool:
        """Whether anything is kept in part, of which a pass in flight holds more."""
        parts = {id(h.parts): h.parts for h in self.held}
        return any(stored.entry.limit for held in parts.values() for part in held for stored in part)

    def start(self, stage: int, sequences: Any = 0) -> Start:
        """One stage as it starts, set up for `sequences` and asked for as many where they are given; an int or an array."""
        run, asked = self.run, self.options
        given = sequences if not isinstance(sequences, int) or sequences else None
        return Start(
            model=run.model,
            precision=run.precision,
            ranks=run.parallelism,
            gpu=run.gpu,
            stage=stage,
            of=self.of,
            tokens=self.settings.max_num_batched_tokens,
            sequences=minimum(self.sequences if given is None else given, self.settings.max_num_batched_tokens),
            asked=self.prompts if given is None else given,
            release=self.release,
            eager=asked.enforce_eager,
            loras=asked.max_loras,
            lora_rank=asked.max_lora_rank,
            gpu_layers=asked.n_gpu_layers,
            cpu_experts=run.model.layers if asked.cpu_moe else asked.n_cpu_moe,
            images=asked.images,
            tables_on_host=asked.tables_on_host,
            beside=self.beside if stage == run.parallelism.pp - 1 else {},
            context=self._context(self.wanted if given is None else given),
        )

    def _context(self, sequences: Any) -> Any:
        """Tokens of one cache, where the engine's buffers grow with it."""
        if not self.options.rules.grows:
            return 0
        return self.length * (sequences if self.settings.kv_unified else 1)

    def at(self, length: int) -> "Request":
        """The same with another longest sequence, and with the pass that the engine then chooses."""
        run, asked = self.run, self.options
        chosen = asked.rules.defaults(run.gpu, run.parallelism, self.release, asked.max_num_batched_tokens, run.model, length)
        settings = msgspec.structs.replace(self.settings, max_num_batched_tokens=chosen.tokens)
        return self._replace(length=length, settings=settings)

    def terms(self, start: Start, end: str) -> Terms:
        """The engine's terms, and in their place those that are given; nothing is uncertain where all three are."""
        return self._given(start, self._memory(start, end))

    def terms_of(self, starts: Sequence[Start], end: str) -> list[Terms]:
        """The terms of stages that differ in their weights alone, as the engine's `aside` tells them apart."""
        first = self._memory(starts[0], end)
        rest = (first._replace(**self.options.rules.weights(start)._asdict()) for start in starts[1:])
        return [self._given(start, found) for start, found in zip(starts, (first, *rest), strict=True)]

    def _given(self, start: Start, found: Terms) -> Terms:
        asked = self.options
        found = asked.rules.grows(start, found) if asked.rules.grows else found
        if asked.from_log:
            found = asked.from_log.applied(found, start.model.parameters, start.formats.weights_label, start.ranks)
        found = found._replace(language=found.language - offloaded(found.language, asked.cpu_offload_gb))
        if asked.weight_bytes is not None:
            found = found._replace(language=asked.weight_bytes, extra={}, host=0)
        if asked.activation_bytes is not None:
            found = found._replace(activation=asked.activation_bytes, peak="given")
        if asked.overhead_bytes is not None:
            found = found._replace(overhead={"given": asked.overhead_bytes})
        given = None not in (asked.weight_bytes, asked.activation_bytes, asked.overhead_bytes)
        return found._replace(margin=0.0) if given else found

    def _memory(self, start: Start, end: str) -> Terms:
        """The engine's terms; those of whole numbers are kept by the model: rows of a list, and searches, ask for the same."""
        rule = self.options.rules.memory
        if not isinstance(start.sequences, int):
            return rule(start, end)
        kept = start.model.known.setdefault("terms", {})
        key = rule, end, start.alike
        if key not in kept:
            if len(kept) == KEPT:
                kept.clear()
            kept[key] = rule(start, end)
        found: Terms = kept[key]
        return found

    def budget(self, terms: Terms, utilization: float = 0.0) -> Budget:
        """The budget of those terms under the utilization in force, or another one."""
        sums = terms.weights, terms.activation, sum(terms.overhead.values())
        share = utilization or self.utilization
        return budget(self.run.gpu.usable_bytes, share, *sums, self.of, terms.taken, self.options.rules.outside)

    def left(self, terms: Terms, utilization: float = 0.0) -> int:
        """Bytes that the terms and their margin leave for the cache; negative where there are too few."""
        return self.budget(terms, utilization).cache - int(terms.margin * self.run.gpu.memory_bytes)

    def cache(self, plan: Plan, left: int) -> int:
        """Bytes that a plan works with: as given, or of what is left."""
        asked = self.options
        if asked.num_gpu_blocks_override:
            return asked.num_gpu_blocks_override * (plan.bytes_per_block or 0)
        return asked.kv_cache_memory_bytes or max(0, left)


def started(deployment: Deployment, asked: FitOptions) -> tuple[Deployment, Any, tuple[str, ...]]:
    """A deployment as the engine runs it, in the formats that it stores; the engine's release; and what is to be said of both.

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
    run = msgspec.structs.replace(deployment, gpu=gpu, precision=precision, model=stored_as(model, precision))
    warns = None if asked.enforce_eager or asked.given else engine.warns
    warning = warns(release, run.model, run.formats, ranks) if warns else ""
    return run, release, (*notes, *filter(None, [remark, warning]))


def request_of(run: Deployment, asked: FitOptions, cache_dtype: str, release: Any) -> Request:
    """The choices that were left to the engine or the model, and the layers; `cache_dtype` as asked, for a draft's cache."""
    engine, ranks = asked.rules, run.parallelism
    length = asked.longest(run.model)
    chosen = engine.defaults(run.gpu, ranks, release, asked.max_num_batched_tokens, run.model, length)
    settings = msgspec.structs.replace(
        asked,
        max_num_batched_tokens=chosen.tokens,
        max_in_flight_batches=asked.max_in_flight_batches or chosen.flights,
        num_speculative_tokens=asked.num_speculative_tokens or chosen.drafted * (asked.mtp or asked.draft is not None),
        mamba_ssm_cache_dtype=asked.state_dtype,
        page_tuples=asked.page_tuples or chosen.page_tuples,
    )
    used = asked.gpu_memory_utilization or chosen.utilization
    held, beside, last = _layers(run, engine, settings, asked.mtp), {}, ranks.pp - 1
    if asked.mtp:
        beside["mtp"] = mtp_weights(run.model, run.formats, ranks)
    if asked.draft:
        check_vocabulary(run.model, asked.draft, engine.unlike_drafts, engine.title)
        precision, _ = engine.stored(asked.draft, Precision(kv_cache_dtype=cache_dtype))
        draft = msgspec.structs.replace(run, model=asked.draft, precision=precision)
        held += [h._replace(stage=last) for h in _layers(draft, engine, settings)]
        beside["draft"] = draft_weights(asked.draft, precision, ranks)
    if not any(h.parts for h in held):
        raise UserError(f"{run.model.name} keeps no cache: its weights and activations alone take memory")
    own = asked.max_num_seqs or max(asked.require, chosen.sequences * ranks.dp)
    sequences = ranks.sequences(max(own, asked.require))
    return Request(run, asked, settings, sequences, release, used, asked.utilization_of or engine.of, length, held, beside)


def _layers(run: Deployment, engine: Engine, settings: EngineSettings, mtp: bool = False) -> list[Held]:
    """Every layer of a model as the engine stores it, on its pipeline stage; with `mtp` those of the prediction on the last."""
    model, ranks, formats = run.model, run.parallelism, run.formats
    parts = {kind: engine.parts(model, kind, formats, ranks, settings) for kind in model.kinds}
    found = [Held(model, kind, stage.number, parts[kind]) for stage in stages(model, ranks.pp) for kind in stage.order]
    if mtp and model.mtp:
        found += [Held(model, model.mtp.kind, ranks.pp - 1, parts[model.mtp.kind])] * model.mtp.layers
    return found
