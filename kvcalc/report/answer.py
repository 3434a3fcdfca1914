"""What a reading of a deployment gives back: records that print as the command's table, convert, and draw."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.report.chart import Chart
from kvcalc.report.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-not-found, import-untyped, unused-ignore]


class Answer(msgspec.Struct, frozen=True, eq=False):
    """What a command answers, one record or several. Printed, it is the command's table; in a notebook, HTML.

    Attributes are the JSON keys of the chief record, in bytes, FLOPs and seconds: of a pass its total, else the first.
    `dir(answer)` lists them; `.records()` are all records, `.to_pandas()` a DataFrame of them, `.plot()` the picture.
    """

    _records: Sequence[dict[str, Any]]
    _tables: Callable[[], Sequence[Table]]
    _chart: Callable[[], Chart]
    _chief: int = 0
    _short: Mapping[str, str] = {}  # other names of keys

    def records(self) -> list[dict[str, Any]]:
        """All records, flat, as `--format json` prints them: what pandas.DataFrame and polars.DataFrame take."""
        return deepcopy(list(self._records))

    def to_pandas(self) -> "DataFrame":
        """All records as a pandas DataFrame, a row each, the keys its columns. Raises UserError where pandas is missing."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise UserError("pandas is not installed", hint="pip install pandas; `.records()` needs nothing") from None
        return DataFrame(self.records())

    def plot(self, style: str = "light") -> "Figure":
        """The command's picture as a matplotlib figure, which a notebook draws and `.savefig("a.png")` saves.

        style: light, dark or slides. Raises UserError on another.
        """
        from kvcalc.report.plots import figure_of

        found: Figure = figure_of(self._chart(), style)
        return found

    def _repr_html_(self) -> str:
        from kvcalc.report.html import table_html

        return "".join(map(table_html, self._tables()))

    def __getattr__(self, name: str) -> Any:
        chief = self._records[self._chief]
        key = self._short.get(name, name)
        if key not in chief:
            raise AttributeError(f"no figure {name!r}. {self._called(name)}".rstrip())
        return chief[key]

    def _called(self, name: str) -> str:
        """The key of the table's column that is headed so; else the keys that are spelled alike."""
        chief = self._records[self._chief]
        columns = [] if name.startswith("_") else [c for table in self._tables() for c in table.columns]
        headed = [c.key for c in columns if c.title.lower().replace(" ", "_") == name.lower() and c.key in chief]
        return f"The column {name!r} is {headed[0]}" if headed else nearest(name, [*chief, *self._short])

    def __dir__(self) -> list[str]:
        return ["records", "to_pandas", "plot", *self._short, *self._records[self._chief]]

    def __repr__(self) -> str:
        return "".join(map(str, self._tables())).rstrip("\n")
