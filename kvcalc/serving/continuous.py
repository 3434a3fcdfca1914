"""Continuous batching, simulated event by event (Orca, Yu et al., OSDI 2022).

The batch is chosen again before every pass. A request is admitted if max_num_seqs and the free
memory allow it. If a decode finds no block, the request that was admitted last is preempted and
waits at the head of the queue. Its cache is dropped and recomputed with the tokens generated so
far, or copied to the host and back. The first output token comes from the last chunk of the
prompt. Consecutive passes in which only lengths change are one event. With a draft, each pass
verifies the draft tokens of every decoding sequence. `Scheduling` describes how engines differ.
"""

import math

from kvcalc.serving.decoding import Decoding, InStep, OwnPace
from kvcalc.serving.door import Door
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.prefixes import Prefixes
from kvcalc.serving.scheduling import MIXED, Limits, Live, Scheduling, lasting, passes_until
from kvcalc.serving.steps import Chunks, Line
from kvcalc.serving.tables import Passes
from kvcalc.serving.waiting import Waiting


class Continuous:
    """The state of a server with continuous batching.

    Attributes:
        prefixes: The prefix cache. None if the server has no prefix cache.
    """

    def __init__(
        self, door: Door, pool: Pool, steps: Passes, limits: Limits, log: Log, scheduling: Scheduling = MIXED,
        prefixes: Prefixes | None = None,
    ) -> None:  # fmt: skip
        self.door, self.pool, self.steps, self.limits, self.log, self.how = door, pool, steps, limits, log, scheduling
        self.prefixes = prefixes
        self.table, self.kept = memoryview(pool.allocated), memoryview(pool.stored)
        self.decoding: Decoding = (
            OwnPace(pool, steps.drafting, log) if steps.drafting else InStep(pool, max(door.outputs, default=1))
        )
        self.now, self.admitted, self.held, self.swap_bytes, self.promised, self.waited = 0.0, 0, 0, 0, 0, 0
        self.horizon = math.inf  # time up to which all arrivals are known
        self.unseen = 0  # decode passes since the last check for arrivals
        self.waiting = Waiting(door)
        self.prefilling: list[Live] = []
        self.joining: list[Live] = []

    @property
    def busy(self) -> bool:
        return bool(self.decoding.count or self.prefilling or self.waiting)

    def when(self) -> float:
        """Return the time in seconds of the next pass, as far as it is known."""
        return self.now if self.busy else max(self.now, self.door.next_s)

    def run(self) -> bool:
        """Simulate one pass, or consecutive passes in which only lengths change.

        Returns:
            False if all requests are done.
        """
        door, busy = self.door, self.busy
        if not busy:
            self.now = max(self.now, door.next_s)
        if door.next_s <= self.now and not (busy and self.unseen):
            self.waiting.fresh += door.admit(self.now)
            busy = busy or self.busy
        if busy:
            self._pass()
        return door.open

    def _pass(self) -> None:
        preempted = self._make_room()
        chunks: list[tuple[Live, int]] = []
        if self.prefilling or self.waiting:
            room = self.limits.max_num_batched_tokens - (0 if self.how.decodes_wait else self.decoding.count * self.steps.queries)
            chunks = self._chunks(room) if self.prefilling else chunks
            if not preempted:
                chunks += self._admit(room - sum([new for _, new in chunks]), bool(chunks))
        swapped, self.swap_bytes = self.swap_bytes, 0
        if chunks or swapped or preempted:
            self._mixed(chunks, swapped)
        else:
            self._decode()
        for live in self.joining:
            live.swapped = False
            self.decoding.join(live, self.door.outputs[live.index] - live.generated)
        self.joining = []

    def _make_room(self) -> bool:
        """Preempt requests until every decode has memory for its next token.

        At least one request always has enough memory.

        Returns:
            Whether a request was preempted.
        """
        preempted = False
        while self.decoding.exceeds(self.pool.budget - self.held):
            preempted = True
            self._preempt()
        return preempted

    def _preempt(self) -> None:
        self.log.preemptions += 1
        if self.prefilling and self.prefilling[-1].order > self.decoding.newest():
            live = self.prefilling.pop()
            self.held -= self.table[live.target]
            self._release(live.index, self.table[live.target])
            self.log.recomputed_tokens += live.cached
            live.cached = 0
        else:
            live = self.decoding.take_out()
            self._release(live.index, self.table[live.cached])
            live.target = live.cached + 1
            if self.limits.host_bytes_per_s:
                live.swapped = True
                self._swap(self.table[live.cached])
            else:
                self.log.recomputed_tokens += live.target
                live.cached = 0
        self.promised -= live.promised
        self.waiting.preempted.append(live)

    def _release(self, index: int, held: int) -> None:
        """Release `held` bytes of a request, except bytes that other requests still use."""
        if self.prefixes:
            self._share(-self.prefixes.release(index, held))

    def _keep(self, index: int) -> None:
        """Add a computed prompt's prefix to the prefix cache, and share bytes that are stored already."""
        if self.prefixes:
            self._share(self.prefixes.keep(index, self.door.inputs[index]))

    def _share(self, saved: int) -> None:
        """Subtract bytes that running requests share from the held and the promised bytes."""
        self.held -= saved
        self.promised -= saved

    def _swap(self, moved: int) -> None:
        self.swap_bytes += moved
        self.log.swapped_bytes += moved

    def _chunks(self, budget: int) -> list[tuple[Live, int]]:
        """Return the next chunk of each prompt that is being processed, at most `budget` tokens in all."""
        found = []
        for live in self.prefilling:
            new = min(live.target - live.cached, budget)
            if new:
                found.append((live, new))
                budget -= new
        return found

    def _admit(self, budget: int, others: bool) -> list[tuple[Live, int]]:
        """Admit requests from the queue and return the first chunk of each.

        Admission ends if max_num_seqs, the tokens of the pass or the memory are used up.
        """
        found: list[tuple[Live, int]] = []
        if not self.waiting or self._waits_for_company(budget):
            return found
        taken = self.decoding.needed + self.held
        seats = self.limits.max_num_seqs - self.decoding.count - len(self.prefilling)
        while self.waiting and budget > 0 and seats > 0:
            head = self.waiting.head()
            need, promised = self.table[head.target], self._promise(head) if self.how.reserve else 0
            found_tokens = saved = 0
            if self.prefixes:
                found_tokens = self.prefixes.found(head.index, self.door.inputs[head.index], self.pool.budget - taken)
                saved = self.prefixes.common(head.index, found_tokens)
            if max(taken + need, self.promised + promised) - saved > self.pool.budget:
                break
            new = head.target - (head.cached if head.swapped or head.handed else found_tokens)
            if self.how.whole and new > budget and (others or found) and not head.swapped:
                break
            seats -= 1
            taken += need - saved
            self._enter(head, found_tokens, promised)
            self._share(saved)
            if head.handed:
                head.handed = False
                self._keep(head.index)
                self.decoding.join(head, self.door.outputs[head.index] - head.generated)
                budget -= self.steps.queries
                continue
            if head.swapped:
                self._swap(self.table[head.cached])
                self.joining.append(head)
                continue
            self.prefilling.append(head)
            found.append((head, min(new, budget)))
            budget -= found[-1][1]
        return found

    def _enter(self, head: Live, found_tokens: int, promised: int) -> None:
        self.waiting.pop()
        is_cached = head.swapped or head.handed
        if self.prefixes:
            self.prefixes.take(head.index, found_tokens)
        if self.prefixes and not is_cached:
            head.cached = found_tokens
            self.log.found_tokens += 0 if head.order else found_tokens
            self.log.recomputed_tokens -= found_tokens if head.order else 0
        if not head.order:
            self.log.scheduled[head.index] = self.now
        self.admitted += 1
        head.order, head.promised = self.admitted, promised
        self.promised += promised
        if not is_cached:
            self.held += self.table[head.target]

    def _promise(self, head: Live) -> int:
        """Return the bytes that are reserved for a request when it is admitted."""
        left = self.door.outputs[head.index] - head.generated - 1
        return int(self.table[head.target + int(self.how.reserve * left)])

    def _waits_for_company(self, budget: int) -> bool:
        """Return whether prompts wait until more prompts fill a pass."""
        if not self.how.wait_passes or not self.decoding.count or self.waited >= self.how.wait_passes:
            self.waited = 0
            return False
        enough = self.how.wait_share * budget
        waits = self.waiting.tokens(enough) < enough
        self.waited = self.waited + 1 if waits else 0
        return waits

    def _mixed(self, pieces: list[tuple[Live, int]], swapped: int) -> None:
        """Simulate one pass with chunks of prompts, or one pass after a swap."""
        decoding = self.decoding
        start, count = self.now, 0 if self.how.decodes_wait and pieces else decoding.count
        chunks: Chunks = tuple([(new, live.cached) for live, new in pieces])
        prompt, seconds = sum([new for _, new in pieces]), 0.0
        self.unseen = 0
        if chunks:
            seconds = self.steps.mixed(chunks, count, decoding.context / count + 1 if count else 0.0)
        elif count:
            seconds = self.steps.line(count, decoding.context / count + 1).first
        if swapped:
            seconds += swapped / self.limits.host_bytes_per_s
        for live, new in pieces:
            live.cached += new
        held, kept = self.held, self._stored()
        if self.joining:
            held += sum(self.table[j.cached] for j in self.joining)
            kept += sum(self.kept[j.cached] for j in self.joining)
        grown, done = decoding.grow(1, Line(seconds), held, kept) if count else (decoding.still(seconds, held, kept), [])
        tokens = count * self.steps.queries + prompt
        self.log.ran(start, seconds, 1, count + len(pieces), tokens, prompt, len(self.waiting), grown)
        if self.prefixes:
            self.prefixes.settle(self.pool.budget - grown.allocated)
        self._pass_time(seconds, done)
        self._prompted(pieces)

    def _decode(self) -> None:
        """Simulate consecutive decode passes.

        They end if a sequence is done, a request arrives that could be admitted, or memory runs out.
        """
        decoding, start = self.decoding, self.now
        count = decoding.count
        line = self.steps.line(count, decoding.context / count + 1)
        many = decoding.in_a_row(line.passes, self.pool.budget - self.held)
        if self.waited:
            many = min(many, self.how.wait_passes - self.waited + 1)
        coming = min(self.door.next_s, self.horizon)
        if many > 1 and coming < start + lasting(line, many) and (self.waited or not self.waiting):
            until = passes_until(line, many, coming - start)
            many = min(many, until + -(self.unseen + until) % self.how.receive_interval)
        self.unseen = (self.unseen + many) % self.how.receive_interval
        self.waited += many - 1 if self.waited else 0
        seconds = lasting(line, many)
        grown, done = decoding.grow(many, line, self.held, self._stored())
        self.log.ran(start, seconds, many, count, count * self.steps.queries, 0, len(self.waiting), grown)
        self._pass_time(seconds, done)

    def _stored(self) -> int:
        """Return the stored bytes of requests that do not decode, less the bytes that requests share."""
        stored = sum([self.kept[p.cached] for p in self.prefilling]) if self.prefilling else 0
        return stored - self.prefixes.shared_stored if self.prefixes else stored

    def _pass_time(self, seconds: float, done: list[Live]) -> None:
        """Advance the time, and remove the requests that are done."""
        self.now += seconds
        self.door.pass_time(seconds)
        for live in done:
            self._leave(live)

    def _leave(self, live: Live) -> None:
        """Remove a request that is done."""
        self.promised -= live.promised
        if self.prefixes:
            self._release(live.index, self.table[self.door.inputs[live.index] + self.door.outputs[live.index] - 1])
        self.door.leave(live.index, self.now)

    def _prompted(self, pieces: list[tuple[Live, int]]) -> None:
        """Give each complete prompt its next token and move its request to decoding."""
        for live, _ in pieces:
            if live.cached < live.target:
                continue
            self.prefilling.remove(live)
            self.held -= self.table[live.target]
            live.generated += 1
            if live.generated == 1:
                self.log.first[live.index] = self.now
            self._keep(live.index)
            if live.generated == self.door.outputs[live.index]:
                self._leave(live)
            else:
                self.joining.append(live)
