"""Static and continuous batching, simulated event by event.

Static batching: a batch starts when the server is free. It takes the waiting requests, first come
first served, up to max_num_seqs and up to the memory that they need at their full length. Prompts
are padded to the longest prompt in the batch and processed in one pass. Then every row decodes
until the last request is done; the slot of a completed row is padding. Clients receive each token
immediately.

Continuous batching (Orca, Yu et al., OSDI 2022): the batch is chosen again before every pass. A
request is admitted if max_num_seqs and the free memory allow it. If a decode finds no block, the
request that was admitted last is preempted and waits at the head of the queue. Its cache is dropped
and recomputed with the tokens generated so far. The first output token comes from the last chunk of
the prompt. Consecutive passes in which only lengths change are one event. With a draft, each pass
verifies the draft tokens of every decoding sequence.
`Scheduling` describes how engines differ.

Without a draft, every sequence gains one token per pass. With a draft, each sequence gains the
accepted draft tokens, whose number is drawn at random, and one more token.
"""

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, compress, repeat
from math import inf
from typing import Any, NamedTuple

import numpy as np

from kvcalc.serving.cache_accounting import (
    CacheGrowth,
    Log,
    PassRow,
    Pool,
    PrefixCache,
    constant_growth,
    hit_tokens,
)
from kvcalc.serving.requests import ArrivalQueue
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.step_timers import StepTimer, StepTimeSegment


class Limits(NamedTuple):
    """Limits of the engine's scheduler, for one data-parallel rank.

    Attributes:
        max_num_seqs: Maximum number of sequences that run at the same time on the rank.
        max_num_batched_tokens: Maximum number of new tokens (prompt tokens, and one per decoding
            sequence) in one forward pass. With several pipeline stages, it is per micro-batch, and
            a pass has one micro-batch per stage.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


class Scheduling(NamedTuple):
    """How an engine fills its forward passes with prompts and decodes. The defaults are vLLM's.

    Attributes:
        decodes_wait: Whether a pass with prompts contains no decodes, and prompts come first
            (SGLang). Otherwise a pass may contain both.
        whole_prompts: Whether a prompt is processed in one pass, together with other prompts up to
            the maximum tokens of a pass (TensorRT-LLM). Otherwise it is processed in chunks (vLLM).
        reserve: Share of a request's output tokens, from 0 to 1, for which KV cache must be free
            when the request is admitted. At 0 only the prompt must fit. At 1 no request is
            preempted.
        wait_passes: Maximum number of consecutive decode passes during which arrived prompts wait,
            so that more prompts can share a pass; 0 if prompts never wait.
        wait_share: Share, from 0 to 1, of the tokens of a pass that decodes and prompts in progress
            leave free. Prompts stop waiting when they fill this share.
    """

    decodes_wait: bool = False
    whole_prompts: bool = False
    reserve: float = 0.0
    wait_passes: int = 0
    wait_share: float = 0.0


MIXED = Scheduling()


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that has reached the server and is not done: it waits, is in prefill, or decodes.

    Attributes:
        index: Position of the request among the requests of its data-parallel rank.
        target: Tokens that must be cached before the request decodes: its prompt, and after a
            preemption also its generated tokens.
        cached: Cached tokens. While the request decodes, this is the number at the beginning of its
            decoding. A waiting request has cached tokens only with disaggregated prefill.
        generated: Generated tokens. While the request decodes, this is the number at the beginning
            of its decoding.
        order: Admission number: the request was the n-th to be admitted on its rank, at its last
            admission; 0 before the first. The newest request is preempted first.
        reserved: KV cache bytes of one GPU, reserved at admission for prompt and share of answer.
    """

    index: int
    target: int
    cached: int = 0
    generated: int = 0
    order: int = 0
    reserved: int = 0


class Decoding:
    """All sequences of one data-parallel rank that decode, with their token counts as arrays.

    In each forward pass, a sequence gains one token, or several with speculative decoding.

    Attributes:
        pool: KV cache memory of the rank, which gives the bytes of a sequence by its tokens.
        drafting: Settings of speculative decoding; None without a draft.
        log: Log of the rank, which counts verified drafts.
        rng: NumPy generator that decides how many draft tokens are accepted; None without a draft.
        running: The sequences (`RunningRequest`), in the order in which they began to decode.
        cached: Cached tokens of each sequence now, as an int64 array [sequences].
        remaining: Tokens that each sequence still has to generate, as an int64 array [sequences].
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
        """Return the number of cached tokens, summed over all decoding sequences of the rank."""
        return int(self.cached.sum())

    @property
    def needed(self) -> int:
        """Return the KV cache bytes that all decoding sequences need after one more token each.

        Bytes that are allocated already count too. All bytes are of one GPU, the one of this
        data-parallel rank that stores the most cache.
        """
        return int(self.pool.allocated[self.cached + 1].sum())

    @property
    def allocated(self) -> int:
        return int(self.pool.allocated[self.cached].sum())

    @property
    def stored_bytes(self) -> int:
        return int(self.pool.stored_bytes[self.cached].sum())

    def join(self, request: RunningRequest, answer_tokens: int) -> None:
        """Add a sequence to the decoding sequences. It gains tokens from the next pass on.

        Args:
            request: The request, whose prompt is completely cached.
            answer_tokens: Output tokens that the sequence still has to generate.
        """
        self.running.append(request)
        self.cached = np.append(self.cached, request.cached)
        self.remaining = np.append(self.remaining, answer_tokens)

    def newest(self) -> int:
        """Return the admission number (`RunningRequest.order`) of the sequence that joined last.

        The rank preempts the request with the highest number. −1 means that no sequence decodes.
        """
        return self.running[-1].order if self.running else -1

    def take_out(self) -> RunningRequest:
        """Remove and return the sequence that joined last, to preempt it.

        The fields `cached` and `generated` of the returned request are first set to its present
        numbers of tokens.
        """
        request = self.running.pop()
        cached = int(self.cached[-1])
        request.generated += cached - request.cached
        request.cached = cached
        self.cached = self.cached[:-1]
        self.remaining = self.remaining[:-1]
        return request

    def in_a_row(self, max_passes: int, free_bytes: int) -> int:
        """Return the number of decode passes that can be simulated in one step.

        During these passes the set of sequences does not change. It changes if a sequence has its
        last token, or if memory does not suffice for one more pass. The number is from 1 to
        `max_passes`. With speculative decoding it is 1.

        Args:
            max_passes: Maximum number of passes.
            free_bytes: KV cache bytes of one GPU for all decoding sequences together, including
                those allocated now.
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
        """Simulate consecutive decode passes, and remove the sequences that are then complete.

        Args:
            passes: Number of forward passes; each adds one token to every sequence, or several with
                a draft.
            line: Gives the seconds of each of these passes.
            other_allocated: KV cache bytes that one GPU has allocated for the requests of the rank
                that do not decode.
            other_stored: Part of `other_allocated` that contains tokens.

        Returns:
            A pair: the KV cache bytes of all requests of the rank during the passes, and the
            requests that are complete.
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
            repeat(line.increase_s, passes - 1), initial=line.first
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
            completed = [*compress(self.running, is_done)]
            self.running = [*compress(self.running, ~is_done)]
            self.cached = self.cached[~is_done]
            self.remaining = self.remaining[~is_done]
        return CacheGrowth(allocated, stored, allocated_s, stored_s), completed


class ServerSetup(NamedTuple):
    """Settings of a simulated server, which are equal for all its data-parallel ranks.

    Attributes:
        pool: Size of the KV cache of one rank, and the bytes that a request takes by its tokens.
        steps: Timer that returns the seconds of each forward pass.
        limits: Maximum sequences and maximum tokens per pass of one rank.
        scheduling: How the engine fills its forward passes with prompts and decodes.
        prefix_hit_rate: Share of each prompt, from 0 to 1, that the prefix cache contains; 0 for
            none.
    """

    pool: Pool
    steps: StepTimer
    limits: Limits
    scheduling: Scheduling = MIXED
    prefix_hit_rate: float = 0.0


class RankServer:
    """Base class of one simulated data-parallel rank, for static and for continuous batching.

    Attributes:
        waiting: Requests that have arrived but are not admitted: indices under static batching,
            `RunningRequest` objects under continuous batching.
        queue: Requests of the rank that have not arrived yet.
        log: Log of the rank: times of its requests, and sums over its forward passes.
        pool: Size of the KV cache of the rank, and the bytes that a request takes by its tokens.
        steps: Timer that returns the seconds of each forward pass.
        limits: Maximum sequences and maximum tokens per pass of the rank.
        now: Simulated time in seconds, from 0 at the beginning of the run.
    """

    now = 0.0

    def __init__(self, queue: ArrivalQueue, setup: ServerSetup) -> None:
        self.queue = queue
        self.log = queue.log
        self.pool = setup.pool
        self.steps: Any = setup.steps
        self.limits = setup.limits
        self.waiting: deque[Any] = deque()

    @property
    def done(self) -> int:
        return self.queue.done

    def _log(
        self,
        growth: CacheGrowth,
        seconds: float,
        passes: int,
        sequences: int,
        tokens: int,
        prompt_tokens: int,
    ) -> None:
        """Record passes of `tokens` tokens each, and advance the time."""
        row = PassRow(
            self.log.rank,
            self.now,
            seconds,
            passes,
            sequences,
            tokens,
            prompt_tokens,
            len(self.waiting),
            growth.allocated,
            growth.stored_bytes,
        )
        self.log.add(row, growth)
        self.now += seconds


class Static(RankServer):
    """One simulated data-parallel rank with static batching.

    A batch has as many of the waiting requests as fit, padded to the longest prompt. The next batch
    begins only after the last answer of the batch is complete.
    """

    def run(self) -> bool:
        """Simulate the next batch of requests, from its prefill to its last output token.

        Returns:
            True if the rank has further requests, False if all are done.
        """
        if not self.waiting:
            self.now = max(self.now, self.queue.next_s)
        self.waiting += self.queue.admit(self.now)
        if self.waiting:
            self._serve(self._next_batch())
        return self.queue.is_open

    def _next_batch(self) -> list[int]:
        """Return as many requests from the head of the queue as fit at their padded full length."""
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
        log, pool, count = self.log, self.pool, len(batch)
        inputs = [self.queue.inputs[index] for index in batch]
        outputs = [self.queue.outputs[index] for index in batch]
        prompt, decodes = max(inputs), max(outputs) - 1
        times = [self.steps.prefill(((prompt, 0),) * count)]
        while len(times) <= decodes:
            context = prompt + len(times)
            times += self.steps.line(count, context).exact_seconds[: decodes + 1 - len(times)]
        seconds = np.array(times)
        ends = (self.now + seconds.cumsum()).tolist()
        log.scheduled[batch] = self.now
        log.first[batch] = ends[0]

        # a row's own tokens are stored until its answer is complete
        cache = np.zeros((2, decodes + 1), dtype=np.int64)  # allocated and stored bytes
        cache[0] = count * pool.allocated[prompt : prompt + decodes + 1]
        for first, output in zip(inputs, outputs):
            cache[1, :output] += pool.stored_bytes[first : first + output]

        for start, end, prompt_tokens in ((0, 1, count * prompt), (1, decodes + 1, 0)):
            if start == end:
                continue
            byte_s = (seconds * cache)[:, start:end].sum(axis=1).tolist()
            growth = CacheGrowth(*cache[:, end - 1].tolist(), *byte_s)
            self._log(
                growth,
                float(seconds[start:end].sum()),
                end - start,
                count,
                prompt_tokens or count,
                prompt_tokens,
            )
            self.now = ends[end - 1]
        prompt_padding = count * prompt - sum(inputs)
        answer_padding = count * (decodes + 1) - sum(outputs)
        log.prefill_tokens -= prompt_padding
        log.padded += prompt_padding + answer_padding

        for output, index in sorted(zip(outputs, batch), key=lambda pair: pair[0]):
            self.queue.record_done(index, ends[output - 1])


class Continuous(RankServer):
    """One simulated data-parallel rank with continuous batching, as in vLLM.

    Before every forward pass, requests may join or leave the batch. Bytes are KV cache bytes on the
    rank's GPU with the most cache bytes.

    Attributes:
        waiting: Requests that have arrived but are not admitted. Preempted requests come first.
        prefilling: Admitted requests whose prompts are being processed.
        decoding: Requests that decode.
        scheduling: How the engine fills its passes with prompts and decodes.
        prefixes: The simulated prefix cache; None if the server has none.
        allocated: Bytes allocated for one request, indexed by its cached tokens.
        stored_bytes: Part of `allocated` that contains tokens, indexed by a request's cached
            tokens.
        admitted: Number of admissions so far. A preempted request counts again.
        prefill_bytes: Bytes allocated for the requests in `prefilling`, minus the bytes that
            running requests save by sharing prefixes.
        reserved: Bytes reserved for all admitted requests together, under `Scheduling.reserve`.
        waited: Number of consecutive decode passes for which prompts have waited for more prompts.
        horizon: Simulated time in seconds until which all arrivals are known.
    """

    admitted = prefill_bytes = reserved = waited = 0
    horizon = inf

    def __init__(self, queue: ArrivalQueue, setup: ServerSetup) -> None:
        super().__init__(queue, setup)
        pool, hit_rate = setup.pool, setup.prefix_hit_rate
        self.scheduling = setup.scheduling
        self.prefixes = PrefixCache(hit_rate, pool) if hit_rate else None
        self.allocated = memoryview(pool.allocated)
        self.stored_bytes = memoryview(pool.stored_bytes)
        self.decoding = Decoding(pool, setup.steps.drafting, self.log)
        self.prefilling: list[RunningRequest] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.decoding.count or self.prefilling or self.waiting)

    def next_pass_s(self) -> float:
        """Return the simulated time in seconds at which the rank's next forward pass begins.

        If no request waits or runs, this is the time of the next arrival. It is infinite if no
        arrival is known.
        """
        return self.now if self.is_busy else max(self.now, self.queue.next_s)

    def run(self) -> bool:
        """Simulate one forward pass, or several in which no sequence joins or leaves.

        Returns:
            True if the rank has further requests, False if all are done.
        """
        self.now = self.next_pass_s()
        self.waiting += map(self._new_request, self.queue.admit(self.now))
        if self.is_busy:
            self._pass()
        return self.queue.is_open

    def _new_request(self, index: int) -> RunningRequest:
        """Return a new `RunningRequest`. If a prefill rank computed its prompt, the prompt is
        cached and one token is generated."""
        prompt = self.queue.inputs[index]
        if self.queue.is_computed:
            return RunningRequest(index, prompt + 1, cached=prompt, generated=1)
        return RunningRequest(index, prompt)

    def _pass(self) -> None:
        preemptions = self.log.preemptions
        # at least one request always has enough memory for its next token
        while self.decoding.needed > self.pool.budget - self.prefill_bytes:
            self._preempt()
        is_preempted = self.log.preemptions > preemptions
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
            if not is_preempted:
                self._admit(tokens, chunks)
        if chunks or is_preempted:
            self._mixed(chunks)
        else:
            self._decode()

    def _join(self, request: RunningRequest) -> None:
        """Let a request decode from the next pass on."""
        self.decoding.join(request, self.queue.outputs[request.index] - request.generated)

    def _preempt(self) -> None:
        if self.prefilling and self.prefilling[-1].order > self.decoding.newest():
            request = self.prefilling.pop()
            self.prefill_bytes -= self.allocated[request.target]
            self.log.recomputed_tokens += request.cached
        else:
            request = self.decoding.take_out()
            request.target = request.cached + 1
            self.log.recomputed_tokens += request.target
        request.cached = 0
        self._release(request)
        self.log.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: RunningRequest) -> None:
        """Release the bytes of a request, except bytes that other requests still use."""
        self.reserved -= request.reserved
        if self.prefixes:
            self._share(self.prefixes.use(request.index, 0))

    def _share(self, shared: int) -> None:
        """Subtract bytes that running requests share from the allocated and the reserved bytes."""
        self.prefill_bytes -= shared
        self.reserved -= shared

    def _admit(self, tokens: int, chunks: list[tuple[RunningRequest, int]]) -> None:
        """Admit requests from the queue and append the first chunk of each.

        Admission ends if max_num_seqs, the tokens of the pass or the memory are used up.
        """
        if not self.waiting or self._waits_for_more_prompts(tokens):
            return
        log, reserve = self.log, self.scheduling.reserve
        allocated = self.decoding.needed + self.prefill_bytes
        num_seqs = self.limits.max_num_seqs - self.decoding.count - len(self.prefilling)
        while self.waiting and tokens > 0 and num_seqs > 0:
            request = self.waiting[0]
            index, target = request.index, request.target
            needed = self.allocated[target]
            if reserve:
                remaining = self.queue.outputs[index] - request.generated - 1
                request.reserved = self.allocated[target + int(reserve * remaining)]
            cached = shared = 0
            if self.prefixes:
                cached = self.prefixes.cached_tokens(self.queue.inputs[index])
                shared = self.prefixes.shared_bytes(cached)
            if (
                max(allocated + needed, self.reserved + request.reserved) - shared
                > self.pool.budget
            ):
                break
            # the prompt may have been computed on a prefill rank
            new = target - (request.cached or cached)
            if self.scheduling.whole_prompts and new > tokens and chunks:
                break
            num_seqs -= 1
            allocated += needed - shared
            self.waiting.popleft()
            if self.prefixes:
                self.prefixes.use(index, cached)
            is_first = not request.order
            if is_first:
                log.scheduled[index] = self.now
            self.admitted += 1
            request.order = self.admitted
            self.reserved += request.reserved
            self._share(shared)
            if request.cached:
                self._keep_prefix(index)
                self._join(request)
                tokens -= self.steps.queries
            else:
                if is_first:
                    log.found_tokens += cached
                else:
                    log.recomputed_tokens -= cached
                request.cached = cached
                self.prefill_bytes += needed
                self.prefilling.append(request)
                chunks.append((request, min(new, tokens)))
                tokens -= chunks[-1][1]

    def _keep_prefix(self, index: int) -> None:
        """Add the prefix of a computed prompt to the prefix cache, and share bytes that are already
        stored."""
        if self.prefixes:
            tokens = hit_tokens(
                self.prefixes.rate, self.queue.inputs[index], self.pool.block_size
            )
            self._share(self.prefixes.use(index, tokens))

    def _waits_for_more_prompts(self, tokens: int) -> bool:
        """Return whether prompts wait until more prompts fill a pass."""
        max_passes = self.scheduling.wait_passes
        if not max_passes or not self.decoding.count or self.waited >= max_passes:
            self.waited = 0
            return False
        enough = self.scheduling.wait_share * tokens
        waiting_tokens = accumulate(request.target - request.cached for request in self.waiting)
        waits = all(total < enough for total in waiting_tokens)
        self.waited = self.waited + 1 if waits else 0
        return waits

    def _mixed(self, chunks: list[tuple[RunningRequest, int]]) -> None:
        """Simulate one pass with chunks of prompts, or one decode pass after a preemption."""
        decoding = self.decoding
        count = 0 if self.scheduling.decodes_wait and chunks else decoding.count
        context = decoding.context / count + 1 if count else 0.0
        if chunks:
            limit = self.limits.max_num_batched_tokens
            pieces = [
                (min(limit, new - start), request.cached + start)
                for request, new in chunks
                for start in range(0, new, limit)
            ]
            seconds = self.steps.mixed(tuple(pieces), count, context)
        else:
            seconds = self.steps.line(count, context).first
        self._run_passes(StepTimeSegment(seconds), 1, count, chunks)

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
        if passes > 1 and (self.waited or not self.waiting):
            next_s = min(self.queue.next_s, self.horizon)
            if next_s < self.now + segment.seconds(passes):
                passes = segment.passes_until(passes, next_s - self.now)
        if self.waited:
            self.waited += passes - 1
        self._run_passes(segment, passes, count, [])

    def _run_passes(
        self,
        segment: StepTimeSegment,
        passes: int,
        count: int,
        chunks: list[tuple[RunningRequest, int]],
    ) -> None:
        """Simulate passes with `count` decodes and chunks of prompts."""
        for request, new in chunks:
            request.cached += new
        decoding, seconds = self.decoding, segment.seconds(passes)
        allocated = self.prefill_bytes
        stored_bytes = sum([self.stored_bytes[r.cached] for r in self.prefilling])
        if self.prefixes:
            stored_bytes -= self.prefixes.shared_blocks * self.prefixes.block_stored
        completed: list[RunningRequest] = []
        if count:
            growth, completed = decoding.grow(passes, segment, allocated, stored_bytes)
        else:
            allocated += decoding.allocated
            growth = constant_growth(allocated, decoding.stored_bytes + stored_bytes, seconds)
        prompt_tokens = sum([new for _, new in chunks])
        tokens = count * self.steps.queries + prompt_tokens
        self._log(growth, seconds, passes, count + len(chunks), tokens, prompt_tokens)
        for request in completed:
            self._leave(request)
        for request, _ in chunks:
            if request.cached == request.target:
                self._complete_prompt(request)

    def _leave(self, request: RunningRequest) -> None:
        """Remove a request that is done."""
        self._release(request)
        self.queue.record_done(request.index, self.now)

    def _complete_prompt(self, request: RunningRequest) -> None:
        """Add the next output token to a request whose prompt is complete, and let the request
        decode."""
        self.prefilling.remove(request)
        self.prefill_bytes -= self.allocated[request.target]
        request.generated += 1
        if request.generated == 1:
            self.log.first[request.index] = self.now
        self._keep_prefix(request.index)
        if request.generated == self.queue.outputs[request.index]:
            self._leave(request)
        else:
            self._join(request)
