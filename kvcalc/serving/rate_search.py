"""Search for the rate of requests that a server sustains, by simulating several rates."""

import math
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from kvcalc.errors import UserError
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.requests import sample_workload
from kvcalc.serving.server import Server, SimulationResult
from kvcalc.timing.deployment import TimedDeployment

SUSTAINED = (
    0.95  # maximum share of the saturation rate, so that the queue empties after a burst
)
SHARES = (
    0.2,
    0.4,
    0.6,
    0.8,
    SUSTAINED,
    1.1,
)  # shares of the saturation rate that are tried
GOOD = 0.99  # share of requests that must meet every goal
CLOSE = 1.02  # ratio of a rate that misses a goal to the sustained rate
MIN_RATE = 1e-3


class Sweep(NamedTuple):
    """A server at several rates.

    Attributes:
        sustained: The run at the highest rate that the server sustains. Its record has the rate as
            `found_rate`; 0 if not even single requests meet the goals.
        tried: A run for each rate that was tried, from the lowest rate on.
        is_complete: Whether no Ctrl-C ended the search.
    """

    sustained: SimulationResult
    tried: list[SimulationResult]
    is_complete: bool


class _Trials:
    """A server simulated at several rates, each rounded to three digits and simulated once.

    Attributes:
        runs: The runs by rate.
        max_rate: The highest rate that may be sustained; 0 if the server serves none of the
            requests.
    """

    def __init__(
        self, server: Server, load: Workload, progress: Callable[[int], None] | None
    ) -> None:
        self.server = server
        self.load = load
        self.progress = progress
        self.saturation_rate = server.saturation_rate or 0.0
        self.max_rate = _rounded(SUSTAINED * self.saturation_rate)
        self.runs: dict[float, SimulationResult] = {}

    def is_good(self, rate: float) -> bool:
        """Return whether the required share of requests meets the goals. Without goals it does.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the simulation.
        """
        rate = _rounded(rate)
        if rate not in self.runs:
            load = replace(self.load, rate=rate)
            run = self.server.run(sample_workload(load), load, self.progress)
            if not run.served.is_complete:
                raise KeyboardInterrupt
            self.runs[rate] = run
        record = self.runs[rate].record
        attainment = record["slo_attainment"]
        return bool(record["completed"]) and (attainment is None or attainment >= GOOD)

    def sustained_rate(self) -> float:
        """Return the highest rate tried that meets the goals and is at most `max_rate`.

        The rate is 0 if no rate tried is sustained.
        """
        rates = [rate for rate in self.runs if rate <= self.max_rate and self.is_good(rate)]
        return max(rates, default=0.0)

    def search(self) -> None:
        """Try all shares of the saturation rate, then rates next to the highest sustained rate."""
        for share in SHARES if self.max_rate else ():
            self.is_good(share * self.saturation_rate)
        if not self.sustained_rate():
            self.is_good(MIN_RATE)
        low = self.sustained_rate()
        high = min((rate for rate in self.runs if rate > low), default=low)
        while low and low < self.max_rate and high > CLOSE * low:
            middle = _rounded((low * high) ** 0.5 if low > high / 4 else high / 2)
            if self.is_good(middle):
                low = middle
            else:
                high = middle


def _rounded(rate: float) -> float:
    """Return a rate rounded to the three digits that are printed."""
    return float(f"{rate:.3g}")


def sweep_rates(
    deployment: TimedDeployment,
    load: Workload,
    settings: ServerSettings,
    policy: str = "continuous",
    cache: str = "paged",
    progress: Callable[[int], None] | None = None,
) -> Sweep:
    """Simulate a server at rates up to saturation and beyond, and find the rate that it sustains.

    The sustained rate is the highest rate, to 2%, at which 99% of the requests meet the goals of
    the settings. It is at most 95% of the saturation rate. Ctrl-C keeps the rates already tried.

    Raises:
        UserError: The load has arrival times or a rate already, or is a closed loop.
    """
    if load.rate != math.inf:
        raise UserError(
            "a rate is given, and the highest one is to be found",
            hint="Leave --rate out, or --find-rate",
        )
    if load.requests or load.max_concurrency:
        raise UserError(
            "a rate is found for requests drawn in an open loop, without --requests and "
            "--max-concurrency"
        )
    server = Server(deployment, sample_workload(load), load, settings, policy, cache)
    trials = _Trials(server, load, progress)
    is_complete = True
    try:
        trials.search()
    except KeyboardInterrupt:
        if not trials.runs:
            raise
        is_complete = False
    rate = trials.sustained_rate()
    rates = sorted(trials.runs)
    run = trials.runs[rate or rates[0]]
    record = {**run.record, "rate": rate or None, "found_rate": rate}
    return Sweep(run._replace(record=record), [trials.runs[r] for r in rates], is_complete)
