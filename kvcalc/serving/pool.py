"""The memory of a server's cache: what a request holds at every length, and how much there is.

paged: whole blocks for the tokens that are cached. contiguous: one stretch for the longest request that there may be,
reserved when a request is admitted. Bytes are those of the fullest GPU of one data-parallel rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcalc.errors import UserError, nearest
from kvcalc.model.memory import LayerRows
from kvcalc.units import ceil_div, format_bytes

CACHES = ("paged", "contiguous")
MEAN_BLOCKS = 1024  # blocks over which the bytes of a shared block are averaged


class Pool(NamedTuple):
    """budget: bytes for the cache. allocated, stored: bytes of a request after so many tokens, by index (int64).

    longest: tokens that a request may hold at most, whatever is free. Allocated bytes never shrink while a request grows.
    shared_block_bytes, shared_block_stored: bytes of a block, allocated and stored, that requests with a common prefix hold once.
    """

    budget: int
    allocated: Any
    stored: Any
    longest: int
    shared_block_bytes: int = 0
    shared_block_stored: int = 0

    def fits(self, tokens: Any) -> Any:
        """Whether a request that ends with so many tokens cached (one, or each of an array) could ever run, alone."""
        import numpy as np

        return (tokens <= self.longest) & (self.allocated[np.minimum(tokens, len(self.allocated) - 1)] <= self.budget)


def make_pool(
    rows: Sequence[LayerRows],
    budget: int,
    cache: str,
    block_size: int,
    max_model_len: int,
    most_tokens: int,
    ahead: int = 0,
) -> Pool:
    """A pool for requests that hold at most `most_tokens` tokens.

    max_model_len: the stretch that `contiguous` reserves, and the longest request of either. ahead: slots for drafted tokens
    behind those of a request. Raises UserError on an unknown kind, and where not even one reservation is within the budget.
    """
    import numpy as np

    if cache not in CACHES:
        raise UserError(f"unknown cache {cache!r}", hint=nearest(cache, CACHES))
    tokens = np.arange(most_tokens + 1, dtype=np.int64)
    stored = row_bytes(rows, tokens, 0)
    if cache == "paged":
        allocated = np.maximum.accumulate(row_bytes(rows, tokens + ahead, block_size))
        return Pool(budget, allocated, stored, max_model_len, *shared_block(rows, block_size))
    last = np.arange(max(1, max_model_len - 255), max_model_len + 1, dtype=np.int64) + ahead
    reserved = int(row_bytes(rows, last, 0).max())
    if reserved > budget:
        what = f"one contiguous reservation of {max_model_len:,} tokens takes {format_bytes(reserved)} of {format_bytes(budget)}"
        raise UserError(what, hint="Lower max-model-len, or take a paged cache")
    return Pool(budget, np.full(most_tokens + 1, reserved), stored, max_model_len)


def shared_block(rows: Sequence[LayerRows], block_size: int) -> tuple[int, int]:
    """Return the bytes, allocated and stored, of one block in the layers that keep all tokens.

    Only these layers share a common prefix, as under `fit --shared-prefix`. The block is the mean of many, because a
    compressed layer stores less than a row per token.
    """
    import numpy as np

    growing = [row for row in rows if row.entry.grows and not row.entry.limit]
    tokens = np.array([MEAN_BLOCKS * block_size], dtype=np.int64)
    allocated, stored = (int(row_bytes(growing, tokens, size)[0]) for size in (block_size, 0))
    return allocated // MEAN_BLOCKS, stored // MEAN_BLOCKS


def row_bytes(rows: Sequence[LayerRows], tokens: Any, block_size: int) -> Any:
    """Bytes of one sequence after `tokens` tokens (int64 array), stored (block_size 0) or in whole blocks."""
    import numpy as np

    found = np.zeros(tokens.size, dtype=np.int64)
    for entry, bytes_each, layers, _, spread in rows:
        held = entry.allocated_rows(tokens, block_size) if block_size else entry.stored_rows(tokens)
        found += (layers * bytes_each * np.asarray(ceil_div(held, spread))).astype(np.int64)
    return found
