"""Products of few rows: what this machine takes for each element of weights that come from memory.

A square product is the best that a machine does. A step multiplies a few rows by weights that it has to read, and that a
library packs into its own order first: neither is paid for by so few rows. So the time of an element of the weights is
measured at some numbers of rows, and taken in a straight line between them.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.measure.cache import DTYPES
from kvcalc.measure.device import Machine
from kvcalc.measure.timing import once

WIDTH, TOGETHER = 1024, 4  # of square weights, and how many make a layer of them
SMALLEST = 16  # side of a matrix that counts as one: convolutions and vectors are none
PAST_CACHE = 4  # square weights rotate over so many times the last-level cache
REPEATS = 9


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
    """Layers of weights [outputs, inputs], taken in turn, so that each has left the caches when its turn comes again."""

    def __init__(self, machine: Machine, layers: Sequence[Sequence[Tensor]]) -> None:
        self.machine, self.turn = machine, 0
        matrices = [[w for w in layer if w.dim() == 2] for layer in layers]
        self.layers = [[w for w in layer if min(w.shape) >= SMALLEST] or layer for layer in matrices]

    def seconds(self, rows: int) -> float:
        """Seconds for each element of the next layer's weights, of products of so many rows with each of them."""
        layer = self.layers[self.turn]
        self.turn = (self.turn + 1) % len(self.layers)
        inputs = {width: layer[0].new_ones(rows, width) for width in {w.shape[1] for w in layer}}
        taken = once(lambda: [F.linear(inputs[w.shape[1]], w) for w in layer], self.machine)
        return taken / sum(w.numel() for w in layer)


def measured_products(machine: Machine, dtype: str, rows: Sequence[int], size: int) -> Products:
    """Medians at each of `rows`, over `size` bytes of square weights at most."""
    one = torch.randn(WIDTH, WIDTH, device=machine.device).mul_(WIDTH**-0.5).to(DTYPES[dtype])
    room = min(size, PAST_CACHE * machine.cache_bytes, machine.free_bytes() // 4)
    count = max(1, room // (TOGETHER * one.untyped_storage().nbytes()))
    weights = Weights(machine, [[one.clone() for _ in range(TOGETHER)] for _ in range(count)])
    found = [[weights.seconds(number) for number in rows] for _ in range(REPEATS)]
    return Products(tuple(rows), tuple(statistics.median(column) for column in zip(*found, strict=True)))
