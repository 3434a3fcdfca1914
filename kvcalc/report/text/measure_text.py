"""Tables of measured layers and generations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from kvcalc.records import Record
from kvcalc.records.measure import GenerationRecord, MeasuredLayerRecord
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import columns, distinct_values, seconds
from kvcalc.units import format_bytes, format_si


@contextmanager
def progress_bar(unit: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, and yield the function that advances it.

    If stderr is not a terminal, show nothing, and yield a function without effect. The function
    takes `advance`, `completed` and `description`, like the method `update` of `rich.progress`.

    Args:
        unit: Noun for what is counted, such as `requests`.
        total: Count at which the bar is full; None if unknown.
    """
    import sys

    if not sys.stderr.isatty():
        yield lambda **changes: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(unit, total=total)

        def move(**changes: object) -> None:
            progress.update(task, **changes)  # type: ignore[arg-type]

        yield move


times = "{:.2f}×".format
MEASURE_COLUMNS = columns(
    MeasuredLayerRecord,
    "variant phase batch_size context attention_predicted_s attention_measured_s attention_ratio "
    "attention_predicted_speedup attention_measured_speedup cache_error attention_bound_s "
    "ratio predicted_s measured_s bound_s spread predicted_bytes "
    "allocated_bytes allocator_bytes attention_bandwidth_share attention_flops_share attention",
    inputs="batch_size context",
)
GENERATE_COLUMNS = columns(
    GenerationRecord,
    "variant prompt_len batch_size mode head total_s predicted_total_s ratio speedup "
    "predicted_speedup same_tokens first_token_s last_token_s tokens_per_s "
    "bound_total_s",
    inputs="variant prompt_len batch_size",
)


def measured_table(rows: list[Record], version: str) -> Table:
    """Return the table that `measure` prints: measured and predicted times and bytes of layers.

    Args:
        rows: Records of `measure`, one per attention variant, phase and shape.
        version: Version of torch, for a footnote.
    """
    medians = []
    for phase in distinct_values(rows, "phase"):
        ratio = median(r["attention_ratio"] for r in rows if r["phase"] == phase)
        medians.append(f"{phase} attention takes {times(ratio)} its prediction")
    each = ", the median of each" if len(rows) > len(medians) else ""
    title = f"{', '.join(medians)}{each}.".capitalize()
    first = rows[0]
    ceilings = (
        f"ceilings of this machine ({first['device']}): "
        f"{format_si(first['bandwidth_bytes_per_s'], 'B/s')}, "
        f"{format_si(first['flops_per_s'], 'FLOP/s')} in {first['dtype']}, "
        f"{seconds(first['launch_s'])} to launch an operation"
    )
    graphs = "CUDA graphs" if any(r["graph"] for r in rows) else "no graphs"
    timing = _clock(first, f"CUDA events, {graphs}")
    bytes_note = "cache bytes DIFFER from the prediction"
    if all(r["predicted_bytes"] == r["allocated_bytes"] for r in rows):
        bytes_note = "cache bytes: predicted = in the tensors' storage in every row"
    details = [
        ceilings,
        f"torch {version}, {timing}; medians; inputs rotate past the last-level cache if memory "
        "bounds the time",
        bytes_note,
    ]
    error = max(r["cache_error"] for r in rows)
    agreement = f"With and without cache, outputs differ by at most {error:.0e} of the largest."
    return Table(
        rows, MEASURE_COLUMNS, title, [*_basis(first, version), agreement], details=details
    )


def _basis(record: Record, version: str) -> list[str]:
    """Return the footnote on the measured machine and its settings."""
    return ["", f"{record['device']}, {record['dtype']}, torch {version}, medians"]


def _clock(record: Record, events: str) -> str:
    """Return a description of the clock; for the event clock of a GPU, the text `events`."""
    clocks = {
        "cpu": "one thread, timed by its own CPU time",
        "wall": f"{record['threads']} threads, wall clock",
    }
    return clocks.get(record["clock"], events)


def generated_table(rows: list[Record], version: str) -> Table:
    """Return the table of `measure --generate`: seconds of generations, measured and predicted.

    Args:
        rows: Records of `measure --generate`, one per way to generate: with and without a KV cache.
        version: Version of torch, for a footnote.
    """
    first, without = rows[0], next((r for r in rows if r["mode"] == "uncached"), None)
    title = (
        f"{first['model']} makes {first['new_tokens']:,} tokens in "
        f"{seconds(first['total_s'])} with the cache"
    )
    if without:
        saves = (
            f"{times(without['speedup'])} faster, predicted "
            f"{times(without['predicted_speedup'])}"
        )
        title = f"{title} and {seconds(without['total_s'])} without, {saves}"
    timing = _clock(first, "CUDA, host included")
    bounds = "bound: the same operators at the measured ceilings, fully overlapped, no launches"
    details = [
        f"{first['model']} with random weights in {first['dtype']} on {first['device']}; torch "
        f"{version}, {timing}; {first['new_tokens']:,} tokens, greedy; head: the LM head, on the "
        "last position or on all",
        f"in the cache {format_bytes(first['allocated_bytes'])}, predicted "
        f"{format_bytes(first['predicted_bytes'])}; 'cache saves': time of a run ÷ time with the "
        "cache",
        "predicted: each operator at this machine's rates for products of so few rows and for "
        f"activations, and the host, {seconds(first['host_s'])} a step; rates sampled between the "
        f"steps; {bounds}",
    ]
    return Table(rows, GENERATE_COLUMNS, f"{title}.", _basis(first, version), details=details)
