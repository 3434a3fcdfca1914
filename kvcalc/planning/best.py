"""The best of a grid: what is kept of the blocks that go by, and the answer that they come to.

With prices the cheapest that meets the need comes first, then the lower TPOT. Without, GPUs of different kinds are not ranked
against each other: of each kind the one with the fewest GPUs, then the lower TPOT.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.planning.block import MEETS, MEMORY, Block
from kvcalc.planning.front import Front
from kvcalc.planning.nearest import Nearest, split
from kvcalc.planning.need import Need
from kvcalc.planning.reasons import Point, points_of

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
        shown = [p.deployment.time_basis for p in (*self.best, *([self.nearest] if self.nearest else []))]
        return " and ".join(dict.fromkeys(shown))


class Tally:
    """What is kept of the blocks of one model under one need. prices: of an hour of a GPU, by its name; none for no prices."""

    def __init__(self, need: Need, max_gpus: int, prices: Mapping[str, float]) -> None:
        self.need, self.most, self.prices = need, max_gpus, prices
        self.front = Front()
        self.looked = self.met = 0
        self._best: dict[str, list[tuple[Key, Point]]] = {}  # of each kind the first five
        self._rows: dict[str, int] = {}  # of each kind, in what follows
        self._fifth: Any = None  # the cost of the fifth best
        self._near = Nearest(max_gpus)

    def take(self, block: Block) -> None:
        """Look at the points of a block, and keep what may be part of the answer."""
        import numpy as np

        self.looked += len(block.counts)
        kinds = [deployment.gpu.name for deployment in block.deployments]
        rows = np.array([self._row(name) for name in kinds])[block.which]
        prices = np.array([self.prices[name] if self.prices else 1.0 for name in kinds])[block.which]
        meets = block.failing == MEETS
        self.met += int(meets.sum())
        self._rank(block, meets, rows, block.gpus * prices)
        self._near.take(block, self._fails(block, ~meets), rows)
        self.front.take(block.tpot, block.rate_per_gpu / prices, lambda places: points_of(block.only(places)))

    def _row(self, name: str) -> int:
        """The row of a kind of GPU, new where it was not seen before."""
        import numpy as np

        if name not in self._rows:
            self._near.add_row()
            self._fifth = np.full(1, np.inf) if self._fifth is None else np.append(self._fifth, np.inf)
            self._rows[name] = len(self._rows)
        return self._rows[name]

    def _rank(self, block: Block, meets: Any, rows: Any, costs: Any) -> None:
        """The best of each deployment of a block, where it is among the five best of its kind: a deployment stands once."""
        import numpy as np

        at = np.flatnonzero(meets & (costs <= self._fifth[rows]))
        order = at[np.lexsort((np.nan_to_num(block.tpot[at]), costs[at], block.which[at]))]
        firsts = order[np.diff(block.which[order], prepend=-1) > 0]
        for first, point in zip(firsts, points_of(block.only(firsts)), strict=True):
            kept = self._best.setdefault(point.gpu, [])
            kept.append(((float(costs[first]), float(np.nan_to_num(block.tpot[first])), split(point.deployment)), point))
            kept.sort(key=lambda found: found[0])
            del kept[FIVE:]
            if len(kept) == FIVE:
                self._fifth[rows[first]] = kept[-1][0][0]

    @staticmethod
    def _fails(block: Block, fails: Any) -> Any:
        """Which points are told as failing: more sequences than fit are but a setting without users, unless none do."""
        if block.need.users:
            return fails
        return fails & ((block.failing != MEMORY) | (block.capacity < block.counts.min()))

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
            nearest=self._near.least(),
            front=self.front,
            looked=self.looked,
            met=self.met,
            prices=self.prices,
        )

    def _cheaper(self, best: list[Point]) -> Point | None:
        """Of what costs less than the first and fails, what comes nearest; its kind alone where kinds are not ranked."""
        import numpy as np

        if not best:
            return None
        each: Any = [self.prices[kind] if self.prices else 1.0 if kind == best[0].gpu else np.inf for kind in self._rows]
        limit = best[0].gpus * (self.prices[best[0].gpu] if self.prices else 1.0)
        return self._near.below(np.outer(each, np.maximum(np.arange(self.most + 2), 1)), limit)
