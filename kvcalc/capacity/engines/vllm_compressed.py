"""vLLM's pages of pooled index keys and of compressed attention.

Pooled index keys with latents or keys and values, and recurrent states (GLM-5.3-Flash,
Qwen3.8-Flash-Next): index keys have one row per `pooled_tokens` tokens, and a ring for tokens that
are not pooled yet. States are in the pages of the rows, rings in those of index keys, so a block
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

from collections.abc import Iterable, Sequence

import msgspec

from kvcalc.capacity.engines.engine import INDEX_ROW
from kvcalc.capacity.engines.kv_cache_groups import KVCacheGroup, Placed, Spec, SpecKind
from kvcalc.capacity.engines.layout import LayerCache, StoredEntry, StoredPart, pages
from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.model.model import Model

POOLED_ROWS = (
    32  # rows of index keys that a block holds at least a multiple of (DeepGEMM's pages)
)
# tokens that a block of latents beside states is a multiple of, and one of keys and values
LATENT_BLOCK_MULTIPLE, PLAIN = 128, 16


def pool_of(held: Sequence[LayerCache]) -> int:
    """Tokens that one row of index keys stands for; 0 where they are not pooled."""
    return max((part.pooled_tokens for h in held for part in h.layer.parts), default=0)


def pooled_content(held: LayerCache) -> Iterable[StoredEntry]:
    """Return the entries that vLLM stores of a layer: pooled index keys have one row per pool of
    tokens."""
    pool = pool_of([held])
    for part in held.parts:
        for entry in part:
            yield (
                _pooled(entry, part, pool)
                if pool and entry.entry.role == "index_key"
                else entry
            )


def _pooled(stored: StoredEntry, beside: Sequence[StoredEntry], pool: int) -> StoredEntry:
    """Return an index key as stored for a pool of tokens; with latents in fp8, without gates and
    flag."""
    if not any(s.entry.role == "latent" for s in beside):
        return stored._replace(entry=msgspec.structs.replace(stored.entry, ratio=pool))
    width = (stored.entry.width - 1) // 2
    return StoredEntry(
        msgspec.structs.replace(stored.entry, width=width, ratio=pool),
        stored.heads,
        INDEX_ROW,
    )


def pooled_groups(
    title: str, held: Sequence[LayerCache], block_size: int
) -> tuple[list[KVCacheGroup], int]:
    """The groups, and tokens of a block: aligned ones, as many as a page needs to hold a state.

    Raises UserError where layers keep anything else, where states do not fit, and beside a draft.
    """
    pool, latent = pool_of(held), False
    rows: list[tuple[int, int, int]] = []  # stage, bytes of a row, bytes of an index key
    states: list[tuple[int, int]] = []
    for layer in held:
        for part in pages(title, layer):
            if part.states:
                states.append((layer.stage, part.state_bytes))
            elif part.rows and part.index_keys:
                latent = part.latent
                key_bytes = _pooled(part.index_keys[0], part.rows, pool).row_bytes
                rows.append((layer.stage, part.row_bytes, key_bytes))
            else:
                raise UserError(
                    f"{title}'s pages of pooled index keys beside other attention are not modelled"
                )
    multiple, pool_rows = (LATENT_BLOCK_MULTIPLE, POOLED_ROWS) if latent else (PLAIN, 1)
    align = max(multiple, pool * pool_rows, -(-block_size // multiple) * multiple)
    row = rows[0][1]
    block = max((align * -(-size // (align * row)) for _, size in states), default=align)
    ring = Spec(SpecKind.RING, 0, (), padded=block // pool * rows[0][2])
    full: list[Placed] = [
        (stage, Spec(SpecKind.FULL, row, (), 0, block, latent=latent)) for stage, row, _ in rows
    ]
    full += [
        (
            stage,
            Spec(SpecKind.FULL, key, (), 0, block, block // pool * key, True, main=False),
        )
        for stage, _, key in rows
    ]
    row_stages = [stage for stage, *_ in rows]
    placed = [
        (stage, Spec(SpecKind.STATE, size, (), padded=block * row)) for stage, size in states
    ]
    return [
        KVCacheGroup(tuple(full)),
        KVCacheGroup(tuple((stage, ring) for stage in row_stages)),
        *_dealt(placed, row_stages),
    ], block


def _dealt(states: Sequence[Placed], latents: Sequence[int]) -> list[KVCacheGroup]:
    """States in turn to as many groups as no stage has more states than latents in one."""
    stages = sorted({stage for stage, _ in states})
    count = -(-len(states) // len(latents)) if states else 0
    for stage in stages:
        if not latents.count(stage):
            raise UserError(
                "vLLM shares pages of latents with states, and a pipeline stage has no latents",
                hint="Other stages may do",
            )
        count = max(
            count,
            -(-sum(where == stage for where, _ in states) // latents.count(stage)),
        )
    return [KVCacheGroup(tuple(states[i::count])) for i in range(count)]


BLOCK, WINDOW_BLOCK = (
    256,
    64,
)  # tokens of a block of compressed rows, and of one of the window
STATE_BLOCKS = {
    4: 4,
    128: 8,
}  # tokens of a compressor's block, by the tokens that it makes one
SCALES = 8  # bytes of a packed row's scales: one a 64 values, padded
ROWS = ("latent", "rope_key")
ROLES = {*ROWS, "index_key", "compressor"}
ALIGNED = {"fp8_ds_mla": 576, "bf16": 512}  # bytes that every page is a multiple of


def compresses(held: Sequence[LayerCache]) -> bool:
    """Return whether a model's layers compress their latents and store nothing else, so that the
    packed pages apply.

    Raises:
        UserError: Layers read the compressed latents of others (models/deepseek_v41: records of 528
            bytes on some GPUs, windows in blocks of 32 or 64, rings of compressor states).
    """
    kinds = {id(layer.parts): layer.parts for layer in held}.values()
    parts = [[stored.entry for stored in part] for layer in kinds for part in layer]
    entries = [entry for part in parts for entry in part]
    if any(e.is_stored_by_other_layer for e in entries) and any(
        e.role == "compressor" for e in entries
    ):
        raise UserError(
            f"vLLM keeps {held[0].model.name} in other pages than DeepSeek-V4, which are not "
            "modelled",
            hint="Engine none counts its content",
        )
    return _compresses(parts)


def compresses_tokens(model: Model) -> bool:
    """Return the same of a model, before its entries have formats."""
    return _compresses(
        part.cache() for layer in model.kinds.values() for part in (*layer.parts, *layer.shared)
    )


def _compresses(parts: Iterable[Sequence[CacheEntry]]) -> bool:
    """Return whether all parts store latents, and those that are not compressed in a window."""
    has_compressor = False
    for entries in filter(None, parts):
        near = [e for e in entries if e.ratio == 1]
        if not near or any(e.is_stored_by_other_layer or e.role not in ROLES for e in entries):
            return False
        if not all(e.limit and e.role in ROWS for e in near):
            return False
        has_compressor |= any(e.role == "compressor" for e in entries)
    return has_compressor


def compressed_specs(part: StoredPart, block: int) -> list[Spec]:
    """Return the specs of one layer. An entry that compresses has blocks of `block` tokens.

    Raises UserError for rows or ratios for which vLLM has no pages.
    """
    rows = [s for s in part if s.entry.role in ROWS]
    dtype = rows[0].format.name.replace("fp8_block128", "fp8_ds_mla")
    if dtype not in ALIGNED:
        raise UserError(
            f"vLLM keeps compressed latents packed in fp8 or in bf16, not in {dtype}"
        )
    aligned, kept = ALIGNED[dtype], [s for s in rows if s.entry.ratio == 1]
    results = [
        _spec(
            SpecKind.WINDOW,
            _row(kept, dtype),
            WINDOW_BLOCK,
            aligned,
            limit=kept[0].entry.limit,
        )
    ]
    ratio = max(s.entry.ratio for s in part)
    if ratio == 1:
        return results
    if ratio not in STATE_BLOCKS:
        raise UserError(f"vLLM compresses 4 or 128 tokens to one, not {ratio}")
    series = 2 if any(s.entry.span is Span.OVERLAP for s in part) else 1
    keys = [s for s in part if s.entry.role == "index_key"]
    widths = [sum(s.entry.width for s in kept), *(s.entry.width for s in keys)]
    main = [s for s in rows if s.entry.ratio > 1]
    results.append(_spec(SpecKind.FULL, _row(main, dtype), block, aligned, ratio))
    results += [_spec(SpecKind.FULL, s.row_bytes, block, aligned, ratio) for s in keys]
    # a key-value and a gate of each series, fp32
    states = (2 * series * width * 4 for width in widths)
    return results + [
        _spec(SpecKind.WINDOW, row, STATE_BLOCKS[ratio], aligned, limit=series * ratio)
        for row in states
    ]


def _row(rows: Sequence[StoredEntry], dtype: str) -> int:
    """Bytes of one latent with its rotated key: in fp8 and bf16 with scales, or all in bf16."""
    plain, rotated = (
        sum(s.entry.width for s in rows if s.entry.role == role)
        for role in ("latent", "rope_key")
    )
    return plain + 2 * rotated + SCALES if dtype == "fp8_ds_mla" else 2 * (plain + rotated)


def _spec(
    kind: SpecKind, row: int, block: int, aligned: int, ratio: int = 1, limit: int = 0
) -> Spec:
    page = -(-(block // ratio * row) // aligned) * aligned
    return Spec(
        kind,
        row,
        (("row", ratio, row),),
        limit,
        block,
        page,
        latent=True,
        main=limit == 0,
    )


def packed_groups(layers: Sequence[Placed]) -> list[KVCacheGroup]:
    """Return groups with pages of any size: layers that need the same blocks together, split so
    that groups have equally many repeats."""
    buckets: dict[tuple[SpecKind, int, int], dict[int, list[Placed]]] = {}
    for placed in layers:
        spec = placed[1]
        sizes = buckets.setdefault((spec.kind, spec.block, spec.limit), {})
        sizes.setdefault(spec.page, []).append(placed)
    even = [b for b in buckets.values() if len({len(same) for same in b.values()}) == 1]
    floor = max((_repeats(b) for b in even if len(b) > 1), default=0)
    repeats = _least_padding([_repeats(b) for b in even], floor) if floor else 0
    groups = []
    for bucket in buckets.values():
        count = -(-_repeats(bucket) // repeats) if bucket in even and repeats else 1
        if count == 1:
            groups.append([placed for same in bucket.values() for placed in same])
        else:
            pattern = list(zip(*bucket.values(), strict=True))
            groups += [
                [placed for repeat in pattern[i::count] for placed in repeat]
                for i in range(count)
            ]
    return [KVCacheGroup(tuple(group)) for group in groups]


def tuple_bytes(groups: Sequence[KVCacheGroup], stage: int) -> int:
    """Bytes of a block before 0.24: the sizes that full layers' pages have · the most layers of one
    size in any group.

    A window's page counts as the next of those sizes (v1/core/kv_cache_utils.py:
    _get_kv_cache_config_deepseek_v4, 0.22).
    """
    sizes = sorted(
        {
            s.page
            for g in groups
            for where, s in g.specs
            if s.kind is SpecKind.FULL and where == stage
        }
    )
    most = 0
    for group in groups:
        pages = [s.page for where, s in group.specs if where == stage]
        raised = [min((size for size in sizes if size >= page), default=page) for page in pages]
        most = max([most, *(raised.count(size) for size in raised)])
    return sum(sizes) * most


def _repeats(bucket: dict[int, list[Placed]]) -> int:
    """Layers of the page size that most of a bucket have."""
    return max(len(same) for same in bucket.values())


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size from `floor` up that pads these counts the least; of equal ones the
    largest."""
    return min(
        range(floor, max(counts) + 1),
        key=lambda d: (sum(-count % d for count in counts), -d),
    )
