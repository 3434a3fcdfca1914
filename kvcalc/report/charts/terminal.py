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
from collections.abc import Iterator
from typing import NamedTuple

from kvcalc.report.charts.chart import Axis, Chart, Series

HEIGHT = 20  # rows of a grid
COLOURS = (34, 33, 32, 35, 36, 31, 90, 94)  # of the terminal's palette
BRAILLE = 0x2800  # the cell without dots
DOTS = (
    (0x40, 0x80),
    (0x04, 0x20),
    (0x02, 0x10),
    (0x01, 0x08),
)  # bits by row from below, column
POINTS = ("points", "hollow")


class Signs(NamedTuple):
    """Characters that a terminal takes.

    Attributes:
        marks: One mark per series.
        level: A limit.
        side: The y axis.
        corner: Where the axes meet.
        foot: The x axis.
        has_dots: Whether a cell of a line has eight dots.
    """

    marks: str
    level: str
    side: str
    corner: str
    foot: str
    has_dots: bool


FINE = Signs(
    "●■▲◆○□△◇",
    "·",
    "│",
    "└",
    "─",
    True,
)
ASCII = Signs(
    "ox#*+@%&",
    ".",
    "|",
    "+",
    "-",
    False,
)


class CellStyle(NamedTuple):
    """How a chart is drawn.

    Attributes:
        signs: The characters.
        has_colour: Whether series have colours.
    """

    signs: Signs
    has_colour: bool

    def mark(self, number: int) -> str:
        """Return the mark of a series."""
        return self.signs.marks[number % len(self.signs.marks)]

    def paint(self, text: str, number: int) -> str:
        """Return a text in the colour of a series; -1 has no colour."""
        if not self.has_colour or number < 0 or not text.strip():
            return text
        return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"


def sketch(chart: Chart, width: int = 0, style: CellStyle | None = None) -> str:
    """Return the charts of a picture below each other, with a key below each.

    Args:
        chart: The picture.
        width: Columns; 0 for the width of the terminal.
        style: Characters and colours; those of standard output by default.
    """
    columns = width or shutil.get_terminal_size((80, 24)).columns
    columns = max(40, min(columns, 160))
    style = style or _terminal_style()
    parts = []
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
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _terminal_style() -> CellStyle:
    encoding = (sys.stdout.encoding or "").lower()
    signs = FINE if encoding.replace("-", "").startswith("utf") else ASCII
    return CellStyle(signs, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def _key_lines(
    names: list[tuple[int, str]], levels: list[Series], columns: int, style: CellStyle
) -> list[str]:
    """Return the key: names with the number of their mark, then limits."""
    entries = [(style.paint(f"  {style.mark(n)}", n), name) for n, name in names if name]
    entries += [(f"  {style.signs.level}", level.label) for level in levels]
    lines = []
    for mark, name in entries:
        first, *rest = textwrap.wrap(name, columns - 4) or [""]
        lines += [f"{mark} {first}", *(f"    {line}" for line in rest)]
    return lines


class _Scale:
    """Positions on an axis, as shares from 0 to 1."""

    def __init__(self, axis: Axis, values: list[float]) -> None:
        self.axis = axis
        scaled = [math.log10(v) if axis.log else v for v in values] or [0.0]
        self.low = min(scaled)
        self.length = max(scaled) - self.low or 1.0

    def share(self, value: float) -> float:
        """Return the position of a value."""
        scaled = math.log10(value) if self.axis.log else value
        return (scaled - self.low) / self.length

    def ends(self) -> tuple[str, str]:
        """Return the texts at both ends."""
        ends = (self.low, self.low + self.length)
        low, high = (self.axis.tick(10**end if self.axis.log else end) for end in ends)
        return low, high


class _Canvas:
    """Cells of characters and dots. The last to draw in a cell gives its colour."""

    def __init__(self, columns: int, style: CellStyle) -> None:
        self.columns, self.style = columns, style
        self.cells = [[" "] * columns for _ in range(HEIGHT)]  # from below
        self.owners = [[-1] * columns for _ in range(HEIGHT)]
        self.across, self.up = (2, 4) if style.signs.has_dots else (1, 1)  # dots of a cell

    def put(self, x: float, y: float, sign: str, owner: int) -> None:
        """Draw a character at shares of the width and height."""
        row, column = _index(y, HEIGHT), _index(x, self.columns)
        self.cells[row][column] = sign
        self.owners[row][column] = owner

    def line(self, start: tuple[float, float], end: tuple[float, float], owner: int) -> None:
        """Draw a straight line of dots. Marks stay."""
        (x0, y0), (x1, y1) = start, end
        width, height = self.columns * self.across, HEIGHT * self.up
        steps = 1 + int(max(abs(x1 - x0) * width, abs(y1 - y0) * height))
        for step in range(steps + 1):
            x = _index(x0 + (x1 - x0) * step / steps, width)
            y = _index(y0 + (y1 - y0) * step / steps, height)
            row, column = y // self.up, x // self.across
            sign = self.cells[row][column]
            if sign in self.style.signs.marks:
                continue
            if self.style.signs.has_dots:
                bits = ord(sign) - BRAILLE if BRAILLE <= ord(sign) < BRAILLE + 256 else 0
                sign = chr(BRAILLE + (bits | DOTS[y % 4][x % 2]))
            else:
                sign = self.style.mark(owner)
            self.cells[row][column] = sign
            self.owners[row][column] = owner

    def lines(self) -> Iterator[str]:
        """Yield the rows from the top, in colour."""
        for cells, owners in zip(reversed(self.cells), reversed(self.owners), strict=True):
            text = ""
            for owner, run in itertools.groupby(range(self.columns), owners.__getitem__):
                text += self.style.paint("".join(cells[column] for column in run), owner)
            yield text.rstrip()


def _index(share: float, count: int) -> int:
    return min(count - 1, max(0, round(share * (count - 1))))


def _points(series: Series, chart: Chart) -> list[tuple[float, float]]:
    """Return the points that the axes can show."""
    points = zip(series.xs, series.ys, strict=True)
    return [
        (x, y) for x, y in points if (x > 0 or not chart.x.log) and (y > 0 or not chart.y.log)
    ]


def _grid_lines(chart: Chart, columns: int, style: CellStyle) -> list[str]:
    hidden = ("limit", "upright", "trail", "span", "band")
    drawn = [s for s in chart.series if s.kind not in hidden]
    drawn = [s for s in drawn if s.kind not in ("hollow", "quiet") or s.label]
    levels = [s for s in chart.series if s.kind == "limit"]
    uprights = [s for s in chart.series if s.kind == "upright"]
    points = [point for series in drawn for point in _points(series, chart)]
    x_scale = _Scale(chart.x, [x for x, _ in points])
    y_scale = _Scale(chart.y, [y for _, y in points] + [s.ys[0] for s in levels])
    low, high = y_scale.ends()
    margin = max(len(low), len(high)) + 2
    canvas = _Canvas(columns - margin, style)
    sign = style.signs.level
    for level in levels:
        for column in range(canvas.columns):
            share = column / (canvas.columns - 1)
            canvas.put(share, y_scale.share(level.ys[0]), sign, -1)
    for upright in uprights:
        for row in range(HEIGHT):
            canvas.put(x_scale.share(upright.xs[0]), row / (HEIGHT - 1), sign, -1)
    names: list[tuple[int, str]] = []
    numbers: dict[tuple[tuple[float, ...], tuple[float, ...]], int] = {}
    for series in drawn:
        places = [(x_scale.share(x), y_scale.share(y)) for x, y in _points(series, chart)]
        is_points = series.kind in POINTS
        number = len({n for n, _ in names})
        if is_points:  # points on a line have its mark
            number = numbers.get((series.xs, series.ys), number)
        else:
            numbers[series.xs, series.ys] = number
            for start, end in itertools.pairwise(places):
                canvas.line(start, end, number)
        for x, y in places if is_points else places[-1:]:
            canvas.put(x, y, style.mark(number), number)
        names.append((number, series.label or ", ".join(filter(None, series.labels))))
    texts = {0: high, HEIGHT - 1: low}
    lines = [
        f"{texts.get(row, ''):>{margin - 2}} {style.signs.side}{cells}"
        for row, cells in enumerate(canvas.lines())
    ]
    left, right = x_scale.ends()
    room = max(1, canvas.columns - len(left) - len(right))
    title = chart.x.title if len(chart.x.title) < room else ""
    lines.append(" " * (margin - 1) + style.signs.corner + style.signs.foot * canvas.columns)
    lines.append(" " * margin + left + f"{title:^{room}}" + right)
    if not all(re.search("[^0-9.,]", text) for text in (low, high)):  # numbers without a unit
        lines.insert(0, chart.y.title)
    return [*lines, *_key_lines(names, [*levels, *uprights], columns, style)]


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
    """Return bars, with their texts behind them, and the limits that have room behind those."""
    parts = [s for s in chart.series if s.kind == "bar"]
    limits = [s for s in chart.series if s.kind == "limit"]
    totals = [sum(lengths) for lengths in zip(*(part.ys for part in parts), strict=True)]
    margin = min(max(map(len, chart.categories)), columns // 2) + 2
    longest = max([*totals, *(s.ys[0] for s in limits)]) or 1.0
    texts = parts[-1].labels or tuple(map(chart.y.tick, totals))
    room = columns - margin - max(12, *(len(text) + 2 for text in texts))
    limit_columns = sorted(margin + round(room * s.ys[0] / longest) for s in limits)
    lines = []
    for index, name in enumerate(chart.categories):
        *above, last = textwrap.wrap(name, margin - 2) or [""]
        row = f"{last:<{margin}}"
        sums = itertools.accumulate((part.ys[index] for part in parts), initial=0.0)
        ends = [round(room * end / longest) for end in sums]
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            is_solid = style.has_colour and style.signs.has_dots
            sign = "█" if is_solid else style.mark(number)
            row += style.paint(sign * (end - start), number)
        row = f"{row} {texts[index]}".rstrip()
        for column in limit_columns:
            gap = column - len(re.sub(r"\x1b\[\d+m", "", row))
            if gap > 0:
                row += " " * gap + style.signs.side
        lines += [*above, row]
    upright = style._replace(signs=style.signs._replace(level=style.signs.side))
    names = [(number, part.label) for number, part in enumerate(parts)]
    return [*lines, *_key_lines(names, limits, columns, upright)]
