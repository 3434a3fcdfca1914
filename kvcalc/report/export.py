"""Records as JSON, CSV or Markdown. A record is a flat mapping of keys to figures, exact, with units in the key."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def to_json(records: Sequence[Record]) -> str:
    """One array of flat records, one record a line; null where a figure does not exist, never NaN or Infinity."""
    lines = [json.dumps({k: _finite(v) for k, v in r.items()}, ensure_ascii=False, allow_nan=False) for r in records]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def to_csv(records: Sequence[Record]) -> str:
    """The same columns as the JSON keys; an empty field where a figure does not exist."""
    out = io.StringIO()
    columns = columns_of(records)
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({k: _cell(v) for k, v in r.items()} for r in records)
    return out.getvalue()


def columns_of(records: Sequence[Record]) -> list[str]:
    """Every key of any record, in the order first met."""
    return list(dict.fromkeys(key for record in records for key in record))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    value = _finite(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else value
