"""How long a pass takes to work out: one of a 61-layer mixture of experts under 1 ms, and a million at a million a second.

The million are decode steps at random batches and contexts, as arrays in blocks of 16,384 points, which stay in the
CPU's cache. CPU time of all threads is taken (elementwise NumPy has one), the least of several repeats: on a shared machine
everything else only adds.
Exit status 1 when a target is missed.

    python benchmarks/forward.py
"""

import sys
import time
import timeit

import numpy as np
from numpy.typing import NDArray

from kvcalc import Batch, Gpu, Model, forward, load_gpu, load_model, roofline
from kvcalc.gpu.roof import total_seconds

POINTS, BLOCK = 1_000_000, 16_384
MOST_MS, LEAST_RATE = 1.0, 1e6
Floats = NDArray[np.float64]


def step_seconds(model: Model, gpu: Gpu, context: int | Floats, batch_size: int | Floats) -> float | Floats:
    """The bound of a decode step, or of as many as the arrays have points."""
    found: float | Floats = total_seconds(roofline(forward(model, Batch.decode(context, batch_size)), gpu))
    return found


def sweep(model: Model, gpu: Gpu, contexts: Floats, sizes: Floats) -> Floats:
    """The bound of every point, block by block."""
    found = np.empty(len(contexts))
    for at in range(0, len(contexts), BLOCK):
        part = slice(at, at + BLOCK)
        found[part] = step_seconds(model, gpu, contexts[part], sizes[part])
    return found


def least_seconds(call: object, number: int, repeat: int) -> float:
    """CPU seconds of one call, the best of `repeat`."""
    return min(timeit.repeat(call, number=number, repeat=repeat, timer=time.process_time)) / number  # type: ignore[arg-type]


def main() -> int:
    gpu, random, missed = load_gpu("h100"), np.random.default_rng(0), False
    contexts, sizes = random.integers(1, 131_073, POINTS).astype(float), random.integers(1, 513, POINTS).astype(float)
    for name in ("deepseek-v3", "deepseek-v3.2", "qwen3-235b-a22b", "llama-3.1-8b"):
        model = load_model(name)
        spent = 1e3 * least_seconds(lambda model=model: step_seconds(model, gpu, 8192, 8), number=50, repeat=9)
        seconds = least_seconds(lambda model=model: sweep(model, gpu, contexts, sizes), number=1, repeat=3)
        checked = sweep(model, gpu, contexts[:3], sizes[:3])
        for found, context, size in zip(checked, contexts, sizes, strict=False):
            assert abs(found / step_seconds(model, gpu, int(context), int(size)) - 1) < 1e-9
        rate = POINTS / seconds
        missed |= spent > MOST_MS or rate < LEAST_RATE
        print(f"{name}, {model.layers} layers: forward + roofline {spent:.2f} ms, {spent / MOST_MS:.2f} of its target; ", end="")
        print(f"{POINTS:,} points in {seconds:.2f} s, {rate / 1e6:.2f} million/s, {rate / LEAST_RATE:.2f} times its target")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
