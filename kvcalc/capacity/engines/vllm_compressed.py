"""vLLM: the pages of compressed attention (DeepSeek-V4), which lie beside each other in one block whatever their sizes.

Every layer keeps a window of latents. One that compresses keeps its compressed latents too, the index keys that choose among
them, and what its compressors have not finished: key-values and gates in fp32, as a window of one block of tokens, of two
where blocks overlap. Source: models/deepseek_v4/{attention,compressor}.py, v1/attention/backends/mla/sparse_swa.py and
v1/core/kv_cache_planning.py (`_get_packed_kv_cache_groups`) of vLLM 0.33.
"""

from collections.abc import Iterable, Sequence

from kvcalc.capacity.engines.stored import Held, StoredEntry, StoredPart
from kvcalc.capacity.engines.vllm_groups import Group, Placed, Spec, SpecKind
from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.model.spec import Model

BLOCK, WINDOW_BLOCK = 256, 64  # tokens of a block of compressed rows, and of one of the window
STATE_BLOCKS = {4: 4, 128: 8}  # tokens of a compressor's block, by the tokens that it makes one
SCALES = 8  # bytes of a packed row's scales: one a 64 values, padded
ROWS = ("latent", "rope_key")
ROLES = {*ROWS, "index_key", "compressor"}
ALIGNED = {"fp8_ds_mla": 576, "bf16": 512}  # bytes that every page is a multiple of


def compresses(held: Sequence[Held]) -> bool:
    """Whether a model's layers compress their latents, and keep nothing but those: what the packed pages are for.

    Raises UserError where layers read the compressed latents of others (models/deepseek_v41: records of 528 bytes on some GPUs,
    windows in blocks of 32 or 64, rings of compressor states).
    """
    kinds = {id(h.parts): h.parts for h in held}.values()
    parts = [[s.entry for s in part] for kept in kinds for part in kept]
    entries = [e for part in parts for e in part]
    if any(e.lent for e in entries) and any(e.role == "compressor" for e in entries):
        raise UserError(
            f"vLLM keeps {held[0].model.name} in other pages than DeepSeek-V4, which are not modelled",
            hint="Engine none counts its content",
        )
    return _compresses(parts)


def compresses_tokens(model: Model) -> bool:
    """The same of a model, before its entries have formats."""
    return _compresses(part.cache() for layer in model.kinds.values() for part in (*layer.parts, *layer.shared))


def _compresses(parts: Iterable[Sequence[CacheEntry]]) -> bool:
    kept = list(filter(None, parts))
    return all(map(_windowed, kept)) and any(e.role == "compressor" for entries in kept for e in entries)


def _windowed(entries: Sequence[CacheEntry]) -> bool:
    """Whether what one part keeps are latents, those of them that are not compressed a window."""
    near = [e for e in entries if e.ratio == 1]
    if any(e.lent for e in entries):
        return False
    return {e.role for e in entries} <= ROLES and bool(near) and all(e.limit and e.role in ROWS for e in near)


def compressed_specs(part: StoredPart, block: int) -> list[Spec]:
    """The specs of one layer, each in blocks of its own, `block` tokens where it compresses.

    Raises UserError for rows or ratios that vLLM has no pages for.
    """
    rows = [s for s in part if s.entry.role in ROWS]
    dtype = rows[0].format.name.replace("fp8_block128", "fp8_ds_mla")
    if dtype not in ALIGNED:
        raise UserError(f"vLLM keeps compressed latents packed in fp8 or in bf16, not in {dtype}")
    aligned, kept = ALIGNED[dtype], [s for s in rows if s.entry.ratio == 1]
    found = [_spec(SpecKind.WINDOW, _row(kept, dtype), WINDOW_BLOCK, aligned, limit=kept[0].entry.limit)]
    ratio = max(s.entry.ratio for s in part)
    if ratio == 1:
        return found
    if ratio not in STATE_BLOCKS:
        raise UserError(f"vLLM compresses 4 or 128 tokens to one, not {ratio}")
    series = 2 if any(s.entry.span is Span.OVERLAP for s in part) else 1
    keys = [s for s in part if s.entry.role == "index_key"]
    widths = [sum(s.entry.width for s in kept), *(s.entry.width for s in keys)]
    main = [s for s in rows if s.entry.ratio > 1]
    found.append(_spec(SpecKind.FULL, _row(main, dtype), block, aligned, ratio))
    found += [_spec(SpecKind.FULL, s.row_bytes, block, aligned, ratio) for s in keys]
    states = (2 * series * width * 4 for width in widths)  # a key-value and a gate of each series, fp32
    return found + [_spec(SpecKind.WINDOW, row, STATE_BLOCKS[ratio], aligned, limit=series * ratio) for row in states]


def _row(rows: Sequence[StoredEntry], dtype: str) -> int:
    """Bytes of one latent with its rotated key: in fp8 and bf16 with scales, or all in bf16."""
    plain, rotated = (sum(s.entry.width for s in rows if s.entry.role == role) for role in ("latent", "rope_key"))
    return plain + 2 * rotated + SCALES if dtype == "fp8_ds_mla" else 2 * (plain + rotated)


def _spec(kind: SpecKind, row: int, block: int, aligned: int, ratio: int = 1, limit: int = 0) -> Spec:
    page = -(-(block // ratio * row) // aligned) * aligned
    return Spec(kind, row, (("row", ratio, row),), limit, block, page, latent=True, main=limit == 0)


def packed_groups(layers: Sequence[Placed]) -> list[Group]:
    """Groups of pages of any size: layers that need the same blocks together, split so that groups hold as many repeats."""
    buckets: dict[tuple[SpecKind, int, int], dict[int, list[Placed]]] = {}
    for placed in layers:
        spec = placed[1]
        buckets.setdefault((spec.kind, spec.block, spec.limit), {}).setdefault(spec.page, []).append(placed)
    even = [b for b in buckets.values() if len({len(same) for same in b.values()}) == 1]
    floor = max((_repeats(b) for b in even if len(b) > 1), default=0)
    repeats = _least_padding([_repeats(b) for b in even], floor) if floor else 0
    found = []
    for bucket in buckets.values():
        count = -(-_repeats(bucket) // repeats) if bucket in even and repeats else 1
        if count == 1:
            found.append(Group(tuple(placed for same in bucket.values() for placed in same)))
            continue
        pattern = list(zip(*bucket.values(), strict=True))
        found += [Group(tuple(placed for repeat in pattern[i::count] for placed in repeat)) for i in range(count)]
    return found


def tuple_bytes(groups: Sequence[Group], stage: int) -> int:
    """Bytes of a block before 0.24: the sizes that full layers' pages have · the most layers of one size in any group.

    A window's page counts as the next of those sizes (v1/core/kv_cache_utils.py: _get_kv_cache_config_deepseek_v4, 0.22).
    """
    sizes = sorted({s.page for g in groups for where, s in g.specs if s.kind is SpecKind.FULL and where == stage})
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
    """The group size from `floor` up that pads these counts the least; of equal ones the largest."""
    return min(range(floor, max(counts) + 1), key=lambda d: (sum(-count % d for count in counts), -d))
