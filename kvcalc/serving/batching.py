"""Static and continuous batching, simulated event by event.

Static batching: a batch starts when the server is free. It takes the requests that wait then, first
come first served, up to max_num_seqs and up to the memory at their longest. Prompts are padded to the
longest one in the batch and processed in one pass. Then every row decodes until the last one is
done; the slot of a completed row is padding. Clients receive tokens as they are made.

Continuous batching (Orca, Yu et al., OSDI 2022): the batch is chosen again before every pass. A
request is admitted if max_num_seqs and the free memory allow it. If a decode finds no block, the
request that was admitted last is preempted and waits at the head of the queue. Its cache is dropped
and recomputed with the tokens generated so far, or copied to the host and back. The first output
token comes from the last chunk of the prompt. Consecutive passes in which only lengths change are
one event. With a draft, each pass verifies the draft tokens of every decoding sequence.
`Scheduling` describes how engines differ.
"""

import math
from collections import deque
from typing import NamedTuple, cast

import numpy as np

from kvcalc.serving.arrivals import ArrivalQueue, WaitingRequests
from kvcalc.serving.cache_accounting import CacheGrowth, PassRow, Pool, constant_growth
from kvcalc.serving.decoding import (
    MIXED,
    Decoding,
    Limits,
    LockstepDecoding,
    RunningRequest,
    Scheduling,
    SpeculativeDecoding,
)
from kvcalc.serving.prefix_cache import PrefixCache, hit_tokens
from kvcalc.serving.step_timers import (
    AnyStepTimer,
    MixedStepTimer,
    SpeculativeStepTimer,
    StepTimer,
    StepTimeSegment,
)


class ServerSetup(NamedTuple):
    """The settings of a simulated server that all its ranks share.

    Attributes:
        prefix_hit_rate: Share of each prompt that a rank's prefix cache finds; 0 without caches.
    """

    pool: Pool
    steps: AnyStepTimer
    limits: Limits
    scheduling: Scheduling = MIXED
    prefix_hit_rate: float = 0.0


class Static:
    """The state of a server with static batching."""

    def __init__(self, queue: ArrivalQueue, setup: ServerSetup) -> None:
        self.queue = queue
        self.pool = setup.pool
        self.steps = cast("StepTimer", setup.steps)
        self.limits = setup.limits
        self.log = queue.log
        self.now = 0.0
        self.waiting: deque[int] = deque()

    def run(self) -> bool:
        """Simulate one batch. Returns False if all requests are done."""
        if not self.waiting:
            self.now = max(self.now, self.queue.next_s)
        self._collect()
        if self.waiting:
            self._serve(self._next_batch())
        return self.queue.is_open

    @property
    def done(self) -> int:
        return self.queue.done

    def _collect(self) -> None:
        """Admit arrivals; wait for a fuller batch until the first request's timeout ends."""
        self.waiting += self.queue.admit(self.now)
        while self.waiting and len(self.waiting) < self.limits.max_num_seqs:
            timeout = self.log.arrived[self.waiting[0]] + self.limits.batch_timeout
            next_s = self.queue.next_s
            if next_s > timeout:
                if next_s < math.inf and timeout > self.now:
                    self.now = timeout
                return
            self.now = max(self.now, next_s)
            self.waiting += self.queue.admit(self.now)

    def _next_batch(self) -> list[int]:
        """Return the longest head of the queue that fits if padded and grown to its end."""
        batch: list[int] = []
        prompt = answer = 0
        while self.waiting and len(batch) < self.limits.max_num_seqs:
            prompt = max(prompt, self.queue.inputs[self.waiting[0]])
            answer = max(answer, self.queue.outputs[self.waiting[0]])
            end = prompt + answer - 1
            needed = (len(batch) + 1) * int(self.pool.allocated[end])
            if batch and (needed > self.pool.budget or end > self.pool.longest):
                break
            batch.append(self.waiting.popleft())
        return batch

    def _serve(self, batch: list[int]) -> None:
        """Process the padded prompts, and decode until the last answer is complete."""
        inputs = np.array([self.queue.inputs[i] for i in batch])
        outputs = np.array([self.queue.outputs[i] for i in batch])
        count, prompt, decodes = len(batch), int(inputs.max()), int(outputs.max()) - 1
        times = [self.steps.prefill(((prompt, 0),) * count)]
        while len(times) <= decodes:
            context = prompt + len(times)
            times += self.steps.line(count, context).exact_seconds[: decodes + 1 - len(times)]
        seconds = np.array(times)
        ends = self.now + seconds.cumsum()
        self.log.scheduled[batch] = self.now
        self.log.first[batch] = ends[0]

        # a row's own tokens are stored until its answer is complete
        cache = np.zeros((2, decodes + 1), dtype=np.int64)  # allocated and stored bytes
        cache[0] = count * self.pool.allocated[prompt : prompt + decodes + 1]
        for first, output in zip(inputs.tolist(), outputs.tolist(), strict=True):
            cache[1, :output] += self.pool.stored_bytes[first : first + output]
        padding = count * prompt - int(inputs.sum()), count * decodes - int((outputs - 1).sum())
        for part, prompt_tokens, padded, start_s in (
            (slice(1), count * prompt, padding[0], self.now),
            (slice(1, None), 0, padding[1], float(ends[0])),
        ):
            if not (part_seconds := seconds[part]).size:
                continue
            byte_s = (part_seconds * cache[:, part]).sum(axis=1).tolist()
            growth = CacheGrowth(*cache[:, part][:, -1].tolist(), *byte_s)
            row = PassRow(
                rank=self.log.rank,
                start_s=start_s,
                duration_s=float(part_seconds.sum()),
                passes=part_seconds.size,
                sequences=count,
                tokens=prompt_tokens or count,
                prefill_tokens=prompt_tokens,
                waiting=len(self.waiting),
                kv_allocated_bytes=growth.allocated,
                kv_stored_bytes=growth.stored_bytes,
            )
            self.log.add(row, growth, padded)

        for position in np.argsort(outputs, kind="stable").tolist():
            end = float(ends[outputs[position] - 1])
            self.queue.leave(batch[position], end)
        self.now = float(ends[-1])


class Continuous:
    """The state of a server with continuous batching.

    Attributes:
        prefixes: The prefix cache. None if the server has no prefix cache.
        prefill_bytes: Allocated bytes of requests whose prompts are being processed, less shared bytes.
        reserved: Bytes reserved for admitted requests.
        waited: Consecutive decode passes for which prompts have waited for more prompts.
        horizon: Time up to which all arrivals are known.
        unchecked: Decode passes since the last check for arrivals.
    """

    def __init__(self, queue: ArrivalQueue, setup: ServerSetup) -> None:
        pool, steps = setup.pool, cast("MixedStepTimer", setup.steps)
        self.queue = queue
        self.pool = pool
        self.steps = steps
        self.limits = setup.limits
        self.scheduling = setup.scheduling
        self.log = queue.log
        hit_rate = setup.prefix_hit_rate
        self.prefixes = PrefixCache(hit_rate, pool) if hit_rate else None
        self.allocated = memoryview(pool.allocated)
        self.stored_bytes = memoryview(pool.stored_bytes)
        self.decoding: Decoding = (
            SpeculativeDecoding(pool, steps.drafting, self.log)
            if isinstance(steps, SpeculativeStepTimer)
            else LockstepDecoding(pool, max(queue.outputs, default=1))
        )
        self.now = 0.0
        self.admitted = self.prefill_bytes = self.swap_bytes = self.reserved = 0
        self.waited = self.unchecked = 0
        self.horizon = math.inf
        self.waiting = WaitingRequests(queue)
        self.prefilling: list[RunningRequest] = []
        self.joining: list[RunningRequest] = []

    @property
    def done(self) -> int:
        return self.queue.done

    @property
    def is_busy(self) -> bool:
        return bool(self.decoding.count or self.prefilling or self.waiting)

    def next_pass_s(self) -> float:
        """Return the time in seconds of the next known pass."""
        return self.now if self.is_busy else max(self.now, self.queue.next_s)

    def run(self) -> bool:
        """Simulate one pass, or consecutive passes in which only lengths change.

        Returns:
            False if all requests are done.
        """
        queue, is_busy = self.queue, self.is_busy
        if not is_busy:
            self.now = max(self.now, queue.next_s)
        if queue.next_s <= self.now and not (is_busy and self.unchecked):
            self.waiting.arrived += queue.admit(self.now)
            is_busy = is_busy or self.is_busy
        if is_busy:
            self._pass()
        return queue.is_open

    def _pass(self) -> None:
        preempted = False
        # at least one request always has enough memory for its next token
        while self.decoding.needed > self.pool.budget - self.prefill_bytes:
            preempted = True
            self._preempt()
        chunks: list[tuple[RunningRequest, int]] = []
        if self.prefilling or self.waiting:
            # each micro-batch of a pipeline may have the maximum number of tokens
            tokens = self.limits.max_num_batched_tokens * self.steps.stages
            if not self.scheduling.decodes_wait:
                tokens -= self.decoding.count * self.steps.queries
            for request in self.prefilling:
                new = min(request.target - request.cached, tokens)
                if new:
                    chunks.append((request, new))
                    tokens -= new
            if not preempted:
                chunks += self._admit(tokens, bool(chunks))
        swapped, self.swap_bytes = self.swap_bytes, 0
        if chunks or swapped or preempted:
            self._mixed(chunks, swapped)
        else:
            self._decode()
        for request in self.joining:
            self._join(request)
        self.joining = []

    def _join(self, request: RunningRequest) -> None:
        """Let a request decode from the next pass on."""
        self.decoding.join(request, self.queue.outputs[request.index] - request.generated)

    def _preempt(self) -> None:
        self.log.preemptions += 1
        if self.prefilling and self.prefilling[-1].order > self.decoding.newest():
            request = self.prefilling.pop()
            self.prefill_bytes -= self.allocated[request.target]
            self._release(request.index)
            self.log.recomputed_tokens += request.cached
            request.cached = 0
        else:
            request = self.decoding.take_out()
            self._release(request.index)
            request.target = request.cached + 1
            if self.limits.host_bytes_per_s:
                self._swap(request)
            else:
                self.log.recomputed_tokens += request.target
                request.cached = 0
        self.reserved -= request.reserved
        self.waiting.preempted.append(request)

    def _release(self, index: int) -> None:
        """Release the bytes of a request, except bytes that other requests still use."""
        if self.prefixes:
            self._share(self.prefixes.use(index, 0))

    def _share(self, shared: int) -> None:
        """Subtract bytes that running requests share from the held and the reserved bytes."""
        self.prefill_bytes -= shared
        self.reserved -= shared

    def _swap(self, request: RunningRequest) -> None:
        """Copy the cache of a request to the host, or back."""
        self.swap_bytes += self.allocated[request.cached]
        self.log.swapped_bytes += self.allocated[request.cached]

    def _admit(self, tokens: int, has_chunks: bool) -> list[tuple[RunningRequest, int]]:
        """Admit requests from the queue and return the first chunk of each.

        Admission ends if max_num_seqs, the tokens of the pass or the memory are used up.
        """
        chunks: list[tuple[RunningRequest, int]] = []
        if not self.waiting or self._waits_for_more_prompts(tokens):
            return chunks
        budget = self.pool.budget
        allocated = self.decoding.needed + self.prefill_bytes
        num_seqs = self.limits.max_num_seqs - self.decoding.count - len(self.prefilling)
        while self.waiting and tokens > 0 and num_seqs > 0:
            request = self.waiting.head()
            needed = self.allocated[request.target]
            remaining = self.queue.outputs[request.index] - request.generated - 1
            end = request.target + int(self.scheduling.reserve * remaining)
            reserved = self.allocated[end] if self.scheduling.reserve else 0
            cached = shared = 0
            if self.prefixes:
                cached = self.prefixes.cached_tokens(self.queue.inputs[request.index])
                shared = self.prefixes.shared_bytes(cached)
            if max(allocated + needed, self.reserved + reserved) - shared > budget:
                break
            # a cache that was swapped out, or computed on a prefill rank
            has_cache = bool(request.cached)
            is_swapped = has_cache and request.order > 0
            new = request.target - (request.cached or cached)
            is_first_prompt = not has_chunks and not chunks
            if (
                self.scheduling.whole_prompts
                and new > tokens
                and not is_first_prompt
                and not is_swapped
            ):
                break
            num_seqs -= 1
            allocated += needed - shared
            self._enter(request, cached, reserved)
            self._share(shared)
            if is_swapped:
                self._swap(request)
                self.joining.append(request)
            elif has_cache:
                self._keep_prefix(request.index)
                self._join(request)
                tokens -= self.steps.queries
            else:
                request.cached = cached
                self.prefill_bytes += needed
                self.prefilling.append(request)
                chunks.append((request, min(new, tokens)))
                tokens -= chunks[-1][1]
        return chunks

    def _enter(self, request: RunningRequest, cached: int, reserved: int) -> None:
        """Move a request from the queue to the running requests; `cached` tokens of its prompt are
        in the prefix cache."""
        self.waiting.pop()
        if self.prefixes:
            self.prefixes.use(request.index, cached)
            if not request.cached and request.order:
                self.log.recomputed_tokens -= cached
            elif not request.cached:
                self.log.found_tokens += cached
        if not request.order:
            self.log.scheduled[request.index] = self.now
        self.admitted += 1
        request.order = self.admitted
        request.reserved = reserved
        self.reserved += reserved

    def _keep_prefix(self, index: int) -> None:
        """Add a computed prompt's prefix to the prefix cache, and share bytes that are stored
        already."""
        if self.prefixes:
            prompt = self.queue.inputs[index]
            tokens = hit_tokens(self.prefixes.rate, prompt, self.pool.block_size)
            self._share(self.prefixes.use(index, tokens))

    def _waits_for_more_prompts(self, tokens: int) -> bool:
        """Return whether prompts wait until more prompts fill a pass."""
        max_passes = self.scheduling.wait_passes
        if not max_passes or not self.decoding.count or self.waited >= max_passes:
            self.waited = 0
            return False
        enough = self.scheduling.wait_share * tokens
        waits = self.waiting.tokens(enough) < enough
        self.waited = self.waited + 1 if waits else 0
        return waits

    def _mixed(self, chunks: list[tuple[RunningRequest, int]], swapped: int) -> None:
        """Simulate one pass with chunks of prompts, or one pass after a swap."""
        decoding = self.decoding
        count = 0 if self.scheduling.decodes_wait and chunks else decoding.count
        context = decoding.context / count + 1 if count else 0.0
        self.unchecked = 0
        seconds = 0.0
        if chunks:
            limit = self.limits.max_num_batched_tokens
            pieces = tuple(
                [
                    (min(limit, new - start), request.cached + start)
                    for request, new in chunks
                    for start in range(0, new, limit)
                ]
            )
            seconds = self.steps.mixed(pieces, count, context)
        elif count:
            seconds = self.steps.line(count, context).first
        if swapped:
            seconds += swapped / self.limits.host_bytes_per_s
        for request, new in chunks:
            request.cached += new
        allocated, stored_bytes = self.prefill_bytes, self._stored_bytes()
        for request in self.joining:
            allocated += self.allocated[request.cached]
            stored_bytes += self.stored_bytes[request.cached]
        completed: list[RunningRequest] = []
        if count:
            segment = StepTimeSegment(seconds)
            growth, completed = decoding.grow(1, segment, allocated, stored_bytes)
        else:
            allocated += decoding.allocated
            growth = constant_growth(allocated, decoding.stored_bytes + stored_bytes, seconds)
        self._log(seconds, 1, count, chunks, growth)
        self._advance(seconds, completed)
        for request, _ in chunks:
            if request.cached == request.target:
                self._complete_prompt(request)

    def _decode(self) -> None:
        """Simulate consecutive decode passes.

        They end if a sequence is done, a request arrives that could be admitted, or memory runs
        out.
        """
        decoding, count = self.decoding, self.decoding.count
        segment = self.steps.line(count, decoding.context / count + 1)
        passes = decoding.in_a_row(segment.passes, self.pool.budget - self.prefill_bytes)
        if self.waited:
            passes = min(passes, self.scheduling.wait_passes - self.waited + 1)
        interval = self.scheduling.receive_interval
        if passes > 1 and (self.waited or not self.waiting):
            next_s = min(self.queue.next_s, self.horizon)
            if next_s < self.now + segment.seconds(passes):
                until = segment.passes_until(passes, next_s - self.now)
                passes = min(passes, until + -(self.unchecked + until) % interval)
        self.unchecked = (self.unchecked + passes) % interval
        if self.waited:
            self.waited += passes - 1
        seconds = segment.seconds(passes)
        growth, completed = decoding.grow(
            passes, segment, self.prefill_bytes, self._stored_bytes()
        )
        self._log(seconds, passes, count, [], growth)
        self._advance(seconds, completed)

    def _stored_bytes(self) -> int:
        """Return the stored bytes of requests that do not decode, less the bytes that requests
        share."""
        stored_bytes = (
            sum([self.stored_bytes[r.cached] for r in self.prefilling])
            if self.prefilling
            else 0
        )
        return stored_bytes - self.prefixes.shared_stored if self.prefixes else stored_bytes

    def _log(
        self,
        seconds: float,
        passes: int,
        decodes: int,
        chunks: list[tuple[RunningRequest, int]],
        growth: CacheGrowth,
    ) -> None:
        """Record passes with `decodes` decodes and chunks of prompts."""
        prompt_tokens = sum([new for _, new in chunks])
        row = PassRow(
            self.log.rank,
            self.now,
            seconds,
            passes,
            decodes + len(chunks),
            decodes * self.steps.queries + prompt_tokens,
            prompt_tokens,
            len(self.waiting),
            growth.allocated,
            growth.stored_bytes,
        )
        self.log.add(row, growth)

    def _advance(self, seconds: float, completed: list[RunningRequest]) -> None:
        """Advance the time, and remove the requests that are done."""
        self.now += seconds
        for request in completed:
            self._leave(request)

    def _leave(self, request: RunningRequest) -> None:
        """Remove a request that is done."""
        index = request.index
        self.reserved -= request.reserved
        self._release(index)
        self.queue.leave(index, self.now)

    def _complete_prompt(self, request: RunningRequest) -> None:
        """Give a complete prompt its next token and let its request decode."""
        index = request.index
        self.prefilling.remove(request)
        self.prefill_bytes -= self.allocated[request.target]
        request.generated += 1
        if request.generated == 1:
            self.log.first[index] = self.now
        self._keep_prefix(index)
        if request.generated == self.queue.outputs[index]:
            self._leave(request)
        else:
            self.joining.append(request)
