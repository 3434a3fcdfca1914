"""Charts of what was measured: points on the measured roofline, and time per generated token."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, plain_tick, si_tick

Rows = Sequence[dict[str, Any]]
TOGETHER = 1.6  # intensities of a variant within this factor of the next are named together
FEW = 3  # ways of generating whose predictions have names of their own
SPREAD = 5  # the largest of the times over the least, beyond which their axis is logarithmic


def measured_chart(rows: Rows) -> Chart:
    """Attention (or scan) of every record at (FLOP per byte, FLOP/s reached) under the roof of the measured ceilings."""
    first = rows[0]
    bandwidth, peak = first["bandwidth_bytes_per_s"], first["flops_per_s"]
    knee = peak / bandwidth
    points = [(r["variant"], r["phase"], r["attention_flops"] / r["attention_bytes"], r) for r in rows if r["attention_bytes"]]
    low = min([knee / 8, *(x / 2 for *_, x, _ in points if x)])
    high = max([knee * 8, *(x * 2 for *_, x, _ in points)])
    roof = Series("measured ceilings", (low, knee, high), (low * bandwidth, peak, peak), "line", colour=0)
    series = [roof]
    for number, phase in enumerate(dict.fromkeys(p for _, p, *_ in points)):
        mine = [(name, x, r) for name, p, x, r in points if p == phase and x]
        if mine:
            xs = tuple(x for _, x, _ in mine)
            ys = tuple(r["attention_flops"] / r["attention_measured_s"] for *_, r in mine)
            series.append(Series(phase, xs, ys, "points", labels=_labels(mine, ys), colour=number + 1))
    subtitle = (
        f"{first['device']}, {first['dtype']}: {si_tick('B/s')(bandwidth)} and {si_tick('FLOP/s')(peak)} measured; "
        "points: attention or scan alone"
    )
    x = Axis("intensity, FLOP per byte", tick=plain_tick)
    return Chart(
        "Measured layers under the measured roofline", subtitle, x, Axis("FLOP/s", tick=si_tick("FLOP/s")), tuple(series)
    )


def _labels(points: Sequence[tuple[str, float, dict[str, Any]]], heights: Sequence[float]) -> tuple[str, ...]:
    """Variants, with batches and contexts where a phase has several: at the highest of the points of one that lie together."""
    together: list[list[int]] = []
    for at in sorted(range(len(points)), key=lambda n: points[n][:2]):
        name, x, _ = points[at]
        last = points[together[-1][-1]] if together else ("", 0.0, {})
        if last[0] != name or x > TOGETHER * last[1]:
            together.append([])
        together[-1].append(at)
    found = [""] * len(points)
    several = {key: len({r[key] for *_, r in points}) > 1 for key in ("batch_size", "context")}
    for mine in together:
        words = [points[mine[0]][0]]
        for key, what in (("batch_size", "batch "), ("context", "")):
            sizes = sorted({points[at][2][key] for at in mine})
            words += [what + "–".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))] * several[key]
        found[max(mine, key=lambda at: heights[at])] = ", ".join(words)
    return tuple(found)


def generation_chart(rows: Rows) -> Chart:
    """Milliseconds of every generated token, measured and predicted, for each way of generating."""
    first, series = rows[0], []
    for number, row in enumerate(rows):
        head = f", head on {row['head']}" if row["mode"] == "uncached" else ""
        name = " ".join(filter(None, (row["variant"], row["mode"]))) + head
        steps = tuple(float(row["prompt_len"] + i + 1) for i in range(row["new_tokens"]))
        series.append(Series(name, steps, tuple(1000 * s for s in row["token_s"]), "line", colour=number))
        predicted = tuple(1000 * s for s in row["predicted_token_s"])
        told = f"{name}: predicted" if len(rows) <= FEW else ""
        series.append(Series(told, steps, predicted, "dashed", colour=number))
    without = next((r for r in rows if r["mode"] == "uncached"), None)
    saves = f"; the cache saves {without['speedup']:.2f}× (predicted {without['predicted_speedup']:.2f}×)" if without else ""
    subtitle = f"{first['device']}, {first['dtype']}: prompt of {first['prompt_len']:,}{saves}"
    subtitle += "; thin: predicted" * (len(rows) > FEW)
    x = Axis("tokens so far", log=False, tick=lambda v: f"{v:g}")
    times = [ms for one in series for ms in one.ys]
    y = Axis("ms", log=max(times) > SPREAD * min(times) > 0, tick=lambda v: f"{v:g}")
    return Chart(f"{first['model']}: time per token", subtitle, x, y, tuple(series))
