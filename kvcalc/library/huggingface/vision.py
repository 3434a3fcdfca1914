"""The vision tower beside a language model in a config.json, of the types whose shapes were read.

w: the tower's width, m: of its MLP, L: its layers, p · p · t: pixels of a patch and frames, k · k: patches of one token, D: the
language model's width. Each function gives Vision: parameters with the projector, and the largest image of the type's own
preprocessor. Source: transformers' modelling and preprocessing code of each type.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.model.vision import Vision

QWEN_PATCHES = 65_536  # 12,845,056 pixels in patches of 14, as 16,777,216 in patches of 16
LLAMA_TILES = 17  # sixteen of an image, and the whole of it
Shape = Callable[[Config, int], Vision]


# Keys under which files describe what stands beside their language model, and what it is.
_BESIDE = {
    "vision tower": (
        "vision_config", "vision_cfg", "visual", "vision_tower", "mm_vision_tower", "vision_tower_cfg", "vision_tower_config",
        "vision_model_config", "vision_backbone_config", "vision_encoder_config", "vit_config", "image_config", "img_processor",
        "vision_backbone", "embd_layer",
    ),
    "audio tower": (
        "audio_config", "audio_cfg", "audio_encoder_config", "audio_model_config", "audio_processor", "mm_audio_tower",
        "audio_tower", "speech_config", "sound_config", "acoustic_tokenizer_config", "whisper_config",
    ),
    "talker": ("talker_config",),
    "vocoder": ("code2wav_config", "token2wav_config", "tts_config", "vocoder_config"),
}  # fmt: skip
_UNSAID = {"molmo": "vision tower"}  # types that have one without a key for it


def tower(data: Mapping[str, Any], where: str, width: int) -> tuple[Vision | None, tuple[str, ...]]:
    """The tower that a file describes beside a language model of that width, and a note on what of the file is not counted.

    Raises UserError naming a key that does not fit.
    """
    whole = data["thinker_config"] | data if isinstance(data.get("thinker_config"), dict) else data
    names = [name for name, keys in _BESIDE.items() if any(whole.get(key) not in (None, False, "", {}, []) for key in keys)]
    given, kind = data.get("vision_config"), str(data.get("model_type"))[:60]
    names = names or [_UNSAID[kind]] if kind in _UNSAID else names
    if not isinstance(given, dict) or not given or kind not in SHAPES:
        return None, (_left_out(names),) if names else ()
    shape, defaults = SHAPES[kind]
    c = Config(given, defaults, f"{where}: vision_config", {})
    c.outer = data
    found = shape(c, width)
    others = [name for name in names if name != "vision tower"]
    said = (
        f"its vision tower ({found.parameters:,} parameters) is not among its parameters: `fit` adds what an engine loads of it"
    )
    return found, (said, *([_left_out(others)] if others else []))


def _left_out(names: list[str]) -> str:
    *most, last = names
    parts = f"{', '.join(most)} and {last}" if most else last
    return f"the language model alone is counted, without the file's {parts}"


def _vision(c: Config, parameters: int, width: int, mlp: int, layers: int, patches: int, merged: int, frames: int = 1) -> Vision:
    values = c.size("in_channels", 3) * frames * c.size("patch_size") ** 2
    return Vision(parameters, width, mlp, layers, patches, max(1, patches // merged), values)


def _siglip(c: Config, width: int) -> Vision:
    """Convolution and MLP with biases, LayerNorms; the projector is one matrix and a norm (Gemma 3, modeling_gemma3.py)."""
    w, m, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    pixels, patches = 3 * c.size("patch_size") ** 2, (c.size("image_size") // c.size("patch_size")) ** 2
    block = 4 * w * w + 4 * w + 2 * w * m + m + w + 4 * w
    parameters = pixels * w + w + patches * w + layers * block + 2 * w + w * width + w
    tokens = c.outer.get("mm_tokens_per_image") or 256
    return _vision(c, parameters, w, m, layers, patches, max(1, patches // tokens) if isinstance(tokens, int) else 1)


def _qwen2(c: Config, width: int) -> Vision:
    """qwen2_vl: an MLP of mlp_ratio · w with biases, LayerNorms; a merger of two matrices (modeling_qwen2_vl.py)."""
    w, out, layers = c.size("embed_dim"), c.size("hidden_size"), c.size("depth")
    m = w * c.size("mlp_ratio")
    block = 4 * w * w + 4 * w + 2 * w * m + m + w + 4 * w
    return _qwen(c, w, m, layers, block, _merger(c, w, out, 2 * w))


def _qwen25(c: Config, width: int) -> Vision:
    """qwen2_5_vl: a gated MLP with biases, RMS norms."""
    w, m, out, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("out_hidden_size"), c.size("depth")
    block = 4 * w * w + 4 * w + 3 * w * m + 2 * m + w + 2 * w
    return _qwen(c, w, m, layers, block, _merger(c, w, out, w))


def _qwen3(c: Config, width: int) -> Vision:
    """qwen3_vl and later: learned positions, a plain MLP with biases; a merger, and one more for each deepstack level."""
    w, m, out, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("out_hidden_size"), c.size("depth")
    block = 4 * w * w + 4 * w + 2 * w * m + m + w + 4 * w
    levels, k2 = c.get("deepstack_visual_indexes", []), c.size("spatial_merge_size") ** 2
    deep = len(levels) * _merger(c, w, out, 2 * k2 * w) if isinstance(levels, list) else 0
    return _qwen(c, w, m, layers, block, w + c.size("num_position_embeddings") * w + _merger(c, w, out, 2 * w) + deep)


def _merger(c: Config, w: int, out: int, norm: int) -> int:
    """A norm, and two matrices with biases from k · k patches to a token."""
    wide = w * c.size("spatial_merge_size") ** 2
    return norm + wide * wide + wide + wide * out + out


def _qwen(c: Config, w: int, m: int, layers: int, block: int, beside: int) -> Vision:
    frames = c.size("temporal_patch_size")
    pixels = c.size("in_channels", 3) * frames * c.size("patch_size") ** 2
    return _vision(c, pixels * w + layers * block + beside, w, m, layers, QWEN_PATCHES, c.size("spatial_merge_size") ** 2, frames)


def _pixtral(c: Config, width: int) -> Vision:
    """No biases, a gated MLP, RMS norms; the projector merges k · k patches and has two matrices (modeling_mistral3.py)."""
    w, m, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    outer = Config(c.outer, {"spatial_merge_size": 2}, c.where, {})
    merged, bias = outer.size("spatial_merge_size") ** 2, outer.flag("multimodal_projector_bias")
    block = 4 * w * w + 3 * w * m + 2 * w
    projector = w + merged * w * w + w * width + width * width + 2 * width * bias
    patches = (c.size("image_size") // c.size("patch_size")) ** 2
    return _vision(c, 3 * c.size("patch_size") ** 2 * w + w + layers * block + projector, w, m, layers, patches, merged)


def _llama4(c: Config, width: int) -> Vision:
    """A class token and learned positions, biases, LayerNorms; an adapter of two matrices, and one to the model's width."""
    w, m, layers = c.size("hidden_size"), c.size("intermediate_size"), c.size("num_hidden_layers")
    patches = (c.size("image_size") // c.size("patch_size")) ** 2
    block = 4 * w * w + 4 * w + 2 * w * m + m + w + 4 * w
    between = c.size("projector_input_dim")
    adapter = m * between + between * c.size("projector_output_dim") + c.size("vision_output_dim") * width
    parameters = 3 * c.size("patch_size") ** 2 * w + w + (patches + 1) * w + layers * block + 4 * w + adapter
    return _vision(c, parameters, w, m, layers, LLAMA_TILES * patches, round(1 / c.number("pixel_shuffle_ratio") ** 2))


_QWEN2 = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN3 = {
    **_QWEN2, "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "out_hidden_size": 3584, "patch_size": 16,
    "num_position_embeddings": 2304,
}  # fmt: skip
SHAPES: dict[str, tuple[Shape, Mapping[str, Any]]] = {
    "gemma3": (
        _siglip, {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16},
    ),
    "qwen2_vl": (
        _qwen2,
        {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "mlp_ratio": 4, **_QWEN2},
    ),
    "qwen2_5_vl": (
        _qwen25,
        {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "out_hidden_size": 3584, **_QWEN2},
    ),
    "qwen3_vl": (_qwen3, _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}),
    "qwen3_vl_moe": (_qwen3, _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}),
    "qwen3_5": (_qwen3, _QWEN3), "qwen3_5_moe": (_qwen3, _QWEN3), "qwen4_exp": (_qwen3, _QWEN3),
    "mistral3": (
        _pixtral, {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 1024, "patch_size": 16},
    ),
    "llama4": (
        _llama4,
        {"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "image_size": 448, "patch_size": 14,
         "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680, "pixel_shuffle_ratio": 0.5},
    ),
}  # fmt: skip
