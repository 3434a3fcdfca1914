"""Caches of one layer, allocated whole before the first token: contiguous, or paged behind a block table; or grown by cat.

A cache holds one tensor for each `CacheEntry` of a spec, so its bytes are the prediction's own: `stored_rows` for a
contiguous cache, `allocated_rows` for a paged one. Rows of an entry with a limit form a ring: the row of position p lies in
slot p mod limit. States are never paged. Shapes: B sequences, h heads, w the entry's width.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcalc.layers.cache import CacheEntry

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Rows(Protocol):
    """The rows of one cache entry."""

    tensor: Tensor
    limit: int

    def write(self, rows: Tensor, past: int) -> None:
        """Put rows [B, h, new, w] at positions past … past + new − 1."""

    def read(self, tokens: int) -> Tensor:
        """The rows kept after `tokens` tokens, [B, h, rows, w]: by position, or by slot once a ring has wrapped."""

    def last(self, tokens: int, count: int) -> Tensor:
        """The `count` latest of `tokens` tokens by position, [B, h, count, w]."""


def _slots(limit: int, first: int, count: int, device: torch.device) -> Tensor:
    positions = torch.arange(first, first + count, device=device)
    return positions % limit if limit else positions


class Contiguous:
    """One tensor [B, h, rows, w]; reading is a view."""

    def __init__(self, entry: CacheEntry, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.limit = entry.limit if entry.grows else 0
        self.capacity = capacity
        rows = int(entry.stored_rows(capacity))
        self.tensor = torch.zeros(batch, entry.heads, rows, entry.width, dtype=dtype, device=device)

    def write(self, rows: Tensor, past: int) -> None:
        first, kept = _kept(rows, past, self.limit, self.capacity)
        start, count = (first % self.limit if self.limit else first), kept.shape[2]
        if start + count <= self.tensor.shape[2]:
            self.tensor[:, :, start : start + count] = kept
        else:
            self.tensor.index_copy_(2, _slots(self.limit, first, count, rows.device), kept)

    def read(self, tokens: int) -> Tensor:
        return self.tensor[:, :, : min(tokens, self.limit or tokens)]

    def last(self, tokens: int, count: int) -> Tensor:
        if not self.limit or tokens <= self.limit:
            return self.tensor[:, :, tokens - count : tokens]
        return self.tensor.index_select(2, _slots(self.limit, tokens - count, count, self.tensor.device))


class Grown:
    """A tensor [B, h, rows, w] made anew by `torch.cat` for every pass that writes: what is kept is read and written again."""

    def __init__(self, entry: CacheEntry, batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.limit, self.capacity = entry.limit, capacity
        self.tensor = torch.zeros(batch, entry.heads, 0, entry.width, dtype=dtype, device=device)

    def write(self, rows: Tensor, past: int) -> None:
        _, kept = _kept(rows, past, self.limit, self.capacity)
        before = self.tensor
        if self.limit:
            before = before[:, :, max(0, before.shape[2] + kept.shape[2] - self.limit) :]
        self.tensor = torch.cat((before, kept), 2)

    def read(self, tokens: int) -> Tensor:
        return self.tensor

    def last(self, tokens: int, count: int) -> Tensor:
        return self.tensor[:, :, self.tensor.shape[2] - count :]


class Paged:
    """Blocks [blocks, block_size, h, w] of a pool, and a table [B, blocks of a sequence] of which are whose.

    The table is shuffled, as a pool in use is. Reading gathers the blocks: plain torch has no paged kernel, so it copies.
    """

    def __init__(
        self, entry: CacheEntry, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> None:
        self.limit, self.capacity = entry.limit, capacity
        blocks = int(entry.allocated_rows(capacity, block_size)) // block_size
        self.block_size = block_size
        self.tensor = torch.zeros(batch * blocks, block_size, entry.heads, entry.width, dtype=dtype, device=device)
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(batch * blocks))
        self.table = order.view(batch, blocks).to(device)

    def write(self, rows: Tensor, past: int) -> None:
        first, kept = _kept(rows, past, self.limit, self.capacity)
        slots = _slots(self.limit, first, kept.shape[2], rows.device)
        self.tensor[self.table[:, slots // self.block_size], slots % self.block_size] = kept.transpose(1, 2)

    def read(self, tokens: int) -> Tensor:
        rows = min(tokens, self.limit or tokens)
        blocks = self.tensor[self.table[:, : -(-rows // self.block_size)]]  # [B, blocks, block_size, h, w]
        return blocks.flatten(1, 2)[:, :rows].transpose(1, 2)

    def last(self, tokens: int, count: int) -> Tensor:
        slots = _slots(self.limit, tokens - count, count, self.tensor.device)
        return self.tensor[self.table[:, slots // self.block_size], slots % self.block_size].transpose(1, 2)


def _kept(rows: Tensor, past: int, limit: int, capacity: int) -> tuple[int, Tensor]:
    """(position of the first row that is kept, the rows kept): a ring keeps the last `limit` of them."""
    new = rows.shape[2]
    if past + new > capacity:
        raise ValueError(f"the cache holds {capacity} tokens, and token {past + new} was written")
    kept = rows[:, :, -limit:] if limit and new > limit else rows
    return past + new - kept.shape[2], kept


class LayerCache:
    """The cache of one layer for `batch` sequences of up to `capacity` tokens: rows and states in the order of `entries`.

    dtype: of entries that name none of their own. state: a dtype for recurrent states in place of the one that the spec
    fixes. block_size: tokens in a block of a paged cache; 0 for a contiguous one. grown: begins empty and grows with each
    pass instead, as many implementations do.
    """

    def __init__(
        self,
        entries: Sequence[CacheEntry],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = 0,
        state: torch.dtype | None = None,
        grown: bool = False,
    ) -> None:
        self.rows: list[Contiguous | Paged | Grown] = []
        where = torch.device(device)
        for entry in entries:
            kept = (state or DTYPES[entry.dtype]) if entry.dtype else dtype
            if grown and entry.grows:
                self.rows.append(Grown(entry, batch, capacity, kept, where))
            elif block_size and entry.grows:
                self.rows.append(Paged(entry, batch, capacity, kept, where, block_size))
            else:
                self.rows.append(Contiguous(entry, batch, capacity, kept, where))

    @property
    def tensors(self) -> list[Tensor]:
        return [rows.tensor for rows in self.rows]

    @property
    def storage_bytes(self) -> int:
        """Bytes of the tensors' storage; block tables apart."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def fill(self, scale: float = 1.0) -> None:
        """Random rows, the same 2^20 elements over and over: as good as tokens for timing, and quick to write."""
        for tensor in self.tensors:
            flat = tensor.view(-1)
            size = min(flat.numel(), 1 << 20)
            flat[:size] = torch.randn(size, device=tensor.device).mul_(scale).to(tensor.dtype)
            for start in range(size, flat.numel(), size):
                part = flat[start : start + size]
                part.copy_(flat[: part.numel()])
