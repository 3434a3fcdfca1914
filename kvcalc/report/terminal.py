"""A chart as characters: a glance in the terminal, not a measurement.

Lines are drawn in braille, eight dots a cell, with a mark of their own at the end; bars in eighths of a block. Where standard
output takes no such characters, ASCII stands for them; colours come on a terminal that wants them.
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

from kvcalc.report.chart import Axis, Chart, Series
from kvcalc.report.heat import heat_lines, is_heat

HEIGHT = 20
COLOURS = (34, 33, 32, 35, 36, 31, 90, 94)  # of the terminal's own palette
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell, by row and column


class Signs(NamedTuple):
    """The characters that a terminal takes. dots: whether cells have eight dots; parts: of a bar, from one eighth on."""

    marks: str
    level: str
    side: str
    corner: str
    foot: str
    dots: bool
    parts: str


FINE = Signs("●■▲◆○□△◇", "·", "│", "└", "─", True, "▏▎▍▌▋▊▉█")
ASCII = Signs("ox#*+@%&", ".", "|", "+", "-", False, "=")


class Look(NamedTuple):
    """How to draw: with which characters, and whether in colour."""

    signs: Signs
    colour: bool

    def mark(self, number: int) -> str:
        return self.signs.marks[number % len(self.signs.marks)]

    def painted(self, text: str, number: int) -> str:
        return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m" if self.colour and number >= 0 and text.strip() else text


def sketch(chart: Chart, width: int = 0, look: Look | None = None) -> str:
    """The chart in `width` columns (the terminal's by default), a mark for each series, a legend below; then what is beside."""
    wide, look = max(40, min(width or shutil.get_terminal_size((80, 24)).columns, 160)), look or _look()
    head = [part for line in (*chart.over, chart.title, chart.subtitle) if line for part in _fitted(line, wide)]
    drawn = "\n".join([*head, *_body(chart, wide, look)])
    return f"{drawn}\n\n{sketch(chart.beside, width, look)}" if chart.beside else drawn


def _body(chart: Chart, wide: int, look: Look) -> list[str]:
    if is_heat(chart):
        return heat_lines(chart, wide)
    return _bars(chart, wide, look) if chart.categories else _grid(chart, wide, look)


def _look() -> Look:
    fine = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return Look(FINE if fine else ASCII, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def _fitted(line: str, wide: int) -> list[str]:
    """A line that is too long, a title or a legend, as several."""
    return [line] if len(line) <= wide else textwrap.wrap(line, wide, subsequent_indent="    ")


def _legend(names: list[tuple[int, str]], levels: list[Series], wide: int, look: Look) -> list[str]:
    lines = [(look.painted(f"  {look.mark(n)}", n), label) for n, label in names if label]
    lines += [(f"  {look.signs.level}", s.label) for s in levels]
    return [
        (f"{mark} " if i == 0 else "    ") + part
        for mark, label in lines
        for i, part in enumerate(textwrap.wrap(label, wide - 4) or [""])
    ]


class _Canvas:
    """Cells of characters and dots; the last to draw in a cell owns its colour."""

    def __init__(self, columns: int, look: Look) -> None:
        self.columns, self.look = columns, look
        self.cells = [[" "] * columns for _ in range(HEIGHT)]
        self.owners = [[-1] * columns for _ in range(HEIGHT)]
        self.across, self.down = (2, 4) if look.signs.dots else (1, 1)

    def put(self, x: float, y: float, sign: str, owner: int) -> None:
        """A character at a place, 0 to 1 from left to right and from bottom to top."""
        row, column = _cell(y, HEIGHT), _cell(x, self.columns)
        self.cells[row][column], self.owners[row][column] = sign, owner

    def dot(self, x: float, y: float, owner: int) -> None:
        """A dot of a line: of braille, or the owner's mark where cells have none. A mark that stands there stays."""
        fine_x, fine_y = _cell(x, self.columns * self.across), _cell(y, HEIGHT * self.down)
        row, column = fine_y // self.down, fine_x // self.across
        held = self.cells[row][column]
        if held in self.look.signs.marks:
            return
        if not self.look.signs.dots:
            self.put(x, y, self.look.mark(owner), owner)
            return
        bits = ord(held) - 0x2800 if "\u2800" <= held <= "\u28ff" else 0
        bit = DOTS[3 - fine_y % 4][fine_x % 2]
        self.cells[row][column], self.owners[row][column] = chr(0x2800 + (bits | bit)), owner

    def level(self, y: float) -> None:
        row = _cell(y, HEIGHT)
        self.cells[row] = [self.look.signs.level if c == " " else c for c in self.cells[row]]

    def upright(self, x: float) -> None:
        for cells in self.cells:
            cells[_cell(x, self.columns)] = self.look.signs.level

    def lines(self) -> Iterator[str]:
        """From the top down, painted by owner."""
        for cells, owners in zip(reversed(self.cells), reversed(self.owners), strict=True):
            runs = itertools.groupby(zip(cells, owners, strict=True), key=lambda pair: pair[1])
            yield "".join(self.look.painted("".join(c for c, _ in run), owner) for owner, run in runs).rstrip()


def _cell(share: float, cells: int) -> int:
    return min(cells - 1, max(0, round(share * (cells - 1))))


def _grid(chart: Chart, wide: int, look: Look) -> list[str]:
    drawn = [s for s in chart.series if s.kind not in ("limit", "upright", "trail", "span", "band")]
    drawn = [s for s in drawn if s.kind not in ("hollow", "quiet") or s.label]  # a mark without a name tells nothing
    levels = [s for s in chart.series if s.kind in ("limit", "upright")]
    points = [point for s in drawn for point in _seen(s, chart)]
    heights = [*(y for _, y in points), *(s.ys[0] for s in levels if s.kind == "limit")]
    spans = _range([x for x, _ in points], chart.x), _range(heights, chart.y)
    ends = [chart.y.tick(_back(v, chart.y)) for v in spans[1]]
    margin = max(map(len, ends)) + 2
    canvas = _Canvas(wide - margin, look)
    for level in levels:
        if level.kind == "limit":
            canvas.level(_share(level.ys[0], spans[1], chart.y))
        else:
            canvas.upright(_share(level.xs[0], spans[0], chart.x))
    owners = _owners(drawn)
    for number, series in zip(owners, drawn, strict=True):
        _trace(canvas, series, number, chart, spans)
    labels = {0: ends[1], HEIGHT - 1: ends[0]}
    lines = [f"{labels.get(r, ''):>{margin - 2}} {look.signs.side}{cells}" for r, cells in enumerate(canvas.lines())]
    left, right = (chart.x.tick(_back(v, chart.x)) for v in spans[0])
    lines.append(" " * (margin - 1) + look.signs.corner + look.signs.foot * canvas.columns)
    room = max(1, canvas.columns - len(left) - len(right))
    lines.append(" " * margin + left + f"{chart.x.title if len(chart.x.title) < room else '':^{room}}" + right)
    named = [(n, s.label or ", ".join(filter(None, s.labels))) for n, s in zip(owners, drawn, strict=True)]
    unit = [chart.y.title] * any(end and not re.search("[^0-9.,]", end) for end in ends)  # that numbers alone do not say
    return [*unit, *lines, *_legend(named, levels, wide, look)]


def _owners(drawn: list[Series]) -> list[int]:
    """A number for each series; points on a line's own places have that of the line."""
    found, lines = list[int](), dict[tuple[tuple[float, ...], ...], int]()
    for series in drawn:
        points = series.kind in ("points", "hollow")
        number = lines.get((series.xs, series.ys)) if points else None
        found.append(max(found, default=-1) + 1 if number is None else number)
        lines |= {} if points else {(series.xs, series.ys): found[-1]}
    return found


Span = tuple[float, float]


def _trace(canvas: _Canvas, series: Series, number: int, chart: Chart, spans: tuple[Span, Span]) -> None:
    """Points as marks; a line as dots between them, straight on the chart's axes, and its mark at the end."""
    places = [(_share(x, spans[0], chart.x), _share(y, spans[1], chart.y)) for x, y in _seen(series, chart)]
    if series.kind in ("points", "hollow"):
        for x, y in places:
            canvas.put(x, y, canvas.look.mark(number), number)
        return
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        steps = 1 + int(max(abs(x1 - x0) * canvas.columns * canvas.across, abs(y1 - y0) * HEIGHT * canvas.down))
        for step in range(steps + 1):
            canvas.dot(x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps, number)
    if places:
        canvas.put(*places[-1], canvas.look.mark(number), number)


def _seen(series: Series, chart: Chart) -> list[tuple[float, float]]:
    """The points that the axes can show."""
    points = zip(series.xs, series.ys, strict=True)
    return [(x, y) for x, y in points if (x > 0 or not chart.x.log) and (y > 0 or not chart.y.log)]


def _bars(chart: Chart, wide: int, look: Look) -> list[str]:
    layers = [s for s in chart.series if s.kind == "bar"]
    levels = [s for s in chart.series if s.kind == "limit"]
    totals = [sum(s.ys[i] for s in layers) for i in range(len(chart.categories))]
    margin = min(max(len(c) for c in chart.categories), wide // 2) + 2
    most = max([*totals, *(s.ys[0] for s in levels)]) or 1.0
    texts = layers[-1].labels or tuple(map(chart.y.tick, totals))
    beside = wide - margin - max(12, *(len(text) + 2 for text in texts))
    lines = []
    for i, name in enumerate(chart.categories):
        lengths = [beside * s.ys[i] / most for s in layers]
        *above, last = textwrap.wrap(name, margin - 2) or [""]
        row = f"{last:<{margin}}{_bar(lengths, look)} {texts[i]}".rstrip()
        for at in sorted(margin + round(beside * s.ys[0] / most) for s in levels):
            free = at - len(re.sub(r"\x1b\[\d+m", "", row))
            row += (" " * free + look.signs.side) * (free > 0)
        lines += [*above, row]
    upright = look._replace(signs=look.signs._replace(level=look.signs.side))
    return [*lines, *_legend([(n, s.label) for n, s in enumerate(layers)], levels, wide, upright)]


def _bar(lengths: list[float], look: Look) -> str:
    """Parts one after the other, each in its own mark, in colour as solid blocks, the last of them to an eighth of a cell."""
    if not look.colour or not look.signs.dots:
        return "".join(look.painted(look.mark(n) * round(length), n) for n, length in enumerate(lengths))
    found, ends = [], [0, *(round(end) for end in itertools.accumulate(lengths[:-1]))]
    for number, (begun, end) in enumerate(itertools.pairwise([*ends, sum(lengths)])):
        whole, rest = divmod(max(0, round((end - begun) * 8)), 8)
        found.append(look.painted(look.signs.parts[7] * whole + (look.signs.parts[rest - 1] if rest else ""), number))
    return "".join(found)


def _scaled(value: float, axis: Axis) -> float:
    return math.log10(value) if axis.log else value


def _range(values: list[float], axis: Axis) -> Span:
    scaled = [_scaled(v, axis) for v in values] or [0.0]
    low, high = min(scaled), max(scaled)
    return (low, high) if high > low else (low, low + 1)


def _back(value: float, axis: Axis) -> float:
    return 10**value if axis.log else value


def _share(value: float, span: Span, axis: Axis) -> float:
    return (_scaled(value, axis) - span[0]) / (span[1] - span[0])
