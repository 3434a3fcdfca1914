"""A simulated server compared with theory: queues, Little's law, an empty, a full and an overloaded server."""

import math

import numpy as np
import pytest
from servers import HandClock, serve, served

from kvcalc import Batch, load_gpu, load_model
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.request_latency import request
from kvcalc.serving.requests import sample_workload
from kvcalc.serving.server import SimulationResult, summary
from kvcalc.serving.step_timers import StepTimer
from kvcalc.timing.deployment import TimedDeployment


def deployment(name: str = "llama-3.1-8b", gpu: str = "h100") -> TimedDeployment:
    return TimedDeployment(load_model(name), load_gpu(gpu))


def run(
    load: Workload, policy: str = "continuous", cache: str = "paged", timed: TimedDeployment | None = None, **settings: object
) -> SimulationResult:
    return serve(timed or deployment(), load, ServerSettings(**settings), policy, cache)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "continuous"])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_is_an_m_d_1_queue(policy: str, load: float) -> None:
    """The mean wait is ρ·D/(2(1 − ρ)) (Pollaczek and Khinchine). The error of a run follows from the means of 20 parts of it."""
    requests = sample_workload(Workload(num_prompts=10_000, input_len="1", output_len="1", rate=load, seed=11))
    found = served(requests, policy, deployment=HandClock(1.0), max_num_seqs=1)
    waits = found.times.scheduled - found.times.arrived
    error = waits.reshape(20, -1).mean(axis=1).std(ddof=1) / math.sqrt(20)
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)), abs=3.5 * error)
    assert error < 0.2 * waits.mean()
    record = summary(found, 10**9)
    assert record["utilization"] == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite"])
@pytest.mark.parametrize("policy", ["static", "continuous"])
def test_at_very_low_load_a_request_has_the_latency_of_one(name: str, policy: str) -> None:
    load = Workload(rate=0.001, num_prompts=5, input_len="700", output_len="150")
    record = run(load, policy, timed=deployment(name)).record
    alone = request(deployment(name), 700, 150)
    for p in (50, 99):
        assert record[f"ttft_p{p}_s"] == pytest.approx(alone.ttft_s, rel=1e-12)
        assert record[f"tpot_p{p}_s"] == pytest.approx(alone.tpot_s, rel=1e-9)
    assert record["e2e_mean_s"] == pytest.approx(alone.e2e_s, rel=1e-9)
    assert record["queueing_mean_s"] == 0


def test_chunks_of_a_long_prompt_have_their_latency_too() -> None:
    load = Workload(rate=0.001, num_prompts=2, input_len="5000", output_len="2")
    record = run(load, max_num_batched_tokens=2048).record
    assert record["ttft_mean_s"] == pytest.approx(request(deployment(), 5000, 2, chunk=2048).ttft_s, rel=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("full_backlog")
@pytest.mark.parametrize(
    ("name", "gpu", "prompt", "answer", "seats"),
    [("llama-3.1-8b", "h100", 1000, 200, 256), ("llama-3.1-8b", "h100", 200, 400, 64), ("gpt-oss-20b", "h200", 500, 100, 128)],
)
def test_at_saturation_throughput_is_what_prefill_and_decode_allow(
    name: str, gpu: str, prompt: int, answer: int, seats: int
) -> None:
    """A request needs its share of a pass full of prompts, and 1/n of each of out − 1 decode passes, if all n sequences run."""
    timed = deployment(name, gpu)
    load = Workload(max_concurrency=2 * seats, num_prompts=12 * seats, input_len=str(prompt), output_len=str(answer))
    record = run(load, timed=timed, max_num_seqs=seats).record
    decode = timed.seconds(Batch.decode(prompt + answer // 2, seats))
    together = min(seats, int(record["max_num_batched_tokens"] // prompt))
    each = timed.seconds(Batch.prefill(prompt, together)) / together + (answer - 1) * decode / seats
    assert record["throughput_tokens_per_s"] == pytest.approx(answer / each, rel=0.05)
    assert 0.97 / each < record["capacity_requests_per_s"] < 1.3 / each  # prompts and decodes that share passes save weights


@pytest.mark.slow
@pytest.mark.usefixtures("full_backlog")
def test_a_real_model_overrun() -> None:
    record = run(Workload(rate=200.0, num_prompts=2000), max_num_seqs=64).record
    assert record["diverges"]
    assert record["requests_per_s"] < 1.05 * record["capacity_requests_per_s"] < 200
    assert run(Workload(num_prompts=100)).record["diverges"] is None
    for policy in ("continuous", "static"):  # 100 requests find a seat each, at a rate that cannot go on
        assert run(Workload(rate=200.0, num_prompts=100), policy).record["diverges"]


def test_memory_that_is_short_preempts_and_still_answers_everyone() -> None:
    """The memory has 40 requests of 1200 tokens, and prompts have 200. Many requests are admitted and preempted as they grow."""
    budget = 40 * 1200 * 131_072
    load = Workload(num_prompts=150, input_len="200", output_len="1000")
    record = run(load, kv_cache_memory_bytes=budget).record
    assert record["completed"] == 150
    assert record["preemptions"] > 0
    assert record["kv_peak_bytes"] <= budget


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3.2", "qwen3-next-80b-a3b"])
def test_remembered_steps_are_the_clocks(name: str) -> None:
    """Interpolated times are exact for one sequence and at multiples of the spacing, and within 0.1 % between them."""
    timed = TimedDeployment(load_model(name), load_gpu("b200"))
    steps = StepTimer(timed)
    for context in (1, 1023, 1024, 5000):
        assert steps.line(1, context).first == pytest.approx(timed.seconds(Batch.decode(context)), rel=1e-12)
    for count, context in ((7, 1603), (100, 1024), (256, 9000)):
        exact = timed.seconds(Batch.decode(context, count))
        assert steps.line(count, context).first == pytest.approx(exact, rel=1e-3)
    assert steps.prefill(((500, 0),)) == timed.seconds(Batch.prefill(500))
    run_of = steps.line(3, 100).exact_seconds[:50]
    assert run_of == pytest.approx(timed.seconds(Batch.decode(np.arange(100.0, 150.0), 3)), rel=1e-3)
