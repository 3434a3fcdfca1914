"""Tables for people. Plain and as wide as they need on a pipe; on a narrow terminal one record below the other."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcalc.report.export import Record
from kvcalc.units import format_bytes, format_count, format_si


class Column(NamedTuple):
    """One column: the record's key, its heading, and how a value is written."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    wide: bool = False  # shown on request alone


class Table(NamedTuple):
    """Records under a title as columns that tell something, with the assumptions below them. `str` is the plain text."""

    records: Sequence[Record]
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    wide: bool = False

    def laid_out(self) -> tuple[list[Column], list[str]]:
        """The columns used, and the lines below; columns that tell nothing are left out or become a line."""
        asked = [c for c in self.columns if self.wide or not c.wide]
        told = [c for c in asked if any(r.get(c.key) is not None for r in self.records)]
        used, remarks = condensed(self.records, told)
        return used, [*self.notes[:1], *remarks, *self.notes[1:]]

    def __str__(self) -> str:
        used, below = self.laid_out()
        return "".join(f"{line}\n" for line in [*([self.title] if self.title else []), *_aligned(self.records, used), *below])


def show(*tables: Table) -> None:
    """Print tables: with emphasis on a terminal, and as cards where it is too narrow; plain on a pipe."""
    for table in tables:
        if sys.stdout.isatty():
            used, below = table.laid_out()
            _show_on_terminal(table.title, _aligned(table.records, used), _cards(table.records, used), below)
        else:
            sys.stdout.write(str(table))


def _aligned(records: Sequence[Record], columns: Sequence[Column]) -> list[str]:
    """The headings and one line a record, figures to the right, two blanks between columns."""
    rows = [[c.title for c in columns], *([_written(c, r) for c in columns] for r in records)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = [str.rjust if c.right else str.ljust for c in columns]
    return ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


def _cards(records: Sequence[Record], columns: Sequence[Column]) -> list[list[tuple[str, str]]]:
    """One record below the other, each as (heading, figure) lines."""
    return [[(c.title, _written(c, r)) for c in columns] for r in records]


def _show_on_terminal(title: str, lines: list[str], cards: list[list[tuple[str, str]]], below: list[str]) -> None:
    """With emphasis, and as cards where the lines are too wide. rich is imported here: a pipe does without, and starts sooner."""
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    if title:
        out.print(Text(title, style="bold"))
    if max(map(len, lines)) <= out.width:
        out.print(Text(lines[0], style="bold"), *map(Text, lines[1:]), sep="\n")
    else:
        for number, card in enumerate(cards):
            out.print(*([""] if number else []), *(Text.assemble((f"{k}: ", "bold"), v) for k, v in card), sep="\n")
    for note in below:
        out.print(Text(note, style="dim"))


_HOISTED = {"context": "context", "batch_size": "batch", "kv_cache_dtype": "cache dtype"}
_ECHOES = {
    "kv_cache_read_bytes": ("kv_cache_bytes", "read per step"),
    "kv_cache_allocated_bytes": ("kv_cache_bytes", "in blocks"),
    "active_parameters": ("parameters", "active"),
}


def condensed(records: Sequence[Record], columns: Sequence[Column]) -> tuple[list[Column], list[str]]:
    """The columns without those that say the same in every row or only repeat another, and remarks that say so instead."""
    kept, constant, echoed = [], [], []
    for column in columns:
        values = [r.get(column.key) for r in records]
        same = len(records) > 1 and all(v == values[0] for v in values)
        other, name = _ECHOES.get(column.key, ("", ""))
        if column.key in _HOISTED and same:
            constant.append(f"{_HOISTED[column.key]} {column.show(values[0])}")
        elif other and len(records) > 1 and all(r.get(column.key) == r.get(other) for r in records):
            echoed.append(name)
        elif not (column.key == "fixed_bytes" and same and not values[0]):
            kept.append(column)
    remarks = [", ".join(constant)] if constant else []
    cache = [name for name in echoed if name != "active"]
    if cache:
        remarks.append(f"{' and '.join(cache)}: the same bytes as stored, in every row")
    return kept, remarks


_COUNTED = ("parameters", "active_parameters", "weight_bytes")


def _written(column: Column, record: Record) -> str:
    """The figure, behind ≈ where it hangs on parameters of which the record says that they are not exact."""
    value = record.get(column.key)
    about = "≈ " if column.key in _COUNTED and record.get("parameters_exact") is False else ""
    return "–" if value is None else about + column.show(value)


def error_bar(records: Sequence[Record]) -> str:
    """The widest error of such steps, as the end of a sentence; '' where none is known."""
    widest = max((r.get("time_p90_error") or 0.0 for r in records), default=0.0)
    return f"; nine of ten such steps of measured servers lie within {widest:.0%}" if widest else ""


def fallback_notes(records: Sequence[Record]) -> list[str]:
    """What products are computed in where a GPU lacks the unit for their dtype, a line each."""
    return list(dict.fromkeys(r["fallback"] for r in records if r.get("fallback")))


def integer(value: int) -> str:
    """With thousands separators."""
    return f"{value:,}"


def ratio(value: float) -> str:
    """A factor: 4×, 56.9×."""
    return f"{value:.3g}×" if value < 100 else f"{value:,.0f}×"


def per_token(value: float) -> str:
    """Bytes per token, exact below 10 KiB."""
    return f"{value:,.0f} B" if value < 10_240 and value == int(value) else format_bytes(value, 1)


SIZE_COLUMNS = (
    Column("variant", "variant", right=False),
    Column("model", "model", right=False),
    Column("attention", "attention", right=False),
    Column("context", "context", integer),
    Column("batch_size", "batch", integer),
    Column("kv_cache_dtype", "cache dtype", right=False),
    Column("kv_cache_bytes", "KV cache", format_bytes),
    Column("kv_cache_read_bytes", "read per step", format_bytes),
    Column("kv_cache_allocated_bytes", "in blocks", format_bytes),
    Column("bytes_per_token", "per token", per_token),
    Column("fixed_bytes", "fixed", format_bytes),
    Column("reduction", "reduction", ratio),
    Column("mha_ratio", "MHA would be", ratio),
    Column("parameters", "parameters", format_count),
    Column("active_parameters", "active", format_count),
    Column("weight_bytes", "weights", format_bytes),
)
MODEL_COLUMNS = (
    Column("model", "model", right=False),
    Column("family", "family", right=False),
    Column("parameters", "parameters", format_count),
    Column("active_parameters", "active", format_count),
    Column("layers", "layers", integer),
    Column("hidden_size", "hidden", integer),
    Column("attention", "attention", right=False),
    Column("bytes_per_token", "per token", per_token),
    Column("max_context", "max context", integer),
)
GPU_COLUMNS = (
    Column("gpu", "GPU", right=False),
    Column("vendor", "vendor", right=False),
    Column("memory_bytes", "memory", lambda v: format_bytes(v, 1)),
    Column("bandwidth_bytes_per_s", "bandwidth", lambda v: format_si(v, "B/s")),
    Column("bf16_flops_per_s", "bf16", lambda v: format_si(v, "FLOP/s")),
    Column("fp8_flops_per_s", "fp8", lambda v: format_si(v, "FLOP/s")),
    Column("fp4_flops_per_s", "fp4", lambda v: format_si(v, "FLOP/s")),
    Column("knee", "knee (bf16)", lambda v: f"{v:.1f}"),
    Column("link_bytes_per_s", "link", lambda v: format_si(v, "B/s")),
)


def seconds(value: float) -> str:
    """A duration with its own unit: 4.59 ms, 12.3 µs."""
    shown = float(f"{value:.3g}")  # 0.9996 ms is 1 ms
    step, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if shown >= s), (1e-9, "ns"))
    return f"{value / step:.3g} {unit}"


ROOFLINE_COLUMNS = (
    Column("operator", "operator", right=False),
    Column("layer", "layer", right=False),
    Column("count", "runs", integer),
    Column("shape", "shape", wide=True),
    Column("flops", "FLOP", lambda v: format_si(v)),
    Column("vector_flops", "vector FLOP", lambda v: format_si(v), wide=True),
    Column("weight_bytes", "weights", lambda v: format_si(v, "B")),
    Column("cache_bytes", "cache", lambda v: format_si(v, "B")),
    Column("activation_bytes", "activations", lambda v: format_si(v, "B")),
    Column("intensity", "FLOP/B", lambda v: f"{v:.3g}"),
    Column("bound", "bound", right=False),
    Column("roofline_s", "at least", seconds),
    Column("share", "share", lambda v: f"{v:.1%}"),
    Column("time_s", "predicted", seconds),
    Column("overhead", "overhead", lambda v: f"{v:.3g}×"),
)
COMPARE_COLUMNS = (
    *(c for c in SIZE_COLUMNS if c.key in ("variant", "attention", "context", "batch_size", "kv_cache_dtype", "kv_cache_bytes")),
    Column("kv_cache_read_bytes", "read per step", format_bytes),
    Column("bytes_per_token", "per token", per_token),
    Column("stored_reduction", "stored less", ratio),
    Column("read_reduction", "read less", ratio),
    Column("parameters", "parameters", format_count),
    Column("attention_intensity", "attention FLOP/B", lambda v: f"{v:.4g}"),
    Column("intensity", "step FLOP/B", lambda v: f"{v:.3g}"),
    Column("bound", "bound", right=False),
    Column("roofline_s", "step", seconds),
    Column("time_s", "predicted", seconds),
    Column("max_num_seqs", "fits", integer),
)
QUALITY_COLUMNS = (
    Column("variant", "variant", right=False),
    Column("head_diversity", "head diversity", right=False),
    Column("trades", "trades", right=False),
    Column("held_equal", "held equal", right=False),
    Column("quality", "published", right=False),
)
