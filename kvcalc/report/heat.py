"""A heat map on matplotlib's axes and in characters: a row a series, a column a category, a text in every cell."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.boxes import text_box
from kvcalc.report.chart import Chart
from kvcalc.report.looks import NAME, unwrapped, wrapped

FITS, FAILS = "#0072B2", "#D55E00"
LEAST, MOST, FAILED = 0.3, 0.95, (0.15, 0.3)  # how deep a cell's colour is; of what fails on light and on dark paper
FEW_LINES, LINES = 3, 6  # of a name at its size, no word of it broken, and at most
SMALL = 4  # rows, and columns, up to which a map is small
LEAST_NAME = 0.85  # of its size, the smallest that the name of a column is written in before it takes more lines


def is_heat(chart: Chart) -> bool:
    return any(s.kind == "cells" for s in chart.series)


def row_names(chart: Chart) -> list[str]:
    """The names of the rows, of many in a line each where that can be."""
    width = NAME if len(chart.series) <= SMALL else 2 * NAME
    return [wrapped(s.label, width, 3, even=True) for s in chart.series]


def column_names(chart: Chart, look: dict[str, Any], width: float) -> tuple[list[str], float]:
    """The names of the columns of a map so many inches wide, and their size in points."""
    room = max(6.0, 0.75 * width * 72 / (_columns(chart) * 0.6 * look["font"]))
    size = min(1.0, room / max(map(len, chart.categories)))
    if size < LEAST_NAME:
        whole = [wrapped(name, int(1.1 * room), FEW_LINES) for name in chart.categories]
        size = 1.0 if [*map(unwrapped, whole)] == [*chart.categories] else LEAST_NAME
    return [wrapped(name, int(1.1 * room / size), LINES, even=True) for name in chart.categories], size * look["font"]


def _columns(chart: Chart) -> int:
    return max(len(chart.categories), *map(int, chart.x.shown), 1)


def draw_heat(axes: Any, chart: Chart, look: dict[str, Any], width: float) -> None:
    """Cells from 0 to 1 in one colour, negative ones in the other; their texts on them.

    width: of the panel, in inches, for the lines of the columns' names. Where the chart's x axis shows a number, that many
    columns have room, so that the cells of maps beside each other are alike; the axis ends with its own.
    """
    paper = _rgb("#ffffff" if look["paper"] == "white" else look["paper"])
    shades = [[_shade(value, paper) for value in s.ys] for s in chart.series]
    axes.grid(False)
    axes.imshow(shades, aspect="auto", origin="lower", interpolation="nearest")
    for row, series in enumerate(chart.series):
        for column, text in enumerate(series.labels):
            dark = sum(shades[row][column]) < 1.5
            cell = axes.text(
                column, row, text, ha="center", va="center", fontsize=look["font"] * 0.85, color="white" if dark else "#1a1a1a"
            )
            cell.set(in_layout=False, visible=False)  # it stands within the axes, and is written at its last size alone
    axes.set_xlim(-0.5, _columns(chart) - 0.5)
    axes.spines["bottom"].set_bounds(-0.5, len(chart.categories) - 0.5)
    names, size = column_names(chart, look, width)
    axes.set_xticks(range(len(names)), names, fontsize=size)
    axes.set_yticks(range(len(chart.series)), row_names(chart))
    axes.set_xlabel(chart.x.title, **({"x": 0.0, "ha": "left"} if _columns(chart) > len(names) else {}))
    axes.set_ylabel(chart.y.title)


def fit_cells(places: Sequence[Any], renderer: Any) -> None:
    """The texts of all cells as small as the widest of them needs, and the rows; of all maps of a picture alike."""
    cells = [[t for t in axes.texts if not hasattr(t, "xycoords")] for axes in places]  # without the line below the title
    size = min((_fitting(*one, renderer) for one in zip(places, cells, strict=True)), default=0.0)
    for text in (t for texts in cells for t in texts):
        text.set(fontsize=size, visible=True)


def _fitting(axes: Any, texts: Sequence[Any], renderer: Any) -> float:
    """The size of texts at which the longest fits into a cell."""
    room = abs(axes.transData.transform((1, 1)) - axes.transData.transform((0, 0)))
    for name in axes.get_yticklabels():
        height = text_box(name, renderer).height
        name.set_fontsize(name.get_fontsize() * min(1.0, room[1] / height if height else 1.0))
    longest = max(texts, key=lambda t: len(t.get_text()))
    longest.set_visible(True)
    box = text_box(longest, renderer)
    return float(longest.get_fontsize() * min(1.0, 0.9 * room[0] / box.width, 0.9 * room[1] / box.height))


def heat_lines(chart: Chart, wide: int) -> list[str]:
    """The cells in columns, rows upwards; columns that a width has no room for are left out on the right."""
    rows = [[chart.y.title, *chart.categories], *([s.label, *s.labels] for s in reversed(chart.series))]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(sizes) + 2 * (len(sizes) - 1) > wide:
        sizes.pop()
    rows = [row[: len(sizes)] for row in rows]
    return ["  ".join(cell.rjust(size) for cell, size in zip(row, sizes, strict=True)) for row in rows]


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _shade(value: float, paper: tuple[float, ...]) -> tuple[float, ...]:
    depth = FAILED[sum(paper) < 1.5] if value < 0 else LEAST + (MOST - LEAST) * value
    return tuple(p + (c - p) * depth for p, c in zip(paper, _rgb(FAILS if value < 0 else FITS), strict=True))
