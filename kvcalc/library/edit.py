"""Change fields of a model (`--set`)."""

from typing import Any

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library import catalog
from kvcalc.library.yaml_text import scalar
from kvcalc.model.spec import Layer, Model
from kvcalc.units import parse_tokens

_SETTABLE = (
    "layers", "hidden_size", "vocab_size", "max_context", "tie_word_embeddings", "dtype", "kv_cache_dtype", "position_embeddings",
)  # fmt: skip
_OF_A_LAYER = set(Layer.__struct_fields__) - {"parts", "shared"}


def edited(model: Model, changes: list[str]) -> Model:
    """Return `model` with each `KEY=VALUE` or `KIND.KEY=VALUE` applied, and checked again.

    KEY is a field of the model, of a layer kind or of its parts. It changes every kind with this
    field. `null` switches a field off.

    Raises:
        UserError: A key is unknown. The message names the nearest keys.
    """
    if not changes:
        return model
    data = msgspec.json.decode(msgspec.json.encode(model))  # lists for tuples, as from a file
    for change in changes:
        target, sign, value = change.partition("=")
        if not sign or not target.strip():
            raise UserError(f"change {change!r} should read KEY=VALUE or KIND.KEY=VALUE")
        _apply(data, target.strip(), _parsed(value.strip()))
    where = f"{model.name} with {', '.join(changes)}"
    found = catalog.build(data, Model, where)
    key, problem = found.problem()
    if problem:
        raise UserError(f"{key}: {problem}", where)
    return found


def _parsed(text: str) -> Any:
    try:
        value = scalar(text)
    except (ValueError, OverflowError):
        raise UserError(f"value {text!r} is not a usable number") from None
    if isinstance(value, str) and value[:1].isdigit() and value[-1:].lower() in "kmg":
        return parse_tokens(value, "value")
    return value


def _apply(data: dict[str, Any], target: str, value: Any) -> None:
    kind, _, key = target.rpartition(".")
    if kind and kind not in data["kinds"]:
        raise UserError(f"{target}: unknown layer kind {kind!r}", hint=nearest(kind, data["kinds"]))
    if not kind and key in _SETTABLE:
        data[key] = value
        return
    chosen = [data["kinds"][kind]] if kind else list(data["kinds"].values())
    found = False
    for layer in chosen:
        parts = (*layer["parts"], *layer["shared"])
        holders = [layer] if key in _OF_A_LAYER else [p for p in parts if key in p and key != "type"]
        for holder in holders:
            holder[key] = value
            found = True
    if not found:
        known = {k for layer in chosen for part in (*layer["parts"], *layer["shared"]) for k in part} - {"type"}
        raise UserError(f"{target}: no layer of {data['name']} has {key!r}", hint=nearest(key, [*known, *_SETTABLE]))
