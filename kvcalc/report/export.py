"""Write records as JSON or CSV. A record is a flat mapping of keys to exact figures."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from kvcalc.records import Record

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def to_json(records: Sequence[Record]) -> str:
    """Return an array of records, one per line. A figure that does not exist is null, never NaN."""
    return "".join(json_pieces(records))


def json_pieces(records: Iterable[Record]) -> Iterator[str]:
    """Yield the pieces of `to_json`, one record at a time."""
    before = "[\n"
    for record in records:
        try:
            text = _ENCODER.encode(dict(record))
        except ValueError:
            text = _ENCODER.encode({k: _finite(v) for k, v in record.items()})
        yield before + (text if text.isprintable() else _escaped(text))
        before = ",\n"
    yield "\n]\n" if before == ",\n" else "[]\n"


def to_csv(records: Sequence[Record]) -> str:
    """Return CSV with the JSON keys as columns. A figure that does not exist is empty."""
    return "".join(csv_pieces(records))


def csv_pieces(records: Iterable[Record]) -> Iterator[str]:
    """Yield the pieces of `to_csv`. An iterator's first record gives the columns."""
    if isinstance(records, Sequence):
        columns = list(dict.fromkeys(key for record in records for key in record))
    else:
        first = next(iter(records), {})
        columns, records = list(first), chain([first], records)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for record in records:
        writer.writerow({k: _cell(v) for k, v in record.items()})
        yield _taken(out)
    yield _taken(out)


def _taken(out: io.StringIO) -> str:
    text = out.getvalue()
    out.seek(0)
    out.truncate()
    return text


def _escaped(text: str) -> str:
    """Return JSON with escapes instead of control characters of a terminal."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    value = _finite(value)
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and not value.isprintable():
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
    return "" if value is None else value
