"""`kvcalc measure`: layers, generation, or the rows of a new calibration."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from kvcalc.answers.answer import Answer, note, save_text
from kvcalc.answers.deployments import model_of
from kvcalc.errors import UserError
from kvcalc.question.options import Question
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.measure.ceilings import Ceilings, Machine
    from kvcalc.measure.run import MeasureSettings, Result
    from kvcalc.records import Record
    from kvcalc.report.charts.chart import Chart

STACK = "torch"
STATUS_INTERRUPTED = 130
VARIANTS = ("mha", "gqa", "mqa", "mla", "dsa", "window", "cla", "recurrent")
Tokens = tuple[int, ...]
# number of steps, and a function of (ceilings, progress) that yields results
Job = tuple[int, Callable[[Any, Callable[[str, int], None]], Iterator[Any]]]


class ShapeOptions(Question, frozen=True):
    """Lengths and batches; () leaves them to the device and the phase."""

    context: Annotated[Tokens, parse_tokens] = ()
    batch_size: Annotated[Tokens, parse_tokens] = ()


class MachineOptions(Question, frozen=True):
    """Where and how to measure."""

    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    seconds: float = 0
    seed: int = 0


class GenerationOptions(Question, frozen=True):
    """Tokens to generate, with the cache and without, instead of layers."""

    generate: int = 0
    prompt_len: Annotated[Tokens, parse_tokens] = (64,)


class ResultOptions(Question, frozen=True):
    """The phase, and the files to write."""

    phase: str = "both"
    rows: str = ""
    save_gpu: str = ""
    calibration: bool = False


def run(
    model: str = "",
    *,
    variant: list[str] = [],  # noqa: B006
    shapes: ShapeOptions,
    machine_options: MachineOptions,
    generation: GenerationOptions,
    set_: list[str] = [],  # noqa: B006
    result: ResultOptions,
) -> Answer:
    """Time the layers on this machine and compare them with the prediction."""
    from kvcalc.measure import require_torch

    _check(result, shapes, generation, "model" if model else "--variant" if variant else "")
    require_torch()
    from kvcalc.measure.ceilings import find_machine, load_note, seed_random
    from kvcalc.measure.run import measure_settings

    machine = find_machine(machine_options.device, machine_options.threads)
    settings = measure_settings(machine, machine_options.dtype, machine_options.seconds)
    seed_random(machine_options.seed)
    if text := load_note(machine):
        note(text)
    if result.calibration:
        return _calibration_answer(machine, settings, result)
    loaded = model_of(model, set_) if model else None
    job = _job(loaded, variant, machine, settings, shapes, generation, result.phase)
    results, status = _results(job, machine, settings, result.save_gpu)
    if not results and not status:
        raise UserError(
            "nothing was measured: no case fits this machine",
            "Lower --context or --batch-size",
        )
    return _answer(results, result.rows, status)


def _check(
    result: ResultOptions, shapes: ShapeOptions, generation: GenerationOptions, layers: str
) -> None:
    """Raise UserError for options that exclude each other, before minutes are spent."""
    if result.rows and generation.generate:
        raise UserError("--output holds the times of layers, and --generate measures none")
    if result.rows and Path(result.rows).suffix.lower() != ".csv":
        raise UserError(f"--output {result.rows!r} should end in .csv")
    excluded = layers or ("--generate" if generation.generate else "")
    if result.calibration and excluded:
        raise UserError(f"--calibration measures shapes of its own, and takes no {excluded}")
    if generation.generate and shapes.context:
        raise UserError(
            "--context is of layers, and --generate measures none", "Use --prompt-len"
        )


def _job(
    model: Any,
    variants: list[str],
    machine: "Machine",
    settings: "MeasureSettings",
    shapes: ShapeOptions,
    generation: GenerationOptions,
    phase: str,
) -> Job:
    """Return the job of `--generate`, or of layers."""
    from kvcalc.measure import run as runs

    if generation.generate:
        lengths = generation.prompt_len, generation.generate, shapes.batch_size
        requests = runs.generation_requests(model, variants, *lengths, settings.dtype, machine)
        steps = sum(request.steps for request in requests)
        return steps, partial(runs.generations, requests, machine)
    models = runs.stacks(model, variants, machine)
    cases = runs.planned(models, phase, machine, shapes.context, shapes.batch_size)
    return len(cases), partial(runs.measured, cases, settings, machine, note)


@contextmanager
def _progress(unit: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that takes the next step and the number of steps that are done."""
    from kvcalc.report.text.measure_text import progress_bar

    with progress_bar(unit, total) as move:
        yield lambda text, done: move(description=text, completed=done) if move else None


def _measured_ceilings(
    machine: "Machine",
    settings: "MeasureSettings",
    name: str,
    begin: Callable[[str, int], None],
) -> "tuple[Ceilings, Gpu]":
    """Measure the ceilings of the machine. Return them, and the machine as a GPU preset.

    Args:
        name: If not empty, the preset is saved under this name, with the rates of all dtypes.
    """
    from kvcalc.measure.ceilings import as_gpu, measured_ceilings, preset_path, save
    from kvcalc.measure.layers.base_layer import DTYPES

    path = preset_path(name) if name else None
    dtypes = dict.fromkeys([settings.dtype, "bf16", "fp32", *(DTYPES if name else ())])
    ceilings = measured_ceilings(
        machine, [*dtypes], lambda text: begin(text, 0), settings.seconds
    )
    gpu = as_gpu(machine, ceilings, name or "measured")
    if path:
        save(gpu, path)
        note(f"wrote {path}")
    return ceilings, gpu


def _results(
    job: Job, machine: "Machine", settings: "MeasureSettings", save_gpu: str
) -> "tuple[list[Result], int]":
    """Return the results and the exit status. Ctrl-C keeps the records so far."""
    results: list[Result] = []
    steps, run_job = job
    try:
        with _progress("steps", steps) as begin:
            ceilings, _ = _measured_ceilings(machine, settings, save_gpu, begin)
            for result in run_job(ceilings, begin):
                results.append(result)
    except KeyboardInterrupt:
        note(f"interrupted: {len(results)} records were measured and are kept")
        return results, STATUS_INTERRUPTED
    return results, 0


def _answer(results: "list[Result]", rows: str, status: int) -> Answer:
    """Write the rows to a file, and return the records."""
    from kvcalc.measure.calibration_rows import measured_rows
    from kvcalc.measure.ceilings import torch_version
    from kvcalc.report.export import to_csv

    if not results:
        return Answer([], list, _status=status)
    is_generation = results[0][0] is None
    records = [record for _, record in results]
    if rows:
        save_text(rows, to_csv(measured_rows(results)))

    def tables() -> Any:
        from kvcalc.report.text.measure_text import generated_table, measured_table

        make_table = generated_table if is_generation else measured_table
        return [make_table(records, torch_version())]

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.comparison_plot import generation_chart, measured_chart

        return [generation_chart(records) if is_generation else measured_chart(records)]

    return Answer(records, tables, draw, _status=status)


def _calibration_answer(
    machine: "Machine", settings: "MeasureSettings", result: ResultOptions
) -> Answer:
    """Measure rows, fit the time models, and write the calibration.

    Raises:
        UserError: The machine is no preset and has no name.
    """
    from msgspec.structs import replace

    from kvcalc.answers.calibrate import fits_answer
    from kvcalc.measure.calibration_rows import fitted_gpu, measured, planned
    from kvcalc.report.export import to_csv

    preset = _known_gpu(machine)
    if preset is None and not result.save_gpu:
        raise UserError(
            f"{machine.name!r} is no preset, so its time models have no roofline",
            "Name it with --save-gpu",
        )
    records: list[Record] = []
    status = 0
    try:
        with _progress("steps", 200) as begin:
            _, gpu = _measured_ceilings(machine, settings, result.save_gpu, begin)
            gpu = fitted_gpu(machine, gpu)
        shapes = planned(machine, gpu)
        with _progress("shapes", len(shapes)) as begin:
            for row in measured(shapes, machine, settings.seconds, note, begin):
                records.append({**row, "gpu": (preset or gpu).name})
    except KeyboardInterrupt:
        note(f"interrupted: {len(records)} rows were measured and are kept")
        status = STATUS_INTERRUPTED
    if not records:
        raise UserError("nothing was measured")
    text = to_csv(records)
    if result.rows:
        save_text(result.rows, text)
    fits = _fitted(text, preset or gpu)
    return replace(fits_answer(fits, preset or gpu, STACK), _status=status)


def _known_gpu(machine: "Machine") -> "Gpu | None":
    """Return the preset of this machine, if there is one."""
    from kvcalc.measure.calibration_rows import gpu_name
    from kvcalc.timing.calibration import gpu_named

    try:
        return gpu_named(gpu_name(machine.name)) if machine.cuda else None
    except UserError:
        return None


def _fitted(text: str, gpu: "Gpu") -> Any:
    """Return the time models that are fitted to rows, and write the calibration of the GPU."""
    from kvcalc.library.files import make_folder, write_text
    from kvcalc.timing.calibration import preset_path, to_yaml
    from kvcalc.timing.fitting import calibrate, make_calibration
    from kvcalc.timing.rows import read_rows

    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        write_text(file, text)
        rows = read_rows(file).rows
    fits = calibrate(rows, gpu, STACK, note)
    path = preset_path(gpu, STACK)
    make_folder(path.parent)
    about = {"origin": "kvcalc measure --calibration"}
    save_text(str(path), to_yaml(make_calibration(fits, gpu, STACK, rows, about)))
    return fits
