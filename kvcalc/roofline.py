"""Operators on a GPU: intensity, what bounds each, and the least time the datasheet allows.

An operator takes at least max(matrix FLOPs/peak, vector FLOPs/vector peak, bytes/bandwidth, network bytes/link): all four
at once, perfectly overlapped. A pass takes the sum over its operators, one after the other. These are bounds, not
predictions: no launch, no ramp, no efficiency.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from kvcalc.cost import Operator
from kvcalc.gpu import Gpu
from kvcalc.units import maximum


class Placed(NamedTuple):
    """An operator under a GPU's roof.

    seconds: of all the times it runs. bound: compute, memory or network ('' for arrays, which may mix them). fallback: the
    dtype whose unit stands in for one that the GPU has not, or ''.
    """

    operator: Operator
    seconds: Any
    bound: str
    fallback: str

    @property
    def intensity(self) -> Any:
        """Matrix FLOPs per byte of memory traffic; None where nothing moves."""
        moved = self.operator.cost.bytes
        return None if isinstance(moved, int | float) and not moved else self.operator.cost.flops / moved


def roofline(operators: Sequence[Operator], gpu: Gpu) -> list[Placed]:
    """Each operator under the roof of `gpu`. Raises UserError where the GPU gives no peak for a dtype that is needed."""
    return [_placed(operator, gpu) for operator in operators]


def total_seconds(placed: Sequence[Placed]) -> Any:
    """The bound of the whole pass: Σ seconds, a float or an array."""
    return sum((p.seconds for p in placed), 0.0)


def total_bound(placed: Sequence[Placed]) -> str:
    """What most of the pass's time is bound by."""
    by_bound: dict[str, float] = {}
    for p in placed:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds
    return max(by_bound, key=lambda b: by_bound[b])


def _placed(operator: Operator, gpu: Gpu) -> Placed:
    cost, used = operator.cost, ""
    slowest: Any = cost.bytes / gpu.bandwidth_bytes_per_s
    bound = "memory"
    limits = [("compute", cost.vector_flops, gpu.vector_peak), ("network", cost.network_bytes, gpu.link)]
    if operator.dtype:
        peak, used = gpu.peak(operator.dtype)
        limits.append(("compute", cost.flops, peak))
    for name, amount, rate in limits:
        if rate and not (isinstance(amount, int | float) and amount == 0):
            seconds = amount / rate
            if isinstance(seconds, float) and isinstance(slowest, float):
                slowest, bound = (seconds, name) if seconds > slowest else (slowest, bound)
            else:
                slowest, bound = maximum(cast("Any", seconds), slowest), ""
    return Placed(operator, slowest * operator.count, bound, used if used != operator.dtype else "")
