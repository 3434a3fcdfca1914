"""Clients of a server: closed loops by hand, prefix caches by hand, the highest rate that meets goals, and interruptions."""

import json
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from conftest import Run
from servers import HandClock, HandTimer, asked, byte_pool, serve

from kvcalc import UserError, load_gpu, load_model
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.batching import Limits, ServerSetup
from kvcalc.serving.requests import Requests, clients_of, sample_workload
from kvcalc.serving.server import Server, SimulationResult, Sweep, summary
from kvcalc.serving.simulation import simulate
from kvcalc.timing.calibration import find_engine_overheads
from kvcalc.timing.deployment import TimedDeployment

LLAMA = TimedDeployment(load_model("llama-3.1-8b"), load_gpu("h100")).with_calibration("vllm")


def test_inferencex_asks_ten_rounds_of_lengths_from_four_fifths() -> None:
    load = Workload(client="inferencex", max_concurrency=8, input_len="1000", output_len="100")
    found = sample_workload(load)
    assert len(found) == 80
    assert found.arrival_s.max() == 0
    assert (found.input_len.min() >= 800, found.input_len.max() <= 1000) == (True, True)
    assert found.input_len.mean() == pytest.approx(900, rel=0.03)
    assert clients_of(load, find_engine_overheads("vllm")) == (8, 0.0, 0.025, 4e-6)
    given = sample_workload(Workload(client="aiperf", max_concurrency=8, input_len="1000", output_len="100"))
    assert (len(given), set(given.input_len.tolist()), set(given.output_len.tolist())) == (80, {1000}, {100})
    assert clients_of(Workload(max_concurrency=8), find_engine_overheads("vllm")) == (8, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"client": "curl"}, "unknown client"),
        ({"client": "closed"}, "needs max-concurrency"),
        ({"client": "open", "max_concurrency": 3}, "no max-concurrency"),
        ({"client": "aiperf", "max_concurrency": 3, "rate": 2.0}, "sends its own"),
        ({"think_time": 1.0}, "closed loop"),
        ({"prefix_hit_rate": 1.5}, "from 0 to 1"),
    ],
)
def test_loads_that_make_no_sense(fields: dict[str, object], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Workload(**fields)  # type: ignore[arg-type]


def test_the_command_line(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --input-len 300 --output-len 30"
    (record,) = kvcalc(f"{line} --client inferencex --max-concurrency 4 --format json").records
    assert (record["client"], record["requests"]) == ("inferencex", 40)
    assert record["front_end_s"] == pytest.approx(0.025 + 4e-6 * 270, rel=0.02)
    assert 0 < record["tpot_p90_error"] < record["ttft_p90_error"]
    (thinking,) = kvcalc(f"{line} --max-concurrency 4 --think-time 500ms --num-prompts 40 --format json").records
    assert (thinking["client"], thinking["think_time_s"]) == ("closed", 0.5)
    (hit,) = kvcalc(f"{line} --rate 1 --num-prompts 20 --prefix-hit-rate 0.5 --format json").records
    assert hit["prefix_hit_share"] == pytest.approx(144 / 300)
    (found,) = kvcalc(f"{line} --find-rate --slo-tpot 12ms --num-prompts 60 --format json").records
    assert found["found_rate"] == found["rate"] > 1


def test_a_prefix_cache_raises_the_capacity(kvcalc: Run) -> None:
    """800 of each 1000 tokens need no work, so a rate between the two capacities is sustained."""
    line = "serve llama-3.1-8b --num-prompts 20 --input-len 1000 --output-len 2 --format json"
    plain, cached = (kvcalc(f"{line} {more}").records[0]["capacity_requests_per_s"] for more in ("", "--prefix-hit-rate 0.8"))
    assert 3 < cached / plain < 5
    (found,) = kvcalc(f"{line.replace('20', '2000', 1)} --prefix-hit-rate 0.8 --rate {0.6 * cached}").records
    assert found["diverges"] is False


def test_an_interruption_within_a_run_keeps_the_requests_that_are_done(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request arrives per second and takes one second. After 100 requests Ctrl-C comes, and the figures are
    of 100 requests in 100 s."""

    def told(count: int) -> None:
        raise KeyboardInterrupt

    def interrupt(advance: int) -> None:
        raise KeyboardInterrupt

    load, steps = asked(*((float(i), 5, 1) for i in range(1000))), HandTimer(HandClock(1.0))
    run = simulate(load, ServerSetup(byte_pool(), steps, Limits()), progress=told)
    record = summary(run, 10**9)
    assert not run.is_complete
    assert (record["requests"], record["completed"], record["rejected"], record["duration_s"]) == (1000, 100, 0, 100)
    assert record["throughput_tokens_per_s"] == 1
    monkeypatch.setattr("kvcalc.report.text.measure_text.progress_bar", lambda unit, total: nullcontext(interrupt))
    line = "serve llama-3.1-8b --input-len 100 --output-len 5 --num-prompts 1000 --format json"
    found = kvcalc(f"{line} --rate 9,8")
    assert (found.code, [r["completed"] >= 100 for r in json.loads(found.out)]) == (130, [True])
    assert "stopped after 0 of 2 runs; the last record is of the requests that were done" in found.err
    assert kvcalc(f"{line} --find-rate --slo-tpot 10s").code == 130


def test_think_time_keeps_littles_law() -> None:
    """C clients alternate between thinking and waiting: C = rate · (think time + time in the system), except at start and end."""
    load = Workload(max_concurrency=6, think_time=2.0, num_prompts=600, input_len="100", output_len="20")
    record = serve(LLAMA, load, ServerSettings(max_num_seqs=8)).record
    assert record["requests_per_s"] * (2.0 + record["e2e_mean_s"]) == pytest.approx(6, rel=0.02)
    assert record["mean_in_system"] == pytest.approx(record["requests_per_s"] * record["e2e_mean_s"], rel=1e-9)
    assert np.isfinite(record["ttft_mean_s"])


def test_an_interrupted_search_keeps_the_highest_rate_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes in the run after the first five, before any of its requests is done."""
    run, rates = Server.run, list[float]()

    def stopped(server: Server, requests: Requests, load: Workload, *more: Any) -> SimulationResult:
        if len(rates) == 5:
            raise KeyboardInterrupt
        rates.append(load.rate)
        return run(server, requests, load, *more)

    monkeypatch.setattr(Server, "run", stopped)
    load, settings = Workload(num_prompts=20, input_len="100", output_len="5"), ServerSettings(slo_ttft=10.0)
    sweep = Sweep(LLAMA, load, settings)
    assert (sweep.sustained.record["found_rate"], sweep.is_complete, len(sweep.tried)) == (rates[4], False, 5)
    shares = [rate / sweep.server.saturation_rate for rate in rates]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.95], rel=0.005)
    monkeypatch.setattr(Server, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Sweep(LLAMA, load, settings)
