"""Arrivals of requests: their clients, the queue of a server, and the options of a workload."""

import math
from collections import deque
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.choices import spelled
from kvcalc.serving.cache_accounting import Log, Pool
from kvcalc.serving.decoding import RunningRequest
from kvcalc.serving.requests import (
    MAX_REQUESTS,
    Requests,
    number_or_nan,
    parse_lengths,
    read_requests,
    sample_requests,
)
from kvcalc.timing.calibration import EngineOverheads
from kvcalc.units import parse_seconds


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
        log: Log,
        clients: Clients = Clients(),  # noqa: B008
    ) -> None:
        self.inputs: list[int] = requests.input_len.tolist()
        self.outputs: list[int] = requests.output_len.tolist()
        self.fits: list[bool] = pool.fits(requests.input_len + requests.output_len - 1).tolist()
        self.log = log
        self.clients = clients
        self.due = requests.arrival_s
        self.done = 0
        self.sent = min(clients.concurrency, len(requests))  # requests sent in a closed loop
        arrivals = self.due + clients.path_s + clients.path_s_per_token * requests.input_len
        order = arrivals[: self.sent or None].argsort(kind="stable")
        columns = (column.tolist() for column in (arrivals[order], order, self.due[order]))
        # heap of (arrival, index, sent); a sorted list is a heap
        self.coming: list[tuple[float, int, float]] = list(zip(*columns, strict=True))

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


class WaitingRequests:
    """Requests that are not admitted; preempted requests are before all others.

    Attributes:
        arrived: Requests in the order of their arrival.
        preempted: Preempted requests; the next one is the last.
    """

    def __init__(self, queue: ArrivalQueue) -> None:
        self.queue = queue
        self.arrived: deque[int] = deque()
        self.preempted: list[RunningRequest] = []
        self._first: RunningRequest | None = (
            None  # the first that arrived, once it was returned
        )

    def __len__(self) -> int:
        return len(self.arrived) + len(self.preempted)

    def head(self) -> RunningRequest:
        """Return the next request.

        A new request has its whole prompt to be processed, or its whole prompt cached and one token
        generated.
        """
        if self.preempted:
            return self.preempted[-1]
        if self._first is None:
            index = self.arrived[0]
            prompt = self.queue.inputs[index]
            self._first = RunningRequest(index, prompt)
            if self.queue.is_computed:
                self._first = RunningRequest(
                    index, prompt + 1, cached=prompt, generated=1, is_computed=True
                )
        return self._first

    def pop(self) -> None:
        """Remove the next request."""
        if self.preempted:
            self.preempted.pop()
        else:
            self.arrived.popleft()
            self._first = None

    def tokens(self, enough: float) -> int:
        """Return the prompt tokens that wait, or a number of at least `enough`."""
        tokens = sum(request.target - request.cached for request in self.preempted)
        for index in self.arrived:
            if tokens >= enough:
                break
            tokens += self.queue.inputs[index]
        return tokens


OPEN, CLOSED, INFERENCEX, AIPERF = KINDS = ("open", "closed", "inferencex", "aiperf")
DEFAULT_PROMPTS, ROUNDS = (
    1000,
    10,
)  # default number of requests; requests per client of a benchmark


def parse_rate(text: str, what: str) -> float:
    """Parse requests per second; `inf` sends all requests at time 0.

    Raises:
        UserError: The text is not a number above 0.
    """
    value = number_or_nan(text)
    if not value > 0:
        raise UserError(f"{what} {text!r} is not a number of requests per second above 0")
    return value


def parse_hit_rate(text: str | float, what: str) -> float:
    """Parse a share of a prompt. Raises UserError unless it is a number from 0 to 1."""
    value = number_or_nan(text)
    if not 0 <= value <= 1:
        raise UserError(
            f"{what} {str(text).strip()} is not between 0 and 1",
            hint="Write 0.9 for 90 %, or 0,0.5,0.9",
        )
    return value


def seconds_or_none(text: str | float, what: str) -> float:
    """Parse seconds as `parse_seconds`; 0 and '' mean no time. Raises UserError."""
    word = str(text).strip()
    return 0.0 if word in ("", "0", "0.0") else parse_seconds(word, what)


def check_range(name: str, value: float, low: int, high: int) -> None:
    """Check that an option is from `low` to `high`. Raises UserError otherwise."""
    if not low <= value <= high:
        raise UserError(f"{spelled(name)} {value} is outside {low} to {high:,}")


class Workload(msgspec.Struct, frozen=True):
    """The requests of a server: a trace, or requests drawn at a rate.

    Benchmark clients send prompts through the engine's front end, so its time counts for users.
    Warm-up requests come before.

    Attributes:
        requests: File of a trace; '' draws requests.
        rate: Requests per second. If infinite, all requests arrive at time 0.
        max_concurrency: Clients in a closed loop; 0 for an open loop.
        num_prompts: Number of requests; 0 for 1000, or for all requests of a trace.
        client: '' to derive the client from the other options, `open`, `closed`, `inferencex` or
            `aiperf`. `inferencex` sends 10 prompts per client, the next when an answer comes,
            with lengths uniform from 0.8 of the nominal length, without a prefix cache. `aiperf`
            does the same with the given lengths.
        think_time: Seconds from an answer to a client's next request.
        prefix_hit_rate: Share of each prompt that a prefix cache stores already. All prompts begin
            with one prefix, which is stored once.
    """

    requests: str = ""
    rate: Annotated[float, parse_rate] = math.inf
    burstiness: float = 1.0
    max_concurrency: int = 0
    num_prompts: int = 0
    input_len: Annotated[str, lambda text, what: text] = "1000"
    output_len: Annotated[str, lambda text, what: text] = "200"
    seed: int = 0
    client: str = ""
    think_time: Annotated[float, seconds_or_none] = 0.0
    prefix_hit_rate: Annotated[float, parse_hit_rate] = 0.0

    def __post_init__(self) -> None:
        if self.client and self.client not in KINDS:
            raise UserError(
                f"unknown client {self.client!r}",
                hint=nearest(self.client, KINDS) or f"Known: {', '.join(KINDS)}",
            )
        parse_hit_rate(self.prefix_hit_rate, "prefix-hit-rate")
        check_range("think_time", self.think_time, 0, 10**9)
        if self.client == OPEN and self.max_concurrency:
            raise UserError(
                "client open has no max-concurrency",
                hint="A closed loop has: --client closed",
            )
        if self.client not in ("", OPEN) and not self.max_concurrency:
            raise UserError(
                f"client {self.client} needs max-concurrency: the number of concurrent requests"
            )
        if self.think_time and not self.max_concurrency:
            raise UserError("think-time is of clients in a closed loop: give max-concurrency")
        if self.is_benchmark and (self.requests or self.rate != math.inf):
            raise UserError(
                f"client {self.client} sends its own requests, without a trace and without a rate"
            )

    @property
    def kind(self) -> str:
        """Name of the client."""
        return self.client or (CLOSED if self.max_concurrency else OPEN)

    @property
    def is_open(self) -> bool:
        """Whether requests arrive over time, independently of the server."""
        return not self.max_concurrency and (bool(self.requests) or self.rate != math.inf)

    @property
    def is_benchmark(self) -> bool:
        """Whether the client is a benchmark that sends its own requests."""
        return self.client in (INFERENCEX, AIPERF)

    def clients(self, engine: EngineOverheads | None) -> Clients:
        """Return the clients, with the seconds that a request takes to reach the engine."""
        clients = Clients(self.max_concurrency, self.think_time)
        if not engine or not self.is_benchmark:
            return clients
        return clients._replace(
            path_s=engine.path_us / 1e6, path_s_per_token=engine.path_token_us / 1e6
        )

    def sample(self) -> Requests:
        """Return the requests, read from a trace or drawn.

        Raises:
            UserError: Options contradict each other or are out of range.
        """
        for name in ("num_prompts", "max_concurrency"):
            check_range(name, getattr(self, name), 0, MAX_REQUESTS)
        if self.requests:
            if self.rate != math.inf:
                raise UserError(
                    "requests and rate exclude each other: a trace has its own times"
                )
            max_rows = self.num_prompts or MAX_REQUESTS
            return read_requests(Path(self.requests), max_rows, not self.max_concurrency)
        inputs = parse_lengths(self.input_len, "input length")
        outputs = parse_lengths(self.output_len, "output length")
        if self.client == INFERENCEX:
            inputs, outputs = inputs.spread(), outputs.spread()
        default = ROUNDS * self.max_concurrency if self.is_benchmark else DEFAULT_PROMPTS
        return sample_requests(
            self.num_prompts or default,
            inputs,
            outputs,
            self.rate,
            self.burstiness,
            self.seed,
        )
