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
    """The KV cache memory of one data-parallel rank, and the bytes that a request takes in it.

    A rank may have several GPUs. All bytes are of one of them, the one with the most cache.
    Allocated bytes cannot be used by other requests. Stored bytes are the part that contains
    tokens. A request's allocated bytes never shrink while it grows. A shared block is a cache block
    that requests with a common prefix use together.

    Attributes:
        budget: Bytes for the KV caches of all requests together.
        allocated: Allocated bytes of one request, as an int64 array indexed by its cached tokens.
        stored_bytes: Stored bytes of one request, as an int64 array indexed by its cached tokens.
        longest: Maximum number of cached tokens of a request, also if more memory is free.
        shared_block_bytes: Allocated bytes of one shared block, over all layers.
        shared_block_stored: Stored bytes of one shared block, over all layers.
        block_size: Tokens of one cache block.
    """

    budget: int
    allocated: Any
    stored_bytes: Any
    longest: int
    shared_block_bytes: int = 0
    shared_block_stored: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE

    def fits(self, tokens: Any) -> Any:
        """Return whether requests of the given lengths each fit into the empty cache.

        Args:
            tokens: Array of numbers of cached tokens, one for each request.

        Returns:
            A boolean array of the same shape.
        """
        allocated = self.allocated[tokens.clip(max=len(self.allocated) - 1)]
        return (tokens <= self.longest) & (allocated <= self.budget)


def make_pool(
    capacity: Fit, cache: str, max_model_len: int, max_tokens: int, draft_slots: int = 0
) -> Pool:
    """Return the KV cache memory of one data-parallel rank, with a table of bytes by tokens.

    Args:
        capacity: Result of `fit` for the deployment: the KV cache budget, and the layout of the
            cache.
        cache: `paged` allocates blocks as a request grows. `contiguous` reserves `max_model_len`
            tokens for each request when it is admitted.
        max_model_len: Maximum tokens of a request: prompt and answer together.
        max_tokens: Largest number of cached tokens of a request, up to which the table of bytes
            goes.
        draft_slots: Cache slots for draft tokens that a request needs in addition to its own
            tokens.

    Raises:
        UserError: The cache is contiguous, and not even one reservation fits.
    """
    layout, content, kv_budget = capacity.plan, capacity.content, capacity.kv_budget
    block_size = layout.block_size or DEFAULT_BLOCK_SIZE
    tokens = np.arange(max_tokens + 1, dtype=np.int64)
    stored_bytes = stored_at(content.rows, tokens)
    if cache == "paged":
        allocated = np.maximum.accumulate(layout.request_bytes(kv_budget, tokens + draft_slots))
        return Pool(
            budget=int(layout.pool(kv_budget)) - layout.needed(0, 0),  # all but placeholders
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
    """Return the bytes on one GPU that two requests save for each cache block that they share.

    Requests with a common prefix share its blocks. A block counts with all layers. The result is
    the mean over many blocks, because a compressed layer stores less than one row per token.

    Args:
        layout: Layout of the KV cache on the GPU. The engine's layout gives allocated bytes. A
            `Content`, which has no padding, gives the bytes that contain tokens.
        block_size: Tokens of one block.
    """
    tokens = MEAN_BLOCKS * block_size
    return (layout.needed(2, tokens) - layout.needed(2, tokens, tokens)) // MEAN_BLOCKS


class CacheGrowth(NamedTuple):
    """KV cache bytes of all requests of one data-parallel rank in consecutive forward passes.

    Bytes are of one GPU of the rank, the one with the most cache. Allocated bytes cannot be used by
    other requests. Stored bytes are the part that contains tokens.

    Attributes:
        allocated: Bytes allocated after the last pass, which is also their maximum.
        stored_bytes: Bytes stored after the last pass.
        allocated_byte_s: Sum over the passes of allocated bytes times the seconds of the pass [byte
            · s]. Divided by all seconds, it is the mean.
        stored_byte_s: Sum over the passes of stored bytes times the seconds of the pass [byte · s].
    """

    allocated: int
    stored_bytes: int
    allocated_byte_s: float
    stored_byte_s: float


def constant_growth(allocated: int, stored_bytes: int, seconds: float) -> CacheGrowth:
    """Return the cache bytes of one rank during passes in which they do not change.

    Bytes are of one GPU of the data-parallel rank, the one with the most cache.

    Args:
        allocated: KV cache bytes allocated for all requests of the rank together.
        stored_bytes: Part of `allocated` that contains tokens.
        seconds: Seconds of all passes together.
    """
    return CacheGrowth(allocated, stored_bytes, allocated * seconds, stored_bytes * seconds)


class PassRow(NamedTuple):
    """One row of a simulation's timeline: forward passes of one rank over the same sequences.

    Consecutive passes are one row as long as no sequence joins or leaves. Bytes are of one GPU of
    the rank, the one with the most cache.

    Attributes:
        rank: Index of the data-parallel rank.
        start_s: Simulated time in seconds at which the first pass begins.
        duration_s: Seconds of all passes together.
        passes: Number of passes.
        sequences: Number of sequences in each pass.
        tokens: New tokens of each pass: `prefill_tokens`, plus those of the decoding sequences.
        prefill_tokens: Prompt tokens that each pass processes.
        waiting: Number of requests of the rank that have arrived but are not admitted.
        kv_allocated_bytes: KV cache bytes allocated for all requests after the last pass.
        kv_stored_bytes: Part of `kv_allocated_bytes` that contains tokens.
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
    """Times of requests and sums over forward passes, of one simulated rank or of a whole run.

    Times are simulated seconds since the beginning of the run, in arrays [requests]. A time is NaN
    if a request did not reach this state. Bytes are KV cache bytes of one GPU of the rank, the one
    with the most cache. In the log of a whole run only the times are set, and all sums are 0.

    Attributes:
        arrived: Time at which the client sent each request.
        scheduled: Time at which the first forward pass of each request begins.
        decode_scheduled: Time at which the first pass on a separate decode rank begins, with
            disaggregated prefill.
        first: Time at which each request has its first output token.
        finished: Time at which each request has its last output token.
        rejected: Whether each request was rejected, because it can never fit into the cache.
        rank: Index of the data-parallel rank; 0 for a whole run.
        rows: The timeline, as a list of `PassRow`. Beyond 20,000 rows, every second is dropped.
        num_rows: Number of rows that were added to the timeline, including dropped rows.
        stride: Number of added rows for which one row of `rows` stands.
        passes: Number of forward passes.
        slots: Number of new tokens in all passes, including padding.
        padded: Number of padding tokens in all passes.
        prefill_tokens: Prompt tokens processed in all passes, including recomputed tokens.
        found_tokens: Prompt tokens that were found in the prefix cache.
        preemptions: Number of times that a running request was stopped because memory ran out.
        recomputed_tokens: Tokens whose cache was dropped by a preemption and computed again.
        verified: Number of verified drafts: one for each decoding sequence in each pass.
        yielded: Tokens that the sequences gained in all verifications together.
        peak: Maximum of the bytes allocated for all requests of the rank together.
        largest: Maximum number of sequences in one pass.
        allocated_byte_s: Allocated bytes times seconds, summed over the passes [byte · s].
        stored_byte_s: Stored bytes times seconds, summed over the passes [byte · s].
        busy_s: Seconds of all passes together.
        sequences_s: Number of sequences times seconds, summed over the passes [s].
    """

    stride = 1
    num_rows = passes = slots = padded = prefill_tokens = 0
    verified = yielded = found_tokens = preemptions = recomputed_tokens = peak = largest = 0
    allocated_byte_s = stored_byte_s = busy_s = sequences_s = 0.0

    def __init__(self, count: int, rank: int = 0) -> None:
        times = np.full((len(TIMES), count), np.nan)
        self.arrived, self.scheduled, self.decode_scheduled, self.first, self.finished = times
        self.rejected = np.zeros(count, dtype=bool)
        self.rank = rank
        self.rows: list[PassRow] = []

    def for_rank(self, rank: int, num_ranks: int) -> "Log":
        """Return a log for one rank, which writes the times of its requests into this common log.

        Rank r of n has the requests r, r + n, r + 2n and so on. Sums over passes are kept
        separately for each rank.

        Args:
            rank: Index of the rank.
            num_ranks: Number of ranks that share the requests.
        """
        log = Log(0, rank)
        for name in (*TIMES, "rejected"):
            setattr(log, name, getattr(self, name)[rank::num_ranks])
        return log

    def add(self, row: PassRow, growth: CacheGrowth) -> None:
        """Add consecutive forward passes to the timeline and to the sums over all passes.

        Args:
            row: Row of the timeline that describes the passes.
            growth: KV cache bytes of the rank during the passes.
        """
        self.passes += row.passes
        self.slots += row.tokens * row.passes
        self.prefill_tokens += row.prefill_tokens
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
    """Return the prompt tokens that a prefix cache contains, in whole cache blocks.

    Example: 0.9 of 1,000 tokens are 56 blocks of 16, so 896 tokens are found.

    Args:
        rate: Share of the prompt that the cache contains, from 0 to 1.
        prompt: Tokens of the prompt.
        block_size: Tokens per cache block.
    """
    return int(round(rate * prompt, 6)) // block_size * block_size


class PrefixCache:
    """A simulated prefix cache that contains the same leading share of every prompt.

    All prompts begin with one common text. So the running requests share its cache blocks, and the
    longest prefix in use is stored only once.

    Attributes:
        rate: Share of each prompt that is cached, from 0 to 1.
        block_size: Tokens per block.
        block_bytes: Bytes on one GPU that the cache allocates for one shared block.
        block_stored: Part of `block_bytes` that contains tokens.
        blocks: Number of leading prefix blocks that each running request uses, by the request's
            index.
        users: Number of running requests that use n blocks, by n.
        shared_blocks: Number of blocks that the running requests save together by sharing.
    """

    shared_blocks = 0

    def __init__(self, rate: float, pool: Pool) -> None:
        self.rate = rate
        self.block_size = pool.block_size
        self.block_bytes = pool.shared_block_bytes
        self.block_stored = pool.shared_block_stored
        self.blocks: dict[int, int] = {}
        self.users: Counter[int] = Counter()

    def cached_tokens(self, prompt: int) -> int:
        """Return the leading tokens of a prompt that need not be computed, because they are cached.

        At least one token of the prompt is left to compute.

        Args:
            prompt: Number of tokens of the prompt.
        """
        return min(hit_tokens(self.rate, prompt, self.block_size), prompt - 1)

    def shared_bytes(self, cached: int) -> int:
        """Return the bytes on one GPU that a new request with a cached prefix need not allocate.

        They are the bytes of the prefix blocks that running requests already use.

        Args:
            cached: Number of tokens of the prefix.
        """
        return min(-(-cached // self.block_size), max(self.users, default=0)) * self.block_bytes

    def use(self, index: int, tokens: int) -> int:
        """Set the number of leading prompt tokens for which a request uses the prefix cache.

        Args:
            index: Position of the request among the requests of the rank.
            tokens: Number of leading prompt tokens; 0 when the request leaves.

        Returns:
            Change of the bytes on one GPU that running requests save by sharing; negative if they
            save less than before.
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
