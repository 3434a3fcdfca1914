"""Recognize files with model sizes in another program's format by their keys, and refuse them.

Sources: Meta's llama (`llama/model.py`, ModelArgs), mistral-inference
(`src/mistral_inference/args.py`), DeepSeek-V3 (`inference/model.py`, ModelArgs),
flash-linear-attention (`fla/models/*/configuration_*.py`).
"""

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UserError, printable

_TYPED = ("model_type", "architectures", "ssm_cfg")
_SIZED = {"dim", "n_layers"}
# Distinguishing keys next to _SIZED, a description of the file, and a word to find its presets.
_OWN = (
    (("inter_dim", "n_dense_layers"), "a config of DeepSeek's own inference code", "deepseek"),
    (("multiple_of", "ffn_dim_multiplier"), "the params.json of a Llama checkpoint as Meta released it", "llama"),
    (("hidden_dim",), "the params.json of a checkpoint in Mistral's own form", "mistral"),
)
# Files that accompany a config.json, by their distinguishing keys.
_NEIGHBOURS = (
    (("weight_map",), "the index of a checkpoint's weights"),
    (("tokenizer_class", "added_tokens_decoder", "add_bos_token"), "a tokenizer's config"),
    (("image_processor_type", "feature_extractor_type", "processor_class", "image_mean"), "a preprocessor's config"),
    (("_from_model_config", "do_sample", "temperature", "max_new_tokens"), "a generation_config.json"),
    (("quant_method", "quant_cfg", "bits", "w_bit"), "what a quantiser writes of itself"),
)
_NAMES = (
    "abc comba delta_net deltaformer forgetting_transformer gated_deltanet gated_deltaproduct gla gsa hgrn hgrn2 kda lightnet "
    "linear_attn log_linear_mamba2 mesa_net moba mom nsa path_attn retnet rodimus rwkv6 samba"
)
_FLA = frozenset(_NAMES.split())
_FLA_KEYS = ("expand_k", "expand_v", "hidden_ratio")  # of its layers' keys and values, and of an FFN without a size
# The equal or most similar layer type here, for each type.
_NEAREST = {"gated_deltanet": "gated_delta_net", "delta_net": "gated_delta_net", "kda": "kda", "retnet": "lightning"}


def check(data: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a file of sizes in another program's format."""
    if any(data.get(key) for key in _TYPED) or not data.keys() >= _SIZED:
        return
    for keys, what, word in _OWN:
        if any(key in data for key in keys):
            hint = f"Read is the config.json of the same weights as transformers has them, or a preset (`kvcalc models {word}`)"
            raise UserError(f"is {what}, not a config.json", where, hint)


def neighbour(data: Mapping[str, Any], where: str) -> UserError | None:
    """Return the error for a known file without sizes that usually accompanies a config.json, or None."""
    if "peft_type" in data:
        base = printable(str(data.get("base_model_name_or_path") or "another"), 80)
        hint = f"Give its model, {base}; `fit --max-loras` counts adapters"
        return UserError("is an adapter's config, which has no sizes of a model", where, hint)
    what = next((what for keys, what in _NEIGHBOURS if any(key in data for key in keys)), "")
    return UserError(f"is {what}, not a model's config.json", where, "Give the config.json beside it") if what else None


def check_unknown(name: str, data: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a type without an entry that no general rule can count.

    These are encoder-decoder models and flash-linear-attention's layers. Its plain `transformer` is
    accepted if it gives the size of the FFN.
    """
    if any(part.get("is_encoder_decoder") is True for part in (data, inner)):
        shown = printable(str(data.get("model_type") or name or "none"), 60)
        raise UserError(f"model_type {shown!r} is not known, and is no decoder alone (is_encoder_decoder)", where)
    sized = name == "transformer" and inner.get("intermediate_size")
    if sized or not (name in _FLA or any(key in inner for key in _FLA_KEYS)):
        return
    kinds = _NEAREST.get(name, "mamba2, gated_delta_net, kda, lightning and rwkv7, none of them its own,")
    hint = f"Layers of type {kinds} can stand in a model file of your own (docs/presets.md)"
    if name == "transformer":
        hint = "Its plain transformer is read where the file gives intermediate_size"
    said = f"model_type {printable(name, 60)!r} is one" if name else "its keys are those"
    raise UserError(f"{said} of flash-linear-attention's, which are not read", where, hint)
