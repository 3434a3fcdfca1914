"""`fit --matrix`: a table and a heat map of users × contexts."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, tokens_tick
from kvcalc.report.fit import assumptions_line
from kvcalc.report.layout import Column, Table
from kvcalc.report.tables import integer
from kvcalc.units import format_bytes


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
    contexts = dict.fromkeys(r["context"] for r in records)
    columns = [Column("users", "users", integer), *(Column(str(c), tokens_tick(c)) for c in contexts)]
    first = records[0]
    notes = ["", f"engine {first['engine']}; {assumptions_line([first]).partition(', ')[2]}", "contexts in tokens: 4k is 4,096"]
    return Table(rows, columns, _sentence(records), notes)


def matrix_chart(records: Sequence[dict[str, Any]]) -> Chart:
    """One cell each, the deeper the more is left."""
    most = max((r["headroom_bytes"] for r in records), default=1) or 1
    contexts = tuple(tokens_tick(c) for c in dict.fromkeys(r["context"] for r in records))
    series = tuple(
        Series(
            f"{users:,}",
            (),
            tuple(max(0.0, r["headroom_bytes"] / most) if r["fits"] else -1.0 for r in row),
            "cells",
            labels=tuple(("" if r["fits"] else "−") + format_bytes(abs(r["headroom_bytes"]), 1) for r in row),
        )
        for users, row in _rows(records).items()
    )
    first = records[0]
    line = f"what is left of the cache's memory on one GPU, or missing (−); engine {first['engine']}"
    return Chart(_where(first), line, Axis("context, tokens"), Axis("users"), series, contexts)
