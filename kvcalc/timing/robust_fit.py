"""Fit the parameters of a kernel model to measured times.

The fit is robust and deterministic. It minimises Σ weight · (√(1 + (r/c)²) − 1) with
r = ln(predicted/measured). c is 4 % unless the kernel model sets another value. Small errors count
as squares and large ones as absolute values, so an outlier has a bounded effect. Parameters vary on
a logarithmic scale within their ranges. A kernel model with many parameters for few rows adds
½·(x/sd)² for each parameter that is x from its typical value. The search is Levenberg-Marquardt
with reweighting from several fixed starting points. The best result counts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvcalc.records import Settings
from kvcalc.timing.kernel_models.kernel_model import Array, GpuParameters, KernelModel

STARTS, STEPS = 5, 40
LIKE_PULL = 0.5  # as PULL, for a kernel model that should resemble another
STEP = 1e-3  # step of a parameter's logarithm: wider than the steps of full waves
# One for each parameter of a kernel model, at most ten.
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


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
        law: Class of the kernel model.
        machine: The GPU.
        shape: Arrays [rows], in the order of the kernel model's `us`.
        measured: Microseconds [rows].
        weight: Weight of each row; 1 by default.
        starts: Number of starting points of the search.
        like: A fitted kernel model for similar data. Its form is used, and the fit stays near its
            parameters.
        fixed: Fields that are not fitted, such as the bytes of an element.
    """
    import numpy as np

    weights = np.ones_like(measured) if weight is None else weight
    target = np.log(measured)
    ranges = law.ranges()
    low = np.log([r.minimum for r in ranges.values()])
    high = np.log([r.maximum for r in ranges.values()])
    typical = np.log([getattr(like, name, r.typical) for name, r in ranges.items()])
    choices = law.CHOICES if like is None else (_fixed_fields(like),)

    def fit_form(form: Settings) -> Fitted:
        def residual(points: Array) -> Array:
            # [parameters, points, 1] broadcasts to [points, rows] in the kernel model.
            values = np.exp(points).T[..., None]
            us = law(**form, **dict(zip(ranges, values, strict=True))).us(machine, *shape)
            return np.log(np.maximum(us, 1e-9)) - target

        pull = law.PULL if like is None else LIKE_PULL
        goal = Goal(residual, weights, law.SOFTNESS, typical, pull)
        ends = [
            (*_descend(goal, start, low, high), start)
            for start in start_points(typical, low, high, starts)
        ]
        point, loss, start = min(ends, key=lambda end: end[1])
        values = np.exp(np.clip(_reset_unused(goal, point, start), low, high)).tolist()
        return Fitted(rounded(law(**form, **dict(zip(ranges, values, strict=True)))), loss)

    forms = {repr(choice | fixed): choice | fixed for choice in choices}
    return min(map(fit_form, forms.values()), key=lambda fitted: fitted.loss)


def _fixed_fields(law: KernelModel) -> Settings:
    """Return the fields of a kernel model that are not fitted."""
    names = set(law.__struct_fields__) - set(law.ranges())
    return {name: getattr(law, name) for name in names}


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

    def loss(self, point: Array, residual: Array) -> float:
        """Return the loss per row, with the penalty for the distance from the typical point."""
        import numpy as np

        total = float((self.weight * (np.sqrt(1 + (residual / self.softness) ** 2) - 1)).sum())
        if self.pull:
            total += float((((point - self.typical) / self.pull) ** 2).sum()) / 2
        return total / float(self.weight.sum())


def rounded(law: KernelModel, digits: int = 4) -> KernelModel:
    """Return the kernel model with parameters rounded to significant digits, within their
    ranges."""
    values = {}
    for name, r in law.ranges().items():
        value = float(f"{getattr(law, name):.{digits}g}")
        values[name] = min(r.maximum, max(r.minimum, value))
    return msgspec.structs.replace(law, **values)


def start_points(typical: Array, low: Array, high: Array, count: int) -> list[Array]:
    """Return the typical point and points around it from a Halton sequence, always the same."""
    import numpy as np

    points = [typical]
    for index in range(1, count):
        step = np.array([_halton(index, prime) for prime in PRIMES[: len(typical)]]) - 0.5
        points.append(np.clip(typical + step * np.minimum(high - low, 2.5), low, high))
    return points


def _halton(index: int, base: int) -> float:
    value = 0.0
    scale = 1.0
    while index:
        scale /= base
        value += scale * (index % base)
        index //= base
    return value


def _descend(goal: Goal, start: Array, low: Array, high: Array) -> tuple[Array, float]:
    """Return the nearest minimum to a starting point, and the loss there."""
    import numpy as np

    point = start
    damping = 1e-2
    residual = goal.residual(point[None])[0]
    loss = goal.loss(point, residual)
    stiffness = (goal.softness / goal.pull) ** 2 if goal.pull else 0.0
    for _ in range(STEPS):
        slopes = ((goal.residual(point + np.eye(len(point)) * STEP) - residual) / STEP).T
        pull = goal.weight / np.sqrt(1 + (residual / goal.softness) ** 2)
        square = slopes.T @ (pull[:, None] * slopes) + stiffness * np.eye(len(point))
        gradient = slopes.T @ (pull * residual) + stiffness * (point - goal.typical)
        for _ in range(8):
            damped = square + damping * np.diag(np.diag(square) + 1e-6)
            move = np.clip(-np.linalg.solve(damped, gradient), -1, 1)
            trial = np.clip(point + move, low, high)
            trial_residual = goal.residual(trial[None])[0]
            trial_loss = goal.loss(trial, trial_residual)
            if trial_loss < loss:
                break
            damping *= 4
        else:
            return point, loss
        gain = loss - trial_loss
        point = trial
        residual = trial_residual
        loss = trial_loss
        damping = max(damping / 5, 1e-6)
        if gain < 1e-6 * (1 + loss):
            return point, loss
    return point, loss


def _reset_unused(goal: Goal, point: Array, start: Array) -> Array:
    """Return the point with its typical value for each parameter that no row depends on."""
    import numpy as np

    residual = goal.residual(point[None])
    for index in np.flatnonzero(point == start):
        trial = point.copy()
        trial[index] = goal.typical[index]
        if np.array_equal(goal.residual(trial[None]), residual):
            point = trial
    return point
