"""Continuous batching, event by event: what runs is chosen anew at every pass (Orca, Yu et al., OSDI 2022).

A request is admitted while there is a seat and free memory. When a decode finds no block, the request that was admitted last
makes room, and waits at the head of the queue: its cache is thrown away and recomputed with what it has generated so far, or
copied to the host and back. The first output token comes from the last piece of the prompt. Passes in which nothing changes
but lengths are one event, whatever their number. How engines differ is their `Scheduling`.
"""

from collections import deque
from heapq import heappop, heappush

from kvcalc.serving.continuous import Limits
from kvcalc.serving.door import Door
from kvcalc.serving.ledger import Grown, Ledger
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.prefixes import Prefixes
from kvcalc.serving.scheduling import MIXED, Live, Scheduling, lasting, passes_until
from kvcalc.serving.steps import Chunks
from kvcalc.serving.tables import Passes


class Scheduler:
    """The server while it runs. `running` holds the sequences that decode by the step at which each is done.

    prefixes: what a prefix cache finds of prompts; None where there is none.
    """

    def __init__(
        self, door: Door, pool: Pool, steps: Passes, limits: Limits, log: Log, scheduling: Scheduling = MIXED,
        prefixes: Prefixes | None = None,
    ) -> None:  # fmt: skip
        self.door, self.pool, self.steps, self.limits, self.log, self.how = door, pool, steps, limits, log, scheduling
        self.prefixes = prefixes
        self.table, self.kept = pool.allocated.tolist(), pool.stored.tolist()
        self.ledger = Ledger(pool, max(door.outputs, default=1))
        self.now, self.admitted, self.held, self.swap_bytes, self.promised, self.waited = 0.0, 0, 0, 0, 0, 0
        self.waiting: deque[Live] = deque()
        self.prefilling: list[Live] = []
        self.joining: list[Live] = []
        self.running: list[tuple[int, int, Live]] = []  # (step at which it is done, order, which); some have been taken out
        self.recent: list[Live] = []  # those that decode, by admission; some are done
        self.count = self.context = 0

    def run(self) -> bool:
        """One pass, or passes in a row in which nothing changes; False when all is done."""
        if not (self.waiting or self.prefilling or self.count):
            self.now = max(self.now, self.door.next_time())
        for i in self.door.admit(self.now):
            self.waiting.append(Live(i, self.door.inputs[i]))
        if self.waiting or self.prefilling or self.count:
            self._pass()
        return self.door.open

    def _pass(self) -> None:
        preempted = self._make_room() if self.ledger.ends + self.held > self.pool.budget else False
        chunks: list[tuple[Live, int]] = []
        if self.prefilling or self.waiting:
            room = self.limits.max_num_batched_tokens - (0 if self.how.decodes_wait else self.count)
            chunks = self._chunks(room)
            if self.waiting and not preempted:
                chunks += self._admit(room - sum(new for _, new in chunks), bool(chunks))
        swapped, self.swap_bytes = self.swap_bytes, 0
        if chunks or swapped or preempted:
            self._mixed(chunks, swapped)
        else:
            self._decode()
        if self.joining:
            self._join()

    def _make_room(self) -> bool:
        """Preempt until every decode has room for its token. At least one request always has."""
        preempted = False
        while self.ledger.allocated + int(self.ledger.coming(1)[0]) + self.held > self.pool.budget:
            preempted = True
            self._preempt()
        return preempted

    def _preempt(self) -> None:
        self.log.preemptions += 1
        while self.recent and not self.recent[-1].decodes:
            self.recent.pop()
        last = self.recent[-1].order if self.recent else -1
        if self.prefilling and self.prefilling[-1].order > last:
            live = self.prefilling.pop()
            self.held -= self.table[live.target]
            self.log.recomputed_tokens += live.cached
            live.cached = 0
        else:
            live = self.recent.pop()
            self._take_out(live)
        self.promised -= live.promised
        self.waiting.appendleft(live)

    def _take_out(self, live: Live) -> None:
        """A decoding sequence becomes one that waits: for its cache to come back, or to be computed again with what it made."""
        cached = live.target + self.ledger.step - live.began
        left = self.door.outputs[live.index] - live.generated
        self.ledger.join(cached, left - (self.ledger.step - live.began), sign=-1)
        live.generated += self.ledger.step - live.began
        live.decodes, live.target = False, cached + 1
        self.count -= 1
        self.context -= cached
        self.running = [entry for entry in self.running if entry[2] is not live]
        self.running.sort()
        if self.limits.host_bytes_per_s:
            live.swapped, live.cached = True, cached
            self._swap(self.table[cached])
        else:
            self.log.recomputed_tokens += live.target
            live.cached = 0

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
        if self._waits_for_company(budget):
            return found
        taken = self.ledger.allocated + (int(self.ledger.coming(1)[0]) if self.count else 0) + self.held
        seats = self.limits.max_num_seqs - self.count - len(self.prefilling) - len(self.joining)
        while self.waiting and budget > 0 and seats > 0:
            head = self.waiting[0]
            if self.prefixes and not head.order:
                head.cached = self.prefixes.found(head.index, head.target, self.pool.budget - taken)
            need, promised = self.table[head.target], self._promise(head)
            if taken + need > self.pool.budget or self.promised + promised > self.pool.budget:
                break
            new = head.target - head.cached
            if self.how.whole and new > budget and (others or found) and not head.swapped:
                break
            self.waiting.popleft()
            seats -= 1
            taken += need
            self._enter(head, need, promised)
            if head.swapped:
                self._swap(self.table[head.cached])
                self.joining.append(head)
                continue
            self.prefilling.append(head)
            found.append((head, min(new, budget)))
            budget -= found[-1][1]
        return found

    def _enter(self, head: Live, need: int, promised: int) -> None:
        self.admitted += 1
        if not head.order:
            self.log.scheduled[head.index] = self.now
            self.log.found_tokens += head.cached
        head.order, head.promised = self.admitted, promised
        self.promised += promised
        if not head.swapped:
            self.held += need

    def _promise(self, head: Live) -> int:
        """Bytes that are set aside for a request when it is admitted."""
        if not self.how.reserve:
            return 0
        left = self.door.outputs[head.index] - head.generated - 1
        return int(self.table[head.target + int(self.how.reserve * left)])

    def _waits_for_company(self, budget: int) -> bool:
        """Whether prompts wait on, for more of them to fill a pass."""
        if not self.how.wait_passes or not self.count or self.waited >= self.how.wait_passes:
            self.waited = 0
            return False
        tokens = 0
        for live in self.waiting:
            tokens += live.target - live.cached
            if tokens >= self.how.wait_share * budget:
                self.waited = 0
                return False
        self.waited += 1
        return True

    def _mixed(self, pieces: list[tuple[Live, int]], swapped: int) -> None:
        """One pass with pieces of prompts, or after a swap."""
        start, count = self.now, 0 if self.how.decodes_wait and pieces else self.count
        chunks: Chunks = tuple((new, live.cached) for live, new in pieces)
        prompt, seconds = sum(new for _, new in pieces), 0.0
        if chunks:
            seconds = self.steps.mixed(chunks, count, self.context / count + 1 if count else 0.0)
        elif count:
            seconds = self.steps.line(count, self.context / count + 1).first
        if swapped:
            seconds += swapped / self.limits.host_bytes_per_s
        for live, new in pieces:
            live.cached += new
        held = self.held + sum(self.table[j.cached] for j in self.joining)
        kept = sum(self.kept[p.cached] for p in (*self.prefilling, *self.joining))
        grown = self._grown(1 if count else 0, seconds, 0.0, held, kept)
        inside = count + len(pieces)
        self.log.ran(start, seconds, 1, inside, count + prompt, prompt, len(self.waiting), grown)
        self._forward(seconds, 1 if count else 0)
        self._prompted(pieces)

    def _grown(self, steps: int, seconds: float, rise: float, held: int, kept: int) -> Grown:
        """What memory is like after these steps; none where decodes stand still."""
        if steps:
            return self.ledger.grow(steps, seconds, rise, held, kept)
        taken, kept = self.ledger.allocated + held, self.ledger.stored + kept
        return Grown(taken, kept, taken, taken * seconds, kept * seconds)

    def _decode(self) -> None:
        """Decode passes in a row until a sequence is done, a request comes that could be admitted, or memory ends."""
        count, start, ledger = self.count, self.now, self.ledger
        line = self.steps.line(count, self.context / count + 1)
        many = min(self.running[0][0] - ledger.step, line.passes)
        if many > 1 and ledger.ends + self.held > self.pool.budget:
            room = ledger.coming(many).cumsum() + (ledger.allocated + self.held)
            many = max(1, int(room.searchsorted(self.pool.budget, "right")))
        if self.waited:
            many = min(many, self.how.wait_passes - self.waited + 1)
        coming = self.door.next_time()
        if coming < start + lasting(line, many) and (self.waited or not self.waiting):
            many = passes_until(line, many, coming - start)
        self.waited += many - 1 if self.waited else 0
        seconds = lasting(line, many)
        grown = ledger.grow(many, line.first, line.rise, self.held, sum(self.kept[p.cached] for p in self.prefilling))
        self.log.ran(start, seconds, many, count, count, 0, len(self.waiting), grown)
        self._forward(seconds, many)

    def _forward(self, seconds: float, steps: int) -> None:
        """Time goes by, and every decoding sequence gains tokens; those that are complete leave."""
        self.now += seconds
        self.door.pass_time(seconds)
        if not steps:
            return
        self.context += self.count * steps
        step = self.ledger.step
        while self.running and self.running[0][0] <= step:
            live = heappop(self.running)[2]
            cached = live.target + step - live.began
            self.ledger.leave(cached)
            self.count -= 1
            self.context -= cached
            self.promised -= live.promised
            live.decodes = False
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
                if self.prefixes:
                    self.prefixes.keep(live.index, live.target)
            if live.generated == self.door.outputs[live.index]:
                self.promised -= live.promised
                self.door.leave(live.index, self.now)
            else:
                self.joining.append(live)

    def _join(self) -> None:
        """Sequences that are ready decode from the next pass on."""
        step = self.ledger.step
        for live in self.joining:
            left = self.door.outputs[live.index] - live.generated
            live.target, live.began, live.decodes, live.swapped = live.cached, step, True, False
            heappush(self.running, (step + left, live.order, live))
            self.recent.append(live)
            self.ledger.join(live.cached, left)
            self.count += 1
            self.context += live.cached
        self.joining = []
        if len(self.recent) > 64 + 2 * self.count:
            self.recent = [live for live in self.recent if live.decodes]
