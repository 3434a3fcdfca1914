"""The answer of a command: records that can be printed as a table, converted and drawn."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from kvcalc.errors import UserError, nearest, printable, visible
from kvcalc.records import Record, Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-not-found, import-untyped, unused-ignore]

    from kvcalc.report.charts.chart import Chart
    from kvcalc.report.text.table_layout import Table


def say(text: str) -> None:
    """Print a text of several lines on stdout.

    On a terminal, lines longer than its width are wrapped. In a pipe, lines are unchanged.

    Args:
        text: Lines separated by newlines. A wrapped line keeps its indentation.
    """
    output = visible(text)
    if sys.stdout.isatty():
        lines = []
        for line in output.split("\n"):
            indent = " " * (len(line) - len(line.lstrip()))
            lines += [indent + part for part in _wrapped(line, len(indent))]
        output = "\n".join(lines)
    print(output)


def _wrapped(line: str, indent: int = 0) -> list[str]:
    from kvcalc.report.text.table_layout import wrapped

    return wrapped(line, max(20, shutil.get_terminal_size().columns - indent), "  ")


def note(text: str) -> None:
    """Print a remark on stderr as `note: TEXT`, so that it does not mix with the results on stdout.

    Args:
        text: The remark. It is cut after 1,000 characters.
    """
    print_to_stderr(f"note: {printable(text, 1000)}")


def print_to_stderr(line: str) -> None:
    """Print a message for the user on stderr, such as an error, so that stdout has only results.

    A long message is wrapped on a terminal, but not in a pipe.

    Args:
        line: The message in one line.
    """
    print("\n".join(_wrapped(line)) if sys.stderr.isatty() else line, file=sys.stderr)


def save_text(target: str, content: str) -> None:
    """Write a text file, and print `wrote PATH` on stderr.

    Args:
        target: Path of the file; `-` writes to stdout, and then stderr stays empty.
        content: The complete text of the file.
    """
    from kvcalc.library.files import write_text

    write_text(target, content)
    if target != "-":
        print(f"wrote {printable(target, 1000)}", file=sys.stderr)


MAX_ROWS = 250_000  # records that are printed one by one
MAX_PASSES = 500  # passes that are timed one by one
MAX_TABLES = 100
MAX_TABLE_ROWS = 20_000


class LazyRecords(Sequence[Record]):
    """Records that a function computes again at each reading, so that they need no memory.

    A record is one row of an answer: a flat dictionary from JSON key to value. Commands use this
    sequence if an answer may have more records than memory can store.

    Attributes:
        make_records: Function that yields all records. Each reading calls it again.
        length: Number of records, so that `len` need not compute them.
    """

    def __init__(self, make_records: Callable[[], Iterable[Record]], length: int) -> None:
        """Keep the function that computes the records.

        Args:
            make_records: Function that yields all records.
            length: Number of records.
        """
        self.make_records = make_records
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Record]:
        return iter(self.make_records())

    def __getitem__(self, index: Any) -> Any:
        return next(islice(self.make_records(), index, None))


class Answer(msgspec.Struct, frozen=True, eq=False):
    """The answer of a command: its records, and how they are printed and drawn.

    A record is a flat dictionary, JSON key → value, such as one row of the printed table.
    `str(answer)` is the command's table, and a notebook shows it as HTML. Each JSON key of the main
    record is an attribute, such as `answer.kv_cache_bytes`. Units are bytes, FLOPs and seconds. The
    main record is the total for `roofline`, otherwise the first record. `dir(answer)` lists the
    keys.

    Attributes:
        _records: All records.
        _tables: Function that returns the tables to print.
        _charts: Function that returns the charts to draw; by default it returns none.
        _main: Index of the main record in `_records`; -1 for the last.
        _short: Further attribute name → the JSON key that it stands for, such as `stored` →
            `kv_cache_bytes`.
        _formulas: Function that returns the text of `--explain`; None for a text made from the
            tables.
        _notes: Remarks to print on stderr.
        _status: Exit status of the command; 0 for success.
        _yaml: Text that is printed instead of the tables; '' for none.
        _is_silent: Whether the records are not printed, because a file is written to stdout
            instead.
    """

    _records: Records
    _tables: "Callable[[], Sequence[Table]]"
    _charts: "Callable[[], Sequence[Chart]]" = list
    _main: int = 0
    _short: Mapping[str, str] = {}  # other names of keys
    _formulas: Callable[[], str] | None = None  # by default the tables' formulas
    _notes: Sequence[str] = ()  # for stderr
    _status: int = 0  # exit status of the command
    _yaml: str = ""  # printed instead of tables
    _is_silent: bool = False  # whether a file on stdout takes the place of the records

    def records(self) -> list[dict[str, Any]]:
        """Return all records as flat dictionaries, as `--format json` prints them.

        The dictionaries are copies, which the caller may change.
        """
        return deepcopy([dict(record) for record in self._records])

    def to_pandas(self) -> "DataFrame":
        """Return all records as a pandas DataFrame.

        Raises:
            UserError: pandas is not installed.
        """
        return self._data_frame("pandas")

    def to_polars(self) -> Any:
        """Return all records as a polars DataFrame.

        Raises:
            UserError: polars is not installed.
        """
        return self._data_frame("polars", infer_schema_length=None)

    def _data_frame(self, library: str, **options: Any) -> Any:
        try:
            module = import_module(library)
        except ImportError:
            raise UserError(
                f"{library} is not installed",
                f"Run `pip install {library}`, or use `.records()`",
            ) from None
        return module.DataFrame(self.records(), **options)

    def plot(self, style: str = "light") -> "Figure":
        """Return the picture that `--plot` draws, as a matplotlib figure.

        `answer.plot().savefig("a.png")` saves it.

        Args:
            style: light, dark or slides.

        Raises:
            UserError: The answer has no picture, or the style is unknown.
        """
        from kvcalc.report.charts.drawing import figure_of

        charts = self._charts()
        if not charts:
            raise UserError("there is nothing to draw")
        figure: Figure = figure_of(charts, style)
        return figure

    def _main_tables(self) -> "list[Table]":
        """Return the tables without those that only `--verbose` prints."""
        return [table for table in self._tables() if not table.is_detail]

    def _explanation(self) -> str:
        """Return the figures as formulas with their numbers, after the answer's sentence."""
        from kvcalc.report.explain import explain_table

        tables = self._tables()
        if self._formulas:
            return "\n\n".join([*(t.title for t in tables[:1]), self._formulas()])
        return "\n".join(map(explain_table, tables))

    def _repr_html_(self) -> str:
        from kvcalc.report.text.table_layout import table_html

        return "".join(map(table_html, self._main_tables()))

    def __getattr__(self, name: str) -> Any:
        record = self._records[self._main]
        key = self._short.get(name, name)
        if key in record:
            return record[key]
        hint = nearest(name, [*record, *self._short])
        tables = [] if name.startswith("_") else self._tables()
        for table in tables:
            for column in table.columns:
                title = column.title.lower().replace(" ", "_")
                if column.key in record and title == name.lower():
                    hint = f"The column {name!r} is {column.key}"
        raise AttributeError(f"no figure {name!r}. {hint}".rstrip())

    def __dir__(self) -> list[str]:
        return [
            "records",
            "to_pandas",
            "to_polars",
            "plot",
            *self._short,
            *self._records[self._main],
        ]

    def __repr__(self) -> str:
        return "\n".join(map(str, self._main_tables())).rstrip("\n")
