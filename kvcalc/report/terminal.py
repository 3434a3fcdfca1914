"""A chart as characters: a glance in the terminal, not a measurement."""

import itertools
import math
import shutil
import textwrap

from kvcalc.report.chart import Axis, Chart, Series

MARKS = "●■▲◆○□△◇"
HEIGHT = 20


def sketch(chart: Chart, width: int = 0) -> str:
    """The chart in `width` columns (the terminal's by default), a mark for each series, a legend below; then what is beside."""
    wide = max(40, min(width or shutil.get_terminal_size((80, 24)).columns, 160))
    lines = [chart.title, chart.subtitle, *(_bars(chart, wide) if chart.categories else _grid(chart, wide))]
    drawn = "\n".join(part for line in lines for part in _fitted(line, wide))
    return f"{drawn}\n\n{sketch(chart.beside, width)}" if chart.beside else drawn


def _fitted(line: str, wide: int) -> list[str]:
    """A line that is too long, a title or a legend, as several."""
    return [line] if len(line) <= wide else textwrap.wrap(line, wide, subsequent_indent="    ")


def _grid(chart: Chart, wide: int) -> list[str]:
    points = [(x, y) for s in chart.series if s.kind not in ("limit", "trail") for x, y in zip(s.xs, s.ys, strict=True)]
    points = [(x, y) for x, y in points if (x > 0 or not chart.x.log) and (y > 0 or not chart.y.log)]
    levels = [s.ys[0] for s in chart.series if s.kind == "limit"]
    low_x, high_x = _range([x for x, _ in points], chart.x)
    low_y, high_y = _range([*(y for _, y in points), *levels], chart.y)
    margin = max(len(chart.y.tick(v)) for v in (_back(low_y, chart.y), _back(high_y, chart.y))) + 2
    columns = wide - margin
    cells = [[" "] * columns for _ in range(HEIGHT)]
    for level in levels:
        row = _at(level, low_y, high_y, HEIGHT, chart.y)
        cells[row] = ["·" if c == " " else c for c in cells[row]]
    drawn = [s for s in chart.series if s.kind not in ("limit", "trail")]
    for number, series in enumerate(drawn):
        mark = MARKS[number % len(MARKS)]
        for x, y in _traced(series, chart, columns):
            if (x > 0 or not chart.x.log) and (y > 0 or not chart.y.log):
                cells[_at(y, low_y, high_y, HEIGHT, chart.y)][_at(x, low_x, high_x, columns, chart.x)] = mark
    labels = {0: chart.y.tick(_back(low_y, chart.y)), HEIGHT - 1: chart.y.tick(_back(high_y, chart.y))}
    lines = [f"{labels.get(r, ''):>{margin - 2}} │{''.join(cells[r])}".rstrip() for r in reversed(range(HEIGHT))]
    left, right = chart.x.tick(_back(low_x, chart.x)), chart.x.tick(_back(high_x, chart.x))
    lines.append(" " * (margin - 1) + "└" + "─" * columns)
    lines.append(" " * margin + left + f"{chart.x.title:^{max(1, columns - len(left) - len(right))}}" + right)
    named = [(n, s.label or ", ".join(filter(None, s.labels))) for n, s in enumerate(drawn)]
    lines += [f"  {MARKS[n % len(MARKS)]} {text}" for n, text in named if text]
    return [*lines, *(f"  · {s.label}" for s in chart.series if s.kind == "limit")]


def _traced(series: Series, chart: Chart, columns: int) -> list[tuple[float, float]]:
    """The points of a series; a line also passes between them, straight on the chart's axes."""
    points = list(zip(series.xs, series.ys, strict=True))
    if series.kind in ("points", "hollow") or any((x <= 0 and chart.x.log) or (y <= 0 and chart.y.log) for x, y in points):
        return points
    found = points[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        ends = ((_scaled(x0, chart.x), _scaled(x1, chart.x)), (_scaled(y0, chart.y), _scaled(y1, chart.y)))
        for step in range(1, columns + 1):
            x, y = (a + (b - a) * step / columns for a, b in ends)
            found.append((_back(x, chart.x), _back(y, chart.y)))
    return found


def _scaled(value: float, axis: Axis) -> float:
    return math.log10(value) if axis.log else value


def _bars(chart: Chart, wide: int) -> list[str]:
    layers = [s for s in chart.series if s.kind == "bar"]
    totals = [sum(s.ys[i] for s in layers) for i in range(len(chart.categories))]
    margin = max(len(c) for c in chart.categories) + 2
    most = max([*totals, *(s.ys[0] for s in chart.series if s.kind == "limit")]) or 1.0
    lines = []
    for i, name in enumerate(chart.categories):
        bar = "".join(MARKS[n % len(MARKS)] * round((wide - margin - 12) * s.ys[i] / most) for n, s in enumerate(layers))
        lines.append(f"{name:<{margin}}{bar} {chart.y.tick(totals[i])}")
    lines += [f"  {MARKS[n % len(MARKS)]} {s.label}" for n, s in enumerate(layers)]
    return [*lines, *(f"  · {s.label}" for s in chart.series if s.kind == "limit")]


def _range(values: list[float], axis: Axis) -> tuple[float, float]:
    scaled = [_scaled(v, axis) for v in values] or [0.0]
    low, high = min(scaled), max(scaled)
    return (low, high) if high > low else (low, low + 1)


def _back(value: float, axis: Axis) -> float:
    return 10**value if axis.log else value


def _at(value: float, low: float, high: float, cells: int, axis: Axis) -> int:
    scaled = _scaled(value, axis)
    return min(cells - 1, max(0, round((scaled - low) / (high - low) * (cells - 1))))
