"""The roof: the least time that a GPU's datasheet allows an operator, and what bounds it. The one place that says so.

An operator takes at least max(matrix FLOPs/peak, vector FLOPs/vector peak, bytes/bandwidth, network bytes/link, bytes between
nodes/link between them): all at once, perfectly overlapped. A pass takes the sum over its operators, one after the other.
These are bounds, not predictions: no launch, no ramp, no efficiency.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cost import Cost, Operator
from kvcalc.units import maximum


class Roof(NamedTuple):
    """The least seconds of a cost (a float or an array), what bounds it, and what its products are computed in.

    bound: compute, memory or network ('' for arrays, which may mix them). computed_in: '' where there are no products.
    """

    seconds: Any
    bound: str
    computed_in: str


def least_time(cost: Cost, dtype: str, gpu: Gpu, memory_alone: bool = False) -> Roof:
    """A cost under the roof of `gpu`, its products in `dtype` ('' for none).

    Raises UserError where the GPU gives no peak that could serve, unless memory_alone: products are then free, and what the
    memory moves is a bound still. Vector work and network are free where it gives no rate.
    """
    computed_in = ""
    slowest: Any = cost.bytes / gpu.bandwidth_bytes_per_s
    bound = "memory"
    limits = [("compute", cost.vector_flops, gpu.vector_peak), ("network", cost.network_bytes, gpu.link)]
    limits.append(("network", cost.inter_node_bytes, gpu.outer_link))
    if dtype and (not memory_alone or gpu.computes(dtype)):
        peak, computed_in = gpu.peak(dtype)
        limits.append(("compute", cost.flops, peak))
    for name, amount, rate in limits:
        if rate and not (isinstance(amount, int | float) and amount == 0):
            seconds = amount / rate
            if isinstance(seconds, float) and isinstance(slowest, float):
                slowest, bound = (seconds, name) if seconds > slowest else (slowest, bound)
            else:
                slowest, bound = maximum(cast("Any", seconds), slowest), ""
    return Roof(slowest, bound, computed_in)


class Placed(NamedTuple):
    """An operator under a GPU's roof: seconds of all the times it runs, the rest as of `Roof`.

    fallback: the dtype whose unit stands in for one that the GPU has not, or ''.
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


def roofline(operators: Sequence[Operator], gpu: Gpu, memory_alone: bool = False) -> list[Placed]:
    """Each operator under the roof of `gpu`. Raises UserError as `least_time`, on a dtype that is needed."""
    found = []
    for operator in operators:
        seconds, bound, computed_in = least_time(operator.cost, operator.dtype, gpu, memory_alone)
        fallback = computed_in if computed_in != operator.dtype else ""
        found.append(Placed(operator, seconds * operator.count, bound, fallback))
    return found


def total_seconds(placed: Sequence[Placed]) -> Any:
    """The bound of the whole pass: Σ seconds, a float or an array."""
    return sum((p.seconds for p in placed), 0.0)


class Stack:
    """Operators under the roofs of one GPU after another, their costs side by side: `roofline` of many points at once.

    Costs stand as arrays [operators of one dtype, *points]. Every figure is what the operators alone give, to the last bit.
    """

    def __init__(self, operators: Sequence[Operator], points: tuple[int, ...]) -> None:
        import numpy as np

        places: dict[str, list[int]] = {}
        for number, operator in enumerate(operators):
            places.setdefault(operator.dtype, []).append(number)

        def stood(values: list[Any]) -> Any:
            return np.stack([np.broadcast_to(np.asarray(value, dtype=float), points) for value in values])

        self._groups = []
        for dtype, at in places.items():
            costs = [operators[i].cost for i in at]
            flops, vector = stood([c.flops for c in costs]), stood([c.vector_flops for c in costs])
            moved, sent = stood([c.bytes for c in costs]), stood([c.network_bytes for c in costs])
            crossing = stood([c.inter_node_bytes for c in costs])
            whole = Cost(flops, vector, weight_bytes=moved, network_bytes=sent, inter_node_bytes=crossing)
            self._groups.append((dtype, at, whole))
        self._shape = len(operators), *points
        self._counts = np.reshape([float(operator.count) for operator in operators], (-1, *(1 for _ in points)))

    def computes(self, gpu: Gpu) -> bool:
        """Whether the GPU has a matrix peak for every dtype that is needed."""
        return all(gpu.computes(dtype) for dtype, *_ in self._groups if dtype)

    def seconds(self, gpu: Gpu, memory_alone: bool = False) -> Any:
        """The least seconds of the pass at each point: Σ over its operators in order. Raises as `least_time`."""
        import numpy as np

        each = np.empty(self._shape)
        for dtype, at, cost in self._groups:
            each[at] = least_time(cost, dtype, gpu, memory_alone).seconds
        each *= self._counts
        if each[0].size == 1:
            return np.add.accumulate(each, axis=0)[-1]  # `reduce` would add up a lone column in pairs
        return np.add.reduce(each, axis=0)


def total_bound(placed: Sequence[Placed]) -> str:
    """What most of the pass's time is bound by."""
    by_bound: dict[str, float] = {}
    for p in placed:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds
    return max(by_bound, key=lambda b: by_bound[b])


def fallbacks(placed: Sequence[Placed], gpu: Gpu) -> str:
    """What products are computed in where the GPU lacks the unit, in words; '' where it has all that are needed."""
    swaps = dict.fromkeys((p.operator.dtype, p.fallback) for p in placed if p.fallback)
    words = [f"computed in {used}: {gpu.name} has no {asked} unit" for asked, used in swaps]
    without = dict.fromkeys(p.operator.dtype for p in placed if p.operator.dtype and not gpu.computes(p.operator.dtype))
    words += [f"bound by memory alone: {gpu.name} has no matrix peak for {', '.join(without)}"] if without else []
    return "; ".join(words)


def mla_form(placed: Sequence[Placed]) -> str | None:
    """The form in which latent attention ran: absorbed, expanded, or mixed between groups; None where there is none."""
    forms = dict.fromkeys(p.operator.form for p in placed if p.operator.form)
    return "mixed" if len(forms) > 1 else next(iter(forms), None)


MOST_BATCH = 1 << 20


def turning_batch(place: Callable[[int], Sequence[Placed]], chosen: Callable[[Operator], bool]) -> int | None:
    """The smallest batch at which the chosen operators, taken together, are compute-bound; None if never to 2^20."""

    def turned(batch_size: int) -> bool:
        found = [p for p in place(batch_size) if chosen(p.operator)]
        return bool(found) and total_bound(found) == "compute"

    if not turned(MOST_BATCH):
        return None
    low, high = 0, MOST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if turned(middle) else (middle, high)
    return high
