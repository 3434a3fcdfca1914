"""Columns of tables, formats of their figures, and the sentences and notes above and below
tables."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcalc.arithmetic import grouped
from kvcalc.errors import list_few, visible
from kvcalc.library.presets import preset_files
from kvcalc.records import Record, Records
from kvcalc.records.figures import figures_of
from kvcalc.records.presets import GpuPresetRecord, ModelPresetRecord
from kvcalc.records.size import MemoryRecord
from kvcalc.report.row_names import sides
from kvcalc.report.text.table_layout import WIDTH, Column, Table, lay_out, markdown
from kvcalc.units import format_bytes, format_count, format_seconds, format_si

BOUND = "bound"  # `time_basis` of a datasheet bound
MIN_MENTIONED_SHARE = 0.05  # of a time that is estimated; smaller shares are not mentioned
MAX_WORDS = 25  # of an answer
EMPHASIS = ("1", "1", "", "2")  # codes of a terminal: bold answer and headings, dim notes
seconds = format_seconds
# The shortest kernel behind the calibrations takes 1.80 µs: a matrix product of AIConfigurator's
# rows (github.com/ai-dynamo/aiconfigurator 095f58a51c4c). So work below 1 µs is not a
# separate kernel, but fused into another.
SHORTEST_KERNEL_S = 1e-6


def kernel_seconds(value: float) -> str:
    """Return a time of GPU kernels as text with three digits and a unit, such as `12.3 µs`.

    Times from 0 to 1 µs give `< 1 µs`, because no measured kernel is that short.

    Args:
        value: Seconds.
    """
    return "< 1 µs" if 0 < value < SHORTEST_KERNEL_S else seconds(value)


def digits(value: float) -> str:
    """Return a number with three significant digits and no exponent: 0.5, 12.3, 1,120."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def whole(value: Any) -> str:
    """Return an integer in full, or another number with six significant digits, as text."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def ratio(value: float) -> str:
    """Return a factor as text with three digits: 4×, 56.9×, 1,120×."""
    return f"{digits(value)}×"


def reduction_words(reduction: float) -> str:
    """Return a reduction as text: 8 gives `8× less`, 0.5 gives `2× more`, and 1 gives `1×`.

    A factor that rounds to 1× is written in percent: 1.004 gives `0.398% less`.

    Args:
        reduction: The value of the reference ÷ the value.
    """
    if reduction in (0, 1):  # 0: the reference is 0
        return ratio(reduction)
    text = ratio(max(reduction, 1 / reduction))
    change = percent(abs(1 - 1 / reduction)) if text == "1×" else text
    return f"{change} {'less' if reduction > 1 else 'more'}"


def percent(value: float) -> str:
    """Return a share from 0 to 1 in percent with three digits: 0.129 gives 12.9%."""
    return f"{digits(100 * value)}%"


def price(value: float) -> str:
    """Return money with two digits after the point, or three if the third is not 0: 2.50, 0.105."""
    return f"{value:,.3f}".removesuffix("0")


def per_token(value: float) -> str:
    """Return a number of bytes per token as text, in the unit that `--units` selects.

    Whole numbers below 10 KiB are exact.

    Args:
        value: Bytes per token.
    """
    return (
        f"{value:,.0f} B" if value < 10_240 and value == int(value) else format_bytes(value, 1)
    )


def variant_name(variant: str) -> str:
    """Return the name of an attention variant for tables.

    `none`, the model's own attention, gives `original`. Other names such as `gqa:8` do not change.
    """
    return {"none": "original", "": "its own"}.get(variant.lower(), variant)


# Functions that write values, by the unit or by the format of their figure.
FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "parameters": format_count,
    "bytes": format_bytes,
    "bytes, one digit": partial(format_bytes, digits=1),
    "bytes a token": per_token,
    "decimal bytes": partial(format_si, unit="B"),
    "bytes a second": partial(format_si, unit="B/s"),
    "FLOP": format_si,
    "FLOP a second": format_si,
    "FLOP per byte": digits,
    "seconds": seconds,
    "kernel": kernel_seconds,
    "tokens a second": "{:,.0f}".format,
    "requests a second": digits,
    "ratio": ratio,
    "reduction": reduction_words,
    "share": "{:.1%}".format,
    "number": digits,
    "money": "{:,.2f}".format,
    "price": price,
    "joules": "{:.3g}".format,
    "yes or no": lambda value: "yes" if value else "no",
    "queue": lambda value: {True: "diverges", False: "stable"}.get(value, value),
    "mode": lambda mode: {"cached": "with", "uncached": "without"}[mode],
    "basis": lambda basis: basis.replace(" calibration", ""),
    "variant": variant_name,
}


def columns(
    record: type, keys: str, *, inputs: str = "", optional: str = "", hidden: str = ""
) -> tuple[Column, ...]:
    """Return the columns of a table, with headings and formats from a record class.

    Each text of keys separates them by spaces.

    Args:
        record: TypedDict class of the records.
        keys: Keys of the columns in the order of importance, such as `gpu memory_bytes | vendor`.
            Only `--wide` shows the columns after `|`. A `*` stands for all further keys that have a
            heading and are not hidden.
        inputs: Keys of values that the user gave. If all rows have the same value, a note replaces
            the column.
        optional: Keys of columns that are hidden if all rows with the same model and GPU have the
            same value.
        hidden: Keys that `*` does not include.
    """
    figures = figures_of(record)
    if "*" in keys:
        listed = f"{keys} {hidden}".split()
        further = [key for key in figures if figures[key].heading and key not in listed]
        keys = keys.replace("*", " ".join(further))
    usual, _, wide = keys.partition("|")
    results = []
    for key in (usual + wide).split():
        figure = figures[key]
        template = figure.format or ("{:,}" if figure.type == "integer" else "{}")
        results.append(
            Column(
                key,
                figure.heading,
                show=FORMATS.get(figure.format or figure.unit, template.format),
                right=figure.type in ("integer", "number"),
                wide=key in wide.split(),
                is_input=key in inputs.split(),
                is_optional=key in optional.split(),
                meaning=figure.meaning.partition(";")[0],
                formula=figure.formula,
            )
        )
    return tuple(results)


def show(tables: Sequence[Table], as_markdown: bool) -> None:
    """Print tables on stdout.

    On a terminal, titles are bold, notes are dim, and a table that is too wide is divided into
    parts below each other. In a pipe, this holds only if the environment variable FORCE_COLOR is
    set. Lines have the width of the terminal; in a pipe, the number of characters in COLUMNS, or
    else 100.

    Args:
        tables: The tables.
        as_markdown: Whether to print Markdown instead of plain text.
    """
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    if as_markdown:
        sys.stdout.write(visible("\n".join(map(markdown, tables))))
        return
    has_emphasis = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    has_emphasis |= bool(os.environ.get("FORCE_COLOR"))
    for index, table in enumerate(tables):
        if index:
            print()
        laid = lay_out(table, width, bands=has_emphasis)
        for lines, code in zip(laid, EMPHASIS):
            for line in lines:
                text = visible(line)
                print(f"\x1b[{code}m{text}\x1b[0m" if has_emphasis and code else text)


def answer_sentence(first: str, *clauses: str) -> str:
    """Return the first clause and the further clauses that fit, as one sentence with a full stop.

    A further clause is left out if the sentence would have more than 25 words. A clause that begins
    with a blank continues the one before, and is left out with it.

    Args:
        first: Beginning of the sentence, without a full stop.
        clauses: Further clauses, the most important first. Each begins with its punctuation, such
            as `, the smallest that fits`.
    """
    text, is_left_out = first, False
    for clause in clauses:
        words = [word for word in f"{text}{clause}".split() if any(map(str.isalnum, word))]
        is_left_out = len(words) > MAX_WORDS or (is_left_out and clause.startswith(" "))
        text += clause * (not is_left_out)
    return f"{text}."


def footnotes(*notes: str) -> list[str]:
    """Return '' (a blank line) and then the notes, as the lines below a table.

    Empty and repeated notes are left out. Without any note, the result is [''].

    Args:
        notes: Notes, the most important first. Only `--verbose` prints more than three.
    """
    return ["", *dict.fromkeys(filter(None, notes))]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun in the right number: 1 user, 2 users.

    Args:
        count: The count.
        noun: The noun in the singular.
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def distinct_values(records: Records, key: str) -> list[str]:
    """Return the values that the records have for a key, each only once; null and '' are left out.

    Args:
        records: The records.
        key: JSON key, such as `memory_note`.
    """
    return list(dict.fromkeys(r[key] for r in records if r.get(key)))


def has_different_values(records: Records, key: str) -> bool:
    """Return whether the records have more than one value of a key.

    Args:
        records: The records, all with this key.
        key: The JSON key.
    """
    return len({r[key] for r in records}) > 1


def misfit_words(record: Record) -> str:
    """Return words on a batch that exceeds the memory, such as `, where 12 fit,`; else "".

    The number is of the longest sequence, so it is left out for mixed batches.
    """
    if record.get("fits") is not False:
        return ""
    count = record.get("phase") != "mixed" and record["max_num_seqs"]
    return f", where {count:,} fit{'s' * (count == 1)}," if count else ", exceeding its memory,"


def records_that_fit(records: Records) -> list[Record]:
    """Return the records without those whose batch does not fit in GPU memory.

    Records whose key `fits` is null or missing stay.

    Args:
        records: The rows.
    """
    return [r for r in records if r.get("fits") is not False]


(FITS,) = columns(MemoryRecord, "fits")


def memory_sentences(records: Records) -> list[str]:
    """Return a warning with needed and available bytes for each batch that does not fit.

    The list is empty if all batches fit.

    Args:
        records: Records of batches, with the KV cache bytes that each needs on one GPU.
    """
    short = [record for record in records if record.get("fits") is False]
    return list(dict.fromkeys(map(_memory_sentence, short)))


def _memory_sentence(record: Record) -> str:
    """Return a warning with the bytes that a batch needs on one GPU, and the budget."""
    variant, count = record.get("variant", "none"), record["batch_size"]
    attention = f" with {variant}" * (variant.lower() != "none")
    needed, budget = record["kv_needed_bytes"], record["kv_budget_bytes"]
    if not budget:
        return f"Does not fit: {record['model']}{attention} leaves too little memory for the batch."
    length = record.get("context") or record["input_len"] + record["output_len"]
    requests = f"{plural(count, 'request')} of {length:,} tokens{attention}"
    each = " per GPU" * (record["gpus"] > 1)
    return (
        f"Does not fit: {requests} need{'s' * (count == 1)} {format_bytes(needed)}, "
        f"{format_bytes(budget)} are left{each}."
    )


def marked_columns(records: Records, columns: Sequence[Column]) -> list[Column]:
    """Return the columns of a table, with the column `fits` added if some batch does not fit.

    The column `engine` is removed if another column already distinguishes the engines: `basis`,
    which names the time model behind each row.

    Args:
        records: The rows.
        columns: The columns.
    """
    table_columns = without_named_engine(records, columns)
    if not any(record.get("fits") is False for record in records):
        return table_columns
    inputs = [n for n, c in enumerate(table_columns) if c.is_input or c.is_optional]
    table_columns.insert(inputs[-1] + 1, FITS)
    return table_columns


def time_footnotes(records: Records) -> list[str]:
    """Return footnotes on how the times of a table were predicted, and how accurate they are.

    The first footnote says whether the times are predictions or datasheet bounds. The second is
    their accuracy, or '' if unknown. The further footnotes, one for each engine, name the GPUs
    without a measured kernel model of this engine.

    Args:
        records: The rows, with the keys `time_basis`, `basis` (the time model) and others.
    """
    bases = {r["time_basis"] for r in records}
    predictions = [r for r in records if r["time_basis"] != BOUND]
    unmeasured = grouped(
        (r["engine"], r["gpu"])
        for r in records
        if r["time_basis"] == BOUND
        and r["engine"] not in ("none", *preset_files(f"calibrations/{r['gpu']}"))
    )
    # without versions: `vllm 0.24.0 calibration of a100` gives `vllm of a100`
    names = {re.sub(" .*calibration", "", r["basis"]): None for r in predictions}
    basis = f"≥ and ≤ mark the best case from the {records[-1]['basis']}. Real runs are slower."
    if len(bases) > 1:
        basis = "Times are predicted."
    elif predictions:
        source = "scaled (~) from" if "scaled" in bases else "predicted by"
        basis = f"Times are {source} the calibration of {list_few(names)}."
    if len(bases) > 1:
        basis += " ~ marks scaled times." * ("scaled" in bases)
        basis += " ≥ marks datasheet bounds." * (BOUND in bases)

    accuracy = []
    errors = [r.get("time_p90_error") or 0.0 for r in predictions]
    if any("users" in r and r["output_len"] for r in predictions):
        accuracy.append("The delay by arriving prompts is estimated.")
    elif errors and all(errors):
        accuracy.append(f"In 90% of measured runs, the error is at most {max(errors):.0%}.")
    share = max((r.get("uncalibrated_share") or 0.0 for r in predictions), default=0.0)
    if share >= MIN_MENTIONED_SHARE:
        accuracy.append(f"Up to {share:.0%} of the time is not measured.")
    reasons = [
        f"No measured kernel model of {engine} on {list_few(gpus)} exists."
        for engine, gpus in unmeasured.items()
    ]
    return [basis, " ".join(accuracy), *reasons]


def pass_notes(records: Records, *more: str) -> list[str]:
    """Return the footnotes of a table whose rows are batches of sequences with their times.

    The first note is the source of the times. Warnings, such as rows that do not fit in memory, and
    the accuracy of the times follow. A note that does not apply is ''. If no row fits in memory,
    another note says so.

    Args:
        records: The rows.
        more: Warnings that precede the other warnings.
    """
    misfits = len(records) - len(records_that_fit(records))
    is_mixed = 0 < misfits < len(records)
    basis, accuracy, *reasons = time_footnotes(records)
    return [
        basis,
        *more,
        f"{misfits:,} of {len(records):,} rows do not fit in GPU memory." * is_mixed,
        *(f"No KV cache budget: {note}." for note in distinct_values(records, "memory_note")),
        *distinct_values(records, "fallback"),
        accuracy,
        *reasons,
    ]


def pass_details(records: Records) -> list[str]:
    """Return further notes of a table whose rows are batches with their times, for `--verbose`.

    They name the calibrations (time models fitted to measured kernels) with their versions, and the
    bandwidth between the nodes of each deployment on several nodes.

    Args:
        records: The rows.
    """
    bases = dict.fromkeys(r["basis"] for r in records if r["time_basis"] != BOUND)
    lines = [f"Calibrations: {', '.join(bases)}.".replace(" calibration", "")] if bases else []
    for r in records:
        if r.get("nodes", 1) > 1 and (rate := r.get("inter_node_bytes_per_s")):
            lines.append(
                f"{r['gpus']}× {r['gpu']} on {r['nodes']} nodes, "
                f"{format_si(rate, 'B/s')} of each GPU between them"
            )
    return list(dict.fromkeys(lines))


def time_note(records: Records) -> str:
    """Return the source and accuracy of the times in one line, for the subtitle of a picture.

    Args:
        records: The records that the picture shows.
    """
    basis, accuracy, *_ = time_footnotes(records)
    return "; ".join(text.removesuffix(".") for text in (basis, accuracy) if text)


def predictions_first(records: Records) -> list[Record]:
    """Return the records in another order: predicted times first, then datasheet bounds.

    Bounds are lower than real times, so they must not lead a ranking. Otherwise the order is
    unchanged.

    Args:
        records: Records with the key `time_basis`.
    """
    return sorted(records, key=lambda record: record["time_basis"] == BOUND)


def comparable_records(records: Records) -> list[Record]:
    """Return the records whose times can be compared with the times of the first record.

    A predicted time cannot be compared with a datasheet bound. If the first record has predicted
    times, the result is the records with predictions. Otherwise it is the records with datasheet
    bounds.

    Args:
        records: Records with the key `time_basis`.
    """
    return [
        r for r in records if (r["time_basis"] == BOUND) == (records[0]["time_basis"] == BOUND)
    ]


def without_named_engine(records: Records, columns: Sequence[Column]) -> list[Column]:
    """Return the columns, but without `engine` if the column `basis` distinguishes the engines too.

    `basis` names the time model of a row, such as `vllm 0.24.0 calibration`. `engine` is removed if
    all rows with different engines also differ in `basis`.

    Args:
        records: The rows.
        columns: The columns.
    """
    is_named = "engine" not in sides(records, ("basis", "engine")).keys
    return [column for column in columns if not (is_named and column.key == "engine")]


MODEL_COLUMNS = columns(
    ModelPresetRecord,
    "model parameters active_parameters bytes_per_token attention max_context layers hidden_size "
    "family",
)
GPU_COLUMNS = columns(
    GpuPresetRecord,
    "gpu memory_bytes bandwidth_bytes_per_s bf16_flops_per_s knee fp8_flops_per_s fp4_flops_per_s "
    "link_bytes_per_s vendor",
)


def model_table(records: Sequence[ModelPresetRecord]) -> Table:
    """Return the table of model presets that `models` prints: parameters, cache sizes and more.

    Args:
        records: Records of the presets, one per row.
    """
    notes = [
        "",
        "per token: bf16 KV cache of one sequence at 8,192 tokens; 0 B: windows are full",
        "`kvcalc models NAME` shows one model with its sources.",
    ]
    return Table(records, MODEL_COLUMNS, f"{plural(len(records), 'model')} match.", notes)


def gpu_table(records: Sequence[GpuPresetRecord]) -> Table:
    """Return the table of GPU presets that `gpus` prints: memory, bandwidth, FLOP rates and more.

    Args:
        records: Records of the presets, one per row.
    """
    rates = {record["gpu"]: record["bandwidth_bytes_per_s"] for record in records}
    best, least = (choose(rates, key=rates.__getitem__) for choose in (max, min))
    factor = f", {ratio(rates[best] / rates[least])} that of {least}" * (best != least)
    title = (
        f"Of {plural(len(records), 'GPU')}, {best} has the most bandwidth, "
        f"{format_si(rates[best], 'B/s')}{factor}."
    )
    notes = ["", "`kvcalc gpus NAME` shows one GPU with its sources."]
    return Table(records, GPU_COLUMNS, title, notes)
