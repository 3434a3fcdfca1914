"""Experts by format and kernel: which cell of the MoE law rows belong to, and which one times the experts of a pass.

A cell is `format/kernel`, with `/ungated` behind where experts have no gate: a stack's kernels for gated and ungated experts
are not the same.
"""

from typing import Any

from kvcalc.layers.cost import ExpertsShape
from kvcalc.storage.quantization import family
from kvcalc.timing.law import Law
from kvcalc.timing.moe import Moe
from kvcalc.timing.tuned import tuned_sizes

# Bytes of a stored weight, scales included, by the format that rows name: 16-bit scales per 32 for int4, one byte for mxfp4.
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int4_wo": 0.5625, "w4a16_mxfp4": 0.53125, "nvfp4": 0.5625}
KERNELS = ("triton", "oai", "marlin", "flashinfer", "cutlass")
TILES = {"oai": "openai", "marlin": "marlin", "flashinfer": "menu", "cutlass": "menu"}
# SGLang's Triton kernel has no 4-bit form before Blackwell: it expands mxfp4 to bf16 when it loads the weights.
EXPANDED = (("sglang", "w4a16_mxfp4/triton"),)

# Cells whose rows are known not to be the stack's own speed: what is said beside every time that rests on them.
_UNTUNED = "experts measured without FlashInfer's autotuning: a tuned engine is faster"
NOTES = {("vllm", "fp8/flashinfer"): _UNTUNED, ("sglang", "bfloat16/flashinfer/ungated"): _UNTUNED}

# Which format of rows meets weights as checkpoints store them; the first that a calibration has counts.
STORED = {
    "bf16": ("bfloat16",), "fp16": ("bfloat16",), "fp8": ("fp8", "fp8_block"), "fp8_per_channel": ("fp8", "fp8_block"),
    "fp8_block128": ("fp8_block", "fp8"), "int4": ("int4_wo",), "awq": ("int4_wo",), "gptq": ("int4_wo",),
    "mxfp4": ("w4a16_mxfp4",), "mxfp4_weight_only": ("w4a16_mxfp4",), "nvfp4": ("nvfp4",),
}  # fmt: skip


def moe_kind(dtype: str, kernel: str) -> str:
    """The cell of rows of this data type and kernel family, or kernel as recorded."""
    words = kernel.replace("_", " ").split()
    name = next((k for k in KERNELS if any(k in word for word in words)), "")
    bare = "ungated" in words or "nongated" in words
    return "/".join(part for part in (dtype, name, "ungated" if bare else "") if part)


def moe_laws(kind: str, stack: str, gpu: str) -> tuple[tuple[type[Law], dict[str, Any]], ...]:
    """The law of a cell with its given fields; none for a format that no row is of."""
    stored, *rest = kind.split("/")
    if stored not in BYTES:
        return ()
    expanded = (stack, kind) in EXPANDED
    given: dict[str, Any] = {
        "bytes": 2.0 if expanded else BYTES[stored],
        "compute": 1.0 if stored.startswith("fp8") else 0.5 if stored == "nvfp4" else 2.0,
    }
    given["gated"] = "ungated" not in rest
    if "triton" in rest:
        block = "_block" if stored == "fp8_block" else ""
        given["tuned"] = tuned_sizes(stack, gpu, "bfloat16" if expanded else stored)
        given |= {"tiles": f"{stack}{block}"} if stack in ("vllm", "sglang") else {}
    elif rest and rest[0] in TILES:
        given["tiles"] = TILES[rest[0]]
    return ((Moe, given),)


def cells_of(shape: ExpertsShape) -> tuple[str, ...]:
    """The cells that may time these experts, best first.

    Where a stack has two kernels for a format, it takes the permuting one (FlashInfer, CUTLASS) once experts are spread over
    ranks. Experts with biases are what OpenAI's mxfp4 kernels were made for; the others go through Marlin.
    """
    permuting, others = ("flashinfer", "cutlass"), ("triton", "oai", "marlin")
    order: tuple[str, ...] = (*permuting, *others) if shape.ranks > 1 else ("triton", "oai", "marlin", "cutlass", "flashinfer")
    if shape.format.startswith("mxfp4"):
        order = ("oai", "triton") if shape.bias else ("marlin",)
    kernels = (*(f"/{kernel}" for kernel in order), "")
    tail = "" if shape.gated else "/ungated"
    name = "int4" if shape.format.startswith("int4_g") else shape.format  # in groups of any size
    return tuple(f"{stored}{kernel}{tail}" for stored in STORED.get(family(name), ()) for kernel in kernels)
