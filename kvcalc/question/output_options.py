"""How the command line prints and draws an answer."""

from enum import StrEnum
from typing import Annotated

from kvcalc.errors import UserError
from kvcalc.question.options import Option, Question


class OutputFormat(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class ByteUnits(StrEnum):
    gib = "gib"
    si = "si"
    bytes = "bytes"


Explain = Annotated[
    bool,
    Option(
        "Print the formula of each figure with its numbers",
        panel="Output",
        is_common=True,
        called="details all",
    ),
]
Plot = Annotated[
    str,
    Option(
        "Write a picture (.png, .svg or .pdf); - draws it in the terminal",
        takes="FILE",
        panel="Output",
        called="save picture figure image chart svg png",
        is_output=True,
    ),
]
Style = Annotated[
    str,
    Option(
        "Style of the picture: light, dark or slides",
        panel="Output",
        words=("light", "dark", "slides"),
        called="theme dark color colour",
    ),
]


class Printing(Question, frozen=True):
    """How records are printed."""

    form: Annotated[
        OutputFormat,
        Option(
            "Format of the output",
            "--format",
            panel="Output",
            is_common=True,
            called="json csv markdown md",
        ),
    ] = OutputFormat.table
    wide: Annotated[
        bool,
        Option("Show all columns of the table", panel="Output", called="details all"),
    ] = False
    verbose: Annotated[
        bool, Option("Print all notes under the table", "--verbose -v", panel="Output")
    ] = False
    units: Annotated[
        ByteUnits,
        Option("Units of bytes: GiB (2^30), GB (10^9) or exact bytes", panel="Output"),
    ] = ByteUnits.gib
    explain: Explain = False

    @property
    def is_table(self) -> bool:
        """Whether a table is printed, under its sentence."""
        return self.form in (OutputFormat.table, OutputFormat.markdown)


class Output(Printing, frozen=True):
    """How records are printed and drawn."""

    plot: Plot = ""
    style: Style = "light"

    def __post_init__(self) -> None:
        if self.style != "light" and not self.plot:
            raise UserError(f"style {self.style!r} needs a picture", hint="Add --plot FILE")
