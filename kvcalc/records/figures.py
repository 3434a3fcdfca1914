"""Read the declarations of records.

A record class declares each key with its type and its meaning. A key that tables show has a heading
too, and a format if its unit has none that suits. A `Formula` may be last.

    class SizeRecord(TypedDict):
        kv_cache_bytes: Annotated[int, "stored by all sequences on one GPU", "KV cache"]
        eviction_score_bytes: Annotated[int, "scores that an eviction policy stores"]
        mha_ratio: Annotated[FloatOrNull, "KV cache of MHA ÷ this KV cache", "MHA needs"]
        intensity: Annotated[float, "flops ÷ bytes", Formula("{flops} / {bytes}")]

The columns of tables, the labels of `--explain`, the reference and the JSON Schema follow from it.
Do not import annotations from `__future__` in this package, because `figures_of` reads them.
"""

import re
from functools import cache
from inspect import getdoc
from types import NoneType, UnionType
from typing import Any, NotRequired, TypeAlias, get_args, get_origin

import msgspec
from msgspec.structs import replace

# Types of figures that a record may lack.
FloatOrNull: TypeAlias = float | None
IntOrNull: TypeAlias = int | None
TextOrNull: TypeAlias = str | None
# The unit of a key by its ending. The first ending that matches counts.
_UNIT_TABLE = """
    bytes_per_token         bytes a token
    per_million_tokens      money
    per_hour                money
    flops_per_s             FLOP a second
    bytes_per_s             bytes a second
    tokens_per_s            tokens a second
    tokens_per_s_per_gpu    tokens a second
    requests_per_s          requests a second
    sequences_per_s         sequences a second
    _s                      seconds
    seconds                 seconds
    slo_ttft                seconds
    slo_tpot                seconds
    _w                      watts
    _j                      joules
    bytes                   bytes
    bytes_per_block         bytes
    bytes_per_sm            bytes
    each                    bytes
    flops                   FLOP
    num_blocks              count
    parameters              count
    _seqs                   sequences
    sequences               sequences
    stops_paying_at_batch   sequences
    _len                    tokens
    tokens                  tokens
    context                 tokens
    block_size              tokens
    receptive_field         tokens
    no_cache_doubles_from   tokens
    first_fit_largest_hole  tokens
    external_largest_hole   share
    batch_size              sequences
    cache_error             ratio
    _error                  share
    found_rate              requests a second
    _rate                   share
    _waste                  share
    share                   share
    slo_attainment          share
    kv_peak                 share
    spread                  share
    utilization             share
    ratio                   ratio
    speedup                 ratio
    reduction               ratio
    overhead                ratio
    cache_share_of_weights  ratio
    to_knee                 ratio
    rate                    requests a second
    intensity               FLOP per byte
    knee                    FLOP per byte
"""
UNITS_OF_ENDINGS = dict(re.findall(r"(\w+) +(.+)", _UNIT_TABLE))
# The unit of a key without such an ending, by its JSON type.
UNITS_OF_TYPES = {
    "integer": "count",
    "number": "number",
    "text": "text",
    "boolean": "yes or no",
    "list": "list",
    "object": "figures",
}
JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    list: "list",
    dict: "object",
}


class Formula(str):
    """A formula with keys in braces, such as `{flops} / {bytes}`.

    `--explain` replaces the keys with their values.
    """


class Figure(msgspec.Struct, frozen=True):
    """The description of one key of a JSON record: its meaning, its unit and its table column.

    Attributes:
        meaning: What the value is. If it may be null, also the condition under which it is null.
            Text after a semicolon is only in the reference.
        heading: Heading of the key's table column; "" if no table shows the key.
        format: Format of a table cell, a name in `report.text.tables.FORMATS` or a template such as
            `{:,.1f}`. "" derives it from the unit.
        formula: A `Formula`; "" if the meaning says enough.
        name: The key.
        type: JSON type: "integer", "number", "text", "boolean", "list" or "object".
        unit: The unit of the value. It follows from the ending of the key, else from the type.
        nullable: Whether the value may be null.
        required: Whether every record has the key.
    """

    meaning: str
    heading: str = ""
    format: str = ""
    formula: str = ""
    name: str = ""
    type: str = ""
    unit: str = ""
    nullable: bool = False
    required: bool = True


def unit_of_key(key: str) -> str:
    """Return the unit that the ending of a record's key gives; "" if it gives none.

    Examples: `tpot_s` gives seconds, and `bandwidth_bytes_per_s` gives bytes a second.

    Args:
        key: Key of a JSON record.
    """
    return next((unit for ending, unit in UNITS_OF_ENDINGS.items() if key.endswith(ending)), "")


@cache
def figures_of(record: type) -> dict[str, Figure]:
    """Return the description of each key of a record class, by key, keys of base classes first.

    Tables, `--explain`, the reference and the JSON Schema are made from these descriptions.

    Args:
        record: A class whose annotations declare the keys, such as `SizeRecord`.
    """
    return {
        key: _complete(key, declaration) for key, declaration in record.__annotations__.items()
    }


def _complete(key: str, declaration: Any) -> Figure:
    """Return the figure of a declaration, with name, type and unit."""
    origin = get_origin(declaration)
    if origin is NotRequired:
        (declaration,) = get_args(declaration)
    value_type, *description = get_args(declaration)
    formula = description.pop() if isinstance(description[-1], Formula) else ""
    members = get_args(value_type) if isinstance(value_type, UnionType) else (value_type,)
    value_types = [get_origin(member) or member for member in members]
    json_type = JSON_TYPES.get(value_types[0], "object")
    ending_unit = unit_of_key(key) if json_type in ("integer", "number") else ""
    return replace(
        Figure(*description),
        formula=formula,
        name=key,
        type=json_type,
        unit=ending_unit or UNITS_OF_TYPES[json_type],
        nullable=NoneType in value_types,
        required=origin is not NotRequired,
    )


def record_schema(record: type) -> dict[str, object]:
    """Return the JSON Schema of a record class as a dictionary, with the unit of each key.

    Users check the output of `--format json` with it.

    Args:
        record: A class whose annotations declare the keys, such as `SizeRecord`.
    """
    figures = figures_of(record)
    return {
        "title": record.__name__,
        "description": getdoc(record),
        "type": "object",
        "properties": {key: _property_schema(figure) for key, figure in figures.items()},
        "required": [key for key, figure in figures.items() if figure.required],
        "additionalProperties": False,
    }


def _property_schema(figure: Figure) -> dict[str, object]:
    """Return the JSON Schema of a key."""
    json_type = {"text": "string", "list": "array"}.get(figure.type, figure.type)
    return {
        "title": figure.heading or figure.name,
        "description": figure.meaning,
        "type": [json_type, "null"] if figure.nullable else json_type,
        "unit": figure.unit,
    }
