"""The queue of a server: who comes next, and how many tokens wait."""

from collections import deque

from kvcalc.serving.door import Door
from kvcalc.serving.scheduling import Live


class Waiting:
    """Requests that have come and are not admitted; those that had to make room are before all others."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.fresh: deque[int] = deque()  # as they come
        self.preempted: list[Live] = []  # the next one last
        self.first: Live | None = None  # of the fresh, once it has been looked at

    def __bool__(self) -> bool:
        return bool(self.fresh or self.preempted)

    def __len__(self) -> int:
        return len(self.fresh) + len(self.preempted)

    def head(self) -> Live:
        """The next one. One that comes has all of its prompt to be processed, or all of it cached and a token made."""
        if self.preempted:
            return self.preempted[-1]
        if self.first is None:
            self.first = live = Live(self.fresh[0], self.door.inputs[self.fresh[0]])
            if self.door.handed:
                live.handed, live.generated, live.cached = True, 1, live.target
                live.target += 1
        return self.first

    def pop(self) -> None:
        """The next one is admitted."""
        if self.preempted:
            self.preempted.pop()
        else:
            self.fresh.popleft()
            self.first = None

    def tokens(self, enough: float) -> int:
        """Tokens of prompts that wait; counted until there are enough."""
        found = sum(live.target - live.cached for live in self.preempted)
        for index in self.fresh:
            if found >= enough:
                break
            found += self.door.inputs[index]
        return found
