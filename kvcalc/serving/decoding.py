"""The decoding sequences of a server, and the limits and rules by which it fills its passes.

Without a draft every sequence gains one token per pass, so consecutive passes are one event. With a
draft each sequence gains the accepted draft tokens, drawn at random, and one more.
"""

from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np

from kvcalc.serving.cache_accounting import CacheGrowth, Log, Pool
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.step_timers import StepTimeSegment


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
        reserved: Bytes reserved for the request.
    """

    index: int
    target: int
    cached: int = 0
    generated: int = 0
    order: int = 0
    reserved: int = 0


class Decoding:
    """The decoding sequences as arrays. Each gains one token per pass, or more with a draft.

    Attributes:
        running: The sequences. The last one began to decode last.
        cached: Cached tokens of each sequence.
        remaining: Tokens that each sequence has still to generate.
    """

    def __init__(self, pool: Pool, drafting: Drafting | None, log: Log) -> None:
        self.pool = pool
        self.drafting = drafting
        self.log = log
        self.rng = np.random.default_rng([drafting.seed, log.rank]) if drafting else None
        self.running: list[RunningRequest] = []
        self.cached = self.remaining = np.zeros(0, dtype=np.int64)

    @property
    def count(self) -> int:
        return len(self.running)

    @property
    def context(self) -> int:
        """Total number of cached tokens."""
        return int(self.cached.sum())

    @property
    def needed(self) -> int:
        """Bytes allocated after one more token of each sequence."""
        return int(self.pool.allocated[self.cached + 1].sum())

    @property
    def allocated(self) -> int:
        return int(self.pool.allocated[self.cached].sum())

    @property
    def stored_bytes(self) -> int:
        return int(self.pool.stored_bytes[self.cached].sum())

    def join(self, request: RunningRequest, answer_tokens: int) -> None:
        """Add a sequence that decodes `answer_tokens` tokens, from the next pass on."""
        self.running.append(request)
        self.cached = np.append(self.cached, request.cached)
        self.remaining = np.append(self.remaining, answer_tokens)

    def newest(self) -> int:
        """Return the order of the sequence that joined last; −1 without sequences."""
        return self.running[-1].order if self.running else -1

    def take_out(self) -> RunningRequest:
        """Remove the sequence that joined last, with its counts of tokens updated."""
        request = self.running.pop()
        cached = int(self.cached[-1])
        request.generated += cached - request.cached
        request.cached = cached
        self.cached = self.cached[:-1]
        self.remaining = self.remaining[:-1]
        return request

    def in_a_row(self, max_passes: int, free_bytes: int) -> int:
        """Return the number of passes until a sequence is done or `free_bytes` are exceeded.

        The number is at least 1 and at most `max_passes`. With a draft it is 1.
        """
        passes = 1 if self.drafting else min(int(self.remaining.min()), max_passes)
        if passes == 1:
            return 1
        allocated = self.pool.allocated[self._tokens(passes)].sum(axis=1)
        return max(1, int(allocated.searchsorted(free_bytes, side="right")))

    def _tokens(self, passes: int) -> Any:
        """Return the cached tokens [passes, sequences] after each pass without a draft."""
        return self.cached + np.arange(1, passes + 1)[:, None]

    def grow(
        self, passes: int, line: StepTimeSegment, other_allocated: int, other_stored: int
    ) -> tuple[CacheGrowth, list[RunningRequest]]:
        """Simulate `passes` passes; return their bytes and the completed requests.

        Args:
            line: Seconds of the passes.
            other_allocated: Allocated bytes of requests that do not decode.
            other_stored: Stored bytes of requests that do not decode.
        """
        if self.drafting:
            gained = self.drafting.draw_tokens(self.rng, self.count).clip(max=self.remaining)
            self.log.verified += self.count
            self.log.yielded += int(gained.sum())
            tokens = (self.cached + gained)[None]
        else:
            tokens = self._tokens(passes)
        self.remaining = self.remaining - (tokens[-1] - self.cached)
        self.cached = tokens[-1]
        allocated_bytes = self.pool.allocated[tokens].sum(axis=1) + other_allocated
        stored_bytes = self.pool.stored_bytes[tokens].sum(axis=1) + other_stored
        times = line.exact_seconds or accumulate(
            repeat(line.rise, passes - 1), initial=line.first
        )
        allocated_s = stored_s = 0.0
        allocated = stored = 0
        for allocated, stored, seconds in zip(
            allocated_bytes.tolist(), stored_bytes.tolist(), times, strict=False
        ):
            allocated_s += allocated * seconds
            stored_s += stored * seconds
        is_done = self.remaining == 0
        completed = []
        if is_done.any():
            completed = [r for r, done in zip(self.running, is_done, strict=True) if done]
            self.running = [
                r for r, done in zip(self.running, is_done, strict=True) if not done
            ]
            self.cached = self.cached[~is_done]
            self.remaining = self.remaining[~is_done]
        return CacheGrowth(allocated, stored, allocated_s, stored_s), completed
