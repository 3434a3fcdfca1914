"""A simulated server over time: what was held, and what ran."""

from itertools import pairwise

from kvcalc.errors import UserError
from kvcalc.report.chart import Axis, Chart, Series, joined, share_tick, whole_tick
from kvcalc.serving.run import Run

MOST_POINTS = 400


def occupancy(run: Run) -> Chart:
    """Cache allocated and used as shares of its memory, and beside them the sequences in the batch; of the first rank.

    Raises UserError where nothing was served.
    """
    rows, thinned = run.served.logs[0].rows, run.served.logs[0].stride > 1
    if not rows:
        raise UserError("no request was served: there is nothing to draw")
    edges = [r.start_s for r in rows] + [rows[-1].start_s + rows[-1].duration_s]
    lengths = [b - a for a, b in pairwise(edges)] if thinned else [r.duration_s for r in rows]
    allocated = _averaged(edges, lengths, [r.kv_allocated_bytes / run.pool.budget for r in rows])
    used = _averaged(edges, lengths, [r.kv_stored_bytes / run.pool.budget for r in rows])
    batch = _averaged(edges, lengths, [float(r.sequences) for r in rows])
    r = run.record
    done = f"{r['completed']:,} request{'s' * (r['completed'] > 1)}" + (f" at {r['rate']:.3g} a second" if r.get("rate") else "")
    subtitle = (
        f"{r['model']} on {r['gpus']}× {r['gpu']}, {r['policy']}, {r['cache']} cache, {done}; "
        f"shares of the cache's memory; times: {r['basis']}"
    )
    cache = (
        Series("", *allocated, "band", colour=0, lows=used[1]),
        Series("cache allocated", *allocated, colour=0),
        Series("cache used", *used, colour=1),
    )
    empty = tuple(100 * (1 - u / a) if a else 0.0 for a, u in zip(allocated[1], used[1], strict=True))
    x, share = Axis("time", log=False, tick=_whole_seconds), Axis("", log=False, tick=share_tick)
    held = f"{r['kv_waste']:.1%} of all that was allocated, over time" if r.get("kv_waste") is not None else ""
    waste = Axis("", log=False, tick=lambda v: f"{v:.3g}%")
    seats = Axis("", log=False, tick=whole_tick)
    most = f"of {run.limits.max_num_seqs:,} that it takes at once"
    return joined(
        [
            Chart("Cache allocated and used", subtitle, x, share, cache),
            Chart("Allocated, but no token in it", held, x, waste, (Series("", allocated[0], empty, colour=0),)),
            Chart("Sequences in the batch", most, x, seats, (Series("", *batch, colour=0),)),
        ]
    )


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
    return f"{value:.3g} s"
