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

    def __len__(self) -> int:
        return len(self.fresh) + len(self.preempted)

    def head(self) -> Live:
        """The next one. One that comes has all of its prompt to be processed, or all of it cached and a token made."""
        if self.preempted:
            return self.preempted[-1]
        live = Live(self.fresh[0], self.door.inputs[self.fresh[0]])
        if self.door.handed:
            live.handed, live.generated, live.cached = True, 1, live.target
            live.target += 1
        return live

    def pop(self) -> None:
        """The next one is admitted."""
        if self.preempted:
            self.preempted.pop()
        else:
            self.fresh.popleft()

    def tokens(self, enough: float) -> int:
        """Tokens of prompts that wait; counted until there are enough."""
        found = sum(live.target - live.cached for live in self.preempted)
        for index in self.fresh:
            if found >= enough:
                break
            found += self.door.inputs[index]
        return found
