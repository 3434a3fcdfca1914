"""What commands do alike: build values from options, and print records in the format asked for."""

import sys
from collections.abc import Sequence

from kvcalc.batch import Parallelism
from kvcalc.cli.options import Format
from kvcalc.errors import UserError, printable
from kvcalc.report import export
from kvcalc.report.export import Record
from kvcalc.units import parse_tokens

MOST_ROWS = 100_000


def parallelism(tp: int, pp: int, dp: int, ep: int, enable_ep: bool, dcp: int) -> Parallelism:
    """Ranks from options; `--enable-expert-parallel` spreads the experts over all tp·dp GPUs."""
    if enable_ep and ep > 1:
        raise UserError("--enable-expert-parallel and --expert-parallel-size exclude each other")
    return Parallelism(tp, pp, dp, tp * dp if enable_ep else ep, dcp)


def lengths(text: str, what: str) -> list[int]:
    """A list of token counts or batch sizes from one option."""
    return [parse_tokens(part, what) for part in text.split(",")]


def note(text: str) -> None:
    """A remark for people, on stderr."""
    print(f"note: {printable(text, 1000)}", file=sys.stderr)


def emit(records: Sequence[Record], output: Format) -> bool:
    """Print records as JSON, CSV or Markdown; False where a table was asked for, which the command prints itself."""
    writers = {Format.json: export.to_json, Format.csv: export.to_csv, Format.markdown: export.to_markdown}
    if output is Format.table:
        return False
    sys.stdout.write(writers[output](records))
    return True
