"""Continuous batching: what runs is chosen anew at every pass (Orca, Yu et al., OSDI 2022; the order is vLLM's).

A pass takes one token of every sequence that decodes, then chunks of prompts first come first served, up to the token budget.
A request is admitted while there is a seat and free memory for its whole prompt. When a decode finds no block, the request
that was admitted last makes room, and waits at the head of the queue: its cache is thrown away and recomputed with what it
has generated so far, or copied to the host and back. The first output token comes from the last chunk of the prompt. With a draft
a pass verifies the drafted tokens of every sequence that decodes, and yields as many as chance accepts and one.
"""

from collections import deque
from typing import Any, NamedTuple

from kvcalc.serving.door import Door
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.steps import Chunks, Steps

MOST_CELLS = 1 << 16  # of the table of passes × sequences that decode in one go


class Limits(NamedTuple):
    """Of one rank. max_num_seqs: sequences at once. max_num_batched_tokens: tokens of a pass.

    host_bytes_per_s: preempted caches are swapped to the host at this rate; 0 recomputes them. batch_timeout: seconds that a
    static batch waits to become full.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    host_bytes_per_s: float = 0.0
    batch_timeout: float = 0.0


class Live:
    """A request that waits or whose prompt is being processed: `target` tokens to cache, of which `cached` are."""

    __slots__ = ("cached", "generated", "index", "order", "swapped", "target")

    def __init__(self, index: int, target: int) -> None:
        self.index, self.target = index, target
        self.cached = self.generated = self.order = 0
        self.swapped = False


class Continuous:
    """The server while it runs. Sequences that decode stand in arrays: which, tokens cached, passes left, when admitted."""

    def __init__(self, door: Door, pool: Pool, steps: Steps, limits: Limits, log: Log) -> None:
        import numpy as np

        self.door, self.pool, self.steps, self.limits, self.log = door, pool, steps, limits, log
        self.now, self.admitted, self.held, self.swap_bytes = 0.0, 0, 0, 0
        self.waiting: deque[Live] = deque()
        self.prefilling: list[Live] = []
        self.joining: list[Live] = []
        self.index, self.cached, self.left, self.order = (np.zeros(0, dtype=np.int64) for _ in range(4))
        self.chance = np.random.default_rng([steps.drafting.seed, log.rank]) if steps.drafting else None

    def run(self) -> bool:
        """One pass, or passes in a row in which nothing changes; False when all is done."""
        if not (self.waiting or self.prefilling or self.index.size):
            self.now = max(self.now, self.door.next_time())
        self.waiting += [Live(i, self.door.inputs[i]) for i in self.door.admit(self.now)]
        if self.waiting or self.prefilling or self.index.size:
            self._pass()
        return self.door.open

    def _pass(self) -> None:
        preempted = self._make_room()
        room = self.limits.max_num_batched_tokens - self.index.size * self.steps.queries
        chunks = self._chunks(room)
        if not preempted:
            chunks += self._admit(room - sum(new for _, new in chunks))
        swapped, self.swap_bytes = self.swap_bytes, 0
        if chunks or swapped or preempted:
            self._mixed(chunks, swapped)
        else:
            self._decode()
        self._join()

    def _needed(self, more: int) -> int:
        """Bytes when every sequence that decodes holds `more` further tokens."""
        return int(self.pool.allocated[self.cached + more].sum())

    def _make_room(self) -> bool:
        """Preempt until every decode has room for its token. At least one request always has."""
        preempted = False
        while self._needed(1) + self.held > self.pool.budget:
            preempted = True
            self._preempt()
        return preempted

    def _preempt(self) -> None:
        self.log.preemptions += 1
        last = int(self.order.argmax()) if self.order.size else -1
        if self.prefilling and (last < 0 or self.prefilling[-1].order > self.order[last]):
            live = self.prefilling.pop()
            self.held -= int(self.pool.allocated[live.target])
            self.log.recomputed_tokens += live.cached
            live.cached = 0
        else:
            live = self._taken_out(last)
        self.waiting.appendleft(live)

    def _taken_out(self, place: int) -> Live:
        """A decoding sequence as one that waits: for its cache to come back, or to be computed again with what it has made."""
        import numpy as np

        index, cached = int(self.index[place]), int(self.cached[place])
        live = Live(index, cached + 1)
        live.generated, live.order = self.door.outputs[index] - int(self.left[place]), int(self.order[place])
        if self.limits.host_bytes_per_s:
            live.swapped, live.cached = True, cached
            self._swap(int(self.pool.allocated[cached]))
        else:
            self.log.recomputed_tokens += live.target
        self._keep(np.arange(self.index.size) != place)
        return live

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

    def _admit(self, budget: int) -> list[tuple[Live, int]]:
        """Requests from the queue, while there are seats, tokens and memory, and the first piece of each."""
        found: list[tuple[Live, int]] = []
        taken = self._needed(1) + self.held if self.waiting else 0
        while self.waiting and budget > 0 and self._seats():
            head = self.waiting[0]
            need = int(self.pool.allocated[head.target])
            if taken + need > self.pool.budget:
                break
            self.waiting.popleft()
            self.admitted += 1
            if not head.order:
                self.log.scheduled[head.index] = self.now
            head.order = self.admitted
            taken += need
            if head.swapped:
                self._swap(int(self.pool.allocated[head.cached]))
                self.joining.append(head)
                continue
            self.held += need
            self.prefilling.append(head)
            found.append((head, min(head.target, budget)))
            budget -= found[-1][1]
        return found

    def _seats(self) -> int:
        return self.limits.max_num_seqs - self.index.size - len(self.prefilling) - len(self.joining)

    def _mixed(self, pieces: list[tuple[Live, int]], swapped: int) -> None:
        """One pass with pieces of prompts, or after a swap."""
        import numpy as np

        count, start = int(self.index.size), self.now
        chunks: Chunks = tuple((new, live.cached) for live, new in pieces)
        prompt, seconds = sum(new for _, new in pieces), 0.0
        if chunks or count:
            context = float(self.cached.mean()) + 1 if count else 0.0
            seconds = self.steps.mixed(chunks, count, context) if chunks else float(self.steps.decode(count, context, 1)[0])
        if swapped:
            seconds += swapped / self.limits.host_bytes_per_s
        for live, new in pieces:
            live.cached += new
        taken = np.array([self._needed(1) + self.held + sum(int(self.pool.allocated[j.cached]) for j in self.joining)])
        gained = self._gained(1)
        kept = int(self.pool.stored[self.cached + gained].sum())
        kept += sum(int(self.pool.stored[p.cached]) for p in (*self.prefilling, *self.joining))
        tokens, inside = count * self.steps.queries + prompt, count + len(pieces)
        self.log.passed(start, np.array([seconds]), inside, tokens, prompt, len(self.waiting), taken, np.array([kept]))
        self._forward(seconds, gained)
        self._grow(pieces)

    def _decode(self) -> None:
        """Decode passes in a row until a sequence is done, a request comes that could be admitted, or memory ends."""
        import numpy as np

        count, start = int(self.index.size), self.now
        many = 1 if self.chance else min(int(self.left.min()), max(1, MOST_CELLS // count))
        while many > 1 and self._needed(many) > self.pool.budget:
            many //= 2
        seconds = self.steps.decode(count, float(self.cached.mean()) + 1, many)
        coming = self.door.next_time()
        if not self.waiting and coming < start + seconds.sum():
            seconds = seconds[: 1 + int(np.searchsorted(start + seconds.cumsum()[:-1], coming))]
        gained = self._gained(len(seconds))
        held = self.cached[None, :] + (np.arange(1, len(seconds) + 1)[:, None] if self.chance is None else gained[None, :])
        taken, kept = self.pool.allocated[held].sum(axis=1), self.pool.stored[held].sum(axis=1)
        self.log.passed(start, seconds, count, count * self.steps.queries, 0, len(self.waiting), taken, kept)
        self._forward(float(seconds.sum()), gained)

    def _gained(self, passes: int) -> Any:
        """Tokens that each decoding sequence gains in so many passes: one a pass, or of one pass what is accepted of a draft."""
        if self.chance is None or not self.steps.drafting:
            return passes
        count = int(self.index.size)
        gained = self.steps.drafting.yields(self.chance, count).clip(max=self.left)
        self.log.verified += count
        self.log.yielded += int(gained.sum())
        return gained

    def _forward(self, seconds: float, gained: Any) -> None:
        """Time goes by, and every decoding sequence gains tokens; those that are complete leave."""
        self.now += seconds
        self.door.pass_time(seconds)
        self.cached += gained
        self.left -= gained
        done = self.left == 0
        if done.any():
            for index in self.index[done].tolist():
                self.door.leave(index, self.now)
            self._keep(~done)

    def _grow(self, pieces: list[tuple[Live, int]]) -> None:
        """Prompts that are complete give a token and go on to decode."""
        for live, _ in pieces:
            if live.cached < live.target:
                continue
            self.prefilling.remove(live)
            self.held -= int(self.pool.allocated[live.target])
            live.generated += 1
            if live.generated == 1:
                self.log.first[live.index] = self.now
            if live.generated == self.door.outputs[live.index]:
                self.door.leave(live.index, self.now)
            else:
                self.joining.append(live)

    def _join(self) -> None:
        """Sequences that are ready decode from the next pass on."""
        import numpy as np

        if not self.joining:
            return
        rows = [(j.index, j.cached, self.door.outputs[j.index] - j.generated, j.order) for j in self.joining]
        more = np.array(rows, dtype=np.int64).T
        self.joining = []
        self.index, self.cached, self.left, self.order = (
            np.concatenate(pair) for pair in zip((self.index, self.cached, self.left, self.order), more, strict=True)
        )

    def _keep(self, mask: Any) -> None:
        self.index, self.cached, self.left, self.order = (
            column[mask] for column in (self.index, self.cached, self.left, self.order)
        )
