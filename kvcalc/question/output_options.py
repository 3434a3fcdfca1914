"""How the command line prints and draws an answer."""

from typing import Annotated

from kvcalc.errors import UserError
from kvcalc.question.options import Option, Question

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
        choices=("light", "dark", "slides"),
        called="theme dark color colour",
    ),
]


class Printing(Question, frozen=True):
    """How records are printed."""

    format: Annotated[
        str,
        Option(
            "Format of the output",
            takes="table|json|csv|markdown",
            panel="Output",
            choices=("table", "json", "csv", "markdown"),
            is_common=True,
            called="json csv markdown md",
        ),
    ] = "table"
    wide: Annotated[
        bool,
        Option("Show all columns of the table", panel="Output", called="details all"),
    ] = False
    verbose: Annotated[
        bool, Option("Print all notes under the table", "--verbose -v", panel="Output")
    ] = False
    units: Annotated[
        str,
        Option(
            "Units of bytes: GiB (2^30), GB (10^9) or exact bytes",
            takes="gib|si|bytes",
            panel="Output",
            choices=("gib", "si", "bytes"),
        ),
    ] = "gib"
    explain: Explain = False

    @property
    def is_table(self) -> bool:
        """Whether a table is printed, under its sentence."""
        return self.format in ("table", "markdown")


class Output(Printing, frozen=True):
    """How records are printed and drawn."""

    plot: Plot = ""
    style: Style = "light"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style != "light" and not self.plot:
            raise UserError(f"style {self.style!r} needs a picture", hint="Add --plot FILE")
