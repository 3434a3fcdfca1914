"""The rate at which a server saturates: what it serves while requests always wait."""

import math
from typing import Any

import msgspec

from kvcalc.serving.load import Load
from kvcalc.serving.requests import Prefixed, Requests
from kvcalc.serving.simulation import Served

STEADY_REQUESTS = 3000  # requests of a backlog, besides those with which it starts
MAX_STARTED = 2048  # requests of a backlog that had begun earlier
PER_STARTED = 4  # requests that a backlog adds for each of them, so that the run outlasts its start


def make_backlog(load: Load, requests: Requests, max_num_seqs: int) -> Requests:
    """Return requests that all wait from the start, of the lengths of a load or of its trace.

    Their number does not depend on the number of requests of the load. The first `max_num_seqs` have a random part of their
    answer left, as if they had begun earlier. Otherwise answers of equal length would all end in the same step, and begin
    again together: gpt-oss-20b on an H100 would then serve 39.4 requests/s instead of 35.9 of a Poisson process.
    """
    import numpy as np

    started = min(max_num_seqs, MAX_STARTED)
    count = STEADY_REQUESTS + PER_STARTED * started
    if load.requests:
        backlog = _repeat(requests, count)
    else:
        backlog = msgspec.structs.replace(load, rate=math.inf, num_prompts=count).drawn()
    parts_left = np.random.default_rng([load.seed, 3]).random(started)
    backlog.output_len[:started] = np.ceil(backlog.output_len[:started] * parts_left).clip(1)
    return backlog


def _repeat(requests: Requests, count: int) -> Requests:
    """Return the first `count` requests of a trace, again from its beginning after its end."""
    import numpy as np

    indices = np.arange(count) % len(requests)
    repeated = type(requests)(np.zeros(count), requests.input_len[indices], requests.output_len[indices])
    if isinstance(requests, Prefixed) and isinstance(repeated, Prefixed):
        return repeated.beginning(requests.prefix_id[indices], requests.prefix_len[indices])
    return repeated


def saturated_rate(served: Served, started: int) -> float | None:
    """Return the requests per second that a server completed of a backlog; None if it completed none.

    Counted is the time from the moment at which the requests that it started with are gone, to the moment at which the last
    request starts. A backlog that is never longer than the server takes at once counts whole.
    """
    finished = _gathered(served, "finished")
    if not len(finished):
        return None
    starts = _gathered(served, "scheduled")
    first = min(started + sum(log.largest for log in served.logs), len(starts) // 2)
    begin, end = (float(starts[first]), float(starts[-1])) if len(starts) else (0.0, 0.0)
    completed = int(((finished > begin) & (finished <= end)).sum())
    if completed < len(finished) // 10:
        return len(finished) / float(finished[-1])
    return completed / (end - begin)


def _gathered(served: Served, name: str) -> Any:
    """Return the times of all ranks that decode, in order, without requests that did not come to that."""
    import numpy as np

    times = np.sort(np.concatenate([getattr(log, name) for log in served.logs]))
    return times[times == times]
