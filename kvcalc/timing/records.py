"""The records of `roofline`: every operator of a pass under the roof, with its calibrated time, and their total."""

from typing import Any

from kvcalc.gpu.roof import Placed, fallbacks, mla_form, total_bound, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import AttentionShape, Cost, GemmShape, Operator
from kvcalc.model.operators import total
from kvcalc.timing.calibration import BOUND, CALIBRATED, Calibration
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.routing import BALANCED, Routing

ENGINE_OVERHEAD, MODULE_OVERHEAD = "engine_overhead", "module_overhead"


def roofline_records(deployment: Deployment, phase: str, batch_size: int, context: int) -> list[dict[str, Any]]:
    """One decode step or prefill as `pass_records`, each record with what was asked. Raises UserError on an unknown phase."""
    return _asked(deployment, Batch.of_phase(phase, context, batch_size), phase, batch_size, context)


def mixed_records(deployment: Deployment, text: str) -> list[dict[str, Any]]:
    """One pass over a batch written as `Batch.parse` takes it: phase `mixed`, batch_size its sequences, context the longest."""
    batch = Batch.parse(text)
    longest = max(int(g.new + g.past) for g in batch.groups)
    return _asked(deployment, batch, "mixed", int(batch.sequences), longest)


def _asked(deployment: Deployment, batch: Batch, phase: str, batch_size: int, context: int) -> list[dict[str, Any]]:
    common: dict[str, Any] = deployment.named | {"phase": phase, "batch_size": batch_size, "context": context}
    records = pass_records(deployment.placed(batch), deployment.gpu, deployment.calibration, deployment.routing)
    return [common | record for record in records]


def pass_records(
    placed: list[Placed], gpu: Gpu, calibration: Calibration | None = None, routing: Routing = BALANCED
) -> list[dict[str, Any]]:
    """Flat records: an operator each, all the times it runs taken together, and last their total.

    Every figure of the total is the sum of the records before it: with a calibration the last of them is `engine_overhead`,
    the time that the engine adds to the kernels. `module_overhead` stands behind the operators of a sparse-attention module:
    the time that the measured module takes beyond them. share: of the time of the pass, predicted or else the bound.

    m, k, n: of a product [m, k] · [k, n]; of an attention its queries, the width of a key, and the keys that a query sees on
    average; beside them `heads`. bound: what the roof says. computed_in: the dtype of the matrix unit that does the products,
    or null. With a calibration, `time_s` is what its laws predict, the total with what the engine adds, and `overhead` that
    time over the bound. time_basis: calibrated, scaled (from another GPU, or from rows of the nearest format) or bound, of each
    operator and of the whole. uncalibrated_share: of its time, what rests on operators without a law of their own.
    time_p90_error: of the whole, that of such a step against measured servers; null where none is known, and of an operator.
    time_note: what is to be said of the rows behind a time, or null. fallback: what products are computed in where the GPU has
    no unit for their dtype, in words, or null.
    """
    whole = total(p.operator for p in placed)
    last = {"operator": "total", "layer": "", "role": "", "count": 1, **_figures(whole)}
    last |= {
        "mla_form": mla_form(placed),
        "intensity": whole.flops / whole.bytes if whole.bytes else None,
        "bound": total_bound(placed),
        "computed_in": "+".join(dict.fromkeys(p.fallback or p.operator.dtype for p in placed if p.operator.dtype)) or None,
        "roofline_s": total_seconds(placed),
        "time_s": None,
        "time_basis": BOUND,
        "uncalibrated_share": 1.0,
        "time_p90_error": None,
        "overhead": None,
        "fallback": fallbacks(placed, gpu) or None,
    }
    records = [*(_record(p, fallbacks([p], gpu) or None) for p in placed), last]
    if calibration:
        _timed(records, [p.operator for p in placed], gpu, calibration, routing)
    shown = "time_s" if calibration else "roofline_s"
    for record in records:
        record["share"] = record[shown] / records[-1][shown]
    return records


def added_time(name: str, seconds: float, basis: str, layer: str = "") -> dict[str, Any]:
    """Return the record of time that a pass takes beyond its operators: it computes nothing and moves nothing."""
    nothing = Operator(name, layer, 1, "added", Cost())
    record = _record(Placed(nothing, seconds=0.0, bound="", fallback=""), fallback=None)
    return record | {"bound": None, "time_s": seconds, "time_basis": basis, "uncalibrated_share": float(basis == BOUND)}


def _timed(
    records: list[dict[str, Any]], operators: list[Operator], gpu: Gpu, calibration: Calibration, routing: Routing
) -> None:
    from kvcalc.timing.steps import operator_seconds, step_error, summed_time

    timed, basis = operator_seconds(operators, gpu, calibration, routing), calibration.basis_on(gpu)
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
            record = added_time(MODULE_OVERHEAD, float(overhead.seconds), rests_on, operators[place].layer)
            runs = {"count": operators[place].count, "uncalibrated_share": float(overhead.basis != CALIBRATED)}
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
        record["overhead"] = record["time_s"] / record["roofline_s"] if record["roofline_s"] else None


def _record(p: Placed, fallback: str | None) -> dict[str, Any]:
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
        "time_s": None,
        "time_basis": BOUND,
        "uncalibrated_share": 1.0,
        "time_p90_error": None,
        "overhead": None,
        "fallback": fallback,
        **({"parts": parts} if parts else {}),
        **({"expected_experts": p.operator.experts} if p.operator.experts else {}),
    }


def _shape(shape: Any) -> dict[str, Any]:
    """The sizes of a product or of an attention; null for what is neither."""
    if isinstance(shape, GemmShape):
        return {"heads": None, "m": shape.m, "k": shape.k, "n": shape.n}
    if isinstance(shape, AttentionShape):
        queries = sum(count * new for count, new, *_ in shape.groups)
        keys = sum(pairs for *_, pairs in shape.groups) / queries if queries else 0
        return {"heads": shape.heads, "m": queries, "k": shape.key, "n": int(keys) if keys == int(keys) else keys}
    return {"heads": None, "m": None, "k": None, "n": None}


def _work(cost: Cost) -> dict[str, Any]:
    """The FLOPs of a part of a fused operator."""
    return {"flops": cost.flops, **({"vector_flops": cost.vector_flops} if cost.vector_flops else {})}


def _figures(cost: Cost) -> dict[str, Any]:
    return {
        "flops": cost.flops,
        "vector_flops": cost.vector_flops,
        "weight_bytes": cost.weight_bytes,
        "cache_bytes": cost.cache_bytes,
        "cache_read_bytes": cost.cache_read_bytes,
        "cache_write_bytes": cost.cache_write_bytes,
        "activation_bytes": cost.activation_bytes,
        "bytes": cost.bytes,
        "network_bytes": cost.network_bytes,
        "inter_node_bytes": cost.inter_node_bytes,
    }
