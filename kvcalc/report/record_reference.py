"""The unit, type and meaning of each key of the records, for people, documents and checks.

`keys.yaml` has the meanings. The ending of a key gives its unit. If it does not, the unit precedes
the meaning. The unit gives the JSON type. A value may be null only if its meaning says so.
"""

from functools import cache
from pathlib import Path

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.records import Record

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
    "_speedup": "ratio",
    "reduction": "ratio",
}
# The JSON type of a value by its unit. Values of other units are numbers.
TYPES = {
    **dict.fromkeys(("bytes", "FLOP", "count", "tokens", "sequences"), "integer"),
    "text": "text",
    "yes or no": "boolean",
    "list": "list",
    "figures": "object",
}
UNITS = {*ENDINGS.values(), *TYPES, "number", "money", "FLOP per byte", "bytes a token"}


class Key(msgspec.Struct, frozen=True):
    """A key of a record.

    Attributes:
        name: The key.
        unit: One of UNITS.
        meaning: What the value is, and when it is null.
    """

    name: str
    unit: str
    meaning: str

    @property
    def type(self) -> str:
        """Return text, boolean, integer, number, list or object."""
        return TYPES.get(self.unit, "number")

    @property
    def nullable(self) -> bool:
        return "null" in self.meaning


def unit_of(name: str) -> str:
    """Return the unit that a key's ending gives, or ''."""
    return next((unit for ending, unit in ENDINGS.items() if name.endswith(ending)), "")


@cache
def parts() -> dict[str, dict[str, Key]]:
    """Return the parts that records consist of, each with its keys in their order."""
    return {
        part: {name: _key(name, text) for name, text in keys.items()}
        for part, keys in _read()["parts"].items()
    }


def kinds() -> dict[str, list[str]]:
    """Return the parts of each kind of records, such as `fit` or `fit --matrix`."""
    return dict(_read()["commands"])


@cache
def _read() -> Record:
    path = Path(__file__).with_name("keys.yaml")
    return parse_yaml(path.read_text(encoding="utf-8"), path.name)[0]


def _key(name: str, text: str) -> Key:
    head, _, tail = text.partition("; ")
    return Key(name, head, tail) if head in UNITS else Key(name, unit_of(name), text)


def record_keys(command: str) -> dict[str, Key]:
    """Return the keys of a command's records with their meanings, in the order of the records.

    Raises:
        UserError: The command has no records.
    """
    keys: dict[str, Key] = {}
    for part in parts_of(command):
        for name, key in part.items():
            keys.setdefault(name, key)
    return keys


def parts_of(command: str) -> list[dict[str, Key]]:
    """Return the parts of all kinds of records of a command."""
    names = [
        name
        for kind, part_names in kinds().items()
        if command in (kind, kind.partition(" ")[0])
        for name in part_names
    ]
    if not names:
        raise UserError(f"no records of {command!r}", hint=nearest(command, kinds()))
    return [parts()[name] for name in names]
