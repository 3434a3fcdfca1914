"""Arrivals of requests: when each is due, and when a client is free to send it."""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heappushpop
from typing import Any, NamedTuple

from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool
from kvcalc.serving.requests import Requests

NOBODY = (math.inf, -1, math.inf)


class Clients(NamedTuple):
    """The clients who send requests.

    Attributes:
        concurrency: Number of clients with one request at a time each; 0 for no limit.
        think_s: Seconds from an answer to the client's next request.
        path_s: Seconds before the engine sees a request: network, HTTP, tokenising, and the first
            token's way back. Users wait for them too.
        path_s_per_token: Seconds added to path_s for each token of the prompt.
    """

    concurrency: int = 0
    think_s: float = 0.0
    path_s: float = 0.0
    path_s_per_token: float = 0.0

    def share(self, rank: int, ranks: int) -> "Clients":
        """Return the clients of one rank; at least one if their number is limited.

        Example: 10 clients on 4 ranks give 3, 3, 2, 2.
        """
        whole = self.concurrency
        return self._replace(concurrency=max(1, whole // ranks + (rank < whole % ranks)) if whole else 0)


class Door:
    """Admits requests in the order in which they reach the engine.

    A request that could never fit is rejected immediately.

    Attributes:
        next_s: Time of the next request in seconds, as far as it is known. Infinite if no request
            comes before another is done.
        handed: Whether the prompts of the requests are computed already.
    """

    handed = False

    def __init__(self, requests: Requests, pool: Pool, log: Log, clients: Clients = Clients()) -> None:  # noqa: B008
        self.inputs: list[int] = requests.input_len.tolist()
        self.outputs: list[int] = requests.output_len.tolist()
        self.fits: list[bool] = pool.fits(requests.input_len + requests.output_len - 1).tolist()
        self.log, self.clients, self.done, self.in_system = log, clients, 0, 0
        self.due, self.next = (
            requests.arrival_s,
            min(clients.concurrency, len(requests)),
        )  # `next`: in a closed loop, requests sent
        there = self.due + clients.path_s + clients.path_s_per_token * requests.input_len
        self.coming: list[tuple[float, int, float]] = []  # closed loop: heap of (arrival, index, sent)
        self.line: Iterator[tuple[float, int, float]] = iter(())  # open loop: sorted by arrival
        if clients.concurrency:
            self.coming = list(zip(*(column[: self.next].tolist() for column in (there, _indices(there), self.due)), strict=True))
            heapify(self.coming)
        else:
            order = there.argsort(kind="stable")
            self.line = zip(*(memoryview(column[order]) for column in (there, _indices(there), self.due)), strict=True)
        self.head = self._next()
        self.next_s = self.head[0]

    def _next(self) -> tuple[float, int, float]:
        """Remove and return the request that arrives next."""
        if self.coming:
            return heappop(self.coming)
        return next(self.line, NOBODY)

    def admit(self, now: float) -> list[int]:
        """Return the requests that have arrived by `now`, without requests that can never fit."""
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
        """Add `seconds` to the time in the system of every admitted request."""
        self.log.in_system_s += self.in_system * seconds

    def leave(self, index: int, now: float) -> None:
        """Note that a request is done."""
        self.log.finished[index] = now
        self.in_system -= 1
        self._free(now)

    def come(self, at: float, index: int, sent: float) -> None:
        """Add a request that was sent at `sent` and reaches the engine at `at`, in seconds."""
        heappush(self.coming, (at, index, sent))
        self.head = heappushpop(self.coming, self.head)
        self.next_s = self.head[0]

    def _free(self, at: float) -> None:
        """Note that a client has its answer. A client of a closed loop sends its next request."""
        self.done += 1
        if self.clients.concurrency and self.next < len(self.due):
            index, clients = self.next, self.clients
            self.next += 1
            sent = max(float(self.due[index]), at + clients.think_s)
            self.come(sent + clients.path_s + clients.path_s_per_token * self.inputs[index], index, sent)

    @property
    def open(self) -> bool:
        """Whether any request is not yet done."""
        return self.done < len(self.due)


def _indices(like: Any) -> Any:
    import numpy as np

    return np.arange(len(like))
