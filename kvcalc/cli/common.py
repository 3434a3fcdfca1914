"""What commands do alike: read lists, make remarks, and print records in the format asked for."""

import sys
from collections.abc import Iterable, Sized
from math import prod
from typing import TYPE_CHECKING

from kvcalc.cli.options import OutputFormat
from kvcalc.errors import UserError, printable
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.model.spec import Model
    from kvcalc.report.export import Record

MOST_NAMES = 2000  # models, or GPUs
MOST_ROWS, MOST_SHOWN, MOST_PASSES = 250_000, 20_000, 2000  # records that are printed one by one, of a table, of passes


def check_number(what: str, most: int, *lists: Sized) -> None:
    """Raises UserError where lists make more combinations than `most`."""
    if (asked := prod(map(len, lists))) > most:
        raise UserError(f"{asked:,} {what} are asked for, and at most {most:,} made at once")


def lengths(text: str, what: str) -> list[int]:
    """A list of token counts or batch sizes from one option."""
    return [parse_tokens(part, what) for part in text.split(",")]


def note(text: str) -> None:
    """A remark for people, on stderr."""
    print(f"note: {printable(text, 1000)}", file=sys.stderr)


def save_text(target: str, content: "str | Iterable[str]") -> None:
    """Write a file, and say so on stderr; `-` is standard output."""
    from kvcalc.library.files import write_text

    write_text(target, content)
    if target != "-":
        print(f"wrote {printable(target, 1000)}", file=sys.stderr)


def remarks(model: "Model", longest: int) -> None:
    """What is to be said of a model and of the longest context asked for, on stderr."""
    for text in model.notes:
        note(f"{model.name}: {text}")
    if model.max_context and longest > model.max_context:
        note(f"{model.name}: context {longest:,} is beyond the model's own maximum of {model.max_context:,}")


def emit(records: "Iterable[Record]", output: OutputFormat) -> bool:
    """Print records as JSON or CSV, each as soon as it is made; False for a table or Markdown, of a command's own columns."""
    if output in (OutputFormat.table, OutputFormat.markdown):
        return False
    from kvcalc.report import export

    pieces = export.json_pieces if output is OutputFormat.json else export.csv_pieces
    sys.stdout.writelines(pieces(records))
    return True
