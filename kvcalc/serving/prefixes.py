"""What a prefix cache finds: leading tokens of prompts that need not be computed again.

By rate: of each prompt the same share, in whole blocks, and never its last token. By trace: prompts that share a prefix name it;
its blocks stay after a request until room is needed, the one unused for longest first, and a prompt takes the leading blocks
that are still there. What is kept lies in what running requests leave of the cache's memory.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from kvcalc.serving.pool import Pool


class Shared:
    """The same share of every prompt is found."""

    def __init__(self, rate: float, block_size: int) -> None:
        self.rate, self.block_size = rate, block_size

    def found(self, index: int, prompt: int, free: int) -> int:
        """Tokens of a prompt of so many that are in the cache already, while `free` bytes are."""
        return min(int(self.rate * prompt) // self.block_size * self.block_size, prompt - 1)

    def keep(self, index: int, prompt: int) -> None:
        """A prompt has been computed."""


class Stretch:
    """Blocks of a prefix from `first` to before `end` that were last used together, of which the first one goes last."""

    __slots__ = ("end", "first", "name")

    def __init__(self, name: int, end: int) -> None:
        self.name, self.first, self.end = name, 0, end


class Kept:
    """Prefixes by name: which of their blocks are in the cache, in the order of last use.

    names, lengths: of each request, the prefix that it begins with (−1: none) and its tokens. A use takes leading blocks, so
    that what is there of a prefix are leading blocks too, in stretches of which those used last come first.
    """

    def __init__(self, names: Sequence[int], lengths: Sequence[int], pool: Pool, block_size: int) -> None:
        self.names, self.lengths, self.block_size = names, lengths, block_size
        self.block_bytes = max(1, int(pool.allocated[min(block_size, len(pool.allocated) - 1)]))
        self.blocks = 0
        self.order: OrderedDict[Stretch, None] = OrderedDict()  # unused for longest first
        self.of: dict[int, deque[Stretch]] = {}  # of each prefix, in the same order

    def found(self, index: int, prompt: int, free: int) -> int:
        """Tokens of this request's prompt that are in the cache already, while `free` bytes are."""
        self._drop(self.blocks - max(0, free) // self.block_bytes)
        hit = min(self._blocks(index, prompt), self._there(self.names[index]))
        self._use(self.names[index], hit)
        return min(hit * self.block_size, prompt - 1)

    def keep(self, index: int, prompt: int) -> None:
        """A prompt has been computed: its prefix stays, the first block as the one last used."""
        name, whole = self.names[index], self._blocks(index, prompt)
        self.blocks += max(0, whole - self._there(name))
        self._use(name, whole)

    def _blocks(self, index: int, prompt: int) -> int:
        return min(self.lengths[index], prompt) // self.block_size if self.names[index] >= 0 else 0

    def _there(self, name: int) -> int:
        """Blocks of a prefix that are in the cache."""
        return self.of[name][0].end if self.of.get(name) else 0

    def _use(self, name: int, blocks: int) -> None:
        """So many leading blocks of a prefix are the ones last used."""
        if not blocks:
            return
        stretches = self.of.setdefault(name, deque())
        while stretches and stretches[-1].end <= blocks:
            del self.order[stretches.pop()]
        if stretches:
            stretches[-1].first = blocks
        stretches.append(Stretch(name, blocks))
        self.order[stretches[-1]] = None

    def _drop(self, blocks: int) -> None:
        """So many blocks go, or none where the number is not above 0."""
        while blocks > 0:
            oldest = next(iter(self.order))
            gone = min(blocks, oldest.end - oldest.first)
            oldest.end -= gone
            blocks, self.blocks = blocks - gone, self.blocks - gone
            if oldest.end == oldest.first:
                del self.order[oldest]
                self.of[oldest.name].popleft()


Prefixes = Shared | Kept
