"""Which law times which measured operation: the one list of families.

A calibration holds, for every family, one law for each kind of data (`bfloat16`, `fp8`, `fp8_block`, `bfloat16/fp8` …), of
experts one for each kind and kernel (`fp8_block/triton`, `bfloat16/cutlass/ungated` …). Where a kind has no law of its own,
the nearest kind that `NEAREST` names stands in for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvcalc.timing.allreduce import AllReduce
from kvcalc.timing.cutlass import CutlassGemm
from kvcalc.timing.decode_attention import DecodeAttention
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.experts import moe_kind, moe_laws
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Array, Law
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.mla_prefill import MlaPrefill
from kvcalc.timing.moe import Moe
from kvcalc.timing.prefill_attention import PrefillAttention
from kvcalc.timing.sparse_decode import SparseDecode

AnyLaw = (
    Gemm | QuantizedGemm | CutlassGemm | DecodeAttention | PrefillAttention | MlaDecode | MlaPrefill | AllReduce | Elementwise
    | Moe | SparseDecode
)  # fmt: skip

# fp8 attention is given away by its time alone: TensorRT-LLM runs bf16 prefill over an fp8 cache in fp8.
FP8_PREFILL_STACKS = ("trtllm",)
ABSORBED_PREFILL_STACKS = ("sglang",)  # latent prefill measured in the absorbed form
NEAREST = {
    "fp8_block": ("fp8",),
    "fp8": ("fp8_block", "fp8/fp8"),
    "bfloat16/fp8": ("bfloat16/bfloat16",),
    "fp8/fp8": ("bfloat16/fp8",),
    "fp8/bfloat16": ("fp8/fp8", "bfloat16/bfloat16"),
}
Candidates = tuple[tuple[type[Law], dict[str, Any]], ...]


class Family(NamedTuple):
    """How a family's rows are fitted.

    laws: what could be the law of a kind under a stack on a GPU, with its given fields; none: no law. kind: of rows, from
    their data types and kernel. weight: of each row.
    """

    laws: Callable[[str, str, str], Candidates]
    kind: Callable[[str, str], str]
    weight: Callable[..., Array] | None = None


_GEMMS: dict[str, tuple[type[Law], ...]] = {
    "bfloat16": (Gemm,), "fp8": (QuantizedGemm, CutlassGemm), "fp8_block": (QuantizedGemm, CutlassGemm),
}  # fmt: skip


def _gemm(kind: str, stack: str, gpu: str) -> Candidates:
    return tuple((law, {}) for law in _GEMMS.get(kind, ()))


def _bytes(kind: str) -> int:
    return 1 if kind.endswith("fp8") else 2


def _cached(law: type[Law]) -> Callable[[str, str, str], Candidates]:
    return lambda kind, stack, gpu: ((law, {"bytes": _bytes(kind)}),) if kind in ("bfloat16", "fp8") else ()


def _prefill(kind: str, stack: str, gpu: str) -> Candidates:
    attends, _, cached = kind.partition("/")
    if not {attends, cached} <= {"bfloat16", "fp8"}:
        return ()
    fp8 = attends == "fp8" or (cached == "fp8" and stack in FP8_PREFILL_STACKS)
    return ((PrefillAttention, {"compute": 1 if fp8 else 2}),)


def _mla_prefill(kind: str, stack: str, gpu: str) -> Candidates:
    if kind not in ("bfloat16", "fp8"):
        return ()
    return ((MlaPrefill, {"attends": "absorbed" if stack in ABSORBED_PREFILL_STACKS else "expanded"}),)


def _sparse(kind: str, stack: str, gpu: str) -> Candidates:
    _, _, stored = kind.partition("/")
    bytes_ = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0}.get(stored)
    return ((SparseDecode, {"bytes": bytes_}),) if bytes_ else ()


def _same(kind: str, kernel: str) -> str:
    return kind


def _usual_groups(*shape: Array) -> Array:
    """Weights for attention: the usual shapes whole, other head widths half, windows, MHA and wide groups a tenth.

    Heads of 192, for which stacks have a kernel apart, hardly count.
    """
    import numpy as np

    _, q_heads, kv_heads, head_dim, *_, window = shape
    group = q_heads / kv_heads
    usual = (window == 0) & (group > 1) & (group <= 16)
    return np.where(head_dim == 192, 0.03, np.where(usual, np.where(head_dim == 128, 1.0, 0.5), 0.1))


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
    "mla_prefill": Family(_mla_prefill, _same),
    "allreduce": Family(lambda kind, stack, gpu: ((AllReduce, {}),), lambda kind, kernel: "bytes"),
    "moe": Family(moe_laws, moe_kind),
    "dsa_decode_module": Family(_sparse, _same),
}
