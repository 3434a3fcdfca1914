"""Texts on a picture: their lines, and their positions in pixels, apart from all that is drawn.

Boxes are arrays [boxes, 4] of x0, y0, x1, y1.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

NAME_LETTERS = 28  # characters in a line of a label or of a bar's name
NAME_LINES = 5
BOX_STEP = 6  # pixels between the boxes that stand for a line
GLUE = "\0"  # stands for a space at which no line ends


def wrapped(text: str, width: int, max_lines: int, even: bool = False) -> str:
    """Return a text in lines of at most `width` characters.

    A line never ends behind a number or a sign such as ≥. Words longer than half a line may break
    after one of /_-, as in "meta-llama/" + "Llama-3.1".

    Args:
        even: Make the lines about equally long.
    """
    glued = re.sub(r"(?<!\S)(\(?\d[\d.,]*×?|[≥≤~−×])\s(?=\S)", rf"\1{GLUE}", text)
    pieces: list[str] = []
    for word in re.findall(r"\S+ ?", glued.replace("\n", " ")):
        is_long = len(word.rstrip(" ")) > width / 2
        pieces += re.findall(r".{4,}?[/_-]+(?=.{5})|.+", word) if is_long else [word]
    lines = _fill_lines(pieces, width)
    longest = max((len(piece.rstrip(" ")) for piece in pieces), default=0)
    while even and len(lines) > 1 and longest < width:
        width -= 1
        narrower = _fill_lines(pieces, width)
        if len(narrower) > len(lines):
            break
        lines = narrower
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], lines[max_lines - 1] + " …"]
    return "\n".join(lines).replace(GLUE, " ")


def _fill_lines(pieces: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece.rstrip(" ")) > width:
            lines.append("")
        while len(piece.rstrip(" ")) > width:
            lines[-1:] = [piece[:width], ""]
            piece = piece[width:]
        lines[-1] += piece
    return [line.rstrip(" ") for line in lines]


def text_box(text: Any, renderer: Any) -> Any:
    """Return the box of a text without the arrow of an annotation."""
    from matplotlib.text import Text

    return Text.get_window_extent(text, renderer)


def count_overlaps(boxes: Any, others: Any) -> int:
    """Return how many of `boxes` touch one of `others`."""
    import numpy as np

    one, two = (
        np.asarray(boxes, float).reshape(-1, 1, 4),
        np.asarray(others).reshape(1, -1, 4),
    )
    is_touching = (one[..., :2] < two[..., 2:]) & (two[..., :2] < one[..., 2:])
    return int(np.any(np.all(is_touching, axis=2), axis=1).sum())


def anchor(text: Any) -> tuple[float, float]:
    """Return the place of an annotation's point, in pixels."""
    transform = text.axes.transData if text.xycoords == "data" else text.xycoords
    x, y = transform.transform(text.xy)
    return float(x), float(y)


def boxes_along(points: Any, half: float, step: int = BOX_STEP) -> Any:
    """Return small boxes of 2 · `half` pixels along a line through points, `step` pixels apart."""
    import numpy as np

    points = np.asarray(points, dtype=float).reshape(-1, 2)
    parts = [points[-1:]]
    for start, end in itertools.pairwise(points):
        count = max(1, int(np.abs(end - start).max() // step))
        parts.append(np.linspace(start, end, count, endpoint=False))
    places = np.concatenate(parts[1:] + parts[:1])
    return np.concatenate([places - half, places + half], axis=1)


def markers_on(axes: Any) -> Any:
    """Return all markers as an array [markers, 3]: x, y and half width in pixels."""
    import numpy as np
    from matplotlib.collections import PathCollection

    rows = [np.empty((0, 3))]
    for points in axes.collections:
        if isinstance(points, PathCollection):
            places = points.get_offset_transform().transform(np.asarray(points.get_offsets()))
            half = np.sqrt(points.get_sizes()) / 2 * axes.figure.dpi / 72
            rows.append(np.column_stack([places, np.broadcast_to(half, len(places))]))
    return np.concatenate(rows)


def occupied_boxes(axes: Any) -> Any:
    """Return boxes of all that is drawn on the axes: markers, bands and lines."""
    import numpy as np
    from matplotlib.collections import PathCollection

    markers = markers_on(axes)
    boxes = [
        np.concatenate([markers[:, :2] - markers[:, 2:], markers[:, :2] + markers[:, 2:]], 1)
    ]
    for band in axes.collections:
        if not isinstance(band, PathCollection):
            outline = band.get_transform().transform_path(band.get_paths()[0])
            (x0, y0), (x1, y1) = (
                outline.vertices.min(axis=0),
                outline.vertices.max(axis=0),
            )
            steps = np.arange(x0, x1, BOX_STEP), np.arange(y0, y1, BOX_STEP)
            grid = np.stack(np.meshgrid(*steps), axis=-1).reshape(-1, 2)
            inside = grid[outline.contains_points(grid)]
            boxes.append(np.concatenate([inside - BOX_STEP / 2, inside + BOX_STEP / 2], axis=1))
    for line in axes.get_lines():
        points = line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        half = max(2.0, line.get_linewidth() / 2 * axes.figure.dpi / 72)
        boxes.append(boxes_along(points, half))
    return np.concatenate(boxes)


# distances of a label from its point, in heights of the text
REACH = (0.8, 1.2, 1.6, 2.6, 3.8, 5.4, 7.5, 10.0, 13.0)
NEAR = 1.6  # up to this distance no line joins a label to its point
ANGLES = [math.pi * n / 8 for n in (0, 8, 14, 2, 6, 10, 4, 12, 1, 15, 7, 9, 3, 13, 5, 11)]
# side of a label that faces its point, 0 (left edge) to 1, if the label is above or below
SIDES = (0.5, 0.8, 0.2, 0.97, 0.03)
# heights of an upright line, as shares of the axes, at which its label may be
UPRIGHT_HEIGHTS = [n / 100 for up in range(96, 50, -3) for n in (up, 100 - up)]


class LabelPosition(NamedTuple):
    """A possible position of a point's label.

    Attributes:
        box: Box of the text with a margin, in pixels.
        leader: Boxes along the whole line from the point to the label; empty without a line.
        free_leader: The part of `leader` that has left the marker.
        offset: Offset of the text from its point, in points.
        side: Side of the text at the offset, 0 (left edge) to 1.
        height: Height of the point, in its own coordinates.
    """

    box: tuple[float, float, float, float]
    leader: Any
    free_leader: Any
    offset: tuple[float, float]
    side: float
    height: float


def place_labels(
    axes: Any, texts: Sequence[Any], end_texts: Sequence[Any], renderer: Any
) -> list[Any]:
    """Place the labels of points beside their points, one after the other.

    Each label takes the nearest position without a fault. Faults, the worst first: it covers
    something, it reads as the label of another point, it is beyond an upright line, its line
    crosses another label's line, its line crosses something drawn.

    Returns:
        The labels that found no free position, or only one whose line crosses something while the
        way to the right of the axes is free.
    """
    import numpy as np

    pixels = axes.figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    leaders = [
        boxes_along([anchor(text), text.anncoords.transform(text.get_position())], 1)
        for text in end_texts
    ]
    joints = np.concatenate([np.empty((0, 4)), *leaders])
    taken = np.concatenate([occupied_boxes(axes), joints])
    markers, places = (
        markers_on(axes),
        np.array([anchor(text) for text in texts]).reshape(-1, 2),
    )
    named = (np.abs(markers[:, None, :2] - places).max(axis=2, initial=0) < 1).any(axis=1)
    uprights = _upright_positions(axes)
    unplaced = []
    obstacles = Obstacles(taken, joints, np.empty((0, 4)), uprights)
    for text in texts:
        own = np.array([*anchor(text), text.arrowprops["shrinkB"] * pixels])
        away = np.abs(markers[:, :2] - own[:2])
        is_other = (np.hypot(*away.T) > max(2.0, own[2])) & ((away[:, 0] > 1) | named)
        near = NEAR * text.get_fontsize() * pixels
        positions = _positions(text, frame, renderer)
        best, faults = _best_position(
            positions,
            own,
            markers[is_other],
            near,
            obstacles,
        )
        start = own[0] + own[2] + text.get_fontsize() * pixels
        way_out = boxes_along([(start, own[1]), (max(start, frame.x1), own[1])], 1)
        is_crossing = best and faults[-1] and not count_overlaps(way_out, obstacles.drawn)
        if best is None or faults[0] or is_crossing:
            unplaced.append(text)
        if best is None:
            continue
        text.xy = text.xy[0], best.height
        text.set_position(best.offset)
        text.set_ha({0.0: "left", 1.0: "right"}.get(best.side, "center"))
        text.arrow_patch.set_visible(len(best.leader) > 0)
        obstacles = Obstacles(
            drawn=np.concatenate([obstacles.drawn, [best.box], best.leader]),
            leaders=np.concatenate([obstacles.leaders, best.leader]),
            texts=np.concatenate([obstacles.texts, [best.box]]),
            uprights=uprights,
        )
    return unplaced


def _upright_positions(axes: Any) -> list[float]:
    """Return the positions of upright lines, in pixels."""
    return [
        axes.transData.transform((line.get_xdata()[0], 1))[0]
        for line in axes.get_lines()
        if line.get_transform() == axes.get_xaxis_transform("grid")
    ]


class Obstacles(NamedTuple):
    """What labels keep away from, as boxes in pixels.

    Attributes:
        drawn: All that is drawn, with the labels placed so far and their lines.
        leaders: Lines from labels to their points.
        texts: Labels placed so far.
        uprights: Positions of upright lines.
    """

    drawn: Any
    leaders: Any
    texts: Any
    uprights: list[float]


def _best_position(
    positions: Iterator[LabelPosition],
    own: Any,
    others: Any,
    near: float,
    obstacles: Obstacles,
) -> tuple[LabelPosition | None, tuple[Any, ...]]:
    """Return the first position with the fewest faults, and its faults.

    Args:
        positions: Positions of the label, the nearest first.
        own: x, y and half width of the point's marker.
        others: Markers of other points.
        near: Pixels up to which no line joins a label to its point.
        obstacles: What the label keeps away from.
    """
    best = None
    min_faults: tuple[Any, ...] = ()
    for position in positions:
        overlaps = count_overlaps(position.box, obstacles.drawn)
        overlaps += count_overlaps(position.leader, obstacles.texts)
        if min_faults and overlaps > min_faults[0]:
            continue
        middle = (position.box[0] + position.box[2]) / 2
        faults = (
            overlaps,
            _is_misread(position, own, others, near),
            any((x - own[0]) * (x - middle) < 0 for x in obstacles.uprights),
            count_overlaps(position.leader, obstacles.leaders) > 0,
            count_overlaps(position.free_leader, obstacles.drawn) > 0,
        )
        if not min_faults or faults < min_faults:
            best = position
            min_faults = faults
        if not any(faults):
            break
    return best, min_faults


def _positions(text: Any, frame: Any, renderer: Any) -> Iterator[LabelPosition]:
    """Yield the positions of a label within the axes, the nearest first."""
    font, pixels, box = (
        text.get_fontsize(),
        text.figure.dpi / 72,
        text_box(text, renderer),
    )
    is_upright, radius = text.xycoords != "data", text.arrowprops["shrinkB"]
    heights = UPRIGHT_HEIGHTS if is_upright else [text.xy[1]]
    for height, reach, slide, angle in itertools.product(
        heights, REACH[:1] if is_upright else REACH, SIDES, ANGLES
    ):
        dx, dy = math.cos(angle), 1.2 * math.sin(angle)
        side = 0.0 if dx > 0.3 else 1.0 if dx < -0.3 else slide
        if slide != SIDES[0] and side != slide:
            continue
        text.xy = text.xy[0], height
        x, y = anchor(text)
        left = x + dx * font * reach * pixels - side * box.width
        low = y + dy * font * reach * pixels - box.height / 2
        margin = max(2.0, 0.15 * font * pixels)
        outer = (
            left - margin,
            low - 2,
            left + box.width + margin,
            low + box.height + 2,
        )
        if (
            outer[0] < frame.x0
            or outer[1] < frame.y0
            or outer[2] > frame.x1
            or outer[3] > frame.y1
        ):
            continue
        leader = boxes_along([(x, y), (left + box.width / 2, low + box.height / 2)], 1, 1)
        if font * (reach - NEAR) <= radius:
            leader = leader[:0]
        slid = (0.5 - side) * box.width / pixels if side == slide else 0.0
        offset = (dx * font * reach + slid, dy * font * reach)
        free = leader[int((NEAR * font + radius) * pixels) :]
        yield LabelPosition(
            outer,
            leader,
            free,
            offset,
            side,
            height,
        )


def _is_misread(position: LabelPosition, own: Any, others: Any, near: float) -> bool:
    """Return whether a label or its line is too near to the marker of another point."""
    if not len(others):
        return False
    distance = _distance([position.box], others)
    if not len(position.leader):
        return distance <= _distance([position.box], own[None])
    return distance < near / 2 or _distance(position.leader, others) < near / 4


def _distance(boxes: Any, markers: Any) -> float:
    """Return the smallest distance between boxes and markers, in pixels."""
    import numpy as np

    low, high = np.asarray(boxes)[:, None, :2], np.asarray(boxes)[:, None, 2:]
    gaps = np.maximum(np.maximum(low - markers[:, :2], markers[:, :2] - high), 0)
    return float((np.linalg.norm(gaps, axis=2) - markers[:, 2]).min())


def spread(
    centres: Sequence[float], sizes: Sequence[float], low: float, high: float
) -> list[float]:
    """Return centres of intervals that do not touch, moved as little as possible.

    Intervals stay within `low` to `high`; if there is no room, they start at `low`.
    Example: centres 5, 5 of sizes 2, 2 become 4, 6.
    """
    order = sorted(range(len(centres)), key=lambda i: centres[i])
    starts = list(itertools.accumulate((sizes[i] for i in order), initial=0.0))
    blocks: list[tuple[float, int]] = []  # mean shift and number of intervals that touch
    for i, start in zip(order, starts, strict=False):
        blocks.append((centres[i] - sizes[i] / 2 - start, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, few), (two, more) = blocks[-2:]
            blocks[-2:] = [((one * few + two * more) / (few + more), few + more)]
    max_shift = max(low, high - starts[-1])
    shifts = [min(max(shift, low), max_shift) for shift, count in blocks for _ in range(count)]
    moved = {
        i: s + shift + sizes[i] / 2 for i, s, shift in zip(order, starts, shifts, strict=False)
    }
    return [moved[i] for i in range(len(centres))]
