"""The load of a server: requests of a trace or drawn requests, and the clients who send them."""

import math
from pathlib import Path
from typing import Annotated

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.words import spelled
from kvcalc.serving.door import Clients
from kvcalc.serving.draw import Lengths, drawn_requests, parse_lengths
from kvcalc.serving.requests import MOST_REQUESTS, Requests, read_requests
from kvcalc.timing.engine import Engine
from kvcalc.units import parse_seconds

OPEN, CLOSED, INFERENCEX, AIPERF = KINDS = ("open", "closed", "inferencex", "aiperf")
DEFAULT_PROMPTS, ROUNDS = 1000, 10  # default number of requests; requests per client of a benchmark
SHORTEST = 0.8  # minimum share of the nominal length in InferenceX


def parse_rate(text: str, what: str) -> float:
    """Parse requests per second; `inf` sends all requests at time 0.

    Raises:
        UserError: The text is not a number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UserError(f"{what} {text!r} is not a number of requests per second above 0")
    return value


def parse_hit_rate(text: str | float, what: str) -> float:
    """Parse a share of a prompt. Raises UserError unless it is a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(f"{what} {str(text).strip()} is not between 0 and 1", hint="Write 0.9 for 90 %, or 0,0.5,0.9")
    return value


def seconds_or_none(text: str | float, what: str) -> float:
    """Parse seconds as `parse_seconds`; 0 and '' mean no time. Raises UserError."""
    word = str(text).strip()
    if word in ("", "0", "0.0"):
        return 0.0
    return parse_seconds(word, what)


def within(name: str, value: float, least: int, most: int) -> None:
    """Check that an option is from `least` to `most`. Raises UserError otherwise."""
    if not least <= value <= most:
        raise UserError(f"{spelled(name)} {value} is outside {least} to {most:,}")


class Load(msgspec.Struct, frozen=True):
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
            raise UserError(f"unknown client {self.client!r}", hint=nearest(self.client, KINDS) or f"Known: {', '.join(KINDS)}")
        parse_hit_rate(self.prefix_hit_rate, "prefix-hit-rate")
        within("think_time", self.think_time, 0, 10**9)
        if self.client == OPEN and self.max_concurrency:
            raise UserError("client open has no max-concurrency", hint="A closed loop has: --client closed")
        if self.client not in ("", OPEN) and not self.max_concurrency:
            raise UserError(f"client {self.client} needs max-concurrency: how many ask at once")
        if self.think_time and not self.max_concurrency:
            raise UserError("think-time is of clients in a closed loop: give max-concurrency")
        if self.client in (INFERENCEX, AIPERF) and (self.requests or self.rate != math.inf):
            raise UserError(f"client {self.client} sends its own requests, without a trace and without a rate")

    @property
    def kind(self) -> str:
        """Name of the client."""
        return self.client or (CLOSED if self.max_concurrency else OPEN)

    @property
    def is_open(self) -> bool:
        """Whether requests arrive over time, independently of the server."""
        return not self.max_concurrency and (bool(self.requests) or self.rate != math.inf)

    def clients(self, engine: Engine | None) -> Clients:
        """Return the clients, with the seconds that a request takes to reach the engine."""
        path = (
            (engine.path_us / 1e6, engine.path_token_us / 1e6) if engine and self.client in (INFERENCEX, AIPERF) else (0.0, 0.0)
        )
        return Clients(self.max_concurrency, self.think_time, *path)

    def drawn(self) -> Requests:
        """Return the requests, read from a trace or drawn.

        Raises:
            UserError: Options contradict each other or are out of range.
        """
        for name in ("num_prompts", "max_concurrency"):
            within(name, getattr(self, name), 0, MOST_REQUESTS)
        if self.requests:
            if self.rate != math.inf:
                raise UserError("requests and rate exclude each other: a trace has its own times")
            return read_requests(Path(self.requests), self.num_prompts or MOST_REQUESTS, timed=not self.max_concurrency)
        inputs, outputs = parse_lengths(self.input_len, "input length"), parse_lengths(self.output_len, "output length")
        count = self.num_prompts or DEFAULT_PROMPTS
        if self.client in (INFERENCEX, AIPERF):
            count = self.num_prompts or ROUNDS * self.max_concurrency
        if self.client == INFERENCEX:
            inputs, outputs = _spread(inputs), _spread(outputs)
        return drawn_requests(count, inputs, outputs, self.rate, self.burstiness, self.seed)


def _spread(lengths: Lengths) -> Lengths:
    """Return a fixed length as the distribution that InferenceX draws; return others unchanged."""
    return Lengths("uniform", max(1, int(SHORTEST * lengths.a)), lengths.a) if lengths.kind == "fixed" else lengths
