"""What fits on GPUs: a budget for the cache (`budget`), and what an engine makes of it (`engines`). Two steps, apart.

Every figure is that of one GPU: of the pipeline stage that holds the fewest sequences. `max_num_seqs` alone, asked and
answered, counts the whole replica's, as `--batch-size` does: dp divides it.
"""

import msgspec

from kvcalc.capacity.budget import (
    Budget,
    activation_peak,
    budget,
    default_batched_tokens,
    default_utilization,
    draft_weights,
    mtp_weights,
    overhead_bytes,
    stage_weights,
)
from kvcalc.capacity.engines import PLANNERS, EngineSettings, Held, Plan
from kvcalc.capacity.engines.rows import engine_precision
from kvcalc.capacity.options import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.model.spec import Model
from kvcalc.model.stages import check, stages


class Fit(msgspec.Struct, frozen=True):
    """One answer.

    stage: the pipeline stage that decides. length: max_model_len as asked, or the model's own. kv_budget: bytes that the
    plan works with. sequences: of `length`, in the replica. longest: tokens of each of the sequences asked for; None where
    the cache stops growing before the budget ends. held: every layer that keeps a cache, drafts included.
    """

    model: Model
    gpu: Gpu
    ranks: Parallelism
    options: FitOptions
    precision: Precision
    formats: Formats
    settings: EngineSettings
    budget: Budget
    utilization: float
    of: str
    stage: int
    plan: Plan
    kv_budget: int
    length: int
    sequences: int
    longest: int | None
    held: tuple[Held, ...]
    beside: dict[str, int]
    notes: tuple[str, ...]

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
    def per_rank(self) -> int:
        """Of the sequences asked for, those on one of the dp ranks."""
        return self.ranks.sequences(self.options.max_num_seqs)


class _Stage(msgspec.Struct, frozen=True):
    """One pipeline stage's budget and plan, and what fits there."""

    number: int
    budget: Budget
    plan: Plan
    kv_budget: int
    sequences: int
    concurrency: float


def fit(
    model: Model,
    gpu: Gpu,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    options: FitOptions | None = None,
) -> Fit:
    """What fits of `model` on GPUs of one kind. Raises UserError on a request that no engine could be given."""
    asked = options or FitOptions()
    check(model, parallelism)
    wanted = precision.kv_cache_dtype
    precision, note = engine_precision(asked.engine, model, precision)
    formats = formats_of(model, precision)
    settings = _settings(asked, gpu, parallelism)
    of = asked.utilization_of or ("free" if asked.engine in ("sglang", "llama.cpp") else "total")
    used = asked.gpu_memory_utilization or default_utilization(asked.engine, gpu, settings.max_num_batched_tokens, parallelism)
    length = asked.max_model_len or model.max_context or 4096
    held = _held(model, formats, parallelism, asked, wanted)
    if not any(h.layer.entries for h in held):
        raise UserError(f"{model.name} keeps no cache: its weights and activations alone take memory")
    beside = {"mtp": mtp_weights(model, formats, parallelism)} if asked.mtp else {}
    if asked.draft:
        beside["draft"] = draft_weights(asked.draft, Precision(), parallelism)
    found = []
    for number in range(parallelism.pp):
        extra = sum(beside.values()) if number == parallelism.pp - 1 else 0
        terms = _terms(model, formats, precision, parallelism, asked, settings, number, extra)
        inside, taken = overhead_bytes(asked.engine, parallelism, of)
        overhead = inside if asked.overhead_bytes is None else asked.overhead_bytes
        share = budget(gpu.memory_bytes, used, *terms, overhead, of, taken, asked.engine == "sglang")
        plan = PLANNERS[asked.engine](held, parallelism, settings, number)
        cache = _cache_budget(asked, share, plan)
        count = plan.most_sequences(cache, length, asked.shared_prefix)
        found.append(_Stage(number, share, plan, cache, count, plan.concurrency(cache, length)))
    decides = min(found, key=lambda s: (s.sequences, s.concurrency, s.kv_budget))
    lengths = [s.plan.longest(s.kv_budget, parallelism.sequences(asked.max_num_seqs), asked.shared_prefix) for s in found]
    return Fit(
        model=model,
        gpu=gpu,
        ranks=parallelism,
        options=asked,
        precision=precision,
        formats=formats,
        settings=settings,
        budget=decides.budget,
        utilization=used,
        of=of,
        stage=decides.number,
        plan=decides.plan,
        kv_budget=decides.kv_budget,
        length=length,
        sequences=decides.sequences * parallelism.dp,
        longest=min((s for s in lengths if s is not None), default=None),
        held=tuple(held),
        beside=beside,
        notes=tuple(filter(None, (note, *decides.plan.notes))),
    )


def _cache_budget(asked: FitOptions, share: Budget, plan: Plan) -> int:
    if asked.num_gpu_blocks_override:
        return asked.num_gpu_blocks_override * (plan.bytes_per_block or 0)
    return asked.kv_cache_memory_bytes or max(0, share.cache)


def _settings(asked: FitOptions, gpu: Gpu, ranks: Parallelism) -> EngineSettings:
    return EngineSettings(
        block_size=asked.block_size,
        max_num_batched_tokens=asked.max_num_batched_tokens or default_batched_tokens(asked.engine, gpu),
        max_in_flight_batches=asked.max_in_flight_batches or max(2, ranks.pp),
        mamba_cache_mode=asked.mamba_cache_mode,
        mamba_checkpoint_blocks=asked.mamba_checkpoint_blocks,
        mamba_ssm_cache_dtype=asked.mamba_ssm_cache_dtype,
        hybrid=asked.hybrid,
        flash_attention=asked.flash_attention,
    )


def _terms(
    model: Model, formats: Formats, precision: Precision, ranks: Parallelism, asked: FitOptions, settings: EngineSettings,
    stage: int, beside: int,
) -> tuple[int, int]:  # fmt: skip
    """(weights, activation peak) of one stage, as given or computed."""
    weights, peak = asked.weight_bytes, asked.activation_bytes
    if weights is None:
        weights = stage_weights(model, formats, ranks, stage) + beside
    if peak is None:
        sequences = ranks.sequences(asked.max_num_seqs)
        peak = activation_peak(model, precision, ranks, settings.max_num_batched_tokens, sequences, stage)
    return weights, peak


def _held(model: Model, formats: Formats, ranks: Parallelism, asked: FitOptions, cache_dtype: str) -> list[Held]:
    found = [Held(model, kind, formats, stage.number) for stage in stages(model, ranks.pp) for kind in stage.order]
    last = ranks.pp - 1
    if asked.mtp and model.mtp:
        found += [Held(model, model.mtp.kind, formats, last)] * model.mtp.layers
    if asked.draft:
        kept, _ = engine_precision(asked.engine, asked.draft, Precision(kv_cache_dtype=cache_dtype))
        own = formats_of(asked.draft, kept)
        found += [Held(asked.draft, kind, own, last) for kind in asked.draft.order]
    return found
