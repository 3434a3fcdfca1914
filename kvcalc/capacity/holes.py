"""The holes of a memory in the order of their places: the first that is large enough, and neighbours that become one.

They stand in short runs, each with its largest, so that neither a search nor a change looks at all of them.
"""

from bisect import bisect_left, bisect_right

MOST_IN_RUN = 128  # holes; a longer run is cut in two


class Holes:
    """Free slots of `capacity`; `free` is how many there are in all."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._starts, self._sizes = [[0]], [[capacity]]  # of the holes of each run
        self._largest = [capacity]  # of each run

    @property
    def largest(self) -> int:
        """Slots of the largest hole; 0 where there is none."""
        return max(self._largest)

    def take(self, need: int) -> int:
        """Cut `need` slots off the first hole that has them: where they start, −1 if no hole is so large."""
        run = next((i for i, largest in enumerate(self._largest) if largest >= need), -1)
        if run < 0:
            return -1
        at = next(i for i, size in enumerate(self._sizes[run]) if size >= need)
        start = self._starts[run][at]
        self._cut(run, at, need)
        return start

    def take_at(self, start: int, need: int) -> bool:
        """Cut `need` slots off the hole that begins at `start`; False where there is none of so many."""
        run = self._run_of(start)
        starts, sizes = self._starts[run], self._sizes[run]
        at = bisect_left(starts, start)
        found = at < len(starts) and starts[at] == start and sizes[at] >= need
        if found:
            self._cut(run, at, need)
        return found

    def give(self, start: int, size: int) -> None:
        """Free `size` slots again."""
        self.free += size
        run = self._run_of(start)
        starts, sizes = self._starts[run], self._sizes[run]
        at = bisect_right(starts, start)
        if at and starts[at - 1] + sizes[at - 1] == start:
            sizes[at - 1] += size
            at -= 1
        else:
            starts.insert(at, start)
            sizes.insert(at, size)
        self._join_next(run, at)
        self._mend(run)

    def _run_of(self, start: int) -> int:
        """The run in which a hole that begins there stands, or would."""
        return max(0, bisect_right(self._starts, start, key=lambda starts: starts[0]) - 1) if self._starts[0] else 0

    def _cut(self, run: int, at: int, need: int) -> None:
        """Take the first `need` slots of a hole."""
        starts, sizes = self._starts[run], self._sizes[run]
        if sizes[at] > need:
            starts[at], sizes[at] = starts[at] + need, sizes[at] - need
        else:
            del starts[at], sizes[at]
        self.free -= need
        self._mend(run)

    def _join_next(self, run: int, at: int) -> None:
        """Make a hole one with that behind it, which may stand in the next run, where they touch."""
        behind, place = (run, at + 1) if at + 1 < len(self._starts[run]) else (run + 1, 0)
        if behind < len(self._starts) and self._starts[run][at] + self._sizes[run][at] == self._starts[behind][place]:
            self._sizes[run][at] += self._sizes[behind].pop(place)
            del self._starts[behind][place]
            if behind != run:
                self._mend(behind)

    def _mend(self, run: int) -> None:
        """After a change of a run: its largest anew, an empty one left out, a long one cut."""
        starts, sizes = self._starts[run], self._sizes[run]
        if not starts and len(self._starts) > 1:
            del self._starts[run], self._sizes[run], self._largest[run]
            return
        self._largest[run] = max(sizes, default=0)
        if len(starts) > MOST_IN_RUN:
            middle = len(starts) // 2
            self._starts[run : run + 1] = [starts[:middle], starts[middle:]]
            self._sizes[run : run + 1] = [sizes[:middle], sizes[middle:]]
            self._largest[run : run + 1] = [max(sizes[:middle]), max(sizes[middle:])]
