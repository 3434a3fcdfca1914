"""Families: the list of kernel models for each measured operation.

A calibration has one kernel model for each family and kind of data (`bfloat16`, `fp8`, `fp8_block`,
`bfloat16/fp8` …). Experts have one model for each kind and kernel (`fp8_block/triton`,
`bfloat16/cutlass/ungated` …). A kind without its own model uses the nearest kind in `NEAREST`.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Settings
from kvcalc.timing.kernel_models.flash_attention import (
    DecodeAttention,
    FlashDecode,
    PrefillAttention,
)
from kvcalc.timing.kernel_models.fused_moe import (
    AllReduce,
    FusedMoe,
    moe_kind,
    moe_laws,
)
from kvcalc.timing.kernel_models.gemm import (
    CutlassGemm,
    Gemm,
    QuantizedGemm,
    ResidentGemm,
    ResidentQuantizedGemm,
    keeps_weights,
)
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    Elementwise,
    KernelModel,
    figures_of,
)
from kvcalc.timing.kernel_models.mla import (
    HOST,
    MlaDecode,
    MlaModule,
    MlaPrefill,
    SparseDecode,
)

AnyLaw = (
    Gemm
    | QuantizedGemm
    | CutlassGemm
    | DecodeAttention
    | PrefillAttention
    | MlaDecode
    | MlaPrefill
    | AllReduce
    | Elementwise
    | FusedMoe
    | SparseDecode
    | MlaModule
    | ResidentGemm
    | ResidentQuantizedGemm
    | FlashDecode
)

# fp8 attention is given away by its time alone: TensorRT-LLM runs bf16 prefill over an fp8 cache in
# fp8.
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
# Parts into which their Triton kernels split a walk at most: SGLang's server_args
# (triton_attention_num_kv_splits), vLLM's triton_attn (NUM_PAR_SOFTMAX_SEGMENTS).
PARTS = {"sglang": 8, "vllm": 16}
# By what rule their usual kernels on Hopper split a walk: FlashAttention-3 left to itself, with
# vLLM's bound (flash_attn_max_num_splits_for_cuda_graph of vllm/config/attention.py), and
# TensorRT-LLM's XQA.
HOPPER_SPLITS: dict[str, Settings] = {
    "sglang": {"rule": "flash3"},
    "vllm": {"rule": "flash3_bounded", "parts": 32},
    "trtllm": {"rule": "xqa"},
}
# The most sequences in CUDA graphs where modules were measured: beyond them SGLang's times jump to
# the host's, others' do not.
GRAPHS: dict[str, Callable[[Gpu], int]] = {
    "sglang": lambda gpu: 512 if gpu.architecture.startswith("Blackwell") else 256,
    "vllm": lambda gpu: 0,
    "trtllm": lambda gpu: 0,
}
# new tokens of a sequence that decode kernels take at once, their query rows packed
MOST_DECODE_TOKENS = 16
# kernels of attention that stacks take for some models or widths, beside their usual one
BESIDE = ("triton", "flashinfer")
Candidates = tuple[tuple[type[KernelModel], Settings], ...]


class Family(NamedTuple):
    """Rule that fits the rows of a family.

    Attributes:
        laws: Candidate kernel models of a kind under a stack on a GPU, with their fixed fields;
            empty if there is no model.
        kind: Function that returns the kind of rows from their data types and kernel.
        weight: Function that returns the weight of each row in the fit.
    """

    laws: Callable[[str, str, Gpu], Candidates]
    kind: Callable[[str, str], str]
    weight: Callable[..., Array] | None = None


_GEMMS: dict[str, tuple[type[KernelModel], ...]] = {
    "bfloat16": (Gemm,),
    "fp8": (QuantizedGemm, CutlassGemm),
    "fp8_block": (QuantizedGemm, CutlassGemm),
    "nvfp4": (QuantizedGemm,),
}


_RESIDENT: dict[type[KernelModel], type[KernelModel]] = {
    Gemm: ResidentGemm,
    QuantizedGemm: ResidentQuantizedGemm,
}


def _gemm(kind: str, stack: str, gpu: Gpu) -> Candidates:
    given = {"bytes": NVFP4} if kind == "nvfp4" else {}
    resident = keeps_weights(figures_of(gpu))
    return tuple(
        (_RESIDENT.get(law, law) if resident else law, given) for law in _GEMMS.get(kind, ())
    )


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
    return (
        (
            MlaPrefill,
            {"attends": "absorbed" if stack in ABSORBED_PREFILL_STACKS else "expanded"},
        ),
    )


def _sparse(kind: str, stack: str, gpu: Gpu) -> Candidates:
    _, _, stored = kind.partition("/")
    bytes_ = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": NVFP4}.get(stored)
    given: Settings = {"graphs": GRAPHS[stack](gpu)} if stack in GRAPHS else {}
    if given.get("graphs") == 0:
        given["host"] = HOST
    return ((SparseDecode, {"bytes": bytes_, **given}),) if bytes_ else ()


def _same(kind: str, kernel: str) -> str:
    return kind


def _attention_kind(kind: str, kernel: str) -> str:
    """Return the kind of data, followed by the kernel if the stack also has a default kernel."""
    beside = next(
        (name for name in BESIDE if kernel == name or f"_{name}_" in f"_{kernel}_"), ""
    )
    return f"{kind}/{beside}" if beside and not kernel.startswith("vllm_flashinfer") else kind


def _usual_groups(*shape: Array) -> Array:
    """Return weights for attention rows: 1 for common shapes, a half for other head widths, a tenth
    for windows, MHA and wide groups.

    Head width 192 has almost no weight, because stacks have a separate kernel for it.
    """
    import numpy as np

    _, q_heads, kv_heads, head_dim, *_, window = shape
    group = q_heads / kv_heads
    usual = (window == 0) & (group > 1) & (group <= 16)
    return np.where(
        head_dim == 192, 0.03, np.where(usual, np.where(head_dim == 128, 1.0, 0.5), 0.1)
    )


def _prompts(*shape: Array) -> Array:
    """Return weights for prefill rows. Prompts that a pass times with the decode model have a
    weight of 0.3."""
    import numpy as np

    return _usual_groups(*shape) * np.where(shape[4] <= MOST_DECODE_TOKENS, 0.3, 1.0)


def _usual_matrices(*shape: Array) -> Array:
    """Return weights for GEMM rows: 1 for matrix sizes of real models, 0.3 for others."""
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
    "allreduce": Family(
        lambda kind, stack, gpu: ((AllReduce, {}),), lambda kind, kernel: "bytes"
    ),
    "moe": Family(lambda kind, stack, gpu: moe_laws(kind, stack, gpu.name), moe_kind),
    "dsa_decode_module": Family(_sparse, _same),
    "mla_decode_module": Family(lambda kind, stack, gpu: ((MlaModule, {}),), _same),
}
