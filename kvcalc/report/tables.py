"""Tables for people: what a command's columns are, how their figures are written, and how tables are printed."""

import shutil
import sys
from collections.abc import Sequence

from kvcalc.errors import few, visible
from kvcalc.library.catalog import preset_files
from kvcalc.report.export import Record
from kvcalc.report.layout import WIDTH, Column, Laid, Table, laid_out, markdown
from kvcalc.units import format_bytes, format_count, format_seconds, format_si


def show(*tables: Table, as_markdown: bool = False) -> None:
    """Print tables: with emphasis on a terminal and as wide as it is; plain on a pipe, at most 100 characters wide."""
    for table in tables:
        if as_markdown:
            sys.stdout.write(visible(markdown(table)))
        elif sys.stdout.isatty():
            _show_on_terminal(laid_out(table, shutil.get_terminal_size().columns, bands=True))
        else:
            sys.stdout.write(visible(str(table)))


def fitted(table: Table, beside: int = 0) -> list[str]:
    """A table's lines as `show` prints them, where `beside` characters stand before each."""
    width = shutil.get_terminal_size().columns - beside if sys.stdout.isatty() else WIDTH
    return laid_out(table, width).lines()


def _show_on_terminal(laid: Laid) -> None:
    """With emphasis. rich is imported here: a pipe does without, and starts sooner."""
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False, soft_wrap=True)
    for lines, style in ((laid.title, "bold"), (laid.head, "bold"), (laid.rows, ""), (laid.below, "dim")):
        for line in lines:
            out.print(Text(visible(line), style=style), soft_wrap=True)


def time_note(records: Sequence[Record], basis: str = "") -> str:
    """What the times of records rest on, and how sure they are of it. basis: where the records do not name theirs."""
    words = []
    for kind in dict.fromkeys(r["time_basis"] for r in records):
        names = dict.fromkeys(basis or r["basis"] for r in records if r["time_basis"] == kind)
        words.append(_BASES[kind].format(", ".join(names)))
    predictions, bounds = split_by_basis(records)
    words += _unmeasured(bounds)
    words += ["bounds are not ranked against predictions"] if predictions and bounds else []
    errors = [r.get("time_p90_error") or 0.0 for r in predictions]
    widest = max(errors, default=0.0) if all(errors) else 0.0
    words += [f"nine of ten such steps of measured servers lie within {widest:.0%}"] if widest else []
    share = max((r.get("uncalibrated_share") or 0.0 for r in predictions), default=0.0)
    words += [_WITHOUT_LAW.format(f"{share:.0%}")] if share >= LEAST_SHARE else []
    return f"times: {'; '.join(words)}"


def _unmeasured(bounds: Sequence[Record]) -> list[str]:
    """Return why times of engines on GPUs are bounds; nothing for those that have a calibration."""
    gpus: dict[str, dict[str, None]] = {}
    for engine, gpu in dict.fromkeys((r["engine"], r["gpu"]) for r in bounds):
        if engine != "none" and engine not in preset_files(f"calibrations/{gpu}"):
            gpus.setdefault(engine, {})[gpu] = None
    return [f"no measured kernel model of {engine} on {few([*names])} exists" for engine, names in gpus.items()]


def split_by_basis(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the records with predicted times, and those whose times are datasheet bounds."""
    predictions = [r for r in records if r["time_basis"] != BOUND]
    return predictions, [r for r in records if r["time_basis"] == BOUND]


def predictions_first(records: Sequence[Record]) -> list[Record]:
    """Return the records for a table: first the predictions, then the bounds, each in the order given."""
    predictions, bounds = split_by_basis(records)
    return [*predictions, *bounds]


def comparable(records: Sequence[Record]) -> list[Record]:
    """Return the records whose times can be compared with those of the first: predictions, or bounds."""
    return [r for r in records if (r["time_basis"] == BOUND) == (records[0]["time_basis"] == BOUND)]


BOUND = "bound"  # `time_basis` of a datasheet bound
LEAST_SHARE = 0.05
_WITHOUT_LAW = "up to {} of a step rests on operators without measured rows: ≥ their bound, ~ the nearest format or rate"
_BASES = {
    "bound": "≥ datasheet bounds, full overlap and no launches",
    "calibrated": "predicted by the {}",
    "scaled": "~ by the {}, scaled by datasheet figures",
}


def without_named_engine(records: Sequence[Record], columns: Sequence[Column]) -> list[Column]:
    """Return the columns, without the engine if the basis of times names it in every row."""
    bases = {r.get("basis") for r in records}
    named = len({(r.get("engine"), r.get("basis")) for r in records}) == len(bases)
    return [column for column in columns if not (named and column is ENGINE)]


def node_notes(records: Sequence[Record]) -> list[str]:
    """What stands on several nodes, and the rate between them, a line each."""
    apart = [r for r in records if r.get("nodes", 1) > 1]
    found = dict.fromkeys((r["gpus"], r["gpu"], r["nodes"], r["inter_node_bytes_per_s"]) for r in apart)
    return [f"{gpus}× {gpu} on {n} nodes, {format_si(rate, 'B/s')} of each GPU between them" for gpus, gpu, n, rate in found]


def fallback_notes(records: Sequence[Record]) -> list[str]:
    """What products are computed in where a GPU lacks the unit for their dtype, a line each."""
    return list(dict.fromkeys(r["fallback"] for r in records if r.get("fallback")))


def integer(value: int) -> str:
    """With thousands separators."""
    return f"{value:,}"


def ratio(value: float) -> str:
    """A factor: 4×, 56.9×."""
    return f"{value:.3g}×" if value < 100 else f"{value:,.0f}×"


def percent(value: float) -> str:
    """A share to three digits: 12.9%, 0.0219%."""
    return f"{100 * value:.3g}%" if value < 10 else f"{100 * value:,.0f}%"


def per_token(value: float) -> str:
    """Bytes per token, exact below 10 KiB."""
    return f"{value:,.0f} B" if value < 10_240 and value == int(value) else format_bytes(value, 1)


BATCH, CONTEXT = Column("batch_size", "batch", integer, given=True), Column("context", "context", integer, given=True)
CACHE_DTYPE = Column("kv_cache_dtype", "cache dtype", right=False, given=True)
# What tells deployments of lists apart, in a table where it does.
CUT = Column("tensor_parallel_size", "tp", integer, apart=True)
WEIGHTS_IN = Column("dtype", "weights in", right=False, apart=True)
CACHE_IN = Column("kv_cache_dtype", "cache in", right=False, apart=True)
ENGINE = Column("engine", "engine", right=False, apart=True)
TIMES_BY = Column("basis", "times by", lambda v: v.replace(" calibration", ""), right=False, apart=True)
DEPLOYED = (
    Column("model", "model", right=False, given=True),
    Column("gpu", "GPU", right=False, given=True),
    CUT,
    WEIGHTS_IN,
    CACHE_IN,
    ENGINE,
    TIMES_BY,
)
SIZE_COLUMNS = (
    Column("model", "model", right=False),
    CUT,
    WEIGHTS_IN,
    CONTEXT,
    BATCH,
    CACHE_DTYPE,
    Column("kv_cache_bytes", "KV cache", format_bytes),
    Column("kv_cache_read_bytes", "read per step", format_bytes),
    Column(
        "bytes_per_token", "per token", per_token, about="what a token more adds at this context; 0 B where all windows are full"
    ),
    Column("attention", "attention", right=False),
    Column("weight_bytes", "weights", format_bytes),
    Column("equal_weights_context", "equal at", integer, about="the context at which the cache is as large as the weights"),
    Column("mha_ratio", "as MHA", ratio, about="how many times as much plain multi-head attention would keep"),
    Column("parameters", "parameters", format_count),
    Column("fixed_bytes", "fixed", format_bytes, about="full windows and states of one sequence"),
    Column("active_parameters", "active", format_count),
    Column("kv_cache_allocated_bytes", "in blocks", format_bytes),
)
MODEL_COLUMNS = (
    Column("model", "model", right=False),
    Column("parameters", "parameters", format_count),
    Column("active_parameters", "active", format_count),
    Column("bytes_per_token", "per token", per_token),
    Column("attention", "attention", right=False),
    Column("max_context", "max context", integer),
    Column("layers", "layers", integer),
    Column("hidden_size", "hidden", integer),
    Column("family", "family", right=False),
)
GPU_COLUMNS = (
    Column("gpu", "GPU", right=False),
    Column("memory_bytes", "memory", lambda v: format_bytes(v, 1)),
    Column("bandwidth_bytes_per_s", "bandwidth", lambda v: format_si(v, "B/s")),
    Column("bf16_flops_per_s", "bf16 FLOP/s", lambda v: format_si(v), about="dense matrix peak"),
    Column("fp8_flops_per_s", "fp8", lambda v: format_si(v)),
    Column("fp4_flops_per_s", "fp4", lambda v: format_si(v)),
    Column("knee", "knee", lambda v: f"{v:.1f}", about="FLOP per byte where bf16 products turn compute-bound"),
    Column("link_bytes_per_s", "link", lambda v: format_si(v, "B/s"), about="to other GPUs, one direction"),
    Column("vendor", "vendor", right=False),
)


seconds = format_seconds
# The shortest kernel behind the calibrations takes 1.80 µs: a matrix product of AIConfigurator's rows
# (github.com/ai-dynamo/aiconfigurator 095f58a51c4c). So a time below 1 µs is no kernel's: it is fused into another.
SHORTEST_KERNEL_S = 1e-6


def kernel_seconds(value: float) -> str:
    """Return a time of kernels to three digits, or `< 1 µs` if no kernel is as short."""
    return "< 1 µs" if 0 < value < SHORTEST_KERNEL_S else seconds(value)


ROOFLINE_COLUMNS = (
    Column("operator", "operator", right=False),
    Column("layer", "layer", right=False),
    Column("time_s", "predicted", kernel_seconds, rests="time"),
    Column("share", "share", lambda v: f"{v:.1%}", about="of the time of the pass"),
    Column("roofline_s", "at least", kernel_seconds, about="the datasheet bound: full overlap, no launches"),
    Column("bound", "bound", right=False),
    Column("intensity", "FLOP/B", lambda v: f"{v:.3g}"),
    Column("flops", "FLOP", lambda v: format_si(v)),
    Column("bytes", "bytes", lambda v: format_si(v, "B")),
    Column("count", "runs", integer),
    Column("overhead", "overhead", lambda v: f"{v:.3g}×", about="predicted over at least"),
    Column("shape", "shape", wide=True),
    Column("vector_flops", "vector FLOP", lambda v: format_si(v), wide=True),
    Column("weight_bytes", "weights", lambda v: format_si(v, "B"), wide=True),
    Column("cache_bytes", "cache", lambda v: format_si(v, "B"), wide=True),
    Column("activation_bytes", "activations", lambda v: format_si(v, "B"), wide=True),
)
COMPARE_COLUMNS = (
    Column("variant", "variant", right=False),
    CUT,
    WEIGHTS_IN,
    ENGINE,
    TIMES_BY,
    CONTEXT,
    BATCH,
    CACHE_DTYPE,
    Column("kv_cache_bytes", "KV cache", format_bytes),
    Column("stored_reduction", "stored less", ratio),
    Column("read_reduction", "read less", ratio),
    Column("step_s", "step", seconds, rests="time", about="the time of one decode step"),
    Column("max_num_seqs", "users", integer, about="requests of that length that fit"),
    Column("attention_intensity", "FLOP/B", lambda v: f"{v:.4g}", about="of attention, per byte of cache that it reads"),
    Column("attention", "attention", right=False),
    Column("kv_cache_read_bytes", "read per step", format_bytes),
    Column(
        "bytes_per_token", "per token", per_token, about="what a token more adds at this context; 0 B where all windows are full"
    ),
    Column("parameters", "parameters", format_count),
    Column("roofline_s", "at least", seconds, wide=True, about="the datasheet bound of the step"),
    Column("intensity", "FLOP/B of the step", lambda v: f"{v:.3g}", wide=True),
    Column("bound", "bound", right=False, wide=True),
)
