"""Disaggregated prefill: cases by hand, rules for random loads, and agreement with `plan`."""

import itertools

import numpy as np
import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from servers import HandClock, HandTimer, asked, byte_pool, served

from kvcalc.serving.batching import Decoding, Limits, ServerSetup
from kvcalc.serving.cache_accounting import Pool
from kvcalc.serving.requests import Clients
from kvcalc.serving.server import summary
from kvcalc.serving.simulation import KVTransfer, Served, simulate

NO_CLIENTS = Clients()


def apart(
    *rows: tuple[float, int, int], clients: Clients = NO_CLIENTS, replicas: int = 1, dp: int = 1, pool: Pool | None = None,
    clock: HandClock | None = None, **limits: int,
) -> Served:  # fmt: skip
    """Return a server whose passes take a second, and whose transfers take a quarter of a second per prompt."""
    setup = ServerSetup(pool or byte_pool(), HandTimer(clock or HandClock(1.0, dp=dp)), Limits(**limits))
    return simulate(asked(*rows), setup, clients=clients, transfer=KVTransfer(replicas, lambda tokens: 0.25))


def test_a_request_by_hand() -> None:
    """Prompts: one pass from 0 to 1, and one from 1 to 2 for the two others. First tokens arrive 0.25 s later.

    Decodes: the first request's passes end at 2.25, 3.25 and 4.25. The second arrives at 2.25, in time for the pass to
    3.25, its last. The third has an answer of one token, which is complete when its cache arrives.
    """
    run = apart((0.0, 5, 4), (0.5, 5, 2), (0.5, 5, 1))
    assert run.times.arrived.tolist() == [0, 0.5, 0.5]
    assert run.times.scheduled.tolist() == [0, 1, 1]
    assert run.times.first.tolist() == [1.25, 2.25, 2.25]
    assert run.times.finished.tolist() == [4.25, 3.25, 2.25]
    record = summary(run, 10**9)
    assert (record["queueing_mean_s"], record["decode_queueing_mean_s"]) == (pytest.approx(1 / 3), 0)
    assert (record["passes"], record["token_slots"]) == (2 + 3, 15 + 4)
    assert record["prefill_utilization"] == pytest.approx(2 / 4.25)
    assert record["utilization"] == pytest.approx(3 / 4.25)
    assert record["mean_in_system"] * 4.25 == pytest.approx(4.25 + 2.75 + 1.75)


def test_prompts_stop_no_decodes() -> None:
    """On one replica, a prompt of 100 tokens makes a decode pass 1 + 100/100 s. On separate replicas, decodes take 1.01 s."""
    rows = [(0.0, 1, 6), *((float(i), 100, 1) for i in range(1, 6))]
    clock = HandClock(1.0, 0.01)
    run = apart(*rows, clock=clock)
    assert run.times.finished[0] == pytest.approx(1.01 + 0.25 + 5 * 1.01)
    together = served(asked(*rows), deployment=clock)
    assert together.logs[0].finished[0] > 8


def test_prompts_take_turns_on_their_replicas() -> None:
    """Four prompts, one at a time, end at 1, 2, 3 and 4 on one replica, and at 1 and 2 on two."""
    rows = [(0.0, 8, 2)] * 4
    one, two = (apart(*rows, replicas=n, max_num_batched_tokens=8, max_num_seqs=8).times.first for n in (1, 2))
    assert one.tolist() == [1.25, 2.25, 3.25, 4.25]
    assert two.tolist() == [1.25, 1.25, 2.25, 2.25]


def test_decodes_wait_for_memory_where_they_decode() -> None:
    """The memory has 8 tokens. Both prompts of 4 are computed in one pass. The first grows to 7, and only then the second
    continues."""
    run = apart((0.0, 4, 4), (0.0, 4, 4), pool=byte_pool(8))
    assert run.times.first.tolist() == [1.25, 1.25]
    assert run.times.finished.tolist() == [4.25, 7.25]
    assert summary(run, 8)["decode_queueing_mean_s"] == 1.5


def test_a_closed_loop_asks_again_when_the_answer_is_there() -> None:
    """One client thinks 2 s: prompt 1 s, transfer 0.25 s, two decodes. Then it sends a request of one token at 5.25."""
    run = apart((0.0, 5, 3), (0.0, 5, 1), (0.0, 5, 2), clients=Clients(1, think_s=2.0))
    assert run.times.arrived.tolist() == [0, 5.25, 8.5]
    assert run.times.finished.tolist() == [3.25, 6.5, 10.75]


def test_a_prefix_cache_saves_where_prompts_are_computed() -> None:
    """A share of 0.5 of 100 tokens is cached, so the pass of the prompt takes 0.5 s instead of 1."""
    steps = HandTimer(HandClock(0.0, 0.01))
    setup = ServerSetup(byte_pool(), steps, Limits(), prefix_hit_rate=0.5)
    run = simulate(asked((0.0, 100, 2)), setup, transfer=KVTransfer(1, lambda tokens: 0.25))
    assert run.logs[0].first.tolist() == [0.75]
    assert run.prefill[0].found_tokens == 50


# the times of this test are sums of powers of two: no rounding decides which of two events is first
loads = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 2.0, 7.75, 21.0]), st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=20
).map(sorted)


@given(loads, st.integers(66, 160), st.integers(1, 6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 4))
def test_nothing_is_lost(
    rows: list[tuple[float, int, int]], budget: int, seats: int, replicas: int, dp: int, clients: int
) -> None:
    """Every request ends once, with times in order. Every token is generated once. Little's law holds, and memory is never
    exceeded."""
    run = apart(
        *rows, clients=Clients(clients), replicas=replicas, dp=dp,
        pool=byte_pool(budget, 4, most=200), clock=HandClock(0.5, 0.01, dp),
        max_num_seqs=seats, max_num_batched_tokens=16,
    )  # fmt: skip
    load, record = run.requests, summary(run, budget)
    times = [getattr(run.times, name) for name in ("arrived", "scheduled", "first", "finished")]
    assert all((before <= after + 1e-9).all() for before, after in itertools.pairwise(times))
    assert (times[2] >= times[1] + 0.25).all()
    logs = (*run.prefill, *run.logs)
    made, further = sum(log.slots - log.prefill_tokens - log.padded for log in run.logs), (load.output_len - 1).sum()
    assert further - record["preemptions"] <= made <= further  # a token each may come from what is computed again
    assert sum(log.prefill_tokens for log in logs) == load.input_len.sum() + record["recomputed_tokens"]
    assert max(log.peak for log in logs) <= budget
    assert record["mean_in_system"] == pytest.approx(record["requests_per_s"] * record["e2e_mean_s"])


@given(loads, st.integers(66, 160), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_passes_in_a_row_are_passes_one_by_one(
    rows: list[tuple[float, int, int]], budget: int, seats: int, replicas: int, dp: int, clients: int
) -> None:
    """No server runs past the time at which another may send it a request: times are equal if each pass is a separate event."""
    asking, pool, clock = Clients(clients, think_s=0.375), byte_pool(budget, 4, most=200), HandClock(0.5, 2**-7, dp)
    each: dict[str, int] = {"max_num_seqs": seats, "max_num_batched_tokens": 16}
    together = apart(*rows, clients=asking, replicas=replicas, dp=dp, pool=pool, clock=clock, **each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoding, "in_a_row", lambda self, most, room: 1)
        alone = apart(*rows, clients=asking, replicas=replicas, dp=dp, pool=pool, clock=clock, **each)
    for name in ("arrived", "scheduled", "first", "finished"):
        assert getattr(together.times, name) == pytest.approx(getattr(alone.times, name))


def test_a_stream_is_plan_s_ttft_and_latency_s_steps(kvcalc: Run) -> None:
    """With one request at a time, TTFT equals `plan` with disaggregated prefill, and the steps equal `latency`."""
    words = "llama-3.1-8b --gpu h100 --isl 4000 --osl 100 --format json"
    (run,) = kvcalc(f"serve {words} --num-prompts 3 --max-concurrency 1 --disaggregate").records
    (alone,) = kvcalc(f"latency {words}").records
    sent = 4000 * 131_072 / 450e9  # 32 layers · 2 · 8 heads · 128 · 2 B, NVLink's 450 GB/s a direction
    assert run["transfer_s"] == pytest.approx(sent, rel=1e-12)
    assert run["ttft_p50_s"] == pytest.approx(alone["ttft_s"] + sent, rel=1e-9)
    assert run["tpot_p50_s"] == pytest.approx(alone["tpot_s"], rel=1e-3)
    planned = kvcalc(f"plan {words} --rate 1 --disaggregate --tp 1 --pp 1 --max-gpus 2").records
    assert run["ttft_p50_s"] == pytest.approx(next(r["ttft_s"] for r in planned if r["prefill_replicas"]), rel=1e-9)
    assert run["tpot_p90_error"] is run["time_p90_error"] is None
    assert (run["prefill_replicas"], run["gpus"], run["total_gpus"]) == (1, 1, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--disaggregate --policy static", "disaggregated prefill is simulated only under continuous batching"),
        ("--prefill-replicas 2", "prefill-replicas need separate replicas for the prompts"),
        ("--disaggregate --prefill-replicas 0", "prefill-replicas 0 is not a whole number from 1 to 1,024"),
        ("--disaggregate --gpu t4", "t4 gives no rate of a link"),
    ],
)
def test_what_cannot_be_apart_is_refused(kvcalc: Run, options: str, said: str) -> None:
    result = kvcalc(f"serve llama-3.2-1b --num-prompts 3 {options}")
    assert (result.code, result.out) == (2, "")
    assert said in result.err


def test_the_same_seed_gives_the_same_run(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --rate 8 --num-prompts 30 --isl uniform:50,300 --osl 20 --disaggregate --prefill-replicas 2"
    first, second = (kvcalc(f"{line} --format json").records for _ in range(2))
    assert first == second and np.isfinite(first[0]["decode_queueing_mean_s"])
    assert kvcalc(line).out.startswith("llama-3.1-8b on 3× h100-sxm keeps up with 8 requests/s")
