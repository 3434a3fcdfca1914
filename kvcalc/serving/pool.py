"""The memory of a server's cache: what a request takes at every length, and how much there is.

paged: the pages that the engine allocates for the cached tokens. contiguous: one stretch for the longest request that there
may be, reserved when a request is admitted. Bytes are those of the fullest GPU of one data-parallel rank.
"""

from typing import Any, NamedTuple

from kvcalc.capacity.engines import Plan
from kvcalc.capacity.engines.content import Content, stored_at
from kvcalc.errors import UserError, nearest
from kvcalc.units import format_bytes

CACHES = ("paged", "contiguous")
BLOCK = 16  # tokens, where the engine's cache has no blocks
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
    plan: Plan,
    content: Content,
    kv_budget: int,
    cache: str,
    max_model_len: int,
    most_tokens: int,
    ahead: int = 0,
) -> Pool:
    """Return the pool of requests that store at most `most_tokens` tokens.

    Args:
        plan: The engine's layout of the cache.
        content: What the cache stores, without blocks and padding.
        kv_budget: Bytes for the cache, as `fit` has them.
        cache: `paged` or `contiguous`.
        max_model_len: The longest request, and the stretch that `contiguous` reserves.
        most_tokens: Tokens of the longest request that comes.
        ahead: Slots for draft tokens behind the tokens of a request.

    Raises:
        UserError: The cache is unknown, or not even one reservation fits.
    """
    import numpy as np

    if cache not in CACHES:
        raise UserError(f"unknown cache {cache!r}", hint=nearest(cache, CACHES))
    tokens = np.arange(most_tokens + 1, dtype=np.int64)
    stored = stored_at(content.rows, tokens)
    if cache == "paged":
        allocated = np.maximum.accumulate(plan.request_bytes(kv_budget, tokens + ahead))
        shared = shared_block(plan), shared_block(content, plan.block_size)
        return Pool(plan.request_pool(kv_budget), allocated, stored, max_model_len, *shared)
    reserved = content.needed(1, max_model_len + ahead)
    if reserved > kv_budget:
        taken = f"{format_bytes(reserved)} of {format_bytes(kv_budget)}"
        what = f"one contiguous reservation of {max_model_len:,} tokens takes {taken}"
        raise UserError(what, hint="Lower max-model-len, or take a paged cache")
    return Pool(kv_budget, np.full(most_tokens + 1, reserved), stored, max_model_len)


def shared_block(plan: Plan, block_size: int | None = None) -> int:
    """Return the bytes of one block that two requests with a common prefix take once.

    The block is the mean of many, because a compressed layer stores less than a row per token.
    """
    tokens = MEAN_BLOCKS * (block_size or plan.block_size or BLOCK)
    return (plan.needed(2, tokens) - plan.needed(2, tokens, tokens)) // MEAN_BLOCKS
