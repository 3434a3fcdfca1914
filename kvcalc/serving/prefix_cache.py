"""Prefix caches: leading prompt tokens that need no recomputation, and the memory they share.

By rate: the same share of each prompt is found, in whole blocks, but never its last token. All
prompts begin with one text, as in `fit --shared-prefix`, so running requests store the blocks of
their hits only once.

By trace: prompts name the prefix that they share. Free blocks wait in a queue. Blocks of a request
are behind blocks of requests that ended earlier, and the last block of a request comes first. New
memory is taken from the head of the queue. A prompt takes the remaining leading blocks of its
prefix out of the queue. Source: vLLM's block pool, vllm/v1/core/block_pool.py and
single_type_kv_cache_manager.py, 0.11.

Only blocks of layers that store all tokens are shared. Each request has its own windows and
states.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcalc.serving.cache_accounting import Pool

PRIVATE = -1  # name of blocks that no other prompt shares


class PrefixCache:
    """Prefixes with leading blocks that running requests share.

    Attributes:
        blocks_held: Blocks of its prefix that each running request holds.
        holders: Number of requests by the blocks that they hold, for each prefix.
        shared: Number of blocks that running requests save by sharing.
    """

    def __init__(self, pool: Pool, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = pool.shared_block_bytes
        self.block_stored = pool.shared_block_stored
        self.shared = 0
        self.blocks_held: dict[int, int] = {}
        self.holders: dict[int, dict[int, int]] = {}

    @property
    def shared_stored(self) -> int:
        """Stored bytes that running requests save by sharing."""
        return self.shared * self.block_stored

    def cached_tokens(self, index: int, prompt: int, free: int) -> int:
        """Return how many tokens of a prompt of `prompt` tokens are cached, with `free` bytes
        free."""
        raise NotImplementedError

    def shared_bytes(self, index: int, cached: int) -> int:
        """Return the bytes of the `cached` tokens that other running requests hold."""
        if not cached:
            return 0
        stored = max(self.holders.get(self._prefix(index), (0,)))
        return min(self._blocks_of(cached), stored) * self.block_bytes

    def take(self, index: int, cached: int) -> None:
        """Record that an admitted request holds the `cached` tokens."""
        self._hold(index, self._blocks_of(cached))

    def keep(self, index: int, prompt: int) -> int:
        """Add a computed prompt's prefix to the cache.

        Returns:
            Bytes newly shared with other running requests.
        """
        before = self.shared
        blocks = self._prefix_blocks(index, prompt)
        if blocks:
            self._hold(index, blocks)
        return (self.shared - before) * self.block_bytes

    def release(self, index: int, held: int) -> int:
        """Release the `held` bytes of a request.

        Returns:
            Bytes of them that other requests still hold.
        """
        before = self.shared
        self._hold(index, 0)
        return (before - self.shared) * self.block_bytes

    def settle(self, free: int) -> None:
        """Shorten the queue to `free` bytes, because running requests have taken the other
        blocks."""

    def _prefix(self, index: int) -> int:
        """Return the prefix of a request."""
        return 0

    def _prefix_blocks(self, index: int, prompt: int) -> int:
        """Return the whole blocks of a request's prefix within its prompt."""
        raise NotImplementedError

    def _change_held(self, prefix: int, before: int, after: int) -> None:
        """Record that running requests hold another number of leading blocks of a prefix."""

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _hold(self, index: int, blocks: int) -> None:
        """Change the number of leading blocks of its prefix that a request holds."""
        old = self.blocks_held.pop(index, 0)
        if blocks:
            self.blocks_held[index] = blocks
        if old == blocks:
            return
        prefix = self._prefix(index)
        holders = self.holders.setdefault(prefix, {})
        before = max(holders, default=0)
        if blocks:
            holders[blocks] = holders.get(blocks, 0) + 1
        if old:
            holders[old] -= 1
            if not holders[old]:
                del holders[old]
        after = max(holders, default=0)
        if not after:
            del self.holders[prefix]
        self.shared += blocks - old - (after - before)
        if after != before:
            self._change_held(prefix, before, after)


class FixedRatePrefixCache(PrefixCache):
    """A prefix cache that finds the same share of every prompt.

    All prompts begin with the same text.
    """

    def __init__(self, rate: float, pool: Pool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.rate = rate

    def cached_tokens(self, index: int, prompt: int, free: int) -> int:
        return min(hit_tokens(self.rate, prompt, self.block_size), prompt - 1)

    def _prefix_blocks(self, index: int, prompt: int) -> int:
        return hit_tokens(self.rate, prompt, self.block_size) // self.block_size


def hit_tokens(rate: float, prompt: int, block_size: int) -> int:
    """Return the tokens of a prompt that a prefix cache finds: the whole blocks in the share
    `rate`.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


@dataclass(slots=True, eq=False)
class FreeBlockRange:
    """Blocks of a prefix from `first` to before `end` that became free at the same time.

    The block `first` is evicted last.
    """

    prefix: int
    first: int
    end: int


class BlockPrefixCache(PrefixCache):
    """A prefix cache with named prefixes and vLLM's order of eviction.

    A request holds leading blocks, so the cached blocks of a prefix are leading blocks too. The
    first ones are held by running requests; the others are in the queue, most recent range first.
    Requests that compute one prefix at the same time each compute it, and then share it.

    Args:
        prefixes: Prefix of each request; −1 for none.
        lengths: Tokens of each request's prefix.

    Attributes:
        queue: Free ranges of blocks, in the order of eviction.
        ranges: Free ranges of each prefix, in the order of the queue.
        cached_blocks: Number of cached blocks of each prefix.
        queued: Blocks in the queue, including blocks without a prefix. Unused memory is taken
            before these blocks.
    """

    def __init__(
        self,
        prefixes: Sequence[int],
        lengths: Sequence[int],
        pool: Pool,
        block_size: int,
    ) -> None:
        super().__init__(pool, block_size)
        self.prefixes = prefixes
        self.lengths = lengths
        self.queued = 0
        self.queue: OrderedDict[FreeBlockRange, None] = OrderedDict()
        self.ranges: dict[int, deque[FreeBlockRange]] = {}
        self.cached_blocks: dict[int, int] = {}

    def cached_tokens(self, index: int, prompt: int, free: int) -> int:
        self.settle(free)
        cached = self.cached_blocks.get(self.prefixes[index], 0)
        blocks = min(self._prefix_blocks(index, prompt), cached)
        return min(blocks * self.block_size, prompt - 1)

    def keep(self, index: int, prompt: int) -> int:
        prefix = self.prefixes[index]
        blocks = self._prefix_blocks(index, prompt)
        if blocks:
            self.cached_blocks[prefix] = max(blocks, self.cached_blocks.get(prefix, 0))
        return super().keep(index, prompt)

    def release(self, index: int, held: int) -> int:
        if self.block_bytes:
            private = held // self.block_bytes - self.blocks_held.get(index, 0)
            self._add_range(PRIVATE, 0, private)
        return super().release(index, held)

    def settle(self, free: int) -> None:
        if self.queued * self.block_bytes <= free:
            return
        excess = self.queued - max(0, free) // self.block_bytes
        while excess > 0:
            oldest = next(iter(self.queue))
            evicted = min(excess, oldest.end - oldest.first)
            oldest.end -= evicted
            excess -= evicted
            self.queued -= evicted
            if oldest.prefix != PRIVATE:
                self.cached_blocks[oldest.prefix] = oldest.end
            if oldest.end == oldest.first:
                self._remove_oldest(oldest)

    def _prefix(self, index: int) -> int:
        return self.prefixes[index]

    def _prefix_blocks(self, index: int, prompt: int) -> int:
        if self.prefixes[index] == PRIVATE:
            return 0
        return min(self.lengths[index], prompt) // self.block_size

    def _change_held(self, prefix: int, before: int, after: int) -> None:
        if after < before:
            self._add_range(prefix, after, before)
            return
        # blocks that are held again leave the queue
        ranges = self.ranges.get(prefix, deque())
        while ranges and ranges[-1].first < after:
            youngest = ranges[-1]
            taken = min(after, youngest.end) - youngest.first
            youngest.first += taken
            self.queued -= taken
            if youngest.first < youngest.end:
                break
            del self.queue[ranges.pop()]
        if not ranges:
            self.ranges.pop(prefix, None)

    def _add_range(self, prefix: int, first: int, end: int) -> None:
        """Add blocks at the end of the queue."""
        if first >= end:
            return
        free_range = FreeBlockRange(prefix, first, end)
        self.queue[free_range] = None
        self.queued += end - first
        if prefix != PRIVATE:
            self.ranges.setdefault(prefix, deque()).append(free_range)

    def _remove_oldest(self, oldest: FreeBlockRange) -> None:
        """Remove the head of the queue, which has no blocks left."""
        del self.queue[oldest]
        if oldest.prefix == PRIVATE:
            return
        ranges = self.ranges[oldest.prefix]
        ranges.popleft()
        if not ranges:
            del self.ranges[oldest.prefix]
        if not oldest.end:
            del self.cached_blocks[oldest.prefix]
