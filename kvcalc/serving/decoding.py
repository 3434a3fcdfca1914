"""The decoding sequences of a server, and the limits and rules by which it fills its passes.

Without a draft every sequence gains one token per pass, so consecutive passes are one event. With a
draft each sequence gains the accepted draft tokens, drawn at random, and one more.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvcalc.serving.cache_accounting import (
    CacheGrowth,
    Log,
    Pool,
    constant_growth,
)
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.step_timers import StepTimeSegment

# size of the schedule of a server, in multiples of the longest growth of a sequence
SCHEDULE_SIZE = 4


class Limits(NamedTuple):
    """Limits of one data-parallel rank.

    Attributes:
        max_num_seqs: Maximum number of concurrent sequences.
        max_num_batched_tokens: Maximum tokens of a pass.
        batch_timeout: Seconds that a static batch waits to become full.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    batch_timeout: float = 0.0


class Scheduling(NamedTuple):
    """How an engine fills its passes.

    Attributes:
        decodes_wait: Whether passes with prompts contain no decodes and come first (SGLang).
        whole_prompts: Whether a prompt is processed in one pass, with others that its tokens allow
            (TensorRT-LLM). Otherwise it is processed in chunks (vLLM).
        reserve: Share of an answer whose cache must be free when a request is admitted. With 1 no
            request is ever preempted.
        wait_passes: Decode passes that prompts wait for more prompts.
        wait_share: Share of a pass that prompts must fill to end the wait.
        receive_interval: Decode passes between two checks for arrivals, if no pass with prompts is
            between them (SGLang's scheduler-recv-interval).
    """

    decodes_wait: bool = False
    whole_prompts: bool = False
    reserve: float = 0.0
    wait_passes: int = 0
    wait_share: float = 0.0
    receive_interval: int = 1


MIXED = Scheduling()


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request in the system.

    Attributes:
        target: Tokens to cache before the request decodes.
        cached: Tokens that are cached now, or were cached when the request began to decode. A
            waiting request has them if they were computed on a prefill rank.
        generated: Tokens generated now, or when the request began to decode.
        order: Number of its last admission; 0 before the first.
        began: Step at which it began to decode.
        ends: Step at which its answer is complete.
        reserved: Bytes reserved for the request.
    """

    index: int
    target: int
    cached: int = 0
    generated: int = 0
    order: int = 0
    began: int = 0
    ends: int = 0
    reserved: int = 0


class LockstepDecoding:
    """Sequences that gain one token each in every pass.

    A sequence that joins with c tokens has c + k tokens after k passes. All bytes that its growth
    will add are therefore known from the start, and added to a schedule by pass. A pass then costs
    as much for a thousand sequences as for one.

    Attributes:
        running: Sequences by their order. The last one began to decode last.
        ends: Heap of (last pass, order), with entries of preempted sequences.
        passes: Number of passes done.
        context: Total number of cached tokens.
        allocated: Bytes allocated now.
        stored_bytes: Bytes stored now.
        schedule: Allocated and stored bytes that each pass adds [2, passes], from pass `base` on.
    """

    def __init__(self, pool: Pool, longest: int) -> None:
        """Start without sequences. Each sequence will gain at most `longest` tokens."""
        self.running: dict[int, RunningRequest] = {}
        self.ends: list[tuple[int, int]] = []
        self.passes = self.base = self.context = self.allocated = self.stored_bytes = 0
        self.tables = memoryview(pool.allocated), memoryview(pool.stored_bytes)
        self.rises = np.diff([pool.allocated, pool.stored_bytes], axis=1)
        self.schedule = np.zeros((2, SCHEDULE_SIZE * (longest + 2)), dtype=np.int64)

    @property
    def count(self) -> int:
        return len(self.running)

    @property
    def needed(self) -> int:
        """Bytes allocated after one more pass."""
        return self.allocated + int(self.schedule[0, self.passes - self.base])

    def join(self, request: RunningRequest, answer_tokens: int) -> None:
        """Add a sequence that decodes `answer_tokens` tokens, from the next pass on."""
        request.began = self.passes
        request.ends = request.began + answer_tokens
        self.running[request.order] = request
        heappush(self.ends, (request.ends, request.order))
        self._count(request.cached, answer_tokens, 1)

    def _count(self, cached: int, steps: int, sign: int) -> None:
        """Add a sequence with `cached` tokens that grows in `steps` passes; sign −1 removes it."""
        allocated, stored_bytes = self.tables
        self.context += sign * cached
        self.allocated += sign * allocated[cached]
        self.stored_bytes += sign * stored_bytes[cached]
        if not steps:
            return
        start = self.passes - self.base
        if 2 * start > self.schedule.shape[1]:
            self.schedule = np.roll(self.schedule, -start, axis=1)
            self.schedule[:, -start:] = 0
            self.base = self.passes
            start = 0
        self.schedule[:, start : start + steps] += sign * self.rises[:, cached : cached + steps]

    def newest(self) -> int:
        """Return the order of the sequence that joined last; −1 without sequences."""
        return next(reversed(self.running), -1)

    def take_out(self) -> RunningRequest:
        """Remove the sequence that joined last, with its counts of tokens updated."""
        _, request = self.running.popitem()
        gained = self.passes - request.began
        request.cached += gained
        request.generated += gained
        self._count(request.cached, request.ends - self.passes, -1)
        return request

    def in_a_row(self, max_passes: int, free_bytes: int) -> int:
        """Return the number of passes until a sequence is done or `free_bytes` are exceeded.

        The number is at least 1 and at most `max_passes`.
        """
        while self.ends[0][1] not in self.running:
            heappop(self.ends)
        passes = min(self.ends[0][0] - self.passes, max_passes)
        if passes == 1:
            return 1
        start = self.passes - self.base
        allocated = self.allocated + self.schedule[0, start : start + passes].cumsum()
        return max(1, int(allocated.searchsorted(free_bytes, side="right")))

    def grow(
        self, passes: int, line: StepTimeSegment, other_allocated: int, other_stored: int
    ) -> tuple[CacheGrowth, list[RunningRequest]]:
        """Simulate `passes` passes; return their bytes and the completed requests.

        Args:
            line: Seconds of the passes.
            other_allocated: Allocated bytes of requests that do not decode.
            other_stored: Stored bytes of requests that do not decode.
        """
        start = self.passes - self.base
        rises = self.schedule[:, start : start + passes].tolist()
        times = line.exact_seconds or accumulate(
            repeat(line.rise, passes - 1), initial=line.first
        )
        allocated_s = stored_s = 0.0
        allocated = self.allocated + other_allocated
        stored_bytes = self.stored_bytes + other_stored
        for more_allocated, more_stored, seconds in zip(*rises, times, strict=False):
            allocated += more_allocated
            stored_bytes += more_stored
            allocated_s += allocated * seconds
            stored_s += stored_bytes * seconds
        self.allocated = allocated - other_allocated
        self.stored_bytes = stored_bytes - other_stored
        self.passes += passes
        self.context += self.count * passes
        completed: list[RunningRequest] = []
        while self.ends and self.ends[0][0] <= self.passes:
            request = self.running.pop(heappop(self.ends)[1], None)
            if request:
                self._count(request.cached + self.passes - request.began, 0, -1)
                completed.append(request)
        return CacheGrowth(allocated, stored_bytes, allocated_s, stored_s), completed


class SpeculativeDecoding:
    """Sequences that gain the accepted draft tokens and one more in each pass.

    It has the methods of `LockstepDecoding`, computed with arrays.

    Attributes:
        cached: Cached tokens of each sequence.
        remaining: Tokens that each sequence has still to generate.
    """

    def __init__(self, pool: Pool, drafting: Drafting, log: Log) -> None:
        self.pool = pool
        self.drafting = drafting
        self.log = log
        self.rng = np.random.default_rng([drafting.seed, log.rank])
        self.running: list[RunningRequest] = []
        self.cached = self.remaining = np.zeros(0, dtype=np.int64)

    @property
    def count(self) -> int:
        return len(self.running)

    @property
    def context(self) -> int:
        return int(self.cached.sum())

    @property
    def needed(self) -> int:
        return int(self.pool.allocated[self.cached + 1].sum())

    @property
    def allocated(self) -> int:
        return int(self.pool.allocated[self.cached].sum())

    @property
    def stored_bytes(self) -> int:
        return int(self.pool.stored_bytes[self.cached].sum())

    def join(self, request: RunningRequest, answer_tokens: int) -> None:
        self.running.append(request)
        self.cached = np.append(self.cached, request.cached)
        self.remaining = np.append(self.remaining, answer_tokens)

    def newest(self) -> int:
        return max((request.order for request in self.running), default=-1)

    def take_out(self) -> RunningRequest:
        index = max(range(self.count), key=lambda i: self.running[i].order)
        request = self.running[index]
        cached = int(self.cached[index])
        request.generated += cached - request.cached
        request.cached = cached
        self._select(np.arange(self.count) != index)
        return request

    def in_a_row(self, max_passes: int, free_bytes: int) -> int:
        return 1

    def grow(
        self, passes: int, line: StepTimeSegment, other_allocated: int, other_stored: int
    ) -> tuple[CacheGrowth, list[RunningRequest]]:
        gained = self.drafting.draw_tokens(self.rng, self.count).clip(max=self.remaining)
        self.log.verified += self.count
        self.log.yielded += int(gained.sum())
        self.cached = self.cached + gained
        self.remaining = self.remaining - gained
        growth = constant_growth(
            self.allocated + other_allocated, self.stored_bytes + other_stored, line.first
        )
        completed = [
            r for r, tokens in zip(self.running, self.remaining, strict=True) if not tokens
        ]
        if completed:
            self._select(self.remaining > 0)
        return growth, completed

    def _select(self, mask: Any) -> None:
        self.running = [r for r, selected in zip(self.running, mask, strict=True) if selected]
        self.cached = self.cached[mask]
        self.remaining = self.remaining[mask]


Decoding: TypeAlias = LockstepDecoding | SpeculativeDecoding
