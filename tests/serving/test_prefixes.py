"""A prefix that all prompts share: by hand, compared with `fit`, and without lost or double-counted bytes."""

import msgspec
import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from servers import HandClock, HandTimer, asked, byte_pool, serve

from kvcalc import Parallelism, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.batching import Continuous, Limits, ServerSetup
from kvcalc.serving.cache_accounting import Log, PrefixCache
from kvcalc.serving.requests import ArrivalQueue
from kvcalc.timing.deployment import TimedDeployment


def finished(rows: list[tuple[float, int, int]], rate: float, budget: int, block: int, seats: int = 256) -> Continuous:
    """Return a server whose pass takes a second, after all its requests."""
    pool = byte_pool(budget, block)
    setup = ServerSetup(pool, HandTimer(HandClock()), Limits(seats), prefix_hit_rate=rate)
    server = Continuous(ArrivalQueue(asked(*rows), pool, Log(len(rows))), setup)
    while server.run():
        pass
    return server


def test_a_share_of_each_prompt_is_found_in_whole_blocks() -> None:
    """0.6 of 100 tokens are 60: 48 in blocks of 16. Of 5 tokens, none is cached. At most all tokens but the last are cached."""
    cache = PrefixCache(0.6, byte_pool(block=16))
    assert [cache.cached_tokens(prompt) for prompt in (100, 5, 32)] == [48, 0, 16]
    assert PrefixCache(1.0, byte_pool(block=16)).cached_tokens(32) == 31


@pytest.mark.parametrize(("budget", "peak", "starts"), [(210, 210, [0, 0, 0]), (170, 160, [0, 0, 3])])
def test_a_share_of_each_prompt_is_stored_once(budget: int, peak: int, starts: list[int]) -> None:
    """Blocks of 10 bytes and tokens. Three prompts of 100 tokens share 60 tokens, and each generates 20: 60 + 3 · (40 + 10)
    bytes at the end.

    170 bytes fit two of them, 60 + 2 · 50, and the third starts when these are done.
    """
    run = finished([(0.0, 100, 3)] * 3, 0.6, budget, 10)
    assert (run.log.peak, run.log.scheduled.tolist()) == (peak, starts)
    assert (run.prefill_bytes, run.log.found_tokens, run.log.prefill_tokens) == (0, 180, 120)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_nothing_is_lost_under_preemption(rows: list[tuple[int, int, int]], rate: float) -> None:
    run = finished([(float(start), prompt, answer) for start, prompt, answer in sorted(rows)], rate, 80, 4, 4)
    assert run.prefill_bytes == run.reserved == run.decoding.count == run.decoding.allocated == 0
    assert not run.prefixes or run.prefixes.shared_blocks == 0
    assert run.done == len(rows) and run.log.peak <= 80
    assert 0 < run.log.stored_byte_s <= run.log.allocated_byte_s


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate"), [("llama-3.1-8b", 0.75), ("gpt-oss-20b", 0.25), ("qwen3-next-80b-a3b", 0.25)])
def test_running_requests_take_the_memory_that_fit_counts(name: str, rate: float) -> None:
    """8 prompts of 6,400 tokens run concurrently before the first of them has generated 80 tokens.

    So the peak is between the bytes of `fit --shared-prefix` for 8 sequences at the beginning and at the end of their
    answers.
    """
    deployment = TimedDeployment(load_model(name), load_gpu("h200"), parallelism=Parallelism(tp=2)).with_calibration()
    load = Workload(num_prompts=8, input_len="6400", output_len="80", prefix_hit_rate=rate)
    record = serve(deployment, load, ServerSettings()).record
    plan = fit(deployment, FitOptions(max_model_len=6400 + 80)).plan
    least, most = (plan.needed(8, length, int(rate * 6400)) - plan.needed(0, length) for length in (6400, 6400 + 80))
    assert least <= record["kv_peak_bytes"] <= most
    block = plan.block_size or 16
    assert record["prefix_hit_share"] == int(rate * 6400) // block * block / 6400
    apart = msgspec.structs.replace(load, prefix_hit_rate=0.0)
    alone = serve(deployment, apart, ServerSettings()).record
    saved = plan.needed(8, 6400) - plan.needed(8, 6400, int(rate * 6400))
    assert alone["kv_peak_bytes"] - record["kv_peak_bytes"] == pytest.approx(saved, rel=0.02)


def test_a_list_of_rates_makes_rows(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --rate 5 --num-prompts 60 --input-len 1000 --output-len 50 --format json --prefix-hit-rate"
    rows = kvcalc(f"{line} 0,0.5,0.9").records
    assert [r["prefix_hit_rate"] for r in rows] == [None, 0.5, 0.9]
    assert rows[1:] == [kvcalc(f"{line} {rate}").records[0] for rate in (0.5, 0.9)]
    for key in ("kv_peak_bytes", "ttft_p50_s"):
        assert rows[0][key] > rows[1][key] > rows[2][key]
    assert rows[0]["capacity_requests_per_s"] < rows[1]["capacity_requests_per_s"] < rows[2]["capacity_requests_per_s"]
    assert "prefix-hit-rate 1.5 is not" in kvcalc(f"{line} 0.5,1.5").err
