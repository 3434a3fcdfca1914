"""Small servers that can be computed by hand: passes of whole seconds, and a cache of one byte per token."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcalc import Batch, Parallelism, Sequences
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.batching import Limits, ServerSetup
from kvcalc.serving.cache_accounting import Pool
from kvcalc.serving.requests import Clients, Requests, sample_workload
from kvcalc.serving.server import Server, SimulationResult
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.step_timers import Chunks, StepTimer, largest_micro_batch


class HandClock:
    """A pass takes `base` seconds and `each` seconds per token."""

    model = SimpleNamespace(kinds={})
    calibration = "by hand"

    def __init__(self, base: float = 1.0, each: float = 0.0, dp: int = 1, pp: int = 1) -> None:
        self.base, self.each, self.parallelism = base, each, Parallelism(dp=dp, pp=pp)

    def as_server(self) -> "HandClock":
        return self

    def seconds(self, batch: Batch, all_positions: bool = False) -> Any:
        past = sum(0 * g.past for g in batch.groups)
        return self.base + self.each * batch.tokens / self.parallelism.dp + past


class HandTimer(StepTimer):
    """Computes the times of passes, also of passes with both prompts and decodes."""

    def __init__(self, clock: Any, queries: int = 1) -> None:
        super().__init__(clock, queries)

    def mixed(self, chunks: Chunks, count: int, context: float) -> float:
        if not count:
            return self.prefill(chunks)
        chunks, count = largest_micro_batch(self.deployment, chunks, count)
        groups = [Sequences(self.ranks, new, past) for new, past in chunks]
        batch = Batch((*groups, Sequences(count * self.ranks, self.queries, 0)))
        return float(self.deployment.seconds(batch, all_positions=self.queries > 1))


def asked(*rows: tuple[float, int, int]) -> Requests:
    """Return requests from tuples (arrival, prompt, answer)."""
    arrivals, inputs, outputs = zip(*rows, strict=True)
    return Requests(np.array(arrivals, dtype=float), np.array(inputs), np.array(outputs))


def byte_pool(budget: int = 10**9, block: int = 1, most: int = 10_000, longest: int = 10**9, reserve: int = 0) -> Pool:
    """Return a pool with one byte per token, in blocks of `block` tokens or with a reservation."""
    tokens = np.arange(most + 1)
    if reserve:
        return Pool(budget, np.full(most + 1, reserve), tokens, longest)
    return Pool(budget, -(-tokens // block) * block, tokens, longest, block, block, block)


def served(
    requests: Requests,
    policy: str = "continuous",
    pool: Pool | None = None,
    deployment: Any = None,
    clients: int = 0,
    **limits: Any,
) -> Served:
    """Return the result of a simulation."""
    setup = ServerSetup(pool or byte_pool(), HandTimer(deployment or HandClock()), Limits(**limits))
    return simulate(requests, setup, policy, Clients(clients))


def serve(
    deployment: Any, load: Workload, settings: ServerSettings, policy: str = "continuous", cache: str = "paged"
) -> SimulationResult:
    """Simulate the requests of a workload on one replica."""
    requests = sample_workload(load)
    return Server(deployment, requests, load, settings, policy, cache).run(requests, load)
