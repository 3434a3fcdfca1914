"""Roofline bounds: the minimum time of an operator on a GPU, and the resource that limits it.

The bound of an operator is max(matrix FLOPs ÷ matrix peak, vector FLOPs ÷ vector peak, bytes ÷
bandwidth, network bytes ÷ link rate, bytes between nodes ÷ rate between nodes). It assumes that
everything overlaps perfectly. The bound of a pass is the sum over its operators. A bound is not a
prediction: it has no launch times, no ramps and no efficiency factors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from kvcalc.arithmetic import maximum
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.cost import Cost, Operator


class Roof(NamedTuple):
    """The bound of one cost.

    Attributes:
        seconds: Minimum seconds, a float or an array.
        bound: Limiting resource: compute, memory or network; '' for arrays, which may mix them.
        computed_in: dtype of the matrix products; '' without products.
    """

    seconds: Any
    bound: str
    computed_in: str


def least_time(cost: Cost, dtype: str, gpu: "Gpu | Roofs", memory_alone: bool = False) -> Roof:
    """Return the bound of a cost on `gpu` with products in `dtype` ('' for none).

    Raises UserError if the GPU has no peak for the dtype or a wider one, unless `memory_alone` is
    set. Then products take no time, and the memory time is still a bound. Vector and network work
    take no time if the GPU gives no rate.
    """
    computed_in, peak = "", None
    slowest: Any = cost.bytes / gpu.bandwidth_bytes_per_s
    bound = "memory"
    if dtype and (not memory_alone or gpu.computes(dtype)):
        peak, computed_in = gpu.peak(dtype)
    limits: tuple[tuple[str, Any, Any], ...] = (
        ("compute", cost.vector_flops, gpu.vector_peak),
        ("network", cost.network_bytes, gpu.link),
        ("network", cost.inter_node_bytes, gpu.outer_link),
        ("compute", cost.flops, peak),
    )
    for name, amount, rate in limits:
        if rate is not None and (not isinstance(amount, int | float) or amount):
            seconds = amount / rate
            if isinstance(seconds, float) and isinstance(slowest, float):
                slowest, bound = (seconds, name) if seconds > slowest else (slowest, bound)
            else:
                slowest, bound = maximum(cast("Any", seconds), slowest), ""
    return Roof(slowest, bound, computed_in)


class Placed(NamedTuple):
    """An operator with its bound. `seconds` covers all its runs; the other fields are as in
    `Roof`.

    `fallback` is the dtype of the unit that replaces a missing unit, or ''.
    """

    operator: Operator
    seconds: Any
    bound: str
    fallback: str

    @property
    def intensity(self) -> Any:
        """Matrix FLOPs per byte of memory traffic; None without traffic."""
        moved = self.operator.cost.bytes
        return (
            None
            if isinstance(moved, int | float) and not moved
            else self.operator.cost.flops / moved
        )


def roofline(
    operators: Sequence[Operator], gpu: Gpu, memory_alone: bool = False
) -> list[Placed]:
    """Return each operator with its bound on `gpu`. Raises UserError as `least_time`."""
    results = []
    for operator in operators:
        seconds, bound, computed_in = least_time(
            operator.cost, operator.dtype, gpu, memory_alone
        )
        fallback = "" if computed_in in operator.dtype.split("/") else computed_in
        results.append(Placed(operator, seconds * operator.count, bound, fallback))
    return results


def total_seconds(bounds: Sequence[Placed]) -> Any:
    """Return the bound of a pass, the sum of its operators, as a float or an array."""
    return sum((p.seconds for p in bounds), 0.0)


class Roofs:
    """Rates of several GPU models as arrays [gpus]. A rate that a GPU does not give is infinite."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self.bandwidth_bytes_per_s = _rates([gpu.bandwidth_bytes_per_s for gpu in gpus])
        self.vector_peak = _rates([gpu.vector_peak for gpu in gpus])
        self.link, self.outer_link = (
            _rates([gpu.link for gpu in gpus]),
            _rates([gpu.outer_link for gpu in gpus]),
        )

    def computes(self, dtype: str) -> Any:
        """Return which GPUs have a matrix peak for products in a dtype."""
        import numpy as np

        return np.array([gpu.computes(dtype) for gpu in self.gpus])

    def peak(self, dtype: str) -> tuple[Any, str]:
        """Return the matrix peak of each GPU; infinite if there is none."""
        return _rates(
            [gpu.peak(dtype)[0] if gpu.computes(dtype) else None for gpu in self.gpus]
        ), ""


def _rates(rates: Sequence[float | None]) -> Any:
    import numpy as np

    return np.array([rate or np.inf for rate in rates])


class OperatorBatch:
    """Operators on several GPUs: `roofline` of many points in one call.

    Operators of one dtype and shape are arrays [operators, *shape, 1], so that a value that does
    not change along an axis is computed once. The last axis is the GPU. Results are equal to the
    results of single operators.

    Attributes:
        points: Shape to which the costs of all operators broadcast.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        import numpy as np

        shapes = [_shape(operator) for operator in operators]
        self.points = np.broadcast_shapes(*set(shapes))
        members: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for number, (operator, shape) in enumerate(zip(operators, shapes, strict=True)):
            axes = len(self.points) - len(shape)
            members.setdefault((operator.dtype, (1,) * axes + shape), []).append(number)
        self._length = len(operators)
        self._groups = []
        for (dtype, shape), numbers in members.items():
            cost, counts = _stack([operators[number] for number in numbers], shape)
            self._groups.append((dtype, numbers, cost, counts))

    def seconds(self, roofs: Roofs, decodes: bool) -> list[Any]:
        """Return the bounds [*points, gpus] of each operator in order, in seconds.

        A GPU without a required matrix peak gets NaN, except in decode, where the memory time is a
        bound.
        """
        import numpy as np

        results: dict[int, Any] = {}
        for dtype, numbers, cost, counts in self._groups:
            seconds = least_time(cost, dtype, roofs).seconds
            if dtype and not decodes:
                seconds = np.where(roofs.computes(dtype), seconds, np.nan)
            results.update(zip(numbers, seconds * counts, strict=True))
        return [results[number] for number in range(self._length)]


def _shape(operator: Operator) -> tuple[int, ...]:
    """Return the shape of an operator's costs."""
    import numpy as np

    shapes = {figure.shape for figure in operator.cost if not isinstance(figure, int | float)}
    return np.broadcast_shapes(*shapes) if len(shapes) > 1 else next(iter(shapes), ())


def _stack(operators: Sequence[Operator], shape: tuple[int, ...]) -> tuple[Cost, Any]:
    """Return the costs of operators as arrays [operators, *shape, 1], and their numbers of runs."""
    import numpy as np

    def stack(values: list[Any]) -> Any:
        array = np.empty((len(values), *shape, 1))
        for index, value in enumerate(values):
            array[index, ..., 0] = value
        return array

    costs = [operator.cost for operator in operators]
    cost = Cost(
        flops=stack([c.flops for c in costs]),
        vector_flops=stack([c.vector_flops for c in costs]),
        weight_bytes=stack([c.bytes for c in costs]),
        network_bytes=stack([c.network_bytes for c in costs]),
        inter_node_bytes=stack([c.inter_node_bytes for c in costs]),
    )
    counts = [float(operator.count) for operator in operators]
    return cost, np.reshape(counts, (-1, *(1 for _ in shape), 1))


def total_bound(bounds: Sequence[Placed]) -> str:
    """Return the resource that limits most of the time of a pass."""
    by_bound: dict[str, float] = {}
    for p in bounds:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds
    return max(by_bound, key=lambda b: by_bound[b])


def fallbacks(bounds: Sequence[Placed], gpu: Gpu) -> str:
    """Return a sentence on dtypes that the GPU has no unit for; '' if it has all required units."""
    swaps = dict.fromkeys((p.operator.dtype, p.fallback) for p in bounds if p.fallback)
    words = [
        f"computed in {used}: {gpu.name} has no {requested} unit" for requested, used in swaps
    ]
    without = dict.fromkeys(
        p.operator.dtype
        for p in bounds
        if p.operator.dtype and not gpu.computes(p.operator.dtype)
    )
    words += (
        [f"bound by memory alone: {gpu.name} has no matrix peak for {', '.join(without)}"]
        if without
        else []
    )
    return "; ".join(words)


def mla_form(bounds: Sequence[Placed]) -> str | None:
    """Return the form of MLA: absorbed, expanded, mixed (differs between groups), or None without
    MLA."""
    forms = dict.fromkeys(p.operator.form for p in bounds if p.operator.form)
    return "mixed" if len(forms) > 1 else next(iter(forms), None)


MAX_BATCH = 1 << 20


def turning_batch(
    place: Callable[[int], Sequence[Placed]], is_selected: Callable[[Operator], bool]
) -> int | None:
    """Return the smallest batch size at which operators are compute-bound together.

    Args:
        place: Function that returns the operators of a pass with a batch size, with their bounds.
        is_selected: Function that selects the operators.

    Returns:
        None up to MAX_BATCH.
    """

    def is_compute_bound(batch_size: int) -> bool:
        operators = [p for p in place(batch_size) if is_selected(p.operator)]
        return bool(operators) and total_bound(operators) == "compute"

    if not is_compute_bound(MAX_BATCH):
        return None
    low, high = 0, MAX_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        if is_compute_bound(middle):
            high = middle
        else:
            low = middle
    return high
