"""llama.cpp allocates cells for the full context of all sequences when it starts.

Rules of autumn 2026:

- Cache: cells in multiples of 256, a smaller cache for windows, f16 keys and values by default,
  states in f32 (`src/llama-kv-cache-iswa.cpp`, `llama-kv-cache.cpp`, `llama-context.cpp`,
  `llama-memory-recurrent.cpp`). The default is one cache per sequence
  (`llama_context_default_params`, `common_params` in `common/common.h`).
  `tools/server/server.cpp` uses one for all sequences only if it chooses the slots.
- Entries that differ from the model's own code: `is_mla` in `src/llama-kv-cache.cpp`,
  `src/models/minicpm3.cpp`, `plm.cpp`, `llama4.cpp`, `exaone4.cpp`, and `load_swa_pattern` of types
  whose conversion writes no window pattern.
- Weights in CPU memory: full layers, experts and the token table (`src/llama-model.cpp`,
  load_tensors: `dev_input`, `dev_layer`, `dev_output`; `src/llama-arch.cpp`; `common/arg.cpp`).
"""

from typing import Any

from msgspec.structs import replace

from kvcalc.arithmetic import maximum
from kvcalc.capacity.engines.engine import (
    Defaults,
    Engine,
    EngineSettings,
    PrecisionAndRemarks,
    part_entries,
    stage_by_stage,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    CacheLayout,
    LayerCaches,
    count_layers,
    distinct_layers,
    pages,
)
from kvcalc.capacity.memory_budget import EngineStartup, MemoryBreakdown, stated_memory
from kvcalc.errors import UserError
from kvcalc.layers.attention import Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntries, CacheEntry, Span
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Formats, WeightKind
from kvcalc.model.model import Model
from kvcalc.model.pipeline import stages
from kvcalc.model.precision import Precision
from kvcalc.records.fit import LoggedCacheRecord
from kvcalc.storage.formats import FORMATS, RowFormat, cache_layout, canonical

PADDING_CELLS = 256  # cells: every cache is a multiple
CHUNK_TOKENS = 8192  # tokens: files have no key for another number
UBATCH_TOKENS = 512  # --ubatch-size
# common/arg.cpp, kv_cache_types
CACHE_TYPES = "fp32 bf16 fp16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl"
OPTIONS = """
    cache_type_k cache_type_v kv_unified swa_full n_gpu_layers n_cpu_moe cpu_moe flash_attn
    idle_slots
"""
# types with a pattern of windows, also by the names in GGUF files
PATTERNED_TYPES = """
    gemma2 gemma3_text gemma3 gpt_oss gpt-oss cohere2 afmoe llama4_text llama4
"""
WINDOWED_DEPTH = {"exaone4": 64}  # types that have windows only at this depth


def _entries(model: Model, part: Sublayer) -> CacheEntries:
    """Return the cache entries of one part.

    Latents with one kv_up tensor are stored as keys and values of every head. Chunks have CHUNK
    tokens.

    Raises:
        UserError: llama.cpp has values of another width.
    """
    if not _is_stored_by_head(model, part):
        return tuple(
            replace(e, limit=CHUNK_TOKENS) if e.span is Span.CHUNK else e
            for e in part_entries(model, part)
        )
    assert isinstance(part, Latent)
    usual = model.hidden_size // part.num_attention_heads
    if model.model_type == "minicpm3" and part.v_head_dim != usual:
        raise UserError(
            f"llama.cpp loads no minicpm3 with values of {part.v_head_dim}: its files do not "
            f"state a width, which is then hidden_size / heads, {usual}",
            "Use --engine none to count its content",
        )
    return part.expanded(part.v_head_dim)


def _is_stored_by_head(model: Model, part: Sublayer) -> bool:
    return isinstance(part, Latent) and (
        part.heads_cached or model.model_type in ("minicpm3", "plm")
    )


def _compute_buffer(start: EngineStartup) -> Any:
    """Return the bytes of the fp32 graph that llama.cpp reserves for T = ubatch tokens, all with
    logits.

    The graph has the size of the larger of two sets: logits and their input, 4 · T · (V + D); or
    the tensors of a layer's FFN with the attention mask, 2 · T bytes per cell. Without flash
    attention, the mask has 4 · T bytes per cell, and the attention scores have 4 · T for each
    query head and cell. Not counted: a second mask for windows or with the logits, and recurrent
    layers. Sources: llama-context.cpp, graph_reserve(n_tokens, n_seqs, n_tokens); llama-graph.cpp,
    build_attn_mha. Llama-3.1-8B's log has 258.50 MiB for 512 tokens; without flash attention, it
    has 560 MiB at 8,192 cells and 2,144 MiB at 32,768.
    """
    model, tokens = start.model, start.tokens
    width = model.hidden_size
    logits = 4 * tokens * (model.vocab_size + width) if start.layers.last else 0
    cells = _pad(start.context) if any(entry.grows for entry in model.entries) else 0
    inner = max(_ffn_elements(part, width) for part in model.parts)
    mask = 2 * tokens * cells
    if start.options.flash_attn == "off":
        heads = max(getattr(part, "num_attention_heads", 0) for part in model.parts)
        inner = maximum(inner, heads * cells)
        mask *= 2
    return maximum(logits, 4 * tokens * (inner + 4 * width) + mask)


def _ffn_elements(part: Sublayer, width: int) -> int:
    """Return the elements per token of an FFN, in addition to four rows of the residual's width.

    Every active expert has gate, up and their product. The experts' outputs reuse the memory of
    gate and up. They count in addition if they are larger than both together.
    """
    if isinstance(part, Dense):
        return part.intermediate_size * (2 + part.gated)
    if not isinstance(part, Moe):
        return 0
    outputs, inner = part.moe_latent_size or width, part.moe_intermediate_size
    extra = outputs if outputs > inner * (1 + part.gated) else 0
    return part.num_experts_per_tok * (inner * (2 + part.gated) + extra)


def _count_host_layers(model: Model, gpu_layers: int) -> int:
    """Return the first layers whose weights and cache are in host memory: L + 1 − ngl.

    The LM head counts as the last layer. With `gpu_layers` −1 the result is 0.

    Raises:
        UserError: No layer would be left on the GPU, or the model has prediction layers.
    """
    if gpu_layers < 0 or gpu_layers > model.layers:
        return 0
    if gpu_layers < 2:
        raise UserError(
            f"n-gpu-layers {gpu_layers} leaves no layer of {model.name} on the GPU",
            "The head is the first",
        )
    if model.mtp:
        raise UserError(
            f"{model.name} has prediction layers: which layers n-gpu-layers {gpu_layers} takes "
            "is not modelled"
        )
    return model.layers + 1 - gpu_layers


def _host_weights(start: EngineStartup) -> int:
    """Return the bytes of one GPU's weights that are in CPU memory; 0 on a SoC.

    These are the input tables, except a tied head, which the GPU has too; the layers of
    `_count_host_layers`; and the routed experts of the first `cpu_experts` layers.
    """
    if start.gpu.per == "SoC":
        return 0
    model, num_layers = start.model, _count_host_layers(start.model, start.options.n_gpu_layers)
    is_tied = all(weight.name != "lm_head" for weight in model.outer_weights)
    weights = []
    for weight in model.outer_weights if start.stage == 0 else ():
        is_head = is_tied and weight.name == "embedding"
        is_input = weight.kind is WeightKind.TABLE and not is_head
        if weight.name not in model.lent and (is_input or weight.name == "embedding_norm"):
            weights.append((weight.name, weight))
    first = sum(len(s.order) for s in stages(model, start.ranks.pp)[: start.stage])
    limit = max(num_layers, start.cpu_experts) - first
    for number, kind in enumerate(start.layers.order[: max(0, limit)]):
        for weight in model.layer_weights(kind):
            if number < num_layers or weight.expert:
                weights.append((f"{kind}.{weight.name}", weight))
    return sum(start.formats.weight_bytes(name, w.local(start.ranks)) for name, w in weights)


def _check_placement(start: EngineStartup) -> None:
    """Raise UserError if layers or experts in host memory are not modelled for this start."""
    model = start.model
    num_layers = _count_host_layers(model, start.options.n_gpu_layers)
    if not (num_layers or start.cpu_experts):
        return
    weights = [weight for kind in model.kinds for weight in model.layer_weights(kind)]
    problem = ""
    if start.ranks.tp > 1 or (start.ranks.pp > 1 and num_layers):
        problem = (
            "llama.cpp's layers in host memory with several GPUs, or with tp, are not modelled"
        )
    elif start.gpu.per == "SoC":
        problem = (
            f"{start.gpu.name} has one memory: layers or experts on the CPU free none of it"
        )
    elif any(model.shared_weights(kind) for kind in model.kinds):
        problem = f"{model.name} shares blocks of weights: their placement is not modelled"
    elif start.cpu_experts and not any(weight.expert for weight in weights):
        problem = f"{model.name} has no experts to put in host memory"
    if problem:
        raise UserError(problem)


def _memory(start: EngineStartup, estimate: str) -> MemoryBreakdown:
    """Return the memory of `stated_memory` with at least the compute buffer, and without weights in
    host memory.

    GPUs that share the layers have no collectives: each copies its output to the next
    (ggml-cuda.cu: ggml_backend_cuda_cpy_tensor_async).
    """
    _check_placement(start)
    terms, host = stated_memory(start, estimate, has_graphs=False), _host_weights(start)
    if start.ranks.tp == 1:
        terms.overhead.pop("collectives", None)
        terms.startup.pop("collectives", None)
    return terms._replace(
        language=terms.language - host,
        host=host,
        activation=maximum(terms.activation, _compute_buffer(start)),
    )


class LlamaCpp(CacheLayout):
    """The cache layout of llama.cpp on one GPU: cells for all sequences, and recurrent states.

    A cell stores one token in all layers of its kind. The number of cells is a multiple of 256.

    Attributes:
        full: Bytes of a cell, over all layers without a sliding window.
        window: Bytes of a cell, over all layers with a sliding window.
        limit: Tokens of the largest sliding window.
        state: Bytes of one sequence's recurrent states, over all layers.
        is_unified: Whether all sequences share one cache, as with --kv-unified.
        ubatch: Tokens of a micro-batch (--ubatch-size).
        idle_slots: Sequences without cells of their own in the unified cache. They have states,
            and cells for windows.
        host: Layout of the layers in host memory; None without such layers.
    """

    block_size = PADDING_CELLS
    host: "LlamaCpp | None" = None

    def __init__(
        self, full: int, window: int, limit: int, state: int, settings: EngineSettings
    ) -> None:
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.is_unified = settings.kv_unified
        self.ubatch, self.idle_slots = settings.max_num_batched_tokens, settings.idle_slots
        caches = "one cache for all sequences" if self.is_unified else "a cache per sequence"
        self.notes = (f"llama.cpp: {caches}",)
        cap = _pad(limit + self.ubatch)
        demands = (
            BlockDemand(PADDING_CELLS * full, PADDING_CELLS),
            BlockDemand(
                PADDING_CELLS * window, PADDING_CELLS, cap, 0, "window and micro-batch"
            ),
            BlockDemand(state, 1, 0, 1, "state"),
        )
        self.demands = [demand for demand in demands if demand.unit]

    def cells(self, sequences: int, length: int, shared: int = 0) -> int:
        """Return the number of cells for layers without a sliding window. A cell stores one token.

        With n sequences of L tokens, the number is n · pad(L), or pad(n · L) if the cache is
        unified. A unified cache stores a common prefix once. pad rounds up to a multiple of 256.

        Args:
            sequences: Number of sequences of one data-parallel rank, n.
            length: Tokens of each sequence, L.
            shared: Number of first tokens that all sequences have in common and share.
        """
        if not self.is_unified:
            return sequences * _pad(length)
        common = min(shared, length)
        return _pad(common + sequences * (length - common))

    def window_cells(self, sequences: int, length: int) -> int:
        """Return the number of cells for layers with a sliding window of W tokens.

        A cell stores one token. With n sequences of L tokens, the number is n · min(pad(L), pad(W +
        ubatch)). If the cache is unified, it is min(pad(n · L), pad(W · n + ubatch)). pad rounds up
        to a multiple of 256, and ubatch is the tokens of a micro-batch. The idle slots count
        in W · n.

        Args:
            sequences: Number of sequences of one data-parallel rank, n.
            length: Tokens of each sequence, L.
        """
        if not self.is_unified:
            return sequences * min(_pad(length), _pad(self.limit + self.ubatch))
        slots = sequences + self.idle_slots
        return min(_pad(sequences * length), _pad(self.limit * slots + self.ubatch))

    def cache_bytes(self, sequences: int, length: int, shared: int = 0) -> int:
        """Return the bytes of keys and values on one GPU, as llama.cpp logs them.

        Recurrent states do not count.

        Args:
            sequences: Number of sequences of one data-parallel rank.
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        full = self.cells(sequences, length, shared) * self.full
        return full + self.window_cells(sequences, length) * self.window

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        states = (sequences + self.idle_slots) * self.state
        return self.cache_bytes(sequences, length, shared) + states

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.cache_bytes(sequences, length)

    def extra_buffers(self, sequences: int, length: int) -> LoggedCacheRecord:
        """Return the bytes of one GPU's window caches, states and caches in host memory.

        The keys are `window_cache_bytes`, `state_bytes` (recurrent states) and, with layers in host
        memory, `host_cache_bytes`. In the record of `fit`, `kv_cache_allocated_bytes` includes the
        window caches, but not the other two.

        Args:
            sequences: Number of sequences of one data-parallel rank.
            length: Tokens of each sequence.
        """
        sizes: LoggedCacheRecord = {
            "window_cache_bytes": self.window_cells(sequences, length) * self.window,
            "state_bytes": (sequences + self.idle_slots) * self.state,
        }
        if self.host:
            sizes["host_cache_bytes"] = self.host.needed(sequences, length)
        return sizes


def _pad(cells: int) -> int:
    return -(-cells // PADDING_CELLS) * PADDING_CELLS


def _plan(
    layers: LayerCaches, ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    """Return the caches on one stage, with a separate layout for layers in CPU memory. Raises
    UserError if no layer is left on the GPU."""
    model = layers[0].model
    num_host_layers = _count_host_layers(model, settings.n_gpu_layers)
    windowed = set() if settings.swa_full else _windowed_models(layers)

    def caches(layers: LayerCaches) -> LlamaCpp:
        full = window = limit = state = 0
        for layer, count in count_layers(layers, stage):
            for part in pages(LLAMA_CPP.title, layer):
                state += count * part.state_bytes
                full += count * part.index_bytes
                if part.limit and id(layer.model) in windowed:
                    window += count * part.row_bytes
                    limit = max(limit, part.limit)
                else:
                    full += count * part.row_bytes
        return LlamaCpp(full, window, limit, state, settings)

    plan = caches(layers[num_host_layers:])
    if not plan.demands:
        raise UserError(
            f"no layer of {model.name} that keeps a cache is on the GPU", "Raise n-gpu-layers"
        )
    if num_host_layers:
        plan.host = caches(layers[:num_host_layers])
        plan.notes += (
            f"llama.cpp: the first {num_host_layers} layers and their caches are in host "
            "memory",
        )
    return plan


def _windowed_models(layers: LayerCaches) -> set[int]:
    """Return the models, by id, whose windows llama.cpp reads.

    It ignores windows that are in every layer (`src/models/llama.cpp` for mistral;
    `starcoder2.cpp`, `phi3.cpp`), unless the type has a pattern of windows. For the types in
    WINDOWED_DEPTH, it reads windows only in models with that number of layers.
    """
    models = set()
    for layer in distinct_layers(layers):
        model = layer.model
        depth = WINDOWED_DEPTH.get(model.model_type, model.layers)
        for part in pages(LLAMA_CPP.title, layer) if model.layers == depth else ():
            if (part.rows and not part.limit) or model.model_type in PATTERNED_TYPES.split():
                models.add(id(model))
    return models


def _precision(model: Model, precision: Precision) -> PrecisionAndRemarks:
    """Return an fp16 cache unless a dtype is requested: llama.cpp's own default, for every dtype of
    the model. gpt-oss has files of the type mxfp4_moe (github.com/ggml-org/llama.cpp, pull
    request 15091).

    The remarks name differences from the model's own code.
    """
    if precision.kv_cache_dtype == "auto":
        precision = replace(precision, kv_cache_dtype="fp16")
    if (
        model.model_type == "gpt_oss"
        and [scheme.format for scheme in model.quantization] == ["mxfp4"]
        and precision.dtype == "auto"
        and precision.quantization in ("", "mxfp4")
    ):
        precision = replace(precision, quantization="mxfp4_moe")
    remarks = []
    if any(_is_stored_by_head(model, part) for part in model.parts):
        remarks.append(
            "llama.cpp keeps keys and values of every head of this model, not its latents"
        )
    if any(entry.span is Span.CHUNK and entry.limit != CHUNK_TOKENS for entry in model.entries):
        remarks.append(f"llama.cpp's chunks always have {CHUNK_TOKENS:,} tokens")
    return precision, tuple(remarks)


def _row_format(
    entry: CacheEntry, part: CacheEntries, formats: Formats, settings: EngineSettings
) -> RowFormat:
    """Return the format of an entry: states in fp32; keys, latents and index keys in K's type,
    values in V's.

    Raises:
        UserError: llama.cpp makes no context (`llama_init_from_model`, `src/llama-context.cpp`):
            blocks do not divide a head, latents have two types, or values in blocks lack flash
            attention.
    """
    if entry.span is Span.STATE:
        return FORMATS["fp32"]
    key_type, value_type = (
        canonical(name) or formats.kv_cache_dtype
        for name in (settings.cache_type_k, settings.cache_type_v)
    )
    if key_type != value_type and any(e.role == "latent" for e in part):
        used = settings.cache_type_k or value_type
        raise UserError(
            f"llama.cpp needs one type for this model's latents, not {key_type} for keys and "
            f"{value_type} for values",
            f"Write --cache-type-k {used} --cache-type-v {used}",
        )
    layout = cache_layout(value_type if entry.role == "v" else key_type)
    row_format = layout.get(entry.role) or formats.cache_format(entry)
    if row_format.whole_groups and entry.width % row_format.group:
        raise UserError(
            f"llama.cpp refuses a cache of {row_format.name}: its blocks of {row_format.group} do "
            f"not divide a head of {entry.width}",
            "Use fp16 or bf16",
        )
    if settings.flash_attn == "off" and entry.role == "v" and row_format.whole_groups:
        raise UserError(
            f"llama.cpp stores values in {row_format.name} only with flash attention",
            "Write --flash-attn on, or --cache-type-v f16",
        )
    return row_format


LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, tokens, model: Defaults(
        tokens or UBATCH_TOKENS, 1, 1.0
    ),
    memory=_memory,
    has_context_buffers=True,
    memory_key=lambda start: start.gpu.per == "SoC",
    dtypes=tuple(CACHE_TYPES.split()),
    takes=tuple(OPTIONS.split()),
    precision=_precision,
    entries=_entries,
    row_format=_row_format,
    utilization_basis="free",
    smaller_weights=("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m"),
)
