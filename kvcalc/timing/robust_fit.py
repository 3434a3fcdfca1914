"""Fit the parameters of a kernel model to measured times.

The fit is robust and deterministic. It minimises Σ weight · (√(1 + (r/c)²) − 1) with
r = ln(predicted/measured) and c = 4 % unless the kernel model sets another: squares for small
errors, absolute values for large ones. So an outlier has a bounded effect. Parameters vary on a
logarithmic scale within their ranges. A kernel model with many parameters for few rows adds
½·(x/sd)² for each parameter that is x from its typical value. The search is Levenberg-Marquardt
with reweighting from several fixed starting points; the best result counts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvcalc.records import Record
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
)

STARTS, STEPS = 5, 40
LIKE = 0.5  # as PULL, for a kernel model that should resemble another
# One for each parameter of a kernel model, at most ten.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


class Fitted(NamedTuple):
    """A fitted kernel model and its robust loss per row."""

    law: KernelModel
    loss: float


def fit(
    law: type[KernelModel],
    machine: GpuParameters,
    shape: tuple[Array, ...],
    measured: Array,
    weight: Array | None = None,
    starts: int = STARTS,
    like: KernelModel | None = None,
    **fixed: Any,
) -> Fitted:
    """Return the kernel model that is closest to the measured microseconds, over all its forms.

    Args:
        shape: Arrays [rows], in the order of the kernel model's `us`.
        measured: Microseconds [rows].
        weight: Weight of each row.
        starts: Number of starting points of the search.
        like: A fitted kernel model for similar data. Its form is used, and the fit stays near its
            parameters.
        fixed: Fields that are not fitted, such as the bytes of an element.
    """
    import numpy as np

    weights = np.ones_like(measured) if weight is None else weight
    if like is not None:
        return _fit_form(
            law,
            _form(like) | fixed,
            machine,
            shape,
            np.log(measured),
            weights,
            starts,
            like,
        )
    best: Fitted | None = None
    forms = {repr(choice | fixed): choice | fixed for choice in law.CHOICES}
    for form in forms.values():
        result = _fit_form(law, form, machine, shape, np.log(measured), weights, starts)
        if best is None or result.loss < best.loss:
            best = result
    assert best is not None
    return best


def _fit_form(
    law: type[KernelModel],
    choice: Record,
    machine: GpuParameters,
    shape: tuple[Array, ...],
    target: Array,
    weight: Array,
    starts: int,
    like: KernelModel | None = None,
) -> Fitted:
    import numpy as np

    ranges = law.ranges()
    low = np.log([r.least for r in ranges.values()])
    high = np.log([r.most for r in ranges.values()])
    typical = np.log([getattr(like, name) if like else r.typical for name, r in ranges.items()])

    def build(x: Array) -> KernelModel:
        return law(**choice, **dict(zip(ranges, np.exp(x).tolist(), strict=True)))

    def residual(points: Array) -> Array:
        # [parameters, points, 1], so that the law broadcasts to [points, rows]
        values = np.exp(points).T[..., None]
        result = law(**choice, **dict(zip(ranges, values, strict=True))).us(machine, *shape)
        return np.log(np.maximum(result, 1e-9)) - target

    goal = Goal(residual, weight, law.SOFTNESS, typical, LIKE if like else law.PULL)
    ends = [
        (*_descend(goal, start, low, high), start)
        for start in start_points(typical, low, high, starts)
    ]
    x, loss, start = min(ends, key=lambda end: end[1])
    return Fitted(rounded(build(np.clip(_settled(goal, x, start), low, high))), loss)


def _form(law: KernelModel) -> Record:
    """Return the fields of a kernel model that are not fitted."""
    return {
        name: getattr(law, name) for name in law.__struct_fields__ if name not in law.ranges()
    }


class Goal(NamedTuple):
    """The function that a fit minimises.

    Attributes:
        residual: Maps points [points, parameters] to residuals [points, rows].
        weight: Weight of each row.
        softness: Relative error at which squares become absolute values.
        typical: The typical point.
        pull: Standard deviation from the typical point; 0 for no pull.
    """

    residual: Callable[[Array], Array]
    weight: Array
    softness: float
    typical: Array
    pull: float

    def loss(self, x: Array, residual: Array) -> float:
        """Return the loss per row, with the penalty for the distance from the typical point."""
        import numpy as np

        total = float((self.weight * (np.sqrt(1 + (residual / self.softness) ** 2) - 1)).sum())
        penalty = float((((x - self.typical) / self.pull) ** 2).sum()) / 2 if self.pull else 0.0
        return (total + penalty) / float(self.weight.sum())


def rounded(law: KernelModel, digits: int = 4) -> KernelModel:
    """Return the kernel model with parameters rounded to significant digits, within their
    ranges."""
    values = {}
    for name, r in law.ranges().items():
        values[name] = min(r.most, max(r.least, float(f"{getattr(law, name):.{digits}g}")))
    return msgspec.structs.replace(law, **values)


def start_points(typical: Array, low: Array, high: Array, count: int) -> list[Array]:
    """Return the typical point and points around it from a Halton sequence, always the same."""
    import numpy as np

    results = [typical]
    for index in range(1, count):
        step = np.array([_halton(index, prime) for prime in _PRIMES[: len(typical)]]) - 0.5
        results.append(np.clip(typical + step * np.minimum(high - low, 2.5), low, high))
    return results


def _halton(index: int, base: int) -> float:
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        value += scale * (index % base)
        index //= base
    return value


def _descend(goal: Goal, start: Array, low: Array, high: Array) -> tuple[Array, float]:
    import numpy as np

    x, damping = start, 1e-2
    r = goal.residual(x[None])[0]
    loss = goal.loss(x, r)
    stiff = (goal.softness / goal.pull) ** 2 if goal.pull else 0.0
    for _ in range(STEPS):
        slopes = ((goal.residual(x + np.eye(len(x)) * _STEP) - r) / _STEP).T
        pull = goal.weight / np.sqrt(1 + (r / goal.softness) ** 2)
        square = slopes.T @ (pull[:, None] * slopes) + stiff * np.eye(len(x))
        gradient = slopes.T @ (pull * r) + stiff * (x - goal.typical)
        better = False
        for _ in range(8):
            move = -np.linalg.solve(
                square + damping * np.diag(np.diag(square) + 1e-6), gradient
            )
            trial = np.clip(x + np.clip(move, -1, 1), low, high)
            result = goal.residual(trial[None])[0]
            value = goal.loss(trial, result)
            if value < loss:
                better = True
                break
            damping *= 4
        if not better:
            break
        gain, x, r, loss = loss - value, trial, result, value
        damping = max(damping / 5, 1e-6)
        if gain < 1e-6 * (1 + loss):
            break
    return x, loss


def _settled(goal: Goal, x: Array, start: Array) -> Array:
    """Return the point with its typical value for each parameter that no row depends on."""
    import numpy as np

    residual = goal.residual(x[None])
    for at in np.flatnonzero(x == start):
        usual = x.copy()
        usual[at] = goal.typical[at]
        if np.array_equal(goal.residual(usual[None]), residual):
            x = usual
    return x


_STEP = 1e-3  # of a parameter's logarithm: wide enough to see past the steps of whole waves
