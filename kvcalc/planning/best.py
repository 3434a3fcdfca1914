"""The best of a grid: what is kept of the blocks that go by, and the answer that they come to.

With prices the cheapest that meets the need comes first, then the lower TPOT. Without, GPUs of different kinds are not ranked
against each other: of each kind the one with the fewest GPUs, then the lower TPOT.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.planning.front import Front
from kvcalc.planning.grid import MEETS, MEMORY, Block
from kvcalc.planning.need import Need
from kvcalc.planning.reasons import Point

FIVE = 5
Key = tuple[float, ...]  # what ranks a point: cost, TPOT, then its split, so that equals stand in one order


class Answer(NamedTuple):
    """What a grid comes to for one model and need.

    best: at most five. kinds: the best of every kind of GPU that meets the need. cheaper: what comes nearest of all that is
    cheaper than the first, or takes fewer of its GPUs, and fails. nearest: of all that fail. looked, met: points in all, and
    that meet the need.
    """

    need: Need
    best: list[Point]
    kinds: list[Point]
    cheaper: Point | None
    nearest: Point | None
    front: Front
    looked: int
    met: int
    prices: Mapping[str, float]

    @property
    def basis(self) -> str:
        """What the times rest on: one of calibrated, scaled, bound, or several where they were allowed to mix."""
        shown = [p.block.deployment.time_basis for p in (*self.best, *([self.nearest] if self.nearest else []))]
        return " and ".join(dict.fromkeys(shown))


class Tally:
    """What is kept of the blocks of one model under one need. prices: of an hour of a GPU, by its name; none for no prices."""

    def __init__(self, need: Need, max_gpus: int, prices: Mapping[str, float]) -> None:
        self.need, self.most, self.prices = need, max_gpus, prices
        self.front = Front()
        self.looked = self.met = 0
        self._best: dict[str, list[tuple[Key, Point]]] = {}
        self._missed: dict[str, Any] = {}  # of each kind the least excess, by GPUs in all
        self._near: dict[tuple[str, int], Point] = {}

    def take(self, block: Block) -> None:
        """Look at the points of a block, and keep what may be part of the answer."""
        self.looked += len(block.counts)
        price = self.prices[block.deployment.gpu.name] if self.prices else 1.0
        meets = block.failing == MEETS
        if meets.any():
            self.met += int(meets.sum())
            self._rank(block, meets, price)
        if not meets.all():
            self._note(block, ~meets)
        self.front.take(block.tpot, block.rate_per_gpu / price, lambda at: Point(block, at))

    def _rank(self, block: Block, meets: Any, price: float) -> None:
        """The best of a block, where it is among the five best of its kind: a deployment stands once."""
        import numpy as np

        kept = self._best.setdefault(block.deployment.gpu.name, [])
        at = np.flatnonzero(meets)
        costs, times = block.gpus[at] * price, np.nan_to_num(block.tpot[at])
        first = np.lexsort((times, costs))[0]
        kept.append(((float(costs[first]), float(times[first]), *_split(block)), Point(block, int(at[first]))))
        kept.sort(key=lambda found: found[0])
        del kept[FIVE:]

    def _note(self, block: Block, fails: Any) -> None:
        """Those of a block that miss the need by less than any other of their kind on as many GPUs."""
        import numpy as np

        gpu = block.deployment.gpu.name
        if not block.need.users:  # more sequences than fit are but a setting, unless none do
            fails = fails & ((block.failing != MEMORY) | (block.capacity < block.counts.min()))
        least = self._missed.setdefault(gpu, np.full(self.most + 2, np.inf))
        totals = np.minimum(block.gpus, self.most + 1)
        for at in np.flatnonzero(fails & (block.excess <= least[totals])):
            total = int(totals[at])
            if block.excess[at] < least[total] or _split(block) < _split(self._near[gpu, total].block):
                least[total] = block.excess[at]
                self._near[gpu, total] = Point(block, int(at))

    def answer(self) -> Answer:
        """What all blocks come to."""
        firsts = sorted((kept[0] for kept in self._best.values()), key=lambda found: found[0])
        every = sorted((found for kept in self._best.values() for found in kept), key=lambda found: found[0])
        if not self.prices:
            heads = {id(point) for _, point in firsts}
            every = [*firsts, *(found for found in every if id(found[1]) not in heads)]
        best = [point for _, point in every[:FIVE]]
        return Answer(
            need=self.need,
            best=best,
            kinds=[point for _, point in firsts],
            cheaper=self._cheaper(best),
            nearest=self._nearest(),
            front=self.front,
            looked=self.looked,
            met=self.met,
            prices=self.prices,
        )

    def _cheaper(self, best: list[Point]) -> Point | None:
        """Of what costs less than the first and fails, what comes nearest; its kind alone where kinds are not ranked."""
        if not best:
            return None
        below = [
            (-float(point.block.excess[point.at]), self._cost(gpu, total), point)
            for (gpu, total), point in self._near.items()
            if (self.prices or gpu == best[0].gpu) and self._cost(gpu, total) < self._cost(best[0].gpu, best[0].gpus)
        ]
        return max(below, key=lambda found: found[:2])[2] if below else None

    def _cost(self, gpu: str, total: int) -> float:
        return total * (self.prices[gpu] if self.prices else 1.0)

    def _nearest(self) -> Point | None:
        """What misses the need by the smallest factor; of equals the fewest GPUs."""
        found = [(point.block.excess[point.at], point.gpus, point) for point in self._near.values()]
        return min(found, key=lambda f: f[:2])[2] if found else None


def _split(block: Block) -> Key:
    """What tells equals apart: the fewest GPUs of a replica, then the most tensor parallelism."""
    ranks = block.deployment.parallelism
    return ranks.gpus, -ranks.tp, ranks.dp, ranks.ep
