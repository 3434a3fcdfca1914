"""KV caches of one layer as torch tensors: contiguous, or paged with a block table.

A cache has one tensor for each `CacheEntry` of a spec, so its bytes equal the prediction:
`stored_rows` of a contiguous cache, `allocated_rows` of a paged one. All tensors are allocated
before the first token.

Entries with a limit are rings: the row of position p is in slot p mod limit. States are never
paged. Shapes: B sequences, h heads, w the width of the entry.
"""

from collections.abc import Sequence
from typing import Any

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
    """The rows of one cache entry in one tensor [B, h, rows, w]. Reading returns a view."""

    def __init__(self, entry: CacheEntry, capacity: int, tensor: Tensor) -> None:
        self.limit = entry.limit if entry.grows else 0
        self.capacity = capacity
        self.tensor = tensor

    def write(self, rows: Tensor, past: int) -> None:
        """Write rows [B, h, new, w] at positions past … past + new − 1.

        A ring stores only the last `limit` rows.
        """
        end = past + rows.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"token {end} does not fit: the cache stores {self.capacity} tokens"
            )
        if self.limit:
            rows = rows[:, :, -self.limit :]
        self._store(rows, end - rows.shape[2])

    def _store(self, rows: Tensor, first: int) -> None:
        count = rows.shape[2]
        start = first % self.limit if self.limit else first
        if start + count <= self.tensor.shape[2]:
            self.tensor[:, :, start : start + count] = rows
        else:
            self.tensor.index_copy_(2, self._slots(first, count), rows)

    def _slots(self, first: int, count: int) -> Tensor:
        """Return the slots of `count` positions from `first` on."""
        positions = torch.arange(first, first + count, device=self.tensor.device)
        return positions % self.limit if self.limit else positions

    def read(self, tokens: int) -> Tensor:
        """Return the rows stored after `tokens` tokens, [B, h, rows, w].

        Rows are in order of position, or in order of slot after a ring has wrapped.
        """
        return self.tensor[:, :, : min(tokens, self.limit or tokens)]

    def last(self, tokens: int, count: int) -> Tensor:
        """Return the latest `count` of `tokens` tokens in order of position, [B, h, count, w]."""
        if not self.limit or tokens <= self.limit:
            return self.tensor[:, :, tokens - count : tokens]
        return self.tensor.index_select(2, self._slots(tokens - count, count))


class PagedRows(CacheRows):
    """A pool of blocks [blocks, block_size, h, w] and a block table [B, blocks per sequence].

    The table is shuffled, like the table of a pool in use. Reading copies the blocks, because torch
    has no paged kernel.
    """

    def __init__(self, entry: CacheEntry, capacity: int, tensor: Tensor, batch: int) -> None:
        super().__init__(entry, capacity, tensor)
        blocks, self.block_size = tensor.shape[:2]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks))
        self.table = order.view(batch, -1).to(tensor.device)

    def _store(self, rows: Tensor, first: int) -> None:
        slots = self._slots(first, rows.shape[2])
        blocks = self.table[:, slots // self.block_size]
        self.tensor[blocks, slots % self.block_size] = rows.transpose(1, 2)

    def read(self, tokens: int) -> Tensor:
        rows = min(tokens, self.limit or tokens)
        blocks = self.table[:, : -(-rows // self.block_size)]
        copied = self.tensor[blocks]  # [B, blocks, block_size, h, w]
        return copied.flatten(1, 2)[:, :rows].transpose(1, 2)

    def last(self, tokens: int, count: int) -> Tensor:
        slots = self._slots(tokens - count, count)
        blocks = self.table[:, slots // self.block_size]
        return self.tensor[blocks, slots % self.block_size].transpose(1, 2)


class TorchLayerCache:
    """The cache of one layer for `batch` sequences of up to `capacity` tokens.

    Attributes:
        rows: Rows and states in the order of `entries`.
    """

    def __init__(
        self,
        entries: Sequence[CacheEntry],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        block_size: int = 0,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the tensors.

        Args:
            entries: Cache entries of the layer.
            batch: Number of sequences.
            capacity: Maximum number of tokens of a sequence.
            dtype: Type of entries that do not set their own.
            device: Torch device.
            block_size: Tokens per block of a paged cache; 0 for a contiguous cache.
            state_dtype: Type of recurrent states, instead of the type that the spec sets.
        """
        self.rows: list[CacheRows] = []
        for entry in entries:
            entry_dtype = (state_dtype or DTYPES[entry.dtype]) if entry.dtype else dtype
            is_paged = bool(block_size) and entry.grows
            if is_paged:
                blocks = int(entry.allocated_rows(capacity, block_size)) // block_size
                shape = batch * blocks, block_size, entry.heads, entry.width
            else:
                shape = batch, entry.heads, int(entry.stored_rows(capacity)), entry.width
            tensor = torch.zeros(shape, dtype=entry_dtype, device=device)
            if is_paged:
                self.rows.append(PagedRows(entry, capacity, tensor, batch))
            else:
                self.rows.append(CacheRows(entry, capacity, tensor))

    @property
    def tensors(self) -> list[Tensor]:
        return [rows.tensor for rows in self.rows]

    def fill(self) -> None:
        """Write random rows: the same 2^20 elements repeated, which is fast and enough for
        timing."""
        for tensor in self.tensors:
            flat = tensor.view(-1)
            values = torch.randn(min(flat.numel(), FILL_ELEMENTS), device=tensor.device)
            for part in flat.split(FILL_ELEMENTS):
                part.copy_(values[: part.numel()])


def model_caches(
    model: Model,
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> list[TorchLayerCache]:
    """Return one cache per layer. A layer that shares a cache gets the cache of the layer
    before it."""
    caches: list[TorchLayerCache] = []
    for kind in model.order:
        layer = model.kinds[kind]
        if layer.shares_cache and caches:
            caches.append(caches[-1])
        else:
            caches.append(
                TorchLayerCache(layer.entries, batch, capacity, dtype, device, **options)
            )
    return caches
