"""The table of model types: one entry for each type that kvcalc reads exactly.

The entries are in the YAML files of this folder, by family. The key of an entry names its model
types, and `like` names the type that it extends. In the values:

- A text is a formula of keys, as `config.value_of` reads it; `name()` calls a rule of a `*_rules`
  module.
- `{function: arguments}` calls a function of `shapes` or a `*_rules` module. `{GatedDeltaNet:
  {...}}` is a part of the class `GatedDeltaNet`.
- A list of readers means the parts of all these readers.
- `$name` is the value of the entry `$name`.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.layers import attention, recurrent
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface import config, shapes
from kvcalc.library.huggingface.config import Field, Reader
from kvcalc.library.huggingface.types import (
    decoder_rules,
    general_rules,
    mixed_layer_rules,
)
from kvcalc.records import JsonObject

FUNCTIONS: dict[str, Callable[..., Any]] = {"when": config.when}
for module in (shapes, decoder_rules, general_rules, mixed_layer_rules):
    FUNCTIONS |= {name: value for name, value in vars(module).items() if callable(value)}
config.RULES.update(FUNCTIONS)
PARTS = {
    name: value
    for name, value in (vars(attention) | vars(recurrent)).items()
    if isinstance(value, type)
}


class Type(NamedTuple):
    """An entry of the table of model types: how a config.json of this type is read.

    A reader is a function that builds the parts of a layer from the file. Other fields are rules,
    formulas of keys, or literals.

    Attributes:
        mixer: Reader of a layer's first parts, usually attention.
        ffn: Reader of a layer's last parts.
        order: Type of each layer.
        norms: Number of norms of a layer outside its parts.
        norm: Type of the norms, such as `rms`.
        layer: Further fields of each `Layer`.
        model: Fields of `Model` that differ from the standard ones.
        depth: Number of layers if no key gives it.
        layers_key: Key of the number of layers; '' if only `depth` gives it.
        defaults: Values of keys that the file leaves out.
        spellings: Key → its other spellings.
        inert: Keys that change no size, separated by spaces.
        is_encoder: Whether tokens also see later tokens in classes without an LM head.
        has_pooler: Whether the class without an LM head has a dense layer for the first token.
        mtp: Whether layers of multi-token prediction are like the last layer. If not, they are left
            out.
    """

    mixer: Reader = shapes.GROUPED
    ffn: Reader = shapes.DENSE
    order: Field = shapes.typed()
    norms: Field = 2
    norm: Field = "rms"
    layer: dict[str, Field] = {}
    model: dict[str, Field] = {}
    depth: Field = None
    layers_key: str = "num_hidden_layers"
    defaults: Mapping[str, Any] = {}
    spellings: Mapping[str, tuple[str, ...]] = {}
    inert: str = ""
    is_encoder: Field = False
    has_pooler: Field = False
    mtp: bool = True


@cache
def entry_texts() -> dict[str, str]:
    """Return the YAML text of each entry in the table of model types, by each name of the type."""
    texts = {}
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        for text in re.split(
            r"^(?=[^\s#])", file.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            names = text.partition(":")[0]
            texts.update(dict.fromkeys(() if text.startswith("#") else names.split(), text))
    return texts


def type_names() -> list[str]:
    """Return the names of the model types that have an entry in the table."""
    return [name for name in entry_texts() if not name.startswith("$")]


def read_entry(name: str) -> Any:
    """Return the YAML value of a model type's entry, before its functions are called.

    Raises:
        KeyError: The table has no such entry.
    """
    entry, _ = parse_yaml(entry_texts()[name], name)
    return next(iter(entry.values()))


@cache
def read_type(name: str) -> Type:
    """Return the entry of a model type in the table.

    The type under `like` gives all fields that the entry does not state. Its fields `layer` and
    `model` are extended by the entry's.

    Args:
        name: Name of the model type.
    """
    entry = read_entry(name)
    base = read_type(entry.pop("like")) if "like" in entry else Type()
    plain = {key: entry.pop(key) for key in ("defaults", "spellings") if key in entry}
    fields = {key: resolve(value) for key, value in entry.items()}
    for key in ("layer", "model"):
        fields[key] = getattr(base, key) | fields.get(key, {})
    return base._replace(**plain, **fields)


def resolve(node: Any) -> Any:
    """Return a value of an entry after its functions are called and its `$` names are replaced.

    Args:
        node: Value from the YAML text.
    """
    if isinstance(node, str):
        if re.fullmatch(r"\$\w+", node):
            return resolve(read_entry(node))
        return re.sub(r"\$\w+", lambda match: f"({resolve(match[0])})", node)
    if isinstance(node, list):
        items = tuple(map(resolve, node))
        return shapes.both(*items) if all(map(callable, items)) else items
    if not isinstance(node, dict):
        return node
    if not is_call(node):
        return {key: resolve(value) for key, value in node.items()}
    [(name, argument)] = node.items()
    if isinstance(argument, list):
        return FUNCTIONS[name](*map(resolve, argument))
    if not isinstance(argument, dict) or is_call(argument):
        return FUNCTIONS[name](resolve(argument))
    options: JsonObject = {key: resolve(value) for key, value in argument.items()}
    if "spec" in options:
        options["spec"] = PARTS[options["spec"]]
    if name in PARTS:
        return shapes.mixer(PARTS[name], **options)
    return FUNCTIONS[name](**options)


def is_call(node: JsonObject) -> bool:
    """Return whether a mapping in an entry is one function or part with its arguments.

    `{grouped: {bias: attention_bias}}` is a call.
    """
    return len(node) == 1 and not node.keys().isdisjoint(FUNCTIONS.keys() | PARTS.keys())
