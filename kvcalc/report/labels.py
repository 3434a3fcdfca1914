"""Where texts stand on a picture, in pixels: at the data, apart from each other, and never over a line, a point or an edge."""

import itertools
from collections.abc import Sequence
from typing import Any

Box = tuple[float, float, float, float]  # left, bottom, right, top
REACH = (0.8, 1.6, 2.6, 3.8, 5.4, 7.5, 10)  # distances from a point that are tried, in heights of the text
SIDES = [
    (1, 0),
    (-1, 0),
    (1, -1.2),
    (1, 1.2),
    (-1, 1.2),
    (-1, -1.2),
    (0, 1.2),
    (0, -1.2),
    (1, 2.4),
    (-1, -2.4),
    (1, -2.4),
    (-1, 2.4),
]


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


def text_box(text: Any, renderer: Any) -> Any:
    """The box of a text alone, without the arrow of an annotation."""
    from matplotlib.text import Text

    return Text.get_window_extent(text, renderer)


def beside(text: Any, taken: list[Box], inside: Any, renderer: Any) -> bool:
    """Put a point's label at the nearest free place within a box, and take the place; False where there is none."""
    gap = text.get_fontsize()
    for reach, (dx, dy) in itertools.product(REACH, SIDES):
        text.set_position((dx * gap * reach, dy * gap * reach))
        text.set_ha("left" if dx > 0 else "right" if dx < 0 else "center")
        box = text_box(text, renderer).padded(2)
        x0, y0, x1, y1 = box.extents.tolist()
        if not (inside.contains(x0, y0) and inside.contains(x1, y1)):
            continue
        if not any(x0 <= right and left <= x1 and y0 <= top and low <= y1 for left, low, right, top in taken):
            taken.append((x0, y0, x1, y1))
            return True
    return False


def taken_places(figure: Any, axes: Any) -> list[Box]:
    """Boxes of everything drawn on the axes: markers, and small ones along every line."""
    return [*_point_boxes(figure, axes), *_line_boxes(axes)]


def _point_boxes(figure: Any, axes: Any) -> list[Box]:
    """A box around every point, as large as its marker."""
    found: list[Box] = []
    for points in axes.collections:
        places, sizes = points.get_offset_transform().transform(points.get_offsets()).tolist(), points.get_sizes().tolist()
        for (x, y), size in zip(places, sizes if len(sizes) == len(places) else sizes[:1] * len(places), strict=True):
            half = size**0.5 / 2 * figure.dpi / 72
            found.append((x - half, y - half, x + half, y + half))
    return found


def _line_boxes(axes: Any) -> list[Box]:
    """Small boxes along every drawn line."""
    import numpy as np

    found: list[Box] = []
    for line in axes.get_lines():
        points = line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        for (x0, y0), (x1, y1) in itertools.pairwise(points.tolist()):
            steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 6))
            for i in range(steps + 1):
                x, y = x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps
                found.append((x - 2, y - 2, x + 2, y + 2))
    return found
