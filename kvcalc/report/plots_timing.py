"""Predicted against measured times, as a chart."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.report.chart import Axis, Chart, Series, joined, si_tick
from kvcalc.report.looks import loud
from kvcalc.report.tables import seconds
from kvcalc.timing.rows import MeasuredRow

TOGETHER, CROWD = 4, 300  # series on one chart, and points
MOST_NAMES = 4  # machines that are named
MOST_POINTS = 2000  # a series: beyond, every n-th row is drawn


def predicted_against_measured(
    series: Sequence[tuple[str, Any, Any]], what: str, title: str = "Predicted against measured"
) -> Chart:
    """Points (measured, predicted) of each (name, measured, predicted) in µs, on logarithmic axes; the diagonal is exact.

    Many of them, which would lie on top of each other, have charts of their own. Rows without a prediction (NaN) are left
    out of the picture.
    """
    pairs = {name: [(m, p) for m, p in zip(*both, strict=True) if m > 0 and p > 0] for name, *both in series}
    found = {name: points for name, points in pairs.items() if points}
    drawn = [Series(name, *_thinned(points), "points", colour=loud(n)) for n, (name, points) in enumerate(found.items())]
    values = [value for one in drawn for value in (*one.xs, *one.ys)]
    ends = (min(values, default=1.0), max(values, default=10.0))
    exact = Series("exact", ends, ends, "quiet")
    axes = Axis("measured", tick=_time), Axis("predicted", tick=_time)
    if len(drawn) == 1 or (len(drawn) <= TOGETHER and len(values) <= 2 * CROWD):
        return Chart(title, what, *axes, (*drawn, exact))
    charts = [
        Chart(one.label, _off(found[one.label]), *axes, (one._replace(label=""), exact._replace(label=""))) for one in drawn
    ]
    return joined([charts[0]._replace(over=(title, f"{what}; the line: exact")), *charts[1:]])


def _off(points: Sequence[tuple[float, float]]) -> str:
    """How many points, and how far predictions are off in the median, to whichever side."""
    errors = sorted(math.exp(abs(math.log(predicted / measured))) - 1 for measured, predicted in points)
    return f"{len(points):,} rows, {100 * errors[len(errors) // 2]:.1f}% off in the median"


def rows_chart(path: Path) -> Chart:
    """Measured rows by operation against the calibrated time, else the datasheet bound, else the file's own (`bound_us`).

    Rows without any, of a machine that is no preset, stand beside them over the work they do. Raises UserError where no row has
    a prediction or products to count.
    """
    import numpy as np

    from kvcalc.serving.measured import served_times
    from kvcalc.timing.tally import Tally
    from kvcalc.timing.validation import validate

    tally = Tally()
    (found,) = tally.adding(validate([path], served=served_times))
    rows, laws = found.table.rows, found.calibrated > 0
    own = np.where(found.bound > 0, found.bound, [row.bound_us for row in rows])
    predicted, measured = np.where(laws, found.calibrated, own), np.array([row.time_us for row in rows])
    told, work = predicted > 0, np.array([_flops(row) for row in rows])
    charts = []
    if told.any():
        sure = (
            "a calibration"
            if laws[told].all()
            else "the bound"
            if not laws.any()
            else f"a calibration in {laws.sum():,}, else the bound"
        )
        what = f"{path.name}: {_count(told)} of {_machines(rows, told)}, predicted by {sure}"
        charts.append(predicted_against_measured(_by_operation(rows, told, measured, predicted), what))
    if (left := ~told & (work > 0)).any():
        what = f"{path.name}: {_count(left)} without a bound or a calibration, of {_machines(rows, left)}"
        charts.append(_over_work(_by_operation(rows, left, work, measured), what))
    if not charts:
        raise UserError("no row has a prediction to stand beside it", str(path), "; ".join(tally.remarks))
    return joined(charts)


def _by_operation(rows: Sequence[MeasuredRow], chosen: Any, *columns: Any) -> list[tuple[str, Any, Any]]:
    """Two columns of the rows chosen, by operation."""
    ops = [row.op for row in rows]
    members = {op: [i for i, name in enumerate(ops) if name == op and chosen[i]] for op in dict.fromkeys(ops)}
    return [(op.replace("_", " "), columns[0][at], columns[1][at]) for op, at in members.items() if at]


def _machines(rows: Sequence[MeasuredRow], chosen: Any) -> str:
    """Of the rows chosen; of many how many they are."""
    found = dict.fromkeys(printable(row.gpu, 60) for row, mine in zip(rows, chosen, strict=True) if mine)
    return ", ".join(found) if len(found) <= MOST_NAMES else f"{len(found)} GPUs"


def _count(chosen: Any) -> str:
    return f"{chosen.sum():,} row{'s' * int(chosen.sum() > 1)}"


def _flops(row: MeasuredRow) -> float:
    """FLOPs of a row's products; 0 where it has none or its operation is not known."""
    import numpy as np

    from kvcalc.timing.costs import cost_of
    from kvcalc.timing.validation import kind_of

    found = cost_of(row.op, kind_of(row), tuple(np.array([n]) for n in row.shape))
    return float(np.max(found[0].flops)) if found else 0.0


def _over_work(series: Sequence[tuple[str, Any, Any]], what: str) -> Chart:
    """Measured µs of each operation over its FLOPs."""
    axes = Axis("work", tick=si_tick("FLOP")), Axis("measured", tick=_time)
    drawn = [Series(name, *_thinned(list(zip(xs, ys, strict=True))), "points") for name, xs, ys in series]
    return Chart("Measured times over work", what, *axes, tuple(drawn))


def _thinned(points: list[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """At most MOST_POINTS of them, evenly chosen, as xs and ys."""
    xs, ys = zip(*points[:: max(1, -(-len(points) // MOST_POINTS))], strict=True)
    return tuple(map(float, xs)), tuple(map(float, ys))


def _time(value: float) -> str:
    """µs as a time."""
    return seconds(value / 1e6)
