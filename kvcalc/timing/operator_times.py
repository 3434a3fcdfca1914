"""Build the records of `roofline`: each operator of a pass with its bound and time, and the
total."""

from typing import Any, TypeAlias

from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.roof import Placed, fallbacks, mla_form, total_bound, total_seconds
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import AttentionShape, Cost, GemmShape, Operator
from kvcalc.model.forward_pass import total
from kvcalc.timing.calibration import BOUND, CALIBRATED, Calibration
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.kernel_models.fused_moe import BALANCED, Routing

Record: TypeAlias = dict[str, Any]  # a record as in report/keys.yaml
ENGINE_OVERHEAD, MODULE_OVERHEAD = "engine_overhead", "module_overhead"
_UNPREDICTED = {
    "time_s": None,
    "time_basis": BOUND,
    "uncalibrated_share": 1.0,
    "time_p90_error": None,
    "overhead": None,
}


def roofline_records(
    deployment: TimedDeployment, phase: str, batch_size: int, context: int
) -> list[Record]:
    """Return the records of one decode step or prefill. Raises UserError for an unknown phase."""
    batch = Batch.of_phase(phase, context, batch_size)
    return _records(deployment, batch, phase, batch_size, context)


def mixed_records(deployment: TimedDeployment, text: str) -> list[Record]:
    """Return the records of a pass over the batch `text`, as in `Batch.parse`. The phase is
    `mixed`."""
    batch = Batch.parse(text)
    longest = max(int(g.new + g.past) for g in batch.groups)
    return _records(deployment, batch, "mixed", int(batch.sequences), longest)


def _records(
    deployment: TimedDeployment, batch: Batch, phase: str, batch_size: int, context: int
) -> list[Record]:
    common: Record = deployment.named | {
        "phase": phase,
        "batch_size": batch_size,
        "context": context,
    }
    records = pass_records(
        deployment.placed(batch),
        deployment.gpu,
        deployment.calibration,
        deployment.routing,
    )
    return [common | record for record in records]


def pass_records(
    placed: list[Placed],
    gpu: Gpu,
    calibration: Calibration | None = None,
    routing: Routing = BALANCED,
) -> list[Record]:
    """Return one record per operator, for all its runs together, and the total as the last record.

    Each figure of the total is the sum of the records before it. With a calibration, these include
    `engine_overhead`, the time that the engine adds to the kernels, and `module_overhead` after the
    operators of a sparse-attention module, the time that the module takes beyond them. The keys are
    described in report/keys.yaml.
    """
    whole = total(p.operator for p in placed)
    dtypes = dict.fromkeys(p.fallback or p.operator.dtype for p in placed if p.operator.dtype)
    last = {"operator": "total", "layer": "", "role": "", "count": 1, **_figures(whole)}
    last |= {
        "mla_form": mla_form(placed),
        "intensity": whole.flops / whole.bytes if whole.bytes else None,
        "bound": total_bound(placed),
        "computed_in": "+".join(dtypes) or None,
        "roofline_s": total_seconds(placed),
        **_UNPREDICTED,
        "fallback": fallbacks(placed, gpu) or None,
    }
    records = [*(_record(p, fallbacks([p], gpu) or None) for p in placed), last]
    if calibration:
        _timed(records, [p.operator for p in placed], gpu, calibration, routing)
    shown = "time_s" if calibration else "roofline_s"
    for record in records:
        record["share"] = record[shown] / records[-1][shown]
    return records


def added_time(name: str, seconds: float, basis: str, layer: str = "") -> Record:
    """Return a record of time beyond the operators, which computes nothing and moves nothing."""
    nothing = Operator(name, layer, 1, "added", Cost())
    record = _record(Placed(nothing, seconds=0.0, bound="", fallback=""), fallback=None)
    return record | {
        "bound": None,
        "time_s": seconds,
        "time_basis": basis,
        "uncalibrated_share": float(basis == BOUND),
    }


def _timed(
    records: list[Record],
    operators: list[Operator],
    gpu: Gpu,
    calibration: Calibration,
    routing: Routing,
) -> None:
    from kvcalc.timing.steps import operator_seconds, step_error, summed_time

    timed, basis = (
        operator_seconds(operators, gpu, calibration, routing),
        calibration.basis_on(gpu),
    )
    for record, one in zip(records, timed, strict=False):
        record["time_s"] = float(one.seconds)
        record["time_basis"] = basis if one.basis == CALIBRATED else one.basis
        record["uncalibrated_share"] = 0.0 if one.basis == CALIBRATED else 1.0
        record["time_note"] = one.entry.note or None if one.entry else None
    whole = summed_time(operators, timed, calibration)
    records.insert(-1, added_time(ENGINE_OVERHEAD, float(whole.engine), basis))
    for place in reversed(range(len(timed))):
        overhead = timed[place].overhead
        if overhead and overhead.seconds > 0:
            rests_on = basis if overhead.basis == CALIBRATED else overhead.basis
            record = added_time(
                MODULE_OVERHEAD,
                float(overhead.seconds),
                rests_on,
                operators[place].layer,
            )
            runs = {
                "count": operators[place].count,
                "uncalibrated_share": float(overhead.basis != CALIBRATED),
            }
            records.insert(place + 1, record | runs)
    notes = dict.fromkeys(t.entry.note for t in timed if t.entry and t.entry.note)
    records[-1] |= {
        "time_s": float(whole.seconds),
        "time_basis": basis,
        "uncalibrated_share": float(whole.uncalibrated_share),
        "time_p90_error": step_error(operators, gpu, calibration),
        "time_note": "; ".join(notes) or None,
    }
    for record in records:
        record["overhead"] = (
            record["time_s"] / record["roofline_s"] if record["roofline_s"] else None
        )


def _record(p: Placed, fallback: str | None) -> Record:
    parts = [{"operator": name, **_work(c * p.operator.count)} for name, c in p.operator.parts]
    return {
        "operator": p.operator.name,
        "layer": p.operator.layer,
        "role": str(p.operator.role),
        "count": p.operator.count,
        **_figures(p.operator.total),
        **_shape(p.operator.shape),
        "intensity": p.intensity,
        "bound": p.bound,
        "computed_in": p.fallback or p.operator.dtype or None,
        "roofline_s": p.seconds,
        **_UNPREDICTED,
        "fallback": fallback,
        **({"parts": parts} if parts else {}),
        **({"expected_experts": p.operator.experts} if p.operator.experts else {}),
    }


def _shape(shape: Any) -> Record:
    """Return the sizes of a GEMM or of attention; null for other operators."""
    if isinstance(shape, GemmShape):
        return {"heads": None, "m": shape.m, "k": shape.k, "n": shape.n}
    if isinstance(shape, AttentionShape):
        queries = sum(count * new for count, new, *_ in shape.groups)
        keys = sum(pairs for *_, pairs in shape.groups) / queries if queries else 0
        return {
            "heads": shape.heads,
            "m": queries,
            "k": shape.key,
            "n": int(keys) if keys == int(keys) else keys,
        }
    return {"heads": None, "m": None, "k": None, "n": None}


def _work(cost: Cost) -> Record:
    """Return the FLOPs of a part of a fused operator."""
    return {
        "flops": cost.flops,
        **({"vector_flops": cost.vector_flops} if cost.vector_flops else {}),
    }


_COSTS = (
    "flops",
    "vector_flops",
    "weight_bytes",
    "cache_bytes",
    "cache_read_bytes",
    "cache_write_bytes",
    "activation_bytes",
    "bytes",
    "network_bytes",
    "inter_node_bytes",
)


def _figures(cost: Cost) -> Record:
    return {name: getattr(cost, name) for name in _COSTS}
