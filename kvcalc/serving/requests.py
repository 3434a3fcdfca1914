"""Requests of a server: read from a trace, or drawn at random.

A trace is a CSV with the columns `arrival_s, input_len, output_len`, or the columns of the public
Azure LLM inference traces, `TIMESTAMP, ContextTokens, GeneratedTokens`
(github.com/Azure/AzurePublicDataset), whose times count from the first row. Clients of a closed
loop send requests in the order of the file, so the trace needs no arrival_s.
"""

import csv
import io
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcalc.capacity.allocations import lognormal
from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.question.options import number_or_nan
from kvcalc.question.serving_options import INFERENCEX, MAX_REQUESTS, Workload
from kvcalc.serving.cache_accounting import Log, Pool
from kvcalc.timing.calibration import EngineOverheads
from kvcalc.units import parse_tokens

MAX_BYTES, MAX_SECONDS = 256 << 20, 1e12
MAX_LEN = 1 << 20  # tokens of a prompt or of an answer: the simulator keeps tables over tokens
MIN_SHARE = 0.8  # minimum share of the nominal length in InferenceX
DEFAULT_PROMPTS = 1000  # default number of requests
REQUESTS_PER_CLIENT = 10  # requests per client of a benchmark
OWN_COLUMNS = ("arrival_s", "input_len", "output_len")
AZURE_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")


@dataclass(frozen=True)
class Requests:
    """Requests that a server receives, as arrays of equal length with one element per request.

    Attributes:
        arrival_s: Time in seconds at which a client sends each request, in ascending order
            (float64).
        input_len: Prompt tokens of each request (int64).
        output_len: Answer tokens of each request (int64).
    """

    arrival_s: Any
    input_len: Any
    output_len: Any

    def __len__(self) -> int:
        return self.arrival_s.size  # type: ignore[no-any-return]

    @property
    def max_tokens(self) -> int:
        """Return an upper bound of a request's tokens: longest prompt plus longest answer."""
        return int(self.input_len.max() + self.output_len.max())

    @property
    def rate(self) -> float:
        """Return the mean number of requests per second from the first to the last arrival.

        The result is 0 if all requests arrive at the same time.
        """
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span else 0.0

    def select(self, index: Any) -> "Requests":
        """Return only the selected requests, in the order of `index`.

        Args:
            index: A slice, or an array of positions of requests.
        """
        return Requests(*(column[index] for column in vars(self).values()))


def read_requests(path: Path, max_rows: int = MAX_REQUESTS, timed: bool = True) -> Requests:
    """Return the first `max_rows` requests of a trace: a CSV file with arrivals and lengths.

    The columns are arrival_s, input_len and output_len, or TIMESTAMP, ContextTokens and
    GeneratedTokens, as in Azure's traces.

    Args:
        path: Path of the file.
        max_rows: Maximum number of requests.
        timed: Whether the trace must have arrivals. If false, missing arrivals become 0, for
            clients that wait for answers.

    Raises:
        UserError: The trace is invalid. The message names the file and the line.
    """
    text = read_text(path, MAX_BYTES)
    if not text.strip():
        raise UserError("is empty", where=str(path))
    reader = csv.reader(io.StringIO(text))
    try:
        rows = [*islice(_rows(reader, str(path), timed), max_rows)]
    except csv.Error as error:
        line = f"{path}, line {reader.line_num}"
        raise UserError(f"is not CSV: {error}", where=line) from None
    if not rows:
        raise UserError("holds no requests", where=str(path))
    arrivals, inputs, outputs = (np.array(column) for column in zip(*rows))
    return Requests(arrivals, inputs, outputs)


def _rows(reader: Any, file_name: str, timed: bool) -> Iterator[tuple[float, int, int]]:
    """Yield arrival in seconds, tokens of the prompt and tokens of the answer of each row."""
    header = [name.strip().lower() for name in next(reader)]
    has_timestamps = AZURE_COLUMNS[0] in header and OWN_COLUMNS[0] not in header
    names = AZURE_COLUMNS if has_timestamps else OWN_COLUMNS
    line = f"{file_name}, line 1"
    missing = [name for name in names if name not in header]
    if missing and (timed or missing != [OWN_COLUMNS[0]]):
        hint = (
            "A trace has arrival_s, input_len, output_len, or TIMESTAMP, ContextTokens, "
            "GeneratedTokens"
        )
        if missing == [OWN_COLUMNS[0]]:
            hint += "; without arrival_s, give the concurrent requests with --max-concurrency"
        plural = "s" * (len(missing) > 1)
        raise UserError(f"lacks the column{plural} {', '.join(missing)}", hint, line)
    for name in names:
        if header.count(name) > 1:
            raise UserError(f"names the column {name} twice", where=line)
    columns = {name: header.index(name) for name in names if name in header}
    start = None
    last = 0.0
    for row in reader:
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        line = f"{file_name}, line {reader.line_num}"
        if len(cells) <= max(columns.values()):
            raise UserError(
                f"has {len(cells)} cells, and the header names {len(header)}", where=line
            )
        first, prompt, answer = (
            cells[columns[name]] if name in columns else "0" for name in names
        )
        if has_timestamps:
            try:
                stamp = datetime.fromisoformat(first)
                start = start or stamp
                arrival = (stamp - start).total_seconds()
            except (TypeError, ValueError):
                message = f"TIMESTAMP {first!r} is not a date and time like the others"
                raise UserError(message, "Write 2023-11-16 18:17:03.979", line) from None
        else:
            arrival = number_or_nan(first)
            if not 0 <= arrival <= MAX_SECONDS:
                message = f"arrival_s {first!r} is not a number of seconds from 0 up"
                raise UserError(message, where=line)
        if arrival < last:
            message = f"arrival {first} comes before the arrival of the request above"
            raise UserError(f"{message}: the trace is not sorted", where=line)
        last = arrival
        yield arrival, _tokens("input_len", prompt, line), _tokens("output_len", answer, line)


def _tokens(name: str, text: str, line: str) -> int:
    value = number_or_nan(text)
    if not 1 <= value <= MAX_LEN or value != int(value):
        raise UserError(
            f"{name} {text!r} is not a whole number from 1 to {MAX_LEN:,}", where=line
        )
    return int(value)


def length_sampler(text: str, name: str, is_spread: bool = False) -> Callable[[Any, int], Any]:
    """Return a function that draws random prompt or answer lengths in tokens.

    The function takes a NumPy random generator and the number of lengths to draw. It returns an
    int64 array of that many lengths.

    Args:
        text: Distribution: `1000` (always 1,000 tokens), `uniform:LOW,HIGH`, or
            `lognormal:MEAN,P99` with the mean and the 99th percentile, in tokens.
        name: Name of the quantity, such as `input length`, with which an error message begins.
        is_spread: Whether a fixed length n stands for lengths drawn uniformly from 0.8 · n to n, as
            in the benchmark InferenceX.

    Raises:
        UserError: The text is not a distribution.
    """
    kind, _, numbers = text.strip().partition(":")
    if not numbers:
        high = _parse_length(text, name)
        low = max(1, int(MIN_SHARE * high)) if is_spread else high
        return partial(_draw_uniform, low, high)
    parts = numbers.split(",")
    spellings = "Write 1000, uniform:100,2000 or lognormal:MEAN,P99"
    if kind not in ("uniform", "lognormal") or len(parts) != 2:
        raise UserError(f"{name} {text!r} is no distribution of lengths", spellings)
    low, high = (_parse_length(part, name) for part in parts)
    if high < low:
        raise UserError(f"{name} {text!r}: {high:,} is below {low:,}", spellings)
    if kind == "uniform":
        return partial(_draw_uniform, low, high)
    mu, sigma = lognormal(low, high)

    def draw(rng: Any, count: int) -> Any:
        return np.clip(np.rint(rng.lognormal(mu, sigma, count)), 1, MAX_LEN).astype(np.int64)

    return draw


def _draw_uniform(low: int, high: int, rng: Any, count: int) -> Any:
    return rng.integers(low, high, size=count, endpoint=True)


def _parse_length(text: str, name: str) -> int:
    length = parse_tokens(text, name)
    if length > MAX_LEN:
        raise UserError(
            f"{name} {length:,} is more than the {MAX_LEN:,} tokens that a simulation takes"
        )
    return length


def sample_workload(load: Workload) -> Requests:
    """Return the requests of a workload, read from its trace file or drawn at random.

    Without a trace, intervals between arrivals are gamma distributed with shape `burstiness` and
    mean 1/rate, as in vLLM's benchmark. A burstiness of 1 is a Poisson process. Below 1, requests
    come in bursts; above 1, they come more regularly. Arrivals and lengths are drawn independently,
    so the same seed gives the same lengths at any rate. If the rate is infinite, all requests
    arrive at time 0.

    Args:
        load: The workload: the trace file, or rate, burstiness, lengths, number of requests and
            seed.

    Raises:
        UserError: Options contradict each other or are out of range.
    """
    is_timed = load.rate != inf
    if load.requests:
        if is_timed:
            raise UserError("requests and rate exclude each other: a trace has its own times")
        max_rows = load.num_prompts or MAX_REQUESTS
        return read_requests(Path(load.requests), max_rows, not load.max_concurrency)
    is_spread = load.client == INFERENCEX
    draw_inputs = length_sampler(load.input_len, "input length", is_spread)
    draw_outputs = length_sampler(load.output_len, "output length", is_spread)
    default = (
        REQUESTS_PER_CLIENT * load.max_concurrency if load.is_benchmark else DEFAULT_PROMPTS
    )
    count = load.num_prompts or default
    if count > MAX_REQUESTS:
        raise UserError(f"{count:,} requests are more than {MAX_REQUESTS:,}")
    arrival_rng, input_rng, output_rng = (
        np.random.default_rng([load.seed, n]) for n in range(3)
    )
    arrivals = np.zeros(count)
    if is_timed:
        scale = 1 / (load.rate * load.burstiness)
        arrivals = arrival_rng.gamma(load.burstiness, scale, count).cumsum()
    return Requests(arrivals, draw_inputs(input_rng, count), draw_outputs(output_rng, count))


class Clients(NamedTuple):
    """The clients that send requests to a simulated server.

    Attributes:
        concurrency: Number of clients. Each sends its next request only after the answer to the
            previous one. 0 means that requests come at their own times and do not wait for answers.
        think_s: Seconds from an answer to the client's next request.
        path_s: Seconds per request outside the engine that a user waits: network, HTTP, tokenising,
            and the way back of the first token.
        path_s_per_token: Seconds per request for each token of its prompt, in addition to `path_s`.
    """

    concurrency: int = 0
    think_s: float = 0.0
    path_s: float = 0.0
    path_s_per_token: float = 0.0

    def for_rank(self, rank: int, num_ranks: int) -> "Clients":
        """Return the clients that send to one data-parallel rank of the server.

        Each rank has at least 1 client. Example: 10 clients on 4 ranks give 3, 3, 2, 2. If
        `concurrency` is 0, because requests do not wait for answers, it stays 0.

        Args:
            rank: Index of the data-parallel rank.
            num_ranks: Number of ranks among which the clients are divided.
        """
        if not self.concurrency:
            return self
        clients, remainder = divmod(self.concurrency, num_ranks)
        return self._replace(concurrency=max(1, clients + (rank < remainder)))

    def with_path_of(self, engine: EngineOverheads | None) -> "Clients":
        """Return the clients with the time that requests spend in an engine's front end.

        The time, which includes the network, becomes `path_s` and `path_s_per_token`.

        Args:
            engine: Measured overheads of the engine. With None, the clients are returned unchanged.
        """
        if not engine:
            return self
        return self._replace(
            path_s=engine.path_us / 1e6, path_s_per_token=engine.path_token_us / 1e6
        )


class ArrivalQueue:
    """The requests of one data-parallel rank that have not reached its engine yet.

    They leave the queue in the order of their arrival. A request that could never fit into the
    cache is rejected when it arrives.

    Attributes:
        is_computed: Whether the prompts are already computed when the requests arrive, because a
            prefill rank did so.
        log: Log of the rank, into which the times of its requests are written.
        num_ranks: Number of data-parallel ranks that share the requests.
        inputs: Prompt tokens of each request.
        outputs: Answer tokens of each request.
        fits: Whether each request, with prompt and answer, fits into the empty cache of the rank.
        clients: Clients that send to this rank.
        due: Earliest time in seconds at which each request may be sent.
        done: Number of requests that are done or rejected.
        answers: Times in seconds at which waiting clients got their answers, in ascending order.
        coming: Heap of the requests whose arrival is known, as (arrival at the engine in seconds,
            index, time of sending in seconds).
    """

    is_computed = False
    done = 0

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
            requests: Requests of all ranks.
            pool: KV cache memory of the rank. Requests that do not fit into it are rejected.
            times: Log with the times of all requests.
            clients: Clients of all ranks together.
            rank: Index of the rank.
            num_ranks: Number of ranks that share the requests.
        """
        requests = requests.select(slice(rank, None, num_ranks))
        clients = clients.for_rank(rank, num_ranks)
        self.log = times.for_rank(rank, num_ranks)
        self.num_ranks = num_ranks
        self.inputs = requests.input_len.tolist()
        self.outputs = requests.output_len.tolist()
        self.fits = pool.fits(requests.input_len + requests.output_len - 1).tolist()
        self.clients = clients
        self.due = requests.arrival_s
        self.answers: list[float] = []
        arrivals = self.due + clients.path_s + clients.path_s_per_token * requests.input_len
        order = arrivals[: clients.concurrency or None].argsort(kind="stable")
        columns = (column.tolist() for column in (arrivals[order], order, self.due[order]))
        # heap of (arrival, index, sent); a sorted list is a heap
        self.coming = list(zip(*columns))

    def request(self, index: int) -> int:
        """Return a request's index among the requests of all data-parallel ranks.

        Each rank has every n-th request. Example: with 4 ranks, request 2 of rank 1 is request 9.

        Args:
            index: Index of the request among the requests of this rank.
        """
        return self.log.rank + index * self.num_ranks

    def admit(self, now: float) -> list[int]:
        """Return the indices of the requests that have arrived by `now` and can fit into the cache.

        They are removed from the queue. Indices count the requests of this rank. Arrived requests
        that can never fit are recorded as rejected.

        Args:
            now: Simulated time in seconds.
        """
        admitted: list[int] = []
        while self.next_s <= now:
            arrival, index, sent = heappop(self.coming)
            self.log.arrived[index] = sent
            if self.fits[index]:
                admitted.append(index)
            else:
                self.log.rejected[index] = True
                self.record_answer(arrival)
        return admitted

    @property
    def next_s(self) -> float:
        """Return the simulated time in seconds at which the next request reaches the engine.

        It is infinite if no arrival is known. If clients wait for answers, the arrival of a request
        is known once its client has its previous answer.
        """
        return self.coming[0][0] if self.coming else inf

    def record_done(self, index: int, now: float) -> None:
        """Record that a request has its last token, and that its client has the answer.

        Args:
            index: Index of the request among the requests of this rank.
            now: Simulated time in seconds at which the request is done.
        """
        self.log.finished[index] = now
        self.record_answer(now)

    def add_arrival(self, arrival: float, index: int, sent: float) -> None:
        """Add a request that will reach the engine at a known time.

        Args:
            arrival: Simulated time in seconds at which it reaches the engine.
            index: Index of the request among the requests of this rank.
            sent: Simulated time in seconds at which its client sent it.
        """
        heappush(self.coming, (arrival, index, sent))

    def record_answer(self, now: float) -> None:
        """Record that a client has an answer. If clients wait for answers, it sends a new request.

        In the order of time, the n-th answer triggers the n-th new request. Disaggregated servers
        may report a later answer first. An earlier answer is then inserted before the later
        answers, and the requests that these trigger get new arrival times.

        Args:
            now: Simulated time in seconds at which the client has the answer.
        """
        self.done += 1
        clients, position = self.clients, bisect(self.answers, now)
        if not clients.concurrency:
            return
        self.answers.insert(position, now)
        first = clients.concurrency + position
        if position + 1 < len(self.answers):
            self.coming = [request for request in self.coming if request[1] < first]
            heapify(self.coming)
        for index, end in zip(
            range(first, len(self.due)), self.answers[position:], strict=False
        ):
            sent = max(float(self.due[index]), end + clients.think_s)
            arrival = sent + clients.path_s + clients.path_s_per_token * self.inputs[index]
            self.add_arrival(arrival, index, sent)

    @property
    def is_open(self) -> bool:
        """Return whether a request of the rank is neither complete nor rejected yet."""
        return self.done < len(self.due)


def clients_of(load: Workload, engine: EngineOverheads | None) -> Clients:
    """Return the clients of a workload, for a simulation.

    Clients of a benchmark, such as InferenceX, reach the engine through network and front end. So
    their requests spend the engine's time outside its forward passes too.

    Args:
        load: The workload, which gives the number of clients, their think time and their kind.
        engine: Measured overheads of the engine; None if they are unknown, which adds no time.
    """
    clients = Clients(load.max_concurrency, load.think_time)
    return clients.with_path_of(engine) if load.is_benchmark else clients
