"""Write kvcalc/library/huggingface/defaults.json: the values that the installed transformers uses for missing
keys of a config.

The file has an entry for each model type with a causal language model, and for each type whose config is the
text part of another type. An entry has the class defaults of keys that may determine sizes, the older
spellings of keys, and the names of other keys (`more`). A default that transformers derives from other keys
(a head size, a list of layer types) is left out, because the other keys of a file determine it.

An entry of a type with a text part also has the type of the text part, whether the whole model ties its
embeddings by default (`tied`), whether it ties them if only the text part says so (`either`), and defaults
that differ from the defaults of the text part's own type (`part`). `*` lists all other types, which kvcalc
refuses.

    python tests/oracle/defaults.py [FILE]      (needs the extra `oracle`)
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kvcalc.library.huggingface.notes import may_carry_weights

CAUSAL = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | {
    name for name, cls in auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.items() if str(cls).endswith("ForCausalLM")
}
FILE = Path(__file__).parents[2] / "kvcalc" / "library" / "huggingface" / "defaults.json"
# Keys that say nothing about parameters or caches, and those among them that do.
NOISE = re.compile(
    r"dropout|_id$|_ids$|_id_|eps|epsilon|hidden_act|^activation|rope|initializer|init_|^dtype$|router_aux|router_z|output_"
    r"|summary|scal(e|ing)|multiplier|temperature|_pdrop|jitter|softcap|logit|is_encoder|add_cross|problem_type|theta|_coef|use_cache"
    r"|gradient|layerdrop|chunk_size_feed|_std|_range$|norm_topk|scoring|topk_method|pretraining_tp|transformers_version|_floor|_min$"
    r"|_max$|_limit|alpha|time_step_(min|max)|beta|swiglu|_loss|_token_index|generation|mask_|embd_|residual_in|rescale|special"
    r"|torchscript|forced|bos|eos|pad_|prefix|attn_implementation|precision|kernels?_|_kernel$|mamba_chunk|chunk_size$"
)
SIZES = re.compile(
    r"attention_chunk_size|conv_kernel|kernel_size|num_token|use_.*scale|vocab|activation_sparsity|rope_head_dim|d_conv|conv_dim"
    r"|position_embedding|embedding_chunk|attention_bias|moe_router_enable|kv_|head_dim|mamba_conv|rope_layers"
)
DERIVED = ("layer_types", "mlp_layer_types")
# Wrappers around a causal language model that has its own head, so that its own config says whether that is tied.
OWN_HEAD = ("blip-2", "instructblip", "instructblipvideo")
NESTED = ("linear_attn_config",)
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator", "text_model")


def instance(cls: Any) -> Any:
    """Return a config with all defaults, or None if the class cannot be built without arguments."""
    try:
        return cls()
    except Exception:
        return None


def signature(cls: Any) -> dict[str, Any]:
    """Return the defaults in the class's signature, before transformers derives values from other values."""
    found = {}
    for field in dataclasses.fields(cls):
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = None if default is dataclasses.MISSING else default
    return found


def plain(value: Any) -> Any:
    """Return `value` as a JSON value; None if JSON cannot express it."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def defaults(cls: Any, config: Any, everywhere: set[str]) -> dict[str, Any]:
    """Return the class defaults of keys that may determine sizes."""
    stated, found = signature(cls), {}
    values = {k: v for k, v in config.to_dict().items() if k not in everywhere and not k.startswith("_") and k != "model_type"}
    for alias in cls.attribute_map:
        values.setdefault(alias, plain(getattr(config, alias, None)))
    for key, value in values.items():
        if key not in cls.attribute_map:
            if key not in stated:
                continue
            if plain(stated[key]) != plain(value) and not isinstance(value, dict):
                value = stated[key]
        if plain(value) is not None and keeps(key, value):
            found[key] = plain(value)
    return found


def own_defaults(cls: Any, part: Any) -> dict[str, Any]:
    """Return the defaults that a class sets for keys of its text part."""
    stated = getattr(getattr(cls, "sub_configs_defaults", {}).get("text_config"), "init_kwargs", None) or {}
    try:
        taken = cls(text_config={"model_type": part.model_type, "bos_token_id": 1}).text_config.to_dict()
    except Exception:
        return {}
    found = {key: value for key, value in stated.items() if plain(value) is not None and keeps(key, value)}
    return {"part": found} if found and all(taken.get(key) == value for key, value in found.items()) else {}


def either(cls: Any, text: str) -> bool:
    """Return whether a class ties the head if its text part says so and the whole config does not."""
    try:
        config = cls(text_config={"model_type": text, "tie_word_embeddings": True}, tie_word_embeddings=False)
    except Exception:
        return False
    return bool(config.tie_word_embeddings)


def declared(cls: Any, config: Any) -> set[str]:
    """Return all keys of the class that may determine parameters."""
    names = {*signature(cls), *cls.attribute_map.values(), *(config.to_dict() if config else ())}
    return {name for name in names if may_carry_weights(name)}


def keeps(key: str, value: Any) -> bool:
    """Return whether a default belongs in the file."""
    if key in DERIVED or (isinstance(value, dict) and key not in NESTED) or (isinstance(value, str) and len(value) > 60):
        return False
    return bool(SIZES.search(key)) or not NOISE.search(key)


def text_parts(config: Any) -> dict[str, Any]:
    """Return the configs of language models inside a config, by the path of their keys."""
    found = {}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            if key in TEXT_PARTS or "text" in key:
                found[key] = part
            found |= {f"{key}.{path}": inner for path, inner in text_parts(part).items()}
    return found


def table() -> dict[str, dict[str, Any]]:
    """Return the contents of the file."""
    keep = {"tie_word_embeddings", "is_encoder_decoder", "add_cross_attention", "is_decoder", "num_beams"}
    everywhere = set(PreTrainedConfig().to_dict()) | set(transformers.GenerationConfig().to_dict()) | {"transformers_version"}
    everywhere -= keep
    classes: dict[str, Any] = {}
    outer: dict[str, dict[str, Any]] = {}
    for name in CONFIG_MAPPING_NAMES:
        try:
            cls = CONFIG_MAPPING[name]
        except Exception:
            continue
        config = instance(cls)
        if name in CAUSAL:
            classes[name] = cls
        if config is None:
            continue
        for path, part in text_parts(config).items():
            if path == "text_config":
                outer[name] = {"text": part.model_type} | own_defaults(cls, part)
                if name not in OWN_HEAD:
                    outer[name]["tied"] = bool(getattr(config, "tie_word_embeddings", False))
                    outer[name] |= {"either": True} if either(cls, part.model_type) else {}
            if path.endswith("text_config") or not part.sub_configs:
                classes.setdefault(part.model_type, CONFIG_MAPPING.get(part.model_type, type(part)) or type(part))
    found: dict[str, dict[str, Any]] = {}
    for name, cls in classes.items():
        config = instance(cls)
        own = {"aliases": dict(cls.attribute_map), "defaults": defaults(cls, config, everywhere)} if config else {}
        if more := sorted(
            declared(cls, config) - {*own.get("defaults", {}), *cls.attribute_map, *cls.attribute_map.values(), *everywhere}
        ):
            own["more"] = more
        found[name] = own
    for name, said in outer.items():
        found[name] = found.get(name, {}) | said
    others = sorted(set(CONFIG_MAPPING_NAMES) - set(found))
    return {"*": {"others": others}, **dict(sorted(found.items()))}


def main() -> None:
    transformers.logging.set_verbosity_error()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    lines = (f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'), sort_keys=True)}" for name, row in table().items())
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
