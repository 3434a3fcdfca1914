"""How requests come in: when they are due, and no sooner than a client is free where their number at once is limited."""

import math
from collections import deque

from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.requests import Requests


class Door:
    """Lets requests in, in order. max_concurrency: clients, each with one request at a time; 0 is no limit.

    A request that could never fit is rejected at once.
    """

    def __init__(self, requests: Requests, pool: Pool, log: Log, max_concurrency: int = 0) -> None:
        self.due: list[float] = requests.arrival_s.tolist()
        self.inputs: list[int] = requests.input_len.tolist()
        self.outputs: list[int] = requests.output_len.tolist()
        self.pool, self.log, self.next, self.done = pool, log, 0, 0
        self.free = deque([-math.inf] * min(max_concurrency, len(self.due))) if max_concurrency else None
        self.in_system = 0

    def next_time(self) -> float:
        """When the next request comes, as far as is known; infinity when none does before another is done."""
        if self.next == len(self.due) or (self.free is not None and not self.free):
            return math.inf
        return max(self.due[self.next], self.free[0] if self.free else -math.inf)

    def admit(self, now: float) -> list[int]:
        """The requests that have come by `now`, without those that can never fit."""
        found = []
        while (at := self.next_time()) <= now:
            index = self.next
            self.next += 1
            if self.free is not None:
                self.free.popleft()
            self.log.arrived[index] = at
            if self.pool.fits(self.inputs[index] + self.outputs[index] - 1):
                found.append(index)
                self.in_system += 1
                self.log.in_system_s += now - at
            else:
                self.log.rejected[index] = True
                self._free(at)
        return found

    def pass_time(self, seconds: float) -> None:
        """Time goes by for those inside."""
        self.log.in_system_s += self.in_system * seconds

    def leave(self, index: int, now: float) -> None:
        """A request is done."""
        self.log.finished[index] = now
        self.in_system -= 1
        self._free(now)

    def _free(self, at: float) -> None:
        self.done += 1
        if self.free is not None:
            self.free.append(at)

    @property
    def open(self) -> bool:
        """Whether any request is still to come or to be done."""
        return self.done < len(self.due)
