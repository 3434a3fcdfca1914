"""Pictures as lists of charts. The `*_plot` modules make them, and `drawing` and `terminal` draw
them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from kvcalc.errors import UserError, visible
from kvcalc.units import format_bytes, format_seconds, format_si

MAX_CURVES = 16  # named lines of a chart
MAX_NAMES = 120  # named points of a chart
COLUMNS = ("xs", "ys", "sizes", "labels")  # fields with a value per point
LINES = ("line", "solid", "dashed", "edge")
MARKERS = ("points", "hollow")


class Series(NamedTuple):
    """One data series of a chart: a curve, markers, a limit, a part of bars or a heat map's row.

    Attributes:
        label: Name in the key or at the end of a line.
        xs: Horizontal positions. Empty for the kinds `bar`, `cells` and `limit`.
        ys: Vertical positions, lengths of bars, or shades of cells. A shade is from 0 to 1. The
            shade -1 marks a cell that does not fit in memory.
        kind: How the series is drawn:
            - lines: `line`, `solid` (never dashed), `dashed`, `edge` (thin) and `quiet` (thin and
              grey)
            - markers: `points` and `hollow`
            - `limit`: a horizontal line at its only y; in a bar chart, a vertical line
            - `upright`: a vertical line at its only x
            - `bar`: one part of stacked bars
            - `cells`: one row of a heat map
        sizes: Relative areas of markers, from 0 to 1; one value for all markers, or one for each.
            () for small markers.
        labels: Texts at points, in cells, or at the ends of bars; () for none, or for the lengths
            of bars.
        colour: Index into the palette. -1 means the index of the series among those drawn.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = "line"
    sizes: Sequence[float] = ()
    labels: Sequence[str] = ()
    colour: int = -1


class Axis(NamedTuple):
    """The title, number format, scale and range of one axis.

    Attributes:
        title: Quantity and unit.
        tick: Function that formats the value at a tick as text.
        log: Whether the axis is logarithmic.
        shown: Values that the range of the axis must include, in addition to the data.
    """

    title: str
    tick: Callable[[float], str] = str
    log: bool = True
    shown: Sequence[float] = ()


class Chart(NamedTuple):
    """The data and texts of one chart: curves and markers, stacked bars, or a heat map.

    Attributes:
        title: Title.
        subtitle: Assumptions, printed below the title.
        x: Horizontal axis.
        y: Vertical axis. In a bar chart, it is the axis of the bars' lengths.
        series: Data of the chart.
        categories: Names of bars, or of the columns of a heat map. They replace the x axis.
        picture_head: Title and assumptions of a picture with several charts. Only its first chart
            has them.
    """

    title: str
    subtitle: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    categories: Sequence[str] = ()
    picture_head: tuple[str, str] = ("", "")

    @property
    def is_heat(self) -> bool:
        """Return whether the chart is a heat map: a grid of coloured cells."""
        return bool(self.of_kind("cells"))

    def of_kind(self, kind: str) -> list[Series]:
        """Return the series of one kind, such as `bar` or `limit`."""
        return [series for series in self.series if series.kind == kind]


Charts = Sequence[Chart]


def drawable(chart: Chart) -> Chart:
    """Return the chart without control characters and without points that its axes cannot show.

    A logarithmic axis cannot show values of 0 or below. No axis shows None or NaN. Series without a
    colour get their index.

    Raises:
        UserError: The chart has no point that its axes can show. Or it has more than 16 named
            curves or more than 120 named points, which a reader cannot tell apart.
    """
    series = [_drawable_series(part, chart) for part in chart.series]
    if not any(part.ys for part in series if part.kind != "upright"):
        raise UserError("there is nothing to draw: no point has figures above 0")
    curves = sum(bool(part.label) for part in series if part.kind in LINES)
    points = 0 if chart.categories else sum(len(part.labels) for part in series)
    for count, noun, maximum in (
        (points, "points with names", MAX_NAMES),
        (curves, "curves", MAX_CURVES),
    ):
        if count > maximum:
            raise UserError(
                f"{count:,} {noun} are more than the {maximum} that a picture shows",
                "Ask for fewer, or take the figures with --format csv",
            )
    shown = [part for part in series if part.ys]
    for number, part in enumerate(shown):
        if part.colour < 0:
            shown[number] = part._replace(colour=number)
    title, about = map(visible, chart.picture_head)
    return chart._replace(
        title=visible(chart.title),
        subtitle=visible(chart.subtitle),
        picture_head=(title, about),
        series=shown,
        categories=[*map(visible, chart.categories)],
    )


def _drawable_series(series: Series, chart: Chart) -> Series:
    """Return a series as floats, with only the points that its axes can show."""
    series = series._replace(label=visible(series.label), labels=[*map(visible, series.labels)])
    if chart.categories:
        return series

    def is_shown(value: float | None, axis: Axis) -> bool:
        return value is not None and value > (0 if axis.log else -math.inf)

    is_drawn = [is_shown(y, chart.y) for y in series.ys]
    if series.xs:
        is_drawn = [d and is_shown(x, chart.x) for d, x in zip(is_drawn, series.xs)]
    columns: dict[str, Any] = {
        name: [*compress(column, is_drawn)]
        for name, column in series._asdict().items()
        if name in COLUMNS and len(column) == len(series.ys)
    }
    floats = {name: [*map(float, columns[name])] for name in columns.keys() & {"xs", "ys"}}
    return series._replace(**columns | floats)


def tokens_tick(value: float) -> str:
    """Return a number of tokens in multiples of 1,024 as text: 4096 gives 4k, 131072 gives 128k."""
    for step, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= step:
            return f"{value / step:.4g}{suffix}"
    return f"{value:.4g}"


def bytes_tick(value: float) -> str:
    """Return bytes in the unit that `--units` selects, without trailing zeros: 1 GiB, 0.5 GiB."""
    return format_bytes(value, 1).replace(".0 ", " ")


# rounded to an integer, with thousands separators: 1280 gives 1,280
whole_tick = "{:,.0f}".format


def plain_tick(value: float) -> str:
    """Return a number with four significant digits, or as an integer from 1,000 on.

    Examples: 0.05 gives 0.05, and 12345.6 gives 12,346.
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def time_tick(value: float) -> str:
    """Return seconds as text in a suitable unit: 0.002 gives 2 ms."""
    return format_seconds(value) if value else "0"


def si_tick(unit: str = "") -> Callable[[float], str]:
    """Return a function that formats values with decimal prefixes, such as 1e12 as 1 T.

    Args:
        unit: Text after the prefix. With `B/s`, 1e12 is 1 TB/s.
    """
    return lambda value: format_si(value, unit)


CONTEXT_AXIS = Axis("context, tokens", tokens_tick)
INTENSITY_AXIS = Axis("intensity, FLOP per byte", plain_tick)
FLOPS_AXIS = Axis("FLOP/s", si_tick("FLOP/s"))


def bar_chart(
    title: str,
    subtitle: str,
    names: Iterable[str],
    parts: Mapping[str, Sequence[float]] | Sequence[float],
    tick: Callable[[float], str],
    labels: Sequence[str] = (),
    limits: Mapping[str, float] = {},
) -> Chart:
    """Return a chart with one horizontal bar per name.

    Args:
        title: Title.
        subtitle: Assumptions, printed below the title.
        names: Names of the bars.
        parts: The length of each bar. For stacked bars, the name of each part and its length in
            each bar.
        tick: Function that formats a length.
        labels: Texts at the ends of the bars, instead of their lengths.
        limits: Positions of vertical lines through all bars, by name.
    """
    if not isinstance(parts, Mapping):
        parts = {"": parts}
    series = [Series(name, (), [*map(float, ys)], "bar") for name, ys in parts.items()]
    series[-1] = series[-1]._replace(labels=labels)
    levels = [limit_line(name, value) for name, value in limits.items()]
    axis = Axis("", tick, log=False)
    return Chart(title, subtitle, axis, axis, [*series, *levels], [*names])


def limit_line(label: str, value: float) -> Series:
    """Return a series that is drawn as a line across the complete chart, such as a memory size.

    The line is horizontal at the height `value`. In a bar chart, it is vertical at this length.

    Args:
        label: Name of the line.
        value: Height or length, in the unit of the axis.
    """
    return Series(label, (), [value], "limit")


def with_picture_head(charts: Charts, picture_head: tuple[str, str]) -> list[Chart]:
    """Return the charts of one picture; the first chart gets the picture's title and assumptions.

    Args:
        charts: The charts of the picture.
        picture_head: Title and assumptions that all the charts share.
    """
    return [charts[0]._replace(picture_head=picture_head), *charts[1:]]
