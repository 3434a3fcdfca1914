"""How requests come in: when they are due, and no sooner than a client is free where their number at once is limited."""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heappushpop
from typing import Any, NamedTuple

from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.requests import Requests

NOBODY = (math.inf, -1, math.inf)


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
    """Lets requests in, in the order in which they reach the engine. A request that could never fit is rejected at once.

    next_s: when the next request comes, as far as is known; infinity when none does before another is done. handed: whether
    they come with their prompts computed.
    """

    handed = False

    def __init__(self, requests: Requests, pool: Pool, log: Log, clients: Clients = Clients()) -> None:  # noqa: B008
        self.inputs: list[int] = requests.input_len.tolist()
        self.outputs: list[int] = requests.output_len.tolist()
        self.fits: list[bool] = pool.fits(requests.input_len + requests.output_len - 1).tolist()
        self.log, self.clients, self.done, self.in_system = log, clients, 0, 0
        self.due, self.next = requests.arrival_s, min(clients.concurrency, len(requests))  # of a closed loop: those sent
        there = self.due + clients.path_s + clients.path_s_per_token * requests.input_len
        self.coming: list[tuple[float, int, float]] = []  # of a closed loop, a heap: (reaches the engine, which, was sent)
        self.line: Iterator[tuple[float, int, float]] = iter(())  # of an open one, in order
        if clients.concurrency:
            self.coming = list(zip(*(column[: self.next].tolist() for column in (there, _indices(there), self.due)), strict=True))
            heapify(self.coming)
        else:
            order = there.argsort(kind="stable")
            self.line = zip(*(memoryview(column[order]) for column in (there, _indices(there), self.due)), strict=True)
        self.head = self._next()
        self.next_s = self.head[0]

    def _next(self) -> tuple[float, int, float]:
        """Takes the one that comes next."""
        if self.coming:
            return heappop(self.coming)
        return next(self.line, NOBODY)

    def admit(self, now: float) -> list[int]:
        """The requests that have come by `now`, without those that can never fit."""
        found: list[int] = []
        while self.next_s <= now:
            at, index, sent = self.head
            self.head = self._next()
            self.next_s = self.head[0]
            self.log.arrived[index] = sent
            if self.fits[index]:
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

    def come(self, at: float, index: int, sent: float) -> None:
        """A request that was sent at some time will reach the engine at another."""
        heappush(self.coming, (at, index, sent))
        self.head = heappushpop(self.coming, self.head)
        self.next_s = self.head[0]

    def _free(self, at: float) -> None:
        """A client has its answer; one of a closed loop asks again."""
        self.done += 1
        if self.clients.concurrency and self.next < len(self.due):
            index, clients = self.next, self.clients
            self.next += 1
            sent = max(float(self.due[index]), at + clients.think_s)
            self.come(sent + clients.path_s + clients.path_s_per_token * self.inputs[index], index, sent)

    @property
    def open(self) -> bool:
        """Whether any request is still to come or to be done."""
        return self.done < len(self.due)


def _indices(like: Any) -> Any:
    import numpy as np

    return np.arange(len(like))
