"""Lay out tables as plain text, Markdown and HTML, and fold command lines.

A table's title is its answer. At most MAX_COLUMNS columns are shown, fewer if the output is narrow.
`--wide` shows all columns, on a terminal in bands below each other.
"""

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.errors import printable
from kvcalc.records import Record, Records
from kvcalc.report.row_names import sides

if TYPE_CHECKING:
    from kvcalc.report.charts.chart import Chart

WIDTH = 100  # characters of a line on a pipe
MAX_COLUMNS = 9
MAX_NOTES = 3  # footnotes without --verbose
NO_BREAK = "\N{NO-BREAK SPACE}"
# a word of a shell command; text in quotes is part of it, also with spaces
SHELL_WORD = r"""(?:'[^']*'|"[^"]*"|\S)+"""
SHORTENED_LETTERS = 16  # minimum length of a shortened word
MIN_NAME = 12  # minimum length of a shortened row name


class Column(msgspec.Struct, frozen=True):
    """One column of a table.

    Attributes:
        key: Key of the record whose value the column shows.
        title: Heading.
        show: Function that formats a value.
        right: Whether cells are aligned to the right and never shortened.
        wide: Whether only `--wide` shows the column.
        is_input: Whether the user gave the values. If all rows have the same value, a note then
            replaces the column.
        is_optional: Whether the column is hidden if all rows with the same model and GPU have the
            same value.
        meaning: Meaning of the value, for `--explain` and `--verbose`; '' for none.
        formula: Formula of the value with keys in braces, for `--explain`; '' for none.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    right: bool = True
    wide: bool = False
    is_input: bool = False
    is_optional: bool = False
    meaning: str = ""
    formula: str = ""


class Table(msgspec.Struct, frozen=True):
    """A table: the answer sentence, records as rows, and notes. `str(table)` is the plain text.

    Attributes:
        records: One record per row.
        columns: The columns in the order of importance. Of more than 9, only `--wide` shows the
            rest.
        title: The answer in one sentence, printed above the table.
        notes: '' for a blank line, then footnotes. Only `--verbose` prints more than 3.
        wide: Whether all columns are shown, as with `--wide`.
        details: Further notes that only `--verbose` prints. If there are any, only `--verbose`
            prints the meanings of headings and the values that are equal in all rows.
        commands: Command lines that the user can run; they are the last lines of the output.
        verbose: Whether all notes are shown, as with `--verbose`.
        is_detail: Whether only `--verbose` prints the table.
    """

    records: Records
    columns: Sequence[Column]
    title: str = ""
    notes: Sequence[str] = ()
    wide: bool = False
    details: Sequence[str] = ()
    commands: Sequence[str] = ()
    verbose: bool = False
    is_detail: bool = False

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in lay_out(self, WIDTH).lines())


class CommandLine(str):
    """A shell command among the lines below a table.

    Its type tells the layout to break it with backslashes (`shell_lines`), so that it can be
    copied.
    """

    __slots__ = ()


class LaidOutTable(NamedTuple):
    """The lines of a printed table, in four groups that differ in emphasis on a terminal.

    Attributes:
        title: Lines of the answer sentence, printed in bold.
        head: The line with the column headings, printed in bold.
        rows: Lines of the rows.
        below: Lines of footnotes and command lines, printed dim.
    """

    title: list[str]
    head: list[str]
    rows: list[str]
    below: list[str]

    def lines(self) -> list[str]:
        """Return all lines of the table from top to bottom."""
        return [line for lines in self for line in lines]


class ColumnChoice(NamedTuple):
    """Which columns of a table are shown, and which notes replace columns.

    A column that is neither in `shown` nor in `wide` adds no information, or a note replaces it.

    Attributes:
        shown: Columns in the table.
        remarks: Notes that replace columns, such as a note on a value that is equal in all rows.
        wide: Columns that are hidden now, and that `--wide` would show.
    """

    shown: list[Column]
    remarks: list[str]
    wide: list[Column]


def lay_out(table: Table, width: int, bands: bool = False) -> LaidOutTable:
    """Return a table as lines of text. Lines are at most `width` characters, except in wide tables.

    Args:
        table: The table.
        width: Characters of a line.
        bands: Whether a wide table is divided into bands below each other, so that no line is too
            long. Without `bands`, a table with `table.wide` has long lines.
    """
    choice = choose_columns(table)
    columns, cells = choice.shown, _cells(table, choice.shown)
    widths = [max(map(len, column)) for column in zip(*cells)]
    if not table.wide:
        widths = _column_widths(columns, widths, width)
    indices = [[*range(len(widths))]]
    if bands and _total_width(widths) > width:
        widths, indices = _bands(columns, widths, width)
    rows: list[str] = []
    for band in indices:
        rows += [""] * bool(rows)
        for row in cells:
            line = ""
            for index in band:
                text, size = row[index], widths[index]
                text = text if len(text) <= size else text[: size - 1] + "…"
                line += (f"{text:>{size}}" if columns[index].right else f"{text:{size}}") + "  "
            rows.append(line.rstrip())
    below = []
    for note in _notes(table, choice, len(widths)):
        is_command = isinstance(note, CommandLine)
        below += shell_lines(note, width) if is_command else wrapped(note, width, "  ")
    title = [line for text in table.title.splitlines() for line in wrapped(text, width)]
    return LaidOutTable(title, rows[:1], rows[1:], below)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return a text broken into lines, for a terminal or a footnote.

    Args:
        text: The text.
        width: Maximum number of characters per line.
        indent: Spaces at the beginning of each line after the first.
    """
    # a number stays with its unit and its mark
    kept = re.sub(r"(?<=\d) (?=[a-zµA-Z])|(?<=[≥≤~]) ", NO_BREAK, text)
    lines = textwrap.wrap(kept, width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines] or [""]


def shell_lines(command: str, width: int) -> list[str]:
    """Return a shell command broken into lines. All lines except the last end with a backslash.

    Lines break before flags, and between words if a flag with its value is longer. A word that is
    longer than a line is not divided, nor is text in quotes.

    Args:
        command: The shell command in one line.
        width: Maximum number of characters per line.
    """
    lines, line = [], ""
    for piece in re.findall(rf"{SHELL_WORD}(?: (?!--?[A-Za-z]){SHELL_WORD})*", command):
        is_long = len(piece) + 4 > width
        for word in re.findall(SHELL_WORD, piece) if is_long else [piece]:
            if line and len(line) + 1 + len(word) > width - 2:
                lines.append(line + " \\")
                line = " "
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _cells(table: Table, columns: Sequence[Column]) -> list[list[str]]:
    """Return the headings and the cells of each row."""
    rows = [[cell_text(column, record) for column in columns] for record in table.records]
    return [[column.title for column in columns], *rows]


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _column_widths(columns: Sequence[Column], sizes: Sequence[int], width: int) -> list[int]:
    """Return the widths of the columns that fit. Words are shortened if more columns then fit.

    The first column names the row. It is shortened only if no other column fits next to it.
    """

    def shorten(letters: int) -> list[int]:
        rest = zip(columns[1:], sizes[1:])
        return [*sizes[:1], *(size if c.right else min(size, letters) for c, size in rest)]

    for count in range(min(MAX_COLUMNS, len(columns)), 1, -1):
        for letters in range(max(*sizes, SHORTENED_LETTERS), SHORTENED_LETTERS - 1, -1):
            widths = shorten(letters)[:count]
            if _total_width(widths) <= width:
                return widths
    second = shorten(SHORTENED_LETTERS)[1:2]
    name = width - 2 - sum(second)
    if second and name >= MIN_NAME:
        return [name, *second]
    return [min(size, width) for size in sizes[:1]]


def _bands(
    columns: Sequence[Column], sizes: Sequence[int], width: int
) -> tuple[list[int], list[list[int]]]:
    """Return the widths of all columns, and the indices of the columns in each band.

    Each band begins with the leading inputs, which name the row, or only the first column if they
    need more than half of the width.
    """
    figures = [size for c, size in zip(columns, sizes) if c.right]
    max_label = min(width // 2 - 2, width - 2 - max(figures, default=0))
    num_names = 1
    while columns[num_names].is_input and columns[0].is_input:
        num_names += 1
    if _total_width(sizes[:num_names]) > max_label:
        num_names = 1
    names = [*range(num_names)]
    widths = [s if c.right else min(s, max_label) for c, s in zip(columns, sizes)]
    bands = [names]
    for index in range(num_names, len(columns)):
        band = [*bands[-1], index]
        if _total_width([widths[i] for i in band]) > width and index > num_names:
            bands.append([*names, index])
        else:
            bands[-1] = band
    return widths, bands


def filled_columns(table: Table) -> list[Column]:
    """Return the columns to show: those for which at least one record has a value other than None.

    Args:
        table: The table with its columns and records.
    """
    return [c for c in table.columns if any(r.get(c.key) is not None for r in table.records)]


# A column, a column that often has the same figures, and a note that then replaces it.
SAME_FIGURES = {
    "kv_cache_read_bytes": ("kv_cache_bytes", "A step reads all stored bytes."),
    "kv_cache_allocated_bytes": ("kv_cache_bytes", "Whole blocks need no more bytes."),
    "active_parameters": ("parameters", ""),
}


def choose_columns(table: Table) -> ColumnChoice:
    """Return which columns a table shows, and the notes that replace other columns.

    Without `--wide`, a column is left out if it adds no information. For example, a note replaces
    an input that is equal in all rows.

    Args:
        table: The table with all its columns.
    """
    records = table.records
    shown, remarks, wide, inputs = [], [], [], []
    for column in filled_columns(table):
        values = [r.get(column.key) for r in records]
        is_constant = all(value == values[0] for value in values)
        other_key, remark = SAME_FIGURES.get(column.key, ("", ""))
        if (
            column.is_optional
            and column.key not in sides(records, ("model", "gpu", column.key)).keys
        ):
            continue
        if table.wide:
            shown.append(column)
        elif column.is_input and is_constant:
            if column.right or column.show(values[0]) not in table.title:
                inputs.append(f"{column.title} {cell_text(column, records[0])}")
        elif len(records) > 1 and other_key and values == [r.get(other_key) for r in records]:
            remarks.append(remark)
        elif column.wide:
            wide.append(column)
        elif column.key not in HIDDEN_IF_ZERO or any(values):
            shown.append(column)
    return ColumnChoice(shown, [*filter(None, [", ".join(inputs), *remarks])], wide)


def _notes(table: Table, choice: ColumnChoice, count: int) -> list[str]:
    """Return the lines below a table that shows the first `count` columns."""
    commands = ["", *map(CommandLine, table.commands)] if table.commands else []
    hidden = [column.title for column in (*choice.shown[count:], *choice.wide)]
    more = f"{len(hidden)} more column{'s' * (len(hidden) > 1)}"
    if table.details and not table.verbose:
        hint = f"{more}: --wide. " * bool(hidden)
        notes = [*table.notes, f"{hint}More notes: -v."]
        return [*notes[: MAX_NOTES + 1], *commands]
    lines = list(choice.remarks)
    if hidden:
        lines.append(f"{more} with --wide: {', '.join(hidden)}")
    if table.verbose:
        defined = [c for c in choice.shown[:count] if c.meaning and not c.is_input]
        meanings = [
            f"{c.title}: {c.meaning}" for c in defined if not c.meaning.startswith(c.title)
        ]
        lines.append("; ".join(meanings))
    lines += [*table.notes[1:], *table.details]
    unique = [n for i, n in enumerate(lines) if not n or n not in (table.title, *lines[:i])]
    return [*table.notes[:1], *unique, *commands]


# Endings of the keys that a bound limits: times and what grows with them, and rates.
TIMES = ("_s", "seconds", "_j", "per_million_tokens")
RATES = ("_per_s", "_per_s_per_gpu", "slo_attainment")
KEYS_WITHOUT_MARK = ("roofline_s", "bytes_per_s")
# Columns that only `--wide` shows if all their values are 0.
HIDDEN_IF_ZERO = ("fixed_bytes", "rejected", "preemptions", "padding_waste")
PARAMETER_KEYS = ("parameters", "active_parameters", "weight_bytes")


def cell_text(column: Column, record: Record) -> str:
    """Return a record's value for a column as the text of a cell; a dash if the value is None.

    A mark before the value means: ≥ or ≤ a datasheet bound, ~ a time scaled from another GPU, and
    ≈ an estimated number of parameters or bytes. A text such as `< 1 µs` gets no mark.

    Args:
        column: The column, with its key and its format.
        record: The row.
    """
    value = record.get(column.key)
    if value is None:
        return "–"
    text, key = column.show(value), column.key
    if key in PARAMETER_KEYS and record.get("parameters_exact") is False:
        return f"≈ {text}"
    if (
        not key.endswith((*TIMES, *RATES))
        or key.endswith(KEYS_WITHOUT_MARK)
        or text.startswith("<")
    ):
        return text
    marks = {"bound": "≤ " if key.endswith(RATES) else "≥ ", "scaled": "~ "}
    return marks.get(record.get("time_basis", ""), "") + text


def table_parts(table: Table) -> tuple[str, list[Column], list[list[str]], list[str]]:
    """Return the title, columns, cells and notes of a table for Markdown and HTML.

    Without `--wide`, columns after the first 9 are dropped, and a note counts them.

    Args:
        table: The table.

    Returns:
        The answer sentence; the columns that are shown; the texts of the cells by row, of which the
        first has the headings; and the footnotes and command lines.
    """
    choice = choose_columns(table)
    columns = choice.shown if table.wide else choice.shown[:MAX_COLUMNS]
    notes = [note for note in _notes(table, choice, len(columns)) if note]
    return table.title.strip(), columns, _cells(table, columns), notes


def markdown(table: Table) -> str:
    """Return a table as Markdown text, with its title above and its notes below.

    Args:
        table: The table. Without `--wide`, only its first 9 columns are included.
    """
    title, columns, (head, *rows), notes = table_parts(table)
    lines = [f"**{title}**", ""] if title else []
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (head, ["---:" if c.right else "---" for c in columns], *rows)
    ]
    if notes:
        lines += ["", *(f"{note}  " for note in notes)]
    return "\n".join([*lines, ""])


RIGHT_CLASS = ' class="right"'
CHART_SIZE = 6.0, 4.4  # inches of a chart on a page: its texts are legible on a phone


def text_html(text: str) -> str:
    """Return a text escaped for HTML, without control characters.

    Example: `a < b` becomes `a &lt; b`.
    """
    from html import escape

    return escape(printable(text, 10_000))


def table_html(table: Table) -> str:
    """Return a table as HTML, with its title above and its notes below.

    Args:
        table: The table. Without `--wide`, only its first 9 columns are included.
    """
    title, columns, rows, notes = table_parts(table)
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = [
            f"<{tag}{RIGHT_CLASS * column.right}>{text_html(text)}</{tag}>"
            for column, text in zip(columns, row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head, *body = lines
    page = f"<p><strong>{text_html(title)}</strong></p>" if title else ""
    page += f'<div class="wide"><table><thead>{head}</thead>'
    page += f"<tbody>{''.join(body)}</tbody></table></div>"
    items = "".join(f"<li>{text_html(note)}</li>" for note in notes)
    return page + (f'<ul class="notes">{items}</ul>' if items else "")


def svgs_html(charts: "Sequence[Chart]") -> list[str]:
    """Return each chart as inline SVG for one HTML page, in the order of `charts`.

    Its colours are the page's CSS variables, and its ids are unique on the page.

    Args:
        charts: All charts of the page, each of which becomes a picture.
    """
    from kvcalc.report.charts.drawing import rendered
    from kvcalc.report.charts.series_styles import STYLES

    pictures = []
    style = STYLES["light"]._replace(size=CHART_SIZE)
    for number, picture in enumerate(rendered([[chart] for chart in charts], "svg", style)):
        text = picture.decode()
        text = re.sub(
            r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL
        )
        for size in ("height", "width"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        for name in ("ink", "paper", "blue"):
            text = text.replace(getattr(style, name).lower(), f"var(--{name})")
        pictures.append(re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>p{number}-", text))
    return pictures
