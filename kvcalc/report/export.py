"""Write records as JSON or CSV, and list the keys of each command's records.

A record is a flat mapping of keys to exact figures.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from kvcalc.errors import UserError, nearest
from kvcalc.records import JsonObject, Record, Records
from kvcalc.records.figures import Figure, figures_of, record_schema
from kvcalc.report.row_names import texts_by_name

# Module in `kvcalc.records`, and class, of each kind of records.
RECORD_CLASSES = texts_by_name("""
    size: size.SizeRecord
    compare: compare.CompareRecord
    roofline: roofline.RooflineRecord
    roofline (an operator): roofline.OperatorRecord
    roofline (without a model): roofline.AttentionRecord
    latency: serving.LatencyRecord
    latency --no-cache: serving.NoCacheRecord
    latency --draft: serving.SpeculationRecord
    serve: serving.ServeRecord
    serve --timeline (a file): serving.PassRecord
    plan: plan.PlanRecord
    fit: fit.FitRecord
    fit --lengths: fit.WasteRecord
    fit --matrix: fit.MatrixCellRecord
    fit --allocations: fit.AllocationRecord
    diagnose: plan.DiagnoseRecord
    measure: measure.MeasuredLayerRecord
    measure --generate: measure.GenerationRecord
    measure --calibration: measure.KernelModelRecord
    calibrate: measure.KernelModelRecord
    validate: measure.ErrorRecord
    models: presets.ModelPresetRecord
    gpus: presets.GpuPresetRecord
""")


def record_class(kind: str) -> type:
    """Return the TypedDict class that declares the JSON keys of a kind of records.

    Args:
        kind: A key of RECORD_CLASSES: a command with the options that change its keys, such as
            `fit --matrix`.
    """
    module, _, name = RECORD_CLASSES[kind].partition(".")
    record: type = getattr(import_module(f"kvcalc.records.{module}"), name)
    return record


@cache
def kinds() -> dict[str, dict[str, Figure]]:
    """Return the description of every JSON key, first by kind of records, then by key.

    A kind is a command with the options that change its keys, such as `fit --matrix`. Example:
    `kinds()["size"]["kv_cache_bytes"]` describes the key `kv_cache_bytes` of `size`.
    """
    return {kind: figures_of(record_class(kind)) for kind in RECORD_CLASSES}


def kinds_of_command(command: str) -> list[str]:
    """Return the kinds of records that a command can print.

    Example: `fit` prints the kinds `fit`, `fit --lengths`, `fit --matrix` and `fit --allocations`.

    Raises:
        UserError: The command has no records.
    """
    matches = [k for k in RECORD_CLASSES if command in (k, k.partition(" ")[0])]
    if not matches:
        commands = dict.fromkeys(kind.partition(" ")[0] for kind in RECORD_CLASSES)
        raise UserError(f"no records of {command!r}", nearest(command, commands))
    return matches


def schema_of_command(command: str) -> JsonObject:
    """Return the JSON Schema of a command's records, as a dictionary.

    The schema is valid for one record and for the array that `--format json` prints.

    Args:
        command: Name of the command, such as `fit`.

    Raises:
        UserError: The command has no records.
    """
    classes = [record_class(kind) for kind in kinds_of_command(command)]
    record = {"anyOf": [{"$ref": f"#/$defs/{c.__name__}"} for c in classes]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kvcalc {command}",
        "anyOf": [*record["anyOf"], {"type": "array", "items": record}],
        "$defs": {c.__name__: record_schema(c) for c in classes},
    }


def record_keys(command: str) -> dict[str, Figure]:
    """Return the description of each JSON key in a command's records, in the order of the records.

    If the command prints several kinds of records, the keys of all kinds are included.

    Args:
        command: Name of the command, such as `fit`.

    Raises:
        UserError: The command has no records.
    """
    keys: dict[str, Figure] = {}
    for kind in kinds_of_command(command):
        keys |= kinds()[kind] | keys
    return keys


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def json_pieces(records: Iterable[Record]) -> Iterator[str]:
    """Yield the text of a JSON array in pieces, so that the complete text need not fit in memory.

    Each piece is a line with one record. A last piece closes the array.

    Args:
        records: The records. NaN and infinity are written as null.
    """
    before = "[\n"
    for record in records:
        yield before + _ENCODER.encode({key: _finite(record[key]) for key in record})
        before = ",\n"
    yield "\n]\n" if before == ",\n" else "[]\n"


def to_csv(records: Records) -> str:
    """Return records as the text of a CSV table, with the JSON keys as column names.

    Args:
        records: The records. A value of None or NaN is an empty cell.
    """
    return "".join(csv_pieces(records))


def csv_pieces(records: Records) -> Iterator[str]:
    """Yield the text of a CSV table in pieces: the line of column names, then one line per record.

    Columns are the JSON keys of all records.

    Args:
        records: The records. A value of None or NaN is an empty cell.
    """
    columns = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(_Lines(), columns, lineterminator="\n", restval="")
    yield writer.writeheader()
    for record in records:
        yield writer.writerow({k: _cell(v) for k, v in record.items()})


# Functions that write records, by the value of `--format`.
FORMATS = {"json": json_pieces, "csv": csv_pieces}


class _Lines:
    """A file whose `write` returns the text, so that a writer of rows returns its lines."""

    def write(self, text: str) -> str:
        return text


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    value = _finite(value)
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return "" if value is None else value
