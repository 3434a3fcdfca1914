"""What `compare` shows: the variants' figures, then what was held equal and what is known of their quality."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcalc.model.size import assumptions
from kvcalc.planning.variants import Variant
from kvcalc.report.chart import Chart
from kvcalc.report.figures import cache_vs_context
from kvcalc.report.passes import times
from kvcalc.report.tables import COMPARE_COLUMNS, QUALITY_COLUMNS, Table, fallback_notes
from kvcalc.timing.deployment import Deployment


def compare_chart(deployment: Deployment, chosen: Sequence[tuple[str, Variant]], batch_size: int, last: int) -> Chart:
    """Stored cache over context, a curve a variant, up to `last` tokens."""
    precision = deployment.precision
    named = []
    for name, variant in chosen:
        dtype = variant.kv_cache_dtype or precision.kv_cache_dtype
        named.append((name, variant.model, msgspec.structs.replace(precision, kv_cache_dtype=dtype)))
    return cache_vs_context(named, deployment.gpu, batch_size, last)


def compare_tables(deployment: Deployment, records: Sequence[dict[str, Any]], block_size: int) -> list[Table]:
    """Two tables: every record, and what is known of every variant."""
    model, gpu = deployment.model, deployment.gpu
    held = assumptions(model, deployment.precision, block_size, deployment.parallelism)
    step = f"step: least time on {gpu.name}; fits: beside the weights alone"
    lines = [
        f"{held}; {times(deployment, records)}",
        f"less: against {records[0]['reference']}; attention FLOP/B: of the cache it reads; {step}",
        *fallback_notes(records),
    ]
    once = {record["variant"]: record for record in records}
    return [
        Table(records, COMPARE_COLUMNS, f"{model.name} on {gpu.name}, decode", ["", *lines, ""]),
        Table(list(once.values()), QUALITY_COLUMNS, "What was held equal, and what is known of quality"),
    ]
