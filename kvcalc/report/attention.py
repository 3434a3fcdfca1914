"""Attention of every variant under a GPU's roof: the table, and the picture for slides."""

from collections.abc import Sequence
from typing import Any

from kvcalc.gpu.spec import Gpu
from kvcalc.planning.attention import SHAPE, attention_records
from kvcalc.report.chart import Axis, Chart, Series, plain_tick, si_tick
from kvcalc.report.figures import powers
from kvcalc.report.layout import Column, Table
from kvcalc.report.roof import roofs
from kvcalc.report.tables import CACHE_IN, integer, kernel_seconds
from kvcalc.units import format_bytes, format_si

TRAIL = powers(1024, 131072)  # contexts over which a point's trail runs
COLUMNS = (
    Column("gpu", "GPU", right=False, given=True),
    Column("attention", "attention", right=False),
    Column("context", "context", integer, given=True),
    Column("batch_size", "batch", integer, given=True),
    CACHE_IN,
    Column("intensity", "FLOP/B", lambda v: f"{v:,.1f}"),
    Column("to_knee", "to the knee", lambda v: f"{v:,.2f}×"),
    Column("bound", "bound", right=False),
    Column("roofline_s", "at least", kernel_seconds),
    Column("bytes", "bytes", format_bytes),
    Column("flops", "FLOP", format_si),
    Column("knee", "knee", lambda v: f"{v:.1f}", wide=True),
    Column("mla_form", "MLA form", right=False, wide=True),
)
FEW = 3  # GPUs that a title names, and beyond which their roofs leave room for the names of prefill in the key alone
CORNER = 1.5  # times its knee is what is drawn of the slope of another GPU's roof
FAMILIES = ("MHA", "GQA-8", "GQA-4", "MQA", "MLA", "DSA")


def attention_table(records: Sequence[dict[str, Any]]) -> Table:
    """A line a variant and GPU, under what they have in common."""
    used = dict.fromkeys(f"{r['gpu']} {r['knee']:.1f} FLOP/B in {r['computed_in']}" for r in records)
    caches = ", ".join(dict.fromkeys(r["kv_cache_dtype"] for r in records))
    notes = [
        "",
        f"{SHAPE}, without its projections; cache {caches}; knee: {', '.join(used)}",
        "to the knee: so many times as many queries would have to share each byte read for compute to bind, 1× or less "
        "where it does: heads on one KV head or drafted tokens; more sequences do not help, for each reads a cache of its own",
        "at least: the datasheet bound of this layer's attention",
    ]
    return Table(records, COLUMNS, _sentence(records), notes)


def _sentence(records: Sequence[dict[str, Any]]) -> str:
    gpu = records[0]["gpu"]
    rows = [r for r in records if r["gpu"] == gpu and all(r[k] == records[0][k] for k in ("context", "batch_size"))]
    decode = [r for r in rows if r["phase"] == "decode"]
    low, high = min(decode, key=_intensity), max(decode, key=_intensity)
    below = [r for r in decode if r["bound"] == "memory"]
    what = "every variant of decode attention is" if len(below) == len(decode) else f"{len(below)} of {len(decode)} variants are"
    ends = f"{low['attention']} does {low['intensity']:.1f} FLOP/B, {high['attention']} {high['intensity']:.1f}"
    compute = all(r["bound"] == "compute" for r in rows if r["phase"] == "prefill")
    return f"On {gpu} {what} bound by memory: {ends}, the knee is at {low['knee']:.1f}" + (
        "; prefill is past it" if compute else ""
    )


def _intensity(record: dict[str, Any]) -> float:
    return float(record["intensity"])


def attention_chart(gpus: Sequence[Gpu], context: int, batch_size: int) -> Chart:
    """Each variant at its intensity under the roof of the first GPU, with the way it goes over `TRAIL` contexts as a trail.

    Its label says the intensity, and on the slope by how much that would have to grow for compute to bind.
    """
    at = attention_records(gpus[0], [context], [batch_size])
    dtypes = list(dict.fromkeys(r["computed_in"] for r in at))
    over = attention_records(gpus[0], TRAIL, [batch_size])
    last = 2 * max(r["intensity"] for r in [*at, *over])
    several = len(gpus) > 1
    series = _corners(gpus[1:], dtypes, last, len(gpus) > FEW)
    series += roofs(gpus[0], [gpus[0].peak(d)[1] for d in dtypes], (0.5, last), several)
    passes = [r for r in at if r["phase"] == "prefill" and r["to_knee"] <= 1]
    for record in [*passes, *(r for r in at if r not in passes)]:  # these first, whose label is the widest
        colour = next(n for n, family in enumerate(FAMILIES) if record["attention"].startswith(family))
        way = [_point(r) for r in over if r["attention"] == record["attention"]]
        series.append(Series("", tuple(x for x, _ in way), tuple(y for _, y in way), "span", colour=colour))
        x, y = _point(record)
        label = _label(record, not several) if record not in passes else _together(passes) if record is passes[0] else ""
        keyed = record in passes and len(gpus) > FEW
        texts = () if keyed else (label,)
        series.append(Series(_label(record, False) if keyed else "", (x,), (y,), "points", (0.12,), texts, colour))
    others = f"{len(gpus) - 1} others" if len(gpus) > FEW else " and ".join(gpu.name for gpu in gpus[1:])
    title = f"Attention under the roof of {gpus[0].name}" + f", beside {others}" * several
    more = f" under {gpus[0].name}" if several else ", and how many times more reach the knee"
    about = (
        f"{SHAPE}, batch {batch_size:,}, context {context:,}; at the points FLOP per byte{more}; "
        f"bands: contexts {TRAIL[0]:,} to {TRAIL[-1]:,}" + "; thin: from just below its knee on each other roof" * several
    )
    x_axis = Axis("intensity, FLOP per byte", tick=plain_tick)
    return Chart(title, about, x_axis, Axis("FLOP/s", tick=si_tick("FLOP/s")), tuple(series))


def _corners(gpus: Sequence[Gpu], dtypes: Sequence[str], last: float, brief: bool) -> list[Series]:
    """Roofs of GPUs in grey from just below their knees to `last`, so that slopes do not cover each other; the same of several
    once. brief: named by GPU and knee alone."""
    owners: dict[tuple[str, float, float], list[str]] = {}
    for gpu in gpus:
        stored = [gpu.peak(dtype)[1] for dtype in dtypes]
        for peak in dict.fromkeys(gpu.flops_per_s[dtype] for dtype in stored):
            alike = ", ".join(dtype for dtype in dict.fromkeys(stored) if gpu.flops_per_s[dtype] == peak)
            owners.setdefault((alike, peak, gpu.bandwidth_bytes_per_s), []).append(gpu.name)
    found = []
    for (alike, peak, bandwidth), names in owners.items():
        knee, told = peak / bandwidth, "" if brief else f" {alike} {peak / 1e12:g} TFLOP/s"
        label = f"{', '.join(dict.fromkeys(names))}{told}, knee {knee:.{0 if brief else 1}f}"
        found.append(Series(label, (knee / CORNER, knee, last), (peak / CORNER, peak, peak), "quiet"))
    return found


def _label(record: dict[str, Any], needing: bool) -> str:
    needed = f" ({record['to_knee']:,.3g}× to go)" if needing and record["to_knee"] > 1 else ""
    return f"{record['attention']}: {record['intensity']:,.0f}{needed}"


def _together(passes: Sequence[dict[str, Any]]) -> str:
    """Prefill past the knee, whose points lie close to each other: named at the first of them."""
    return "prefill " + ", ".join(f"{r['attention'].removesuffix(' prefill')} {r['intensity']:,.0f}" for r in passes)


def _point(record: dict[str, Any]) -> tuple[float, float]:
    return float(record["intensity"]), record["flops"] / record["roofline_s"]
