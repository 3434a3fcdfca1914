"""More lines or points than a picture can tell apart, as small multiples: a few in each, the others grey behind them."""

from collections.abc import Sequence
from itertools import pairwise

from kvcalc.errors import UserError
from kvcalc.report.chart import Chart, Series
from kvcalc.report.looks import loud

MOST = 8  # series told apart on one chart
FEW = 6  # on each of several
MANY, NAMES = 56, 120  # series on all of them, and points with a name on one
NAMED = ("line", "solid", "dashed", "edge", "points", "trail")


def in_multiples(charts: Sequence[Chart]) -> list[Chart]:
    """Each chart, or several of the same axes with a few of its series each, those that end highest first.

    Charts of as many series as the first of them have these in its order, so that each looks the same in all. Raises UserError
    on more than MANY curves or NAMES.
    """
    found: list[Chart] = []
    orders: dict[int, list[int]] = {}
    for chart in charts:
        told = _told(chart)
        if not chart.categories:
            _check(sum(len(series.labels) for series in chart.series), "points with names", NAMES)
        if len(told) <= MOST:
            found.append(chart)
            continue
        places = orders.setdefault(len(told), sorted(range(len(told)), key=lambda n: -_end(list(told.values())[n])))
        found += _split(chart, told, [list(told)[n] for n in places])
    return found


def _check(count: int, what: str, most: int) -> None:
    if count > most:
        hint = "Ask for fewer, or take the figures with --format csv"
        raise UserError(f"{count:,} {what} are more than the {most} that a picture shows", hint=hint)


def _end(series: Sequence[Series]) -> float:
    return max(s.ys[-1] for s in series)


def _split(chart: Chart, told: dict[int, list[Series]], order: Sequence[int]) -> list[Chart]:
    _check(len(order), "curves", MANY)
    parts = -(-len(order) // FEW)
    cuts = [len(order) * n // parts for n in range(parts + 1)]
    return [_part(chart, told, order, low, high) for low, high in pairwise(cuts)]


def _told(chart: Chart) -> dict[int, list[Series]]:
    """The series by look, of those looks that have a name."""
    found: dict[int, list[Series]] = {}
    for number, series in enumerate(() if chart.categories else chart.series):
        if series.kind in NAMED or series.kind in ("hollow", "band"):
            found.setdefault(number if series.colour < 0 else series.colour, []).append(series)
    return {at: mine for at, mine in found.items() if any(s.label and s.kind in NAMED for s in mine)}


def _part(chart: Chart, told: dict[int, list[Series]], order: Sequence[int], low: int, high: int) -> Chart:
    """One of the multiples; a look follows from the place in the order, so that no two of all are the same."""
    mine = [s._replace(colour=loud(n)) for n in range(low, high) for s in told[order[n]]]
    others = [_quiet(s) for at in order if at not in order[low:high] for s in told[at] if s.kind != "band"]
    kept = {id(s) for each in told.values() for s in each}
    rest = [s for s in chart.series if id(s) not in kept]
    title, about = f"{chart.title}: {low + 1} to {high} of {len(order)}", "those not named are grey"
    subtitle = about if low else f"{chart.subtitle}; {about}".removeprefix("; ")
    return chart._replace(title=title, subtitle=subtitle, series=(*others, *mine, *rest), beside=None)


def _quiet(series: Series) -> Series:
    kind = "quiet points" if series.kind in ("points", "hollow") else "quiet"
    return series._replace(label="", labels=(), kind=kind, sizes=())
