"""The answer of a Python function: records that print as a table, convert and draw."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.report.charts.chart import Chart
from kvcalc.report.text.table_layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-not-found, import-untyped, unused-ignore]


class Answer(msgspec.Struct, frozen=True, eq=False):
    """One or several records. Printed, it is the command's table; in a notebook, HTML.

    Attributes are the JSON keys of the main record, in bytes, FLOPs and seconds. The main record
    is the total of a pass, otherwise the first. `dir(answer)` lists the keys.
    """

    _records: Sequence[Mapping[str, object]]
    _tables: Callable[[], Sequence[Table]]
    _chart: Callable[[], Chart]
    _chief: int = 0
    _short: Mapping[str, str] = {}  # other names of keys

    def records(self) -> list[dict[str, Any]]:
        """Return all flat records, as `--format json` prints them, for pandas or polars."""
        return deepcopy([dict(record) for record in self._records])

    def to_pandas(self) -> "DataFrame":
        """Return all records as a pandas DataFrame. Raise UserError if pandas is missing."""
        try:
            from pandas import DataFrame
        except ImportError:
            hint = "Run `pip install pandas`, or use `.records()`"
            raise UserError("pandas is not installed", hint=hint) from None
        return DataFrame(self.records())

    def plot(self, style: str = "light") -> "Figure":
        """Return the command's picture; `.savefig("a.png")` saves it.

        Args:
            style: light, dark or slides.
        """
        from kvcalc.report.charts.drawing import figure_of

        figure: Figure = figure_of(self._chart(), style)
        return figure

    def _repr_html_(self) -> str:
        from kvcalc.report.text.table_layout import table_html

        return "".join(map(table_html, self._tables()))

    def __getattr__(self, name: str) -> Any:
        record = self._records[self._chief]
        key = self._short.get(name, name)
        if key in record:
            return record[key]
        hint = nearest(name, [*record, *self._short])
        columns = [] if name.startswith("_") else [c for t in self._tables() for c in t.columns]
        for column in columns:
            if column.key in record and column.title.lower().replace(" ", "_") == name.lower():
                hint = f"The column {name!r} is {column.key}"
        raise AttributeError(f"no figure {name!r}. {hint}".rstrip())

    def __dir__(self) -> list[str]:
        return [
            "records",
            "to_pandas",
            "plot",
            *self._short,
            *self._records[self._chief],
        ]

    def __repr__(self) -> str:
        return "".join(map(str, self._tables())).rstrip("\n")
