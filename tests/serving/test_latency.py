"""One request: its sums equal a loop over all passes."""

import pytest
from conftest import Run

from kvcalc import Batch, Parallelism, UserError, load_gpu, load_model
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.serving import request_latency
from kvcalc.serving.request_latency import cost_per_million, latency_records, prefill_passes, request, token_projections
from kvcalc.timing.deployment import TimedDeployment

NAMES = ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "gemma-3-27b")


def deployment(name: str = "llama-3.1-8b", gpu: str = "h200", **ranks: int) -> TimedDeployment:
    return TimedDeployment(load_model(name), load_gpu(gpu), parallelism=Parallelism(**ranks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_generation_is_its_passes(name: str, batch: int) -> None:
    """The first token comes from the prefill of 300, the j-th from context 300 + j − 1. FLOPs and bytes are of all passes."""
    timed = deployment(name)
    passes = [Batch.prefill(300, batch), *(Batch.decode(300 + j - 1, batch) for j in range(2, 21))]
    seconds = [timed.seconds(p) for p in passes]
    found = request(timed, 300, 20, batch)
    assert found.ttft_s == seconds[0]
    assert found.tpot_s == pytest.approx(sum(seconds[1:]) / 19, rel=1e-12)
    assert (found.tpot_first_s, found.tpot_last_s) == (pytest.approx(seconds[1]), pytest.approx(seconds[-1]))
    assert found.e2e_s == pytest.approx(sum(seconds), rel=1e-12)
    assert found.flops == sum(timed.cost(p).flops for p in passes)
    assert found.bytes == sum(timed.cost(p).bytes for p in passes)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_cache_every_step_is_a_prefill(name: str) -> None:
    timed = deployment(name)
    passes = [Batch.prefill(length) for length in range(50, 60)]
    found = request(timed, 50, 10, no_cache=True)
    assert found.e2e_s == pytest.approx(sum(timed.seconds(p) for p in passes), rel=1e-12)
    assert found.flops == sum(timed.cost(p).flops for p in passes)
    assert found.ttft_s == request(timed, 50, 10).ttft_s


@pytest.mark.parametrize("no_cache", [False, True])
def test_one_token_has_no_decode(no_cache: bool) -> None:
    found = request(deployment(), 100, 1, no_cache=no_cache)
    assert (found.tpot_s, found.tpot_first_s, found.tpot_last_s) == (None, None, None)
    assert found.e2e_s == found.ttft_s == deployment().seconds(Batch.prefill(100))


def test_chunks_cover_the_prompt() -> None:
    chunks, rest = (p.groups[0] for p in prefill_passes(1000, 3, cached=100, chunk=400))
    assert (chunks.count, chunks.new, list(chunks.past)) == (3, 400, [100, 500])  # type: ignore[arg-type]
    assert (rest.count, rest.new, rest.past) == (3, 100, 900)
    chunked, whole = request(deployment(), 1000, 2, chunk=256), request(deployment(), 1000, 2)
    expected = sum(deployment().seconds(Batch.prefill(n, 1, at)) for n, at in ((256, 0), (256, 256), (256, 512), (232, 768)))
    assert chunked.ttft_s == pytest.approx(expected)
    assert chunked.ttft_s > whole.ttft_s  # the weights are read four times
    assert request(deployment(), 1000, 2, chunk=1000) == whole
    head = deployment().model.vocab_size * deployment().model.hidden_size * 2
    assert chunked.flops - whole.flops == 3 * head  # the head runs once a chunk


@pytest.mark.slow
def test_many_passes_are_summed_exactly_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has about 10^13 FLOPs, all passes together more than 2^53. The attention of the j-th is linear in its context."""
    timed = deployment("deepseek-v3")
    whole = request(timed, 100, 5000, 300)
    first, second = (timed.cost(Batch.decode(100 + j, 300)).flops for j in (1, 2))
    assert whole.flops - timed.cost(Batch.prefill(100, 300)).flops == sum(first + j * (second - first) for j in range(4999))
    assert whole.flops > 2**53
    monkeypatch.setattr(request_latency, "BLOCK", 7)
    pieces = request(timed, 100, 5000, 300)
    assert (pieces.flops, pieces.bytes) == (whole.flops, whole.bytes)
    assert (pieces.tpot_first_s, pieces.tpot_last_s) == (whole.tpot_first_s, whole.tpot_last_s)
    assert pieces.e2e_s == pytest.approx(whole.e2e_s, rel=1e-12)


def test_a_cached_prefix_is_not_processed_again() -> None:
    hit = request(deployment(), 1000, 5, cached=900)
    assert hit.ttft_s == deployment().seconds(Batch.prefill(100, 1, 900))
    assert hit.tpot_s == request(deployment(), 1000, 5).tpot_s
    for cached in (1000, 1001, -1):
        with pytest.raises(UserError, match="leaves no token of a prompt of 1,000"):
            request(deployment(), 1000, 5, cached=cached)


def test_cost_by_hand(kvcalc: Run) -> None:
    """Two GPUs at 3 an hour make 1000 tokens in 6 s: 6 · 6/3600 = 0.01 for 1000, 10 for a million."""
    assert cost_per_million(3.0, 2, 1000 / 6) == pytest.approx(10.0)
    line = "latency gpt2 --input-len 600 --output-len 100 --batch-size 4 --gpu h100,h200 --price-per-hour h100=2,h200=5 --tp 2"
    text, records = kvcalc(line).joined, kvcalc(f"{line} --format json").records
    costs = [price * 2 * record["e2e_s"] / 3600 / 400 * 1e6 for price, record in zip((2, 5), records, strict=True)]
    assert [record["cost_per_million_tokens"] for record in records] == pytest.approx(costs)
    assert f" costs {costs[0]:.2f} per million output tokens for 4 requests and {costs[1]:.2f} with h200" in text
    assert kvcalc("latency gpt2 --gpu h100,h200 --price-per-hour h100=2").code == 0  # no price of the other
    assert "cost 5.556 at 200 tokens/s" in kvcalc("latency gpt2 --tp 2 --price-per-hour 2 --output-throughput 200").joined


def test_the_largest_batch_meets_a_tpot_and_one_more_misses_it(kvcalc: Run) -> None:
    line = "latency llama-3.1-8b --format json"
    (best,), (full,) = (kvcalc(f"{line} --max-tpot {tpot}").records for tpot in ("12ms", "1s"))
    (more,) = kvcalc(f"{line} --batch-size {best['batch_size'] + 1}").records
    assert best["tpot_s"] <= 0.012 < more["tpot_s"] and full["batch_size"] == full["max_num_seqs"]


def test_token_projections_of_a_generation() -> None:
    """1 input and 4096 output tokens: 4096 pass through the layers with a cache, 1 + … + 4096 = 4096 · 4097 / 2 without."""
    assert (token_projections(1, 4096), token_projections(5, 3)) == ((4096, 8_390_656), (5 + 1 + 1, 5 + 6 + 7))


def test_a_cached_prefix_is_said_beside_what_the_first_token_takes_without(kvcalc: Run) -> None:
    line = "latency llama-3.1-8b --gpu h100 --input-len 2000"
    (plain,), (found,) = (kvcalc(f"{line}{prefix} --format json").records for prefix in ("", " --prefix-len 1500"))
    assert (plain["prefix_len"], plain["uncached_ttft_s"]) == (0, None)
    assert (found["prefix_len"], found["uncached_ttft_s"]) == (1500, plain["ttft_s"]) and found["ttft_s"] < plain["ttft_s"]
    assert f"instead of {plain['ttft_s'] * 1e3:.3g} ms" in " ".join(kvcalc(f"{line} --prefix-len 1500").out.split())


def test_energy_is_full_power_over_the_tokens_of_the_request(kvcalc: Run) -> None:
    """Four H100s at 700 W for the seconds of the request, by 3 × 50 tokens. There is no energy if no power is published."""
    (found,) = kvcalc("latency llama-3.1-8b --gpu h100 --tp 4 --bs 3 --isl 100 --osl 50 --format json").records
    assert found["energy_per_token_j"] == pytest.approx(700 * 4 * found["e2e_s"] / 150, rel=1e-12)
    (apple,) = kvcalc("latency llama-3.1-8b --gpu apple-m3-max --output-len 5 --format json").records
    assert apple["energy_per_token_j"] is None


@pytest.mark.parametrize("name", ["gemma-3-27b", "deepseek-v4-pro"])
def test_a_list_gives_what_each_request_gives(name: str) -> None:
    """The steps of a single short request are timed without NumPy, the steps of a list with NumPy."""
    timed = deployment(name).with_calibration()
    lists = [(batch, *lengths, host) for host in (0, 3) for batch in (1, 8) for lengths in ((100, 500), (90, 30), (7, 1))]
    requests = [LatencyOptions(input_len=i, output_len=o, batch_size=b, cpu_offload_gb=g) for b, i, o, g in lists]
    for record, one in zip(latency_records([(timed, one) for one in requests]), requests, strict=True):
        for key, value in latency_records([(timed, one)])[0].items():
            assert record[key] == (pytest.approx(value, rel=1e-14) if isinstance(value, float) else value)
