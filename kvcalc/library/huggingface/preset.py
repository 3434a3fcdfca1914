"""A model as the YAML of a preset: what `kvcalc models --import` writes."""

from typing import Any

import msgspec
import yaml

from kvcalc.errors import printable
from kvcalc.library.yaml_text import scalar
from kvcalc.model.spec import Model

_ORDER = (
    "name", "family", "model_type", "aliases", "huggingface_id", "source", "published", "notes",
    "hidden_size", "vocab_size", "max_context", "layers", "pattern", "kinds",
)  # fmt: skip


class _Flow(dict[str, Any]):
    """A mapping written on one line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Line(list[Any]):
    """A list written on as few lines as it needs."""


_Dumper.add_representer(_Line, lambda d, v: d.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True))
_Dumper.add_representer(_Flow, lambda d, v: d.represent_mapping("tag:yaml.org,2002:map", v, flow_style=True))


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """A text, in quotes where kvcalc's reader would take it for a number or a word of YAML 1.2, or a terminal obey it."""
    if not value.isprintable():
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if isinstance(scalar(value), str) else "'")


_Dumper.add_representer(str, _text)


def imported(model: Model) -> str:
    """The preset of a model that a config.json describes: what its reader noted as comments, and what is left to fill in."""
    hint = "" if model.huggingface_id else "# huggingface_id: org/name\n"
    hint += "# source: [{document: config.json, url: 'https://huggingface.co/org/name', read: 2026-01-31}]\n"
    return "".join(f"# {printable(note, 1000)}\n" for note in model.notes) + to_yaml(model) + hint


def to_yaml(model: Model) -> str:
    """The preset of `model`: defaults left out, one line a part. Reading it back gives the same figures."""
    data = {k: v for k, v in _without_defaults(model).items() if k not in ("notes", "file")}
    for key in ("pattern", "aliases"):
        if key in data:
            data[key] = _Line(data[key])
    for layer in data["kinds"].values():
        if "unquantized" in layer:
            layer["unquantized"] = _Line(layer["unquantized"])
        for key in ("parts", "shared"):
            if key in layer:
                layer[key] = [_Flow(part) for part in layer[key]]
    for key in ("source", "quantization", "extra"):
        if key in data:
            data[key] = [_Flow(item) for item in data[key]]
    for key in ("published", "mtp"):
        if key in data:
            data[key] = _Flow(data[key])
    ordered = {k: data[k] for k in _ORDER if k in data} | {k: v for k, v in data.items() if k not in _ORDER}
    text = yaml.dump(ordered, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118)
    return "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08x}" for c in text)  # in quotes, by `_text`


def _without_defaults(value: Any) -> Any:
    """Plain values, of which those that equal a field's default are dropped."""
    if isinstance(value, msgspec.Struct):
        found: dict[str, Any] = {}
        tag = value.__struct_config__.tag
        if tag:
            found["type"] = tag
        for field in msgspec.structs.fields(value):
            item = getattr(value, field.name)
            default = field.default if field.default is not msgspec.NODEFAULT else None
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            if field.required or item != default:
                found[field.encode_name] = _without_defaults(item)
        return found
    if isinstance(value, dict):
        return {k: _without_defaults(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_without_defaults(v) for v in value]
    return value
