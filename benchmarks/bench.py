"""Common parts of all benchmarks: a line of the table, and measurement of CPU time.

Every time is compared with the time of a yardstick, which runs in the same process on the same machine.
Ratios of the two are comparable between machines, seconds are not. A time is the minimum CPU time of several
repeats, because other work on the machine can only add time.
"""

import time
import timeit
from collections.abc import Callable
from typing import NamedTuple

from kvcalc.units import format_seconds


class Line(NamedTuple):
    """One measurement: a time (or a size), the same quantity of a yardstick, and the maximum ratio.

    Attributes:
        what: The measured work.
        taken: CPU seconds of the work, or bytes.
        yardstick: The work of the yardstick.
        taken_by_it: CPU seconds of the yardstick, or bytes.
        most: Maximum of `taken` divided by `taken_by_it`.
        show: Function that formats the two quantities.
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
        """Return the cells of the line in the table."""
        return [
            self.what,
            self.show(self.taken),
            self.yardstick,
            self.show(self.taken_by_it),
            f"{self.ratio:.3g}",
            f"{self.most:g}",
        ]


def cpu_seconds(call: Callable[[], object], number: int = 1, repeat: int = 5) -> float:
    """Return the CPU seconds of one call in all threads: the minimum over `repeat` series of `number` calls."""
    return min(timeit.repeat(call, number=number, repeat=repeat, timer=time.process_time)) / number


def thousand_additions() -> int:
    """Run the yardstick for work that takes microseconds: 1,000 additions in plain Python."""
    total = 0
    for number in range(1000):
        total += number
    return total


ADDITIONS = "1,000 additions in plain Python"
