"""What the keys of records mean, in which unit and type: one place for people, documents and checks.

`keys.yaml` holds the meanings. The unit follows from the key's ending, and only where that says none stands before the meaning;
the type of the value in JSON follows from the unit. A value is null only where the meaning says when.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.yaml_text import parse_yaml

ENDINGS = {
    "flops_per_s": "FLOP a second",
    "bytes_per_s": "bytes a second",
    "tokens_per_s": "tokens a second",
    "requests_per_s": "requests a second",
    "_s": "seconds",
    "_w": "watts",
    "_j": "joules",
    "bytes": "bytes",
    "flops": "FLOP",
    "num_blocks": "count",
    "parameters": "count",
    "_seqs": "sequences",
    "_sequences": "sequences",
    "_len": "tokens",
    "tokens": "tokens",
    "_error": "share",
    "_share": "share",
    "_waste": "share",
    "ratio": "ratio",
    "_reduction": "ratio",
    "_speedup": "ratio",
    "reduction": "ratio",
}
# The type of a value by its unit; of all others it is a number, with decimals or without.
TYPES = {
    **dict.fromkeys(("bytes", "FLOP", "count", "tokens", "sequences"), "integer"),
    "text": "text",
    "yes or no": "boolean",
    "list": "list",
    "figures": "object",
}
UNITS = {*ENDINGS.values(), *TYPES, "number", "money", "FLOP per byte", "bytes a token"}
_PYTHON = {"integer": int, "text": str, "boolean": bool, "list": list, "object": dict, "number": int | float}


class Key(msgspec.Struct, frozen=True):
    """A key of a record: the unit and the type of its value, and what it means, with when it is null."""

    name: str
    unit: str
    meaning: str

    @property
    def type(self) -> str:
        """text, boolean, integer, number, list or object."""
        return TYPES.get(self.unit, "number")

    @property
    def nullable(self) -> bool:
        """Whether the value may be null."""
        return "null" in self.meaning

    def holds(self, value: Any) -> bool:
        """Whether a value is of the type, or null where it may be."""
        if value is None:
            return self.nullable
        return isinstance(value, _PYTHON[self.type]) and (self.type == "boolean" or not isinstance(value, bool))


def unit_of(name: str) -> str:
    """The unit that a key's ending says; '' where it says none."""
    return next((unit for ending, unit in ENDINGS.items() if name.endswith(ending)), "")


@cache
def parts() -> dict[str, dict[str, Key]]:
    """The parts that records are made of, each with its keys in their order."""
    return {part: {name: _key(name, text) for name, text in keys.items()} for part, keys in _read()["parts"].items()}


def kinds() -> dict[str, list[str]]:
    """The parts of each command's records; a command that makes several kinds of records stands with each."""
    return dict(_read()["commands"])


@cache
def _read() -> dict[str, Any]:
    path = Path(__file__).with_name("keys.yaml")
    return parse_yaml(path.read_text(encoding="utf-8"), path.name)[0]


def _key(name: str, text: str) -> Key:
    head, _, tail = text.partition("; ")
    return Key(name, head, tail) if head in UNITS else Key(name, unit_of(name), text)


def record_keys(command: str) -> dict[str, Key]:
    """What the keys of a command's records mean, in their order. Raises UserError on what is no command with records."""
    found: dict[str, Key] = {}
    for keys in _parts_of(command):
        found |= {name: key for name, key in keys.items() if name not in found}
    return found


def check_records(command: str, records: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError where a record of a command has a key that is not described, or a value that is not of its type."""
    known = _parts_of(command)
    for record in records:
        for name, value in record.items():
            keys = [part[name] for part in known if name in part]
            if not any(key.holds(value) for key in keys):
                raise ValueError(f"{command}: {name} = {value!r} is {'not of its type' if keys else 'not described'}")


def _parts_of(command: str) -> list[dict[str, Key]]:
    found = [parts()[part] for kind, of in kinds().items() if command in (kind, kind.partition(" ")[0]) for part in of]
    if not found:
        raise UserError(f"no records of {command!r}", hint=nearest(command, kinds()))
    return found
