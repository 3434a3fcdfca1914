"""The Pareto front of latency against throughput: points of which no other is both as fast and as productive.

Kept while blocks go by; ties keep the first.
"""

from typing import Any


class Front:
    """Points (x, y) with the least x and the greatest y; each stands for something. xs increase, and with them ys."""

    def __init__(self) -> None:
        import numpy as np

        self.xs, self.ys = np.empty(0), np.empty(0)
        self.what: list[Any] = []

    def take(self, xs: Any, ys: Any, what: Any) -> None:
        """Points as arrays, NaN for none; `what` of their places is asked for those that stay alone."""
        import numpy as np

        known = np.isfinite(xs) & np.isfinite(ys)
        if len(self.xs):
            at = np.searchsorted(self.xs, xs, side="right")
            known &= (at == 0) | (ys > self.ys[np.maximum(at, 1) - 1])
        fresh = np.flatnonzero(known)
        if not fresh.size:
            return
        all_x, all_y = np.concatenate([self.xs, xs[fresh]]), np.concatenate([self.ys, ys[fresh]])
        order = np.lexsort((-all_y, all_x))
        before = np.concatenate([[-np.inf], np.maximum.accumulate(all_y[order])[:-1]])
        kept = order[all_y[order] > before]
        old = len(self.what)
        added = iter(what(fresh[kept[kept >= old] - old]))
        self.what = [self.what[i] if i < old else next(added) for i in kept]
        self.xs, self.ys = all_x[kept], all_y[kept]

    def holds(self, x: float, y: float) -> bool:
        """Whether that point is on the front."""
        return bool(((self.xs == x) & (self.ys == y)).any())


def knees(xs: Any, ys: Any, most: int = 3) -> list[int]:
    """The places of a front's ends, and between them of the points that stand out most from a straight line between them.

    On logarithmic axes, as they are drawn. After Satopää et al. 2011, "Finding a Kneedle in a Haystack", without its smoothing.
    """
    import numpy as np

    if len(xs) <= 2:
        return list(range(len(xs)))
    across, up = np.log(xs / xs[0]) / np.log(xs[-1] / xs[0]), np.log(ys / ys[0]) / np.log(ys[-1] / ys[0])
    far = up - across
    inner = [i for i in range(1, len(xs) - 1) if far[i] >= far[i - 1] and far[i] > far[i + 1] and far[i] > 0]
    best = sorted(inner, key=lambda i: -far[i])[: max(0, most - 2) or 1]
    return sorted({0, *best, len(xs) - 1})
