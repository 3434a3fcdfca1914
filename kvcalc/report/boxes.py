"""Boxes, in pixels, of texts and of what is drawn on axes: what a text may not lie over."""

from collections.abc import Sequence
from typing import Any

STEP = 6  # pixels between the boxes that stand for a line


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
        import numpy as np

        return not self.touched(np.array([box]))

    def touched(self, boxes: Any) -> int:
        """How many of some boxes touch one of them."""
        a, b = boxes[:, :, None], self.boxes.T
        return int(((b[0] < a[:, 2]) & (a[:, 0] < b[2]) & (b[1] < a[:, 3]) & (a[:, 1] < b[3])).any(axis=1).sum())

    def take(self, boxes: Any) -> None:
        import numpy as np

        self.boxes = np.concatenate([self.boxes, boxes])


def anchor(text: Any) -> tuple[float, float]:
    """The place of an annotation's point, in pixels."""
    transform = text.axes.transData if text.xycoords == "data" else text.xycoords
    x, y = transform.transform(text.xy)
    return float(x), float(y)


def leader_boxes(text: Any) -> Any:
    """Boxes along the line that joins a text right of the axes to its point."""
    x, y = text.anncoords.transform(text.get_position())
    return boxes_along([anchor(text), (float(x), float(y))], 1, STEP)


def taken_places(figure: Any, axes: Any) -> Places:
    """Boxes of everything drawn on the axes: markers, and small ones along every line."""
    import numpy as np
    from matplotlib.collections import PathCollection

    found = [_point_boxes(figure, c) if isinstance(c, PathCollection) else _band_boxes(c) for c in axes.collections]
    for line in axes.get_lines():
        points = line.get_transform().transform(np.column_stack(line.get_data()).astype(float))
        found.append(boxes_along(points, max(2.0, line.get_linewidth() / 2 * figure.dpi / 72), STEP))
    return Places(np.concatenate([np.empty((0, 4)), *found]))


def marks_on(figure: Any, axes: Any, texts: Sequence[Any]) -> Any:
    """Every marker on the axes, as rows of x, y and half its width in pixels, and whether one of the annotations is its own."""
    import numpy as np
    from matplotlib.collections import PathCollection

    found = np.concatenate([np.empty((0, 3)), *(_marks(figure, c) for c in axes.collections if isinstance(c, PathCollection))])
    named = np.array([anchor(text) for text in texts if text.xycoords == "data"]).reshape(-1, 2)
    return np.column_stack([found, (np.abs(found[:, None, :2] - named).max(axis=2, initial=0.0) < 1).any(axis=1)])


def _marks(figure: Any, points: Any) -> Any:
    import numpy as np

    places, sizes = points.get_offset_transform().transform(np.asarray(points.get_offsets())), points.get_sizes()
    half = np.broadcast_to(np.sqrt(sizes) / 2 * figure.dpi / 72, len(places))
    return np.column_stack([np.asarray(places), half])


def _point_boxes(figure: Any, points: Any) -> Any:
    """A box around every point, as large as its marker."""
    import numpy as np

    found = _marks(figure, points)
    return np.concatenate([found[:, :2] - found[:, 2:], found[:, :2] + found[:, 2:]], axis=1)


def _band_boxes(band: Any) -> Any:
    """Boxes that cover a filled band."""
    import numpy as np

    outline = band.get_transform().transform_path(band.get_paths()[0])
    (x0, y0), (x1, y1) = outline.vertices.min(axis=0), outline.vertices.max(axis=0)
    grid = np.stack(np.meshgrid(np.arange(x0, x1, STEP), np.arange(y0, y1, STEP)), axis=-1).reshape(-1, 2)
    inside = grid[outline.contains_points(grid)]
    return np.concatenate([inside - STEP / 2, inside + STEP / 2], axis=1)


def boxes_along(points: Any, half: float, step: int) -> Any:
    """Small boxes along a line through points, so many pixels apart."""
    import numpy as np

    points = np.asarray(points, dtype=float)
    if len(points) < 2:
        return np.empty((0, 4))
    steps = np.maximum(1, np.abs(np.diff(points, axis=0)).max(axis=1) // step).astype(int)
    along = np.concatenate([np.arange(n) / n for n in steps.tolist()])[:, None]
    from_, way = np.repeat(points[:-1], steps, axis=0), np.repeat(np.diff(points, axis=0), steps, axis=0)
    places = np.concatenate([from_ + along * way, points[-1:]])
    return np.concatenate([places - half, places + half], axis=1)
