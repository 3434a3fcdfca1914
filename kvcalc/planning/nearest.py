"""What comes nearest to a need and fails: of each kind of GPU, on each number of GPUs in all, one point."""

from collections.abc import Sequence
from typing import Any

from kvcalc.planning.block import Block
from kvcalc.planning.reasons import Point
from kvcalc.timing.deployment import Deployment

KEPT = 256  # blocks, before those of which no point is the nearest any more are dropped


class Nearest:
    """Points by row, a kind of GPU, and column, the GPUs in all: the one with the least excess, of equals the first split.

    excess: of each, infinite where there is none.
    """

    def __init__(self, most: int) -> None:
        import numpy as np

        self.most = most  # GPUs; points with more share a column
        self.excess = np.empty((0, most + 2))
        self._splits, self._blocks, self._places = (np.empty((0, most + 2), dtype=np.int64) for _ in range(3))
        self._kept: dict[int, Block] = {}
        self._taken = 0

    def add_row(self) -> None:
        """One more kind of GPU."""
        import numpy as np

        self.excess = np.pad(self.excess, ((0, 1), (0, 0)), constant_values=np.inf)
        self._splits, self._blocks, self._places = (
            np.pad(each, ((0, 1), (0, 0))) for each in (self._splits, self._blocks, self._places)
        )

    def take(self, block: Block, fails: Any, rows: Any) -> None:
        """Keep those points of a block that come nearer than all before them. fails, rows: of each point."""
        import numpy as np

        totals = np.minimum(block.gpus, self.most + 1)
        near = np.flatnonzero(fails & (block.excess <= self.excess[rows, totals]))
        cells = rows[near] * (self.most + 2) + totals[near]
        splits = np.array([split(deployment) for deployment in block.deployments])[block.which[near]]
        order = np.lexsort((splits, block.excess[near], cells))
        order = order[np.diff(cells[order], prepend=-1) > 0]
        near, splits = near[order], splits[order]
        cell = rows[near], totals[near]
        better = (block.excess[near] < self.excess[cell]) | (splits < self._splits[cell])
        near, cell = near[better], (rows[near[better]], totals[near[better]])
        if near.size:
            self.excess[cell], self._splits[cell] = block.excess[near], splits[better]
            self._blocks[cell], self._places[cell] = self._taken, np.arange(len(near))
            self._kept[self._taken] = block.only(near)
            self._taken += 1
            self._drop()

    def _drop(self) -> None:
        import numpy as np

        if len(self._kept) >= KEPT and self._taken % KEPT == 0:
            used = set(np.unique(self._blocks).tolist())
            self._kept = {number: block for number, block in self._kept.items() if number in used}

    def point(self, row: int, total: int) -> Point:
        """The point of a kind on so many GPUs."""
        return Point(self._kept[int(self._blocks[row, total])], int(self._places[row, total]))

    def least(self, kinds: Sequence[int]) -> Point | None:
        """What misses the need by the smallest factor; of equals the fewest GPUs. kinds: the rows that are looked at."""
        import numpy as np

        excess = np.full_like(self.excess, np.inf)
        excess[[*kinds]] = self.excess[[*kinds]]
        if not np.isfinite(excess).any():
            return None
        rows, totals = np.nonzero(excess == excess.min())
        return min((self.point(*cell) for cell in zip(rows.tolist(), totals.tolist(), strict=True)), key=lambda p: p.gpus)

    def below(self, costs: Any, limit: float) -> Point | None:
        """Of what costs less than a limit, what comes nearest; of equals the dearest. costs [rows, totals]."""
        import numpy as np

        rows, totals = np.nonzero(np.isfinite(self.excess) & (costs < limit))
        if not len(rows):
            return None
        first = np.lexsort((-costs[rows, totals], self.excess[rows, totals]))[0]
        return self.point(int(rows[first]), int(totals[first]))


def split(deployment: Deployment) -> int:
    """What tells equals apart, in order: the fewest GPUs of a replica, then the most tensor parallelism, then dp and ep."""
    ranks = deployment.parallelism
    return (((ranks.gpus << 13) - ranks.tp << 13) + ranks.dp << 13) + ranks.ep
