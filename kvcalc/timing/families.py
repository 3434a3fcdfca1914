"""Which law times which measured operation: the one list of families, and what each operation costs at least.

A calibration holds, for every family, one law for each kind of data (`bfloat16`, `fp8`, `fp8_block`, `bfloat16/fp8` …).
Where a kind has no law of its own, the nearest kind that `NEAREST` names stands in for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvcalc.layers.cost import Cost
from kvcalc.timing.allreduce import AllReduce
from kvcalc.timing.decode_attention import DecodeAttention
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Array, Law
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.mla_prefill import MlaPrefill
from kvcalc.timing.prefill_attention import PrefillAttention

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


def cost_of(op: str, kind: str, shape: tuple[Array, ...]) -> tuple[Cost, str] | None:
    """What measured operations cost at least, and the dtype of their products; None for an operation that is not known."""
    found = _COSTS.get(op)
    return None if found is None else found(kind, *shape)


def _cost(flops: Array, moved: Array) -> Cost:
    return Cost(flops=flops, activation_bytes=moved)


def _element(kind: str) -> int:
    return 1 if "fp8" in kind else 2


def _products(kind: str) -> str:
    return "fp8" if "fp8" in kind else "bf16"


def _limit(length: Array, window: Array) -> Array:
    """Tokens that a query sees at most: the window where there is one."""
    import numpy as np

    return np.where(window > 0, np.minimum(length, np.maximum(window, 1)), length)


def _gemm_cost(kind: str, m: Array, n: Array, k: Array) -> tuple[Cost, str]:
    return _cost(2 * m * n * k, (m + n) * k * _element(kind) + 2 * m * n), _products(kind)


def _decode_cost(
    kind: str, batch: Array, q_heads: Array, kv_heads: Array, head_dim: Array, length: Array, window: Array
) -> tuple[Cost, str]:
    seen = _limit(length, window)
    moved = 2 * batch * kv_heads * seen * head_dim * _element(kind) + 4 * batch * q_heads * head_dim
    return _cost(4 * batch * q_heads * seen * head_dim, moved), "bf16"


def _prefill_cost(
    kind: str, batch: Array, q_heads: Array, kv_heads: Array, head_dim: Array, length: Array, window: Array
) -> tuple[Cost, str]:
    limit = _limit(length, window)
    pairs = batch * (limit * (limit + 1) / 2 + (length - limit) * limit)
    moved = batch * length * head_dim * (4 * q_heads + 2 * kv_heads * (2 + _element(kind.partition("/")[2])))
    return _cost(4 * pairs * q_heads * head_dim, moved), _products(kind.partition("/")[0])


def _mla_decode_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    moved = batch * length * 576 * _element(kind) + 2 * batch * heads * 1088
    return _cost(2 * batch * heads * length * 1088, moved), "bf16"


def _mla_prefill_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    pairs = batch * length * (length + 1) / 2
    return _cost(2 * pairs * heads * 320, 2 * batch * length * heads * 640), "bf16"


def _allreduce_cost(kind: str, ranks: Array, size: Array) -> tuple[Cost, str]:
    return Cost(network_bytes=2 * (ranks - 1) / ranks * size), ""


def _moe_cost(
    kind: str, tokens: Array, hidden: Array, inter: Array, top: Array, experts: Array, tp: Array, ep: Array
) -> tuple[Cost, str]:
    """Three products per expert; of the experts, what uniform routing reaches: E·(1 − (1 − k/E)^T), spread over moe_ep."""
    import numpy as np

    reached = experts * (1 - (1 - np.minimum(top / experts, 1)) ** tokens) / ep
    moved = 3 * reached * hidden * inter / tp * _element(kind) + 4 * tokens * hidden
    return _cost(6 * tokens * top * hidden * inter / tp / ep, moved), _products(kind)


_COSTS: dict[str, Callable[..., tuple[Cost, str]]] = {
    "gemm": _gemm_cost,
    "decode_attention": _decode_cost,
    "prefill_attention": _prefill_cost,
    "mla_decode": _mla_decode_cost,
    "mla_prefill": _mla_prefill_cost,
    "allreduce": _allreduce_cost,
    "moe": _moe_cost,
}
