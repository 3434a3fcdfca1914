"""vLLM: layers to cache specs, the block size, and a plan in blocks.

Rules as of vLLM 0.33 (v1/kv_cache_interface.py, v1/core/kv_cache_planning.py,
platforms/interface.py). The grouping of layers is in `vllm_groups`. All figures are per rank.
"""

from collections.abc import Callable, Sequence

import msgspec

from kvcalc.capacity.engines.engine import (
    Engine,
    EngineSettings,
    downcast,
    packed_latents,
    part_entries,
    scaled_index_keys,
)
from kvcalc.capacity.engines.kv_cache_groups import (
    KVCacheGroup,
    Spec,
    SpecKind,
    groups_of,
    promoted,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    BlockPool,
    CacheLayout,
    LayerCache,
    Pages,
    pages,
)
from kvcalc.capacity.engines.vllm_compressed import BLOCK as COMPRESSED_BLOCK
from kvcalc.capacity.engines.vllm_compressed import (
    compressed_specs,
    compresses,
    compresses_tokens,
    packed_groups,
    pool_of,
    pooled_content,
    pooled_groups,
    tuple_bytes,
)
from kvcalc.capacity.engines.vllm_memory import (
    memory,
    stage_memory_key,
    warning,
    weights,
)
from kvcalc.capacity.engines.vllm_versions import defaults, release
from kvcalc.errors import UserError
from kvcalc.layers.attention import Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Formats
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.storage.formats import FORMATS, KEYS_AND_VALUES_ONLY, RowFormat, canonical

# tokens; FlashMLA and the indexer run 64; hybrids of MLA align to 128
BLOCK, MLA_BLOCK, MLA_HYBRID_BLOCK = 16, 64, 128
NF4 = ("nf4", "bitsandbytes")
NULL_BLOCKS = 1  # the first block of the pool is a placeholder that no sequence ever gets


class Vllm(BlockPool):
    """A pool of equal blocks on one stage. Every group of layers takes its own blocks from it."""

    null_blocks = NULL_BLOCKS

    def __init__(
        self,
        groups: list[KVCacheGroup],
        stage: int,
        block: int,
        ranks: Parallelism,
        settings: EngineSettings,
    ) -> None:
        self.groups, self.stage = groups, stage
        specs = [spec for group in groups for _, spec in group.specs]
        if settings.page_tuples and any(spec.latent and spec.padded for spec in specs):
            self.unit = tuple_bytes(groups, stage)
        else:
            self.unit = max((group.page_bytes(stage) for group in groups), default=0)
        self.bytes_per_block = self.unit
        has_tokens = any(group.spec.kind is not SpecKind.STATE for group in groups)
        self.block_size = block if has_tokens else None
        self.page_bytes = max((group.widest_page() for group in groups), default=0)
        self.demands = [
            _demand(group.spec, ranks.dcp, settings)._replace(unit=self.unit)
            for group in groups
        ]
        notes = []
        if len({spec.page for spec in specs}) == 1:
            largest = max(len(group.specs) for group in groups)
            if padding := sum(largest - len(group.specs) for group in groups):
                notes.append(f"{padding} padding layers make the groups equal")
        if settings.block_size and block != settings.block_size:
            notes.append(
                f"blocks of {block} tokens: the layers cannot use {settings.block_size}"
            )
        self.notes = tuple(notes)

    def describe(self, length: int) -> list[str]:
        lines = []
        for group, term in zip(self.groups, self.demands, strict=True):
            blocks = term.count(length)
            page = " + ".join(f"{n} × {size:,}" for size, n in group.pages(self.stage))
            lines.append(
                f"group of {len(group.specs)} {group.spec.kind} layers: pages "
                f"{page or 'none on this stage'} = "
                f"{group.page_bytes(self.stage):,} B, blocks of "
                f"{term.block if term.cap else '–'} tokens; "
                f"{blocks:,} blocks at {length:,} tokens"
            )
        return lines


def _plan(
    held: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings
) -> Callable[[int], CacheLayout]:
    """Return the pool of each stage. Groups are made over the whole model, so that all stages have
    the same block tables.

    Raises:
        UserError: vLLM's planner has no page for a layer, or needs its hybrid cache manager. Or
            decode-context parallelism would have to spread windows.
    """
    compressed = compresses(held)
    if pool_of(held) and not compressed:
        groups, block = pooled_groups(VLLM.title, held, settings.block_size)
        return lambda stage: Vllm(groups, stage, block, ranks, settings)
    kinds = {id(layer.parts): layer for layer in held}
    if compressed:
        block = -(-(settings.block_size or 1) // COMPRESSED_BLOCK) * COMPRESSED_BLOCK
        specs = {
            key: [spec for part in layer.parts for spec in compressed_specs(part, block)]
            for key, layer in kinds.items()
        }
    else:
        specs = {
            key: [spec for part in pages(VLLM.title, layer) for spec in _specs(part, settings)]
            for key, layer in kinds.items()
        }
        block = block_size([spec for layer in specs.values() for spec in layer], settings)
        specs = {key: [spec.in_blocks(block) for spec in layer] for key, layer in specs.items()}
    layers = [(layer.stage, spec) for layer in held for spec in specs[id(layer.parts)]]
    if not settings.hybrid and not compressed:
        layers = promoted(layers)
    if ranks.dcp > 1 and any(spec.kind is SpecKind.WINDOW for _, spec in layers):
        raise UserError("vLLM spreads no sliding windows over decode-context-parallel ranks")
    if not settings.hybrid and compressed:
        raise UserError("vLLM's pages of compressed attention need its hybrid cache manager")
    groups = packed_groups(layers) if compressed else groups_of(layers)
    return lambda stage: Vllm(groups, stage, block, ranks, settings)


def block_size(specs: Sequence[Spec], settings: EngineSettings) -> int:
    """Return the tokens per block: 16 or the setting, rounded up to the backend's block size.

    With recurrent states, a page must store a state. With `a` bytes of attention per token and
    layer and `m` bytes of state, the block has at least align · ⌈m / (align · a)⌉ tokens.
    """
    base, latent = settings.block_size or BLOCK, any(s.latent for s in specs)
    if latent:
        base = -(-base // MLA_BLOCK) * MLA_BLOCK
    states = [s.row for s in specs if s.kind is SpecKind.STATE]
    attention = _row(specs)
    if not states or not attention:
        return base
    align = max(base, MLA_HYBRID_BLOCK if latent else BLOCK)
    return max(base, align * -(-max(states) // (align * attention)))


def _row(specs: Sequence[Spec]) -> int:
    """Bytes of attention per token and layer: those of the full layers if there are any."""
    full = [s.row for s in specs if s.kind is SpecKind.FULL and s.main]
    return max(full or [s.row for s in specs if s.kind is not SpecKind.STATE], default=0)


def _demand(spec: Spec, dcp: int, settings: EngineSettings) -> BlockDemand:
    """Return the blocks of one sequence: full ⌈L/block⌉; window ⌈min(W − 1 + F, L)/block⌉ + 1;
    chunk ⌈min(C + F, L)/block⌉; state 1 or 2. F is the tokens in flight."""
    if spec.kind is SpecKind.STATE:
        aligned = settings.mamba_cache_mode == "align"
        pages = 2 + settings.mamba_checkpoint_blocks if aligned else 1
        return BlockDemand(0, 1, 0, pages + settings.num_speculative_tokens, "state")
    if spec.kind is SpecKind.RING:
        return BlockDemand(0, 1, 0, 1, "ring")
    if spec.kind is SpecKind.FULL:
        return BlockDemand(0, spec.block * dcp)
    window = spec.kind is SpecKind.WINDOW
    return BlockDemand(
        0,
        spec.block,
        spec.limit + settings.in_flight - window,
        int(window),
        f"{spec.kind} and tokens in flight",
    )


def _specs(part: Pages, settings: EngineSettings) -> list[Spec]:
    """Return the cache specs of one part: of its rows and of their index keys, or one page for all
    its states.

    A convolution's state has one more column for each draft token
    (model_executor/layers/mamba/mamba_utils.py).
    """
    if part.states:
        shape = tuple(
            (f"{s.entry.role} {s.format.name}", s.heads, s.entry.width * s.entry.limit)
            for s in part.states
        )
        column = sum(s.row_bytes for s in part.states if s.entry.role == "conv_state")
        state_bytes = part.state_bytes + settings.num_speculative_tokens * column
        return [Spec(SpecKind.STATE, state_bytes, shape)]
    local = SpecKind.CHUNK if part.chunked else SpecKind.WINDOW
    kind = local if part.limit else SpecKind.FULL
    shape = tuple((s.entry.role, s.heads, s.entry.width) for s in part.rows)
    specs = [Spec(kind, part.row_bytes, shape, part.limit, latent=part.latent)]
    for s in part.index_keys:
        shape = (("index_key", 1, s.entry.width),)
        specs.append(Spec(SpecKind.FULL, s.row_bytes, shape, latent=part.latent, main=False))
    return specs


def _entries(model: Model, part: Sublayer) -> Sequence[CacheEntry]:
    """Of MiniCPM3 keys of every head, and values padded to their width
    (model_executor/models/minicpm3.py)."""
    if isinstance(part, Latent) and model.model_type == "minicpm3":
        return part.expanded(part.qk_nope_head_dim + part.qk_rope_head_dim)
    return part_entries(model, part)


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """Pack fp8 latents of sparse attention, quantize the scales of nf4, and cast a float32
    checkpoint to bf16.

    model_loader/bitsandbytes_loader.py: compress_statistics, 0.7 to 0.16.
    """
    precision, packed = packed_latents("vllm", model, precision)
    remarks, changes = [*packed], dict[str, str]()
    if precision.quantization.lower() in NF4:
        changes["quantization"] = "nf4_double"
        remarks.append("vLLM's bitsandbytes quantises the scales of nf4 too")
    if canonical(precision.kv_cache_dtype) == "auto" and compresses_tokens(model):
        changes["kv_cache_dtype"] = "fp8_ds_mla"
        remarks.append(
            "vllm packs compressed latents in fp8 (fp8_ds_mla) unless bf16 is asked for"
        )
    if model.model_type == "minicpm3":
        remarks.append("vllm keeps keys and values of every head of minicpm3, not its latents")
    precision = msgspec.structs.replace(precision, **changes)
    precision, cast = downcast(VLLM.title, model, precision, "bf16")
    return precision, (*remarks, *cast)


def _row_format(
    entry: CacheEntry,
    beside: Sequence[CacheEntry],
    formats: Formats,
    settings: EngineSettings,
) -> RowFormat:
    """Recurrent states as asked, else as the model fixes them, else in its own dtype; index keys of
    latents in fp8."""
    if entry.role == "recurrent_state" and (settings.mamba_ssm_cache_dtype or entry.assumed):
        return FORMATS[settings.mamba_ssm_cache_dtype or formats.dtype]
    if entry.role == "compressor":
        return FORMATS["fp32"]
    return scaled_index_keys(entry, beside, formats, settings)


VLLM = Engine(
    name="vllm",
    title="vLLM",
    plan=_plan,
    defaults=defaults,
    release=release,
    warns=warning,
    memory=memory,
    ranged=True,
    counts=("max_loras", "limit_mm_per_prompt", "engram_config"),
    dtypes=(
        "bf16",
        "fp16",
        "fp32",
        "fp8",
        "fp8_ds_mla",
        "nvfp4",
        "nvfp4_ds_mla",
        "fp8_per_token_head",
        "int8_per_token_head",
        "int4_per_token_head",
    ),
    unmodelled=KEYS_AND_VALUES_ONLY,
    precision=_precision,
    entries=_entries,
    row_format=_row_format,
    content=pooled_content,
    spreads_context=True,
    takes_num_blocks=True,
    memory_key=stage_memory_key,
    weights=weights,
    unlike_drafts=0,  # config/speculative.py: verify_equal_vocab_size_if_draft_model
    refuses_below_one_sequence=True,
    # config/model.py: _get_and_verify_max_len
    long_context_variable="VLLM_ALLOW_LONG_MAX_MODEL_LEN",
)
