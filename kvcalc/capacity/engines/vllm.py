"""vLLM: the cache specs of layers, the block size, and the layout in blocks.

Rules as of vLLM 0.33 (v1/kv_cache_interface.py, v1/core/kv_cache_planning.py,
platforms/interface.py). `kv_cache_groups` groups the layers. All figures are per rank.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvcalc.capacity.engines.engine import (
    Engine,
    EngineSettings,
    PrecisionAndRemarks,
    downcast,
    packed_latents,
    part_entries,
    scaled_index_keys,
)
from kvcalc.capacity.engines.kv_cache_groups import (
    COMPRESSED_BLOCK,
    KVCacheGroup,
    Spec,
    SpecKind,
    compressed_specs,
    compresses_tokens,
    group_layers,
    packed_groups,
    pooled_content,
    pooled_groups,
    pooled_tokens,
    promote_windows,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    BlockPool,
    CacheLayout,
    LayerCaches,
    Pages,
    distinct_layers,
    pages,
)
from kvcalc.capacity.engines.vllm_memory import memory, memory_key
from kvcalc.capacity.engines.vllm_versions import RELEASES, defaults
from kvcalc.errors import UserError
from kvcalc.layers.attention import Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntries, CacheEntry, Span
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Formats
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.storage.formats import FORMATS, KEYS_AND_VALUES_ONLY, RowFormat, canonical

# tokens; FlashMLA and the indexer run 64; hybrids of MLA align to 128
BLOCK, MLA_BLOCK, MLA_HYBRID_BLOCK = 16, 64, 128
DTYPES = """
    bf16 fp16 fp32 fp8 fp8_ds_mla nvfp4 nvfp4_ds_mla
    fp8_per_token_head int8_per_token_head int4_per_token_head
"""


class Vllm(BlockPool):
    """The cache layout of vLLM on one GPU of a pipeline stage: a pool of equal blocks.

    Every KV cache group of layers takes its blocks from this pool.

    Args:
        groups: The KV cache groups of all stages.
        stage: Index of the pipeline stage.
        block: Tokens of a block.
        ranks: The parallelism. Decode-context-parallel ranks divide the tokens of a sequence.
        settings: The engine's settings, such as the tokens in flight, for which windows reserve.
    """

    null_blocks = 1  # a placeholder

    def __init__(
        self,
        groups: list[KVCacheGroup],
        stage: int,
        block: int,
        ranks: Parallelism,
        settings: EngineSettings,
    ) -> None:
        self.groups = groups
        specs = [spec for group in groups for _, spec in group.specs]
        self.bytes_per_block = max((sum(group.pages(stage)) for group in groups), default=0)
        has_tokens = any(group.spec.kind is not SpecKind.STATE for group in groups)
        self.block_size = block if has_tokens else None
        self.page_bytes = max((group.widest_page() for group in groups), default=0)
        self.demands = [
            _demand(group.spec, self.bytes_per_block, ranks.dcp, settings) for group in groups
        ]
        notes = []
        if len({spec.page for spec in specs}) == 1:
            sizes = [len(group.specs) for group in groups]
            if padding := max(sizes) * len(sizes) - sum(sizes):
                notes.append(f"{padding} padding layers make the groups equal")
        if settings.block_size and block != settings.block_size:
            notes.append(
                f"blocks of {block} tokens: the layers cannot use {settings.block_size}"
            )
        self.notes = tuple(notes)


def _plan(
    layers: LayerCaches, ranks: Parallelism, settings: EngineSettings
) -> Callable[[int], CacheLayout]:
    """Return the pool of each stage. Groups are made over the whole model, so that all stages have
    the same block tables.

    Raises:
        UserError: vLLM's planner has no page for a layer, or needs its hybrid cache manager. Or
            decode-context parallelism would have to spread windows.
    """
    is_compressed = all(compresses_tokens(layer.model) for layer in distinct_layers(layers))
    if pooled_tokens(layers) and not is_compressed:
        groups, block = pooled_groups(VLLM.title, layers, settings.block_size)
        return lambda stage: Vllm(groups, stage, block, ranks, settings)
    block = -(-(settings.block_size or 1) // COMPRESSED_BLOCK) * COMPRESSED_BLOCK
    specs = {}
    for layer in distinct_layers(layers):
        parts = (
            (compressed_specs(part, block) for part in layer.parts)
            if is_compressed
            else (_specs(part, settings) for part in pages(VLLM.title, layer))
        )
        specs[id(layer.parts)] = [spec for part in parts for spec in part]
    stage_specs = [(layer.stage, spec) for layer in layers for spec in specs[id(layer.parts)]]
    if not is_compressed:
        block = choose_block_size([spec for _, spec in stage_specs], settings)
        stage_specs = [
            (stage, spec if spec.kind is SpecKind.STATE else spec._replace(block=block))
            for stage, spec in stage_specs
        ]
        if not settings.hybrid:
            stage_specs = promote_windows(stage_specs)
    if ranks.dcp > 1 and any(spec.kind is SpecKind.WINDOW for _, spec in stage_specs):
        raise UserError("vLLM spreads no sliding windows over decode-context-parallel ranks")
    if not settings.hybrid and is_compressed:
        raise UserError("vLLM's pages of compressed attention need its hybrid cache manager")
    groups = packed_groups(stage_specs) if is_compressed else group_layers(stage_specs)
    return lambda stage: Vllm(groups, stage, block, ranks, settings)


def choose_block_size(specs: Sequence[Spec], settings: EngineSettings) -> int:
    """Return the tokens of a KV cache block: 16 or `settings.block_size`, rounded up for kernels.

    If the model has recurrent states, a page must be large enough for a state. The block then has
    at least align · ⌈m / (align · a)⌉ tokens: a is the largest bytes of a token in an attention
    layer, m the bytes of the largest state, and align the number of tokens of which the attention
    kernel needs a multiple.

    Args:
        specs: One spec for each kind of stored row of every layer.
        settings: The engine's settings. Only `block_size` counts; 0 means 16.
    """
    size, align = settings.block_size or BLOCK, BLOCK
    if any(spec.latent for spec in specs):
        size, align = -(-size // MLA_BLOCK) * MLA_BLOCK, MLA_HYBRID_BLOCK
    states = [spec.row for spec in specs if spec.kind is SpecKind.STATE]
    rows = [spec.row for spec in specs if spec.kind is not SpecKind.STATE]
    full_rows = [spec.row for spec in specs if spec.kind is SpecKind.FULL and spec.main]
    if not states or not rows:
        return size
    align = max(size, align)
    return max(size, align * -(-max(states) // (align * max(full_rows or rows))))


def _demand(spec: Spec, unit: int, dcp: int, settings: EngineSettings) -> BlockDemand:
    """Return the blocks that one sequence of L tokens needs.

    Full attention needs ⌈L/block⌉, a window ⌈min(W − 1 + F, L)/block⌉ + 1, a chunk ⌈min(C + F,
    L)/block⌉, and a state 1 or 2. F is the number of tokens in flight.
    """
    if spec.kind is SpecKind.STATE:
        is_aligned = settings.mamba_cache_mode == "align"
        blocks = 2 + settings.mamba_checkpoint_blocks if is_aligned else 1
        return BlockDemand(unit, 1, 0, blocks + settings.num_speculative_tokens, "state")
    if spec.kind is SpecKind.RING:
        return BlockDemand(unit, 1, 0, 1, "ring")
    if spec.kind is SpecKind.FULL:
        return BlockDemand(unit, spec.block * dcp)
    extra = int(spec.kind is SpecKind.WINDOW)
    cap = spec.limit + settings.in_flight - extra
    return BlockDemand(unit, spec.block, cap, extra, f"{spec.kind} and tokens in flight")


def _specs(part: Pages, settings: EngineSettings) -> list[Spec]:
    """Return the cache specs of one sublayer: one for its rows and one for their index keys, or one
    for all its states.

    The state of a convolution has one more column for each draft token
    (model_executor/layers/mamba/mamba_utils.py).
    """
    if part.states:
        column = sum(s.row_bytes for s in part.states if s.entry.role == "conv_state")
        return [
            Spec(SpecKind.STATE, part.state_bytes + settings.num_speculative_tokens * column)
        ]
    kind = SpecKind.FULL
    if part.limit:
        kind = SpecKind.CHUNK if part.rows[0].entry.span is Span.CHUNK else SpecKind.WINDOW
    specs = [Spec(kind, part.row_bytes, part.limit, latent=part.is_latent)]
    return specs + [
        Spec(SpecKind.FULL, key.row_bytes, latent=part.is_latent, main=False)
        for key in part.index_keys
    ]


def _entries(model: Model, part: Sublayer) -> CacheEntries:
    """Return the cache entries of one part.

    MiniCPM3 stores keys of every head, and values padded to the width of keys
    (model_executor/models/minicpm3.py).
    """
    if isinstance(part, Latent) and model.model_type == "minicpm3":
        return part.expanded(part.qk_nope_head_dim + part.qk_rope_head_dim)
    return part_entries(model, part)


def _precision(model: Model, precision: Precision) -> PrecisionAndRemarks:
    """Pack fp8 latents of sparse attention, quantize the scales of nf4, and cast a float32
    checkpoint to bf16.

    model_loader/bitsandbytes_loader.py: compress_statistics, 0.7 to 0.16.
    """
    precision, remarks = packed_latents("vllm", model, precision)
    if precision.quantization.lower() in ("nf4", "bitsandbytes"):
        precision = replace(precision, quantization="nf4_double")
        remarks += ("vLLM's bitsandbytes quantises the scales of nf4 too",)
    if canonical(precision.kv_cache_dtype) == "auto" and compresses_tokens(model):
        precision = replace(precision, kv_cache_dtype="fp8_ds_mla")
        remarks += (
            "vllm packs compressed latents in fp8 (fp8_ds_mla) unless bf16 is requested",
        )
    if model.model_type == "minicpm3":
        remarks += ("vllm keeps keys and values of every head of minicpm3, not its latents",)
    precision, cast = downcast(VLLM.title, model, precision, "bf16")
    return precision, (*remarks, *cast)


def _row_format(
    entry: CacheEntry, part: CacheEntries, formats: Formats, settings: EngineSettings
) -> RowFormat:
    """Return the format of an entry. Recurrent states without a fixed dtype have the model's
    dtype."""
    has_own_dtype = entry.has_assumed_dtype and not settings.mamba_ssm_cache_dtype
    if entry.role == "recurrent_state" and has_own_dtype:
        return FORMATS[formats.dtype]
    if entry.role == "compressor":
        return FORMATS["fp32"]
    return scaled_index_keys(entry, part, formats, settings)


VLLM = Engine(
    name="vllm",
    title="vLLM",
    plan=_plan,
    defaults=defaults,
    releases=RELEASES,
    oldest_release=(0, 8),  # with the rules of 0.9
    memory=memory,
    has_memory_range=True,
    takes=("max_loras", "limit_mm_per_prompt", "num_gpu_blocks_override"),
    dtypes=tuple(DTYPES.split()),
    unmodelled=KEYS_AND_VALUES_ONLY,
    precision=_precision,
    entries=_entries,
    row_format=_row_format,
    content=pooled_content,
    spreads_context=True,
    memory_key=memory_key,
    max_vocabulary_difference=0,  # config/speculative.py: verify_equal_vocab_size_if_draft_model
    refuses_below_one_sequence=True,
    checks_free_memory=True,
    # config/model.py: _get_and_verify_max_len
    long_context_variable="VLLM_ALLOW_LONG_MAX_MODEL_LEN",
)
