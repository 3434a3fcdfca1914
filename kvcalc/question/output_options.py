"""How the command line prints and draws an answer."""

from kvcalc.errors import UserError
from kvcalc.question.options import Question


class Printing(Question, frozen=True):
    """How records are printed."""

    format: str = "table"
    wide: bool = False
    verbose: bool = False
    units: str = "gib"
    explain: bool = False

    @property
    def is_table(self) -> bool:
        """Whether a table is printed, under its sentence."""
        return self.format in ("table", "markdown")


class Output(Printing, frozen=True):
    """How records are printed and drawn."""

    plot: str = ""
    style: str = "light"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style != "light" and not self.plot:
            raise UserError(f"style {self.style!r} needs a picture", hint="Add --plot FILE")
