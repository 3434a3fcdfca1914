"""The cache memory of a server: bytes per request at every length, and the budget.

paged: pages that the engine allocates for the cached tokens. contiguous: one range for the longest
possible request, reserved when a request is admitted. Bytes are of the GPU with the most bytes in
one data-parallel rank.
"""

from typing import Any, NamedTuple

from kvcalc.capacity.engines import Plan
from kvcalc.capacity.engines.content import Content, stored_at
from kvcalc.errors import UserError, nearest
from kvcalc.units import format_bytes

CACHES = ("paged", "contiguous")
BLOCK = 16  # tokens, if the engine's cache has no blocks
MEAN_BLOCKS = 1024  # blocks over which the bytes of a shared block are averaged


class Pool(NamedTuple):
    """The cache memory of one data-parallel rank.

    Allocated bytes never shrink while a request grows.

    Attributes:
        budget: Bytes for the cache.
        allocated: Allocated bytes of a request, indexed by its tokens (int64).
        stored: Stored bytes of a request, indexed by its tokens (int64).
        longest: Maximum tokens of a request, independent of free memory.
        shared_block_bytes: Allocated bytes of a block that requests with a common prefix share.
        shared_block_stored: Stored bytes of a block that requests with a common prefix share.
    """

    budget: int
    allocated: Any
    stored: Any
    longest: int
    shared_block_bytes: int = 0
    shared_block_stored: int = 0

    def fits(self, tokens: Any) -> Any:
        """Return whether a request with `tokens` cached tokens at its end fits into the empty cache.

        `tokens` is one number or an array.
        """
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
        content: Contents of the cache, without blocks and padding.
        kv_budget: KV cache budget in bytes, as in `fit`.
        cache: `paged` or `contiguous`.
        max_model_len: Tokens of the longest request, which `contiguous` reserves.
        most_tokens: Tokens of the longest request in the load.
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
    """Return the bytes of one block that two requests with a common prefix share.

    The result is the mean over many blocks, because a compressed layer stores less than one row per
    token.
    """
    tokens = MEAN_BLOCKS * (block_size or plan.block_size or BLOCK)
    return (plan.needed(2, tokens) - plan.needed(2, tokens, tokens)) // MEAN_BLOCKS
