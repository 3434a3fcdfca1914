"""The operators of passes as points under a roof: which lie together, what they are called, and which of them are named."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvcalc.layers.cost import Role

KINDS = ("attention", "products with weights")
ROLES = {Role.CORE: "attention", Role.PROJECTION: "projections", Role.FFN: "FFN", Role.HEAD: "LM head"}
MOST_STEPS = 6  # of a sweep, with a label
MOST_NAMES = 4  # operators of a label, and steps of a sweep that it lists
TOGETHER = 1.4  # times the intensity of the one before, up to which operators lie together
NEAR = 4.0  # times the intensity of a group, within which next to nothing joins it
LEAST_SHARE = 0.02  # of a pass, below which products lie apart without a word of their own for the others
CALIBRATED = "as calibrated"
SWEPT = {"batch_size": "batch", "context": "context"}
Row = dict[str, Any]


class Mark(msgspec.Struct, frozen=True, eq=False):
    """Operators of one pass that lie together: a point. asked: a record of the pass; at: the roof under which it lies."""

    kind: int
    what: str
    x: float
    y: float
    share: float
    predicted: float | None
    asked: Row
    at: str


def drawn(row: Row) -> bool:
    return bool(row["flops"] and row["intensity"] and row["role"] in set(ROLES))


def marks_of(passes: Sequence[Sequence[Row]]) -> list[Mark]:
    """The points of passes, the largest of each first; what lies in one group in each of them has one name."""
    grouped = [_groups(rows) for rows in passes]
    alone = all(map(_alone, grouped))
    return [mark for rows, groups in zip(passes, grouped, strict=True) for mark in _marks(rows, groups, alone)]


def _groups(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """The operators of one pass that lie together, attention first, by intensity; next to nothing joins what is near it."""
    groups: list[tuple[int, list[Row]]] = []
    for row in sorted(filter(drawn, rows[:-1]), key=lambda row: (row["role"] != Role.CORE, row["intensity"])):
        kind = int(row["role"] != Role.CORE)
        if not groups or groups[-1][0] != kind or row["intensity"] > TOGETHER * groups[-1][1][-1]["intensity"]:
            groups.append((kind, []))
        groups[-1][1].append(row)
    large = [group for group in groups if _share(group[1]) >= LEAST_SHARE]
    found = [*large]
    for kind, mine in [group for group in groups if group not in large]:
        apart = {abs(math.log(mine[0]["intensity"] / other[0]["intensity"])): other for k, other in large if k == kind}
        if min(apart, default=math.inf) < math.log(NEAR):
            apart[min(apart)].extend(mine)
        else:
            found.append((kind, mine))
    return found


def _alone(groups: Sequence[tuple[int, list[Row]]]) -> bool:
    """Whether all products of a pass but next to nothing are one group beside attention."""
    large = [kind for kind, mine in groups if _share(mine) >= LEAST_SHARE]
    return large.count(1) == 1 and any(kind == 0 for kind, _ in groups)


def _marks(rows: Sequence[Row], groups: Sequence[tuple[int, list[Row]]], alone: bool) -> list[Mark]:
    """The points of one pass, the largest first. alone: its products need no other name."""
    found = []
    for kind, mine in groups:
        flops, moved, bound = (sum(row[key] for row in mine) for key in ("flops", "bytes", "roofline_s"))
        timed = all(row["time_s"] for row in mine)
        predicted = flops / sum(row["time_s"] for row in mine) if timed else None
        biggest = max(mine, key=lambda row: float(row["roofline_s"]))
        share = _share(mine)
        what = KINDS[1] if alone and kind and share >= LEAST_SHARE else _called(mine)
        found.append(Mark(kind, what, flops / moved, flops / bound, share, predicted, rows[0], str(biggest["computed_in"] or "")))
    return sorted(found, key=lambda mark: -mark.share)


def _share(mine: Sequence[Row]) -> float:
    return sum(float(row["share"]) for row in mine)


def _called(rows: Sequence[Row]) -> str:
    """Operators by name, or of many their kinds."""
    names = dict.fromkeys(row["operator"] for row in rows)
    return ", ".join(names if len(names) <= MOST_NAMES else dict.fromkeys(ROLES[Role(row["role"])] for row in rows))


def words_at(marks: Sequence[Mark], swept: Sequence[str]) -> dict[Mark, str]:
    """The labels, each at the largest of the points that have it: what lies there, and at which steps of the sweep.

    Where attention and products both move, the ends of their ways alone; of many steps some, and the ends among them.
    """
    ways = _ways(marks)
    both = len({kind for (kind, _), places in ways.items() if len(places) > 1}) > 1
    found: dict[Mark, str] = {}
    for (kind, what), places in ways.items():
        several = both or [other for other, _ in ways].count(kind) > 1
        others = [place[0].x for who, there in ways.items() if who != (kind, what) for place in there]
        for mine in _some(_uncovered(places, others), 2 if both else MOST_STEPS):
            where = []
            for key in swept:
                here, every = ({mark.asked[key] for mark in some} for some in (mine, marks))
                where.append(f"every {SWEPT[key]}" if here == every else f"{SWEPT[key]} {listed(here)}")
            named = several or mine is places[0] or not where  # of one thing that moves the first says what it is
            found[max(mine, key=lambda mark: mark.share)] = ", ".join([what] * named + where)
    return found


def words_below(marks: Sequence[Mark], swept: Sequence[str]) -> dict[Mark, str]:
    """The labels of what laws say: where steps that lie at one place are told apart by them alone, the slowest of them, and the
    fastest where it is not near the bound either."""
    found: dict[Mark, str] = {}
    for places in _ways(marks).values():
        timed = sorted((mark for mark in places[0] if mark.predicted), key=lambda mark: mark.predicted or 0.0)
        if not (swept and timed and len(places) == 1):
            continue
        slow, fast = ((mark, mark.predicted or 0.0) for mark in (timed[0], timed[-1]))
        ends = [slow[0]] * (fast[1] > TOGETHER * slow[1]) + [fast[0]] * (fast[0].y > TOGETHER * fast[1] > TOGETHER**2 * slow[1])
        for mark in ends:
            found[mark] = ", ".join([CALIBRATED, *(f"{SWEPT[key]} {mark.asked[key]:,}" for key in swept)])
    return found


def _ways(marks: Sequence[Mark]) -> dict[tuple[int, str], list[list[Mark]]]:
    """The places of each kind and name, by intensity: those of their points that lie together."""
    together: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda m: (m.kind, m.what, m.x)):
        last = together[-1][-1] if together else None
        if not last or (last.kind, last.what) != (mark.kind, mark.what) or mark.x > TOGETHER * last.x:
            together.append([])
        together[-1].append(mark)
    ways: dict[tuple[int, str], list[list[Mark]]] = {}
    for mine in together:
        ways.setdefault((mine[0].kind, mine[0].what), []).append(mine)
    return ways


def _uncovered(places: list[list[Mark]], others: Sequence[float]) -> list[list[Mark]]:
    """The ends of a way, and what lies between them and not with points of another name, at these intensities."""
    inner = [mine for mine in places[1:-1] if all(mine[0].x > TOGETHER * x or mine[0].x * TOGETHER < x for x in others)]
    return [*places[:1], *inner, *places[1:][-1:]]


def _some(places: Sequence[list[Mark]], most: int) -> list[list[Mark]]:
    """As many, evenly from the first to the last."""
    steps = min(most, len(places)) - 1
    return [places[round(n * (len(places) - 1) / max(steps, 1))] for n in range(steps + 1)]


def listed(values: Iterable[int]) -> str:
    """1, 8, 64; of many the first and the last."""
    found = sorted({*values})
    return ", ".join(f"{n:,}" for n in found) if len(found) <= MOST_NAMES else f"{found[0]:,} to {found[-1]:,}"
