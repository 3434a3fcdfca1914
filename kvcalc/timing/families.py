"""Which law times which measured operation: the one list of families, and the datasheet bound of each.

A calibration holds, for every family, one law for each kind of data (`bfloat16`, `fp8`, `fp8_block`, `bfloat16/fp8` …).
Where a kind has no law of its own, the nearest kind that `NEAREST` names stands in for it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.timing.allreduce import AllReduce
from kvcalc.timing.decode_attention import DecodeAttention
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Array, Law
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.mla_prefill import MlaPrefill
from kvcalc.timing.prefill_attention import PrefillAttention

if TYPE_CHECKING:
    from kvcalc.timing.machine import Machine

AnyLaw = Gemm | QuantizedGemm | DecodeAttention | PrefillAttention | MlaDecode | MlaPrefill | AllReduce | Elementwise

# fp8 attention is given away by its time alone: TensorRT-LLM runs bf16 prefill over an fp8 cache in fp8.
FP8_PREFILL_STACKS = ("trtllm",)
KINDS_OF_GEMM: dict[str, type[Law]] = {"bfloat16": Gemm, "fp8": QuantizedGemm, "fp8_block": QuantizedGemm}
NEAREST = {
    "fp8_block": ("fp8",),
    "fp8": ("fp8_block", "fp8/fp8"),
    "bfloat16/fp8": ("bfloat16/bfloat16",),
    "fp8/fp8": ("bfloat16/fp8",),
    "fp8/bfloat16": ("fp8/fp8", "bfloat16/bfloat16"),
}


class Family(NamedTuple):
    """How a family's rows are fitted: the law of a kind with its given fields (None: no law), and the rows' weights."""

    law: Callable[[str, str], tuple[type[Law], dict[str, Any]] | None]
    kind: Callable[[str], str]
    weight: Callable[..., Array] | None = None


def _gemm(kind: str, stack: str) -> tuple[type[Law], dict[str, Any]] | None:
    return (KINDS_OF_GEMM[kind], {}) if kind in KINDS_OF_GEMM else None


def _bytes(kind: str) -> int:
    return 1 if kind.endswith("fp8") else 2


def _cached(law: type[Law]) -> Callable[[str, str], tuple[type[Law], dict[str, Any]] | None]:
    return lambda kind, stack: (law, {"bytes": _bytes(kind)}) if kind in ("bfloat16", "fp8") else None


def _prefill(kind: str, stack: str) -> tuple[type[Law], dict[str, Any]] | None:
    attends, _, cached = kind.partition("/")
    if not {attends, cached} <= {"bfloat16", "fp8"}:
        return None
    fp8 = attends == "fp8" or (cached == "fp8" and stack in FP8_PREFILL_STACKS)
    return PrefillAttention, {"compute": 1 if fp8 else 2}


def _same(kind: str) -> str:
    return kind


def _usual_groups(*shape: Array) -> Array:
    """Weights for attention: the usual shapes whole, other head widths half, windows, MHA and wide groups a fifth."""
    import numpy as np

    _, q_heads, kv_heads, head_dim, *_, window = shape
    group = q_heads / kv_heads
    usual = (window == 0) & (group > 1) & (group <= 16)
    return np.where(usual & (head_dim == 128), 1.0, np.where(usual & (head_dim != 192), 0.5, 0.2))


def _usual_matrices(*shape: Array) -> Array:
    """Weights for products: matrices of the sizes that models have whole, others three tenths."""
    import numpy as np

    _, n, k = shape
    least, most = np.minimum(n, k), np.maximum(n, k)
    return np.where((least >= 1024) & (most <= 32768), 1.0, 0.3)


FAMILIES = {
    "gemm": Family(_gemm, _same, _usual_matrices),
    "decode_attention": Family(_cached(DecodeAttention), _same, _usual_groups),
    "prefill_attention": Family(_prefill, _same, _usual_groups),
    "mla_decode": Family(_cached(MlaDecode), _same),
    "mla_prefill": Family(lambda kind, stack: (MlaPrefill, {}) if kind in ("bfloat16", "fp8") else None, _same),
    "allreduce": Family(lambda kind, stack: (AllReduce, {}), lambda kind: "bytes"),
}


def bound_us(op: str, kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array | None:
    """The datasheet bound max(FLOPs/peak, bytes/bandwidth, link bytes/link rate) of measured operations, in µs."""
    found = _BOUNDS.get(op)
    return None if found is None else found(kind, machine, shape)


def _roof(machine: "Machine", flops: Array, peak: float, moved: Array) -> Array:
    import numpy as np

    return np.maximum(flops / peak, moved / machine.memory)


def _element(kind: str) -> int:
    return 1 if "fp8" in kind else 2


def _gemm_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    m, n, k = shape
    size = _element(kind)
    return _roof(machine, 2 * m * n * k, machine.peak(size), (m + n) * k * size + 2 * m * n)


def _decode_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    import numpy as np

    batch, q_heads, kv_heads, head_dim, length, window = shape
    seen = np.where(window > 0, np.minimum(length, np.maximum(window, 1)), length)
    moved = 2 * batch * kv_heads * seen * head_dim * _element(kind) + 4 * batch * q_heads * head_dim
    return _roof(machine, 4 * batch * q_heads * seen * head_dim, machine.bf16, moved)


def _prefill_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    import numpy as np

    batch, q_heads, kv_heads, head_dim, length, window = shape
    limit = np.where(window > 0, np.minimum(length, np.maximum(window, 1)), length)
    pairs = batch * (limit * (limit + 1) / 2 + (length - limit) * limit)
    moved = batch * length * head_dim * (4 * q_heads + 2 * kv_heads * (2 + _element(kind.partition("/")[2])))
    return _roof(machine, 4 * pairs * q_heads * head_dim, machine.peak(_element(kind.partition("/")[0])), moved)


def _mla_decode_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    batch, heads, length = shape
    moved = batch * length * 576 * _element(kind) + 2 * batch * heads * 1088
    return _roof(machine, 2 * batch * heads * length * 1088, machine.bf16, moved)


def _mla_prefill_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    batch, heads, length = shape
    pairs = batch * length * (length + 1) / 2
    return _roof(machine, 2 * pairs * heads * 320, machine.bf16, 2 * batch * length * heads * 640)


def _allreduce_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    ranks, size = shape
    return 2 * (ranks - 1) / ranks * size / machine.link


def _moe_bound(kind: str, machine: "Machine", shape: tuple[Array, ...]) -> Array:
    """Three products per expert; of the experts, what uniform routing reaches: E·(1 − (1 − k/E)^T), spread over moe_ep."""
    import numpy as np

    tokens, hidden, inter, top, experts, tp, ep = shape
    reached = experts * (1 - (1 - np.minimum(top / experts, 1)) ** tokens) / ep
    flops = 6 * tokens * top * hidden * inter / tp / ep
    moved = 3 * reached * hidden * inter / tp * _element(kind) + 4 * tokens * hidden
    return _roof(machine, flops, machine.peak(_element(kind)), moved)


_BOUNDS: dict[str, Callable[[str, "Machine", tuple[Array, ...]], Array]] = {
    "gemm": _gemm_bound,
    "decode_attention": _decode_bound,
    "prefill_attention": _prefill_bound,
    "mla_decode": _mla_decode_bound,
    "mla_prefill": _mla_prefill_bound,
    "allreduce": _allreduce_bound,
    "moe": _moe_bound,
}
