"""What a prefix cache finds: leading tokens of prompts that need not be computed again, and the memory that they share.

By rate: of each prompt the same share is found, in whole blocks, and never its last token. All prompts begin with one text, as
under `fit --shared-prefix`, so running requests store the blocks of their hits once. By trace: prompts that share a prefix
name it. Blocks that nobody holds stand in a queue, those of one request behind those of requests that ended before it, its last
block first; whatever needs memory takes blocks from the head of the queue, and a prompt takes out the leading blocks of its
prefix that are still there (vLLM's block pool: vllm/v1/core/block_pool.py and single_type_kv_cache_manager.py, 0.11).
Shared are the blocks of layers that keep all tokens. Windows and states are every request's own.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from kvcalc.serving.pool import Pool

PRIVATE = -1  # the name of blocks that no other prompt begins with


class Prefixes:
    """What a server asks of a prefix cache, and what one says that finds nothing.

    shared_stored: stored bytes that would be more if running requests shared none.
    """

    shared_stored = 0

    def found(self, index: int, prompt: int, free: int) -> int:
        """Tokens of a prompt of so many that are in the cache already, while `free` bytes are held by nobody."""
        return 0

    def common(self, index: int, found: int) -> int:
        """Bytes of what was found that other running requests hold."""
        return 0

    def take(self, index: int, found: int) -> None:
        """A request is admitted, and holds what was found."""

    def keep(self, index: int, prompt: int) -> int:
        """A prompt has been computed: its prefix can be found. Bytes that others hold with it now, and did not."""
        return 0

    def release(self, index: int, held: int) -> int:
        """A request gives back its `held` bytes. Those of them that others hold on."""
        return 0

    def settle(self, free: int) -> None:
        """So many bytes are held by nobody: what the queue has beyond them has been taken by those that run."""


class SharedBlocks(Prefixes):
    """Prefixes of which running requests hold leading blocks together.

    Attributes:
        holds: Blocks of its prefix that each running request holds.
        holders: Number of requests by the blocks that they hold, for each prefix.
        shared: Blocks that running requests would hold more if they shared none.
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
        """Note that nobody holds these blocks of a prefix any longer."""

    def _use(self, name: int, blocks: int) -> None:
        """Note that leading blocks of a prefix are held that nobody held."""

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
    """The same share of every prompt is found: leading blocks of one text with which all prompts begin."""

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
    """Return the tokens of a prompt that a prefix cache finds: the whole blocks of the share `rate`.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


class Stretch:
    """Blocks of a prefix from `first` to before `end` that nobody holds since one moment, of which the first one goes last."""

    __slots__ = ("end", "first", "name")

    def __init__(self, name: int, first: int, end: int) -> None:
        self.name, self.first, self.end = name, first, end


class Kept(SharedBlocks):
    """Prefixes by name: which of their blocks are in the cache, who holds them, and in which order the others go.

    names, lengths: of each request, the prefix that it begins with (−1: none) and its tokens. A request holds leading blocks, so
    that what is there of a prefix are leading blocks too: those that the longest of its holders has, then stretches of the queue,
    the youngest first. queued: blocks of the queue, those of no prefix too; memory that was never used goes before them. Requests
    that compute one prefix at the same time each do it; then they share it.
    """

    def __init__(self, names: Sequence[int], lengths: Sequence[int], pool: Pool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self.names, self.lengths = names, lengths
        self.queued = 0
        self.order: OrderedDict[Stretch, None] = OrderedDict()  # the queue; its head comes first
        self.of: dict[int, deque[Stretch]] = {}  # of each prefix, in the same order
        self.there: dict[int, int] = {}  # blocks of each prefix that are in the cache

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
        """So many leading blocks of a prefix are held, and leave the queue."""
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
        """The head of the queue has no blocks left."""
        del self.order[oldest]
        if oldest.name == PRIVATE:
            return
        self.of[oldest.name].popleft()
        if not self.of[oldest.name]:
            del self.of[oldest.name]
        if not oldest.end:
            del self.there[oldest.name]
