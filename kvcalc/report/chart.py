"""A picture as data: what stands on it, before anything is drawn. Builders make charts; `plots` and `sketch` draw them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcalc.errors import UserError, visible
from kvcalc.units import format_bytes, format_si


class Series(NamedTuple):
    """Numbers that belong together.

    kind: line, solid (without dashes, whatever its colour), dashed, edge (a thin line), band (filled between `lows` and ys),
    points, hollow (points without a filling), trail (a faint line that joins points), span (a broad faint one below another
    line: the way that a point goes), quiet and quiet points (grey: what stands behind, or beside what the picture is about),
    limit (a level across), upright (one from bottom to top at its only x, its y is 1), bar (one stacked layer), cells (a row of
    a heat map, one for each category, −1 for what does not fit). sizes: areas of points, 0 to 1. labels: texts at the points,
    or of the bars that end with this layer. colour: an index into the palette, −1 for the next one.
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
    """title, logarithmic or not, how a tick is written, and values that it shows though nothing lies there."""

    title: str
    log: bool = True
    tick: Callable[[float], str] = str
    shown: tuple[float, ...] = ()


class Chart(NamedTuple):
    """title, a line of assumptions below it, axes, and series. categories: names of bars, which replace the x axis.

    beside: the next chart of the same picture. areas: what the sizes of its points are shares of, for the key.
    over: title and assumptions of all of them, where each says but what tells it from the others; of the first alone.
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

    def chain(self) -> "list[Chart]":
        """This chart and all that stand beside it."""
        return [self, *(self.beside.chain() if self.beside else ())]


def drawable(chart: Chart) -> Chart:
    """The chart and that beside it with floats alone, and without points that have no figure, or none for a logarithmic axis.

    Raises UserError where nothing is left to draw.
    """
    series = chart.series if chart.categories else tuple(_on_axes(s, chart) for s in chart.series)
    if not any(s.ys for s in series if s.kind != "upright"):
        raise UserError("there is nothing to draw: no point has figures above 0")
    beside = drawable(chart.beside) if chart.beside else None
    return chart._replace(series=tuple(s for s in series if s.ys), beside=beside)


def legible(chart: Chart) -> Chart:
    """The chart and that beside it without characters in names and titles that a terminal would obey rather than show."""

    def shown(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(visible, texts))

    series = tuple(s._replace(label=visible(s.label), labels=shown(s.labels)) for s in chart.series)
    title, subtitle, *over = shown((chart.title, chart.subtitle, *chart.over))
    beside = legible(chart.beside) if chart.beside else None
    kept = chart._replace(title=title, subtitle=subtitle, over=(over[0], over[1]), series=series)
    return kept._replace(categories=shown(chart.categories), beside=beside)


def _on_axes(series: Series, chart: Chart) -> Series:
    if len(series.xs) != len(series.ys):  # a level, which has but its height
        return _floats(series, [n for n, y in enumerate(series.ys) if _shown(y, chart.y)], series.xs)
    points = enumerate(zip(series.xs, series.ys, strict=True))
    kept = [n for n, (x, y) in points if _shown(x, chart.x) and _shown(y, chart.y)]
    kept = [n for n in kept if not series.lows or _shown(series.lows[n], chart.y)]
    return _floats(series, kept, tuple(series.xs[n] for n in kept))


def _floats(series: Series, kept: Sequence[int], xs: Sequence[float]) -> Series:
    """The series with these of its points, as floats."""

    def of_kept(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[n] for n in kept) if len(values) == len(series.ys) else values

    ys, lows = (tuple(map(float, of_kept(values))) for values in (series.ys, series.lows))
    sizes, labels = of_kept(series.sizes), of_kept(series.labels)
    return series._replace(xs=tuple(map(float, xs)), ys=ys, sizes=sizes, labels=labels, lows=lows)


def _shown(value: float | None, axis: Axis) -> bool:
    return value is not None and (value > 0 or not axis.log)


def tokens_tick(value: float) -> str:
    """4096 → 4k, 131072 → 128k: binary thousands, as contexts are written, to three digits."""
    for step, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= step:
            return f"{value / step:.4g}{suffix}"
    return f"{value:.4g}"


def bytes_tick(value: float) -> str:
    """Binary bytes without needless digits: 1 GiB, 0.5 GiB."""
    text = format_bytes(value, 1)
    return text.replace(".0 ", " ")


def whole_tick(value: float) -> str:
    """A count: 1,280."""
    return f"{value:,.0f}"


def plain_tick(value: float) -> str:
    """A number of four digits, or whole: 0.05, 12.34, 12,345."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def share_tick(value: float) -> str:
    """0.145 → 14.5%."""
    return f"{100 * value:.3g}%"


def si_tick(unit: str = "") -> Callable[[float], str]:
    """Decimal prefixes: 1e12 → 1 T."""
    return lambda value: format_si(value, unit)


def bar_chart(title: str, about: str, names: Sequence[str], values: Sequence[float], tick: Callable[[float], str]) -> Chart:
    """A bar for each name, as long as its figure."""
    axis = Axis("", log=False, tick=tick)
    return Chart(title, about, axis, axis, (Series("", (), tuple(map(float, values)), "bar"),), tuple(names))


def joined(charts: Sequence[Chart]) -> Chart:
    """One picture of several charts and of what stands beside each, in their order."""
    found: Chart | None = None
    for chart in reversed([part for one in charts for part in one.chain()]):
        found = chart._replace(beside=found)
    assert found is not None
    return found
