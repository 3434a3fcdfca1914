"""Charts of `compare`, of measured next to predicted times, and of the Pareto front of `plan`."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UserError
from kvcalc.records import Record, Records
from kvcalc.report.charts.chart import (
    FLOPS_AXIS,
    INTENSITY_AXIS,
    Axis,
    Chart,
    Series,
    bar_chart,
    bytes_tick,
    plain_tick,
    si_tick,
    time_tick,
    whole_tick,
    with_picture_head,
)
from kvcalc.report.charts.load_plot import deployment_names
from kvcalc.report.charts.roofline_plot import intensity_ends, roofs
from kvcalc.report.charts.size_plot import cache_vs_context
from kvcalc.report.text.compare_text import compared
from kvcalc.report.text.plan_text import deployment_words, requirement_words, sentence
from kvcalc.report.text.tables import (
    BOUND,
    comparable_records,
    distinct_values,
    seconds,
    time_note,
)

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.planning.best_configs import BestConfigs
    from kvcalc.planning.sweeps import CacheCurve
    from kvcalc.timing.deployment import TimedDeployment

MAX_POINTS = 2000  # points of a series; if there are more, every n-th is drawn


def measured_chart(records: Records) -> Chart:
    """Return a roofline chart with the attention of each measured layer, and its prediction.

    The roofline is the highest memory bandwidth and FLOP rate measured on the same machine. For a
    layer with linear attention, the point is its scan.

    Args:
        records: Records of `measure`, one per layer variant, phase and shape.
    """

    def flops_per(rows: Records, key: str) -> list[float]:
        return [r["attention_flops"] / r[key] for r in rows]

    first = records[0]
    bandwidth, peak = first["bandwidth_bytes_per_s"], first["flops_per_s"]
    ridge = peak / bandwidth
    measured = [record for record in records if record["attention_bytes"]]
    intensities = flops_per(measured, "attention_bytes")
    xs = [min([ridge / 8, *(x / 2 for x in intensities if x)])]
    xs += [ridge, max([ridge * 8, *(x * 2 for x in intensities)])]
    series = [
        Series("measured ceilings", xs, [min(x, ridge) * bandwidth for x in xs], colour=0)
    ]
    for number, phase in enumerate(distinct_values(measured, "phase"), 1):
        rows = [r for r in measured if r["phase"] == phase]
        xs = flops_per(rows, "attention_bytes")
        ys = flops_per(rows, "attention_measured_s")
        names = [r["variant"] for r in rows]
        labels = [name * (names.index(name) == n) for n, name in enumerate(names)]
        series.append(Series(phase, xs, ys, "points", labels=labels, colour=number))
        ys = flops_per(rows, "attention_predicted_s")
        sizes = [0.04] * len(rows)  # a hollow mark with a size hides no other mark
        series.append(Series(f"{phase}, predicted", xs, ys, "hollow", sizes, colour=number))
    subtitle = (
        f"{first['device']}, {first['dtype']}: {si_tick('B/s')(bandwidth)} and "
        f"{si_tick('FLOP/s')(peak)} measured; points: attention or scan only"
    )
    return Chart(
        "Measured layers under the measured roofline",
        subtitle,
        INTENSITY_AXIS,
        FLOPS_AXIS,
        series,
    )


def generation_chart(records: Records) -> Chart:
    """Return a chart of the seconds of each generated token over the number of tokens so far.

    The seconds of a token are for one forward pass for all sequences of the batch.

    Args:
        records: Records of `measure --generate`. Each record gives two curves: measured and
            predicted seconds.
    """
    first = records[0]
    start = first["prompt_len"] + 1
    lengths = range(start, start + first["new_tokens"])
    series = []
    for number, record in enumerate(records):
        name = f"{record['variant']} {record['mode']}".strip()
        name += ", head on all" if record["head"] == "all" else ""
        predicted = record["predicted_token_s"]
        series += [
            Series(name, lengths, record["token_s"], colour=number),
            Series(f"{name}: predicted", lengths, predicted, "dashed", colour=number),
        ]
    subtitle = f"{first['device']}, {first['dtype']}: prompt of {first['prompt_len']:,}"
    x = Axis("tokens so far", whole_tick, log=False)
    return Chart(
        f"{first['model']}: time per token", subtitle, x, Axis("time", seconds), series
    )


def predicted_against_measured(
    operations: Sequence[tuple[str, Any, Any]], subtitle: str
) -> list[Chart]:
    """Return a chart per operation: the predicted time of each measurement over its measured time.

    A point on the diagonal line is an exact prediction. Measurements without a prediction (NaN) are
    left out.

    Args:
        operations: (name of the operation, measured microseconds, predicted microseconds) for each
            operation. The times are arrays with one element per measurement.
        subtitle: Description of the measurements.

    Raises:
        UserError: No measurement has both times.
    """
    x, y = (
        Axis(name, lambda value: seconds(value / 1e6)) for name in ("measured", "predicted")
    )
    charts: list[Chart] = []
    for name, measured, predicted in operations:
        pairs = [(float(m), float(p)) for m, p in zip(measured, predicted) if m > 0 and p > 0]
        if not pairs:
            continue
        ratios = sorted(abs(math.log(p / m)) for m, p in pairs)
        median = math.expm1(ratios[len(ratios) // 2])
        error = f"{len(pairs):,} rows, median error {100 * median:.1f}%"
        xs, ys = zip(*pairs[:: -(-len(pairs) // MAX_POINTS)])
        points = Series("", xs, ys, "points", colour=len(charts))
        ends = [min(*xs, *ys), max(*xs, *ys)]
        charts.append(Chart(name, error, x, y, [points, Series("", ends, ends, "quiet")]))
    if not charts:
        raise UserError("there is nothing to draw: no row has a measured and a predicted time")
    return with_picture_head(
        charts, ("Predicted against measured", f"{subtitle}; the line: exact")
    )


def compare_chart(
    deployments: "Sequence[TimedDeployment]",
    records: Records,
    sweep: "Sequence[Sequence[CacheCurve]]",
) -> list[Chart]:
    """Return charts that compare the attention variants of one model.

    Bytes and FLOPs are of one GPU. Bar charts show the stored cache, the cache bytes that a decode
    step reads, and its seconds. A roofline chart shows the FLOP per byte of attention. The last
    charts show the cache over contexts.

    Args:
        deployments: Deployments of one model.
        records: Records of `compare`: all records of the first deployment, then of the second, and
            so on.
        sweep: For each deployment, a curve per variant with the cache bytes over contexts.
    """
    first = records[0]
    is_timed = first["weight_bytes"] is not None  # otherwise only dimensions are known
    timed_rows = comparable_records(records) if is_timed else []
    _, names = deployment_names(deployments)
    loads = [*dict.fromkeys(map(_load, records))]
    per_gpu = " per GPU" * any(record["gpus"] > 1 for record in records)
    count = len(records) // len(deployments)
    groups = [
        [r for r in records[start : start + count] if _load(r) == loads[0]]
        for start in range(0, len(records), count)
    ]
    rows = groups[0]
    charts = [
        _bars(f"KV cache stored{per_gpu}", "kv_cache_bytes", rows, bytes_tick),
        _bars(f"Read by a decode step{per_gpu}", "kv_cache_read_bytes", rows, bytes_tick),
        _attention_roof(deployments[0].gpu, rows)
        if first.get("computed_in")
        else _bars("Attention's FLOP per byte read", "attention_intensity", rows, plain_tick),
    ]
    for deployment, name, group in zip(deployments, names, groups):
        if group[0] in timed_rows:
            title = f"Decode step: {name or deployment.gpu.name}"
            steps = [{**r, "time_s": r["time_s"] or r["roofline_s"]} for r in group]
            charts.append(_bars(title, "time_s", steps, time_tick))
    gpus = [deployment.gpu for deployment in deployments] if is_timed else []
    curves = [cache_vs_context(row, [first["batch_size"]], gpus) for row in sweep]
    charts += {str(curve.series): curve for curve in curves}.values()
    about = [loads[0] if len(loads) == 1 else f"{loads[0]}, the first of {len(loads)} loads"]
    if is_timed:
        about.append(time_note(records))
        if undrawn := [*dict.fromkeys(r["gpu"] for r in records if r not in timed_rows)]:
            about.append(f"steps without a prediction are not drawn: {', '.join(undrawn)}")
    return with_picture_head(charts, (compared(deployments[0], rows), "; ".join(about)))


def _attention_roof(gpu: "Gpu", records: Records) -> Chart:
    """Return a chart of the attention of each variant under the roof of a GPU, at its datasheet
    bound."""
    drawn = [record for record in records if record["attention_intensity"]]
    xs = [record["attention_intensity"] for record in drawn]
    ys = [record["attention_flops_per_s"] for record in drawn]
    series = roofs(gpu, records[0]["computed_in"].split("+"), intensity_ends(xs))
    series.append(Series("", xs, ys, "points", labels=_variant_names(drawn), colour=0))
    title = f"Attention of a decode step under the roof of {gpu.name}"
    return Chart(title, _load(records[0]), INTENSITY_AXIS, FLOPS_AXIS, series)


def _variant_names(records: Records) -> list[str]:
    return [
        f"original {r['attention']}" if r["variant"] == "none" else r["variant"]
        for r in records
    ]


def _load(record: Record) -> str:
    return f"{record['batch_size']:,} × {record['context']:,} tokens"


def _bars(title: str, key: str, rows: Records, tick: Callable[[float], str]) -> Chart:
    """Return a bar chart of one figure of each variant."""
    names = _variant_names(rows)
    if key == "time_s":
        texts = [": does not fit" * (record["fits"] is False) for record in rows]
        names = [name + text for name, text in zip(names, texts)]
    return bar_chart(title, "", names, [float(r[key] or 0) for r in rows], tick)


POINTS = "A point is a deployment that no other beats in both"


def front_chart(answer: "BestConfigs") -> Chart:
    """Return a chart of the Pareto-optimal deployments: TPOT in seconds against throughput.

    Throughput is tokens per second per GPU. If prices are given, it is tokens per second ÷ price of
    an hour. The chart marks the best deployment and the TPOT target.

    Args:
        answer: The search result for one load with its targets.
    """
    front = answer.front
    tpot_s, rates = front.xs.tolist(), front.ys.tolist()
    best = answer.best[0] if answer.best else None
    points = [*zip(tpot_s, rates, front.items)]
    series = [Series("", tpot_s, rates, "edge", colour=0)]
    for label, kind, meets in (
        ("meets the targets", "points", True),
        ("misses a target", "hollow", False),
    ):
        rows = [
            (tpot, rate, deployment_words(point) if index in (0, len(points) - 1) else "")
            for index, (tpot, rate, point) in enumerate(points)
            if point.meets == meets and point != best
        ]
        if rows:
            xs, ys, texts = zip(*rows)
            series.append(Series(label, xs, ys, kind, labels=texts, colour=0))
    if best and best.tpot:
        rate = (best.tokens_per_s_per_gpu or 0.0) / answer.prices.get(best.gpu, 1.0)
        labels = [deployment_words(best)]
        series.append(Series("the answer", [best.tpot], [rate], "points", [0.1], labels, 1))
    max_tpot = answer.need.max_tpot
    if max_tpot and max(tpot_s) > max_tpot / 2:
        series.append(Series(f"at most {seconds(max_tpot)}", [max_tpot], [1.0], "upright"))
    basis = f"times: {answer.basis}"
    if answer.basis != BOUND and len(answer.fronts[True].xs):
        basis += ", bounds not drawn"
    model = answer.answers[0].deployment.model.name if answer.answers else ""
    return Chart(
        title=f"{model} for {requirement_words(answer.need)}".removeprefix(" for "),
        subtitle=f"{sentence(answer)} {POINTS}; {basis}",
        x=Axis("TPOT", seconds),
        y=Axis(
            f"tokens/s per {'price of an hour' if answer.prices else 'GPU'}", tick=plain_tick
        ),
        series=series,
    )
