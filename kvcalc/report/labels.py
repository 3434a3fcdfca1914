"""Where texts stand on a picture, in pixels: at the data, apart from each other, and never over a line, a point or an edge."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

REACH = (0.8, 1.6, 2.6, 3.8, 5.4, 7.5, 10.0, 13.0)  # distances from a point that are tried, in heights of the text
NEAR = 1.6  # so far from its mark a text is its point's without a line that joins them
SIDES = [
    (math.cos(math.pi * n / 8), 1.2 * math.sin(math.pi * n / 8)) for n in (0, 8, 14, 2, 6, 10, 4, 12, 1, 15, 7, 9, 3, 13, 5, 11)
]
HEIGHTS = [n / 100 for n in range(96, 3, -3)]  # on the axes, where an upright line may be named
STEP = 6  # pixels between the boxes that stand for a line


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


class Places:
    """Boxes that are taken, as rows of x0, y0, x1, y1 in pixels."""

    def __init__(self, boxes: Any) -> None:
        self.boxes = boxes

    @classmethod
    def none(cls) -> "Places":
        import numpy as np

        return cls(np.empty((0, 4)))

    def free(self, box: Sequence[float]) -> bool:
        """Whether a box touches none of them."""
        b, (x0, y0, x1, y1) = self.boxes, box
        return not bool(((b[:, 0] < x1) & (x0 < b[:, 2]) & (b[:, 1] < y1) & (y0 < b[:, 3])).any())

    def take(self, boxes: Any) -> None:
        import numpy as np

        self.boxes = np.concatenate([self.boxes, boxes])


def beside(text: Any, taken: Places, texts: Places, inside: Any, renderer: Any) -> bool:
    """Put a point's label at the nearest free place within a box, and take the place; False where there is none.

    texts: the labels put before. One that stands further away is joined to its point by a line, which crosses none of them.
    """
    import numpy as np

    gap, pixels, box = text.get_fontsize(), text.figure.dpi / 72, text_box(text, renderer)
    heights = (text.xy[1],) if text.xycoords == "data" else HEIGHTS
    for height, reach, (dx, dy) in itertools.product(heights, REACH if len(heights) == 1 else REACH[:1], SIDES):
        text.xy = text.xy[0], height
        x, y = anchor(text)
        at_x, at_y = x + dx * gap * reach * pixels, y + dy * gap * reach * pixels
        side = 0.0 if dx > 0.3 else 1.0 if dx < -0.3 else 0.5
        left, low = at_x - side * box.width, at_y - box.height / 2
        place = (left - 2, low - 2, left + box.width + 2, low + box.height + 2)
        if not (inside.x0 <= place[0] and place[2] <= inside.x1 and inside.y0 <= place[1] and place[3] <= inside.y1):
            continue
        if not taken.free(place):
            continue
        far = gap * (reach - NEAR) > text.arrowprops["shrinkB"]
        leader = boxes_along([(x, y), (left + box.width / 2, low + box.height / 2)], 1)
        if far and not all(texts.free(b) for b in leader.tolist()):
            continue
        text.set_position((dx * gap * reach, dy * gap * reach))
        text.set_ha({0.0: "left", 1.0: "right", 0.5: "center"}[side])
        text.arrow_patch.set_visible(far)
        texts.take(np.array([place]))
        taken.take(np.array([place, *leader.tolist()] if far else [place]))
        return True
    return False


def anchor(text: Any) -> tuple[float, float]:
    """The place of an annotation's point, in pixels."""
    transform = text.axes.transData if text.xycoords == "data" else text.xycoords
    x, y = transform.transform(text.xy)
    return float(x), float(y)


def leader_boxes(text: Any) -> Any:
    """Boxes along the line that joins a text right of the axes to its point."""
    x, y = text.anncoords.transform(text.get_position())
    return boxes_along([anchor(text), (float(x), float(y))], 1)


def taken_places(figure: Any, axes: Any) -> Places:
    """Boxes of everything drawn on the axes: markers, and small ones along every line."""
    import numpy as np
    from matplotlib.collections import PathCollection

    found = [_point_boxes(figure, c) if isinstance(c, PathCollection) else _band_boxes(c) for c in axes.collections]
    for line in axes.get_lines():
        points = line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        found.append(boxes_along(points, max(2.0, line.get_linewidth() / 2 * figure.dpi / 72)))
    return Places(np.concatenate([np.empty((0, 4)), *found]))


def _point_boxes(figure: Any, points: Any) -> Any:
    """A box around every point, as large as its marker."""
    import numpy as np

    places, sizes = points.get_offset_transform().transform(points.get_offsets()), points.get_sizes()
    half = np.broadcast_to(np.sqrt(sizes) / 2 * figure.dpi / 72, len(places))[:, None]
    return np.concatenate([places - half, places + half], axis=1)


def _band_boxes(band: Any) -> Any:
    """Boxes that cover a filled band."""
    import numpy as np

    outline = band.get_transform().transform_path(band.get_paths()[0])
    (x0, y0), (x1, y1) = outline.vertices.min(axis=0), outline.vertices.max(axis=0)
    grid = np.stack(np.meshgrid(np.arange(x0, x1, STEP), np.arange(y0, y1, STEP)), axis=-1).reshape(-1, 2)
    inside = grid[outline.contains_points(grid)]
    return np.concatenate([inside - STEP / 2, inside + STEP / 2], axis=1)


def boxes_along(points: Any, half: float) -> Any:
    """Small boxes along a line through points."""
    import numpy as np

    points = np.asarray(points, dtype=float)
    if len(points) < 2:
        return np.empty((0, 4))
    steps = np.maximum(1, np.abs(np.diff(points, axis=0)).max(axis=1) // STEP).astype(int)
    along = np.concatenate([np.arange(n) / n for n in steps.tolist()])[:, None]
    from_, way = np.repeat(points[:-1], steps, axis=0), np.repeat(np.diff(points, axis=0), steps, axis=0)
    places = np.concatenate([from_ + along * way, points[-1:]])
    return np.concatenate([places - half, places + half], axis=1)
