"""Read the vision tower that a config.json describes next to its language model.

w: the tower's width, m: width of its MLP, L: its layers, p · p · t: pixels of a patch and frames, k
· k:
patches of one token, D: the language model's width. Each function gives Vision: parameters with the
projector, and the largest image of the type's own preprocessor. Source: transformers' modelling and
preprocessing code of each type.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.model.model import Vision

QWEN_PATCHES = 65_536  # 12,845,056 pixels in patches of 14, as 16,777,216 in patches of 16
LLAMA_TILES = 17  # sixteen of an image, and the whole of it
Shape = Callable[[Config, int], Vision]


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
_UNSAID = {"molmo": "vision tower"}  # types that have one without a key for it


def tower(
    data: Mapping[str, Any], file_name: str, width: int
) -> tuple[Vision | None, tuple[str, ...]]:
    """Return the tower that a file describes, and a note about parts that are not counted.

    Raises UserError naming a key that does not fit.
    """
    file_keys = (
        data["thinker_config"] | data if isinstance(data.get("thinker_config"), dict) else data
    )
    names = [
        name
        for name, keys in _OTHER_PARTS.items()
        if any(file_keys.get(key) not in (None, False, "", {}, []) for key in keys.split())
    ]
    vision_keys, kind = data.get("vision_config"), str(data.get("model_type"))[:60]
    names = names or [_UNSAID[kind]] if kind in _UNSAID else names
    if not isinstance(vision_keys, dict) or not vision_keys or kind not in SHAPES:
        return None, (_left_out(names),) if names else ()
    shape, defaults = SHAPES[kind]
    c = Config(vision_keys, f"{file_name}: vision_config", defaults)
    c.outer = data
    result = shape(c, width)
    others = [name for name in names if name != "vision tower"]
    note = (
        f"its vision tower ({result.parameters:,} parameters) is not among its parameters: "
        "`fit` adds the part that an engine loads"
    )
    return result, (note, *([_left_out(others)] if others else []))


def _left_out(names: list[str]) -> str:
    *first_names, last = names
    parts = f"{', '.join(first_names)} and {last}" if first_names else last
    return f"only the language model is counted, without the file's {parts}"


def _block(w: int, m: int, matrices: int = 2, norms: int = 4, has_bias: bool = True) -> int:
    """Return the parameters of a layer: attention, an MLP of two or three matrices, and norms."""
    bias = 5 * w + (matrices - 1) * m if has_bias else 0
    return 4 * w * w + matrices * w * m + bias + norms * w


def _vision(
    c: Config, parameters: int, w: int, m: int, layers: int, patches: int, merged: int
) -> Vision:
    pixels = (
        c.size("in_channels", 3) * c.size("temporal_patch_size", 1) * c.size("patch_size") ** 2
    )
    total = parameters + pixels * w
    return Vision(total, w, m, layers, patches, max(1, patches // merged), pixels)


def _sizes(c: Config) -> tuple[int, int, int, int]:
    """Return the width, the width of the MLP, the layers, and the patches of an image."""
    w, m, layers = (
        c.size("hidden_size"),
        c.size("intermediate_size"),
        c.size("num_hidden_layers"),
    )
    return w, m, layers, (c.size("image_size") // c.size("patch_size")) ** 2


def _siglip(c: Config, width: int) -> Vision:
    """Return gemma3's: biases, LayerNorms; the projector is one matrix and a norm.

    Source: modeling_gemma3.py.
    """
    w, m, layers, patches = _sizes(c)
    parameters = w + patches * w + layers * _block(w, m) + 2 * w + w * width + w
    tokens = c.outer.get("mm_tokens_per_image") or 256
    merged = max(1, patches // tokens) if isinstance(tokens, int) else 1
    return _vision(c, parameters, w, m, layers, patches, merged)


def _qwen2(c: Config, width: int) -> Vision:
    """Return qwen2_vl's: an MLP of mlp_ratio · w with biases, LayerNorms; a merger."""
    w = c.size("embed_dim")
    m = w * c.size("mlp_ratio")
    return _qwen(c, w, m, _block(w, m), _merger(c, w, c.size("hidden_size"), 2 * w))


def _qwen25(c: Config, width: int) -> Vision:
    """Return qwen2_5_vl's: a gated MLP with biases, RMS norms."""
    w, m = c.size("hidden_size"), c.size("intermediate_size")
    merger = _merger(c, w, c.size("out_hidden_size"), w)
    return _qwen(c, w, m, _block(w, m, matrices=3, norms=2), merger)


def _qwen3(c: Config, width: int) -> Vision:
    """Return qwen3_vl's: learned positions, a plain MLP; a merger, and one per deepstack level."""
    w, m, out = (
        c.size("hidden_size"),
        c.size("intermediate_size"),
        c.size("out_hidden_size"),
    )
    levels, wide = (
        c.get("deepstack_visual_indexes", []),
        w * c.size("spatial_merge_size") ** 2,
    )
    deep = len(levels) * _merger(c, w, out, 2 * wide) if isinstance(levels, list) else 0
    positions = w + c.size("num_position_embeddings") * w
    return _qwen(c, w, m, _block(w, m), positions + _merger(c, w, out, 2 * w) + deep)


def _merger(c: Config, w: int, out: int, norm: int) -> int:
    """Return the parameters of a norm, and of two matrices with biases from k · k patches."""
    wide = w * c.size("spatial_merge_size") ** 2
    return norm + wide * wide + wide + wide * out + out


def _qwen(c: Config, w: int, m: int, block: int, other_parameters: int) -> Vision:
    layers, merged = c.size("depth"), c.size("spatial_merge_size") ** 2
    return _vision(c, layers * block + other_parameters, w, m, layers, QWEN_PATCHES, merged)


def _pixtral(c: Config, width: int) -> Vision:
    """Return mistral3's: no biases, a gated MLP, RMS norms; two matrices after merged patches.

    Source: modeling_mistral3.py.
    """
    w, m, layers, patches = _sizes(c)
    outer = Config(c.outer, c.file_name, {"spatial_merge_size": 2})
    merged, bias = (
        outer.size("spatial_merge_size") ** 2,
        outer.flag("multimodal_projector_bias"),
    )
    projector = w + merged * w * w + w * width + width * width + 2 * width * bias
    block = _block(w, m, matrices=3, norms=2, has_bias=False)
    return _vision(c, w + layers * block + projector, w, m, layers, patches, merged)


def _llama4(c: Config, width: int) -> Vision:
    """Return llama4's: a class token and positions, biases, LayerNorms; three further matrices."""
    w, m, layers, patches = _sizes(c)
    between = c.size("projector_input_dim")
    adapter = m * between + between * c.size("projector_output_dim")
    adapter += c.size("vision_output_dim") * width
    parameters = w + (patches + 1) * w + layers * _block(w, m) + 4 * w + adapter
    merged = round(1 / c.number("pixel_shuffle_ratio") ** 2)
    return _vision(c, parameters, w, m, layers, LLAMA_TILES * patches, merged)


_QWEN2 = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN3 = {
    **_QWEN2,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
SHAPES: dict[str, tuple[Shape, Mapping[str, Any]]] = {
    "gemma3": (
        _siglip,
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "image_size": 224,
            "patch_size": 16,
        },
    ),
    "qwen2_vl": (
        _qwen2,
        {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "mlp_ratio": 4, **_QWEN2},
    ),
    "qwen2_5_vl": (
        _qwen25,
        {
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "depth": 32,
            "out_hidden_size": 3584,
            **_QWEN2,
        },
    ),
    "qwen3_vl": (_qwen3, _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}),
    "qwen3_vl_moe": (_qwen3, _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}),
    "qwen3_5": (_qwen3, _QWEN3),
    "qwen3_5_moe": (_qwen3, _QWEN3),
    "qwen4_exp": (_qwen3, _QWEN3),
    "mistral3": (
        _pixtral,
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "image_size": 1024,
            "patch_size": 16,
        },
    ),
    "llama4": (
        _llama4,
        {
            "hidden_size": 768,
            "intermediate_size": 5632,
            "num_hidden_layers": 34,
            "image_size": 448,
            "patch_size": 14,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
            "vision_output_dim": 7680,
            "pixel_shuffle_ratio": 0.5,
        },
    ),
}
