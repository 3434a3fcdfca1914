"""Predicted against measured times, as a chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError
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


def rows_chart(path: Path) -> Chart:
    """Measured rows against the calibrated time, or the datasheet bound where no calibration applies, by operation.

    Raises UserError where no row has a prediction.
    """
    import numpy as np

    from kvcalc.serving.measured import served_times
    from kvcalc.timing.tally import Tally
    from kvcalc.timing.validation import validate

    tally = Tally()
    (found,) = tally.adding(validate([path], served=served_times))
    predicted = np.where(np.isnan(found.calibrated), found.bound, found.calibrated)
    if not (predicted > 0).any():
        raise UserError("no row has a prediction to stand beside it", str(path), "; ".join(tally.remarks))
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row, value in zip(found.table.rows, predicted, strict=True):
        measured, expected = series.setdefault(row.op, ([], []))
        measured.append(row.time_us)
        expected.append(float(value))
    calibrated = int((found.calibrated > 0).sum())
    what = f"{path.name}; predicted by a calibration in {calibrated:,} of {len(predicted):,} rows, else the bound"
    return predicted_against_measured([(op, *both) for op, both in series.items()], what)


def _tick(value: float) -> str:
    return f"{value:g}"
