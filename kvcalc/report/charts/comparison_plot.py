"""Pictures of variants of attention side by side, and of the Pareto fronts of `plan`."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcalc.report.charts.chart import (
    Axis,
    Chart,
    Series,
    bar_chart,
    bytes_tick,
    joined,
    plain_tick,
    tokens_tick,
)
from kvcalc.report.charts.latency_plot import deployment_names
from kvcalc.report.charts.size_plot import cache_vs_context
from kvcalc.report.export import Record
from kvcalc.report.row_names import keep_distinguishing_columns
from kvcalc.report.text.compare_text import compared
from kvcalc.report.text.plan_text import requirement_words, sentence, where
from kvcalc.report.text.tables import BOUND, comparable, seconds, time_note

if TYPE_CHECKING:
    from kvcalc.planning.comparison import OverHeads
    from kvcalc.planning.sweeps import ComparisonSweep, FrontCurve
    from kvcalc.timing.deployment import TimedDeployment

SHARING = ("mha", "gqa", "mqa")  # variants that change the number of KV heads
FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("KV cache stored", "kv_cache_bytes", bytes_tick),
    ("Read by a decode step", "kv_cache_read_bytes", bytes_tick),
    ("Attention's FLOP per byte read", "attention_intensity", "{:,.3g}".format),
    ("Decode step", "time_s", lambda v: seconds(v) if v else "0"),
)
MAX_ROWS = 12  # of cells
MAX_BUDGETS = 3  # limits beside the cache curves; of more the smallest and the largest
MAX_CURVES = 3  # shares over KV heads
PUBLISHED_AREA = 0.1  # of the markers of published scores
Rows = dict[str, list[Record]]


def compare_chart(
    deployments: "Sequence[TimedDeployment]",
    records: Sequence[Record],
    sweep: "ComparisonSweep",
) -> Chart:
    """Return the figures of each variant, their cache over contexts, and shares over KV heads.

    Args:
        deployments: Deployments of one model.
        records: Records of `compare`, deployment by deployment.
        sweep: Curves of the same deployments.
    """
    first = records[0]
    is_timed = first["weight_bytes"] is not None  # otherwise only dimensions are known
    drawn = comparable(records) if is_timed else records
    names = deployment_names(deployments)
    if len(deployments) == 1:
        names = [deployments[0].gpu.name]
    per_deployment = len(records) // len(deployments)
    loads = [*dict.fromkeys(_load(record) for record in records)]
    shown_loads = loads[: max(1, MAX_ROWS // len(deployments))]
    rows: Rows = {}
    for index, record in enumerate(records):
        words = [names[index // per_deployment]] if len(deployments) > 1 else []
        words += [_load(record)] if len(shown_loads) > 1 else []
        if _load(record) in shown_loads:
            rows.setdefault(", ".join(words) or names[0], []).append(record)
    per_gpu = " per GPU" if any(record["gpus"] > 1 for record in records) else ""
    charts = []
    for title, key, tick in FIGURES[: 4 if is_timed else 3]:
        same = rows
        if key == "time_s":
            same = {name: row for name, row in rows.items() if row[0] in drawn}
        title += per_gpu if tick is bytes_tick else ""
        charts.append(_figure_chart(title, key, tick, same))
    budgets = sorted(sweep.budgets.items(), key=lambda item: item[1]) if is_timed else []
    if len(budgets) > MAX_BUDGETS:
        budgets = [budgets[0], budgets[-1]]
    curves = [
        cache_vs_context(row, first["batch_size"], budgets=dict(budgets))
        for row in sweep.cache_curves
    ]
    charts += {str(curve.series): curve for curve in curves}.values()
    if is_timed and any(record["variant"].lower().startswith(SHARING) for record in records):
        load = f", {loads[0]}" if len(shown_loads) > 1 else ""
        shown = [i for i in range(len(names)) if records[i * per_deployment] in drawn]
        heads = {names[i]: one for i in shown if (one := sweep.heads[i])}
        charts += _heads_charts(f"Fewer KV heads{load}", heads)
    about = [loads[0]] if len(shown_loads) == 1 else []
    if len(shown_loads) < len(loads):
        about = [f"the first {len(shown_loads)} of {len(loads)} loads asked for"]
    if is_timed:
        about.append(time_note(records))
    if len(drawn) < len(records):
        gpus = dict.fromkeys(record["gpu"] for record in records if record not in drawn)
        about.append(f"steps not drawn, as only bounds are known: {', '.join(gpus)}")
    over = (compared(deployments, records), "; ".join(about))
    return joined([charts[0]._replace(over=over), *charts[1:]])


def _load(record: Record) -> str:
    return f"{record['batch_size']:,} × {record['context']:,} tokens"


def _figure_chart(title: str, key: str, tick: Callable[[float], str], rows: Rows) -> Chart:
    """Return a figure of each variant: bars if it is the same in all rows, otherwise cells.

    A cell is the darker the larger its figure is.
    """
    first = next(iter(rows.values()))
    variants = [_variant(record) for record in first]
    values = [[_value(record, key) for record in row] for row in rows.values()]
    is_time = key == "time_s"
    if len(rows) == 1 or (not is_time and all(row == values[0] for row in values)):
        if is_time:
            title += f": {next(iter(rows))}"
            variants = [
                name if _fits(record) else f"{name}: does not fit"
                for name, record in zip(variants, first, strict=True)
            ]
        return bar_chart(
            title,
            "",
            variants,
            values[0],
            tick,
        )
    logs = [math.log(value) for row in values for value in row if value]
    low, high = min(logs), max(logs)
    series = []
    about = ""
    for name, row in zip(rows, values, strict=True):
        depths = [
            (math.log(value) - low) / (high - low or 1.0) if value else 0.0 for value in row
        ]
        for column, record in enumerate(rows[name]):
            if is_time and not _fits(record):
                depths[column] = -1.0
                about = "orange: does not fit in the memory"
        labels = tuple(tick(value) for value in row)
        series.append(
            Series(
                name,
                (),
                tuple(depths),
                "cells",
                labels=labels,
            )
        )
    return Chart(
        title,
        about,
        Axis(""),
        Axis(""),
        tuple(reversed(series)),
        tuple(variants),
    )


def _variant(record: Record) -> str:
    """Return a variant as it was typed; `none` is called by the model's attention."""
    if record["variant"] == "none":
        return f"{record['attention']} as it is"
    return str(record["variant"])


def _fits(record: Record) -> bool:
    return record["fits"] is not False


def _value(record: Record, key: str) -> float:
    """Return a figure; of a step without a prediction its bound."""
    value = record[key]
    if value is None and key == "time_s":
        value = record["roofline_s"]
    return float(value or 0)


def _heads_charts(title: str, heads: "dict[str, OverHeads]") -> list[Chart]:
    """Return a chart of cache, step and published scores over KV heads, as shares of MHA's.

    Deployments with equal shares, to a percent, have one curve. Of many curves, the lowest and the
    highest are drawn.
    """
    if not heads:
        return []
    first = next(iter(heads.values()))
    series = []
    for what, key in (("KV cache", "cache"), ("decode step", "step")):
        groups: dict[tuple[float, ...], list[str]] = {}
        for name, one in heads.items():
            shares = tuple(round(share, 2) for share in getattr(one, key))
            groups.setdefault(shares, []).append(name)
        ranked = [groups[shares] for shares in sorted(groups, key=sum)]
        if len(ranked) > MAX_CURVES:
            ranked = [ranked[0], ranked[-1]]
        for names in ranked:
            label = what
            if len(groups) > 1:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                label = f"{what}, {names[0]}{more}"
            ys = tuple(getattr(heads[names[0]], key))
            series.append(Series(label, tuple(first.heads), ys))
    for what, heads_counts, scores in first.published:
        sizes = (PUBLISHED_AREA,) * len(scores)
        series.append(
            Series(
                what,
                tuple(heads_counts),
                tuple(scores),
                "points",
                sizes,
            )
        )
    x = Axis("KV heads", tick=tokens_tick)
    y = Axis("share of what MHA has", log=False, tick="{:.0%}".format)
    return [
        Chart(
            title,
            "",
            x,
            y,
            tuple(series),
        )
    ]


POINTS = "a point is a deployment that none beats in both"
BASES = {
    "bound": "datasheet bounds",
    "calibrated": "predicted",
    "scaled": "scaled from another GPU",
}


def front_charts(curves: "Sequence[FrontCurve]") -> tuple[list[Chart], list[str]]:
    """Return a chart of each front, and a sentence about each answer without a front."""
    drawn = [curve for curve in curves if curve.tpot_s]
    missing = [
        f"not in the picture: {sentence(curve.answer)}" for curve in curves if not curve.tpot_s
    ]
    charts = [front_chart(curve) for curve in drawn]
    if len(charts) < 2:
        return charts, missing
    parts = [(_model(curve), requirement_words(curve.answer.need)) for curve in drawn]
    same = [words[0] for words in zip(*parts, strict=True) if len(set(words)) == 1]
    titles = keep_distinguishing_columns(parts)
    charts = [
        chart._replace(title=" for ".join(title), subtitle=_best(curve))
        for chart, title, curve in zip(charts, titles, drawn, strict=True)
    ]
    bases = dict.fromkeys(_basis(curve) for curve in drawn)
    over = (
        " for ".join(same) or f"What {len(charts)} needs take",
        "; ".join([POINTS, *bases]),
    )
    return [charts[0]._replace(over=over), *charts[1:]], missing


def front_chart(curve: "FrontCurve") -> Chart:
    """Return TPOT against throughput per GPU (or per price), with the answer and the limit."""
    answer = curve.answer
    best = answer.best[0] if answer.best else None
    series = [
        Series(
            "",
            tuple(curve.tpot_s),
            tuple(curve.rates),
            "edge",
            colour=0,
        )
    ]
    for label, kind, meets in (
        ("meets the need", "points", True),
        ("does not", "hollow", False),
    ):
        indices = [
            index
            for index, point in enumerate(curve.points)
            if point.meets == meets and point != best
        ]
        texts = [where(curve.points[i]) if i in curve.labelled else "" for i in indices]
        xs = tuple(curve.tpot_s[index] for index in indices)
        ys = tuple(curve.rates[index] for index in indices)
        series.append(
            Series(
                label,
                xs,
                ys,
                kind,
                labels=tuple(texts),
                colour=0,
            )
        )
    if best and curve.best:
        tpot, rate = curve.best
        text = (where(best),)
        series.append(
            Series(
                "the answer",
                (tpot,),
                (rate,),
                "points",
                (0.1,),
                text,
                1,
            )
        )
    max_tpot = answer.need.max_tpot
    if max_tpot and curve.tpot_s and max(curve.tpot_s) > max_tpot / 2:
        series.append(Series(f"at most {seconds(max_tpot)}", (max_tpot,), (1.0,), "upright"))
    rate_title = "tokens/s per price of an hour" if answer.prices else "tokens/s per GPU"
    return Chart(
        title=" for ".join(filter(None, (_model(curve), requirement_words(answer.need)))),
        subtitle=f"{_best(curve)}; {POINTS}; {_basis(curve)}",
        x=Axis("TPOT", tick=seconds),
        y=Axis(rate_title, tick=plain_tick),
        series=tuple(one for one in series if one.xs),
    )


def _model(curve: "FrontCurve") -> str:
    """Return the model of the best or the closest deployment."""
    answer = curve.answer
    candidates = [*answer.best[:1], *([answer.closest] if answer.closest else [])]
    return candidates[0].deployment.model.name if candidates else ""


def _best(curve: "FrontCurve") -> str:
    """Return the best deployment in a few words."""
    answer = curve.answer
    if answer.best:
        place = where(answer.best[0])
        return f"{place} is the cheapest" if answer.prices else f"{place}: the fewest GPUs"
    if answer.closest:
        return f"nothing meets it; nearest is {where(answer.closest)}: {curve.missed_target}"
    return "nothing meets it"


def _basis(curve: "FrontCurve") -> str:
    answer = curve.answer
    words = BASES.get(answer.basis, answer.basis)
    if answer.basis != BOUND and len(answer.fronts[True].xs):
        words += ", bounds not drawn"
    return words
