"""Which law times which measured operation: the one list of families.

A calibration holds, for every family, one law for each kind of data (`bfloat16`, `fp8`, `fp8_block`, `bfloat16/fp8` …), of
experts one for each kind and kernel (`fp8_block/triton`, `bfloat16/cutlass/ungated` …). Where a kind has no law of its own,
the nearest kind that `NEAREST` names stands in for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.timing.allreduce import AllReduce
from kvcalc.timing.cutlass import CutlassGemm
from kvcalc.timing.decode_attention import DecodeAttention
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.experts import moe_kind, moe_laws
from kvcalc.timing.figures import figures_of
from kvcalc.timing.flash_decode import FlashDecode
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Array, Law
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.mla_module import MlaModule
from kvcalc.timing.mla_prefill import MlaPrefill
from kvcalc.timing.moe import Moe
from kvcalc.timing.prefill_attention import PrefillAttention
from kvcalc.timing.resident import ResidentGemm, ResidentQuantizedGemm, keeps_weights
from kvcalc.timing.sparse_decode import HOST, SparseDecode

AnyLaw = (
    Gemm | QuantizedGemm | CutlassGemm | DecodeAttention | PrefillAttention | MlaDecode | MlaPrefill | AllReduce | Elementwise
    | Moe | SparseDecode | MlaModule | ResidentGemm | ResidentQuantizedGemm | FlashDecode
)  # fmt: skip

# fp8 attention is given away by its time alone: TensorRT-LLM runs bf16 prefill over an fp8 cache in fp8.
FP8_PREFILL_STACKS = ("trtllm",)
NVFP4 = 0.5625  # bytes of an element: four bits, and a scale of one byte for 16
ABSORBED_PREFILL_STACKS = ("sglang",)  # latent prefill measured in the absorbed form
NEAREST = {
    "fp8_block": ("fp8",),
    "fp8": ("fp8_block", "fp8/fp8"),
    "bfloat16/fp8": ("bfloat16/bfloat16",),
    "fp8/fp8": ("bfloat16/fp8",),
    "fp8/bfloat16": ("fp8/fp8", "bfloat16/bfloat16"),
}
# Parts into which their Triton kernels split a walk at most: SGLang's server_args (triton_attention_num_kv_splits), vLLM's
# triton_attn (NUM_PAR_SOFTMAX_SEGMENTS).
PARTS = {"sglang": 8, "vllm": 16}
# By what rule their usual kernels on Hopper split a walk: FlashAttention-3 left to itself, with vLLM's bound
# (flash_attn_max_num_splits_for_cuda_graph of vllm/config/attention.py), and TensorRT-LLM's XQA.
HOPPER_SPLITS: dict[str, dict[str, Any]] = {
    "sglang": {"rule": "flash3"}, "vllm": {"rule": "flash3_bounded", "parts": 32}, "trtllm": {"rule": "xqa"},
}  # fmt: skip
# The most sequences in CUDA graphs where modules were measured: beyond them SGLang's times jump to the host's, others' do not.
GRAPHS: dict[str, Callable[[Gpu], int]] = {
    "sglang": lambda gpu: 512 if gpu.architecture.startswith("Blackwell") else 256,
    "vllm": lambda gpu: 0,
    "trtllm": lambda gpu: 0,
}
MOST_DECODE_TOKENS = 16  # new tokens of a sequence that decode kernels take at once, their query rows packed
BESIDE = ("triton", "flashinfer")  # kernels of attention that stacks take for some models or widths, beside their usual one
Candidates = tuple[tuple[type[Law], dict[str, Any]], ...]


class Family(NamedTuple):
    """How a family's rows are fitted.

    laws: what could be the law of a kind under a stack on a GPU, with its given fields; none: no law. kind: of rows, from
    their data types and kernel. weight: of each row.
    """

    laws: Callable[[str, str, Gpu], Candidates]
    kind: Callable[[str, str], str]
    weight: Callable[..., Array] | None = None


_GEMMS: dict[str, tuple[type[Law], ...]] = {
    "bfloat16": (Gemm,), "fp8": (QuantizedGemm, CutlassGemm), "fp8_block": (QuantizedGemm, CutlassGemm),
    "nvfp4": (QuantizedGemm,),
}  # fmt: skip


_RESIDENT: dict[type[Law], type[Law]] = {Gemm: ResidentGemm, QuantizedGemm: ResidentQuantizedGemm}


def _gemm(kind: str, stack: str, gpu: Gpu) -> Candidates:
    given = {"bytes": NVFP4} if kind == "nvfp4" else {}
    resident = keeps_weights(figures_of(gpu))
    return tuple((_RESIDENT.get(law, law) if resident else law, given) for law in _GEMMS.get(kind, ()))


def _bytes(kind: str) -> int:
    return 1 if kind.endswith("fp8") else 2


def _decode(kind: str, stack: str, gpu: Gpu) -> Candidates:
    data, _, kernel = kind.partition("/")
    if data not in ("bfloat16", "fp8"):
        return ()
    if not kernel and stack in HOPPER_SPLITS and gpu.architecture.startswith("Hopper"):
        return ((FlashDecode, {"bytes": _bytes(data), **HOPPER_SPLITS[stack]}),)
    split = {"parts": PARTS[stack]} if kernel == "triton" and stack in PARTS else {}
    return ((DecodeAttention, {"bytes": _bytes(data), **split}),)


def _mla_decode(kind: str, stack: str, gpu: Gpu) -> Candidates:
    return ((MlaDecode, {"bytes": _bytes(kind)}),) if kind in ("bfloat16", "fp8") else ()


def _prefill(kind: str, stack: str, gpu: Gpu) -> Candidates:
    attends, cached, *_ = [*kind.split("/"), ""]
    if not {attends, cached} <= {"bfloat16", "fp8"}:
        return ()
    fp8 = attends == "fp8" or (cached == "fp8" and stack in FP8_PREFILL_STACKS)
    return ((PrefillAttention, {"compute": 1 if fp8 else 2}),)


def _mla_prefill(kind: str, stack: str, gpu: Gpu) -> Candidates:
    if kind not in ("bfloat16", "fp8"):
        return ()
    return ((MlaPrefill, {"attends": "absorbed" if stack in ABSORBED_PREFILL_STACKS else "expanded"}),)


def _sparse(kind: str, stack: str, gpu: Gpu) -> Candidates:
    _, _, stored = kind.partition("/")
    bytes_ = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": NVFP4}.get(stored)
    given: dict[str, Any] = {"graphs": GRAPHS[stack](gpu)} if stack in GRAPHS else {}
    if given.get("graphs") == 0:
        given["host"] = HOST
    return ((SparseDecode, {"bytes": bytes_, **given}),) if bytes_ else ()


def _same(kind: str, kernel: str) -> str:
    return kind


def _attention_kind(kind: str, kernel: str) -> str:
    """The kind of data, with the kernel behind it where that is one that a stack takes beside its own."""
    beside = next((name for name in BESIDE if kernel == name or f"_{name}_" in f"_{kernel}_"), "")
    return f"{kind}/{beside}" if beside and not kernel.startswith("vllm_flashinfer") else kind


def _usual_groups(*shape: Array) -> Array:
    """Weights for attention: the usual shapes whole, other head widths half, windows, MHA and wide groups a tenth.

    Heads of 192, for which stacks have a kernel apart, hardly count.
    """
    import numpy as np

    _, q_heads, kv_heads, head_dim, *_, window = shape
    group = q_heads / kv_heads
    usual = (window == 0) & (group > 1) & (group <= 16)
    return np.where(head_dim == 192, 0.03, np.where(usual, np.where(head_dim == 128, 1.0, 0.5), 0.1))


def _prompts(*shape: Array) -> Array:
    """The same for prefill; prompts that a pass times by the law of decode count three tenths of that."""
    import numpy as np

    return _usual_groups(*shape) * np.where(shape[4] <= MOST_DECODE_TOKENS, 0.3, 1.0)


def _usual_matrices(*shape: Array) -> Array:
    """Weights for products: matrices of the sizes that models have whole, others three tenths."""
    import numpy as np

    _, n, k = shape
    least, most = np.minimum(n, k), np.maximum(n, k)
    return np.where((least >= 1024) & (most <= 32768), 1.0, 0.3)


FAMILIES = {
    "gemm": Family(_gemm, _same, _usual_matrices),
    "decode_attention": Family(_decode, _attention_kind, _usual_groups),
    "prefill_attention": Family(_prefill, _attention_kind, _prompts),
    "mla_decode": Family(_mla_decode, _same),
    "mla_prefill": Family(_mla_prefill, _same),
    "allreduce": Family(lambda kind, stack, gpu: ((AllReduce, {}),), lambda kind, kernel: "bytes"),
    "moe": Family(lambda kind, stack, gpu: moe_laws(kind, stack, gpu.name), moe_kind),
    "dsa_decode_module": Family(_sparse, _same),
    "mla_decode_module": Family(lambda kind, stack, gpu: ((MlaModule, {}),), _same),
}
