"""Measured servers, simulated with their load: TPOT, TTFT and tokens per second.

Each run is simulated from its first request to its last: the burst at the start, queues, the cache
memory, and the engine's order of passes. The figures are defined as the client reports them: means
over requests, and output tokens over the whole time.
"""

from collections.abc import Sequence
from math import nan
from typing import Any

import msgspec
import numpy as np

from kvcalc.capacity import Fit, FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.serving.batching import ServerSetup
from kvcalc.serving.cache_accounting import Pool, make_pool
from kvcalc.serving.decoding import Limits
from kvcalc.serving.requests import Clients, Requests
from kvcalc.serving.server import memory, summary
from kvcalc.serving.simulation import PublishedRun, published_run, simulate
from kvcalc.serving.step_timers import InterpolatedStepTimer
from kvcalc.timing.calibration import Calibration, Validated, engine_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.rows import MeasuredRow, ServedTimes, served_model
from kvcalc.timing.validation import precision_of, ranks_of

MIN_RUNS = 8  # minimum number of measured servers for an error figure
UTILIZATION = 0.9  # share of the memory, from the scripts of the runs
MIN_MAX_LEN, MIN_MAX_TOKENS, MIN_MAX_NUM_SEQS = (
    9300,
    16384,
    128,
)  # minimum sizes of the tables


def served_times(
    rows: Sequence[MeasuredRow], gpu: Gpu, calibration: Calibration | None
) -> list[ServedTimes]:
    """Return the figures of each run under a calibration.

    They are NaN if the model is unknown or if there is no calibration.
    """
    times = [ServedTimes()] * len(rows)
    if calibration is None:
        return times
    engine = engine_of(calibration.stack) if calibration.engine is None else calibration.engine
    groups: dict[Any, list[int]] = {}  # runs that one server can simulate
    for index, row in enumerate(rows):
        versioned = engine.of_version(row.version) if engine else None
        served = row.model, row.dtype, row.op, row.shape[3:], row.cache
        key = *served, row.client, row.framework, versioned
        groups.setdefault(key, []).append(index)
    for (*_, versioned), indices in groups.items():
        runs = [published_run(rows[index], versioned) for index in indices]
        versioned_calibration = msgspec.structs.replace(calibration, engine=versioned)
        replica = _make_replica(rows[indices[0]], gpu, versioned_calibration, runs)
        if replica is None:
            continue
        path = (versioned.path_us / 1e6, versioned.path_token_us / 1e6) if versioned else ()
        for index, run in zip(indices, runs, strict=True):
            times[index] = _simulate(*replica, run, Clients(run.clients, 0.0, *path))
    return times


def _make_replica(
    row: MeasuredRow, gpu: Gpu, calibration: Calibration, runs: Sequence[PublishedRun]
) -> tuple[InterpolatedStepTimer, Fit | None] | None:
    """Return the timer and the memory of a server; None if the model is unknown or has no times.

    The memory is None if the weights leave none.
    """
    model = served_model(row.model) if row.model else None
    if model is None:
        return None
    max_len = max(MIN_MAX_LEN, *(run.input_len + run.output_len + 1 for run in runs))
    max_tokens = max(MIN_MAX_TOKENS, *(run.max_tokens for run in runs))
    max_num_seqs = max(MIN_MAX_NUM_SEQS, *(run.max_num_seqs for run in runs))
    try:
        deployment = TimedDeployment(
            model, gpu, precision_of(row, model), ranks_of(row), calibration=calibration
        )
        steps = InterpolatedStepTimer(
            deployment, max_len, max_tokens, max_num_seqs, exact=False
        )
    except UserError:
        return None
    options = FitOptions(
        engine="none",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=UTILIZATION,
    )
    try:
        return steps, memory(deployment, options)
    except UserError:
        return steps, None


def _simulate(
    steps: InterpolatedStepTimer, capacity: Fit | None, run: PublishedRun, clients: Clients
) -> ServedTimes:
    """Return the figures of one run."""
    count = run.rounds * run.clients
    rng = np.random.default_rng(0)
    inputs, outputs = (
        rng.integers(max(1, int(n * run.min_share)), n, size=count, endpoint=True)
        for n in (run.input_len, run.output_len)
    )
    max_tokens = run.input_len + run.output_len + 1
    if capacity:
        layout, content, budget = capacity.plan, capacity.content, capacity.kv_budget
        pool = make_pool(layout, content, budget, "paged", max_tokens, max_tokens)
    else:
        tokens = np.arange(max_tokens + 1, dtype=np.int64)
        pool = Pool(1 << 60, tokens, tokens, max_tokens)
    limits = Limits(run.max_num_seqs, run.max_tokens)
    setup = ServerSetup(pool, steps, limits, run.scheduling, run.prefix_hit_rate)
    requests = Requests(np.zeros(count), inputs, outputs)
    record = summary(simulate(requests, setup, clients=clients), pool.budget)
    if not record["completed"]:
        return ServedTimes()
    tpot_s = nan if record["tpot_mean_s"] is None else record["tpot_mean_s"]
    return ServedTimes(
        1e6 * tpot_s, 1e6 * record["ttft_mean_s"], record["throughput_tokens_per_s"]
    )


def steps_validated(
    calibration: Calibration, gpu: Gpu, rows: Sequence[MeasuredRow]
) -> dict[Any, Validated]:
    """Return the errors of the three figures for dense and for mixture-of-experts models.

    Runs that hit a prefix cache or contain measurement artefacts are left out, and so are kinds of
    model with fewer than MIN_RUNS runs. Measured
    tokens per second are clients · output / (TTFT + (output − 1) · TPOT).
    """
    errors: dict[Any, Validated] = {}
    for op, kind in (("e2e_dense", "dense"), ("e2e_moe", "mixture")):
        runs = [row for row in rows if row.op == op and not row.odd]
        predicted = served_times(runs, gpu, calibration)
        for suffix, figure in (
            ("", "tpot_us"),
            ("_ttft", "ttft_us"),
            ("_throughput", "tokens_per_s"),
        ):
            measured = [
                getattr(run, "time_us" if figure == "tpot_us" else figure) for run in runs
            ]
            error = _error([getattr(times, figure) for times in predicted], measured)
            if error:
                errors[f"{kind}{suffix}"] = error
    return errors


def _error(predicted: Sequence[float], measured: Sequence[float]) -> Validated | None:
    """Return median and 90th percentile of the errors of the known figures."""
    pairs = zip(predicted, measured, strict=True)
    logs = [abs(float(np.log(a / b))) for a, b in pairs if a > 0 and b > 0]
    if len(logs) < MIN_RUNS:
        return None
    median, p90 = np.quantile(np.expm1(logs), (0.5, 0.9)).round(4).tolist()
    return Validated(rows=len(logs), median_abs_error=median, p90_abs_error=p90)
