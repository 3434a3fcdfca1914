"""Who asks a server and how: clients by hand, prefix caches by hand, the highest rate that keeps a promise, an interruption."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from servers import HandClock, asked, byte_pool

from kvcalc import UserError, load_gpu, load_model
from kvcalc.serving.finding import sweep_rates
from kvcalc.serving.load import Load
from kvcalc.serving.metrics import Goals, summary
from kvcalc.serving.prefixes import Kept, Shared
from kvcalc.serving.requests import Prefixed, read_requests
from kvcalc.serving.run import ServerSettings
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.simulation import simulate
from kvcalc.serving.steps import Steps
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.engine import engine_of

LLAMA = Deployment(load_model("llama-3.1-8b"), load_gpu("h100")).under("vllm")


def test_inferencex_asks_ten_rounds_of_lengths_from_four_fifths() -> None:
    load = Load(client="inferencex", max_concurrency=8, input_len="1000", output_len="100")
    found = load.drawn()
    assert len(found) == 80
    assert found.arrival_s.max() == 0
    assert (found.input_len.min() >= 800, found.input_len.max() <= 1000) == (True, True)
    assert found.input_len.mean() == pytest.approx(900, rel=0.03)
    assert load.clients(engine_of("vllm")) == (8, 0.0, 0.025, 4e-6)
    given = Load(client="aiperf", max_concurrency=8, input_len="1000", output_len="100").drawn()
    assert (len(given), set(given.input_len.tolist()), set(given.output_len.tolist())) == (80, {1000}, {100})
    assert Load(max_concurrency=8).clients(engine_of("vllm")) == (8, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"client": "curl"}, "unknown client"),
        ({"client": "closed"}, "needs max-concurrency"),
        ({"client": "open", "max_concurrency": 3}, "no max-concurrency"),
        ({"client": "aiperf", "max_concurrency": 3, "rate": 2.0}, "sends its own"),
        ({"think_time": 1.0}, "closed loop"),
        ({"prefix_hit_rate": 1.5}, "between 0 and 1"),
    ],
)
def test_loads_that_make_no_sense(fields: dict[str, object], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Load(**fields)  # type: ignore[arg-type]


def test_a_share_of_each_prompt_is_found_in_whole_blocks() -> None:
    """0.6 of 100 tokens are 60: 48 in blocks of 16. Of 5 tokens none; of all but the last token at the most."""
    shared = Shared(0.6, byte_pool(), 16)
    assert [shared.found(0, n, 0) for n in (100, 5, 32)] == [48, 0, 16]
    assert Shared(1.0, byte_pool(), 16).found(0, 32, 0) == 31
    run = simulate(
        asked((0.0, 100, 1), (0.0, 100, 1)), byte_pool(), Steps(HandClock(0, 1)), Limits(),  # type: ignore[arg-type]
        make_prefixes=lambda: Shared(0.6, byte_pool(), 10),
    )  # fmt: skip
    assert run.logs[0].finished.tolist() == [80, 80]  # 40 tokens of each are computed
    assert run.logs[0].found_tokens == 120


def test_a_trace_names_its_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_len,output_len,prefix_id,prefix_len\n0,64,2,a,32\n5,64,2,a,32\n9,64,2,,\n")
    found = read_requests(path)
    assert isinstance(found, Prefixed)
    assert (found.prefix_id.tolist(), found.prefix_len.tolist()) == ([0, 0, -1], [32, 32, 0])
    kept = Kept(found.prefix_id.tolist(), found.prefix_len.tolist(), byte_pool(block=16), 16)
    log = simulate(found, byte_pool(), Steps(HandClock(0, 0.01)), Limits(), make_prefixes=lambda: kept).logs[0]  # type: ignore[arg-type]
    assert (log.first - log.arrived).tolist() == pytest.approx([0.64, 0.32, 0.64])


def test_the_highest_rate_keeps_its_promise_and_a_higher_one_does_not() -> None:
    load = Load(num_prompts=150, input_len="500", output_len="50")
    settings = ServerSettings(slo_ttft=0.2, slo_tpot=0.015, max_num_seqs=64)
    record = sweep_rates(LLAMA, load, settings).sustained.record
    assert record["slo_attainment"] >= 0.99
    assert record["found_rate"] > 2
    strict = sweep_rates(LLAMA, load, ServerSettings(slo_ttft=0.2, slo_tpot=0.008, max_num_seqs=64))
    assert 0 < strict.sustained.record["found_rate"] < record["found_rate"]
    never = sweep_rates(LLAMA, load, ServerSettings(slo_ttft=1e-4, max_num_seqs=64))
    assert never.sustained.record["found_rate"] == 0


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
    text = kvcalc(f"{line} --client aiperf --max-concurrency 4 --stack vllm,sglang").joined
    for word in ("nine of ten measured servers", "(TPOT)", "(mean TTFT)", "add 26.2 ms to a first token", "sglang 0.5.14"):
        assert word in text
    (found,) = kvcalc(f"{line} --find-rate --slo-tpot 12ms --num-prompts 60 --format json").records
    assert found["found_rate"] == found["rate"] > 1
    assert (
        "requests/s with each further one within 12 ms" in kvcalc(f"{line} --find-rate --slo-tpot 12ms --num-prompts 60").joined
    )


def test_no_rate_beyond_the_capacity_is_found_however_short_the_run(kvcalc: Run) -> None:
    """50 requests never fill the queue; what the server cannot carry for long is not promised all the same."""
    line = "serve llama-3.1-8b --num-prompts 50 --find-rate --slo-ttft 10s --format json"
    for more in ("", "--disaggregate", "--prefix-hit-rate 0.5"):
        (found,) = kvcalc(f"{line} {more}").records
        assert found["found_rate"] == pytest.approx(0.95 * found["capacity_requests_per_s"], rel=0.005)
    result = kvcalc(f"{line} --rate 3")
    assert (result.code, "the highest one is to be found" in result.err) == (2, True)


def test_a_prefix_cache_raises_the_capacity(kvcalc: Run) -> None:
    """800 of each 1000 tokens need no work: a rate between the capacities with and without them is carried on."""
    line = "serve llama-3.1-8b --num-prompts 20 --input-len 1000 --output-len 2 --format json"
    plain, cached = (kvcalc(f"{line} {more}").records[0]["capacity_requests_per_s"] for more in ("", "--prefix-hit-rate 0.8"))
    assert 3 < cached / plain < 5
    (found,) = kvcalc(f"{line.replace('20', '2000', 1)} --prefix-hit-rate 0.8 --rate {0.6 * cached}").records
    assert found["diverges"] is False


def test_lists_of_clients_make_rows(kvcalc: Run) -> None:
    found = kvcalc("serve llama-3.1-8b --max-concurrency 2,8 --num-prompts 20 --output-len 20 --format json").records
    assert [r["max_concurrency"] for r in found] == [2, 8]
    assert found[0]["throughput_tokens_per_s"] < found[1]["throughput_tokens_per_s"]
    assert "max-concurrency 'x' is not a whole number" in kvcalc("serve llama-3.1-8b --max-concurrency 2,x").err


def test_a_sweep_says_where_the_server_saturates(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --num-prompts 50 --request-rate 5,40"
    found = kvcalc(f"{line} --format json").records
    assert all(r[f"{name}_p{p}_s"] > 0 for r in found for name in ("ttft", "tpot") for p in (50, 90, 99))
    assert f"saturated at about {found[0]['capacity_requests_per_s']:.3g} requests a second" in kvcalc(line).joined


def test_an_interruption_keeps_what_is_done(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.serving import run as module

    whole, calls = module.serve, []

    def stopped(*args: object, **more: object) -> object:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return whole(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "serve", stopped)
    found = kvcalc("serve llama-3.1-8b --input-len 100 --output-len 5 --num-prompts 10 --rate 1,2,3 --format json")
    assert (found.code, len(json.loads(found.out))) == (130, 1)
    assert "stopped after 1 of 3 runs" in found.err


def test_an_interruption_within_a_run_keeps_the_requests_that_are_done(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request a second, served in one: when 100 are done Ctrl-C comes, and the figures are of 100 requests in 100 s."""

    def told(count: int) -> None:
        raise KeyboardInterrupt

    load, steps = asked(*((float(i), 5, 1) for i in range(1000))), Steps(HandClock(1.0))  # type: ignore[arg-type]
    run = simulate(load, byte_pool(), steps, Limits(), progress=told)
    record = summary(run, 10**9, Goals())
    assert not run.whole
    assert (record["requests"], record["completed"], record["rejected"], record["duration_s"]) == (1000, 100, 0, 100)
    assert record["throughput_tokens_per_s"] == 1
    monkeypatch.setattr("kvcalc.cli.serve._progress", lambda total: nullcontext(told))
    line = "serve llama-3.1-8b --input-len 100 --output-len 5 --num-prompts 1000 --format json"
    found = kvcalc(f"{line} --rate 9,8")
    assert (found.code, [r["completed"] >= 100 for r in json.loads(found.out)]) == (130, [True])
    assert "of 1,000 requests, whose figures these are; run 1 of 2" in found.err
    assert kvcalc(f"{line} --find-rate --slo-tpot 10s").code == 130


def test_think_time_keeps_littles_law() -> None:
    """C clients cycle through thinking and being served: C = rate · (think + in the system), but for the start and the end."""
    load = Load(max_concurrency=6, think_time=2.0, num_prompts=600, input_len="100", output_len="20")
    from kvcalc.serving.run import serve

    record = serve(LLAMA, load.drawn(), load, ServerSettings(max_num_seqs=8)).record
    assert record["requests_per_s"] * (2.0 + record["e2e_mean_s"]) == pytest.approx(6, rel=0.02)
    assert record["mean_in_system"] == pytest.approx(record["requests_per_s"] * record["e2e_mean_s"], rel=1e-9)
    assert np.isfinite(record["ttft_mean_s"])


def test_the_first_sentence_of_a_sweep_names_the_ends_of_it(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --input-len 300 --output-len 30 --num-prompts 8"
    one, two = kvcalc(f"{line} --max-concurrency 1,2 --format json").records
    said = " ".join(kvcalc(f"{line} --max-concurrency 1,2").out.split())
    tokens = [f"{r['throughput_tokens_per_s']:,.0f} tokens" for r in (one, two)]
    assert f"{tokens[0]} a second with 1 client, {tokens[1]} with 2 clients; half of" in said
    assert f", with 2 clients within {1e3 * two['ttft_p50_s']:.3g} ms" in said
    assert "with 1 client" not in kvcalc(f"{line} --max-concurrency 1").out
    said = " ".join(kvcalc(f"{line} --rate 2,40").out.split())
    assert "tokens a second at a rate of 2, " in said


def test_an_interrupted_search_keeps_the_highest_rate_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the run after the first two that keep their goals, before any request of it is done."""
    from kvcalc.serving import finding

    whole, rates = finding.serve, list[float]()

    def stopped(deployment: Deployment, requests: object, load: Load, *more: object, **others: object) -> object:
        if len(rates) == 2:
            raise KeyboardInterrupt
        rates.append(load.rate)
        return whole(deployment, requests, load, *more, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(finding, "serve", stopped)
    load, settings = Load(num_prompts=20, input_len="100", output_len="5"), ServerSettings(slo_ttft=10.0)
    sweep = sweep_rates(LLAMA, load, settings)
    assert (sweep.sustained.record["found_rate"], sweep.whole, len(sweep.tried)) == (rates[1], False, 2)
    monkeypatch.setattr(finding, "serve", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sweep_rates(LLAMA, load, settings)
