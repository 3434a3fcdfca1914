"""Pictures under the roofs of GPUs: operators of passes, and variants of attention."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Record
from kvcalc.report.charts.chart import (
    FLOPS_AXIS,
    INTENSITY_AXIS,
    Chart,
    Series,
    joined,
    si_tick,
)
from kvcalc.report.charts.series_styles import GREY
from kvcalc.report.row_names import keep_distinguishing_columns, shared_words

KINDS = ("attention", "GEMMs with weights")
ROLES = ("core", "projection", "ffn", "head")  # roles of operators that are drawn
SWEPT = {"batch_size": "batch", "context": "context"}
NEAR = 1.4  # ratio of intensities up to which operators are one point
MIN_SHARE = 0.02  # share of a pass below which operators have no name
MAX_NAMES = 4  # operators or steps that a label lists
MAX_STEPS = 6  # steps of a sweep that have labels
MAX_LABELLED = 2  # charts on which roofs have labels
BELOW_RIDGE = 1.5  # ratio by which the roof of another GPU begins below its ridge point
FAMILIES = ("MHA", "GQA-8", "GQA-4", "MQA", "MLA", "DSA")  # in the order of the palette
# values that distinguish charts, the weightiest first
WORDING = {
    "model": "{}",
    "phase": "{}",
    "gpu": "on {}",
    "dtype": "{}",
    "tensor_parallel_size": "tp {}",
}
Item = TypeVar("Item")
Pass = Sequence[Record]


class RooflinePoint(NamedTuple):
    """Operators of one pass with similar intensities.

    Attributes:
        kind: Index into KINDS.
        name: Names of the operators, or KINDS.
        x: FLOP per byte.
        y: FLOP per second at the datasheet bound.
        share: Share of the pass's bound.
        predicted: FLOP per second as calibrated; None without a calibration.
        step: Batch size and context of the pass.
    """

    kind: int
    name: str
    x: float
    y: float
    share: float
    predicted: float | None
    step: tuple[int, ...]


def roofline_chart(passes: Sequence[Pass], gpus: Sequence[Gpu]) -> Chart:
    """Return the operators of passes under the roofs of their GPUs.

    Each deployment and phase has a separate chart. Charts have equal axes.

    Args:
        passes: Records of each pass; the last record of a pass is its total.
        gpus: GPUs of the passes.

    Raises:
        UserError: A GPU has no matrix peak.
    """
    operators = [row for rows in passes for row in _operators(rows)]
    ends = [
        min([0.5, *(row["intensity"] / 3 for row in operators)]),
        max([4000.0, *(row["intensity"] * 2 for row in operators)]),
    ]
    groups: dict[tuple[str, ...], list[Pass]] = {}
    for rows in passes:
        words = tuple(text.format(rows[0][key]) for key, text in WORDING.items())
        groups.setdefault(words, []).append(rows)
    is_brief = len(groups) > MAX_LABELLED
    dtypes = _dtypes(operators)
    charts = []
    for words, group in zip(
        keep_distinguishing_columns([*groups]), groups.values(), strict=True
    ):
        chart = _deployment_chart(group, gpus, dtypes, ends, is_brief)
        charts.append(chart._replace(title=" ".join(words).removeprefix("on ")))
    heights = [y for chart in charts for series in chart.series for y in series.ys]
    y_axis = FLOPS_AXIS._replace(shown=[min(heights), 2 * max(heights)])
    parts = [chart.subtitle.split("; ") for chart in charts]
    common = [part for part in parts[0] if all(part in other for other in parts)]
    for number, own in enumerate(parts):
        subtitle = "; ".join(part for part in own if part not in common)
        charts[number] = charts[number]._replace(subtitle=subtitle, y=y_axis)
    firsts = [rows[0] for rows in passes]
    title = " ".join(
        shared_words(firsts, {key: WORDING[key] for key in ("model", "phase", "gpu")})
    )
    if firsts[0]["tensor_parallel_size"] > 1:
        title += "".join(shared_words(firsts, {"tensor_parallel_size": ", tp {}"}))
    key = "points: at the datasheet bound"
    if any(row["time_s"] for row in operators):
        key = "filled: at the datasheet bound; hollow: as calibrated"
    over = (f"Roofline: {title}", "; ".join([*common, key]))
    if len(charts) == 1:
        return charts[0]._replace(title=over[0], subtitle=over[1])
    return joined([charts[0]._replace(over=over), *charts[1:]])


def _operators(rows: Pass) -> list[Record]:
    """Return the operators of a pass that are drawn."""
    return [
        row for row in rows[:-1] if row["flops"] and row["intensity"] and row["role"] in ROLES
    ]


def _dtypes(operators: Iterable[Record]) -> list[str]:
    return [*dict.fromkeys(row["computed_in"] for row in operators if row["computed_in"])]


def _deployment_chart(
    passes: Sequence[Pass],
    gpus: Sequence[Gpu],
    dtypes: Sequence[str],
    ends: Sequence[float],
    is_brief: bool,
) -> Chart:
    """Return the passes of one deployment in one phase. Brief charts name roofs in words."""
    cards = {gpu.name: gpu for gpu in gpus}
    gpu = cards.pop(passes[0][0]["gpu"])
    own_peaks = {gpu.peak(dtype)[0] for rows in passes for dtype in _dtypes(rows[:-1])}
    own_roofs = roofs(gpu, [dtype for dtype in dtypes if gpu.peak(dtype)[0] in own_peaks], ends)
    series = [
        roof._replace(label="", kind="quiet")
        for other in cards.values()
        for roof in roofs(other, dtypes, ends)
        if roof.kind == "solid"
    ]
    steps = {key: sorted({rows[0][key] for rows in passes}) for key in SWEPT}
    about = [", ".join(f"{word} {_listed(steps[key])}" for key, word in SWEPT.items())]
    about.append(si_tick("B/s")(gpu.bandwidth_bytes_per_s))
    if is_brief:
        names = [text for roof in own_roofs for text in (roof.label, *roof.labels) if text]
        about.append(", ".join(names))
        own_roofs = [roof._replace(label="", labels=()) for roof in own_roofs]
    missing = [rows[-1] for rows in passes if rows[-1].get("fits") is False]
    if len(missing) == len(passes):
        about.append("does not fit in the memory")
    elif missing:
        loads = [f"{row['batch_size']:,} × {row['context']:,} tokens" for row in missing]
        about.append(f"beyond the memory: {', '.join(loads)}")
    series += own_roofs
    points = [point for rows in passes for point in _points(rows)]
    labels = _labels(points, [len(values) > 1 for values in steps.values()], is_brief)
    points.sort(key=lambda point: -point.share)
    for kind in dict.fromkeys(point.kind for point in points):  # the larger gets labels first
        same = [point for point in points if point.kind == kind]
        xs = [point.x for point in same]
        sizes = [point.share for point in same]
        texts = [labels.get(id(point), "") for point in same]
        ys = [point.y for point in same]
        series.append(Series(KINDS[kind], xs, ys, "points", sizes, texts, kind))
        if any(point.predicted for point in same):
            predicted = [point.predicted or 0.0 for point in same]
            series.append(Series("", xs, predicted, "hollow", sizes, colour=kind))
    return Chart("", "; ".join(about), INTENSITY_AXIS, FLOPS_AXIS, series, areas="of the pass")


def _listed(values: Sequence[int]) -> str:
    """Return 1, 8, 64, or the first and the last of many values."""
    if len(values) > MAX_NAMES:
        return f"{values[0]:,} to {values[-1]:,}"
    return ", ".join(f"{value:,}" for value in values)


def _clusters(items: Iterable[Item], intensity: Callable[[Item], float]) -> list[list[Item]]:
    """Return the items in groups of similar intensity, by intensity."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=intensity):
        if not groups or intensity(item) > NEAR * intensity(groups[-1][-1]):
            groups.append([])
        groups[-1].append(item)
    return groups


def _points(rows: Pass) -> list[RooflinePoint]:
    """Return the points of a pass: operators of a kind with similar intensities."""
    points = []
    for kind, name in enumerate(KINDS):
        same = [row for row in _operators(rows) if (row["role"] != "core") == kind]
        for group in _clusters(same, lambda row: float(row["intensity"])):
            flops, size, bound, share, time = (
                sum(row[key] or 0 for row in group)
                for key in ("flops", "bytes", "roofline_s", "share", "time_s")
            )
            names = [*dict.fromkeys(row["operator"] for row in group)]
            is_listed = kind and len(names) <= MAX_NAMES
            points.append(
                RooflinePoint(
                    kind=kind,
                    name=", ".join(names) if is_listed else name,
                    x=flops / size,
                    y=flops / bound,
                    share=share,
                    predicted=flops / time if all(row["time_s"] for row in group) else None,
                    step=tuple(rows[0][key] for key in SWEPT),
                )
            )
    return points


def _labels(
    points: Sequence[RooflinePoint], is_swept: Sequence[bool], is_brief: bool
) -> dict[int, str]:
    """Return labels by id of the point: its name, and its steps of a sweep.

    A label is at the largest of the points of a name that are close together. If attention and
    GEMMs both move in a sweep, only the ends of their ways have labels. Brief labels name steps
    only, because the key names the kinds.
    """
    by_name: dict[tuple[int, str], list[RooflinePoint]] = {}
    for point in points:
        by_name.setdefault((point.kind, point.name), []).append(point)
    places = {
        name: _clusters(same, lambda point: point.x)
        for (kind, name), same in by_name.items()
        if kind == 0 or max(point.share for point in same) >= MIN_SHARE
    }
    num_moving = sum(len(clusters) > 1 for clusters in places.values())
    labels = {}
    for name, clusters in places.items():
        if len(clusters) > (MAX_STEPS if num_moving == 1 else 2):
            clusters = [clusters[0], clusters[-1]]
        for number, cluster in enumerate(clusters):
            is_named = number == 0 or num_moving > 1
            words = [name] if is_named and not (is_brief and name in KINDS) else []
            for index, word in enumerate(SWEPT.values()):
                values = sorted({point.step[index] for point in cluster})
                if len(values) < len({point.step[index] for point in points}):
                    words.append(f"{word} {_listed(values)}")
                elif is_swept[index] and not is_brief:
                    words.append(f"every {word}")
            labels[id(max(cluster, key=lambda point: point.share))] = ", ".join(words)
    return labels


def _peaks(gpu: Gpu, dtypes: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the ridge point and the peak of a GPU for the data types, by their names.

    Raises:
        UserError: The GPU has no matrix peak.
    """
    if not dtypes:
        raise UserError(f"{gpu.name} has no matrix peak, and so no roof")
    names: dict[float, list[str]] = {}
    for dtype in dict.fromkeys(gpu.peak(dtype)[1] for dtype in dtypes):
        names.setdefault(gpu.flops_per_s[dtype], []).append(dtype)
    return {
        f"{', '.join(same)} {peak / 1e12:g} TFLOP/s": (peak / gpu.bandwidth_bytes_per_s, peak)
        for peak, same in names.items()
    }


def roofs(gpu: Gpu, dtypes: Sequence[str], ends: Sequence[float]) -> list[Series]:
    """Return a roof and its ridge point for each peak of a GPU, between intensities, in grey.

    Raises:
        UserError: The GPU has no matrix peak.
    """
    series = []
    low, high = ends
    for name, (ridge, peak) in _peaks(gpu, dtypes).items():
        ys = [low * gpu.bandwidth_bytes_per_s, peak, peak]
        series.append(Series(name, [low, ridge, high], ys, "solid", colour=GREY))
        text = f"ridge point {ridge:.1f}"
        series.append(Series("", [ridge], [peak], "points", [0.0], [text], GREY))
    return series


def attention_chart(
    records: Sequence[Record], sweep: Sequence[Record], gpus: Sequence[Gpu], shape: str
) -> Chart:
    """Return every variant of attention under the roof of the first GPU.

    Args:
        records: Records of attention on the first GPU.
        sweep: The same over contexts; they are broad faint lines.
        gpus: GPUs; the roofs of the others are thin, from just below their ridge points.
        shape: Shape of the layer.
    """
    gpu, *others = gpus
    dtypes = _dtypes(records)
    last = 2 * max(record["intensity"] for record in (*records, *sweep))
    series = []
    for other in others:
        for name, (ridge, peak) in _peaks(other, dtypes).items():
            label = f"{other.name} {name}, ridge point {ridge:.1f}"
            xs, ys = [ridge / BELOW_RIDGE, ridge, last], [peak / BELOW_RIDGE, peak, peak]
            series.append(Series(label, xs, ys, "quiet"))
    for roof in roofs(gpu, dtypes, [0.5, last]):
        label = f"{gpu.name} {roof.label}" if others and roof.label else roof.label
        series.append(roof._replace(label=label))
    series += _attention_points(records, sweep, len(others))
    title = f"Attention under the roof of {gpu.name}"
    note = "and the gap to the ridge point"
    if others:
        names = " and ".join(other.name for other in others)
        title += f", with {names if len(others) < 3 else f'{len(others)} others'}"
        note = "thin: other roofs, from just below their ridge points"
    contexts = [record["context"] for record in sweep]
    subtitle = (
        f"{shape}, batch {records[0]['batch_size']:,}, context {records[0]['context']:,}; at the "
        f"points FLOP per byte, {note}; bands: contexts {min(contexts):,} to {max(contexts):,}"
    )
    return Chart(title, subtitle, INTENSITY_AXIS, FLOPS_AXIS, series)


def _attention_points(
    records: Sequence[Record], sweep: Sequence[Record], num_others: int
) -> list[Series]:
    """Return the points of attention, and their ways over contexts.

    Variants that are compute-bound in prefill are close together and have one label. With the
    roofs of more than two other GPUs, the key names these variants.
    """
    series = []
    bound = [r for r in records if r["phase"] == "prefill" and r["to_knee"] <= 1]
    ranked = [*bound, *(record for record in records if record not in bound)]
    prefill = ", ".join(
        f"{r['attention'].removesuffix(' prefill')} {r['intensity']:,.0f}" for r in bound
    )
    for record in ranked:  # the widest label first
        name = record["attention"]
        colour = next(n for n, family in enumerate(FAMILIES) if name.startswith(family))
        path = [_place(r) for r in sweep if r["attention"] == name]
        xs, ys = zip(*path, strict=True)
        series.append(Series("", xs, ys, "span", colour=colour))
        key, label = "", f"{name}: {record['intensity']:,.0f}"
        if record["to_knee"] > 1 and not num_others:
            label += f" (gap {record['to_knee']:,.3g}×)"
        if record in bound and num_others > 2:  # roofs leave no room
            key, label = label, ""
        elif record in bound:
            label = f"prefill {prefill}" if record is bound[0] else ""
        x, y = _place(record)
        texts = [label] if label else []
        series.append(Series(key, [x], [y], "points", [0.12], texts, colour))
    return series


def _place(record: Record) -> tuple[float, float]:
    return record["intensity"], record["flops"] / record["roofline_s"]
