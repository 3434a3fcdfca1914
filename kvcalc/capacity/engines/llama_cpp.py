"""llama.cpp: cells for the whole context of all sequences, allocated at the start.

Rules of autumn 2026:

- Cache: cells in multiples of 256, a smaller cache for windows, f16 keys and values by default,
  states in f32 (`src/llama-kv-cache-iswa.cpp`, `llama-kv-cache.cpp`, `llama-context.cpp`,
  `llama-memory-recurrent.cpp`). The default is one cache per sequence
  (`llama_context_default_params`, `common_params` in `common/common.h`).
  `tools/server/server.cpp` uses one for all sequences only if it chooses the slots.
- Entries that differ from the model's own code: `is_mla` in `src/llama-kv-cache.cpp`,
  `src/models/minicpm3.cpp`, `plm.cpp`, `llama4.cpp`, `exaone4.cpp`, and `load_swa_pattern` of types
  whose conversion writes no window pattern.
- Weights in CPU memory: whole layers, experts and the token table (`src/llama-model.cpp`,
  load_tensors: `dev_input`, `dev_layer`, `dev_output`; `src/llama-arch.cpp`; `common/arg.cpp`).
"""

from collections.abc import Sequence

import msgspec

from kvcalc.capacity.engines.engine import (
    Defaults,
    Engine,
    EngineSettings,
    part_entries,
    stage_by_stage,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    CacheLayout,
    LayerCache,
    counted,
    pages,
)
from kvcalc.capacity.memory_budget import EngineStartup, MemoryBreakdown, stated
from kvcalc.errors import UserError
from kvcalc.layers.attention import Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Formats, Weight, WeightKind
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.storage.formats import FORMATS, RowFormat, cache_layout, canonical

CHUNK = 8192  # tokens: no key of a file says another
# Of how many layers the last has no window.
_PERIODS = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "afmoe": 4,
    "llama4_text": 4,
    "llama4": 4,
}
# also as GGUF files call them, whose own patterns are read
PATTERNED = (*_PERIODS, "gemma3", "gpt-oss")
_WINDOWED_DEPTH = {"exaone4": 64}  # types that have windows at this depth alone


def entries(model: Model, part: Sublayer) -> Sequence[CacheEntry]:
    """Return the cache entries of one part.

    Latents with one kv_up tensor are stored as keys and values of every head. Chunks have CHUNK
    tokens. Raises UserError if llama.cpp has windows in other layers than the model.
    """
    _check_order(model)
    if isinstance(part, Latent) and _by_head(model, part):
        if model.model_type == "minicpm3" and part.v_head_dim != (
            usual := model.hidden_size // part.num_attention_heads
        ):
            raise UserError(
                f"llama.cpp loads no minicpm3 with values of {part.v_head_dim}: its files say "
                "no width, which is then "
                f"hidden_size / heads, {usual}",
                hint="Engine none counts its content",
            )
        return part.expanded(part.v_head_dim)
    result = part_entries(model, part)
    return [
        msgspec.structs.replace(e, limit=CHUNK) if e.span is Span.CHUNK else e for e in result
    ]


def _by_head(model: Model, part: Sublayer) -> bool:
    return isinstance(part, Latent) and (
        part.heads_cached or model.model_type in ("minicpm3", "plm")
    )


def _check_order(model: Model) -> None:
    """Raise UserError if the model's windows are in other layers than llama.cpp's for its type."""
    period = _PERIODS.get(model.model_type, 0)
    limited = {
        kind: any(e.limit for e in layer.entries if e.grows)
        for kind, layer in model.kinds.items()
    }
    expected = (
        [number % period < period - 1 for number in range(model.layers)] if period else []
    )
    if period and any(limited.values()) and [limited[kind] for kind in model.order] != expected:
        raise UserError(
            f"llama.cpp takes every {period}th layer of {model.model_type} for one without a "
            f"window, not so {model.name}",
            hint="Engine none counts its content",
        )


PAD = 256  # cells: every cache is a multiple


def compute_buffer(start: EngineStartup) -> int:
    """Return the bytes of the graph that is reserved for T = ubatch tokens, all with logits, in
    fp32.

    It is the larger of two: logits and their input, 4 · T · (V + D); or the tensors of a layer's
    FFN with attention's mask, 2 · T bytes per cell. Not counted: a second mask for windows or with
    the logits, recurrent layers, and attention without flash attention. Source: llama-context.cpp,
    graph_reserve(n_tokens, n_seqs, n_tokens). Llama-3.1-8B's log has 258.50 MiB for 512 tokens.
    """
    model = start.model
    logits = (
        4 * start.tokens * (model.vocab_size + model.hidden_size) if start.layers.last else 0
    )
    attends = any(entry.grows for layer in model.kinds.values() for entry in layer.entries)
    mask = 2 * start.tokens * -(-start.context // PAD) * PAD if attends else 0
    inner = max(
        (
            _inner(part, model.hidden_size)
            for layer in model.kinds.values()
            for part in layer.parts
        ),
        default=0,
    )
    return max(logits, 4 * start.tokens * (inner + 4 * model.hidden_size) + mask)


def _inner(part: Sublayer, width: int) -> int:
    """Elements of a token in an FFN, beside four rows of the residual's width: gate, up and their
    product, of every expert that it uses; and the experts' outputs, where the place of gate and up
    does not hold them."""
    if isinstance(part, Dense):
        return part.intermediate_size * (2 + part.gated)
    if not isinstance(part, Moe):
        return 0
    outputs, used = part.moe_latent_size or width, part.num_experts_per_tok
    inner = part.moe_intermediate_size
    return used * (
        inner * (2 + part.gated) + (outputs if outputs > inner * (1 + part.gated) else 0)
    )


def host_layers(model: Model, gpu_layers: int) -> int:
    """Layers whose weights and cache the host keeps: the first L + 1 − ngl, since the head counts
    as the last. −1: none.

    Raises UserError where no layer would be left, or prediction layers would have to be counted.
    """
    if gpu_layers < 0 or gpu_layers > model.layers:
        return 0
    if gpu_layers < 2:
        raise UserError(
            f"n-gpu-layers {gpu_layers} leaves no layer of {model.name} on the GPU",
            hint="The head is the first",
        )
    if model.mtp:
        raise UserError(
            f"{model.name} has prediction layers: which layers n-gpu-layers {gpu_layers} takes "
            "is not modelled"
        )
    return model.layers + 1 - gpu_layers


def host_weights(start: EngineStartup) -> int:
    """Return the bytes of one GPU's weights that are in CPU memory; 0 on a SoC.

    These are the input tables, except a tied head, which the GPU has too; the layers of
    `host_layers`; and the routed experts of the first `cpu_experts` layers.
    """
    if start.gpu.per == "SoC":
        return 0
    model, first = start.model, host_layers(start.model, start.gpu_layers)
    weights: dict[str, Weight] = {}
    tied = all(weight.name != "lm_head" for weight in model.outer_weights)
    for weight in model.outer_weights if start.stage == 0 else ():
        is_table = weight.kind is WeightKind.TABLE and not (tied and weight.name == "embedding")
        if weight.name not in model.lent and (is_table or weight.name == "embedding_norm"):
            weights[weight.name] = weight
    named = [*weights.items()]
    for number, kind in enumerate(model.order[: max(first, start.cpu_experts)]):
        for weight in model.layer_weights(kind):
            if number < first or weight.expert:
                named.append((f"{kind}.{weight.name}", weight))
    return sum(start.formats.weight_bytes(name, w.local(start.ranks)) for name, w in named)


def check_placement(start: EngineStartup) -> None:
    """Raises UserError where layers or experts in the host's memory are not modelled."""
    model = start.model
    if start.gpu_layers < 0 and not start.cpu_experts:
        return
    if start.ranks.gpus > start.ranks.dp:
        raise UserError(
            "llama.cpp's layers or experts in the host's memory beside several GPUs are not "
            "modelled"
        )
    if start.gpu.per == "SoC":
        raise UserError(
            f"{start.gpu.name} has one memory: layers or experts on the CPU leave no more of it"
        )
    if any(model.shared_weights(kind) for kind in model.kinds):
        raise UserError(
            f"{model.name} shares blocks of weights: on which side they lie is not modelled"
        )
    if start.cpu_experts and not any(
        w.expert for kind in model.kinds for w in model.layer_weights(kind)
    ):
        raise UserError(f"{model.name} has no experts to keep in the host's memory")


def terms(start: EngineStartup, end: str) -> MemoryBreakdown:
    """The stated terms, without what the host keeps. Raises UserError as `check_placement`.

    GPUs that share the layers have no collectives: each copies its output to the next
    (ggml-cuda.cu: ggml_backend_cuda_cpy_tensor_async).
    """
    check_placement(start)
    result, host = stated(start, end, graphs=False), host_weights(start)
    dropped = "collectives" if start.ranks.tp == 1 else ""
    return result._replace(
        language=result.language - host,
        host=host,
        overhead={name: size for name, size in result.overhead.items() if name != dropped},
        startup={name: size for name, size in result.startup.items() if name != dropped},
    )


def grown(start: EngineStartup, found: MemoryBreakdown) -> MemoryBreakdown:
    """Terms with at least the compute buffer of a context."""
    return found._replace(activation=max(found.activation, compute_buffer(start)))


UBATCH = 512  # --ubatch-size
# common/arg.cpp, kv_cache_types
TYPES = ("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


class LlamaCpp(CacheLayout):
    """`full` bytes per cell of layers without a window, `window` bytes per cell of those with,
    `state` bytes a sequence."""

    block_size = PAD
    host: "LlamaCpp | None" = None

    def __init__(
        self, full: int, window: int, limit: int, state: int, settings: EngineSettings
    ) -> None:
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.unified, self.ubatch = settings.kv_unified, settings.max_num_batched_tokens
        self.notes = (
            "llama.cpp: "
            f"{'one cache for all sequences' if self.unified else 'a cache for each sequence'}",
        )

    def cells(self, sequences: int, length: int, shared: int = 0) -> int:
        """Cells of layers without a window: n · pad(L); unified pad(n · L), with a common prefix
        once."""
        if not self.unified:
            return sequences * _padded(length)
        common = min(shared, length)
        return _padded(common + sequences * (length - common))

    def window_cells(self, sequences: int, length: int) -> int:
        """n · min(pad(L), pad(W + ubatch)); unified min(pad(n · L), pad(W · n + ubatch))."""
        if not self.unified:
            return sequences * min(_padded(length), _padded(self.limit + self.ubatch))
        return min(_padded(sequences * length), _padded(self.limit * sequences + self.ubatch))

    def cache_bytes(self, sequences: int, length: int, shared: int = 0) -> int:
        """Bytes of the cells, as llama.cpp logs them: full and window caches together, recurrent
        states apart."""
        result = self.cells(sequences, length, shared) * self.full
        return (
            result + self.window_cells(sequences, length) * self.window
            if self.window
            else result
        )

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        return self.cache_bytes(sequences, length, shared) + sequences * self.state

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.cache_bytes(sequences, length)

    def parts(self, sequences: int, length: int) -> dict[str, int]:
        """The window caches, which kv_cache_allocated_bytes includes, and the recurrent states,
        which it does not.

        And what of both kinds is in the host's memory, which neither includes.
        """
        apart = {"host_cache_bytes": self.host.needed(sequences, length)} if self.host else {}
        window = self.window_cells(sequences, length) * self.window if self.window else 0
        return {
            "window_cache_bytes": window,
            "state_bytes": sequences * self.state,
            **apart,
        }

    def terms(self) -> list[BlockDemand]:
        window = _padded(self.limit + self.ubatch)
        demands = (
            BlockDemand(PAD * self.full, PAD),
            BlockDemand(PAD * self.window, PAD, window, 0, "window and micro-batch"),
            BlockDemand(self.state, 1, 0, 1, "state"),
        )
        return [demand for demand in demands if demand.unit]

    def describe(self, length: int) -> list[str]:
        cells = self.cells(1, length)
        lines = [
            f"{cells:,} cells × {self.full:,} B in layers without a window = "
            f"{cells * self.full:,} B"
        ]
        if self.window:
            resident = self.window_cells(1, length)
            lines.append(
                f"{resident:,} cells (least of all and {self.limit:,} + {self.ubatch:,}, padded "
                f"to {PAD}) × {self.window:,} B "
                f"in layers with one = {resident * self.window:,} B"
            )
        if self.state:
            lines.append(
                f"recurrent states, in a buffer of their own: {self.state:,} B a sequence"
            )
        return lines


def _padded(cells: int) -> int:
    return -(-cells // PAD) * PAD


def _plan(
    held: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    """Return the caches on one stage, with a separate layout for layers in CPU memory. Raises
    UserError if no layer is left on the GPU."""
    first = host_layers(held[0].model, settings.n_gpu_layers)
    interleaved = set() if settings.swa_full else _interleaved(held)
    plan = _caches(held[first:], interleaved, settings, stage)
    if not (plan.full or plan.window or plan.state):
        raise UserError(
            f"no layer of {held[0].model.name} that keeps a cache is on the GPU",
            hint="Raise n-gpu-layers",
        )
    if first:
        plan.host = _caches(held[:first], interleaved, settings, stage)
        plan.notes += (
            f"llama.cpp: the first {first} layers and their caches are in the host's memory",
        )
    return plan


def _caches(
    held: Sequence[LayerCache],
    interleaved: set[int],
    settings: EngineSettings,
    stage: int,
) -> LlamaCpp:
    """The caches of some layers. Raises UserError for layers that llama.cpp has no cache for."""
    full = window = limit = state = 0
    for h, count in counted(held, stage):
        for kept in pages(LLAMA_CPP.title, h):
            state += count * kept.state_bytes
            full += count * kept.index_bytes
            if kept.limit and id(h.model) in interleaved:
                window, limit = window + count * kept.row_bytes, max(limit, kept.limit)
            else:
                full += count * kept.row_bytes
    return LlamaCpp(full, window, limit, state, settings)


def _interleaved(held: Sequence[LayerCache]) -> set[int]:
    """The models, by id, whose windows llama.cpp reads: not those with one in every layer
    (`src/models/llama.cpp`, of mistral; `starcoder2.cpp`, `phi3.cpp`), unless their type has a
    pattern of windows, nor types with windows at another depth only."""
    return {
        id(layer.model)
        for layer in {id(layer.parts): layer for layer in held}.values()
        if layer.model.layers == _WINDOWED_DEPTH.get(layer.model.model_type, layer.model.layers)
        for part in pages(LLAMA_CPP.title, layer)
        if (part.rows and not part.limit) or layer.model.model_type in PATTERNED
    }


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """Return fp16 unless a dtype is requested: llama.cpp's own default, whatever the model's dtype.

    The remarks name differences from the model's own code.
    """
    if precision.kv_cache_dtype == "auto":
        precision = msgspec.structs.replace(precision, kv_cache_dtype="fp16")
    layers, remarks = model.kinds.values(), []
    if any(_by_head(model, part) for layer in layers for part in layer.parts):
        remarks.append(
            "llama.cpp keeps keys and values of every head of this model, not its latents"
        )
    entries = [entry for layer in layers for entry in layer.entries]
    if any(entry.span is Span.CHUNK and entry.limit != CHUNK for entry in entries):
        remarks.append(f"llama.cpp's chunks are of {CHUNK:,} tokens, whatever a file says")
    return precision, tuple(remarks)


def _row_format(
    entry: CacheEntry,
    beside: Sequence[CacheEntry],
    formats: Formats,
    settings: EngineSettings,
) -> RowFormat:
    """States of both kinds in fp32; keys, latents and index keys in K's type, values in V's.

    Raises UserError where llama.cpp makes no context (`llama_init_from_model`,
    `src/llama-context.cpp`): blocks that do not divide a head, or latents with two types.
    """
    if entry.span is Span.STATE:
        return FORMATS["fp32"]
    types = [
        canonical(t) or formats.kv_cache_dtype
        for t in (settings.cache_type_k, settings.cache_type_v)
    ]
    if types[0] != types[1] and any(e.role == "latent" for e in beside):
        raise UserError(
            f"llama.cpp stores latents in one type, not keys in {types[0]} and values in {types[1]}"
        )
    stored = cache_layout(types[entry.role == "v"]).get(entry.role) or formats.cache_format(
        entry
    )
    if stored.whole_groups and entry.width % stored.group:
        raise UserError(
            f"llama.cpp refuses a cache of {stored.name}: its blocks of {stored.group} do not "
            f"divide a head of {entry.width}",
            hint="Use fp16 or bf16",
        )
    return stored


LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, tokens, *asked: Defaults(tokens or UBATCH, 1, 1.0),
    memory=terms,
    add_context_buffers=grown,
    memory_key=lambda start: start.gpu.per == "SoC",
    dtypes=TYPES,
    takes=(
        "cache_type_k",
        "cache_type_v",
        "kv_unified",
        "swa_full",
        "n_gpu_layers",
        "n_cpu_moe",
        "cpu_moe",
    ),
    precision=_precision,
    entries=entries,
    row_format=_row_format,
    of="free",
    smaller_weights=("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m"),
)
