"""What a router puts on one rank of a mixture of experts: rows, experts touched, tiles of so many rows.

A pair is a token on one of its k experts; the row that the expert multiplies. With T tokens, E experts over `ranks` ranks,
every rank of the group waits for the busiest, and its figures are what time laws take.

    an expert's mean    n = T·k/E, or unequal shares of T·k under a skew
    the busiest rank    n' = n·(R + √(2·ln ranks)·σ)/R, R = Σ n on a rank, σ² = R + E/ranks·Var(n): the greatest of so many
                        Gaussian draws, within what T tokens can bring; one rank is its own mean
    touched             a = 1 − (1 − n'/T)^T, of each expert
    tiles of m rows     a where n'/a ≤ m/2, else max(a, n'/m + a/2)
"""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from kvcalc.timing.law import Array
else:
    Array = Any

TILE_ROWS = (8, 16, 32, 48, 64, 128)  # the tiles that kernels take


class Load(NamedTuple):
    """What stands on the busiest rank: pairs, experts with at least one, and tiles for each of TILE_ROWS."""

    rows: Array
    touched: Array
    tiles: tuple[Array, ...]


class Routing(msgspec.Struct, frozen=True):
    """How a router spreads tokens. skew: 0 is a uniform router.

    Above 0 the loads of the experts lie on a power law of that exponent, x^−skew from 1 to 0.8·T rows (from 0.01 to 2 where
    there are no more pairs than experts), as measured tables call `power_law_1.2`: their quantiles, one an expert, scaled to
    all pairs and cut off at T.
    """

    skew: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0

    def load(self, tokens: Array, top: Array, experts: Array, ranks: Array) -> Load:
        """The load of the busiest of `ranks` ranks for `tokens` tokens of the whole group. Under a skew: one `experts` only."""
        import numpy as np

        tokens = np.asarray(tokens, float)
        if not self.skew:
            mean = tokens * top / experts
            return _loaded(tokens, mean[..., None], top, experts / ranks, ranks, mean * 0)
        count = int(np.max(experts))
        each = self._shares(tokens, top, count)
        mean = tokens * top / count
        return _loaded(tokens, each, top, count / ranks, ranks, ((each - mean[..., None]) ** 2).mean(-1))

    def _shares(self, tokens: Array, top: Array, experts: int) -> Array:
        """The mean pairs of each expert, along a last axis, in increasing order."""
        import numpy as np

        many = tokens * top > experts
        low, high = np.where(many, 1.0, 0.01), np.where(many, np.maximum(0.8 * tokens, 1.0), 2.0)
        power = 1 - self.skew if self.skew != 1 else 1e-9
        quantile = (np.arange(experts) + 0.5) / experts
        first, last = (low**power)[..., None], (high**power)[..., None]
        drawn = (first + (last - first) * quantile) ** (1 / power)
        each = drawn / drawn.sum(-1, keepdims=True) * (tokens * top)[..., None]
        rows: Array = np.minimum(each, tokens[..., None])
        return rows


BALANCED = Routing()


def _loaded(tokens: Array, each: Array, top: Array, held: Array, ranks: Array, variance: Array) -> Load:
    """each: mean pairs of experts along the last axis, of which a rank holds `held` like them; at most top·T in all."""
    import numpy as np

    mean = held * each.mean(-1)
    busiest = mean + np.sqrt(2 * np.log(ranks) * (mean + held * variance))
    factor = np.minimum(busiest, tokens * np.minimum(top, held)) / np.maximum(mean, 1e-300)
    busy = np.minimum(each * factor[..., None], tokens[..., None])
    share = np.minimum(busy / tokens[..., None], 1 - 1e-15)
    touched = -np.expm1(tokens[..., None] * np.log1p(-share))
    tiles = tuple(held * _tiles(busy, touched, m).mean(-1) for m in TILE_ROWS)
    return Load(held * busy.mean(-1), held * touched.mean(-1), tiles)


def _tiles(rows: Array, touched: Array, m: int) -> Array:
    import numpy as np

    return np.where(rows <= touched * m / 2, touched, np.maximum(touched, rows / m + touched / 2))
