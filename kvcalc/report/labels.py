"""Where texts stand on a picture, in pixels: at the data, apart from each other, and never over a line, a point or an edge."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvcalc.report.boxes import Places, anchor, boxes_along, text_box
from kvcalc.report.looks import unwrapped, wrapped

REACH = (0.8, 1.2, 1.6, 2.6, 3.8, 5.4, 7.5, 10.0, 13.0)  # distances from a point that are tried, in heights of the text
NEAR = 1.6  # so far from its mark a text is its point's without a line that joins them, and a line may touch what it lies on
SIDES = [
    (math.cos(math.pi * n / 8), 1.2 * math.sin(math.pi * n / 8)) for n in (0, 8, 14, 2, 6, 10, 4, 12, 1, 15, 7, 9, 3, 13, 5, 11)
]
SLID = (0.8, 0.2, 0.97, 0.03)  # where a text above or below its point has it, from its left edge to its right, but in the middle
WAYS = [*((0.5, way) for way in SIDES), *((slide, way) for slide in SLID for way in SIDES if abs(way[0]) < 0.3)]
HEIGHTS = [n / 100 for up in range(96, 50, -3) for n in (up, 100 - up)]  # on the axes, where an upright line may be named
BESIDE = 0.15  # heights of the text left free at its sides
SCALED = 0.97  # of a size in proportion, as texts are no more than about as tall as that
ILL, LOST = 1, 2  # of a label's place
SHARES = tuple(n / 20 for n in range(20, 9, -1))  # of the size of labels right of the axes, until they fit
LINES_OF_NAME = 5
APART = 0.3  # of their size, between labels right of the axes


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of intervals of these sizes, as near to `wanted` as they can be without touching, within low to high.

    The least squares of how far they move; where all together do not fit, they begin at `low` and run over `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    starts = list(itertools.accumulate((sizes[i] for i in order), initial=0.0))
    blocks: list[tuple[float, int]] = []  # (mean shift of the block, how many)
    for shift in (wanted[i] - sizes[i] / 2 - start for i, start in zip(order, starts, strict=False)):
        blocks.append((shift, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, few), (two, more) = blocks[-2:]
            blocks[-2:] = [((one * few + two * more) / (few + more), few + more)]
    most = max(low, high - starts[-1])
    shifts = [min(max(shift, low), most) for shift, count in blocks for _ in range(count)]
    found = [0.0] * len(wanted)
    for i, start, shift in zip(order, starts, shifts, strict=False):
        found[i] = start + shift + sizes[i] / 2
    return found


def fitting(axes: Any, labels: Sequence[Any], size: float, letters: int, renderer: Any) -> float:
    """The size, at most `size`, in which labels right of the axes stand above each other.

    letters: of a line of that size; smaller ones have as many more as they are narrower.
    """
    height = axes.get_window_extent(renderer).height
    for share in SHARES:
        needed = sum(_heights(labels, share * size, int(letters / share), renderer))
        if needed <= height:
            return size * share
    return float(size * share * SCALED * height / needed)


def ranged(axes: Any, labels: Sequence[Any], size: float, letters: int, renderer: Any) -> None:
    """Labels of a size right of the axes, each as near to the height of its line's end as the others leave room, and in an order
    in which the lines to them do not cross."""
    frame = axes.get_window_extent(renderer)
    places, heights = [anchor(text) for text in labels], _heights(labels, size, letters, renderer)
    wanted = [y for _, y in places]
    for _ in labels:
        centres = spread(wanted, heights, frame.y0, frame.y1)
        ways = [  # a level comes from far left, as high as it is
            (x, y, centre) if text.xycoords == "data" else (frame.x0, y, y)
            for text, (x, y), centre in zip(labels, places, centres, strict=True)
        ]
        upwards = itertools.pairwise(sorted(range(len(ways)), key=centres.__getitem__))
        right = float(labels[0].anncoords.transform((1, 0))[0])
        crossed = next(((a, b) for a, b in upwards if _crossing(ways[a], ways[b], right)), None)
        for text, centre in zip(labels, centres, strict=True):
            text.set_position((1, (centre - frame.y0) / frame.height))
        if not crossed:
            break
        a, b = crossed
        wanted[a], wanted[b] = max(wanted[a], wanted[b]) + 0.01, min(wanted[a], wanted[b])  # though they be at one height


def _crossing(low: tuple[float, ...], high: tuple[float, ...], right: float) -> bool:
    """Whether of two lines, each from x and y to a height at the right, that which ends lower begins above the other."""
    start = max(low[0], high[0])
    below, above = (y + (end - y) * (start - x) / max(right - x, 1.0) for x, y, end in (low, high))
    return below > above + 1


def _heights(labels: Sequence[Any], size: float, letters: int, renderer: Any) -> list[float]:
    """Pixels that labels of a size take above each other, in lines of so many letters."""
    for text in labels:
        text.set(fontsize=size, text=wrapped(unwrapped(text.get_text()), letters, LINES_OF_NAME, even=True))
    return [text_box(t, renderer).height + APART * size * t.figure.dpi / 72 for t in labels]


class Spot(NamedTuple):
    """A place for a point's label: of the text, of the way to it from its point, and of the line that joins them, as boxes;
    offset: in points; side: 0 to 1, which side of the text faces the point; height: of the point itself, where that may move."""

    place: tuple[float, float, float, float]
    way: Any
    leader: Any
    offset: tuple[float, float]
    side: float
    height: float


class Room(NamedTuple):
    """What is drawn within axes: all of it, of that the texts put before, and the lines that join texts to what they name;
    beyond: whether there is room for names right of the axes, as small multiples have none."""

    taken: Places
    texts: Places
    joints: Places
    beyond: bool = True


def beside(text: Any, marks: Any, room: Room, inside: Any, renderer: Any) -> int:
    """Put a point's label at the nearest free place within a box, and take the place: 0, or ILL where it may be read as that of
    another; LOST where there is none, where the way out to the right is free and shorter than one that crosses what is drawn, or
    passes no other mark where each place is ill.

    marks: all that are drawn, as `marks_on` has them, of whose none it is to look where there is another place, but of its own
    and of those without a text above and below that; nor is it to stand beyond an upright line. One that stands further away is
    joined to its point by a line, which crosses nothing that is drawn where there is such a place, elsewhere no other such line
    if that can be and the least of the rest, and none of the texts anywhere.
    """
    import numpy as np

    found = least = None
    pixels = text.figure.dpi / 72
    own = np.array([*anchor(text), text.arrowprops["shrinkB"] * pixels])
    away = np.abs(marks[:, :2] - own[:2])
    others = marks[(np.hypot(*away.T) > max(2.0, own[2])) & ((away[:, 0] > 1) | (marks[:, 3] > 0))]
    levels = _uprights(text.axes)
    for spot in _spots(text, room.taken, inside, renderer):
        joint = spot.way if len(spot.leader) else spot.leader  # in its whole length
        if room.texts.touched(joint):
            continue
        faults = (
            _misread(spot, own, others, NEAR * text.get_fontsize() * pixels),
            any((at - own[0]) * (at - (spot.place[0] + spot.place[2]) / 2) < 0 for at in levels),
            room.joints.touched(joint) > 0,
            room.taken.touched(spot.leader),
        )
        if least is None or faults < least:
            found, least = spot, faults
        if not any(faults):
            break
    if not (found and least):
        return LOST
    passed = (others[:, 0] > own[0]) & (np.abs(others[:, 1] - own[1]) < others[:, 2] + own[2])
    crossed = least[-1] and len(found.leader) > _way_out(text, room, inside)
    if room.beyond and (crossed or (least[0] and not passed.any())):
        return LOST
    text.xy = text.xy[0], found.height
    text.set_position(found.offset)
    text.set_ha({0.0: "left", 1.0: "right"}.get(found.side, "center"))
    text.arrow_patch.set_visible(len(found.leader) > 0)
    room.texts.take(np.array([found.place]))
    joint = found.way if len(found.leader) else found.leader
    room.joints.take(joint)
    room.taken.take(np.array([found.place, *joint.tolist()]))
    return ILL if least[0] else 0


def _uprights(axes: Any) -> list[float]:
    """Where lines from the bottom of the axes to their top stand, in pixels."""
    places = [line.get_xdata()[0] for line in axes.get_lines() if line.get_transform() == axes.get_xaxis_transform("grid")]
    return [float(axes.transData.transform((x, 1))[0]) for x in places]


def _way_out(text: Any, room: Room, inside: Any) -> float:
    """Pixels from a point to the right edge of a box where nothing is drawn between them, else infinite."""
    x, y = anchor(text)
    begun = x + (text.get_fontsize() + text.arrowprops["shrinkB"]) * text.figure.dpi / 72
    return (
        inside.x1 - x
        if begun >= inside.x1 or not room.taken.touched(boxes_along([(begun, y), (inside.x1, y)], 1, 1))
        else math.inf
    )


def _misread(spot: Spot, own: Any, others: Any, near: float) -> bool:
    """Whether a text stands as near to another mark as to its own; joined to it by a line, it within half of `near` pixels of
    one, or its line within a quarter of them."""
    if not len(others):
        return False
    if not len(spot.leader):
        return bool(_distances([spot.place], others).min() <= _distances([spot.place], own[None]).min())
    return bool(_distances([spot.place], others).min() < near / 2 or _distances(spot.way, others).min() < near / 4)


def _distances(boxes: Any, marks: Any) -> Any:
    """Pixels from each of some boxes to the edge of each mark."""
    import numpy as np

    low, high, places = np.asarray(boxes)[:, None, :2], np.asarray(boxes)[:, None, 2:], marks[:, :2]
    return np.linalg.norm(np.maximum(np.maximum(low - places, places - high), 0), axis=2) - marks[:, 2]


def _spots(text: Any, taken: Places, inside: Any, renderer: Any) -> Iterator[Spot]:
    """The free places within a box, the nearest first; a line begins where it has left its mark and what that lies on."""
    gap, pixels, box = text.get_fontsize(), text.figure.dpi / 72, text_box(text, renderer)
    heights = (text.xy[1],) if text.xycoords == "data" else HEIGHTS
    for height, reach, (slide, (dx, dy)) in itertools.product(heights, REACH if len(heights) == 1 else REACH[:1], WAYS):
        text.xy = text.xy[0], height
        x, y = anchor(text)
        at_x, at_y = x + dx * gap * reach * pixels, y + dy * gap * reach * pixels
        side = 0.0 if dx > 0.3 else 1.0 if dx < -0.3 else slide
        left, low = at_x - side * box.width, at_y - box.height / 2
        aside = max(2.0, BESIDE * gap * pixels)
        place = (left - aside, low - 2, left + box.width + aside, low + box.height + 2)
        if not (inside.x0 <= place[0] and place[2] <= inside.x1 and inside.y0 <= place[1] and place[3] <= inside.y1):
            continue
        if not taken.free(place):
            continue
        mark = text.arrowprops["shrinkB"]
        way = boxes_along([(x, y), (left + box.width / 2, low + box.height / 2)], 1, 1)
        leader = way[int((NEAR * gap + mark) * pixels) :] if gap * (reach - NEAR) > mark else way[:0]
        slid = (0.5 - side) * box.width / pixels if side == slide else 0.0
        yield Spot(place, way, leader, (dx * gap * reach + slid, dy * gap * reach), side, height)
