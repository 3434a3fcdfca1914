"""What a prefix cache finds: leading tokens of prompts that need not be computed again.

By rate: of each prompt the same share, in whole blocks, and never its last token. By trace: prompts that share a prefix name it;
its blocks stay after a request until room is needed, the one unused for longest first, and a prompt takes the leading blocks
that are still there. What is kept lies in what running requests leave of the cache's memory.
"""

from collections import OrderedDict
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


class Kept:
    """Prefixes by name: which of their blocks are in the cache, in the order of last use.

    names, lengths: of each request, the prefix that it begins with (−1: none) and its tokens.
    """

    def __init__(self, names: Sequence[int], lengths: Sequence[int], pool: Pool, block_size: int) -> None:
        self.names, self.lengths, self.block_size = names, lengths, block_size
        self.block_bytes = max(1, int(pool.allocated[min(block_size, len(pool.allocated) - 1)]))
        self.blocks: OrderedDict[tuple[int, int], None] = OrderedDict()

    def found(self, index: int, prompt: int, free: int) -> int:
        """Tokens of this request's prompt that are in the cache already, while `free` bytes are."""
        while self.blocks and len(self.blocks) * self.block_bytes > free:
            self.blocks.popitem(last=False)
        whole = self._blocks(index, prompt)
        hit = next((at for at in range(whole) if (self.names[index], at) not in self.blocks), whole)
        for at in reversed(range(hit)):
            self.blocks.move_to_end((self.names[index], at))
        return min(hit * self.block_size, prompt - 1)

    def keep(self, index: int, prompt: int) -> None:
        """A prompt has been computed: its prefix stays, the first block as the one last used."""
        for at in reversed(range(self._blocks(index, prompt))):
            self.blocks[self.names[index], at] = None
            self.blocks.move_to_end((self.names[index], at))

    def _blocks(self, index: int, prompt: int) -> int:
        return min(self.lengths[index], prompt) // self.block_size if self.names[index] >= 0 else 0


Prefixes = Shared | Kept
