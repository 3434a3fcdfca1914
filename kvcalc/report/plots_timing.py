"""Predicted against measured times, as a chart."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series

MOST_POINTS = 2000  # a series: beyond, every n-th row is drawn


def predicted_against_measured(series: Sequence[tuple[str, Any, Any]], what: str) -> Chart:
    """Points (measured, predicted) in µs of each (name, measured, predicted), on logarithmic axes; the diagonal is exact.

    Rows without a prediction (NaN) are left out of the picture.
    """
    drawn, values = [], []
    for name, measured, predicted in series:
        points = [(float(m), float(p)) for m, p in zip(measured, predicted, strict=True) if m > 0 and p > 0]
        points = points[:: max(1, -(-len(points) // MOST_POINTS))]
        if points:
            xs, ys = zip(*points, strict=True)
            drawn.append(Series(name, xs, ys, "points"))
            values += [*xs, *ys]
    ends = (min(values, default=1.0), max(values, default=10.0))
    drawn.append(Series("exact", ends, ends, "line"))
    axes = Axis("measured, µs", tick=_tick), Axis("predicted, µs", tick=_tick)
    return Chart("Predicted against measured", f"each point one row, {what}", *axes, tuple(drawn))


def _tick(value: float) -> str:
    return f"{value:g}"
