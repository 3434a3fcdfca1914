"""What `diagnose --metrics` shows."""

from collections.abc import Callable
from typing import Any

from kvcalc.planning.running import Running, running_records
from kvcalc.report.layout import Column, Table
from kvcalc.report.tables import seconds

_SHOWN: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "share": lambda v: f"{v:.1%}",
    "requests": lambda v: f"{v:,.1f}",
    "times": lambda v: f"{v:,.0f}",
}


def running_table(found: Running) -> Table:
    """Figures of the server beside those of the simulated one."""
    records: list[dict[str, Any]] = []
    for r in running_records(found)[:-1]:
        shown = {k: None if r[k] is None else _SHOWN[r["unit"]](r[k]) for k in ("measured", "predicted")}
        records.append({"figure": r["figure"], **shown})
    columns = [Column("figure", "figure", right=False), Column("measured", "measured"), Column("predicted", "predicted")]
    basis = found.deployment.basis
    notes = [
        "",
        f"predicted for {found.clients:,} clients in a closed loop, {found.input_len:,} tokens in and {found.output_len:,} out",
        f"times: {basis}; measured since its start, quantiles within buckets; prefix hits are not in the prediction",
    ]
    return Table(records, columns, found.sentence, notes)
