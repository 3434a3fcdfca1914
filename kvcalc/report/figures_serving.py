"""Pictures of a simulated server: what ran and what was held over time, and latency against load."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

from kvcalc.errors import UserError
from kvcalc.report.chart import Axis, Chart, Series
from kvcalc.report.export import Record
from kvcalc.report.tables import seconds
from kvcalc.serving.run import Run

MOST_POINTS = 400


def occupancy(run: Run) -> Chart:
    """Sequences in the batch, and cache allocated and used, each as a share of the most there can be; of the first rank.

    Raises UserError where nothing was served.
    """
    rows, thinned = run.served.logs[0].rows, run.served.logs[0].stride > 1
    if not rows:
        raise UserError("no request was served: there is nothing to draw")
    edges = [r.start_s for r in rows] + [rows[-1].start_s + rows[-1].duration_s]
    lengths = [b - a for a, b in pairwise(edges)] if thinned else [r.duration_s for r in rows]
    curves = (
        ("sequences in the batch", [r.sequences / run.limits.max_num_seqs for r in rows]),
        ("cache allocated", [r.kv_allocated_bytes / run.pool.budget for r in rows]),
        ("cache used", [r.kv_stored_bytes / run.pool.budget for r in rows]),
    )
    series = tuple(Series(label, *_averaged(edges, lengths, values)) for label, values in curves)
    r = run.record
    subtitle = (
        f"{r['model']} on {r['gpus']} × {r['gpu']}, {r['policy']}, {r['cache']} cache, {r['completed']:,} requests; "
        f"of {run.limits.max_num_seqs:,} sequences and of the cache's memory; times: {r['basis']}"
    )
    x, y = Axis("time", log=False, tick=_whole_seconds), Axis("share of the most", log=False, tick=lambda v: f"{100 * v:.3g}%")
    return Chart("A server over time", subtitle, x, y, series)


def _averaged(edges: list[float], lengths: list[float], values: list[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means over equal stretches of time, weighted by how long each value held, idle time as 0."""
    import numpy as np

    start, end = edges[0], edges[-1]
    grid = np.linspace(start, end, min(MOST_POINTS, max(2, 4 * len(values))) + 1)
    starts, durations = np.array(edges[:-1]), np.array(lengths)
    knots = np.column_stack((starts, starts + durations)).ravel()
    area = np.column_stack((np.zeros(len(values)), np.array(values) * durations)).ravel().cumsum()
    level = np.diff(np.interp(grid, knots, area)) / np.diff(grid)
    return tuple(((grid[:-1] + grid[1:]) / 2).tolist()), tuple(level.tolist())


def _whole_seconds(value: float) -> str:
    return f"{value:g} s"


def load_curve(records: Sequence[Record]) -> Chart:
    """TTFT and TPOT against requests per second, for each GPU, policy and cache: 99th percentile, and median where few.

    Raises UserError where nothing was served.
    """
    if not any(r["completed"] for r in records):
        raise UserError("no request was served: there is nothing to draw")
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        groups.setdefault(tuple(r[k] for k in ("gpu", "policy", "cache")), []).append(r)
    series = []
    for name, found in groups.items():
        label = " ".join(str(part) for i, part in enumerate(name) if len({g[i] for g in groups}) > 1)
        for figure, percentile in product(("ttft", "tpot"), (50, 99) if len(groups) < 3 else (99,)):
            points = [(r["rate"] or r["requests_per_s"], r[f"{figure}_p{percentile}_s"]) for r in found]
            points = sorted(p for p in points if p[0] and p[1])
            xs, ys = (tuple(p[i] for p in points) for i in (0, 1))
            series += [Series(f"{label} {figure.upper()} p{percentile}".strip(), xs, ys)] if points else []
    first = records[0]
    subtitle = f"{first['model']}, {first['requests']:,} requests at each rate; times: {first['basis']}"
    x = Axis("requests per second", log=False, tick=lambda v: f"{v:g}")
    return Chart("Latency against load", subtitle, x, Axis("seconds", tick=seconds), tuple(series))
