"""`roofline --explain`: every operation with its shape, its FLOPs and bytes as formulas with the numbers put in."""

from typing import Any, NamedTuple

from kvcalc.gpu.roof import Placed
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import AttentionShape, ExpertsShape, GemmShape, Operator
from kvcalc.layers.part import Part
from kvcalc.model.spec import Model
from kvcalc.report.layout import Column, written
from kvcalc.report.tables import kernel_seconds, seconds
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import ENGINE_OVERHEAD, MODULE_OVERHEAD, pass_records
from kvcalc.timing.steps import engine_parts, layers_and_ranks, mixes

MEANINGS = "B sequences, S tokens of each, T = Σ new tokens; D hidden_size = {:,}, V vocab_size = {:,}"


def explain_roofline(deployment: Deployment, batch: Batch, placed: list[Placed]) -> str:
    """The operations of a pass on one GPU, two or three lines each; figures are of one run, `count` runs in a pass."""
    model, element = deployment.model, deployment.formats.element_bytes
    lines = [f"{model.name} on {deployment.gpu.name}: {_batch(batch)}", MEANINGS.format(model.hidden_size, model.vocab_size), ""]
    for kind, layer in model.kinds.items():
        sizes = [pair for part in (*layer.parts, *layer.shared) for pair in part.letters().items()]
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
            lines += [MODULE_OVERHEAD, "    measured module − its operators", _of_the_pass(record), ""]
        elif record["operator"] not in (ENGINE_OVERHEAD, "total"):
            lines += [*_operation(model, next(remaining), element, tokens), _of_the_pass(record), ""]
    if deployment.calibration:
        lines += _engine([p.operator for p in placed], deployment.calibration, records)
    bound, time = records[-1]["roofline_s"], records[-1]["time_s"]
    predicted = "" if time is None else f"predicted {kernel_seconds(time)}, "
    return "\n".join([*lines, f"total of all rows: {predicted}datasheet bound {kernel_seconds(bound)}"]) + "\n"


def _of_the_pass(record: dict[str, Any]) -> str:
    """Return the times of all the runs of an operator, and its share of the pass."""
    times = f"datasheet bound {kernel_seconds(record['roofline_s'])}"
    if record["time_s"] is not None:
        predicted = Column("time_s", "", kernel_seconds, rests="time")
        times = f"predicted {written(predicted, record)}, {times}"
    runs = "1 run" if record["count"] == 1 else f"all {record['count']:,} runs"
    return f"    {runs}: {times}; {record['share']:.1%} of the pass"


def _engine(operators: list[Operator], calibration: Calibration, records: list[dict[str, Any]]) -> list[str]:
    """Return the lines of what the engine adds: to each layer, pass and sequence, and to kernels that run with prompts."""
    *before, record, _ = records
    kernels = sum(one["time_s"] for one in before)
    fixed, of_sequences, of_prompts = engine_parts(operators, calibration, kernels)
    layers, ranks = layers_and_ranks(operators)
    terms = calibration.terms(mixes(operators))
    each = f"{terms.glue_us:g} µs" if ranks == 1 else f"({terms.glue_us:g} + {terms.skew_us:g}·log2({ranks} ranks)) µs"
    lines = [f"{layers} layers · {each} + {terms.step_us:g} µs a pass = {seconds(fixed)}"]
    if of_sequences:
        count = of_sequences * 1e6 / terms.sequence_us
        lines.append(f"{count:,.0f} sequences · {terms.sequence_us:g} µs = {seconds(of_sequences)}")
    if of_prompts:
        slowed = f"{terms.prompts:g} · {seconds(kernels)}"
        slowed = f"max({slowed}, {layers} layers · {terms.launch_us:g} µs)" if terms.launch_us else slowed
        lines.append(f"kernels with prompts: {slowed} − {seconds(kernels)} = {seconds(of_prompts)}")
    whole = f"{seconds(record['time_s'])} predicted; {record['share']:.1%} of the pass"
    return [ENGINE_OVERHEAD, *(f"    {line}" for line in [*lines, whole]), ""]


def _batch(batch: Batch) -> str:
    return " + ".join(
        f"{g.count:,} × {g.new:,} new tokens" + (f" behind {g.past:,} cached" if isinstance(g.past, int) and g.past else "")
        for g in batch.groups
    )


class _Tokens(NamedTuple):
    """The new tokens of a batch on one rank, in letters: B of a decode, B·S of a prefill, T where groups are mixed."""

    letters: str
    count: Any


def _tokens(batch: Batch, dp: int) -> _Tokens:
    (first, *more) = batch.groups
    letters = "T" if more or not isinstance(first.new, int) else "B" if first.new == 1 else "B·S"
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
    rate = f"{cost.flops / moved:.4g} FLOP/B" if moved else f"{cost.network_bytes:,.0f} B over the link"
    each = one.seconds / operator.count
    return [
        head,
        *(f"    {line}" for line in body),
        f"    {rate}: {one.bound}-bound, datasheet bound {kernel_seconds(each)} a run",
    ]


def _product(model: Model, operator: Operator, shape: GemmShape, element: int, tokens: _Tokens) -> list[str]:
    rows, inner, columns = _letters(model, operator, tokens.letters if shape.m == tokens.count else "rows")
    cost, wide = operator.cost, f"({columns})" if "+" in columns else columns
    m, n = _whole(shape.m), _whole(shape.n)
    lines = [f"x[m, k] · W[k, n], m = {rows} = {m}, k = {inner} = {shape.k:,}, n = {columns} = {n}"]
    deep = f"({inner})" if "+" in inner else inner
    lines.append(f"FLOPs = 2·m·k·n = 2·{rows}·{deep}·{wide} = 2·{m}·{shape.k:,}·{n} = {cost.flops:,}")
    stored = f"{shape.stored:g} B a weight, scales included"
    moved = {"m·(k + n)": shape.m * (shape.k + shape.n), "m·n": shape.m * shape.n}
    formula = next((f"{element} bytes·{f} = " for f, count in moved.items() if element * count == cost.activation_bytes), "")
    parts = [f"weights {cost.weight_bytes:,} ({stored})", f"activations {formula}{cost.activation_bytes:,}"]
    parts += [f"cache {cost.cache_bytes:,}"] if cost.cache_bytes else []
    return [*lines, f"bytes = {' + '.join(parts)} = {cost.bytes:,}"]


def _experts(operator: Operator, shape: ExpertsShape) -> list[str]:
    """Both products and the activation of the routed experts, over the rows that this GPU's experts get."""
    cost, each = operator.cost, "3" if shape.gated else "2"
    rows, shared = -(-shape.tokens * shape.top // shape.ranks), f" ÷ {shape.ranks}" if shape.ranks > 1 else ""
    return [
        f"rows R = T·k{shared} = {rows:,}; D = {shape.hidden:,}, Fe = {shape.width:,} on this GPU",
        f"experts read = E·(1 − (1 − k/E)^T){shared} = {_whole(operator.experts)} in expectation",
        f"FLOPs = 2·R·{each}·D·Fe = 2·{rows:,}·{each}·{shape.hidden:,}·{shape.width:,} = {cost.flops:,}",
        f"bytes = weights {cost.weight_bytes:,} ({shape.format}) + activations {cost.activation_bytes:,} = {cost.bytes:,}",
    ]


def _letters(model: Model, operator: Operator, tokens: str) -> tuple[str, str, str]:
    """(m, k, n) of a product in letters; plain words where its part has none, and where its rows are not the new tokens."""
    if operator.name == "lm_head":
        return "B", "D", "V"
    rows = f"{tokens}·k ÷ experts" if operator.experts else tokens
    for part in _parts(model, operator.layer):
        dims = part.dims()
        if operator.name in dims and operator.name not in operator.weights:  # a part of a matrix, for each head
            return rows, dims[operator.name][0], f"H·{dims[operator.name][1]}"
        if operator.weights and all(name in dims for name in operator.weights):
            columns = " + ".join(dims[name][1] for name in operator.weights)
            return rows, dims[operator.weights[0]][0], columns
    return rows, "inputs", "outputs"


def _parts(model: Model, kind: str) -> tuple[Part, ...]:
    layer = model.kinds.get(kind)
    return (*layer.parts, *layer.shared) if layer else ()


def _attention(operator: Operator, shape: AttentionShape, element: int, tokens: str) -> list[str]:
    cost, pairs = operator.cost, sum(p for *_, p in shape.groups)
    queries = sum(count * new for count, new, *_ in shape.groups)
    seen = pairs / queries if queries else 0
    shared = "latents shared by all heads" if not shape.kv_heads else f"{shape.kv_heads:,} KV heads"
    widths = shape.key + shape.value
    return [
        f"{shape.heads:,} heads × {queries:,} queries × {seen:,.6g} keys (mean) × {shape.key:,} + {shape.value:,} wide; {shared}",
        f"pairs a query may see: {pairs:,}",
        f"FLOPs = 2·H·(dk + dv)·pairs = 2·{shape.heads:,}·{widths:,}·{pairs:,} = {cost.flops:,}",
        f"softmax = 5·H·pairs = {cost.vector_flops:,} vector FLOPs, on the chip",
        f"bytes = cache read {cost.cache_read_bytes:,} + written {cost.cache_write_bytes:,} + "
        f"activations {element} bytes·{tokens}·H·(dk + dv) {cost.activation_bytes:,} = {cost.bytes:,}",
    ]


def _other(operator: Operator) -> list[str]:
    cost = operator.cost
    parts = [("weights", cost.weight_bytes), ("cache", cost.cache_bytes), ("activations", cost.activation_bytes)]
    moved = " + ".join(f"{name} {size:,}" for name, size in parts if size) or "0"
    flops = f"FLOPs = {cost.flops:,}; " if cost.flops else ""
    return [f"{flops}{cost.vector_flops:,} vector FLOPs; bytes = {moved} = {cost.bytes:,}"]


def _whole(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
