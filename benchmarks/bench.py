"""What all benchmarks have: a line of the table, and times that other work on the machine disturbs least.

Every time stands beside that of a yardstick, taken in the same run on the same machine: the ratio of the two travels from one
machine to another, seconds do not. CPU time is taken, and the least of several repeats: on a shared machine everything else only
adds.
"""

import time
import timeit
from collections.abc import Callable
from typing import NamedTuple

from kvcalc.units import format_seconds


class Line(NamedTuple):
    """What was done and what it took, the yardstick and what that took, and the most that their ratio may be.

    show: how amounts are written, CPU seconds unless it says otherwise.
    """

    what: str
    taken: float
    yardstick: str
    taken_by_it: float
    most: float
    show: Callable[[float], str] = format_seconds

    @property
    def ratio(self) -> float:
        return self.taken / self.taken_by_it

    @property
    def good(self) -> bool:
        return self.ratio <= self.most

    def cells(self) -> list[str]:
        """As a row of the table."""
        return [
            self.what,
            self.show(self.taken),
            self.yardstick,
            self.show(self.taken_by_it),
            f"{self.ratio:.3g}",
            f"{self.most:g}",
        ]


def cpu_seconds(call: Callable[[], object], number: int = 1, repeat: int = 5) -> float:
    """CPU seconds of one call, all threads together: the best of so many repeats of `number` calls."""
    return min(timeit.repeat(call, number=number, repeat=repeat, timer=time.process_time)) / number


def thousand_additions() -> int:
    """The yardstick of what takes microseconds: 1,000 additions of plain Python."""
    total = 0
    for number in range(1000):
        total += number
    return total


ADDITIONS = "1,000 additions in plain Python"
