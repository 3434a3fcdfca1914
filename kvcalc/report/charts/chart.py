"""Pictures as data. Builders make charts from records; `drawing` and `terminal` draw them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvcalc.errors import UserError, visible
from kvcalc.records import Record
from kvcalc.report.charts.series_styles import skip_grey
from kvcalc.units import format_bytes, format_si

MAX_SERIES = 8  # named series on one chart
MULTIPLE_SERIES = 6  # named series on each of several charts
MAX_CURVES = 56  # named series of a picture
MAX_NAMES = 120  # named points of a chart
NAMED = ("line", "solid", "dashed", "edge", "points", "trail")


class Series(NamedTuple):
    """Numbers that belong together.

    Attributes:
        label: Name in the key or at the end of a line.
        xs: Positions; empty for bars, cells and limits.
        ys: Heights, lengths of bars, or depths of cells (-1 for what does not fit).
        kind: `line`, `solid` (without dashes), `dashed` or `edge` (a thin line); `band` (filled
            between `lows` and `ys`); `points`, or `hollow` ones; `trail` (a faint line) or `span`
            (a broad faint line); `quiet` or `quiet points` (grey); `limit` (a level across) or
            `upright` (a vertical line at its only x); `bar` (one stacked part) or `cells` (a row
            of a heat map).
        sizes: Areas of points, 0 to 1.
        labels: Texts at points, or at the bars that end with this part.
        colour: Index into the palette, -1 for the next one.
        lows: Lower ends of a band.
    """

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    kind: str = "line"
    sizes: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    colour: int = -1
    lows: tuple[float, ...] = ()


class Axis(NamedTuple):
    """An axis.

    Attributes:
        title: Quantity and unit.
        log: Whether the axis is logarithmic.
        tick: Writes a value.
        shown: Values that the axis includes.
    """

    title: str
    log: bool = True
    tick: Callable[[float], str] = str
    shown: tuple[float, ...] = ()


class Chart(NamedTuple):
    """One chart.

    Attributes:
        title: Title.
        subtitle: Assumptions.
        x: Horizontal axis.
        y: Vertical axis.
        series: What the chart shows.
        categories: Names of bars or columns of cells. They replace the x axis.
        beside: Next chart of the same picture.
        areas: What the sizes of points are shares of.
        over: Title and assumptions of all charts of the picture.
    """

    title: str
    subtitle: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    beside: "Chart | None" = None
    areas: str = ""
    over: tuple[str, str] = ("", "")

    @property
    def is_heat(self) -> bool:
        """Whether the chart is a heat map."""
        return any(s.kind == "cells" for s in self.series)

    def chain(self) -> "list[Chart]":
        """Return this chart and all charts beside it."""
        return [self, *(self.beside.chain() if self.beside else ())]


def drawable(chart: Chart) -> Chart:
    """Return the picture with floats only, and only with points that its axes can show.

    Raises:
        UserError: No point is left.
    """
    series = chart.series
    if not chart.categories:
        series = tuple(_on_axes(one, chart) for one in series)
    if not any(s.ys for s in series if s.kind != "upright"):
        raise UserError("there is nothing to draw: no point has figures above 0")
    beside = drawable(chart.beside) if chart.beside else None
    return chart._replace(series=tuple(s for s in series if s.ys), beside=beside)


def legible(chart: Chart) -> Chart:
    """Return the picture without control characters in names and titles."""
    series = []
    for one in chart.series:
        labels = tuple(map(visible, one.labels))
        series.append(one._replace(label=visible(one.label), labels=labels))
    return chart._replace(
        title=visible(chart.title),
        subtitle=visible(chart.subtitle),
        over=(visible(chart.over[0]), visible(chart.over[1])),
        series=tuple(series),
        categories=tuple(map(visible, chart.categories)),
        beside=legible(chart.beside) if chart.beside else None,
    )


def _on_axes(series: Series, chart: Chart) -> Series:
    """Return the series as floats, with only the points that the axes can show."""
    coordinates = [(series.ys, chart.y), (series.xs, chart.x), (series.lows, chart.y)]
    shown = []
    for index in range(len(series.ys)):
        values = [
            (column[index], axis)
            for column, axis in coordinates
            if len(column) == len(series.ys)  # a limit has only its height
        ]
        if all(v is not None and (v > 0 or not axis.log) for v, axis in values):
            shown.append(index)
    fields: Record = {}
    for name in ("xs", "ys", "lows", "sizes", "labels"):
        column = getattr(series, name)
        if len(column) == len(series.ys):
            column = tuple(column[index] for index in shown)
        if name in ("xs", "ys", "lows"):
            column = tuple(map(float, column))
        fields[name] = column
    return series._replace(**fields)


def tokens_tick(value: float) -> str:
    """Return tokens in binary thousands: 4096 gives 4k, 131072 gives 128k."""
    for step, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= step:
            return f"{value / step:.4g}{suffix}"
    return f"{value:.4g}"


def bytes_tick(value: float) -> str:
    """Return bytes without needless digits: 1 GiB, 0.5 GiB."""
    return format_bytes(value, 1).replace(".0 ", " ")


def whole_tick(value: float) -> str:
    """Return a count: 1,280."""
    return f"{value:,.0f}"


def plain_tick(value: float) -> str:
    """Return a number of four digits, or a whole number: 0.05, 12.34, 12,345."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def share_tick(value: float) -> str:
    """Return a share in percent: 0.145 gives 14.5%."""
    return f"{100 * value:.3g}%"


def times_tick(value: float) -> str:
    """Return a ratio: 2.5×, 1,394×."""
    return f"{value:,.0f}×" if value >= 100 else f"{value:.3g}×"


def si_tick(unit: str = "") -> Callable[[float], str]:
    """Return a writer of values with decimal prefixes: 1e12 gives 1 T."""
    return lambda value: format_si(value, unit)


CONTEXT_AXIS = Axis("context, tokens", tick=tokens_tick)
INTENSITY_AXIS = Axis("intensity, FLOP per byte", tick=plain_tick)
FLOPS_AXIS = Axis("FLOP/s", tick=si_tick("FLOP/s"))


def bar_chart(
    title: str,
    subtitle: str,
    names: Iterable[str],
    parts: Mapping[str, Sequence[float]] | Sequence[float],
    tick: Callable[[float], str],
    labels: Sequence[str] = (),
    limits: Mapping[str, float] | None = None,
) -> Chart:
    """Return a chart with one bar per name.

    Args:
        title: Title.
        subtitle: Assumptions.
        names: Names of the bars.
        parts: Lengths of the bars; or lengths of stacked parts, by name.
        tick: Writes a length.
        labels: Texts at the ends of the bars, instead of their lengths.
        limits: Levels through all bars, by name.
    """
    axis = Axis("", log=False, tick=tick)
    if not isinstance(parts, Mapping):
        parts = {"": parts}
    series = [Series(name, (), tuple(map(float, ys)), "bar") for name, ys in parts.items()]
    series[-1] = series[-1]._replace(labels=tuple(labels))
    levels = [limit(name, value) for name, value in (limits or {}).items()]
    return Chart(
        title,
        subtitle,
        axis,
        axis,
        (*series, *levels),
        tuple(names),
    )


def limit(label: str, value: float) -> Series:
    """Return a level across a chart."""
    return Series(label, (), (float(value),), "limit")


def joined(charts: Sequence[Chart]) -> Chart:
    """Return one picture of several charts, and of those beside each, in their order."""
    last: Chart | None = None
    for chart in reversed([part for one in charts for part in one.chain()]):
        last = chart._replace(beside=last)
    assert last is not None
    return last


def in_multiples(charts: Sequence[Chart]) -> list[Chart]:
    """Return the charts; a chart with too many series becomes several with a few series each.

    The series that end highest come first. Charts with equally many series take the order of the
    first of them, so a series looks the same in all.

    Raises:
        UserError: More than MAX_CURVES series or MAX_NAMES named points.
    """
    multiples: list[Chart] = []
    orders: dict[int, list[int]] = {}
    for chart in charts:
        groups = [] if chart.categories else _style_groups(chart.series)
        if not chart.categories:
            names = sum(len(series.labels) for series in chart.series)
            _check_count(names, "points with names", MAX_NAMES)
        if len(groups) <= MAX_SERIES:
            multiples.append(chart)
            continue
        _check_count(len(groups), "curves", MAX_CURVES)
        ends = [max(series.ys[-1] for series in group) for group in groups]
        by_end = sorted(range(len(groups)), key=lambda n: -ends[n])
        ranked = [groups[n] for n in orders.setdefault(len(groups), by_end)]
        count = -(-len(ranked) // MULTIPLE_SERIES)
        bounds = [len(ranked) * n // count for n in range(count + 1)]
        multiples += [_multiple(chart, ranked, low, high) for low, high in pairwise(bounds)]
    return multiples


def _check_count(count: int, what: str, maximum: int) -> None:
    if count > maximum:
        raise UserError(
            f"{count:,} {what} are more than the {maximum} that a picture shows",
            hint="Ask for fewer, or take the figures with --format csv",
        )


def _style_groups(series: Sequence[Series]) -> list[list[Series]]:
    """Return the series of each style that has a name."""
    styles: dict[int, list[Series]] = {}
    for number, one in enumerate(series):
        if one.kind in (*NAMED, "hollow", "band"):
            style = number if one.colour < 0 else one.colour
            styles.setdefault(style, []).append(one)
    return [
        group
        for group in styles.values()
        if any(one.label and one.kind in NAMED for one in group)
    ]


def _multiple(chart: Chart, ranked: Sequence[list[Series]], low: int, high: int) -> Chart:
    """Return a chart that names `ranked[low:high]` and shows the other series in grey."""
    named = []
    quiet = []
    for number, group in enumerate(ranked):
        for series in group:
            if low <= number < high:
                named.append(series._replace(colour=skip_grey(number)))
            elif series.kind != "band":
                kind = "quiet points" if series.kind in ("points", "hollow") else "quiet"
                quiet.append(
                    Series(
                        "",
                        series.xs,
                        series.ys,
                        kind,
                        colour=series.colour,
                    )
                )
    grouped = {id(series) for group in ranked for series in group}
    rest = [series for series in chart.series if id(series) not in grouped]
    about = "those not named are grey"
    if not low:
        about = "; ".join(filter(None, [chart.subtitle, about]))
    return chart._replace(
        title=f"{chart.title}: {low + 1} to {high} of {len(ranked)}",
        subtitle=about,
        series=(*quiet, *named, *rest),
        beside=None,
    )
