"""Requests of a server: read from a trace, or drawn at random.

A trace is a CSV with the columns `arrival_s, input_len, output_len`, or the columns of the public
Azure LLM inference traces, `TIMESTAMP, ContextTokens, GeneratedTokens`
(github.com/Azure/AzurePublicDataset), whose times count from the first row. Clients of a closed
loop send requests in their order, so their trace needs no arrival_s.
"""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcalc.capacity.allocations import lognormal
from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.question.options import number_or_nan
from kvcalc.question.serving_options import MAX_REQUESTS
from kvcalc.units import parse_tokens

MAX_BYTES, MAX_SECONDS = 256 << 20, 1e12
MAX_LEN = 1 << 20  # tokens of a prompt or of an answer: the simulator keeps tables over tokens
MIN_SHARE = 0.8  # minimum share of the nominal length in InferenceX
PLAIN = ("arrival_s", "input_len", "output_len")
AZURE = ("timestamp", "contexttokens", "generatedtokens")


@dataclass(frozen=True)
class Requests:
    """Requests as arrays of one length.

    Attributes:
        arrival_s: Seconds of arrival, sorted (float64).
        input_len: Tokens of the prompts (int64).
        output_len: Tokens of the answers (int64).
    """

    arrival_s: Any
    input_len: Any
    output_len: Any

    def __len__(self) -> int:
        return self.arrival_s.size  # type: ignore[no-any-return]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt and of the longest answer together."""
        return int(self.input_len.max() + self.output_len.max())

    @property
    def rate(self) -> float:
        """Arrivals per second, from the first to the last; 0 if they all come at the same time."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span else 0.0

    def select(self, index: Any) -> "Requests":
        """Return the requests of a slice, or of an array of indices."""
        return Requests(*(column[index] for column in vars(self).values()))

    def for_rank(self, rank: int, num_ranks: int) -> "Requests":
        """Return every `num_ranks`-th request: the requests of one rank."""
        return self.select(slice(rank, None, num_ranks))


def read_requests(path: Path, max_rows: int = MAX_REQUESTS, timed: bool = True) -> Requests:
    """Return the first `max_rows` requests of a trace.

    Args:
        timed: Whether arrivals are required. Otherwise missing arrivals are 0.

    Raises:
        UserError: The trace is wrong. The error names the file and the line.
    """
    rows = [*islice(_rows(read_text(path, MAX_BYTES), str(path), timed), max_rows)]
    if not rows:
        raise UserError("holds no requests", str(path))
    arrivals, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrivals, inputs, outputs)


def _rows(text: str, where: str, timed: bool) -> Iterator[tuple[float, int, int]]:
    """Yield arrival in seconds, tokens of the prompt and tokens of the answer of each row."""
    if not text.strip():
        raise UserError("is empty", where)
    reader = csv.reader(io.StringIO(text))
    start = None
    last = 0.0
    try:
        header = [name.strip().lower() for name in next(reader)]
        has_timestamps = AZURE[0] in header and PLAIN[0] not in header
        names = AZURE if has_timestamps else PLAIN
        _check_columns(header, names, f"{where}, line 1", timed)
        columns = {name: header.index(name) for name in names if name in header}
        min_cells = 1 + max(columns.values())
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            line = f"{where}, line {reader.line_num}"
            if len(cells) < min_cells:
                raise UserError(
                    f"has {len(cells)} cells, and the header names {len(header)}", line
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
                    what = f"TIMESTAMP {first!r} is not a date and time like the others"
                    raise UserError(what, line, "Write 2023-11-16 18:17:03.979") from None
            else:
                arrival = number_or_nan(first)
                if not 0 <= arrival <= MAX_SECONDS:
                    raise UserError(
                        f"arrival_s {first!r} is not a number of seconds from 0 up",
                        line,
                    )
            if arrival < last:
                raise UserError(
                    f"arrival {first} comes before that of the request above: the trace is not "
                    "sorted",
                    line,
                )
            last = arrival
            yield (
                arrival,
                _tokens("input_len", prompt, line),
                _tokens("output_len", answer, line),
            )
    except csv.Error as error:
        raise UserError(f"is not CSV: {error}", f"{where}, line {reader.line_num}") from None


def _check_columns(header: Sequence[str], names: Sequence[str], line: str, timed: bool) -> None:
    """Check that a header has the columns once. Raises UserError otherwise."""
    missing = [name for name in names if name not in header]
    if missing and (timed or missing != [PLAIN[0]]):
        hint = (
            "A trace has arrival_s, input_len, output_len, or TIMESTAMP, ContextTokens, "
            "GeneratedTokens"
        )
        if missing == [PLAIN[0]]:
            hint += "; without arrival_s, give the concurrent requests with --max-concurrency"
        plural = "s" * (len(missing) > 1)
        raise UserError(f"lacks the column{plural} {', '.join(missing)}", line, hint)
    for name in names:
        if header.count(name) > 1:
            raise UserError(f"names the column {name} twice", line)


def _tokens(name: str, text: str, line: str) -> int:
    value = number_or_nan(text)
    if not 1 <= value <= MAX_LEN or value != int(value):
        raise UserError(f"{name} {text!r} is not a whole number from 1 to {MAX_LEN:,}", line)
    return int(value)


SPELLINGS = "Write 1000, uniform:100,2000 or lognormal:MEAN,P99"


class LengthDistribution(NamedTuple):
    """A distribution of lengths in tokens.

    Attributes:
        kind: `fixed` (always a), `uniform` (a to b) or `lognormal` (mean a, 99th percentile b).
    """

    kind: str
    a: int
    b: int

    def draw(self, rng: Any, count: int) -> Any:
        """Return `count` lengths of at least one token, as int64."""
        if self.kind == "fixed":
            return np.full(count, self.a, dtype=np.int64)
        if self.kind == "uniform":
            return rng.integers(self.a, self.b, size=count, endpoint=True)
        shape = lognormal(self.a, self.b)
        drawn = rng.lognormal(shape.mu, shape.sigma, count)
        return np.clip(np.rint(drawn), 1, MAX_LEN).astype(np.int64)

    def spread(self) -> "LengthDistribution":
        """Return a fixed length as the uniform distribution that InferenceX draws; others
        unchanged."""
        if self.kind != "fixed":
            return self
        return LengthDistribution("uniform", max(1, int(MIN_SHARE * self.a)), self.a)


def parse_lengths(text: str, what: str) -> LengthDistribution:
    """Parse `1000`, `uniform:a,b` or `lognormal:mean,p99`. Raises UserError on anything else."""
    kind, _, rest = text.strip().partition(":")
    if not rest:
        length = parse_tokens(text, what)
        return LengthDistribution("fixed", _short(length, what), 0)
    parts = rest.split(",")
    if kind not in ("uniform", "lognormal") or len(parts) != 2:
        raise UserError(f"{what} {text!r} is no distribution of lengths", hint=SPELLINGS)
    a, b = (_short(parse_tokens(part, what), what) for part in parts)
    if b < a:
        raise UserError(f"{what} {text!r}: {b:,} is below {a:,}", hint=SPELLINGS)
    if kind == "lognormal":
        lognormal(a, b)
    return LengthDistribution(kind, a, b)


def _short(length: int, what: str) -> int:
    if length > MAX_LEN:
        raise UserError(
            f"{what} {length:,} is more than the {MAX_LEN:,} tokens that a simulation takes"
        )
    return length


def sample_requests(
    count: int,
    inputs: LengthDistribution,
    outputs: LengthDistribution,
    rate: float = math.inf,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Requests:
    """Return `count` requests that arrive at `rate` per second.

    Intervals are gamma distributed with shape `burstiness` and mean 1/rate, as in vLLM's benchmark.
    A burstiness of 1 is a Poisson process. Below 1, requests come in bursts; above 1, they come
    more regularly. With an infinite rate, all requests arrive at time 0. Arrivals and lengths are
    drawn independently, so the same seed gives the same lengths at any rate.

    Raises:
        UserError: An argument is out of range.
    """
    if not 1 <= count <= MAX_REQUESTS:
        raise UserError(f"number of prompts {count} is outside 1 to {MAX_REQUESTS:,}")
    if not (1e-6 <= rate <= 1e9 or rate == math.inf):
        raise UserError(f"rate {rate:g} is outside 0.000001 to 10^9 requests per second")
    if not 1e-3 <= burstiness <= 1e6:
        raise UserError(f"burstiness {burstiness:g} is outside 0.001 to 10^6")
    if not 0 <= seed < 1 << 63:
        raise UserError(f"seed {seed} is not a whole number from 0 up")
    arrival_rng, input_rng, output_rng = (np.random.default_rng([seed, n]) for n in range(3))
    arrivals = np.zeros(count)
    if rate != math.inf:
        arrivals = arrival_rng.gamma(burstiness, 1 / (rate * burstiness), count).cumsum()
    return Requests(arrivals, inputs.draw(input_rng, count), outputs.draw(output_rng, count))
