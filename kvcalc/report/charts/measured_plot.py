"""Pictures of measurements: layers under the measured roof, generated tokens, and predictions."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.errors import few
from kvcalc.records import Record
from kvcalc.report.charts.chart import (
    FLOPS_AXIS,
    INTENSITY_AXIS,
    Axis,
    Chart,
    Series,
    joined,
    si_tick,
    whole_tick,
)
from kvcalc.report.text.tables import plural, seconds

if TYPE_CHECKING:
    from kvcalc.planning.sweeps import MeasuredTimes

LOG_RANGE = 5  # largest over smallest time above which the axis is logarithmic
MAX_POINTS = 2000  # points of a series; if there are more, every n-th is drawn


def measured_chart(records: Sequence[Record]) -> Chart:
    """Return attention (or the scan) of each record under the roof of the measured ceilings."""
    first = records[0]
    bandwidth, peak = first["bandwidth_bytes_per_s"], first["flops_per_s"]
    ridge = peak / bandwidth
    measured = [record for record in records if record["attention_bytes"]]
    intensities = [r["attention_flops"] / r["attention_bytes"] for r in measured]
    xs = [min([ridge / 8, *(x / 2 for x in intensities if x)])]
    xs += [ridge, max([ridge * 8, *(x * 2 for x in intensities)])]
    series = [
        Series("measured ceilings", xs, [min(x, ridge) * bandwidth for x in xs], colour=0)
    ]
    for number, phase in enumerate(dict.fromkeys(r["phase"] for r in measured)):
        points = [
            (x, r["attention_flops"] / r["attention_measured_s"], r)
            for x, r in zip(intensities, measured, strict=True)
            if r["phase"] == phase
        ]
        xs, ys, rows = ([*column] for column in zip(*points, strict=True))
        labels = _labels(ys, rows)
        series.append(Series(phase, xs, ys, "points", labels=labels, colour=number + 1))
    subtitle = (
        f"{first['device']}, {first['dtype']}: {si_tick('B/s')(bandwidth)} and "
        f"{si_tick('FLOP/s')(peak)} measured; points: attention or scan only"
    )
    title = "Measured layers under the measured roofline"
    return Chart(title, subtitle, INTENSITY_AXIS, FLOPS_AXIS, series)


def _labels(ys: Sequence[float], records: Sequence[Record]) -> list[str]:
    """Return the variant at the highest of its points."""
    labels = [""] * len(ys)
    for variant in dict.fromkeys(record["variant"] for record in records):
        group = [index for index, r in enumerate(records) if r["variant"] == variant]
        labels[max(group, key=lambda index: ys[index])] = variant
    return labels


def generation_chart(records: Sequence[Record]) -> Chart:
    """Return milliseconds of each generated token, measured and predicted."""
    first = records[0]
    subtitle = f"{first['device']}, {first['dtype']}: prompt of {first['prompt_len']:,}"
    series = []
    for number, record in enumerate(records):
        name = " ".join(filter(None, (record["variant"], record["mode"])))
        if record["mode"] == "uncached":
            name += f", head on {record['head']}"
            if "saves" not in subtitle:
                subtitle += (
                    f"; the cache saves {record['speedup']:.2f}× "
                    f"(predicted {record['predicted_speedup']:.2f}×)"
                )
        start = record["prompt_len"] + 1
        lengths = range(start, start + record["new_tokens"])
        times, predicted = (
            [1000 * time for time in record[key]] for key in ("token_s", "predicted_token_s")
        )
        series.append(Series(name, lengths, times, colour=number))
        series.append(Series(f"{name}: predicted", lengths, predicted, "dashed", colour=number))
    values = [time for points in series for time in points.ys]
    x = Axis("tokens so far", log=False, tick=whole_tick)
    y = Axis("ms", max(values) > LOG_RANGE * min(values) > 0, "{:g}".format)
    return Chart(f"{first['model']}: time per token", subtitle, x, y, series)


def predicted_against_measured(
    operations: Sequence[tuple[str, Any, Any]],
    subtitle: str,
    title: str = "Predicted against measured",
) -> Chart:
    """Return predicted over measured times; points on the diagonal are exact.

    Several operations have a chart each. Rows without a prediction (NaN) are left out.

    Args:
        operations: Name, measured and predicted microseconds of each operation.
        subtitle: Description of the rows.
        title: Title.
    """
    series: list[Series] = []
    errors = []
    for name, measured, predicted in operations:
        rows = zip(measured, predicted, strict=True)
        pairs = [(float(m), float(p)) for m, p in rows if m > 0 and p > 0]
        if not pairs:
            continue
        xs, ys = zip(*pairs[:: -(-len(pairs) // MAX_POINTS)], strict=True)
        series.append(Series(name, xs, ys, "points", colour=len(series)))
        ratios = sorted(abs(math.log(p / m)) for m, p in pairs)
        median = math.expm1(ratios[len(ratios) // 2])
        errors.append(f"{len(pairs):,} rows, median error {100 * median:.1f}%")
    values = [value for points in series for value in (*points.xs, *points.ys)] or [1.0, 10.0]
    ends = [min(values), max(values)]
    exact = Series("exact", ends, ends, "quiet")
    x, y = (
        Axis(name, tick=lambda value: seconds(value / 1e6))
        for name in ("measured", "predicted")
    )
    if len(series) < 2:
        return Chart(title, subtitle, x, y, [*series, exact])
    exact = exact._replace(label="")
    charts = [
        Chart(points.label, error, x, y, [points._replace(label=""), exact])
        for points, error in zip(series, errors, strict=True)
    ]
    over = (title, f"{subtitle}; the line: exact")
    return joined([charts[0]._replace(over=over), *charts[1:]])


def measured_times_chart(name: str, times: "MeasuredTimes") -> Chart:
    """Return predicted over measured times of a file of rows, by operation."""
    count = times.num_predicted
    rows = f"{plural(count, 'row')} of {few(times.gpus)}"
    about = f"{name}: {rows}, predicted by a calibration, else by the bound"
    if count < times.num_rows:
        about += f"; {times.num_rows - count:,} without a prediction are not drawn"
    return predicted_against_measured(times.times_us, about)
