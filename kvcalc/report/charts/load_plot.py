"""Pictures of simulated servers: over the load, side by side, and over time."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UserError, few
from kvcalc.report.charts.chart import (
    MAX_SERIES,
    Axis,
    Chart,
    Series,
    bar_chart,
    joined,
    plain_tick,
    share_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.series_styles import GREY
from kvcalc.report.export import Record
from kvcalc.report.row_names import keep_distinguishing_columns
from kvcalc.report.text.tables import comparable, predictions_first, seconds

if TYPE_CHECKING:
    from kvcalc.serving.server import SimulationResult

# what distinguishes servers, the weightiest first, and how it is written
NAMES: dict[str, Callable[[Any], str]] = {
    "model": str,
    "gpus": lambda v: f"{v} GPUs",
    "gpu": str,
    "dtype": str,
    "kv_cache_dtype": lambda v: f"cache {v}",
    "basis": str,
    "policy": str,
    "cache": str,
    "prefix_hit_rate": lambda v: f"prefix hits {v or 0:g}",
    "max_concurrency": lambda v: f"{v:,} clients" if v else "",
    "rate": lambda v: f"{v:g}/s" if v else "all at once",
}
TIMES = {"ttft": "Time to the first token", "tpot": "Time from token to token"}
# title, key and writer of other figures, over the load or as bars
FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Output tokens per second", "throughput_tokens_per_s", whole_tick),
    ("Cost of a million output tokens", "cost_per_million_tokens", plain_tick),
    ("Cache allocated that holds no token", "kv_waste", share_tick),
    ("Token slots that hold padding", "padding_waste", share_tick),
)
PERCENTILES = (50, 90, 99)
MAX_BANDS = 2  # servers with bands between percentiles; more have only the 99th
LOG_RANGE = 8  # largest over smallest load, above which the axis is logarithmic
ENOUGH = 0.95  # share of the most requests per second, at which clients saturate a server
MAX_TIMES = 400  # points of a curve over time
Servers = dict[str, list[Record]]


def load_chart(records: Sequence[Record]) -> Chart:
    """Return TTFT and TPOT over the load, or bars if all servers take one load.

    Raises:
        UserError: No request was served.
    """
    completed = [r for r in predictions_first(records) if r["completed"]]
    if not completed:
        raise UserError("no request was served: there is nothing to draw")
    served = comparable(completed)
    swept = "rate"
    counts = {key: len({r.get(key) for r in served}) for key in ("rate", "max_concurrency")}
    if counts["rate"] == 1 and counts["max_concurrency"] > 1:
        swept = "max_concurrency"
    servers = _servers(served, swept)
    is_single_load = all(len({_load(r, swept) for r in rows}) == 1 for rows in servers.values())
    where = _title(served, swept, is_single_load)
    notes = []
    if len({r["basis"] for r in served}) == 1:
        notes.append(f"times: {served[0]['basis']}")
    if bounds := dict.fromkeys(r["gpu"] for r in completed if r not in served):
        notes.append(f"not drawn, as only bounds are known: {few([*bounds])}")
    if is_single_load:
        first, *others = _bars(servers)
        return joined([first._replace(subtitle="; ".join([where, *notes])), *others])
    loads = {name: _saturating_load(rows, swept) for name, rows in servers.items()}
    marks = []
    if len(servers) <= MAX_BANDS:
        marks = _saturation_marks(loads)
    if not marks:
        notes.append(_saturation_words(loads))
    charts = [_percentiles(servers, key, swept) for key in TIMES]
    for title, key, tick in FIGURES[:2]:
        if all(r.get(key) for r in served):
            charts.append(
                _over_load(
                    servers,
                    swept,
                    title,
                    key,
                    tick,
                )
            )
    unnamed = [mark._replace(label="") for mark in marks]
    charts = [
        chart._replace(series=(*chart.series, *(unnamed if number else marks)))
        for number, chart in enumerate(charts)
    ]
    first = charts[0]
    if len(servers) > MAX_SERIES:
        first = first._replace(over=(where, "; ".join(notes)))
    else:
        first = first._replace(
            subtitle="; ".join(filter(None, [first.subtitle, where, *notes]))
        )
    return joined([first, *charts[1:]])


def _servers(records: Sequence[Record], swept: str) -> Servers:
    """Return the records of each server, by what distinguishes it."""
    keys = [key for key in NAMES if key != swept]
    parts = [tuple(NAMES[key](r[key]) if key in r else "" for key in keys) for r in records]
    servers: Servers = {}
    for record, words in zip(records, keep_distinguishing_columns(parts), strict=True):
        servers.setdefault(", ".join(filter(None, words)), []).append(record)
    return servers


def _load(record: Record, swept: str) -> float:
    """Return the requested load, or the served one if all requests came at once."""
    return float(record.get(swept) or record["requests_per_s"])


def _title(records: Sequence[Record], swept: str, is_single_load: bool) -> str:
    """Return model, GPUs and load, as far as they are the same."""
    first = records[0]
    models = {r["model"] for r in records}
    title = first["model"] if len(models) == 1 else f"{len(models)} models"
    if len({(r["gpus"], r["gpu"]) for r in records}) == 1:
        title += f" on {first['gpus']}× {first['gpu']}"
    title += f", {first['requests']:,} request{'s' * (first['requests'] > 1)}"
    if not is_single_load:
        return f"{title} at each load"
    if first.get("rate") and len({r["rate"] for r in records}) == 1:
        title += f" at {first['rate']:.3g} a second"
    return title


def _percentiles(servers: Servers, figure: str, swept: str) -> Chart:
    """Return percentiles of a time over the load; only the 99th of many servers."""
    percentiles = PERCENTILES if len(servers) <= MAX_BANDS else PERCENTILES[-1:]
    keys = [f"{figure}_p{p}_s" for p in percentiles]
    series: list[Series] = []
    for number, (name, records) in enumerate(servers.items()):
        timed = [r for r in records if all(r.get(key) for key in keys)]
        timed.sort(key=lambda r: _load(r, swept))
        xs = tuple(_load(r, swept) for r in timed)
        levels = [tuple(r[key] for r in timed) for key in keys]
        if not xs:
            continue
        for low, high in pairwise(levels):
            series.append(
                Series(
                    "",
                    xs,
                    high,
                    "band",
                    colour=number,
                    lows=low,
                )
            )
        for p, ys in zip(percentiles, levels, strict=True):
            label = f"{name} p{p}".strip() if len(percentiles) > 1 else name
            kind = "line" if p == percentiles[0] else "edge"
            series.append(
                Series(
                    label,
                    xs,
                    ys,
                    kind,
                    colour=number,
                )
            )
    about = "" if len(percentiles) > 1 else "99th percentile"
    y = Axis("", tick=seconds)
    return Chart(
        TIMES[figure],
        about,
        _load_axis(servers, swept),
        y,
        tuple(series),
    )


def _over_load(
    servers: Servers, swept: str, title: str, key: str, tick: Callable[[float], str]
) -> Chart:
    """Return another figure of each server over the load."""
    series = []
    for number, (name, records) in enumerate(servers.items()):
        points = sorted((_load(r, swept), r[key]) for r in records)
        xs, ys = zip(*points, strict=True)
        series.append(Series(name, xs, ys, colour=number))
    about = "of each server" if len(servers) > 1 else "of all requests together"
    y = Axis("", log=False, tick=tick)
    return Chart(
        title,
        about,
        _load_axis(servers, swept),
        y,
        tuple(series),
    )


def _load_axis(servers: Servers, swept: str) -> Axis:
    loads = [_load(r, swept) for records in servers.values() for r in records]
    is_log = max(loads) > LOG_RANGE * min(loads)
    if swept == "rate":
        return Axis("requests per second", log=is_log, tick=plain_tick)
    return Axis("clients", log=is_log, tick=tokens_tick)


def _saturating_load(records: Sequence[Record], swept: str) -> float | None:
    """Return the load from which a server cannot keep up; None if it keeps up with all.

    Of rates: `capacity_requests_per_s`. Of clients: the fewest that bring ENOUGH of the most
    requests per second.
    """
    if swept == "rate":
        diverges = any(r.get("diverges") for r in records)
        return records[0].get("capacity_requests_per_s") if diverges else None
    enough = ENOUGH * max(r["requests_per_s"] for r in records)
    fewest = min(_load(r, swept) for r in records if r["requests_per_s"] >= enough)
    return fewest if fewest < max(_load(r, swept) for r in records) else None


def _saturation_marks(loads: dict[str, float | None]) -> list[Series]:
    """Return a line at each saturating load, with the server's name if not all have it."""
    marks = []
    for load in dict.fromkeys(filter(None, loads.values())):
        names = [name for name, other in loads.items() if other == load]
        name = f"{names[0]}: " if len(names) < len(loads) else ""
        marks.append(Series(f"{name}saturated from {load:.3g} on", (load,), (1.0,), "upright"))
    return marks


def _saturation_words(loads: dict[str, float | None]) -> str:
    words = []
    for name, load in loads.items():
        if load:
            words.append(f"{load:.3g} on" + (f" ({name})" if name else ""))
    return f"saturated from {', '.join(words)}" if words else "no load asked for saturates it"


def _bars(servers: Servers) -> list[Chart]:
    """Return bars of percentiles of each time, and of other figures, at one load."""
    firsts = [records[0] for records in servers.values()]
    charts = []
    for figure, title in TIMES.items():
        half, most, tail = (
            [float(r[f"{figure}_p{p}_s"] or 0) for r in firsts] for p in PERCENTILES
        )
        parts = {
            "half of the requests": half,
            "nine in ten": [b - a for a, b in zip(half, most, strict=True)],
            "99 of 100": [b - a for a, b in zip(most, tail, strict=True)],
        }
        texts = [
            f"{seconds(a)} … {seconds(b)}" if b else "" for a, b in zip(half, tail, strict=True)
        ]
        charts.append(
            bar_chart(
                title,
                "",
                servers,
                parts,
                _time_tick,
                texts,
            )
        )
    for title, key, tick in FIGURES:
        values = [r[key] for r in firsts if r.get(key) is not None]
        if any(values) and len(values) == len(firsts):
            chart = bar_chart(
                title,
                "",
                servers,
                values,
                tick,
            )
            bars = chart.series[0]._replace(colour=GREY)  # percentiles have the other colours
            charts.append(chart._replace(series=(bars,)))
    return charts


def _time_tick(value: float) -> str:
    return seconds(value) if value else "0"


def occupancy_chart(run: "SimulationResult") -> Chart:
    """Return the cache allocated and used, and the batch size, over time, of the first rank.

    Raises:
        UserError: No request was served.
    """
    log = run.served.logs[0]
    rows = log.rows
    if not rows:
        raise UserError("no request was served: there is nothing to draw")
    edges = [row.start_s for row in rows] + [rows[-1].start_s + rows[-1].duration_s]
    lengths = [row.duration_s for row in rows]
    if log.stride > 1:
        lengths = [b - a for a, b in pairwise(edges)]
    budget = run.pool.budget
    xs, allocated = _means(edges, lengths, [r.kv_allocated_bytes / budget for r in rows])
    _, used = _means(edges, lengths, [r.kv_stored_bytes / budget for r in rows])
    _, batch = _means(edges, lengths, [r.sequences for r in rows])
    empty = [100 * (1 - u / a) if a else 0.0 for a, u in zip(allocated, used, strict=True)]
    record = run.record
    subtitle = _occupancy_subtitle(record)
    waste = ""
    if record.get("kv_waste") is not None:
        waste = f"{record['kv_waste']:.1%} of all that was allocated, over time"
    cache = (
        Series(
            "",
            xs,
            allocated,
            "band",
            colour=0,
            lows=used,
        ),
        Series("cache allocated", xs, allocated, colour=0),
        Series("cache used", xs, used, colour=1),
    )
    batch_about = f"of {run.limits.max_num_seqs:,} that it takes at once"
    x = Axis("time", log=False, tick=lambda v: f"{v:.3g} s")
    panels = (
        ("Cache allocated and used", subtitle, share_tick, cache),
        ("Allocated, but no token in it", waste, "{:.3g}%".format, _curve(xs, empty)),
        ("Sequences in the batch", batch_about, whole_tick, _curve(xs, batch)),
    )
    charts = []
    for title, about, tick, series in panels:
        y = Axis("", log=False, tick=tick)
        charts.append(Chart(title, about, x=x, y=y, series=series))
    return joined(charts)


def _occupancy_subtitle(record: Record) -> str:
    requests = f"{record['completed']:,} request{'s' * (record['completed'] > 1)}"
    if record.get("rate"):
        requests += f" at {record['rate']:.3g} a second"
    return (
        f"{record['model']} on {record['gpus']}× {record['gpu']}, {record['policy']}, "
        f"{record['cache']} cache, {requests}; shares of the cache's memory; "
        f"times: {record['basis']}"
    )


def _curve(xs: tuple[float, ...], ys: Sequence[float]) -> tuple[Series, ...]:
    return (Series("", xs, tuple(ys), colour=0),)


def _means(
    edges: list[float], lengths: list[float], values: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return times and means over equal stretches of time; idle time counts as 0."""
    import numpy as np

    count = min(MAX_TIMES, max(2, 4 * len(values)))
    grid = np.linspace(edges[0], edges[-1], count + 1)
    starts, durations = np.array(edges[:-1]), np.array(lengths)
    knots = np.column_stack((starts, starts + durations)).ravel()
    areas = np.array(values) * durations
    area = np.column_stack((np.zeros(len(values)), areas)).ravel().cumsum()
    means = np.diff(np.interp(grid, knots, area)) / np.diff(grid)
    return tuple(((grid[:-1] + grid[1:]) / 2).tolist()), tuple(means.tolist())
