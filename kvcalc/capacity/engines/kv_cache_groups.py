"""vLLM: group layers that share a block table, from the cache specs of the layers.

One pool of equal blocks serves all groups, so pages are made equal and layers are split into groups
of one size. Source: v1/core/kv_cache_planning.py of vLLM 0.33.

The second part has vLLM's pages of pooled index keys and of compressed attention.

Pooled index keys with latents or keys and values, and recurrent states (GLM-5.3-Flash,
Qwen3.8-Flash-Next): index keys have one row per `pooled_tokens` tokens, and a ring for tokens that
are not pooled yet. States are in the pages of the rows, rings in the pages of index keys, so a
block
has the size of its rows and index keys. Source: models/glm5next and v1/core/kv_cache_utils.py
(`_get_kv_cache_groups_glm5_next`) of vLLM 0.31. The same layout of keys and values gives the tokens
of a published start within 0.03 %.

Compressed attention (DeepSeek-V4): pages of all sizes are packed in one block. Every layer stores a
window of latents. A layer that compresses also stores its compressed latents, their index keys, and
the unfinished input of its compressors: key-values and gates in fp32, as a window of one block of
tokens, or of two if blocks overlap. Source: models/deepseek_v4/{attention,compressor}.py,
v1/attention/backends/mla/sparse_swa.py and v1/core/kv_cache_planning.py
(`_get_packed_kv_cache_groups`) of vLLM 0.33.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import grouped
from kvcalc.capacity.engines.engine import INDEX_ROW
from kvcalc.capacity.engines.layout import (
    LayerCache,
    LayerCaches,
    Pages,
    StoredEntry,
    StoredPart,
    pages,
)
from kvcalc.errors import UserError
from kvcalc.layers.cache import Span
from kvcalc.model.model import Model

StageSpec = tuple[int, "Spec"]  # a pipeline stage and a layer's spec
StageSpecs = Sequence[StageSpec]


class SpecKind(StrEnum):
    """How the KV cache of a layer grows with the sequence. vLLM groups layers by it.

    Attributes:
        FULL: One row per token of the sequence.
        WINDOW: One row per token of the sliding window.
        CHUNK: One row per token of the current attention chunk.
        STATE: One recurrent state at any length.
        RING: One block at any length. It buffers tokens until they are pooled into one index key of
            sparse attention.
    """

    FULL = "full"  # also latents and their index keys
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    RING = "ring"  # tokens that are not pooled yet: one block at any length


class Spec(NamedTuple):
    """One kind of stored row of one layer, like vLLM's `KVCacheSpec`. Bytes are for one GPU.

    Attributes:
        kind: How the rows grow with the sequence.
        row: Bytes of one token. For a state, the bytes of the whole state.
        limit: Tokens of the sliding window or attention chunk; 0 for none.
        block: Tokens of a block; 0 for a state or a ring.
        padded: Bytes of a page, if padding makes it larger than its content; otherwise 0.
        latent: Whether the rows are latents (MLA).
        main: Whether the rows are keys, values, latents or states. False for index keys.
    """

    kind: SpecKind
    row: int
    limit: int = 0
    block: int = 0
    padded: int = 0
    latent: bool = False
    main: bool = True

    @property
    def page(self) -> int:
        """Return the bytes of one page on one GPU: the part of a block that this layer uses.

        Padding is included.
        """
        size = self.row if self.kind is SpecKind.STATE else self.row * self.block
        return self.padded or size


class KVCacheGroup(NamedTuple):
    """Layers that share one block table, because they need equal numbers of blocks.

    The group covers all pipeline stages, so that the stages have equal block tables.

    Attributes:
        specs: Pairs of a pipeline stage's index and the spec of a layer on it. The bytes per row
            may differ between layers.
    """

    specs: tuple[StageSpec, ...]

    @property
    def spec(self) -> Spec:
        """Return the spec of the first layer, which stands for the other layers.

        Its kind, limit and block determine how many blocks of the group a sequence needs.
        """
        return self.specs[0][1]

    def pages(self, stage: int) -> list[int]:
        """Return the page bytes on one GPU of each layer of this group on a pipeline stage.

        Their sum is the bytes that the group uses of one block.

        Args:
            stage: Index of the pipeline stage.
        """
        return [spec.page for spec_stage, spec in self.specs if spec_stage == stage]

    def widest_page(self) -> int:
        """Return the bytes of the largest page of one layer on one GPU, for the record of `fit`.

        Layers of all pipeline stages count. A layer with index keys has two pages. The result is
        the largest page of keys, values, latents or states, plus the largest page of index keys.
        """
        main = max((s.page for _, s in self.specs if s.main), default=0)
        return main + max((s.page for _, s in self.specs if not s.main), default=0)


def group_layers(layers: StageSpecs) -> list[KVCacheGroup]:
    """Return the KV cache groups of a model's layers, as vLLM makes them.

    All groups take blocks from one pool, so vLLM makes their pages equal and splits large groups.

    Args:
        layers: Pipeline stage index and spec of each layer, in order.

    Raises:
        UserError: vLLM cannot make the pages of these layers equal.
    """
    if not layers:
        return []
    if _need_equal_blocks(layers):
        return [KVCacheGroup(tuple(layers))]
    equal_layers = _make_pages_equal(layers)
    if equal_layers is None:
        kinds = {(s.kind, s.latent) for _, s in layers if s.kind is not SpecKind.FULL}
        if not kinds <= {(SpecKind.WINDOW, False)}:
            raise UserError(
                "vLLM cannot make the pages of these layers equal",
                "Another cache dtype or block size may do",
            )
        # windows of keys and values next to latents
        return [KVCacheGroup(tuple(promote_windows(layers)))]
    buckets = grouped((spec, (stage, spec)) for stage, spec in equal_layers)
    size = choose_group_size([len(bucket) for bucket in buckets.values()])
    return [
        KVCacheGroup(tuple(bucket[i :: -(-len(bucket) // size)]))
        for bucket in buckets.values()
        for i in range(-(-len(bucket) // size))
    ]


def choose_group_size(layer_counts: Sequence[int]) -> int:
    """Return the number of layers per KV cache group.

    The smallest layer count is the group size, so only the larger attention types are split. If the
    largest count is below 1.5 times the smallest, the largest is the group size, because that needs
    fewer padding layers.

    Examples: 10 full and 20 window layers give 10, in 3 groups. 12 window and 13 full layers give
    13, with 1 padding layer.

    Args:
        layer_counts: Number of layers of each attention type, such as full and window. Must not be
            empty.
    """
    smallest, largest = min(layer_counts), max(layer_counts)
    return largest if 2 * largest < 3 * smallest else smallest


def _need_equal_blocks(layers: StageSpecs) -> bool:
    """Return whether all layers have the same kind, block size and limit, and for states the same
    page size."""
    needs = set()
    for _, spec in layers:
        is_state = spec.kind is SpecKind.STATE
        needs.add((spec.kind, spec.page) if is_state else (spec.kind, spec.block, spec.limit))
    return len(needs) <= 1


def _make_pages_equal(layers: StageSpecs) -> list[StageSpec] | None:
    """Return the layers with pages of the largest size; None if latents would need padding.

    A smaller page that divides the largest gets a larger block. Other pages of keys and values, and
    states, are padded.
    """
    largest = max(spec.page for _, spec in layers)
    results = []
    for stage, spec in layers:
        is_state = spec.kind is SpecKind.STATE
        if spec.page != largest and not is_state and largest % spec.page == 0:
            spec = spec._replace(block=spec.block * (largest // spec.page))
        elif spec.page != largest:
            if spec.latent and not is_state:
                return None
            spec = spec._replace(padded=largest)
        results.append((stage, spec))
    return results


def promote_windows(layers: StageSpecs) -> list[StageSpec]:
    """Return the layers as `--disable-hybrid-kv-cache-manager` allocates them.

    If some layers have full attention, layers with windows and chunks are allocated like full
    attention. Otherwise the layers are unchanged.

    Args:
        layers: Pipeline stage index and spec of each layer, in order.

    Raises:
        UserError: The layers need different blocks in spite of this change.
    """
    full_blocks = [spec.block for _, spec in layers if spec.kind is SpecKind.FULL]
    results = []
    for stage, spec in layers:
        if full_blocks and spec.kind in (SpecKind.WINDOW, SpecKind.CHUNK):
            spec = spec._replace(kind=SpecKind.FULL, limit=0, block=full_blocks[0])
        results.append((stage, spec))
    if not _need_equal_blocks(results):
        raise UserError(
            "vLLM needs its hybrid cache manager for layers that need different blocks"
        )
    return results


# a block has a multiple of these rows of index keys (DeepGEMM's pages)
POOLED_ROWS = 32
# a block has a multiple of these tokens, for latents next to states and for keys and values
LATENT_MULTIPLE, PLAIN_MULTIPLE = 128, 16
# tokens of a block of compressed rows, and of a block of a window
COMPRESSED_BLOCK, WINDOW_BLOCK = 256, 64
# tokens of a compressor's block, by the tokens that it compresses to one
STATE_BLOCKS = {4: 4, 128: 8}
SCALE_BYTES = 8  # bytes of a packed row's scales: one for 64 values, padded
ROW_ROLES = ("latent", "rope_key")
PAGE_ALIGNMENTS = {"fp8_ds_mla": 576, "bf16": 512}  # every page is a multiple of these bytes


def pooled_tokens(layers: LayerCaches) -> int:
    """Return how many tokens share one index key of sparse attention; 0 if each has its own.

    The result is also 0 without index keys.

    Args:
        layers: All layers of the model.
    """
    return max((part.pooled_tokens for n in layers for part in n.layer.parts), default=0)


def pooled_content(layer: LayerCache) -> Iterable[StoredEntry]:
    """Return the cache entries (such as keys and values) that vLLM stores for a layer.

    They are the layer's own entries, with one exception: if several tokens share one index key of
    sparse attention, vLLM stores one row of index keys for these tokens.
    """
    pool = pooled_tokens([layer])
    for part in layer.parts:
        for stored_entry in part:
            is_pooled = pool and stored_entry.entry.role == "index_key"
            yield _pooled_key(stored_entry, part, pool) if is_pooled else stored_entry


def _pooled_key(stored_entry: StoredEntry, part: StoredPart, pool: int) -> StoredEntry:
    """Return the stored index-key entry of a pool of tokens. With fp8 latents, it has no gates and
    no flag."""
    entry = replace(stored_entry.entry, ratio=pool)
    if not any(s.entry.role == "latent" for s in part):
        return stored_entry._replace(entry=entry)
    entry = replace(entry, width=(entry.width - 1) // 2)
    return StoredEntry(entry, stored_entry.heads, INDEX_ROW)


def pooled_groups(
    title: str, layers: LayerCaches, block_size: int
) -> tuple[list[KVCacheGroup], int]:
    """Return the KV cache groups of a model with pooled index keys, and the tokens of a block.

    An indexer of sparse attention reads index keys to select tokens. A pooled index key is one row
    for several tokens. The tokens of a block are a multiple of the number that the kernels need,
    and enough that a page stores a recurrent state.

    Args:
        title: Official name of the engine, for the message.
        layers: All layers of the model, in order.
        block_size: Requested tokens of a block, which are rounded up; 0 for the smallest block.

    Raises:
        UserError: Layers store other attention too, or states do not fit in the pages.
    """
    pool = pooled_tokens(layers)
    rows: list[tuple[int, Pages]] = []
    states: list[tuple[int, Pages]] = []
    for layer in layers:
        for part in pages(title, layer):
            if not (part.states or (part.rows and part.index_keys)):
                raise UserError(
                    f"{title}'s pages of pooled index keys next to other attention are not "
                    "modelled"
                )
            (states if part.states else rows).append((layer.stage, part))
    _, first = rows[0]
    multiple, pool_rows = (
        (LATENT_MULTIPLE, POOLED_ROWS) if first.is_latent else (PLAIN_MULTIPLE, 1)
    )
    align = max(multiple, pool * pool_rows, -(-block_size // multiple) * multiple)
    largest_state = max((part.state_bytes for _, part in states), default=0)
    block = align * max(1, -(-largest_state // (align * first.row_bytes)))
    full, keys, rings = [], [], []
    for stage, part in rows:
        key = _pooled_key(part.index_keys[0], (*part.rows, *part.index_keys), pool).row_bytes
        page = block // pool * key
        full.append((stage, Spec(SpecKind.FULL, part.row_bytes, 0, block, 0, part.is_latent)))
        keys.append((stage, Spec(SpecKind.FULL, key, 0, block, page, True, main=False)))
        rings.append((stage, Spec(SpecKind.RING, 0, padded=page)))
    state_page = block * first.row_bytes
    state_specs = [
        (stage, Spec(SpecKind.STATE, part.state_bytes, padded=state_page))
        for stage, part in states
    ]
    return [
        KVCacheGroup((*full, *keys)),
        KVCacheGroup(tuple(rings)),
        *_group_states(state_specs, [stage for stage, _ in rows]),
    ], block


def _group_states(states: StageSpecs, row_stages: Sequence[int]) -> list[KVCacheGroup]:
    """Return state layers, dealt to groups in turn. In each group, no stage has more state layers
    than row layers."""
    num_states = Counter(stage for stage, _ in states)
    num_rows = Counter(row_stages)
    if not num_states.keys() <= num_rows.keys():
        raise UserError(
            "vLLM shares pages of latents with states, and a pipeline stage has no latents",
            "Use another number of stages",
        )
    per_row = (-(-count // num_rows[stage]) for stage, count in num_states.items())
    num_groups = max(per_row, default=0)
    return [KVCacheGroup(tuple(states[i::num_groups])) for i in range(num_groups)]


def compresses_tokens(model: Model) -> bool:
    """Return whether vLLM stores the model's KV cache in packed pages of several sizes.

    vLLM does so if layers compress their latents (DeepSeek-V4) and store uncompressed latents only
    in a window.

    Raises:
        UserError: Layers read the compressed latents of other layers, as in DeepSeek-V4.1. Its
            pages are not modelled (models/deepseek_v41: records of 528 bytes on some GPUs, windows
            in blocks of 32 or 64, rings of compressor states).
    """
    if "compressor" not in model.roles:
        return False
    if any(entry.is_stored_by_other_layer for entry in model.entries):
        raise UserError(
            f"vLLM stores {model.name} in other pages than DeepSeek-V4, which are not modelled",
            "Use --engine none to count its content",
        )
    uncompressed = [entry for entry in model.entries if entry.ratio == 1]
    return all(entry.limit and entry.role in ROW_ROLES for entry in uncompressed)


def compressed_specs(part: StoredPart, block: int) -> list[Spec]:
    """Return the specs of a layer with compressed attention (DeepSeek-V4), one per kind of row.

    The first spec is the sliding window of latents. A layer that compresses tokens also has specs
    of compressed latents, of index keys and of compressor states.

    Args:
        part: The stored cache entries of the layer's attention.
        block: Tokens of a block of compressed rows, counted before compression. A block of 256
            tokens has 64 rows if a row stores 4 tokens.

    Raises:
        UserError: vLLM has no pages for the format of the rows or for the compression ratio.
    """
    rows = [s for s in part if s.entry.role in ROW_ROLES]
    dtype = rows[0].format.name.replace("fp8_block128", "fp8_ds_mla")
    if dtype not in PAGE_ALIGNMENTS:
        raise UserError(
            f"vLLM stores compressed latents packed in fp8 or in bf16, not in {dtype}"
        )

    def spec(row: int, block: int, ratio: int = 1, limit: int = 0) -> Spec:
        page = -(-(block // ratio * row) // PAGE_ALIGNMENTS[dtype]) * PAGE_ALIGNMENTS[dtype]
        kind = SpecKind.WINDOW if limit else SpecKind.FULL
        return Spec(kind, row, limit, block, page, latent=True, main=not limit)

    def row_bytes(rows: Sequence[StoredEntry]) -> int:
        """Return the bytes of one latent with its RoPE key."""
        latent, rotated = (
            sum(s.entry.width for s in rows if s.entry.role == role) for role in ROW_ROLES
        )
        is_packed = dtype == "fp8_ds_mla"
        return latent + 2 * rotated + SCALE_BYTES if is_packed else 2 * (latent + rotated)

    window = [s for s in rows if s.entry.ratio == 1]
    specs = [spec(row_bytes(window), WINDOW_BLOCK, limit=window[0].entry.limit)]
    ratio = max(s.entry.ratio for s in part)
    if ratio == 1:
        return specs
    if ratio not in STATE_BLOCKS:
        raise UserError(f"vLLM compresses 4 or 128 tokens to one, not {ratio}")
    num_series = 2 if any(s.entry.span is Span.OVERLAP for s in part) else 1
    keys = [s for s in part if s.entry.role == "index_key"]
    compressed = row_bytes([s for s in rows if s.entry.ratio > 1])
    sizes = (compressed, *(key.row_bytes for key in keys))
    specs += [spec(size, block, ratio) for size in sizes]
    # a key-value and a gate of each series, fp32
    for width in (sum(s.entry.width for s in window), *(key.entry.width for key in keys)):
        state_bytes = 2 * num_series * width * 4
        specs.append(spec(state_bytes, STATE_BLOCKS[ratio], limit=num_series * ratio))
    return specs


def packed_groups(layers: StageSpecs) -> list[KVCacheGroup]:
    """Return the KV cache groups of layers whose pages may differ in size (DeepSeek-V4).

    vLLM packs the pages of a group in one block. Layers of a group need equal block tokens and
    windows. A group with many layers is split, so that all groups have about as many layers of each
    page size.

    Args:
        layers: Pipeline stage index and spec of each layer, in order.
    """
    buckets: dict[object, dict[int, list[StageSpec]]] = {}
    for stage, spec in layers:
        sizes = buckets.setdefault((spec.kind, spec.block, spec.limit), defaultdict(list))
        sizes[spec.page].append((stage, spec))
    repeats = []  # layers of each page size in a bucket; 0 if page sizes differ in this
    for sizes in buckets.values():
        counts = {len(layers) for layers in sizes.values()}
        repeats.append(counts.pop() if len(counts) == 1 else 0)
    counted_buckets = list(zip(repeats, buckets.values()))
    floor = max((count for count, sizes in counted_buckets if len(sizes) > 1), default=0)
    group_size = 0
    if floor:  # the size that pads least; the largest of equals
        group_size = min(
            range(floor, max(repeats) + 1),
            key=lambda size: (sum(-count % size for count in repeats), -size),
        )
    groups = []
    for count, sizes in counted_buckets:
        num_groups = max(1, -(-count // group_size)) if group_size else 1
        groups += [
            [layer for layers in sizes.values() for layer in layers[i::num_groups]]
            for i in range(num_groups)
        ]
    return [KVCacheGroup(tuple(group)) for group in groups]
