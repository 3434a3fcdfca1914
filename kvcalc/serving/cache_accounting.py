"""The cache memory of a server: bytes of requests, their growth, and the log of a run.

A paged cache allocates pages for the cached tokens. A contiguous cache reserves one range for the
longest possible request when a request is admitted. Bytes are of the GPU with the most bytes in one
data-parallel rank.

A sequence that joins with c tokens has c + k tokens after k steps. All bytes that its growth will
add are therefore known from the start: bytes of a new block in the allocated bytes, and changes of
the stored bytes per token (at the end of a window). The sums need no loop over the sequences, so
one step costs as much for a thousand sequences as for one.
"""

from bisect import bisect_right
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np

from kvcalc.capacity.engines import CacheLayout
from kvcalc.capacity.engines.layout import Content, stored_at
from kvcalc.errors import UserError, nearest
from kvcalc.serving.step_timers import StepTimeSegment
from kvcalc.units import format_bytes

CACHES = ("paged", "contiguous")
DEFAULT_BLOCK_SIZE = 16  # tokens, if the engine's cache has no blocks
MEAN_BLOCKS = 1024  # blocks over which the bytes of a shared block are averaged
SCHEDULE_SIZE = 4  # size of a schedule, in multiples of the longest growth
MAX_ROWS = 20_000  # rows of a timeline


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
        """Return whether requests with `tokens` cached tokens (an array) fit into the empty
        cache."""
        allocated = self.allocated[tokens.clip(max=len(self.allocated) - 1)]
        return (tokens <= self.longest) & (allocated <= self.budget)


def make_pool(
    layout: CacheLayout,
    content: Content,
    kv_budget: int,
    cache: str,
    max_model_len: int,
    max_tokens: int,
    draft_slots: int = 0,
) -> Pool:
    """Return the pool of requests that store at most `max_tokens` tokens.

    Args:
        layout: The engine's layout of the cache.
        content: Contents of the cache, without blocks and padding.
        kv_budget: KV cache budget in bytes, as in `fit`.
        cache: `paged` or `contiguous`.
        max_model_len: Tokens of the longest request, which `contiguous` reserves.
        draft_slots: Slots for draft tokens behind the tokens of a request.

    Raises:
        UserError: The cache is unknown, or not even one reservation fits.
    """
    if cache not in CACHES:
        raise UserError(f"unknown cache {cache!r}", hint=nearest(cache, CACHES))
    tokens = np.arange(max_tokens + 1, dtype=np.int64)
    stored = stored_at(content.rows, tokens)
    if cache == "paged":
        allocated = np.maximum.accumulate(layout.request_bytes(kv_budget, tokens + draft_slots))
        return Pool(
            budget=layout.request_pool(kv_budget),
            allocated=allocated,
            stored=stored,
            longest=max_model_len,
            shared_block_bytes=shared_block(layout),
            shared_block_stored=shared_block(content, layout.block_size),
        )
    reserved = content.needed(1, max_model_len + draft_slots)
    if reserved > kv_budget:
        taken = f"{format_bytes(reserved)} of {format_bytes(kv_budget)}"
        what = f"one contiguous reservation of {max_model_len:,} tokens takes {taken}"
        raise UserError(what, hint="Lower max-model-len, or take a paged cache")
    return Pool(kv_budget, np.full(max_tokens + 1, reserved), stored, max_model_len)


def shared_block(layout: CacheLayout, block_size: int | None = None) -> int:
    """Return the bytes of one block that two requests with a common prefix share.

    The result is the mean over many blocks, because a compressed layer stores less than one row per
    token.
    """
    tokens = MEAN_BLOCKS * (block_size or layout.block_size or DEFAULT_BLOCK_SIZE)
    return (layout.needed(2, tokens) - layout.needed(2, tokens, tokens)) // MEAN_BLOCKS


class CacheGrowth(NamedTuple):
    """Bytes of some consecutive steps.

    Attributes:
        allocated: Bytes allocated after the last step, which is also their maximum.
        stored: Bytes stored after the last step.
        allocated_byte_s: Allocated bytes times seconds, summed over the steps.
        stored_byte_s: Stored bytes times seconds, summed over the steps.
    """

    allocated: int
    stored: int
    allocated_byte_s: float
    stored_byte_s: float


def constant_growth(allocated: int, stored: int, seconds: float) -> CacheGrowth:
    """Return the bytes of one step that lasts `seconds`."""
    return CacheGrowth(allocated, stored, allocated * seconds, stored * seconds)


class GrowthSchedule:
    """Rises of a table over tokens, scheduled by step to the end of each sequence.

    Args:
        rises: Bytes that each token adds.
        longest: Maximum number of tokens that a sequence gains.
    """

    def __init__(self, rises: Any, longest: int) -> None:
        self.positions = np.flatnonzero(rises) + 1
        self.rises = rises[self.positions - 1]
        self.position_list: list[int] = self.positions.tolist()
        self.added = np.zeros(SCHEDULE_SIZE * (longest + 2), dtype=np.int64)
        self.base = 0  # first step of the schedule

    def join(self, step: int, cached: int, end: int, sign: int) -> None:
        """Add the growth of a sequence from `cached` tokens at `step` to `end` tokens; sign −1
        removes it."""
        passed = step - self.base
        if 2 * passed > self.added.size:
            remaining = self.added[passed:].copy()
            self.added[: remaining.size] = remaining
            self.added[remaining.size :] = 0
            self.base = step
        low = bisect_right(self.position_list, cached)
        high = bisect_right(self.position_list, end)
        steps = self.positions[low:high] + (step - self.base - cached)
        self.added[steps] += sign * self.rises[low:high]

    def next(self, step: int) -> int:
        """Return the bytes that the step after `step` adds."""
        return int(self.added[step - self.base + 1])

    def coming(self, step: int, steps: int) -> list[int]:
        """Return the bytes that each of the `steps` steps after `step` adds."""
        first = step - self.base + 1
        return self.added[first : first + steps].tolist()  # type: ignore[no-any-return]


class CacheUsage:
    """Sums over the decoding sequences.

    Attributes:
        allocated: Bytes allocated now.
        stored: Bytes stored now.
        ends: Bytes allocated if each sequence had reached its end.
        rise: Stored bytes that the next step adds.
    """

    def __init__(self, pool: Pool, longest: int) -> None:
        self.allocated = self.stored = self.ends = self.step = self.rise = 0
        self.allocated_table = memoryview(pool.allocated)
        self.stored_table = memoryview(pool.stored)
        rises: Any = np.diff(pool.stored)
        rises = np.append(rises, rises[-1:])  # a sequence of maximum length does not grow
        self.rises = memoryview(rises)
        self.blocks = GrowthSchedule(np.diff(pool.allocated), longest)
        self.bends = GrowthSchedule(np.diff(rises), longest)
        # whether every token stores equally many bytes
        self.is_straight = not self.bends.position_list

    def join(self, cached: int, steps: int, sign: int = 1) -> None:
        """Add a sequence with `cached` tokens that grows for `steps` steps; sign −1 removes it."""
        end = cached + steps
        self.allocated += sign * self.allocated_table[cached]
        self.stored += sign * self.stored_table[cached]
        self.ends += sign * self.allocated_table[end]
        self.rise += sign * self.rises[cached]
        self.blocks.join(self.step, cached, end, sign)
        if not self.is_straight:
            self.bends.join(self.step, cached, end, sign)

    def within(self, steps: int, free_bytes: int) -> int:
        """Return how many of the next `steps` steps allocate at most `free_bytes` in all."""
        allocated = self.allocated
        for step, added in enumerate(self.blocks.coming(self.step, steps)):
            allocated += added
            if allocated > free_bytes:
                return step
        return steps

    @property
    def next(self) -> int:
        """Bytes allocated after one more step."""
        return self.allocated + self.blocks.next(self.step)

    def grow(
        self, steps: int, line: StepTimeSegment, other_allocated: int, other_stored: int
    ) -> CacheGrowth:
        """Advance by `steps` steps and return their bytes.

        Args:
            line: Seconds of the steps.
            other_allocated: Allocated bytes of requests that do not decode.
            other_stored: Stored bytes of requests that do not decode.
        """
        allocated = self.allocated + other_allocated
        stored = self.stored + other_stored
        slope = self.rise
        turns = repeat(0) if self.is_straight else self.bends.coming(self.step, steps)
        times = line.each or accumulate(repeat(line.rise, steps - 1), initial=line.first)
        allocated_s = stored_s = 0.0
        coming = self.blocks.coming(self.step, steps)
        for added, turn, seconds in zip(coming, turns, times, strict=False):
            allocated += added
            stored += slope
            slope += turn
            allocated_s += allocated * seconds
            stored_s += stored * seconds
        self.allocated = allocated - other_allocated
        self.stored = stored - other_stored
        self.rise = slope
        self.step += steps
        return CacheGrowth(allocated, stored, allocated_s, stored_s)


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
    """Times of every request, as arrays, and sums over the passes, of constant size.

    A time is NaN if a request did not reach that state. If the timeline is full, every second row
    is dropped.

    Attributes:
        slots: Token slots of the passes run.
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
        self.arrived, self.scheduled, self.first, self.finished = np.full((4, count), np.nan)
        self.rejected = np.zeros(count, dtype=bool)
        self.rank = rank
        self.stride = 1
        self.num_rows = 0
        self.rows: list[PassRow] = []
        self.passes = self.slots = self.padded = self.prefill_tokens = self.decode_tokens = 0
        self.verified = self.yielded = self.found_tokens = 0
        self.preemptions = self.recomputed_tokens = self.swapped_bytes = 0
        self.peak = self.largest = 0
        self.allocated_byte_s = self.stored_byte_s = 0.0
        self.busy_s = self.sequences_s = 0.0

    def add(self, row: PassRow, growth: CacheGrowth, padded: int = 0) -> None:
        """Record consecutive passes.

        Args:
            padded: Padding slots of all passes together, in prompts if the passes have prompts.
        """
        prompt = row.prefill_tokens
        self.passes += row.passes
        self.slots += row.tokens * row.passes
        self.padded += padded
        if prompt:
            self.prefill_tokens += prompt - padded
            padded = 0
        self.decode_tokens += (row.tokens - prompt) * row.passes - padded
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
