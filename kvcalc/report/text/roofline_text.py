"""Printed answers of `roofline` for one pass, and of a GPU's memory hierarchy."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import log
from typing import Annotated, TypedDict

from kvcalc.gpu.gpu import BoundedOperator, Gpu, Host, compute_bound_batch_size
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Role
from kvcalc.planning.comparison import SHAPE
from kvcalc.records import JsonObject, Record, Records
from kvcalc.records.figures import Formula
from kvcalc.records.roofline import AttentionRecord, OperatorRecord, RooflineRecord
from kvcalc.report.row_names import DEPLOYMENT, WORDING, equal_records, sides
from kvcalc.report.text.table_layout import Column, Table
from kvcalc.report.text.tables import (
    answer_sentence,
    columns,
    comparable_records,
    digits,
    distinct_values,
    footnotes,
    kernel_seconds,
    marked_columns,
    memory_sentences,
    misfit_words,
    pass_details,
    pass_notes,
    predictions_first,
    whole,
)
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_si


class OperatorRow(OperatorRecord):
    """A row of the table that `roofline` prints: a record of an operator with its shape.

    Attributes:
        shape: Sizes as text: m × k × n of a GEMM, or heads × queries × keys × width of attention.
            None for other operators.
    """

    shape: Annotated[str | None, "m × k × n, or heads × queries × keys × width", "shape"]


ROOFLINE_COLUMNS = columns(
    OperatorRow,
    "operator layer time_s share roofline_s bound intensity flops bytes count overhead | "
    "shape vector_flops weight_bytes cache_bytes activation_bytes",
)
SUMMARY_COLUMNS = columns(
    RooflineRecord,
    "model gpu gpus tensor_parallel_size dtype kv_cache_dtype engine batch_size context time_s "
    "roofline_s bound intensity flops bytes",
    inputs="model gpu gpus tensor_parallel_size dtype kv_cache_dtype engine batch_size context",
)
PASS_WORDING = {**WORDING, "context": "context {:,}"}
PASS_KEYS = (*DEPLOYMENT, "batch_size", "context")
BYTES = {
    "weights": "weight_bytes",
    "KV cache": "cache_bytes",
    "activations": "activation_bytes",
}
PHASES = {"decode": "decode step", "prefill": "prefill", "mixed": "mixed pass"}
SIZES = {"decode": "batch {:,}", "prefill": "{:,} tokens"}


def pass_tables(passes: Sequence[tuple[TimedDeployment, Batch, Records]]) -> Iterator[Table]:
    """Yield a table of operators for each forward pass: its operators, their parts, and the total.

    Of several passes, the first table compares the totals.

    A part is one operation of a fused operator, as if it ran in a kernel of its own. The record of
    a fused operator contains its parts. A footnote names the smallest compute-bound sizes.

    Args:
        passes: (deployment, batch, records) of each pass. The records are one per operator, then
            their total.
    """
    totals = [records[-1] for *_, records in passes]
    sizes_of = [_compute_bound_sizes(d, r[-1]["phase"], r[-1]["context"]) for d, _, r in passes]
    if len(totals) > 1:
        further = _operator_clauses(
            {sizes.get("FFN") for sizes in sizes_of}, chain.from_iterable(r for *_, r in passes)
        )
        title = _summary_sentence(totals, further)
        notes = ["", "-v prints the operators of each pass."]
        yield Table(totals, marked_columns(totals, SUMMARY_COLUMNS), title, notes)
    names = sides(totals, DEPLOYMENT[2:7]).names
    for name, sizes, (deployment, _, records) in zip(names, sizes_of, passes):
        total = {**records[-1], "basis": records[-1].get("basis") or deployment.basis}
        rows = []
        for record in records:
            operator = record["operator"].replace("_overhead", " overhead")
            rows.append({**record, "operator": operator, "shape": shape(record)})
            for part in record.get("parts", []):
                row = {"operator": f"  {part['operator']}", "layer": "in it", "count": None}
                rows.append({**part, **row, "flops": part["flops"] or part["vector_flops"]})
        words = [
            f"{role} {f'from {size} on' if size else 'never'}" for role, size in sizes.items()
        ]
        compute = f"Compute-bound: {', '.join(words)}." if words else ""
        shares = [f"{label} {total[key] / total['bytes']:.1%}" for label, key in BYTES.items()]
        moved = f"Bytes: {', '.join(shares)}."
        yield Table(
            rows,
            _ordered_columns(records),
            _pass_sentence(
                deployment, total, name, _operator_clauses({sizes.get("FFN")}, records)
            ),
            footnotes(*pass_notes([total], *memory_sentences([total])), moved, compute),
            details=[_assumptions(deployment), *pass_details([total])],
            is_detail=len(totals) > 1,
        )


def _pass_sentence(
    deployment: TimedDeployment, total: Record, name: str, further: Sequence[str]
) -> str:
    """Return a sentence on the time of the pass, its limit and its arithmetic intensity.

    If the KV cache has a tenth of the bytes of a memory-bound pass or more, the minimum time of its
    traffic follows.

    Args:
        deployment: The deployment.
        total: Record of the whole pass.
        name: Values that distinguish the deployment from those of other passes.
        further: Clauses on FFNs and on attention.
    """
    stages, gpus = deployment.parallelism.pp, total["gpus"]
    count = f"{total['batch_size']:,} × " * (total["batch_size"] > 1)
    subject = f"The slowest of {stages} stages in a " if stages > 1 else "A "
    subject += (
        f"{PHASES[total['phase']]} of {total['model']} with {count}{total['context']:,} "
        f"token{'s' * (total['context'] > 1)} on "
        f"{f'{gpus}× ' * (gpus > 1)}{total['gpu']}{f' with {name}' * bool(name)}"
        f"{misfit_words(total)} takes"
    )
    at_least = "≥ " * (not total["time_s"])
    time = total["time_s"] or total["roofline_s"]
    seconds = total["cache_bytes"] / deployment.gpu.bandwidth_bytes_per_s
    cache = f", KV cache ≥ {kernel_seconds(seconds)}"
    cache *= total["bound"] == "memory" and total["cache_bytes"] >= total["bytes"] / 10
    limit = f", {total['bound']}-bound at {_intensities([total])}"
    ffn, attention = further
    best = f", roofline {kernel_seconds(total['roofline_s'])}" * (not at_least)
    return answer_sentence(
        f"{subject} {at_least}{kernel_seconds(time)}", limit, attention, ffn, cache, best
    )


def _operator_clauses(ffn_sizes: set[str | None], records: Iterable[Record]) -> list[str]:
    """Return clauses on the compute-bound size of FFNs and on the intensity of attention.

    Args:
        ffn_sizes: Smallest batches or prompts with a compute-bound FFN. Only a common one is named.
        records: Records of operators. Only a common intensity of attention is named.
    """
    size, *others = ffn_sizes
    ffn = f", FFNs compute-bound from {size}" * bool(size and not others)
    attention = [r for r in records if r["operator"] == "attention"]
    intensities = {digits(record["intensity"]) for record in attention}
    if len(intensities) != 1:
        return [ffn, ""]
    bound = attention[0]["bound"]
    limit = f"{f'{bound}-bound ' * (not ffn or bound == 'compute')}at {intensities.pop()}"
    return [ffn, f", attention {limit}"]


def _summary_sentence(totals: Records, further: Sequence[str]) -> str:
    """Return a sentence on the fastest and the slowest of several passes, and on their bounds.

    Args:
        totals: Records of the passes.
        further: Clauses on FFNs and on attention.
    """
    comparable = comparable_records(predictions_first(totals))
    names = sides(comparable, PASS_KEYS, PASS_WORDING).names
    times = [total["time_s"] or total["roofline_s"] for total in comparable]
    bounds = [total["bound"] for total in totals]
    limit = f", {bounds.count('memory')} of {len(bounds)} memory-bound"
    if len(set(bounds)) == 1:
        limit = f", {bounds[0]}-bound"
    if len(distinct_values(totals, "batch_size")) == 1:
        limit += f" at {_intensities(totals)}"
    at_least = "≥ " * (comparable[0]["time_s"] is None)
    spans = [
        f"{kernel_seconds(t)} with {names[times.index(t)].replace(', ', ' and ')}"
        for t in dict.fromkeys((min(times), max(times)))
    ]
    model, *other_models = distinct_values(totals, "model")
    subject = PHASES[totals[0]["phase"]] + f" of {model}" * (not other_models)
    ffn, attention = further
    if attention and "FLOP/B" not in limit:
        attention += " FLOP/B"
    return answer_sentence(
        f"A {subject} takes {at_least}{', '.join(spans).removesuffix(' with ')}",
        limit,
        ffn,
        attention,
    )


def _intensities(totals: Records) -> str:
    """Return the lowest and the highest arithmetic intensity, or the only one."""
    values = [total["intensity"] for total in totals]
    return f"{' to '.join(dict.fromkeys(map(digits, (min(values), max(values)))))} FLOP/B"


def _ordered_columns(records: Records) -> list[Column]:
    """Return the columns of the table. A share follows its time, and layer kinds are shown only if
    there are several."""
    has_layers = len({r["layer"] for r in records} - {""}) > 1
    by_key = {c.key: c for c in ROOFLINE_COLUMNS if c.key != "layer" or has_layers}
    share = by_key.pop("share")
    time_key = "roofline_s" if records[-1]["time_s"] is None else "time_s"
    ordered = list(by_key.values())
    ordered.insert(1 + list(by_key).index(time_key), share)
    return ordered


def shape(record: Record) -> str | None:
    """Return the sizes of an operator as text; None if it is neither a GEMM nor attention.

    A GEMM gives m × k × n. Attention gives heads × queries × keys × width of a head.

    Args:
        record: Record of the operator.
    """
    if not record.get("m"):
        return None
    keys = ("heads", "m", "n", "k") if record["heads"] else ("m", "k", "n")
    return " × ".join(whole(record[key]) for key in keys)


def _compute_bound_sizes(
    deployment: TimedDeployment, phase: str, context: int
) -> dict[str, str | None]:
    """Return the batch sizes, or tokens of a prompt, from which on FFN and attention are
    compute-bound.

    None means never. Layers that the model has not are missing. The result is empty without a
    matrix peak.
    """
    dtypes = deployment.formats.product_dtypes
    if phase not in SIZES or not all(map(deployment.gpu.computes, dtypes)):
        return {}

    def bounds_at(size: int) -> Sequence[BoundedOperator]:
        shape = (context, size) if phase == "decode" else (size, 1)
        return deployment.operator_bounds(Batch.of_phase(phase, *shape))

    sizes = {}
    for name, role in {"FFN": Role.FFN, "attention": Role.CORE}.items():
        if any(bounded.operator.role is role for bounded in bounds_at(1)):
            size = compute_bound_batch_size(bounds_at, role)
            sizes[name] = SIZES[phase].format(size) if size else None
    return sizes


def _assumptions(deployment: TimedDeployment) -> str:
    """Return a line with the formats and the ridge points of the GPU."""
    formats, gpu = deployment.formats, deployment.gpu
    ridges = [
        f"{gpu.ridge_point_for(dtype):.1f} FLOP/B in {dtype}"
        for dtype in formats.product_dtypes
        if gpu.computes(dtype)
    ]
    ridge = (
        f"ridge point {', '.join(ridges)}" if ridges else "no matrix peak, so no ridge point"
    )
    vector = "" if gpu.vector_peak else "; no vector peak, so vector work is not timed"
    weights = f"weights {formats.weights_label}{formats.computed}"
    return f"{weights}, cache {formats.kv_cache_dtype}; {gpu.name}: {ridge}{vector}"


# bytes that an fp32 FLOP reads from registers: three operands of 4 bytes per multiply-add, which
# is two FLOPs
OPERAND_BYTES = 6


class MemoryLevel(TypedDict):
    """A record of one memory of a GPU or of its server, such as L2 or disk. None means unknown.

    Attributes:
        level: Name, such as `registers`, `L2` or `disk`.
        each: Bytes of one unit: of the registers or the shared memory of one streaming
            multiprocessor (SM). None for other memories.
        units: Number of units: SMs of the GPU; for the memory of other GPUs, the number of linked
            GPUs.
        bytes: Bytes of all units.
        bytes_per_s: Bandwidth in one direction.
        seconds: Seconds to read all bytes once.
    """

    level: Annotated[str, "registers, a cache, memory or disk", "memory"]
    each: Annotated[int | None, "bytes of one SM", "per unit"]
    units: Annotated[int | None, "number of units", "units", "text"]
    bytes: Annotated[int | None, "bytes of all units", "total", Formula("{units} · {each}")]
    bytes_per_s: Annotated[float | None, "in one direction", "bandwidth"]
    seconds: Annotated[
        float | None,
        "time of all bytes; ≥ by a documented rate, ~ by a measured rate",
        "time to read",
        Formula("{bytes} / {bytes_per_s}"),
    ]


HIERARCHY_COLUMNS = columns(MemoryLevel, "level each units bytes bytes_per_s seconds")


def memory_levels(gpu: Gpu) -> Iterator[JsonObject]:
    """Yield a `MemoryLevel` record for each memory of a GPU and its server, from registers to disk.

    A record has the memory's size in bytes and its bandwidth. A value is None if the GPU preset has
    no figure for it.

    Args:
        gpu: The GPU.
    """
    peak = gpu.vector_peak
    registers = gpu.register_bytes_per_sm
    register_rate = OPERAND_BYTES * peak if peak and registers else None
    for name, sm_bytes, rate in (
        ("registers", registers, register_rate),
        ("shared memory, L1", gpu.shared_memory_bytes_per_sm, gpu.shared_memory_bytes_per_s),
    ):
        units = {"each": sm_bytes, "units": gpu.sms if sm_bytes else None}
        yield _level(name, sm_bytes * gpu.sms if sm_bytes and gpu.sms else None, rate) | units
    yield _level("L2", gpu.l2_bytes, gpu.l2_bytes_per_s, "scaled")
    yield _level(gpu.memory_type or "memory", gpu.memory_bytes, gpu.bandwidth_bytes_per_s)
    if gpu.link_bytes_per_s:
        yield _level("another GPU's", None, gpu.link_bytes_per_s) | {"units": gpu.link_domain}
    host = gpu.host or Host(name="", gpus=1)
    yield _level("the host's", host.memory_bytes, gpu.host_link_bytes_per_s)
    yield _level("disk", host.disk_bytes, host.disk_bytes_per_s, "scaled")


def _level(
    name: str, size: int | None, rate: float | None, time_basis: str = "bound"
) -> JsonObject:
    time = size / rate if size and rate else None
    level = {"level": name, "bytes": size, "bytes_per_s": rate, "seconds": time}
    return level | {"time_basis": time_basis}


def hierarchy_table(gpu: Gpu) -> Table:
    """Return the table of a GPU's memories, from registers to disk, with bytes and bandwidth.

    Args:
        gpu: The GPU.
    """
    peak = ""
    if gpu.knee:
        rate, dtype = gpu.peak("bf16")
        speed = f"{format_si(rate, 'FLOP/s')} in {dtype}"
        peak = f" and computes {speed}: its ridge point is {gpu.knee:.0f} FLOP/B"
        if gpu.peak("fp8")[1] == "fp8":
            peak += f", in fp8 {gpu.ridge_point_for('fp8'):.0f}"
    title = f"{gpu.name} reads {format_si(gpu.bandwidth_bytes_per_s, 'B/s')}{peak}."
    notes = [
        "",
        "bandwidth is of one direction; –: no figure with a source",
        "≥: by a documented rate; ~: by a measured rate, or its lower limit",
    ]
    if gpu.host:
        notes.append(f"host and disk: of an {gpu.host.name} with {gpu.host.gpus} GPUs")
    return Table(list(memory_levels(gpu)), HIERARCHY_COLUMNS, title, notes)


ATTENTION_COLUMNS = columns(
    AttentionRecord,
    "gpu attention context batch_size kv_cache_dtype intensity to_knee bound roofline_s bytes "
    "flops | knee mla_form",
    inputs="gpu context batch_size",
    optional="kv_cache_dtype",
)


def attention_table(records: Records) -> Table:
    """Return the table that `roofline` prints without a model: attention of model families.

    Each row is the attention of one layer, such as GQA or MLA, on a GPU.

    Args:
        records: Records of `roofline` without a model.
    """
    ridges = dict.fromkeys(
        f"{r['gpu']} {r['knee']:.1f} FLOP/B in {r['computed_in']}" for r in records
    )
    notes = footnotes(
        f"Each row is {SHAPE} without projections, "
        f"KV cache in {', '.join(distinct_values(records, 'kv_cache_dtype'))}.",
        "Above a gap of 1×, attention is memory-bound.",
    )
    details = [
        f"ridge point: {', '.join(ridges)}",
        "more sequences do not close the gap, because each reads its own cache",
    ]
    return Table(
        records, ATTENTION_COLUMNS, _attention_sentence(records), notes, details=details
    )


def _attention_sentence(records: Records) -> str:
    """Return a sentence on how many variants of decode attention are memory-bound on the first GPU,
    and on the one nearest the ridge point."""
    decode = equal_records(
        records, records[0], "gpu", "context", "batch_size", "phase", "kv_cache_dtype"
    )
    count = sum(record["bound"] == "memory" for record in decode)
    closest = min(decode, key=lambda r: abs(log(r["to_knee"])))
    return (
        f"{count} of {len(decode)} variants of {closest['kv_cache_dtype']} decode attention are "
        f"memory-bound on {closest['gpu']}, and {closest['attention']} with "
        f"{closest['intensity']:.0f} FLOP/B is nearest its ridge point, {closest['knee']:.0f}."
    )
