"""What commands do alike: read lists, make remarks, and print records in the format asked for."""

import sys
from collections.abc import Iterable, Sized
from math import prod
from typing import TYPE_CHECKING

from kvcalc.cli.options import OutputFormat
from kvcalc.errors import UserError, printable, visible
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.model.spec import Model
    from kvcalc.report.export import Record

MOST_NAMES = 2000  # models, or GPUs
MOST_ROWS, MOST_SHOWN = 250_000, 20_000  # records that are printed one by one, and in a table
MOST_PASSES, MOST_TABLES = 500, 100  # passes that are timed one by one, and that each have a table


def check_number(what: str, most: int, *lists: Sized) -> None:
    """Raises UserError where lists make more combinations than `most`."""
    if (asked := prod(map(len, lists))) > most:
        raise UserError(f"{asked:,} {what} are asked for, and at most {most:,} made at once")


def lengths(text: str, what: str) -> list[int]:
    """A list of token counts or batch sizes from one option."""
    return [parse_tokens(part, what) for part in text.split(",")]


def say(text: str) -> None:
    """Lines on standard output: on a terminal none is longer than it is wide, on a pipe all are whole."""
    shown = visible(text)
    if sys.stdout.isatty():
        import shutil

        from kvcalc.report.layout import wrapped

        width = shutil.get_terminal_size().columns
        rows = [(" " * (len(line) - len(line.lstrip())), line) for line in shown.split("\n")]
        shown = "\n".join(lead + part for lead, line in rows for part in wrapped(line, max(20, width - len(lead)), "  "))
    print(shown)


def say_yaml(text: str) -> None:
    """YAML on standard output: as it is on a pipe, folded on a terminal that is narrower."""
    if sys.stdout.isatty():
        import shutil

        from kvcalc.report.folding import folded

        text = folded(text, shutil.get_terminal_size().columns)
    sys.stdout.write(visible(text))


def note(text: str) -> None:
    """A remark for people, on stderr."""
    remark(f"note: {printable(text, 1000)}")


def remark(line: str) -> None:
    """A line on stderr; on a terminal that is narrower, on several."""
    if sys.stderr.isatty():
        import shutil

        from kvcalc.report.layout import wrapped

        line = "\n".join(wrapped(line, max(20, shutil.get_terminal_size().columns), "  "))
    print(line, file=sys.stderr)


def save_text(target: str, content: "str | Iterable[str]") -> None:
    """Write a file, and say so on stderr; `-` is standard output."""
    from kvcalc.library.writing import write_text

    write_text(target, content)
    if target != "-":
        print(f"wrote {printable(target, 1000)}", file=sys.stderr)


def remarks(models: "Iterable[Model]", longest: int) -> None:
    """What is to be said of models and of the longest context asked for, on stderr; once of all of whom it is true."""
    about: dict[str, list[str]] = {}
    for model in {m.name: m for m in models}.values():
        texts = list(model.notes)
        if model.max_context and longest > model.max_context:
            texts.append(f"context {longest:,} is beyond the model's own maximum of {model.max_context:,}")
        for text in texts:
            about.setdefault(text, []).append(model.name)
    for text, names in about.items():
        note(f"{', '.join(names)}: {text}")


def emit(records: "Iterable[Record]", output: OutputFormat) -> bool:
    """Print records as JSON or CSV, each as soon as it is made; False for a table or Markdown, of a command's own columns."""
    if output in (OutputFormat.table, OutputFormat.markdown):
        return False
    from kvcalc.report import export

    pieces = export.json_pieces if output is OutputFormat.json else export.csv_pieces
    sys.stdout.writelines(pieces(records))
    return True
