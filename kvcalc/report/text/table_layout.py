"""Lay out tables as plain text, Markdown and HTML, and fold command lines and YAML.

A table's title is its answer. At most MAX_COLUMNS columns are next to each other; a width that has
less room gets fewer. `--wide` shows all columns, in bands on a terminal.
"""

import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import printable
from kvcalc.report.charts.chart import Chart
from kvcalc.report.export import Record

WIDTH = 100  # characters of a line on a pipe
MAX_COLUMNS = 9
MAX_NOTES = 3  # footnotes without --verbose
SHORTENED_LETTERS = 16  # characters of a shortened word
MIN_NAME = 12  # characters of a shortened row name


class Column(msgspec.Struct, frozen=True):
    """One column of a table.

    Attributes:
        key: Key of the record.
        title: Heading.
        show: Function that formats a value.
        right: Whether cells are aligned to the right and never shortened.
        wide: Whether only `--wide` shows the column.
        given: Whether the value is an input. Equal inputs of all rows become a note.
        apart: Whether the column is hidden if model and GPU determine its value.
        rests: `time` or `rate` if the figure depends on the record's `time_basis`.
        about: Meaning of the heading, for a note below the table.
        meaning: Meaning of the value, for `--explain`.
        formula: Formula of the value with keys in braces, for `--explain`.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    wide: bool = False
    given: bool = False
    apart: bool = False
    rests: str = ""
    about: str = ""
    meaning: str = ""
    formula: str = ""


class Table(msgspec.Struct, frozen=True):
    """Records under a title as columns. `str` is the plain text.

    Attributes:
        records: One record per row.
        columns: The columns in the order of importance.
        title: The answer in one sentence.
        notes: Footnotes, at most three.
        wide: Whether all columns are shown.
        details: Further notes, for `--verbose` only. A table that has some leaves the meanings of
            headings and the values equal in all rows to `--verbose` too.
        commands: Command lines to run, the last lines of the output.
        verbose: Whether all notes are shown.
    """

    records: Sequence[Record]
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    wide: bool = False
    details: Sequence[str] = ()
    commands: Sequence[str] = ()
    verbose: bool = False

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in laid_out(self, WIDTH).lines())


class CommandLine(str):
    """A command line. It is folded so that a shell reads its lines as one command."""

    __slots__ = ()


class LaidOutTable(NamedTuple):
    """The lines of a table by their emphasis."""

    title: list[str]
    head: list[str]
    rows: list[str]
    below: list[str]

    def lines(self) -> list[str]:
        """Return all lines."""
        return [*self.title, *self.head, *self.rows, *self.below]


class ColumnChoice(NamedTuple):
    """Columns of a table.

    Attributes:
        shown: Columns in the table.
        remarks: Notes in place of columns whose rows are all equal.
        wide: Columns for `--wide`.
    """

    shown: list[Column]
    remarks: list[str]
    wide: list[Column]


Cells = Sequence[Sequence[str]]


def laid_out(table: Table, width: int, bands: bool = False) -> LaidOutTable:
    """Return the lines of a table, none longer than `width`.

    Args:
        table: The table.
        width: Characters of a line.
        bands: Whether columns that do not fit continue in a further band. It needs `table.wide`;
            without it, wide tables have long lines.
    """
    choice = chosen_columns(table)
    columns, count = choice.shown, len(choice.shown)
    cells: Cells = [
        [c.title for c in columns],
        *([written(c, r) for c in columns] for r in table.records),
    ]
    if not table.wide:
        count, cells = _fit_columns(columns, cells, width)
    rows = _aligned(columns, cells)
    if bands and max(map(len, rows)) > width:
        rows = _banded(columns, cells, width)
    below = []
    for note in _notes(table, choice, count):
        is_command = isinstance(note, CommandLine)
        below += shell_lines(note, width) if is_command else wrapped(note, width, "  ")
    title = [line for text in table.title.splitlines() for line in wrapped(text, width)]
    return LaidOutTable(title, rows[:1], rows[1:], below)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the words of a text in lines of at most `width` characters, indented from the
    second."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def shell_lines(command: str, width: int) -> list[str]:
    """Return a command line in lines of at most `width`, each but the last with a backslash.

    Lines break before flags, and at spaces if a flag with its value is longer. A line that ends
    inside quotes has no backslash. A longer word stays whole.
    """
    lines: list[str] = []
    line = ""
    for piece in re.split(r" (?=--?[A-Za-z])", command):
        for word in [piece] if len(piece) + 4 <= width or '"\'"' in piece else piece.split(" "):
            if line and len(line) + 1 + len(word) > width - 2:
                is_quoted = "\n".join([*lines, line]).count("'") % 2
                lines.append(line if is_quoted else line + " \\")
                line = " "
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _sizes(cells: Cells) -> list[int]:
    """Return the characters of each column."""
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def _aligned(columns: Sequence[Column], cells: Cells) -> list[str]:
    """Return one line per row."""
    sizes = _sizes(cells)
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(size) if column.right else cell.ljust(size)
            for column, cell, size in zip(columns, row, sizes, strict=False)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def _fit_columns(columns: Sequence[Column], cells: Cells, width: int) -> tuple[int, Cells]:
    """Return how many columns fit, and their cells with words shortened if that shows more columns.

    The first column names the row. It is shortened only if no other column fits next to it.
    """
    sizes = _sizes(cells)
    limits = sizes
    count = min(MAX_COLUMNS, len(columns))
    while count > 1:
        words = [i for i in range(1, count) if not columns[i].right]
        room = width - 2 * (count - 1) - sum(sizes[i] for i in range(count) if i not in words)
        letters = max([SHORTENED_LETTERS, *(sizes[i] for i in words)])
        while letters > SHORTENED_LETTERS and sum(min(sizes[i], letters) for i in words) > room:
            letters -= 1
        limits = [min(size, letters) if i in words else size for i, size in enumerate(sizes)]
        if sum(limits[:count]) + 2 * (count - 1) <= width:
            break
        count -= 1
    if count == 1:
        limits = [
            size if c.right else min(size, SHORTENED_LETTERS)
            for c, size in zip(columns, sizes, strict=True)
        ]
        name = width - 2 - sum(limits[1:2])
        if len(columns) > 1 and name >= MIN_NAME:
            count = 2
        limits[0] = name if count > 1 else width
    cut = [
        [_short(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in cells
    ]
    return count, [row[:count] for row in cut]


def _banded(columns: Sequence[Column], cells: Cells, width: int) -> list[str]:
    """Return all columns in bands, with a blank line between bands.

    Each band begins with the leading inputs, which name the row, or only the first column if they
    need more than half of the width.
    """
    sizes = _sizes(cells)
    names = max(1, next((i for i, c in enumerate(columns) if not c.given), 1))
    widest = max((size for c, size in zip(columns, sizes, strict=True) if c.right), default=0)
    max_label = min(width // 2, width - 2 - widest)
    if names > 1 and sum(sizes[:names]) + 2 * (names - 1) > max_label:
        names = 1
        sizes[0] = min(sizes[0], max_label)
    elif names == 1:
        sizes[0] = min(sizes[0], max_label)
    room = width - sum(sizes[:names]) - 2 * names
    sizes[names:] = [
        size if c.right else min(size, room)
        for c, size in zip(columns[names:], sizes[names:], strict=True)
    ]
    cut = [[_short(cell, size) for cell, size in zip(row, sizes, strict=True)] for row in cells]
    lines: list[str] = []
    start = names
    while start < len(columns):
        end = start + 1
        while end < len(columns) and sum(sizes[start : end + 1]) + 2 * (end - start) <= room:
            end += 1
        band = [*range(names), *range(start, end)]
        rows = _aligned([columns[i] for i in band], [[row[i] for i in band] for row in cut])
        lines += ["", *rows] if lines else rows
        start = end
    return lines


def filled_columns(table: Table) -> list[Column]:
    """Return the columns that have a value in some record."""
    return [c for c in table.columns if any(r.get(c.key) is not None for r in table.records)]


def chosen_columns(table: Table) -> ColumnChoice:
    """Return the columns to show, without those that have nothing to say."""
    records = table.records
    columns = [
        c for c in filled_columns(table) if not (c.apart and is_determined(records, c.key))
    ]
    if table.wide:
        return ColumnChoice(columns, [], [])
    shown, inputs, remarks = [], [], []
    for column in columns:
        values = [r.get(column.key) for r in records]
        is_constant = all(value == values[0] for value in values)
        same, remark = SAME_FIGURES.get(column.key, ("", ""))
        if column.given and is_constant:
            if column.right or column.show(values[0]) not in table.title:
                inputs.append(f"{column.title} {written(column, records[0])}")
        elif same and len(records) > 1 and all(r[column.key] == r.get(same) for r in records):
            remarks.append(remark)
        elif not (
            column.wide or (column.key == "fixed_bytes" and is_constant and not values[0])
        ):
            shown.append(column)
    remarks = [", ".join(inputs), *remarks]
    return ColumnChoice(shown, [*filter(None, remarks)], [c for c in columns if c.wide])


# A column, the one that is the same figure in most tables, and a note if both are equal.
SAME_FIGURES = {
    "kv_cache_read_bytes": ("kv_cache_bytes", "A step reads all stored bytes."),
    "kv_cache_allocated_bytes": ("kv_cache_bytes", "Whole blocks need no more bytes."),
    "active_parameters": ("parameters", ""),
}


def is_determined(records: Sequence[Record], key: str) -> bool:
    """Return whether all records of one model on one GPU have the same value under a key."""
    values = {(r.get("model"), r.get("gpu"), r.get(key)) for r in records}
    return len(values) == len({value[:2] for value in values})


def _notes(table: Table, choice: ColumnChoice, count: int) -> list[str]:
    """Return the lines below a table that shows the first `count` columns."""
    commands = ["", *map(CommandLine, table.commands)] if table.commands else []
    hidden = [*choice.shown[count:], *choice.wide]
    plural = "s" * (len(hidden) > 1)
    if table.details and not table.verbose:
        hint = f"{len(hidden)} more column{plural}: --wide. " if hidden else ""
        room = MAX_NOTES - sum(map(bool, table.notes))
        return [*table.notes, *[f"{hint}More notes: -v."][:room], *commands]
    lines = list(choice.remarks)
    if hidden:
        lines.append(f"{len(hidden)} more with --wide: {', '.join(c.title for c in hidden)}")
    meanings = dict.fromkeys(f"{c.title}: {c.about}" for c in choice.shown[:count] if c.about)
    lines += ["; ".join(meanings)] if meanings else []
    lines += [*table.notes[1:], *table.details]
    lines = [n for i, n in enumerate(lines) if not n or n not in (table.title, *lines[:i])]
    return [*table.notes[:1], *lines, *commands]


MARKS = {
    ("time", "bound"): "≥ ",
    ("rate", "bound"): "≤ ",
    ("time", "scaled"): "~ ",
    ("rate", "scaled"): "~ ",
}
PARAMETER_KEYS = ("parameters", "active_parameters", "weight_bytes")


def written(column: Column, record: Record) -> str:
    """Return a record's value as text, or a dash.

    A bound has ≥ or ≤, a scaled figure ~, and a figure of estimated parameters ≈. `< 1 µs` has no
    mark.
    """
    value = record.get(column.key)
    if value is None:
        return "–"
    text = column.show(value)
    if text.startswith("<"):
        return text
    if column.key in PARAMETER_KEYS and record.get("parameters_exact") is False:
        return f"≈ {text}"
    return MARKS.get((column.rests, record.get("time_basis", "")), "") + text


class TableParts(NamedTuple):
    """A table for formats without a width.

    Attributes:
        title: The title.
        columns: The columns.
        rows: The cells of each row.
        notes: The lines below.
    """

    title: str
    columns: list[Column]
    rows: list[list[str]]
    notes: list[str]


def table_parts(table: Table) -> TableParts:
    """Return the parts of a table with at most MAX_COLUMNS columns, or all with `--wide`."""
    choice = chosen_columns(table)
    columns = choice.shown if table.wide else choice.shown[:MAX_COLUMNS]
    rows = [[written(column, record) for column in columns] for record in table.records]
    notes = [note for note in _notes(table, choice, len(columns)) if note]
    return TableParts(table.title.strip(), columns, rows, notes)


def markdown(table: Table) -> str:
    """Return a table in Markdown with its title above and its notes below."""
    title, columns, rows, notes = table_parts(table)
    rule = ["---:" if c.right else "---" for c in columns]
    lines = [f"**{title}**", ""] if title else []
    for row in ([c.title for c in columns], rule, *rows):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    if notes:
        lines += ["", *(f"{note}  " for note in notes)]
    return "\n".join([*lines, ""])


RIGHT_CLASS = ' class="right"'
CHART_SIZE = 6.0, 4.4  # inches of a chart on a page: its texts are legible on a phone


def text_html(text: str) -> str:
    """Return a text as HTML without markup and control characters."""
    return escape(printable(text, 10_000))


def table_html(table: Table) -> str:
    """Return a table as HTML with its title above and its notes below."""
    title, columns, rows, notes = table_parts(table)

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{RIGHT_CLASS * column.right}>{text_html(text)}</{tag}>"
            for column, text in zip(columns, texts, strict=True)
        )

    head = cells("th", [c.title for c in columns])
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    page = f"<p><strong>{text_html(title)}</strong></p>" if title else ""
    page += f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
    page += f"<tbody>{body}</tbody></table></div>"
    items = "".join(f"<li>{text_html(note)}</li>" for note in notes)
    return page + (f'<ul class="notes">{items}</ul>' if items else "")


def svgs_html(charts: Sequence[Chart]) -> list[dict[str, str]]:
    """Return each chart of a page as inline SVG in the styles light and dark, with unique ids."""
    from kvcalc.report.charts.drawing import in_style, rendered
    from kvcalc.report.charts.series_styles import STYLES

    pictures = []
    style = STYLES["light"]._replace(size=CHART_SIZE)
    for number, picture in enumerate(rendered(charts, "svg", style)):
        text = picture.decode()
        text = re.sub(
            r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL
        )
        for size in ("height", "width"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        texts = {"light": text, "dark": in_style(text, "dark")}
        ids = re.compile(r'(\bid="|url\(#|href="#)')
        pictures.append({s: ids.sub(rf"\g<1>{s[0]}{number}-", t) for s, t in texts.items()})
    return pictures


_COMMENT = re.compile(r"(^|\s)#.*$")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def folded(text: str, width: int) -> str:
    """Return YAML with long lines folded at spaces. A comment moves above its line.

    A longer word, such as an address, stays whole.
    """
    lines = []
    for line in text.splitlines():
        lead = " " * (len(line) - len(line.lstrip()))
        unquoted = _QUOTED.sub(lambda match: "_" * len(match[0]), line)
        comment = _COMMENT.search(unquoted)
        if len(line) <= width:
            lines.append(line)
            continue
        if comment:
            words = line[comment.start() :].strip().lstrip("# ")
            lines += _folded_line(words, width, f"{lead}# ", f"{lead}# ")
            line = line[: comment.start()].rstrip()
        lines += _folded_line(line, width, "", lead + "    ")
    return "".join(f"{line}\n" for line in lines)


def _folded_line(text: str, width: int, first: str, further: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
