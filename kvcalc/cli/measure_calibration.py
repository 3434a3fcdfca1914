"""`kvcalc measure --calibration`: rows, their laws, and the file that holds them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvcalc.cli.common import note, save_text
from kvcalc.cli.groups import Output

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.measure.machine import Machine
    from kvcalc.measure.run import MeasureSettings

STACK, INTERRUPTED = "torch", 130
Bar = Callable[[int], AbstractContextManager[Callable[[str, int], None]]]


def calibrated(
    machine: "Machine", settings: "MeasureSettings", name: str, preset: Path | None, rows: str, output: Output, bar: Bar
) -> int:
    """Measures, fits and writes; the exit status. Raises UserError where the machine is no preset and is given no name."""
    from kvcalc.errors import UserError
    from kvcalc.measure.calibration_rows import fitted_gpu, measured, planned
    from kvcalc.measure.ceilings import as_gpu, measured_ceilings, save
    from kvcalc.report.export import to_csv

    known = _known(machine)
    if known is None and preset is None:
        raise UserError(f"{machine.name!r} is no preset, so its laws have no roof to stand on", hint="Name it with --save-gpu")
    found: list[dict[str, Any]] = []
    status = 0
    try:
        with bar(200) as begin:
            ceilings = measured_ceilings(machine, ("bf16", "fp32"), lambda text: begin(text, 0), settings.seconds)
            gpu = fitted_gpu(machine, as_gpu(machine, ceilings, name or "measured"))
        if preset:
            save(gpu, preset)
            note(f"wrote {preset}")
        shapes = planned(machine, gpu)
        with bar(len(shapes)) as begin:
            for row in measured(shapes, machine, settings.seconds, settings.graphs, note, begin):
                found.append(row | {"gpu": (known or gpu).name})
    except KeyboardInterrupt:
        note(f"interrupted: {len(found)} rows were measured and are kept")
        status = INTERRUPTED
    if not found:
        raise UserError("nothing was measured")
    text = to_csv(found)
    if rows:
        save_text(rows, text)
    _fit(text, known or gpu, output)
    return status


def _known(machine: "Machine") -> "Gpu | None":
    """The preset that is this machine, if there is one."""
    from kvcalc.errors import UserError
    from kvcalc.measure.calibration_rows import gpu_name
    from kvcalc.timing.calibration import gpu_named

    try:
        return gpu_named(gpu_name(machine.name)) if machine.cuda else None
    except UserError:
        return None


def _fit(text: str, gpu: "Gpu", output: Output) -> None:
    from kvcalc.cli.calibrate import fits_table
    from kvcalc.library.writing import make_folder, write_text
    from kvcalc.timing.calibration import preset_path, to_yaml
    from kvcalc.timing.calibrator import calibrate, fit_records, summed
    from kvcalc.timing.rows import read_rows

    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        write_text(file, text)
        rows = read_rows(file).rows
    fits = calibrate(rows, gpu, STACK, note)
    path = preset_path(gpu, STACK)
    make_folder(path.parent)
    save_text(str(path), to_yaml(summed(fits, gpu, STACK, rows, {"origin": "kvcalc measure --calibration"})))
    if not output.printed(fit_records(fits)):
        output.show(fits_table(fits, gpu, STACK))
