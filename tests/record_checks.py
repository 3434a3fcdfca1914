"""The check that each value of a record is described in the reference and has the described type."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvcalc.records.figures import Figure
from kvcalc.report.export import kinds as figures_by_kind
from kvcalc.report.export import kinds_of_command

PYTHON = {"integer": int, "text": str, "boolean": bool, "list": list, "object": dict, "number": int | float}


def check_records(command: str, records: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if a key is not described, or a value has another type."""
    kinds = [figures_by_kind()[kind] for kind in kinds_of_command(command)]
    for record in records:
        for name, value in record.items():
            figures = [kind[name] for kind in kinds if name in kind]
            if not any(_is_valid(figure, value) for figure in figures):
                raise ValueError(f"{command}: {name} = {value!r} is {'not of its type' if figures else 'not described'}")


def _is_valid(figure: Figure, value: Any) -> bool:
    if value is None:
        return figure.nullable
    return isinstance(value, PYTHON[figure.type]) and (figure.type == "boolean" or not isinstance(value, bool))
