"""Charts beside each other: how many in each row, how large their texts are, and where each has its axes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvcalc.report.bars import height_for, widest
from kvcalc.report.chart import Chart
from kvcalc.report.heads import LINES, TITLE
from kvcalc.report.heat import SMALL as MAP
from kvcalc.report.heat import column_names, is_heat, row_names
from kvcalc.report.looks import letters, wrapped
from kvcalc.report.scales import along

WIDE, SMALL = 13.33, 0.8  # inches of several charts beside each other, and the size of their texts where they stand in rows
PLAIN, FINEST = 1.2, 8.0  # inches of a chart that no names take, and the smallest font that makes room for them, in points
LEAST_AXES = 0.9  # inches of axes and gaps that a name may leave where a page is of a size, for texts that are legible on it
EMS, ALIKE_EMS = 38, 22  # that a chart is wide; where all have the same axes without names at points, or cells
LEGIBLE = 0.59  # of its size, the smallest that such a width makes texts
LEAST = 0.3  # inches of a chart's width for each point of its font
LEAST_ROW = 2.2  # inches of a row of other charts than heat maps, at least, on a page of a size
ROW, ALIKE_ROW = 3.75, 3.1  # inches of a row, likewise
MOST = 3  # charts beside each other where they are not alike
MANY = 9  # charts of the same axes, beyond which four stand beside each other
GAP = 0.12  # inches around each chart
TIGHTEST = 0.6  # of the height that charts want, the least that a page of a size gives them
HEAD = 8.0  # heights of the text that a heat map has above and below its rows


class Grid(NamedTuple):
    """Charts in rows, so many in each, as wide as their row has room; inches of the page and of each row; the font in points;
    whether all have the same axes, and so the same width."""

    rows: tuple[int, ...]
    width: float
    heights: tuple[float, ...]
    font: float
    alike: bool

    @property
    def columns(self) -> int:
        return max(self.rows)

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """Row, column and charts of the row of each chart."""
        for row, count in enumerate(self.rows):
            yield from ((row, column, self.columns if self.alike else count) for column in range(count))


def arranged(charts: Sequence[Chart], look: dict[str, Any]) -> Grid:
    """As much room for each as its names and bars need; where the page is of a size, more charts in a row, and no more."""
    grid, page = _sized(charts, look, MOST), look["size"][1]
    if not look["whole"] or sum(grid.heights) <= page:
        return grid
    grid = min(grid, _sized(charts, look, MOST, True), _sized(charts, look, MOST + 1, True), key=lambda one: sum(one.heights))
    share = min(1.0, page / sum(grid.heights))
    return grid._replace(heights=tuple(share * inches for inches in grid.heights)) if share > TIGHTEST else grid


def _sized(charts: Sequence[Chart], look: dict[str, Any], most: int, close: bool = False) -> Grid:
    """So many charts in a row at most, but of those that are alike; close: rows of heat maps are as low as they can be."""
    alike = len(charts) > 2 and _alike(charts)
    rows = _rows(charts, look, alike, most)
    width, height = look["size"]
    width = min(width * max(rows), WIDE)
    each = width / max(rows)
    named = any(text for chart in charts for s in chart.series if s.kind == "points" for text in s.labels)
    ems = ALIKE_EMS if (alike or all(map(is_heat, charts))) and not named else EMS
    size = min(look["font"] * (SMALL if len(rows) > 1 else 1.0), max(each * 72 / ems, LEGIBLE * look["font"], FINEST))
    finest, beside = LEGIBLE * look["font"], 0.6 * widest(charts, letters(each, LEGIBLE * look["font"])) / 72
    narrow = look["whole"] and (each - LEAST_AXES) / beside >= finest
    font = min(size, max(finest if narrow else FINEST, (each - PLAIN) / beside))
    firsts = [sum(rows[:n]) for n in range(len(rows))]
    mixed = not all(map(is_heat, charts))
    sized = look | {"font": font, "letters": letters(each, font)}
    low = [_low(charts[at], sized, width, close) if mixed and rows[n] == 1 else 0.0 for n, at in enumerate(firsts)]
    plain = sum(not inches for inches in low) or 1
    least = (ALIKE_ROW if alike else ROW) if len(rows) > 1 else 0.0
    row = max(height_for(one, sized, max(least, (height - sum(low)) / plain)) for one in charts)
    if close and any(low):
        row = min(row, max(LEAST_ROW, (height - sum(low)) / plain))
    return Grid(rows, width, tuple(inches or row for inches in low), font, alike)


def _low(chart: Chart, look: dict[str, Any], width: float, close: bool) -> float:
    """Inches of a heat map that has a row for itself, its cells some apart or as close as they can be; 0 of another chart."""
    if not is_heat(chart):
        return 0.0
    lines = sum((name.count("\n") + 1) * 1.3 if close else (name.count("\n") + 1.5) * 1.3 for name in row_names(chart))
    below = 1.2 * max((name.count("\n") for name in column_names(chart, look, width)[0]), default=0)
    return float((HEAD + lines + below) * look["font"] / 72)


def _alike(charts: Sequence[Chart]) -> bool:
    """Whether all have the same axes over the same values."""
    return len({(c.x.title, c.y.title, *(end for name in "xy" for end in _ends(c, name))) for c in charts}) == 1


def _ends(chart: Chart, name: str) -> tuple[object, ...]:
    """What an axis spans: its least and greatest value, on a heat map its names or columns; itself of bars, like no other."""
    if is_heat(chart):
        return (chart.x.shown or chart.categories) if name == "x" else tuple(s.label for s in chart.series)
    axis = chart.x if name == "x" else chart.y
    values = [v for s in chart.series for v in along(s, name) if v > 0 or not axis.log] + [*axis.shown]
    return (id(chart),) if chart.categories or not values else (min(values), max(values))


def _rows(charts: Sequence[Chart], look: dict[str, Any], alike: bool, most: int) -> tuple[int, ...]:
    """How many charts each row has; a heat map among others has a row for itself, as its columns need, but small ones of many."""
    heats = [is_heat(chart) for chart in charts]
    small = all(len(chart.categories) <= MAP >= len(chart.series) for chart in charts if is_heat(chart))
    if not any(heats) or all(heats) or (small and sum(heats) > 1):
        return _spread(len(charts), look, alike, most)
    runs = [(heat, len([*those])) for heat, those in itertools.groupby(heats)]
    return tuple(n for heat, count in runs for n in ((1,) * count if heat else _spread(count, look, alike, most, True)))


def _spread(count: int, look: dict[str, Any], alike: bool, most: int, among: bool = False) -> tuple[int, ...]:
    """So many charts in rows, no more beside each other than their texts have room for; the last rows have one less.

    among: there are rows of other charts.
    """
    columns = _columns(count, look, alike, among) if most == MOST else min(count, most)
    rows = -(-count // columns)
    if alike:
        return (columns,) * (rows - 1) + (count - columns * (rows - 1),)
    return tuple(count // rows + (row < count % rows) for row in range(rows))


def _columns(count: int, look: dict[str, Any], alike: bool, among: bool) -> int:
    """At most MOST, of many that are alike four."""
    if count < 3:
        return count
    if alike and (count > MANY or (count > 4 and count % 4 == 0)):
        return 4
    for columns in (2,) if count == 4 else (3, 2):
        rows = -(-count // columns)
        if alike or WIDE / columns >= LEAST * look["font"] * (SMALL if rows > 1 or among else 1.0):
            break
    return columns


def panels(figure: Any, grid: Grid) -> list[Any]:
    """Axes of each chart; rows of unlike counts are divided each by itself."""
    if len(set(grid.rows)) == 1 or grid.alike:
        cells = figure.add_gridspec(len(grid.rows), grid.columns)
        return [figure.add_subplot(cells[row, column]) for row, column, _ in grid.cells()]
    below = figure.add_gridspec(len(grid.rows), 1, height_ratios=grid.heights)
    rows = [below[row].subgridspec(1, count) for row, count in enumerate(grid.rows)]
    return [figure.add_subplot(rows[row][column]) for row, column, _ in grid.cells()]


def engine(grid: Grid) -> Any:
    """matplotlib's constrained layout, then each chart as wide as its cell: all gaps are alike, whatever stands in a column."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class Cells(ConstrainedLayoutEngine):
        def execute(self, fig: Any) -> Any:
            kept = super().execute(fig)
            if not grid.alike and grid.columns > 1:
                for axes, (_, column, count) in zip(fig.axes, grid.cells(), strict=True):
                    _fill(axes, column, count)
            elif grid.alike:
                _centre(fig.axes, grid)
            return kept

    return Cells(w_pad=GAP, h_pad=0.08)  # inches: hinted and unhinted text are not equally wide


def _fill(axes: Any, column: int, columns: int) -> None:
    """Make axes so wide that they and what stands left and right of them fill their column."""
    figure = axes.figure
    renderer, page = figure.canvas.get_renderer(), figure.bbox
    frame, around = axes.get_window_extent(renderer), axes.get_tightbbox(renderer, for_layout_only=True)
    gap = GAP * figure.dpi
    left = page.width * column / columns + gap + frame.x0 - around.x0
    right = page.width * (column + 1) / columns - gap - (around.x1 - frame.x1)
    place = axes.get_position()
    axes.set_position([left / page.width, place.y0, (right - left) / page.width, place.height])


def _centre(places: Sequence[Any], grid: Grid) -> None:
    """Move the charts of a last row with fewer than the others to its middle."""
    first, second, mine = places[0].get_position(), places[1].get_position(), places[len(places) - grid.rows[-1] :]
    aside = (grid.columns - len(mine)) * (second.x0 - first.x0) / 2
    for axes in mine if aside else ():
        axes.set_position(axes.get_position().translated(aside, 0))
        axes.set_in_layout(True)


def shared(places: Sequence[Any], grid: Grid) -> None:
    """Ticks and names of the same axes at the left and below alone, where each stands above another."""
    columns = {*map(_columns_of, places)}
    for number, axes in enumerate(places):
        if number % grid.columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if {*grid.rows[number // grid.columns + 1 :][:1]} == {grid.columns}:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=len(columns) > 1)


def _columns_of(axes: Any) -> tuple[str, ...]:
    """The names of a heat map's columns; nothing else has any before it is drawn."""
    return tuple(text.get_text() for text in axes.get_xticklabels())


def follow(places: Sequence[Any]) -> None:
    """Ticks without texts where those of the same axes at the edges have theirs, and as few on each that spans the same."""
    spans = [(axes.get_xlabel(), *axes.get_xlim()) for axes in places]
    ticks = [[at for at in axes.get_xticks() if low <= at <= high] for axes, (_, low, high) in zip(places, spans, strict=True)]
    for axes, mine, span in zip(places, ticks, spans, strict=True):
        fewest = min((some for some, other in zip(ticks, spans, strict=True) if other == span), key=len)
        if axes.get_xlabel() and len(fewest) < len(mine):
            axes.set_xticks(fewest)
    for axes in places:
        for axis, edge in ((axes.xaxis, places[-1].xaxis), (axes.yaxis, places[0].yaxis)):
            low, high = sorted(axis.get_view_interval())
            if not axis.get_ticklabels():
                axis.set_ticks([at for at in edge.get_majorticklocs() if low <= at <= high])


def write_above(figure: Any, chart: Chart, look: dict[str, Any], width: float) -> None:
    """What all charts of a picture so many inches wide have in common, above them."""
    from matplotlib.text import Annotation

    if not chart.over[0]:
        return
    font, (title, about) = look["font"], chart.over
    words = wrapped(title, int(width * 90 / font), TITLE, even=True, whole=True)
    below = wrapped(about, int(width * 160 / font), LINES, even=True, whole=True)
    place = {"x": 0.12 / width, "ha": "left", "fontweight": "bold", "fontsize": font * 1.3}
    above = figure.suptitle(words + "\n" * (below.count("\n") + 1), **place)
    text = figure.add_artist(Annotation(below, (0, 0), xycoords=above, fontsize=font * 0.9, va="bottom"))
    text.set_in_layout(False)  # it stands in the last lines of the title
