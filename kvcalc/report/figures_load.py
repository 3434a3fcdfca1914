"""TTFT and TPOT of simulated servers against what was swept: requests per second, or clients."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvcalc.errors import UserError, few
from kvcalc.report.chart import Axis, Chart, Series, bar_chart, joined, plain_tick, share_tick, tokens_tick, whole_tick
from kvcalc.report.export import Record
from kvcalc.report.looks import GREY
from kvcalc.report.multiples import MOST
from kvcalc.report.tables import comparable, predictions_first, seconds

NAMED = (
    "model",
    "gpus",
    "gpu",
    "dtype",
    "kv_cache_dtype",
    "basis",
    "policy",
    "cache",
    "prefix_hit_rate",
    "max_concurrency",
    "rate",
)
OF_MODEL = ("dtype", "kv_cache_dtype")  # not named where they follow from the model
FIGURES = {"ttft": "Time to the first token", "tpot": "Time from token to token"}
MORE: tuple[tuple[str, str, Any], ...] = (
    ("Output tokens per second", "throughput_tokens_per_s", whole_tick),
    ("Cost of a million output tokens", "cost_per_million_tokens", plain_tick),
)
EMPTY: tuple[tuple[str, str], ...] = (
    ("Cache allocated that holds no token", "kv_waste"),
    ("Token slots that hold padding", "padding_waste"),
)
MOST_BANDS = 2  # servers whose bands a picture keeps apart; of more the 99th percentile
TAIL = "99th percentile"
WIDE = 8  # a sweep over more than so many times its least is logarithmic
ENOUGH = 0.95  # of the most requests per second, from which on more clients bring nothing


def load_chart(records: Sequence[Record]) -> Chart:
    """Percentiles of TTFT and TPOT as bands over the swept load, saturation marked; as bars where servers take one load.

    Raises UserError where nothing was served.
    """
    done = [r for r in predictions_first(records) if r["completed"]]
    if not done:
        raise UserError("no request was served: there is nothing to draw")
    served = comparable(done)
    bounds = dict.fromkeys(r["gpu"] for r in done if r not in served)
    undrawn = f"; not drawn, as only bounds are known: {few([*bounds])}" if bounds else ""
    swept = next((key for key in ("rate", "max_concurrency") if len({r.get(key) for r in served}) > 1), "rate")
    groups = _groups(served, swept)
    first = served[0]
    models, cards = ({(r["model"]) for r in served}, {(r["gpus"], r["gpu"]) for r in served})
    where = f"{first['model'] if len(models) == 1 else f'{len(models)} models'}"
    where += f" on {first['gpus']}× {first['gpu']}" if len(cards) == 1 else ""
    alone = max(len({_load(r, swept) for r in mine}) for mine in groups.values()) < 2
    load = f"{first['requests']:,} request{'s' * (first['requests'] > 1)}" + " at each load" * (not alone)
    bases = {r["basis"] for r in served}
    same = alone and len({r.get("rate") for r in served}) == 1
    load += f" at {first['rate']:.3g} a second" if same and first.get("rate") else ""
    about = f"{where}, {load}" + f"; times: {first['basis']}" * (len(bases) == 1) + undrawn
    if alone:
        bars = [*(_bars(groups, figure) for figure in FIGURES), *_sides(groups)]
        return joined([bars[0]._replace(subtitle=about), *bars[1:]])
    marks = {name: _saturation(mine, swept) for name, mine in groups.items()}
    left, right = (_curves(groups, figure, swept, about) for figure in FIGURES)
    rates = [_rates(groups, swept, *each) for each in MORE if all(r.get(each[1]) for r in served)]
    spots = _spots(marks) if len(groups) <= MOST_BANDS else []
    about = about if spots else f"{about}; {_told(marks)}"
    tail = TAIL * (len(groups) > MOST_BANDS)
    if len(groups) > MOST:
        left = left._replace(subtitle=tail, over=(f"{where}, {load}", about.partition(f"{load}; ")[2]))
    else:
        left = left._replace(subtitle=f"{tail}; {about}" if tail else about)
    under = [left, right._replace(subtitle=tail), *rates]
    return joined([
        chart._replace(series=(*chart.series, *(spot._replace(label=spot.label * (not n)) for spot in spots)))
        for n, chart in enumerate(under)
    ])  # fmt: skip


def _groups(records: Sequence[Record], swept: str) -> dict[str, list[Record]]:
    """The records of each server, by what tells it from the others."""
    keys = [k for k in NAMED if k != swept and len({r.get(k) for r in records}) > 1]
    keys = [k for k in keys if k != "basis" or "gpu" not in keys]
    models = {r["model"] for r in records}
    keys = [k for k in keys if k not in OF_MODEL or len({(r["model"], r.get(k)) for r in records}) > len(models)]
    found: dict[str, list[Record]] = {}
    for record in records:
        words = (str(record[k]) if k not in UNITS else UNITS[k](record[k]) for k in keys)
        found.setdefault(", ".join(filter(None, words)), []).append(record)
    return found


UNITS: dict[str, Any] = {
    "gpus": lambda v: f"{v} GPUs",
    "max_concurrency": lambda v: f"{v:,} clients" if v else "",
    "rate": lambda v: f"{v:g}/s" if v else "all at once",
    "kv_cache_dtype": lambda v: f"cache {v}",
    "prefix_hit_rate": lambda v: f"prefix hits {v or 0:g}",
}


def _load(record: Record, swept: str) -> float:
    """The load asked for; what was served where all came at once."""
    return float(record.get(swept) or record["requests_per_s"])


def _curves(groups: dict[str, list[Record]], figure: str, swept: str, about: str) -> Chart:
    series: list[Series] = []
    for number, (name, mine) in enumerate(groups.items()):
        wanted = (50, 90, 99) if len(groups) <= MOST_BANDS else (99,)
        keys = [f"{figure}_p{p}_s" for p in wanted]
        rows = sorted((_load(r, swept), *(r[k] for k in keys)) for r in mine if all(r.get(k) for k in keys))
        if not rows:
            continue
        xs, *levels = zip(*rows, strict=True)
        if len(levels) > 1:
            series += [Series("", xs, high, "band", colour=number, lows=low) for low, high in pairwise(levels)]
        for p, ys in zip(wanted, levels, strict=True):
            kind = "line" if p == wanted[0] else "edge"
            label = f"{name} p{p}".strip() if len(wanted) > 1 else name
            series.append(Series(label, xs, ys, kind, colour=number))
    return Chart(FIGURES[figure], about, _axis(groups, swept), Axis("", tick=seconds), tuple(series))


def _spots(marks: dict[str, float | None]) -> list[Series]:
    """A line at each load from which on servers are saturated, with their names where not all are."""
    found = []
    for at in dict.fromkeys(filter(None, marks.values())):
        names = [name for name, mark in marks.items() if mark == at]
        which = f"{names[0]}: " if len(names) < len(marks) else ""
        found.append(Series(f"{which}saturated from {at:.3g} on", (at,), (1.0,), "upright"))
    return found


def _rates(groups: dict[str, list[Record]], swept: str, title: str, key: str, tick: Any) -> Chart:
    """Another figure of each server over the load."""
    series = []
    for number, (name, mine) in enumerate(groups.items()):
        xs, ys = zip(*sorted((_load(r, swept), r[key]) for r in mine), strict=True)
        series.append(Series(name, xs, ys, colour=number))
    return Chart(
        title,
        "of each server" if len(groups) > 1 else "of all requests together",
        _axis(groups, swept),
        Axis("", log=False, tick=tick),
        tuple(series),
    )


def _sides(groups: dict[str, list[Record]]) -> list[Chart]:
    """Other figures of servers at one load: tokens per second, cost, and what was allocated or computed for nothing."""
    firsts = [mine[0] for mine in groups.values()]
    shown = [*MORE, *((title, key, share_tick) for title, key in EMPTY)]
    return [
        _in_own_colour(bar_chart(title, "", [*groups], [r[key] for r in firsts], tick))
        for title, key, tick in shown
        if any(r.get(key) for r in firsts) and all(r.get(key) is not None for r in firsts)
    ]


def _in_own_colour(chart: Chart) -> Chart:
    """Bars unlike those of the percentiles, which have a key."""
    return chart._replace(series=tuple(s._replace(colour=GREY) for s in chart.series))


def _axis(groups: dict[str, list[Record]], swept: str) -> Axis:
    loads = [_load(r, swept) for mine in groups.values() for r in mine]
    title, tick = ("clients", tokens_tick) if swept == "max_concurrency" else ("requests per second", plain_tick)
    return Axis(title, log=max(loads) > WIDE * min(loads), tick=tick)


def _saturation(records: Sequence[Record], swept: str) -> float | None:
    """The load from which on a server cannot keep up; None where it keeps up with all that was asked.

    Of rates: `capacity_requests_per_s`, as the table says it. Of clients: the fewest that bring `ENOUGH` of the most requests
    per second of the sweep.
    """
    if swept == "max_concurrency":
        enough = ENOUGH * max(r["requests_per_s"] for r in records)
        least = min(_load(r, swept) for r in records if r["requests_per_s"] >= enough)
        return least if least < max(_load(r, swept) for r in records) else None
    return records[0].get("capacity_requests_per_s") if any(r.get("diverges") for r in records) else None


def _told(marks: dict[str, float | None]) -> str:
    """Where each server is saturated, in words."""
    said = [f"{at:.3g} on" + (f" ({name})" if name else "") for name, at in marks.items() if at]
    return f"saturated from {', '.join(said)}" if said else "no load asked for saturates it"


def _bars(groups: dict[str, list[Record]], figure: str) -> Chart:
    """Half, nine in ten and 99 of 100 requests of each server at one load, one on the other."""
    firsts = [mine[0] for mine in groups.values()]
    half, most, tail = ([float(r[f"{figure}_p{p}_s"] or 0) for r in firsts] for p in (50, 90, 99))
    texts = tuple(f"{seconds(a)} … {seconds(b)}" if b else "" for a, b in zip(half, tail, strict=True))
    parts = (
        Series("half of the requests", (), tuple(half), "bar"),
        Series("nine in ten", (), tuple(b - a for a, b in zip(half, most, strict=True)), "bar"),
        Series("99 of 100", (), tuple(b - a for a, b in zip(most, tail, strict=True)), "bar", labels=texts),
    )
    axis = Axis("", log=False, tick=lambda v: seconds(v) if v else "0")
    return Chart(FIGURES[figure], "", axis, axis, parts, tuple(groups))
