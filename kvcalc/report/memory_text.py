"""What tables say of batches that do not fit into the memory."""

from collections.abc import Sequence

from kvcalc.report.chart import Series
from kvcalc.report.export import Record
from kvcalc.report.layout import Column
from kvcalc.report.tables import without_named_engine
from kvcalc.units import format_bytes

MOST_SENTENCES = 2
_VERDICTS = {True: "yes", False: "no", None: "unknown"}
FITS = Column("fits", "fits", _VERDICTS.__getitem__, right=False, about="whether the memory is enough")


def memory_sentences(records: Sequence[Record]) -> list[str]:
    """Return a sentence about each batch that does not fit, at most MOST_SENTENCES of them."""
    short = [record for record in records if record.get("fits") is False]
    some_fit = any(record.get("kv_budget_bytes") for record in records)
    sentences = list(dict.fromkeys(_memory_sentence(record, some_fit) for record in short))
    more = len(sentences) - MOST_SENTENCES
    rest = [f"{more:,} more do{'es' * (more == 1)} not fit."] if more > 0 else []
    return sentences[:MOST_SENTENCES] + rest


def _memory_sentence(record: Record, some_fit: bool) -> str:
    """Return what a batch needs of one GPU, and what there is. some_fit: Other weights leave a budget."""
    count, gpus, gpu = record["batch_size"], record["gpus"], record["gpu"]
    where = f"one {gpu}" if gpus == 1 else f"each of {gpus}× {gpu}"
    length = record.get("context") or record["input_len"] + record["output_len"]
    variant = record.get("variant", "none")
    attention = "" if variant.lower() == "none" else f" with {variant}"
    requests = f"{count:,} request{'s' * (count > 1)} of {length:,} tokens{attention}"
    if not record["kv_budget_bytes"] and not some_fit:
        return f"{record['model']} leaves no memory for the KV cache on {where}."
    if record["kv_needed_bytes"] is None:
        return f"{requests} do{'es' * (count == 1)} not fit on {where}."
    if not record["kv_budget_bytes"]:
        return f"{record['model']}{attention} leaves no memory for the KV cache on {where}."
    needed, budget = (format_bytes(record[key]) for key in ("kv_needed_bytes", "kv_budget_bytes"))
    need = f"need{'s' * (count == 1)} {needed}{' per GPU' * (gpus > 1)}"
    return f"{requests} {need}, but {where} has {budget} for the cache."


def memory_notes(records: Sequence[Record]) -> list[str]:
    """Return why an engine gives no budget, a line each."""
    texts = dict.fromkeys(r["memory_note"] for r in records if r.get("memory_note"))
    return [f"no KV cache budget: {text}" for text in texts]


def marked_columns(records: Sequence[Record], columns: Sequence[Column]) -> list[Column]:
    """Return the columns with `fits` behind what was asked, if something does not fit."""
    columns = without_named_engine(records, columns)
    if not any(record.get("fits") is False for record in records):
        return columns
    behind = max(n for n, column in enumerate(columns) if column.given or column.apart) + 1
    return [*columns[:behind], FITS, *columns[behind:]]


def within_memory(series: Series, max_num_seqs: int | None) -> Series:
    """Return a curve over the batch up to the largest batch that fits.

    A curve of which no point fits is dashed and says so. None sets no limit: the engine's budget
    is unknown.
    """
    if max_num_seqs is None:
        return series
    kept = sum(x <= max_num_seqs for x in series.xs)
    if not kept:
        return series._replace(kind="dashed", label=f"{series.label}: does not fit")
    return series._replace(xs=series.xs[:kept], ys=series.ys[:kept])


def batches_within(batches: Sequence[int], max_num_seqs: int | None) -> list[int]:
    """Return the batches, and among them the largest that fits."""
    more = [max_num_seqs] if max_num_seqs and max_num_seqs < max(batches) else []
    return sorted({*batches, *more})


def curve_note(drawn: Sequence[Series], batches: Sequence[int]) -> str:
    """Return what the subtitle says of curves that memory ends."""
    if any(series.kind == "dashed" for series in drawn):
        return "; dashed: does not fit in the memory"
    short = any(series.xs[-1] < max(batches) for series in drawn)
    return "; a curve ends where the memory is full" if short else ""
