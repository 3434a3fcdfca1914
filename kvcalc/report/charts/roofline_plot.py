"""Pictures under the roofs of GPUs: operators of passes, and attention of every kind."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.report.charts.chart import (
    FLOPS_AXIS,
    INTENSITY_AXIS,
    Chart,
    Series,
    joined,
    si_tick,
)
from kvcalc.report.charts.series_styles import GREY
from kvcalc.report.export import Record
from kvcalc.report.row_names import keep_distinguishing_columns

KINDS = ("attention", "products with weights")
ROLES = {
    "core": "attention",
    "projection": "projections",
    "ffn": "FFN",
    "head": "LM head",
}
SWEPT = {"batch_size": "batch", "context": "context"}
NEAR = 1.4  # ratio of intensities up to which operators are one point
MIN_SHARE = 0.02  # of a pass, below which operators have no name
MAX_NAMES = 4  # operators or steps that a label lists
MAX_STEPS = 6  # steps of a sweep that have labels
MAX_LABELLED = 2  # charts on which roofs have labels
BELOW_KNEE = 1.5  # ratio by which the roof of another GPU begins below its knee
FAMILIES = ("MHA", "GQA-8", "GQA-4", "MQA", "MLA", "DSA")  # in the order of the palette
Item = TypeVar("Item")
Ends = tuple[float, float]


class RooflinePoint(NamedTuple):
    """Operators of one pass with similar intensities.

    Attributes:
        kind: Index into KINDS.
        name: Names of the operators, or KINDS.
        x: FLOP per byte.
        y: FLOP per second at the datasheet bound.
        share: Share of the pass's bound.
        predicted: FLOP per second as calibrated; None without a calibration.
        dtype: Data type of the roof above the point.
        step: Batch size and context of the pass.
    """

    kind: int
    name: str
    x: float
    y: float
    share: float
    predicted: float | None
    dtype: str
    step: dict[str, int]


def roofline_chart(passes: Sequence[Sequence[Record]], gpus: Sequence[Gpu]) -> Chart:
    """Return the operators of passes under the roofs of their GPUs.

    Each deployment and phase has a chart of its own. Charts have equal axes.

    Args:
        passes: Records of each pass; the last record of a pass is its total.
        gpus: GPUs of the passes.

    Raises:
        UserError: A GPU has no matrix peak.
    """
    operators = [row for rows in passes for row in _operators(rows)]
    ends = (
        min([0.5, *(row["intensity"] / 3 for row in operators)]),
        max([4000.0, *(row["intensity"] * 2 for row in operators)]),
    )
    cards = {gpu.name: gpu for gpu in gpus}
    groups: dict[tuple[str, ...], list[Sequence[Record]]] = {}
    for rows in passes:
        groups.setdefault(_deployment_words(rows[0]), []).append(rows)
    is_brief = len(groups) > MAX_LABELLED
    charts = [
        _deployment_chart(
            group,
            cards,
            _dtypes(operators),
            ends,
            is_brief,
        )
        for group in groups.values()
    ]
    heights = [y for chart in charts for one in chart.series for y in one.ys]
    y_axis = FLOPS_AXIS._replace(shown=(min(heights), 2 * max(heights)))
    key = "points: at the datasheet bound"
    if any(row["time_s"] for row in operators):
        key = "filled: at the datasheet bound; hollow: as calibrated"
    parts = [chart.subtitle.split("; ") for chart in charts]
    common = [part for part in parts[0] if all(part in other for other in parts)]
    model, phase, gpu, _, tp = (
        words[0] if len(set(words)) == 1 else "" for words in zip(*groups, strict=True)
    )
    title = " ".join(filter(None, ["Roofline:", model, phase, gpu]))
    if tp not in ("", "tp 1"):
        title += f", {tp}"
    charts = [
        chart._replace(
            title=" ".join(words).removeprefix("on "),
            subtitle="; ".join(part for part in own if part not in common),
            y=y_axis,
        )
        for chart, words, own in zip(
            charts, keep_distinguishing_columns([*groups]), parts, strict=True
        )
    ]
    about = "; ".join([*common, key])
    first = charts[0]._replace(over=(title, about))
    if len(charts) == 1:
        first = charts[0]._replace(title=title, subtitle=about)
    return joined([first, *charts[1:]])


def _deployment_words(record: Record) -> tuple[str, ...]:
    return (
        record["model"],
        record["phase"],
        f"on {record['gpu']}",
        record["dtype"],
        f"tp {record['tensor_parallel_size']}",
    )


def _operators(rows: Sequence[Record]) -> list[Record]:
    """Return the operators of a pass that are drawn."""
    return [
        row for row in rows[:-1] if row["flops"] and row["intensity"] and row["role"] in ROLES
    ]


def _dtypes(operators: Iterable[Record]) -> list[str]:
    return [*dict.fromkeys(row["computed_in"] for row in operators if row["computed_in"])]


def _deployment_chart(
    passes: Sequence[Sequence[Record]],
    cards: dict[str, Gpu],
    dtypes: Sequence[str],
    ends: Ends,
    is_brief: bool,
) -> Chart:
    """Return the passes of one deployment in one phase. Brief charts name roofs in words."""
    gpu = cards[passes[0][0]["gpu"]]
    own = {gpu.peak(dtype)[0] for dtype in _dtypes(row for rows in passes for row in rows[:-1])}
    own_roofs = roofs(gpu, [dtype for dtype in dtypes if gpu.peak(dtype)[0] in own], ends)
    series = []
    for other in cards.values():
        if other is not gpu:
            grey = [roof for roof in roofs(other, dtypes, ends) if roof.kind == "solid"]
            series += [roof._replace(label="", kind="quiet") for roof in grey]
    steps = {key: sorted({rows[0][key] for rows in passes}) for key in SWEPT}
    about = [f"{word} {_listed(steps[key])}" for key, word in SWEPT.items()]
    about = [", ".join(about), si_tick("B/s")(gpu.bandwidth_bytes_per_s)]
    if is_brief:
        names = [text for roof in own_roofs for text in (roof.label, *roof.labels) if text]
        about.append(", ".join(names))
        own_roofs = [roof._replace(label="", labels=()) for roof in own_roofs]
    about += _missing_memory(passes)
    series += own_roofs
    points = [point for rows in _named_passes(passes) for point in rows]
    labels = _labels(points, [key for key in SWEPT if len(steps[key]) > 1])
    by_share = sorted(points, key=lambda point: -point.share)
    if is_brief:  # the key names the kinds
        for identity, text in labels.items():
            words = [word for word in text.split(", ") if word not in KINDS]
            labels[identity] = ", ".join(word for word in words if "every" not in word)
    for kind in dict.fromkeys(point.kind for point in by_share):  # the larger gets labels first
        same = [point for point in by_share if point.kind == kind]
        series += [*_path(same, gpu), *_markers(same, labels)]
    subtitle = "; ".join(about)
    return Chart(
        "",
        subtitle,
        INTENSITY_AXIS,
        FLOPS_AXIS,
        tuple(series),
        areas="of the pass",
    )


def _missing_memory(passes: Sequence[Sequence[Record]]) -> list[str]:
    """Return which passes do not fit in memory."""
    missing = [rows[-1] for rows in passes if rows[-1].get("fits") is False]
    if len(missing) == len(passes):
        return ["does not fit in the memory"]
    loads = [f"{row['batch_size']:,} × {row['context']:,} tokens" for row in missing]
    return [f"beyond the memory: {', '.join(loads)}"] if loads else []


def _listed(values: Sequence[int]) -> str:
    """Return 1, 8, 64; of many values the first and the last."""
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


def _named_passes(passes: Sequence[Sequence[Record]]) -> list[list[RooflinePoint]]:
    """Return the points of each pass. Products have one name if each pass has one large group."""
    named = [_points(rows) for rows in passes]
    products = [[p for p in points if p.kind and p.share >= MIN_SHARE] for points in named]
    if any(len(points) > 1 for points in products):
        return named
    return [
        [p._replace(name=KINDS[1]) if p.kind and p.share >= MIN_SHARE else p for p in points]
        for points in named
    ]


def _points(rows: Sequence[Record]) -> list[RooflinePoint]:
    points = []
    operators = _operators(rows)
    for kind in range(len(KINDS)):
        same = [row for row in operators if (row["role"] != "core") == kind]
        for group in _clusters(same, lambda row: float(row["intensity"])):
            flops, size, bound, share = (
                sum(row[key] for row in group)
                for key in ("flops", "bytes", "roofline_s", "share")
            )
            names = [*dict.fromkeys(row["operator"] for row in group)]
            if not kind or len(names) > MAX_NAMES:
                names = [*dict.fromkeys(ROLES[row["role"]] for row in group)]
            predicted = None
            if all(row["time_s"] for row in group):
                predicted = flops / sum(row["time_s"] for row in group)
            longest = max(group, key=lambda row: float(row["roofline_s"]))
            points.append(
                RooflinePoint(
                    kind=kind,
                    name=", ".join(names),
                    x=flops / size,
                    y=flops / bound,
                    share=share,
                    predicted=predicted,
                    dtype=longest["computed_in"] or "",
                    step={key: rows[0][key] for key in SWEPT},
                )
            )
    return points


def _labels(points: Sequence[RooflinePoint], swept: Sequence[str]) -> dict[int, str]:
    """Return labels by id of the point: its name, and its steps of a sweep.

    A label is at the largest of the points of a name that are close together. If attention and
    products both move in a sweep, only the ends of their ways have labels.
    """
    ways: dict[tuple[int, str], list[RooflinePoint]] = {}
    for point in points:
        ways.setdefault((point.kind, point.name), []).append(point)
    places = {
        key: _clusters(same, lambda point: point.x)
        for key, same in ways.items()
        if key[0] == 0 or max(point.share for point in same) >= MIN_SHARE
    }
    moving = sum(len(clusters) > 1 for clusters in places.values())
    labels = {}
    for (_, name), clusters in places.items():
        shown = clusters
        if len(clusters) > (MAX_STEPS if moving == 1 else 2):
            shown = [clusters[0], clusters[-1]]
        for cluster in shown:
            words = [] if cluster is not clusters[0] and moving == 1 else [name]
            for key in swept:
                values = sorted({point.step[key] for point in cluster})
                is_all = len(values) == len({point.step[key] for point in points})
                words.append(
                    f"every {SWEPT[key]}" if is_all else f"{SWEPT[key]} {_listed(values)}"
                )
            labels[id(max(cluster, key=lambda point: point.share))] = ", ".join(words)
    return labels


def _markers(points: Sequence[RooflinePoint], labels: dict[int, str]) -> list[Series]:
    """Return the points of a kind: filled at the bound, hollow as calibrated."""
    kind = points[0].kind
    filled = Series(
        label=KINDS[kind],
        xs=tuple(point.x for point in points),
        ys=tuple(point.y for point in points),
        kind="points",
        sizes=tuple(point.share for point in points),
        labels=tuple(labels.get(id(point), "") for point in points),
        colour=kind,
    )
    timed = [point for point in points if point.predicted]
    hollow = Series(
        label="",
        xs=tuple(point.x for point in timed),
        ys=tuple(point.predicted or 0.0 for point in timed),
        kind="hollow",
        sizes=tuple(point.share for point in timed),
        colour=kind,
    )
    return [filled, hollow] if timed else [filled]


def _path(points: Sequence[RooflinePoint], gpu: Gpu) -> list[Series]:
    """Return the way of the largest point of each step of a sweep, under the roof."""
    largest: dict[tuple[int, ...], RooflinePoint] = {}
    for point in points:
        largest.setdefault(tuple(point.step.values()), point)
    steps = sorted(largest.values(), key=lambda point: point.x)
    if steps[-1].x < NEAR * steps[0].x:
        return []
    places = [(steps[0].x, steps[0].y)]
    for before, after in pairwise(steps):
        peak = gpu.peak(after.dtype)[0] if after.dtype else after.y
        knee = peak / gpu.bandwidth_bytes_per_s
        if before.x < knee < after.x:
            places.append((knee, peak))
        places.append((after.x, after.y))
    xs, ys = zip(*places, strict=True)
    return [
        Series(
            "",
            xs,
            ys,
            "span",
            colour=points[0].kind,
        )
    ]


def _peaks(gpu: Gpu, dtypes: Sequence[str]) -> dict[float, str]:
    """Return the peaks of a GPU for the data types, with the names of those that have each.

    Raises:
        UserError: The GPU has no matrix peak.
    """
    if not dtypes:
        raise UserError(f"{gpu.name} has no matrix peak, and so no roof")
    names: dict[float, list[str]] = {}
    for dtype in dict.fromkeys(gpu.peak(dtype)[1] for dtype in dtypes):
        names.setdefault(gpu.flops_per_s[dtype], []).append(dtype)
    return {peak: f"{', '.join(same)} {peak / 1e12:g} TFLOP/s" for peak, same in names.items()}


def roofs(gpu: Gpu, dtypes: Sequence[str], ends: Ends) -> list[Series]:
    """Return a roof and its marked knee for each peak of a GPU, in grey, from `ends[0]` on.

    Raises:
        UserError: The GPU has no matrix peak.
    """
    series = []
    bandwidth = gpu.bandwidth_bytes_per_s
    for peak, name in _peaks(gpu, dtypes).items():
        knee = peak / bandwidth
        roof = (ends[0], knee, ends[1]), (ends[0] * bandwidth, peak, peak)
        series.append(Series(name, *roof, "solid", colour=GREY))
        text = f"knee {knee:.1f}"
        series.append(
            Series(
                "",
                (knee,),
                (peak,),
                "points",
                (0.0,),
                (text,),
                GREY,
            )
        )
    return series


def attention_chart(
    records: Sequence[Record], sweep: Sequence[Record], gpus: Sequence[Gpu], shape: str
) -> Chart:
    """Return every kind of attention under the roof of the first GPU.

    Args:
        records: Records of attention on the first GPU.
        sweep: The same over contexts; they are broad faint lines.
        gpus: GPUs; the roofs of the others are thin, from just below their knees.
        shape: Shape of the layer.
    """
    gpu, *others = gpus
    dtypes = [*dict.fromkeys(record["computed_in"] for record in records)]
    last = 2 * max(record["intensity"] for record in (*records, *sweep))
    series = []
    for other in others:
        for peak, name in _peaks(other, dtypes).items():
            knee = peak / other.bandwidth_bytes_per_s
            roof = (knee / BELOW_KNEE, knee, last), (peak / BELOW_KNEE, peak, peak)
            series.append(Series(f"{other.name} {name}, knee {knee:.1f}", *roof, "quiet"))
    for one in roofs(gpu, dtypes, (0.5, last)):
        label = f"{gpu.name} {one.label}" if others and one.label else one.label
        series.append(one._replace(label=label))
    series += _attention_points(records, sweep, len(others))
    title = f"Attention under the roof of {gpu.name}"
    notes = "and how many times more reach the knee"
    if others:
        names = " and ".join(other.name for other in others)
        title += f", beside {names if len(others) < 3 else f'{len(others)} others'}"
        notes = "thin: from just below its knee on each other roof"
    contexts = sorted(record["context"] for record in sweep)
    subtitle = (
        f"{shape}, batch {records[0]['batch_size']:,}, context {records[0]['context']:,}; at the "
        f"points FLOP per byte, {notes}; bands: contexts {contexts[0]:,} to {contexts[-1]:,}"
    )
    return Chart(
        title,
        subtitle,
        INTENSITY_AXIS,
        FLOPS_AXIS,
        tuple(series),
    )


def _attention_points(
    records: Sequence[Record], sweep: Sequence[Record], num_others: int
) -> list[Series]:
    """Return the points of attention, and their ways over contexts.

    Kinds that are compute-bound in prefill are close together. They have one label; beside the
    roofs of more than two other GPUs, the key names them.
    """
    series = []
    bound = [r for r in records if r["phase"] == "prefill" and r["to_knee"] <= 1]
    prefill = ", ".join(
        f"{r['attention'].removesuffix(' prefill')} {r['intensity']:,.0f}" for r in bound
    )
    for record in [
        *bound,
        *(r for r in records if r not in bound),
    ]:  # the widest label first
        name = record["attention"]
        colour = next(n for n, family in enumerate(FAMILIES) if name.startswith(family))
        path = [_place(r) for r in sweep if r["attention"] == name]
        xs, ys = zip(*path, strict=True)
        series.append(
            Series(
                "",
                xs,
                ys,
                "span",
                colour=colour,
            )
        )
        label = f"{name}: {record['intensity']:,.0f}"
        if record["to_knee"] > 1 and not num_others:
            label += f" ({record['to_knee']:,.3g}× to go)"
        key = ""
        if record in bound and num_others > 2:  # roofs leave no room, so the key names it
            key, label = label, ""
        elif record in bound:
            label = f"prefill {prefill}" if record is bound[0] else ""
        x, y = _place(record)
        texts = (label,) if label else ()
        series.append(
            Series(
                key,
                (x,),
                (y,),
                "points",
                (0.12,),
                texts,
                colour,
            )
        )
    return series


def _place(record: Record) -> tuple[float, float]:
    return record["intensity"], record["flops"] / record["roofline_s"]
