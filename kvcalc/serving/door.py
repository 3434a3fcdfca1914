"""How requests come in: when they are due, and no sooner than a client is free where their number at once is limited."""

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.requests import Requests


class Clients(NamedTuple):
    """Who asks. concurrency: clients, each with one request at a time, 0 for no limit. think_s: seconds from an answer to the
    client's next request. path_s, path_s_per_token: seconds that a request of so many tokens is under way (network, HTTP,
    tokenising, and the first token back) before the engine sees it; a user waits for them too.
    """

    concurrency: int = 0
    think_s: float = 0.0
    path_s: float = 0.0
    path_s_per_token: float = 0.0

    def share(self, rank: int, ranks: int) -> "Clients":
        """Those that ask one of so many ranks; at least one where their number is limited."""
        whole = self.concurrency
        return self._replace(concurrency=max(1, whole // ranks + (rank < whole % ranks)) if whole else 0)


class Door:
    """Lets requests in, in the order in which they reach the engine. A request that could never fit is rejected at once."""

    def __init__(self, requests: Requests, pool: Pool, log: Log, clients: Clients = Clients()) -> None:  # noqa: B008
        self.due: list[float] = requests.arrival_s.tolist()
        self.inputs: list[int] = requests.input_len.tolist()
        self.outputs: list[int] = requests.output_len.tolist()
        self.pool, self.log, self.clients, self.next, self.done = pool, log, clients, 0, 0
        self.closed = bool(clients.concurrency)
        self.in_system = 0
        # (reaches the engine, which, was sent)
        self.coming: list[tuple[float, int, float]] = []
        while self.next < (min(clients.concurrency, len(self.due)) if self.closed else len(self.due)):
            self._send(-math.inf)
        heapify(self.coming)
        if not self.closed:
            self.coming.sort(reverse=True)

    def _send(self, free: float) -> None:
        index = self.next
        self.next += 1
        sent = max(self.due[index], free)
        there = sent + self.clients.path_s + self.clients.path_s_per_token * self.inputs[index]
        if free > -math.inf:
            heappush(self.coming, (there, index, sent))
        else:
            self.coming.append((there, index, sent))

    def next_time(self) -> float:
        """When the next request comes, as far as is known; infinity when none does before another is done."""
        if not self.coming:
            return math.inf
        return self.coming[0 if self.closed else -1][0]

    def admit(self, now: float) -> list[int]:
        """The requests that have come by `now`, without those that can never fit."""
        found: list[int] = []
        while self.coming and self.coming[0 if self.closed else -1][0] <= now:
            at, index, sent = heappop(self.coming) if self.closed else self.coming.pop()
            self.log.arrived[index] = sent
            if self.pool.fits(self.inputs[index] + self.outputs[index] - 1):
                found.append(index)
                self.in_system += 1
                self.log.in_system_s += now - sent
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
        if self.closed and self.next < len(self.due):
            self._send(at + self.clients.think_s)

    @property
    def open(self) -> bool:
        """Whether any request is still to come or to be done."""
        return self.done < len(self.due)
