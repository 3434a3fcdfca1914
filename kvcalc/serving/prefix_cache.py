"""A prefix cache: leading prompt tokens that need no recomputation, and the memory they share.

The same share of each prompt is found, in whole blocks, but never its last token. All prompts begin
with one text, as in `fit --shared-prefix`, so running requests store its blocks only once. Only
blocks of layers that store all tokens are shared. Each request has its own windows and states.
"""

from collections import Counter

from kvcalc.serving.cache_accounting import Pool


def hit_tokens(rate: float, prompt: int, block_size: int) -> int:
    """Return the tokens of a prompt that a prefix cache finds: the whole blocks in the share
    `rate`.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


class PrefixCache:
    """A prefix cache that finds the share `rate` of every prompt.

    Attributes:
        blocks: Leading blocks of the prefix that each running request uses.
        users: Number of running requests by the blocks that they use.
        shared_blocks: Number of blocks that running requests save by sharing.
    """

    def __init__(self, rate: float, pool: Pool) -> None:
        self.rate = rate
        self.block_size = pool.block_size
        self.block_bytes = pool.shared_block_bytes
        self.block_stored = pool.shared_block_stored
        self.shared_blocks = 0
        self.blocks: dict[int, int] = {}
        self.users: Counter[int] = Counter()

    @property
    def shared_stored(self) -> int:
        """Stored bytes that running requests save by sharing."""
        return self.shared_blocks * self.block_stored

    def cached_tokens(self, prompt: int) -> int:
        """Return how many tokens of a prompt of `prompt` tokens are cached."""
        return min(hit_tokens(self.rate, prompt, self.block_size), prompt - 1)

    def shared_bytes(self, cached: int) -> int:
        """Return the bytes of the first `cached` tokens that running requests use."""
        blocks = -(-cached // self.block_size)
        return min(blocks, max(self.users, default=0)) * self.block_bytes

    def use(self, index: int, tokens: int) -> int:
        """Set the number of leading prefix tokens that a request uses.

        Returns:
            Bytes newly shared with other running requests; negative if fewer bytes are shared.
        """
        blocks = -(-tokens // self.block_size)
        previous = self.blocks.pop(index, 0)
        largest = max(self.users, default=0)
        self.users[previous] -= 1
        self.users[blocks] += 1
        self.users = Counter({n: users for n, users in self.users.items() if n and users})
        if blocks:
            self.blocks[index] = blocks
        newly_shared = blocks - previous - (max(self.users, default=0) - largest)
        self.shared_blocks += newly_shared
        return newly_shared * self.block_bytes
