"""The best of a grid: what is kept of the blocks that go by, and the answer that they come to.

With prices the cheapest that meets the need comes first, then the lower TPOT. Without, GPUs of different kinds are not ranked
against each other: of each kind the one with the fewest GPUs, then the lower TPOT.

A prediction is never ranked against a bound. If predictions meet the need, only they are ranked, and the GPUs without a
calibration are listed beside them. If only bounds meet it, the bounds are ranked.
"""

from collections.abc import Collection, Mapping
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
    cheaper than the first, or takes fewer of its GPUs, and fails. nearest: of all that fail. front: of what is ranked. All
    of these have times of one kind, predictions or bounds.
    unranked: the best of every other kind of GPU, whose bounds meet the need. hopeless: kinds whose bounds miss it, beside
    others with predictions. bounds_only: whether bounds are ranked although
    GPUs with predictions were looked at. fronts: of predictions and of bounds, by `is_bound`.
    looked, met: points in all, and that meet the need.
    """

    need: Need
    best: list[Point]
    kinds: list[Point]
    cheaper: Point | None
    nearest: Point | None
    unranked: list[Point]
    hopeless: list[str]
    bounds_only: bool
    fronts: Mapping[bool, Front]
    looked: int
    met: int
    prices: Mapping[str, float]

    @property
    def listed(self) -> list[Point]:
        """The points that records are made of: the ranked ones, else the nearest, then at most five of the unranked."""
        return [*(self.best or ([self.nearest] if self.nearest else [])), *self.unranked[:FIVE]]

    @property
    def front(self) -> Front:
        return self.fronts[is_bound(self.listed[0])] if self.listed else self.fronts[False]

    @property
    def basis(self) -> str:
        """What the ranked times rest on: one of calibrated, scaled, bound, or the first two."""
        shown = [p.deployment.time_basis for p in (*self.best, *([self.nearest] if self.nearest else []))]
        return " and ".join(dict.fromkeys(shown))


def is_bound(point: Point) -> bool:
    """Return whether a point's times are datasheet bounds rather than predictions."""
    return point.deployment.calibration is None


class Tally:
    """What is kept of the blocks of one model under one need. prices: of an hour of a GPU, by its name; none for no prices."""

    def __init__(self, need: Need, max_gpus: int, prices: Mapping[str, float]) -> None:
        self.need, self.most, self.prices = need, max_gpus, prices
        self.fronts = {False: Front(), True: Front()}
        self.looked = self.met = 0
        self._best: dict[str, list[tuple[Key, Point]]] = {}  # of each kind the first five
        self._rows: dict[str, int] = {}  # of each kind, in what follows
        self._bounds: dict[str, bool] = {}  # of each kind, whether its times are bounds
        self._fifth: Any = None  # the cost of the fifth best
        self._near = Nearest(max_gpus)

    def take(self, block: Block) -> None:
        """Look at the points of a block, and keep what may be part of the answer."""
        import numpy as np

        self.looked += len(block.counts)
        kinds = [deployment.gpu.name for deployment in block.deployments]
        self._bounds |= {one.gpu.name: one.calibration is None for one in block.deployments}
        bound = np.array([self._bounds[name] for name in kinds])[block.which]
        rows = np.array([self._row(name) for name in kinds])[block.which]
        prices = np.array([self.prices[name] if self.prices else 1.0 for name in kinds])[block.which]
        meets = block.failing == MEETS
        self.met += int(meets.sum())
        self._rank(block, meets, rows, block.gpus * prices)
        self._near.take(block, self._fails(block, ~meets), rows)
        for basis, front in self.fronts.items():
            tpot = np.where(bound == basis, block.tpot, np.nan)
            front.take(tpot, block.rate_per_gpu / prices, lambda places: points_of(block.only(places)))

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
        predicted = {name for name, bound in self._bounds.items() if not bound}
        met = self._best.keys()
        ranked = predicted if predicted and (predicted & met or not met) else self._bounds.keys() - predicted
        firsts = sorted((kept[0] for kept in self._best.values()), key=lambda found: found[0])
        heads = [found for found in firsts if found[1].gpu in ranked]
        every = sorted((found for kept in self._best.values() for found in kept), key=lambda found: found[0])
        every = [found for found in every if found[1].gpu in ranked]
        if not self.prices:
            shown = {id(point) for _, point in heads}
            every = [*heads, *(found for found in every if id(found[1]) not in shown)]
        best = [point for _, point in every[:FIVE]]
        return Answer(
            need=self.need,
            best=best,
            kinds=[point for _, point in heads],
            cheaper=self._cheaper(best, ranked),
            nearest=self._near.least([self._rows[name] for name in ranked]),
            unranked=[point for _, point in firsts if point.gpu not in ranked],
            hopeless=[name for name, bound in self._bounds.items() if bound and predicted and name not in met],
            bounds_only=bool(predicted) and not predicted & ranked,
            fronts=self.fronts,
            looked=self.looked,
            met=self.met,
            prices=self.prices,
        )

    def _cheaper(self, best: list[Point], ranked: Collection[str]) -> Point | None:
        """Of what costs less than the first and fails, what comes nearest; its kind alone where kinds are not ranked."""
        import numpy as np

        if not best:
            return None
        first = best[0].gpu
        compared = ranked if self.prices else {first}
        each: Any = [self.prices.get(kind, 1.0) if kind in compared else np.inf for kind in self._rows]
        limit = best[0].gpus * self.prices.get(first, 1.0)
        return self._near.below(np.outer(each, np.maximum(np.arange(self.most + 2), 1)), limit)
