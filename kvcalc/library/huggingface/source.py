"""From a file to the part of it that describes the language model, and what transformers says of each model type."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcalc.errors import UserError
from kvcalc.library.files import MOST_JSON, read_text
from kvcalc.library.huggingface.config import show

TEXT_KEYS = (
    "text_config", "llm_config", "language_config", "thinker_config", "language_model", "decoder",
    "llm_cfg", "text_cfg", "language_model_config", "text_model_config", "lm_config", "llm",
)  # fmt: skip
MOST_DEPTH = 32


@cache
def facts() -> dict[str, dict[str, Any]]:
    """What transformers says of each model type: its class defaults, older spellings of keys, the type of its text part."""
    found: dict[str, dict[str, Any]] = msgspec.json.decode((Path(__file__).parent / "defaults.json").read_bytes())
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, NaN and Infinity allowed as transformers writes them. Raises UserError naming the file."""
    where = str(path)
    deep = UserError(f"nests deeper than {MOST_DEPTH} levels", where)

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in found if keys.count(key) > 1)
            raise UserError(f"key {twice[:60]!r} stands twice", where)
        return found

    try:
        data = json.loads(read_text(path, MOST_JSON), object_pairs_hook=mapping)
    except RecursionError:  # how deep the parser goes depends on Python's version
        raise deep from None
    except ValueError as error:
        raise UserError(f"is not JSON: {error}", where) from None
    level: list[Any] = [data] if isinstance(data, dict | list) else []
    for _ in range(MOST_DEPTH):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list)]
    if level:
        raise deep
    if not isinstance(data, dict):
        raise UserError("holds no mapping of keys to values", where)
    return data


def of_state_spaces(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A config of mamba_ssm's own (`models/config_mamba.py`), which names no type, in transformers' keys; any other as it is.

    The defaults are those of its `Mamba` and `Mamba2` modules; rows of the table are padded up. Raises UserError on one with
    attention or FFNs between its blocks, and on settings of the module that are not known here.
    """
    if "ssm_cfg" not in data or data.get("model_type") or data.get("architectures"):
        return data
    given = data["ssm_cfg"] if isinstance(data["ssm_cfg"], dict) else {"ssm_cfg": data["ssm_cfg"]}
    kind = given.get("layer", "Mamba1")
    sizes: list[Any] = [data.get("d_model"), data.get("vocab_size", 50277), data.get("pad_vocab_size_multiple", 8)]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
    mixed = data.get("attn_layer_idx") or data.get("d_intermediate")
    if kind not in ("Mamba1", "Mamba2") or set(given) - {"layer"} or mixed or not whole:
        raise UserError("ssm_cfg: only Mamba's or Mamba-2's blocks alone, with their defaults, are read", where)
    width, vocab, step = sizes
    found: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": data.get("n_layer"),
        "vocab_size": -(-vocab // step) * step,
    }
    found |= {"expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
    found |= {"tie_word_embeddings": data.get("tie_embeddings", True), "torch_dtype": data.get("torch_dtype")}
    if kind == "Mamba1":
        return found | {"model_type": "mamba", "state_size": 16, "time_step_rank": -(-width // 16)}
    return found | {"model_type": "mamba2", "state_size": 128, "head_dim": 64, "num_heads": 2 * width // 64, "n_groups": 1}


def text_part(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The part of a file that describes the language model, with what the parts around it say of tied embeddings."""
    inner: Mapping[str, Any] = data
    for _ in range(4):
        if inner.get("text_config") is not None and not isinstance(inner["text_config"], dict):
            raise UserError(f"text_config: should be a mapping, not {show(inner['text_config'])}", where)
        found = next((inner[k] for k in TEXT_KEYS if isinstance(inner.get(k), dict)), None)
        if found is None or "num_hidden_layers" in inner:
            return inner
        kept = {k: inner[k] for k in ("tie_word_embeddings",) if k in inner and k not in found}
        outer_type = inner.get("model_type")
        inner = {**found, **kept}
        if not isinstance(inner.get("model_type"), str) and isinstance(outer_type, str):
            inner["model_type"] = facts().get(outer_type, {}).get("text", outer_type)
    raise UserError("nests one text_config in another too deeply", where)


def defaults_of(model_type: str, outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """The class defaults of a type; where it is a part of another, that one's default says whether the head is tied."""
    own: dict[str, Any] = facts().get(model_type, {}).get("defaults", {})
    around = outer.get("model_type") if outer is not inner else None
    whole = facts().get(around, {}) if isinstance(around, str) else {}
    part = whole.get("part", {}) if whole.get("text") == model_type else {}
    return own | part | ({"tie_word_embeddings": whole["tied"]} if "tied" in whole else {})
