"""Cases exactly at a limit: batches that just fit, and loads that start late."""

import math

import numpy as np
import pytest
from servers import HandClock, HandTimer, asked, byte_pool, served

from kvcalc.serving.batching import Limits, ServerSetup
from kvcalc.serving.server import mean, mean_and_percentiles
from kvcalc.serving.simulation import simulate


@pytest.mark.parametrize("outputs", [(2, 9), (9, 2)])
def test_a_static_batch_splits_where_its_outputs_do_not_fit(outputs: tuple[int, int]) -> None:
    """Padded to the longest answer, two rows end at 2 + 9 − 1 = 10 tokens each. 20 tokens fit both, 19 one at a time."""
    rows = asked(*((0.0, 2, n) for n in outputs))
    assert served(rows, "static", byte_pool(20)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, "static", byte_pool(19)).logs[0].scheduled.tolist() == [0, outputs[0]]


def test_a_static_batch_is_no_longer_than_the_longest_request() -> None:
    """A prompt of 5 and an answer of 6 end at 10 in one batch, although each request ends at 5 or 6 in a separate batch."""
    rows = asked((0, 5, 1), (0, 1, 6))
    assert served(rows, "static", byte_pool(longest=10)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, "static", byte_pool(longest=9)).logs[0].scheduled.tolist() == [0, 1]


def test_continuous_admits_what_just_fits() -> None:
    """Prompts of 3 and 4 in 7 bytes start together. In 6 bytes, the second waits for the first."""
    rows = asked((0, 3, 1), (0, 4, 1))
    assert served(rows, pool=byte_pool(7)).logs[0].scheduled.tolist() == [0, 0]
    assert served(rows, pool=byte_pool(6)).logs[0].scheduled.tolist() == [0, 1]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("policy", ["static", "continuous"])
def test_progress_sums_to_the_requests(ranks: int, policy: str) -> None:
    """Rejected requests count as done. Progress is reported in steps, neither once per request nor only at the end."""
    rows = [(float(i), 1 + 99 * (i % 5 == 0), 2) for i in range(1000)]
    told: list[int] = []
    steps = HandTimer(HandClock(0.1, dp=ranks))
    run = simulate(asked(*rows), ServerSetup(byte_pool(50), steps, Limits(max_num_seqs=4)), policy, progress=told.append)
    assert sum(told) == 1000
    assert sum(log.rejected.sum() for log in run.logs) == 200
    assert ranks < len(told) <= 10 + ranks
    assert sum(n >= 100 for n in told) >= len(told) - ranks  # all but the last of each rank


def test_percentiles_lie_between_ranks() -> None:
    """For 1, 2, 3, 10: the median is 2.5. The 90th percentile is 2.7 of three steps up: 3 + 0.7·7."""
    found = mean_and_percentiles("ttft", np.array([10.0, 1.0, 3.0, 2.0]))
    assert found == pytest.approx({"ttft_mean_s": 4, "ttft_p50_s": 2.5, "ttft_p90_s": 7.9, "ttft_p99_s": 3 + 0.97 * 7})
    assert mean(np.array([])) is None
    assert math.isclose(mean(np.array([1.0, 2.0])) or 0, 1.5)
