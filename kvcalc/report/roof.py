"""The roofline chart: roofs of one or more GPUs, knees, and the operators of passes as points."""

import math
from collections.abc import Sequence
from typing import Any

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cost import Role
from kvcalc.report.chart import Axis, Chart, Series, si_tick
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import roofline_records

ROLES = {Role.CORE: "attention", Role.PROJECTION: "projections", Role.FFN: "FFN", Role.HEAD: "LM head"}
LEAST_SHARE = 0.01  # of a pass, below which an operator gets no label
Pass = tuple[str, Sequence[dict[str, Any]]]


def roofline_chart(passes: Sequence[Pass], gpus: Sequence[Gpu]) -> Chart:
    """Roofs over intensity; each operator at (FLOP per byte, FLOP/s at its bound), sized by its share of the pass.

    Several passes (a batch sweep) leave a trail for each operator.
    """
    rows = [row for _, found in passes for row in found[:-1] if row["flops"] and row["intensity"]]
    lowest = min([0.5, *(row["intensity"] / 1.5 for row in rows)])
    highest = max([4000.0, *(row["intensity"] * 2 for row in rows)])
    used = list(dict.fromkeys(row["computed_in"] for row in rows if row["computed_in"]))
    series = [s for n, gpu in enumerate(gpus) for s in roofs(gpu, _dtypes(gpu, used, len(gpus) == 1), n + 4, lowest, highest)]
    labels = _labels(passes)
    for number, (role, kind) in enumerate(ROLES.items()):
        series += _trails(passes, role, number) if len(passes) > 1 else []
        found = _points(passes, kind, role, number, labels)
        series += [found] if found else []
    series += _predicted(rows)
    title = "Roofline: " + (", ".join(dict.fromkeys(name for name, _ in passes)) or ", ".join(g.name for g in gpus))
    knees = "; ".join(f"{g.name}: {g.bandwidth_bytes_per_s / 1e12:g} TB/s" for g in gpus)
    subtitle = knees + ("; filled: at the datasheet bound, area: share of the pass" if passes else "; dense datasheet peaks")
    x = Axis("intensity, FLOP per byte", tick=lambda v: f"{v:g}")
    return Chart(title, subtitle, x, Axis("FLOP/s", tick=si_tick("FLOP/s")), tuple(series))


def _point(row: dict[str, Any]) -> tuple[float, float]:
    return float(row["intensity"]), row["flops"] / row["roofline_s"]


def _labels(passes: Sequence[Pass]) -> dict[tuple[int, int], str]:
    """One text for all operators that lie together, by rounded place: their names, and the batches in a sweep."""
    places: dict[tuple[int, int], dict[str, list[int]]] = {}
    for _, rows in passes:
        for row in rows[:-1]:
            if row["flops"] and row["intensity"] and row["roofline_s"] >= LEAST_SHARE * rows[-1]["roofline_s"]:
                batches = places.setdefault(_place(row), {}).setdefault(row["operator"], [])
                batches += [row["batch_size"]] if row["batch_size"] not in batches else []
    return {place: _text(names, len(passes) > 1) for place, names in places.items()}


def _place(row: dict[str, Any]) -> tuple[int, int]:
    x, y = _point(row)
    return round(8 * math.log10(x)), round(8 * math.log10(y))


def _text(names: dict[str, list[int]], sweep: bool) -> str:
    batches = sorted({b for found in names.values() for b in found})
    return ", ".join(names) + (", batch " + ", ".join(f"{b:,}" for b in batches) if sweep else "")


def _points(passes: Sequence[Pass], kind: str, role: Role, number: int, labels: dict[tuple[int, int], str]) -> Series | None:
    xs, ys, sizes, texts = [], [], [], []
    for _, rows in passes:
        for row in rows[:-1]:
            if row["role"] == role and row["flops"] and row["intensity"]:
                x, y = _point(row)
                xs.append(x)
                ys.append(y)
                sizes.append(row["roofline_s"] / rows[-1]["roofline_s"])
                texts.append(labels.pop(_place(row), ""))
    return Series(kind, tuple(xs), tuple(ys), "points", tuple(sizes), tuple(texts), number) if xs else None


def _trails(passes: Sequence[Pass], role: Role, number: int) -> list[Series]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _, rows in passes:
        for row in rows[:-1]:
            if row["role"] == role and row["flops"] and row["intensity"]:
                found.setdefault((row["operator"], row["layer"]), []).append(_point(row))
    trails = [points for points in found.values() if len(points) > 1]
    return [Series("", tuple(x for x, _ in t), tuple(y for _, y in t), "trail", colour=number) for t in trails]


def roofs(gpu: Gpu, dtypes: Sequence[str], colour: int, lowest: float, highest: float) -> list[Series]:
    """A GPU's slope and flat roof for each of `dtypes` that its matrix units have, from `colour` on, with the knees marked."""
    found = []
    for position, dtype in enumerate(dtypes):
        peak, bandwidth = gpu.flops_per_s[dtype], gpu.bandwidth_bytes_per_s
        knee = peak / bandwidth
        xs, ys = (lowest, knee, highest), (lowest * bandwidth, peak, peak)
        found.append(Series(f"{gpu.name} {dtype} {peak / 1e12:g} TFLOP/s", xs, ys, colour=colour + position))
        found.append(Series("", (knee,), (peak,), "points", (0.0,), (f"knee {knee:.1f}",), colour + position))
    return found


def _dtypes(gpu: Gpu, used: Sequence[str], alone: bool) -> list[str]:
    """The dtypes of a GPU's roofs: those that the products use, else 16-bit ones, and the narrower where it stands alone."""
    if used:
        return list(dict.fromkeys(gpu.peak(dtype)[1] for dtype in used))
    first = next((d for d in ("bf16", "fp16", *gpu.flops_per_s) if d in gpu.flops_per_s), "")
    found = [d for d in (first, *(("fp8", "fp4") if alone else ())) if d in gpu.flops_per_s]
    if not found:
        raise UserError(f"{gpu.name} has no matrix peak, and so no roof")
    return found


def _predicted(rows: Sequence[dict[str, Any]]) -> list[Series]:
    """What the calibrated laws say, under each bound."""
    timed = [(float(r["intensity"]), r["flops"] / r["time_s"]) for r in rows if r["time_s"]]
    return [Series("calibrated", tuple(x for x, _ in timed), tuple(y for _, y in timed), "hollow", colour=6)] if timed else []


def decode_sweep(deployment: Deployment, context: int, batches: Sequence[int]) -> list[Pass]:
    """A decode step's records for each batch, as `roofline_chart` takes them."""
    name = f"{deployment.model.name} decode"
    return [(name, roofline_records(deployment, "decode", batch, context)) for batch in batches]
