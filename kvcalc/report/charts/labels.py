"""Break texts on a picture into lines, and find positions at which they cover nothing.

Positions and boxes are in pixels.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

NAME_LETTERS = 28  # characters in a line of a label, or of a bar's name
NAME_LINES = 5


def wrapped(text: str, width: int, max_lines: int = NAME_LINES) -> str:
    """Return a text with line breaks, in lines of about equal length, for a label in a picture.

    Args:
        text: The text.
        width: Maximum number of characters per line.
        max_lines: Maximum number of lines. A text with more lines ends with `…`.
    """
    lines = textwrap.wrap(text, width)
    while len(lines) > 1 and len(textwrap.wrap(text, width - 1)) == len(lines):
        width -= 1
        lines = textwrap.wrap(text, width)
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [lines[max_lines - 1] + " …"]
    return "\n".join(lines)


def text_box(text: Any, renderer: Any) -> Any:
    """Return the bounding box of a matplotlib text in pixels, without an annotation's arrow.

    Args:
        text: A matplotlib text or annotation.
        renderer: The matplotlib renderer that measures texts.
    """
    from matplotlib.text import Text

    return Text.get_window_extent(text, renderer)


def anchor(text: Any) -> tuple[float, float]:
    """Return x and y, in pixels, of the point that a matplotlib annotation labels."""
    transform = text.axes.transData if text.xycoords == "data" else text.xycoords
    x, y = transform.transform(text.xy)
    return float(x), float(y)


def lines_on(axes: Any) -> list[tuple[Any, float]]:
    """Return (path, half the line width), both in pixels, for each line on the axes.

    Labels of points must not cover these lines. Half the width is at least 2 pixels.
    """
    lines = []
    for line in axes.get_lines():
        path = line.get_transform().transform_path(line.get_path())
        lines.append((path, max(2.0, line.get_linewidth() / 2 * axes.figure.dpi / 72)))
    return lines


def count_crossed(lines: Sequence[tuple[Any, float]], box: Any) -> int:
    """Return how many lines cross a box, as a measure of how well a label in this box can be read.

    Args:
        lines: Path and half the line width of each line, in pixels.
        box: A matplotlib box in pixels.
    """
    return sum(path.intersects_bbox(box.padded(half), filled=False) for path, half in lines)


def markers_on(axes: Any) -> list[Any]:
    """Return the bounding box in pixels of each marker on the axes.

    Labels of points must not cover these boxes.
    """
    from matplotlib.transforms import Bbox

    boxes = []
    for markers in axes.collections:
        places = markers.get_offset_transform().transform(markers.get_offsets())
        areas = markers.get_sizes()
        for index, (x, y) in enumerate(places):
            radius = math.sqrt(areas[index % len(areas)]) / 2 * axes.figure.dpi / 72
            boxes.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    return boxes


# distances of a label from its marker, in heights of the text
DISTANCES = (0.8, 1.2, 1.6, 2.6, 3.8, 5.4, 7.5, 10.0, 13.0)
NEAR_DISTANCE = 1.6  # no line joins a label to its marker up to this distance
ANGLES = [math.pi * n / 8 for n in (0, 8, 14, 2, 6, 10, 4, 12, 1, 15, 7, 9, 3, 13, 5, 11)]
# parts of a label above its marker: 0 is the left edge and 1 the right edge
SIDES = (0.5, 0.8, 0.2, 0.97, 0.03)


class LabelPosition(NamedTuple):
    """A possible position of a point's label.

    Attributes:
        box: Box of the label's text with a margin, in pixels.
        leader: The (x, y) corners in pixels of the line from the marker to the text. The line bends
            outside other markers. Empty for a label near its marker, which needs no line.
        centre: Offset (x, y) of the text's centre from its marker, in pixels.
        distance: Pixels from the box to the marker's edge.
    """

    box: Any
    leader: list[tuple[float, float]]
    centre: tuple[float, float]
    distance: float


def place_labels(
    axes: Any, texts: Sequence[Any], end_texts: Sequence[Any], renderer: Any
) -> list[Any]:
    """Move the labels of points to free positions, one after the other.

    A label takes the nearest position without a fault. If there is none, it takes the position with
    the smallest fault. Faults, from the worst on:

    1. The label covers a marker, a line or another label.
    2. A reader may take it for the label of another point.
    3. The line to its marker crosses another line.

    Args:
        axes: The matplotlib axes.
        texts: Annotations of points. They are moved.
        end_texts: Annotations right of the axes. The labels avoid their lines.
        renderer: The matplotlib renderer that measures texts.

    Returns:
        The labels whose position still has the first or the third fault.
    """
    from matplotlib.path import Path

    frame = axes.get_window_extent(renderer)
    pixels = axes.figure.dpi / 72
    markers = markers_on(axes)
    lines = lines_on(axes) + [
        (Path([anchor(text), text.anncoords.transform(text.get_position())]), 1.0)
        for text in end_texts
    ]
    boxes: list[Any] = []
    unplaced = []
    for text in texts:
        x, y = anchor(text)
        near = NEAR_DISTANCE * text.get_fontsize() * pixels
        others = [m for m in markers if not m.contains(x, y) and abs(m.x0 + m.x1 - 2 * x) > 2]
        best, least = None, (1 << 30, 0, 0)
        for position in _positions(text, frame, renderer):
            box, leader = position.box, position.leader
            covered = box.count_overlaps([*markers, *boxes]) + count_crossed(lines, box)
            margin = near / 2 if leader else position.distance + 1
            misread = box.padded(margin).count_overlaps(others)
            crossings = 0
            if leader:
                path, free_part = Path(leader), Path(leader[1:])
                covered += sum(path.intersects_bbox(other) for other in boxes)
                misread += sum(path.intersects_bbox(m.padded(near / 4)) for m in others)
                crossings = sum(
                    free_part.intersects_path(line, filled=False) for line, _ in lines
                )
            faults = covered, misread, crossings
            if faults < least:
                best, least = position, faults
            if not any(least):
                break
        if least[0] or least[-1]:
            unplaced.append(text)
        if best is None:
            continue
        text.set_position([offset / pixels for offset in best.centre])
        text.set_ha("center")
        text.arrow_patch.set_visible(bool(best.leader))
        boxes.append(best.box)
        if best.leader:
            lines.append((Path(best.leader), 1.0))
    return unplaced


def _positions(text: Any, frame: Any, renderer: Any) -> Iterator[LabelPosition]:
    """Yield the positions of a label within the axes, the nearest first."""
    from matplotlib.transforms import Bbox

    pixels = text.figure.dpi / 72
    font = text.get_fontsize() * pixels
    radius = text.arrowprops["shrinkB"] * pixels
    width, height = text_box(text, renderer).size
    x, y = anchor(text)
    for distance, side, angle in itertools.product(DISTANCES, SIDES, ANGLES):
        dx, dy = distance * font * math.cos(angle), 1.2 * distance * font * math.sin(angle)
        if abs(dx) > 0.3 * distance * font:
            if side != SIDES[0]:
                continue
            side = float(dx < 0)
        centre = dx + (0.5 - side) * width, dy
        middle = x + centre[0], y + dy
        box = Bbox.from_bounds(middle[0] - width / 2, middle[1] - height / 2, width, height)
        box = box.padded(max(2, 0.15 * font), 2)
        if not (frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)):
            continue
        leader = []
        if font * (distance - NEAR_DISTANCE) > radius:
            share = (NEAR_DISTANCE * font + radius) / math.hypot(*centre)
            leader = [(x, y), (x + share * centre[0], y + share * dy), middle]
        gap = max(box.x0 - x, x - box.x1, 0), max(box.y0 - y, y - box.y1, 0)
        yield LabelPosition(box, leader, centre, math.hypot(*gap) - radius)


def spread(
    centres: Sequence[float], sizes: Sequence[float], low: float, high: float
) -> list[float]:
    """Return new centres of intervals that do not overlap, moved as little as possible.

    The intervals stay between `low` and `high`. If they do not all fit, they start at `low`.
    Example: centres 5 and 5 of sizes 2 and 2 become 4 and 6.

    Args:
        centres: Desired centre of each interval.
        sizes: Length of each interval.
        low: Lower limit of the space.
        high: Upper limit of the space.
    """
    order = sorted(range(len(centres)), key=lambda index: centres[index])
    ends = list(itertools.accumulate(sizes[index] for index in order))
    shifts = [centres[i] + sizes[i] / 2 - end for i, end in zip(order, ends)]
    places = {}
    for number, index in enumerate(order):
        # intervals that touch share the mean of their shifts: an isotonic regression
        means = [
            min(fmean(shifts[first : last + 1]) for last in range(number, len(order)))
            for first in range(number + 1)
        ]
        shift = min(max(max(means), low), max(low, high - ends[-1]))
        places[index] = shift + ends[number] - sizes[index] / 2
    return [places[index] for index in range(len(centres))]
