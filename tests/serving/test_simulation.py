"""The simulator compared with cases by hand, and rules for random loads: nothing is lost or counted twice."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import HandClock, asked, byte_pool, served

from kvcalc import UserError
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.requests import Requests
from kvcalc.serving.server import summary
from kvcalc.serving.simulation import Served


def record(run: Served, budget: int = 10**9, **goals: float) -> dict[str, float]:
    return summary(run, budget, **{f"slo_{name}": goal for name, goal in goals.items()})


@pytest.mark.parametrize("lengths", ["prompts", "answers"])
def test_lengths_5_3_4_in_a_static_batch_waste_3_of_15_slots(lengths: str) -> None:
    """Prompts of 5, 3 and 4 are a (3, 5) pass. Answers of 5, 3 and 4 after one prompt token are 3 slots and 4 passes of 3."""
    rows = [(0.0, n, 1) if lengths == "prompts" else (0.0, 1, n) for n in (5, 3, 4)]
    run = served(asked(*rows), "static")
    assert (run.logs[0].slots, run.logs[0].padded) == (15, 3)
    assert record(run)["padding_waste"] == 0.2
    assert record(served(asked(*rows)))["padding_waste"] == 0


def test_static_batches_by_hand() -> None:
    """A pass takes a second. Two requests arrive at 0. The third, at 1, waits until the longest of them is done at 3."""
    run = served(asked((0, 2, 1), (0, 2, 3), (1, 2, 2)), "static")
    log = run.logs[0]
    assert log.scheduled.tolist() == [0, 0, 3]
    assert log.first.tolist() == [1, 1, 4]
    assert log.finished.tolist() == [1, 3, 5]
    assert record(run)["queueing_mean_s"] == pytest.approx(2 / 3)
    # slots: 2 rows × (2 + 2 decodes) + 1 row × (2 + 1); the short one idles through two decodes
    assert (log.slots, log.padded) == (11, 2)


def test_the_same_load_in_continuous_batches() -> None:
    """The third request is in the pass from 1 to 2, together with the second's decode, and no request waits."""
    log = served(asked((0, 2, 1), (0, 2, 3), (1, 2, 2))).logs[0]
    assert log.scheduled.tolist() == [0, 0, 1]
    assert log.first.tolist() == [1, 1, 2]
    assert log.finished.tolist() == [1, 3, 3]
    assert [(r.tokens, r.prefill_tokens) for r in log.rows] == [(4, 4), (3, 2), (2, 0)]


def test_a_prompt_of_500_beside_4_decodes_is_one_pass_of_504_tokens() -> None:
    """A pass of n tokens takes 1 + n/1000 s: 1.004 for four prompts of one token, 1.504 for the (504, D) pass."""
    rows = [(0.0, 1, 10)] * 4 + [(1.0, 500, 1)]
    log = served(asked(*rows), deployment=HandClock(1, 1 / 1000)).logs[0]
    assert log.rows[1].tokens == 504
    assert log.rows[1].duration_s == pytest.approx(1.504)
    assert log.finished[4] == pytest.approx(1.004 + 1.504)


def test_chunks_within_the_token_budget() -> None:
    """A prompt of 10 and one decode, with 4 tokens per pass: chunks of 4, then 3, 3 and 1 together with decodes."""
    log = served(asked((0, 1, 9), (0.5, 10, 1)), max_num_batched_tokens=4, max_num_seqs=4).logs[0]
    assert [(r.tokens, r.prefill_tokens) for r in log.rows][:5] == [(1, 1), (4, 3), (4, 3), (4, 3), (2, 1)]
    assert log.finished[1] == 5


def test_seats_are_limited() -> None:
    log = served(asked(*[(0.0, 1, 3)] * 3), max_num_seqs=2).logs[0]
    assert log.scheduled.tolist() == [0, 0, 3]
    assert log.largest == 2


def test_idle_time_is_skipped() -> None:
    run = served(asked((0, 1, 1), (1000, 1, 1)))
    assert run.logs[0].finished.tolist() == [1, 1001]
    assert record(run)["utilization"] == pytest.approx(2 / 1001)


def test_preemption_by_recomputing() -> None:
    """The memory has 8 tokens. Both requests store 4 after a decode. The second is preempted, and computes its tokens again."""
    log = served(asked((0, 3, 4), (0, 3, 4)), pool=byte_pool(8)).logs[0]
    assert (log.preemptions, log.recomputed_tokens) == (1, 5)
    # passes: both prompts; both decode (4 + 4); the first alone (5), (6); then 5 tokens again give the third, one decode more
    assert [r.tokens for r in log.rows for _ in range(r.passes)] == [6, 2, 1, 1, 5, 1]
    assert log.finished.tolist() == [4, 6]
    assert log.first.tolist() == [1, 1]
    # a prompt of 6 has computed one token per pass in two passes when the third token of the other request needs its place
    (log,) = served(asked((0, 1, 5), (0, 6, 1)), pool=byte_pool(8), max_num_batched_tokens=2, max_num_seqs=2).logs
    assert (log.preemptions, log.recomputed_tokens, *log.finished) == (1, 2, 5, 8)


def test_contiguous_reserves_and_paged_does_not() -> None:
    """The memory has 20 tokens. Reservations of 10 admit two requests and waste the unused part. Blocks of 1 admit all four."""
    rows = asked(*[(0.0, 2, 3)] * 4)
    slots = served(rows, pool=byte_pool(20, longest=10, reserve=10))
    pages = served(rows, pool=byte_pool(20, longest=10))
    assert (slots.logs[0].largest, pages.logs[0].largest) == (2, 4)
    # in its three passes a request holds 2, 3 and 4 tokens of its 10
    assert record(slots)["kv_waste"] == pytest.approx(1 - (2 + 3 + 4) / 30)
    assert record(pages)["kv_waste"] == 0
    assert record(slots, 20)["kv_peak"] == 1
    assert record(pages, 20)["kv_peak"] == 16 / 20


@pytest.mark.parametrize("policy", ["static", "continuous"])
@pytest.mark.parametrize("clients", [0, 1])
def test_what_can_never_fit_is_rejected(policy: str, clients: int) -> None:
    """A request ends with in + out − 1 cached tokens: 8 fit in 8, not 9. Requests beyond the maximum length do not fit either."""
    run = served(asked((0, 5, 4), (0, 5, 5), (0, 2, 2)), policy, byte_pool(8), clients=clients)
    assert run.logs[0].rejected.tolist() == [False, True, False]
    found = record(run)
    assert (found["completed"], found["rejected"], found["output_tokens"]) == (2, 1, 6)
    assert all(served(asked((0, 5, 4)), policy, byte_pool(100, longest=7)).logs[0].rejected)


def test_nothing_served_has_no_figures() -> None:
    found = record(served(asked((0, 50, 1)), pool=byte_pool(8)), ttft=1)
    assert found["completed"] == 0
    for key in ("throughput_tokens_per_s", "ttft_p50_s", "tpot_p99_s", "goodput_requests_per_s", "kv_waste", "padding_waste"):
        assert found[key] is None


def test_clients_ask_again_when_they_are_answered() -> None:
    """With one client and passes of a second, each request arrives when the previous one ends."""
    log = served(asked(*[(0.0, 1, 2)] * 3), clients=1).logs[0]
    assert log.arrived.tolist() == [0, 2, 4]
    late = served(asked((0, 1, 2), (0, 1, 2), (7, 1, 2)), clients=1).logs[0]
    assert late.arrived.tolist() == [0, 2, 7]


def test_data_parallel_ranks_take_turns() -> None:
    """Two ranks: requests 0 and 2 on one, request 1 on the other. A pass of one rank is timed as if both ran it."""
    run = served(asked((0, 1, 1), (0, 2, 1), (0, 3, 1)), deployment=HandClock(0, 1, dp=2))
    assert len(run.logs) == 2
    assert run.times.finished.tolist() == [4, 2, 4]


def test_goodput_counts_what_meets_every_goal() -> None:
    """TTFT is 1, 1 and 3 s (the last request waits), TPOT 1 s: two of three are within 2 s, in 6 s."""
    run = served(asked(*[(0.0, 1, 3)] * 3), max_num_seqs=2)
    found = record(run, ttft=2.0, tpot=1.0)
    assert (found["goodput_requests_per_s"], found["slo_attainment"]) == (2 / 6, pytest.approx(2 / 3))
    assert record(run, tpot=0.5)["slo_attainment"] == 0
    assert record(run)["goodput_requests_per_s"] is None


rows = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 40), st.integers(1, 25)), min_size=1, max_size=30
).map(lambda found: sorted(found))  # fmt: skip
servers = st.fixed_dictionaries({"max_num_seqs": st.integers(1, 6), "max_num_batched_tokens": st.integers(6, 64)})


@given(rows, servers, st.sampled_from(["static", "continuous"]), st.integers(20, 120), st.integers(1, 8), st.integers(0, 4))
def test_conservation(
    load: list[tuple[float, int, int]], limits: dict[str, float], policy: str, budget: int, block: int, clients: int
) -> None:
    """Every request ends once or is rejected. Every token is generated once. Blocks are never exceeded. Little's law holds."""
    requests = asked(*load)
    pool = byte_pool(budget, block, most=200)
    run = served(requests, policy, pool, HandClock(0.5, 0.01), clients, **limits)
    (log,) = run.logs
    fits = pool.allocated[requests.input_len + requests.output_len - 1] <= budget
    assert (log.rejected == ~fits).all()
    assert (np.isfinite(log.finished) == fits).all()
    inputs, outputs = requests.input_len[fits], requests.output_len[fits]
    assert log.peak <= budget
    assert log.largest <= limits["max_num_seqs"]
    assert log.prefill_tokens == inputs.sum() + log.recomputed_tokens
    decoded = log.slots - log.prefill_tokens - log.padded
    assert (outputs - 1).sum() - log.preemptions <= decoded <= (outputs - 1).sum()
    _check_times(log, requests)
    found = record(run, budget)
    if fits.any() and found["duration_s"]:
        within = float((log.finished - log.arrived)[fits].mean())
        assert found["mean_in_system"] == pytest.approx(found["requests_per_s"] * within)
        assert 0 <= found["kv_waste"] <= 1


def _check_times(log: Log, requests: Requests) -> None:
    done = np.isfinite(log.finished)
    times = [getattr(log, name)[done] for name in ("arrived", "scheduled", "first", "finished")]
    assert (times[0] >= requests.arrival_s[done]).all()
    for before, after in itertools.pairwise(times):
        assert (before <= after).all()


def test_the_timeline_is_thinned_and_the_sums_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.serving import cache_accounting as module

    load = asked(*[(float(2 * i), 1, 1) for i in range(1000)])
    whole = served(load).logs[0]
    monkeypatch.setattr(module, "MAX_ROWS", 100)
    thin = served(load).logs[0]
    assert len(whole.rows) == 1000
    assert thin.rows == whole.rows[::16]  # 1000 rows thinned to at most 100 by halves
    assert (thin.stride, whole.stride) == (16, 1)
    assert (thin.passes, thin.busy_s) == (whole.passes, whole.busy_s)


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(UserError, match=r"4 tokens of a pass are fewer than 8 sequences\."):
        served(asked((0, 1, 1)), max_num_seqs=8, max_num_batched_tokens=4)
