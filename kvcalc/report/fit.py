"""What `fit` shows: its columns, what varies in the rows, and the notes below."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.capacity import Fit
from kvcalc.capacity.memory_terms import GIB
from kvcalc.report.fit_sentence import closest, said_first, smaller_cache
from kvcalc.report.layout import Column, Table
from kvcalc.report.placement import placement_lines
from kvcalc.report.shell import CommandLine
from kvcalc.report.tables import integer
from kvcalc.units import format_bytes

COLUMNS = (
    Column("model", "model", right=False),
    Column("gpu", "GPU", right=False),
    Column("gpus", "GPUs", integer),
    Column("tensor_parallel_size", "tp", integer),
    Column("engine", "engine", right=False),
    Column("dtype", "weights in", right=False, given=True),
    Column("kv_cache_dtype", "cache in", right=False, given=True),
    Column("length", "context", integer),
    Column("asked", "at once", integer),
    Column("verdict", "fits", right=False),
    Column("max_num_seqs", "users", integer, about="whole sequences of that length, of the replica"),
    Column("unshared_num_seqs", "not shared", integer, about="users without the shared prefix"),
    Column("offload_num_seqs", "on the host", integer, about="users more, in the host's memory"),
    Column("max_concurrency", "concurrency", lambda v: f"{v:,.2f}", about="the same of one rank, as vLLM prints it"),
    Column("low_num_seqs", "low side", integer, about="users at the low end of the range"),
    Column("longest", "longest context", right=True),
    Column("kv_budget_bytes", "for the cache", format_bytes),
    Column("range", "range", right=True),
    Column("weight_bytes", "weights", format_bytes),
    Column("activation_bytes", "activations", format_bytes),
    Column("overhead_bytes", "overhead", format_bytes),
    Column("num_blocks", "blocks", integer),
    Column("blocks_per_request", "per user", integer),
    Column("kv_tokens", "tokens", integer),
)
ASKED = ("model", "engine")  # that lists of them tell apart
FRAGMENTS = (
    ("contiguous slots of max-model-len", "contiguous_waste"),
    ("pieces of exact size: free and out of reach when one does not fit", "external_waste"),
    ("pages", "paged_waste"),
)


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the words that the table shows beside its figures."""
    verdict = (
        "yes"
        if record["fits"]
        else "no"
        if record["shortage_bytes"] == 0
        else f"no, {format_bytes(record['shortage_bytes'])} short"
    )
    longest, low, high = (record[key] for key in ("longest_context", "kv_budget_low_bytes", "kv_budget_high_bytes"))
    words = {"verdict": verdict, "longest": "no limit" if longest is None else f"{longest:,}"}
    return record | words | {"range": None if low is None else f"{low / GIB:,.2f} – {high / GIB:,.2f} GiB"}


def varied(records: Sequence[dict[str, Any]], key: str) -> bool:
    return len({r[key] for r in records}) > 1


def assumptions_line(records: Sequence[dict[str, Any]]) -> str:
    """What the figures were computed under; what varies stands in the rows."""
    first = records[0]
    counts = [] if varied(records, "requested_num_seqs") else [sequences_of(first["requested_num_seqs"])]
    tokens = [] if varied(records, "requested_model_len") else [f"{first['requested_model_len']:,} tokens"]
    words = [" of ".join(counts + tokens)] if counts or tokens else []
    if not varied(records, "utilization_of"):
        words.append(f"{_range(records, 'gpu_memory_utilization', 'g')} of {first['utilization_of']} memory")
    return ", ".join([*words, f"passes of {_range(records, 'max_num_batched_tokens', ',')} tokens"])


def _range(records: Sequence[dict[str, Any]], key: str, form: str) -> str:
    """A figure of all records, or the least and the most of them."""
    values = [r[key] for r in records]
    return " to ".join(f"{value:{form}}" for value in dict.fromkeys((min(values), max(values))))


def notes(records: Sequence[dict[str, Any]], found: Sequence[Fit]) -> list[str]:
    """What stands below the table."""
    first, lines = records[0], [""]
    engines = dict.fromkeys(r["engine"] for r in records)
    lines += [f"engine {name}; {assumptions_line([r for r in records if r['engine'] == name])}" for name in engines]
    lines += [CommandLine(first["command"])] if first["command"] else []
    for record in records:
        if len(record["breakpoints"]) > 1 or record is first:
            lines += cost_lines(record)
            break
    lines += smaller_cache(found[0])
    lines += [f"waste of {name}: {first[key]:.1%}" for name, key in FRAGMENTS if first.get(key) is not None]
    lines += placement_lines(found[0], first)
    if len(found) > 1 and any(f.length > (f.model.max_context or f.length) for f in found):
        lines.append("longest context: at most the model's own maximum, unless more is requested")
    lines += dict.fromkeys(text for f in found for text in f.notes)
    lines += dict.fromkeys(granted for f in found if (granted := _granted(f)))
    lines += [quality for quality in (records[closest(found)]["advice_quality"],) if quality]
    if first["budget"] != "middle":
        lines.append(f"users, tokens and contexts at the {first['budget']} end of the range")
    lines.append(memory_line(found[closest(found)]))
    return [*lines, "every figure is one GPU's, users the replica's; `--explain` walks the budget"]


def memory_line(found: Fit) -> str:
    """Return where the memory of one GPU goes, by name; the parts add up to it."""
    end = f" at the {found.end} end" if found.end != "middle" else ""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.memory_parts().items())
    return f"{found.gpu.name}: {format_bytes(found.budget.memory)} of memory{end}: {parts}"


def _granted(found: Fit) -> str:
    """What the system lets a GPU hold of unified memory; '' where that is all of it."""
    gpu = found.gpu
    held, there = format_bytes(gpu.usable_bytes), format_bytes(gpu.memory_bytes)
    return f"{gpu.name}: its system lets the GPU hold {held} of {there} unless told otherwise" if gpu.usable_share else ""


def cost_lines(record: dict[str, Any]) -> list[str]:
    """What one sequence takes, from each breakpoint on."""
    lines = []
    for piece in record["breakpoints"]:
        slope = piece["bytes_per_token"]
        per = f"{slope:,}" if isinstance(slope, int) else f"{slope:,.1f}"
        cause = f" ({piece['cause']} full)" if piece["cause"] else ""
        blocks = f", in blocks of {piece['block_tokens']:,}" if piece["block_tokens"] > 1 and slope else ""
        lines.append(
            f"one sequence from {piece['from_tokens']:,} tokens{cause}: {piece['fixed_bytes']:,} + {per} · tokens bytes{blocks}"
        )
    return lines


def fit_table(records: Sequence[dict[str, Any]], found: Sequence[Fit], typed: Mapping[str, str] | None = None) -> Table:
    """Configurations a line each, under a sentence about the smallest that holds what was asked: the first, where any does.

    typed: if the request is an engine's command line, its word for each model. Changes are then the engine's own flags.
    """
    shown = {"length": "requested_model_len", "asked": "requested_num_seqs"}
    given = {name: key for name, key in shown.items() if varied(records, key)}
    rows = [row(r) | {name: r[key] for name, key in given.items()} for r in records]
    columns = [c for c in COLUMNS if c.key not in ASKED or varied(records, c.key)]
    return Table(rows, columns, said_first(rows, found, typed), notes(records, found))


def sequences_of(count: int) -> str:
    """So many of them, in words."""
    return f"{count:,} sequence" + "s" * (count != 1)
