"""The cache memory of a server: bytes of requests, their growth, prefixes, and the log of a run.

A paged cache allocates pages for the cached tokens. A contiguous cache reserves one range for the
longest possible request when a request is admitted. Bytes are of the GPU with the most bytes in one
data-parallel rank.
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from kvcalc.capacity import Fit
from kvcalc.capacity.engines.layout import CacheLayout, stored_at
from kvcalc.errors import UserError
from kvcalc.units import format_bytes

DEFAULT_BLOCK_SIZE = 16  # tokens, if the engine's cache has no blocks
MEAN_BLOCKS = 1024  # blocks over which the bytes of a shared block are averaged
MAX_ROWS = 20_000  # rows of a timeline
TIMES = ("arrived", "scheduled", "decode_scheduled", "first", "finished")


class Pool(NamedTuple):
    """The cache memory of one data-parallel rank.

    Allocated bytes never shrink while a request grows.

    Attributes:
        budget: KV cache budget in bytes.
        allocated: Allocated bytes of a request, indexed by its tokens (int64).
        stored_bytes: Stored bytes of a request, indexed by its tokens (int64).
        longest: Maximum tokens of a request, independent of free memory.
        shared_block_bytes: Allocated bytes of a block that requests with a common prefix share.
        shared_block_stored: Stored bytes of a block that requests with a common prefix share.
        block_size: Tokens of a block that requests with a common prefix share.
    """

    budget: int
    allocated: Any
    stored_bytes: Any
    longest: int
    shared_block_bytes: int = 0
    shared_block_stored: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE

    def fits(self, tokens: Any) -> Any:
        """Return whether requests with `tokens` cached tokens (an array) fit into the empty
        cache."""
        allocated = self.allocated[tokens.clip(max=len(self.allocated) - 1)]
        return (tokens <= self.longest) & (allocated <= self.budget)


def make_pool(
    capacity: Fit,
    cache: str,
    max_model_len: int,
    max_tokens: int,
    draft_slots: int = 0,
) -> Pool:
    """Return the pool of requests that store at most `max_tokens` tokens.

    Args:
        capacity: The KV cache budget, and the engine's layout of the cache.
        cache: `paged` or `contiguous`.
        max_model_len: Tokens of the longest request, which `contiguous` reserves.
        draft_slots: Slots for draft tokens behind the tokens of a request.

    Raises:
        UserError: Not even one reservation fits.
    """
    layout, content, kv_budget = capacity.plan, capacity.content, capacity.kv_budget
    block_size = layout.block_size or DEFAULT_BLOCK_SIZE
    tokens = np.arange(max_tokens + 1, dtype=np.int64)
    stored_bytes = stored_at(content.rows, tokens)
    if cache == "paged":
        allocated = np.maximum.accumulate(layout.request_bytes(kv_budget, tokens + draft_slots))
        return Pool(
            budget=layout.request_pool(kv_budget),
            allocated=allocated,
            stored_bytes=stored_bytes,
            longest=max_model_len,
            shared_block_bytes=shared_block(layout, block_size),
            shared_block_stored=shared_block(content, block_size),
            block_size=block_size,
        )
    reserved = content.needed(1, max_model_len + draft_slots)
    if reserved > kv_budget:
        sizes = f"{format_bytes(reserved)} of {format_bytes(kv_budget)}"
        message = f"one contiguous reservation of {max_model_len:,} tokens takes {sizes}"
        raise UserError(message, "Lower max-model-len, or take a paged cache")
    allocated = np.full(max_tokens + 1, reserved)
    return Pool(kv_budget, allocated, stored_bytes, max_model_len, block_size=block_size)


def shared_block(layout: CacheLayout, block_size: int) -> int:
    """Return the bytes of one block that two requests with a common prefix share.

    The result is the mean over many blocks, because a compressed layer stores less than one row per
    token.
    """
    tokens = MEAN_BLOCKS * block_size
    return (layout.needed(2, tokens) - layout.needed(2, tokens, tokens)) // MEAN_BLOCKS


class CacheGrowth(NamedTuple):
    """Bytes of some consecutive steps.

    Attributes:
        allocated: Bytes allocated after the last step, which is also their maximum.
        stored_bytes: Bytes stored after the last step.
        allocated_byte_s: Allocated bytes times seconds, summed over the steps.
        stored_byte_s: Stored bytes times seconds, summed over the steps.
    """

    allocated: int
    stored_bytes: int
    allocated_byte_s: float
    stored_byte_s: float


def constant_growth(allocated: int, stored_bytes: int, seconds: float) -> CacheGrowth:
    """Return the bytes of one step that lasts `seconds`."""
    return CacheGrowth(allocated, stored_bytes, allocated * seconds, stored_bytes * seconds)


class PassRow(NamedTuple):
    """One row of the timeline: consecutive passes over the same sequences, and the state after
    them.

    Attributes:
        passes: Number of passes.
        tokens: Tokens of each pass.
        prefill_tokens: Prompt tokens of each pass.
        waiting: Requests that are not admitted.
        kv_allocated_bytes: Allocated bytes of one GPU.
        kv_stored_bytes: Stored bytes of one GPU.
    """

    rank: int
    start_s: float
    duration_s: float
    passes: int
    sequences: int
    tokens: int
    prefill_tokens: int
    waiting: int
    kv_allocated_bytes: int
    kv_stored_bytes: int


class Log:
    """The log of a run: times of every request as arrays, and sums over the passes.

    A time is NaN if a request did not reach this state. If the timeline is full, every second row
    is dropped.

    Attributes:
        arrived: Seconds at which each request was sent.
        scheduled: Seconds at which the first pass of each request begins.
        decode_scheduled: Seconds at which the first pass of each request on a separate decode rank
            begins.
        first: Seconds at which each request has its first token.
        finished: Seconds at which each request has its last token.
        rejected: Whether each request can never fit.
        slots: Token slots of all passes.
        padded: Token slots that contain padding.
        prefill_tokens: Prompt tokens, including recomputed tokens.
        decode_tokens: Tokens of decoding sequences, including draft tokens.
        found_tokens: Prompt tokens found in a prefix cache.
        verified: Verifications of drafts, counted per sequence.
        yielded: Tokens that the verifications produced.
        allocated_byte_s: Allocated bytes, integrated over time.
        stored_byte_s: Stored bytes, integrated over time.
        stride: Number of rows that one row of the timeline represents.
    """

    def __init__(self, count: int, rank: int = 0) -> None:
        times = np.full((len(TIMES), count), np.nan)
        self.arrived, self.scheduled, self.decode_scheduled, self.first, self.finished = times
        self.rejected = np.zeros(count, dtype=bool)
        self.rank = rank
        self.stride = 1
        self.num_rows = 0
        self.rows: list[PassRow] = []
        self.passes = self.slots = self.padded = self.prefill_tokens = self.decode_tokens = 0
        self.verified = self.yielded = self.found_tokens = 0
        self.preemptions = self.recomputed_tokens = 0
        self.peak = self.largest = 0
        self.allocated_byte_s = self.stored_byte_s = 0.0
        self.busy_s = self.sequences_s = 0.0

    def for_rank(self, rank: int, num_ranks: int) -> "Log":
        """Return the log of a rank.

        The arrays of times are views of this log: every `num_ranks`-th request from request `rank`
        on.
        """
        log = Log(0, rank)
        for name in (*TIMES, "rejected"):
            setattr(log, name, getattr(self, name)[rank::num_ranks])
        return log

    def add(self, row: PassRow, growth: CacheGrowth) -> None:
        """Record consecutive passes."""
        prompt = row.prefill_tokens
        self.passes += row.passes
        self.slots += row.tokens * row.passes
        self.prefill_tokens += prompt
        self.decode_tokens += (row.tokens - prompt) * row.passes
        self.busy_s += row.duration_s
        self.sequences_s += row.sequences * row.duration_s
        self.largest = max(self.largest, row.sequences)
        self.peak = max(self.peak, growth.allocated)
        self.allocated_byte_s += growth.allocated_byte_s
        self.stored_byte_s += growth.stored_byte_s
        if self.num_rows % self.stride == 0:
            self.rows.append(row)
            if len(self.rows) > MAX_ROWS:
                self.rows = self.rows[::2]
                self.stride *= 2
        self.num_rows += 1


def hit_tokens(rate: float, prompt: int, block_size: int) -> int:
    """Return how many tokens of a prompt a prefix cache contains: the whole blocks in the share
    `rate`.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


class PrefixCache:
    """A prefix cache that contains the share `rate` of every prompt.

    Attributes:
        blocks: Leading blocks of the prefix that each running request uses.
        users: Number of running requests, by the number of blocks that they use.
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
        """Return the stored bytes that running requests save by sharing."""
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
