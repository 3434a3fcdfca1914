"""Time passes: one pass of a 61-layer mixture of experts with its roofline, and a sweep over a million decode
steps.

The million steps have random batch sizes and contexts. They are computed as arrays in blocks of 16,384
points, which fit in the CPU's cache.
"""

from collections.abc import Iterator

import numpy as np
from bench import ADDITIONS, Line, cpu_seconds, thousand_additions
from numpy.typing import NDArray

from kvcalc import Batch, Gpu, Model, bounds, forward, load_gpu, load_model
from kvcalc.gpu.gpu import total_seconds

POINTS, BLOCK = 1_000_000, 16_384
Floats = NDArray[np.float64]


def step_seconds(model: Model, gpu: Gpu, context: int | Floats, batch_size: int | Floats) -> float | Floats:
    """Return the bound of a decode step in seconds, or an array of bounds if the arguments are arrays."""
    found: float | Floats = total_seconds(bounds(forward(model, Batch.decode(context, batch_size)), gpu))
    return found


def sweep(model: Model, gpu: Gpu, contexts: Floats, sizes: Floats) -> Floats:
    """Compute the bound of every point, block by block."""
    found = np.empty(len(contexts))
    for at in range(0, len(contexts), BLOCK):
        part = slice(at, at + BLOCK)
        found[part] = step_seconds(model, gpu, contexts[part], sizes[part])
    return found


def multiplied(contexts: Floats, sizes: Floats) -> Floats:
    """Run the yardstick of a sweep: compute x · y + x of every point in equal blocks."""
    found = np.empty(len(contexts))
    for at in range(0, len(contexts), BLOCK):
        part = slice(at, at + BLOCK)
        found[part] = contexts[part] * sizes[part] + contexts[part]
    return found


def lines() -> Iterator[Line]:
    gpu, random = load_gpu("h100"), np.random.default_rng(0)
    contexts, sizes = random.integers(1, 131_073, POINTS).astype(float), random.integers(1, 513, POINTS).astype(float)
    adding, product = cpu_seconds(thousand_additions, 2000), cpu_seconds(lambda: multiplied(contexts, sizes), repeat=9)
    for name in ("deepseek-v3", "deepseek-v3.2", "qwen3-235b-a22b", "llama-3.1-8b"):
        model = load_model(name)
        checked = sweep(model, gpu, contexts[:3], sizes[:3])
        for found, context, size in zip(checked, contexts, sizes, strict=False):
            assert abs(found / step_seconds(model, gpu, int(context), int(size)) - 1) < 1e-9
        spent = cpu_seconds(lambda model=model: step_seconds(model, gpu, 8192, 8), 50)
        yield Line(f"a pass of {name} with its roofline, {model.layers} layers", spent, ADDITIONS, adding, 60)
        seconds = cpu_seconds(lambda model=model: sweep(model, gpu, contexts, sizes), repeat=3)
        yield Line(f"a sweep of {name}, {POINTS:,} decode steps", seconds, "x·y + x of as many points", product, 1600)
