"""Families: the list of kernel models for each measured operation.

A calibration has one kernel model for each family and kind of data (`bfloat16`, `fp8`, `fp8_block`,
`bfloat16/fp8` …). Experts have one model for each kind and kernel (`fp8_block/triton`,
`bfloat16/cutlass/ungated` …). A kind without its own model uses the nearest kind in `NEAREST`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

from kvcalc.arithmetic import maximum, minimum, where
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Settings
from kvcalc.storage.formats import table_rows
from kvcalc.timing.kernel_models.flash_attention import (
    DecodeAttention,
    FlashDecode,
    PrefillAttention,
)
from kvcalc.timing.kernel_models.fused_moe import (
    STORED_BYTES,
    AllReduce,
    Candidates,
    moe_candidates,
    moe_kind,
)
from kvcalc.timing.kernel_models.gemm import (
    CutlassGemm,
    Gemm,
    QuantizedGemm,
    ResidentGemm,
    ResidentQuantizedGemm,
    l2_keeps_weights,
)
from kvcalc.timing.kernel_models.kernel_model import Array, KernelModel, figures_of
from kvcalc.timing.kernel_models.mla import (
    HOST_RATIO,
    MlaDecode,
    MlaModule,
    MlaPrefill,
    SparseDecode,
)


def _subclasses(base: type[KernelModel]) -> list[type[KernelModel]]:
    """Return all classes that inherit from a class."""
    classes = []
    for subclass in base.__subclasses__():
        classes += [subclass, *_subclasses(subclass)]
    return classes


if TYPE_CHECKING:
    AnyKernelModel: TypeAlias = KernelModel
else:
    AnyKernelModel = Union[(*_subclasses(KernelModel),)]

# Maximum new tokens of a sequence that decode kernels process in one launch, with packed query
# rows.
MAX_DECODE_TOKENS = 16
# Kinds to use instead, the nearest first.
_NEAREST_TABLE = """
    fp8_block     fp8
    fp8           fp8_block fp8/fp8
    bfloat16/fp8  bfloat16/bfloat16
    fp8/fp8       bfloat16/fp8
    fp8/bfloat16  fp8/fp8 bfloat16/bfloat16
"""
NEAREST = {kind: nearest for kind, *nearest in table_rows(_NEAREST_TABLE)}
# Only the times show fp8 attention: TensorRT-LLM runs bf16 prefill over an fp8 cache in fp8.
FP8_PREFILL_STACK = "trtllm"
ABSORBED_PREFILL_STACK = "sglang"  # its latent prefill was measured in the absorbed form
# Maximum number of parts into which Triton kernels split a cache: SGLang's server_args
# (triton_attention_num_kv_splits), vLLM's triton_attn (NUM_PAR_SOFTMAX_SEGMENTS).
TRITON_PARTS = {"sglang": 8, "vllm": 16}
# Rules by which the usual kernels on Hopper split a cache: FlashAttention-3 without a bound, with
# vLLM's bound (flash_attn_max_num_splits_for_cuda_graph of vllm/config/attention.py), and
# TensorRT-LLM's XQA.
HOPPER_SPLITS: dict[str, Settings] = {
    "sglang": {"rule": "flash3"},
    "vllm": {"rule": "flash3_bounded", "parts": 32},
    "trtllm": {"rule": "xqa"},
}
# Kernels of attention that stacks use for some models or widths, in addition to their usual kernel.
SECOND_KERNELS = ("triton", "flashinfer")


class Family(NamedTuple):
    """How the measured rows of one kernel family, such as `gemm`, are fitted.

    A kind of data names the data types of a kernel's operands, such as `bfloat16/fp8`. Rows of one
    kind are fitted together.

    Attributes:
        candidates: Function of (kind of data, name of the software stack, GPU). It returns the
            classes of time models to try, each with its fixed fields; empty if there is none.
        kind: Function of the (data types, kernel name) of a row. It returns the kind of data; by
            default the data types.
        weight: Function of the sizes of the measured calls, such as m, n and k, one array [rows]
            each. It returns the weight of each row in the fit; by default 1.
    """

    candidates: Callable[[str, str, Gpu], Candidates]
    kind: Callable[[str, str], str] = lambda dtype, kernel: dtype
    weight: Callable[..., Array] = lambda first, *sizes: first * 0 + 1.0


def kind_of(op: str, dtype: str, kernel: str) -> str:
    """Return the kind of data of a measured row, such as `bfloat16` or `fp8_block/triton`.

    It consists of data types, and of the kernel if stacks have several for the operation. A
    calibration has one time model per operation and kind of data.

    Args:
        op: Name of the operation, such as `moe`. It decides whether the kernel is in the result.
        dtype: Data types in the row, such as `bfloat16/fp8`.
        kernel: Name of the kernel in the row, such as `triton`; '' if the row names none.
    """
    family = FAMILIES.get(op)
    return family.kind(dtype, kernel) if family else dtype


def _gemm(kind: str, stack: str, gpu: Gpu) -> Candidates:
    is_resident = l2_keeps_weights(figures_of(gpu))
    quantized = ResidentQuantizedGemm if is_resident else QuantizedGemm
    if kind == "bfloat16":
        return ((ResidentGemm if is_resident else Gemm, {}),)
    if kind == "nvfp4":
        return ((quantized, {"bytes": STORED_BYTES[kind]}),)
    return ((quantized, {}), (CutlassGemm, {})) if kind in ("fp8", "fp8_block") else ()


def _decode(kind: str, stack: str, gpu: Gpu) -> Candidates:
    data, _, kernel = kind.partition("/")
    if data not in ("bfloat16", "fp8"):
        return ()
    fields = {"bytes": 1 if data == "fp8" else 2}
    if not kernel and stack in HOPPER_SPLITS and gpu.architecture.startswith("Hopper"):
        return ((FlashDecode, fields | HOPPER_SPLITS[stack]),)
    if kernel == "triton" and stack in TRITON_PARTS:
        fields["parts"] = TRITON_PARTS[stack]
    return ((DecodeAttention, fields),)


def _mla_decode(kind: str, stack: str, gpu: Gpu) -> Candidates:
    sizes = {"bfloat16": 2, "fp8": 1}
    return ((MlaDecode, {"bytes": sizes[kind]}),) if kind in sizes else ()


def _prefill(kind: str, stack: str, gpu: Gpu) -> Candidates:
    computed, cached, *_ = [*kind.split("/"), ""]
    if not {computed, cached} <= {"bfloat16", "fp8"}:
        return ()
    is_fp8 = computed == "fp8" or (cached == "fp8" and stack == FP8_PREFILL_STACK)
    return ((PrefillAttention, {"compute": 1 if is_fp8 else 2}),)


def _mla_prefill(kind: str, stack: str, gpu: Gpu) -> Candidates:
    form = "absorbed" if stack == ABSORBED_PREFILL_STACK else "expanded"
    return ((MlaPrefill, {"attends": form}),) if kind in ("bfloat16", "fp8") else ()


def _sparse(kind: str, stack: str, gpu: Gpu) -> Candidates:
    _, _, stored = kind.partition("/")
    if stored not in ("bfloat16", "fp8", "fp8_block", "nvfp4"):
        return ()
    fields = {"bytes": STORED_BYTES[stored]}
    if stack == "sglang":  # beyond the batches of its CUDA graphs, times jump to the host's
        fields["graphs"] = 512 if gpu.architecture.startswith("Blackwell") else 256
    elif stack in ("vllm", "trtllm"):
        fields |= {"graphs": 0, "host": HOST_RATIO}
    return ((SparseDecode, fields),)


def _attention_kind(kind: str, kernel: str) -> str:
    """Return the kind of data, followed by the kernel if the stack also has a usual kernel."""
    if not kernel.startswith("vllm_flashinfer"):
        for name in SECOND_KERNELS:
            if f"_{name}_" in f"_{kernel}_":
                return f"{kind}/{name}"
    return kind


def _attention_weight(*shape: Array) -> Array:
    """Return weights for attention rows: 1 for common shapes, a half for other head widths, a tenth
    for windows, MHA and wide groups.

    Head width 192 has almost no weight, because stacks have a separate kernel for it.
    """
    _, q_heads, kv_heads, head_dim, *_, window = shape
    group = q_heads / kv_heads
    is_common = (window == 0) & (group > 1) & (group <= 16)
    return where(head_dim == 192, 0.03, where(is_common, where(head_dim == 128, 1.0, 0.5), 0.1))


def _prefill_weight(*shape: Array) -> Array:
    """Return weights for prefill rows. Prompts that a pass times with the decode model have a
    weight of 0.3."""
    return _attention_weight(*shape) * where(shape[4] <= MAX_DECODE_TOKENS, 0.3, 1.0)


def _gemm_weight(*shape: Array) -> Array:
    """Return weights for GEMM rows: 1 for matrix sizes of real models, 0.3 for others."""
    _, n, k = shape
    is_common = (minimum(n, k) >= 1024) & (maximum(n, k) <= 32768)
    return where(is_common, 1.0, 0.3)


FAMILIES = {
    "gemm": Family(_gemm, weight=_gemm_weight),
    "decode_attention": Family(_decode, _attention_kind, _attention_weight),
    "prefill_attention": Family(_prefill, _attention_kind, _prefill_weight),
    "mla_decode": Family(_mla_decode),
    "mla_prefill": Family(_mla_prefill),
    "allreduce": Family(
        lambda kind, stack, gpu: ((AllReduce, {}),), lambda dtype, kernel: "bytes"
    ),
    "moe": Family(lambda kind, stack, gpu: moe_candidates(kind, stack, gpu.name), moe_kind),
    "dsa_decode_module": Family(_sparse),
    "mla_decode_module": Family(lambda kind, stack, gpu: ((MlaModule, {}),)),
}
