"""Titles of charts and the assumptions below them, as wide as there is room beside each other."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.boxes import text_box
from kvcalc.report.chart import Chart
from kvcalc.report.looks import wrapped

TITLE, LINES = 3, 5  # lines at most of a title, and of what stands below it


class Head:
    """A chart's title and subtitle above its axes; widths: characters of a line of each."""

    def __init__(self, axes: Any, chart: Chart, look: dict[str, Any], width: float) -> None:
        self.axes, self.chart, self.look = axes, chart, look
        self.widths = int(width * 90 / look["font"]), int(width * 160 / look["font"])
        above = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points", "xytext": (0, look["font"] * 0.5)}
        self.subtitle = axes.annotate("", **above, fontsize=look["font"] * 0.85, va="bottom")
        self.subtitle.set_in_layout(False)

    @property
    def row(self) -> int:
        """Of the charts beside each other, from the top."""
        return int(self.axes.get_subplotspec().get_topmost_subplotspec().rowspan.start)

    @property
    def lines(self) -> list[str]:
        return wrapped(self.chart.subtitle, self.widths[1], LINES, even=True, whole=True).split("\n")

    def align(self, renderer: Any) -> tuple[float, float]:
        """Begin where the names and ticks left of the axes do; pixels of that place and of where the axes end."""
        frame, names = self.axes.get_window_extent(renderer), self.axes.yaxis.get_tightbbox(renderer)
        left = min(frame.x0, names.x0) if names else frame.x0
        share = (left - frame.x0) / frame.width
        self.title.set_x(share)
        self.subtitle.xy = (share, 1)
        return left, frame.x1

    def write(self, most: int) -> None:
        """Title and subtitle, above room for so many lines of subtitles."""
        lines, font = self.lines, self.look["font"]
        self.subtitle.set_text("\n".join(lines + [""] * (most - len(lines))))
        pad = font * (0.9 + 1.1 * most)
        title = wrapped(self.chart.title, self.widths[0], TITLE, even=True, whole=True)
        self.title = self.axes.set_title(title, loc="left", fontweight="bold", fontsize=font * 1.2, pad=pad, y=1.0)

    def narrowed(self, room: float, renderer: Any) -> bool:
        """Fewer characters a line where one of the texts is wider than so many pixels; whether it was."""
        found = []
        for text, width in zip((self.title, self.subtitle), self.widths, strict=True):
            longest = max(map(len, text.get_text().split("\n")))
            wide = text_box(text, renderer).width
            found.append(width if wide <= room else max(12, int(longest * room / wide) - 1))
        narrower = tuple(found) != self.widths
        self.widths = found[0], found[1]
        return narrower


def write_heads(heads: Sequence[Head]) -> None:
    """All of them, with room for as many lines of subtitles above each of a row."""
    lines: dict[int, int] = {}
    for head in heads:
        lines[head.row] = max(lines.get(head.row, 0), len(head.lines) if head.chart.subtitle else 0)
    for head in heads:
        head.write(lines[head.row])


def fit_heads(heads: Sequence[Head], renderer: Any) -> bool:
    """Align them, and narrow those that reach into the next chart or off the page; whether there were any."""
    sides = [head.align(renderer) for head in heads]
    page = heads[0].axes.figure.bbox.x1
    narrowed = False
    for head, (left, right) in zip(heads, sides, strict=True):
        beside = [after for other, (after, _) in zip(heads, sides, strict=True) if other.row == head.row and after > right]
        room = min([page, *beside]) - left - head.look["font"]
        narrowed |= head.narrowed(room, renderer)
    if narrowed:
        write_heads(heads)
    return narrowed
