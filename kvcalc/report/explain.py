"""Write the figures of tables, pictures and sizes as formulas with numbers, for `--explain`."""

import re
import shlex
from collections.abc import Sequence

from kvcalc.capacity import Fit
from kvcalc.gpu.gpu import BoundedOperator
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.layers.cache import Span
from kvcalc.layers.cost import AttentionShape, ExpertsShape, GemmShape, Operator
from kvcalc.layers.weights import Formats
from kvcalc.model.memory import LayerRows, assumptions, fullest_stage, reach_line, stage_rows
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision, formats_of
from kvcalc.planning.best_configs import BestConfigs, candidate_record, command
from kvcalc.planning.search_space import SearchSpace
from kvcalc.records import JsonObject, Record, Records
from kvcalc.records.figures import figures_of, unit_of_key
from kvcalc.records.size import SizeRecord
from kvcalc.report.charts.chart import Chart
from kvcalc.report.row_names import texts_by_name
from kvcalc.report.text.fit_text import cost_lines, memory_line, placement_lines
from kvcalc.report.text.plan_text import deployment_words
from kvcalc.report.text.table_layout import Column, Table, cell_text, filled_columns
from kvcalc.report.text.tables import digits, kernel_seconds, plural, seconds, whole
from kvcalc.timing.deployment import (
    ENGINE_OVERHEAD,
    MODULE_OVERHEAD,
    TimedDeployment,
    pass_records,
)
from kvcalc.timing.steps import engine_parts
from kvcalc.units import format_bytes, format_si


def explain_table(table: Table) -> str:
    """Return a table as text for `--explain`: how each value of each record is computed.

    There is one line per value. It has the formula with numbers, such as `{flops} / {bytes}`, or
    without a formula the meaning of the value.

    Args:
        table: A table that a command prints.
    """
    columns = filled_columns(table)
    lines = [table.title.strip(), ""] if table.title else []
    for record in table.records:
        known = [column for column in columns if record.get(column.key) is not None]
        names = [column for column in known if column.is_input or not column.right]
        lines.append(", ".join(f"{c.title} {cell_text(c, record)}" for c in names))
        lines += [f"  {_explanation(c, record)}" for c in known if c not in names]
        lines.append("")
    return "\n".join([*lines, *filter(None, table.notes)]) + "\n"


def _explanation(column: Column, record: Record) -> str:
    """Return a figure with its formula, or with its meaning if the record has no numbers for it."""
    formula = with_numbers(column.formula, record)
    value = cell_text(column, record)
    if formula:
        return f"{column.title} = {formula} = {value}"
    return f"{column.title} = {value}" + f" ({column.meaning})" * bool(column.meaning)


def with_numbers(formula: str, record: Record) -> str:
    """Return a formula with a record's values in place of the keys; '' if the record lacks a value.

    Example: with a record of 2,000 flops and 1,000 bytes, `{flops} / {bytes}` gives
    `2,000 / 1,000 B`.

    Args:
        formula: Formula with the record's keys in braces; may be ''.
        record: Record with the values.
    """
    keys = re.findall(r"\{(\w+)\}", formula)
    if any(record.get(key) is None for key in keys):
        return ""
    return formula.format(**{key: operand(key, record[key]) for key in keys})


def operand(key: str, value: object) -> str:
    """Return one value of a record as text with its unit, to be put into a formula of `--explain`.

    Bytes are written in full (`1,000 B`), other numbers with six significant digits.

    Args:
        key: Key of the record. Its ending gives the unit: `_s` is seconds.
        value: The value.
    """
    if not isinstance(value, int | float):
        return str(value)
    texts = {
        "seconds": seconds(value),
        "bytes": f"{value:,} B",
        "bytes a second": format_si(value, "B/s"),
        "FLOP a second": format_si(value, "FLOP/s"),
    }
    return texts.get(unit_of_key(key)) or whole(value)


def explain_chart(chart: Chart) -> str:
    """Return a chart as text for `--explain`: the values of its points, formatted as on the axes.

    The text has the first and the last point of each curve, and every point with a name.

    Args:
        chart: The chart.
    """
    lines = [chart.title, chart.subtitle, ""]
    for series in chart.series:
        # a label per point, or markers of a line
        if series.kind == "points" and not series.label:
            lines += [
                f"{label}: {chart.y.tick(y)} at {chart.x.tick(x)}"
                for label, x, y in zip(series.labels, series.xs, series.ys)
                if label
            ]
            continue
        points = list(dict.fromkeys(zip(series.xs, series.ys)))
        ends = dict.fromkeys([*points[:1], *points[-1:]])
        texts = [f"{chart.y.tick(y)} at {chart.x.tick(x)}" for x, y in ends]
        name = series.label.removesuffix(f": {chart.y.tick(series.ys[-1])}")
        lines.append(f"{name or 'further'}: {', '.join(texts or map(chart.y.tick, series.ys))}")
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
    """Return a text that shows how the KV cache bytes and the other values of `size` are computed.

    Values that are None in the record are left out.

    Args:
        record: Record of the model for the other arguments.
        model: The model.
        context: Tokens per sequence.
        batch_size: Number of sequences.
        precision: Data types of weights and cache.
        block_size: Tokens per block of the cache.
        parallelism: How the model is split over GPUs. Bytes are of the GPU that stores the most.
    """
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    sequences = parallelism.sequences(batch_size)
    has_weights = record["weight_bytes"] is not None
    values: JsonObject = {**record}
    lines = [
        f"{model.name}: {record['attention']}",
        assumptions(model, precision, block_size, parallelism, has_weights),
    ]
    sums = {
        "kv_cache_bytes": f"Stored after S = {context:,} tokens",
        "kv_cache_read_bytes": "Read by one decode step (new = 1, past = S − 1)",
        "kv_cache_allocated_bytes": f"In whole blocks of {block_size} tokens",
    }
    rows = stage_rows(model, stage, formats, parallelism)
    for key, title in sums.items():
        lines += ["", f"{title}:"]
        if key == "kv_cache_bytes":
            lines.append(f"  {key} = {size_formula(rows)}")
        texts = [_row_line(row, key, context, block_size, parallelism, formats) for row in rows]
        total = f"{values[key]:,} ({format_bytes(values[key])})"
        lines += [*filter(None, texts), f"  {key} = Σ × {sequences:,} = {total}"]
    figures = figures_of(SizeRecord)
    lines += ["", *filter(None, [reach_line(model)])]
    for key in SIZE_KEYS.split():
        if values[key] is not None:
            formula = with_numbers(figures[key].formula, values)
            sign = "≈" if "param" in key and not record["parameters_exact"] else "="
            shown = f"{formula} = {whole(values[key])}".removeprefix(" = ")
            lines.append(f"{key} {sign} {shown} ({figures[key].meaning.partition(';')[0]})")
    return "\n".join(lines) + "\n"


# Elements that a layer stores per row, in the keys of config.json.
ELEMENTS_OF_ROLES = texts_by_name("""
    k: 2 · layers · kv_heads · head_dim
    v: 2 · layers · kv_heads · head_dim
    latent: layers · (kv_lora_rank + qk_rope_head_dim)
    rope_key: layers · (kv_lora_rank + qk_rope_head_dim)
    index_key: layers · index_head_dim
""")


def size_formula(rows: Sequence[LayerRows]) -> str:
    """Return the formula of the stored cache bytes, with the names of config.json as symbols.

    Example: `2 · layers · kv_heads · head_dim · tokens · batch · bytes`.

    Args:
        rows: The cache entries of all layers, such as keys, values or latents.
    """
    terms: dict[str, None] = {}
    for row in rows:
        entry = row.entry
        tokens = f" · min(tokens, {entry.limit:,})" if entry.limit else " · tokens"
        tokens += f" / {entry.ratio}" if entry.ratio > 1 else ""
        elements = ELEMENTS_OF_ROLES.get(entry.role, f"layers · {entry.role} elements")
        terms[elements + tokens * entry.grows] = None
    text = " + ".join(terms) or "0"
    return f"{f'({text})' if len(terms) > 1 else text} · batch · bytes"


def _row_line(
    row: LayerRows,
    key: str,
    context: int,
    block_size: int,
    parallelism: Parallelism,
    formats: Formats,
) -> str:
    """Return the bytes of an entry of some layers under a key of `size`; '' without layers."""
    entry = row.entry
    layers = row.stored_layers
    details = ""
    heads = parallelism.share(entry.heads)
    num_rows = int(entry.allocated_rows(context, block_size))
    if key == "kv_cache_read_bytes":
        layers = row.read_layers
        num_rows = int(entry.read_rows(1, context - 1))
        details = f" (top {entry.max_rows_per_query:,})" if entry.max_rows_per_query else ""
    if key == "kv_cache_bytes":
        num_rows = int(entry.stored_rows(context))
        limit = f", at most {entry.limit:,}" if entry.limit and entry.grows else ""
        details = f" ({SPANS[entry.span]}{f' of {entry.ratio}' * (entry.ratio > 1)}{limit})"
    if not layers:
        return ""
    if row.spread > 1:
        details = f" ({num_rows:,} over {row.spread} ranks)"
    rank_rows = -(-num_rows // row.spread)
    elements = (
        f"{entry.width} {formats.cache_format(entry).name} elements"
        f"{f' × {heads} heads' * (heads > 1)}"
    )
    return (
        f"  {entry.role}: {layers} layers × {rank_rows:,} rows{details} × {row.row_bytes:,} B "
        f"({elements}) = {layers * rank_rows * row.row_bytes:,}"
    )


def explain_fit(fitted: Fit, record: Record) -> str:
    """Return a text with each step from one GPU's memory to the number of sequences that fit.

    Args:
        fitted: Memory and capacity of a deployment.
        record: The `fit` record of the same deployment.
    """
    budget = fitted.estimate_budget
    terms = fitted.estimate_terms
    plan = fitted.plan
    remaining, margin = fitted.remaining[fitted.estimate], fitted.margin_bytes
    taken = ""
    if not budget.excludes_activations:
        taken = f" − {budget.activation:,} − {budget.overhead:,}"
    if margin:
        taken += f" {'−' if margin > 0 else '+'} {abs(margin):,}"
    tokens = f"{fitted.settings.max_num_batched_tokens:,} tokens"
    length = f"{fitted.length:,} tokens"
    host_bytes = plan.extra_buffers(1, fitted.length).get("host_cache_bytes", 0)
    has_cache = fitted.needed.cache > 0
    steps = {
        "Memory that the engine may use": _share_lines(fitted),
        "Weights, activations and overhead": [
            f"weights of the language model ({record['dtype']}): {_bytes(terms.language)}",
            *(f"{name}: {_bytes(size)}" for name, size in terms.extra.items()),
            f"in the host's memory instead: {_bytes(terms.host)}" if terms.host else "",
            f"activations of a pass of {tokens}"
            f"{f', of the {terms.peak}' * bool(terms.peak)}: {_bytes(terms.activation)}",
            *(f"{name}: {_bytes(size)}" for name, size in terms.overhead.items()),
        ],
        "KV cache budget" if has_cache else "Free memory": [
            f"{budget.share:,} − {budget.weights:,}{taken} = {_bytes(remaining)}",
            f"override: {_bytes(fitted.kv_budget)}" if fitted.kv_budget != remaining else "",
        ],
        f"Blocks of the engine (cache in {record['kv_cache_dtype']})": [
            *plan.describe(fitted.length),
            with_numbers(
                "num_blocks = {kv_budget_bytes} / {bytes_per_block} = {num_blocks}", record
            ),
            with_numbers(f"blocks_per_request at {length} = {{blocks_per_request}}", record),
            with_numbers(
                "max_concurrency = {max_concurrency}; kv_tokens = {kv_tokens}", record
            ),
        ]
        * has_cache,
        "One sequence": [
            *cost_lines(record),
            f"content at {length}: {_bytes(fitted.content.needed(1, fitted.length))}; the engine "
            f"holds {_bytes(plan.needed(1, fitted.length))} for it"
            f"{f', and {_bytes(host_bytes)} in host memory' * bool(host_bytes)}",
            f"a decode step reads {_bytes(fitted.content.step_read(fitted.length))}",
        ]
        * has_cache,
        "What fits": _fit_lines(fitted) * has_cache,
        "Links": placement_lines(record),
    }
    gpus = f"{'each of ' * (record['gpus'] > 1)}{record['gpus']}×"
    lines = [f"{record['model']} with {record['engine']} on {gpus} {memory_line(fitted)}"]
    if fitted.ranks.pp > 1:
        lines.append(f"pipeline stage {fitted.stage} of {fitted.ranks.pp} decides")
    shown = {title: step for title, step in steps.items() if any(step)}
    for number, (title, step) in enumerate(shown.items(), 1):
        lines += ["", f"{number}. {title}", *(f"   {line}" for line in step if line)]
    return "\n".join(lines) + "\n"


def _share_lines(fitted: Fit) -> list[str]:
    """Return the share of total, free or remaining memory that the engine may use."""
    budget = fitted.estimate_budget
    terms = fitted.estimate_terms
    share = f"{fitted.utilization:g}"
    memory = _bytes(budget.memory)
    if fitted.utilization_basis == "total":
        return [f"{share} of the total memory of {memory} = {_bytes(budget.share)}"]
    free = budget.memory - terms.startup_bytes
    startup = "".join(f" − {size:,} ({name})" for name, size in terms.startup.items())
    line = f"of {memory} free before the weights: {budget.memory:,}{startup} = {_bytes(free)}"
    if fitted.utilization_basis == "free":
        return [line, f"{share} of the free memory = {_bytes(budget.share)}"]
    used = budget.weights
    if not budget.excludes_activations:
        used += budget.activation + budget.overhead
    if used >= free:
        return [line, f"nothing remains after the terms below, {_bytes(used)}"]
    remaining = f"{share} of the remaining {free - used:,}"
    return [line, f"the terms below, {used:,}, and {remaining} = {_bytes(budget.share)}"]


def _fit_lines(fitted: Fit) -> list[str]:
    """Return lines with the bytes of the largest number of sequences that fits, and of one more
    sequence."""
    plan = fitted.plan
    length = fitted.length
    pool = plan.pool(fitted.kv_budget)
    max_count = fitted.capacity // fitted.ranks.dp
    lines = []
    for count, word in ((max_count, "within"), (max_count + 1, "over")):
        size = plan.needed(count, length, fitted.options.shared_prefix)
        need = f"{plural(count, 'sequence')} of {length:,} tokens need{'s' * (count == 1)}"
        lines.append(f"{need} {size:,} B, {word} {pool:,} B")
    if fitted.sequences < fitted.capacity:
        lines.append(
            f"{fitted.sequences:,} of {fitted.capacity:,} fit with this --max-num-seqs, which "
            "needs more memory"
        )
    longest = (
        "no limit" if fitted.longest_length is None else f"{fitted.longest_length:,} tokens"
    )
    lines.append(
        f"longest context of {plural(fitted.options.requested_num_seqs, 'sequence')}: {longest}"
    )
    if fitted.has_chosen_length and length != fitted.longest_length:
        lines.append(
            f"longest at the low end of the range: {length:,} tokens, the default length"
        )
    return lines


def _bytes(size: int) -> str:
    return f"{size:,} B ({format_bytes(size)})"


def explain_roofline(
    deployment: TimedDeployment, batch: Batch, bounds: list[BoundedOperator]
) -> str:
    """Return a text that shows how FLOPs, bytes and times of each operator are computed.

    FLOPs and bytes are of one run of the operator on one GPU, times of all its runs in a pass.

    Args:
        deployment: The deployment.
        batch: The sequences in the pass, with their new and cached tokens.
        bounds: Operators of the pass, each with max(FLOPs ÷ datasheet peak, bytes ÷ bandwidth).
    """
    model, calibration = deployment.model, deployment.calibration
    groups = [
        f"{g.count:,} × {g.new:,} new tokens after {g.past:,} cached" for g in batch.groups
    ]
    lines = [
        f"{model.name} on {deployment.gpu.name}: {' + '.join(groups)}",
        "B sequences, S tokens of each, T = Σ new tokens; "
        f"D hidden_size = {model.hidden_size:,}, V vocab_size = {model.vocab_size:,}",
    ]
    for kind, layer in model.kinds.items():
        letters = {k: v for part in layer.parts for k, v in part.letters().items() if v}
        sizes = [f"{letter} = {size:,}" for letter, size in letters.items()]
        lines.append(f"{kind} layers ({model.counts[kind]}): {', '.join(sizes)}")
    if deployment.parallelism.gpus > 1:
        lines.append("n, k and heads are this GPU's share of the letters")
    operators = [p.operator for p in bounds]
    remaining = iter(operators)
    element = deployment.formats.element_bytes
    *records, total = pass_records(bounds, deployment.gpu, calibration, element)
    kernels = sum(r["time_s"] or 0 for r in records if r["operator"] != ENGINE_OVERHEAD)
    for record in records:
        if record["operator"] == MODULE_OVERHEAD:
            sums = ["measured module − its operators"]
        elif record["operator"] == ENGINE_OVERHEAD and calibration:
            parts = engine_parts(operators, calibration, kernels)
            names = ("layers and pass", "sequences", "kernels with prompts")
            sums = [f"{name} {seconds(part)}" for name, part in zip(names, parts) if part]
        else:
            sums = _operator_sums(deployment, batch, next(remaining))
        times = []
        if record["time_s"] is not None:
            times.append(f"predicted {kernel_seconds(record['time_s'])}")
        if record["bound"]:
            times.append(f"{record['bound']} bound {kernel_seconds(record['roofline_s'])}")
        if record["intensity"]:
            times.append(f"{digits(record['intensity'])} FLOP/B")
        sums.append(f"all runs: {', '.join(times)}; {record['share']:.1%} of the pass")
        layer = record["layer"]
        lines += ["", f"{record['operator']}{f' ({layer})' * bool(layer)} × {record['count']}"]
        lines += [f"    {text}" for text in sums]
        lines += _separate_kernels(record.get("parts", []))
    time = "" if total["time_s"] is None else f"predicted {kernel_seconds(total['time_s'])}, "
    bound = f"datasheet bound {kernel_seconds(total['roofline_s'])}"
    return "\n".join([*lines, "", f"total of all rows: {time}{bound}"]) + "\n"


# Intensity of an operation that runs as a separate kernel; e is the bytes of an activation, w of a
# weight.
INTENSITIES = texts_by_name("""
    qk: 2·H·dk·pairs / (K + e·H·(dk·T + pairs))
    softmax: 5·H·pairs / (2·e·H·pairs)
    av: 2·H·dv·pairs / (V + e·H·(pairs + dv·T))
    gate: 2·T·D·F / (w·D·F + e·T·(D + F))
    up: 2·T·D·F / (w·D·F + e·T·(D + F))
""")


def _separate_kernels(records: Records) -> list[str]:
    """Return a line for each operation of a fused operator, as a separate kernel."""
    lines = []
    for record in records:
        if formula := INTENSITIES.get(record["operator"]):
            bound = f"{record['bound']} bound {kernel_seconds(record['roofline_s'])}"
            vector = "vector " * (not record["flops"])
            lines.append(
                f"    {record['operator']} as a kernel of its own: {record['bytes']:,} bytes, "
                f"{vector}FLOP/B = {formula} = {digits(record['intensity'])}, {bound}"
            )
    return lines


def _operator_sums(deployment: TimedDeployment, batch: Batch, operator: Operator) -> list[str]:
    """Return FLOPs and bytes of one run of an operator as sums."""
    cost = operator.cost
    shape = operator.shape
    element = deployment.formats.element_bytes
    weights = activations = ""
    if isinstance(shape, GemmShape):
        rows, inner, columns = _letters(deployment, batch, operator)
        m = whole(shape.m)
        n = whole(shape.n)
        wide = f"({columns})" if "+" in columns else columns
        sums = [
            f"x[m, k] · W[k, n], m = {rows} = {m}, k = {inner} = {shape.k:,}, "
            f"n = {columns} = {n}",
            f"FLOPs = 2·m·k·n = 2·{m}·{shape.k:,}·{n} = {cost.flops:,}",
            f"FLOP/B = 2·{rows}·{inner}·{wide} / ({shape.stored:g}·{inner}·{wide} + "
            f"{element}·{rows}·({inner} + {columns}))",
        ]
        weights = f" ({shape.stored:g} B a weight, scales included)"
        for formula, count in (("m·(k + n)", shape.k + shape.n), ("m·n", shape.n)):
            if element * shape.m * count == cost.activation_bytes and not activations:
                activations = f" {element} bytes·{formula} ="
    elif isinstance(shape, AttentionShape):
        pairs = shape.num_pairs
        queries = shape.num_queries
        shared = f"{shape.kv_heads:,} KV heads" if shape.kv_heads else "latents of all heads"
        sums = [
            f"{shape.heads:,} heads × {queries:,} queries × {pairs / (queries or 1):,.6g} keys "
            f"(mean) × {shape.key:,} + {shape.value:,} wide; {shared}",
            f"FLOPs = 2·H·(dk + dv)·pairs = 2·{shape.heads:,}·{shape.key + shape.value:,}·"
            f"{pairs:,} = {cost.flops:,}",
            f"FLOP/B = 2·H·(dk + dv)·pairs / (cache + {element}·H·(dk + dv)·T), pairs ≈ "
            + ("B·S" if len(batch.groups) == 1 and batch.groups[0].new == 1 else "B·S²/2"),
            f"softmax = 5·H·pairs = {cost.vector_flops:,} vector FLOPs, on the chip",
            f"scores = {element}·H·pairs = {element * shape.heads * pairs:,} bytes, which fused "
            "attention never stores",
        ]
    elif isinstance(shape, ExpertsShape):
        expert_rows = -(-shape.tokens * shape.top_k // shape.ranks)
        matrices = 3 if shape.gated else 2
        ranks = f" ÷ {shape.ranks}" if shape.ranks > 1 else ""
        sums = [
            f"rows R = T·k{ranks} = {expert_rows:,}; D = {shape.hidden:,}, Fe = {shape.width:,}",
            f"experts read = E·(1 − (1 − k/E)^T){ranks} = {whole(operator.experts)} in expectation",
            f"FLOPs = 2·R·{matrices}·D·Fe = 2·{expert_rows:,}·{matrices}·{shape.hidden:,}·"
            f"{shape.width:,} = {cost.flops:,}",
        ]
    else:
        sums = [f"{cost.flops:,} FLOPs, {cost.vector_flops:,} vector FLOPs"]
    sizes = {
        f"weights {cost.weight_bytes:,}{weights}": cost.weight_bytes,
        f"cache {cost.cache_bytes:,}": cost.cache_bytes,
        f"activations{activations} {cost.activation_bytes:,}": cost.activation_bytes,
    }
    terms = " + ".join(text for text, size in sizes.items() if size) or "0"
    return [
        *sums,
        f"bytes = {terms} = {cost.bytes:,}"
        f"{f', {cost.network_bytes:,.0f} over the link' * bool(cost.network_bytes)}",
    ]


def _letters(
    deployment: TimedDeployment, batch: Batch, operator: Operator
) -> tuple[str, str, str]:
    """Return m, k and n of a GEMM as products of letters, or as words if no letters are known.

    The new tokens of a batch are B in a decode, B·S in a prefill and T in a mixed pass.
    """
    if operator.name == "lm_head":
        return "B", "D", "V"
    first, *more = batch.groups
    rows = "T" if more or not isinstance(first.new, int) else "B" if first.new == 1 else "B·S"
    if operator.experts:
        rows += "·k ÷ experts"
    layer = deployment.model.kinds.get(operator.layer)
    for part in layer.all_parts if layer else ():
        sides = part.sides()
        names = (operator.name,) if operator.name in sides else operator.weights
        if names and all(name in sides for name in names):
            return rows, sides[names[0]][0], " + ".join(sides[name][1] for name in names)
    return rows, "inputs", "outputs"


# Formulas of a deployment. Keys that a record lacks leave out their formula.
PLAN_FORMULAS = texts_by_name("""
    total_gpus: {gpus} · ({replicas} + {prefill_replicas} for prefill)
    max_num_seqs: ⌈{users} users / {replicas}⌉
    tokens_per_s: {max_num_seqs} · {output_len} tokens / {e2e_s}
    tokens_per_s_per_gpu: {tokens_per_s} · {replicas} / {total_gpus} GPUs
    cost_per_million_tokens: {cost_per_hour} / 3600 s / {total_tokens_per_s} · 10^6
    energy_per_token_j: {power_w} W · {total_gpus} GPUs / {total_tokens_per_s}
""")
PLAN_KEYS = (
    "total_gpus max_num_seqs capacity_sequences ttft_s tpot_s e2e_s tokens_per_s "
    "tokens_per_s_per_gpu total_tokens_per_s cost_per_hour cost_per_million_tokens "
    "energy_per_token_j reason"
)
DELAY_RULE = """\
  Prompts delay decode steps, except on prefill replicas, in datasheet bounds and with --context:
    tpot_s = step / (1 − requests/s of a replica · seconds of a prompt)
    With pp stages, either each prompt delays a whole pass, or passes are longer by
    (pp − 1) / (2 · pp) prompts and each prompt takes 1 / pp of its time. The shorter one holds.
  max_num_seqs users of a replica send max_num_seqs / e2e_s requests/s.
  At a rate, a replica gets at most 95% of its highest requests/s with as many users as fit.
  The command allows peaks: n + 3 · √n sequences, if they fit, for the n of max_num_seqs."""


def explain_plan(answer: BestConfigs, space: SearchSpace) -> str:
    """Return a text that shows how TPOT, throughput, cost and more of a deployment are computed.

    It is the best deployment for a load. If none meets the targets, it is the deployment that
    misses them least.

    Args:
        answer: The search result for one load with its targets.
        space: The limits of the search, such as the maximum number of GPUs.
    """
    lines = []
    for point in answer.answers[:1]:
        record = candidate_record(point, answer.prices.get(point.gpu, 0.0))
        values = {**record, "power_w": point.deployment.gpu.power_w}
        formulas = dict(PLAN_FORMULAS)
        if record["prefill_replicas"]:
            formulas["tokens_per_s"] = (
                "{max_num_seqs} / {tpot_s} · {output_len} / ({output_len} − 1)"
            )
        dtypes = f"{record['dtype']} weights, a cache in {record['kv_cache_dtype']}"
        lines.append(f"{deployment_words(point)}, {dtypes}, {record['time_basis']} times:")
        for key in PLAN_KEYS.split():
            if values[key] is not None:
                formula = with_numbers(formulas.get(key, ""), values)
                lines.append(
                    f"  {key} = {formula} = {operand(key, values[key])}".replace("=  = ", "= ")
                )
        if record["output_len"]:
            lines.append(DELAY_RULE)
        fitted = command(point, space)
        if fitted:
            words = shlex.join(["--gpu", point.gpu, *fitted.options])
            lines.append(f"  kvcalc fit {words} --explain -- {fitted.line}")
        lines.append("")
    return "\n".join(lines)
