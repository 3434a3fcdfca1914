"""Names of rows: the values that distinguish records, and the values that they share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from kvcalc.records import Record, Records

AnyRecord = TypeVar("AnyRecord", bound=Record)


def texts_by_name(table: str) -> dict[str, str]:
    """Return the texts of a table by name: the line `rate: {:.4g} requests/s` has the name `rate`.

    Args:
        table: Lines with a name, a colon and a text.
    """
    return dict(line.strip().split(": ", 1) for line in table.strip().splitlines())


# How a value that distinguishes rows is written, in the order of weight.
WORDING = texts_by_name("""
    model: {}
    gpu: {}
    tensor_parallel_size: tp {}
    gpus: {:,} GPUs
    engine: {}
    dtype: {} weights
    kv_cache_dtype: {} cache
    gpu_memory_utilization: utilization {:g}
    basis: {}
    batch_size: batch {:,}
    policy: {} batching
    cache: {} cache
    prefix_hit_rate: {:.0%} prefix hits
    max_num_seqs: max-num-seqs {:,}
    max_num_batched_tokens: max-num-batched-tokens {:,}
    rate: {:.4g} requests/s
    max_concurrency: {:,} clients
    details: {}
""")
RANKS = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert"}
DEPLOYMENT = tuple(WORDING)[:9]
SERVER = tuple(WORDING)[:15]


def split_words(record: Record) -> str:
    """Return the parallelism of one replica in words, such as `tp 2 pp 2`; '' on one GPU.

    Args:
        record: Record of a deployment, with keys such as `tensor_parallel_size`.
    """
    sizes = {name: record.get(f"{kind}_parallel_size", 1) for name, kind in RANKS.items()}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


class Sides(NamedTuple):
    """The keys in which records differ, and a name for each record.

    Attributes:
        keys: Keys, the most important first. Each key separates records that the earlier keys do
            not separate.
        names: Name of each record, made of its values of these keys. Empty texts if no key
            separates the records.
    """

    keys: list[str]
    names: list[str]


def sides(
    records: Records, keys: Iterable[str] = DEPLOYMENT, wording: Mapping[str, str] = WORDING
) -> Sides:
    """Return the keys in which records differ, and a short name for each record from these values.

    Rows and curves get these names, so that they do not repeat what all have in common. Example:
    Records of llama on h100 and llama on h200 differ in `gpu`. Their names are h100 and h200.

    Args:
        records: The records.
        keys: Keys to compare, the most important first. Differences in other keys do not count.
        wording: Key → format string for its value in a name, such as `tp {}`; needed for each of
            `keys`.
    """
    distinct = []
    rows: list[tuple[object, ...]] = [()] * len(records)
    for key in keys:
        longer = [(*row, record.get(key)) for row, record in zip(rows, records)]
        if len({*longer}) > len({*rows}):
            distinct.append(key)
            rows = longer
    names = []
    for row in rows:
        words = [wording[k].format(v) for k, v in zip(distinct, row) if v not in (None, "")]
        names.append(", ".join(words).replace(" calibration", ""))
    return Sides(distinct, names)


def shared_words(records: Records, wording: Mapping[str, str]) -> list[str]:
    """Return the values that are equal in all records, in words, for a title or subtitle.

    Example: with the wording {"model": "{}", "tensor_parallel_size": "tp {}"}, two records of llama
    with tp 1 and tp 2 give ["llama"].

    Args:
        records: The records.
        wording: Key to compare → format string for its value, such as `tp {}`.
    """
    words = []
    for key, text in wording.items():
        values = {record[key] for record in records}
        if len(values) == 1 and None not in values:
            words.append(text.format(*values))
    return words


def equal_records(records: Sequence[AnyRecord], first: Record, *keys: str) -> list[AnyRecord]:
    """Return the records whose values equal those of the record `first`, for each of the keys.

    Args:
        records: The records to filter.
        first: The record with the values to match. It need not be one of `records`.
        keys: Keys whose values must be equal.
    """
    return [r for r in records if all(r.get(key) == first.get(key) for key in keys)]
