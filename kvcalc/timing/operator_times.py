"""Build the records of `roofline`: each operator of a pass with its bound and time, and the
total."""

from collections.abc import Sequence
from typing import Any

from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.roof import Placed, fallbacks, mla_form, total_bound, total_seconds
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import AttentionShape, Cost, GemmShape, Operator
from kvcalc.model.forward_pass import total
from kvcalc.records import Record
from kvcalc.timing.calibration import BOUND, CALIBRATED, Calibration
from kvcalc.timing.deployment import TimedDeployment

ENGINE_OVERHEAD, MODULE_OVERHEAD = "engine_overhead", "module_overhead"
_UNPREDICTED = {
    "time_s": None,
    "time_basis": BOUND,
    "uncalibrated_share": 1.0,
    "time_p90_error": None,
    "overhead": None,
}
_COST_KEYS = (
    "flops vector_flops weight_bytes cache_bytes cache_read_bytes cache_write_bytes "
    "activation_bytes bytes network_bytes inter_node_bytes"
)


def roofline_records(
    deployment: TimedDeployment, phase: str, batch_size: int, context: int
) -> list[Record]:
    """Return the records of one decode step or prefill. Raises UserError for an unknown phase."""
    batch = Batch.of_phase(phase, context, batch_size)
    common = {"phase": phase, "batch_size": batch_size, "context": context}
    return _records(deployment, batch, common)


def mixed_records(deployment: TimedDeployment, text: str) -> list[Record]:
    """Return the records of a pass over the batch `text`, as in `Batch.parse`. The phase is
    `mixed`."""
    batch = Batch.parse(text)
    longest = max(int(g.new + g.past) for g in batch.groups)
    common = {"phase": "mixed", "batch_size": int(batch.sequences), "context": longest}
    return _records(deployment, batch, common)


def _records(deployment: TimedDeployment, batch: Batch, common: Record) -> list[Record]:
    d = deployment
    records = pass_records(d.placed(batch), d.gpu, d.calibration)
    return [{**d.named, **common, **record} for record in records]


def pass_records(
    placed: list[Placed],
    gpu: Gpu,
    calibration: Calibration | None = None,
) -> list[Record]:
    """Return one record per operator, for all its runs together, and the total as the last record.

    Each figure of the total is the sum of the records before it. With a calibration, these include
    `engine_overhead`, the time that the engine adds to the kernels, and `module_overhead` after the
    operators of a sparse-attention module, the time that the module takes beyond them.
    """
    records = [_operator_record(p, gpu) for p in placed]
    total_record = _total_record(placed, gpu)
    if calibration:
        operators = [p.operator for p in placed]
        records, times = _timed_records(records, operators, gpu, calibration)
        total_record.update(times)
    records.append(total_record)
    time_key = "time_s" if calibration else "roofline_s"
    for record in records:
        if calibration and record["roofline_s"]:
            record["overhead"] = record["time_s"] / record["roofline_s"]
        record["share"] = record[time_key] / total_record[time_key]
    return [*records]


def _total_record(placed: list[Placed], gpu: Gpu) -> dict[str, Any]:
    cost = total(p.operator for p in placed)
    dtypes = dict.fromkeys(p.fallback or p.operator.dtype for p in placed if p.operator.dtype)
    return {
        "operator": "total",
        "layer": "",
        "role": "",
        "count": 1,
        **_cost_figures(cost),
        "mla_form": mla_form(placed),
        "intensity": cost.flops / cost.bytes if cost.bytes else None,
        "bound": total_bound(placed),
        "computed_in": "+".join(dtypes) or None,
        "roofline_s": total_seconds(placed),
        **_UNPREDICTED,
        "fallback": fallbacks(placed, gpu) or None,
    }


def _timed_records(
    records: Sequence[dict[str, Any]],
    operators: Sequence[Operator],
    gpu: Gpu,
    calibration: Calibration,
) -> tuple[list[dict[str, Any]], Record]:
    """Return the records with predicted times and overheads, and the time keys of the total."""
    from kvcalc.timing.steps import operator_seconds, step_error, summed_time

    basis = calibration.basis_on(gpu)
    times = operator_seconds(operators, gpu, calibration)
    timed_records = []
    for record, operator, time in zip(records, operators, times, strict=True):
        record["time_s"] = float(time.seconds)
        record["time_basis"] = basis if time.basis == CALIBRATED else time.basis
        record["uncalibrated_share"] = float(time.basis != CALIBRATED)
        record["time_note"] = time.entry.note or None if time.entry else None
        timed_records.append(record)
        overhead = time.overhead
        if overhead and overhead.seconds > 0:
            is_calibrated = overhead.basis == CALIBRATED
            added = _added_time(
                MODULE_OVERHEAD,
                float(overhead.seconds),
                basis if is_calibrated else overhead.basis,
                operator.layer,
            )
            added |= {"count": operator.count, "uncalibrated_share": float(not is_calibrated)}
            timed_records.append(added)
    pass_time = summed_time(operators, times, calibration)
    timed_records.append(_added_time(ENGINE_OVERHEAD, float(pass_time.engine), basis))
    notes = dict.fromkeys(time.entry.note for time in times if time.entry and time.entry.note)
    return timed_records, {
        "time_s": float(pass_time.seconds),
        "time_basis": basis,
        "uncalibrated_share": float(pass_time.uncalibrated_share),
        "time_p90_error": step_error(operators, gpu, calibration),
        "time_note": "; ".join(notes) or None,
    }


def _added_time(name: str, seconds: float, basis: str, layer: str = "") -> dict[str, Any]:
    """Return a record of time beyond the operators, which computes nothing and moves nothing."""
    operator = Operator(name, layer, 1, "added", Cost())
    return _operator_record(Placed(operator, seconds=0.0, bound="", fallback="")) | {
        "bound": None,
        "time_s": seconds,
        "time_basis": basis,
        "uncalibrated_share": 0.0,
    }


def _operator_record(p: Placed, gpu: Gpu | None = None) -> dict[str, Any]:
    operator = p.operator
    record: dict[str, Any] = {
        "operator": operator.name,
        "layer": operator.layer,
        "role": str(operator.role),
        "count": operator.count,
        **_cost_figures(operator.total),
        **_shape_figures(operator.shape),
        "intensity": p.intensity,
        "bound": p.bound,
        "computed_in": p.fallback or operator.dtype or None,
        "roofline_s": p.seconds,
        **_UNPREDICTED,
        "fallback": (fallbacks([p], gpu) if gpu else "") or None,
    }
    if operator.parts:
        record["parts"] = [_part(name, cost * operator.count) for name, cost in operator.parts]
    if operator.experts:
        record["expected_experts"] = operator.experts
    return record


def _shape_figures(shape: Any) -> Record:
    """Return the sizes of a GEMM or of attention; null for other operators."""
    if isinstance(shape, GemmShape):
        return {"heads": None, "m": shape.m, "k": shape.k, "n": shape.n}
    if isinstance(shape, AttentionShape):
        queries = sum(count * new for count, new, *_ in shape.groups)
        keys = sum(pairs for *_, pairs in shape.groups) / queries if queries else 0
        mean_keys = int(keys) if keys == int(keys) else keys
        return {"heads": shape.heads, "m": queries, "k": shape.key, "n": mean_keys}
    return dict.fromkeys(("heads", "m", "k", "n"))


def _part(name: str, cost: Cost) -> Record:
    """Return the FLOPs of a part of a fused operator."""
    vector = {"vector_flops": cost.vector_flops} if cost.vector_flops else {}
    return {"operator": name, "flops": cost.flops, **vector}


def _cost_figures(cost: Cost) -> Record:
    return {key: getattr(cost, key) for key in _COST_KEYS.split()}
