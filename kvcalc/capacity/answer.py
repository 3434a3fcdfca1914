"""What fits on GPUs: a budget for the cache (`memory_terms`), and what an engine makes of it (`engines`). Two steps, apart.

Every figure is that of one GPU: of the pipeline stage that holds the fewest sequences. `max_num_seqs` alone, asked and
answered, counts the whole replica's, as `--batch-size` does: dp divides it.
"""

from typing import NamedTuple

import msgspec

from kvcalc.capacity.engines import Engine, EngineSettings, Plan
from kvcalc.capacity.engines.content import Content, content_of
from kvcalc.capacity.engines.stored import Held
from kvcalc.capacity.memory_terms import (
    Budget,
    activation_peak,
    budget,
    draft_weights,
    mtp_weights,
    overhead_bytes,
    stage_weights,
)
from kvcalc.capacity.options import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.pipeline import check, stages
from kvcalc.model.precision import Precision, stored_as
from kvcalc.model.spec import Model
from kvcalc.timing.deployment import Deployment


class Fit(msgspec.Struct, frozen=True):
    """One answer.

    deployment: as the engine runs it, in the formats that it stores. stage: the pipeline stage that decides. length:
    max_model_len as asked, or the model's own. kv_budget: bytes that the plan works with. content: what that stage's cache
    holds of what the engine stores, without blocks, padding or reserve. sequences: of `length`, in the replica. longest: tokens
    of each of the sequences asked for; None where the cache stops growing before the budget ends. beside: bytes of weights
    that are not the model's own, by name.
    """

    deployment: Deployment
    options: FitOptions
    settings: EngineSettings
    budget: Budget
    utilization: float
    of: str
    stage: int
    plan: Plan
    content: Content
    kv_budget: int
    length: int
    sequences: int
    longest: int | None
    beside: dict[str, int]
    notes: tuple[str, ...]

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
    def shortage(self) -> int:
        """Bytes by which weights, activations and overhead exceed the share; 0 where they do not."""
        return max(0, -self.budget.cache)

    @property
    def given(self) -> bool:
        """Whether the cache's size was given, which leaves the weights unchecked."""
        return bool(self.options.kv_cache_memory_bytes or self.options.num_gpu_blocks_override)

    @property
    def over(self) -> int:
        """Bytes by which a cache of a given size exceeds what weights, activations and overhead leave."""
        return max(0, self.plan.pool(self.kv_budget) - self.budget.cache) if self.given else 0

    @property
    def fits(self) -> bool:
        """Whether max_num_seqs sequences of max_model_len tokens fit: beside the weights, or in a cache of a given size."""
        return (self.given or self.shortage == 0) and self.sequences >= self.options.max_num_seqs

    @property
    def starts(self) -> bool:
        """Whether the engine would start: some refuse where not even one sequence of `length` tokens fits."""
        return bool(self.sequences) or not self.engine.refuses_below_one_sequence

    @property
    def per_rank(self) -> int:
        """Of the sequences asked for, those on one of the dp ranks."""
        return self.ranks.sequences(self.options.max_num_seqs)


class _Request(NamedTuple):
    """What is asked, with every choice made; `held`: every layer that keeps a cache, drafts included."""

    run: Deployment
    options: FitOptions
    settings: EngineSettings
    utilization: float
    of: str
    length: int
    held: list[Held]
    beside: dict[str, int]


class _Stage(NamedTuple):
    """One pipeline stage's budget and plan, and what fits there: longest is of the sequences asked for."""

    number: int
    budget: Budget
    plan: Plan
    kv_budget: int
    sequences: int
    concurrency: float
    longest: int | None


def fit(deployment: Deployment, options: FitOptions | None = None) -> Fit:
    """What fits of a deployment. Raises UserError on a request that no engine could be given."""
    asked, ranks = options or FitOptions(), deployment.parallelism
    check(deployment.model, ranks)
    if ranks.dcp > 1 and not asked.rules.spreads_context:
        raise UserError(f"no rules for decode-context parallelism under {asked.rules.title}")
    precision, notes = asked.rules.stored(deployment.model, deployment.precision)
    run = msgspec.structs.replace(deployment, precision=precision, model=stored_as(deployment.model, precision))
    request = _request(run, asked, deployment.precision.kv_cache_dtype)
    found = [_stage(request, number) for number in range(ranks.pp)]
    decides = min(found, key=lambda s: (s.sequences, s.concurrency, s.kv_budget))
    return Fit(
        deployment=run,
        options=asked,
        settings=request.settings,
        budget=decides.budget,
        utilization=request.utilization,
        of=request.of,
        stage=decides.number,
        plan=decides.plan,
        content=content_of(request.held, ranks, decides.number),
        kv_budget=decides.kv_budget,
        length=request.length,
        sequences=decides.sequences * ranks.dp,
        longest=min((s.longest for s in found if s.longest is not None), default=None),
        beside=request.beside,
        notes=(*notes, *decides.plan.notes),
    )


def _request(run: Deployment, asked: FitOptions, cache_dtype: str) -> _Request:
    """The choices that were left to the engine or the model, and the layers; `cache_dtype` as asked, for a draft's cache."""
    settings, engine = _settings(asked, run), asked.rules
    used = asked.gpu_memory_utilization or engine.utilization(run.gpu, settings.max_num_batched_tokens, run.parallelism)
    held, beside, last = _layers(run, engine, settings, asked.mtp), {}, run.parallelism.pp - 1
    if asked.mtp:
        beside["mtp"] = mtp_weights(run.model, run.formats, run.parallelism)
    if asked.draft:
        precision, _ = engine.stored(asked.draft, Precision(kv_cache_dtype=cache_dtype))
        draft = msgspec.structs.replace(run, model=asked.draft, precision=precision)
        held += [h._replace(stage=last) for h in _layers(draft, engine, settings)]
        beside["draft"] = draft_weights(asked.draft, precision, run.parallelism)
    if not any(h.parts for h in held):
        raise UserError(f"{run.model.name} keeps no cache: its weights and activations alone take memory")
    length = asked.max_model_len or run.model.max_context or 4096
    return _Request(run, asked, settings, used, asked.utilization_of or engine.of, length, held, beside)


def _settings(asked: FitOptions, run: Deployment) -> EngineSettings:
    """What the engine runs with, no choice left open."""
    return msgspec.structs.replace(
        asked,
        max_num_batched_tokens=asked.max_num_batched_tokens or asked.rules.batched_tokens(run.gpu),
        max_in_flight_batches=asked.max_in_flight_batches or max(2, run.parallelism.pp),
        mamba_ssm_cache_dtype=asked.state_dtype,
    )


def _layers(run: Deployment, engine: Engine, settings: EngineSettings, mtp: bool = False) -> list[Held]:
    """Every layer of a model as the engine stores it, on its pipeline stage; with `mtp` those of the prediction on the last."""
    model, ranks, formats = run.model, run.parallelism, run.formats
    parts = {kind: engine.parts(model, kind, formats, ranks, settings) for kind in model.kinds}
    found = [Held(model, kind, stage.number, parts[kind]) for stage in stages(model, ranks.pp) for kind in stage.order]
    if mtp and model.mtp:
        found += [Held(model, model.mtp.kind, ranks.pp - 1, parts[model.mtp.kind])] * model.mtp.layers
    return found


def _stage(request: _Request, number: int) -> _Stage:
    """The budget of one stage, from its terms as given or computed, the engine's plan, and what fits."""
    run, asked, settings = request.run, request.options, request.settings
    engine, ranks = asked.rules, run.parallelism
    count = ranks.sequences(asked.max_num_seqs)
    weights, peak, overhead = asked.weight_bytes, asked.activation_bytes, asked.overhead_bytes
    if weights is None:
        beside = sum(request.beside.values()) if number == ranks.pp - 1 else 0
        weights = stage_weights(run.model, run.formats, ranks, number) + beside
    if peak is None:
        peak = activation_peak(run.model, run.precision, ranks, settings.max_num_batched_tokens, count, number)
    inside, taken = overhead_bytes(engine.graphs, ranks, request.of)
    terms = weights, peak, inside if overhead is None else overhead
    share = budget(run.gpu.memory_bytes, request.utilization, *terms, request.of, taken, engine.outside)
    plan = engine.plan(request.held, ranks, settings, number)
    cache = asked.kv_cache_memory_bytes or max(0, share.cache)
    if asked.num_gpu_blocks_override:
        cache = asked.num_gpu_blocks_override * (plan.bytes_per_block or 0)
    sequences = plan.most_sequences(cache, request.length, asked.shared_prefix)
    longest = plan.longest(cache, count, asked.shared_prefix)
    return _Stage(number, share, plan, cache, sequences, plan.concurrency(cache, request.length), longest)
