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
    tied = facts().get(around, {}).get("tied") if isinstance(around, str) else None
    return own if tied is None else own | {"tie_word_embeddings": tied}
