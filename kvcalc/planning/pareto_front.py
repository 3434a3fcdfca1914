"""The best candidates of a search: groups, the Pareto front and the closest misses."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from kvcalc.planning.candidate_times import Array
from kvcalc.planning.grid import Candidate, CandidateBatch, Target
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes, format_seconds


def first_of_groups(groups: Array, *keys: Array, count: int = 1) -> Array:
    """Return the indices of the first elements of each group, in ascending order of the keys."""
    import numpy as np

    order = np.lexsort((*reversed(keys), groups))
    ordered = groups[order]
    return order[np.arange(len(order)) - np.searchsorted(ordered, ordered) < count]


class ParetoFront:
    """The points with no other point of smaller x and larger y. If points are equal, the first
    stays.

    Attributes:
        xs: In ascending order; the ys ascend too.
        items: The candidate of each point.
    """

    def __init__(self) -> None:
        import numpy as np

        self.xs: Array = np.empty(0)
        self.ys: Array = np.empty(0)
        self.items: list[Any] = []

    def add(self, xs: Array, ys: Array, items: Callable[[Array], Sequence[Any]]) -> None:
        """Add points; NaN marks no point.

        Args:
            items: Returns the items of some of the new points, from their indices.
        """
        import numpy as np

        new = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
        all_xs = np.concatenate([self.xs, xs[new]])
        all_ys = np.concatenate([self.ys, ys[new]])
        order = np.lexsort((-all_ys, all_xs))
        highest = np.maximum.accumulate(np.concatenate([[-np.inf], all_ys[order]]))
        front = order[all_ys[order] > highest[:-1]]
        num_old = len(self.items)
        new_items = iter(items(new[front[front >= num_old] - num_old]))
        self.items = [self.items[i] if i < num_old else next(new_items) for i in front.tolist()]
        self.xs, self.ys = all_xs[front], all_ys[front]

    def contains(self, x: float, y: float) -> bool:
        """Return whether a point is on the front."""
        return bool(((self.xs == x) & (self.ys == y)).any())


def knees(xs: Array, ys: Array) -> list[int]:
    """Return the indices of a front's ends, and of the point that is farthest above the line between
    them.

    The axes are logarithmic, as in the chart. Source: Satopää et al. 2011, "Finding a Kneedle in a
    Haystack", without its smoothing.
    """
    import numpy as np

    if len(xs) <= 2:
        return list(range(len(xs)))
    heights = np.log(ys / ys[0]) / np.log(ys[-1] / ys[0])
    heights -= np.log(xs / xs[0]) / np.log(xs[-1] / xs[0])
    highest = int(np.argmax(heights))
    return [0, *([highest] if heights[highest] > 0 else []), len(xs) - 1]


def reason(candidate: Candidate) -> str | None:
    """Return the first missed target with both figures; None if all are met."""
    need, total = candidate.need, candidate.total_tokens_per_s or 0.0
    about = {"bound": "at least ", "scaled": "about "}.get(candidate.deployment.time_basis, "")
    ttft, tpot = (format_seconds(time or 0.0) for time in (candidate.ttft, candidate.tpot))
    replica = " per replica" if candidate.replicas > 1 else ""
    memory = f"{candidate.capacity:,} of {candidate.max_num_seqs:,} requests{replica} fit"
    if candidate.remaining_bytes < 0:
        memory = f"the model exceeds memory by {format_bytes(-candidate.remaining_bytes)}"
    texts = {
        Target.MEMORY: memory,
        Target.UNKNOWN: "TTFT is unknown, because the GPU has no matrix peak",
        Target.TTFT: f"TTFT {about}{ttft}, target {format_seconds(need.max_ttft)}",
        Target.TPOT: f"TPOT {about}{tpot}, target {format_seconds(need.max_tpot)}",
        Target.THROUGHPUT: f"{total:,.0f} tokens/s, target {need.min_throughput:,.0f}",
        Target.GPUS: f"the load needs {candidate.gpus:,} GPUs",
    }
    return texts.get(Target(candidate.violated_target))


class ClosestMisses:
    """The failing candidates that miss their targets by the smallest factor.

    There is one for each GPU model and total number of GPUs. A candidate is left out if fewer GPUs
    of its model miss the targets by less.

    Attributes:
        factors: Smallest violation factor [GPU models, total GPUs]; infinite if there is none.
            Candidates with too many GPUs share the last column.
    """

    def __init__(self, num_models: int, max_gpus: int) -> None:
        import numpy as np

        shape = num_models, max_gpus + 2
        self.factors = np.full(shape, np.inf)
        self._orders = np.zeros(shape, dtype=np.int64)
        self._candidates: Array = np.empty(shape, dtype=object)

    def add(self, batch: CandidateBatch, is_failing: Array, rows: Array, orders: Array) -> None:
        """Add the failing candidates of a batch.

        Args:
            rows: GPU model of each candidate.
            orders: Order among candidates with equal factors.
        """
        import numpy as np

        width = self.factors.shape[1]
        totals = np.minimum(batch.figures["gpus"], width - 1)
        factors = batch.figures["violation_factor"]
        smallest = np.minimum.accumulate(self.factors, axis=1)[rows, totals]
        close = np.flatnonzero(is_failing & (factors <= smallest))
        cells = (rows * width + totals)[close]
        close = close[first_of_groups(cells, factors[close], orders[close])]
        cell = rows[close], totals[close]
        is_closer = factors[close] < self.factors[cell]
        close = close[is_closer | (orders[close] < self._orders[cell])]
        cell = rows[close], totals[close]
        self.factors[cell] = factors[close]
        self._orders[cell] = orders[close]
        for row, total, candidate in zip(*cell, batch.candidates(close), strict=True):
            self._candidates[row, total] = candidate

    def closest(self, costs: Array, limit: float = float("inf")) -> Candidate | None:
        """Return the closest candidate that costs less than a limit.

        If several are equally close, return the most expensive one below a limit, or the cheapest
        one without a limit.

        Args:
            costs: By GPU model and total GPUs [GPU models, total GPUs].
        """
        import numpy as np

        rows, totals = np.nonzero(np.isfinite(self.factors) & (costs < limit))
        if not len(rows):
            return None
        sign = 1 if limit == np.inf else -1
        first = np.lexsort((sign * costs[rows, totals], self.factors[rows, totals]))[0]
        return cast("Candidate", self._candidates[rows[first], totals[first]])


def split_order(batch: CandidateBatch) -> Array:
    """Return the order among equal candidates: smallest number of GPUs per replica, largest tensor
    parallelism, then dp and ep."""
    import numpy as np

    def order(deployment: TimedDeployment) -> int:
        ranks = deployment.parallelism
        return (((ranks.gpus << 13) - ranks.tp << 13) + ranks.dp << 13) + ranks.ep

    return np.array([order(deployment) for deployment in batch.deployments])[batch.index]
