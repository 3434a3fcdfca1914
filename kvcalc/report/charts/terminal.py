"""Draw charts with characters in a terminal.

Lines are drawn in braille, eight dots per cell, with a mark at the end. Bars are drawn in whole
cells.
"""

import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from kvcalc.report.charts.chart import MARKERS, Axis, Chart, Charts

HEIGHT = 20  # rows of a grid
MARKS = "●■▲◆○□△◇"  # one per series
LEVEL = "·"  # sign of a limit
BRAILLE = 0x2800  # the cell without dots
# bits of a braille cell by row from below, and column
DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
UNDRAWN_KINDS = ("limit", "upright")  # kinds that are not drawn as lines or points


def sketch(charts: Charts, width: int = 0) -> str:
    """Return a picture drawn with characters: its charts below each other, each with a key.

    Args:
        charts: The charts.
        width: Characters per line; 0 for the width of the terminal.
    """
    columns = max(40, min(width or shutil.get_terminal_size((80, 24)).columns, 160))
    pictures = []
    for part in charts:
        lines = []
        for text in (*part.picture_head, part.title, part.subtitle):
            lines += textwrap.wrap(text, columns, subsequent_indent="    ")
        if part.is_heat:
            lines.append(", ".join(part.categories))
            for row in reversed(part.series):
                lines += textwrap.wrap(f"{row.label}: {', '.join(row.labels)}", columns)
        elif part.categories:
            lines += _bar_lines(part, columns)
        else:
            lines += _grid_lines(part, columns)
        pictures.append("\n".join(lines))
    return "\n\n".join(pictures)


def _key_lines(entries: Iterable[tuple[str, str]], columns: int) -> list[str]:
    """Return the lines of the key, from the sign and the name of each series."""
    lines = []
    for sign, name in entries:
        lines += textwrap.wrap(
            name, columns, initial_indent=f"  {sign} ", subsequent_indent="    "
        )
    return lines


def _share_of(axis: Axis, values: Sequence[float]) -> Callable[[float], float]:
    """Return a function that maps a value to its position on an axis, from 0 at the smallest value
    to 1 at the largest."""
    scale = math.log if axis.log else float
    low = scale(min(values))
    length = scale(max(values)) - low or 1.0
    return lambda value: (scale(value) - low) / length


def _grid_lines(chart: Chart, columns: int) -> list[str]:
    """Return lines and points on a grid, with the values at the ends of both axes."""
    visible = [
        s
        for s in chart.series
        if s.kind not in UNDRAWN_KINDS and (s.label or s.kind not in ("hollow", "quiet"))
    ]
    levels = chart.of_kind("limit")
    xs = [x for series in visible for x in series.xs]
    ys = [y for series in (*visible, *levels) for y in series.ys]
    x_share, y_share = _share_of(chart.x, xs), _share_of(chart.y, ys)
    low, high = chart.y.tick(min(ys)), chart.y.tick(max(ys))
    margin = max(len(low), len(high))
    width = columns - margin - 2
    cells: dict[tuple[int, int], str] = {}  # signs by row from below, and column

    def place(x: float, y: float) -> tuple[int, int]:
        """Return the row and the column of the dot at a position (x, y), both from 0 to 1."""
        return round(y * (4 * HEIGHT - 1)), round(x * (2 * width - 1))

    for series in levels:
        row = place(0, y_share(series.ys[0]))[0] // 4
        cells |= dict.fromkeys(((row, column) for column in range(width)), LEVEL)
    key = []
    number, colour = -1, -2
    for series in visible:
        if series.label or series.colour != colour:  # otherwise points of the line before
            number += 1
        colour, mark = series.colour, MARKS[number % len(MARKS)]
        places = [place(x_share(x), y_share(y)) for x, y in zip(series.xs, series.ys)]
        if series.kind not in MARKERS:
            for start, end in pairwise(places):
                _draw_line(cells, start, end)
            places = places[-1:]
        cells |= {(row // 4, column // 2): mark for row, column in places}
        if name := series.label or ", ".join(filter(None, series.labels)):
            key.append((mark, name))
    key += [(LEVEL, series.label) for series in levels]
    lines = [chart.y.title]
    for row in reversed(range(HEIGHT)):
        text = "".join(cells.get((row, column), " ") for column in range(width)).rstrip()
        name = {0: low, HEIGHT - 1: high}.get(row, "")
        lines.append(f"{name:>{margin}} │{text}")
    low, high = chart.x.tick(min(xs)), chart.x.tick(max(xs))
    room = max(1, width - len(low) - len(high))
    title = chart.x.title if len(chart.x.title) < room else ""
    lines.append(" " * (margin + 1) + "└" + "─" * width)
    lines.append(" " * (margin + 2) + low + f"{title:^{room}}" + high)
    return [*lines, *_key_lines(key, columns)]


def _draw_line(
    cells: dict[tuple[int, int], str], start: tuple[int, int], end: tuple[int, int]
) -> None:
    """Add the dots of a straight line to cells. Cells with a mark do not change."""
    steps = max(1, abs(end[0] - start[0]), abs(end[1] - start[1]))
    for step in range(steps + 1):
        row, column = (round(a + (b - a) * step / steps) for a, b in zip(start, end))
        sign = cells.get((row // 4, column // 2), " ")
        if sign not in MARKS:
            cells[row // 4, column // 2] = chr(
                max(ord(sign), BRAILLE) | DOTS[row % 4][column % 2]
            )


def _bar_lines(chart: Chart, columns: int) -> list[str]:
    """Return the lines of a bar chart: bars followed by their texts, and a separate row for each
    limit."""
    parts = chart.of_kind("bar")
    bars = [*zip(*(part.ys for part in parts))]
    texts = parts[-1].labels or [chart.y.tick(sum(lengths)) for lengths in bars]
    rows = [(name, text, MARKS) for name, text in zip(chart.categories, texts)]
    for series in chart.of_kind("limit"):
        rows.append((series.label, "", LEVEL))
        bars.append((series.ys[0],))
    margin = min(max(len(name) for name, *_ in rows), columns // 2) + 2
    room = columns - margin - max(12, *(len(text) + 2 for text in texts))
    scale = room / (max(map(sum, bars)) or 1.0)
    lines = []
    for (name, text, signs), lengths in zip(rows, bars):
        *above, last = textwrap.wrap(name, margin - 2)
        row = f"{last:<{margin}}"
        for number, total in enumerate(accumulate(lengths)):
            row = row.ljust(margin + round(scale * total), signs[number % len(signs)])
        lines += [*above, f"{row} {text}".rstrip()]
    key = [(MARKS[number % len(MARKS)], part.label) for number, part in enumerate(parts)]
    return [*lines, *_key_lines(key, columns)]
