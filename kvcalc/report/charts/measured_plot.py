"""Pictures of measurements: layers under the measured roof, generated tokens, and predictions."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

MAX_NAMED = 3  # generation modes whose predictions are named
LOG_RANGE = 5  # largest over smallest time above which the axis is logarithmic
MAX_SERIES = 4  # operations on one chart
MAX_CROWD = 300  # points of several operations on one chart
MAX_POINTS = 2000  # points of a series; if there are more, every n-th is drawn
MAX_GPUS = 4  # GPUs that a subtitle names


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
    """Return the variant at the highest of its points.

    A label has the batch sizes and contexts of the variant if the phase has several.
    """
    labels = [""] * len(ys)
    for variant in dict.fromkeys(record["variant"] for record in records):
        group = [index for index, r in enumerate(records) if r["variant"] == variant]
        words = [variant]
        for key, name in (("batch_size", "batch "), ("context", "")):
            if len({record[key] for record in records}) > 1:
                sizes = sorted({records[index][key] for index in group})
                ends = dict.fromkeys([sizes[0], sizes[-1]])
                words.append(name + "–".join(f"{size:,}" for size in ends))
        labels[max(group, key=lambda index: ys[index])] = ", ".join(words)
    return labels


def generation_chart(records: Sequence[Record]) -> Chart:
    """Return milliseconds of each generated token, measured and predicted."""
    first = records[0]
    is_named = len(records) <= MAX_NAMED
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
        label = f"{name}: predicted" if is_named else ""
        series.append(Series(label, lengths, predicted, "dashed", colour=number))
    if not is_named:
        subtitle += "; thin: predicted"
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

    Many points have a chart for each operation. Rows without a prediction (NaN) are left out.

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
    is_crowded = len(series) > MAX_SERIES or len(values) > 2 * MAX_CROWD
    if len(series) < 2 or not is_crowded:
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
    basis = f"a calibration in {times.num_calibrated:,}, else the bound"
    if times.num_calibrated in (0, count):
        basis = "a calibration" if times.num_calibrated else "the bound"
    gpus = f"{len(times.gpus)} GPUs"
    if len(times.gpus) <= MAX_GPUS:
        gpus = ", ".join(times.gpus)
    about = f"{name}: {plural(count, 'row')} of {gpus}, predicted by {basis}"
    if count < times.num_rows:
        about += f"; {times.num_rows - count:,} without a prediction are not drawn"
    return predicted_against_measured(times.times_us, about)
