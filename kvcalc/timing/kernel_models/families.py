"""Families: the list of kernel models for each measured operation.

A calibration has one kernel model for each family and kind of data (`bfloat16`, `fp8`, `fp8_block`,
`bfloat16/fp8` …). Experts have one model for each kind and kernel (`fp8_block/triton`,
`bfloat16/cutlass/ungated` …). A kind without its own model uses the nearest kind in `NEAREST`.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.gpu import Gpu
from kvcalc.library import presets as catalog
from kvcalc.library.files import parse_yaml, read_text
from kvcalc.library.load import load_gpu
from kvcalc.question.deployment_options import DATASHEET
from kvcalc.records import Settings
from kvcalc.timing.kernel_models.flash_attention import (
    DecodeAttention,
    FlashDecode,
    PrefillAttention,
)
from kvcalc.timing.kernel_models.fused_moe import (
    STORED_BYTES,
    AllReduce,
    Candidates,
    FusedMoe,
    moe_candidates,
    moe_kind,
)
from kvcalc.timing.kernel_models.gemm import (
    CutlassGemm,
    Gemm,
    QuantizedGemm,
    ResidentGemm,
    ResidentQuantizedGemm,
    keeps_weights,
)
from kvcalc.timing.kernel_models.kernel_model import Array, Elementwise, KernelModel, figures_of
from kvcalc.timing.kernel_models.mla import (
    HOST_RATIO,
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

# Maximum new tokens of a sequence that decode kernels process in one launch, with packed query
# rows.
MAX_DECODE_TOKENS = 16
# Kinds to use instead, the nearest first.
NEAREST = {
    "fp8_block": ("fp8",),
    "fp8": ("fp8_block", "fp8/fp8"),
    "bfloat16/fp8": ("bfloat16/bfloat16",),
    "fp8/fp8": ("bfloat16/fp8",),
    "fp8/bfloat16": ("fp8/fp8", "bfloat16/bfloat16"),
}
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
    """Rule that fits the rows of a family.

    Attributes:
        candidates: Function that returns the candidate kernel models of a kind under a stack on a
            GPU, with their fixed fields; empty if there is no model.
        kind: Function that returns the kind of rows from their data types and kernel.
        weight: Function that returns the weight of each row in the fit.
    """

    candidates: Callable[[str, str, Gpu], Candidates]
    kind: Callable[[str, str], str] = lambda dtype, kernel: dtype
    weight: Callable[..., Array] | None = None


def kind_of(op: str, dtype: str, kernel: str) -> str:
    """Return the kind of data that selects the kernel model of rows of an operation."""
    family = FAMILIES.get(op)
    return family.kind(dtype, kernel) if family else dtype


def _gemm(kind: str, stack: str, gpu: Gpu) -> Candidates:
    is_resident = keeps_weights(figures_of(gpu))
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
    fields: Settings = {"bytes": 1 if data == "fp8" else 2}
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
    fields: Settings = {"bytes": STORED_BYTES[stored]}
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
    import numpy as np

    _, q_heads, kv_heads, head_dim, *_, window = shape
    group = q_heads / kv_heads
    is_common = (window == 0) & (group > 1) & (group <= 16)
    weight = np.where(is_common, np.where(head_dim == 128, 1.0, 0.5), 0.1)
    return np.where(head_dim == 192, 0.03, weight)


def _prefill_weight(*shape: Array) -> Array:
    """Return weights for prefill rows. Prompts that a pass times with the decode model have a
    weight of 0.3."""
    import numpy as np

    return _attention_weight(*shape) * np.where(shape[4] <= MAX_DECODE_TOKENS, 0.3, 1.0)


def _gemm_weight(*shape: Array) -> Array:
    """Return weights for GEMM rows: 1 for matrix sizes of real models, 0.3 for others."""
    import numpy as np

    _, n, k = shape
    is_common = (np.minimum(n, k) >= 1024) & (np.maximum(n, k) <= 32768)
    return np.where(is_common, 1.0, 0.3)


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


MAX_FILE_BYTES = 1 << 20
CALIBRATED, SCALED, BOUND = "calibrated", "scaled", "bound"  # values of `time_basis`
Error = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Us = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class HostOverheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Microseconds that an engine adds to the kernels of a pass.

    Attributes:
        glue_us: Per layer: launches, small kernels and gaps.
        skew_us: Per layer and doubling of the ranks of an all-reduce, which wait for the slowest.
        step_us: Per pass.
        sequence_us: Per sequence: scheduling, sampling, detokenising and sending.
        prompts: Factor on the kernels of a pass with prompts, which run at sustained power.
        launch_us: Minimum per layer of a pass with prompts. The host launches each kernel, without
            a CUDA graph.
    """

    glue_us: Us = 0.0
    skew_us: Us = 0.0
    step_us: Us = 0.0
    sequence_us: Us = 0.0
    prompts: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.0
    launch_us: Us = 0.0

    def fixed_s(self, layers: int, ranks: int) -> float:
        """Return the seconds of a pass that do not depend on the batch."""
        return (layers * (self.glue_us + self.skew_us * math.log2(ranks)) + self.step_us) / 1e6


class Former(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Overheads of releases before a change of the engine's host loop.

    Attributes:
        versions: Prefixes of these releases' versions.
    """

    versions: tuple[str, ...]
    dense: HostOverheads
    mixture: HostOverheads


class EngineOverheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's overheads and its scheduling.

    Attributes:
        dense: Overheads of dense models.
        mixture: Overheads of mixtures of experts.
        runs: Number of measured servers of the fit.
        decodes_wait: Whether decoding waits for prompts.
        whole: Whether a pass takes only whole prompts.
        reserve: Share of an answer for which a request reserves cache at its start.
        path_us: Microseconds that front end and network add to a first token.
        path_token_us: Microseconds that they add per prompt token.
        former: Overheads of older releases.
    """

    stack: str
    dense: HostOverheads
    mixture: HostOverheads
    origin: str = ""
    runs: int = 0
    decodes_wait: bool = False
    whole: bool = False
    reserve: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    path_us: Us = 0.0
    path_token_us: Us = 0.0
    former: Former | None = None

    def terms(self, mixture: bool) -> HostOverheads:
        """Return the overheads of a dense model or of a mixture of experts."""
        return self.mixture if mixture else self.dense

    def of_version(self, version: str) -> "EngineOverheads":
        """Return the engine with the overheads of a release, or of the latest release if no older
        one is known."""
        if self.former and version and version.startswith(self.former.versions):
            return msgspec.structs.replace(
                self, dense=self.former.dense, mixture=self.former.mixture
            )
        return self


def engine_of(stack: str) -> EngineOverheads | None:
    """Return the overheads of an engine, or None. Raises UserError for an invalid file."""
    path = catalog.preset_file(stack, "engines")
    return _read_engine(path, path.stat().st_mtime_ns) if path else None


@cache
def _read_engine(path: Path, modified_ns: int) -> EngineOverheads:
    data, lines = parse_yaml(read_text(path, MAX_FILE_BYTES), str(path))
    return catalog.build(data, EngineOverheads, str(path), lines)


ServedFigure = Literal[
    "dense", "mixture", "dense_ttft", "mixture_ttft", "dense_throughput", "mixture_throughput"
]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fitted kernel model. Errors are exp(|ln(predicted/measured)|) − 1.

    Attributes:
        law: The kernel model with its parameters.
        rows: Number of measured rows of the fit.
        median_abs_error: Median on held-out rows.
        p90_abs_error: 90th percentile on held-out rows.
        fitted_median_abs_error: Median on the rows of the fit.
        fitted_p90_abs_error: 90th percentile on the rows of the fit.
        note: Warning for times of this model, if its rows are not the stack's usual speed.
    """

    law: AnyLaw
    rows: Count
    median_abs_error: Error
    p90_abs_error: Error
    fitted_median_abs_error: Error = 0.0
    fitted_p90_abs_error: Error = 0.0
    note: str = ""


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of data without a kernel model, so that times are bounds: the best fit's held-out
    errors, and the reason."""

    rows: Count
    median_abs_error: Error
    p90_abs_error: Error
    why: str


class Validated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The error of a figure on `rows` measured servers that no kernel model was fitted on."""

    rows: Count
    median_abs_error: Error
    p90_abs_error: Error


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The kernel models of one GPU and stack. The fields are the keys of the file.

    Attributes:
        laws: Kernel models by family, then by kind of data.
        glue_us: Overhead per layer in microseconds, if the stack is not a known engine.
        engine: Overheads to use instead of the overheads of the engine that the stack names.
        refused: Kinds of data without a kernel model, by family.
        validation: Errors on measured servers: time per output token of `dense` models and of a
            `mixture` of experts, mean time to first token (`_ttft`), tokens/s (`_throughput`).
    """

    gpu: str
    stack: str
    laws: dict[str, dict[str, Entry]]
    version: str = ""
    origin: str = ""
    commit: str = ""
    license: str = ""
    date: str = ""
    rows: int = 0
    glue_us: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 8.0
    engine: EngineOverheads | None = None
    validation: dict[ServedFigure, Validated] = {}
    refused: dict[str, dict[str, Refused]] = {}

    def terms(self, mixture: bool) -> HostOverheads:
        """Return the engine's overhead in the passes of a dense model or of a mixture."""
        engine = self.engine or engine_of(self.stack)
        return engine.terms(mixture) if engine else HostOverheads(glue_us=self.glue_us)

    def law(self, family: str, kind: str) -> KernelModel | None:
        """Return the kernel model of a family for a kind of data or the nearest kind, or None."""
        entry = self.entry(family, kind)
        return entry.law if entry else None

    def entry(self, family: str, kind: str) -> Entry | None:
        """Return the kernel model of `law` with its errors, or None.

        If a kind was measured with several kernels, the one with the most rows counts.
        """
        if kind in self.refused.get(family, {}):
            return None
        kinds = self.laws.get(family, {})
        for name in (kind, *NEAREST.get(kind, ()), kind.rpartition("/")[0]):
            if name in kinds:
                return kinds[name]
            kernels = [kinds[key] for key in kinds if name and key.startswith(f"{name}/")]
            if kernels:
                return max(kernels, key=lambda entry: entry.rows)
        return None

    def basis_on(self, gpu: Gpu) -> str:
        """Return whether times on `gpu` are calibrated, or scaled from another GPU."""
        return CALIBRATED if self.gpu == gpu.name else SCALED

    @property
    def problem(self) -> tuple[str, str]:
        """The key of the first invalid entry and its problem, or two empty texts."""
        for family, kinds in self.laws.items():
            for kind, entry in kinds.items():
                form = str(entry.law.__struct_config__.tag)
                is_variant = family in ("gemm", "decode_attention") and form.startswith(family)
                if form != family and not is_variant:
                    return f"laws.{family}.{kind}", f"holds a law of form {form!r}"
                for name, limits in entry.law.ranges().items():
                    if not limits.minimum <= getattr(entry.law, name) <= limits.maximum:
                        text = f"is not from {limits.minimum:g} to {limits.maximum:g}"
                        return f"laws.{family}.{kind}.law.{name}", text
        return "", ""


def stacks_of(gpu: Gpu) -> list[str]:
    """Return the stacks for which a GPU has calibrations."""
    return sorted(catalog.preset_files(f"calibrations/{gpu.name}"))


def find_calibration(gpu: Gpu, stack: str) -> Calibration | None:
    """Return the calibration of a GPU with a stack, or None. Raises UserError for an invalid
    file."""
    path = catalog.preset_files(f"calibrations/{gpu.name}").get(stack)
    return _read_calibration(path, path.stat().st_mtime_ns) if path else None


def load_calibration(
    gpu: Gpu, stack: str = "", source: Gpu | None = None, engine: str = "vllm"
) -> Calibration | None:
    """Return the calibration of times on `gpu`, or None for datasheet bounds.

    Args:
        gpu: The GPU.
        stack: A calibration's name or YAML file, `datasheet` for none, '' for the engine's own.
        source: Another GPU. Its calibration is scaled by datasheet figures.
        engine: The engine. Without a calibration for this GPU, times are bounds.

    Raises:
        UserError: There is no such calibration, or its file is broken.
    """
    if stack == DATASHEET:
        return None
    if stack.lower().endswith((".yaml", ".yml")):
        return read_calibration(Path(stack))
    source = source or gpu
    calibration = find_calibration(source, stack or engine)
    if calibration is None and stack:
        stacks = [*stacks_of(source), DATASHEET]
        hint = nearest(stack, stacks) or f"Known: {', '.join(stacks)}"
        raise UserError(f"no calibration of {source.name} called {stack!r}", hint=hint)
    return calibration


@cache
def _read_calibration(path: Path, modified_ns: int) -> Calibration:
    return read_calibration(path)


def read_calibration(path: Path) -> Calibration:
    """Return the checked calibration in a YAML file. Raises UserError with file, line and key."""
    data, lines = parse_yaml(read_text(path, MAX_FILE_BYTES), str(path))
    calibration = catalog.build(data, Calibration, str(path), lines)
    key, problem = calibration.problem
    if problem:
        raise catalog.located(problem, key, str(path), lines)
    return calibration


def to_yaml(calibration: Calibration) -> str:
    """Return the text of a preset file."""
    import yaml

    data: dict[str, Any] = msgspec.to_builtins(calibration)
    laws, refused = data.pop("laws"), data.pop("refused")
    for kinds in laws.values():
        for entry in kinds.values():
            if not entry["note"]:
                del entry["note"]
    filled = {key: value for key, value in data.items() if value not in ({}, None)}
    more = {"refused": refused} if refused else {}
    return yaml.safe_dump(
        {**filled, "laws": laws, **more},
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=None,  # one line for each kernel model
    )


def preset_path(gpu: Gpu, stack: str) -> Path:
    """Return the path of a user's calibration. Raises UserError for an unusable name."""
    for noun, name in (("stack", stack), ("GPU", gpu.name)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name == DATASHEET:
            raise UserError(
                f"{noun} {name!r} is not a usable file name",
                hint="Use letters, digits, - _ . only, and not 'datasheet'",
            )
    folders = catalog.user_folders()
    if not folders:
        raise UserError("there is no folder for your presets", hint="Name the file")
    return folders[0] / "calibrations" / gpu.name / f"{stack}.yaml"


def all_stacks() -> list[str]:
    """Return all stacks for which any GPU has a calibration."""
    folders = [*catalog.user_folders(), catalog.shipped_folder()]
    return sorted(
        {path.stem for folder in folders for path in (folder / "calibrations").glob("*/*.yaml")}
    )


def gpu_named(name: str) -> Gpu:
    """Return the GPU preset that a measured row names. Raises UserError if there is none."""
    catalog.find(name, "gpus")
    return load_gpu(name)


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU preset that a measured row names, or None."""
    try:
        return gpu_named(name) if name else None
    except UserError:
        return None
