"""Continuous batching, event by event: what runs is chosen anew at every pass (Orca, Yu et al., OSDI 2022).

A request is admitted while there is a seat and free memory. When a decode finds no block, the request that was admitted last
makes room, and waits at the head of the queue: its cache is thrown away and recomputed with what it has generated so far, or
copied to the host and back. The first output token comes from the last piece of the prompt. Passes in which nothing changes
but lengths are one event. With a draft a pass verifies the drafted tokens of every sequence that decodes. How engines differ is
their `Scheduling`.
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
    """The server while it runs. prefixes: what a prefix cache finds of prompts; None where there is none."""

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
        self.horizon = math.inf  # until when all that comes is known
        self.unseen = 0  # decode passes since the last look at what has come
        self.waiting = Waiting(door)
        self.prefilling: list[Live] = []
        self.joining: list[Live] = []

    @property
    def busy(self) -> bool:
        return bool(self.decoding.count or self.prefilling or self.waiting)

    def when(self) -> float:
        """When it goes on, as far as is known."""
        return self.now if self.busy else max(self.now, self.door.next_s)

    def run(self) -> bool:
        """One pass, or passes in a row in which nothing changes; False when all is done."""
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
        """Preempt until every decode has room for its token. At least one request always has."""
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
        """A request gives back so many bytes, but for those that others hold on."""
        if self.prefixes:
            self._share(-self.prefixes.release(index, held))

    def _keep(self, index: int) -> None:
        """A request's prompt is computed: others find its prefix, and it holds with them what they have."""
        if self.prefixes:
            self._share(self.prefixes.keep(index, self.door.inputs[index]))

    def _share(self, saved: int) -> None:
        """Subtract bytes that running requests hold together from those that are held and promised."""
        self.held -= saved
        self.promised -= saved

    def _swap(self, moved: int) -> None:
        self.swap_bytes += moved
        self.log.swapped_bytes += moved

    def _chunks(self, budget: int) -> list[tuple[Live, int]]:
        """The next pieces of the prompts that are being processed."""
        found = []
        for live in self.prefilling:
            new = min(live.target - live.cached, budget)
            if new:
                found.append((live, new))
                budget -= new
        return found

    def _admit(self, budget: int, others: bool) -> list[tuple[Live, int]]:
        """Requests from the queue, while there are seats, tokens and memory, and the first piece of each."""
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
        """Bytes that are set aside for a request when it is admitted."""
        left = self.door.outputs[head.index] - head.generated - 1
        return int(self.table[head.target + int(self.how.reserve * left)])

    def _waits_for_company(self, budget: int) -> bool:
        """Whether prompts wait on, for more of them to fill a pass."""
        if not self.how.wait_passes or not self.decoding.count or self.waited >= self.how.wait_passes:
            self.waited = 0
            return False
        enough = self.how.wait_share * budget
        waits = self.waiting.tokens(enough) < enough
        self.waited = self.waited + 1 if waits else 0
        return waits

    def _mixed(self, pieces: list[tuple[Live, int]], swapped: int) -> None:
        """One pass with pieces of prompts, or after a swap."""
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
        """Decode passes in a row until a sequence is done, a request comes that could be admitted, or memory ends."""
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
        """Stored bytes of those who do not decode, less what running requests share."""
        stored = sum([self.kept[p.cached] for p in self.prefilling]) if self.prefilling else 0
        return stored - self.prefixes.shared_stored if self.prefixes else stored

    def _pass_time(self, seconds: float, done: list[Live]) -> None:
        """Time goes by, and those who are done leave."""
        self.now += seconds
        self.door.pass_time(seconds)
        for live in done:
            self._leave(live)

    def _leave(self, live: Live) -> None:
        """A request is done."""
        self.promised -= live.promised
        if self.prefixes:
            self._release(live.index, self.table[self.door.inputs[live.index] + self.door.outputs[live.index] - 1])
        self.door.leave(live.index, self.now)

    def _prompted(self, pieces: list[tuple[Live, int]]) -> None:
        """Prompts that are complete give a token and go on to decode."""
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
