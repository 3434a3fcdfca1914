"""The axes of a chart on matplotlib: linear or logarithmic, with as many ticks as there is room for."""

from typing import Any

from kvcalc.report.chart import Axis, Chart
from kvcalc.units import shown_in


def room(width: float, look: dict[str, Any], characters: int) -> int:
    """Ticks of so many characters that stand beside each other on axes that take some 60 % of `width` inches."""
    return max(3, int(width * 0.6 * 72 / (look["font"] * (0.6 * characters + 1))))


def set_scales(axes: Any, chart: Chart, most: int) -> None:
    """Titles, scales and ticks of both axes, at most so many of these from left to right."""
    ended = any(s.kind in ("line", "dashed") and s.label for s in chart.series)  # names stand right of the axes
    for axis, spec, name in ((axes.xaxis, chart.x, "x"), (axes.yaxis, chart.y, "y")):
        getattr(axes, f"set_{name}label")(spec.title)
        values = [v for s in chart.series for v in (s.xs if name == "x" else s.ys) if v > 0 or not spec.log]
        if spec.log:
            _log_axis(axes, axis, spec, name, values, 1.05 if name == "x" and ended else 1.7)
            axis.get_major_locator().set_params(numticks=min(most, 14) if name == "x" else 14)
        else:
            axis.set_major_formatter(lambda v, _, spec=spec: spec.tick(v))


def _log_axis(axes: Any, axis: Any, spec: Axis, name: str, values: list[float], beyond: float) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    binary = spec.tick.__name__ == "tokens_tick" or (spec.tick.__name__ == "bytes_tick" and shown_in() == "gib")
    decades = max(values) / min(values)
    step = 2 if decades < 2**12 else 8 if decades < 2**24 else 32
    base = step if binary else 10
    getattr(axes, f"set_{name}scale")("log", base=base)
    between = (1.0,) if binary or decades > 100 else (1.0, 2.0, 5.0) if decades > 5 else tuple(map(float, range(1, 10)))
    axis.set_major_locator(LogLocator(base=base, subs=between))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda v, _: spec.tick(v))
    getattr(axes, f"set_{name}lim")(min(values) / 1.4, max(values) * beyond)


def step_of(most: float, ticks: int) -> int:
    """A round step that gives at most so many ticks up to `most` bytes: binary, or decimal where bytes are."""
    binary = [1 << n for n in range(201)]
    steps = binary if shown_in() == "gib" else [size * 10**n for n in range(60) for size in (1, 2, 5)]
    return next(step for step in steps if most / step <= ticks)
