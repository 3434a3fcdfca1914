"""Storage formats of quantisation tools that few checkpoints use, one function a tool, each with the code that it follows.

A setting whose bytes are not known gives a name that says so, and that no format has.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.library.huggingface.config import Config


def hqq(q: Config) -> str:
    """HQQ: packed values, a scale and a zero point per group (hqq/core/quantize.py). Three bits go ten to an int32."""
    outer = q.nested("quant_config")
    weights = outer.nested("weight_quant_params")
    bits, group = weights.size("nbits", 0, least=0), weights.size("group_size", 0, least=0)
    if bits not in (8, 4, 2, 1) or not group or outer.get("scale_quant_params") or outer.get("zero_quant_params"):
        return "hqq (not one setting of 8, 4, 2 or 1 bits with plain scales)"
    return f"affine{bits}_g{group}"


def aqlm(q: Config) -> str:
    """AQLM: a code per group and codebook, the codebooks, a scale per output (aqlm/inference.py)."""
    books, bits = q.size("num_codebooks", 1), q.size("nbits_per_codebook", 16)
    return f"aqlm_{books}x{bits}_g{q.size('in_group_size', 8)}x{q.size('out_group_size', 1)}"


def bitnet(q: Config) -> str:
    """BitNet: four ternary weights a byte and a scale (transformers' integrations/bitnet.py); trained online they are whole."""
    if q.flag("use_rms_norm"):
        return "bitnet (with norms of its own)"
    online = q.word("linear_class") == "autobitlinear" and q.word("quantization_mode") == "online"
    return "bf16" if online else "bitnet"


def torchao(q: Config) -> str:
    """torchao's int4 (a scale and a zero point per group, in tiles or plain) and float8; its int8 keeps other zero points
    from version to version (torchao/quantization/quantize_/workflows)."""
    given = q.get("quant_type")
    if q.flag("include_input_output_embeddings"):
        return "torchao (embeddings too)"
    if isinstance(given, str):
        name, version, settings = given[:60], 1, q.table("quant_type_kwargs")
    else:
        config = q.nested("quant_type").nested("default")
        name, version, settings = config.word("_type")[:60], config.size("_version", 1), config.table("_data")
    if name in ("int4_weight_only", "Int4WeightOnlyConfig"):
        return _torchao_int4(settings, version, f"torchao ({name})")
    if name == "Float8WeightOnlyConfig" and version >= 2:
        return "fp8_weight_only_fp32"
    if name == "Float8DynamicActivationFloat8WeightConfig":
        return "fp8_per_channel" if "PerRow" in str(settings.get("granularity"))[:1000] else "fp8"
    return f"torchao ({name or 'several settings'})"


def _torchao_int4(settings: Mapping[str, Any], version: int, unknown: str) -> str:
    group = settings.get("group_size", 128)
    if isinstance(group, bool) or not isinstance(group, int) or not 1 <= group <= 99_999:
        return unknown
    layout = str(settings.get("layout") or settings.get("int4_packing_format"))[:1000]
    plain = version >= 2 and ("plain" in layout or layout == "None") and "int32" not in layout
    tiled = "tile" in layout.lower() if layout != "None" else version == 1
    return f"affine4_g{group}" if plain else f"tiles4_g{group}" if tiled else unknown


def quark(q: Config) -> str:
    """Quark: fp8 with an fp32 scale per tensor or channel, OCP mxfp4 (quark/torch/export/nn/modules/realquantizer.py)."""
    weight = q.nested("global_quant_config").get("weight")
    if q.get("layer_quant_config") or q.get("layer_type_quant_config") or not isinstance(weight, dict):
        return "quark (layers that differ)"
    dtype, scheme, scale = (str(weight.get(key))[:40] for key in ("dtype", "qscheme", "scale_format"))
    if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return "fp8" if scheme == "per_tensor" else "fp8_per_channel"
    if dtype == "fp4" and scheme == "per_group" and weight.get("group_size") == 32 and scale == "e8m0":
        return "mxfp4" if q.nested("global_quant_config").table("input_tensors") else "mxfp4_weight_only"
    return f"quark ({dtype} {scheme})"


def mlx(q: Config) -> str:
    """MLX: packed values, a scale and a bias per group, or a format of small floats (mlx-lm's utils.py).

    Its nvfp4 has a scale for 16 values, and none for the matrix (mlx/nn/layers/quantized.py).
    """
    mode = q.word("mode", "affine")[:20]
    if mode != "affine":
        return {"mxfp4": "mxfp4_weight_only", "mxfp8": "mxfp8", "nvfp4": "nvfp4_plain"}.get(mode, f"mlx ({mode})")
    return f"affine{q.size('bits', 4)}_g{q.size('group_size', 64)}"


def own_bits(c: Config) -> dict[str, Any]:
    """ChatGLM's own quantisation, which its config states in keys of the model; empty where there is none."""
    bits = c.size("quantization_bit", 0, least=0) if c.file.get("model_type") == "chatglm" else 0
    return {"quant_method": "chatglm", "bits": bits, "embeddings": c.flag("quantization_embeddings")} if bits else {}


def chatglm(q: Config) -> str:
    """ChatGLM: packed values and a 16-bit scale per output (the quantization.py released with it)."""
    plain = q.size("bits") in (4, 8) and not q.flag("embeddings")
    return f"int{q.size('bits')}_g0" if plain else "chatglm (embeddings too)"


TOOLS: dict[str, Callable[[Config], str]] = {
    "hqq": hqq, "aqlm": aqlm, "bitnet": bitnet, "torchao": torchao, "quark": quark,
    "chatglm": chatglm,
}  # fmt: skip
