"""The log-normal distribution of lengths that a mean and a 99th percentile fix."""

from math import exp, log, sqrt
from typing import NamedTuple

from kvcalc.errors import UserError

P99 = 2.3263478740408408  # z: the 99th percentile of a standard normal
MOST = exp(P99**2 / 2)  # the 99th percentile over the mean, at most


class LogNormal(NamedTuple):
    """Mean and standard deviation of the logarithm of a length."""

    mu: float
    sigma: float


def lognormal(mean: int, p99: int) -> LogNormal:
    """The distribution with this mean and 99th percentile; where they are equal, every length is the mean.

    ln(p99/mean) = z·σ − σ²/2, of which the smaller root is σ = z − √(z² − 2·ln(p99/mean)); μ = ln(mean) − σ²/2.
    Raises UserError on a percentile below the mean, or too far above it for any σ.
    """
    if not mean <= p99 <= mean * MOST:
        raise UserError(
            f"no log-normal distribution has mean {mean:,} and 99th percentile {p99:,}",
            hint=f"The percentile is at least the mean and at most {MOST:.1f} times it",
        )
    sigma = P99 - sqrt(max(0.0, P99**2 - 2 * log(p99 / mean)))
    return LogNormal(log(mean) - sigma**2 / 2, sigma)
