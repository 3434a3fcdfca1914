"""The check that each value of a record is described in the reference and has the described type."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvcalc.report.record_reference import Key, parts_of

PYTHON = {"integer": int, "text": str, "boolean": bool, "list": list, "object": dict, "number": int | float}


def check_records(command: str, records: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if a key is not described, or a value has another type."""
    known = parts_of(command)
    for record in records:
        for name, value in record.items():
            keys = [part[name] for part in known if name in part]
            if not any(_is_valid(key, value) for key in keys):
                raise ValueError(f"{command}: {name} = {value!r} is {'not of its type' if keys else 'not described'}")


def _is_valid(key: Key, value: Any) -> bool:
    if value is None:
        return key.nullable
    return isinstance(value, PYTHON[key.type]) and (key.type == "boolean" or not isinstance(value, bool))
