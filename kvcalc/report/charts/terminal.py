"""Charts as characters, for a glance in the terminal.

Lines are drawn in braille, eight dots per cell, with a mark at the end. Bars are drawn in whole
cells. If standard output takes no such characters, ASCII replaces them.
"""

import itertools
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcalc.report.charts.chart import MARKERS, Axis, Chart

HEIGHT = 20  # rows of a grid
COLOURS = (34, 33, 32, 35, 36, 31, 90, 94)  # of the terminal's palette
BRAILLE = 0x2800  # the cell without dots
# bits of a braille cell by row from below, and column
DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
HIDDEN = ("limit", "upright", "span", "band")  # kinds that are not drawn as lines or points


class CellStyle(NamedTuple):
    """Characters and colours of a terminal.

    Attributes:
        marks: One mark per series.
        level: Sign of a limit.
        side: Sign of the y axis.
        corner: Sign of the place at which the axes meet.
        foot: Sign of the x axis.
        has_dots: Whether a cell of a line has eight dots.
        has_colour: Whether series have colours.
    """

    marks: str
    level: str
    side: str
    corner: str
    foot: str
    has_dots: bool
    has_colour: bool = False

    def mark(self, number: int) -> str:
        """Return the mark of a series."""
        return self.marks[number % len(self.marks)]

    def paint(self, text: str, number: int) -> str:
        """Return a text in the colour of a series; -1 has no colour."""
        if not self.has_colour or number < 0:
            return text
        return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"


FINE = CellStyle("●■▲◆○□△◇", "·", "│", "└", "─", has_dots=True)
ASCII = CellStyle("ox#*+@%&", ".", "|", "+", "-", has_dots=False)


def sketch(chart: Chart, width: int = 0, style: CellStyle | None = None) -> str:
    """Return the charts of a picture below each other, with a key below each.

    Args:
        chart: The picture.
        width: Columns; 0 for the width of the terminal.
        style: Characters and colours; those of standard output by default.
    """
    columns = max(40, min(width or shutil.get_terminal_size((80, 24)).columns, 160))
    if style is None:
        is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        style = (FINE if is_unicode else ASCII)._replace(has_colour=has_colour)
    pictures = []
    for one in chart.chain():
        lines = []
        for text in (*one.over, one.title, one.subtitle):
            lines += textwrap.wrap(text, columns, subsequent_indent="    ")
        if one.is_heat:
            lines += _heat_lines(one, columns)
        elif one.categories:
            lines += _bar_lines(one, columns, style)
        else:
            lines += _grid_lines(one, columns, style)
        pictures.append("\n".join(lines))
    return "\n\n".join(pictures)


def _key_lines(entries: Sequence[tuple[str, str]], columns: int) -> list[str]:
    """Return the lines of the key, from a sign and a name per entry."""
    lines = []
    for sign, name in entries:
        if name:
            first, *rest = textwrap.wrap(name, columns - 4)
            lines += [f"  {sign} {first}", *(f"    {line}" for line in rest)]
    return lines


def _scale(axis: Axis, values: Sequence[float]) -> tuple[Callable[[float], float], str, str]:
    """Return a function from values to shares of the axis, and the texts at both ends."""
    low, high = min(values, default=1.0), max(values, default=1.0)

    def share(value: float) -> float:
        if high == low:
            return 0.0
        if axis.log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    return share, axis.tick(low), axis.tick(high)


class _Canvas:
    """A grid of signs with the numbers of their series, by row from below and column."""

    def __init__(self, columns: int, style: CellStyle) -> None:
        self.columns = columns
        self.style = style
        self.cells: dict[tuple[int, int], tuple[str, int]] = {}

    def put(self, x: float, y: float, sign: str, number: int) -> None:
        """Write a sign at shares of the width and height."""
        self.cells[_index(y, HEIGHT), _index(x, self.columns)] = sign, number

    def line(self, start: tuple[float, float], end: tuple[float, float], number: int) -> None:
        """Draw a straight line of dots. Marks stay."""
        across, up = (2, 4) if self.style.has_dots else (1, 1)
        width, height = self.columns * across, HEIGHT * up
        (x0, y0), (x1, y1) = start, end
        steps = 1 + int(max(abs(x1 - x0) * width, abs(y1 - y0) * height))
        for step in range(steps + 1):
            x = _index(x0 + (x1 - x0) * step / steps, width)
            y = _index(y0 + (y1 - y0) * step / steps, height)
            sign, _ = self.cells.get((y // up, x // across), (" ", -1))
            if sign in self.style.marks:
                continue
            dots = max(ord(sign), BRAILLE)
            sign = chr(dots | DOTS[y % 4][x % 2]) if up > 1 else self.style.mark(number)
            self.cells[y // up, x // across] = sign, number

    def lines(self) -> list[str]:
        """Return the rows from the top, in colour."""
        rows = []
        for row in reversed(range(HEIGHT)):
            cells = [self.cells.get((row, column), (" ", -1)) for column in range(self.columns)]
            rows.append("".join(self.style.paint(*cell) for cell in cells).rstrip())
        return rows


def _index(share: float, count: int) -> int:
    return min(count - 1, max(0, round(share * (count - 1))))


def _grid_lines(chart: Chart, columns: int, style: CellStyle) -> list[str]:
    """Return lines and points on a grid, with the values at the ends of both axes."""
    drawn = [s for s in chart.series if s.kind not in HIDDEN]
    drawn = [s for s in drawn if s.kind not in ("hollow", "quiet") or s.label]
    limits = [s for s in chart.series if s.kind in ("limit", "upright")]
    levels = [s.ys[0] for s in limits if s.kind == "limit"]
    x_share, left, right = _scale(chart.x, [x for s in drawn for x in s.xs])
    y_share, low, high = _scale(chart.y, [*(y for s in drawn for y in s.ys), *levels])
    margin = max(len(low), len(high)) + 2
    canvas = _Canvas(columns - margin, style)
    for series in limits:
        for share in (n / (columns - 1) for n in range(columns)):
            x, y = share, share
            if series.kind == "limit":
                y = y_share(series.ys[0])
            else:
                x = x_share(series.xs[0])
            canvas.put(x, y, style.level, -1)
    key = []
    numbers: dict[int, int] = {}
    for index, series in enumerate(drawn):
        style_key = series.colour if series.colour >= 0 else -index - 1
        number = numbers.setdefault(style_key, len(numbers))
        places = [(x_share(x), y_share(y)) for x, y in zip(series.xs, series.ys, strict=True)]
        if series.kind not in MARKERS:
            for start, end in itertools.pairwise(places):
                canvas.line(start, end, number)
            places = places[-1:]
        for x, y in places:
            canvas.put(x, y, style.mark(number), number)
        name = series.label or ", ".join(filter(None, series.labels))
        key.append((style.paint(style.mark(number), number), name))
    key += [(style.level, series.label) for series in limits]
    texts = {0: high, HEIGHT - 1: low}
    rows = [
        f"{texts.get(row, ''):>{margin - 2}} {style.side}{cells}"
        for row, cells in enumerate(canvas.lines())
    ]
    room = max(1, canvas.columns - len(left) - len(right))
    title = chart.x.title if len(chart.x.title) < room else ""
    rows.append(" " * (margin - 1) + style.corner + style.foot * canvas.columns)
    rows.append(" " * margin + left + f"{title:^{room}}" + right)
    if not all(re.search("[^0-9.,]", text) for text in (low, high)):  # numbers without a unit
        rows.insert(0, chart.y.title)
    return [*rows, *_key_lines(key, columns)]


def _heat_lines(chart: Chart, width: int) -> list[str]:
    """Return the cells in columns; columns without room are left out on the right."""
    rows = [[chart.y.title, *chart.categories]]
    rows += [[series.label, *series.labels] for series in reversed(chart.series)]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(sizes) + 2 * (len(sizes) - 1) > width:
        sizes.pop()
    return [
        "  ".join(cell.rjust(size) for cell, size in zip(row, sizes, strict=False))
        for row in rows
    ]


def _bar_lines(chart: Chart, columns: int, style: CellStyle) -> list[str]:
    """Return bars with their texts behind them, and the limits that have room behind those."""
    parts = [s for s in chart.series if s.kind == "bar"]
    limits = [s for s in chart.series if s.kind == "limit"]
    totals = [sum(lengths) for lengths in zip(*(part.ys for part in parts), strict=True)]
    margin = min(max(map(len, chart.categories)), columns // 2) + 2
    longest = max([*totals, *(s.ys[0] for s in limits)]) or 1.0
    texts = parts[-1].labels or [*map(chart.y.tick, totals)]
    room = columns - margin - max(12, *(len(text) + 2 for text in texts))
    limit_columns = sorted(margin + round(room * s.ys[0] / longest) for s in limits)
    is_solid = style.has_colour and style.has_dots
    lines = []
    for index, name in enumerate(chart.categories):
        *above, last = textwrap.wrap(name, margin - 2)
        row = f"{last:<{margin}}"
        sums = itertools.accumulate((part.ys[index] for part in parts), initial=0.0)
        ends = [round(room * end / longest) for end in sums]
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            sign = "█" if is_solid else style.mark(number)
            row += style.paint(sign * (end - start), number)
        row = f"{row} {texts[index]}".rstrip()
        for column in limit_columns:
            gap = column - len(re.sub(r"\x1b\[\d+m", "", row))
            if gap > 0:
                row += " " * gap + style.side
        lines += [*above, row]
    key = [(style.paint(style.mark(n), n), part.label) for n, part in enumerate(parts)]
    key += [(style.side, series.label) for series in limits]
    return [*lines, *_key_lines(key, columns)]
