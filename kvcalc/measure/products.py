"""Products of few rows: what this machine takes for each element of weights that come from memory.

A square product is the best that a machine does. A step multiplies a few rows by weights that it has to read, and that a
library packs into its own order first: neither is paid for by so few rows. So the time of an element of the weights is
measured at some numbers of rows, and taken in a straight line between them.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from kvcalc.measure.cache import DTYPES
from kvcalc.measure.device import Machine
from kvcalc.measure.timing import once

WIDTHS = 512, 2048  # of the square weights that products are measured with, at least and at most
TOGETHER = {"cpu": 4, "cuda": 64}  # products in one sample
PAST_CACHE = 4  # weights rotate over so many times the last-level cache, or over as many bytes as a model has
USUAL_WIDTH, REPEATS = 1024, 9


class Products(NamedTuple):
    """x [rows, k] · W [k, n]: seconds for each of the k·n elements of W, at so many rows, in ascending order."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def taken(self, rows: float, elements: float) -> float:
        """Seconds of a product: in a straight line between measured rows, by row beyond the most, as the fewest below."""
        if rows >= self.rows[-1]:
            return self.seconds[-1] * elements * rows / self.rows[-1]
        if rows <= self.rows[0]:
            return self.seconds[0] * elements
        at = next(i for i, measured in enumerate(self.rows) if rows < measured)
        share = (rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return elements * (self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1]))


class Weights:
    """Square matrices, taken in turn, so that each has left the caches when its turn comes again."""

    def __init__(self, machine: Machine, dtype: str, width: int, size: int) -> None:
        """width: of the residual that they stand for. size: bytes of all weights of the model."""
        self.machine, self.dtype = machine, DTYPES[dtype]
        self.width = min(max(width, WIDTHS[0]), WIDTHS[1])
        one = self.width**2 * self.dtype.itemsize
        count = max(1, min(size, PAST_CACHE * machine.cache_bytes, machine.free_bytes() // 4) // one)
        first = torch.randn(self.width, self.width, device=machine.device).mul_(self.width**-0.5).to(self.dtype)
        self.matrices = [first, *(first.clone() for _ in range(count - 1))]
        self.turn = 0

    def seconds(self, rows: int) -> float:
        """Seconds for each element of the weights, of products of so many rows."""
        x = torch.ones(rows, self.width, dtype=self.dtype, device=self.machine.device)
        count = TOGETHER[self.machine.device.type]
        chosen = [self.matrices[(self.turn + i) % len(self.matrices)] for i in range(count)]
        self.turn = (self.turn + count) % len(self.matrices)
        return once(lambda: [F.linear(x, w) for w in chosen], self.machine) / count / self.width**2


def measured_products(machine: Machine, dtype: str, rows: Sequence[int], size: int) -> Products:
    """Medians at each of `rows`, over `size` bytes of weights at most."""
    weights = Weights(machine, dtype, USUAL_WIDTH, size)
    found = [[weights.seconds(count) for count in rows] for _ in range(REPEATS)]
    return Products(tuple(rows), tuple(statistics.median(column) for column in zip(*found, strict=True)))
