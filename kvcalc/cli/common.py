"""What commands do alike: read lists, make remarks, and print records in the format asked for."""

import sys
from collections.abc import Sequence, Sized
from math import prod
from typing import TYPE_CHECKING

from kvcalc.cli.options import OutputFormat
from kvcalc.errors import UserError, printable
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.model.spec import Model
    from kvcalc.report.export import Record

MOST_ROWS, MOST_PASSES = 100_000, 2000


def check_number(what: str, most: int, *lists: Sized) -> None:
    """Raises UserError where lists make more combinations than `most`."""
    if prod(map(len, lists)) > most:
        raise UserError(f"more than {most:,} {what} asked for")


def lengths(text: str, what: str) -> list[int]:
    """A list of token counts or batch sizes from one option."""
    return [parse_tokens(part, what) for part in text.split(",")]


def note(text: str) -> None:
    """A remark for people, on stderr."""
    print(f"note: {printable(text, 1000)}", file=sys.stderr)


def save_text(target: str, content: str) -> None:
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


def emit(records: "Sequence[Record]", output: OutputFormat) -> bool:
    """Print records as JSON or CSV; False where a table or Markdown was asked for, which show the command's own columns."""
    if output in (OutputFormat.table, OutputFormat.markdown):
        return False
    from kvcalc.report import export

    sys.stdout.write(export.to_json(records) if output is OutputFormat.json else export.to_csv(records))
    return True
