"""Pictures of simulated servers: over the load, next to each other, and over time."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvcalc.errors import UserError, few
from kvcalc.records import Record
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
from kvcalc.report.row_names import SERVER, shared_words, sides
from kvcalc.report.text.tables import comparable, predictions_first, seconds

if TYPE_CHECKING:
    from kvcalc.serving.server import SimulationResult

TIMES = {"ttft": "Time to first token", "tpot": "Time per output token"}
# title, key and tick of other figures; the first two are drawn over the load too
FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Output tokens per second", "throughput_tokens_per_s", whole_tick),
    ("Cost of a million output tokens", "cost_per_million_tokens", plain_tick),
    ("Allocated cache without a token", "kv_waste", share_tick),
    ("Token slots with padding", "padding_waste", share_tick),
)
PERCENTILES = (50, 90, 99)
MAX_BANDS = 2  # servers with bands between percentiles; more have only the 99th
LOG_RANGE = 8  # largest over smallest load above which the axis is logarithmic
ENOUGH = 0.95  # share of the largest request rate at which clients saturate a server
MAX_TIMES = 400  # points of a curve over time
WORDING = {
    "model": "{}",
    "place": "{}",
    "requests": "{:,} requests",
    "rate": "{:.3g} requests/s",
    "basis": "times: {}",
}
Servers = dict[str, list[Record]]


def load_chart(records: Sequence[Record]) -> Chart:
    """Return TTFT and TPOT over the load, or bars if all servers have one load.

    Raises:
        UserError: No request was served.
    """
    completed = [r for r in predictions_first(records) if r["completed"]]
    if not completed:
        raise UserError("no request was served: there is nothing to draw")
    served = comparable(completed)
    swept = "rate"
    if (
        len({r.get("rate") for r in served})
        == 1
        < len({r.get("max_concurrency") for r in served})
    ):
        swept = "max_concurrency"
    names = sides(served, [*SERVER, *({"rate", "max_concurrency"} - {swept})]).names
    servers: Servers = {}
    for name, record in sorted(
        zip(names, served, strict=True), key=lambda pair: _load(pair[1], swept)
    ):
        servers.setdefault(name, []).append(record)
    servers = {name: servers[name] for name in dict.fromkeys(names)}
    about = _common_words(served)
    if bounds := dict.fromkeys(r["gpu"] for r in completed if r not in served):
        about += f"; not drawn without a prediction: {few([*bounds])}"
    if all(len({_load(r, swept) for r in rows}) == 1 for rows in servers.values()):
        first, *others = _bars(servers)
        return joined([first._replace(subtitle=about), *others])
    percentiles = PERCENTILES if len(servers) <= MAX_BANDS else PERCENTILES[-1:]
    charts = []
    for figure, title in TIMES.items():
        keys = {f"p{p}": f"{figure}_p{p}_s" for p in percentiles}
        charts.append(_over_load(servers, swept, title, keys, seconds))
    for title, key, tick in FIGURES[:2]:
        if all(r.get(key) for r in served):
            charts.append(_over_load(servers, swept, title, {"": key}, tick))
    marks = _saturation_marks(servers, swept) if len(servers) <= MAX_BANDS else []
    for number, chart in enumerate(charts):
        unnamed = [mark._replace(label="") if number else mark for mark in marks]
        charts[number] = chart._replace(series=[*chart.series, *unnamed])
    if len(servers) > MAX_SERIES:
        charts[0] = charts[0]._replace(over=(about, ""))
    else:
        subtitle = "; ".join(filter(None, [charts[0].subtitle, about]))
        charts[0] = charts[0]._replace(subtitle=subtitle)
    return joined(charts)


def _load(record: Record, swept: str) -> float:
    """Return the requested load, or the request rate if all requests arrive together."""
    return float(record.get(swept) or record["requests_per_s"])


def _common_words(records: Sequence[Record]) -> str:
    places = [{"rate": None, **r, "place": f"{r['gpus']}× {r['gpu']}"} for r in records]
    return ", ".join(shared_words(places, WORDING))


def _over_load(
    servers: Servers,
    swept: str,
    title: str,
    keys: Mapping[str, str],
    tick: Callable[[float], str],
) -> Chart:
    """Return figures of each server over the load, with bands between several of one server.

    Args:
        servers: Records of each server, in the order of the load.
        swept: Key of the load.
        title: Title of the chart.
        keys: Keys of the figures by their names.
        tick: Function that writes a figure.
    """
    series = []
    for number, (name, records) in enumerate(servers.items()):
        timed = [r for r in records if all(r.get(key) for key in keys.values())]
        if not timed:
            continue
        xs = [_load(r, swept) for r in timed]
        columns = {label: [r[key] for r in timed] for label, key in keys.items()}
        for lows, ys in pairwise(columns.values()):
            series.append(Series("", xs, ys, "band", colour=number, lows=lows))
        for label, ys in columns.items():
            kind = "line" if label == next(iter(columns)) else "edge"
            label = f"{name} {label}".strip() if len(keys) > 1 else name
            series.append(Series(label, xs, ys, kind, colour=number))
    loads = [_load(r, swept) for records in servers.values() for r in records]
    is_log = max(loads) > LOG_RANGE * min(loads)
    x = Axis("requests per second", is_log, plain_tick)
    if swept != "rate":
        x = Axis("clients", is_log, tokens_tick)
    about = "99th percentile" if [*keys] == ["p99"] else ""
    return Chart(title, about, x, Axis("", log=tick is seconds, tick=tick), series)


def _saturation_marks(servers: Servers, swept: str) -> list[Series]:
    """Return a vertical line at the load from which each server cannot keep up.

    That is `capacity_requests_per_s`, or the smallest number of clients that reach ENOUGH of the
    largest request rate. A server that keeps up with all loads has no line.
    """
    loads: dict[float, list[str]] = {}
    for name, records in servers.items():
        if swept == "rate":
            load = records[0].get("capacity_requests_per_s")
            is_saturated = any(r.get("diverges") for r in records)
        else:
            enough = ENOUGH * max(r["requests_per_s"] for r in records)
            load = min(_load(r, swept) for r in records if r["requests_per_s"] >= enough)
            is_saturated = load < _load(records[-1], swept)
        if is_saturated and load:
            loads.setdefault(load, []).append(name)
    marks = []
    for load, names in loads.items():
        name = f"{names[0]}: " if len(names) < len(servers) else ""
        marks.append(Series(f"{name}saturated from {load:.3g} on", [load], [1.0], "upright"))
    return marks


def _bars(servers: Servers) -> list[Chart]:
    """Return bars of percentiles of each time, and of other figures, at one load."""
    firsts = [records[0] for records in servers.values()]
    charts = []
    for figure, title in TIMES.items():
        p50, p90, p99 = ([r[f"{figure}_p{p}_s"] or 0 for r in firsts] for p in PERCENTILES)
        parts = {
            "50% of requests": p50,
            "90%": [high - low for low, high in zip(p50, p90, strict=True)],
            "99%": [high - low for low, high in zip(p90, p99, strict=True)],
        }
        texts = [
            f"{seconds(low)} … {seconds(high)}" if high else ""
            for low, high in zip(p50, p99, strict=True)
        ]
        charts.append(bar_chart(title, "", servers, parts, _time_tick, texts))
    for title, key, tick in FIGURES:
        values = [r[key] for r in firsts if r.get(key) is not None]
        if any(values) and len(values) == len(firsts):
            chart = bar_chart(title, "", servers, values, tick)
            bars = chart.series[0]._replace(colour=GREY)  # percentiles have the other colours
            charts.append(chart._replace(series=[bars]))
    return charts


def _time_tick(value: float) -> str:
    return seconds(value) if value else "0"


def occupancy_chart(run: "SimulationResult") -> Chart:
    """Return the allocated and used cache and the batch size of the first rank over time.

    Raises:
        UserError: No request was served.
    """
    log = run.served.logs[0]
    if not log.rows:
        raise UserError("no request was served: there is nothing to draw")
    edges = [row.start_s for row in log.rows]
    edges.append(log.rows[-1].start_s + log.rows[-1].duration_s)
    lengths = [row.duration_s for row in log.rows]
    if log.stride > 1:
        lengths = [end - start for start, end in pairwise(edges)]
    budget = run.pool.budget
    xs, allocated = _means(edges, lengths, [r.kv_allocated_bytes / budget for r in log.rows])
    _, used = _means(edges, lengths, [r.kv_stored_bytes / budget for r in log.rows])
    _, batch = _means(edges, lengths, [r.sequences for r in log.rows])
    unused = [
        1 - part / all_ if all_ else 0 for part, all_ in zip(used, allocated, strict=True)
    ]
    record = {**run.record, "requests": run.record["completed"]}
    about = f"{_common_words([record])}, {record['policy']}, {record['cache']} cache"
    waste = record.get("kv_waste")
    cache = [
        Series("", xs, allocated, "band", colour=0, lows=used),
        Series("cache allocated", xs, allocated, colour=0),
        Series("cache used", xs, used, colour=1),
    ]
    x = Axis("time", log=False, tick="{:.3g} s".format)
    y = Axis("", log=False, tick=share_tick)
    return joined(
        [
            Chart(
                "Cache allocated and used",
                f"shares of the KV cache budget; {about}",
                x,
                y,
                cache,
            ),
            Chart(
                "Allocated, but without a token",
                f"{waste:.1%} on average" if waste is not None else "",
                x,
                y,
                [Series("", xs, unused)],
            ),
            Chart(
                "Sequences in the batch",
                f"at most {run.limits.max_num_seqs:,}",
                x,
                y._replace(tick=whole_tick),
                [Series("", xs, batch)],
            ),
        ]
    )


def _means(
    edges: Sequence[float], lengths: Sequence[float], values: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return times in seconds and means over equal periods; idle time counts as 0.

    Args:
        edges: Starts of the steps and the end of the last step, in seconds.
        lengths: Seconds of the steps.
        values: Values during the steps.
    """
    import numpy as np

    count = min(MAX_TIMES, max(2, 4 * len(values)))
    grid = np.linspace(edges[0], edges[-1], count + 1)
    starts, durations = np.array(edges[:-1]), np.array(lengths)
    knots = np.column_stack((starts, starts + durations)).ravel()
    areas = np.array(values) * durations
    area = np.column_stack((np.zeros(len(values)), areas)).ravel().cumsum()
    means = np.diff(np.interp(grid, knots, area)) / np.diff(grid)
    return ((grid[:-1] + grid[1:]) / 2).tolist(), means.tolist()
