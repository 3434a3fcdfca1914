"""`--explain` for tables: each figure with its formula, the record's numbers put in; what has none,
with what it means.

`--explain`: every figure of a size as its formula, with the numbers put in.
"""

from collections.abc import Callable, Sequence

from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import Span
from kvcalc.layers.weights import Formats
from kvcalc.model.memory import (
    LayerRows,
    assumptions,
    cache_rows,
    cache_size,
    eviction_score_bytes,
    fullest_stage,
    reach_line,
)
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision, formats_of
from kvcalc.report.charts.chart import Chart
from kvcalc.report.export import Record
from kvcalc.report.text.table_layout import Column, Table, filled_columns, written
from kvcalc.report.text.tables import percent, seconds
from kvcalc.units import format_bytes, format_si

ERROR = "exp(|ln(predicted/measured)|) − 1"
Formula = Callable[[Record], str]


def _over(
    *pairs: tuple[str, str], show: Callable[[float], str] = lambda v: f"{v:,.6g}"
) -> Formula:
    """The quotient of the first pair of keys that the record has."""

    def text(record: Record) -> str:
        for above, below in pairs:
            if record.get(above) is not None and record.get(below):
                return f"{show(record[above])} / {show(record[below])}"
        return ""

    return text


def _bytes(size: float) -> str:
    return f"{size:,.0f} B"


def _first_token(r: Record) -> str:
    if "input_len" not in r:
        return ""
    if r["prefix_len"]:
        return (
            f"Σ operators of the prefill of {r['input_len'] - r['prefix_len']:,} tokens "
            f"behind {r['prefix_len']:,} cached ones"
        )
    return f"Σ operators of the prefill of {r['input_len']:,} tokens"


def _per_token(r: Record) -> str:
    if not r.get("tpot_first_s"):
        return ""
    return (
        f"mean of {r['output_len'] - 1:,} decode steps, {seconds(r['tpot_first_s'])} to "
        f"{seconds(r['tpot_last_s'])}"
    )


def _end_to_end(r: Record) -> str:
    if r["tpot_s"] is None:
        return "TTFT"
    return f"{seconds(r['ttft_s'])} + ({r['output_len']:,} − 1) · {seconds(r['tpot_s'])}"


def _money(r: Record) -> str:
    tokens = r.get("output_tokens") or r["batch_size"] * r["output_len"]
    spent = r.get("duration_s") or r["e2e_s"]
    price = r["cost_per_million_tokens"] * tokens / 1e6 * 3600 / spent / r["gpus"]
    return (
        f"{price:g} an hour · {r['gpus']} GPUs · {seconds(spent)} / 3600 s / {tokens:,} "
        "tokens · 10^6"
    )


def _energy(r: Record) -> str:
    if "output_len" not in r or not r.get("e2e_s"):
        return ""
    tokens = r["batch_size"] * r["output_len"]
    power = r["energy_per_token_j"] * tokens / r["e2e_s"] / r["gpus"]
    return f"{power:g} W · {r['gpus']} GPUs · {seconds(r['e2e_s'])} / {tokens:,} tokens"


def _reduced(key: str, by: str) -> Formula:
    def text(r: Record) -> str:
        return (
            f"{_bytes(r[key] * r[by])} of {r['reference']} / {_bytes(r[key])}"
            if r.get(by)
            else ""
        )

    return text


def _expected(r: Record) -> str:
    if r.get("acceptance_rate") is None or "draft_s" not in r:
        return ""
    a, k = r["acceptance_rate"], r["num_speculative_tokens"]
    return f"(1 − {a:g}^{k + 1}) / (1 − {a:g})" if a < 1 else f"{k} + 1"


def _speculative(r: Record) -> str:
    return f"({seconds(r['draft_s'])} + {seconds(r['verify_s'])}) / {r['tokens_per_step']:.4f}"


def _users(r: Record) -> str:
    """Return the room for the cache and the bytes that the engine keeps for one sequence, both of
    one GPU."""
    if "variant" not in r or not r.get("kv_budget_bytes") or not r.get("kv_needed_bytes"):
        return ""
    each = -(-r["kv_needed_bytes"] // r["batch_size"])
    return (
        f"{_bytes(r['kv_budget_bytes'])} for the cache of each GPU, {_bytes(each)} a sequence"
    )


def _step(r: Record) -> str:
    what = (
        "Σ operators + engine overhead"
        if r.get("time_s")
        else "Σ max(FLOPs/peak, bytes/bandwidth) of its operators"
    )
    return f"{what}: {format_si(r['flops'])}FLOP, {_bytes(r['bytes'])}"


def _error(r: Record) -> str:
    return f"{ERROR}, of {r.get('predicted_rows', r['rows']):,} rows"


FORMULAS: dict[str, Formula] = {
    "ttft_s": _first_token,
    "tpot_s": _per_token,
    "e2e_s": _end_to_end,
    "output_tokens_per_s": lambda r: (
        f"{r['batch_size']:,} · {r['output_len']:,} / {seconds(r['e2e_s'])}"
    ),
    "cost_per_million_tokens": _money,
    "energy_per_token_j": _energy,
    "speedup": _over(("no_cache_e2e_s", "e2e_s"), show=seconds),
    "tokens_per_step": _expected,
    "speculative_tpot_s": _speculative,
    "requests_per_s": lambda r: f"{r['completed']:,} requests / {seconds(r['duration_s'])}",
    "throughput_tokens_per_s": lambda r: (
        f"{r['output_tokens']:,} tokens / {seconds(r['duration_s'])}"
    ),
    "ttft_p50_s": lambda r: f"first token − arrival, the half of {r['completed']:,} requests",
    "tpot_p50_s": lambda r: (
        f"(end − first token) / (out − 1), the half of {r['completed']:,} requests"
    ),
    "padding_waste": _over(("padded_slots", "token_slots"), show=lambda v: f"{v:,}"),
    "kv_peak": _over(("kv_peak_bytes", "kv_budget_bytes"), show=_bytes),
    "kv_waste": lambda r: "1 − byte·seconds that hold tokens / byte·seconds allocated",
    "stored_reduction": _reduced("kv_cache_bytes", "stored_reduction"),
    "read_reduction": _reduced("kv_cache_read_bytes", "read_reduction"),
    "attention_intensity": lambda r: "FLOPs of what reads the cache / bytes that it reads",
    "max_num_seqs": _users,
    "step_s": _step,
    "intensity": _over(("flops", "bytes")),
    "to_knee": _over(("knee", "intensity")),
    "knee": _over(("bf16_flops_per_s", "bandwidth_bytes_per_s")),
    "ratio": _over(("measured_s", "predicted_s"), show=seconds),
    "overhead": _over(("time_s", "roofline_s"), show=seconds),
    "median_abs_error": lambda r: f"median of {_error(r)}",
    "p90_abs_error": lambda r: f"90th percentile of {_error(r)}",
    "bytes": lambda r: f"{r['units']:,} · {_bytes(r['each'])}" if r.get("each") else "",
    "seconds": lambda r: f"{_bytes(r['bytes'])} / {format_si(r['bytes_per_s'], 'B/s')}",
    "cache_share_of_weights": _over(("kv_cache_bytes", "weight_bytes"), show=format_bytes),
}


def explained(table: Table) -> str:
    """The rows of a table one after the other, a line a figure: its formula with the numbers, its
    value, or what it means."""
    columns = filled_columns(table)
    names = [c for c in columns if not c.right or c.given]
    lines = [table.title.strip(), ""] if table.title else []
    for record in table.records:
        lines.append(
            ", ".join(
                f"{c.title} {written(c, record)}"
                for c in names
                if record.get(c.key) is not None
            )
        )
        lines += [f"  {line}" for c in columns if c not in names and (line := _line(c, record))]
        lines.append("")
    return "\n".join([*lines, *_notes(table.notes)]) + "\n"


def _line(column: Column, record: Record) -> str:
    if record.get(column.key) is None:
        return ""
    known = FORMULAS.get(column.key)
    formula = known(record) if known else ""
    value = written(column, record)
    if formula:
        return f"{column.title} = {formula} = {value}"
    return f"{column.title} = {value}" + (f" ({column.about})" if column.about else "")


def charted(chart: Chart) -> str:
    """The curves of a picture by their ends, as its axes write them."""
    lines = [chart.title, chart.subtitle, ""]
    for one in chart.series:
        ends = [(x, y) for x, y in zip(one.xs, one.ys, strict=False)]
        stated = [
            f"{chart.y.tick(y)} at {chart.x.tick(x)}"
            for x, y in dict.fromkeys((*ends[:1], *ends[-1:]))
        ]
        stated = stated or [", ".join(map(chart.y.tick, one.ys))]
        name = one.label.removesuffix(
            f": {chart.y.tick(one.ys[-1])}"
        )  # which says where it ends
        lines.append(f"{name or 'further'}: {', '.join(stated)}")
    return "\n".join(lines) + "\n" + (f"\n{charted(chart.beside)}" if chart.beside else "")


def _notes(notes: Sequence[str]) -> list[str]:
    return [note for note in notes if note]


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
    """The worked sums behind a record of `size`, as plain text; without what the record does not
    know, such as weights."""
    weights = record["weight_bytes"] is not None
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = cache_rows(model, stage.counts, formats, parallelism)
    size = cache_size(model, context, batch_size, precision, block_size, parallelism)
    sequences = parallelism.sequences(batch_size)
    lines = [
        f"{model.name}: {record['attention']}",
        assumptions(model, precision, block_size, parallelism, weights),
        "",
    ]
    lines.append(
        f"Stored after S = {context:,} tokens, {sequences:,} sequence{'s' * (sequences != 1)}:"
    )
    lines += [_stored(row, context, formats, parallelism) for row in rows if row.stored_layers]
    lines.append(_total("kv_cache_bytes", size.stored, sequences))
    lines += ["", "Read by one decode step (new = 1, past = S − 1):"]
    lines += [_read(row, context) for row in rows]
    lines.append(_total("kv_cache_read_bytes", size.read, sequences))
    lines += ["", f"In whole blocks of {block_size} tokens:"]
    lines += [_allocated(row, context, block_size) for row in rows if row.stored_layers]
    lines.append(_total("kv_cache_allocated_bytes", size.allocated, sequences))
    lines += [
        "",
        f"bytes_per_token = {size.slope:,} (rows that still grow at S, divided by the tokens a "
        "row stands for)",
    ]
    lines.append(f"fixed_bytes = {size.fixed:,} (state and full windows of one sequence)")
    lines += [
        line
        for line in (
            _scores(model, context, batch_size, precision, parallelism),
            reach_line(model),
        )
        if line
    ]
    if ratio := record["mha_ratio"]:
        lines.append(
            f"mha_ratio = {ratio:.4g} (every layer that attends as plain MHA, without a window, "
            "over these bytes)"
        )
    lines += _weights(record, model, precision) if weights else []
    return "\n".join(lines) + "\n"


def _weights(record: Record, model: Model, precision: Precision) -> list[str]:
    about, label = (
        "=" if model.parameters_exact else "≈",
        formats_of(model, precision).weights_label,
    )
    lines = [
        "",
        f"parameters {about} {model.parameters:,}; of them active per token "
        f"{model.active_parameters:,}",
    ]
    lines += [
        f"  {name}: {count:,} × {each:,} = {count * each:,}"
        for name, count, each in _groups(model)
    ]
    stored, turns = record["weight_bytes"], record["equal_weights_context"]
    lines.append(f"weight_bytes = {stored:,} ({format_bytes(stored)}; {label})")
    share = percent(record["cache_share_of_weights"])
    lines.append(
        f"the cache against the weights: {record['kv_cache_bytes']:,} ÷ {stored:,} = {share}"
    )
    if not turns:
        return [*lines, "the cache is never as large as the weights"]
    return [
        *lines,
        f"equal_weights_context = {turns:,} (tokens from which on the cache is as large as the "
        "weights)",
    ]


def _scores(
    model: Model,
    context: int,
    batch_size: int,
    precision: Precision,
    parallelism: Parallelism,
) -> str:
    stored = eviction_score_bytes(model, context, batch_size, precision, parallelism)
    return (
        f"eviction_score_bytes = {stored:,}, beside the cache (one score per token kept and "
        "KV head)"
        if stored
        else ""
    )


def _stored(row: LayerRows, context: int, formats: Formats, ranks: Parallelism) -> str:
    entry, stored = row.entry, int(row.entry.stored_rows(context))
    heads = ranks.share(entry.heads)
    limit = f", at most {entry.limit:,}" if entry.limit and entry.grows else ""
    per = f" of {entry.ratio}" if entry.ratio > 1 else ""
    shared = f"; of {stored:,} over {row.spread} ranks" if row.spread > 1 else ""
    each = f"{entry.width} {formats.cache_format(entry).name} elements" + (
        f" × {heads} heads" if heads > 1 else ""
    )
    return _product(
        row,
        row.stored_layers,
        stored,
        f" ({_SPANS[entry.span]}{per}{limit}{shared})",
        f" ({each})",
    )


def _read(row: LayerRows, context: int) -> str:
    top = f" (top {row.entry.top:,})" if row.entry.top else ""
    return _product(row, row.read_layers, int(row.entry.read_rows(1, context - 1)), top)


def _allocated(row: LayerRows, context: int, block_size: int) -> str:
    return _product(row, row.stored_layers, int(row.entry.allocated_rows(context, block_size)))


def _product(row: LayerRows, layers: int, rows: int, what: str = "", each: str = "") -> str:
    """Layers × rows on this rank × bytes of a row."""
    here = -(-rows // row.spread)
    total = layers * here * row.row_bytes
    return (
        f"  {row.entry.role}: {layers} layers × {here:,} rows{what} × {row.row_bytes:,} "
        f"B{each} = {total:,}"
    )


def _total(key: str, value: int, sequences: int) -> str:
    return f"  {key} = Σ × {sequences:,} = {value:,} ({format_bytes(value)})"


def _groups(model: Model) -> list[tuple[str, int, int]]:
    outer = sum(w.elements for w in model.outer_weights if w.name not in model.lent)
    groups = [("embeddings, final norm and head", 1, outer)]
    for kind, count in model.counts.items():
        groups.append(
            (f"{kind} layer", count, sum(w.elements for w in model.layer_weights(kind)))
        )
        shared = sum(w.elements for w in model.shared_weights(kind))
        if shared:
            groups.append(
                (
                    f"{kind}'s shared block",
                    min(model.kinds[kind].weight_sets, count),
                    shared,
                )
            )
    return groups
