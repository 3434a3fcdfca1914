"""Printed answers of `roofline` for one pass, and of a GPU's memory hierarchy."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Annotated, TypeAlias, TypedDict

from kvcalc.gpu.gpu import Gpu, Host, compute_bound_batch_size
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.planning.comparison import SHAPE
from kvcalc.records import JsonObject, Record, Records
from kvcalc.records.figures import Figure
from kvcalc.records.roofline import AttentionRecord, OperatorRecord
from kvcalc.report.text.table_layout import Column, Table
from kvcalc.report.text.tables import (
    answer_sentence,
    columns,
    distinct_values,
    footnotes,
    kernel_seconds,
    memory_sentences,
    pass_details,
    pass_notes,
    seconds,
    whole,
)
from kvcalc.timing.deployment import TimedDeployment


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
BYTE_KEYS = {
    "weights": "weight_bytes",
    "cache": "cache_bytes",
    "activations": "activation_bytes",
}
# smallest compute-bound batch size of FFN and attention; None if no batch size is
ComputeBoundBatches: TypeAlias = dict[str, int | None]
PHASES = {"decode": "a decode step", "prefill": "a prefill"}


def pass_tables(passes: Sequence[tuple[TimedDeployment, Records]]) -> Iterator[Table]:
    """Yield a table of operators for each forward pass.

    Args:
        passes: (deployment, records) of each pass. The records are one per operator, then their
            total.
    """
    smallest_batches = {}
    for deployment, records in passes:
        context = records[-1]["context"]
        key = id(deployment), context
        if records[-1]["phase"] == "decode" and key not in smallest_batches:
            smallest_batches[key] = _compute_bound_batches(deployment, context)
        yield pass_table(deployment, records, smallest_batches.get(key, {}))


def pass_table(
    deployment: TimedDeployment, records: Records, smallest_batches: ComputeBoundBatches
) -> Table:
    """Return the table of one forward pass: its operators, their parts, and the total.

    A part is one operation of a fused operator, as if it ran in a kernel of its own. The record of
    a fused operator contains its parts. A footnote names the smallest compute-bound batch sizes.

    Args:
        deployment: Deployment of the pass.
        records: Records of the operators, then the total.
        smallest_batches: Batch size from which FFN or attention is compute-bound in a decode step,
            by name (`FFN`, `attention`); the batch size is None if there is none.
    """
    total = dict(records[-1]) | {"basis": records[-1].get("basis") or deployment.basis}
    rows = []
    for record in records:
        name = record["operator"]
        if name.endswith("_overhead"):
            name = name.replace("_", " ")
        rows.append({**record, "operator": name, "shape": shape(record)})
        for part in record.get("parts", []):
            row = {"operator": f"  {part['operator']}", "layer": "in it", "count": None}
            rows.append({**part, **row, "flops": part["flops"] or part["vector_flops"]})
    words = [
        f"{name} from batch {batch:,} on" if batch else f"{name} at no batch"
        for name, batch in smallest_batches.items()
    ]
    compute = f"Compute-bound: {', '.join(words)}." if words else ""
    tokens = total["equal_reads_context"]
    reads = f"Cache and weight reads are equal at {tokens:,} tokens." if tokens else ""
    shares = [f"{name} {total[key] / total['bytes']:.1%}" for name, key in BYTE_KEYS.items()]
    return Table(
        rows,
        _ordered_columns(records),
        _pass_sentence(deployment, total, smallest_batches.get("FFN")),
        footnotes(*pass_notes([total], *memory_sentences([total])), compute, reads),
        details=[
            f"bytes moved: {', '.join(shares)}",
            _assumptions(deployment),
            *pass_details([total]),
        ],
    )


def _pass_sentence(deployment: TimedDeployment, total: Record, ffn_batch: int | None) -> str:
    """Return a sentence on the time of the pass and its limit.

    Args:
        ffn_batch: Smallest batch size with a compute-bound FFN.
    """
    phase = PHASES.get(total["phase"], "a mixed pass")
    subject = f"{phase} of {deployment.model.name} on {deployment.gpu.name}"
    stages = deployment.parallelism.pp
    if stages > 1:
        subject = f"the slowest of {stages} stages in {subject}"
    subject += f" with batch {total['batch_size']:,} and context {total['context']:,}"
    time = f"at least {kernel_seconds(total['roofline_s'])}"
    if total["time_s"]:
        time = kernel_seconds(total["time_s"])
    limit = f", {total['bound']}-bound" if total["intensity"] else ""
    ffn = ""
    if ffn_batch and total["bound"] == "memory" and total["batch_size"] < ffn_batch:
        ffn = f"; its FFN becomes compute-bound at batch {ffn_batch:,}"
    return answer_sentence(f"{subject[0].upper()}{subject[1:]} takes {time}", limit, ffn)


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


def _compute_bound_batches(deployment: TimedDeployment, context: int) -> ComputeBoundBatches:
    """Return the batch sizes from which on FFN and attention are compute-bound; {} without a matrix
    peak."""
    if not all(map(deployment.gpu.computes, deployment.formats.product_dtypes)):
        return {}
    bounds_at = cache(lambda batch: deployment.operator_bounds(Batch.decode(context, batch)))
    roles = {"FFN": Role.FFN, "attention": Role.CORE}
    return {
        name: compute_bound_batch_size(bounds_at, partial(_has_role, role))
        for name, role in roles.items()
    }


def _has_role(role: Role, operator: Operator) -> bool:
    return operator.role is role


def _assumptions(deployment: TimedDeployment) -> str:
    """Return a line with the formats and the ridge points of the GPU."""
    formats, gpu = deployment.formats, deployment.gpu
    ridges = [
        f"{gpu.ridge_point_for(dtype):.1f} FLOP/B in {dtype}"
        for dtype in formats.product_dtypes
        if gpu.computes(dtype)
    ]
    ridge = "no matrix peak, so no ridge point"
    if ridges:
        ridge = f"ridge point {', '.join(ridges)}"
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
    each: Annotated[int | None, Figure("bytes of one SM", "per unit", unit="bytes")]
    units: Annotated[int | None, "number of units", "units", "text"]
    bytes: Annotated[
        int | None, Figure("bytes of all units", "total", formula="{units} · {each} B")
    ]
    bytes_per_s: Annotated[float | None, "in one direction", "bandwidth"]
    seconds: Annotated[
        float | None,
        Figure(
            "time of all bytes; ≥ by a documented rate, ~ by a measured rate",
            "time to read",
            unit="seconds",
            formula="{bytes} / {bytes_per_s}",
        ),
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
    shared = gpu.shared_memory_bytes_per_sm, gpu.shared_memory_bytes_per_s
    for name, sm_bytes, rate in (
        ("registers", registers, register_rate),
        ("shared memory, L1", *shared),
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
    time = seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)
    notes = [
        "",
        "bandwidth is of one direction; –: no figure with a source",
        "≥: by a documented rate; ~: by a measured rate, or its lower limit",
    ]
    if gpu.host:
        notes.append(f"host and disk: of an {gpu.host.name} with {gpu.host.gpus} GPUs")
    title = f"{gpu.name} reads its memory in at least {time}."
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
    caches = ", ".join(distinct_values(records, "kv_cache_dtype"))
    notes = footnotes(
        f"Each row is {SHAPE} without projections, KV cache in {caches}.",
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
    """Return a sentence on how many variants of decode attention are memory-bound on the first
    GPU."""
    first = records[0]
    load = ("gpu", "context", "batch_size", "phase")
    decode = [r for r in records if all(r[key] == first[key] for key in load)]
    count = sum(r["bound"] == "memory" for r in decode)
    which = "Every variant" if count == len(decode) else f"{count} of {len(decode)} variants"
    verb = "is" if count in (1, len(decode)) else "are"
    closest = max(decode, key=lambda r: float(r["intensity"]))
    return answer_sentence(
        f"{which} of decode attention {verb} memory-bound on {first['gpu']}",
        f", and {closest['attention']} is closest to the ridge point"
        f" with {closest['intensity']:.1f} FLOP/B",
    )
