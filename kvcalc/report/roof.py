"""The roofline chart: the roofs of a GPU, their knees, and the operators of passes as points."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from kvcalc.capacity.memory_record import pass_with_memory
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.report.chart import Axis, Chart, Series, joined, plain_tick, si_tick
from kvcalc.report.looks import GREY
from kvcalc.report.marks import CALIBRATED, KINDS, SWEPT, TOGETHER, Mark, Row, drawn, listed, marks_of, words_at, words_below
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import roofline_records

MANY = 3  # axes, from which on only the first say in full what stands on them
ABOVE = 2.0  # times the highest roof is shown, for the words that stand above it
WHO = ("model", "gpu", "dtype", "tensor_parallel_size", "phase")
RATE = si_tick("B/s")
Pass = tuple[str, Sequence[Row]]


def roofline_chart(passes: Sequence[Pass], gpus: Sequence[Gpu]) -> Chart:
    """Roofs over intensity; operators at (FLOP per byte, FLOP/s at their bound), their area the share of the pass.

    Those of a pass that lie together are one point; a sweep of batches or contexts leaves spans. Each deployment and phase has
    axes of its own, of the same length, with the roofs of the others in grey. Raises UserError on GPUs without a matrix peak.
    """
    rows = [row for _, found in passes for row in found[:-1] if drawn(row)]
    ends = min([0.5, *(row["intensity"] / 3 for row in rows)]), max([4000.0, *(row["intensity"] * 2 for row in rows)])
    cards = {gpu.name: gpu for gpu in gpus}
    groups: dict[tuple[Any, ...], list[Sequence[Row]]] = {}
    for _, found in passes:
        groups.setdefault(tuple(found[0].get(key) for key in WHO), []).append(found)
    varied = [key for at, key in enumerate(WHO) if len({who[at] for who in groups}) > 1]
    charts = [_under_its_roof(mine, cards, _used(rows), ends, varied) for mine in groups.values()]
    heights = tuple(y for chart in charts for s in chart.series for y in s.ys)
    shown = Axis("FLOP/s", tick=si_tick("FLOP/s"), shown=(min(heights), ABOVE * max(heights)))
    charts = [chart._replace(y=shown) for chart in charts]
    timed = any(row["time_s"] for row in rows)
    key = f"filled: at the datasheet bound; hollow: {CALIBRATED}" if timed else "points: at the datasheet bound"
    if len(charts) < MANY:
        first, *others = charts
        return joined([first._replace(title=f"Roofline: {first.title}", subtitle=f"{first.subtitle}; {key}"), *others])
    return joined(_briefly(charts, [mine[0][0] for mine in groups.values()], varied, key))


def _under_its_roof(
    passes: Sequence[Sequence[Row]], cards: dict[str, Gpu], used: Sequence[str], ends: tuple[float, float], varied: Sequence[str]
) -> Chart:
    """The passes of one deployment in one phase."""
    first = passes[0][0]
    gpu = cards[first["gpu"]]
    swept = [key for key in SWEPT if len({found[0][key] for found in passes}) > 1]
    marks = marks_of(passes)
    series = [s._replace(label="", kind="quiet") for other in cards.values() if other is not gpu for s in _own(other, used, ends)]
    peaks = {gpu.peak(dtype)[0] for dtype in _used(row for found in passes for row in found[:-1])}
    series = [s for s in series if not s.labels] + _own(gpu, [dtype for dtype in used if gpu.peak(dtype)[0] in peaks], ends)
    texts, below = words_at(marks, swept), words_below(marks, swept)
    kinds = [[mark for mark in marks if mark.kind == kind] for kind in range(len(KINDS))]
    for mine in sorted(filter(None, kinds), key=lambda mine: -mine[0].share):  # the large are named first, where there is room
        series += _span([found for found in passes if swept], mine, gpu)
        series += _points(mine, texts, below)
    words = [f"{word} {listed(found[0][key] for found in passes)}" for key, word in SWEPT.items()]
    about = f"{', '.join(words)}; {RATE(gpu.bandwidth_bytes_per_s)}{_beyond_memory(passes)}"
    x = Axis("intensity, FLOP per byte", tick=plain_tick)
    return Chart(_title(first, varied), about, x, Axis("FLOP/s"), tuple(series), areas="of the pass")


def _beyond_memory(passes: Sequence[Sequence[Row]]) -> str:
    """Return which passes do not fit in the memory."""
    short = [found[-1] for found in passes if found[-1].get("fits") is False]
    if len(short) == len(passes):
        return "; does not fit in the memory"
    loads = [f"{row['batch_size']:,} × {row['context']:,} tokens" for row in short]
    return f"; beyond the memory: {', '.join(loads)}" if loads else ""


def _title(row: Row, varied: Sequence[str]) -> str:
    """Model, phase and GPU, and what else tells a deployment from the others."""
    more = [str(row["dtype"])] * ("dtype" in varied)
    more += [f"tp {row['tensor_parallel_size']}"] * (row["tensor_parallel_size"] > 1 or "tensor_parallel_size" in varied)
    return ", ".join([f"{row['model']} {row['phase']} on {row['gpu']}", *more])


def _briefly(charts: Sequence[Chart], rows: Sequence[Row], varied: Sequence[str], key: str) -> list[Chart]:
    """Each under what tells it from the others, its roofs in words, below what all have in common; kinds in the key."""
    told = [[*chart.subtitle.split("; "), *_roofs_in_words(chart.series)] for chart in charts]
    said = [part for part in told[0] if all(part in parts for parts in told)]
    alike = {at: str(rows[0][at]) for at in ("model", "phase", "gpu") if at not in varied}
    title = " ".join(f"on {word}" if at == "gpu" else word for at, word in alike.items())
    tp = rows[0]["tensor_parallel_size"]
    title += f", tp {tp}" * (tp > 1 and "tensor_parallel_size" not in varied)
    found = []
    for chart, row, parts in zip(charts, rows, told, strict=True):
        words = [f"tp {row[at]}" if at == "tensor_parallel_size" else str(row[at]) for at in WHO if at in varied]
        about = "; ".join(part for part in parts if part not in said)
        found.append(chart._replace(title=", ".join(words), subtitle=about, series=tuple(map(_unnamed, chart.series))))
    return [found[0]._replace(over=(f"Roofline: {title}".rstrip(": "), "; ".join([*said, key]))), *found[1:]]


def _roofs_in_words(series: Sequence[Series]) -> list[str]:
    """bf16 989 TFLOP/s, knee 295.2."""
    roofs = [s.label for s in series if s.kind == "solid"]
    knees = [text for s in series if s.colour == GREY for text in s.labels]
    return [f"{roof}, {knee}" for roof, knee in zip(roofs, knees, strict=True)]


def _unnamed(one: Series) -> Series:
    """Without what a head or the key says, or has no room in one of many: a roof, its knee, the name of a kind at its points, and
    which steps those are that lie at one place."""
    if one.colour == GREY or one.kind == "hollow":
        return one._replace(label="", labels=())
    texts = [text.removeprefix(one.label).removeprefix(", ") if one.label else text for text in one.labels]
    return one._replace(labels=tuple("" if text.startswith("every ") else text for text in texts))


def _used(rows: Iterable[Row]) -> list[str]:
    """The dtypes that drawn operators compute in."""
    return list(dict.fromkeys(row["computed_in"] for row in rows if drawn(row) and row["computed_in"]))


def _points(marks: Sequence[Mark], texts: dict[Mark, str], below: dict[Mark, str]) -> list[Series]:
    """The points of a kind at the bound, filled, and where laws say more, hollow below."""
    kind, xs, sizes = marks[0].kind, tuple(mark.x for mark in marks), tuple(mark.share for mark in marks)
    labels = tuple(texts.get(m, "") for m in marks)
    found = [Series(KINDS[kind], xs, tuple(m.y for m in marks), "points", sizes, labels, kind)]
    timed = [mark for mark in marks if mark.predicted]
    if timed:
        ys, words = tuple(mark.predicted or 0.0 for mark in timed), tuple(below.get(m, "") for m in timed)
        words = words if any(words) else ()
        found.append(Series("", tuple(m.x for m in timed), ys, "hollow", tuple(m.share for m in timed), words, kind))
    return found


def _span(passes: Sequence[Sequence[Row]], marks: Sequence[Mark], gpu: Gpu) -> list[Series]:
    """The way of the largest point of a kind through a sweep, under the roof."""
    steps = [max(mine, key=lambda m: m.share) for found in passes if (mine := [m for m in marks if m.asked is found[0]])]
    steps.sort(key=lambda mark: mark.x)
    if not steps or steps[-1].x < TOGETHER * steps[0].x:
        return []
    way = [(steps[0].x, steps[0].y)]
    for before, after in pairwise(steps):
        peak = gpu.peak(after.at)[0] if after.at else after.y
        knee = peak / gpu.bandwidth_bytes_per_s
        way += [(knee, peak)] * (before.x < knee < after.x) + [(after.x, after.y)]
    xs, ys = zip(*way, strict=True)
    return [Series("", xs, ys, "span", colour=steps[0].kind)]


def _own(gpu: Gpu, used: Sequence[str], ends: tuple[float, float]) -> list[Series]:
    """The roofs of the dtypes that products use, or what stands in for them."""
    return roofs(gpu, list(dict.fromkeys(gpu.peak(dtype)[1] for dtype in used)), ends)


def roofs(gpu: Gpu, dtypes: Sequence[str], ends: tuple[float, float], named: bool = False) -> list[Series]:
    """A GPU's slope and flat roof for each peak of `dtypes`, in grey, with the knees marked.

    named: several GPUs stand together, so that a roof's label says whose it is and where its knee.

    Raises UserError where none is given.
    """
    if not dtypes:
        raise UserError(f"{gpu.name} has no matrix peak, and so no roof")
    found, bandwidth = [], gpu.bandwidth_bytes_per_s
    for peak in dict.fromkeys(gpu.flops_per_s[dtype] for dtype in dtypes):
        knee, alike = peak / bandwidth, ", ".join(dtype for dtype in dtypes if gpu.flops_per_s[dtype] == peak)
        text = f"{alike} {peak / 1e12:g} TFLOP/s"
        label, mark = (f"{gpu.name} {text}, knee {knee:.1f}", "") if named else (text, f"knee {knee:.1f}")
        xs, ys = (ends[0], knee, ends[1]), (ends[0] * bandwidth, peak, peak)
        found.append(Series(label, xs, ys, "solid", colour=GREY))
        found.append(Series("", (knee,), (peak,), "points", (0.0,), (mark,), GREY))
    return found


def decode_sweep(deployment: Deployment, context: int, batches: Sequence[int]) -> list[Pass]:
    """A decode step's records for each batch, as `roofline_chart` takes them."""
    name = f"{deployment.model.name} decode"
    passes: list[Pass] = []
    for size in batches:
        records = roofline_records(deployment, "decode", size, context)
        passes.append((name, pass_with_memory(deployment, records, Batch.decode(context, size))))
    return passes
