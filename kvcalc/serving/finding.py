"""The highest rate of requests at which a server keeps its promises, found by simulating it again and again."""

import math
from collections.abc import Callable

import msgspec

from kvcalc.errors import UserError
from kvcalc.serving.load import Load
from kvcalc.serving.run import Run, serve
from kvcalc.serving.settings import ServerSettings
from kvcalc.timing.deployment import Deployment

GOOD = 0.99  # of the requests, what has to meet every goal
CLOSE = 1.02  # times the rate found, a rate that does not
LEAST_RATE, MOST_TRIES = 1e-3, 40


def find_rate(
    deployment: Deployment, load: Load, settings: ServerSettings, policy: str = "continuous", cache: str = "paged",
    progress: Callable[[int], None] | None = None,
) -> tuple[Run, Load]:  # fmt: skip
    """The run at the highest rate (to 2 %) at which 99 of 100 requests meet the goals and the queue does not grow, and its load.

    No rate beyond what the server can carry at all is found, however short the run.

    Where no rate is slow enough the run is that of single requests, and its rate 0. Ctrl-C ends the search with the highest rate
    that was seen to do, its run marked as not whole. Raises UserError without goals, or where the load has times of its own.
    """
    if not (settings.slo_ttft or settings.slo_tpot):
        raise UserError("the highest rate needs a goal", hint="Give --slo-ttft, --slo-tpot or both")
    if load.rate != math.inf:
        raise UserError("a rate is given, and the highest one is to be found", hint="Leave --rate out, or --find-rate")
    if load.requests or load.max_concurrency:
        raise UserError("a rate is found for requests drawn in an open loop, without --requests and --max-concurrency")

    def at(rate: float, before: Run | None = None) -> tuple[Run, Load]:
        asked = msgspec.structs.replace(load, rate=rate)
        run = serve(deployment, asked.drawn(), asked, settings, policy, cache, progress, before)
        if not run.served.whole:
            raise KeyboardInterrupt
        return run, asked

    alone = at(LEAST_RATE)
    if not _kept(*alone):
        return alone[0], msgspec.structs.replace(alone[1], rate=0.0)
    best, low = alone, LEAST_RATE
    high = max(2 * LEAST_RATE, alone[0].record["capacity_requests_per_s"] or 1.0)
    try:
        for _ in range(MOST_TRIES):
            tried = at(high, alone[0])
            if not _kept(*tried):
                break
            best, low, high = tried, high, 1.5 * high
        while high > CLOSE * low:
            middle = (low * high) ** 0.5 if low > high / 4 else high / 2
            tried = at(middle, alone[0])
            if _kept(*tried):
                best, low = tried, middle
            else:
                high = middle
    except KeyboardInterrupt:
        return _stopped(best)
    return best


def _stopped(best: tuple[Run, Load]) -> tuple[Run, Load]:
    run, load = best
    return run._replace(served=run.served._replace(whole=False)), load


def _kept(run: Run, load: Load) -> bool:
    """Whether the goals are met by as many requests as have to, none was refused, and the rate can go on for ever."""
    record = run.record
    if record["capacity_requests_per_s"] and load.rate > record["capacity_requests_per_s"]:
        return False
    return bool((record["slo_attainment"] or 0.0) >= GOOD and not record["diverges"] and not record["rejected"])
