"""Variants of attention side by side: what each keeps, reads and takes, over contexts and over the number of KV heads."""

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec

from kvcalc.capacity.memory_record import batch_memory
from kvcalc.model.spec import Model
from kvcalc.planning.heads import over_heads
from kvcalc.planning.variants import Variant
from kvcalc.report.chart import Axis, Chart, Series, bar_chart, bytes_tick, joined, tokens_tick
from kvcalc.report.comparison import compared
from kvcalc.report.figures import cache_vs_context
from kvcalc.report.figures_latency import timed_alike, told_apart
from kvcalc.report.tables import seconds, time_note
from kvcalc.timing.deployment import Deployment

SHARING = ("mha", "gqa", "mqa")
SIDES = (
    ("KV cache stored", "kv_cache_bytes", bytes_tick),
    ("Read by a decode step", "kv_cache_read_bytes", bytes_tick),
    ("Attention's FLOP per byte read", "attention_intensity", lambda v: f"{v:,.3g}"),
    ("Decode step", "time_s", lambda v: seconds(v) if v else "0"),
)
MOST_ROWS = 12  # of cells
MOST_LEVELS, MOST_CURVES = 3, 3  # memories beside the curves, and shares over KV heads, before the outer two stand for all
FEW = 4  # deployments that are rows of cells, whatever the number of variants
PUBLISHED = 0.1  # area of a published score, as a share


def compare_chart(
    deployments: Sequence[Deployment], chosen: Sequence[tuple[str, Variant]], records: Sequence[dict[str, Any]], last: int
) -> Chart:
    """What the records say of each variant, side by side: cache, bytes read, FLOP/B of attention, decode step.

    Then the stored cache over context up to `last` tokens and, where heads are shared, `heads_chart`, at the first load. Of
    several deployments, whose records follow each other, and several loads, as batches of contexts, a figure that is the same
    of all are bars, another a row of cells each, of at most MOST_ROWS.
    """
    first, each = records[0], len(records) // len(deployments)
    timed = first["weight_bytes"] is not None  # else the dimensions alone are known
    every = [*dict.fromkeys((r["batch_size"], r["context"]) for r in records)]
    loads = every[: max(1, MOST_ROWS // len(deployments))]
    names = told_apart(deployments) if len(deployments) > 1 else [deployments[0].gpu.name]
    rows = [_at(records[n * each : (n + 1) * each], chosen, load) for n in range(len(deployments)) for load in loads]
    called = [_row_name(name * (len(deployments) > 1), load) for name in names for load in loads] if len(loads) > 1 else names
    where = " per GPU" * any(r["gpus"] > 1 for r in records)
    across = len(loads) == 1 and len(names) > max(FEW, len(chosen))
    sides = ((f"{title}{where * (tick is bytes_tick)}", key, tick) for title, key, tick in SIDES[: 3 + timed])
    drawn, undrawn = timed_alike(deployments)
    alike = [d in drawn for d in deployments for _ in loads]
    charts = []
    for title, key, tick in sides:
        shown = alike if key == "time_s" else [True] * len(rows)
        charts.append(_side(title, key, tick, [*compress(called, shown)], [*compress(rows, shown)], across))
    curves = [_curve(d, chosen, first["batch_size"], last, deployments if timed else ()) for d in deployments]
    charts += {str(curve.series): curve for curve in curves}.values()
    if timed and any(name.lower().startswith(SHARING) for name, _ in chosen):
        title = "Fewer KV heads" + f", {_load(loads[0])}" * (len(loads) > 1)
        drawn_names = [name for name, d in zip(names, deployments, strict=True) if d in drawn]
        charts += heads_chart(title, drawn, drawn_names, first["context"], first["batch_size"])
    asked = f"the first {len(loads)} of {len(every)} loads asked for" * (len(loads) < len(every)) or _load(loads[0]) * (
        len(loads) == 1
    )
    about = "; ".join(filter(None, [asked, *([time_note(records) + undrawn] if timed else [])]))
    return joined([charts[0]._replace(over=(compared(deployments, records), about)), *charts[1:]])


def _at(records: Sequence[dict[str, Any]], chosen: Sequence[tuple[str, Variant]], load: tuple[int, int]) -> list[dict[str, Any]]:
    """Of one deployment's records those of each variant at a batch and context."""
    alike = {r["variant"]: r for r in records if (r["batch_size"], r["context"]) == load}
    return [alike[name] for name, _ in chosen]


def _load(load: tuple[int, int]) -> str:
    return f"{load[0]:,} × {load[1]:,} tokens"


def _row_name(deployment: str, load: tuple[int, int]) -> str:
    return f"{deployment}, {_load(load)}".removeprefix(", ")


def _side(title: str, key: str, tick: Any, names: Sequence[str], rows: Sequence[Sequence[dict[str, Any]]], across: bool) -> Chart:
    """One figure of every variant: as bars where it is the same on all deployments, else cells, the deeper the more it is.

    across: deployments are columns rather than rows, as where there are many, and fewer variants.
    """
    fit = [[key != "time_s" or r["fits"] is not False for r in mine] for mine in rows]
    variants = [_called(r["variant"], r["attention"]) for r in rows[0]]
    if len(names) == 1:
        variants = [name + ": does not fit" * (not held) for name, held in zip(variants, fit[0], strict=True)]
    values = [[_figure(r, key) for r in mine] for mine in rows]
    if len(names) == 1 or (key != "time_s" and all(mine == values[0] for mine in values)):
        named = f"{title}: {names[0]}" if key == "time_s" else title
        return bar_chart(named, "", variants, values[0], tick)
    if across:
        variants, names, values = [*names], variants, [[*one] for one in zip(*values, strict=True)]
        fit = [[*one] for one in zip(*fit, strict=True)]
    every = [math.log(v) for mine in values for v in mine if v]
    low, span = min(every), max(every) - min(every) or 1.0

    def depth(value: float, held: bool) -> float:
        """Return the colour of a cell, -1 for a step that does not fit."""
        if not held:
            return -1.0
        return (math.log(value) - low) / span if value else 0.0

    series = tuple(
        Series(name, (), tuple(map(depth, mine, held)), "cells", labels=tuple(map(tick, mine)))
        for name, mine, held in reversed([*zip(names, values, fit, strict=True)])
    )
    about = "" if all(map(all, fit)) else "orange: does not fit in the memory"
    return Chart(title, about, Axis(""), Axis(""), series, tuple(variants))


def _figure(record: dict[str, Any], key: str) -> float:
    """A step as predicted, else its bound."""
    return float((record["roofline_s"] if record[key] is None and key == "time_s" else record[key]) or 0)


def _curve(
    deployment: Deployment, chosen: Sequence[tuple[str, Variant]], batch_size: int, last: int, beside: Sequence[Deployment]
) -> Chart:
    """The stored cache of every variant over context, beside the budgets of these deployments' GPUs, of many the outer two."""
    precision, named = deployment.precision, []
    for name, variant in chosen:
        dtype = variant.kv_cache_dtype or precision.kv_cache_dtype
        stored = msgspec.structs.replace(precision, kv_cache_dtype=dtype)
        named.append((_called(name, variant.model.attention), variant.model, stored))
    budgets = sorted(_budgets(beside, chosen[0][1].model).items(), key=lambda one: one[1])
    levels = budgets if len(budgets) <= MOST_LEVELS else [budgets[0], budgets[-1]]
    ranks = [deployment.parallelism] * len(named)
    return cache_vs_context(named, batch_size=batch_size, last=last, ranks=ranks, levels=levels)


def _budgets(deployments: Sequence[Deployment], model: Model) -> dict[str, int]:
    """Return the KV cache budget of one GPU by its name, for the GPUs that leave one."""
    found = {}
    for deployment in deployments:
        one = msgspec.structs.replace(deployment, model=model)
        found[one.gpu.name] = batch_memory(one, [(1, 1)])["kv_budget_bytes"] or 0
    return {name: size for name, size in found.items() if size}


def _called(variant: str, attention: str) -> str:
    """A variant as it was typed; the model's own by what that is."""
    return f"{attention} as it is" if variant == "none" else variant


def heads_chart(
    title: str, deployments: Sequence[Deployment], names: Sequence[str], context: int, batch_size: int
) -> list[Chart]:
    """Cache, step and published scores over the number of KV heads, each as a share of MHA's; none where there is no curve.

    Deployments whose shares are the same to a percent are one curve.
    """
    every = [found for d in deployments if (found := over_heads(d, context, batch_size))]
    if not every:
        return []
    heads = tuple(map(float, every[0].heads))
    curves = [*_shares("KV cache", names, [f.cache for f in every]), *_shares("decode step", names, [f.step for f in every])]
    series = [Series(what, heads, ys) for what, ys in curves]
    for what, counts, scores in every[0].published:
        areas = (PUBLISHED,) * len(counts)
        series.append(Series(what, tuple(map(float, counts)), tuple(scores), "points", areas))
    share = Axis("share of what MHA has", log=False, tick=lambda v: f"{v:.0%}")
    return [Chart(title, "", Axis("KV heads", tick=tokens_tick), share, tuple(series))]


def _shares(what: str, names: Sequence[str], curves: Sequence[Sequence[float]]) -> list[tuple[str, tuple[float, ...]]]:
    """Curves under the names of those that have them; of many the lowest and the highest."""
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, ys in enumerate(curves):
        alike.setdefault(tuple(round(y, 2) for y in ys), []).append(number)
    groups = sorted(alike.values(), key=lambda those: sum(curves[those[0]]))
    if len(groups) > MOST_CURVES:
        groups = [groups[0], groups[-1]]
    if len(groups) == 1:
        return [(what, tuple(curves[0]))]
    found = []
    for those in groups:
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        found.append((f"{what}, {names[those[0]]}{more}", tuple(curves[those[0]])))
    return found
