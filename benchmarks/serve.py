"""Time a simulated server: 10,000 requests of 1,000 input and 200 output tokens, llama-3.1-8b on an H100 at 80 %
of its capacity.

The yardstick is a plain Python loop over the same tokens. It visits every sequence in every pass, and
computes the time of a pass by one line of arithmetic. Memory is the peak of Python's allocator in addition to
the requests and their results. It should not grow with the number of requests.
"""

import tracemalloc
from collections import deque
from collections.abc import Iterator

from bench import Line, cpu_seconds

from kvcalc import load_gpu, load_model
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.serving.requests import sample_workload
from kvcalc.serving.server import Server, SimulationResult
from kvcalc.timing.calibration import load_calibration
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

REQUESTS, PROMPT, ANSWER, SHARE = 10_000, 1000, 200, 0.8


def simulated(load: Workload) -> SimulationResult:
    """Return the result of one run of kvcalc's simulator."""
    gpu = load_gpu("h100")
    deployment = TimedDeployment(load_model("llama-3.1-8b"), gpu, calibration=load_calibration(gpu, "vllm"))
    requests = sample_workload(load)
    return Server(deployment, requests, load, ServerSettings()).run(requests, load)


def reference(arrivals: list[float]) -> float:
    """Run the yardstick, and return the time at which the last request is done. A pass takes 5 ms, and 16 µs per
    token."""
    waiting, running, now = deque(arrivals), [], 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[0])
        tokens = len(running)
        while waiting and waiting[0] <= now:
            waiting.popleft()
            running.append(ANSWER)
            tokens += PROMPT
        now += 5e-3 + 16e-6 * tokens
        running = [left - 1 for left in running if left > 1]
    return now


def peak(count: int, rate: float) -> int:
    """Return the peak bytes of a run, minus the bytes of its result."""
    tracemalloc.start()
    run = simulated(Workload(rate=rate, num_prompts=count))
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.record["completed"] == count
    return most - kept


def lines() -> Iterator[Line]:
    capacity = simulated(Workload(num_prompts=10)).record["capacity_requests_per_s"]
    load = Workload(rate=SHARE * capacity, num_prompts=REQUESTS, input_len=str(PROMPT), output_len=str(ANSWER))
    arrivals = sample_workload(load).arrival_s.tolist()
    ours, plain = cpu_seconds(lambda: simulated(load), repeat=3), cpu_seconds(lambda: reference(arrivals), repeat=3)
    yield Line(f"`serve` of {REQUESTS:,} requests", ours, "a loop over every sequence in every pass", plain, 40)
    whole, half = peak(REQUESTS, load.rate), peak(REQUESTS // 2, load.rate)
    yield Line(f"its memory in addition to {REQUESTS:,} results", whole, "half as many", half, 2, format_bytes)
