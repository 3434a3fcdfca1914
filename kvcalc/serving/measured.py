"""Measured servers, simulated with their load: TPOT, TTFT and tokens per second.

Each run is simulated from its first request to its last: the burst at the start, queues, the cache
memory, and the engine's order of passes. The figures are defined as the client reports them: means
over requests, and output tokens over the whole time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.capacity.answer import Capacity
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.serving.continuous import Continuous
from kvcalc.serving.door import Clients, Door
from kvcalc.serving.log import Log
from kvcalc.serving.pool import Pool, make_pool
from kvcalc.serving.prefixes import Kept
from kvcalc.serving.published import Driven, driven, precision_of, ranks_of
from kvcalc.serving.replica import memory
from kvcalc.serving.requests import Requests
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.tables import Tables
from kvcalc.timing.calibration import Calibration, Validated
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.engine import engine_of
from kvcalc.timing.rows import MeasuredRow, ServedTimes
from kvcalc.timing.served import served_model

LEAST_RUNS = 8  # minimum number of measured servers for an error figure
BLOCK = 16  # tokens per block
UTILIZATION = 0.9  # share of the memory, from the scripts of the runs
LONGEST, WIDEST = 9300, 16384  # minimum tokens of a request and of a pass in the tables


class Replica(NamedTuple):
    """A server of one model.

    Attributes:
        tables: Times of its passes.
        room: Memory of its cache. None if the weights leave no memory.
    """

    tables: Tables
    room: Capacity | None


def served_times(rows: Sequence[MeasuredRow], gpu: Gpu, calibration: Calibration | None) -> list[ServedTimes]:
    """Return the figures of each run under a calibration.

    They are NaN if the model is unknown or if there is no calibration.
    """
    replicas: dict[Any, Replica | None] = {}
    return [_served(row, gpu, calibration, replicas) if calibration else ServedTimes() for row in rows]


def _served(row: MeasuredRow, gpu: Gpu, calibration: Calibration, replicas: dict[Any, Replica | None]) -> ServedTimes:
    engine = engine_of(calibration.stack) if calibration.engine is None else calibration.engine
    engine = engine.of_version(row.version) if engine else None
    how = driven(row, engine)
    key = row.model, row.dtype, row.op, row.shape[3:], row.cache, row.client, row.framework, engine
    most, tokens = max(LONGEST, how.input_len + how.output_len + 1), max(WIDEST, how.tokens)
    found = replicas.get(key)
    if key not in replicas or (found and not found.tables.covers(most, tokens, how.seats)):
        found = replicas[key] = _replica(row, gpu, msgspec.structs.replace(calibration, engine=engine), most, tokens, how.seats)
    if found is None:
        return ServedTimes()
    path = (engine.path_us / 1e6, engine.path_token_us / 1e6) if engine else (0.0, 0.0)
    return _simulated(found, how, Clients(how.clients, 0.0, *path))


def _replica(row: MeasuredRow, gpu: Gpu, calibration: Calibration, most: int, tokens: int, seats: int) -> Replica | None:
    model = served_model(row.model) if row.model else None
    if model is None:
        return None
    try:
        timed = Deployment(model, gpu, precision_of(row, model), ranks_of(row), calibration=calibration)
        tables = Tables(timed, most, tokens, max(seats, 128), exact=False)
    except UserError:
        return None
    asked = FitOptions(engine="none", max_num_seqs=256, max_num_batched_tokens=8192, gpu_memory_utilization=UTILIZATION)
    try:
        return Replica(tables, memory(timed, asked))
    except UserError:
        return Replica(tables, None)


def _simulated(replica: Replica, how: Driven, clients: Clients) -> ServedTimes:
    import numpy as np

    count = how.rounds * how.clients
    chance = np.random.default_rng(0)
    inputs, outputs = (
        chance.integers(max(1, int(n * how.shortest)), n, size=count, endpoint=True) for n in (how.input_len, how.output_len)
    )
    if how.pool:
        inputs = np.resize(inputs[: how.pool], count)
    most = how.input_len + how.output_len + 1
    if replica.room:
        pool = make_pool(replica.room.plan, replica.room.content, replica.room.kv_budget, "paged", most, most)
    else:
        tokens = np.arange(most + 1, dtype=np.int64)
        pool = Pool(1 << 60, tokens, tokens, most)
    log = Log(count)
    door = Door(Requests(np.zeros(count), inputs, outputs), pool, log, clients)
    limits = Limits(how.seats, how.tokens)
    prefixes = Kept((np.arange(count) % how.pool).tolist(), inputs.tolist(), pool, BLOCK) if how.pool else None
    server = Continuous(door, pool, replica.tables, limits, log, how.scheduling, prefixes)
    while server.run():
        pass
    done = log.finished == log.finished
    if not done.any():
        return ServedTimes()
    longer = done & (outputs > 1)
    tpot = ((log.finished - log.first)[longer] / (outputs[longer] - 1)).mean() if longer.any() else float("nan")
    span = log.finished[done].max() - log.arrived[done].min()
    ttft = (log.first - log.arrived)[done].mean()
    return ServedTimes(1e6 * float(tpot), 1e6 * float(ttft), float(outputs[done].sum() / span))


def steps_validated(calibration: Calibration, gpu: Gpu, rows: Sequence[MeasuredRow]) -> dict[Any, Validated]:
    """Return the errors of the three figures for dense and for mixture-of-experts models.

    Runs that hit a prefix cache or contain measurement artefacts are left out, and so are kinds of
    model with fewer than LEAST_RUNS runs. Measured
    tokens per second are clients · output / (TTFT + (output − 1) · TPOT).
    """
    found: dict[Any, Validated] = {}
    for op, kind in (("e2e_dense", "dense"), ("e2e_moe", "mixture")):
        runs = [row for row in rows if row.op == op and not row.odd]
        times = served_times(runs, gpu, calibration)
        pairs = [(one.tpot_us, row.time_us) for one, row in zip(times, runs, strict=True)]
        first = [(one.ttft_us, row.ttft_us) for one, row in zip(times, runs, strict=True)]
        rates = [(one.tokens_per_s, row.tokens_per_s) for one, row in zip(times, runs, strict=True)]
        for name, both in ((kind, pairs), (f"{kind}_ttft", first), (f"{kind}_throughput", rates)):
            error = _error(both)
            if error:
                found[name] = error
    return found


def _error(pairs: Sequence[tuple[float, float]]) -> Validated | None:
    import numpy as np

    logs = [abs(float(np.log(predicted / measured))) for predicted, measured in pairs if predicted > 0 and measured > 0]
    if len(logs) < LEAST_RUNS:
        return None
    each = np.expm1(logs)
    median, p90 = (round(float(np.quantile(each, q)), 4) for q in (0.5, 0.9))
    return Validated(rows=len(logs), median_abs_error=median, p90_abs_error=p90)
