"""Printed answers of `size`, `compare` and `compare --deployments`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from kvcalc.layers.batch import Parallelism
from kvcalc.model.memory import assumptions, cache_size, reach_line
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records.compare import CompareRecord
from kvcalc.records.figures import Figure
from kvcalc.records.size import SizeRecord
from kvcalc.report.charts.chart import Chart, bar_chart, joined
from kvcalc.report.export import Record
from kvcalc.report.row_names import alike, shared_words, sides
from kvcalc.report.text.fit_text import marked_columns, memory_notes, memory_sentences
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import (
    answer_sentence,
    budget_warning,
    columns,
    comparable,
    distinct_notes,
    fitting,
    footnotes,
    memory_warning,
    node_notes,
    percent,
    predictions_first,
    ratio,
    seconds,
    time_details,
    time_footnotes,
)
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import MAX_TOKENS, format_bytes, format_count, format_si, shown_in

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


def size_table(
    records: Sequence[Record],
    stored: Sequence[tuple[Model, Precision, Parallelism]],
    block_size: int,
) -> Table:
    """Return the table of sizes with the assumptions of each model."""
    has_weights = records[0]["weight_bytes"] is not None
    models = {model.name: model for model, *_ in stored}
    lines = [
        f"{model.name}: {assumptions(model, precision, block_size, ranks, has_weights)}"
        for model, precision, ranks in stored
    ]
    lines += [
        f"{name}: {line}" for name, model in models.items() if (line := reach_line(model))
    ]
    equal, shares = "", []
    if has_weights:
        equal = _equal_weights(records, models)
        shares = _shares(records)
    details = [*dict.fromkeys(lines), *shares, *_beyond_maximum(records, models)]
    details.append(f"{UNITS[shown_in()]}; `--explain` shows the formulas")
    return Table(
        records,
        SIZE_COLUMNS,
        _size_sentence(records),
        footnotes(_storage_note(records, block_size), equal),
        details=details,
    )


def _size_sentence(records: Sequence[Record]) -> str:
    """Return what the KV cache needs: of several models or formats, the least and the most.

    They are compared at the last context and batch size.
    """
    first, last = records[0], records[-1]
    equal = alike(records, last, *LOAD)
    keys, names = sides(equal, STORAGE_KEYS)
    need = "need" if first["parameters_exact"] is None else "needs"
    cache = "of KV cache per GPU" if any(r["gpus"] > 1 for r in records) else "of KV cache"
    sizes = [r["kv_cache_bytes"] for r in equal]
    small, large = (sizes.index(choose(sizes)) for choose in (min, max))
    least, most = equal[small], equal[large]
    start = f"{least['model']} {need} {format_bytes(least['kv_cache_bytes'])} {cache}"
    if "model" in keys and least["kv_cache_bytes"] != most["kv_cache_bytes"]:
        return answer_sentence(
            f"{least['model']} needs the smallest KV cache for {_load(last)}, "
            f"{format_bytes(least['kv_cache_bytes'])}{' per GPU' * cache.endswith('GPU')}",
            f", and {most['model']} the largest, {format_bytes(most['kv_cache_bytes'])}",
        )
    if least["kv_cache_bytes"] != most["kv_cache_bytes"]:
        span = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
        return answer_sentence(
            f"{first['model']} {need} {span} {cache} for {_load(last)}",
            f", the least with {names[small]}",
        )
    if len(records) > len(equal) and len(equal) == 1:
        start = f"{first['model']} {need} {format_bytes(first['kv_cache_bytes'])} {cache}"
        more = f", and {format_bytes(last['kv_cache_bytes'])} for {_load(last)}"
        if first["kv_cache_bytes"] == last["kv_cache_bytes"]:
            more = f" and as much for {_load(last)}"
        return answer_sentence(f"{start} for {_load(first)}", more)
    about = "" if last["parameters_exact"] else "about "
    weights = {r["dtype"]: format_bytes(r["weight_bytes"] or 0) for r in equal}
    listed = " or ".join(f"{size} in {dtype}" for dtype, size in weights.items())
    only = f", and {about}{format_bytes(last['weight_bytes'] or 0)} for its weights"
    return answer_sentence(
        f"{start} for {_load(last)}",
        f", and for its weights {listed}" if keys == ["dtype"] else "",
        only if len(equal) == 1 and last["weight_bytes"] is not None else "",
    )


def _storage_note(records: Sequence[Record], block_size: int) -> str:
    """Return the formats that all rows share, and the block size."""
    words = shared_words(
        records, {"dtype": "weights in {}", "kv_cache_dtype": "KV cache in {}"}
    )
    words.append(f"blocks of {block_size} tokens")
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _equal_weights(records: Sequence[Record], models: Mapping[str, Model]) -> str:
    """Return the context at which one model's cache is as large as its weights."""
    last = records[-1]
    if sides(records, (*STORAGE_KEYS, "batch_size")).keys:
        return ""
    tokens, maximum = last["equal_weights_context"], models[last["model"]].max_context
    if not tokens:
        return "The KV cache stays smaller than the weights at any context."
    beyond = f", above the maximum {maximum:,}" if maximum and tokens > maximum else ""
    return f"KV cache and weights are equal at {tokens:,} tokens{beyond}."


def _shares(records: Sequence[Record]) -> list[str]:
    """Return the KV cache as a share of the weights, at the last context and batch size."""
    last = records[-1]
    equal = alike(records, last, *LOAD)
    shares = [
        f"{name} {percent(r['cache_share_of_weights'])}".strip()
        for name, r in zip(sides(equal, STORAGE_KEYS).names, equal, strict=True)
    ]
    return [f"KV cache as a share of the weights at {_load(last)}: {', '.join(shares)}"]


def _beyond_maximum(records: Sequence[Record], models: Mapping[str, Model]) -> list[str]:
    """Return a line on models whose cache equals the weights only beyond the maximum context."""
    maximum = {name: model.max_context or MAX_TOKENS for name, model in models.items()}
    names = dict.fromkeys(
        f"{r['model']}'s {maximum[r['model']]:,}"
        for r in records
        if (r["equal_weights_context"] or 0) > maximum.get(r["model"], MAX_TOKENS)
    )
    return [f"= weights: beyond the maximum context, {', '.join(names)}"] if names else []


def _load(record: Record) -> str:
    """Return the load in words: 4,096 tokens, or 8 × 4,096 tokens."""
    batch, context = record["batch_size"], record["context"]
    return f"{batch:,} × {context:,} tokens" if batch > 1 else f"{context:,} tokens"


def compare_tables(
    deployments: Sequence[TimedDeployment],
    records: Sequence[Record],
    block_size: int,
) -> list[Table]:
    """Return the table of the variants, with their quality in its details."""
    model, first = deployments[0].model, records[0]
    gpus = [*dict.fromkeys(d.gpu.name for d in deployments)]
    timed = first["weight_bytes"] is not None  # else only the dimensions are known
    by_variant = {record["variant"]: record for record in records}
    details = [
        *dict.fromkeys(
            assumptions(model, d.precision, block_size, d.parallelism, timed)
            for d in deployments
        ),
        *_window_notes(by_variant),
    ]
    title = compared(deployments, records)
    if not fitting(records):
        details.append(title)
        title = memory_sentences(records)[0]
    where = f", one decode step on {', '.join(gpus)}" if timed else ""
    reference = f"Reductions are against {_variant(first)}{where}."
    notes = [reference]
    rows: list[Record] = list(records)
    shown = list(COMPARE_COLUMNS)
    if len(gpus) > 1:
        shown[1:1] = columns(CompareRow, "gpu")
    if timed:
        notes = [
            *distinct_notes(records, "fallback"),
            budget_warning(records),
            memory_warning(records),
            *time_footnotes(records),
        ]
        rows = predictions_first(
            [{**r, "step_s": r["time_s"] or r["roofline_s"]} for r in records]
        )
        details += [
            reference,
            *time_details(records),
            *node_notes(records),
            *distinct_notes(records, "fallback"),
        ]
        details += memory_sentences(records) + memory_notes(records)
    return [
        Table(
            rows,
            marked_columns(records, shown),
            title,
            footnotes(*notes),
            details=[*details, "", *_known_of(by_variant)],
        )
    ]


def compared(deployments: Sequence[TimedDeployment], records: Sequence[Record]) -> str:
    """Return the variant of the first deployment that needs least memory, in one sentence.

    A single variant is compared with the model's own attention.
    """
    first = records[0]
    model = deployments[0].model.name
    equal = alike(records[: len(records) // len(deployments)], first, *LOAD)
    best = min(equal, key=lambda r: r["kv_cache_bytes"])
    need = "need" if first["weight_bytes"] is None else "needs"
    size = (
        f"{format_bytes(best['kv_cache_bytes'])} of KV cache{' per GPU' * (first['gpus'] > 1)}"
    )
    start = f"{model} with {_variant(best)} {need} {size} for {_load(first)}"
    own = _own_bytes(deployments[0], first)
    if len(equal) == 1 and own:
        times = best["kv_cache_bytes"] / own
        change = f"{ratio(max(times, 1 / times))} {'more' if times > 1 else 'less'} than"
        return answer_sentence(
            start,
            f", {'as much as' if times == 1 else change} with its own attention",
            f", {format_bytes(own)}",
        )
    reader = max(equal, key=_read_reduction)
    reads = ""
    if _read_reduction(reader) > max(1.0, _read_reduction(best)):
        reads = f", and {_variant(reader)} reads {_less(_read_reduction(reader))}"
    if best is first:
        return answer_sentence(start, ", the least of these variants" * (len(equal) > 1), reads)
    less = f", {_less(best['stored_reduction'])} than with {_variant(first)}"
    return answer_sentence(start, less, reads)


def _window_notes(by_variant: Mapping[str, Record]) -> list[str]:
    """Return the receptive field of windows, and what eviction stores to select tokens."""
    fields = [
        f"{name} {r['receptive_field']:,} tokens"
        for name, r in by_variant.items()
        if r["receptive_field"]
    ]
    scores = [
        f"{name} {format_bytes(r['eviction_score_bytes'])} and "
        f"{format_si(r['eviction_flops'], 'FLOP')} a step"
        for name, r in by_variant.items()
        if r["eviction_score_bytes"]
    ]
    titles = (
        "receptive field, layers × window",
        "eviction scores, not in the KV cache",
    )
    return [
        f"{title}: {', '.join(words)}"
        for title, words in zip(titles, (fields, scores), strict=True)
        if words
    ]


def _own_bytes(deployment: TimedDeployment, first: Record) -> int:
    """Return the KV cache of the model's own attention; 0 if the first variant is that or stores
    nothing."""
    if first["variant"].lower() == "none" or not first["kv_cache_bytes"]:
        return 0
    model, precision, ranks = (
        deployment.model,
        deployment.precision,
        deployment.parallelism,
    )
    size = cache_size(
        model, first["context"], first["batch_size"], precision, parallelism=ranks
    )
    return int(size.stored)


def _read_reduction(record: Record) -> float:
    """Return how many times fewer bytes a variant reads than the reference; 0 if it reads none."""
    return float(record["read_reduction"] or 0)


def _less(reduction: float) -> str:
    """Return a reduction in words: `8× less`, or in percent if it rounds to 1×."""
    text = ratio(reduction)
    return f"{percent(1 - 1 / reduction) if text == '1×' else text} less"


def _variant(record: Record) -> str:
    """Return a variant as a sentence names it."""
    name = str(record["variant"])
    return "its own attention" if name.lower() == "none" else name


def _known_of(by_variant: Mapping[str, Record]) -> list[str]:
    """Return what is known of each variant, variants with equal text in one line."""
    names: dict[str, list[str]] = {}
    for name, record in by_variant.items():
        names.setdefault(_known(record), []).append(
            "original" if name.lower() == "none" else name
        )
    return [f"{', '.join(variants)} — {text}" for text, variants in names.items()]


def _known(record: Record) -> str:
    """Return what a variant has in common with the others, and its published quality."""
    words = [f"equal in all variants: {record['held_equal']}"]
    if record["head_diversity"]:
        words.append(f"heads: {record['head_diversity']}; costs: {record['trades']}")
    own, plain = record["parameters"], record.get("mha_parameters")
    if own and plain and record["attention"].startswith(("MLA", "DSA")) and own != plain:
        change = "fewer" if own < plain else "more"
        words.append(
            f"{format_count(own)} parameters, {change} than the {format_count(plain)} with MHA"
        )
    if record["quality"]:
        words.append(f"published: {record['quality']}")
    return "; ".join(words)


BEFORE_AFTER_COLUMNS = columns(
    """
    side            |                 | text
    fits            | fits            | yes/no  | left
    max_num_seqs    | users           | int
    kv_tokens       | tokens          | int
    kv_budget_bytes | KV cache budget | bytes
    weight_bytes    | weights         | bytes
    tpot_s          | TPOT            | seconds | time
    ttft_s          | TTFT            | seconds | time
    gpus            | GPUs            | int
    """
)


def before_after_table(records: Sequence[Record], sentence: str) -> Table:
    """Return the table of deployments. The first is before, the others are after."""
    names = ["before", "after"]
    if len(records) > 2:
        names[1:] = [f"after {number}" for number in range(1, len(records))]
    first = records[0]
    answer, _, cost = sentence.partition("; ")
    load = f"{first['batch_size']:,} requests of {first['context']:,} tokens"
    labels = [f"{name}: {r['deployment']}" for name, r in zip(names, records, strict=True)]
    mixed = len(comparable(records)) < len(records)
    commands = [r["command"] for r in records if r["command"]]
    return Table(
        [{"side": name, **record} for name, record in zip(names, records, strict=True)],
        BEFORE_AFTER_COLUMNS,
        answer,
        footnotes(
            "≥ marks datasheet bounds, which are not compared with predictions." * mixed,
            f"TPOT is for {load}, TTFT for one of them.",
        ),
        details=[*labels, *filter(None, [cost]), *commands[:-1]],
        commands=commands[-1:],
    )


def before_after_chart(records: Sequence[Record]) -> Chart:
    """Return bars of users, TPOT and TTFT of each deployment."""
    first, timed = records[0], comparable(records)
    load = f"{first['batch_size']:,} at once of {first['context']:,} tokens"
    undrawn = "; bounds are not drawn beside predictions" * (len(timed) < len(records))
    bars = (
        ("Users", "max_num_seqs", records, load, lambda v: f"{v:,.0f}"),
        ("Time per token", "tpot_s", timed, load + undrawn, _time_tick),
        ("Time to the first token", "ttft_s", timed, load + undrawn, _time_tick),
    )
    return joined(
        [
            bar_chart(
                title,
                about,
                [r["deployment"] for r in rows],
                [r[key] or 0.0 for r in rows],
                tick,
            )
            for title, key, rows, about, tick in bars
        ]
    )


def _time_tick(value: float) -> str:
    return seconds(value) if value else "0"
