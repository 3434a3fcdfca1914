"""Whole passes in calibrated time: every operator through its law, caches cold, and what a layer costs beside them.

    pass = Σ operators, one after the other, + glue per layer

Matrix products, attention and all-reduces follow their laws. Elementwise chains move their bytes at the rate that streaming
kernels reach; their launches are in the glue, which is a constant of the stack. In serving a cache is never in the L2, so
its laws run with no residency. fp8 products take static scales: their input arrives quantised. Operators without a law
(recurrences, indexers) take their datasheet bound and a launch, and say so. No law goes below the bound, and no overlap
between operators is assumed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.gpu.roof import least_time
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cost import AttentionShape, CollectiveShape, Cost, GemmShape, Operator
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.figures import Figures, figures_of
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Law
from kvcalc.units import at_least

if TYPE_CHECKING:
    from kvcalc.timing.law import Array

MOST_DECODE_TOKENS = 16  # new tokens of a sequence that decode kernels take at once, their query rows packed
CALIBRATED, BOUND = "calibrated", "bound"
MEASURED = ("bf16", "fp16", "fp8")  # what products compute in that rows are of; others borrow the memory side of bf16's law
_VECTOR = Elementwise()
_Group = tuple[Any, Any, Any]  # sequences, new tokens of each, pairs of all of them


class Timed(NamedTuple):
    """Seconds of all the times an operator runs (a float or an array), and what they rest on: calibrated or bound."""

    seconds: Any
    basis: str


def operator_seconds(operators: Sequence[Operator], gpu: Gpu, calibration: Calibration) -> list[Timed]:
    """The time of each operator under a calibration, never below its roof; 0 where it has nothing to do.

    Raises UserError where the GPU lacks a figure that laws need.
    """
    figures = figures_of(gpu)
    found: list[tuple[Any, str] | None] = [None] * len(operators)
    _gemms(operators, figures, calibration, found)
    timed = []
    for operator, known in zip(operators, found, strict=True):
        least = least_time(operator.cost, operator.dtype, gpu).seconds
        us, basis = known or _one(operator, figures, calibration) or (least * 1e6 + _VECTOR.t0, BOUND)
        measured = operator.dtype in MEASURED or not operator.dtype
        seconds = _larger(us * operator.count / 1e6, least * operator.count)
        timed.append(Timed(_where_busy(operator.cost, seconds), basis if measured else BOUND))
    return timed


def pass_seconds(operators: Sequence[Operator], gpu: Gpu, calibration: Calibration) -> Any:
    """The time of the whole pass: its operators and the glue of its layers."""
    timed = operator_seconds(operators, gpu, calibration)
    return sum((t.seconds for t in timed), glue_seconds(operators, calibration))


def glue_seconds(operators: Sequence[Operator], calibration: Calibration) -> float:
    """What the layers of a pass cost beside their operators: glue_us each."""
    counts: dict[str, int] = {}
    for operator in operators:
        if operator.layer:
            counts[operator.layer] = min(operator.count, counts.get(operator.layer, operator.count))
    return sum(counts.values()) * calibration.glue_us / 1e6


def error_bar(operators: Sequence[Operator], calibration: Calibration) -> float:
    """The held-out p90 of the worst of the families that a pass uses: an error bar for its time."""
    kinds = {k for o in operators if (k := _kind(o)) and calibration.entry(*k)}
    entries = [calibration.entry(*k) for k in kinds]
    return max((e.p90_abs_error for e in entries if e), default=0.0)


def _kind(operator: Operator) -> tuple[str, str] | None:
    """(family, kind of data) of the law that times an operator; None where there is no such family."""
    shape = operator.shape
    if isinstance(shape, GemmShape):
        return "gemm", "fp8" if operator.dtype == "fp8" else "bfloat16"
    if isinstance(shape, CollectiveShape):
        return "allreduce", "bytes"
    if not isinstance(shape, AttentionShape):
        return None
    cached = _cached(shape)
    decodes = all(_decodes(new) for _, new, _, _ in shape.groups)
    if decodes:
        return ("decode_attention" if shape.kv_heads else "mla_decode"), cached
    return ("prefill_attention", f"bfloat16/{cached}") if shape.kv_heads else ("mla_prefill", cached)


def _cached(shape: AttentionShape) -> str:
    return "fp8" if 0 < shape.element < 1.5 else "bfloat16"


def _decodes(new: Any) -> bool:
    return bool(new <= MOST_DECODE_TOKENS) if isinstance(new, int) else bool((new <= MOST_DECODE_TOKENS).all())


def _gemms(
    operators: Sequence[Operator], figures: Figures, calibration: Calibration, found: list[tuple[Any, str] | None]
) -> None:
    """All matrix products of one law at once, in µs of one run."""
    import numpy as np

    members: dict[str, list[int]] = {}
    for i, operator in enumerate(operators):
        if isinstance(operator.shape, GemmShape) and (kind := _kind(operator)):
            members.setdefault(kind[1], []).append(i)
    for data, indices in members.items():
        law = _product_law(calibration, data)
        if law is None:
            continue
        shapes = [operators[i].shape for i in indices]
        columns = [np.broadcast_arrays(*(np.asarray(x, float) for x in shape)) for shape in shapes if shape]
        flat = [np.concatenate([column[axis].ravel() for column in columns]) for axis in range(4)]
        flat[0] = np.maximum(flat[0], 1.0)
        us = law.us(figures, *flat)
        ends = np.cumsum([column[0].size for column in columns])
        for i, column, part in zip(indices, columns, np.split(us, ends[:-1]), strict=True):
            found[i] = _plain(part.reshape(column[0].shape)), CALIBRATED


def _product_law(calibration: Calibration, kind: str) -> Law | None:
    """The law of products whose input arrives quantised: fp8's without its own pass over the input."""
    law, plain = calibration.law("gemm", kind), calibration.law("gemm", "bfloat16")
    if isinstance(law, QuantizedGemm):
        start = min(law.t0, plain.t0) if isinstance(plain, Gemm) else law.t0
        return msgspec.structs.replace(law, t0=start, bq=float("inf"))
    return law


def _one(operator: Operator, figures: Figures, calibration: Calibration) -> tuple[Any, str] | None:
    """(µs of one run, basis) of anything but a matrix product; None where no law is of its kind."""
    if operator.kind == "vector":
        return operator.cost.bytes / (_VECTOR.em * figures.memory), CALIBRATED
    kind = _kind(operator)
    if kind is None:
        return None
    if isinstance(operator.shape, AttentionShape):
        us = _attention(operator.shape, figures, calibration)
    else:
        us = _collective(operator.shape, figures, calibration)
    return None if us is None else (us, CALIBRATED)


def _collective(shape: Any, figures: Figures, calibration: Calibration) -> Any:
    import numpy as np

    law = calibration.law("allreduce", "bytes")
    if law is None or not isinstance(shape, CollectiveShape):
        return None
    size = np.asarray(shape.bytes, float)
    return _plain(law.us(figures, np.full_like(size, shape.ranks), size))


def _attention(shape: AttentionShape, figures: Figures, calibration: Calibration) -> Any:
    """µs of an attention over all groups of the batch: those that decode in one launch, each prompt's in one of its own."""
    total: Any = 0.0
    decoding, prompts = _by_kernel(shape)
    if decoding:
        us = _decode(shape, decoding, figures, calibration)
        if us is None:
            return None
        total = total + us
    for count, new, pairs in prompts:
        us = _prefill(shape, count, new, pairs, figures, calibration)
        if us is None:
            return None
        total = total + us
    return _plain(total)


def _by_kernel(shape: AttentionShape) -> tuple[list[_Group], list[_Group]]:
    """The groups that decode kernels take, and those that prefill kernels take; of an array each point where it belongs."""
    decoding: list[_Group] = []
    prompts: list[_Group] = []
    for count, new, _, pairs in shape.groups:
        longer = at_least(new, MOST_DECODE_TOKENS + 1)
        if isinstance(longer, int) or (longer == longer.flat[0]).all():
            (decoding if _decodes(new) else prompts).append((count, new, pairs))
            continue
        decoding.append((count * (1 - longer), new, pairs * (1 - longer)))
        prompts.append((count * longer, new, pairs * longer))
    return decoding, prompts


def _decode(shape: AttentionShape, groups: list[_Group], figures: Figures, calibration: Calibration) -> Any:
    import numpy as np

    cached = _cached(shape)
    law = calibration.law("decode_attention" if shape.kv_heads else "mla_decode", cached)
    if law is None:
        return None
    batch = sum((np.asarray(c, float) for c, _, _ in groups[1:]), np.asarray(groups[0][0], float))
    queries = sum((np.asarray(c * n, float) for c, n, _ in groups[1:]), np.asarray(groups[0][0] * groups[0][1], float))
    pairs = sum((p for *_, p in groups[1:]), groups[0][2])
    used, rows = np.maximum(batch, 1), queries / np.maximum(batch, 1)
    length = np.maximum(np.round(pairs / np.maximum(queries, 1)), 1)
    cold = msgspec.structs.replace(law, cold=True)
    arrays: tuple[Array, ...]
    if shape.kv_heads:
        head_dim = (shape.key + shape.value) / 2
        arrays = (used, shape.heads * rows, used * 0 + shape.kv_heads, used * 0 + head_dim, length, used * 0)
    else:
        arrays = (used, shape.heads * rows, length)
    return np.where(batch > 0, cold.us(figures, *np.broadcast_arrays(*arrays)), 0.0)


def _prefill(shape: AttentionShape, count: Any, new: Any, pairs: Any, figures: Figures, calibration: Calibration) -> Any:
    import numpy as np

    cached = _cached(shape)
    batch, length = np.broadcast_arrays(np.asarray(count, float), np.asarray(new, float))
    arrays: tuple[Array, ...]
    used, keys = np.maximum(batch, 1), pairs / np.maximum(batch * length, 1)
    if shape.kv_heads:
        law = calibration.law("prefill_attention", f"bfloat16/{cached}")
        head_dim = (shape.key + shape.value) / 2
        arrays = (used, used * 0 + shape.heads, used * 0 + shape.kv_heads, used * 0 + head_dim, length, used * 0, keys)
    else:
        law = calibration.law("mla_prefill", cached)
        arrays = (used, used * 0 + shape.heads, length, keys, used * 0 + (shape.key + shape.value))
    if law is None:
        return None
    return np.where(batch > 0, law.us(figures, *np.broadcast_arrays(*arrays)), 0.0)


def _where_busy(cost: Cost, seconds: Any) -> Any:
    """0 at the points of an array where an operator has nothing to do: latent attention in the form that others take."""
    work = cost.flops + cost.vector_flops + cost.bytes + cost.network_bytes
    return seconds if isinstance(work, int | float) else _plain(seconds * (work > 0))


def _larger(a: Any, b: Any) -> Any:
    """The larger of two floats or arrays; a float for two floats."""
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    import numpy as np

    return np.maximum(a, b)


def _plain(us: Any) -> Any:
    """A float for a single value, else the array."""
    return float(us) if getattr(us, "ndim", 0) == 0 else us
