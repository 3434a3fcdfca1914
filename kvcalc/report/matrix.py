"""`fit --matrix`: a table and a heat map of users × contexts."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, tokens_tick
from kvcalc.report.fit import assumptions_line
from kvcalc.report.layout import Column, Table
from kvcalc.report.looks import telling
from kvcalc.report.tables import integer
from kvcalc.units import format_bytes, format_si, scale_of


def _cell(record: dict[str, Any]) -> str:
    left = record["headroom_bytes"]
    return f"yes, {format_bytes(left, 1)}" if record["fits"] else f"no, −{format_bytes(abs(left), 1)}"


def _rows(records: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["users"], []).append(record)
    return rows


def _where(record: dict[str, Any]) -> str:
    return f"{record['model']} on {record['gpus']}× {record['gpu']} (tp {record['tensor_parallel_size']})"


def _sentence(records: Sequence[dict[str, Any]]) -> str:
    """The most users of the shortest context, and the longest of one."""
    first = records[0]
    good = [r for r in records if r["fits"]]
    if not good:
        return f"{_where(first)}: not one of these fits"
    most = max(good, key=lambda r: (r["users"], r["context"]))
    longest = max(good, key=lambda r: (r["context"], r["users"]))
    said = f"{most['users']:,} × {most['context']:,} tokens"
    also = f", {longest['users']:,} × {longest['context']:,}" if longest is not most else ""
    return f"{_where(first)}: {said}{also} fit; what is left of the cache's memory on a GPU, or is missing"


def matrix_table(records: Sequence[dict[str, Any]]) -> Table:
    """Users down, contexts across."""
    rows = [{"users": users, **{str(r["context"]): _cell(r) for r in row}} for users, row in _rows(records).items()]
    contexts = dict.fromkeys(str(r["context"]) for r in records)
    named = zip(contexts, _contexts(records), strict=True)
    columns = [Column("users", "users", integer), *(Column(key, name) for key, name in named)]
    first = records[0]
    notes = ["", f"engine {first['engine']}; {assumptions_line([first]).partition(', ')[2]}", "contexts in tokens: 4k is 4,096"]
    return Table(rows, columns, _sentence(records), notes)


def matrix_charts(found: Sequence[Sequence[dict[str, Any]]]) -> list[Chart]:
    """A heat map of each deployment's records, what they have in common above them; the deeper a cell, the more is left."""
    firsts = [records[0] for records in found]
    size, unit = scale_of(max((r["headroom_bytes"] for records in found for r in records), default=0))
    about = f"{unit} left of the cache's memory on one GPU, or missing (−); engine {firsts[0]['engine']}"
    columns = float(max(len(_contexts(records)) for records in found))
    charts = [_heat(records, size, columns) for records in found]
    if len(found) == 1:
        return [charts[0]._replace(title=f"{_where(firsts[0])}: what fits", subtitle=about)]
    parts = [(r["model"], f"{r['gpus']}× {r['gpu']}", f"tp {r['tensor_parallel_size']}") for r in firsts]
    told = telling(parts)
    same = [part for part in parts[0][:2] if all(part in words for words in parts)]
    title = " on ".join(["What fits", *same[-1:]] if parts[0][0] not in same else [f"What fits of {same[0]}", *same[1:]])
    charts = [chart._replace(title=", ".join(words)) for chart, words in zip(charts, told, strict=True)]
    return [charts[0]._replace(over=(title, about)), *charts[1:]]


def _heat(records: Sequence[dict[str, Any]], size: int, columns: float) -> Chart:
    """Users upwards, contexts to the right; in each cell what is left or missing, in units of so many bytes.

    columns: those of the picture's widest map, for which all have room.
    """
    most = max((r["headroom_bytes"] for r in records), default=1) or 1
    series = tuple(
        Series(
            f"{users:,}",
            (),
            tuple(max(0.0, r["headroom_bytes"] / most) if r["fits"] else -1.0 for r in row),
            "cells",
            labels=tuple(("" if r["fits"] else "−") + _figure(abs(r["headroom_bytes"]) / size) for r in row),
        )
        for users, row in _rows(records).items()
    )
    return Chart("", "", Axis("context, tokens", shown=(columns,)), Axis("users"), series, tuple(_contexts(records)))


def _contexts(records: Sequence[dict[str, Any]]) -> list[str]:
    """4k is 4,096; what is no whole number of them is written out."""
    return [f"{n:,}" if n % 1024 else tokens_tick(n) for n in dict.fromkeys(r["context"] for r in records)]


def _figure(value: float) -> str:
    """Three digits: 0.604, 40.7, 967, 1980; from 9,999.5 on separated, beyond 99,999 with a prefix."""
    return f"{value:.3g}" if value < 999.5 else f"{value:{',' * (value >= 9999.5)}.0f}" if value < 1e5 else format_si(value)
