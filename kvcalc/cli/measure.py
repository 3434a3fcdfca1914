"""`kvcalc measure --calibration`: rows, their laws, and the file that holds them.

`kvcalc measure`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Output, chosen_model
from kvcalc.cli.options import Argument, Option, OptionGroup, lengths, note, save_text
from kvcalc.records import Record

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.measure.machine import Machine
    from kvcalc.measure.run import Job, MeasureSettings, Result


STACK, EXIT_INTERRUPTED = "torch", 130
Bar = Callable[[int], AbstractContextManager[Callable[[str, int], None]]]


def calibrated(
    machine: "Machine",
    settings: "MeasureSettings",
    name: str,
    preset: Path | None,
    rows: str,
    output: Output,
    bar: Bar,
) -> int:
    """Measures, fits and writes; the exit status. Raises UserError where the machine is no preset
    and is given no name."""
    from kvcalc.errors import UserError
    from kvcalc.measure.calibration_rows import fitted_gpu, measured, planned
    from kvcalc.measure.ceilings import as_gpu, measured_ceilings, save
    from kvcalc.report.export import to_csv

    known = _known(machine)
    if known is None and preset is None:
        raise UserError(
            f"{machine.name!r} is no preset, so its laws have no roof to stand on",
            hint="Name it with --save-gpu",
        )
    matches: list[Record] = []
    status = 0
    try:
        with bar(200) as begin:
            ceilings = measured_ceilings(
                machine, ("bf16", "fp32"), lambda text: begin(text, 0), settings.seconds
            )
            gpu = fitted_gpu(machine, as_gpu(machine, ceilings, name or "measured"))
        if preset:
            save(gpu, preset)
            note(f"wrote {preset}")
        shapes = planned(machine, gpu)
        with bar(len(shapes)) as begin:
            for row in measured(
                shapes, machine, settings.seconds, settings.graphs, note, begin
            ):
                matches.append(row | {"gpu": (known or gpu).name})
    except KeyboardInterrupt:
        note(f"interrupted: {len(matches)} rows were measured and are kept")
        status = EXIT_INTERRUPTED
    if not matches:
        raise UserError("nothing was measured")
    text = to_csv(matches)
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
    from kvcalc.library.files import make_folder, write_text
    from kvcalc.timing.calibration import preset_path, to_yaml
    from kvcalc.timing.fitting import calibrate, fit_records, make_calibration
    from kvcalc.timing.rows import read_rows

    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        write_text(file, text)
        rows = read_rows(file).rows
    fits = calibrate(rows, gpu, STACK, note)
    path = preset_path(gpu, STACK)
    make_folder(path.parent)
    save_text(
        str(path),
        to_yaml(
            make_calibration(fits, gpu, STACK, rows, {"origin": "kvcalc measure --calibration"})
        ),
    )
    if not output.printed(fit_records(fits)):
        output.show(fits_table(fits, gpu, STACK))


VARIANTS = ("mha", "gqa", "mqa", "mla", "dsa", "window", "cla", "recurrent")
INTERRUPTED = 130
_measured = partial(Option, panel="Measurement")


class Sizes(OptionGroup, frozen=True):
    """Lengths and batches; '' leaves them to the device and the phase."""

    context: Annotated[
        str,
        Option(
            "Cached tokens; a list; default: by device and phase",
            takes="TOKENS",
            is_common=True,
            called=o.CONTEXT_WORDS,
        ),
    ] = ""
    prefill_context: Annotated[
        str,
        Option("Prompt tokens of prefill only; a list", takes="TOKENS", panel="Workload"),
    ] = ""
    batch_size: Annotated[
        str,
        Option(
            "Concurrent sequences; a list; default: by device and phase",
            "--batch-size --bs",
            "N",
            is_common=True,
            called=o.USER_WORDS,
        ),
    ] = ""

    def lists(self) -> list[list[int]]:
        """Contexts, contexts of prefill, batch sizes."""
        requested = (
            (self.context, "context"),
            (self.prefill_context, "prefill context"),
            (self.batch_size, "batch size"),
        )
        return [lengths(text, what) if text else [] for text, what in requested]


class Measuring(OptionGroup, frozen=True):
    """Where and how to measure."""

    device: Annotated[
        str,
        Option(
            "Device: auto (a GPU if there is one), cuda or cpu",
            is_common=True,
            words=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Option(
            "Data type: auto (bf16 on GPU, fp32 on CPU), bf16, fp16, fp32, fp64",
            takes="DTYPE",
            is_common=True,
            words=("auto", "bf16", "fp16", "fp32", "fp64"),
        ),
    ] = "auto"
    threads: Annotated[int, _measured("CPU threads; 0 uses all cores that are free", min=0)] = 0
    kernel: Annotated[
        str,
        _measured(
            "Attention kernel: auto, sdpa or plain",
            words=("auto", "sdpa", "plain"),
        ),
    ] = "auto"
    cache: Annotated[
        str,
        _measured("KV cache memory: contiguous or paged", words=("contiguous", "paged")),
    ] = "contiguous"
    block_size: o.BlockSize = 16
    seconds: Annotated[float, _measured("Seconds per measurement; 0: by device")] = 0
    graphs: Annotated[bool, _measured("Replay CUDA graphs", "--graphs/--no-graphs")] = True

    def settings(self, machine: "Machine") -> "MeasureSettings":
        from kvcalc.measure import run

        return run.settings(
            machine,
            self.dtype,
            self.kernel,
            self.cache,
            self.block_size,
            self.seconds,
            self.graphs,
        )


class Generation(OptionGroup, frozen=True):
    """Tokens to generate, with the cache and without, instead of layers."""

    generate: Annotated[
        int,
        Option(
            "Generate N tokens with and without a KV cache instead of layers",
            is_common=True,
            min=0,
            max=100_000,
        ),
    ] = 0
    prompt_len: Annotated[
        str,
        Option(
            "Prompt tokens for --generate; a list",
            takes="TOKENS",
            panel="Workload",
            called=o.PROMPT_WORDS,
        ),
    ] = "64"
    modes: Annotated[
        str,
        Option(
            "Modes of --generate: cached, uncached; a list",
            panel="Workload",
            words=("cached", "uncached"),
        ),
    ] = ""
    head: Annotated[
        str,
        Option(
            "Positions of the LM head without a cache: last, all or both",
            panel="Workload",
            words=("last", "all", "both"),
        ),
    ] = "both"


def run(
    model: Annotated[
        str,
        Argument(
            "Preset, file or Hub name; without it, a standard layer",
            takes="MODEL",
            words=o.model_names,
        ),
    ] = "",
    *,
    variant: Annotated[
        list[str],
        Option(
            "Attention variant to measure, such as mla or gqa:4; repeatable",
            is_common=True,
            words=VARIANTS,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    phase: Annotated[
        str,
        Option(
            "Phase: decode, prefill or both",
            is_common=True,
            words=("decode", "prefill", "both"),
        ),
    ] = "both",
    sizes: Sizes,
    measuring: Measuring,
    generation: Generation,
    set_: o.Settings = [],  # noqa: B006 (typer copies it)
    seed: Annotated[
        int, _measured("Seed of random weights and inputs", min=0, max=2**63 - 1)
    ] = 0,
    rows: Annotated[
        str,
        Option(
            "Write the measured rows to a .csv file",
            "--output",
            "FILE",
            is_common=True,
            is_output=True,
        ),
    ] = "",
    save_gpu: Annotated[
        str,
        Option("Save the measured ceilings as a GPU preset", takes="NAME", is_common=True),
    ] = "",
    calibration: Annotated[
        bool, Option("Measure and fit the time models of a new GPU", is_common=True)
    ] = False,
    output: Output,
) -> int:
    """Time the layers on this machine and compare them with the prediction."""
    from kvcalc.errors import UserError
    from kvcalc.measure import require_torch

    _check_targets(rows, output, bool(generation.generate))
    if calibration:
        _check_alone(model, variant, generation, output)
    lists, prompts = sizes.lists(), lengths(generation.prompt_len, "prompt length")
    if generation.generate and any(lists[:2]):
        raise UserError(
            "--context is of layers, and --generate measures none",
            hint="Use --prompt-len",
        )
    require_torch()
    from kvcalc.measure import run
    from kvcalc.measure.ceilings import preset_path
    from kvcalc.measure.machine import find_machine, load_note, seed_random
    from kvcalc.measure.run import generation_job, layers_job

    path = preset_path(save_gpu) if save_gpu else None
    machine = find_machine(measuring.device, measuring.threads)
    settings = measuring.settings(machine)
    seed_random(seed)
    if calibration:
        if text := load_note(machine):
            note(text)
        return calibrated(machine, settings, save_gpu, path, rows, output, _bar)
    chosen = chosen_model(model, set_) if model else None
    if generation.generate:
        decoders = run.decoders(chosen, variant)
        workload = prompts, generation.generate, lists[2] or [1], settings
        requests = run.generation_requests(
            decoders, *workload, generation.modes, generation.head
        )
        job = generation_job(requests, machine)
    else:
        job = layers_job(
            run.planned(run.stacks(chosen, variant, machine), phase, machine, *lists),
            settings,
            machine,
            note,
        )
    if text := load_note(machine):
        note(text)
    results, whole = _results(job, machine, settings, save_gpu, path)
    if results:
        _report(results, rows, output)
    elif whole:
        raise UserError(
            "nothing was measured: no case fits this machine",
            hint="Lower --context or --batch-size",
        )
    return 0 if whole else INTERRUPTED


def _results(
    job: "Job",
    machine: "Machine",
    settings: "MeasureSettings",
    name: str,
    preset: Path | None,
) -> "tuple[list[Result], bool]":
    """What was measured, and whether that is all: Ctrl-C keeps the records that there are."""
    from kvcalc.measure.ceilings import as_gpu, measured_ceilings, save
    from kvcalc.measure.run import ceiling_dtypes

    matches: list[Result] = []
    try:
        with _bar(job.steps) as begin:
            dtypes = ceiling_dtypes(settings.dtype, preset is not None)
            ceilings = measured_ceilings(
                machine, dtypes, lambda text: begin(text, 0), settings.seconds
            )
            gpu = as_gpu(machine, ceilings, name or "measured")
            if preset:
                save(gpu, preset)
                note(f"wrote {preset}")
            for result in job.results(ceilings, gpu, begin):
                matches.append(result)
    except KeyboardInterrupt:
        note(f"interrupted: {len(matches)} records were measured and are kept")
        return matches, False
    return matches, True


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr with the time left; yields what tells it what comes next and how
    much is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("ceilings", total=steps)

        def begin(text: str, done: int) -> None:
            progress.update(task, description=text, completed=done)

        yield begin


def _report(found: "list[Result]", rows: str, output: Output) -> None:
    """Files first, then the records on standard output."""
    from kvcalc.measure.machine import torch_version
    from kvcalc.report.export import to_csv
    from kvcalc.report.text.measure_text import generated_table, measured_table

    generated = found[0][0] is None
    records = [record for _, record in found]
    if rows:
        from kvcalc.measure.calibration_rows import measured_rows

        save_text(rows, to_csv(measured_rows(found)))
    if output.plot:
        from kvcalc.report.charts.measured_plot import generation_chart, measured_chart

        output.picture(generation_chart(records) if generated else measured_chart(records))
    if not output.printed(records):
        output.show(
            (generated_table if generated else measured_table)(records, torch_version())
        )


def _check_alone(
    model: str, variant: list[str], generation: Generation, output: Output
) -> None:
    """Raises UserError for what `--calibration` does not take: it has shapes of its own."""
    from kvcalc.errors import UserError

    for given, name in (
        (model, "a model"),
        (variant, "--variant"),
        (generation.generate, "--generate"),
        (output.plot, "--plot"),
    ):
        if given:
            raise UserError(
                f"--calibration measures shapes of its own, and takes no {name.removeprefix('a ')}"
            )


def _check_targets(rows: str, output: Output, generate: bool) -> None:
    """Raises UserError for files that cannot be written, before minutes are spent on what should
    stand in them."""
    from kvcalc.errors import UserError
    from kvcalc.library.files import destination

    if rows and generate:
        raise UserError("--output holds the times of layers, and --generate measures none")
    if rows and Path(rows).suffix.lower() != ".csv":
        raise UserError(f"--output {rows!r} should end in .csv")
    plot = output.plot
    for target in (name for name in (rows, plot) if name not in ("", "-")):
        destination(target)
    if plot:
        from kvcalc.report.charts.drawing import SUFFIXES
        from kvcalc.report.charts.series_styles import STYLES

        if plot != "-" and Path(plot).suffix.lower() not in SUFFIXES:
            raise UserError(
                f"--plot {plot!r} should end in one of {', '.join(SUFFIXES)}, or be - for the "
                "terminal"
            )
        if output.style not in STYLES:
            raise UserError(
                f"unknown style {output.style!r}", hint=f"Known: {', '.join(STYLES)}"
            )
