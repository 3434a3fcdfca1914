"""The saturation rate of a server: by hand, compared with an overloaded queue, and as the verdict of a run."""

import numpy as np
import pytest
from servers import HandClock, HandTimer, byte_pool, serve, served

from kvcalc import load_gpu, load_model
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.batching import Limits, ServerSetup
from kvcalc.serving.requests import Requests, sample_workload
from kvcalc.serving.server import Server, SimulationResult, make_backlog, saturated_rate
from kvcalc.serving.simulation import KVTransfer, simulate
from kvcalc.timing.deployment import TimedDeployment

pytestmark = pytest.mark.usefixtures("full_backlog")


def deployment(name: str, gpu: str = "h100") -> TimedDeployment:
    return TimedDeployment(load_model(name), load_gpu(gpu)).with_calibration()


def run(load: Workload, policy: str = "continuous", timed: TimedDeployment | None = None, **settings: object) -> SimulationResult:
    timed = timed or deployment("llama-3.1-8b")
    return serve(timed, load, ServerSettings(**settings), policy)  # type: ignore[arg-type]


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
    """Every pass takes a second. Prompts have 21 tokens, and 400 bytes fit 16 requests of 25 tokens."""
    load = Workload(input_len="21", output_len=str(output_len))
    backlog = make_backlog(load, sample_workload(load), seats * ranks)
    steps = HandTimer(HandClock(dp=ranks))
    setup = ServerSetup(byte_pool(400, 25), steps, Limits(max_num_seqs=seats))
    assert saturated_rate(simulate(backlog, setup, policy), seats * ranks) == pytest.approx(ranks * rate, rel=0.02)


@pytest.mark.parametrize(("replicas", "rate"), [(1, 1.0), (2, 1.5), (9, 1.5)])
def test_of_prompts_apart_either_kind_may_saturate(replicas: int, rate: float) -> None:
    """Prompts of 10 tokens fill a pass, so a replica computes one per second. 3 concurrent decodes need two passes."""
    load = Workload(input_len="10", output_len="3")
    backlog = make_backlog(load, sample_workload(load), 3)
    steps = HandTimer(HandClock())
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=10)
    transfer = KVTransfer(replicas, lambda tokens: 0.25)
    run = simulate(backlog, ServerSetup(byte_pool(), steps, limits), transfer=transfer)
    assert saturated_rate(run, 3) == pytest.approx(rate, rel=0.02)


def test_nothing_served_has_no_rate() -> None:
    rejected = Requests(np.zeros(3), np.full(3, 900), np.full(3, 9))
    assert saturated_rate(served(rejected, pool=byte_pool(100)), 1) is None


SERVERS = [
    ("llama-3.1-8b", "h100", "static", {}, {}),
    ("llama-3.1-8b", "l4", "continuous", {"input_len": "lognormal:600,3000", "output_len": "uniform:50,350"}, {}),
    ("gemma-3-27b", "h200", "continuous", {"burstiness": 0.5}, {"disaggregate": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "policy", "load", "settings"), SERVERS)
def test_the_verdict_does_not_depend_on_the_number_of_requests(
    model: str, gpu: str, policy: str, load: dict[str, object], settings: dict[str, object]
) -> None:
    """It is equal for 300 requests, which hardly form a queue, and for 3,000 requests, of which the last ones may wait."""
    timed = deployment(model, gpu)
    workload = Workload(num_prompts=10, rate=1.0, **load)  # type: ignore[arg-type]
    server = Server(timed, sample_workload(workload), workload, ServerSettings(**settings), policy)  # type: ignore[arg-type]
    capacity = server.saturation_rate
    assert capacity
    for share in (0.88, 1.12):
        for count in (300, 3000):
            asked = Workload(rate=share * capacity, num_prompts=count, **load)  # type: ignore[arg-type]
            result = server.run(sample_workload(asked), asked)
            assert result.record["diverges"] is (share > 1), (share, count)
            assert result.record["capacity_requests_per_s"] == capacity
        waits = result.served.times.scheduled - result.served.times.arrived
        growth = float(waits[-1000:].mean() / result.served.requests.arrival_s[-1])
        assert (growth > 0.02) is (share > 1), (share, growth)
