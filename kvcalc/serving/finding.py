"""Search for the rate of requests that a server sustains, by simulating several rates."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.serving.load import Load
from kvcalc.serving.run import Run, prepare, serve
from kvcalc.serving.settings import ServerSettings
from kvcalc.timing.deployment import Deployment

SUSTAINED = 0.95  # maximum share of the saturation rate, so that the queue empties after a burst
SHARES = (0.2, 0.4, 0.6, 0.8, SUSTAINED, 1.1)  # shares of the saturation rate that are tried
GOOD = 0.99  # share of requests that must meet every goal
CLOSE = 1.02  # ratio of a rate that misses a goal to the sustained rate
LEAST_RATE = 1e-3


class Sweep(NamedTuple):
    """A server at several rates.

    Attributes:
        sustained: The run at the highest rate that the server sustains. Its record has the rate as `found_rate`; 0 if not even
            single requests meet the goals.
        tried: A run for each rate that was tried, from the lowest rate on.
        whole: Whether no Ctrl-C ended the search.
    """

    sustained: Run
    tried: list[Run]
    whole: bool


class _Trials:
    """A server simulated at several rates, each rounded to three digits and simulated once.

    Attributes:
        runs: The runs by rate.
        max_rate: The highest rate that may be sustained; 0 if the server serves none of the requests.
    """

    def __init__(
        self,
        deployment: Deployment,
        load: Load,
        settings: ServerSettings,
        policy: str,
        cache: str,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.deployment, self.load, self.settings = deployment, load, settings
        self.policy, self.cache, self.progress = policy, cache, progress
        self.ready = prepare(deployment, load.drawn(), load, settings, policy, cache)
        self.max_rate = _rounded(SUSTAINED * (self.ready.capacity or 0.0))
        self.runs: dict[float, Run] = {}

    def run(self, rate: float) -> None:
        """Simulate the server at a rate. Raises KeyboardInterrupt if Ctrl-C ended the simulation."""
        rate = _rounded(rate)
        if rate in self.runs:
            return
        load = msgspec.structs.replace(self.load, rate=rate)
        found = serve(
            self.deployment,
            load.drawn(),
            load,
            self.settings,
            self.policy,
            self.cache,
            progress=self.progress,
            before=self.ready,
        )
        if not found.served.whole:
            raise KeyboardInterrupt
        self.runs[rate] = found

    def sustained_rate(self) -> float:
        """Return the highest rate tried that meets the goals and is at most `max_rate`.

        The rate is 0 if no rate tried is sustained.
        """
        good = (rate for rate, run in self.runs.items() if _meets_goals(run.record))
        return max((rate for rate in good if rate <= self.max_rate), default=0.0)

    def search(self) -> None:
        """Try all shares of the saturation rate, then rates next to the highest sustained rate."""
        for share in SHARES if self.max_rate else ():
            self.run(share * (self.ready.capacity or 0.0))
        if not self.sustained_rate():
            self.run(LEAST_RATE)
        low = self.sustained_rate()
        if not low:
            return
        high = min((rate for rate in self.runs if rate > low), default=low)
        while low < self.max_rate and high > CLOSE * low:
            middle = _rounded((low * high) ** 0.5 if low > high / 4 else high / 2)
            self.run(middle)
            low, high = (middle, high) if _meets_goals(self.runs[middle].record) else (low, middle)


def _rounded(rate: float) -> float:
    """Return a rate rounded to three digits, as it is printed."""
    return float(f"{rate:.3g}")


def _meets_goals(record: dict[str, Any]) -> bool:
    """Return whether the required share of requests meets the goals. Without goals it does."""
    attainment = record["slo_attainment"]
    return bool(record["completed"]) and (attainment is None or attainment >= GOOD)


def sweep_rates(
    deployment: Deployment,
    load: Load,
    settings: ServerSettings,
    policy: str = "continuous",
    cache: str = "paged",
    progress: Callable[[int], None] | None = None,
) -> Sweep:
    """Simulate a server at rates up to saturation and beyond, and find the rate that it sustains.

    The sustained rate is the highest rate, to 2%, at which 99% of the requests meet the goals of the
    settings. It is at most 95% of the saturation rate. Ctrl-C keeps the rates already tried.

    Raises:
        UserError: The load has arrival times or a rate already, or is a closed loop.
    """
    if load.rate != math.inf:
        raise UserError("a rate is given, and the highest one is to be found", hint="Leave --rate out, or --find-rate")
    if load.requests or load.max_concurrency:
        raise UserError("a rate is found for requests drawn in an open loop, without --requests and --max-concurrency")
    trials, whole = _Trials(deployment, load, settings, policy, cache, progress), True
    try:
        trials.search()
    except KeyboardInterrupt:
        if not trials.runs:
            raise
        whole = False
    rate, rates = trials.sustained_rate(), sorted(trials.runs)
    run = trials.runs[rate or rates[0]]
    record = run.record | {"rate": rate or None, "found_rate": rate}
    return Sweep(run._replace(record=record), [trials.runs[each] for each in rates], whole)
