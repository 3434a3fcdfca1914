"""What `fit --allocations` shows: each step beside what three allocators make of it, and how the memory lies at the end."""

from itertools import groupby
from typing import Any

from kvcalc.capacity.allocations import ENTRY_BYTES, Played
from kvcalc.report.layout import Column, Table
from kvcalc.report.tables import integer

NAMES = {"contiguous": "slots", "first_fit": "pieces", "paged": "pages"}
ANSWERS = {True: "yes", False: "no", None: "–"}
COLUMNS = (
    Column("request", "request", right=False),
    Column("contiguous", "contiguous", right=False),
    Column("contiguous_free_slots", "slots free", integer),
    Column("first_fit", "first fit", right=False),
    Column("first_fit_free_tokens", "tokens free", integer),
    Column("first_fit_largest_hole", "largest hole", integer),
    Column("paged", "pages", right=False),
    Column("paged_free_blocks", "blocks free", integer),
)


def allocation_table(played: Played, longest: int, max_num_seqs: int) -> Table:
    """The steps, and below them pieces, block tables and their bytes; max_num_seqs sequences of `longest` are what may come."""
    rows = [{key: ANSWERS.get(value, value) if key in NAMES else value for key, value in r.items()} for r in played.records]
    pages = played.pages
    entries, block = sum(map(len, pages.tables.values())), pages.block
    most = max_num_seqs * -(-longest // block)
    sizes = f"{played.slots.number:,} contiguous slots of {longest:,}, {pages.memory // block:,} pages of {block}"
    lines = [f"{pages.memory:,} tokens of memory: {sizes}", f"first fit ends as {_map(played)}"]
    lines += [f"block table of {name}, logical → physical: {_runs(table)}" for name, table in pages.tables.items()]
    lines.append(
        f"block tables: {entries:,} entries of {ENTRY_BYTES} bytes = {entries * ENTRY_BYTES:,} B; room for {max_num_seqs:,} × "
        f"{longest:,} tokens = {most:,} entries = {most * ENTRY_BYTES:,} B"
    )
    return Table(rows, COLUMNS, _sentence(played), ["", *lines, *_wasted(played)])


def _wasted(played: Played) -> list[str]:
    """Of the tokens that slots and pages reserve for the sequences that live at the end, those that hold nothing."""
    slots, pages, lines = played.slots, played.pages, []
    for name, whole, held in (
        (f"slots of {slots.longest:,}", slots.longest * len(slots.living), played.held["contiguous"]),
        (f"pages of {pages.block:,}", pages.block * sum(map(len, pages.tables.values())), played.held["paged"]),
    ):
        empty = whole - sum(held.values())
        lines += [f"{name}: {empty:,} of {whole:,} tokens reserved hold nothing, {empty / whole:.1%}"] if whole else []
    return lines


def _sentence(played: Played) -> str:
    """The last step as a person would say it."""
    last = played.records[-1]
    if last["tokens"] is None:
        return (
            f"{last['request']}: {len(played.pages.tables):,} sequences live in pages, {len(played.first_fit.pieces):,} in pieces"
        )
    verdicts = [f"{word} {'grant' if last[key] else 'refuse'} it" for key, word in NAMES.items()]
    free = f"{last['first_fit_free_tokens']:,} tokens are free in pieces, the largest {last['first_fit_largest_hole']:,}"
    return f"{last['request']}: {', '.join(verdicts)}; {free}"


def _map(played: Played) -> str:
    """The pieces and holes of first fit in order."""
    spans: list[tuple[int, str, int]] = [(start, name, size) for name, (start, size) in played.first_fit.pieces.items()]
    spans += [(start, "free", size) for start, size in played.first_fit.holes()]
    return " | ".join(f"{name} {size:,}" for _, name, size in sorted(spans))


def _runs(table: list[int]) -> str:
    """0–2 → 5–7, 3 → 1: stretches in which both numbers count up together."""
    found = []
    for _, group in groupby(enumerate(table), key=lambda pair: pair[1] - pair[0]):
        pairs: list[tuple[Any, Any]] = list(group)
        (first, start), (last, end) = pairs[0], pairs[-1]
        found.append(f"{first}–{last} → {start}–{end}" if last > first else f"{first} → {start}")
    return ", ".join(found) or "none"
