"""How a table is laid out in a width: its columns in the order of what matters, the rest named below; no line is longer.

A table answers first: its title is a sentence. At most nine columns and 100 characters stand beside each other; what is the
same in every row becomes a line below. Where a width holds fewer, long words are cut, then columns lost from the right; a few
rows that would keep too few columns stand on their side, one column a row. Only under 40 characters is it a list. All columns,
where they are asked for, stand in bands on a terminal, in one on a pipe.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvcalc.report.cells import CUT, Cells, banded, short, turned, upright
from kvcalc.report.export import Record
from kvcalc.report.shell import CommandLine, shell_lines

WIDTH, MOST_COLUMNS, LEAST_WIDTH = 100, 9, 40
LEAST_NAME = 12  # characters that are left of the row's name where there is little room
FEW_ROWS, FEW_COLUMNS = 6, 6  # rows that may stand on their side, and columns that are too few to stay upright


class Column(msgspec.Struct, frozen=True):
    """One column: the record's key, its heading, and how a value is written.

    given: what was asked rather than answered, which leaves the table where it is the same in every row. apart: has a place
    only where records of one model on one GPU differ in it. rests: the figure rests on the record's `time_basis`, as a `time`
    or as a `rate`. about: what the heading means, said below.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    wide: bool = False  # shown on request alone
    given: bool = False
    apart: bool = False
    rests: str = ""
    about: str = ""


class Table(msgspec.Struct, frozen=True):
    """Records under a title as columns that tell something, with the assumptions below them. `str` is the plain text."""

    records: Sequence[Record]
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    wide: bool = False

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in laid_out(self, WIDTH).lines())


class Laid(msgspec.Struct, frozen=True):
    """A table's lines: what is emphasised, the rows, and what stands below."""

    title: list[str]
    head: list[str]
    rows: list[str]
    below: list[str]

    def lines(self) -> list[str]:
        return [*self.title, *self.head, *self.rows, *self.below]


def laid_out(table: Table, width: int, bands: bool = False) -> Laid:
    """The lines of a table, none of them longer than `width`; all columns, where they are asked for, in `bands` or in one."""
    columns, remarks, wide = _chosen(table)
    cells = [[c.title for c in columns], *([written(c, r) for c in columns] for r in table.records)]
    head, rows, kept = _stood(columns, cells, width, table.wide, bands)
    below = _below(table, remarks, columns[:kept], [*columns[kept:], *wide])
    title = [line for text in table.title.split("\n") for line in wrapped(text, width)] if table.title else []
    return Laid(title, head, rows, [line for note in below for line in _noted(note, width)])


def _noted(note: str, width: int) -> list[str]:
    return shell_lines(note, width) if isinstance(note, CommandLine) else wrapped(note, width, "  ")


class Parts(msgspec.Struct, frozen=True):
    """What stands on a table where width is no matter: title, columns, the cells of each row, and the lines below."""

    title: str
    columns: list[Column]
    rows: list[list[str]]
    notes: list[str]


def parts(table: Table) -> Parts:
    """A table's columns, at most `MOST_COLUMNS` unless all are asked for, and what it says above and below them."""
    columns, remarks, wide = _chosen(table)
    kept = len(columns) if table.wide else MOST_COLUMNS
    notes = [note for note in _below(table, remarks, columns[:kept], [*columns[kept:], *wide]) if note]
    rows = [[written(c, r).strip() for c in columns[:kept]] for r in table.records]
    return Parts(table.title.strip(), columns[:kept], rows, notes)


def markdown(table: Table) -> str:
    """The table's columns and units as a pipe table, its notes as lines below."""
    found = parts(table)
    rows = [[c.title for c in found.columns], ["---:" if c.right else "---" for c in found.columns], *found.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    head = [f"**{found.title}**", ""] if found.title else []
    return "\n".join([*head, *lines, *(["", *(f"{note}  " for note in found.notes)] if found.notes else []), ""])


def _chosen(table: Table) -> tuple[list[Column], list[str], list[Column]]:
    """The columns that have a place in the table, remarks for those that have none, and those that are shown on request."""
    every = told(table)
    if table.wide:
        return [c for c in every if not (c.apart and alike_by_gpu(table.records, c.key))], [], []
    columns, remarks = condensed(table.records, [c for c in every if not c.wide], table.title)
    return columns, remarks, [c for c in every if c.wide]


def told(table: Table) -> list[Column]:
    """The columns that some record has a value for."""
    return [c for c in table.columns if any(r.get(c.key) is not None for r in table.records)]


def alike_by_gpu(records: Sequence[Record], key: str) -> bool:
    """Whether all records of one model on one GPU have the same under `key`."""
    found = {(r.get("model"), r.get("gpu"), r.get(key)) for r in records}
    return len(found) == len({pair[:2] for pair in found})


def _below(table: Table, remarks: Sequence[str], shown: Sequence[Column], lost: Sequence[Column]) -> list[str]:
    """The notes, and among them what is the same in every row, what more there is, and what headings mean."""
    more = [f"{len(lost)} more with --wide: {', '.join(c.title for c in lost)}"] if lost else []
    meanings = list(dict.fromkeys(f"{c.title}: {c.about}" for c in shown if c.about))
    return [*table.notes[:1], *remarks, *more, *(["; ".join(meanings)] if meanings else []), *table.notes[1:]]


def _stood(columns: Sequence[Column], cells: Cells, width: int, wide: bool, bands: bool) -> tuple[list[str], list[str], int]:
    """The heading, the rows, and how many columns they hold: upright, or on their side where that shows more."""
    right = [c.right for c in columns]
    if width < LEAST_WIDTH:
        return [], [line for row in cells[1:] for line in _listed(cells[0], row, width)], len(columns)
    few = len(cells) - 1 <= FEW_ROWS
    if wide:
        lines = upright(right, cells)
        if bands and max(map(len, lines)) > width:
            names = next((at for at, c in enumerate(columns) if not c.given), 1)
            lines = (turned(right, cells, width) if few else []) or banded(right, cells, width, max(1, names))
        return lines[:1], lines[1:], len(columns)
    kept, cut = _fitting(columns, cells, width)
    side = turned(right, cells, width) if few and kept < min(FEW_COLUMNS, len(columns)) else []
    lines = side or upright(right[:kept], [row[:kept] for row in cut])
    return lines[:1], lines[1:], len(columns) if side else kept


def _fitting(columns: Sequence[Column], cells: Cells, width: int) -> tuple[int, Cells]:
    """How many columns stand beside each other, from the left, and the cells with words as short as that needs.

    Words get what is left for them, no less than CUT, and all that they need in the first column, which names the row: it is
    cut only where no other column has a place beside it.
    """
    sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
    most = range(min(MOST_COLUMNS, len(columns)), 1, -1)
    for kept in most:
        words = [at for at in range(1, kept) if not columns[at].right]
        taken = 2 * (kept - 1) + sum(sizes[at] for at in range(kept) if at not in words)
        limit = _limit([sizes[at] for at in words], width - taken)
        if limit:
            return kept, [[short(c, limit) if at in words else c for at, c in enumerate(row)] for row in cells]
    words = [at for at, c in enumerate(columns) if not c.right]
    cut = [min(size, CUT) if at in words else size for at, size in enumerate(sizes)]
    kept = next((n for n in most if width - sum(cut[1:n]) - 2 * (n - 1) >= LEAST_NAME), 1)
    name = width - sum(cut[1:kept]) - 2 * (kept - 1)
    return kept, [[short(c, CUT if at else name) if at in words else c for at, c in enumerate(row)] for row in cells]


def _limit(sizes: list[int], room: int) -> int:
    """The length of the longest words that fit into `room`, one of each size; 0 where not even those of CUT do."""
    limits = range(max(CUT, *sizes, 0), CUT - 1, -1)
    return next((limit for limit in limits if sum(min(size, limit) for size in sizes) <= room), 0)


def _listed(names: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    return [line for name, cell in zip(names, row, strict=True) for line in wrapped(f"{name}: {cell}", width)]


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """The words of `text` on lines no longer than `width`, all but the first indented; a word that is longer is cut up.

    As textwrap does it, whose import alone takes longer than a table.
    """
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else f"{indent if lines else ''}{word}"
        while len(line) > width:
            lines.append(line[:width])
            line = indent + line[width:]
    return [*lines, line]


_ECHOES = {
    "kv_cache_read_bytes": ("kv_cache_bytes", "read per step"),
    "kv_cache_allocated_bytes": ("kv_cache_bytes", "in blocks"),
    "active_parameters": ("parameters", "active"),
}


def condensed(records: Sequence[Record], columns: Sequence[Column], title: str = "") -> tuple[list[Column], list[str]]:
    """The columns without those that say the same in every row or only repeat another, and remarks that say so instead.

    Words that the title says already are in no remark.
    """
    kept, constant, echoed = [], [], []
    for column in columns:
        values = [r.get(column.key) for r in records]
        same = all(v == values[0] for v in values)
        other, name = _ECHOES.get(column.key, ("", ""))
        if column.apart and alike_by_gpu(records, column.key):
            continue
        if column.given and same:
            said = not column.right and column.show(values[0]) in title
            constant += [] if said else [f"{column.title} {written(column, records[0])}"]
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
_ABOUT = {("time", "bound"): "≥ ", ("rate", "bound"): "≤ ", ("time", "scaled"): "~ ", ("rate", "scaled"): "~ "}


def written(column: Column, record: Record) -> str:
    """The figure, behind ≈ where it hangs on parameters of which the record says that they are not exact.

    Of a time behind ≥ where it is a bound, of a rate ≤, and ~ where it is scaled from another GPU; `< 1 µs` has no mark.
    """
    value = record.get(column.key)
    about = "≈ " if column.key in _COUNTED and record.get("parameters_exact") is False else ""
    about += _ABOUT.get((column.rests, record.get("time_basis", "")), "") if column.rests else ""
    text = "–" if value is None else column.show(value)
    return text if text.startswith(("–", "<")) else about + text
