"""Write notes about unread keys and defaults of a config, and write a model as a preset."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from kvcalc.errors import printable
from kvcalc.gpu.gpu import Gpu
from kvcalc.library.files import scalar
from kvcalc.library.huggingface.architectures import ModelType
from kvcalc.library.huggingface.config import Config, facts
from kvcalc.library.huggingface.types.general_rules import check_settled, is_silent
from kvcalc.library.huggingface.types.model_type import Type
from kvcalc.model.model import Model

MAX_KEYS_SHOWN = 40
# Names of lengths, which are no weights.
_LENGTHS = re.compile(
    r"(chunk|window|block|batch|cache|padding)_size|group_size$|interval|frequency|_freq$|"
    r"_lower_bound$"
)
_WEIGHTS = re.compile(
    r"size|dim|rank|lora|bias|residual|norm|head|expert|proj|gate(?!_level)|gating|conv|mlp|ffn|"
    r"inner|embed|vocab|adapter|depth"
    r"|width|channel|layer|memory|engram|latent|ngram|share|sink"
)
# Keys that add weights although a word in their name usually means no sizes.
_ALWAYS = re.compile(r"lora(?!_(?:alpha|dropout))|adapter|_rank$|layer_?scale|scale_norm")
# Standard keys. A known type that does not read one of them is made without it.
_STANDARD = """
    num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
"""
# Switches, and the keys that say nothing if the switch is off.
_SWITCHES = {
    "use_sliding_window": "max_window_layers sliding_window sliding_window_pattern",
    "use_cla": "cla_share_factor",
    "use_mla": "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
}


def collect_notes(c: Config, resolved: ModelType, entry: Type) -> tuple[tuple[str, ...], bool]:
    """Return notes for the user about how a config.json was read.

    Notes name the general rules and the defaults that were used, and the keys that no reader used.
    A reader is a function that builds parts of a layer from the file.

    Args:
        c: The config.json, after its layers were read.
        resolved: The model type that read the file.
        entry: The table entry of this type.

    Returns:
        Sentences for the user, and whether the computed parameter count is exact. It may be wrong
        if kvcalc has no rules for the model type, the choice of the type is uncertain, or an unread
        key may add weights.

    Raises:
        UserError: The type has no table entry, and an unread key may change weights or cache.
    """
    inert = {*entry.inert.split(), *_declared(resolved), *_switched_off(c), *_respelled(c)}
    unread = list(_unread(c, inert))
    notes = [*resolved.notes]
    if not resolved.has_entry:
        name = printable(resolved.name or "none", 60)
        check_settled(c, name, unread)
        values = [f"{key} = {value}" for key, value in _ASSUMED.items() if not c.in_file(key)]
        assumed = f", with {', '.join(values)}" if values else ""
        text = f"parameters are approximate: model_type {name!r} is not known"
        notes.append(f"{text}. General rules for decoders apply{assumed}")
    defaults = ", ".join(
        f"{key}={value}"
        for key, value in sorted(c.defaulted.items())
        if not isinstance(value, list | dict) and key not in c.read
    )
    if defaults:
        notes.append(f"class defaults, because the file lacks them: {defaults}")
    keys = [
        key
        for key in unread
        if _ALWAYS.search(key) or not any(is_silent(part) for part in key.split("."))
    ]
    # a decoder may have an attention that its type does not have
    weights = [key for key in keys if may_carry_weights(key.rpartition(".")[2])]
    if "add_cross_attention" in unread:
        weights.append("add_cross_attention")
    others = [key for key in keys if key not in weights]
    if weights:
        notes.append(
            f"parameters are approximate: unread keys may add weights: {_joined(weights)}"
        )
    if others:
        notes.append(f"keys not read: {_joined(others)}")
    return tuple(notes), resolved.has_entry and resolved.exact and not weights


def may_carry_weights(key: str) -> bool:
    """Return whether an unknown key of config.json may add parameters, judged by its name.

    If it may, the parameter count is marked as uncertain.

    Args:
        key: Name of the key, without the mappings that contain it.
    """
    is_size = _WEIGHTS.search(key) and not (_LENGTHS.search(key) or is_silent(key))
    return bool(_ALWAYS.search(key) or is_size)


def _joined(keys: list[str]) -> str:
    more = " …" if len(keys) > MAX_KEYS_SHOWN else ""
    return ", ".join(printable(key, 60) for key in keys[:MAX_KEYS_SHOWN]) + more


def _unread(c: Config, inert: set[str]) -> Iterator[str]:
    """Yield keys that have a value, are not inert and were not used by a reader; nested keys as
    `a.b`."""
    for key, value in c.file.items():
        if key not in c.read and key not in inert:
            yield from _leaves(key, value, set())
        elif key in c.inside and isinstance(value, dict):
            for inner_key, inner in value.items():
                if inner_key not in c.inside[key]:
                    yield from _leaves(f"{key}.{inner_key}", inner, inert)


def _leaves(key: str, value: Any, inert: set[str]) -> Iterator[str]:
    """Yield the keys of all values nested in a value, except false, empty and zero values."""
    if isinstance(value, dict) and value:
        for inner_key, inner in value.items():
            yield from _leaves(f"{key}.{inner_key}", inner, inert)
    elif value not in (None, False, 0, "", [], {}) and key.rpartition(".")[2] not in inert:
        yield key


def _declared(resolved: ModelType) -> set[str]:
    """Return the keys of transformers' config class of this type. The entry of the type covers all
    these keys."""
    if not resolved.has_entry:
        return set()
    table = facts().get(resolved.name, {})
    aliases = table.get("aliases", {})
    keys = (table.get("defaults", {}), aliases, aliases.values(), table.get("more", ()))
    return set(_STANDARD.split()).union(*keys)


def _switched_off(c: Config) -> Iterator[str]:
    for switch, keys in _SWITCHES.items():
        if c.file.get(switch, c.defaults.get(switch)) is False:
            yield from keys.split()
    if c.file.get("sliding_window") is None:
        yield "max_window_layers"
    if c.file.get("position_embedding_type") == "absolute":  # adds no table to the type's own
        yield "position_embedding_type"


def _respelled(c: Config) -> Iterator[str]:
    """Yield other spellings of a key that was read, if they have the same value."""
    for key, names in c.aliases.items():
        values = [c.file[name] for name in (key, *names) if name in c.read and name in c.file]
        yield from (name for name in (key, *names) if c.file.get(name) in values)


_ASSUMED = {
    "num_key_value_heads": "one per head",
    "head_dim": "hidden_size / heads",
    "tie_word_embeddings": "false",
}


_ORDER = """
    name family model_type aliases checkpoints huggingface_id source published notes hidden_size
    vocab_size max_context layers pattern kinds
"""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Return a text node, with quotes if the text looks like a number or is not printable."""
    style = None if isinstance(scalar(value), str) else "'"
    style = style if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def preset_text_of(model: Model) -> str:
    """Return the YAML text of a preset for a model that was read from a config.json or GGUF file.

    Comments in the text contain the model's notes, and name the fields that the user must complete.

    Args:
        model: The model.
    """
    hint = "" if model.huggingface_id else "# huggingface_id: org/name\n"
    hint += (
        "# source: [{document: config.json, url: 'https://huggingface.co/org/name', "
        "read: 2026-01-31}]\n"
    )
    return (
        "".join(f"# {printable(note, 1000)}\n" for note in model.notes) + to_yaml(model) + hint
    )


def to_yaml(preset: Model | Gpu) -> str:
    """Return the YAML text of a model or GPU preset, without fields that have their default value.

    The innermost mappings are each on one line. A model that is read from this text has equal
    weight and cache sizes.

    Args:
        preset: The model or GPU.
    """
    data = _without_defaults(preset)
    ordered = {key: data.pop(key) for key in _ORDER.split() if key in data} | data
    for key in ("notes", "file"):
        ordered.pop(key, None)
    text = yaml.dump(
        ordered,
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=118,
    )
    # `_text` has put these characters in quotes
    return "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08x}" for c in text)


def _without_defaults(value: Any) -> Any:
    """Return plain values without fields that equal their default, ready to be written."""
    if isinstance(value, dict):
        return {name: _without_defaults(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, msgspec.Struct):
        return value
    tag = value.__struct_config__.tag
    fields = {"type": tag} if tag else {}
    for field in msgspec.structs.fields(value):
        item = getattr(value, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if item != default:
            fields[field.encode_name] = _without_defaults(item)
    return fields
