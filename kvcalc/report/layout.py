"""How a table is laid out in a width: its columns in the order of what matters, the rest named below; no line is longer.

A table answers first: its title is a sentence. At most nine columns and 100 characters stand beside each other; what is the
same in every row becomes a line below. Where a width holds fewer, long words are cut, then columns lost from the right; a few
rows that would keep too few columns stand on their side, one column a row. Only under 40 characters is it a list.
"""

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from kvcalc.report.export import Record

WIDTH, MOST_COLUMNS, LEAST_WIDTH = 100, 9, 40
CUT = 24  # characters that are left of a long word where there is no room for it
FEW_ROWS, FEW_COLUMNS = 6, 6  # rows that may stand on their side, and columns that are too few to stay upright


class Column(NamedTuple):
    """One column: the record's key, its heading, and how a value is written.

    given: what was asked rather than answered, which leaves the table where it is the same in every row.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    wide: bool = False  # shown on request alone
    given: bool = False


class Table(NamedTuple):
    """Records under a title as columns that tell something, with the assumptions below them. `str` is the plain text."""

    records: Sequence[Record]
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    wide: bool = False

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in laid_out(self, WIDTH).lines())


class Laid(NamedTuple):
    """A table's lines: what is emphasised, the rows, and what stands below."""

    title: list[str]
    head: list[str]
    rows: list[str]
    below: list[str]

    def lines(self) -> list[str]:
        return [*self.title, *self.head, *self.rows, *self.below]


def laid_out(table: Table, width: int) -> Laid:
    """The lines of a table, none of them longer than `width`."""
    columns, remarks = condensed(table.records, _told(table))
    cells = [[c.title for c in columns], *([written(c, r) for c in columns] for r in table.records)]
    below = [*table.notes[:1], *remarks, *table.notes[1:]]
    if width < LEAST_WIDTH:
        head: list[str] = []
        rows = [line for row in cells[1:] for line in _listed(cells[0], row, width)]
    else:
        head, rows, lost = _upright(columns, cells, width, table.wide)
        few = len(table.records) <= FEW_ROWS and len(columns) - len(lost) < min(FEW_COLUMNS, len(columns))
        turned = _turned(cells, width) if lost and few else None
        if turned:
            head, rows = turned[:1], turned[1:]
        elif lost:
            below.insert(1 if below else 0, f"{len(lost)} more with --wide: {', '.join(lost)}")
    title = [line for text in table.title.split("\n") for line in (wrap(text, width) or [""])] if table.title else []
    return Laid(title, head, rows, [line for note in below for line in _wrapped(note, width)])


def markdown(table: Table) -> str:
    """The table's columns and units as a pipe table, its notes as lines below."""
    columns = _told(table)
    rows = [[c.title for c in columns], ["---:" if c.right else "---" for c in columns]]
    rows += [[written(c, r).strip() for c in columns] for r in table.records]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    notes = [note for note in table.notes if note]
    head = [f"**{table.title.strip()}**", ""] if table.title else []
    return "\n".join([*head, *lines, *(["", *(f"{note}  " for note in notes)] if notes else []), ""])


def _told(table: Table) -> list[Column]:
    asked = [c for c in table.columns if table.wide or not c.wide]
    return [c for c in asked if any(r.get(c.key) is not None for r in table.records)]


def _upright(columns: Sequence[Column], cells: list[list[str]], width: int, wide: bool) -> tuple[list[str], list[str], list[str]]:
    """(headings, rows, columns lost): as many columns as stand beside each other, from the left."""
    kept = len(columns) if wide else min(MOST_COLUMNS, len(columns))
    cut = cells
    if not wide and _breadth(cells, kept) > width:
        cut = [[_short(cell) if not c.right else cell for c, cell in zip(columns, row, strict=True)] for row in cells]
        while kept > 2 and _breadth(cut, kept) > width:
            kept -= 1
        if _breadth(cells, kept) <= width:
            cut = cells
    sides = [str.rjust if c.right else str.ljust for c in columns[:kept]]
    widths = _widths(cut, kept)
    lines = ["  ".join(side(cell, w) for side, cell, w in zip(sides, row, widths, strict=False)).rstrip() for row in cut]
    return [line[:width] if not wide else line for line in lines[:1]], lines[1:], [c.title for c in columns[kept:]]


def _turned(cells: list[list[str]], width: int) -> list[str] | None:
    """One line a column and one column a row, where that fits; rows that have no name get the first line's."""
    label = max(map(len, cells[0]))
    sizes = [max(map(len, row)) for row in cells[1:]]
    if label + sum(2 + size for size in sizes) > width:
        return None
    lines = []
    for at, name in enumerate(cells[0]):
        figures = "".join("  " + row[at].rjust(size) for row, size in zip(cells[1:], sizes, strict=True))
        lines.append(name.ljust(label) + figures)
    return lines


def _listed(names: list[str], row: list[str], width: int) -> list[str]:
    return [line for name, cell in zip(names, row, strict=True) for line in wrap(f"{name}: {cell}", width)]


def _widths(cells: list[list[str]], kept: int) -> list[int]:
    return [max(len(row[at]) for row in cells) for at in range(kept)]


def _breadth(cells: list[list[str]], kept: int) -> int:
    return sum(_widths(cells, kept)) + 2 * (kept - 1)


def _short(text: str) -> str:
    return text if len(text) <= CUT else text[: CUT - 1] + "…"


def _wrapped(note: str, width: int) -> list[str]:
    return wrap(note, width, subsequent_indent="  ", break_on_hyphens=False) or [""]


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
        same = all(v == values[0] for v in values)
        other, name = _ECHOES.get(column.key, ("", ""))
        if column.given and same:
            constant.append(f"{column.title} {column.show(values[0])}")
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


def written(column: Column, record: Record) -> str:
    """The figure, behind ≈ where it hangs on parameters of which the record says that they are not exact."""
    value = record.get(column.key)
    about = "≈ " if column.key in _COUNTED and record.get("parameters_exact") is False else ""
    return "–" if value is None else about + column.show(value)
