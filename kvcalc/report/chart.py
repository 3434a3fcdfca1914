"""A picture as data: what stands on it, before anything is drawn. Builders make charts; `plots` and `sketch` draw them."""

from collections.abc import Callable
from typing import NamedTuple

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

    beside: a second chart that stands to the right of this one.
    """

    title: str
    subtitle: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    beside: "Chart | None" = None


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
