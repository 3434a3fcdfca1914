"""vLLM: latents or keys and values beside index keys that are pooled, and recurrent states (GLM-5.3-Flash, Qwen3.8-Flash-Next).

Index keys have a row for `pooled_tokens` tokens, and a ring of those that are not pooled yet. States lie in the pages of the
rows, rings in those of index keys, so that a block is as large as its rows and index keys. Source: models/glm5next and
v1/core/kv_cache_utils.py (`_get_kv_cache_groups_glm5_next`) of vLLM 0.31; that keys and values are laid out alike was read off
a published start, whose tokens it gives to 0.03 %.
"""

from collections.abc import Iterable, Sequence

import msgspec

from kvcalc.capacity.engines.engine import INDEX_ROW
from kvcalc.capacity.engines.stored import Held, StoredEntry, pages
from kvcalc.capacity.engines.vllm_groups import Group, Placed, Spec, SpecKind
from kvcalc.errors import UserError

POOLED_ROWS = 32  # rows of index keys that a block holds at least a multiple of (DeepGEMM's pages)
ALIGNED, PLAIN = 128, 16  # tokens that a block of latents beside states is a multiple of, and one of keys and values


def pool_of(held: Sequence[Held]) -> int:
    """Tokens that one row of index keys stands for; 0 where they are not pooled."""
    return max((part.pooled_tokens for h in held for part in h.layer.parts), default=0)


def pooled_content(held: Held) -> Iterable[StoredEntry]:
    """What vLLM holds of a layer: of pooled index keys a row for a pool of tokens, the ring apart."""
    pool = pool_of([held])
    for part in held.parts:
        for entry in part:
            yield _pooled(entry, part, pool) if pool and entry.entry.role == "index_key" else entry


def _pooled(stored: StoredEntry, beside: Sequence[StoredEntry], pool: int) -> StoredEntry:
    """An index key as it is kept of a pool of tokens: beside latents in fp8, without the gates and the flag of single tokens."""
    if not any(s.entry.role == "latent" for s in beside):
        return stored._replace(entry=msgspec.structs.replace(stored.entry, ratio=pool))
    width = (stored.entry.width - 1) // 2
    return StoredEntry(msgspec.structs.replace(stored.entry, width=width, ratio=pool), stored.heads, INDEX_ROW)


def pooled_groups(title: str, held: Sequence[Held], block_size: int) -> tuple[list[Group], int]:
    """The groups, and tokens of a block: aligned ones, as many as a page needs to hold a state.

    Raises UserError where layers keep anything else, where states do not fit, and beside a draft.
    """
    pool, kept_rows, states = pool_of(held), list[tuple[int, int, int]](), list[tuple[int, int]]()
    latent = False
    for h in held:
        for kept in pages(title, h):
            if kept.states:
                states.append((h.stage, kept.state_bytes))
            elif kept.rows and kept.index_keys:
                latent = kept.latent
                kept_rows.append((h.stage, kept.row_bytes, _pooled(kept.index_keys[0], kept.rows, pool).row_bytes))
            else:
                raise UserError(f"{title}'s pages of pooled index keys beside other attention are not modelled")
    least, rows_of = (ALIGNED, POOLED_ROWS) if latent else (PLAIN, 1)
    align = max(least, pool * rows_of, -(-block_size // least) * least)
    row = kept_rows[0][1]
    block = max((align * -(-size // (align * row)) for _, size in states), default=align)
    page = block * row
    ring = Spec(SpecKind.RING, 0, (), padded=block // pool * kept_rows[0][2])
    rows = [(stage, Spec(SpecKind.FULL, row, (), 0, block, latent=latent)) for stage, row, _ in kept_rows]
    keys = [
        (stage, Spec(SpecKind.FULL, key, (), 0, block, block // pool * key, latent=True, main=False))
        for stage, _, key in kept_rows
    ]
    groups = [Group((*rows, *keys)), Group(tuple((stage, ring) for stage, *_ in kept_rows))]
    placed = [(stage, Spec(SpecKind.STATE, size, (), padded=page)) for stage, size in states]
    return groups + _dealt(placed, [stage for stage, *_ in kept_rows]), block


def _dealt(states: Sequence[Placed], latents: Sequence[int]) -> list[Group]:
    """States in turn to as many groups as no stage has more states than latents in one."""
    stages = sorted({stage for stage, _ in states})
    count = -(-len(states) // len(latents)) if states else 0
    for stage in stages:
        if not latents.count(stage):
            raise UserError(
                "vLLM shares pages of latents with states, and a pipeline stage has no latents", hint="Other stages may do"
            )
        count = max(count, -(-sum(where == stage for where, _ in states) // latents.count(stage)))
    return [Group(tuple(states[i::count])) for i in range(count)]
