"""What fits on GPUs: memory to a budget for the cache, and a budget to sequences and tokens. Two functions, apart.

`budget` knows no engine's pages, `engines` no GPU's memory. Every figure is that of one GPU, the one of the replica that
holds the fewest sequences; `max_num_seqs` alone counts the whole replica's, as `--batch-size` does.
"""

from math import ceil, floor
from typing import Any, NamedTuple

import msgspec

from kvcalc.batch import ONE_GPU, PUBLISHED, Batch, Parallelism, Precision, Sequences
from kvcalc.engines import PLANNERS, Held, Plan, Settings
from kvcalc.engines.llama_cpp import UBATCH
from kvcalc.engines.rows import engine_precision
from kvcalc.engines.sglang import chunk_tokens, static_fraction
from kvcalc.errors import UserError, nearest
from kvcalc.forward import forward
from kvcalc.gpu import Gpu
from kvcalc.memory import size_of, stage_weight_bytes, weight_bytes
from kvcalc.model import NORM_VECTORS, Model
from kvcalc.parallel import check, local, stages
from kvcalc.precision import Formats
from kvcalc.units import MOST_TOKENS, format_bytes
from kvcalc.weights import matrix, vector

GIB = 1 << 30
# Measured by others, not derived; `--overhead-bytes` overrides their sum. Sources in docs/engines.md.
CONTEXT_BYTES = 7 * GIB // 10  # CUDA context: an H100 of 79.18 GiB has 78.48 free before weights (SGLang's start-up log)
LIBRARY_BYTES = 13 * GIB // 100  # what libraries take outside torch (vLLM's log: "0.13 GiB for non-torch memory")
GRAPH_BYTES = 36 * GIB // 100  # CUDA graphs (vLLM's log: "Estimated CUDA graph memory: 0.36 GiB total")
COLLECTIVE_BYTES = 2 * GIB  # buffers of the collectives of several GPUs (SGLang's log at tp 8: 2.01 GB)
OF = ("total", "free")
MODES = ("none", "align")


class FitOptions(msgspec.Struct, frozen=True):
    """What `fit` is asked. 0, '' and None leave a choice to the engine or the model.

    max_model_len: tokens of each of max_num_seqs sequences. utilization_of: share of the GPU's total memory, or of what is
    free once a CUDA context and the collectives stand. kv_cache_memory_bytes replaces the budget, num_gpu_blocks_override
    vLLM's number of blocks; weight_bytes, activation_bytes and overhead_bytes replace the three terms. shared_prefix: first
    tokens that all sequences have in common. mtp: with the multi-token-prediction layers. draft: a model beside this one.
    """

    engine: str = "none"
    max_model_len: int = 0
    max_num_seqs: int = 1
    gpu_memory_utilization: float = 0.0
    utilization_of: str = ""
    max_num_batched_tokens: int = 0
    max_in_flight_batches: int = 0
    kv_cache_memory_bytes: int = 0
    num_gpu_blocks_override: int = 0
    block_size: int = 0
    mamba_cache_mode: str = "none"
    mamba_ssm_cache_dtype: str = ""
    hybrid: bool = True
    flash_attention: bool = True
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    overhead_bytes: int | None = None
    shared_prefix: int = 0
    mtp: bool = False
    draft: Model | None = None
    kv_offloading_bytes: int = 0

    def __post_init__(self) -> None:
        if self.engine not in PLANNERS:
            raise UserError(f"unknown engine {self.engine!r}", hint=nearest(self.engine, PLANNERS))
        for name, known in (("mamba_cache_mode", MODES), ("utilization_of", (*OF, ""))):
            if getattr(self, name) not in known:
                what = name.replace("_", "-")
                raise UserError(f"unknown --{what} {getattr(self, name)!r}", hint=f"Known: {', '.join(filter(None, known))}")
        if not (self.gpu_memory_utilization == 0 or 0 < self.gpu_memory_utilization <= 1):
            raise UserError(f"GPU memory utilisation {self.gpu_memory_utilization!r} is not above 0 and at most 1")
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "block_size", "shared_prefix"):
            _whole(name, getattr(self, name), 0)
        _whole("max_num_seqs", self.max_num_seqs, 1)
        for name in ("max_in_flight_batches", "kv_cache_memory_bytes", "kv_offloading_bytes"):
            _whole(name, getattr(self, name), 0, 1 << 60)
        for name in ("weight_bytes", "activation_bytes", "overhead_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, 1 << 60)
        if self.num_gpu_blocks_override and self.engine != "vllm":
            raise UserError("--num-gpu-blocks-override is vLLM's", hint="Add --engine vllm")


class Budget(NamedTuple):
    """Memory of one GPU, term by term: share − weights − activation − overhead = cache, which may be negative.

    share: what the process may use. outside: activation and overhead lie outside the share (SGLang).
    """

    memory: int
    share: int
    weights: int
    activation: int
    overhead: int
    outside: bool = False

    @property
    def cache(self) -> int:
        """Bytes left for the cache; negative where there are too few."""
        return self.share - self.weights - (0 if self.outside else self.activation + self.overhead)


class Fit(msgspec.Struct, frozen=True):
    """One answer: the budget, the engine's plan on the deciding stage, and what fits in it."""

    model: Model
    gpu: Gpu
    ranks: Parallelism
    options: FitOptions
    formats: Formats
    budget: Budget
    plan: Plan
    length: int
    kv_budget: int
    sequences: int
    longest: int | None
    utilization: float
    of: str
    settings: Settings
    mtp_bytes: int
    draft_bytes: int
    notes: tuple[str, ...]

    @property
    def weights_fit(self) -> bool:
        """Whether the weights are within the share."""
        return self.budget.weights <= self.budget.share

    @property
    def shortage(self) -> int:
        """Bytes that weights, activations and overhead are over the share; 0 where they are not."""
        return max(0, -self.budget.cache)

    @property
    def fits(self) -> bool:
        """Whether max_num_seqs sequences of max_model_len tokens fit."""
        return self.sequences >= self.options.max_num_seqs


def budget(
    memory: int,
    utilization: float,
    weights: int,
    activation: int,
    overhead: int,
    of: str = "total",
    taken: int = 0,
    outside: bool = False,
) -> Budget:
    """The budget of one GPU of `memory` bytes.

    Of total: share = ⌈memory · utilization⌉ (vLLM). Of free: share = ⌊(memory − taken) · utilization⌋, with `taken` the
    context and collectives that stand before the weights.
    """
    share = ceil(memory * utilization) if of == "total" else floor(max(0, memory - taken) * utilization)
    return Budget(memory, share, weights, activation, overhead, outside)


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
    precision, note = engine_precision(asked.engine, model, precision, precision.kv_cache_dtype)
    formats = Formats(model, precision)
    settings = _settings(asked, gpu, parallelism)
    length = asked.max_model_len or model.max_context or 4096
    held = _held(model, formats, parallelism, asked)
    per_rank = parallelism.sequences(asked.max_num_seqs)
    mtp, draft = _mtp_bytes(model, formats, parallelism) if asked.mtp else 0, _draft_bytes(asked, precision, parallelism)
    candidates = []
    for stage in range(parallelism.pp):
        last = stage == parallelism.pp - 1
        found = _budget(model, formats, gpu, precision, parallelism, asked, settings, stage, (mtp + draft) * last)
        plan = PLANNERS[asked.engine](held, parallelism, settings, stage)
        cache = _cache_budget(asked, found, plan)
        count = plan.most_sequences(cache, length, asked.shared_prefix)
        candidates.append((count, plan.concurrency(cache, length), stage, found, plan, cache))
    count, _, _, found, plan, cache = min(candidates, key=lambda c: c[:3])
    lengths = [c[4].longest(c[5], per_rank, asked.shared_prefix) for c in candidates]
    known = [s for s in lengths if s is not None]
    utilization, of = _utilization(asked, gpu, settings, parallelism)
    notes = tuple(filter(None, (note, *plan.notes)))
    return Fit(
        model, gpu, parallelism, asked, formats, found, plan, length, cache, count * parallelism.dp,
        min(known) if known else None, utilization, of, settings, mtp, draft, notes,
    )  # fmt: skip


def _cache_budget(asked: FitOptions, found: Budget, plan: Plan) -> int:
    if asked.num_gpu_blocks_override:
        return asked.num_gpu_blocks_override * (plan.bytes_per_block or 0)
    return asked.kv_cache_memory_bytes or max(0, found.cache)


def _settings(asked: FitOptions, gpu: Gpu, ranks: Parallelism) -> Settings:
    tokens = asked.max_num_batched_tokens or default_batched_tokens(asked.engine, gpu)
    batches = asked.max_in_flight_batches or max(2, ranks.pp)
    return Settings(
        asked.block_size, tokens, batches, asked.mamba_cache_mode, asked.mamba_ssm_cache_dtype, asked.hybrid, asked.flash_attention
    )


def default_batched_tokens(engine: str, gpu: Gpu) -> int:
    """Tokens of one pass by default: vLLM's by GPU memory (2048 below 70 GiB and on an A100, 16384 from 160 GiB, else 8192),

    SGLang's prefill chunk, llama.cpp's micro-batch of 512.
    """
    if engine == "llama.cpp":
        return UBATCH
    if engine == "sglang":
        return chunk_tokens(gpu.memory_bytes)
    if gpu.memory_bytes < 70 * GIB or gpu.name.startswith("a100"):
        return 2048
    return 16384 if gpu.memory_bytes >= 160 * GIB else 8192


def _utilization(asked: FitOptions, gpu: Gpu, settings: Settings, ranks: Parallelism) -> tuple[float, str]:
    of = asked.utilization_of or ("free" if asked.engine in ("sglang", "llama.cpp") else "total")
    if asked.gpu_memory_utilization:
        return asked.gpu_memory_utilization, of
    if asked.engine == "sglang":
        return static_fraction(gpu.memory_bytes, settings.max_num_batched_tokens, ranks), of
    return (1.0 if asked.engine == "llama.cpp" else 0.92), of


def _budget(
    model: Model, formats: Formats, gpu: Gpu, precision: Precision, ranks: Parallelism, asked: FitOptions,
    settings: Settings, stage: int, beside: int,
) -> Budget:  # fmt: skip
    kinds = stages(model, ranks.pp)[stage] if ranks.pp > 1 else model.order
    counts = {kind: kinds.count(kind) for kind in model.kinds}
    weights = asked.weight_bytes
    if weights is None:
        weights = stage_weight_bytes(model, counts, formats, ranks, stage) + beside
    activation = asked.activation_bytes
    if activation is None:
        activation = activation_peak(model, precision, ranks, settings.max_num_batched_tokens, asked.max_num_seqs, stage)
    collectives = COLLECTIVE_BYTES if ranks.gpus > 1 else 0
    utilization, of = _utilization(asked, gpu, settings, ranks)
    taken = CONTEXT_BYTES + collectives if of == "free" else 0
    overhead = asked.overhead_bytes
    if overhead is None:
        graphs = 0 if asked.engine == "llama.cpp" else GRAPH_BYTES
        overhead = LIBRARY_BYTES + graphs + (0 if of == "free" else collectives)
    return budget(gpu.memory_bytes, utilization, weights, activation, overhead, of, taken, asked.engine == "sglang")


def activation_peak(
    model: Model, precision: Precision, ranks: Parallelism, tokens: int, sequences: int = 1, stage: int = 0
) -> int:
    """The most activation bytes that stand at once in a prefill of `tokens` tokens on one rank.

    The largest operator's inputs and outputs, and the residual stream that waits beside it. An engine's allocator, its
    compiler and its kernels' workspaces take more: a bound from below, which a measured figure should replace.
    """
    count = max(1, min(sequences, tokens))
    share, left = divmod(tokens, count)
    groups = [Sequences((count - left) * ranks.dp, share, 0)] if share and count > left else []
    groups += [Sequences(left * ranks.dp, share + 1, 0)] if left else []
    operators = forward(model, Batch(tuple(groups)), precision, ranks, stage=stage if ranks.pp > 1 else None)
    residual = tokens * model.hidden_size * Formats(model, precision).element_bytes
    return residual + max((int(o.cost.activation_bytes) for o in operators), default=0)


def _held(model: Model, formats: Formats, ranks: Parallelism, asked: FitOptions) -> list[Held]:
    split = stages(model, ranks.pp) if ranks.pp > 1 else [model.order]
    found = [Held(model, kind, formats, stage) for stage, kinds in enumerate(split) for kind in kinds]
    last = ranks.pp - 1
    if asked.mtp:
        if not model.mtp:
            raise UserError(f"{model.name} has no multi-token-prediction layers")
        found += [Held(model, model.mtp.kind, formats, last)] * model.mtp.layers
    if asked.draft:
        own = Formats(asked.draft, Precision("auto", formats.kv_cache_dtype if asked.draft.name == model.name else "auto"))
        found += [Held(asked.draft, kind, own, last) for kind in asked.draft.order]
    return found


def _mtp_bytes(model: Model, formats: Formats, ranks: Parallelism) -> int:
    """Weights of the prediction layers on one rank: each a layer, its projection [2·D, D], replicated, and three norms."""
    if not model.mtp:
        return 0
    kind, width = model.mtp.kind, model.hidden_size
    layer = sum(formats.weight_bytes(f"{kind}.{w.name}", local(w, ranks)) for w in model.layer_weights(kind))
    join = formats.weight_bytes("mtp.projection", matrix("projection", 2 * width, width))
    norms = formats.weight_bytes("mtp.norms", vector("norms", 3 * NORM_VECTORS[model.norm] * width))
    return model.mtp.layers * (layer + join + norms)


def _draft_bytes(asked: FitOptions, precision: Precision, ranks: Parallelism) -> int:
    if not asked.draft:
        return 0
    spread = ranks.tp * ranks.dp if ranks.ep > 1 else 1
    return weight_bytes(asked.draft, Precision("auto"), Parallelism(ranks.tp, 1, ranks.dp, spread))


def transfer_bytes(found: Fit, length: int) -> int:
    """What crosses the link for one sequence when prefill and decode stand on separate GPUs: the content, per rank."""
    return PLANNERS["none"](_all(found), found.ranks, found.settings, found.ranks.pp - 1 if found.ranks.pp == 1 else 0).needed(
        1, length
    )


def _all(found: Fit) -> list[Held]:
    return _held(found.model, found.formats, found.ranks, found.options)


def _whole(name: str, value: Any, least: int, most: int = MOST_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{name.replace('_', '-')} {value!r} is not a whole number from {least} to {most:,}")


_ = (size_of, format_bytes)
