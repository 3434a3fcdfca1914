"""`kvcalc measure`: layers, generation, or the rows of a new calibration."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from kvcalc.answers.answer import Answer, note, save_text
from kvcalc.answers.deployments import model_of
from kvcalc.errors import UserError
from kvcalc.library.files import destination
from kvcalc.question.options import Question
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.measure.ceilings import Ceilings, Machine
    from kvcalc.measure.run import MeasureSettings, Result
    from kvcalc.records import Record
    from kvcalc.report.charts.chart import Chart

STACK = "torch"
STATUS_INTERRUPTED = 130
Tokens = tuple[int, ...]


class MeasureOptions(Question, frozen=True):
    """The options of `measure`, which times a model's layers or generation on this machine.

    Attributes:
        context, batch_size: Contexts in tokens and batch sizes; () means defaults for the device
            and the phase.
        device: `auto` (a GPU if there is one), `cuda` or `cpu`.
        dtype: Data type; `auto` is bf16 on a GPU and fp32 on a CPU.
        threads: CPU threads; 0 for all free cores.
        seconds: Seconds per measurement; 0 for the default of the device.
        seed: Seed of random weights and inputs.
        generate: Output tokens of generations, which are timed with and without a KV cache. 0 means
            that single layers are timed instead.
        prompt_len: Prompt tokens of each generation; used only with `generate`.
        phase: Phase of layers to measure: decode, prefill or both.
        rows: CSV file to write with the measured times; '' for none.
        save_gpu: Name of a GPU preset to write with the measured ceilings (FLOP/s and bytes/s); ''
            for none.
        calibration: Whether to measure chosen shapes instead, fit time models of this GPU to them,
            and write a calibration.
    """

    context: Annotated[Tokens, parse_tokens] = ()
    batch_size: Annotated[Tokens, parse_tokens] = ()
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    seconds: float = 0
    seed: int = 0
    generate: int = 0
    prompt_len: Annotated[Tokens, parse_tokens] = (64,)
    phase: str = "both"
    rows: str = ""
    save_gpu: str = ""
    calibration: bool = False


def run(
    model: str = "",
    *,
    variant: list[str] = [],  # noqa: B006 (no function changes the list)
    options: MeasureOptions,
    set_: list[str] = [],  # noqa: B006 (no function changes the list)
) -> Answer:
    """Run `kvcalc measure`: time layers on this machine, and compare with the predictions.

    Args:
        model: Name or file of the model; '' for a standard layer.
        variant: Attention variants to measure, such as `mla` or `gqa:4`.
        options: The options of the measurement, such as device and contexts.
        set_: Changes of the model's fields, such as `layers=40`.

    Returns:
        The answer to print: records of the measurements, a sentence and the exit status.
    """
    from kvcalc.measure import require_torch

    _check(options, "model" if model else "--variant" if variant else "")
    require_torch()
    from kvcalc.measure import run as runs
    from kvcalc.measure.ceilings import find_machine, load_note, seed_random

    machine = find_machine(options.device, options.threads)
    settings = runs.measure_settings(machine, options.dtype, options.seconds)
    seed_random(options.seed)
    if text := load_note(machine):
        note(text)
    if options.calibration:
        return _calibration_answer(machine, settings, options)
    loaded = model_of(model, set_) if model else None
    batches = options.batch_size
    if options.generate:
        lengths = options.prompt_len, options.generate, batches
        requests = runs.generation_requests(loaded, variant, *lengths, settings.dtype, machine)
        steps = sum(request.steps for request in requests)
        run_job = partial(runs.run_generations, requests, machine)
    else:
        models = runs.stacks(loaded, variant, machine)
        cases = runs.plan_cases(models, options.phase, machine, options.context, batches)
        steps = len(cases)
        run_job = partial(runs.measure_cases, cases, settings, machine, note)
    results, status = _results(steps, run_job, machine, settings, options.save_gpu)
    return _answer(results, options.rows, status)


def _check(options: MeasureOptions, layers: str) -> None:
    """Raise UserError for options that exclude each other, before minutes are spent."""
    if options.rows:
        if options.generate:
            raise UserError("--output holds the times of layers, and --generate measures none")
        if Path(options.rows).suffix.lower() != ".csv":
            raise UserError(f"--output {options.rows!r} should end in .csv")
        destination(options.rows)
    excluded = layers or ("--generate" if options.generate else "")
    if options.calibration and excluded:
        raise UserError(f"--calibration chooses the shapes, and takes no {excluded}")
    if options.generate and options.context:
        raise UserError(
            "--context is of layers, and --generate measures none", "Use --prompt-len"
        )


def _results(
    steps: int | None,
    run_job: Callable[..., Iterator[Any]],
    machine: "Machine",
    settings: "MeasureSettings",
    save_gpu: str,
) -> tuple[list[Any], int]:
    """Measure the ceilings, then run the job. Return its results and the exit status.

    Ctrl-C keeps the results so far, if there are any.

    Args:
        steps: Number of steps of the job, if known.
        run_job: Function of the ceilings and of a function for progress, which yields the results.
        save_gpu: If not empty, the machine is saved as a preset of this name, with the rates of all
            dtypes.

    Raises:
        UserError: Nothing was measured.
    """
    from kvcalc.measure.ceilings import as_gpu, measure_ceilings, preset_path, save
    from kvcalc.measure.layers.base_layer import DTYPES
    from kvcalc.report.text.measure_text import progress_bar

    path = preset_path(save_gpu) if save_gpu else None
    dtypes = dict.fromkeys([settings.dtype, "bf16", "fp32", *(DTYPES if path else ())])
    results = []
    try:
        with progress_bar("steps", steps) as move:

            def begin(text: str, done: int = 0) -> None:
                move(description=text, completed=done)

            ceilings = measure_ceilings(machine, [*dtypes], begin, settings.seconds)
            if path:
                save(as_gpu(machine, ceilings, save_gpu), path)
                note(f"wrote {path}")
            for result in run_job(ceilings, begin):
                results.append(result)
    except KeyboardInterrupt:
        if not results:
            raise
        note(f"interrupted: {len(results)} records were measured and are kept")
        return results, STATUS_INTERRUPTED
    if not results:
        raise UserError(
            "nothing was measured: no case fits this machine", "Lower --context or --batch-size"
        )
    return results, 0


def _answer(results: "list[Result]", rows: str, status: int) -> Answer:
    """Write the rows to a file, and return the records."""
    from kvcalc.measure.calibration_rows import measured_rows
    from kvcalc.report.export import to_csv

    is_generation = results[0][0] is None
    records = [record for _, record in results]
    if rows:
        save_text(rows, to_csv(measured_rows(results)))

    def tables() -> Any:
        from kvcalc.report.text.measure_text import generated_table, measured_table

        make_table = generated_table if is_generation else measured_table
        return [make_table(records, version("torch"))]

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.comparison_plot import generation_chart, measured_chart

        return [generation_chart(records) if is_generation else measured_chart(records)]

    return Answer(records, tables, draw, _status=status)


def _calibration_answer(
    machine: "Machine", settings: "MeasureSettings", options: MeasureOptions
) -> Answer:
    """Measure rows, fit the time models, and write the calibration.

    Raises:
        UserError: The machine has no preset and no name, or no kernel model can be fitted.
    """
    from msgspec.structs import replace

    from kvcalc.answers.calibrate import calibrate_stack
    from kvcalc.library.files import write_text
    from kvcalc.library.load import driver_gpu, load_gpu
    from kvcalc.measure import calibration_rows
    from kvcalc.measure.ceilings import as_gpu
    from kvcalc.report.export import to_csv

    preset = driver_gpu(machine.name, machine.memory_bytes) if machine.cuda else None
    name = preset.name if preset else options.save_gpu
    if not name:
        raise UserError(
            f"{machine.name!r} is no preset, so its time models have no roofline",
            "Name it with --save-gpu",
        )

    def rows(ceilings: "Ceilings", begin: Callable[[str, int], None]) -> "Iterator[Record]":
        shapes = calibration_rows.plan_shapes(machine, as_gpu(machine, ceilings))
        for row in calibration_rows.measure_shapes(
            shapes, machine, settings.seconds, note, begin
        ):
            yield {**row, "gpu": name}

    records, status = _results(None, rows, machine, settings, options.save_gpu)
    text = to_csv(records)
    if options.rows:
        save_text(options.rows, text)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        write_text(file, text)
        about = {"origin": "kvcalc measure --calibration"}
        answer = calibrate_stack([file], load_gpu(name), STACK, "", about)
    return replace(answer, _status=status)
