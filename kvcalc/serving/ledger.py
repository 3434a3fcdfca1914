"""The bytes of sequences that grow by a token a step: their sums, kept step by step without going through the sequences.

A sequence joins with c tokens at some step and holds c + k of them k steps later, so that all that its growth will add is known
from the start, by the step that adds it: what a new block adds to the allocated bytes, and where the stored bytes of a token
change (at a window's end). One step then costs as much for a thousand sequences as for one.
"""

from bisect import bisect_right
from itertools import accumulate, repeat
from typing import Any, NamedTuple

from kvcalc.serving.pool import Pool
from kvcalc.serving.steps import Line

LONG = 64  # steps in a row beyond which sums are not taken step by step
SPARE = 4  # times the longest growth that the calendar holds before it is shifted


class Grown(NamedTuple):
    """Of some steps in a row: bytes allocated and stored after the last, the most allocated, and both times the seconds."""

    allocated: int
    stored: int
    peak: int
    allocated_byte_s: float
    stored_byte_s: float


class Even:
    """A table that rises by the same at every so many tokens: what each step adds is known by its number modulo that distance."""

    def __init__(self, first: int = 0, every: int = 1, rise: int = 0) -> None:
        self.first, self.every, self.rise = first, every, rise
        self.due = [0] * every

    def join(self, step: int, cached: int, end: int, sign: int = 1) -> None:
        """A sequence that holds `cached` tokens at `step` grows; sign −1: it does so no more."""
        self.due[(step - cached + self.first) % self.every] += sign * self.rise

    def leave(self, step: int, cached: int) -> None:
        """A sequence has reached its end at `step`, with `cached` tokens."""
        self.due[(step - cached + self.first) % self.every] -= self.rise

    def next(self, step: int) -> int:
        """What the step after `step` adds."""
        return self.due[(step + 1) % self.every]

    def coming(self, step: int, steps: int) -> list[int]:
        """What each of so many steps after `step` adds."""
        at = (step + 1) % self.every
        if at + steps <= self.every:
            return self.due[at : at + steps]
        return (self.due * ((at + steps) // self.every + 1))[at : at + steps]

    def moments(self, step: int, steps: int) -> tuple[int, int, int]:
        """Of what so many steps after `step` add together: after the last of them; the sum of it after each step; and that
        with each step weighed by its number, from 0.
        """
        last = weighed = total = 0
        every, numbers = self.every, steps * (steps - 1) // 2
        for i, by in enumerate(self.coming(step, min(steps, every)), 1):  # it comes in the steps i, i + every, …
            times = (steps - i) // every + 1
            pairs = times * (times - 1) // 2
            steps_in, squares = times * i + every * pairs, times * i * i + 2 * i * every * pairs
            squares += every * every * pairs * (2 * times - 1) // 3
            last += by * times
            total += by * (times * (steps + 1) - steps_in)
            weighed += by * (times * numbers - (squares - 3 * steps_in + 2 * times) // 2)
        return last, total, weighed


class Calendar:
    """A table with rises of any kind: what they add stands in a calendar of steps, to the end of each sequence.

    longest: tokens that a sequence gains at most.
    """

    def __init__(self, table: Any, longest: int) -> None:
        import numpy as np

        rises = np.diff(table)
        self.at = np.flatnonzero(rises) + 1
        self.by = rises[self.at - 1]
        self.places: list[int] = self.at.tolist()
        self.size = SPARE * (longest + 2)
        self.adds = np.zeros(self.size, dtype=np.int64)
        self.base = 0  # the step that the calendar begins with

    def join(self, step: int, cached: int, end: int, sign: int = 1) -> None:
        """A sequence that holds `cached` tokens at `step` grows to `end` of them; sign −1: it does so no more."""
        self._shift(step)
        low, high = bisect_right(self.places, cached), bisect_right(self.places, end)
        self.adds[self.at[low:high] + (step - self.base - cached)] += sign * self.by[low:high]

    def leave(self, step: int, cached: int) -> None:
        """A sequence has reached its end."""

    def next(self, step: int) -> int:
        """What the step after `step` adds."""
        return int(self.adds[step - self.base + 1])

    def coming(self, step: int, steps: int) -> list[int]:
        """What each of so many steps after `step` adds."""
        first = step - self.base + 1
        return self.adds[first : first + steps].tolist()  # type: ignore[no-any-return]

    def _shift(self, step: int) -> None:
        gone = step - self.base
        if 2 * gone > self.size:
            left = self.adds[gone:].copy()
            self.adds[: left.size], self.adds[left.size :] = left, 0
            self.base = step


def rises_of(table: Any, longest: int) -> Even | Calendar:
    """What growth adds to a table over tokens."""
    import numpy as np

    rises = np.diff(table)
    places = np.flatnonzero(rises) + 1
    if not places.size:
        return Even()
    by, apart = rises[places - 1], np.diff(places)
    if places.size > 1 and (apart == apart[0]).all() and (by == by[0]).all() and places[0] <= apart[0]:
        return Even(int(places[0]), int(apart[0]), int(by[0]))
    return Calendar(table, longest)


class Ledger:
    """Sums over the sequences that decode: bytes allocated and stored now, and allocated once each has reached its end."""

    def __init__(self, pool: Pool, longest: int) -> None:
        import numpy as np

        self.allocated = self.stored = self.ends = self.step = 0
        self.table, self.kept = memoryview(pool.allocated), memoryview(pool.stored)
        rises: Any = np.diff(pool.stored)
        rises = np.append(rises, rises[-1:])  # the longest grows no more
        self.rises = memoryview(rises)
        self.blocks = rises_of(pool.allocated, longest)
        self.bends = rises_of(rises, longest)
        self.straight = isinstance(self.bends, Even) and not self.bends.rise  # the stored bytes of every token are alike
        self.rise = 0  # what the next step adds to the stored bytes

    def join(self, cached: int, steps: int, sign: int = 1) -> None:
        """A sequence with `cached` tokens that will grow for so many steps; sign −1: it leaves before it has."""
        end = cached + steps
        self.allocated += sign * self.table[cached]
        self.stored += sign * self.kept[cached]
        self.ends += sign * self.table[end]
        self.rise += sign * self.rises[cached]
        self.blocks.join(self.step, cached, end, sign)
        if not self.straight:
            self.bends.join(self.step, cached, end, sign)

    def leave(self, cached: int) -> None:
        """A sequence has reached its end with `cached` tokens."""
        self.allocated -= self.table[cached]
        self.stored -= self.kept[cached]
        self.ends -= self.table[cached]
        self.rise -= self.rises[cached]
        self.blocks.leave(self.step, cached)
        if not self.straight:
            self.bends.leave(self.step, cached)

    def within(self, steps: int, room: int) -> int:
        """Of so many steps those after which the allocated bytes are no more than `room`."""
        done, taken = 0, self.allocated
        if isinstance(self.blocks, Even) and steps > LONG and taken <= room:
            every, rise = self.blocks.every, sum(self.blocks.due)
            rounds = min(steps // every, (room - taken) // rise if rise else steps)
            done, taken = rounds * every, taken + rounds * rise
        for many, add in enumerate(self.blocks.coming(self.step + done, min(steps - done, LONG) if done else steps), done):
            taken += add
            if taken > room:
                return many
        return steps

    @property
    def next(self) -> int:
        """Bytes allocated after one more step."""
        return self.allocated + self.blocks.next(self.step)

    def grow(self, steps: int, line: Line, held: int, kept: int) -> Grown:
        """So many steps pass, of so many seconds each; `held` and `kept` bytes of others stand beside."""
        if steps > LONG and self.straight and isinstance(self.blocks, Even) and not line.each:
            return self._grow_far(self.blocks, steps, line, held, kept)
        adds, slope = self.blocks.coming(self.step, steps), self.rise
        allocated, stored = self.allocated + held, self.stored + kept
        spent = lived = 0.0
        times = line.each[:steps] or accumulate(repeat(line.rise, steps - 1), initial=line.first)
        if self.straight:
            for add, seconds in zip(adds, times, strict=True):
                allocated += add
                stored += slope
                spent += allocated * seconds
                lived += stored * seconds
        else:
            for add, turn, seconds in zip(adds, self.bends.coming(self.step, steps), times, strict=True):
                allocated += add
                stored += slope
                slope += turn
                spent += allocated * seconds
                lived += stored * seconds
        self.allocated, self.stored, self.rise = allocated - held, stored - kept, slope
        self.step += steps
        return Grown(allocated, stored, allocated, spent, lived)

    def _grow_far(self, blocks: Even, steps: int, line: Line, held: int, kept: int) -> Grown:
        """As `grow`, without going through the steps: exact sums of bytes, and of bytes times a step's number."""
        allocated, stored, slope = self.allocated + held, self.stored + kept, self.rise
        last, total, weighed = blocks.moments(self.step, steps)
        numbers, first, rise = steps * (steps - 1) // 2, line.first, line.rise
        spent = first * (steps * allocated + total) + rise * (allocated * numbers + weighed)
        lived = first * (steps * stored + slope * (numbers + steps))
        lived += rise * (stored * numbers + slope * (numbers * 2 * (steps + 1) // 3))
        self.allocated += last
        self.stored += slope * steps
        self.step += steps
        return Grown(allocated + last, stored + slope * steps, allocated + last, spent, lived)
