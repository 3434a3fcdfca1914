"""KV caches of one layer as torch tensors: contiguous, paged with a block table, or grown by `cat`.

A cache has one tensor for each `CacheEntry` of a spec, so its bytes equal the prediction:
`stored_rows` of a contiguous cache, `allocated_rows` of a paged one. All tensors except those of a
grown cache are allocated before the first token.

Entries with a limit are rings: the row of position p is in slot p mod limit. States are never paged.
Shapes: B sequences, h heads, w the width of the entry.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcalc.layers.cache import CacheEntry

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class CacheRows(Protocol):
    """The rows of one cache entry."""

    tensor: Tensor
    limit: int

    def write(self, rows: Tensor, past: int) -> None:
        """Write rows [B, h, new, w] at positions past … past + new − 1."""

    def read(self, tokens: int) -> Tensor:
        """Return the rows stored after `tokens` tokens, [B, h, rows, w].

        Rows are in order of position, or in order of slot after a ring has wrapped.
        """

    def last(self, tokens: int, count: int) -> Tensor:
        """Return the latest `count` of `tokens` tokens in order of position, [B, h, count, w]."""


def _slots(limit: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the slots of `count` positions from `first` on."""
    positions = torch.arange(first, first + count, device=device)
    return positions % limit if limit else positions


class Contiguous:
    """One tensor [B, h, rows, w]. Reading returns a view."""

    def __init__(
        self,
        entry: CacheEntry,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.limit = entry.limit if entry.grows else 0
        self.capacity = capacity
        rows = int(entry.stored_rows(capacity))
        self.tensor = torch.zeros(batch, entry.heads, rows, entry.width, dtype=dtype, device=device)

    def write(self, rows: Tensor, past: int) -> None:
        first, new_rows = _rows_to_store(rows, past, self.limit, self.capacity)
        start = first % self.limit if self.limit else first
        count = new_rows.shape[2]
        if start + count <= self.tensor.shape[2]:
            self.tensor[:, :, start : start + count] = new_rows
        else:
            slots = _slots(self.limit, first, count, rows.device)
            self.tensor.index_copy_(2, slots, new_rows)

    def read(self, tokens: int) -> Tensor:
        return self.tensor[:, :, : min(tokens, self.limit or tokens)]

    def last(self, tokens: int, count: int) -> Tensor:
        if not self.limit or tokens <= self.limit:
            return self.tensor[:, :, tokens - count : tokens]
        slots = _slots(self.limit, tokens - count, count, self.tensor.device)
        return self.tensor.index_select(2, slots)


class Grown:
    """A tensor [B, h, rows, w] that `torch.cat` copies in every pass that writes."""

    def __init__(
        self,
        entry: CacheEntry,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.limit = entry.limit
        self.capacity = capacity
        self.tensor = torch.zeros(batch, entry.heads, 0, entry.width, dtype=dtype, device=device)

    def write(self, rows: Tensor, past: int) -> None:
        _, new_rows = _rows_to_store(rows, past, self.limit, self.capacity)
        old_rows = self.tensor
        if self.limit:
            surplus = old_rows.shape[2] + new_rows.shape[2] - self.limit
            old_rows = old_rows[:, :, max(0, surplus) :]
        self.tensor = torch.cat((old_rows, new_rows), 2)

    def read(self, tokens: int) -> Tensor:
        return self.tensor

    def last(self, tokens: int, count: int) -> Tensor:
        return self.tensor[:, :, self.tensor.shape[2] - count :]


class Paged:
    """A pool of blocks [blocks, block_size, h, w] and a block table [B, blocks per sequence].

    The table is shuffled, like the table of a pool in use. Reading copies the blocks, because torch
    has no paged kernel.
    """

    def __init__(
        self,
        entry: CacheEntry,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
    ) -> None:
        self.limit = entry.limit
        self.capacity = capacity
        self.block_size = block_size
        blocks = int(entry.allocated_rows(capacity, block_size)) // block_size
        shape = (batch * blocks, block_size, entry.heads, entry.width)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(batch * blocks)
        order = torch.randperm(batch * blocks, generator=generator)
        self.table = order.view(batch, blocks).to(device)

    def write(self, rows: Tensor, past: int) -> None:
        first, new_rows = _rows_to_store(rows, past, self.limit, self.capacity)
        slots = _slots(self.limit, first, new_rows.shape[2], rows.device)
        blocks = self.table[:, slots // self.block_size]
        self.tensor[blocks, slots % self.block_size] = new_rows.transpose(1, 2)

    def read(self, tokens: int) -> Tensor:
        rows = min(tokens, self.limit or tokens)
        blocks = self.table[:, : -(-rows // self.block_size)]
        copied = self.tensor[blocks]  # [B, blocks, block_size, h, w]
        return copied.flatten(1, 2)[:, :rows].transpose(1, 2)

    def last(self, tokens: int, count: int) -> Tensor:
        slots = _slots(self.limit, tokens - count, count, self.tensor.device)
        blocks = self.table[:, slots // self.block_size]
        return self.tensor[blocks, slots % self.block_size].transpose(1, 2)


def _rows_to_store(rows: Tensor, past: int, limit: int, capacity: int) -> tuple[int, Tensor]:
    """Return the position of the first row to store, and the rows: a ring stores the last `limit`."""
    new = rows.shape[2]
    if past + new > capacity:
        raise ValueError(f"token {past + new} does not fit: the cache stores {capacity} tokens")
    stored_rows = rows[:, :, -limit:] if limit and new > limit else rows
    return past + new - stored_rows.shape[2], stored_rows


class LayerCache:
    """The cache of one layer for `batch` sequences of up to `capacity` tokens.

    Attributes:
        rows: Rows and states in the order of `entries`.

    Args:
        entries: Cache entries of the layer.
        batch: Number of sequences.
        capacity: Maximum number of tokens of a sequence.
        dtype: Type of entries that do not set their own.
        device: Torch device.
        block_size: Tokens per block of a paged cache; 0 for a contiguous cache.
        state_dtype: Type of recurrent states, instead of the type that the spec sets.
        is_grown: Whether the cache starts empty and grows by `torch.cat` in each pass.
    """

    def __init__(
        self,
        entries: Sequence[CacheEntry],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = 0,
        state_dtype: torch.dtype | None = None,
        is_grown: bool = False,
    ) -> None:
        self.rows: list[Contiguous | Paged | Grown] = []
        torch_device = torch.device(device)
        for entry in entries:
            entry_dtype = (state_dtype or DTYPES[entry.dtype]) if entry.dtype else dtype
            shape = (entry, batch, capacity, entry_dtype, torch_device)
            if is_grown and entry.grows:
                self.rows.append(Grown(*shape))
            elif block_size and entry.grows:
                self.rows.append(Paged(*shape, block_size))
            else:
                self.rows.append(Contiguous(*shape))

    @property
    def tensors(self) -> list[Tensor]:
        return [rows.tensor for rows in self.rows]

    @property
    def storage_bytes(self) -> int:
        """Bytes of the storage of all tensors, without block tables."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def fill(self, scale: float = 1.0) -> None:
        """Write random rows: the same 2^20 elements repeated, which is fast and enough for timing."""
        for tensor in self.tensors:
            flat = tensor.view(-1)
            size = min(flat.numel(), 1 << 20)
            flat[:size] = torch.randn(size, device=tensor.device).mul_(scale).to(tensor.dtype)
            for start in range(size, flat.numel(), size):
                part = flat[start : start + size]
                part.copy_(flat[: part.numel()])
