"""Deployments of one model side by side: which of them a pass takes through the same operators."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvcalc.layers.ranks import Parallelism
from kvcalc.model.operators import handings
from kvcalc.timing.deployment import Deployment

Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


class Alike(NamedTuple):
    """Deployments of a fleet through whose layers a pass has the same operators: they differ by GPU and number of stages.

    places: in the fleet. near: ranks of a stage that stand on a node. kinds: one of each kind of GPU, which [deployments]: its
    place among these. handed [2, deployments]: how often stages hand on within a node, and to another.
    """

    places: Array
    near: int
    kinds: list[Deployment]
    which: Array
    handed: Array


def alike(fleet: Sequence[Deployment]) -> list[Alike]:
    """A fleet in parts that are timed at once."""
    import numpy as np

    parts: dict[tuple[int, bool], list[tuple[int, tuple[int, int]]]] = {}
    for at, one in enumerate(fleet):
        ranks = one.ranks
        key = ranks.near(ranks.tp * ranks.dp), bool(one.calibration)
        parts.setdefault(key, []).append((at, _handed(ranks)))
    found = []
    for (near, _), members in parts.items():
        kinds = {fleet[at].gpu.name: fleet[at] for at, _ in members}
        order = {name: number for number, name in enumerate(kinds)}
        which = np.array([order[fleet[at].gpu.name] for at, _ in members])
        handed = np.array([times for _, times in members]).T
        found.append(Alike(np.array([at for at, _ in members]), near, [*kinds.values()], which, handed))
    return found


@lru_cache(1 << 14)
def _handed(ranks: Parallelism) -> tuple[int, int]:
    return handings(ranks, range(ranks.pp - 1))
