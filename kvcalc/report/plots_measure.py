"""Charts of what was measured: points on the measured roofline, and time per generated token."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, plain_tick, si_tick

Rows = Sequence[dict[str, Any]]


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
            series.append(Series(phase, xs, ys, "points", labels=tuple(_named(*one, rows) for one in mine), colour=number + 1))
    subtitle = (
        f"{first['device']}, {first['dtype']}: {si_tick('B/s')(bandwidth)} and {si_tick('FLOP/s')(peak)} measured; "
        "points: attention or scan alone"
    )
    x = Axis("intensity, FLOP per byte", tick=plain_tick)
    return Chart(
        "Measured layers under the measured roofline", subtitle, x, Axis("FLOP/s", tick=si_tick("FLOP/s")), tuple(series)
    )


def _named(variant: str, _: float, row: dict[str, Any], rows: Rows) -> str:
    """A variant, with its batch and context where the rows of a phase differ in them."""
    alike = [r for r in rows if r["phase"] == row["phase"]]
    words = [f"batch {row['batch_size']:,}"] * (len({r["batch_size"] for r in alike}) > 1)
    words += [f"{row['context']:,}"] * (len({r["context"] for r in alike}) > 1)
    return ", ".join([variant, *words])


def generation_chart(rows: Rows) -> Chart:
    """Milliseconds of every generated token, measured and predicted, for each way of generating."""
    first, series = rows[0], []
    for number, row in enumerate(rows):
        head = f", head on {row['head']}" if row["mode"] == "uncached" else ""
        name = " ".join(filter(None, (row["variant"], row["mode"]))) + head
        steps = tuple(float(row["prompt_len"] + i + 1) for i in range(row["new_tokens"]))
        series.append(Series(name, steps, tuple(1000 * s for s in row["token_s"]), "line", colour=number))
        predicted = tuple(1000 * s for s in row["predicted_token_s"])
        series.append(Series(f"{name}: predicted", steps, predicted, "dashed", colour=number))
    without = next((r for r in rows if r["mode"] == "uncached"), None)
    saves = f"; the cache saves {without['speedup']:.2f}× (predicted {without['predicted_speedup']:.2f}×)" if without else ""
    subtitle = f"{first['device']}, {first['dtype']}: prompt of {first['prompt_len']:,}{saves}"
    x = Axis("tokens so far", log=False, tick=lambda v: f"{v:g}")
    return Chart(f"{first['model']}: time per token", subtitle, x, Axis("ms", log=False, tick=lambda v: f"{v:g}"), tuple(series))
