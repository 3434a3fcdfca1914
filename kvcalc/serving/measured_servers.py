"""Simulate published runs of measured servers: their formats, ranks and load, and their bounds.

Each run is simulated from its first request to its last: the burst at the start, queues, the cache
memory, and the engine's order of passes. The figures are defined as in the benchmark client: means
over requests, and output tokens divided by the whole time.

The bound of the time per output token is

    TPOT ≥ decode step(batch, input + output/2) + batch/output · prefill(input)

A new prompt replaces each sequence that ends, so a step includes batch/output of a prefill.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import nan
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvcalc.capacity import Fit, FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu, roofline, total_seconds
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.library.presets import key
from kvcalc.model.forward_pass import forward
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.question.serving_options import INFERENCEX
from kvcalc.serving.batching import Limits, Scheduling, ServerSetup
from kvcalc.serving.cache_accounting import Pool, make_pool
from kvcalc.serving.requests import Clients, Requests
from kvcalc.serving.server import memory, summary
from kvcalc.serving.simulation import scheduling_of, simulate
from kvcalc.serving.step_timers import InterpolatedStepTimer
from kvcalc.storage.quantization import stored_format
from kvcalc.timing.calibration import (
    Calibration,
    EngineOverheads,
    ErrorStatistics,
    find_engine_overheads,
)
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.fitting import median_and_p90
from kvcalc.timing.rows import MeasuredRow, ServedTimes, served_model

# Formats of 4-bit weights and activations, by the label of a run.
FP4 = {"fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}


def bound_us(row: MeasuredRow, gpu: Gpu) -> float:
    """Return the datasheet bound of a measured server's time per output token, in microseconds.

    It is a lower bound, with which the measured time is compared. It is the time of a decode step
    in the middle of the answers, plus the prefill time of one prompt · clients ÷ output tokens,
    because each answer also needs a prefill. The result is NaN if no preset matches the row's
    model, or if the model cannot run on the row's tensor-parallel and expert-parallel ranks.

    Args:
        row: Row of a benchmark of a server, with lengths, clients and measured times.
        gpu: The GPU of the row, whose datasheet rates are used.
    """
    model = served_model(row.model)
    if model is None:
        return nan
    input_len, output_len, batch = map(int, row.shape[:3])
    passes = Batch.decode(input_len + max(1, output_len // 2), batch), Batch.prefill(input_len)
    try:
        step_s, prompt_s = (
            total_seconds(
                roofline(forward(model, batch, precision_of(row, model), ranks_of(row)), gpu)
            )
            for batch in passes
        )
    except UserError:
        return nan
    return 1e6 * float(step_s + batch / output_len * prompt_s)


def precision_of(row: MeasuredRow, model: Model) -> Precision:
    """Return the data types of weights and KV cache with which a measured server ran.

    A checkpoint that is published quantised runs as published. There is one exception: a run in fp4
    of a checkpoint in a wider format uses an NVFP4 checkpoint. Example: DeepSeek-R1 is published in
    fp8.

    A checkpoint that is not quantised runs in the row's format. Mixtures of experts and Qwen in fp8
    then have scales for blocks of 128 × 128.

    Args:
        row: Row of a benchmark of a server.
        model: The model that the row names.
    """
    quantization = ""
    has_four_bits = any(stored_format(scheme.format).bits == 4 for scheme in model.quantization)
    if row.dtype in FP4 and not has_four_bits:
        quantization = FP4[row.dtype]
    elif row.dtype.startswith("fp8") and not model.quantization:
        is_qwen = row.framework == "trtllm" and _model_key(row).startswith("qwen3")
        has_blocks = row.op == "e2e_moe" or row.dtype == "fp8_block" or is_qwen
        quantization = "fp8_block128" if has_blocks else "fp8"
    return Precision(quantization=quantization, kv_cache_dtype=_cache_dtype(row))


def _cache_dtype(row: MeasuredRow) -> str:
    """Return the cache's dtype. The queues of InferenceX's Llama-70B with vLLM on H100 show that
    its cache had 16 bits."""
    name = _model_key(row)
    if row.client == INFERENCEX:
        is_on_h100 = row.framework == "vllm" and "h100" in row.gpu.lower()
        if is_on_h100 and name.startswith("llama3170b"):
            return "auto"
        is_deepseek = row.framework == "trtllm" and name.startswith("deepseek")
        if not row.cache and (name.startswith("qwen35") or is_deepseek):
            return "fp8"
    return "fp8" if row.cache.startswith("fp8") else "auto"


def _model_key(row: MeasuredRow) -> str:
    return key(row.model.rsplit("/", 1)[-1])


def ranks_of(row: MeasuredRow) -> Parallelism:
    """Return the parallelism of a measured server: tensor-parallel and expert-parallel sizes.

    If the row states no expert-parallel size, it is 1.

    Args:
        row: Row of a benchmark of a server.
    """
    tp, *ep = map(int, row.shape[3:])
    return Parallelism(tp=tp, ep=max([1, *ep]))


# batch_wait_timeout_iters 20 of 70B at 1k/1k
WAITING_SCHEDULE = Scheduling(whole_prompts=True, reserve=1.0, wait_passes=20, wait_share=0.9)
# Maximum tokens of a pass in InferenceX's scripts (benchmarks/single_node/*_h200*.sh), by engine
# and by the beginning of the model's name.
PASS_TOKENS = {
    ("sglang", "deepseek"): 32768,
    ("sglang", "qwen35"): 16384,
    ("trtllm", "gptoss"): 20000,
    ("trtllm", ""): 16384,
}


class PublishedRun(NamedTuple):
    """The load and the server settings of a published benchmark, for a simulation of it.

    Attributes:
        input_len: Nominal tokens of a prompt, as published.
        output_len: Nominal tokens of an answer, as published.
        clients: Number of clients, each with one request at a time.
        max_tokens: Maximum new tokens of one forward pass.
        max_num_seqs: Maximum number of sequences that run at the same time.
        scheduling: How the engine fills its passes with prompts and decodes.
        rounds: Number of requests that each client sends, one after the other.
        min_share: Minimum length as a share of the nominal length. Lengths are drawn uniformly
            between minimum and nominal length; 1 means that all lengths are nominal.
        prefix_hit_rate: Share of each prompt, from 0 to 1, that a prefix cache contains.
    """

    input_len: int
    output_len: int
    clients: int
    max_tokens: int
    max_num_seqs: int
    scheduling: Scheduling
    rounds: int = 10
    min_share: float = 0.8
    prefix_hit_rate: float = 0.0

    @property
    def max_len(self) -> int:
        """Return an upper bound of a request's tokens, for which the simulation sizes its tables.

        It is the nominal prompt plus the nominal answer, plus one.
        """
        return self.input_len + self.output_len + 1


def published_run(row: MeasuredRow, engine: EngineOverheads | None) -> PublishedRun:
    """Return the load and the settings of a measured server, to simulate the measurement.

    Args:
        row: Row of a benchmark of a server. Its benchmark and engine select the settings that the
            benchmark's scripts used.
        engine: Overheads of the engine, which give its scheduling; None for an unknown engine,
            which counts as vLLM.
    """
    isl, osl, clients = map(int, row.shape[:3])
    name = _model_key(row)
    is_small_llama = name.startswith("llama318b")
    changes: dict[str, Any] = {}
    if row.client == INFERENCEX:
        budgets = (
            tokens
            for (stack, begins), tokens in PASS_TOKENS.items()
            if stack == row.framework and name.startswith(begins)
        )
        changes["max_tokens"] = next(budgets, 8192)
        if row.version.startswith("0.11.2"):
            # runs labelled with 512 clients have the throughput of 64
            changes["max_num_seqs"] = min(clients, 64)
        if name.startswith("glm5"):
            changes["rounds"] = 5
        is_dense_trtllm = row.framework == "trtllm" and row.op == "e2e_dense"
        if is_dense_trtllm and isl == osl == 1024 and row.shape[3] < 8:
            changes["scheduling"] = WAITING_SCHEDULE
    elif row.framework == "vllm":
        changes = {"rounds": 5, "max_tokens": isl + 1500 + clients}
    elif row.framework == "trtllm":
        # one request of each wave waits for a whole answer
        waiting = is_small_llama and clients > 1
        changes = {
            "min_share": 1.0,
            "max_tokens": isl + 1500 + clients,
            "max_num_seqs": clients - waiting,
        }
    elif not is_small_llama:  # otherwise its requests do not stay in waves
        changes["min_share"] = 1.0
    if row.prefix_cached:
        changes["prefix_hit_rate"] = 1.0
    run = PublishedRun(isl, osl, clients, 8192, clients, scheduling_of(engine))
    run = run._replace(**changes)
    return run._replace(max_tokens=max(run.max_tokens, clients))


MIN_RUNS = 8  # minimum number of measured servers for an error figure
# share of the memory, from the scripts of the runs
MEMORY_OPTIONS = FitOptions(
    engine="none", max_num_seqs=256, max_num_batched_tokens=8192, gpu_memory_utilization=0.9
)
# minimum sizes of the tables
MIN_MAX_LEN, MIN_MAX_TOKENS, MIN_MAX_NUM_SEQS = 9300, 16384, 128


def served_times(
    rows: Sequence[MeasuredRow], gpu: Gpu, calibration: Calibration
) -> list[ServedTimes]:
    """Return simulated mean times and tokens/s of measured servers, in the order of `rows`.

    They are compared with the measured times, to validate the simulation. All values of a server
    are NaN if no preset matches its model or the model cannot be timed.

    Args:
        rows: Rows of benchmarks of servers, with models, lengths and clients.
        gpu: The GPU of the rows.
        calibration: Time models of kernels and engine overheads, with which forward passes are
            timed.
    """
    times = [ServedTimes()] * len(rows)
    engine = calibration.engine or find_engine_overheads(calibration.stack)
    servers: dict[Any, dict[int, PublishedRun]] = {}  # runs that one server can simulate
    for index, row in enumerate(rows):
        versioned = engine.for_version(row.version) if engine else None
        formats = row.model, row.dtype, row.op, row.shape[3:], row.cache
        key = *formats, row.client, row.framework, versioned
        servers.setdefault(key, {})[index] = published_run(row, versioned)
    for (*_, versioned), runs in servers.items():
        row = rows[min(runs)]
        model = served_model(row.model)
        if model is None:
            continue
        sizes = (
            max(MIN_MAX_LEN, *(run.max_len for run in runs.values())),
            max(MIN_MAX_TOKENS, *(run.max_tokens for run in runs.values())),
            max(MIN_MAX_NUM_SEQS, *(run.max_num_seqs for run in runs.values())),
        )
        timed = replace(calibration, engine=versioned)
        try:
            deployment = TimedDeployment(
                model, gpu, precision_of(row, model), ranks_of(row), calibration=timed
            )
            steps = InterpolatedStepTimer(deployment, *sizes)
        except UserError:
            continue
        capacity = None
        with suppress(UserError):  # weights that leave no memory: its size does not count
            capacity = memory(deployment, MEMORY_OPTIONS)
        for index, run in runs.items():
            clients = Clients(run.clients).with_path_of(versioned)
            times[index] = _simulate(steps, capacity, run, clients)
    return times


def _simulate(
    steps: InterpolatedStepTimer, capacity: Fit | None, run: PublishedRun, clients: Clients
) -> ServedTimes:
    """Return TPOT, TTFT and tokens/s of one simulated run."""
    count = run.rounds * run.clients
    rng = np.random.default_rng(0)
    inputs, outputs = (
        rng.integers(max(1, int(n * run.min_share)), n, size=count, endpoint=True)
        for n in (run.input_len, run.output_len)
    )
    max_len = run.max_len
    if capacity:
        pool = make_pool(capacity, "paged", max_len, max_len)
    else:
        tokens = np.arange(max_len + 1, dtype=np.int64)
        pool = Pool(1 << 60, tokens, tokens, max_len)
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
) -> dict[Any, ErrorStatistics]:
    """Return the errors of simulated TPOT, TTFT and tokens/s against measured servers.

    TTFT is the mean time to the first token, TPOT the mean time per output token. The keys `dense`
    and `mixture` have the errors of TPOT, for dense models and for mixtures of experts. The keys
    with the suffixes `_ttft` and `_throughput` have those of TTFT and tokens/s. Runs that hit a
    prefix cache or contain measurement artefacts are left out. An error from fewer than 8 runs is
    left out too.

    Args:
        calibration: Time models of kernels and engine overheads, with which forward passes are
            timed.
        gpu: The GPU of the rows.
        rows: Measured rows; only rows of servers are used.
    """
    validated = {}
    for op, kind in (("e2e_dense", "dense"), ("e2e_moe", "mixture")):
        runs = [row for row in rows if row.op == op and not row.is_excluded]
        predicted = np.reshape(served_times(runs, gpu, calibration), (-1, 3))
        measured = np.reshape([run.served for run in runs], (-1, 3))
        known = (predicted > 0) & (measured > 0)
        for column, suffix in enumerate(("", "_ttft", "_throughput")):
            is_known = known[:, column]
            count = int(is_known.sum())
            if count >= MIN_RUNS:
                median, p90 = median_and_p90(
                    predicted[is_known, column], measured[is_known, column]
                )
                validated[kind + suffix] = ErrorStatistics(
                    rows=count, median_abs_error=median, p90_abs_error=p90
                )
    return validated
