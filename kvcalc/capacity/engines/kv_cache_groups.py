"""vLLM: cache specs to groups of layers that share a block table.

One pool of equal blocks serves all groups, so pages are made equal and layers are split into groups
of one size. Source: v1/core/kv_cache_planning.py of vLLM 0.33.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvcalc.errors import UserError

StageSpec = tuple[int, "Spec"]  # a pipeline stage and a layer's spec


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
        size = self.row if self.kind is SpecKind.STATE else self.row * self.block
        return self.padded or size

    @property
    def is_local(self) -> bool:
        """Whether a window or a chunk limits the tokens."""
        return self.kind in (SpecKind.WINDOW, SpecKind.CHUNK)


class KVCacheGroup(NamedTuple):
    """Layers with one block table. They need equally many blocks; `specs` may differ in width."""

    specs: tuple[StageSpec, ...]

    @property
    def spec(self) -> Spec:
        return self.specs[0][1]

    def pages(self, stage: int) -> list[int]:
        """Return the page size of each layer on a stage."""
        return [spec.page for spec_stage, spec in self.specs if spec_stage == stage]

    def widest_page(self) -> int:
        """Return the page of the widest layer, its index keys included."""
        main = max((s.page for _, s in self.specs if s.main), default=0)
        return main + max((s.page for _, s in self.specs if not s.main), default=0)


def group_layers(layers: Sequence[StageSpec]) -> list[KVCacheGroup]:
    """Return the groups of a model's layers. Raises UserError if pages cannot be made equal."""
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
                hint="Another cache dtype or block size may do",
            )
        # windows of keys and values next to latents
        return [KVCacheGroup(tuple(promote_windows(layers)))]
    buckets: dict[Spec, list[StageSpec]] = {}
    for stage, spec in equal_layers:
        buckets.setdefault(spec, []).append((stage, spec))
    size = choose_group_size([len(bucket) for bucket in buckets.values()])
    return [
        KVCacheGroup(tuple(bucket[i :: -(-len(bucket) // size)]))
        for bucket in buckets.values()
        for i in range(-(-len(bucket) // size))
    ]


def choose_group_size(layer_counts: Sequence[int]) -> int:
    """Return the number of layers per KV cache group.

    The smallest layer count is the group size, so only the larger attention types are split. If
    the largest count is below 1.5 times the smallest, the largest is the group size, because
    that needs fewer padding layers.

    Examples: 10 full and 20 window layers give 10, in 3 groups. 12 window and 13 full layers
    give 13, with 1 padding layer.
    """
    smallest, largest = min(layer_counts), max(layer_counts)
    return largest if 2 * largest < 3 * smallest else smallest


def _need_equal_blocks(layers: Sequence[StageSpec]) -> bool:
    """Return whether all layers have one kind, block and limit; for states, one page size."""
    return (
        len(
            {
                (s.kind, s.page) if s.kind is SpecKind.STATE else (s.kind, s.block, s.limit)
                for _, s in layers
            }
        )
        <= 1
    )


def _make_pages_equal(layers: Sequence[StageSpec]) -> list[StageSpec] | None:
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


def promote_windows(layers: Sequence[StageSpec]) -> list[StageSpec]:
    """Return the layers with windows and chunks allocated like full attention, if there is full
    attention (`--disable-hybrid-kv-cache-manager`).

    Raises:
        UserError: The layers then still need different blocks.
    """
    full_blocks = [spec.block for _, spec in layers if spec.kind is SpecKind.FULL]
    if not full_blocks or _need_equal_blocks(layers):
        results = list(layers)
    else:
        results = [
            (
                n,
                s._replace(kind=SpecKind.FULL, limit=0, block=full_blocks[0])
                if s.is_local
                else s,
            )
            for n, s in layers
        ]
    if not _need_equal_blocks(results):
        raise UserError(
            "vLLM needs its hybrid cache manager for layers that need different blocks"
        )
    return results
