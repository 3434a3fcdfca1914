"""The decoding sequences of a server, and the limits and rules by which it fills its passes.

Without a draft every sequence gains one token per pass, so consecutive passes are one event. With a
draft each sequence gains the accepted draft tokens, drawn at random, and one more.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvcalc.serving.cache_accounting import (
    CacheGrowth,
    CacheUsage,
    Log,
    Pool,
    constant_growth,
)
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.step_timers import StepTimeSegment


class Limits(NamedTuple):
    """Limits of one data-parallel rank.

    Attributes:
        max_num_seqs: Maximum number of concurrent sequences.
        max_num_batched_tokens: Maximum tokens of a pass.
        host_bytes_per_s: Rate at which preempted caches are swapped to the host; 0 recomputes them.
        batch_timeout: Seconds that a static batch waits to become full.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    host_bytes_per_s: float = 0.0
    batch_timeout: float = 0.0


class Scheduling(NamedTuple):
    """How an engine fills its passes.

    Attributes:
        decodes_wait: Whether passes with prompts contain no decodes and come first (SGLang).
        whole: Whether a prompt is processed in one pass, with as many others as its tokens allow
            (TensorRT-LLM). Otherwise it is processed in chunks (vLLM).
        reserve: Share of an answer whose cache must be free when a request is admitted. With 1 no
            request is ever preempted.
        wait_passes: Decode passes that prompts wait for more prompts.
        wait_share: Share of a pass that prompts must fill to end the wait.
        receive_interval: Decode passes between two checks for arrivals, if no pass with prompts is
            between them (SGLang's scheduler-recv-interval).
    """

    decodes_wait: bool = False
    whole: bool = False
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
        cached: Tokens that are cached; of a decoding request, when it began to decode.
        generated: Tokens generated; of a decoding request, when it began to decode.
        order: Number of its last admission; 0 before the first.
        began: Step at which it began to decode.
        ends: Step at which its answer is complete.
        reserved: Bytes reserved for the request.
        is_swapped: Whether its cache is in the memory of the host.
        is_computed: Whether its prompt was computed on a prefill rank.
    """

    index: int
    target: int
    cached: int = 0
    generated: int = 0
    order: int = 0
    began: int = 0
    ends: int = 0
    reserved: int = 0
    is_swapped: bool = False
    is_computed: bool = False


class LockstepDecoding:
    """Sequences that gain one token each in every pass.

    Attributes:
        running: Sequences by their order. The last one began to decode last.
        ends: Heap of (last step, order), with entries of preempted sequences.
        context: Total number of cached tokens.
    """

    def __init__(self, pool: Pool, longest: int) -> None:
        self.usage = CacheUsage(pool, longest)
        self.running: dict[int, RunningRequest] = {}
        self.ends: list[tuple[int, int]] = []
        self.context = 0

    @property
    def count(self) -> int:
        return len(self.running)

    @property
    def needed(self) -> int:
        """Bytes that the sequences hold after one more pass."""
        return self.usage.next if self.running else 0

    def exceeds(self, free_bytes: int) -> bool:
        """Return whether one more pass needs more than `free_bytes` bytes."""
        return self.usage.ends > free_bytes and self.needed > free_bytes

    def join(self, request: RunningRequest, answer_tokens: int) -> None:
        """Add a sequence that decodes `answer_tokens` tokens, from the next pass on."""
        request.began = self.usage.step
        request.ends = request.began + answer_tokens
        self.running[request.order] = request
        heappush(self.ends, (request.ends, request.order))
        self.usage.join(request.cached, answer_tokens)
        self.context += request.cached

    def newest(self) -> int:
        """Return the order of the sequence that joined last; −1 without sequences."""
        return next(reversed(self.running), -1)

    def take_out(self) -> RunningRequest:
        """Remove the sequence that joined last, with its counts of tokens updated."""
        _, request = self.running.popitem()
        gained = self.usage.step - request.began
        request.cached += gained
        request.generated += gained
        self.usage.join(request.cached, request.ends - self.usage.step, sign=-1)
        self.context -= request.cached
        return request

    def in_a_row(self, max_passes: int, free_bytes: int) -> int:
        """Return the number of passes until a sequence is done or `free_bytes` are exceeded.

        The number is at least 1 and at most `max_passes`.
        """
        while self.ends[0][1] not in self.running:
            heappop(self.ends)
        passes = min(self.ends[0][0] - self.usage.step, max_passes)
        if passes > 1 and self.usage.ends > free_bytes:
            passes = max(1, self.usage.within(passes, free_bytes))
        return passes

    def grow(
        self,
        passes: int,
        line: StepTimeSegment,
        other_allocated: int,
        other_stored: int,
    ) -> tuple[CacheGrowth, list[RunningRequest]]:
        """Simulate `passes` passes; return their bytes, as `CacheUsage.grow`, and the completed
        requests."""
        growth = self.usage.grow(passes, line, other_allocated, other_stored)
        self.context += self.count * passes
        completed: list[RunningRequest] = []
        step = self.usage.step
        while self.ends and self.ends[0][0] <= step:
            request = self.running.pop(heappop(self.ends)[1], None)
            if request:
                cached = request.cached + step - request.began
                self.usage.join(cached, 0, sign=-1)
                self.context -= cached
                completed.append(request)
        return growth, completed

    def pause(self, seconds: float, other_allocated: int, other_stored: int) -> CacheGrowth:
        """Return the bytes of a pass in which these sequences do not decode."""
        allocated = self.usage.allocated + other_allocated
        return constant_growth(allocated, self.usage.stored + other_stored, seconds)


class SpeculativeDecoding:
    """Sequences that gain the accepted draft tokens and one more in each pass.

    The methods are those of `LockstepDecoding`, computed with arrays.
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

    def exceeds(self, free_bytes: int) -> bool:
        return self.needed > free_bytes

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
        self,
        passes: int,
        line: StepTimeSegment,
        other_allocated: int,
        other_stored: int,
    ) -> tuple[CacheGrowth, list[RunningRequest]]:
        gained = self.drafting.draw_tokens(self.rng, self.count).clip(max=self.remaining)
        self.log.verified += self.count
        self.log.yielded += int(gained.sum())
        self.cached = self.cached + gained
        self.remaining = self.remaining - gained
        growth = self.pause(line.first, other_allocated, other_stored)
        goes_on = self.remaining > 0
        completed = [r for r, more in zip(self.running, goes_on, strict=True) if not more]
        if completed:
            self._select(goes_on)
        return growth, completed

    def pause(self, seconds: float, other_allocated: int, other_stored: int) -> CacheGrowth:
        allocated = int(self.pool.allocated[self.cached].sum()) + other_allocated
        stored = int(self.pool.stored[self.cached].sum()) + other_stored
        return constant_growth(allocated, stored, seconds)

    def _select(self, mask: Any) -> None:
        self.running = [r for r, selected in zip(self.running, mask, strict=True) if selected]
        self.cached = self.cached[mask]
        self.remaining = self.remaining[mask]


Decoding: TypeAlias = LockstepDecoding | SpeculativeDecoding
