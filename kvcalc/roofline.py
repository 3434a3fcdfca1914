"""Operators on a GPU: intensity, what bounds each, and the least time the datasheet allows.

An operator takes at least max(matrix FLOPs/peak, vector FLOPs/vector peak, bytes/bandwidth, network bytes/link): all four
at once, perfectly overlapped. A pass takes the sum over its operators, one after the other. These are bounds, not
predictions: no launch, no ramp, no efficiency.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvcalc.batch import ONE_GPU, PUBLISHED, Batch, Parallelism, Precision
from kvcalc.cost import Cost, Operator
from kvcalc.errors import UserError
from kvcalc.forward import forward, total
from kvcalc.gpu import Gpu
from kvcalc.model import Model
from kvcalc.parallel import check
from kvcalc.units import Num, maximum

if TYPE_CHECKING:
    from kvcalc.timing.calibration import Calibration


class Placed(NamedTuple):
    """An operator under a GPU's roof.

    seconds: of all the times it runs. bound: compute, memory or network ('' for arrays, which may mix them). fallback: the
    dtype whose unit stands in for one that the GPU has not, or ''.
    """

    operator: Operator
    seconds: Any
    bound: str
    fallback: str

    @property
    def intensity(self) -> Any:
        """Matrix FLOPs per byte of memory traffic; None where nothing moves."""
        moved = self.operator.cost.bytes
        return None if isinstance(moved, int | float) and not moved else self.operator.cost.flops / moved


def roofline(operators: Sequence[Operator], gpu: Gpu) -> list[Placed]:
    """Each operator under the roof of `gpu`. Raises UserError where the GPU gives no peak for a dtype that is needed."""
    return [_placed(operator, gpu) for operator in operators]


def placed_pass(
    model: Model,
    batch: Batch,
    gpu: Gpu,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    mla_form: str = "auto",
) -> list[Placed]:
    """One pass as one GPU sees it: of pipeline stages the slowest. For whole numbers, not arrays."""
    if parallelism.pp == 1:
        return roofline(forward(model, batch, precision, parallelism, mla_form), gpu)
    check(model, parallelism)
    passes = (forward(model, batch, precision, parallelism, mla_form, stage=n) for n in range(parallelism.pp))
    return max((roofline(operators, gpu) for operators in passes), key=total_seconds)


def total_seconds(placed: Sequence[Placed]) -> Any:
    """The bound of the whole pass: Σ seconds, a float or an array."""
    return sum((p.seconds for p in placed), 0.0)


def total_bound(placed: Sequence[Placed]) -> str:
    """What most of the pass's time is bound by."""
    by_bound: dict[str, float] = {}
    for p in placed:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds
    return max(by_bound, key=lambda b: by_bound[b])


def _placed(operator: Operator, gpu: Gpu) -> Placed:
    cost, used = operator.cost, ""
    slowest: Any = cost.bytes / gpu.bandwidth_bytes_per_s
    bound = "memory"
    limits = [("compute", cost.vector_flops, gpu.vector_peak), ("network", cost.network_bytes, gpu.link)]
    if operator.dtype:
        peak, used = gpu.peak(operator.dtype)
        limits.append(("compute", cost.flops, peak))
    for name, amount, rate in limits:
        if rate and not (isinstance(amount, int | float) and amount == 0):
            seconds = amount / rate
            if isinstance(seconds, float) and isinstance(slowest, float):
                slowest, bound = (seconds, name) if seconds > slowest else (slowest, bound)
            else:
                slowest, bound = maximum(cast("Any", seconds), slowest), ""
    return Placed(operator, slowest * operator.count, bound, used if used != operator.dtype else "")


PHASES = ("decode", "prefill")


def phase_batch(phase: str, context: Num, batch_size: Num) -> Batch:
    """The batch that a phase name stands for. Raises UserError on an unknown phase."""
    if phase not in PHASES:
        raise UserError(f"unknown phase {phase!r}", hint=f"Known: {', '.join(PHASES)}")
    return Batch.decode(context, batch_size) if phase == "decode" else Batch.prefill(context, batch_size)


def records(
    placed: Sequence[Placed], common: dict[str, Any], gpu: Gpu | None = None, calibration: "Calibration | None" = None
) -> list[dict[str, Any]]:
    """Flat records: an operator each, all the times it runs taken together, and last their total.

    With a calibration of `gpu`, `time_s` is what its laws predict, the total with the glue of its layers and its error bar;
    an operator whose bound is under half its predicted time is bound by overhead.
    """
    found = [common | _record(p) for p in placed]
    whole = total(p.operator for p in placed)
    moved = whole.bytes
    last = {"operator": "total", "layer": "", "count": 1, **_figures(whole)}
    last |= {
        "mla_form": mla_form_of(placed),
        "intensity": whole.flops / moved if moved else None,
        "bound": total_bound(placed),
        "roofline_s": total_seconds(placed),
        "time_s": None,
    }
    records = [*found, common | last]
    if calibration and gpu:
        _timed(records, [p.operator for p in placed], gpu, calibration)
    return records


def mla_form_of(placed: Sequence[Placed]) -> str | None:
    """The form in which latent attention ran: absorbed, expanded, or mixed between groups; None where there is none."""
    names = {p.operator.name for p in placed}
    forms = [form for form, name in (("absorbed", "absorb_q"), ("expanded", "kv_up")) if name in names]
    return "mixed" if len(forms) > 1 else forms[0] if forms else None


def _timed(records: list[dict[str, Any]], operators: list[Operator], gpu: Gpu, calibration: "Calibration") -> None:
    from kvcalc.timing.steps import error_bar, glue_seconds, operator_seconds

    timed = operator_seconds(operators, gpu, calibration)
    for record, one in zip(records, timed, strict=False):
        record["time_s"] = float(one.seconds)
        if record["bound"] != "network" and record["roofline_s"] < 0.5 * record["time_s"]:
            record["bound"] = "overhead"
    whole = records[-1]
    whole["time_s"] = float(sum(t.seconds for t in timed) + glue_seconds(operators, calibration))
    whole["time_p90_error"] = error_bar(operators, calibration)


def _record(p: Placed) -> dict[str, Any]:
    parts = [{"operator": name, "flops": c.flops * p.operator.count} for name, c in p.operator.parts]
    return {
        "operator": p.operator.name,
        "layer": p.operator.layer,
        "count": p.operator.count,
        **_figures(p.operator.total),
        "intensity": p.intensity,
        "bound": p.bound,
        "roofline_s": p.seconds,
        "time_s": None,
        **({"parts": parts} if parts else {}),
        **({"expected_experts": p.operator.experts} if p.operator.kind == "gemm" and p.operator.experts else {}),
    }


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
    }


FFN = ("gate_up", "up", "down", "experts_gate_up", "experts_up", "experts_down")
MOST_BATCH = 1 << 20


def turning_batch(place: Callable[[int], Sequence[Placed]], names: Sequence[str]) -> int | None:
    """The smallest batch at which operators called `names`, taken together, are compute-bound; None if never to 2^20."""

    def turned(batch_size: int) -> bool:
        chosen = [p for p in place(batch_size) if p.operator.name in names]
        return bool(chosen) and total_bound(chosen) == "compute"

    if not turned(MOST_BATCH):
        return None
    low, high = 0, MOST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if turned(middle) else (middle, high)
    return high
