"""A picture as data: what stands on it, before anything is drawn. Builders make charts; `plots` and `sketch` draw them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.units import format_bytes, format_si


class Series(NamedTuple):
    """Numbers that belong together.

    kind: line, dashed, points, hollow (points without a filling), trail (a faint line that joins points), limit (a level
    across), bar (one stacked layer), cells (a row of a heat map, one for each category, −1 for what does not fit).
    sizes: areas of points, 0 to 1. labels: texts at the points. colour: an index into the palette, −1 for the next one.
    """

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    kind: str = "line"
    sizes: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    colour: int = -1


class Axis(NamedTuple):
    """title, logarithmic or not, and how a tick is written."""

    title: str
    log: bool = True
    tick: Callable[[float], str] = str


class Chart(NamedTuple):
    """title, a line of assumptions below it, axes, and series. categories: names of bars, which replace the x axis.

    beside: the next chart of the same picture.
    """

    title: str
    subtitle: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    beside: "Chart | None" = None

    def chain(self) -> "list[Chart]":
        """This chart and all that stand beside it."""
        return [self, *(self.beside.chain() if self.beside else ())]


def drawable(chart: Chart) -> Chart:
    """The chart and that beside it with floats alone, and without points that have no figure, or none for a logarithmic axis.

    Raises UserError where nothing is left to draw.
    """
    series = chart.series if chart.categories else tuple(_on_axes(s, chart) for s in chart.series)
    if not any(s.ys for s in series):
        raise UserError("there is nothing to draw: no point has figures above 0")
    beside = drawable(chart.beside) if chart.beside else None
    return chart._replace(series=tuple(s for s in series if s.ys), beside=beside)


def _on_axes(series: Series, chart: Chart) -> Series:
    level = len(series.xs) != len(series.ys)  # which has but its height
    across = zip([1.0] * len(series.ys) if level else series.xs, series.ys, strict=True)
    kept = [n for n, (x, y) in enumerate(across) if _shown(x, chart.x) and _shown(y, chart.y)]
    xs = tuple(map(float, series.xs)) if level else tuple(float(series.xs[n]) for n in kept)
    sizes, labels = (c if len(c) != len(series.ys) else tuple(c[n] for n in kept) for c in (series.sizes, series.labels))
    return Series(series.label, xs, tuple(float(series.ys[n]) for n in kept), series.kind, sizes, labels, series.colour)  # type: ignore[arg-type]


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


def si_tick(unit: str = "") -> Callable[[float], str]:
    """Decimal prefixes: 1e12 → 1 T."""
    return lambda value: format_si(value, unit)


def joined(charts: Sequence[Chart]) -> Chart:
    """One picture of several charts, in their order."""
    found: Chart | None = None
    for chart in reversed(charts):
        found = chart._replace(beside=found)
    assert found is not None
    return found
