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
    """The KV cache memory of one data-parallel rank. Bytes are of its GPU with the most cache.

    Requests have allocated bytes, which nothing else can use, and stored bytes, which contain
    tokens. A request's allocated bytes never shrink while it grows. A shared block is a cache block
    that requests with a common prefix use together.

    Attributes:
        budget: KV cache budget in bytes.
        allocated: Allocated bytes of one request, as an int64 array indexed by its cached tokens.
        stored_bytes: Stored bytes of one request, as an int64 array indexed by its cached tokens.
        longest: Maximum cached tokens of a request, independent of free memory.
        shared_block_bytes: Allocated bytes of one shared block.
        shared_block_stored: Stored bytes of one shared block.
        block_size: Tokens of one shared block.
    """

    budget: int
    allocated: Any
    stored_bytes: Any
    longest: int
    shared_block_bytes: int = 0
    shared_block_stored: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE

    def fits(self, tokens: Any) -> Any:
        """Return whether a request with `tokens` cached tokens fits into the empty cache.

        Args:
            tokens: Array of token counts. The result is a boolean array of the same shape.
        """
        allocated = self.allocated[tokens.clip(max=len(self.allocated) - 1)]
        return (tokens <= self.longest) & (allocated <= self.budget)


def make_pool(
    capacity: Fit,
    cache: str,
    max_model_len: int,
    max_tokens: int,
    draft_slots: int = 0,
) -> Pool:
    """Return the KV cache memory of one data-parallel rank, with bytes tabulated by a request's
    tokens.

    Args:
        capacity: The KV cache budget, and the engine's layout of the cache.
        cache: `paged` allocates blocks as a request grows. `contiguous` reserves `max_model_len`
            tokens when a request is admitted.
        max_model_len: Maximum tokens of a request: prompt and answer together.
        max_tokens: Number of cached tokens up to which the bytes of a request are tabulated.
        draft_slots: Cache slots for draft tokens that each request needs in addition to its tokens.

    Raises:
        UserError: Not even one contiguous reservation fits.
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
    """Return the bytes, on one GPU, of one cache block that two requests with a common prefix
    share.

    The result is the mean over many blocks, because a compressed layer stores less than one row per
    token.

    Args:
        layout: Layout of the KV cache.
        block_size: Tokens per block.
    """
    tokens = MEAN_BLOCKS * block_size
    return (layout.needed(2, tokens) - layout.needed(2, tokens, tokens)) // MEAN_BLOCKS


class CacheGrowth(NamedTuple):
    """KV cache bytes of all requests of one rank during consecutive passes.

    Bytes are of the rank's GPU with the most cache bytes.

    Attributes:
        allocated: Bytes allocated after the last pass, which is also their maximum.
        stored_bytes: Bytes stored after the last pass.
        allocated_byte_s: Sum over the passes of allocated bytes times the pass's seconds.
        stored_byte_s: Sum over the passes of stored bytes times the pass's seconds.
    """

    allocated: int
    stored_bytes: int
    allocated_byte_s: float
    stored_byte_s: float


def constant_growth(allocated: int, stored_bytes: int, seconds: float) -> CacheGrowth:
    """Return the cache bytes of consecutive passes of one rank during which they do not change.

    Args:
        allocated: KV cache bytes allocated for all requests of the rank.
        stored_bytes: KV cache bytes stored for all requests of the rank.
        seconds: Seconds of all passes together.
    """
    return CacheGrowth(allocated, stored_bytes, allocated * seconds, stored_bytes * seconds)


class PassRow(NamedTuple):
    """One row of the timeline of a simulation: consecutive passes of one rank over the same
    sequences.

    Bytes are of the rank's GPU with the most cache bytes.

    Attributes:
        rank: Index of the data-parallel rank.
        start_s: Simulated time in seconds at which the first pass begins.
        duration_s: Seconds of all passes together.
        passes: Number of passes.
        sequences: Number of sequences in each pass.
        tokens: New tokens of each pass, including `prefill_tokens`.
        prefill_tokens: Prompt tokens of each pass.
        waiting: Number of requests of the rank that have arrived but are not admitted.
        kv_allocated_bytes: Allocated KV cache bytes of all requests after the last pass.
        kv_stored_bytes: Stored KV cache bytes of all requests after the last pass.
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
    """Times of requests as arrays, and sums over the passes, of one simulated rank or of a whole
    run.

    A time is NaN if a request did not reach this state. If the timeline `rows` is full, every
    second row is dropped. A token slot is a place of a pass that contains a token or padding. Bytes
    are KV cache bytes of the rank's GPU with the most cache bytes.

    Attributes:
        arrived: Seconds at which each request was sent.
        scheduled: Seconds at which the first pass of each request begins.
        decode_scheduled: Seconds at which the first pass of each request on a separate decode rank
            begins.
        first: Seconds at which each request has its first token.
        finished: Seconds at which each request has its last token.
        rejected: Whether each request can never fit.
        rank: Index of the rank.
        rows: The timeline.
        num_rows: Number of rows before rows were dropped.
        stride: Number of recorded rows for which one row of `rows` stands.
        passes: Number of passes.
        slots: Token slots of all passes.
        padded: Token slots of all passes that contain padding.
        prefill_tokens: Prompt tokens processed, including recomputed tokens.
        decode_tokens: Tokens of decoding sequences, including draft tokens.
        found_tokens: Prompt tokens found in a prefix cache.
        preemptions: Number of preemptions.
        recomputed_tokens: Tokens whose cache was dropped by a preemption and computed again.
        verified: Number of verified drafts: one for each decoding sequence in each pass.
        yielded: Tokens that the sequences gained in these verifications.
        peak: Maximum of the bytes that all requests of the rank have allocated.
        largest: Maximum number of sequences in a pass.
        allocated_byte_s: Allocated bytes times seconds, summed over the passes.
        stored_byte_s: Stored bytes times seconds, summed over the passes.
        busy_s: Seconds of all passes together.
        sequences_s: Sum over the passes of sequences times the pass's seconds.
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
        """Return a new log for one rank, which writes the times of its requests into this log.

        A rank has every `num_ranks`-th request, from request `rank` on.

        Args:
            rank: Index of the rank.
            num_ranks: Number of ranks that share the requests.
        """
        log = Log(0, rank)
        for name in (*TIMES, "rejected"):
            setattr(log, name, getattr(self, name)[rank::num_ranks])
        return log

    def add(self, row: PassRow, growth: CacheGrowth) -> None:
        """Add consecutive passes to the timeline and to the sums over all passes.

        Args:
            row: Row of the timeline that describes the passes.
            growth: KV cache bytes of the rank during the passes.
        """
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
    """Return the prompt tokens that a prefix cache contains: only whole blocks within `rate` of the
    prompt.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.

    Args:
        rate: Share of the prompt that the cache contains, from 0 to 1.
        prompt: Tokens of the prompt.
        block_size: Tokens per cache block.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


class PrefixCache:
    """A prefix cache that contains the leading share `rate` of every prompt.

    All prompts begin with one common prefix, so the longest prefix in use is stored once.

    Attributes:
        rate: Share of each prompt that is cached, from 0 to 1.
        block_size: Tokens per block.
        block_bytes: Allocated bytes of a shared block.
        block_stored: Stored bytes of a shared block.
        blocks: Number of leading prefix blocks in use, by the index of each running request.
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
        """Return the stored KV cache bytes, on one GPU, that all running requests together save by
        sharing.
        """
        return self.shared_blocks * self.block_stored

    def cached_tokens(self, prompt: int) -> int:
        """Return the tokens of a prompt that are cached. At least one token is left to compute.

        Args:
            prompt: Tokens of the prompt.
        """
        return min(hit_tokens(self.rate, prompt, self.block_size), prompt - 1)

    def shared_bytes(self, cached: int) -> int:
        """Return the allocated bytes, on one GPU, of a cached prefix that running requests already
        use.

        A new request with this prefix does not allocate these bytes again.

        Args:
            cached: Tokens of the prefix.
        """
        blocks = -(-cached // self.block_size)
        return min(blocks, max(self.users, default=0)) * self.block_bytes

    def use(self, index: int, tokens: int) -> int:
        """Set the number of leading prefix tokens that a request uses; 0 if the request leaves.

        Args:
            index: Index of the request among the requests of the rank.
            tokens: Number of leading prompt tokens that the request uses from the prefix cache.

        Returns:
            Allocated bytes newly shared with other running requests; negative if fewer are shared.
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
