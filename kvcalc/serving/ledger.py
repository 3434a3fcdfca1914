"""The bytes of sequences that grow by a token a step: their sums, kept step by step without going through the sequences.

A sequence joins with c tokens at some step and holds c + k of them k steps later, so that all that its growth will add stands
in a calendar of steps from the start: what a new block adds to the allocated bytes, and where the stored bytes of a token
change (at a window's end). One step then costs as much for a thousand sequences as for one.
"""

from bisect import bisect_right
from typing import Any, NamedTuple

from kvcalc.serving.pool import Pool

SPARE = 4  # times the longest growth that the calendar holds before it is shifted


class Grown(NamedTuple):
    """Of some steps in a row: bytes allocated and stored after the last, the most allocated, and both times the seconds."""

    allocated: int
    stored: int
    peak: int
    allocated_byte_s: float
    stored_byte_s: float


class Changes:
    """Of a table over tokens: where it rises, and by how much."""

    def __init__(self, table: Any) -> None:
        import numpy as np

        rises = np.diff(table)
        places = np.flatnonzero(rises) + 1
        self.places: list[int] = places.tolist()
        self.at, self.by = places, rises[places - 1]
        apart = np.diff(places)
        even = places.size > 1 and bool((apart == apart[0]).all() and (self.by == self.by[0]).all())
        self.every = int(apart[0]) if even else 0  # tokens from one rise to the next, all alike; 0 where they are not
        self.rise = int(self.by[0]) if even else 0

    def between(self, first: int, last: int) -> tuple[Any, Any]:
        """(tokens, rise) at more than `first` and at most `last` tokens."""
        low, high = bisect_right(self.places, first), bisect_right(self.places, last)
        return self.at[low:high], self.by[low:high]


class Ledger:
    """Sums over the sequences that decode: bytes allocated and stored now, and allocated once each has reached its end."""

    def __init__(self, pool: Pool, longest: int) -> None:
        import numpy as np

        self.pool, self.allocated, self.stored, self.ends = pool, 0, 0, 0
        self.step = 0
        self.table, self.kept = pool.allocated.tolist(), pool.stored.tolist()
        self.blocks = Changes(pool.allocated)
        self.rises = np.diff(pool.stored, append=pool.stored[-1:])
        self.bends = Changes(self.rises)
        self.rise = 0  # what the next step adds to the stored bytes
        self._size = SPARE * (longest + 2)
        self._adds, self._turns = (np.zeros(self._size, dtype=np.int64) for _ in range(2))
        self._base = 0  # the step that the calendar begins with

    def join(self, cached: int, steps: int, sign: int = 1) -> None:
        """A sequence with `cached` tokens that will grow for so many steps; sign −1: it leaves before it has."""
        self._shift()
        end, here = cached + steps, self.step - self._base - cached
        self.allocated += sign * self.table[cached]
        self.stored += sign * self.kept[cached]
        self.ends += sign * self.table[end]
        self.rise += sign * int(self.rises[cached])
        if self.blocks.every:
            places, every = self.blocks.places, self.blocks.every
            first = places[0] + -(-(cached + 1 - places[0]) // every) * every if cached >= places[0] else places[0]
            if first <= end:
                self._adds[first + here : end + here + 1 : every] += sign * self.blocks.rise
        else:
            at, by = self.blocks.between(cached, end)
            self._adds[at + here] += sign * by
        if self.bends.places:
            at, by = self.bends.between(cached, end)
            self._turns[at + here] += sign * by

    def leave(self, cached: int) -> None:
        """A sequence has reached its end with `cached` tokens."""
        self.allocated -= self.table[cached]
        self.stored -= self.kept[cached]
        self.ends -= self.table[cached]
        self.rise -= int(self.rises[cached])

    def coming(self, steps: int) -> Any:
        """Bytes that each of so many steps adds to the allocated ones."""
        first = self.step - self._base + 1
        return self._adds[first : first + steps]

    def next_rise(self) -> int:
        """Bytes that the next step adds to the allocated ones."""
        return int(self._adds[self.step - self._base + 1])

    def grow(self, steps: int, first: float, rise: float, held: int, kept: int) -> Grown:
        """So many steps pass, of `first` seconds and `rise` more each; `held` and `kept` bytes of others stand beside."""
        place = self.step - self._base + 1
        adds, slope = self._adds[place : place + steps].tolist(), self.rise
        allocated, stored = self.allocated + held, self.stored + kept
        spent = lived = 0.0
        if self.bends.places:
            turns = self._turns[place : place + steps].tolist()
            for add, turn in zip(adds, turns, strict=True):
                allocated += add
                stored += slope
                slope += turn
                spent += allocated * first
                lived += stored * first
                first += rise
        else:
            for add in adds:
                allocated += add
                stored += slope
                spent += allocated * first
                lived += stored * first
                first += rise
        self.allocated, self.stored, self.rise = allocated - held, stored - kept, slope
        self.step += steps
        return Grown(allocated, stored, allocated, spent, lived)

    def _shift(self) -> None:
        gone = self.step - self._base
        if 2 * gone > self._size:
            for calendar in (self._adds, self._turns):
                left = calendar[gone:].copy()
                calendar[: left.size], calendar[left.size :] = left, 0
            self._base = self.step
