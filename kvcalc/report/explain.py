"""`--explain`: every figure of a size as its formula, with the numbers put in."""

from kvcalc.layers.cache import Span
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.memory import LayerRows, cache_rows, cache_size, eviction_score_bytes, fullest_stage
from kvcalc.model.precision import Precision, formats_of
from kvcalc.model.reach import reach_line
from kvcalc.model.size import assumptions
from kvcalc.model.spec import Model
from kvcalc.report.export import Record
from kvcalc.report.tables import percent
from kvcalc.units import format_bytes

_SPANS = {
    Span.TOKENS: "one row per token",
    Span.CHUNK: "one row per token of a chunk",
    Span.STATE: "a state of constant size",
    Span.PARTIAL: "the tokens of the unfinished block",
    Span.OVERLAP: "the last finished block",
}


def explain_size(
    record: Record,
    model: Model,
    context: int,
    batch_size: int,
    precision: Precision,
    block_size: int,
    parallelism: Parallelism,
) -> str:
    """The worked sums behind a record of `size`, as plain text; without what the record does not know, such as weights."""
    weights = record["weight_bytes"] is not None
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = cache_rows(model, stage.counts, formats, parallelism)
    size = cache_size(model, context, batch_size, precision, block_size, parallelism)
    sequences = parallelism.sequences(batch_size)
    lines = [f"{model.name}: {record['attention']}", assumptions(model, precision, block_size, parallelism, weights), ""]
    lines.append(f"Stored after S = {context:,} tokens, {sequences:,} sequence{'s' * (sequences != 1)}:")
    lines += [_stored(row, context, formats, parallelism) for row in rows if row.stored_layers]
    lines.append(_total("kv_cache_bytes", size.stored, sequences))
    lines += ["", "Read by one decode step (new = 1, past = S − 1):"]
    lines += [_read(row, context) for row in rows]
    lines.append(_total("kv_cache_read_bytes", size.read, sequences))
    lines += ["", f"In whole blocks of {block_size} tokens:"]
    lines += [_allocated(row, context, block_size) for row in rows if row.stored_layers]
    lines.append(_total("kv_cache_allocated_bytes", size.allocated, sequences))
    lines += ["", f"bytes_per_token = {size.slope:,} (rows that still grow at S, divided by the tokens a row stands for)"]
    lines.append(f"fixed_bytes = {size.fixed:,} (state and full windows of one sequence)")
    lines += [line for line in (_scores(model, context, batch_size, precision, parallelism), reach_line(model)) if line]
    if ratio := record["mha_ratio"]:
        lines.append(f"mha_ratio = {ratio:.4g} (every layer that attends as plain MHA, without a window, over these bytes)")
    lines += _weights(record, model, precision) if weights else []
    return "\n".join(lines) + "\n"


def _weights(record: Record, model: Model, precision: Precision) -> list[str]:
    about, label = "=" if model.parameters_exact else "≈", formats_of(model, precision).weights_label
    lines = ["", f"parameters {about} {model.parameters:,}; of them active per token {model.active_parameters:,}"]
    lines += [f"  {name}: {count:,} × {each:,} = {count * each:,}" for name, count, each in _groups(model)]
    held, turns = record["weight_bytes"], record["equal_weights_context"]
    lines.append(f"weight_bytes = {held:,} ({format_bytes(held)}; {label})")
    share = percent(record["cache_share_of_weights"])
    lines.append(f"the cache against the weights: {record['kv_cache_bytes']:,} ÷ {held:,} = {share}")
    if not turns:
        return [*lines, "the cache is never as large as the weights"]
    return [*lines, f"equal_weights_context = {turns:,} (tokens from which on the cache is as large as the weights)"]


def _scores(model: Model, context: int, batch_size: int, precision: Precision, parallelism: Parallelism) -> str:
    held = eviction_score_bytes(model, context, batch_size, precision, parallelism)
    return f"eviction_score_bytes = {held:,}, beside the cache (one score per token kept and KV head)" if held else ""


def _stored(row: LayerRows, context: int, formats: Formats, ranks: Parallelism) -> str:
    entry, held = row.entry, int(row.entry.stored_rows(context))
    heads = ranks.share(entry.heads)
    limit = f", at most {entry.limit:,}" if entry.limit and entry.grows else ""
    per = f" of {entry.ratio}" if entry.ratio > 1 else ""
    shared = f"; of {held:,} over {row.spread} ranks" if row.spread > 1 else ""
    each = f"{entry.width} {formats.cache_format(entry).name} elements" + (f" × {heads} heads" if heads > 1 else "")
    return _product(row, row.stored_layers, held, f" ({_SPANS[entry.span]}{per}{limit}{shared})", f" ({each})")


def _read(row: LayerRows, context: int) -> str:
    top = f" (top {row.entry.top:,})" if row.entry.top else ""
    return _product(row, row.read_layers, int(row.entry.read_rows(1, context - 1)), top)


def _allocated(row: LayerRows, context: int, block_size: int) -> str:
    return _product(row, row.stored_layers, int(row.entry.allocated_rows(context, block_size)))


def _product(row: LayerRows, layers: int, rows: int, what: str = "", each: str = "") -> str:
    """Layers × rows on this rank × bytes of a row."""
    here = -(-rows // row.spread)
    total = layers * here * row.row_bytes
    return f"  {row.entry.role}: {layers} layers × {here:,} rows{what} × {row.row_bytes:,} B{each} = {total:,}"


def _total(key: str, value: int, sequences: int) -> str:
    return f"  {key} = Σ × {sequences:,} = {value:,} ({format_bytes(value)})"


def _groups(model: Model) -> list[tuple[str, int, int]]:
    outer = sum(w.elements for w in model.outer_weights if w.name not in model.lent)
    found = [("embeddings, final norm and head", 1, outer)]
    for kind, count in model.counts.items():
        found.append((f"{kind} layer", count, sum(w.elements for w in model.layer_weights(kind))))
        shared = sum(w.elements for w in model.shared_weights(kind))
        if shared:
            found.append((f"{kind}'s shared block", min(model.kinds[kind].weight_sets, count), shared))
    return found
