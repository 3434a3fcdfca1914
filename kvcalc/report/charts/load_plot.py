"""Pictures of simulated servers: over the load, next to each other, and over time."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UserError, few
from kvcalc.records import Record
from kvcalc.report.charts.chart import (
    Axis,
    Chart,
    Series,
    bar_chart,
    joined,
    plain_tick,
    share_tick,
    time_tick,
    tokens_tick,
    whole_tick,
)
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
MAX_DETAILED = 2  # servers with several percentiles; more have only the 99th
LOG_RANGE = 8  # largest over smallest load above which the axis is logarithmic
MAX_TIMES = 400  # points of a curve over time
WORDING = {
    "model": "{}",
    "place": "{}",
    "requests": "{:,} requests",
    "rate": "{:.3g} requests/s",
    "basis": "times: {}",
}
Servers = dict[str, dict[float, list[Record]]]  # by name and load


def load_chart(records: Sequence[Record]) -> Chart:
    """Return TTFT and TPOT over the load, or bars if all servers have one load.

    Raises:
        UserError: No request was served.
    """
    completed = [r for r in predictions_first(records) if r["completed"]]
    if not completed:
        raise UserError("no request was served: there is nothing to draw")
    served = comparable(completed)
    loads, others = "rate", "max_concurrency"
    if len({r.get(loads) for r in served}) == 1 < len({r.get(others) for r in served}):
        loads, others = others, loads
    # all requests arrive together if there is no rate
    places = [float(record.get(loads) or record["requests_per_s"]) for record in served]
    names = sides(served, [*SERVER, others]).names
    servers: Servers = {name: {} for name in names}
    for load, name, record in sorted(
        zip(places, names, served, strict=True), key=lambda row: row[0]
    ):
        servers[name].setdefault(load, []).append(record)
    about = _common_words(served)
    if bounds := dict.fromkeys(r["gpu"] for r in completed if r not in served):
        about += f"; not drawn without a prediction: {few([*bounds])}"
    if all(len(points) == 1 for points in servers.values()):
        first, *charts = _bars(servers)
        return joined([first._replace(subtitle=about), *charts])
    x = Axis("requests per second", tick=plain_tick)
    if loads != "rate":
        x = Axis("clients", tick=tokens_tick)
    x = x._replace(log=max(places) > LOG_RANGE * min(places))
    is_detailed = len(servers) <= MAX_DETAILED
    charts = []
    for figure, title in TIMES.items():
        percentiles = PERCENTILES if is_detailed else PERCENTILES[-1:]
        keys = {f"p{p}": f"{figure}_p{p}_s" for p in percentiles}
        about_times = "" if is_detailed else "99th percentile"
        y = Axis("", tick=seconds)
        charts.append(Chart(title, about_times, x, y, _over_load(servers, keys)))
    for title, key, tick in FIGURES[:2]:
        if all(r.get(key) for r in served):
            y = Axis("", log=False, tick=tick)
            charts.append(Chart(title, "", x, y, _over_load(servers, {"": key})))
    subtitle = "; ".join(filter(None, [charts[0].subtitle, about]))
    charts[0] = charts[0]._replace(subtitle=subtitle)
    return joined(charts)


def _common_words(records: Sequence[Record]) -> str:
    places = [{"rate": None, **r, "place": f"{r['gpus']}× {r['gpu']}"} for r in records]
    return ", ".join(shared_words(places, WORDING))


def _over_load(servers: Servers, keys: Mapping[str, str]) -> list[Series]:
    """Return figures of each server over the load.

    Args:
        servers: Records of each server.
        keys: Keys of the figures by their names.
    """
    series = []
    for number, (name, points) in enumerate(servers.items()):
        rows = [(load, r) for load, records in points.items() for r in records]
        rows = [(load, r) for load, r in rows if all(r.get(key) for key in keys.values())]
        xs = [load for load, _ in rows]
        columns = {label: [r[key] for _, r in rows] for label, key in keys.items()}
        kind = "line"
        for label, ys in columns.items():
            label = f"{name} {label}".strip() if len(keys) > 1 else name
            series.append(Series(label, xs, ys, kind, colour=number))
            kind = "edge"
    return series


def _bars(servers: Servers) -> list[Chart]:
    """Return bars of percentiles of each time, and of other figures, at one load."""
    firsts = [records[0] for points in servers.values() for records in points.values()]
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
        charts.append(bar_chart(title, "", servers, parts, time_tick, texts))
    for title, key, tick in FIGURES:
        values: list[Any] = [r.get(key) for r in firsts]
        if any(values) and None not in values:
            charts.append(bar_chart(title, "", servers, values, tick))
    return charts


def occupancy_chart(run: "SimulationResult") -> Chart:
    """Return the allocated and used cache and the batch size of the first rank over time.

    Raises:
        UserError: No request was served.
    """
    log = run.served.logs[0]
    if not log.rows:
        raise UserError("no request was served: there is nothing to draw")
    rows = log.rows
    edges = [row.start_s for row in rows] + [rows[-1].start_s + rows[-1].duration_s]
    lengths = [row.duration_s for row in rows]
    if log.stride > 1:
        lengths = [end - start for start, end in pairwise(edges)]
    budget = run.pool.budget
    (xs, allocated), (_, used), (_, batch) = (
        _means(edges, lengths, values)
        for values in (
            [row.kv_allocated_bytes / budget for row in rows],
            [row.kv_stored_bytes / budget for row in rows],
            [row.sequences for row in rows],
        )
    )
    record = {**run.record, "requests": run.record["completed"]}
    about = f"{_common_words([record])}, {record['policy']}, {record['cache']} cache"
    waste = record.get("kv_waste")
    cache = [
        Series("cache allocated", xs, allocated, colour=0),
        Series("cache used", xs, used, colour=1),
    ]
    x = Axis("time", log=False, tick="{:.3g} s".format)
    shares = f"shares of the KV cache budget; {about}"
    if waste is not None:
        shares += f"; {waste:.1%} of the allocated cache without a token"
    y = Axis("", log=False, tick=share_tick)
    memory = Chart("Cache allocated and used", shares, x, y, cache)
    limit = f"at most {run.limits.max_num_seqs:,}"
    y = y._replace(tick=whole_tick)
    sequences = Chart("Sequences in the batch", limit, x, y, [Series("", xs, batch)])
    return joined([memory, sequences])


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
