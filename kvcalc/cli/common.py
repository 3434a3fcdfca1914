"""What commands do alike: build values from options, and print records in the format asked for."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcalc.cli.options import OutputFormat
from kvcalc.errors import UserError, printable
from kvcalc.layers.ranks import Parallelism
from kvcalc.report import export
from kvcalc.report.export import Record
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.model.spec import Model
    from kvcalc.timing.calibration import Calibration

MOST_ROWS = 100_000


def parallelism(tp: int, pp: int, dp: int, ep: int, enable_ep: bool, dcp: int) -> Parallelism:
    """Ranks from options; `--enable-expert-parallel` spreads the experts over all tp·dp GPUs."""
    if enable_ep and ep > 1:
        raise UserError("--enable-expert-parallel and --expert-parallel-size exclude each other")
    return Parallelism(tp, pp, dp, tp * dp if enable_ep else ep, dcp)


def calibration(gpu: "Gpu", stack: str, source: str) -> "Calibration | None":
    """The calibration that times on `gpu` rest on, scaled from another GPU's if asked; None for datasheet bounds."""
    from kvcalc.library.load import load_gpu

    if stack == "datasheet" or not (stack or source or _calibrated(gpu)):
        return None
    from kvcalc.timing.calibration import load_calibration

    return load_calibration(gpu, stack, load_gpu(source) if source else None)


def _calibrated(gpu: "Gpu") -> bool:
    from kvcalc.library.catalog import shipped_folder, user_folders

    return any((folder / "calibrations" / gpu.name / "vllm.yaml").is_file() for folder in [*user_folders(), shipped_folder()])


def basis(gpu: "Gpu", found: "Calibration | None", source: str) -> str:
    """One sentence of what predicted times rest on."""
    if not found:
        return f"{gpu.name}: no calibration in use, so no predicted times"
    scaled = f", scaled from {source} by datasheet figures" if source else ""
    return f"predicted: {found.stack} {found.version} calibration{scaled}".replace("  ", " ")


def lengths(text: str, what: str) -> list[int]:
    """A list of token counts or batch sizes from one option."""
    return [parse_tokens(part, what) for part in text.split(",")]


def note(text: str) -> None:
    """A remark for people, on stderr."""
    print(f"note: {printable(text, 1000)}", file=sys.stderr)


def remarks(model: "Model", longest: int) -> None:
    """What is to be said of a model and of the longest context asked for, on stderr."""
    for text in model.notes:
        note(f"{model.name}: {text}")
    if model.max_context and longest > model.max_context:
        note(f"{model.name}: context {longest:,} is beyond the model's own maximum of {model.max_context:,}")


def emit(records: Sequence[Record], output: OutputFormat) -> bool:
    """Print records as JSON, CSV or Markdown; False where a table was asked for, which the command prints itself."""
    writers = {OutputFormat.json: export.to_json, OutputFormat.csv: export.to_csv, OutputFormat.markdown: export.to_markdown}
    if output is OutputFormat.table:
        return False
    sys.stdout.write(writers[output](records))
    return True
