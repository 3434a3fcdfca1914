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
MOST_NAMES = 4  # operators of a label
LEAST_SHARE = 0.01  # of a pass, below which an operator gets no label
WHO = ("model", "gpu", "dtype", "tensor_parallel_size")
SWEPT = {"batch_size": "batch", "context": "context"}
Row = dict[str, Any]
Pass = tuple[str, Sequence[Row]]


def roofline_chart(passes: Sequence[Pass], gpus: Sequence[Gpu]) -> Chart:
    """Roofs over intensity; each operator at (FLOP per byte, FLOP/s at its bound), sized by its share of the pass.

    A sweep of one deployment tells kinds of operators apart, and leaves a trail for each; several deployments are told apart.
    """
    rows = [row for _, found in passes for row in found[:-1] if _drawn(row)]
    lowest = min([0.5, *(row["intensity"] / 1.5 for row in rows)])
    highest = max([4000.0, *(row["intensity"] * 2 for row in rows)])
    used = list(dict.fromkeys(row["computed_in"] for row in rows if row["computed_in"]))
    series = [s for n, gpu in enumerate(gpus) for s in roofs(gpu, _dtypes(gpu, used, len(gpus) == 1), n + 4, lowest, highest)]
    who, swept = _telling(rows), [key for key in SWEPT if len({row[key] for row in rows}) > 1]
    texts = {place: _text(place[0], found, swept) for place, found in _places(passes, who).items()}
    groups: dict[tuple[str, int], list[tuple[Row, Row]]] = {}
    for _, found in passes:
        for row in filter(_drawn, found[:-1]):
            number = list(ROLES).index(Role(row["role"]))
            groups.setdefault((_named(row, who), -1) if who else (ROLES[Role(row["role"])], number), []).append((row, found[-1]))
    for at, ((name, number), mine) in enumerate(sorted(groups.items(), key=lambda item: item[0][1])):
        colour = at if who else number
        series += _trails([row for row, _ in mine], colour) if swept else []
        series.append(_points(name, mine, texts, who, colour))
    series += _predicted(rows)
    knees = "; ".join(f"{g.name}: {g.bandwidth_bytes_per_s / 1e12:g} TB/s" for g in gpus)
    subtitle = knees + ("; filled: at the datasheet bound, area: share of the pass" if passes else "; dense datasheet peaks")
    x = Axis("intensity, FLOP per byte", tick=lambda v: f"{v:g}")
    return Chart(_title(passes, gpus), subtitle, x, Axis("FLOP/s", tick=si_tick("FLOP/s")), tuple(series))


def _title(passes: Sequence[Pass], gpus: Sequence[Gpu]) -> str:
    """Models and phase, GPUs where there are several or nothing else is."""
    names = list(dict.fromkeys(name for name, _ in passes))
    phases = list(dict.fromkeys(name.rpartition(" ")[2] for name in names))
    what = ", ".join(dict.fromkeys(name.rpartition(" ")[0] for name in names))
    cards = ", ".join(g.name for g in gpus)
    if not names:
        return f"Roofline: {cards}"
    return f"Roofline: {what} {', '.join(phases)}" + (f" on {cards}" if len(gpus) > 1 else "")


def _drawn(row: Row) -> bool:
    return bool(row["flops"] and row["intensity"] and row["role"] in set(ROLES))


def _telling(rows: Sequence[Row]) -> list[str]:
    """The fewest keys, first to last, that tell the deployments apart."""
    found: list[str] = []
    for key in WHO:
        if len({_named(row, [*found, key]) for row in rows}) > len({_named(row, found) for row in rows}):
            found.append(key)
    return found


def _named(row: Row, keys: Sequence[str]) -> str:
    """What tells a row's deployment from the others."""
    return ", ".join(f"tp {row[key]}" if key == "tensor_parallel_size" else str(row[key]) for key in keys)


def _point(row: Row) -> tuple[float, float]:
    return float(row["intensity"]), row["flops"] / row["roofline_s"]


Place = tuple[str, int, int]  # whose, and where on a grid of eighths of a decade


def _place(row: Row, who: Sequence[str]) -> Place:
    x, y = _point(row)
    return _named(row, who), round(8 * math.log10(x)), round(8 * math.log10(y))


def _places(passes: Sequence[Pass], who: Sequence[str]) -> dict[Place, dict[str, list[Row]]]:
    """The operators that lie together and take at least `LEAST_SHARE` of their pass, under a name for each point of a sweep.

    Where all but attention lie together in a pass, that is their name.
    """
    found: dict[Place, dict[str, list[Row]]] = {}
    for _, rows in passes:
        shown = [row for row in rows[:-1] if _drawn(row) and row["roofline_s"] >= LEAST_SHARE * rows[-1]["roofline_s"]]
        weights = [row for row in shown if row["role"] != Role.CORE]
        together = len(weights) > 1 and len(weights) < len(shown) and len({_place(row, who) for row in weights}) == 1
        for row in shown:
            name = "all but attention" if together and row in weights else row["operator"]
            found.setdefault(_place(row, who), {}).setdefault(name, []).append(row)
    return found


def _text(whose: str, names: dict[str, list[Row]], swept: Sequence[str]) -> str:
    """Whose they are where there are several, the names, or of many their kinds, and where in the sweep: batch 8, 64."""
    rows = [row for found in names.values() for row in found]
    where = [f"{SWEPT[key]} {', '.join(f'{n:,}' for n in sorted({row[key] for row in rows}))}" for key in swept]
    kinds = dict.fromkeys(ROLES[Role(row["role"])] for row in rows)
    what = ", ".join([*(names if len(names) <= MOST_NAMES else kinds), *where])
    return f"{whose}: {what}" if whose else what


def _points(name: str, mine: Sequence[tuple[Row, Row]], texts: dict[Place, str], who: Sequence[str], colour: int) -> Series:
    xs, ys = zip(*(_point(row) for row, _ in mine), strict=True)
    sizes = tuple(row["roofline_s"] / whole["roofline_s"] for row, whole in mine)
    return Series(name, xs, ys, "points", sizes, tuple(texts.pop(_place(row, who), "") for row, _ in mine), colour)


def _trails(rows: Sequence[Row], colour: int) -> list[Series]:
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault((*(row.get(key) for key in WHO), row["operator"], row["layer"]), []).append(_point(row))
    trails = [points for points in found.values() if len(points) > 1]
    return [Series("", tuple(x for x, _ in t), tuple(y for _, y in t), "trail", colour=colour) for t in trails]


def roofs(gpu: Gpu, dtypes: Sequence[str], colour: int, lowest: float, highest: float) -> list[Series]:
    """A GPU's slope and flat roof for each of `dtypes` that its matrix units have, from `colour` on, with the knees marked."""
    found = []
    for position, dtype in enumerate(dtypes):
        peak, bandwidth = gpu.flops_per_s[dtype], gpu.bandwidth_bytes_per_s
        knee = peak / bandwidth
        xs, ys = (lowest, knee, highest), (lowest * bandwidth, peak, peak)
        found.append(Series(f"{gpu.name} {dtype} {peak / 1e12:g} TFLOP/s", xs, ys, "solid", colour=colour + position))
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


def _predicted(rows: Sequence[Row]) -> list[Series]:
    """What the calibrated laws say, under each bound."""
    timed = [(float(r["intensity"]), r["flops"] / r["time_s"]) for r in rows if r["time_s"]]
    return [Series("calibrated", tuple(x for x, _ in timed), tuple(y for _, y in timed), "hollow", colour=6)] if timed else []


def decode_sweep(deployment: Deployment, context: int, batches: Sequence[int]) -> list[Pass]:
    """A decode step's records for each batch, as `roofline_chart` takes them."""
    name = f"{deployment.model.name} decode"
    return [(name, roofline_records(deployment, "decode", batch, context)) for batch in batches]
