"""Charts as characters, for a glance in the terminal.

Lines are drawn in braille, eight dots per cell, with a mark at the end. Bars are drawn in whole
cells. If standard output is not Unicode, ASCII replaces these characters.
"""

import itertools
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

from kvcalc.report.charts.chart import MARKERS, Axis, Chart

HEIGHT = 20  # rows of a grid
MARKS = "●■▲◆○□△◇"  # one per series
COLOURS = (34, 33, 32, 35, 36, 31, 90, 94)  # one per mark, of the terminal's palette
LEVEL = "·"  # sign of a limit
BRAILLE = 0x2800  # the cell without dots
# bits of a braille cell by row from below, and column
DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
ASCII = str.maketrans("●■▲◆○□△◇█·│└─–…×÷≥≤−", "ox#*+@%&#.|+--.x/><-")
HIDDEN = ("limit", "upright", "span", "band")  # kinds that are not drawn as lines or points
COLOUR_CODE = re.compile(r"\x1b\[\d+m")


def sketch(chart: Chart, width: int = 0, has_colour: bool = False) -> str:
    """Return the charts of a picture below each other, with a key below each.

    Args:
        chart: The picture.
        width: Columns; 0 for the width of the terminal.
        has_colour: Whether series have colours.
    """
    columns = max(40, min(width or shutil.get_terminal_size((80, 24)).columns, 160))
    pictures = []
    for part in chart.chain():
        lines = []
        for text in (*part.over, part.title, part.subtitle):
            lines += textwrap.wrap(text, columns, subsequent_indent="    ")
        if part.is_heat:
            lines += _heat_lines(part, columns)
        elif part.categories:
            lines += _bar_lines(part, columns, has_colour)
        else:
            lines += _grid_lines(part, columns)
        pictures.append("\n".join(lines))
    text = "\n\n".join(pictures)
    return text if has_colour else COLOUR_CODE.sub("", text)


def print_sketch(chart: Chart) -> None:
    """Print a picture with the colours and characters of standard output."""
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = sketch(chart, has_colour=has_colour)
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        text = re.sub("[\u2800-\u28ff]", "*", text).translate(ASCII)
    print(text)


def _paint(sign: str, number: int) -> str:
    """Return a sign in the colour of a series; -1 has no colour."""
    return f"\x1b[{COLOURS[number % len(COLOURS)]}m{sign}\x1b[0m" if number >= 0 else sign


def _mark(number: int) -> str:
    return MARKS[number % len(MARKS)]


def _key_lines(entries: Sequence[tuple[str, int, str]], columns: int) -> list[str]:
    """Return the key, from the sign, the number and the name of each series."""
    lines = []
    for sign, number, name in entries:
        if name:
            first, *others = textwrap.wrap(name, columns - 4)
            lines += [f"  {_paint(sign, number)} {first}", *(f"    {line}" for line in others)]
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
    """A grid of signs and the numbers of their series, by row from below and column."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.cells: dict[tuple[int, int], tuple[str, int]] = {}

    def put(self, x: float, y: float, sign: str, number: int) -> None:
        """Write a sign at shares of the width and height, or add dots to dots of a cell."""
        place = _index(y, 4 * HEIGHT), _index(x, 2 * self.columns)
        cell = place[0] // 4, place[1] // 2
        if not sign:
            previous = self.cells.get(cell, (" ", -1))[0]
            if previous in MARKS:
                return
            sign = chr(max(ord(previous), BRAILLE) | DOTS[place[0] % 4][place[1] % 2])
        self.cells[cell] = sign, number

    def line(self, start: tuple[float, float], end: tuple[float, float], number: int) -> None:
        """Draw a straight line of dots. Marks stay."""
        (x0, y0), (x1, y1) = start, end
        steps = 1 + int(max(abs(x1 - x0) * 2 * self.columns, abs(y1 - y0) * 4 * HEIGHT))
        for share in (step / steps for step in range(steps + 1)):
            self.put(x0 + (x1 - x0) * share, y0 + (y1 - y0) * share, "", number)

    def rows(self) -> list[str]:
        """Return the rows from the top, in colour."""
        return [
            "".join(
                _paint(*self.cells.get((row, column), (" ", -1)))
                for column in range(self.columns)
            ).rstrip()
            for row in reversed(range(HEIGHT))
        ]


def _index(share: float, count: int) -> int:
    return min(count - 1, max(0, round(share * (count - 1))))


def _grid_lines(chart: Chart, columns: int) -> list[str]:
    """Return lines and points on a grid, with the values at the ends of both axes."""
    visible = [s for s in chart.series if s.kind not in HIDDEN]
    visible = [s for s in visible if s.kind not in ("hollow", "quiet") or s.label]
    limits = [s for s in chart.series if s.kind in ("limit", "upright")]
    levels = [s.ys[0] for s in limits if s.kind == "limit"]
    x_share, x_low, x_high = _scale(chart.x, [x for s in visible for x in s.xs])
    y_share, low, high = _scale(chart.y, [*(y for s in visible for y in s.ys), *levels])
    margin = max(len(low), len(high)) + 2
    canvas = _Canvas(columns - margin)
    for series in limits:
        for share in (n / columns for n in range(columns + 1)):
            if series.kind == "limit":
                canvas.put(share, y_share(series.ys[0]), LEVEL, -1)
            else:
                canvas.put(x_share(series.xs[0]), share, LEVEL, -1)
    key = []
    numbers: dict[int, int] = {}
    for index, series in enumerate(visible):
        colour = series.colour if series.colour >= 0 else -index - 1
        number = numbers.setdefault(colour, len(numbers))
        places = [(x_share(x), y_share(y)) for x, y in zip(series.xs, series.ys, strict=True)]
        if series.kind not in MARKERS:
            for start, end in itertools.pairwise(places):
                canvas.line(start, end, number)
            places = places[-1:]
        for x, y in places:
            canvas.put(x, y, _mark(number), number)
        name = series.label or ", ".join(filter(None, series.labels))
        key.append((_mark(number), number, name))
    key += [(LEVEL, -1, series.label) for series in limits]
    rows = [f"{'':{margin - 2}} │{row}" for row in canvas.rows()]
    rows[0] = f"{high:>{margin - 2}}{rows[0][margin - 2 :]}"
    rows[-1] = f"{low:>{margin - 2}}{rows[-1][margin - 2 :]}"
    room = max(1, canvas.columns - len(x_low) - len(x_high))
    title = chart.x.title if len(chart.x.title) < room else ""
    rows.append(" " * (margin - 1) + "└" + "─" * canvas.columns)
    rows.append(" " * margin + x_low + f"{title:^{room}}" + x_high)
    return [chart.y.title, *rows, *_key_lines(key, columns)]


def _heat_lines(chart: Chart, width: int) -> list[str]:
    """Return the cells in columns; columns without room are left out on the right."""
    rows = [[chart.y.title, *chart.categories]]
    rows += [[series.label, *series.labels] for series in reversed(chart.series)]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = "  ".join(cell.rjust(size) for cell, size in zip(row, sizes, strict=True))
        lines.append(line[: width + 1].rpartition("  ")[0] if len(line) > width else line)
    return lines


def _bar_lines(chart: Chart, columns: int, is_solid: bool) -> list[str]:
    """Return bars with their texts behind them, and limits as rows of their own."""
    parts = [s for s in chart.series if s.kind == "bar"]
    totals = [sum(lengths) for lengths in zip(*(part.ys for part in parts), strict=True)]
    texts = parts[-1].labels or [*map(chart.y.tick, totals)]
    rows = [
        (name, text, lengths)
        for name, text, *lengths in zip(
            chart.categories, texts, *(part.ys for part in parts), strict=True
        )
    ]
    rows += [(s.label, "", [s.ys[0]]) for s in chart.series if s.kind == "limit"]
    margin = min(max(len(name) for name, *_ in rows), columns // 2) + 2
    longest = max(sum(lengths) for *_, lengths in rows) or 1.0
    room = columns - margin - max(12, *(len(text) + 2 for text in texts))
    lines = []
    for index, (name, text, lengths) in enumerate(rows):
        *above, last = textwrap.wrap(name, margin - 2)
        row = f"{last:<{margin}}"
        ends = [
            round(room * end / longest) for end in itertools.accumulate(lengths, initial=0.0)
        ]
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            sign = "█" if is_solid else _mark(number)
            if index >= len(texts):
                sign, number = LEVEL, -1
            row += _paint(sign * (end - start), number)
        lines += [*above, f"{row} {text}".rstrip()]
    key = [(_mark(number), number, part.label) for number, part in enumerate(parts)]
    return [*lines, *_key_lines(key, columns)]
