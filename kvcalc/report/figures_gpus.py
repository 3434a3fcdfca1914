"""GPUs as pictures: the memories of one, size against rate, and the peaks and bandwidths of several."""

from collections.abc import Sequence

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.report.chart import Axis, Chart, Series, bytes_tick, si_tick
from kvcalc.report.hierarchy import levels
from kvcalc.report.tables import seconds

FEW, MOST_NAMES = 8, 24  # GPUs that have a mark of their own, and that are named in the picture
KNEES = (50, 100, 200, 400)  # FLOP per byte of the diagonals
RATE = si_tick("B/s")


def hierarchy_chart(gpu: Gpu) -> Chart:
    """Rate over size of each memory that has both, joined, and a level across for a link to what has no size.

    Memories without a rate are named in the line below the title.
    """
    found = list(levels(gpu))
    whole = [(float(one["bytes"]), float(one["bytes_per_s"]), one) for one in found if one["bytes"] and one["bytes_per_s"]]
    series = [Series("", tuple(x for x, *_ in whole), tuple(y for _, y, _ in whole), "trail", colour=0)]
    for number, (size, rate, one) in enumerate(whole):
        text = f"{one['level']}: {bytes_tick(size)} at {RATE(rate)}"
        series.append(Series("", (size,), (rate,), "points", labels=(text,), colour=number))
    links = [one for one in found if one["bytes_per_s"] and not one["bytes"]]
    series += [Series(f"{one['level']}: {RATE(one['bytes_per_s'])}", (), (one["bytes_per_s"],), "limit") for one in links]
    about = [f"rates in one direction; one reading of its memory takes {seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)}"]
    if slow := [f"{one['level']} ({bytes_tick(one['bytes'])})" for one in found if one["bytes"] and not one["bytes_per_s"]]:
        about.append(f"without a rate: {', '.join(slow)}")
    if gpu.host:
        about.append(f"host and disk: of one {gpu.host.name}, which {gpu.host.gpus} GPUs share")
    axes = Axis("size", tick=bytes_tick), Axis("bytes per second", tick=RATE)
    return Chart(f"{gpu.name}, from registers to disk", "; ".join(about), *axes, tuple(series))


def peaks_chart(gpus: Sequence[Gpu]) -> Chart:
    """bf16 (else fp16) peak over bandwidth, a point a GPU, under diagonals of equal knee.

    Raises UserError where none has such a peak.
    """
    points = [(gpu, gpu.bandwidth_bytes_per_s, gpu.knee * gpu.bandwidth_bytes_per_s) for gpu in gpus if gpu.knee]
    if not points:
        raise UserError("there is no matrix peak in bf16 or fp16 to draw", hint="`kvcalc gpus` lists the GPUs that have one")
    xs = [x for _, x, _ in points]
    ends = min(xs) / 1.3, max(xs) * 1.3
    series = [Series(f"knee {knee} FLOP/B", ends, (knee * ends[0], knee * ends[1]), "dashed", colour=6) for knee in KNEES]
    named = len(points) <= MOST_NAMES
    keys = dict.fromkeys((gpu.name, "") if len(points) <= FEW else (gpu.vendor, gpu.vendor) for gpu, *_ in points)
    for number, (key, label) in enumerate(keys):
        mine = [point for point in points if key in (point[0].name, point[0].vendor)]
        names = tuple(f"{gpu.name}: knee {gpu.knee:.0f}" for gpu, *_ in mine) if named else ()
        ys = tuple(y for *_, y in mine)
        series.append(Series(label, tuple(x for _, x, _ in mine), ys, "points", labels=names, colour=number))
    without = len(gpus) - len(points)
    about = "dense datasheet peaks in bf16, else fp16; knee: where products turn compute-bound"
    about += f"; {without} without such a peak are left out" if without else ""
    axes = Axis("memory bandwidth", tick=RATE), Axis("FLOP/s", tick=si_tick("FLOP/s"))
    return Chart("Peaks and bandwidths", about, *axes, tuple(series))
