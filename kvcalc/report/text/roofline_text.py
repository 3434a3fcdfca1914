"""Printed answers of `roofline` for one pass, and of a GPU's memory hierarchy."""

from collections.abc import Iterator, Sequence
from functools import cache, partial

from kvcalc.gpu.gpu import Gpu, Host
from kvcalc.gpu.roof import turning_batch
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.planning.comparison import SHAPE
from kvcalc.records import JsonObject
from kvcalc.report.export import Record
from kvcalc.report.text.fit_text import memory_notes, memory_sentences
from kvcalc.report.text.table_layout import Column, Table
from kvcalc.report.text.tables import (
    ROOFLINE_COLUMNS,
    answer_sentence,
    budget_warning,
    columns,
    distinct_notes,
    footnotes,
    kernel_seconds,
    node_notes,
    seconds,
    time_details,
    time_footnotes,
    whole,
)
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.operator_times import ENGINE_OVERHEAD, MODULE_OVERHEAD

OPERATOR_NAMES = {
    ENGINE_OVERHEAD: "engine overhead",
    MODULE_OVERHEAD: "module overhead",
}
KINDS_OF_BYTES = {
    "weights": "weight_bytes",
    "cache": "cache_bytes",
    "activations": "activation_bytes",
}
PHASES = {"decode": "a decode step", "prefill": "a prefill"}
NOT_OF_PARTS = ("count", *KINDS_OF_BYTES.values())


def pass_tables(
    passes: Sequence[tuple[TimedDeployment, Sequence[Record]]],
) -> Iterator[Table]:
    """Yield a table per pass. Turning batches are computed once per deployment and context."""
    turning: dict[tuple[int, int], str] = {}
    near: dict[int, dict[Role, int | None]] = {}
    for deployment, records in passes:
        key = id(deployment), records[-1]["context"]
        if records[-1]["phase"] == "decode" and key not in turning:
            start = near.setdefault(id(deployment), {})
            turning[key] = _turning(deployment, records[-1]["context"], start)
        yield pass_table(deployment, records, turning.get(key, ""))


def pass_table(
    deployment: TimedDeployment, records: Sequence[Record], turning: str | None = None
) -> Table:
    """Return the table of one pass: operators with their parts, and the total.

    Args:
        deployment: Deployment of the pass.
        records: Records of the operators, the total last.
        turning: Sentence on the batches from which on compute limits; None to compute it.
    """
    whole = dict(records[-1]) | {"basis": records[-1].get("basis") or deployment.basis}
    rows: list[Record] = []
    for record in records:
        name = OPERATOR_NAMES.get(record["operator"], record["operator"])
        rows.append({**record, "operator": name, "shape": shape(record)})
        rows += map(_part, record.get("parts", []))
    split = ", ".join(
        f"{name} {whole[key] / whole['bytes']:.1%}" for name, key in KINDS_OF_BYTES.items()
    )
    if turning is None:
        decode = whole["phase"] == "decode"
        turning = _turning(deployment, whole["context"], {}) if decode else ""
    short = memory_sentences([whole])
    answer, brief = _answers(deployment, whole)
    return Table(
        rows,
        _columns(records),
        short[0] if short else answer,
        footnotes(
            *distinct_notes([whole], "fallback"),
            budget_warning([whole]),
            brief if short else "",
            *time_footnotes([whole]),
            turning,
        ),
        details=[
            *([answer] if short else []),
            *filter(None, [turning]),
            f"bytes moved: {split}",
            _assumptions(deployment),
            *node_notes([whole]),
            *distinct_notes([whole], "fallback"),
            *time_details([whole]),
            *memory_notes([whole]),
        ],
    )


def _answers(deployment: TimedDeployment, whole: Record) -> tuple[str, str]:
    """Return the time of the pass and what limits it, with and without the deployment."""
    phase = PHASES.get(whole["phase"], "a mixed pass")
    subject = f"{phase} of {deployment.model.name} on {deployment.gpu.name}"
    stages = deployment.parallelism.pp
    if stages > 1:
        subject = f"the slowest of {stages} stages in {subject}"
    subject += f" with batch {whole['batch_size']:,} and context {whole['context']:,}"
    bound, predicted = kernel_seconds(whole["roofline_s"]), whole["time_s"]
    time = kernel_seconds(predicted) if predicted else f"at least {bound}"
    limit = f", bound by {whole['bound']}" if whole["intensity"] else ""
    full, brief = (f"{text[0].upper()}{text[1:]} takes {time}" for text in (subject, phase))
    return answer_sentence(full, limit), answer_sentence(brief, limit)


def _columns(records: Sequence[Record]) -> list[Column]:
    """Return the columns: the share follows its time; layer kinds only if there are several."""
    kinds = {r["layer"] for r in records} - {""}
    columns = {c.key: c for c in ROOFLINE_COLUMNS if c.key != "layer" or len(kinds) > 1}
    share = columns.pop("share")
    timed = "roofline_s" if records[-1]["time_s"] is None else "time_s"
    ordered = list(columns.values())
    ordered.insert(1 + list(columns).index(timed), share)
    return ordered


def shape(record: Record) -> str | None:
    """Return m × k × n of a GEMM, or heads × queries × keys × width of attention; else None."""
    m, k, n, heads = (_size(record.get(key)) for key in ("m", "k", "n", "heads"))
    if not m:
        return None
    return f"{heads} × {m} × {n} × {k}" if heads else f"{m} × {k} × {n}"


def _size(value: float | None) -> str:
    return "" if value is None else whole(value)


def _part(part: Record) -> Record:
    """Return the row of a part of an operator."""
    row = dict.fromkeys(NOT_OF_PARTS) | {
        "operator": f"  {part['operator']}",
        "layer": "in it",
    }
    work = {"flops": part["flops"] or None, "vector_flops": part.get("vector_flops")}
    return {**row, **work, "bound": ""}


def _turning(deployment: TimedDeployment, context: int, near: dict[Role, int | None]) -> str:
    """Return from which batch on FFN and attention are compute-bound; '' without a matrix peak.

    near: Result at the previous context. It is tried first and replaced.
    """
    if not all(map(deployment.gpu.computes, deployment.formats.product_dtypes)):
        return ""
    placed = cache(lambda n: deployment.placed(Batch.decode(context, n)))
    words = []
    for name, role in (("FFN", Role.FFN), ("attention", Role.CORE)):
        batch = turning_batch(placed, partial(_has_role, role), near.get(role))
        near[role] = batch
        words.append(f"{name} from batch {batch:,} on" if batch else f"{name} at no batch")
    return f"Compute-bound: {', '.join(words)}."


def _has_role(role: Role, operator: Operator) -> bool:
    return operator.role is role


def _assumptions(deployment: TimedDeployment) -> str:
    """Return the formats and the ridge points of the GPU."""
    formats, gpu = deployment.formats, deployment.gpu
    ridges = [
        f"{gpu.knee_of(dtype):.1f} FLOP/B in {dtype}"
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
HIERARCHY_COLUMNS = columns(
    """
    level       | memory       | text
    each        | per unit     | bytes
    units       | units        | text    | right
    bytes       | total        | bytes
    bytes_per_s | bandwidth    | si B/s
    seconds     | time to read | seconds
    """
)


def levels(gpu: Gpu) -> Iterator[JsonObject]:
    """Yield a record per memory, the nearest first; None if the preset gives no figure."""
    peak, registers = gpu.vector_flops_per_s.get("fp32"), gpu.register_bytes_per_sm
    register_rate = OPERAND_BYTES * peak if peak and registers else None
    shared = gpu.shared_memory_bytes_per_sm, gpu.shared_memory_bytes_per_s
    for name, each, rate in (
        ("registers", registers, register_rate),
        ("shared memory, L1", *shared),
    ):
        units = {"each": each, "units": gpu.sms if each else None}
        yield _level(name, each * gpu.sms if each and gpu.sms else None, rate) | units
    yield _level("L2", gpu.l2_bytes, gpu.l2_bytes_per_s)
    yield _level(gpu.memory_type or "memory", gpu.memory_bytes, gpu.bandwidth_bytes_per_s)
    if gpu.link_bytes_per_s:
        yield _level("another GPU's", None, gpu.link_bytes_per_s) | {"units": gpu.link_domain}
    host = gpu.host or Host(name="", gpus=1)
    yield _level("the host's", host.memory_bytes, gpu.host_link_bytes_per_s)
    yield _level("disk", host.disk_bytes, host.disk_bytes_per_s)


def _level(name: str, size: int | None, rate: float | None) -> JsonObject:
    time = size / rate if size and rate else None
    return {"level": name, "bytes": size, "bytes_per_s": rate, "seconds": time}


def hierarchy_table(gpu: Gpu) -> Table:
    """Return the table of a GPU's memories, from registers to disk."""
    time = seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)
    host = gpu.host
    notes = ["", "bandwidth is of one direction; –: no figure with a source"]
    if gpu.register_bytes_per_sm:
        notes.append("registers: bytes that fp32 vector work at its peak reads")
    if gpu.l2_bytes_per_s:
        notes.append("L2: published or measured on this GPU; the preset states which")
    if host:
        notes.append(f"host and disk: of an {host.name} with {host.gpus} GPUs")
    title = f"{gpu.name} reads its memory in {time}."
    return Table(list(levels(gpu)), HIERARCHY_COLUMNS, title, notes)


ATTENTION_COLUMNS = columns(
    """
    gpu            | GPU          | text     | given
    attention      | attention    | text
    context        | context      | int      | given
    batch_size     | batch        | int      | given
    kv_cache_dtype | cache in     | text     | apart
    intensity      | FLOP/B       | {:,.1f}
    to_knee        | gap to ridge | {:,.2f}×
    bound          | bound        | text
    roofline_s     | at least     | kernel
    bytes          | bytes        | bytes
    flops          | FLOP         | si
    knee           | ridge point  | {:.1f}   | wide
    mla_form       | MLA form     | text     | wide
    """
)


def attention_table(records: Sequence[JsonObject]) -> Table:
    """Return a row per variant and GPU, with the layer's shape below."""
    ridges = dict.fromkeys(
        f"{r['gpu']} {r['knee']:.1f} FLOP/B in {r['computed_in']}" for r in records
    )
    caches = ", ".join(dict.fromkeys(r["kv_cache_dtype"] for r in records))
    notes = footnotes(
        f"Each row is {SHAPE} without projections, KV cache in {caches}.",
        "Above a gap of 1×, attention is memory-bound.",
    )
    details = [
        f"ridge point: {', '.join(ridges)}",
        "more sequences do not close the gap, because each reads a cache of its own",
    ]
    return Table(
        records, ATTENTION_COLUMNS, _attention_sentence(records), notes, details=details
    )


def _attention_sentence(records: Sequence[JsonObject]) -> str:
    """Return how many variants of decode attention are memory-bound on the first GPU."""
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
