"""Find the part of a file that describes the language model, with the defaults of its type.

Files that are not a transformers config.json are recognized by their keys and refused. Sources of
their keys: Meta's llama (`llama/model.py`), mistral-inference (`src/mistral_inference/args.py`),
DeepSeek-V3 (`inference/model.py`), mamba_ssm (`models/config_mamba.py`) and flash-linear-attention
(`fla/models/*/configuration_*.py`).
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcalc.errors import UserError, printable
from kvcalc.library.files import MOST_JSON, read_text
from kvcalc.library.huggingface.config import show
from kvcalc.records import JsonObject

_FLA_NAMES = (
    "abc comba delta_net deltaformer forgetting_transformer gated_deltanet gated_deltaproduct gla "
    "gsa hgrn hgrn2 kda lightnet linear_attn log_linear_mamba2 mesa_net moba mom nsa path_attn "
    "retnet rodimus rwkv6 samba"
)
_FLA_TYPES = frozenset(_FLA_NAMES.split())
_FLA_KEYS = {"expand_k", "expand_v", "hidden_ratio"}


def check_program(data: Mapping[str, Any], file_name: str) -> None:
    """Raise UserError for a file of sizes in another program's format."""
    if data.get("model_type") or data.get("architectures"):
        return
    is_mamba = "ssm_cfg" in data
    is_params = data.keys() >= {"dim", "n_layers"} and (
        data.keys() & {"inter_dim", "n_dense_layers", "multiple_of", "ffn_dim_multiplier"}
        or "hidden_dim" in data
    )
    if is_mamba or is_params:
        raise UserError(
            "has another program's format, not the format of a config.json of transformers",
            file_name,
            "Give the config.json of the same weights for transformers, or a preset",
        )


def check_has_sizes(data: Mapping[str, Any], file_name: str) -> None:
    """Raise UserError for an adapter's config, which has no sizes of a model."""
    if "peft_type" in data:
        base = printable(str(data.get("base_model_name_or_path") or "another"), 80)
        hint = f"Give its model, {base}; `fit --max-loras` counts adapters"
        raise UserError(
            "is an adapter's config, which has no sizes of a model", file_name, hint
        )


def check_unknown(
    name: str, data: Mapping[str, Any], inner: Mapping[str, Any], file_name: str
) -> None:
    """Raise UserError for a type without an entry that no general rule can count.

    These are encoder-decoder models and flash-linear-attention's layers. Its type `transformer` is
    accepted if it gives the size of the FFN.
    """
    label = f"model_type {printable(str(data.get('model_type') or name or 'none'), 60)!r}"
    if any(part.get("is_encoder_decoder") is True for part in (data, inner)):
        raise UserError(
            f"{label} is not known, and has an encoder (is_encoder_decoder)", file_name
        )
    is_sized = name == "transformer" and inner.get("intermediate_size")
    if not is_sized and (name in _FLA_TYPES or inner.keys() & _FLA_KEYS):
        hint = "Write a model file with similar layers (docs/how-to/add-a-model.md)"
        raise UserError(
            f"{label} has layers of flash-linear-attention, which are not read",
            file_name,
            hint,
        )


TEXT_KEYS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model",
    "decoder",
    "llm_cfg",
    "text_cfg",
    "language_model_config",
    "text_model_config",
    "lm_config",
    "llm",
)
MAX_DEPTH = 32


@cache
def facts() -> dict[str, JsonObject]:
    """Return transformers' facts about each model type.

    These are its class defaults, older spellings of keys, and the type of its text part.
    """
    path = Path(__file__).parent / "defaults.json"
    table: dict[str, JsonObject] = msgspec.json.decode(path.read_bytes())
    return table


def read_json(path: Path) -> JsonObject:
    """Return the mapping in a JSON file; NaN and Infinity are allowed, as transformers writes them.

    Raises:
        UserError: The file is not such a mapping, repeats a key or nests too deeply.
    """
    file_name = str(path)
    too_deep = UserError(f"nests deeper than {MAX_DEPTH} levels", file_name)

    def mapping(pairs: list[tuple[str, Any]]) -> JsonObject:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"key {repeated[:60]!r} occurs twice", file_name)
        return dict(pairs)

    try:
        data = json.loads(read_text(path, MOST_JSON), object_pairs_hook=mapping)
    except RecursionError:  # the depth of the parser depends on Python's version
        raise too_deep from None
    except ValueError as error:
        raise UserError(f"is not JSON: {error}", file_name) from None
    if not isinstance(data, dict):
        raise UserError("contains no mapping of keys to values", file_name)
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        values = [value for x in level for value in (x.values() if isinstance(x, dict) else x)]
        level = [value for value in values if isinstance(value, dict | list)]
    if level:
        raise too_deep
    return data


def text_part(data: Mapping[str, Any], file_name: str) -> Mapping[str, Any]:
    """Return the part of a file that describes the language model.

    It includes the value of tied embeddings from the parts around it.
    """
    key = "tie_word_embeddings"
    inner = data
    for _ in range(4):
        text = inner.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise UserError(f"text_config: should be a mapping, not {show(text)}", file_name)
        part = next((inner[k] for k in TEXT_KEYS if isinstance(inner.get(k), dict)), None)
        if part is None or "num_hidden_layers" in inner:
            return inner
        outer_type = inner.get("model_type")
        inner = ({key: inner[key]} if key in inner else {}) | part
        if not isinstance(inner.get("model_type"), str) and isinstance(outer_type, str):
            inner["model_type"] = facts().get(outer_type, {}).get("text", outer_type)
    raise UserError("nests one text_config in another too deeply", file_name)


def defaults_of(model_type: str, outer: Mapping[str, Any], inner: Mapping[str, Any]) -> Any:
    """Return the values of keys that a file of this type leaves out, as transformers' class has them.

    If the type is a part of another, the other's default says whether the head is tied.
    """
    defaults = facts().get(model_type, {}).get("defaults", {})
    outer_type = outer.get("model_type")
    is_part = outer is not inner and isinstance(outer_type, str)
    outer_facts = facts().get(str(outer_type), {}) if is_part else {}
    if outer_facts.get("text") == model_type:
        defaults = defaults | outer_facts.get("part", {})
    if "tied" in outer_facts:
        defaults = defaults | {"tie_word_embeddings": outer_facts["tied"]}
    return defaults
