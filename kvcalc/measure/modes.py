"""Ways to generate: with the cache and without, and what implementations do that costs bytes beside those of the model.

cached: a cache allocated before the first token. cat: one grown by `torch.cat`, which reads and writes what is cached again
in every step. repeat: K and V copied to every query head before attention. uncached: all tokens again in every step.
unfused: the same with the n × n scores of every head in memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.layers.attention import Grouped
from kvcalc.layers.batch import Batch
from kvcalc.layers.cache import CacheEntry
from kvcalc.measure.cache import DTYPES
from kvcalc.model.spec import Layer, Model

MODES = ("cached", "cat", "repeat", "uncached", "unfused")
HEADS = ("last", "all", "both")
SCORE_PASSES = 6  # over the scores of plain attention: written, masked in place, through the softmax, read for the values


class Mode(NamedTuple):
    """name: one of `MODES`. head: last or all, the positions that the LM head sees."""

    name: str
    head: str = "last"

    @property
    def caches(self) -> bool:
        """Whether a step passes one token alone."""
        return self.name in ("cached", "cat", "repeat")

    @property
    def kernel(self) -> str:
        return "plain" if self.name == "unfused" else "sdpa"

    def extra_bytes(self, model: Model, dtype: str, batch: Batch, block_size: int = 0) -> int:
        """What a pass moves beside its operators, in bytes.

        cat: every cached row read and written. repeat: K and V of all query heads written and read. unfused: the scores of
        every head, 6 times through memory; masks apart. A cache in blocks of `block_size`: all blocks that are read, copied.
        """
        count, new, past = (int(value) for value in msgspec.structs.astuple(batch.groups[0]))
        layers = [model.kinds[kind] for kind in model.order]
        elements = 0
        if self.caches and self.name != "cat" and block_size:
            elements = 2 * sum(_gathered(layer, owner, new, past, block_size) for layer, owner in _owned(layers))
        if self.name == "cat":
            elements = 2 * sum(_grown(e, new, past) for layer in layers if not layer.shares_cache for e in layer.entries)
        if self.name == "repeat":
            elements += 2 * sum(_repeated(layer, new, past) for layer in layers)
        if self.name == "unfused":
            heads = sum(part.as_mha()[0] for layer in layers for part in layer.mixers)
            elements = SCORE_PASSES * heads * new * (new + past)
        return count * elements * DTYPES[dtype].itemsize


def modes_of(model: Model, names: str, head: str) -> tuple[Mode, ...]:
    """The modes that `names` lists ('' for all), the cached one first; `repeat` only where query heads share K and V.

    Raises UserError on an unknown name or head.
    """
    if head not in HEADS:
        raise UserError(f"unknown head {head!r}", hint=f"Known: {', '.join(HEADS)}")
    asked = [name.strip() for name in names.split(",")] if names else list(MODES)
    for name in asked:
        if name not in MODES:
            raise UserError(f"unknown mode {name!r}", hint=nearest(name, MODES))
    if not any(_repeated(layer, 1, 0) for layer in model.kinds.values()):
        asked = [name for name in asked if name != "repeat"]
    positions = {"uncached": ("last", "all") if head == "both" else (head,)}
    chosen = [name for name in MODES if name in ("cached", *asked)]
    return tuple(Mode(name, rows) for name in chosen for rows in positions.get(name, ("last",)))


def _grown(entry: CacheEntry, new: int, past: int) -> int:
    """Elements of one sequence's rows that a grown entry keeps of those before."""
    if not entry.grows:
        return 0
    kept = int(entry.stored_rows(past))
    return (min(kept, max(0, entry.limit - new)) if entry.limit else kept) * entry.heads * entry.width


def _owned(layers: Sequence[Layer]) -> list[tuple[Layer, Layer]]:
    """Each layer with the one whose cache it reads: its own, or that of the last before it."""
    found: list[tuple[Layer, Layer]] = []
    for layer in layers:
        found.append((layer, found[-1][1] if layer.shares_cache and found else layer))
    return found


def _gathered(layer: Layer, owner: Layer, new: int, past: int, block_size: int) -> int:
    """Elements of one sequence in the blocks that a pass of a layer reads; several tokens under a window read none back."""
    entries = [entry for entry in owner.entries if entry.grows and not (entry.limit and new > 1)]
    return sum(int(entry.allocated_rows(new + past, block_size)) * entry.heads * entry.width for entry in entries)


def _repeated(layer: Layer, new: int, past: int) -> int:
    """Elements of K and V of all query heads over what a pass reads, in layers whose query heads share them."""
    found = 0
    for part in layer.mixers:
        if isinstance(part, Grouped) and part.num_key_value_heads < part.num_attention_heads:
            heads, key, value = part.as_mha()
            window = part.sliding_window
            rows = min(new + past, window - 1 + new) if window else new + past
            found += heads * (key + value) * rows
    return found
