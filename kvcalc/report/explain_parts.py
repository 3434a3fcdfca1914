"""`fit --explain`: the whole budget as a worked exercise, from the GPU's memory to sequences.

`roofline --explain`: every operation with its shape, its FLOPs and bytes as formulas with the
numbers put in.

`plan --explain`: each figure of the chosen point with its numbers put in, and the command that says
how it comes about.
"""

import shlex
from typing import Any, NamedTuple

from kvcalc.capacity import Fit
from kvcalc.gpu.roof import Placed
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import AttentionShape, ExpertsShape, GemmShape, Operator
from kvcalc.layers.part import Sublayer
from kvcalc.model.model import Model
from kvcalc.planning.best_configs import BestConfigs, candidate_record, command
from kvcalc.planning.grid import Candidate
from kvcalc.planning.pareto_front import reason
from kvcalc.planning.search_space import SearchSpace
from kvcalc.records import JsonObject
from kvcalc.report.export import Record
from kvcalc.report.text.fit_text import cost_lines, memory_line, placement_lines
from kvcalc.report.text.plan_text import sentence, where
from kvcalc.report.text.table_layout import Column, written
from kvcalc.report.text.tables import kernel_seconds, plural, seconds, whole
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.operator_times import ENGINE_OVERHEAD, MODULE_OVERHEAD, pass_records
from kvcalc.timing.steps import engine_parts, layers_and_ranks, mixes
from kvcalc.units import format_bytes


def explain_fit(found: Fit, record: JsonObject) -> str:
    """The whole budget as a worked exercise, from the GPU's memory to sequences."""
    b, plan, length = found.end_budget, found.plan, found.length
    lines = [
        f"{record['model']} on {record['gpus']}× {record['gpu']}, engine {record['engine']}"
    ]
    if found.ranks.pp > 1:
        lines.append(f"pipeline stage {found.stage} of {found.ranks.pp} decides")
    lines += ["", "1. What the process may use"]
    lines += _share(found)
    lines += _terms(found, record)
    lines += ["", "3. The budget for the cache"]
    margin = (
        f" − {found.margin:,}"
        if found.margin > 0
        else f" + {-found.margin:,}"
        if found.margin
        else ""
    )
    if margin:
        lines.append(
            f"   margin of the {found.end} end, for what differs between starts: {_b(found.margin)}"
        )
    inside = "" if b.outside else f" − {b.activation:,} − {b.overhead:,}"
    if b.outside:
        lines.append(
            "   activations and CUDA graphs lie in the rest of the memory, outside this share"
        )
    lines.append(
        f"   {b.share:,} − {b.weights:,}{inside}{margin} = {_b(found.left[found.end])}"
    )
    if found.engine.ranged and not found.given:
        ends = " to ".join(format_bytes(found.budget_at(end)) for end in ("low", "high"))
        lines.append(f"   the range of its terms: {ends}; the {found.end} answers")
    if found.kv_budget != found.left[found.end]:
        lines.append(
            f"   {'given' if found.given else 'bounded'} instead: {_b(found.kv_budget)}"
        )
    lines.append(f"   {memory_line(found)}")
    lines += [
        "",
        f"4. What the engine makes of it (cache in {record['kv_cache_dtype']})",
    ]
    lines += [f"   {line}" for line in plan.describe(length)]
    lines += _capacity(found, record)
    return "\n".join(lines) + "\n"


def _share(found: Fit) -> list[str]:
    """What the process may use: a share of the memory, of what is free before the weights, or of
    what all terms leave."""
    b, part = found.end_budget, f"{found.utilization:g}"
    if found.of == "total":
        return [
            f"   {part} of the total memory of {b.memory:,} B ({format_bytes(b.memory)}) = "
            f"{_b(b.share)}"
        ]
    startup, free = found.end_terms.startup, b.memory - found.end_terms.taken
    terms = "".join(f" − {size:,} ({name})" for name, size in startup.items())
    lines = [
        f"   of {b.memory:,} B ({format_bytes(b.memory)}) free before the weights: "
        f"{b.memory:,}{terms} = {_b(free)}"
    ]
    if found.of == "free":
        return [*lines, f"   {part} of the free memory = {_b(b.share)}"]
    below = b.weights + (0 if b.outside else b.activation + b.overhead)
    if below >= free:
        return [*lines, f"   nothing of it remains beside the terms below, {_b(below)}"]
    return [
        *lines,
        f"   the terms below, {below:,}, and {part} of the remaining {free - below:,} = "
        f"{_b(b.share)}",
    ]


def _terms(found: Fit, record: JsonObject) -> list[str]:
    """What stands beside the cache, name by name."""
    terms = found.end_terms
    peak = f", of the {terms.peak}" if terms.peak else ""
    lines = [
        "",
        "2. What stands beside the cache",
        f"   weights of the language model ({record['dtype']}): {_b(terms.language)}",
    ]
    lines += [f"   in the host's memory instead: {_b(terms.host)}"] if terms.host else []
    lines += [f"   {name}: {_b(size)}" for name, size in terms.extra.items()]
    lines.append(
        f"   activations of a pass of {found.settings.max_num_batched_tokens:,} tokens{peak}: "
        f"{_b(terms.activation)}"
    )
    return [
        *lines,
        *(f"   {name}: {_b(size)}" for name, size in terms.overhead.items()),
    ]


def _capacity(found: Fit, record: JsonObject) -> list[str]:
    plan, length, cache = found.plan, found.length, found.kv_budget
    lines = []
    if record["num_blocks"] is not None:
        lines.append(
            f"   num_blocks = {cache:,} ÷ {plan.bytes_per_block:,} = {record['num_blocks']:,}"
        )
        lines.append(
            f"   blocks_per_request at {length:,} tokens = {record['blocks_per_request']:,}"
        )
    lines.append(
        f"   max_concurrency = {record['max_concurrency']:.4f}; kv_tokens = {record['kv_tokens']:,}"
    )
    lines += ["", "5. One sequence"]
    lines += [f"   {line}" for line in cost_lines(record)]
    stored, sequences = (
        found.content.needed(1, length),
        found.capacity // found.ranks.dp,
    )
    there = plan.parts(1, length).get("host_cache_bytes", 0)
    beside = f", and {_b(there)} in the host's memory" if there else ""
    lines.append(
        f"   content at {length:,} tokens: {_b(stored)}; the engine holds "
        f"{_b(plan.needed(1, length))} for it{beside}"
    )
    lines.append(f"   a decode step reads {_b(found.content.step_read(length))} of it")
    lines += ["", "6. What fits"]
    ends = ((sequences, "within"), (sequences + 1, "over"))
    for count, word in ends:
        need = plan.needed(count, length, found.options.shared_prefix)
        lines.append(
            f"   {plural(count, 'sequence')} of {length:,} tokens need {need:,} B, {word} "
            f"{plan.pool(cache):,} B"
        )
    if found.sequences < found.capacity:
        lines.append(
            f"   of the replica's {found.capacity:,}, {found.sequences:,} hold with as many "
            "--max-num-seqs, which take more"
        )
    longest = found.longest
    requested = plural(found.options.wanted, "sequence")
    lines.append(
        f"   longest context of {requested}: "
        + ("no limit" if longest is None else f"{longest:,} tokens")
    )
    if found.longest_context is not None and found.longest_context != longest:
        lines.append(f"   the model is made for {found.longest_context:,} tokens")
    least = record["needed_utilization"]
    share = "no share of the memory" if least is None else f"a share of {least:g}"
    lines.append(
        f"   {requested} of {length:,} tokens: {_b(record['needed_kv_cache_memory_bytes'])} for "
        f"the cache, {share}"
    )
    lines += [
        "",
        "7. Links",
        *(f"   {line}" for line in placement_lines(found, record)),
    ]
    return lines


def _b(size: int) -> str:
    return f"{size:,} B ({format_bytes(size)})"


MEANINGS = (
    "B sequences, S tokens of each, T = Σ new tokens; D hidden_size = {:,}, V vocab_size = {:,}"
)


def explain_roofline(deployment: TimedDeployment, batch: Batch, placed: list[Placed]) -> str:
    """The operations of a pass on one GPU, two or three lines each; figures are of one run, `count`
    runs in a pass."""
    model, element = deployment.model, deployment.formats.element_bytes
    lines = [
        f"{model.name} on {deployment.gpu.name}: {_batch(batch)}",
        MEANINGS.format(model.hidden_size, model.vocab_size),
        "",
    ]
    for kind, layer in model.kinds.items():
        sizes = [
            pair for part in (*layer.parts, *layer.shared) for pair in part.letters().items()
        ]
        letters = dict.fromkeys(f"{name} = {size:,}" for name, size in sizes if size)
        lines.append(f"{kind} layers ({model.counts[kind]}): " + ", ".join(letters))
    if deployment.parallelism.gpus > 1:
        lines.append("n, k and heads are this GPU's share of the letters")
    lines.append("")
    tokens = _tokens(batch, deployment.parallelism.dp)
    records = pass_records(placed, deployment.gpu, deployment.calibration, deployment.routing)
    remaining = iter(placed)
    for record in records:
        if record["operator"] == MODULE_OVERHEAD:
            lines += [
                MODULE_OVERHEAD,
                "    measured module − its operators",
                _of_the_pass(record),
                "",
            ]
        elif record["operator"] not in (ENGINE_OVERHEAD, "total"):
            lines += [
                *_operation(model, next(remaining), element, tokens),
                _of_the_pass(record),
                "",
            ]
    if deployment.calibration:
        lines += _engine([p.operator for p in placed], deployment.calibration, records)
    bound, time = records[-1]["roofline_s"], records[-1]["time_s"]
    predicted = "" if time is None else f"predicted {kernel_seconds(time)}, "
    return (
        "\n".join(
            [
                *lines,
                f"total of all rows: {predicted}datasheet bound {kernel_seconds(bound)}",
            ]
        )
        + "\n"
    )


def _of_the_pass(record: JsonObject) -> str:
    """Return the times of all the runs of an operator, and its share of the pass."""
    times = f"datasheet bound {kernel_seconds(record['roofline_s'])}"
    if record["time_s"] is not None:
        predicted = Column("time_s", "", kernel_seconds, rests="time")
        times = f"predicted {written(predicted, record)}, {times}"
    runs = "1 run" if record["count"] == 1 else f"all {record['count']:,} runs"
    return f"    {runs}: {times}; {record['share']:.1%} of the pass"


def _engine(
    operators: list[Operator], calibration: Calibration, records: list[JsonObject]
) -> list[str]:
    """Return the lines of what the engine adds: to each layer, pass and sequence, and to kernels
    that run with prompts."""
    *before, record, _ = records
    kernels = sum(one["time_s"] for one in before)
    fixed, of_sequences, of_prompts = engine_parts(operators, calibration, kernels)
    layers, ranks = layers_and_ranks(operators)
    terms = calibration.terms(mixes(operators))
    each = (
        f"{terms.glue_us:g} µs"
        if ranks == 1
        else f"({terms.glue_us:g} + {terms.skew_us:g}·log2({ranks} ranks)) µs"
    )
    lines = [f"{layers} layers · {each} + {terms.step_us:g} µs a pass = {seconds(fixed)}"]
    if of_sequences:
        count = of_sequences * 1e6 / terms.sequence_us
        lines.append(
            f"{count:,.0f} sequences · {terms.sequence_us:g} µs = {seconds(of_sequences)}"
        )
    if of_prompts:
        slowed = f"{terms.prompts:g} · {seconds(kernels)}"
        slowed = (
            f"max({slowed}, {layers} layers · {terms.launch_us:g} µs)"
            if terms.launch_us
            else slowed
        )
        lines.append(
            f"kernels with prompts: {slowed} − {seconds(kernels)} = {seconds(of_prompts)}"
        )
    whole = f"{seconds(record['time_s'])} predicted; {record['share']:.1%} of the pass"
    return [ENGINE_OVERHEAD, *(f"    {line}" for line in [*lines, whole]), ""]


def _batch(batch: Batch) -> str:
    return " + ".join(
        f"{g.count:,} × {g.new:,} new tokens"
        + (f" behind {g.past:,} cached" if isinstance(g.past, int) and g.past else "")
        for g in batch.groups
    )


class _Tokens(NamedTuple):
    """The new tokens of a batch on one rank, in letters: B of a decode, B·S of a prefill, T where
    groups are mixed."""

    letters: str
    count: Any


def _tokens(batch: Batch, dp: int) -> _Tokens:
    (first, *more) = batch.groups
    letters = (
        "T" if more or not isinstance(first.new, int) else "B" if first.new == 1 else "B·S"
    )
    return _Tokens(letters, sum(-(-g.count // dp) * g.new for g in batch.groups))


def _operation(model: Model, one: Placed, element: int, tokens: _Tokens) -> list[str]:
    operator, cost = one.operator, one.operator.cost
    where = f" ({operator.layer})" if operator.layer else ""
    head = f"{operator.name}{where} × {operator.count}"
    if isinstance(operator.shape, GemmShape):
        body = _product(model, operator, operator.shape, element, tokens)
    elif isinstance(operator.shape, AttentionShape):
        body = _attention(operator, operator.shape, element, tokens.letters)
    elif isinstance(operator.shape, ExpertsShape):
        body = _experts(operator, operator.shape)
    else:
        body = _other(operator)
    moved = cost.bytes
    rate = (
        f"{cost.flops / moved:.4g} FLOP/B"
        if moved
        else f"{cost.network_bytes:,.0f} B over the link"
    )
    each = one.seconds / operator.count
    return [
        head,
        *(f"    {line}" for line in body),
        f"    {rate}: {one.bound}-bound, datasheet bound {kernel_seconds(each)} a run",
    ]


def _product(
    model: Model, operator: Operator, shape: GemmShape, element: int, tokens: _Tokens
) -> list[str]:
    rows, inner, columns = _letters(
        model, operator, tokens.letters if shape.m == tokens.count else "rows"
    )
    cost, wide = operator.cost, f"({columns})" if "+" in columns else columns
    m, n = whole(shape.m), whole(shape.n)
    lines = [
        f"x[m, k] · W[k, n], m = {rows} = {m}, k = {inner} = {shape.k:,}, n = {columns} = {n}"
    ]
    deep = f"({inner})" if "+" in inner else inner
    lines.append(
        f"FLOPs = 2·m·k·n = 2·{rows}·{deep}·{wide} = 2·{m}·{shape.k:,}·{n} = {cost.flops:,}"
    )
    stored = f"{shape.stored:g} B a weight, scales included"
    moved = {"m·(k + n)": shape.m * (shape.k + shape.n), "m·n": shape.m * shape.n}
    formula = next(
        (
            f"{element} bytes·{f} = "
            for f, count in moved.items()
            if element * count == cost.activation_bytes
        ),
        "",
    )
    parts = [
        f"weights {cost.weight_bytes:,} ({stored})",
        f"activations {formula}{cost.activation_bytes:,}",
    ]
    parts += [f"cache {cost.cache_bytes:,}"] if cost.cache_bytes else []
    return [*lines, f"bytes = {' + '.join(parts)} = {cost.bytes:,}"]


def _experts(operator: Operator, shape: ExpertsShape) -> list[str]:
    """Both products and the activation of the routed experts, over the rows that this GPU's experts
    get."""
    cost, each = operator.cost, "3" if shape.gated else "2"
    rows, shared = (
        -(-shape.tokens * shape.top // shape.ranks),
        f" ÷ {shape.ranks}" if shape.ranks > 1 else "",
    )
    return [
        f"rows R = T·k{shared} = {rows:,}; D = {shape.hidden:,}, Fe = {shape.width:,} on this GPU",
        f"experts read = E·(1 − (1 − k/E)^T){shared} = {whole(operator.experts)} in expectation",
        f"FLOPs = 2·R·{each}·D·Fe = 2·{rows:,}·{each}·{shape.hidden:,}·{shape.width:,} = "
        f"{cost.flops:,}",
        f"bytes = weights {cost.weight_bytes:,} ({shape.format}) + activations "
        f"{cost.activation_bytes:,} = {cost.bytes:,}",
    ]


def _letters(model: Model, operator: Operator, tokens: str) -> tuple[str, str, str]:
    """(m, k, n) of a product in letters; plain words where its part has none, and where its rows
    are not the new tokens."""
    if operator.name == "lm_head":
        return "B", "D", "V"
    rows = f"{tokens}·k ÷ experts" if operator.experts else tokens
    for part in _parts(model, operator.layer):
        dims = part.dims()
        # a part of a matrix, for each head
        if operator.name in dims and operator.name not in operator.weights:
            return rows, dims[operator.name][0], f"H·{dims[operator.name][1]}"
        if operator.weights and all(name in dims for name in operator.weights):
            columns = " + ".join(dims[name][1] for name in operator.weights)
            return rows, dims[operator.weights[0]][0], columns
    return rows, "inputs", "outputs"


def _parts(model: Model, kind: str) -> tuple[Sublayer, ...]:
    layer = model.kinds.get(kind)
    return (*layer.parts, *layer.shared) if layer else ()


def _attention(
    operator: Operator, shape: AttentionShape, element: int, tokens: str
) -> list[str]:
    cost, pairs = operator.cost, sum(p for *_, p in shape.groups)
    queries = sum(count * new for count, new, *_ in shape.groups)
    seen = pairs / queries if queries else 0
    shared = (
        "latents shared by all heads" if not shape.kv_heads else f"{shape.kv_heads:,} KV heads"
    )
    widths = shape.key + shape.value
    return [
        f"{shape.heads:,} heads × {queries:,} queries × {seen:,.6g} keys (mean) × {shape.key:,} "
        f"+ {shape.value:,} wide; {shared}",
        f"pairs a query may see: {pairs:,}",
        f"FLOPs = 2·H·(dk + dv)·pairs = 2·{shape.heads:,}·{widths:,}·{pairs:,} = {cost.flops:,}",
        f"softmax = 5·H·pairs = {cost.vector_flops:,} vector FLOPs, on the chip",
        f"bytes = cache read {cost.cache_read_bytes:,} + written {cost.cache_write_bytes:,} + "
        f"activations {element} bytes·{tokens}·H·(dk + dv) {cost.activation_bytes:,} = "
        f"{cost.bytes:,}",
    ]


def _other(operator: Operator) -> list[str]:
    cost = operator.cost
    parts = [
        ("weights", cost.weight_bytes),
        ("cache", cost.cache_bytes),
        ("activations", cost.activation_bytes),
    ]
    moved = " + ".join(f"{name} {size:,}" for name, size in parts if size) or "0"
    flops = f"FLOPs = {cost.flops:,}; " if cost.flops else ""
    return [f"{flops}{cost.vector_flops:,} vector FLOPs; bytes = {moved} = {cost.bytes:,}"]


def explain_plan(answer: BestConfigs, space: SearchSpace) -> str:
    """The point that an answer names first, or what comes nearest: its figures from those of `fit`
    and of passes."""
    point = answer.named[0] if answer.named else None
    lines = [sentence(answer, space), ""]
    if point is None:
        return "\n".join(lines)
    price = answer.prices.get(point.gpu, 0.0)
    record = candidate_record(point, price)
    lines += [
        f"{where(point)}, {record['dtype']} weights, a cache in {record['kv_cache_dtype']}:"
    ]
    results = [
        *_load(point, record),
        *_fits(point, record, space),
        *_times(point, record),
        *_rates(point, record, price),
    ]
    lines += [f"  {line}" for line in results]
    failing = reason(point)
    return "\n".join([*lines, *([f"  fails: {failing}"] if failing else []), ""])


def _load(point: Candidate, r: Record) -> list[str]:
    """Replicas, GPUs and sequences of a replica."""
    need, replicas = point.need, plural(r["replicas"], "replica")
    apart = (
        f" + {r['gpus']} · {r['prefill_replicas']} for prompts" if r["prefill_replicas"] else ""
    )
    gpus = f"GPUs = {r['gpus']} of a replica · {replicas}{apart} = {r['total_gpus']}"
    if need.users:
        return [
            gpus,
            f"at once = ⌈{need.users:,} users / {replicas}⌉ = {r['max_num_seqs']:,}",
        ]
    requested = max(need.rate * need.output_len, need.min_throughput)
    rate = f"{r['tokens_per_s']:,.6g}" if r["tokens_per_s"] else "unknown"
    carried = f"replicas = ⌈{requested:,g} tokens/s asked / {rate} of one⌉ = {r['replicas']}"
    return [f"at once = {r['max_num_seqs']:,}, one of those tried", carried, gpus]


def _timed(point: Candidate, value: float) -> str:
    """A time with its mark: a bound, or scaled from another GPU."""
    mark = {"bound": "≥ ", "scaled": "~ "}.get(point.deployment.time_basis, "")
    return mark + seconds(value)


def _fits(point: Candidate, r: Record, space: SearchSpace) -> list[str]:
    line = (
        f"fit = {r['capacity_sequences']:,} sequences of {r['context']:,} tokens, at the low "
        "end of the engine's range"
    )
    written = command(point, space)
    if written is None:
        return [line]
    beside = shlex.join(["--gpu", point.gpu, *written.beside])
    return [line, f"  kvcalc fit {beside} --explain -- {written.line}"]


def _times(point: Candidate, r: Record) -> list[str]:
    need, deployment, count = point.need, point.deployment, r["max_num_seqs"]
    if r["ttft_s"] is None and r["tpot_s"] is None:
        return []
    prompt, cached = need.lengths.prompt, need.lengths.cached
    behind = f" behind {cached:,} cached ones" if cached else ""
    results = []
    if r["ttft_s"] is not None:
        results = [
            f"TTFT = the pass of one prompt of {prompt - cached:,} tokens{behind} = "
            f"{_timed(point, r['ttft_s'])}"
        ]
        results += [_pass(deployment, "prefill", 1, prompt)] if not cached else []
    if r["tpot_s"] is None:
        return results
    value = _timed(point, r["tpot_s"])
    if r["draft"]:
        return [
            *results,
            f"TPOT = a speculative step of {count:,} sequences / tokens it yields = {value} "
            "(`latency --draft`)",
        ]
    if not need.output_len:
        results.append(
            f"TPOT = a step of {count:,} sequences at {r['context']:,} tokens = {value}"
        )
        return [*results, _pass(deployment, "decode", count, r["context"])]
    results.append(
        f"TPOT = mean of the {need.output_len - 1:,} steps of {count:,} sequences to "
        f"{r['context'] - 1:,} tokens = {value}"
    )
    results.append(
        f"{_pass(deployment, 'decode', count, r['context'] - 1)}  (the last of them)"
    )
    if r["e2e_s"] is not None:
        apart = (
            "one prompt, its cache over the link"
            if r["prefill_replicas"]
            else f"{count:,} prompts at once"
        )
        results.append(
            f"end to end = {apart}, then {need.output_len - 1:,} · {value} = "
            f"{_timed(point, r['e2e_s'])}"
        )
    return results


def _pass(deployment: TimedDeployment, phase: str, count: int, context: int) -> str:
    """The command that walks through a pass; of pipeline stages the slowest."""
    ranks, precision = deployment.parallelism, deployment.precision
    sizes = {
        "--tp": ranks.tp,
        "--pp": ranks.pp,
        "--dp": ranks.dp,
        "--ep": ranks.ep,
        "--nodes": deployment.nodes,
    }
    formats = {
        "--dtype": precision.dtype,
        "-q": precision.quantization,
        "--kv-cache-dtype": precision.kv_cache_dtype,
    }
    words = [
        "--gpu",
        deployment.gpu.name,
        "--phase",
        phase,
        "--batch-size",
        str(count),
        "--context",
        str(context),
    ]
    words += [
        word
        for name, size in sizes.items()
        if size > (name != "--nodes")
        for word in (name, str(size))
    ]
    words += [
        word
        for name, value in formats.items()
        if value not in ("", "auto")
        for word in (name, value)
    ]
    words += ["--engine", deployment.engine] if deployment.engine != "vllm" else []
    if not deployment.calibration:
        words += ["--bounds"] if deployment.engine != "none" else []
    elif deployment.calibration.stack != deployment.engine:
        words += ["--calibration", deployment.calibration.stack]
    stages = f"  (the slowest of {ranks.pp} stages)" if ranks.pp > 1 else ""
    return f"  kvcalc roofline {deployment.model.name} {shlex.join(words)} --explain{stages}"


def _rates(point: Candidate, r: Record, price: float) -> list[str]:
    need, rate, total = point.need, r["tokens_per_s"], r["total_tokens_per_s"]
    if rate is None:
        return []
    count, e2e = r["max_num_seqs"], r["e2e_s"]
    if r["prefill_replicas"]:
        steps = f"{need.output_len - 1:,} · {seconds(r['tpot_s'])}"
        each = f"{count:,} · {need.output_len:,} tokens / ({steps})"
    elif e2e is None:
        each = f"{count:,} / {seconds(r['tpot_s'])}"
    else:
        each = f"{count:,} · {need.output_len:,} tokens / {seconds(e2e)}"
    rates = [f"tokens/s of a replica = {each} = {rate:,.6g}"]
    rates.append(
        f"tokens/s/GPU = {rate:,.6g} · {plural(r['replicas'], 'replica')} / {r['total_gpus']} "
        f"GPUs = {r['tokens_per_s_per_gpu']:,.6g}"
    )
    if total is None:
        return rates
    rates.append(f"tokens/s at the asked load = {total:,.6g}")
    if price:
        rates.append(
            f"an hour = {price:g} · {r['total_gpus']} GPUs = {r['cost_per_hour']:,.2f}"
        )
        worked = f"{r['cost_per_hour']:,.2f} / 3600 s / {total:,.6g} tokens/s · 10^6"
        rates.append(f"per 1M tokens = {worked} = {r['cost_per_million_tokens']:,.4g}")
    if r["energy_per_token_j"] is not None:
        power = point.deployment.gpu.power_w
        rates.append(
            f"J/token = {power:g} W · {r['total_gpus']} GPUs / {total:,.6g} tokens/s = "
            f"{r['energy_per_token_j']:.4g}"
        )
    return rates
