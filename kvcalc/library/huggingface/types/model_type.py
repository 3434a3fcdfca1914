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

from kvcalc.layers.parts import MIXERS
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface import config, shapes
from kvcalc.library.huggingface.config import Field, Reader
from kvcalc.library.huggingface.types import decoder_rules, general_rules, mixed_layer_rules
from kvcalc.records import JsonObject

FUNCTIONS: dict[str, Callable[..., Any]] = {"when": config.when}
for module in (shapes, decoder_rules, general_rules, mixed_layer_rules):
    FUNCTIONS |= {name: value for name, value in vars(module).items() if callable(value)}
config.RULES.update(FUNCTIONS)
PARTS = {mixer.__name__: mixer for mixer in MIXERS}


class Type(NamedTuple):
    """An entry of the table of model types: how a config.json of this type is read.

    A reader is a function that builds parts of one layer from the file. A part is an attention or
    recurrent mixer, or an FFN. A `Field` is a rule (a function of the file), a formula of the
    file's keys, or a literal.

    Attributes:
        mixer: Reader of a layer's first parts, usually attention.
        ffn: Reader of a layer's last parts, usually an FFN.
        order: Function or list that gives the type of each layer, such as `full_attention`.
        norms: Number of norms of a layer outside its parts.
        norm: Type of the model's norms, such as `rms`.
        layer: Field of class `Layer` → its value, for every layer.
        model: Field of class `Model` → its value, in addition to the fields that every type has.
        depth: Number of layers if config.json does not state it.
        layers_key: Key of the number of layers in config.json; '' if only `depth` gives it.
        defaults: Key of config.json → its value if the file leaves it out.
        spellings: Key → other names of the key in released files.
        inert: Keys that change no size, separated by blanks.
        is_encoder: Whether, in models without an LM head, tokens also attend to later tokens.
        has_pooler: Whether models without an LM head have a dense layer on their first token.
        mtp: Whether layers of multi-token prediction have the parts of the last layer. If not,
            these layers are left out.
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
    defaults: JsonObject = {}
    spellings: Mapping[str, tuple[str, ...]] = {}
    inert: str = ""
    is_encoder: Field = False
    has_pooler: Field = False
    mtp: bool = True


@cache
def entry_texts() -> dict[str, str]:
    """Return the YAML text of each entry in the table of model types, by name of the type.

    The text is parsed only when a type is needed. An entry with several names occurs once for each
    name. Names that begin with `$` are shared values, not model types.
    """
    texts = {}
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        for text in re.split(
            r"^(?=[^\s#])", file.read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            names = text.partition(":")[0]
            texts.update(dict.fromkeys(() if text.startswith("#") else names.split(), text))
    return texts


def type_names() -> list[str]:
    """Return the names of the model types for which kvcalc has rules, such as `llama`."""
    return [name for name in entry_texts() if not name.startswith("$")]


def read_entry(name: str) -> Any:
    """Return the content of a model type's YAML entry, before its calls are evaluated.

    An entry may contain calls such as `{grouped: {bias: true}}`, which stay mappings here.

    Args:
        name: Name of a model type, or `$name` of a value that entries share.

    Raises:
        KeyError: The table has no entry with this name.
    """
    entry, _ = parse_yaml(entry_texts()[name], name)
    return next(iter(entry.values()))


@cache
def read_type(name: str) -> Type:
    """Return the table entry of a model type, with its calls evaluated.

    An example of a call is `{grouped: {bias: true}}`.

    `like` in an entry names the type that it extends. Fields that the entry does not state come
    from that type. The mappings `layer` and `model` of both entries are merged.

    Args:
        name: Name of the model type.

    Raises:
        KeyError: The table has no entry with this name.
    """
    entry = read_entry(name)
    base = read_type(entry.pop("like")) if "like" in entry else Type()
    plain = {key: entry.pop(key) for key in ("defaults", "spellings") if key in entry}
    fields = {key: resolve(value) for key, value in entry.items()}
    for key in ("layer", "model"):
        fields[key] = getattr(base, key) | fields.get(key, {})
    return base._replace(**plain, **fields)


def resolve(node: Any) -> Any:
    """Return the value that a node of a model type's YAML entry stands for.

    Calls such as `{grouped: {bias: true}}` are replaced by their results, and `$name` by the value
    of the entry `$name`. A list of readers (functions that build parts of a layer) becomes one
    reader that gives the parts of all of them. Other nodes are unchanged.

    Args:
        node: Text, number, list or mapping from the YAML text.
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
    options = {key: resolve(value) for key, value in argument.items()}
    if "spec" in options:
        options["spec"] = PARTS[options["spec"]]
    if name in PARTS:
        return shapes.mixer(PARTS[name], **options)
    return FUNCTIONS[name](**options)


def is_call(node: JsonObject) -> bool:
    """Return whether a mapping in an entry is a call: one function or part with its arguments.

    The only key must be the name of a function or of a class of a part. `{grouped: {bias:
    attention_bias}}` is a call.

    Args:
        node: Mapping from the YAML text of an entry.
    """
    return len(node) == 1 and not node.keys().isdisjoint(FUNCTIONS.keys() | PARTS.keys())
