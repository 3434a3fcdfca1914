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


def least_time(cost: Cost, dtype: str, gpu: "Gpu | Roofs", memory_alone: bool = False) -> Roof:
    """A cost under the roof of `gpu`, its products in `dtype` ('' for none).

    Raises UserError where the GPU gives no peak that could serve, unless memory_alone: products are then free, and what the
    memory moves is a bound still. Vector work and network are free where it gives no rate.
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
        fallback = "" if computed_in in operator.dtype.split("/") else computed_in
        found.append(Placed(operator, seconds * operator.count, bound, fallback))
    return found


def total_seconds(placed: Sequence[Placed]) -> Any:
    """The bound of the whole pass: Σ seconds, a float or an array."""
    return sum((p.seconds for p in placed), 0.0)


class Roofs:
    """The rates of several kinds of GPU side by side, as arrays [GPUs]: infinite where one gives none."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self.bandwidth_bytes_per_s = _rates([gpu.bandwidth_bytes_per_s for gpu in gpus])
        self.vector_peak = _rates([gpu.vector_peak for gpu in gpus])
        self.link, self.outer_link = _rates([gpu.link for gpu in gpus]), _rates([gpu.outer_link for gpu in gpus])

    def computes(self, dtype: str) -> Any:
        """Which of them have a matrix peak that serves products in a dtype."""
        import numpy as np

        return np.array([gpu.computes(dtype) for gpu in self.gpus])

    def peak(self, dtype: str) -> tuple[Any, str]:
        """The matrix peak of each, infinite where there is none; what its unit is, is not said."""
        return _rates([gpu.peak(dtype)[0] if gpu.computes(dtype) else None for gpu in self.gpus]), ""


def _rates(each: Sequence[float | None]) -> Any:
    import numpy as np

    return np.array([rate or np.inf for rate in each])


class Stack:
    """Operators under the roofs of several GPUs, their costs side by side: `roofline` of many points at once.

    points: the shape to which the operators' costs broadcast. Those of one dtype and shape stand as arrays [operators,
    *shape, 1], so that what does not change along an axis is worked out once; the last axis is that of the GPUs. Every figure
    is what the operators alone give, to the last bit.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        import numpy as np

        shapes = [_shape(operator) for operator in operators]
        self.points = np.broadcast_shapes(*set(shapes))
        together: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for number, (operator, shape) in enumerate(zip(operators, shapes, strict=True)):
            axes = len(self.points) - len(shape)
            together.setdefault((operator.dtype, (1,) * axes + shape), []).append(number)
        self._length = len(operators)
        self._groups = [(d, at, _stood([operators[i] for i in at], shape)) for (d, shape), at in together.items()]

    def each(self, roofs: Roofs, decodes: bool) -> list[Any]:
        """The least seconds [*points, GPUs] of each operator, in order.

        NaN on a GPU without a matrix peak that is needed, unless the pass decodes: then the memory is a bound still.
        """
        import numpy as np

        found: dict[int, Any] = {}
        for dtype, at, (cost, counts) in self._groups:
            least = least_time(cost, dtype, roofs).seconds
            known = least if decodes or not dtype else np.where(roofs.computes(dtype), least, np.nan)
            found.update(zip(at, known * counts, strict=True))
        return [found[at] for at in range(self._length)]


def _shape(operator: Operator) -> tuple[int, ...]:
    """Of an operator's costs."""
    import numpy as np

    shapes = {figure.shape for figure in operator.cost if not isinstance(figure, int | float)}
    return np.broadcast_shapes(*shapes) if len(shapes) > 1 else next(iter(shapes), ())


def _stood(operators: Sequence[Operator], shape: tuple[int, ...]) -> tuple[Cost, Any]:
    """The costs of operators side by side, and how often each runs."""
    import numpy as np

    def stood(values: list[Any]) -> Any:
        found = np.empty((len(values), *shape, 1))
        for at, value in enumerate(values):
            found[at, ..., 0] = value
        return found

    costs = [operator.cost for operator in operators]
    whole = Cost(
        stood([c.flops for c in costs]),
        stood([c.vector_flops for c in costs]),
        weight_bytes=stood([c.bytes for c in costs]),
        network_bytes=stood([c.network_bytes for c in costs]),
        inter_node_bytes=stood([c.inter_node_bytes for c in costs]),
    )
    return whole, np.reshape([float(operator.count) for operator in operators], (-1, *(1 for _ in shape), 1))


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


def turning_batch(
    place: Callable[[int], Sequence[Placed]], chosen: Callable[[Operator], bool], near: int | None = None
) -> int | None:
    """The smallest batch at which the chosen operators, taken together, are compute-bound; None if never to 2^20.

    near: a batch that is tried first, such as that of a context beside this one.
    """

    def turned(batch_size: int) -> bool:
        found = [p for p in place(batch_size) if chosen(p.operator)]
        return bool(found) and total_bound(found) == "compute"

    if not turned(MOST_BATCH):
        return None
    low, high = 0, MOST_BATCH
    first = [near, near - 1] if near else []
    while high - low > 1:
        tried = first.pop(0) if first else 0
        middle = tried if low < tried < high else (low + high) // 2
        low, high = (low, middle) if turned(middle) else (middle, high)
    return high
