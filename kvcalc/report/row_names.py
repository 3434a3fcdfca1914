"""Names of rows: the values that distinguish records, and the values that they share."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Record = TypeVar("Record", bound=Mapping[str, Any])


def keep_distinguishing_columns(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows with only the columns that distinguish them, the weightiest first.

    Example: [("llama", "h100"), ("llama", "h200")] gives [("h100",), ("h200",)].
    """
    columns = distinguishing_columns(rows)
    return [tuple(row[index] for index in columns) for row in rows]


def distinguishing_columns(rows: Sequence[Sequence[object]]) -> list[int]:
    """Return the indices of columns that each separate rows that the columns before do not."""
    columns: list[int] = []
    names: list[tuple[object, ...]] = [()] * len(rows)
    for index, values in enumerate(zip(*rows, strict=True)):
        longer = [(*name, value) for name, value in zip(names, values, strict=True)]
        if len({*longer}) > len({*names}):
            columns.append(index)
            names = longer
    return columns


def shared_values(rows: Sequence[Sequence[Any]]) -> dict[int, Any]:
    """Return the values that all rows share, by the index of their column."""
    columns = enumerate(zip(*rows, strict=True))
    return {index: values[0] for index, values in columns if len({*values}) == 1}


# How a value that distinguishes rows is written, in the order of weight.
WORDING = {
    "model": "{}",
    "gpu": "{}",
    "tensor_parallel_size": "tp {}",
    "dtype": "{} weights",
    "kv_cache_dtype": "{} cache",
    "engine": "{}",
    "basis": "{}",
    "policy": "{} batching",
    "cache": "{} cache",
    "prefix_hit_rate": "{:.0%} prefix hits",
    "rate": "{:.4g} requests/s",
    "max_concurrency": "{:,} clients",
    "batch_size": "batch {:,}",
}
DEPLOYMENT = tuple(WORDING)[:7]
SERVER = tuple(WORDING)[:10]


class Sides(NamedTuple):
    """What distinguishes records.

    Attributes:
        keys: Keys of which each separates records that the earlier keys do not.
        names: Name of each record, written from these keys; empty if one record is compared.
    """

    keys: list[str]
    names: list[str]


def sides(records: Sequence[Mapping[str, Any]], keys: Sequence[str] = DEPLOYMENT) -> Sides:
    """Return the keys that distinguish records, and each record's name.

    Example: llama on h100 and llama on h200 differ in `gpu` and are called h100 and h200.
    """
    rows = [[record.get(key) for key in keys] for record in records]
    distinct = [keys[index] for index in distinguishing_columns(rows)]
    names = []
    for record in records:
        values = {key: record.get(key) for key in distinct}
        words = [WORDING[key].format(value) for key, value in values.items() if value]
        names.append(", ".join(words).replace(" calibration", ""))
    return Sides(distinct, names)


def shared_words(records: Sequence[Mapping[str, Any]], wording: Mapping[str, str]) -> list[str]:
    """Return the values that all records share, in words. wording: A template per key."""
    shared = shared_values([[record[key] for key in wording] for record in records])
    texts = [*wording.values()]
    return [texts[i].format(value) for i, value in shared.items() if value is not None]


def alike(records: Sequence[Record], first: Mapping[str, Any], *keys: str) -> list[Record]:
    """Return the records that have the values of the first under all keys."""
    return [r for r in records if all(r.get(key) == first.get(key) for key in keys)]
