"""How long 10,000 requests take to simulate: 1000 tokens in, 200 out, llama-3.1-8b on an H100 at 80 % of its
capacity, in calibrated times.

CPU time of one core against that of a plain Python loop over the same tokens: it visits every sequence in every pass, with a
line of arithmetic in place of the times of the model. Memory is the peak that Python's allocator sees above the requests and
their results, for 10,000 requests and for half of them. Exit status 1 above a target.

    python benchmarks/serve.py
"""

import sys
import time
import tracemalloc
from collections import deque

from kvcalc import load_gpu, load_model
from kvcalc.serving.run import Load, Run, ServerSettings, serve
from kvcalc.timing.calibration import load_calibration
from kvcalc.timing.deployment import Deployment

REQUESTS, PROMPT, ANSWER, SHARE = 10_000, 1000, 200, 0.8
MOST_SECONDS, MOST_RATIO, MOST_GROWTH = 20.0, 40.0, 16 << 20


def simulated(load: Load) -> Run:
    """One run of our simulator."""
    gpu = load_gpu("h100")
    deployment = Deployment(load_model("llama-3.1-8b"), gpu, calibration=load_calibration(gpu, "vllm"))
    return serve(deployment, load.drawn(), load, ServerSettings())


def reference(arrivals: list[float]) -> float:
    """The time at which the last request is done, by a loop over sequences: a pass takes 5 ms, and 16 µs a token."""
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
    """Bytes that a run takes at most beyond what it returns."""
    tracemalloc.start()
    run = simulated(Load(rate=rate, num_prompts=count))
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.record["completed"] == count
    return most - kept


def main() -> int:
    capacity = simulated(Load(num_prompts=10)).record["capacity_requests_per_s"]
    load = Load(rate=SHARE * capacity, num_prompts=REQUESTS, input_len=str(PROMPT), output_len=str(ANSWER))
    start = time.process_time()
    run = simulated(load)
    ours = time.process_time() - start
    start = time.process_time()
    reference(load.drawn().arrival_s.tolist())
    plain = time.process_time() - start
    passes = run.record["passes"]
    print(f"{REQUESTS:,} requests at {load.rate:.1f}/s, {passes:,} passes, mean batch {run.record['mean_batch_size']:.1f}")
    print(f"CPU: {ours:.2f} s, target {MOST_SECONDS:.0f}; reference loop {plain:.2f} s")
    print(f"ratio {ours / plain:.1f}, target {MOST_RATIO:.0f}")
    half, whole = peak(REQUESTS // 2, load.rate), peak(REQUESTS, load.rate)
    print(f"peak memory: {half / 2**20:.1f} MiB for half of them, {whole / 2**20:.1f} MiB for all")
    return int(ours > MOST_SECONDS or ours / plain > MOST_RATIO or whole - half > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
