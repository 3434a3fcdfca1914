"""Write tables, pictures and sizes as formulas with their numbers, for `--explain`."""

import re
from collections.abc import Mapping
from typing import Any

from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import Span
from kvcalc.model.memory import assumptions, fullest_stage, reach_line, stage_rows
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision, formats_of
from kvcalc.records.figures import figures_of, unit_of_key
from kvcalc.records.size import SizeRecord
from kvcalc.report.charts.chart import Chart
from kvcalc.report.text.table_layout import Column, Table, filled_columns, written
from kvcalc.report.text.tables import seconds, whole
from kvcalc.units import format_bytes, format_si


def explained(table: Table) -> str:
    """Return the rows of a table one after the other, with one figure per line."""
    columns = filled_columns(table)
    lines = [table.title.strip(), ""] if table.title else []
    for record in table.records:
        known = [column for column in columns if record.get(column.key) is not None]
        names = [column for column in known if column.is_input or not column.right]
        lines.append(", ".join(f"{c.title} {written(c, record)}" for c in names))
        lines += [f"  {_explanation(c, record)}" for c in known if c not in names]
        lines.append("")
    return "\n".join([*lines, *filter(None, table.notes)]) + "\n"


def _explanation(column: Column, record: Mapping[str, object]) -> str:
    """Return a figure with its formula, or with its meaning if the record has no numbers for it."""
    formula = with_numbers(column.formula, record)
    value = written(column, record)
    if formula:
        return f"{column.title} = {formula} = {value}"
    return f"{column.title} = {value}" + f" ({column.meaning})" * bool(column.meaning)


def with_numbers(formula: str, record: Mapping[str, object]) -> str:
    """Return a formula with values in place of its keys; '' if the record lacks one of them.

    Example: `{flops} / {bytes}` gives `2,000 / 1,000 B`.
    """
    keys = re.findall(r"\{(\w+)\}", formula)
    if any(record.get(key) is None for key in keys):
        return ""
    return formula.format(**{key: operand(key, record[key]) for key in keys})


def operand(key: str, value: object) -> str:
    """Return a value as a number of a formula: bytes in full, other numbers with six digits."""
    if not isinstance(value, int | float):
        return str(value)
    texts = {
        "seconds": seconds(value),
        "bytes": f"{value:,} B",
        "bytes a second": format_si(value, "B/s"),
        "FLOP a second": format_si(value, "FLOP/s"),
    }
    return texts.get(unit_of_key(key)) or whole(value)


def charted(chart: Chart) -> str:
    """Return the first and the last point of each curve of a picture, as its axes write them."""
    lines = [chart.title, chart.subtitle, ""]
    for series in chart.series:
        points = list(dict.fromkeys(zip(series.xs, series.ys, strict=False)))
        ends = dict.fromkeys([*points[:1], *points[-1:]])
        texts = [f"{chart.y.tick(y)} at {chart.x.tick(x)}" for x, y in ends]
        name = series.label.removesuffix(f": {chart.y.tick(series.ys[-1])}")
        values = ", ".join(texts or map(chart.y.tick, series.ys))
        lines.append(f"{name or 'further'}: {values}")
    if chart.next_chart:
        lines += ["", charted(chart.next_chart).rstrip("\n")]
    return "\n".join(lines) + "\n"


SPANS = {
    Span.TOKENS: "one row per token",
    Span.CHUNK: "one row per token of a chunk",
    Span.STATE: "a state of constant size",
    Span.PARTIAL: "the tokens of the unfinished block",
    Span.OVERLAP: "the last finished block",
}
# Figures of `size` that follow the sums, in this order.
SIZE_KEYS = (
    "bytes_per_token fixed_bytes eviction_score_bytes mha_ratio parameters active_parameters "
    "weight_bytes cache_share_of_weights equal_weights_context"
)


def explain_size(
    record: SizeRecord,
    model: Model,
    context: int,
    batch_size: int,
    precision: Precision,
    block_size: int,
    parallelism: Parallelism,
) -> str:
    """Return the sums behind a record of `size`. Figures that the record lacks are left out."""
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    sequences = parallelism.sequences(batch_size)
    has_weights = record["weight_bytes"] is not None
    values: dict[str, Any] = {**record}
    lines = [
        f"{model.name}: {record['attention']}",
        assumptions(model, precision, block_size, parallelism, has_weights),
    ]
    sums = {
        "kv_cache_bytes": f"Stored after S = {context:,} tokens",
        "kv_cache_read_bytes": "Read by one decode step (new = 1, past = S − 1)",
        "kv_cache_allocated_bytes": f"In whole blocks of {block_size} tokens",
    }
    for key, title in sums.items():
        lines += ["", f"{title}:"]
        for row in stage_rows(model, stage, formats, parallelism):
            entry, layers, details = row.entry, row.stored_layers, ""
            heads = parallelism.share(entry.heads)
            num_rows = int(entry.allocated_rows(context, block_size))
            if key == "kv_cache_read_bytes":
                layers = row.read_layers
                num_rows = int(entry.read_rows(1, context - 1))
                details = f" (top {entry.top:,})" if entry.top else ""
            if key == "kv_cache_bytes":
                num_rows = int(entry.stored_rows(context))
                limit = f", at most {entry.limit:,}" if entry.limit and entry.grows else ""
                ratio = f" of {entry.ratio}" if entry.ratio > 1 else ""
                details = f" ({SPANS[entry.span]}{ratio}{limit})"
            if not layers:
                continue
            if row.spread > 1:
                details = f" ({num_rows:,} over {row.spread} ranks)"
            rank_rows = -(-num_rows // row.spread)
            elements = f"{entry.width} {formats.cache_format(entry).name} elements"
            elements += f" × {heads} heads" if heads > 1 else ""
            lines.append(
                f"  {entry.role}: {layers} layers × {rank_rows:,} rows{details} × "
                f"{row.row_bytes:,} B ({elements}) = {layers * rank_rows * row.row_bytes:,}"
            )
        total = f"{values[key]:,} ({format_bytes(values[key])})"
        lines.append(f"  {key} = Σ × {sequences:,} = {total}")
    figures = figures_of(SizeRecord)
    lines += ["", *filter(None, [reach_line(model)])]
    for key in SIZE_KEYS.split():
        if values[key] is not None:
            formula = with_numbers(figures[key].formula, values)
            sign = "≈" if "param" in key and not record["parameters_exact"] else "="
            shown = f"{formula} = {whole(values[key])}".removeprefix(" = ")
            lines.append(f"{key} {sign} {shown} ({figures[key].meaning.partition(';')[0]})")
    return "\n".join(lines) + "\n"
