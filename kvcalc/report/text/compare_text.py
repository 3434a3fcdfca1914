"""Printed answers of `compare`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from kvcalc.model.memory import assumptions, cache_size
from kvcalc.records import Record
from kvcalc.records.compare import CompareRecord
from kvcalc.records.figures import Figure
from kvcalc.report.row_names import alike
from kvcalc.report.text.fit_text import marked_columns, memory_notes, memory_sentences
from kvcalc.report.text.size_text import LOAD, load
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import (
    answer_sentence,
    budget_warning,
    columns,
    distinct_notes,
    fitting,
    footnotes,
    memory_warning,
    node_notes,
    percent,
    predictions_first,
    ratio,
    time_details,
    time_footnotes,
    variant_name,
)
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes, format_count


class CompareRow(CompareRecord):
    """A record of `compare` with the time of its decode step, predicted or else the bound."""

    step_s: Annotated[
        float, Figure("step", "time of one decode step", mark="time", is_noted=True)
    ]
    roofline_s: Annotated[
        float, Figure("at least", "datasheet bound of the step", is_noted=True)
    ]
    intensity: Annotated[
        float | None, Figure("FLOP/B of the step", "flops ÷ bytes; null without traffic")
    ]


COMPARE_COLUMNS = columns(
    CompareRow,
    "variant tensor_parallel_size dtype engine basis context batch_size kv_cache_dtype "
    "kv_cache_bytes stored_reduction read_reduction step_s max_num_seqs attention_intensity "
    "attention kv_cache_read_bytes bytes_per_token parameters roofline_s intensity bound",
    inputs="context batch_size kv_cache_dtype",
    optional="tensor_parallel_size dtype engine basis",
    wide="roofline_s intensity bound",
)


def compare_tables(
    deployments: Sequence[TimedDeployment], records: Sequence[Record], block_size: int
) -> list[Table]:
    """Return the table of the variants, with their quality in its details."""
    model, first = deployments[0].model, records[0]
    gpus = [*dict.fromkeys(d.gpu.name for d in deployments)]
    is_timed = first["weight_bytes"] is not None  # otherwise only the dimensions are known
    assumed = [
        assumptions(model, d.precision, block_size, d.parallelism, is_timed)
        for d in deployments
    ]
    quality = ["", *_quality_lines({record["variant"]: record for record in records})]
    reference = f"Reductions are against {_variant(first)}"
    title = compared(deployments, records)
    if not is_timed:
        notes, details = [f"{reference}."], [*dict.fromkeys(assumed), *quality]
        return [Table(records, COMPARE_COLUMNS, title, footnotes(*notes), details=details)]
    shown = list(COMPARE_COLUMNS)
    if len(gpus) > 1:
        shown[1:1] = columns(CompareRow, "gpu")
    fallbacks = distinct_notes(records, "fallback")
    warnings = [budget_warning(records), memory_warning(records)]
    details = [
        *dict.fromkeys(assumed),
        title * (not fitting(records)),
        f"{reference}, one decode step on {', '.join(gpus)}.",
        *time_details(records),
        *node_notes(records),
        *fallbacks,
        *memory_sentences(records),
        *memory_notes(records),
        *quality,
    ]
    if not fitting(records):
        title = memory_sentences(records)[0]
    rows = [{**r, "step_s": r["time_s"] or r["roofline_s"]} for r in records]
    notes = footnotes(*fallbacks, *warnings, *time_footnotes(records))
    return [
        Table(
            predictions_first(rows),
            marked_columns(records, shown),
            title,
            notes,
            details=details,
        )
    ]


def compared(deployments: Sequence[TimedDeployment], records: Sequence[Record]) -> str:
    """Return the variant of the first deployment that needs least memory, in one sentence.

    A single variant is compared with the model's own attention.
    """
    first = records[0]
    equal = alike(records[: len(records) // len(deployments)], first, *LOAD)
    best = min(equal, key=lambda r: r["kv_cache_bytes"])
    need = "need" if first["weight_bytes"] is None else "needs"
    cache = f"of KV cache{' per GPU' * (first['gpus'] > 1)} for {load(first)}"
    sentence = (
        f"{deployments[0].model.name} with {_variant(best)} {need} "
        f"{format_bytes(best['kv_cache_bytes'])} {cache}"
    )
    if len(equal) == 1:
        return answer_sentence(sentence, *_against_own_attention(deployments[0], first))
    reader = max(equal, key=lambda r: r["read_reduction"] or 0)
    reads = ""
    if (reader["read_reduction"] or 0) > max(1, best["read_reduction"] or 0):
        reads = f", and {_variant(reader)} reads {_less(reader['read_reduction'])}"
    if best is first:
        return answer_sentence(sentence, ", the least of these variants", reads)
    less = f", {_less(best['stored_reduction'])} than with {_variant(first)}"
    return answer_sentence(sentence, less, reads)


def _against_own_attention(deployment: TimedDeployment, record: Record) -> list[str]:
    """Return clauses on the KV cache of the model's own attention, if the variant is another."""
    if record["variant"].lower() == "none" or not record["kv_cache_bytes"]:
        return []
    own_bytes = cache_size(
        deployment.model,
        record["context"],
        record["batch_size"],
        deployment.precision,
        parallelism=deployment.parallelism,
    ).stored
    factor = record["kv_cache_bytes"] / own_bytes
    change = f"{ratio(max(factor, 1 / factor))} {'more' if factor > 1 else 'less'} than"
    change = "as much as" if factor == 1 else change
    return [f", {change} with its own attention", f", {format_bytes(own_bytes)}"]


def _less(reduction: float) -> str:
    """Return a reduction in words: `8× less`, or in percent if it rounds to 1×."""
    text = ratio(reduction)
    return f"{percent(1 - 1 / reduction) if text == '1×' else text} less"


def _variant(record: Record) -> str:
    """Return a variant as a sentence names it."""
    name = str(record["variant"])
    return "its own attention" if name.lower() == "none" else name


def _quality_lines(by_variant: Mapping[str, Record]) -> list[str]:
    """Return what is equal in all variants and their published quality.

    Variants with equal text share a line.
    """
    names: dict[str, list[str]] = {}
    for name, record in by_variant.items():
        words = [f"equal in all variants: {record['held_equal']}"]
        if record["head_diversity"]:
            words.append(f"heads: {record['head_diversity']}; costs: {record['trades']}")
        own, plain = record["parameters"], record.get("mha_parameters")
        if own and plain and record["attention"].startswith(("MLA", "DSA")) and own != plain:
            change = f"{'fewer' if own < plain else 'more'} than the {format_count(plain)}"
            words.append(f"{format_count(own)} parameters, {change} with MHA")
        if record["quality"]:
            words.append(f"published: {record['quality']}")
        names.setdefault("; ".join(words), []).append(variant_name(name))
    return [f"{', '.join(variants)} — {text}" for text, variants in names.items()]
