"""The rate at which a server saturates: by hand, against a queue that is overrun, and as the verdict of any run."""

import numpy as np
import pytest
from servers import HandClock, byte_pool

from kvcalc import Parallelism, load_gpu, load_model
from kvcalc.serving.handover import Handover
from kvcalc.serving.load import Load
from kvcalc.serving.metrics import gathered
from kvcalc.serving.requests import Requests
from kvcalc.serving.run import Run, serve
from kvcalc.serving.saturation import make_backlog, saturated_rate
from kvcalc.serving.scheduling import Limits
from kvcalc.serving.settings import ServerSettings
from kvcalc.serving.simulation import simulate
from kvcalc.serving.steps import Steps
from kvcalc.timing.deployment import Deployment


def deployment(name: str, gpu: str = "h100") -> Deployment:
    return Deployment(load_model(name), load_gpu(gpu)).under()


def run(load: Load, policy: str = "continuous", timed: Deployment | None = None, **settings: object) -> Run:
    timed = timed or deployment("llama-3.1-8b")
    return serve(timed, load.drawn(), load, ServerSettings(**settings), policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("policy", "output_len", "seats", "rate"),
    [
        ("continuous", 1, 4, 4.0),  # 4 prompts a pass
        ("static", 1, 4, 4.0),
        ("static", 5, 4, 4 / 5),  # 4 requests in 5 passes
        ("continuous", 5, 4, 4 / 5),
        ("continuous", 5, 400, 16 / 5),  # 16 × 25 bytes fill the memory
    ],
)
def test_saturation_by_hand(policy: str, output_len: int, seats: int, rate: float, ranks: int) -> None:
    """A pass takes a second, whatever is in it. Prompts have 21 tokens, and 400 bytes hold 16 requests of 25 tokens."""
    load = Load(input_len="21", output_len=str(output_len))
    backlog = make_backlog(load, load.drawn(), seats * ranks)
    steps = Steps(HandClock(dp=ranks))  # type: ignore[arg-type]
    served = simulate(backlog, byte_pool(400, 25), steps, Limits(max_num_seqs=seats), policy)
    assert saturated_rate(served, seats * ranks) == pytest.approx(ranks * rate, rel=0.02)


@pytest.mark.parametrize(("replicas", "rate"), [(1, 1.0), (2, 1.5), (9, 1.5)])
def test_of_prompts_apart_either_kind_may_saturate(replicas: int, rate: float) -> None:
    """Prompts of 10 tokens fill a pass, so a replica computes one a second; 3 decodes at once take two passes."""
    load = Load(input_len="10", output_len="3")
    backlog = make_backlog(load, load.drawn(), 3)
    steps = Steps(HandClock())  # type: ignore[arg-type]
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=10)
    served = simulate(backlog, byte_pool(), steps, limits, handover=Handover(replicas, lambda tokens: 0.25))
    assert saturated_rate(served, 3) == pytest.approx(rate, rel=0.02)


def test_nothing_served_has_no_rate() -> None:
    rejected = Requests(np.zeros(3), np.full(3, 900), np.full(3, 9))
    served = simulate(rejected, byte_pool(100), Steps(HandClock()), Limits())  # type: ignore[arg-type]
    assert saturated_rate(served, 1) is None


SERVERS = [
    ("llama-3.1-8b", "h100", "continuous", {}, {}),
    ("llama-3.1-8b", "h100", "static", {}, {}),
    ("llama-3.1-8b", "h100", "continuous", {"prefix_hit_rate": 0.9}, {}),
    ("llama-3.1-8b", "l4", "continuous", {"input_len": "lognormal:600,3000", "output_len": "uniform:50,350"}, {}),
    ("gpt-oss-20b", "h100", "continuous", {"prefix_hit_rate": 0.5, "burstiness": 0.5}, {}),
    ("gemma-3-27b", "h200", "continuous", {}, {"disaggregate": True}),
    ("deepseek-v2-lite", "h100", "continuous", {"prefix_hit_rate": 0.25, "input_len": "300"}, {"max_num_seqs": 32}),
]


@pytest.mark.parametrize(("model", "gpu", "policy", "load", "settings"), SERVERS)
def test_the_verdict_does_not_depend_on_the_number_of_requests(
    model: str, gpu: str, policy: str, load: dict[str, object], settings: dict[str, object]
) -> None:
    """It is the same for 300 requests, whose queue hardly forms, and for 10,000, of which the last ones wait or do not."""
    timed = deployment(model, gpu)
    capacity = run(Load(num_prompts=10, rate=1.0, **load), policy, timed, **settings).ready.capacity  # type: ignore[arg-type, union-attr]
    assert capacity
    before = None
    for share in (0.5, 0.88, 1.12, 1.5):
        for count in (300, 1000, 3000, 10_000)[:: 1 if share == 1.12 else 3]:
            asked = Load(rate=share * capacity, num_prompts=count, **load)  # type: ignore[arg-type]
            before = serve(timed, asked.drawn(), asked, ServerSettings(**settings), policy, before=before and before.ready)  # type: ignore[arg-type]
            assert before.record["diverges"] is (share > 1), (share, count)
            assert before.record["capacity_requests_per_s"] == capacity
        waits = gathered(before.served, "scheduled") - gathered(before.served, "arrived")
        growth = float(waits[-1000:].mean() / before.served.requests.arrival_s[-1])
        assert (growth > 0.04) is (share > 1), (share, growth)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_queue_that_is_overrun_is_served_at_the_rate_of_saturation(ranks: int) -> None:
    """Equal answers that start at random do not end together: 5% too many requests are served as fast as a backlog."""
    timed = Deployment(load_model("gpt-oss-20b"), load_gpu("h100"), parallelism=Parallelism(dp=ranks)).under()
    capacity = run(Load(num_prompts=10, rate=1.0), timed=timed).ready.capacity  # type: ignore[union-attr]
    assert capacity
    over = run(Load(num_prompts=12_000, rate=1.05 * capacity), timed=timed).served
    finished = np.sort(np.concatenate([log.finished for log in over.logs]))
    steady = finished[(finished > 0.5 * over.requests.arrival_s[-1]) & (finished < over.requests.arrival_s[-1])]
    assert len(steady) / (steady[-1] - steady[0]) == pytest.approx(capacity, rel=0.03)
