"""Arrivals of requests: their clients, the queue of a server, and the options of a workload."""

import math
from heapq import heappop, heappush
from typing import NamedTuple

from kvcalc.question.serving_options import Workload
from kvcalc.serving.cache_accounting import Log, Pool
from kvcalc.serving.requests import Requests
from kvcalc.timing.calibration import EngineOverheads


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

    def for_rank(self, rank: int, num_ranks: int) -> "Clients":
        """Return the clients of one rank; at least one if their number is limited.

        Example: 10 clients on 4 ranks give 3, 3, 2, 2.
        """
        if not self.concurrency:
            return self
        clients, remainder = divmod(self.concurrency, num_ranks)
        return self._replace(concurrency=max(1, clients + (rank < remainder)))


class ArrivalQueue:
    """Admits requests in the order in which they reach the engine.

    A request that could never fit is rejected immediately.

    Attributes:
        is_computed: Whether the prompts of the requests are computed already.
        done: Number of requests that are done.
    """

    is_computed = False

    def __init__(
        self,
        requests: Requests,
        pool: Pool,
        times: Log,
        clients: Clients = Clients(),  # noqa: B008
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Queue every `num_ranks`-th request, from request `rank` on.

        Args:
            times: Log of all requests.
            clients: Clients of all requests.
        """
        requests = requests.select(slice(rank, None, num_ranks))
        clients = clients.for_rank(rank, num_ranks)
        self.log = times.for_rank(rank, num_ranks)
        self.num_ranks = num_ranks
        self.inputs: list[int] = requests.input_len.tolist()
        self.outputs: list[int] = requests.output_len.tolist()
        self.fits: list[bool] = pool.fits(requests.input_len + requests.output_len - 1).tolist()
        self.clients = clients
        self.due = requests.arrival_s
        self.done = 0
        self.sent = min(clients.concurrency, len(requests))  # requests sent in a closed loop
        arrivals = self.due + clients.path_s + clients.path_s_per_token * requests.input_len
        order = arrivals[: self.sent or None].argsort(kind="stable")
        columns = (column.tolist() for column in (arrivals[order], order, self.due[order]))
        # heap of (arrival, index, sent); a sorted list is a heap
        self.coming: list[tuple[float, int, float]] = list(zip(*columns, strict=True))

    def request(self, index: int) -> int:
        """Return the index of a request among the requests of all ranks."""
        return self.log.rank + index * self.num_ranks

    def admit(self, now: float) -> list[int]:
        """Return the requests that have arrived by `now`, without requests that can never fit."""
        admitted: list[int] = []
        while self.next_s <= now:
            arrival, index, sent = heappop(self.coming)
            self.log.arrived[index] = sent
            if self.fits[index]:
                admitted.append(index)
            else:
                self.log.rejected[index] = True
                self.answer(arrival)
        return admitted

    @property
    def next_s(self) -> float:
        """Time of the next request in seconds, as far as the simulation knows it.

        Infinite if no request comes before another request is done.
        """
        return self.coming[0][0] if self.coming else math.inf

    def leave(self, index: int, now: float) -> None:
        """Note that a request is done."""
        self.log.finished[index] = now
        self.answer(now)

    def come(self, arrival: float, index: int, sent: float) -> None:
        """Add a request that was sent at `sent` and reaches the engine at `arrival`, in seconds."""
        heappush(self.coming, (arrival, index, sent))

    def answer(self, now: float) -> None:
        """Note that a client has its answer. A client of a closed loop sends its next request."""
        self.done += 1
        index = self.sent
        clients = self.clients
        if clients.concurrency and index < len(self.due):
            self.sent += 1
            sent = max(float(self.due[index]), now + clients.think_s)
            arrival = sent + clients.path_s + clients.path_s_per_token * self.inputs[index]
            self.come(arrival, index, sent)

    @property
    def is_open(self) -> bool:
        """Whether any request is not yet done."""
        return self.done < len(self.due)


def clients_of(load: Workload, engine: EngineOverheads | None) -> Clients:
    """Return the clients, with the seconds that a request takes to reach the engine."""
    clients = Clients(load.max_concurrency, load.think_time)
    if not engine or not load.is_benchmark:
        return clients
    return clients._replace(
        path_s=engine.path_us / 1e6, path_s_per_token=engine.path_token_us / 1e6
    )
