"""Printed answers of `fit`, `fit --allocations` and `fit --matrix`."""

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvcalc.capacity import Fit
from kvcalc.capacity.fit_records import engine_command, slot_limit
from kvcalc.capacity.suggested_fixes import (
    NO_FIX,
    Advice,
    ConfigChange,
    advice,
    join_with_or,
    small_cache,
    smaller_batch,
    with_surest_length,
)
from kvcalc.errors import join_words
from kvcalc.question.fit_question import TypedWords
from kvcalc.records import JsonObject, Record, Records
from kvcalc.records.fit import AllocationRecord, FitRow
from kvcalc.report.charts.chart import tokens_tick
from kvcalc.report.row_names import (
    equal_records,
    shared_words,
    sides,
    split_words,
    texts_by_name,
)
from kvcalc.report.text.table_layout import Column, Table
from kvcalc.report.text.tables import (
    FORMATS,
    answer_sentence,
    columns,
    distinct_values,
    has_different_values,
    plural,
    seconds,
)
from kvcalc.units import format_bytes

if TYPE_CHECKING:
    from kvcalc.capacity.allocations import AllocationRun

COLUMNS = columns(
    FitRow,
    "model gpu gpus tensor_parallel_size engine dtype kv_cache_dtype gpu_memory_utilization "
    "requested_model_len requested_num_seqs fits missing_bytes max_num_seqs low_num_seqs "
    "unshared_num_seqs offload_num_seqs longest kv_budget_bytes weight_bytes | "
    "kv_budget_low_bytes kv_budget_high_bytes max_concurrency activation_bytes overhead_bytes "
    "num_blocks blocks_per_request kv_tokens needed_utilization *",
)
# columns that are shown only if their values differ
COLUMNS_IF_DIFFERENT = """
    model tensor_parallel_size engine dtype kv_cache_dtype gpu_memory_utilization
    requested_num_seqs fits
"""
# model and data types that all rows share, in a footnote
FORMAT_WORDING = {"model": "{}", "dtype": "{} weights", "kv_cache_dtype": "{} cache"}
# values that a configuration has in common with another one in the same sentence
COMPARABLE_KEYS = """
    requested_model_len requested_num_seqs fits gpu gpus tensor_parallel_size pipeline_parallel_size
"""
ALTERNATIVE_KEYS = "requested_num_seqs fits gpus model engine dtype kv_cache_dtype"
# weights that an option adds
ADDED_WEIGHTS = ("LoRA slots", "draft weights", "MTP weights")
Fits = Sequence[Fit]
BATCHED = {"max_num_batched_tokens": "max_num_batched_tokens {:,}"}
UTILIZATION_NAMES = texts_by_name("""
    vllm: gpu_memory_utilization
    none: gpu_memory_utilization
    sglang: mem_fraction_static
    trtllm: free_gpu_memory_fraction
""")
WASTES = texts_by_name("""
    padded batch: padding_waste
    contiguous slots: contiguous_waste
    pieces of exact size: external_waste
    pages: paged_waste
""")


def fit_table(records: Records, fits: Fits, words: TypedWords) -> Table:
    """Return the table that `fit` prints, with one row per configuration.

    The title names the smallest configuration that fits, and the last line its engine's command. If
    none fits, the title names the memory that the closest lacks. A note then suggests changes, and
    the command has the first change.

    Args:
        records: Records of `fit`, one per configuration.
        fits: The memory and capacity of each configuration, in the order of `records`. If any
            configuration fits, the first is the smallest that does.
        words: The words that the user typed. If they are an engine's command line, changes are
            flags of this engine, and the command has the typed model and flags. Otherwise changes
            are options of kvcalc.
    """
    rows = []
    for record, result in zip(records, fits):
        longest = with_surest_length(result).longest_context
        mark = "≥ " * (longest != result.longest_context)
        rows.append(
            {
                **record,
                "missing_bytes": None if result.fits else -result.headroom_bytes,
                "longest": "no limit" if longest is None else f"{mark}{longest:,}",
            }
        )
    index = _described_row(records, fits)
    record, result = records[index], fits[index]
    row = f"Row {1 + index * (not result.fits)}: " * (len(fits) > 1)
    basis, extra = basis_line(records, fits), words.extra_words
    if "--memory" in extra:
        basis += f", {extra[extra.index('--memory') + 1]} GPUs"
    notes = ["", basis, *_accuracy(result, row)]
    command = record["command"]
    fixes = [change for change in (smaller_batch(result), small_cache(result)) if change]
    if result.fits:
        rows.insert(0, rows.pop(index))
        title = _fit_sentence(records, fits, index)
        notes += _users_notes(records, record, result, fixes, row)
    else:
        name = words.names[result.model.name] if words.stated else ""
        advised = advice(result, words.has_all_experts, name)
        assert advised is not None
        title, note, command = _missing_sentence(record, result, len(fits), advised, name)
        fixes += advised.fixes.values()
        notes.append(note)
        command = command and f"{command} {words.flags}".rstrip()
    return Table(
        rows,
        _shown_columns(records, fits),
        title,
        notes,
        details=_details(records, fits, result, fixes),
        commands=[command] if command else [],
    )


def _shown_columns(records: Records, fits: Fits) -> list[Column]:
    """Return the columns of the table. The heading of the longest context names its users."""
    table_columns = [
        c
        for c in COLUMNS
        if c.key not in COLUMNS_IF_DIFFERENT.split() or has_different_values(records, c.key)
    ]
    if has_different_values(records, "engine"):  # their shares are of different memory
        table_columns = [c for c in table_columns if c.key != "gpu_memory_utilization"]
    count = records[0]["requested_num_seqs"]
    if count > 1 and not has_different_values(records, "requested_num_seqs"):
        title = f"max context, {count:,} users"
        table_columns = [
            replace(c, title=title) if c.key == "longest" else c for c in table_columns
        ]
    has_cache = any(result.needed.cache for result in fits)
    return [c for c in table_columns if has_cache or "kv_budget" not in c.key]


def _described_row(records: Records, fits: Fits) -> int:
    """Return the index of the configuration in the sentence: the one with the most users, among
    those that fit like the first. Equal users are compared by their length, then by the low end.
    If nothing fits, it is the configuration with the most users, then with the most free bytes.
    """
    if not fits[0].fits:
        return max(range(len(fits)), key=lambda i: (fits[i].sequences, fits[i].headroom_bytes))
    fitting = _comparable_records(records, fits)
    return records.index(max(fitting, key=lambda r: (*_size(r), r["low_num_seqs"] or 0)))


def _size(record: Record) -> tuple[int, int]:
    """Return the users that fit in a configuration, and their tokens."""
    return record["max_num_seqs"], record["requested_model_len"]


def _users_notes(
    records: Records, record: Record, result: Fit, changes: Sequence[ConfigChange], row: str
) -> list[str]:
    """Return notes on the users of a configuration that fits, the most important first.

    Args:
        changes: Changes with which more users fit.
        row: Beginning of the notes on this configuration, its row, if there are others.
    """
    limit, slots = result.options.max_num_seqs, slot_limit(result)
    shares = [
        f"{name} {record[key]:.1%}"
        for name, key in WASTES.items()
        if record.get(key) is not None
    ]
    notes = [f"Waste: {', '.join(shares)}"] if shares else []
    if record["low_num_seqs"] == 0:
        notes.append("At the low end of this range no user fits.")
    notes += _filled(OFFLOAD, record)
    if limit and result.options.engine == "llama.cpp":
        allocated = format_bytes(record["kv_cache_allocated_bytes"])
        notes.append(f"{row}KV cache/GPU of {plural(limit, 'slot')}: {allocated}.")
    elif 0 < slots < result.sequences:
        notes.append(f"The server runs at most {slots:,} concurrent users.")
    images = record.get("images") or 0
    if tokens := images * record.get("image_tokens", 0):
        notes.append(
            f"Requests have {result.length:,} tokens, and {plural(images, 'image')} "
            f"may need {tokens:,}."
        )
    has_caches = has_different_values(records, "kv_cache_dtype")
    for change in changes:
        users = min(filter(None, (change.sequences, limit, slots)))
        words = shlex.join(change.words)
        if users > result.sequences and not (has_caches and "--kv-cache-dtype" in words):
            end = f"of {result.length:,} tokens fit"
            if "--max-num-batched-tokens" in words:
                end = "fit: window layers reserve less"
            notes.append(f"{row}With `{words}`, {plural(users, 'user')} {end}.")
    return [*notes, *result.remarks]


def _place(record: Record, best: Fit) -> str:
    """Return a record's GPUs and parallelism in words, and the weights that options add."""
    added = [
        f"{format_bytes(size)} of {name}"
        for name, size in best.terms.extra.items()
        if name in ADDED_WEIGHTS
    ]
    weights = f" beside {join_words(added)}{_each(best)}" if added else ""
    return placement_words(record) + weights


def _each(fitted: Fit) -> str:
    return " per GPU" * (fitted.ranks.gpus > 1)


def _comparable_records(records: Records, fits: Fits) -> Records:
    """Return the records that fit and differ from the first only in model, engine or formats.

    Their lengths may differ too, if the request has no list of lengths.
    """
    lengths = {fit.length for fit in fits if _is_same_start(fit, fits[0])}
    return equal_records(records, records[0], *COMPARABLE_KEYS.split()[len(lengths) == 1 :])


def _fit_sentence(records: Records, fits: Fits, index: int) -> str:
    """Return the users that fit on the best configuration, and at the longest length. If some
    models do not fit, return their names instead.

    If the engine's own limit on users is smaller, the sentence is about this limit first.
    """
    record, best = records[index], fits[index]
    place, limit = _place(record, best), best.options.max_num_seqs or 0
    last = [fit for fit in fits if _is_same_start(fit, best)][-1]
    if record["needed_kv_cache_memory_bytes"] == 0:
        return (
            f"{record['model']} fits on {place} and leaves {format_bytes(best.kv_budget)} free."
        )
    fitting = {r["model"] for r in records if r["fits"]}
    if others := [name for name in distinct_values(records, "model") if name not in fitting]:
        is_same = len({placement_words(r) for r in records}) == 1
        return answer_sentence(
            f"{len(fitting)} of {len(fitting) + len(others)} models fit{f' on {place}' * is_same}",
            f", all but {', '.join(others)}",
        )
    maximum = best.model.max_context or 0
    if len(records) == 1 and best.length < maximum and best.has_chosen_length:
        return _longest_context_sentence(record, best)
    counts = f"{plural(best.sequences, 'user')} of {best.length:,} tokens"
    clauses = []
    if last.length != best.length:
        counts += f" or {last.sequences:,} of {last.length:,}"
    elif last.options.requested_num_seqs != best.options.requested_num_seqs:
        lengths = [
            f"{f.longest_length:,}" if f.longest_length else "unlimited" for f in (best, last)
        ]
        counts = (
            f"{plural(best.options.requested_num_seqs, 'user')} of {lengths[0]} tokens or "
            f"{last.options.requested_num_seqs:,} of {lengths[1]}"
        )
    else:
        low = record["low_num_seqs"] or best.sequences
        minimum = f", at least {low:,}" if low < best.sequences else ""
        clauses = _fit_clauses(records, fits, index)
        if best.options.requested_num_seqs <= limit < best.sequences:
            counts = f"{plural(limit, 'user')} of {best.length:,} tokens"
            clauses.insert(0, f", with memory for {best.sequences:,}{minimum}")
            if record["unshared_num_seqs"]:
                clauses.insert(0, f", in {_needed_cache(record, best, limit)}")
        else:
            counts += minimum and f"{minimum},"
            if len(records) == 1 and maximum and not (minimum or best.options.max_model_len):
                counts += ", the model's maximum,"
    if has_different_values(records, "model"):
        return answer_sentence(
            f"{record['model']} on {place} {_fit_verb(record)} {counts.rstrip(',')}", *clauses
        )
    verb = _fit_verb(record, counts.startswith("1 user ") and " or " not in counts)
    name = _differences(records, record)
    return answer_sentence(f"{counts} {verb} on {place}{name}", *clauses)


def _fit_verb(record: Record, is_single: bool = True) -> str:
    """Return `fits`, or `may fit` if the low end of the budget fits nothing."""
    return "may fit" if record["low_num_seqs"] == 0 else f"fit{'s' * is_single}"


def _longest_context_sentence(record: Record, best: Fit) -> str:
    """Return a sentence on the longest context, which is shorter than the model's maximum."""
    low = record["low_num_seqs"]
    count = low or best.sequences
    count = min(count, best.options.max_num_seqs or count)
    users = f" of {count:,} users" * (count > 1)
    verb = "is at least" if low else "is" if low is None else "may be"  # None: no range
    return answer_sentence(
        f"The longest context{users} on {_place(record, best)} {verb} {best.length:,} tokens",
        *_cache_size(record, best)[:1],
        f", below the model's maximum of {best.model.max_context:,}",
    )


def _differences(records: Records, record: Record) -> str:
    """Return what distinguishes a record from others on its GPUs, such as ` with fp8 cache`."""
    rivals = equal_records(records, record, *COMPARABLE_KEYS.split()[3:])
    name = sides(rivals).names[rivals.index(record)]
    return f" {'and' if ' with ' in placement_words(record) else 'with'} {name}" * bool(name)


def _is_same_start(fit: Fit, other: Fit) -> bool:
    """Return whether two configurations differ only in lengths and users."""
    is_same = fit.requested == other.requested and fit.utilization == other.utilization
    return is_same and fit.engine is other.engine


def _users(record: Record, other: Record) -> str:
    """Return the users of a configuration, and their length if it differs from another's."""
    users, length = _size(record)
    return f"{users:,}{f' of {length:,}' * (length != _size(other)[1])}"


def _fit_clauses(records: Records, fits: Fits, index: int) -> list[str]:
    """Return what follows the users: rivals, the limit, the needed share or the whole cache."""
    record, best = records[index], fits[index]
    options, wanted = best.options, best.options.requested_num_seqs
    place, unshared = placement_words(record), record["unshared_num_seqs"]
    clauses = []
    least = min(reversed(_comparable_records(records, fits)), key=_size)
    if name := sides([least, record]).names[0]:
        perhaps = "perhaps " * (least["low_num_seqs"] == 0)
        clauses.append(
            f", {perhaps}{_users(least, record)} with {name}"
            if least["model"] == record["model"]
            else f"; {least['model']} {_fit_verb(least)} {_users(least, record)}"
        )
    is_stated = options.require or options.users > 1
    if unshared not in (None, best.sequences) and not (options.max_num_seqs or is_stated):
        clauses.append(f", instead of {unshared:,} without sharing")
    others = equal_records(records, record, *ALTERNATIVE_KEYS.split())
    others = [other for other in others if placement_words(other) != place]
    if not others and len({placement_words(r) for r in records}) > 1:
        purpose = f"{wanted:,} users" if wanted > 1 else "this length"
        clauses.append(f", the smallest for {purpose}")
    setting = UTILIZATION_NAMES.get(record["engine"]) if len(records) == 1 else None
    if setting and record["needed_utilization"] and is_stated and wanted < best.sequences:
        need = f"need{'s' * (wanted == 1)} {_needed_cache(record, best, wanted)}"
        share = f" or {setting} {record['needed_utilization']:g}"
        clauses += [f", and {wanted:,} {need}", share]
    if others:
        largest = max(others, key=_size)
        clauses.append(f", and {_users(largest, record)} on {placement_words(largest)}")
    if record.get("offload_num_seqs"):
        clauses.append(f", {record['offload_num_seqs']:,} more in CPU memory")
        if return_s := record["offload_return_s"]:
            clauses.append(f", each back in ≥ {seconds(return_s)}")
    return clauses if clauses or options.max_model_len else _cache_size(record, best)


def _needed_cache(record: Record, fit: Fit, users: int) -> str:
    """Return the KV cache that users need, and the bytes that a shared prefix saves."""
    needed = record["needed_kv_cache_memory_bytes"]
    words = f"{format_bytes(needed)} of KV cache{_each(fit)}"
    if record["unshared_num_seqs"]:
        unshared = fit.plan.needed(-(-users // fit.ranks.dp), fit.length)
        words += f", {format_bytes(unshared - needed)} less by sharing"
    return words


def _cache_size(record: Record, best: Fit) -> list[str]:
    """Return two clauses on the cache's tokens and bytes; none if it stores only one request."""
    tokens, ranks = record["kv_tokens"], best.ranks
    if tokens <= best.length:
        return []
    caches = f"{ranks.dp} caches" if ranks.dp > 1 else "a cache"
    about = "about " * (record["low_num_seqs"] is not None)  # the length is of the low end
    return [
        f", in {caches} of {about}{tokens:,} tokens",
        f" or {format_bytes(best.kv_budget)}{_each(best)}",
    ]


def _missing_sentence(
    record: Record, closest: Fit, num_configs: int, advised: Advice, name: str
) -> tuple[str, str, str | None]:
    """Return the missing memory, the options that help, and the command line with the first option.

    Args:
        num_configs: Number of configurations. None of them fits.
        name: The model in an engine's command line; "" for its own name.
    """
    options = closest.options
    count, length = options.requested_num_seqs, f"{closest.length:,} tokens"
    requests = f"{count:,} requests of {length}" if count > 1 else f"one request of {length}"
    title = f"None of {num_configs:,} configurations fits {requests}, the closest is"
    if num_configs == 1:
        verb = "may not" if closest.sequences_at("middle") >= count else "does not"
        starts = f"{closest.engine.title} {verb} start"
        one = f"{starts}: one" if name and options.engine == "vllm" else "One"
        title = f"{one} request of {length} {verb} fit on"
        if options.engine == "sglang" and closest.longest_context:
            title = (
                f"SGLang {'starts' if record['kv_budget_low_bytes'] else 'may start'}, but one "
                f"request of {length} does not fit on"
            )
        if advised.missing.startswith("weights"):
            title = f"{starts if name else record['model'] + ' does not fit'} on"
        elif count > 1:
            fitting = f"Only {closest.sequences:,}" if closest.sequences else "None"
            title = f"{fitting} of {count:,} users of {length} fit on"
    link = ", which" if advised.missing.startswith("has") else ":"
    subject, reason = f"{title} {placement_words(record)}", f"{link} {advised.missing}"
    title = answer_sentence(subject, reason)
    can_wait = options.max_num_seqs and not (options.users or options.require)
    if closest.sequences and can_wait and record["command"] and options.engine != "llama.cpp":
        note = f"{closest.engine.title} starts, and the other users wait for memory."
        change = ConfigChange.of(closest)
    elif not advised.fixes:
        return title, f"{NO_FIX.capitalize()}.", None
    else:
        fixes = [f"`{fix}`" for fix in advised.fixes]
        note, use = f"It fits with {join_with_or(fixes)}.", f"; use {fixes[0]}"
        title = answer_sentence(subject, reason, use)
        if not (closest.sequences or use in title):
            title = answer_sentence(subject, use)
        change = next(iter(advised.fixes.values()))
    written = engine_command(change.result or closest, name)
    return title, note, written.line if written else None


def placement_words(record: Record) -> str:
    """Return a record's GPUs and parallelism in words: 4× h100-sxm with tp 4.

    Args:
        record: Record of a deployment.
    """
    split = split_words(record)
    return f"{record['gpus']}× {record['gpu']}{f' with {split}' * bool(split)}"


def basis_line(records: Records, fits: Fits) -> str:
    """Return a footnote of `fit` with the model, data types, engine and memory share of all rows.
    Values that differ between rows are left out, but each engine's share is named.

    Args:
        records: Records of `fit`.
        fits: The memory and capacity of each record's configuration.
    """
    words = shared_words(records, FORMAT_WORDING)
    if not fits[0].needed.cache:
        words = [word for word in words if not word.endswith(" cache")]
    if not has_different_values(records, "engine"):
        words += [] if fits[0].engine.has_memory_range else [f"engine {records[0]['engine']}"]
        return ", ".join(words + _utilization(records))
    words += {
        f"{r['engine']} memory share {r['gpu_memory_utilization']:.3g}": 0 for r in records
    }
    return ", ".join(words)


def _utilization(records: Records) -> list[str]:
    """Return the share of memory with the engine's name of the option."""
    name = UTILIZATION_NAMES.get(records[0]["engine"])
    if not name:
        share = records[0]["gpu_memory_utilization"]
        return [f"{share:.0%} of {records[0]['utilization_of']} memory"]
    return shared_words(records, {"gpu_memory_utilization": f"{name} {{:g}}"})


def _accuracy(result: Fit, row: str) -> list[str]:
    """Return a note on the range of the KV cache budget, if the engine's memory has a range."""
    has_range = result.engine.has_memory_range and result.budget_at("high")
    if not has_range or result.has_given_cache:
        return []
    if (end := result.estimate) != "middle" and result.needed.cache:
        return (result.kv_budget > 0) * [
            f"{row}Users are for {format_bytes(result.kv_budget)} of KV cache/GPU, the {end} "
            "end of its range."
        ]
    low, high = (format_bytes(result.budget_at(name)) for name in ("low", "high"))
    rules, _ = result.engine.release(result.options.engine_version)
    version = result.options.engine_version
    if rules and not version:
        version = ".".join(map(str, rules.since))
    engine = f"{result.options.engine} {version}".rstrip()
    source = f"with {engine}, in 90% of starts"
    if result.options.from_log:
        source = "as corrected by the log"
    return [
        f"{row}{'KV cache' if result.needed.cache else 'Free memory'}/GPU: {low} to "
        f"{high} {source}."
    ]


def _details(
    records: Records, fits: Fits, result: Fit, fixes: Sequence[ConfigChange]
) -> list[str]:
    """Return the notes for `--verbose`: settings, bytes of a request, transfers and memory."""
    first = records[0]
    lines = shared_words(records, BATCHED)
    lines += cost_lines(next((r for r in records if len(r["breakpoints"]) > 1), first))
    lines += placement_lines(first)
    lines += [note for f in fits for note in f.notes]
    # published quality of the formats that the answer suggests, for this model only
    lines += [c.cost for c in fixes if is_measured_on(result.model.name, c.cost)]
    return [*dict.fromkeys(lines), memory_line(result)]


def is_measured_on(model: str, quality: str) -> bool:
    """Return whether a published quality score was measured on a model. Only then it is shown.

    Example: "effectively lossless for Llama-3.1 of all sizes" is true of llama-3.1-70b.

    Args:
        model: Name of the model.
        quality: Text on the score, which names the models that were measured.
    """
    published = quality.lower()
    sizes = re.sub(r"-\d+(\.\d+)?b(-instruct)?$", "", model)
    return model in published or ("all sizes" in published and sizes in published)


def memory_line(result: Fit) -> str:
    """Return a line with all parts of one GPU's memory, such as weights, activations and KV cache.
    Their sum is the GPU's memory.

    Args:
        result: Memory and capacity of a deployment.
    """
    parts = [f"{name} {format_bytes(size)}" for name, size in result.memory_parts().items()]
    memory, estimate = format_bytes(result.budget.memory), result.estimate
    return (
        f"{result.gpu.name}: {memory} of memory"
        f"{f' at the {estimate} end' * (estimate != 'middle')}: {', '.join(parts)}"
    )


def cost_lines(record: Record) -> list[str]:
    """Return sentences on the cache bytes that one request needs, by its number of tokens.

    When a sliding window is full, the bytes per token change: a further sentence follows.

    Args:
        record: Record of `fit`. Its key `breakpoints` has the bytes for each range of lengths.
    """
    lines = []
    for piece in record["breakpoints"]:
        slope, fixed = piece["bytes_per_token"], piece["fixed_bytes"]
        start, blocks = piece["from_tokens"], piece["block_tokens"]
        sizes = [f"{fixed:,} bytes"] if fixed or not slope else []
        if slope:
            per_token = f"{slope:,}" if isinstance(slope, int) else f"{slope:,.1f}"
            sizes.append(f"{per_token} bytes per token{' and GPU' * (record['gpus'] > 1)}")
        begin = f"From {start:,} tokens, a request" if start else "A request"
        rounded = f", in blocks of {blocks:,} tokens" if blocks > 1 and slope else ""
        cause = f" ({piece['cause']} full)" if piece["cause"] else ""
        lines.append(f"{begin} needs {' + '.join(sizes)}{rounded}{cause}")
    return lines


# Notes on a record. A part after | is left out if one of its keys is null or 0. The whole note is
# left out if a key of its first part is null or 0.
PLACEMENT_NOTES = """
CPU memory stores {cpu_offload_bytes} of weights; a decode step reads {cpu_offload_read_bytes} of \
them|, {cpu_offload_basis} {cpu_offload_s}
A decode step over users in CPU memory moves {offload_step_bytes}|, at least {offload_step_s}
Disaggregated serving transfers {transfer_bytes} per GPU and request|, at least {transfer_s}
Every GPU stores {replicated_weight_bytes} of replicated weights
Loading {checkpoint_bytes} of weights takes at least {load_s}|; from disk to host \
at least {load_disk_s}|; {language_weight_bytes} from host to each GPU at least {load_link_s}
"""
OFFLOAD = (
    "CPU memory stores {offload_tokens} tokens|; recomputing one user takes ≥ {recompute_s}."
)


def placement_lines(record: Record) -> list[str]:
    """Return sentences on what a deployment stores or moves outside one GPU's own memory.

    They are about weights and caches in CPU memory, replicated weights, and times to load weights
    or to send a cache.

    Args:
        record: Record of `fit`, or of `latency` with the same keys.
    """
    lines = []
    if (copies := record.get("kv_copies", 1)) > 1:
        lines.append(f"{copies} GPUs store each row: the KV cache is replicated {copies} times")
    for note in PLACEMENT_NOTES.strip().splitlines():
        lines += _filled(note, record)
    return lines


def _filled(note: str, record: Record) -> list[str]:
    """Return a note with the values of a record; no note if its first part lacks one."""
    parts = []
    for part in note.split("|"):
        keys = re.findall(r"{(\w+)}", part)
        if all(record.get(key) for key in keys):
            shown = columns(FitRow, " ".join(keys))
            parts.append(part.format(**{c.key: c.show(record[c.key]) for c in shown}))
        elif not parts:
            break
    return ["".join(parts)] if parts else []


NAMES = {"contiguous": "slots", "first_fit": "pieces", "paged": "pages"}
ALLOCATION_COLUMNS = columns(
    AllocationRecord,
    "request contiguous contiguous_free_slots first_fit first_fit_wasted_tokens "
    "first_fit_free_tokens first_fit_largest_hole paged paged_free_blocks",
)


def allocation_table(run: "AllocationRun") -> Table:
    """Return the table of `fit --allocations`: a row per request, columns per cache allocator.

    Cells show whether the request succeeds, and what is free or wasted afterwards. The allocators
    are contiguous slots of the maximum length, first-fit pieces of exact size, and pages.

    Args:
        run: Result of the requests in all three allocators.
    """
    pages, slots = run.pages, run.slots
    wastes = [f"{waste.share:.1%} of {name}" for name, waste in zip(NAMES.values(), run.wastes)]
    notes = [
        "",
        f"{pages.memory:,} tokens of memory: "
        f"{plural(len(slots.queue) + len(slots.tables), 'contiguous slot')} of {slots.block:,}, "
        f"{pages.memory // pages.block:,} pages of {pages.block}",
        f"Empty: {', '.join(wastes)}",
    ]
    last = run.records[-1]
    if last["tokens"] is None:
        title = (
            f"After {last['request']}, pages store {plural(len(pages.tables), 'sequence')} and "
            f"pieces {len(run.first_fit.pieces):,}."
        )
    else:
        verdicts = [
            f"{'granted' if last[key] else 'refused'} by {name}" for key, name in NAMES.items()
        ]
        title = f"The last request, {last['request']}, is {join_words(verdicts)}."
    return Table(run.records, ALLOCATION_COLUMNS, title, notes)


def matrix_table(records: Records) -> Table:
    """Return the table of `fit --matrix`, with rows of users and columns of contexts in tokens.
    Cells are free KV cache bytes per GPU, negative if they do not fit.

    Args:
        records: Records of one deployment, one per combination of users and context.
    """
    first = records[0]
    texts = ["none of these"]
    if cells := [(r["users"], r["context"]) for r in records if r["fits"]]:
        corners = dict.fromkeys((max(cells), max(cells, key=lambda cell: cell[::-1])))
        texts = [f"{users:,} × {context:,} tokens" for users, context in corners]
    title = f"{first['model']} on {placement_words(first)} fits {' or '.join(texts)}."
    rows: dict[int, JsonObject] = {}
    for r in records:
        row = rows.setdefault(r["users"], {"users": r["users"]})
        row[context_name(r["context"])] = r["headroom_bytes"]
    table_columns = [Column("users", "users", "{:,}".format)]
    table_columns += [
        Column(name, name, FORMATS["bytes, one digit"]) for name in [*rows[first["users"]]][1:]
    ]
    words = [*_utilization([first]), *shared_words([first], BATCHED)]
    notes = [
        "",
        f"Cells: free {'KV cache' if first['needed_kv_cache_memory_bytes'] else 'memory'} per GPU, "
        "negative if it does not fit. 4k is 4,096 tokens.",
        ", ".join([f"engine {first['engine']}", *words]),
    ]
    return Table(list(rows.values()), table_columns, title, notes)


def context_name(tokens: int) -> str:
    """Return a context as text: 4k for 4,096, and 4,097 in full."""
    return f"{tokens:,}" if tokens % 1024 else tokens_tick(tokens)
