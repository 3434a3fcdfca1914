"""Pictures of requests and simulated servers: over batch size, over the load, and over time."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UserError, list_few
from kvcalc.records import Record, Records
from kvcalc.report.charts.chart import (
    Axis,
    Chart,
    Series,
    bar_chart,
    limit_line,
    plain_tick,
    time_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.size_plot import generation_work_chart
from kvcalc.report.row_names import SERVER, shared_words, sides, texts_by_name
from kvcalc.report.text.tables import (
    comparable_records,
    percent,
    plural,
    predictions_first,
    ratio,
    seconds,
    time_note,
)

if TYPE_CHECKING:
    from kvcalc.planning.sweeps import LatencyCurve, SpeculationCurve
    from kvcalc.question.serving_options import LatencyOptions
    from kvcalc.serving.server import SimulationResult
    from kvcalc.timing.deployment import TimedDeployment

BATCH_AXIS = Axis("concurrent sequences", tokens_tick)


def latency_chart(curves: Sequence[Any], request: "LatencyOptions") -> list[Chart]:
    """Return the charts of `latency`. The options decide which charts they are.

    If the options have a draft, a chart shows the speed-up of speculative decoding. If they have
    `no_cache`, charts show FLOPs with and without a KV cache. Otherwise, two charts show TPOT and
    throughput over the batch size.

    Args:
        curves: Result of `latency_sweep` for all requests: speculation curves, generation work or
            latency curves.
        request: The options of the first request. They select the charts, and the subtitle of the
            speed-up chart names its batch size and lengths.
    """
    if request.draft:
        return [speculation_chart(curves, request)]
    if request.no_cache:
        return generation_work_chart(curves)
    return batch_chart(curves)


def batch_chart(curves: "Sequence[LatencyCurve]") -> list[Chart]:
    """Return a chart of TPOT and a chart of output tokens per second, both over the batch size.

    Tokens per second are of all sequences on the replica. Each curve ends at the largest batch that
    fits in GPU memory.

    Args:
        curves: A curve for each deployment and request, with a record per batch size.
    """
    curves, undrawn = comparable_curves(curves)
    lengths = [
        f"{curve.request.input_len:,} tokens in and {curve.request.output_len:,} out"
        for curve in curves
    ]
    common, names = deployment_names([curve.deployment for curve in curves], lengths)
    times, rates = (
        Chart(
            title,
            "",
            BATCH_AXIS,
            axis,
            [
                within_memory(
                    Series(
                        name or curve.deployment.model.name,
                        [record["batch_size"] for record in curve.records],
                        [record[key] for record in curve.records],
                    ),
                    curve.max_num_seqs,
                )
                for name, curve in zip(names, curves)
            ],
        )
        for title, axis, key in (
            ("Time per token over the batch", Axis("TPOT", seconds), "tpot_s"),
            ("Tokens per second", Axis("tokens/s", whole_tick), "output_tokens_per_s"),
        )
    )
    notes = time_note([record for curve in curves for record in curve.records]) + undrawn
    times = times._replace(subtitle=". ".join(filter(None, [common, notes])))
    about = "output tokens of all sequences, end to end; a curve ends where the memory is full"
    return [times, rates._replace(subtitle=about)]


def speculation_chart(curves: "Sequence[SpeculationCurve]", request: "LatencyOptions") -> Chart:
    """Return a chart of the speed-up of speculative decoding over the acceptance rate.

    The speed-up is TPOT without the draft ÷ TPOT with it. A line at 1 marks decoding without a
    draft.

    Args:
        curves: A curve for each deployment and number of draft tokens.
        request: The request, whose batch size and lengths the subtitle names.
    """
    curves, undrawn = comparable_curves(curves)
    counts = [plural(curve.num_draft_tokens, "draft token") for curve in curves]
    common, names = deployment_names([curve.deployment for curve in curves], counts)
    drafts = " and ".join(dict.fromkeys(curve.draft for curve in curves))
    gains = []
    for number, (name, curve) in enumerate(zip(names, curves)):
        xs = [index / (len(curve.speedups) - 1) for index in range(len(curve.speedups))]
        gain = Series(name or curve.draft, xs, curve.speedups, colour=number)
        if curve.can_fit is False:
            gain = gain._replace(kind="dashed", label=f"{gain.label}: does not fit")
        gains.append(gain)
    load = f"{plural(request.batch_size, 'sequence')} of {request.mid_length:,} tokens"
    bases = " and ".join(dict.fromkeys(curve.deployment.basis for curve in curves))
    return Chart(
        "Speed-up by speculative decoding",
        f"{common}, draft {drafts}; {load}; times: {bases}{undrawn}",
        Axis("acceptance rate of a draft token", percent, log=False),
        Axis("speed-up", ratio, log=False),
        [*gains, limit_line("plain decode", 1.0)],
    )


def comparable_curves(curves: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the curves to draw, and a note for the subtitle that names the GPUs left out.

    A predicted time and a lower bound from the datasheet cannot be compared. So if any curve has
    predicted times, curves with datasheet bounds are left out. The note is '' if all curves are
    drawn.

    Args:
        curves: Curves of `latency_sweep`, each with its deployment.
    """
    drawn = [curve for curve in curves if curve.deployment.calibration] or [*curves]
    names = dict.fromkeys(curve.deployment.gpu.name for curve in curves if curve not in drawn)
    return drawn, f"; not drawn without a prediction: {list_few(names)}" * bool(names)


def deployment_names(
    deployments: "Sequence[TimedDeployment]", details: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return a text on what all deployments share, and a short name for each deployment.

    The text is for the subtitle of a chart: model, GPUs and details that are equal in all
    deployments. A name has only values that differ between the deployments. The names are '' if
    nothing differs.

    Args:
        deployments: The deployments.
        details: A further text for each deployment, such as its input and output lengths; () for
            none.
    """
    records = [
        {
            "model": deployment.model.name,
            "gpu": f"{deployment.parallelism.gpus}× {deployment.gpu.name}",
            "dtype": deployment.formats.weights_label,
            "kv_cache_dtype": deployment.formats.kv_cache_dtype,
            "basis": deployment.basis,
            "details": text,
        }
        for deployment, text in zip(deployments, details or [""] * len(deployments))
    ]
    common = ", ".join(
        filter(None, shared_words(records, dict.fromkeys(("model", "gpu", "details"), "{}")))
    )
    return common, sides(records, [*records[0]]).names


TIMES = {"ttft": "Time to first token", "tpot": "Time per output token"}
# title, key and tick of other figures; the first two are drawn over the load too
FIGURES = (
    ("Output tokens per second", "throughput_tokens_per_s", whole_tick),
    ("Cost of a million output tokens", "cost_per_million_tokens", plain_tick),
    ("Allocated cache without a token", "kv_waste", percent),
    ("Token slots with padding", "padding_waste", percent),
)
PERCENTILES = (50, 90, 99)
MAX_DETAILED = 2  # servers with several percentiles; more have only the 99th
LOG_RANGE = 8  # largest over smallest load above which the axis is logarithmic
MAX_TIMES = 400  # points of a curve over time
WORDING = texts_by_name("""
    model: {}
    place: {}
    requests: {:,} requests
    rate: {:.3g} requests/s
    basis: times: {}
""")
Servers = dict[str, list[tuple[float, Record]]]  # loads and records by name


def load_chart(records: Records) -> list[Chart]:
    """Return charts of TTFT, TPOT, throughput and cost of simulated servers over the load.

    The load is the request rate or the number of clients. If each server has only one load, the
    charts have a bar per server. If any record has predicted times, records with datasheet bounds
    are left out, because they cannot be compared.

    Args:
        records: Records of `serve`, one per server and load.

    Raises:
        UserError: No request was served.
    """
    completed = [r for r in predictions_first(records) if r["completed"]]
    if not completed:
        raise UserError("no request was served: there is nothing to draw")
    served = comparable_records(completed)
    loads, others = "rate", "max_concurrency"
    if len({r.get(loads) for r in served}) == 1 < len({r.get(others) for r in served}):
        loads, others = others, loads
    # all requests arrive together if there is no rate
    places = [float(record.get(loads) or record["requests_per_s"]) for record in served]
    names = sides(served, [*SERVER, others]).names
    servers: Servers = {name: [] for name in names}
    for load, name, record in sorted(zip(places, names, served), key=lambda row: row[0]):
        servers[name].append((load, record))
    about = _common_words(served)
    if bounds := dict.fromkeys(r["gpu"] for r in completed if r not in served):
        about += f"; not drawn without a prediction: {list_few(bounds)}"
    charts = []
    if all(len(points) == 1 for points in servers.values()):
        figures = [(f"{TIMES[time]}, p99", f"{time}_p99_s", time_tick) for time in TIMES]
        for title, key, tick in (*figures, *FIGURES):
            values: list[Any] = [r.get(key) for ((_, r),) in servers.values()]
            if any(values) and None not in values:
                charts.append(bar_chart(title, "", servers, values, tick))
    else:
        x = Axis("requests per second", plain_tick)
        if loads != "rate":
            x = Axis("clients", tokens_tick)
        x = x._replace(log=max(places) > LOG_RANGE * min(places))
        is_detailed = len(servers) <= MAX_DETAILED
        percentiles = PERCENTILES if is_detailed else PERCENTILES[-1:]
        about_times = "" if is_detailed else "99th percentile"
        for figure, title in TIMES.items():
            keys = {f"p{p}": f"{figure}_p{p}_s" for p in percentiles}
            y = Axis("", seconds)
            charts.append(Chart(title, about_times, x, y, _over_load(servers, keys)))
        for title, key, tick in FIGURES[:2]:
            if all(r.get(key) for r in served):
                y = Axis("", tick, log=False)
                charts.append(Chart(title, "", x, y, _over_load(servers, {"": key})))
    about = "; ".join(filter(None, [charts[0].subtitle, about]))
    return [charts[0]._replace(subtitle=about), *charts[1:]]


def _common_words(records: Records) -> str:
    places = [{"rate": None, **r, "place": f"{r['gpus']}× {r['gpu']}"} for r in records]
    return ", ".join(shared_words(places, WORDING))


def _over_load(servers: Servers, keys: Mapping[str, str]) -> list[Series]:
    """Return the series of figures of each server over the load.

    Args:
        servers: Records of each server.
        keys: Record keys of the figures, by printed name.
    """
    series = []
    for number, (name, points) in enumerate(servers.items()):
        rows = [(load, r) for load, r in points if all(r.get(key) for key in keys.values())]
        xs = [load for load, _ in rows]
        kind = "line"
        for label, key in keys.items():
            ys = [r[key] for _, r in rows]
            label = f"{name} {label}".strip() if len(keys) > 1 else name
            series.append(Series(label, xs, ys, kind, colour=number))
            kind = "edge"
    return series


def occupancy_chart(run: "SimulationResult") -> list[Chart]:
    """Return two charts over the time of a simulated server, for its first data-parallel rank.

    The first chart has the allocated and the used KV cache, as shares of the KV cache budget. The
    second chart has the number of sequences in the batch.

    Args:
        run: Result of the simulation.

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
    x = Axis("time", "{:.3g} s".format, log=False)
    shares = f"shares of the KV cache budget; {about}"
    if waste is not None:
        shares += f"; {waste:.1%} of the allocated cache without a token"
    limit = f"at most {run.limits.max_num_seqs:,}"
    count = Axis("", whole_tick, log=False)
    return [
        Chart("Cache allocated and used", shares, x, Axis("", percent, log=False), cache),
        Chart("Sequences in the batch", limit, x, count, [Series("", xs, batch)]),
    ]


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

    grid = np.linspace(edges[0], edges[-1], min(MAX_TIMES, max(2, 4 * len(values))) + 1)
    starts, durations = np.array(edges[:-1]), np.array(lengths)
    knots = np.column_stack((starts, starts + durations)).ravel()
    area = (
        np.column_stack((np.zeros(len(values)), np.array(values) * durations)).ravel().cumsum()
    )
    means = np.diff(np.interp(grid, knots, area)) / np.diff(grid)
    return ((grid[:-1] + grid[1:]) / 2).tolist(), means.tolist()


def within_memory(series: Series, max_num_seqs: int | None) -> Series:
    """Return the part of a curve over batch sizes up to the largest batch that fits in memory.

    If no point fits, the complete curve is returned, dashed and with a label that says so.

    Args:
        series: The curve. Its horizontal positions are batch sizes.
        max_num_seqs: Largest batch that fits; None if unknown, which leaves the curve unchanged.
    """
    if max_num_seqs is None:
        return series
    num_points = sum(x <= max_num_seqs for x in series.xs)
    if not num_points:
        return series._replace(kind="dashed", label=f"{series.label}: does not fit")
    return series._replace(xs=series.xs[:num_points], ys=series.ys[:num_points])
