"""vLLM: cache specs to groups of layers that share a block table.

One pool of equal blocks serves all groups, so pages are made equal and layers are cut into groups
of one size. Source: v1/core/kv_cache_planning.py of vLLM 0.33.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvcalc.errors import UserError

Placed = tuple[int, "Spec"]  # a pipeline stage and a layer's spec


class SpecKind(StrEnum):
    FULL = "full"  # also latents and their index keys
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    RING = "ring"  # tokens that are not pooled yet: one block at any length


class Spec(NamedTuple):
    """One layer's cache: `row` bytes per token, or of the whole state, in blocks of `block` tokens.

    Attributes:
        shape: Distinguishes rows of the same size.
        limit: Window or chunk.
        padded: The page size, if it is larger than its content.
        main: False for the keys of an indexer.
    """

    kind: SpecKind
    row: int
    shape: tuple[tuple[str, int, int], ...]
    limit: int = 0
    block: int = 0
    padded: int = 0
    latent: bool = False
    main: bool = True

    @property
    def page(self) -> int:
        """Bytes of one block of this layer."""
        return self.padded or (
            self.row if self.kind is SpecKind.STATE else self.row * self.block
        )

    def in_blocks(self, block: int) -> "Spec":
        """The same in blocks of so many tokens; a state has no tokens."""
        return self if self.kind is SpecKind.STATE else self._replace(block=block)


class KVCacheGroup(NamedTuple):
    """Layers with one block table. They need equally many blocks; `specs` may differ in width."""

    specs: tuple[Placed, ...]

    @property
    def spec(self) -> Spec:
        return self.specs[0][1]

    def page_bytes(self, stage: int) -> int:
        """Bytes of one block of this group on a stage: Σ pages."""
        return sum(s.page for where, s in self.specs if where == stage)

    def pages(self, stage: int) -> list[tuple[int, int]]:
        """(page size, how many layers) on a stage."""
        sizes = [s.page for where, s in self.specs if where == stage]
        return [(size, sizes.count(size)) for size in dict.fromkeys(sizes)]

    def widest_page(self) -> int:
        """The widest layer's page, its index keys included."""
        main = max((s.page for _, s in self.specs if s.main), default=0)
        return main + max((s.page for _, s in self.specs if not s.main), default=0)


def groups_of(layers: Sequence[Placed]) -> list[KVCacheGroup]:
    """The groups of a model's layers. Raises UserError where their pages cannot be made equal."""
    if not layers:
        return []
    if _uniform([s for _, s in layers]):
        return [KVCacheGroup(tuple(layers))]
    unified = _unified(layers)
    if unified is None:
        return _fallback(layers)
    buckets: dict[Spec, list[Placed]] = {}
    for placed in unified:
        buckets.setdefault(placed[1], []).append(placed)
    counts = [len(b) for b in buckets.values()]
    size = group_size(counts)
    groups = []
    for bucket in buckets.values():
        parts = -(-len(bucket) // size)
        groups += [KVCacheGroup(tuple(bucket[i::parts])) for i in range(parts)]
    return groups


def group_size(counts: Sequence[int]) -> int:
    """Return the number of layers per KV cache group.

    It is the smallest count of any kind of layer. If the largest count is below 1.5 times the
    smallest, it is the largest. Example: 10 full and 20 window layers give 10, in 3 groups.
    """
    least, most = min(counts), max(counts)
    return most if 2 * most < 3 * least else least


def _uniform(specs: Sequence[Spec]) -> bool:
    """Whether all layers need the same blocks: one kind, block and limit; for states, one page."""
    first = specs[0]
    if first.kind is SpecKind.STATE:
        return all(s.kind is SpecKind.STATE and s.page == first.page for s in specs)
    return all(
        (s.kind, s.block, s.limit) == (first.kind, first.block, first.limit) for s in specs
    )


def _unified(layers: Sequence[Placed]) -> list[Placed] | None:
    """The layers with pages of one size: the largest. None where a page of latents would have to be
    padded.

    A smaller page that divides it gets a larger block; other pages of keys and values, and states,
    are padded.
    """
    largest = max(s.page for _, s in layers)
    results = []
    for stage, spec in layers:
        page, used = spec.page, spec
        if page == largest:
            pass
        elif spec.kind is SpecKind.STATE:
            used = spec._replace(padded=largest)
        elif largest % page == 0:
            used = spec._replace(block=spec.block * (largest // page))
        elif not spec.latent:
            used = spec._replace(padded=largest)
        else:
            return None
        results.append((stage, used))
    return results


def _fallback(layers: Sequence[Placed]) -> list[KVCacheGroup]:
    """Windows of keys and values beside latents, allocated like full attention in one group; no
    other mix has a rule."""
    kinds = {(s.kind, s.latent) for _, s in layers}
    if not kinds <= {
        (SpecKind.FULL, True),
        (SpecKind.FULL, False),
        (SpecKind.WINDOW, False),
    }:
        raise UserError(
            "vLLM cannot make the pages of these layers equal",
            hint="Another cache dtype or block size may do",
        )
    return [KVCacheGroup(tuple(promoted(layers)))]


def promoted(layers: Sequence[Placed]) -> list[Placed]:
    """Windows and chunks allocated like full attention, where there is some
    (`--disable-hybrid-kv-cache-manager`).

    Raises UserError where the layers then still need different blocks.
    """
    specs = [s for _, s in layers]
    if not specs or _uniform(specs):
        return list(layers)
    results, full = list(layers), [s.block for s in specs if s.kind is SpecKind.FULL]
    if full:
        local = (SpecKind.WINDOW, SpecKind.CHUNK)
        results = [
            (
                w,
                s._replace(kind=SpecKind.FULL, limit=0, block=full[0])
                if s.kind in local
                else s,
            )
            for w, s in layers
        ]
    if not _uniform([s for _, s in results]):
        raise UserError(
            "vLLM needs its hybrid cache manager for layers that keep different blocks"
        )
    return results
