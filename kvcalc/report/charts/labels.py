"""Texts on a picture: their line breaks, and positions at which they cover nothing.

Positions and boxes are in pixels.
"""

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

NAME_LETTERS = 28  # characters in a line of a label, or of a bar's name
NAME_LINES = 5
GLUE = "\1"  # replaces a space at which no line ends
BREAK = "\2 "  # a place in a long word at which a line may end


def wrapped(text: str, width: int, max_lines: int = NAME_LINES) -> str:
    """Return a text in lines of about equal length and at most `width` characters.

    A line never ends behind a number or a sign such as ≥. Words longer than half a line may break
    after one of /_-, such as "meta-llama/" + "Llama-3.1".
    """
    glued = re.sub(r"(?<!\S)(\(?\d[\d.,]*×?|[≥≤~−×])\s(?=\S)", rf"\1{GLUE}", text)
    words = []
    for word in glued.split():
        is_long = len(word) > width / 2
        words.append(
            re.sub(r"(?<=.{3})([/_-]+)(?=.{5})", rf"\1{BREAK}", word) if is_long else word
        )
    text = " ".join(words)

    def lines_of(width: int) -> list[str]:
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        return [line.replace(BREAK, "").replace(BREAK[0], "") for line in lines]

    lines = lines_of(width)
    longest = max(map(len, text.split(" ")))
    while len(lines) > 1 and width > longest and len(lines_of(width - 1)) == len(lines):
        width -= 1
        lines = lines_of(width)
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [lines[max_lines - 1] + " …"]
    return "\n".join(lines).replace(GLUE, " ")


def text_box(text: Any, renderer: Any) -> Any:
    """Return the box of a text without the arrow of an annotation."""
    from matplotlib.text import Text

    return Text.get_window_extent(text, renderer)


def anchor(text: Any) -> tuple[float, float]:
    """Return the place of an annotation's point."""
    transform = text.axes.transData if text.xycoords == "data" else text.xycoords
    x, y = transform.transform(text.xy)
    return float(x), float(y)


def lines_on(axes: Any) -> list[tuple[Any, float]]:
    """Return the path and half the width of each line on the axes."""
    lines = []
    for line in axes.get_lines():
        path = line.get_transform().transform_path(line.get_path())
        lines.append((path, max(2.0, line.get_linewidth() / 2 * axes.figure.dpi / 72)))
    return lines


def count_crossed(lines: Sequence[tuple[Any, float]], box: Any) -> int:
    """Return how many lines run through a box."""
    return sum(path.intersects_bbox(box.padded(half), filled=False) for path, half in lines)


def markers_on(axes: Any) -> list[Any]:
    """Return the boxes of all markers on the axes."""
    from matplotlib.collections import PathCollection
    from matplotlib.transforms import Bbox

    boxes = []
    for markers in axes.collections:
        if not isinstance(markers, PathCollection):
            continue
        places = markers.get_offset_transform().transform(markers.get_offsets())
        areas = markers.get_sizes()
        for index, (x, y) in enumerate(places):
            radius = math.sqrt(areas[index % len(areas)]) / 2 * axes.figure.dpi / 72
            boxes.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    return boxes


# distances of a label from its marker, in heights of the text
DISTANCES = (0.8, 1.2, 1.6, 2.6, 3.8, 5.4, 7.5, 10.0, 13.0)
NEAR = 1.6  # no line joins a label to its marker up to this distance
ANGLES = [math.pi * n / 8 for n in (0, 8, 14, 2, 6, 10, 4, 12, 1, 15, 7, 9, 3, 13, 5, 11)]
# parts of a label above its marker: 0 is the left edge and 1 the right edge
SIDES = (0.5, 0.8, 0.2, 0.97, 0.03)


class LabelPosition(NamedTuple):
    """A possible position of a label.

    Attributes:
        box: Box of the text with a margin.
        leader: Path from the marker, over the place at which it is free, to the text. None for a
            label near its marker.
        offset: Offset of the text from its marker, in points.
        side: Side of the text at the offset, from 0 (left edge) to 1.
    """

    box: Any
    leader: Any
    offset: tuple[float, float]
    side: float


def place_labels(
    axes: Any, texts: Sequence[Any], end_texts: Sequence[Any], renderer: Any
) -> list[Any]:
    """Move the labels of points to free positions, one after the other.

    A label takes the nearest position without a fault, or the position with the smallest fault.
    Faults, the worst first: the label covers something, it may be read as the label of another
    point, its line crosses something.

    Args:
        axes: Axes that contain the labels.
        texts: Annotations of points.
        end_texts: Annotations right of the axes. Labels avoid their leaders.
        renderer: Renderer of the figure.

    Returns:
        The labels without a position at which they cover nothing.
    """
    from matplotlib.path import Path

    frame = axes.get_window_extent(renderer)
    markers = markers_on(axes)
    lines = lines_on(axes)
    for text in end_texts:
        ends = [anchor(text), text.anncoords.transform(text.get_position())]
        lines.append((Path(ends), 1.0))
    boxes: list[Any] = []
    unplaced = []
    for text in texts:
        best, faults = _best_position(text, (frame, renderer), markers, boxes, lines)
        x, y = anchor(text)
        way_out = Path([(x + 2 * text.get_fontsize(), y), (frame.x1, y)])
        is_free = not any(way_out.intersects_path(path, filled=False) for path, _ in lines)
        if best is None or faults[0] or (faults[-1] and is_free):
            unplaced.append(text)
        if best is None:
            continue
        text.set_position(best.offset)
        text.set_ha({0.0: "left", 1.0: "right"}.get(best.side, "center"))
        text.arrow_patch.set_visible(best.leader is not None)
        boxes.append(best.box)
        if best.leader:
            lines.append((best.leader, 1.0))
    return unplaced


def _best_position(
    text: Any,
    page: tuple[Any, Any],
    markers: Sequence[Any],
    boxes: Sequence[Any],
    lines: Sequence[tuple[Any, float]],
) -> tuple[LabelPosition | None, tuple[int, ...]]:
    """Return the first position with the smallest faults, and its faults.

    Args:
        text: Annotation of a point.
        page: Box of the axes, and renderer of the figure.
        markers: Boxes of all markers.
        boxes: Boxes of the labels placed so far.
        lines: Paths and half widths of lines on the axes and of leaders.
    """
    from matplotlib.path import Path

    x, y = anchor(text)
    pixels = text.figure.dpi / 72
    near = NEAR * text.get_fontsize() * pixels
    others = [m for m in markers if not m.contains(x, y) and abs(m.x0 + m.x1 - 2 * x) > 2]
    best, min_faults = None, (1 << 30, 0, 0)
    for position in _positions(text, *page):
        box, leader = position.box, position.leader
        covered = box.count_overlaps([*markers, *boxes])
        covered += count_crossed(lines, box)
        if leader:
            covered += sum(leader.intersects_bbox(other) for other in boxes)
            misread = box.padded(near / 2).count_overlaps(others)
            misread += sum(leader.intersects_bbox(m.padded(near / 4)) for m in others)
            free_part = Path(leader.vertices[1:])
            crossings = sum(free_part.intersects_path(path, filled=False) for path, _ in lines)
        else:
            nearest_x = min(max(x, box.x0), box.x1)
            nearest_y = min(max(y, box.y0), box.y1)
            distance = math.dist((x, y), (nearest_x, nearest_y))
            distance -= text.arrowprops["shrinkB"] * pixels
            misread = box.padded(distance + 1).count_overlaps(others)
            crossings = 0
        faults = (covered, misread, crossings)
        if faults < min_faults:
            best, min_faults = position, faults
        if not any(faults):
            break
    return best, min_faults


def _positions(text: Any, frame: Any, renderer: Any) -> Iterator[LabelPosition]:
    """Yield the positions of a label within the axes, the nearest first."""
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    pixels = text.figure.dpi / 72
    font = text.get_fontsize() * pixels
    radius = text.arrowprops["shrinkB"] * pixels
    size = text_box(text, renderer)
    x, y = anchor(text)
    for distance, side, angle in itertools.product(DISTANCES, SIDES, ANGLES):
        dx, dy = distance * math.cos(angle), 1.2 * distance * math.sin(angle)
        if abs(dx) > 0.3 * distance:
            if side != SIDES[0]:
                continue
            side = float(dx < 0)
        x0 = x + dx * font - side * size.width
        y0 = y + dy * font - size.height / 2
        box = Bbox.from_bounds(x0, y0, size.width, size.height).padded(max(2, 0.15 * font), 2)
        if not (frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)):
            continue
        leader = None
        if font * (distance - NEAR) > radius:
            middle = (x0 + size.width / 2, y0 + size.height / 2)
            share = (NEAR * font + radius) / math.dist((x, y), middle)
            start = (x + share * (middle[0] - x), y + share * (middle[1] - y))
            leader = Path([(x, y), start, middle])
        shift = (0.5 - side) * size.width if 0 < side < 1 else 0.0
        offset = ((dx * font + shift) / pixels, dy * font / pixels)
        yield LabelPosition(box, leader, offset, side)


def spread(
    centres: Sequence[float], sizes: Sequence[float], low: float, high: float
) -> list[float]:
    """Return centres of intervals that do not touch, moved as little as possible.

    Intervals stay within `low` to `high`; if there is no room, they start at `low`.
    Example: centres 5, 5 of sizes 2, 2 become 4, 6.
    """
    order = sorted(range(len(centres)), key=lambda index: centres[index])
    ends = list(itertools.accumulate(sizes[index] for index in order))
    shifts = [centres[i] + sizes[i] / 2 - end for i, end in zip(order, ends, strict=True)]
    places = dict.fromkeys(order, 0.0)
    for number, index in enumerate(order):
        # intervals that touch share the mean of their shifts: an isotonic regression
        means = [
            min(fmean(shifts[first : last + 1]) for last in range(number, len(order)))
            for first in range(number + 1)
        ]
        shift = min(max(max(means), low), max(low, high - ends[-1]))
        places[index] = shift + ends[number] - sizes[index] / 2
    return [places[index] for index in range(len(centres))]
