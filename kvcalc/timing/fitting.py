"""Fitting a law to measured times: robust, deterministic, in logarithms.

Minimised is Σ weight · (√(1 + (r/c)²) − 1) with r = ln(predicted/measured) and c = 4 % or what the law says: squares for
small errors, absolute values for large ones, so that outliers pull with bounded force. Parameters vary in the logarithm
between their ranges; a law of many parameters for few rows adds ½·(x/sd)² for each that strays by x from its typical value.
The search is Levenberg and Marquardt's with reweighting, from several fixed starting points; the best end wins.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.timing.law import Array, Law

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

STARTS, STEPS = 5, 40
LIKE = 0.5  # e-fold that a parameter may stray from that of a law which it should resemble, as PULL
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)  # one for each of a law's parameters, of which it has ten at most


class Fitted(NamedTuple):
    """A law with fitted parameters, and the robust loss per row that it reached."""

    law: Law
    loss: float


def fit(
    law: type[Law],
    machine: "Figures",
    shape: tuple[Array, ...],
    measured: Array,
    weight: Array | None = None,
    starts: int = STARTS,
    like: Law | None = None,
    **fixed: Any,
) -> Fitted:
    """The law of this kind that comes nearest to the measured microseconds, over all its forms and starting points.

    like: a law of this kind for much the same, from whose form and parameters the fit strays only as far as rows pull it.

    weight: of each row. starts: points that the search begins from. fixed: fields that are given, not fitted (the bytes of
    an element, say).
    """
    import numpy as np

    weights = np.ones_like(measured) if weight is None else weight
    if like is not None:
        return _fit_form(law, _form(like) | fixed, machine, shape, np.log(measured), weights, starts, like)
    best: Fitted | None = None
    forms = {repr(choice | fixed): choice | fixed for choice in law.CHOICES}
    for form in forms.values():
        found = _fit_form(law, form, machine, shape, np.log(measured), weights, starts)
        if best is None or found.loss < best.loss:
            best = found
    assert best is not None
    return best


def _fit_form(
    law: type[Law],
    choice: dict[str, Any],
    machine: "Figures",
    shape: tuple[Array, ...],
    target: Array,
    weight: Array,
    starts: int,
    like: Law | None = None,
) -> Fitted:
    import numpy as np

    ranges = law.ranges()
    low = np.log([r.least for r in ranges.values()])
    high = np.log([r.most for r in ranges.values()])
    typical = np.log([getattr(like, name) if like else r.typical for name, r in ranges.items()])

    def build(x: Array) -> Law:
        return law(**choice, **dict(zip(ranges, np.exp(x).tolist(), strict=True)))

    def residual(points: Array) -> Array:
        values = np.exp(points).T[..., None]  # [parameters, points, 1], so that the law broadcasts to [points, rows]
        found = law(**choice, **dict(zip(ranges, values, strict=True))).us(machine, *shape)
        return np.log(np.maximum(found, 1e-9)) - target

    goal = Goal(residual, weight, law.SOFTNESS, typical, LIKE if like else law.PULL)
    ends = [(*_descend(goal, start, low, high), start) for start in start_points(typical, low, high, starts)]
    x, loss, start = min(ends, key=lambda end: end[1])
    return Fitted(rounded(build(np.clip(_settled(goal, x, start), low, high))), loss)


def _form(law: Law) -> dict[str, Any]:
    """The fields of a law that are given, not fitted."""
    return {name: getattr(law, name) for name in law.__struct_fields__ if name not in law.ranges()}


class Goal(NamedTuple):
    """What a fit minimises: residuals of points [points, rows] with their weights, and the pull towards the typical point."""

    residual: Callable[[Array], Array]
    weight: Array
    softness: float
    typical: Array
    pull: float

    def loss(self, x: Array, residual: Array) -> float:
        """Per row: the mean of √(1 + (r/c)²) − 1, and what straying costs."""
        import numpy as np

        total = float((self.weight * (np.sqrt(1 + (residual / self.softness) ** 2) - 1)).sum())
        strayed = float((((x - self.typical) / self.pull) ** 2).sum()) / 2 if self.pull else 0.0
        return (total + strayed) / float(self.weight.sum())


def rounded(law: Law, digits: int = 4) -> Law:
    """The law with its parameters to so many significant digits, within their ranges."""
    kept = {}
    for name, r in law.ranges().items():
        kept[name] = min(r.most, max(r.least, float(f"{getattr(law, name):.{digits}g}")))
    return msgspec.structs.replace(law, **kept)


def start_points(typical: Array, low: Array, high: Array, count: int) -> list[Array]:
    """The typical point, and points around it in a third of the range: a Halton sequence, the same every time."""
    import numpy as np

    found = [typical]
    for index in range(1, count):
        step = np.array([_halton(index, prime) for prime in _PRIMES[: len(typical)]]) - 0.5
        found.append(np.clip(typical + step * np.minimum(high - low, 2.5), low, high))
    return found


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
            move = -np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), gradient)
            trial = np.clip(x + np.clip(move, -1, 1), low, high)
            found = goal.residual(trial[None])[0]
            value = goal.loss(trial, found)
            if value < loss:
                better = True
                break
            damping *= 4
        if not better:
            break
        gain, x, r, loss = loss - value, trial, found, value
        damping = max(damping / 5, 1e-6)
        if gain < 1e-6 * (1 + loss):
            break
    return x, loss


def _settled(goal: Goal, x: Array, start: Array) -> Array:
    """A point with every parameter that no row tells of at its typical value, not where the search began."""
    import numpy as np

    residual = goal.residual(x[None])
    for at in np.flatnonzero(x == start):
        usual = x.copy()
        usual[at] = goal.typical[at]
        if np.array_equal(goal.residual(usual[None]), residual):
            x = usual
    return x


_STEP = 1e-3  # of a parameter's logarithm: wide enough to see past the steps of whole waves
