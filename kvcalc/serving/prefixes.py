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

from kvcalc.serving.pool import Pool

PRIVATE = -1  # name of blocks that no other prompt shares


class Prefixes:
    """The interface of a prefix cache. This base class finds nothing.

    Attributes:
        shared_stored: Stored bytes that running requests save by sharing.
    """

    shared_stored = 0

    def found(self, index: int, prompt: int, free: int) -> int:
        """Return how many tokens of a prompt of `prompt` tokens are cached, with `free` bytes free."""
        return 0

    def common(self, index: int, found: int) -> int:
        """Return the bytes of the `found` tokens that other running requests hold."""
        return 0

    def take(self, index: int, found: int) -> None:
        """Record that an admitted request holds the `found` tokens."""

    def keep(self, index: int, prompt: int) -> int:
        """Add a computed prompt's prefix to the cache.

        Returns:
            Bytes newly shared with other running requests.
        """
        return 0

    def release(self, index: int, held: int) -> int:
        """Release the `held` bytes of a request.

        Returns:
            Bytes of them that other requests still hold.
        """
        return 0

    def settle(self, free: int) -> None:
        """Shorten the queue to `free` bytes, because running requests have taken the other blocks."""


class SharedBlocks(Prefixes):
    """Prefixes with leading blocks that running requests share.

    Attributes:
        holds: Blocks of its prefix that each running request holds.
        holders: Number of requests by the blocks that they hold, for each prefix.
        shared: Number of blocks that running requests save by sharing.
    """

    def __init__(self, pool: Pool, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes, self.block_stored = pool.shared_block_bytes, pool.shared_block_stored
        self.shared = 0
        self.holds: dict[int, int] = {}
        self.holders: dict[int, dict[int, int]] = {}

    @property
    def shared_stored(self) -> int:  # type: ignore[override]
        return self.shared * self.block_stored

    def common(self, index: int, found: int) -> int:
        return min(-(-found // self.block_size), self._held(self._name(index))) * self.block_bytes if found else 0

    def take(self, index: int, found: int) -> None:
        self._hold(index, -(-found // self.block_size))

    def keep(self, index: int, prompt: int) -> int:
        before, whole = self.shared, self._blocks(index, prompt)
        if whole:
            self._hold(index, whole)
        return (self.shared - before) * self.block_bytes

    def release(self, index: int, held: int) -> int:
        before = self.shared
        self._hold(index, 0)
        return (before - self.shared) * self.block_bytes

    def _name(self, index: int) -> int:
        """Return the name of a request's prefix."""
        raise NotImplementedError

    def _blocks(self, index: int, prompt: int) -> int:
        """Return the whole blocks of a request's prefix within its prompt."""
        raise NotImplementedError

    def _free(self, name: int, first: int, end: int) -> None:
        """Record that no request holds these blocks of a prefix any longer."""

    def _use(self, name: int, blocks: int) -> None:
        """Record that a request now holds leading blocks of a prefix that no request held."""

    def _held(self, name: int) -> int:
        """Return the number of leading blocks of a prefix that running requests hold."""
        return max(self.holders[name]) if name in self.holders else 0

    def _hold(self, index: int, blocks: int) -> None:
        """Change the number of leading blocks of its prefix that a request holds."""
        old = self.holds.get(index, 0)
        if old == blocks:
            return
        name = self._name(index)
        holders = self.holders.setdefault(name, {})
        before = max(holders, default=0)
        if blocks:
            self.holds[index] = blocks
            holders[blocks] = holders.get(blocks, 0) + 1
        else:
            del self.holds[index]
        if old:
            holders[old] -= 1
            if not holders[old]:
                del holders[old]
        now = max(holders, default=0)
        if not now:
            del self.holders[name]
        self.shared += blocks - old - (now - before)
        if now < before:
            self._free(name, now, before)
        elif now > before:
            self._use(name, now)


class Shared(SharedBlocks):
    """A prefix cache that finds the same share of every prompt.

    All prompts begin with the same text.
    """

    def __init__(self, rate: float, pool: Pool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.rate = rate

    def found(self, index: int, prompt: int, free: int) -> int:
        return min(self._blocks(index, prompt) * self.block_size, prompt - 1)

    def _name(self, index: int) -> int:
        return 0

    def _blocks(self, index: int, prompt: int) -> int:
        return hit_tokens(self.rate, prompt, self.block_size) // self.block_size


def hit_tokens(rate: float, prompt: int, block_size: int) -> int:
    """Return the tokens of a prompt that a prefix cache finds: the whole blocks in the share `rate`.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


class Stretch:
    """Blocks of a prefix from `first` to before `end` that became free at the same time.

    The block `first` is evicted last.
    """

    __slots__ = ("end", "first", "name")

    def __init__(self, name: int, first: int, end: int) -> None:
        self.name, self.first, self.end = name, first, end


class Kept(SharedBlocks):
    """A prefix cache with named prefixes and vLLM's order of eviction.

    A request holds leading blocks, so the cached blocks of a prefix are leading blocks too. The first
    ones are held by running requests; the others are in the queue, most recent range first. Requests
    that compute one prefix at the same time each compute it, and then share it.

    Attributes:
        names: Prefix of each request; −1 for none.
        lengths: Tokens of each request's prefix.
        queued: Blocks in the queue, including blocks without a prefix. Unused memory is taken before
            these blocks.
    """

    def __init__(self, names: Sequence[int], lengths: Sequence[int], pool: Pool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.names, self.lengths = names, lengths
        self.queued = 0
        self.order: OrderedDict[Stretch, None] = OrderedDict()  # the queue, head first
        self.of: dict[int, deque[Stretch]] = {}  # ranges of each prefix, in the order of the queue
        self.there: dict[int, int] = {}  # cached blocks of each prefix

    def found(self, index: int, prompt: int, free: int) -> int:
        self.settle(free)
        return min(min(self._blocks(index, prompt), self.there.get(self.names[index], 0)) * self.block_size, prompt - 1)

    def keep(self, index: int, prompt: int) -> int:
        name, whole = self.names[index], self._blocks(index, prompt)
        if whole:
            self.there[name] = max(whole, self.there.get(name, 0))
        return super().keep(index, prompt)

    def release(self, index: int, held: int) -> int:
        private = held // self.block_bytes - self.holds.get(index, 0) if self.block_bytes else 0
        if private > 0:
            self._queue(Stretch(PRIVATE, 0, private))
        return super().release(index, held)

    def settle(self, free: int) -> None:
        if self.queued * self.block_bytes <= free:
            return
        over = self.queued - max(0, free) // self.block_bytes
        while over > 0:
            oldest = next(iter(self.order))
            gone = min(over, oldest.end - oldest.first)
            oldest.end -= gone
            over, self.queued = over - gone, self.queued - gone
            if oldest.name != PRIVATE:
                self.there[oldest.name] = oldest.end
            if oldest.end == oldest.first:
                self._forget(oldest)

    def _name(self, index: int) -> int:
        return self.names[index]

    def _blocks(self, index: int, prompt: int) -> int:
        return min(self.lengths[index], prompt) // self.block_size if self.names[index] >= 0 else 0

    def _free(self, name: int, first: int, end: int) -> None:
        self._queue(Stretch(name, first, end))

    def _use(self, name: int, blocks: int) -> None:
        self._unqueue(name, blocks)

    def _queue(self, stretch: Stretch) -> None:
        self.order[stretch] = None
        self.queued += stretch.end - stretch.first
        if stretch.name != PRIVATE:
            self.of.setdefault(stretch.name, deque()).append(stretch)

    def _unqueue(self, name: int, blocks: int) -> None:
        """Remove the first `blocks` blocks of a prefix from the queue."""
        stretches = self.of.get(name)
        if not stretches:
            return
        while stretches and stretches[-1].first < blocks:
            youngest = stretches[-1]
            gone = min(blocks, youngest.end) - youngest.first
            youngest.first += gone
            self.queued -= gone
            if youngest.first < youngest.end:
                break
            del self.order[stretches.pop()]
        if not stretches:
            del self.of[name]

    def _forget(self, oldest: Stretch) -> None:
        """Remove the head of the queue, which has no blocks left."""
        del self.order[oldest]
        if oldest.name == PRIVATE:
            return
        self.of[oldest.name].popleft()
        if not self.of[oldest.name]:
            del self.of[oldest.name]
        if not oldest.end:
            del self.there[oldest.name]
