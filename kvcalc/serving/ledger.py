"""Sums of the bytes of decoding sequences that grow by one token per step.

A sequence that joins with c tokens has c + k tokens after k steps. All bytes that its growth will
add are therefore known from the start: bytes of a new block in the allocated bytes, and changes of
the stored bytes per token (at the end of a window). The sums need no loop over the sequences, so
one step costs as much for a thousand sequences as for one.
"""

from bisect import bisect_right
from itertools import accumulate, repeat
from typing import Any, NamedTuple

from kvcalc.serving.pool import Pool
from kvcalc.serving.steps import Line

LONG = 64  # above this number of steps, sums use closed formulas
SPARE = 4  # size of the schedule, in multiples of the longest growth


class Grown(NamedTuple):
    """Bytes of some consecutive steps.

    Attributes:
        allocated: Bytes allocated after the last step.
        stored: Bytes stored after the last step.
        peak: Maximum of the allocated bytes.
        allocated_byte_s: Allocated bytes times seconds, summed over the steps.
        stored_byte_s: Stored bytes times seconds, summed over the steps.
    """

    allocated: int
    stored: int
    peak: int
    allocated_byte_s: float
    stored_byte_s: float


class Even:
    """Growth of a table that rises by `rise` bytes every `every` tokens.

    The bytes added by a step depend only on the step's number modulo `every`.
    """

    def __init__(self, first: int = 0, every: int = 1, rise: int = 0) -> None:
        self.first, self.every, self.rise = first, every, rise
        self.due = [0] * every

    def join(self, step: int, cached: int, end: int, sign: int = 1) -> None:
        """Add the growth of a sequence that has `cached` tokens at `step`; sign −1 removes it."""
        self.due[(step - cached + self.first) % self.every] += sign * self.rise

    def leave(self, step: int, cached: int) -> None:
        """Remove the growth of a sequence that ends at `step` with `cached` tokens."""
        self.due[(step - cached + self.first) % self.every] -= self.rise

    def next(self, step: int) -> int:
        """Return the bytes that the step after `step` adds."""
        return self.due[(step + 1) % self.every]

    def coming(self, step: int, steps: int) -> list[int]:
        """Return the bytes that each of the `steps` steps after `step` adds."""
        at = (step + 1) % self.every
        if at + steps <= self.every:
            return self.due[at : at + steps]
        return (self.due * ((at + steps) // self.every + 1))[at : at + steps]

    def moments(self, step: int, steps: int) -> tuple[int, int, int]:
        """Return (last, total, weighted) for the `steps` steps after `step`.

        If `added[i]` is the bytes added up to step i, they are `added[-1]`, Σ `added[i]` and
        Σ i·`added[i]`, with i from 0.
        """
        last = weighed = total = 0
        every, numbers = self.every, steps * (steps - 1) // 2
        for i, by in enumerate(self.coming(step, min(steps, every)), 1):  # `by` is added in the steps i, i + every, …
            times = (steps - i) // every + 1
            pairs = times * (times - 1) // 2
            steps_in, squares = times * i + every * pairs, times * i * i + 2 * i * every * pairs
            squares += every * every * pairs * (2 * times - 1) // 3
            last += by * times
            total += by * (times * (steps + 1) - steps_in)
            weighed += by * (times * numbers - (squares - 3 * steps_in + 2 * times) // 2)
        return last, total, weighed


class Calendar:
    """Growth of a table with irregular rises, scheduled by step to the end of each sequence.

    Args:
        longest: Maximum number of tokens that a sequence gains.
    """

    def __init__(self, table: Any, longest: int) -> None:
        import numpy as np

        rises = np.diff(table)
        self.at = np.flatnonzero(rises) + 1
        self.by = rises[self.at - 1]
        self.places: list[int] = self.at.tolist()
        self.size = SPARE * (longest + 2)
        self.adds = np.zeros(self.size, dtype=np.int64)
        self.base = 0  # first step of the schedule

    def join(self, step: int, cached: int, end: int, sign: int = 1) -> None:
        """Add the growth of a sequence from `cached` tokens at `step` to `end` tokens; sign −1 removes it."""
        self._shift(step)
        low, high = bisect_right(self.places, cached), bisect_right(self.places, end)
        self.adds[self.at[low:high] + (step - self.base - cached)] += sign * self.by[low:high]

    def leave(self, step: int, cached: int) -> None:
        """Do nothing: the schedule of a sequence ends with the sequence."""

    def next(self, step: int) -> int:
        """Return the bytes that the step after `step` adds."""
        return int(self.adds[step - self.base + 1])

    def coming(self, step: int, steps: int) -> list[int]:
        """Return the bytes that each of the `steps` steps after `step` adds."""
        first = step - self.base + 1
        return self.adds[first : first + steps].tolist()  # type: ignore[no-any-return]

    def _shift(self, step: int) -> None:
        gone = step - self.base
        if 2 * gone > self.size:
            left = self.adds[gone:].copy()
            self.adds[: left.size], self.adds[left.size :] = left, 0
            self.base = step


def rises_of(table: Any, longest: int) -> Even | Calendar:
    """Return the growth of a table over tokens: `Even` if its rises are regular, else `Calendar`."""
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
    """Sums over the decoding sequences.

    Attributes:
        allocated: Bytes allocated now.
        stored: Bytes stored now.
        ends: Bytes allocated if each sequence had reached its end.
    """

    def __init__(self, pool: Pool, longest: int) -> None:
        import numpy as np

        self.allocated = self.stored = self.ends = self.step = 0
        self.table, self.kept = memoryview(pool.allocated), memoryview(pool.stored)
        rises: Any = np.diff(pool.stored)
        rises = np.append(rises, rises[-1:])  # a sequence of maximum length does not grow
        self.rises = memoryview(rises)
        self.blocks = rises_of(pool.allocated, longest)
        self.bends = rises_of(rises, longest)
        self.straight = isinstance(self.bends, Even) and not self.bends.rise  # every token stores equally many bytes
        self.rise = 0  # stored bytes that the next step adds

    def join(self, cached: int, steps: int, sign: int = 1) -> None:
        """Add a sequence with `cached` tokens that grows for `steps` steps.

        sign −1 removes a sequence before its end.
        """
        end = cached + steps
        self.allocated += sign * self.table[cached]
        self.stored += sign * self.kept[cached]
        self.ends += sign * self.table[end]
        self.rise += sign * self.rises[cached]
        self.blocks.join(self.step, cached, end, sign)
        if not self.straight:
            self.bends.join(self.step, cached, end, sign)

    def leave(self, cached: int) -> None:
        """Remove a sequence that has reached its end with `cached` tokens."""
        self.allocated -= self.table[cached]
        self.stored -= self.kept[cached]
        self.ends -= self.table[cached]
        self.rise -= self.rises[cached]
        self.blocks.leave(self.step, cached)
        if not self.straight:
            self.bends.leave(self.step, cached)

    def within(self, steps: int, room: int) -> int:
        """Return how many of the next `steps` steps keep the allocated bytes at or below `room`."""
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
        """Advance by `steps` steps and return their bytes.

        Args:
            line: Seconds of the steps.
            held: Allocated bytes of other requests.
            kept: Stored bytes of other requests.
        """
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
        """Return the result of `grow` without a loop over the steps.

        It uses exact sums of bytes, and of bytes times step number.
        """
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
