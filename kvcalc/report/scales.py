"""The axes of a chart on matplotlib: linear or logarithmic, with as many ticks as there is room for."""

import itertools
import math
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, whole_tick
from kvcalc.units import shown_in

NARROW = 2.6  # span of an axis below which a logarithmic axis has even steps
MOST_DECADES = 3.3  # more of them have powers of ten alone
EMPTY = 0.4  # of an axis, the most that has no tick where there are finer ones
WITHIN = (
    tuple(range(1, 10)),
    (1, 1.5, 2, 3, 4, 5, 6, 8),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 3, 5),
    (1, 2, 5),
    (1, 3),
)  # a decade's ticks


def room(width: float, look: dict[str, Any], characters: int) -> int:
    """Ticks of so many characters that stand beside each other on axes that take some 60 % of `width` inches."""
    return max(3, int(width * 0.6 * 72 / (look["font"] * (0.6 * characters + 1))))


def set_scales(axes: Any, chart: Chart, most: int) -> None:
    """Titles, scales and ticks of both axes, at most so many of these from left to right."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    ended = any(
        s.kind in ("line", "solid", "dashed", "edge", "trail", "quiet") and s.label for s in chart.series
    )  # names stand right of the axes
    for axis, spec, name in ((axes.xaxis, chart.x, "x"), (axes.yaxis, chart.y, "y")):
        getattr(axes, f"set_{name}label")(spec.title)
        values = [v for s in chart.series for v in along(s, name) if v > 0 or not spec.log] + [*spec.shown]
        if spec.log:
            ticks = min(most, 14) if name == "x" else 14
            base, locator = _log_ticks(spec, *_limits(values, ended and name == "x"), ticks)
            locator = locator or MaxNLocator(min(ticks, 6), steps=[1, 2, 5, 10])
            getattr(axes, f"set_{name}scale")("log", base=base)
            axis.set_major_locator(locator)
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(lambda v, _, spec=spec: spec.tick(v))
            getattr(axes, f"set_{name}lim")(_limits(values, ended and name == "x"))
        else:
            axis.set_major_formatter(lambda v, _, spec=spec: spec.tick(v))
            if name == "x":
                axes.locator_params(axis="x", nbins=min(most, 9), integer=all(v == int(v) for v in values))
            elif min(values) >= 0:  # a quantity, whose height is read from nothing up
                axes.set_ylim(0, 1.08 * max(values) or 1)
                axes.locator_params(axis="y", integer=spec.tick is whole_tick)


def along(series: Series, name: str) -> tuple[float, ...]:
    """The values of a series on one axis."""
    if name == "x":
        return series.xs
    return () if series.kind == "upright" else (*series.ys, *series.lows)


def _limits(values: list[float], ended: bool) -> tuple[float, float]:
    """A little more than the values on a logarithmic axis: a twelfth of their span; none after lines whose names follow."""
    low, high = min(values), max(values)
    beyond = max(1.15, min(1.7, (high / low) ** (1 / 12)))
    return low / min(beyond, 1.4), high * (1.05 if ended else beyond)


def _log_ticks(spec: Axis, low: float, high: float, most: int) -> tuple[int, Any]:
    """The base of an axis from `low` to `high`, and the locator of at most so many ticks; None for even steps."""
    from matplotlib.ticker import LogLocator

    binary = spec.tick.__name__ == "tokens_tick" or (spec.tick.__name__ == "bytes_tick" and shown_in() == "gib")
    span = high / low
    if not binary and span < NARROW:
        return 10, None
    base = (2 if span < 2**12 else 8 if span < 2**24 else 32) if binary else 10
    subs = (1.0,) if binary else _between(low, high, most)
    return base, LogLocator(base=base, subs=subs, numticks=most)


def _between(low: float, high: float, most: int) -> tuple[float, ...]:
    """The ticks of a decade: the most that stand apart by a part of the axis that leaves room for `most`, and leave no large part
    of it without one; where all do, those that leave the least."""
    decades, apart = math.log10(high / low), []
    for found in WITHIN if decades < MOST_DECADES else ():
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        at = [math.log10(step * 10.0**power / low) / decades for power in powers for step in found]
        ticks = [place for place in at if 0 <= place <= 1]
        gaps = [b - a for a, b in itertools.pairwise((0.0, *ticks, 1.0))]
        if len(ticks) > 1 and min(gaps[1:-1]) >= 1 / most:
            apart.append((max(gaps), tuple(map(float, found))))
    fine = [found for empty, found in apart if empty <= EMPTY]
    return fine[0] if fine else min(apart)[1] if apart else (1.0,)


def thin_ticks(axis: Any, renderer: Any, gap: float) -> None:
    """Leave out every other tick of an axis while two of their texts, where they have any, come nearer than so many heights."""
    if not axis.get_ticklabels():
        return
    low, high = sorted(axis.get_view_interval())
    across = int(axis.axis_name == "y")
    while True:
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        shown = sorted(((at, t.get_window_extent(renderer)) for at, t in ticks if low <= at <= high), key=lambda pair: pair[0])
        pairs = itertools.pairwise(box for _, box in shown)
        if len(shown) < 3 or all(a.max[across] + gap * a.height < b.min[across] for a, b in pairs):
            return
        axis.set_ticks([at for at, _ in shown[::2]])


def step_of(most: float, ticks: int) -> int:
    """A round step that gives at most so many ticks up to `most` bytes: binary, or decimal where bytes are."""
    binary = [1 << n for n in range(201)]
    steps = binary if shown_in() == "gib" else [size * 10**n for n in range(60) for size in (1, 2, 5)]
    return next(step for step in steps if most / step <= ticks)
