"""GPUs as pictures: the memories of one, size against rate, and the peaks and bandwidths of several."""

import math
from collections.abc import Sequence
from typing import Any

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.report.chart import Axis, Chart, Series, bytes_tick, si_tick
from kvcalc.report.hierarchy import levels
from kvcalc.report.looks import GREY, NAME
from kvcalc.report.tables import seconds

FEW, MOST_NAMES = 8, 24  # GPUs that have a mark of their own, and that are named in the picture
KNEES = (25, 50, 100, 200, 400)  # FLOP per byte of the diagonals, of which names of several points leave room for every other
TITLE = 90  # characters of a title that names GPUs
RATE = si_tick("B/s")
Point = tuple[Gpu, float, float]


def hierarchy_chart(gpu: Gpu) -> Chart:
    """Rate over size of each memory that has both, joined, and a level across for a link to what has no size.

    Memories without a rate are named in the line below the title.
    """
    found = list(levels(gpu))
    whole = [(float(one["bytes"]), float(one["bytes_per_s"]), one) for one in found if one["bytes"] and one["bytes_per_s"]]
    series = [Series("", tuple(x for x, *_ in whole), tuple(y for _, y, _ in whole), "solid", colour=GREY)]
    for number, (size, rate, one) in enumerate(whole):
        text = f"{_called(one)}: {bytes_tick(size)} at {RATE(rate)}"
        series.append(Series("", (size,), (rate,), "points", labels=(text,), colour=number))
    links = [one for one in found if one["bytes_per_s"] and not one["bytes"]]
    series += [Series(f"{_called(one)}: {RATE(one['bytes_per_s'])}", (), (one["bytes_per_s"],), "limit") for one in links]
    about = [f"rates in one direction; one reading of its memory takes {seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)}"]
    if slow := [f"{one['level']} ({bytes_tick(one['bytes'])})" for one in found if one["bytes"] and not one["bytes_per_s"]]:
        about.append(f"without a rate: {', '.join(slow)}")
    if gpu.host:
        about.append(f"host and disk: of one {gpu.host.name}, which {gpu.host.gpus} GPUs share")
    axes = Axis("size", tick=bytes_tick), Axis("bytes per second", tick=RATE)
    known = [_called(one) for one in found if one["bytes"] or one["bytes_per_s"]]
    span = f"from {known[0]} to {known[-1]}" if len(known) > 1 else "its memory"
    return Chart(f"{gpu.name}, {span}", "; ".join(about), *axes, tuple(series))


def _called(level: dict[str, Any]) -> str:
    """A memory by name: the host's, another GPU's, or what it is."""
    return str(level["level"]) + " memory" * str(level["level"]).endswith("'s")


def peaks_chart(gpus: Sequence[Gpu]) -> Chart:
    """bf16 (else fp16) peak over bandwidth, a point a GPU, under diagonals of equal knee.

    Raises UserError where none has such a peak.
    """
    cards = {gpu.name: gpu for gpu in gpus}.values()
    points = [(gpu, gpu.bandwidth_bytes_per_s, gpu.knee * gpu.bandwidth_bytes_per_s) for gpu in cards if gpu.knee]
    if not points:
        raise UserError("there is no matrix peak in bf16 or fp16 to draw", hint="`kvcalc gpus` lists the GPUs that have one")
    bandwidths = [x for _, x, _ in points]
    ends = min(bandwidths) / 1.3, max(bandwidths) * 1.3
    ranked = sorted(points, key=lambda point: point[2] / point[1])
    least, most = ranked[0][0].knee or 0.0, ranked[-1][0].knee or 0.0
    knees = KNEES if len(points) <= 2 else KNEES[::2]
    series = [
        Series(f"knee {knee} FLOP/B", ends, (knee * ends[0], knee * ends[1]), "quiet")
        for before, knee, after in zip((0, *knees), knees, (*knees[1:], math.inf), strict=False)
        if after > least and before < most
    ]
    for number, (label, names, mine) in enumerate(_by_look(points)):
        xs, ys = tuple(x for _, x, _ in mine), tuple(y for *_, y in mine)
        series.append(Series(label, xs, ys, "points", labels=names, colour=number))
    without = len(cards) - len(points)
    about = "dense datasheet peaks in bf16, else fp16; knee: where products turn compute-bound"
    about += f"; {without} without such a peak are left out" if without else ""
    axes = Axis("memory bandwidth", tick=RATE), Axis("FLOP/s", tick=si_tick("FLOP/s"))
    first, last = (f"{gpu.knee:.0f} ({gpu.name})" for gpu, *_ in (ranked[0], ranked[-1]))
    title = f"Peak over bandwidth: knees from {first} to {last} FLOP/B"
    if len(title) > TITLE:
        title = f"Peak over bandwidth: knees from {least:.0f} to {most:.0f} FLOP/B"
    return Chart(title if most > least else "Peak over bandwidth", about, *axes, tuple(series))


def _by_look(points: Sequence[Point]) -> list[tuple[str, tuple[str, ...], list[Point]]]:
    """Points of the same look, with what the key calls them and their texts; those that lie at one place have one name.

    Each GPU has a look of its own where they are few, or their names so long that only a few of many are told at once; else each
    vendor, its GPUs named where they are not too many.
    """
    places: dict[tuple[float, float], list[Point]] = {}
    for point in points:
        places.setdefault(point[1:], []).append(point)
    names = {place: ", ".join(gpu.name for gpu, *_ in there) for place, there in places.items()}
    long = max(len(gpu.name) for gpu, *_ in points) > NAME
    if len(points) <= FEW or (long and len(points) <= MOST_NAMES):
        told = {place: f"{name}: knee {places[place][0][0].knee:.0f}" for place, name in names.items()}
        return [(text, (text,), places[place][:1]) for place, text in told.items()]
    vendors: dict[str, list[Point]] = {}
    for point in points:
        vendors.setdefault(point[0].vendor, []).append(point)
    said = {id(there[0]): names[place] for place, there in places.items() if len(points) <= MOST_NAMES}
    return [(vendor, tuple(said.get(id(p), "") for p in mine) if said else (), mine) for vendor, mine in vendors.items()]
