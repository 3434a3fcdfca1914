"""Requests drawn at random: arrival times and lengths, reproducible by seed."""

import math
from typing import Any, NamedTuple

from kvcalc.capacity.distribution import lognormal
from kvcalc.errors import UserError
from kvcalc.serving.requests import MOST_LEN, MOST_REQUESTS, Requests
from kvcalc.units import parse_tokens

SPELLINGS = "Write 1000, uniform:100,2000 or lognormal:MEAN,P99"


class Lengths(NamedTuple):
    """A distribution of lengths in tokens.

    Attributes:
        kind: `fixed` (always a), `uniform` (a to b) or `lognormal` (mean a, 99th percentile b).
    """

    kind: str
    a: int
    b: int

    def draw(self, rng: Any, count: int) -> Any:
        """Return `count` lengths of at least one token, as int64."""
        import numpy as np

        if self.kind == "fixed":
            return np.full(count, self.a, dtype=np.int64)
        if self.kind == "uniform":
            return rng.integers(self.a, self.b, size=count, endpoint=True)
        shape = lognormal(self.a, self.b)
        drawn = rng.lognormal(shape.mu, shape.sigma, count)
        return np.clip(np.rint(drawn), 1, MOST_LEN).astype(np.int64)


def parse_lengths(text: str, what: str) -> Lengths:
    """Parse `1000`, `uniform:a,b` or `lognormal:mean,p99`. Raises UserError on anything else."""
    kind, _, rest = text.strip().partition(":")
    if not rest:
        length = parse_tokens(text, what)
        return Lengths("fixed", _short(length, what), 0)
    parts = rest.split(",")
    if kind not in ("uniform", "lognormal") or len(parts) != 2:
        raise UserError(f"{what} {text!r} is no distribution of lengths", hint=SPELLINGS)
    a, b = (_short(parse_tokens(part, what), what) for part in parts)
    if b < a:
        raise UserError(f"{what} {text!r}: {b:,} is below {a:,}", hint=SPELLINGS)
    if kind == "lognormal":
        lognormal(a, b)
    return Lengths(kind, a, b)


def _short(length: int, what: str) -> int:
    if length > MOST_LEN:
        raise UserError(f"{what} {length:,} is more than the {MOST_LEN:,} tokens that a simulation takes")
    return length


def drawn_requests(
    count: int, inputs: Lengths, outputs: Lengths, rate: float = math.inf, burstiness: float = 1.0, seed: int = 0
) -> Requests:
    """Return `count` requests that arrive at `rate` per second.

    Intervals are gamma distributed with shape `burstiness` and mean 1/rate, as in vLLM's benchmark.
    A burstiness of 1 is a Poisson process. Below 1, requests come in bursts; above 1, they come more
    regularly. With an infinite rate, all requests arrive at time 0. Arrivals and lengths are drawn
    independently, so the same seed gives the same lengths at any rate.

    Raises:
        UserError: An argument is out of range.
    """
    import numpy as np

    if not 1 <= count <= MOST_REQUESTS:
        raise UserError(f"number of prompts {count} is outside 1 to {MOST_REQUESTS:,}")
    if not (1e-6 <= rate <= 1e9 or rate == math.inf):
        raise UserError(f"rate {rate:g} is outside 0.000001 to 10^9 requests per second")
    if not 1e-3 <= burstiness <= 1e6:
        raise UserError(f"burstiness {burstiness:g} is outside 0.001 to 10^6")
    if not 0 <= seed < 1 << 63:
        raise UserError(f"seed {seed} is not a whole number from 0 up")
    arrivals = np.zeros(count)
    if rate != math.inf:
        arrivals = np.random.default_rng([seed, 0]).gamma(burstiness, 1 / (rate * burstiness), count).cumsum()
    prompts, answers = (d.draw(np.random.default_rng([seed, n]), count) for n, d in ((1, inputs), (2, outputs)))
    return Requests(arrivals, prompts, answers)
