"""Printed answer of `size`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.layers.batch import Parallelism
from kvcalc.model.memory import assumptions, reach_line
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records.size import SizeRecord
from kvcalc.report.row_names import alike, shared_words, sides
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import answer_sentence, columns, footnotes
from kvcalc.units import format_bytes, shown_in

UNITS = {"gib": "1 GiB = 2^30 bytes", "si": "1 GB = 10^9 bytes", "bytes": "exact bytes"}
LOAD = ("context", "batch_size")
STORAGE_KEYS = ("model", "tensor_parallel_size", "dtype", "kv_cache_dtype")
SIZE_COLUMNS = columns(
    SizeRecord,
    "model tensor_parallel_size dtype context batch_size kv_cache_dtype kv_cache_bytes "
    "kv_cache_read_bytes bytes_per_token attention weight_bytes equal_weights_context mha_ratio "
    "parameters fixed_bytes active_parameters kv_cache_allocated_bytes",
    inputs="context batch_size kv_cache_dtype",
    optional="tensor_parallel_size dtype",
)


def size_table(
    records: Sequence[SizeRecord],
    stored: Sequence[tuple[Model, Precision, Parallelism]],
    block_size: int,
) -> Table:
    """Return the table of sizes with the assumptions of each model."""
    has_weights = records[0]["weight_bytes"] is not None
    models = {model.name: model for model, *_ in stored}
    details = [
        f"{model.name}: {assumptions(model, precision, block_size, ranks, has_weights)}"
        for model, precision, ranks in stored
    ]
    for name, model in models.items():
        if reach := reach_line(model):
            details.append(f"{name}: {reach}")
    details.append(f"{UNITS[shown_in()]}; `--explain` shows the formulas")
    formats = {"dtype": "weights in {}", "kv_cache_dtype": "KV cache in {}"}
    storage = ", ".join([*shared_words(records, formats), f"blocks of {block_size} tokens"])
    equal = _equal_weights(records, models) if has_weights else ""
    return Table(
        records,
        SIZE_COLUMNS,
        _size_sentence(records),
        footnotes(f"{storage[0].upper()}{storage[1:]}.", equal),
        details=[*dict.fromkeys(details)],
    )


def _size_sentence(records: Sequence[SizeRecord]) -> str:
    """Return the size of the KV cache. For several models or formats, name the extremes.

    They are compared at the last context and batch size.
    """
    first, last = records[0], records[-1]
    equal = alike(records, last, *LOAD)
    keys, names = sides(equal, STORAGE_KEYS)
    sizes = [record["kv_cache_bytes"] for record in equal]
    small, large = sizes.index(min(sizes)), sizes.index(max(sizes))
    per_gpu = " per GPU" * any(record["gpus"] > 1 for record in records)
    cache = f"of KV cache{per_gpu} for {load(last)}"
    need = "need" if first["parameters_exact"] is None else "needs"
    if sizes[small] != sizes[large] and "model" in keys:
        size = f"{format_bytes(sizes[small])}{per_gpu}"
        return answer_sentence(
            f"{equal[small]['model']} needs the smallest KV cache for {load(last)}, {size}",
            f", and {equal[large]['model']} the largest, {format_bytes(sizes[large])}",
        )
    if sizes[small] != sizes[large]:
        span = f"{format_bytes(sizes[small])} to {format_bytes(sizes[large])}"
        sentence = f"{first['model']} {need} {span} {cache}"
        return answer_sentence(sentence, f", the least with {names[small]}")
    sentence = f"{equal[small]['model']} {need} {format_bytes(sizes[small])} {cache}"
    if len(equal) == 1 and len(records) > 1:
        size = format_bytes(first["kv_cache_bytes"])
        return answer_sentence(
            f"{first['model']} {need} {size} of KV cache{per_gpu} for {load(first)}",
            f", and {format_bytes(sizes[0])} for {load(last)}",
        )
    weights = {r["dtype"]: format_bytes(r["weight_bytes"] or 0) for r in equal}
    if last["weight_bytes"] is None or keys not in ([], ["dtype"]):
        return answer_sentence(sentence)
    if len(equal) > 1:
        listed = " or ".join(f"{size} in {dtype}" for dtype, size in weights.items())
        return answer_sentence(sentence, f", and for its weights {listed}")
    about = "" if last["parameters_exact"] else "about "
    return answer_sentence(sentence, f", and {about}{weights[last['dtype']]} for its weights")


def _equal_weights(records: Sequence[SizeRecord], models: Mapping[str, Model]) -> str:
    """Return the context at which one model's cache is as large as its weights."""
    last = records[-1]
    if sides(records, (*STORAGE_KEYS, "batch_size")).keys:
        return ""
    tokens, maximum = last["equal_weights_context"], models[last["model"]].max_context
    if not tokens:
        return "The KV cache stays smaller than the weights at any context."
    beyond = f", above the maximum {maximum:,}" if maximum and tokens > maximum else ""
    return f"KV cache and weights are equal at {tokens:,} tokens{beyond}."


def load(record: Mapping[str, Any]) -> str:
    """Return the load in words: 4,096 tokens, or 8 × 4,096 tokens."""
    batch, context = record["batch_size"], record["context"]
    return f"{batch:,} × {context:,} tokens" if batch > 1 else f"{context:,} tokens"
