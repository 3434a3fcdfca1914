"""What happens exactly at a limit: batches that just fit, queues that just do not diverge, loads that start late."""

import math

import numpy as np
import pytest
from servers import HandClock, asked, byte_pool, served

from kvcalc.serving.log import Log
from kvcalc.serving.metrics import Goals, diverges, mean, spread, summary
from kvcalc.serving.replica import capacity
from kvcalc.serving.requests import Requests
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.simulation import Served, simulate
from kvcalc.serving.steps import Steps


@pytest.mark.parametrize("outputs", [(2, 9), (9, 2)])
def test_a_static_batch_splits_where_its_outputs_do_not_fit(outputs: tuple[int, int]) -> None:
    """Padded to the longest answer two rows end at 2 + 9 − 1 = 10 tokens each: 20 hold both, 19 only one after the other."""
    rows = asked(*((0.0, 2, n) for n in outputs))
    assert served(rows, "static", byte_pool(20)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, "static", byte_pool(19)).logs[0].scheduled.tolist() == [0, outputs[0]]


def test_a_static_batch_splits_where_its_prompts_do_not_fit() -> None:
    """Padded prompts of 7 with one answer token: 14 hold both."""
    rows = asked((0, 1, 1), (0, 7, 1))
    assert served(rows, "static", byte_pool(14)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, "static", byte_pool(13)).logs[0].scheduled.tolist() == [0, 1]


def test_a_static_batch_is_no_longer_than_the_longest_request() -> None:
    """A prompt of 5 and an answer of 6 end at 10 together, though each alone ends at 5 or 6."""
    rows = asked((0, 5, 1), (0, 1, 6))
    assert served(rows, "static", byte_pool(longest=10)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, "static", byte_pool(longest=9)).logs[0].scheduled.tolist() == [0, 1]


def test_a_pass_has_room_for_a_token_of_every_sequence() -> None:
    """As many tokens as seats is enough."""
    assert served(asked((0, 4, 1)), max_num_seqs=4, max_num_batched_tokens=4).logs[0].finished.tolist() == [1]


def test_continuous_admits_what_just_fits() -> None:
    """Prompts of 3 and 4 in 7 bytes start together; in 6 the second waits for the first."""
    rows = asked((0, 3, 1), (0, 4, 1))
    assert served(rows, pool=byte_pool(7)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, pool=byte_pool(6)).logs[0].scheduled.tolist() == [0, 1]


def test_the_rate_of_a_load_that_starts_late() -> None:
    """Three requests over 4 seconds, from 100 s on: two intervals in 4 s."""
    late = asked((100, 1, 1), (101, 1, 1), (104, 1, 1))
    assert late.rate == 0.5
    assert asked((100, 1, 1)).rate == 0
    assert asked((7, 1, 1), (7, 1, 1)).rate == 0
    found = summary(served(late), 10**9, Goals(), True)
    assert found["duration_s"] == 5
    assert found["requests_per_s"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("policy", ["static", "continuous"])
def test_progress_sums_to_the_requests(ranks: int, policy: str) -> None:
    """Those that are rejected are done too; told in steps, not once a request nor only at the end."""
    rows = [(float(i), 1 + 99 * (i % 5 == 0), 2) for i in range(1000)]
    told: list[int] = []
    steps = Steps(HandClock(0.1, dp=ranks))  # type: ignore[arg-type]
    run = simulate(asked(*rows), byte_pool(50), steps, Limits(max_num_seqs=4), policy, progress=told.append)
    assert sum(told) == 1000
    assert sum(log.rejected.sum() for log in run.logs) == 200
    assert ranks < len(told) <= 10 + ranks
    assert sum(n >= 100 for n in told) >= len(told) - ranks  # all but the last of each rank


def queue(waits: np.ndarray, arrived: np.ndarray | None = None) -> Served:
    """A rank's log of requests that came one a second (or as given) and waited so long each."""
    log = Log(len(waits))
    log.arrived = np.arange(len(waits), dtype=float) if arrived is None else arrived
    log.scheduled = log.arrived + waits
    log.first = log.finished = log.scheduled + 1
    ones = np.ones(len(waits), dtype=np.int64)
    return Served(Requests(log.arrived, ones, ones), (log,))


def growing(slope: float, ahead: float = 0.0, count: int = 1000) -> Served:
    """A queue whose wait, after the first half, grows by `slope` seconds a second."""
    seconds = np.arange(count)
    return queue(ahead + slope * np.maximum(0, seconds - count // 2))


def test_a_queue_diverges_when_more_wait_than_2_percent_ten_and_a_batch() -> None:
    """1000 requests, one started at a time: 31 that wait at the end are a queue's noise, 32 are not.

    Request i starts at i + s(i − 500), after the last arrival at 999 from i = (999 + 500·s)/(1 + s) on: 969 for s = 0.065,
    which leaves 31, and 968 for s = 0.067.
    """
    for slope, waiting in ((0.065, 31), (0.067, 32)):
        assert (growing(slope).logs[0].scheduled > 999).sum() == waiting
        assert diverges(growing(slope)) is (waiting > 0.02 * 1000 + 10 + 1)


def test_a_long_queue_that_grows_by_less_than_2_percent_is_stable() -> None:
    """A hundred wait at the end of each; the wait grows by 1.9 and by 2.1 seconds in a hundred."""
    assert not diverges(growing(0.0, ahead=100.0))
    assert not diverges(growing(0.019, ahead=100.0))
    assert diverges(growing(0.021, ahead=100.0))


@pytest.mark.parametrize(("last", "fast"), [(110, False), (111, True)])
def test_a_queue_in_large_batches_diverges_when_it_grows_fast_and_a_tenth_and_ten_wait(last: int, fast: bool) -> None:
    """Every request starts at once but the last 110 or 111, which one batch takes 5000 s later: fewer than 30 + that batch."""
    waits = np.zeros(1000)
    waits[-last:] = 6000 - np.arange(1000)[-last:]
    assert diverges(queue(waits)) is fast


def test_a_queue_in_large_batches_that_grows_slowly_is_stable() -> None:
    """200 of 1000 wait for one batch just after the last arrival: over the second half waiting grows by less than 0.25 s/s."""
    waits = np.zeros(1000)
    waits[-200:] = 1000 - np.arange(1000)[-200:]
    slope = np.polyfit(np.arange(500), waits[500:], 1)[0]
    assert 0.02 < slope < 0.25
    assert not diverges(queue(waits))


def test_too_few_requests_or_all_at_once_never_diverge() -> None:
    assert not diverges(queue(np.array([0.0, 50.0, 100.0])))
    assert not diverges(queue(np.arange(1000.0), np.zeros(1000)))
    assert not diverges(queue(np.array([])))


def test_one_rank_that_is_overrun_is_enough() -> None:
    calm, overrun = growing(0.0), growing(0.5)
    both = Served(calm.requests, (*calm.logs, *overrun.logs))
    assert diverges(both)
    assert not diverges(Served(calm.requests, calm.logs * 2))


def test_percentiles_lie_between_ranks() -> None:
    """Of 1, 2, 3, 10: the median 2.5; the 90th is 2.7 of three steps up, 3 + 0.7·7."""
    found = spread("ttft", np.array([10.0, 1.0, 3.0, 2.0]))
    assert found == pytest.approx({"ttft_mean_s": 4, "ttft_p50_s": 2.5, "ttft_p90_s": 7.9, "ttft_p99_s": 3 + 0.97 * 7})
    assert mean(np.array([])) is None
    assert math.isclose(mean(np.array([1.0, 2.0])) or 0, 1.5)


@pytest.mark.parametrize(
    ("chunk", "seats", "budget", "each"),
    [
        (4, 9, 33, 3 + 2 / 3),  # three passes a prompt; 3 sequences of 11 tokens on average decode at once
        (25, 9, 33, 1 / 2 + 2 / 3),  # two prompts in a pass
        (99, 9, 33, 1 / 3 + 2 / 3),  # as many prompts in a pass as decode at once
        (10, 2, 33, 1 + 2 / 2),  # two seats
        (99, 9, 32, 1 / 2 + 2 / 2),  # 32 bytes hold two
        (99, 9, 5, 1 + 2),  # one at a time, however little there is
    ],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_capacity_by_hand(chunk: int, seats: int, budget: int, each: float, ranks: int) -> None:
    """Prompts of 10, answers of 3, a second a pass: its share of the prompts' passes, and two decodes shared by all."""
    steps, limits = Steps(HandClock(1.0, dp=ranks)), Limits(max_num_seqs=seats, max_num_batched_tokens=chunk)  # type: ignore[arg-type]
    assert capacity(steps, byte_pool(budget), limits, 10, 3) == pytest.approx(ranks / each)
