"""KV caches of one layer as torch tensors.

A cache has one tensor for each `CacheEntry` of a spec, so its bytes equal the prediction. All
tensors are allocated before the first token.

Entries with a limit are rings: the row of position p is in slot p mod limit. Shapes: B sequences,
h heads, w the width of the entry.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcalc.layers.cache import CacheEntry
from kvcalc.model.model import Model

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
FILL_ELEMENTS = 1 << 20


class CacheRows:
    """The rows of one cache entry for sequences of up to `capacity` tokens.

    Attributes:
        tensor: The stored rows, [B, h, rows, w].
    """

    def __init__(
        self,
        entry: CacheEntry,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.limit = entry.limit if entry.grows else 0
        self.capacity = capacity
        shape = batch, entry.heads, int(entry.stored_rows(capacity)), entry.width
        dtype = DTYPES[entry.dtype] if entry.dtype else dtype
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    def append(self, rows: Tensor, past: int) -> Tensor:
        """Write rows [B, h, n, w] after `past` tokens, and return the rows that they attend to.

        One new token overwrites the oldest row of a ring and reads the ring in any order, because
        keys include their positions. Several new tokens read the last limit − 1 rows and their own
        rows. They are written afterwards, because their first queries still attend to rows that
        the last new tokens replace.
        """
        new = rows.shape[2]
        end = past + new
        if end > self.capacity:
            raise ValueError(
                f"token {end} does not fit: the cache stores {self.capacity} tokens"
            )
        if not self.limit or new == 1:
            slot = past % self.limit if self.limit else past
            self.tensor[:, :, slot : slot + new] = rows
            return self.read(end)
        attended = rows
        if past:
            old = self.tensor.index_select(2, self._slots(max(0, past - self.limit + 1), past))
            attended = torch.cat((old, rows), 2)
        rows = rows[:, :, -self.limit :]
        self.tensor.index_copy_(2, self._slots(end - rows.shape[2], end), rows)
        return attended

    def _slots(self, start: int, end: int) -> Tensor:
        """Return the slots of positions start … end − 1 in a ring."""
        return torch.arange(start, end, device=self.tensor.device) % self.limit

    def read(self, tokens: int) -> Tensor:
        """Return the rows stored after `tokens` tokens, [B, h, rows, w]."""
        return self.tensor[:, :, : min(tokens, self.limit or tokens)]


LayerCache = tuple[CacheRows, ...]  # rows and states in the order of the layer's entries


def layer_cache(
    entries: Sequence[CacheEntry],
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LayerCache:
    """Return the empty cache of one layer; `dtype` is for entries that do not set their own."""
    return tuple(CacheRows(entry, batch, capacity, dtype, device) for entry in entries)


def model_caches(
    model: Model, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Return one cache per layer. A layer that shares a cache gets the cache of the layer
    before it."""
    caches: list[LayerCache] = []
    for kind in model.order:
        layer = model.kinds[kind]
        if layer.shares_cache and caches:
            caches.append(caches[-1])
        else:
            caches.append(layer_cache(layer.entries, batch, capacity, dtype, device))
    return caches


def cache_tensors(caches: Iterable[LayerCache]) -> list[Tensor]:
    """Return the tensors of all caches; a shared cache counts once."""
    return [rows.tensor for cache in dict.fromkeys(caches) for rows in cache]


def storage_bytes(caches: Iterable[LayerCache]) -> int:
    """Return the bytes of all tensors; a shared cache counts once."""
    return sum(tensor.untyped_storage().nbytes() for tensor in cache_tensors(caches))


def fill(caches: Iterable[LayerCache]) -> None:
    """Write random rows: the same 2^20 elements repeated, which is fast and enough for timing."""
    for tensor in cache_tensors(caches):
        flat = tensor.view(-1)
        values = torch.randn(min(flat.numel(), FILL_ELEMENTS), device=tensor.device)
        for part in flat.split(FILL_ELEMENTS):
            part.copy_(values[: part.numel()])
