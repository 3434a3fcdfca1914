"""vLLM: latents beside index keys that are pooled, and recurrent states (GLM-5.3-Flash).

Index keys have a row for `index_pool` tokens, and a ring of those that are not pooled yet. States lie in the pages of latents,
rings in those of index keys, so that a block is as large as its latents and index keys. Source: models/glm5next and
v1/core/kv_cache_utils.py (`_get_kv_cache_groups_glm5_next`) of vLLM 0.31.
"""

from collections.abc import Iterable, Sequence

import msgspec

from kvcalc.capacity.engines.engine import INDEX_ROW
from kvcalc.capacity.engines.stored import Held, StoredEntry, pages
from kvcalc.capacity.engines.vllm_groups import Group, Placed, Spec, SpecKind
from kvcalc.errors import UserError
from kvcalc.layers.attention import Sparse

POOLED_ROWS = 32  # rows of index keys that a block holds at least a multiple of (DeepGEMM's pages)
ALIGNED = 128  # tokens that a block of latents beside states is a multiple of


def pool_of(held: Sequence[Held]) -> int:
    """Tokens that one row of index keys stands for; 0 where they are not pooled."""
    return max((part.index_pool for h in held for part in h.layer.parts if isinstance(part, Sparse)), default=0)


def pooled_content(held: Held) -> Iterable[StoredEntry]:
    """What vLLM holds of a layer: of pooled index keys a row of fp8 for a pool of tokens, the ring apart."""
    pool = pool_of([held])
    for entry in (s for part in held.parts for s in part):
        if pool and entry.entry.role == "index_key":
            rows = msgspec.structs.replace(entry.entry, width=_key_width(entry), ratio=pool)
            yield StoredEntry(rows, entry.heads, INDEX_ROW)
        else:
            yield entry


def _key_width(stored: StoredEntry) -> int:
    """Of an index key that is kept beside its gates and a flag until it is pooled."""
    return (stored.entry.width - 1) // 2


def pooled_groups(title: str, held: Sequence[Held], block_size: int) -> tuple[list[Group], int]:
    """The groups, and tokens of a block: aligned ones, as many as a page needs to hold a state.

    Raises UserError where layers keep anything else, where states do not fit, and beside a draft.
    """
    pool, latents, states = pool_of(held), list[tuple[int, int, int]](), list[tuple[int, int]]()
    for h in held:
        for kept in pages(title, h):
            if kept.states:
                states.append((h.stage, kept.state_bytes))
            elif kept.latent and kept.index_keys:
                latents.append((h.stage, kept.row_bytes, INDEX_ROW.row_bytes(_key_width(kept.index_keys[0]))))
            else:
                raise UserError(f"{title}'s pages of pooled index keys beside other attention are not modelled")
    align = max(ALIGNED, pool * POOLED_ROWS, -(-block_size // ALIGNED) * ALIGNED)
    row = latents[0][1]
    block = max((align * -(-size // (align * row)) for _, size in states), default=align)
    page = block * row
    ring = Spec(SpecKind.RING, 0, (), padded=block // pool * latents[0][2])
    rows = [(stage, Spec(SpecKind.FULL, row, (), 0, block, latent=True)) for stage, row, _ in latents]
    keys = [
        (stage, Spec(SpecKind.FULL, key, (), 0, block, block // pool * key, latent=True, main=False)) for stage, _, key in latents
    ]
    groups = [Group((*rows, *keys)), Group(tuple((stage, ring) for stage, *_ in latents))]
    placed = [(stage, Spec(SpecKind.STATE, size, (), padded=page)) for stage, size in states]
    return groups + _dealt(placed, [stage for stage, *_ in latents]), block


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
