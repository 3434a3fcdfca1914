"""Roofline pictures: operators of passes, and variants of attention."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from kvcalc.arithmetic import grouped
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Record, Records
from kvcalc.report.charts.chart import (
    FLOPS_AXIS,
    INTENSITY_AXIS,
    Chart,
    Series,
    si_tick,
    with_picture_head,
)
from kvcalc.report.charts.series_styles import GREY
from kvcalc.report.row_names import shared_words, sides, texts_by_name
from kvcalc.report.text.tables import distinct_values

KINDS = ("attention", "GEMMs with weights")
ROLES = ("core", "projection", "ffn", "head")  # roles of operators that are drawn
SWEPT_WORDING = {"batch_size": "batch", "context": "context"}
SAME_POINT_RATIO = 1.4  # ratio of intensities up to which operators are one point
MIN_SHARE = 0.02  # share of a pass below which operators have no name
MAX_NAMES = 4  # operators or steps that a label lists
MAX_STEPS = 6  # steps of a sweep that have labels
MAX_LABELLED = 2  # charts on which roofs have labels
BELOW_RIDGE = 1.5  # ratio by which the roof of another GPU begins below its ridge point
FAMILIES = ("MHA", "GQA-8", "GQA-4", "MQA", "MLA", "DSA")  # in the order of the palette
# values that distinguish charts, the weightiest first
WORDING = texts_by_name("""
    model: {}
    phase: {}
    gpu: on {}
    dtype: {}
    tensor_parallel_size: tp {}
""")
Item = TypeVar("Item")


class RooflinePoint(NamedTuple):
    """One marker of a roofline chart: operators of one forward pass with similar FLOP per byte.

    Attributes:
        kind: "attention" or "GEMMs with weights".
        name: Names of the operators, or `kind` if there are too many to list.
        x: FLOP per byte.
        y: FLOP per second at the datasheet bound.
        share: The operators' share of the pass's time, from 0 to 1.
        predicted: FLOP per second as the calibration (time models fitted to measured kernels)
            predicts; 0 without a calibration.
        step: [batch size, context] of the pass.
    """

    kind: str
    name: str
    x: float
    y: float
    share: float
    predicted: float
    step: list[int]


def roofline_chart(passes: Sequence[Records], gpus: Sequence[Gpu]) -> list[Chart]:
    """Return roofline charts with the operators of forward passes, one per deployment and phase.

    All charts have the same axes: FLOP per byte, and FLOP per second.

    Args:
        passes: For each pass, the records of `roofline`: one per operator, then their total.
        gpus: GPUs of the passes. Their peaks and bandwidths are the roofs.

    Raises:
        UserError: A GPU has no published peak of its matrix units.
    """
    operators = [row for rows in passes for row in _operators(rows)]
    ends = intensity_ends([row["intensity"] for row in operators])
    firsts = [rows[0] for rows in passes]
    groups = grouped(zip(sides(firsts, WORDING, WORDING).names, passes))
    charts = []
    for name, group in groups.items():
        chart = _deployment_chart(group, gpus, operators, ends, len(groups) > MAX_LABELLED)
        charts.append(chart._replace(title=name.removeprefix("on ")))
    heights = [y for chart in charts for series in chart.series for y in series.ys]
    y_axis = FLOPS_AXIS._replace(shown=[min(heights), 2 * max(heights)])
    charts = [chart._replace(y=y_axis) for chart in charts]
    keys = ["model", "phase", "gpu"]
    if firsts[0]["tensor_parallel_size"] > 1:
        keys.append("tensor_parallel_size")
    title = f"Roofline: {' '.join(shared_words(firsts, {key: WORDING[key] for key in keys}))}"
    loads = ", ".join(
        f"{word} {_list_values({rows[key] for rows in firsts})}"
        for key, word in SWEPT_WORDING.items()
    )
    key = "points: at the datasheet bound; area: share of the pass"
    if any(row["time_s"] for row in operators):
        key = f"filled {key}; hollow: as calibrated"
    if len(charts) == 1:
        return [
            charts[0]._replace(title=title, subtitle=f"{loads}; {charts[0].subtitle}; {key}")
        ]
    return with_picture_head(charts, (title, f"{loads}; {key}"))


def intensity_ends(intensities: Sequence[float]) -> list[float]:
    """Return [smallest, largest] FLOP per byte for the horizontal axis of roofline charts.

    The range includes a margin around the intensities and the usual ridge points. All charts of a
    picture get the same range, so that they can be compared.

    Args:
        intensities: FLOP per byte of the points on the charts.
    """
    low, high = min([1.5, *intensities]), max([2000.0, *intensities])
    return [low / 3, 2 * high]


def _operators(rows: Records) -> list[Record]:
    """Return the operators of a pass that the chart shows."""
    return [
        row for row in rows[:-1] if row["flops"] and row["intensity"] and row["role"] in ROLES
    ]


def _deployment_chart(
    passes: Sequence[Records],
    gpus: Sequence[Gpu],
    operators: Records,
    ends: Sequence[float],
    is_brief: bool,
) -> Chart:
    """Return the chart of the passes of one deployment in one phase. Brief charts name roofs in
    words."""
    gpu = next(gpu for gpu in gpus if gpu.name == passes[0][0]["gpu"])
    series = [
        roof._replace(label="", kind="quiet")
        for other in gpus
        for roof in roofs(other, distinct_values(operators, "computed_in"), ends)
        if roof.kind == "solid" and other.name != gpu.name
    ]
    about = [si_tick("B/s")(gpu.bandwidth_bytes_per_s)]
    own_operators = [row for rows in passes for row in rows[:-1]]
    for roof in roofs(gpu, distinct_values(own_operators, "computed_in"), ends):
        if is_brief:
            about += filter(None, (roof.label, *roof.labels))
            roof = roof._replace(label="", labels=())
        series.append(roof)
    missing = [
        f"{row['batch_size']:,} × {row['context']:,} tokens"
        for *_, row in passes
        if row.get("fits") is False
    ]
    if missing:
        about.append(f"beyond the memory: {', '.join(missing)}")
    series += _point_series(passes)
    return Chart("", "; ".join(about), INTENSITY_AXIS, FLOPS_AXIS, series)


def _list_values(values: Iterable[int]) -> str:
    """Return values as text, such as `1, 8, 64`; of many values, only the first and the last."""
    ordered = sorted(values)
    if len(ordered) > MAX_NAMES:
        return f"{ordered[0]:,} to {ordered[-1]:,}"
    return ", ".join(f"{value:,}" for value in ordered)


def _clusters(items: Iterable[Item], intensity: Callable[[Item], float]) -> list[list[Item]]:
    """Return the items in groups of similar intensity, in ascending order."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=intensity):
        if not groups or intensity(item) > SAME_POINT_RATIO * intensity(groups[-1][-1]):
            groups.append([])
        groups[-1].append(item)
    return groups


def _points(rows: Records, kind: str) -> list[RooflinePoint]:
    """Return the points of a pass: operators of a kind with similar intensities."""
    points = []
    same = [row for row in _operators(rows) if (row["role"] == "core") == (kind == KINDS[0])]
    for group in _clusters(same, lambda row: float(row["intensity"])):
        flops, size, bound, share, time = (
            sum(row[key] or 0 for row in group)
            for key in ("flops", "bytes", "roofline_s", "share", "time_s")
        )
        names = distinct_values(group, "operator")
        is_listed = kind == KINDS[1] and len(names) <= MAX_NAMES
        points.append(
            RooflinePoint(
                kind=kind,
                name=", ".join(names) if is_listed else kind,
                x=flops / size,
                y=flops / bound,
                share=share,
                predicted=flops / time if all(row["time_s"] for row in group) else 0.0,
                step=[rows[0][key] for key in SWEPT_WORDING],
            )
        )
    return points


def _point_series(passes: Sequence[Records]) -> list[Series]:
    """Return a series of points for each kind; the kind with the largest point is first."""
    points = [point for kind in KINDS for rows in passes for point in _points(rows, kind)]
    points.sort(key=lambda point: -point.share)
    labels = _labels(points)
    series = []
    for kind in dict.fromkeys(point.kind for point in points):  # the larger gets labels first
        same = [point for point in points if point.kind == kind]
        xs = [point.x for point in same]
        filled = Series(
            label=kind,
            xs=xs,
            ys=[point.y for point in same],
            kind="points",
            sizes=[point.share for point in same],
            labels=[labels.get(id(point), "") for point in same],
            colour=KINDS.index(kind),
        )
        predicted = [point.predicted for point in same]
        series.append(filled)
        if any(predicted):
            series.append(filled._replace(label="", ys=predicted, kind="hollow", labels=()))
    return series


def _labels(points: Sequence[RooflinePoint]) -> dict[int, str]:
    """Return labels by id of the point: the name of the point, and its steps in a sweep.

    Of points with one name that are close together, only the largest has a label. If attention and
    GEMMs both move in a sweep, only their first and last points have labels.
    """
    by_name = grouped((point.name, point) for point in points)
    places = {
        name: _clusters(same, lambda point: point.x)
        for name, same in by_name.items()
        if name == KINDS[0] or max(point.share for point in same) >= MIN_SHARE
    }
    num_moving = sum(len(clusters) > 1 for clusters in places.values())
    labels = {}
    for name, clusters in places.items():
        if len(clusters) > (MAX_STEPS if num_moving == 1 else 2):
            clusters = [clusters[0], clusters[-1]]
        for cluster in clusters:
            words = [name] if cluster is clusters[0] or num_moving > 1 else []
            for index, word in enumerate(SWEPT_WORDING.values()):
                values = {point.step[index] for point in cluster}
                if len(values) < len({point.step[index] for point in points}):
                    words.append(f"{word} {_list_values(values)}")
            labels[id(max(cluster, key=lambda point: point.share))] = ", ".join(words)
    return labels


def roofs(gpu: Gpu, dtypes: Sequence[str], ends: Sequence[float]) -> list[Series]:
    """Return the roofline of a GPU for each data type, and a marker at each ridge point, in grey.

    Args:
        gpu: The GPU.
        dtypes: Data types in which the operators compute. Types with equal peaks share a roofline.
        ends: [smallest, largest] FLOP per byte of the rooflines. If the smallest is 0, each
            roofline begins just below its ridge point.

    Raises:
        UserError: The GPU has no published peak of its matrix units.
    """
    if not dtypes:
        raise UserError(f"{gpu.name} has no matrix peak, and so no roof")
    used = dict.fromkeys(gpu.peak(dtype)[1] for dtype in dtypes)
    names = grouped((gpu.flops_per_s[dtype] * gpu.mfu, dtype) for dtype in used)
    series = []
    for peak, same in names.items():
        ridge = peak / gpu.bandwidth_bytes_per_s
        low = ends[0] or ridge / BELOW_RIDGE
        name = f"{', '.join(same)} {peak / 1e12:g} TFLOP/s"
        ys = [low * gpu.bandwidth_bytes_per_s, peak, peak]
        series.append(Series(name, [low, ridge, ends[1]], ys, "solid", colour=GREY))
        labels = [f"ridge point {ridge:.1f}"]
        series.append(Series("", [ridge], [peak], "points", [0.0], labels, GREY))
    return series


def attention_chart(records: Records, gpus: Sequence[Gpu], shape: str) -> Chart:
    """Return a chart with every attention variant under the roofline of the first GPU.

    Args:
        records: Records of `roofline` without a model, for the first GPU.
        gpus: GPUs. Rooflines of GPUs after the first are thin, and begin just below their ridge
            points.
        shape: Description of the attention layer, for the subtitle.
    """
    gpu, *others = gpus
    dtypes = distinct_values(records, "computed_in")
    last = 2 * max(record["intensity"] for record in records)
    series = []
    for other in others:
        for roof in roofs(other, dtypes, [0, last]):
            if roof.kind == "solid":
                label = f"{other.name} {roof.label}, ridge point {roof.xs[1]:.1f}"
                series.append(Series(label, roof.xs, roof.ys, "quiet"))
    series += [*roofs(gpu, dtypes, [0.5, last]), *map(_attention_point, records)]
    load = f"batch {records[0]['batch_size']:,}, context {records[0]['context']:,}"
    subtitle = f"{shape}, {load}; at the points FLOP per byte, and the gap to the ridge point"
    if others:
        subtitle += "; thin: roofs of other GPUs, from just below their ridge points"
    title = f"Attention under the roof of {gpu.name}"
    return Chart(title, subtitle, INTENSITY_AXIS, FLOPS_AXIS, series)


def _attention_point(record: Record) -> Series:
    """Return the point of a variant. Compute-bound prefill points are crowded, so the key names
    them."""
    name = record["attention"]
    colour = next(n for n, family in enumerate(FAMILIES) if name.startswith(family))
    key, labels = f"{name}: {record['intensity']:,.0f}", []
    if record["to_knee"] > 1 or record["phase"] == "decode":
        labels = [f"{key} (gap {record['to_knee']:,.3g}×)"]
        key = ""
    ys = [record["flops"] / record["roofline_s"]]
    return Series(key, [record["intensity"]], ys, "points", [0.12], labels, colour)
