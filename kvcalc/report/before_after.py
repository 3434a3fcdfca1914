"""What `compare --deployments` shows: the difference first, then each side a row."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Chart, bar_chart, joined
from kvcalc.report.layout import Column, Table
from kvcalc.report.shell import CommandLine
from kvcalc.report.tables import comparable, integer, seconds
from kvcalc.units import format_bytes

COLUMNS = (
    Column("side", "", right=False),
    Column("fits", "fits", lambda v: "yes" if v else "no", right=False),
    Column("max_num_seqs", "users", integer),
    Column("kv_tokens", "tokens", integer),
    Column("kv_budget_bytes", "for the cache", format_bytes),
    Column("weight_bytes", "weights", format_bytes),
    Column("tpot_s", "time per token", seconds, rests="time"),
    Column("ttft_s", "first token", seconds, rests="time"),
    Column("gpus", "GPUs", integer),
)


def before_after_table(records: Sequence[dict[str, Any]], sentence: str) -> Table:
    """The first is before, the others are after."""
    names = ["before", *(["after"] if len(records) == 2 else [f"after {n}" for n in range(1, len(records))])]
    rows = [{"side": name, **record} for name, record in zip(names, records, strict=True)]
    first = records[0]
    notes = ["", f"times of {first['batch_size']:,} sequences of {first['context']:,} tokens, the first token of one alone"]
    if len(comparable(records)) < len(records):
        notes.append("≥ datasheet bounds, which are not compared with predictions")
    for name, record in zip(names, records, strict=True):
        notes += [f"{name}: {record['deployment']}"] + ([CommandLine(record["command"])] if record["command"] else [])
    return Table(rows, COLUMNS, sentence, notes)


def before_after_chart(records: Sequence[dict[str, Any]]) -> Chart:
    """Users, time per token and time to the first of each deployment, as bars."""
    first = records[0]
    about = f"{first['batch_size']:,} at once of {first['context']:,} tokens"
    timed = comparable(records)
    times = about + "; bounds are not drawn beside predictions" * (len(timed) < len(records))
    return joined(
        [
            bar_chart(title, under, [r["deployment"] for r in shown], [r[key] or 0.0 for r in shown], tick)
            for title, key, shown, under, tick in (
                ("Users", "max_num_seqs", records, about, lambda v: f"{v:,.0f}"),
                ("Time per token", "tpot_s", timed, times, lambda v: seconds(v) if v else "0"),
                ("Time to the first token", "ttft_s", timed, times, lambda v: seconds(v) if v else "0"),
            )
        ]
    )
