"""Printed answers of `size` and `compare`."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from kvcalc.errors import join_words
from kvcalc.layers.batch import Parallelism
from kvcalc.model.memory import (
    CacheSize,
    assumptions,
    cache_size,
    layer_bytes,
    reach_line,
)
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records import Record, Records
from kvcalc.records.compare import CompareRecord
from kvcalc.records.figures import TextOrNull
from kvcalc.records.size import SizeRecord
from kvcalc.report.row_names import equal_records, shared_words, sides
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import (
    MIN_MENTIONED_SHARE,
    answer_sentence,
    columns,
    distinct_values,
    footnotes,
    marked_columns,
    memory_sentences,
    pass_details,
    pass_notes,
    per_token,
    percent,
    plural,
    predictions_first,
    ratio,
    records_that_fit,
    reduction_words,
    variant_name,
)
from kvcalc.storage.formats import cache_layout
from kvcalc.units import format_bytes, format_count, shown_in

if TYPE_CHECKING:
    from kvcalc.timing.deployment import TimedDeployment

UNITS = {"gib": "1 GiB = 2^30 bytes", "si": "1 GB = 10^9 bytes", "bytes": "exact bytes"}
LOAD = ("context", "batch_size")
STORAGE_KEYS = ("model", "tensor_parallel_size", "dtype", "kv_cache_dtype")
SIZE_COLUMNS = columns(
    SizeRecord,
    "model tensor_parallel_size dtype context batch_size kv_cache_dtype kv_cache_bytes "
    "kv_cache_read_bytes bytes_per_token attention weight_bytes equal_weights_context mha_ratio "
    "parameters fixed_bytes active_parameters kv_cache_allocated_bytes | *",
    inputs="context batch_size kv_cache_dtype",
    optional="tensor_parallel_size dtype",
    hidden="gpus",
)

MAX_SIZES = 3  # sizes in one sentence


def size_table(
    records: Sequence[SizeRecord],
    stored: Sequence[tuple[Model, Precision, Parallelism]],
) -> Table:
    """Return the table that `size` prints: KV cache bytes per GPU of models, contexts and batches.

    Args:
        records: Records of `size`, one per row.
        stored: (model, data types, parallelism) triples. Notes for `--verbose` state what is
            assumed about each model.
    """
    first = records[0]
    block_size, has_weights = first["block_size"], first["weight_bytes"] is not None
    models = {model.name: model for model, *_ in stored}
    details = [
        f"{model.name}: {assumptions(model, precision, block_size, ranks, has_weights)}"
        for model, precision, ranks in stored
    ]
    for name, model in models.items():
        if reach := reach_line(model):
            details.append(f"{name}: {reach}")
    details.append(f"{UNITS[shown_in()]}; `--explain` shows the formulas")
    equal = _equal_weights(records, models) if has_weights else ""
    return Table(
        records,
        SIZE_COLUMNS,
        _size_sentence(records, *stored[-1]),
        footnotes(*_storage(records, models), equal, *_model_notes(records, stored)),
        details=[*dict.fromkeys(details)],
    )


def _model_notes(
    records: Sequence[SizeRecord], stored: Sequence[tuple[Model, Precision, Parallelism]]
) -> list[str]:
    """Return notes on a single model: its bytes per token on one GPU if its GPUs share them, and
    the tokens of an image if its vision tower is known."""
    if len(stored) > 1:
        return []
    model, precision, _ = stored[0]
    notes = []
    slope = cache_size(model, records[-1]["context"], precision=precision).slope
    if slope != records[-1]["bytes_per_token"]:
        notes.append(f"On one GPU, the KV cache needs {per_token(slope)} per token.")
    if image := model.vision:
        notes.append(f"The largest image has {image.tokens:,} tokens, part of the context.")
    return notes


def _storage(records: Sequence[SizeRecord], models: Mapping[str, Model]) -> tuple[str, str]:
    """Return footnotes on the formats of weights and cache with the blocks, and on the index keys
    of engines; '' for a footnote that is not needed."""
    formats = {
        "dtype": "weights in {}",
        "kv_cache_dtype": "KV cache in {}",
        "block_size": "blocks of {} tokens",
    }
    storage = ", ".join(shared_words(records, formats))
    differs = any(
        {"latent", "index_key"} <= models[r["model"]].roles
        and cache_layout(r["kv_cache_dtype"])["index_key"].name != "fp8_block128"
        for r in records
    )
    return (
        f"{storage[0].upper()}{storage[1:]}.",
        "vLLM and SGLang store index keys in fp8." * differs,
    )


def _size_sentence(
    records: Sequence[SizeRecord], model: Model, precision: Precision, parallelism: Parallelism
) -> str:
    """Return a sentence on the size of the KV cache. Of several models or formats, it names the
    smallest and largest at the last context and batch size.

    Args:
        model: The model of the last record, with its data types and parallelism.
    """
    first, last = records[0], records[-1]
    equal = equal_records(records, last, *LOAD)
    keys, names = sides(equal, STORAGE_KEYS)
    groups: dict[int, list[str]] = {}
    kinds = [record["attention"] for record in equal]
    for record, name in zip(equal, names):
        # two models whose attention differs and is one word, such as MLA
        if keys == ["model"] and len(set(kinds)) == 2 == len(" ".join(kinds).split()):
            name += f" with {record['attention']}"
        groups.setdefault(record["kv_cache_bytes"], []).append(name.replace(", ", " with ", 1))
    least, most = min(groups), max(groups)
    smallest, size = _joined(groups[least]), format_bytes(least)
    per_gpu = " per GPU" * any(record["gpus"] > 1 for record in records)
    cache = f"of KV cache{per_gpu} for {load_words(last)}"
    has_models = "model" in keys
    is_plural = (has_models and len(groups[least]) > 1) or last["parameters_exact"] is None
    subject = (
        f"{smallest if has_models else model.name}{' each' * (has_models and least == most)} "
        f"need{'s' * (not is_plural)}"
    )
    if least != most:
        return _different_sizes(groups, subject, load_words(last), per_gpu, has_models)
    first_size = format_bytes(first["kv_cache_bytes"])
    if len(equal) == 1 and first_size != size:
        sentence = f"{subject} {first_size} of KV cache{per_gpu} for {load_words(first)}"
        saved = f", a difference of {format_bytes(abs(least - first['kv_cache_bytes']))}"
        return answer_sentence(sentence, f", and {size} for {load_words(last)}", saved)
    start = cache_size(model, 1, precision=precision, parallelism=parallelism)
    if start.fixed and not start.slope:
        cache = f"of state{per_gpu} for {plural(last['batch_size'], 'sequence')} of any length"
    elif 0 < start.fixed == last["fixed_bytes"]:
        state = start.fixed * parallelism.sequences(last["batch_size"])
        size = format_bytes(least - state)
        cache = cache.replace(" for", f" plus {format_bytes(state)} of state for", 1)
    sentence = f"{subject} {size} {cache}"
    if keys not in ([], ["dtype"]):
        return answer_sentence(sentence, f", the same with {smallest}" * (not has_models))
    weights = [format_bytes(r["weight_bytes"] or 0) for r in equal]
    if len(equal) > 1:
        listed = [f"{size} in {r['dtype']}" for size, r in zip(weights, equal)]
        return answer_sentence(sentence, f", and for weights {' or '.join(listed)}")
    one_rank = cache_size(model, 1, 1, precision, parallelism=Parallelism(pp=parallelism.pp))
    copies = parallelism.tp * start.slope / (one_rank.slope or 1)
    repeated = f", each KV head on {copies:.0f} GPUs" * (copies > 1 and copies % 1 == 0)
    if 1 < copies == parallelism.tp:
        repeated = ", a full copy on each"
    return answer_sentence(
        sentence, repeated or _per_token_clause(last, start), *_weights_clauses(last)
    )


def _weights_clauses(record: SizeRecord) -> list[str]:
    """Return clauses on the bytes of the weights and on the context with as many bytes, or for a
    batch on the bytes of both."""
    if not record["weight_bytes"]:
        return []
    about = "about " * (not record["parameters_exact"])
    clauses = [f", and {about}{format_bytes(record['weight_bytes'])} for weights"]
    if record["batch_size"] > 1:
        total = record["kv_cache_bytes"] + record["weight_bytes"]
        clauses.append(f", together {format_bytes(total)}")
    elif tokens := record["equal_weights_context"]:
        clauses.append(f", both equal at {tokens:,} tokens")
    return clauses


def _per_token_clause(record: SizeRecord, start: CacheSize) -> str:
    """Return a clause on the bytes per token and the bytes of windows.

    Args:
        start: Cache of one token. Its slope is the bytes per token before a window is full.
    """
    slope, fixed, end = record["bytes_per_token"], record["fixed_bytes"], ""
    if not slope and start.slope:  # a window or a budget is full
        slope, limit = start.slope, (fixed - start.fixed) / start.slope
        end, fixed = f" up to its {limit:,.0f}-token limit", start.fixed
    window = f" plus {format_bytes(fixed)} per sequence" * (fixed > start.fixed)
    return f", {per_token(slope)} per token{end}{window}" * bool(slope)


def _different_sizes(
    groups: Mapping[int, Sequence[str]], subject: str, load: str, per_gpu: str, has_models: bool
) -> str:
    """Return a sentence on caches of different sizes.

    Args:
        groups: Bytes → names of the rows with these bytes.
        subject: The smallest models and their verb, such as `deepseek-v3 needs`; without
            `has_models`, the only model.
        load: Context and batch size in words.
        per_gpu: ` per GPU` or ''.
        has_models: Whether the rows have several models.
    """
    ordered = sorted(groups)
    size, largest = format_bytes(ordered[0]), format_bytes(ordered[-1])
    is_short = len(groups) <= MAX_SIZES
    factor = f", {ratio(ordered[-1] / ordered[0])} as much" if ordered[0] else ""
    if has_models and is_short and max(map(len, groups.values())) == 1:
        others = [f"{groups[n][0]} {format_bytes(n)}" for n in ordered[1:]]
        words = join_words([f"{subject} {size}", *others])
        return answer_sentence(
            f"{words} of KV cache{per_gpu} for {load}", factor * (len(groups) == 2)
        )
    if has_models:
        return answer_sentence(
            f"{subject} the smallest KV cache for {load}, {size}{per_gpu}",
            f", and {_joined(groups[ordered[-1]])} the largest, {largest}",
            factor,
        )
    if is_short:
        sizes = [
            f"{format_bytes(n)}{per_gpu} with {_joined(names)}" for n, names in groups.items()
        ]
        name = subject.partition(" ")[0]
        saved = f", a difference of {format_bytes(ordered[-1] - ordered[0])}"
        return answer_sentence(
            f"{name} stores {load} in {join_words(sizes)}", saved * (len(groups) == 2)
        )
    return answer_sentence(
        f"{subject} {size} to {largest} of KV cache{per_gpu} for {load}",
        f", the least with {_joined(groups[ordered[0]])}",
    )


def _joined(names: Sequence[str]) -> str:
    """Return names as one text: `a, b and c`, or `4 rows` for more than three."""
    return join_words(names) if len(names) < 4 else f"{len(names)} rows"


def _equal_weights(records: Sequence[SizeRecord], models: Mapping[str, Model]) -> str:
    """Return a note on the context at which one model's cache is as large as its weights; '' for
    several."""
    last = records[-1]
    tokens, maximum = last["equal_weights_context"], models[last["model"]].max_context
    if sides(records, (*STORAGE_KEYS, "batch_size")).keys:
        return ""
    if not tokens:
        is_stored = last["kv_cache_bytes"] > 0
        return "The KV cache stays smaller than the weights at any context." * is_stored
    beyond = f", above the maximum {maximum:,}" if maximum and tokens > maximum else ""
    return f"KV cache and weights are equal at {tokens:,} tokens{beyond}."


def load_words(record: Record) -> str:
    """Return a record's context and batch size in words: 4,096 tokens, or 8 × 4,096 tokens.

    Args:
        record: Record with the keys `context` and `batch_size`.
    """
    batch, tokens = record["batch_size"], plural(record["context"], "token")
    return f"{batch:,} × {tokens}" if batch > 1 else tokens


class CompareRow(CompareRecord):
    """A row of the table that `compare` prints: a record with three further values.

    Attributes:
        step_s: Predicted seconds of a decode step. For a GPU and engine without measured kernels,
            it is a lower bound from the datasheet.
        grade: Published quality of the attention variant: `99.8%` of the model's score with 16
            bits, or a word such as `moderate`. None if nothing is published.
        intensity: FLOP per byte of the decode step.
    """

    step_s: Annotated[float, "time of one decode step", "step"]
    grade: Annotated[
        TextOrNull,
        "share of the score with 16 bits, if published for this model; else DeepSeek-V2's word",
        "quality",
    ]
    intensity: Annotated[
        float | None, "flops ÷ bytes; null without traffic", "FLOP/B of the step"
    ]


COMPARE_COLUMNS = columns(
    CompareRow,
    "variant gpu tensor_parallel_size dtype engine basis context batch_size kv_cache_dtype "
    "kv_cache_bytes stored_reduction read_reduction step_s max_num_seqs attention_intensity "
    "head_diversity grade ttft_s prefill_flops attention kv_cache_read_bytes "
    "bytes_per_token parameters equal_weights_context equal_reads_context flops | roofline_s "
    "intensity bound",
    inputs="context batch_size kv_cache_dtype",
    optional="gpu tensor_parallel_size dtype engine basis",
)


def compare_table(deployments: "Sequence[TimedDeployment]", records: Records) -> Table:
    """Return the table that `compare` prints, with KV cache, step time and quality of variants.

    There is a row per deployment, attention variant, context and batch size.

    Args:
        deployments: Deployments of one model.
        records: Records of `compare`: all records of the first deployment, then of the second, and
            so on.
    """
    model, first = deployments[0].model, records[0]
    is_timed = first["weight_bytes"] is not None  # otherwise only the dimensions are known
    assumed = [
        assumptions(model, d.precision, first["block_size"], d.parallelism, is_timed)
        for d in deployments
    ]
    quality = ["", *_quality_lines({record["variant"]: record for record in records})]
    equal = equal_records(records[: len(records) // len(deployments)], first, *LOAD)
    rows = [
        {**r, "step_s": r.get("time_s") or r.get("roofline_s"), "grade": _grade(r)}
        for r in records
    ]
    has_reference = len(equal) > 1  # a single variant is its own reference
    reference = f"Reductions are against {_variant(first)}." * has_reference
    notes, details = [reference], [*dict.fromkeys(assumed)]
    if is_timed:
        gpus = distinct_values(records, "gpu")
        none_fits = f"No row fits on {first['gpus']}× {' or '.join(gpus)}."
        notes = pass_notes(records, none_fits * (not records_that_fit(records)))
        details += [
            f"{reference} Times are of one decode step on {', '.join(gpus)}.".lstrip(),
            *pass_details(records),
            *memory_sentences(records),
        ]
    return Table(
        predictions_first(rows) if is_timed else rows,
        [
            column
            for column in marked_columns(records, COMPARE_COLUMNS)
            if has_reference or "reduction" not in column.key
        ],
        compared(deployments[0], equal),
        footnotes(*notes),
        details=[*details, *quality],
    )


def _grade(record: Record) -> str | None:
    """Return the quality of a variant in one word; None if nobody published it.

    Example: 'moderate' of gqa:8, 99.8% of an fp8 cache.
    """
    if record["quality_share"]:
        return percent(record["quality_share"])
    word = re.search(r"'(\w+)'", record["quality"] or "")
    return word and word[1]


def compared(deployment: "TimedDeployment", records: Records) -> str:
    """Return the title of `compare`: a sentence on the attention variant with the smallest cache.

    It states the bytes of the whole batch on one GPU, and how much less they are than with the
    first variant. A single variant is compared with the model's own attention. With the usual
    variants, the sentence is about the model's own attention: what its layers with small caches
    save, or how much less than MHA it needs.

    Args:
        deployment: Deployment of the model.
        records: Records of `compare` with one context and batch size, one per variant.
    """
    from kvcalc.planning.comparison import usual_variants  # `size` needs no engine

    first, model = records[0], deployment.model
    if not any(part.attends for part in model.mixers):
        return f"{model.name} has no attention that a variant could replace."
    best = min(records, key=lambda r: r["kv_cache_bytes"])
    by_name = {record["variant"]: record for record in records}
    usual = usual_variants(model)
    if ",".join(by_name) in ("none", usual, usual.removesuffix(",dsa")):
        if saving := _layer_saving(deployment, first):
            return saving
        best = by_name.get("none", best)
    sentence = (
        f"{model.name} with {_variant(best)} need{'s' * (first['weight_bytes'] is not None)} "
        f"{format_bytes(best['kv_cache_bytes'])} of KV cache{' per GPU' * (first['gpus'] > 1)} for "
        f"{load_words(first)}"
    )
    if len(records) == 1:
        return answer_sentence(sentence, *_against_own_attention(deployment, first))
    reader = max(records, key=lambda r: r["read_reduction"] or 0)
    reads = ""
    if (reader["read_reduction"] or 0) > max(1, best["read_reduction"] or 0):
        reads = f", and {_variant(reader)} reads {reduction_words(reader['read_reduction'])}"
    elif best["kv_cache_read_bytes"] < best["kv_cache_bytes"]:
        reads = f", and reads {reduction_words(best['read_reduction'])}"
    other = max(records, key=lambda r: r["kv_cache_bytes"]) if best is first else first
    most, least = other["kv_cache_bytes"], best["kv_cache_bytes"]
    if least in (0, most):
        return answer_sentence(sentence, ", and no variant needs less", reads)
    return answer_sentence(
        sentence,
        f", {reduction_words(most / least)} than with {_variant(other)}",
        reads,
        f", a difference of {format_bytes(most - least)}",
    )


def _layer_saving(deployment: "TimedDeployment", record: Record) -> str:
    """Return a sentence on what layers with windows or other small caches save, else ''.

    The reference is a model whose layers all store as much as its largest layer. It is the largest
    at the model's maximum context.
    """
    model, precision = deployment.model, deployment.precision
    context = record["context"]
    longest = model.max_context or context
    layers = layer_bytes(model, longest, precision)
    largest = layers.index(max(layers))
    shares = []
    for tokens in (longest, context):
        sizes = [size for size, _ in layer_bytes(model, tokens, precision)]
        full = len(sizes) * sizes[largest]
        saved = max(0, full - sum(sizes))
        shares.append(saved / full)
    if shares[0] < MIN_MENTIONED_SHARE:
        return ""
    small = [label for size, label in layers if size < layers[largest][0]]
    names = dict.fromkeys(label.rpartition("(")[2].rstrip(")") for label in small)
    far, near = map(percent, shares)
    return answer_sentence(
        f"With {' or '.join(names)} in {len(small)} of {len(layers)} layers, {model.name} saves "
        f"{near} or {format_bytes(saved * record['batch_size'])} of its KV cache at {context:,} "
        "tokens",
        f", and {far} at {longest:,} tokens" * (near != far),
    )


def _against_own_attention(deployment: "TimedDeployment", record: Record) -> list[str]:
    """Return clauses that compare a variant with the KV cache of the model's own attention, if it
    is another attention."""
    if record["variant"].lower() == "none" or not record["kv_cache_bytes"]:
        return []
    own_bytes = cache_size(
        deployment.model,
        record["context"],
        record["batch_size"],
        deployment.precision,
        parallelism=deployment.parallelism,
    ).stored
    if record["kv_cache_bytes"] == own_bytes:
        return [", as with its own attention"]
    change = reduction_words(own_bytes / record["kv_cache_bytes"])
    return [f", {change} than with its own attention", f", {format_bytes(own_bytes)}"]


def _variant(record: Record) -> str:
    """Return the name of a variant in a sentence; without a model, GQA-8 for `none`."""
    own = "its own attention" if record["weight_bytes"] else record["attention"]
    name = str(record["variant"]).replace("none/", f"{own} and ")
    return own if name.lower() == "none" else name


def _quality_lines(by_variant: Mapping[str, Record]) -> list[str]:
    """Return lines on the properties that are equal in all variants, and on published quality.

    Variants with equal text share a line.
    """
    names: dict[str, list[str]] = {}
    for name, record in by_variant.items():
        words = [f"equal in all variants: {record['held_equal']}"]
        if record["head_diversity"]:
            words.append(f"{record['head_diversity']} heads, at the cost of {record['trades']}")
        own, plain = record["parameters"], record.get("mha_parameters")
        if own and plain and record["attention"].startswith(("MLA", "DSA")) and own != plain:
            change = f"{'fewer' if own < plain else 'more'} than the {format_count(plain)}"
            words.append(f"{format_count(own)} parameters, {change} with MHA")
        if record["quality"]:
            words.append(f"published: {record['quality']}")
        names.setdefault("; ".join(words), []).append(variant_name(name))
    return [f"{', '.join(variants)} — {text}" for text, variants in names.items()]
