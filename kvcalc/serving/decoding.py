"""The decoding sequences: their number, memory, newest request, and completed requests.

Without a draft every sequence gains one token per pass, so consecutive passes are one event.
With a draft each sequence gains the accepted draft tokens, drawn at random, and one more.
"""

from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from kvcalc.serving.ledger import Grown, Ledger
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.scheduling import Live
from kvcalc.serving.speculation import Drafting
from kvcalc.serving.steps import Line


class InStep:
    """Sequences that gain one token each in every pass.

    Attributes:
        running: Sequences sorted by the step at which each is done.
        count: Number of sequences.
        context: Total number of cached tokens.
        needed: Bytes that the sequences hold after one more pass.
    """

    def __init__(self, pool: Pool, longest: int) -> None:
        self.ledger = Ledger(pool, longest)
        self.running: list[tuple[int, int, Live]] = []  # heap of (last step, order, request) with stale entries
        self.recent: list[Live] = []  # in order of admission; includes completed requests
        self.count = self.context = 0

    @property
    def needed(self) -> int:
        return self.ledger.next if self.count else 0

    def exceeds(self, room: int) -> bool:
        """Return whether one more pass needs more than `room` bytes."""
        return self.ledger.ends > room and self.needed > room

    def join(self, live: Live, left: int) -> None:
        """Add a sequence that decodes `left` tokens, from the next pass on."""
        step = self.ledger.step
        live.target, live.began, live.ends, live.decodes = live.cached, step, step + left, True
        heappush(self.running, (live.ends, live.order, live))
        self.recent.append(live)
        if len(self.recent) > 64 + 2 * self.count:
            self.recent = [one for one in self.recent if one.decodes]
            self.running = [entry for entry in self.running if entry[2].decodes and entry[1] == entry[2].order]
            heapify(self.running)
        self.ledger.join(live.cached, left)
        self.count += 1
        self.context += live.cached

    def newest(self) -> int:
        """Return the order of the sequence that was admitted last; −1 without sequences."""
        while self.recent and not self.recent[-1].decodes:
            self.recent.pop()
        return self.recent[-1].order if self.recent else -1

    def take_out(self) -> Live:
        """Remove the sequence that was admitted last, with its counts of tokens updated."""
        self.newest()
        live = self.recent.pop()
        live.decodes = False
        self._clear()
        gained = self.ledger.step - live.began
        live.cached = live.target + gained
        live.generated += gained
        self.ledger.join(live.cached, live.ends - self.ledger.step, sign=-1)
        self.count -= 1
        self.context -= live.cached
        return live

    def in_a_row(self, most: int, room: int) -> int:
        """Return the number of passes until a sequence is done or `room` bytes are exceeded.

        The number is at least 1 and at most `most`.
        """
        many = min(self.running[0][0] - self.ledger.step, most)
        if many > 1 and self.ledger.ends > room:
            many = max(1, self.ledger.within(many, room))
        return many

    def _clear(self) -> None:
        """Remove entries of preempted sequences from the front of the heap.

        A sequence that came back has another order.
        """
        running = self.running
        while running and not (running[0][2].decodes and running[0][1] == running[0][2].order):
            heappop(running)

    def grow(self, passes: int, line: Line, held: int, kept: int) -> tuple[Grown, list[Live]]:
        """Simulate `passes` passes and return their bytes, as `Ledger.grow`, and the completed requests."""
        grown = self.ledger.grow(passes, line, held, kept)
        self.context += self.count * passes
        done: list[Live] = []
        step = self.ledger.step
        while self.running and self.running[0][0] <= step:
            live = heappop(self.running)[2]
            cached = live.target + step - live.began
            self.ledger.leave(cached)
            self.count -= 1
            self.context -= cached
            live.decodes = False
            done.append(live)
            self._clear()
        return grown, done

    def still(self, seconds: float, held: int, kept: int) -> Grown:
        """Return the bytes of a pass in which these sequences do not decode."""
        taken, kept = self.ledger.allocated + held, self.ledger.stored + kept
        return Grown(taken, kept, taken, taken * seconds, kept * seconds)


class OwnPace:
    """Sequences that gain the accepted draft tokens and one more in each pass.

    The methods are those of `InStep`, computed with arrays.
    """

    def __init__(self, pool: Pool, drafting: Drafting, log: Log) -> None:
        import numpy as np

        self.pool, self.drafting, self.log = pool, drafting, log
        self.chance = np.random.default_rng([drafting.seed, log.rank])
        self.lives: list[Live] = []
        self.cached, self.left = (np.zeros(0, dtype=np.int64) for _ in range(2))

    @property
    def count(self) -> int:
        return len(self.lives)

    @property
    def context(self) -> int:
        return int(self.cached.sum())

    @property
    def needed(self) -> int:
        return int(self.pool.allocated[self.cached + 1].sum())

    def exceeds(self, room: int) -> bool:
        return self.needed > room

    def join(self, live: Live, left: int) -> None:
        import numpy as np

        self.lives.append(live)
        self.cached, self.left = np.append(self.cached, live.cached), np.append(self.left, left)

    def newest(self) -> int:
        return max((live.order for live in self.lives), default=-1)

    def take_out(self) -> Live:
        import numpy as np

        at = int(np.argmax([live.order for live in self.lives]))
        live = self.lives[at]
        live.generated += int(self.cached[at]) - live.cached
        live.cached = int(self.cached[at])
        self._keep(np.arange(self.count) != at)
        return live

    def in_a_row(self, most: int, room: int) -> int:
        return 1

    def grow(self, passes: int, line: Line, held: int, kept: int) -> tuple[Grown, list[Live]]:
        gained = self.drafting.yields(self.chance, self.count).clip(max=self.left)
        self.log.verified += self.count
        self.log.yielded += int(gained.sum())
        self.cached += gained
        self.left -= gained
        grown, going = self.still(line.first, held, kept), self.left > 0
        done = [live for live, on in zip(self.lives, going, strict=True) if not on]
        if done:
            self._keep(going)
        return grown, done

    def still(self, seconds: float, held: int, kept: int) -> Grown:
        taken, kept = (int(of[self.cached].sum()) + n for of, n in ((self.pool.allocated, held), (self.pool.stored, kept)))
        return Grown(taken, kept, taken, taken * seconds, kept * seconds)

    def _keep(self, mask: Any) -> None:
        self.lives = [live for live, kept in zip(self.lives, mask, strict=True) if kept]
        self.cached, self.left = self.cached[mask], self.left[mask]


Decoding: TypeAlias = InStep | OwnPace
