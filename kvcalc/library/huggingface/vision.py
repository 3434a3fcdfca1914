"""Read the vision tower that a config.json describes next to its language model.

In the functions, w is the width of the tower and m the width of its MLP. A function returns the
parameters of tower and projector, and the largest image that the type's preprocessor makes. Source:
transformers' modelling and preprocessing code of each type. `vision.yaml` has the default values.
"""

from collections.abc import Callable, Mapping
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface.config import Config
from kvcalc.model.model import Vision
from kvcalc.records import JsonObject

QWEN_PATCHES = 65_536  # 12,845,056 pixels in patches of 14, as 16,777,216 in patches of 16
GLM_TOKENS = 6144  # of 9,633,792 pixels, which two equal frames of an image share
LLAMA_TILES = 17  # sixteen of an image, and the whole of it


# Parts of a file next to its language model, and their keys.
_OTHER_PARTS = {
    "vision tower": (
        "vision_config vision_cfg visual vision_tower mm_vision_tower vision_tower_cfg"
        " vision_tower_config vision_model_config vision_backbone_config vision_encoder_config"
        " vit_config image_config img_processor vision_backbone embd_layer"
    ),
    "audio tower": (
        "audio_config audio_cfg audio_encoder_config audio_model_config audio_processor"
        " mm_audio_tower audio_tower speech_config sound_config acoustic_tokenizer_config"
        " whisper_config"
    ),
    "talker": "talker_config",
    "vocoder": "code2wav_config token2wav_config tts_config vocoder_config",
}
_TOWERS_WITHOUT_KEY = {"molmo"}  # types that have a vision tower, but no key for it


def tower(
    data: Mapping[str, Any], file_name: str, width: int
) -> tuple[Vision | None, tuple[str, ...]]:
    """Return the tower that a file describes, and notes on parts that are not counted.

    Args:
        data: The whole file.
        file_name: Name of the file, for errors.
        width: Width of the language model.

    Raises:
        UserError: The value of a key is invalid.
    """
    thinker = data.get("thinker_config")
    keys = {**thinker, **data} if isinstance(thinker, dict) else data
    model_type = str(data.get("model_type"))[:60]
    parts = [
        part
        for part, names in _OTHER_PARTS.items()
        if any(keys.get(name) not in (None, False, "", {}, []) for name in names.split())
    ]
    if not parts and model_type in _TOWERS_WITHOUT_KEY:
        parts = ["vision tower"]
    section = data.get("vision_config")
    if not isinstance(section, dict) or not section or model_type not in tower_defaults():
        return None, _left_out(parts)
    defaults = tower_defaults()[model_type]
    c = Config(section, f"{file_name}: vision_config", defaults)
    c.outer = data
    vision = SHAPES[defaults["shape"]](c, width)
    note = (
        f"its vision tower ({vision.parameters:,} parameters) is not among its parameters: "
        "`fit` adds the part that an engine loads"
    )
    return vision, (note, *_left_out([part for part in parts if part != "vision tower"]))


def _left_out(parts: list[str]) -> tuple[str, ...]:
    """Return a list with a note on parts that are not counted; empty if there are none."""
    if not parts:
        return ()
    names = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return (f"only the language model is counted, without the file's {names}",)


def _block(w: int, m: int, matrices: int = 2, norms: int = 4, has_bias: bool = True) -> int:
    """Return the parameters of a layer: attention, an MLP of two or three matrices, and norms."""
    bias = 5 * w + (matrices - 1) * m if has_bias else 0
    return 4 * w * w + matrices * w * m + bias + norms * w


def _vision(
    c: Config,
    parameters: int,
    w: int,
    m: int,
    layers: int,
    patches: int,
    merged: int,
    is_scaled: bool = False,
) -> Vision:
    """Return the vision tower with these sizes.

    Args:
        merged: Number of patches that become one token.
        is_scaled: Whether larger images have more tokens.
    """
    frames, side = c.size("temporal_patch_size", 1), c.size("patch_size")
    values = c.size("in_channels", 3) * frames * side**2
    return Vision(
        parameters=parameters + values * w,
        width=w,
        mlp=m,
        layers=layers,
        patches=patches,
        tokens=max(1, patches // merged),
        values=values,
        token_side=side * isqrt(merged) if is_scaled else 0,
        frames=frames,
    )


def _sizes(c: Config) -> tuple[int, int, int, int]:
    """Return the width, the width of the MLP, the layers, and the patches of an image."""
    patches_per_side = c.size("image_size") // c.size("patch_size")
    sizes = (c.size(f) for f in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    w, m, layers = sizes
    return w, m, layers, patches_per_side**2


def _siglip(c: Config, width: int) -> Vision:
    """Return the tower of gemma3: with biases and LayerNorms. The projector is one matrix and a
    norm.

    Source: modeling_gemma3.py.
    """
    w, m, layers, patches = _sizes(c)
    parameters = w + patches * w + layers * _block(w, m) + 2 * w + w * width + w
    tokens = c.outer.get("mm_tokens_per_image") or 256
    merged = max(1, patches // tokens) if isinstance(tokens, int) else 1
    return _vision(c, parameters, w, m, layers, patches, merged)


def _qwen2(c: Config, width: int) -> Vision:
    """Return the tower of qwen2_vl: an MLP of width mlp_ratio · w with biases, LayerNorms, and a
    merger."""
    w = c.size("embed_dim")
    m = w * c.size("mlp_ratio")
    return _qwen(c, w, m, _block(w, m), _merger(c, w, c.size("hidden_size"), 2 * w))


def _qwen25(c: Config, width: int) -> Vision:
    """Return the tower of qwen2_5_vl: a gated MLP with biases, RMS norms."""
    w, m = c.size("hidden_size"), c.size("intermediate_size")
    merger = _merger(c, w, c.size("out_hidden_size"), w)
    return _qwen(c, w, m, _block(w, m, matrices=3, norms=2), merger)


def _qwen3(c: Config, width: int) -> Vision:
    """Return the tower of qwen3_vl: learned positions, a merger, and one more merger per deepstack
    level."""
    w, m = c.size("hidden_size"), c.size("intermediate_size")
    out = c.size("out_hidden_size")
    levels = c.get("deepstack_visual_indexes", [])
    wide = w * c.size("spatial_merge_size") ** 2
    deep = len(levels) * _merger(c, w, out, 2 * wide) if isinstance(levels, list) else 0
    positions = w + c.size("num_position_embeddings") * w
    return _qwen(c, w, m, _block(w, m), positions + _merger(c, w, out, 2 * w) + deep)


def _merger(c: Config, w: int, out: int, norm: int) -> int:
    """Return the parameters of a merger: a norm, and two matrices with biases whose input is k · k
    patches."""
    wide = w * c.size("spatial_merge_size") ** 2
    return norm + wide * wide + wide + wide * out + out


def _qwen(c: Config, w: int, m: int, block: int, other_parameters: int) -> Vision:
    layers, merged = c.size("depth"), c.size("spatial_merge_size") ** 2
    parameters = layers * block + other_parameters
    return _vision(c, parameters, w, m, layers, QWEN_PATCHES, merged, is_scaled=True)


def _glm4v(c: Config, width: int) -> Vision:
    """Return the tower of glm4v: an MLP as wide as the output, a gated merger after a convolution
    over merged patches.

    The largest image is the default of its image processor. Source: modeling_glm4v.py.
    """
    w, m, out = (c.size(key) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    merged = c.size("spatial_merge_size") ** 2
    block = _block(w, out, matrices=3, norms=2, has_bias=c.flag("attention_bias"))
    merger = out * (out + 2) + 3 * out * m + merged * w * out + out
    outside = w * (c.size("image_size") // c.size("patch_size")) ** 2 + 3 * w
    parameters = c.size("depth") * block + merger + outside
    layers, patches = c.size("depth"), GLM_TOKENS * merged
    return _vision(c, parameters, w, out, layers, patches, merged, is_scaled=True)


def _gemma4(c: Config, width: int) -> Vision:
    """Return the tower of gemma4: RMS norms, a norm of queries and keys, two tables of positions.

    Source: modeling_gemma4.py.
    """
    w, m, layers = (
        c.size(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    merged = c.size("pooling_kernel_size") ** 2
    block = _block(w, m, matrices=3, has_bias=False) + 2 * c.size("head_dim")
    positions = 2 * c.size("position_embedding_size") * w
    parameters = layers * block + positions + w * width + 2 * w * c.flag("standardize")
    tokens = Config(c.outer, c.file_name).size("vision_soft_tokens_per_image", 280)
    vision = _vision(c, parameters, w, m, layers, tokens * merged, merged)
    return replace(vision, sharded=False)


def _pixtral(c: Config, width: int) -> Vision:
    """Return the tower of mistral3: no biases, a gated MLP, RMS norms; two matrices after merged
    patches.

    Source: modeling_mistral3.py.
    """
    w, m, layers, patches = _sizes(c)
    outer = Config(c.outer, c.file_name, {"spatial_merge_size": 2})
    merged = outer.size("spatial_merge_size") ** 2
    bias = outer.flag("multimodal_projector_bias")
    projector = w + merged * w * w + w * width + width * width + 2 * width * bias
    block = _block(w, m, matrices=3, norms=2, has_bias=False)
    parameters = w + layers * block + projector
    return _vision(c, parameters, w, m, layers, patches, merged, is_scaled=True)


def _llama4(c: Config, width: int) -> Vision:
    """Return the tower of llama4: a class token, positions, biases, LayerNorms; three matrices."""
    w, m, layers, patches = _sizes(c)
    between = c.size("projector_input_dim")
    adapter = m * between + between * c.size("projector_output_dim")
    adapter += c.size("vision_output_dim") * width
    parameters = w + (patches + 1) * w + layers * _block(w, m) + 4 * w + adapter
    merged = round(1 / c.number("pixel_shuffle_ratio") ** 2)
    return _vision(c, parameters, w, m, layers, LLAMA_TILES * patches, merged)


SHAPES: dict[str, Callable[[Config, int], Vision]] = {
    "siglip": _siglip,
    "qwen2": _qwen2,
    "qwen2_5": _qwen25,
    "qwen3": _qwen3,
    "glm4v": _glm4v,
    "gemma4": _gemma4,
    "pixtral": _pixtral,
    "llama4": _llama4,
}


@cache
def tower_defaults() -> dict[str, JsonObject]:
    """Return the shape and the default values of the tower of each model type."""
    path = Path(__file__).with_suffix(".yaml")
    entries, _ = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    return {name: entry for names, entry in entries.items() for name in names.split()}
