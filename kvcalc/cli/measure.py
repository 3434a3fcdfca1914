"""`kvcalc measure`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_model
from kvcalc.cli.common import lengths, note, save_text
from kvcalc.cli.groups import Group, Output, grouped

if TYPE_CHECKING:
    from kvcalc.measure.machine import Machine
    from kvcalc.measure.run import Job, MeasureSettings, Result

VARIANTS = "mha, gqa, mqa, mla, dsa, window, cla, recurrent, or a form that compare knows (gqa:4, window:512); repeatable."
INTERRUPTED = 130


class Sizes(Group, frozen=True):
    """Lengths and batches; '' leaves them to the device and the phase."""

    context: Annotated[str, typer.Option("--context", help="Tokens; a list makes more rows. Default: by device and phase.")] = ""
    prefill_context: Annotated[str, typer.Option("--prefill-context", help="The same for prefill alone.")] = ""
    batch_size: Annotated[str, typer.Option("--batch-size", "--bs", help="Sequences at once. Default: by device and phase.")] = ""

    def lists(self) -> list[list[int]]:
        """Contexts, contexts of prefill, batch sizes."""
        asked = (self.context, "context"), (self.prefill_context, "prefill context"), (self.batch_size, "batch size")
        return [lengths(text, what) if text else [] for text, what in asked]


class Measuring(Group, frozen=True):
    """Where and how to measure."""

    device: Annotated[str, typer.Option("--device", help="auto (a GPU where there is one), cuda or cpu.")] = "auto"
    dtype: Annotated[str, typer.Option("--dtype", help="auto (bf16 on a GPU, fp32 on a CPU), bf16, fp16, fp32, fp64.")] = "auto"
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads; 0: all cores, or one where others keep them busy.")
    ] = 0
    kernel: Annotated[str, typer.Option("--kernel", help="auto, sdpa, plain, or flex (CUDA only; compiles).")] = "auto"
    cache: Annotated[str, typer.Option("--cache", help="contiguous or paged.")] = "contiguous"
    block_size: o.BlockSize = 16
    seconds: Annotated[float, typer.Option("--seconds", help="Spent on each time; 0: by device.")] = 0
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="Replay CUDA graphs.")] = True

    def settings(self, machine: "Machine") -> "MeasureSettings":
        from kvcalc.measure import run

        return run.settings(machine, self.dtype, self.kernel, self.cache, self.block_size, self.seconds, self.graphs)


class Generation(Group, frozen=True):
    """Tokens to generate, with the cache and without, instead of layers."""

    generate: Annotated[
        int, typer.Option("--generate", min=0, max=100_000, help="Tokens to generate, with the cache and without.")
    ] = 0
    prompt_len: Annotated[str, typer.Option("--prompt-len", help="Tokens of the prompt, for --generate; or a list.")] = "64"
    modes: Annotated[
        str, typer.Option("--modes", help="Of cached, cat, repeat, uncached, unfused, for --generate.", show_default="all")
    ] = ""
    head: Annotated[str, typer.Option("--head", help="Positions that the LM head sees without a cache: last, all, both.")] = (
        "both"
    )


@grouped
def run(
    model: Annotated[str, typer.Argument(help=o.MODEL_HELP + " Without one: a standard layer.", show_default=False)] = "",
    *,
    variant: Annotated[list[str], typer.Option("--variant", help=VARIANTS, show_default=False)] = [],  # noqa: B006 (typer copies it)
    phase: Annotated[str, typer.Option("--phase", help="decode, prefill or both.")] = "both",
    sizes: Sizes,
    measuring: Measuring,
    generation: Generation,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of weights and inputs.")] = 0,
    rows: Annotated[str, typer.Option("--output", help="Write measured rows to a .csv file.")] = "",
    save_gpu: Annotated[str, typer.Option("--save-gpu", help="Save the measured ceilings as a GPU preset.")] = "",
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Measure the rows that a new GPU needs, and fit the time laws to them.")
    ] = False,
    output: Output,
) -> int:
    """The real layers on this machine, beside the prediction."""
    from kvcalc.errors import UserError
    from kvcalc.measure import require_torch

    _check_targets(rows, output, bool(generation.generate))
    if calibration:
        _check_alone(model, variant, generation, output)
    lists, prompts = sizes.lists(), lengths(generation.prompt_len, "prompt length")
    if generation.generate and any(lists[:2]):
        raise UserError("--context is of layers, and --generate measures none", hint="Use --prompt-len")
    require_torch()
    from kvcalc.measure import run
    from kvcalc.measure.ceilings import preset_path
    from kvcalc.measure.machine import find_machine, load_note, seeded
    from kvcalc.measure.run import generation_job, layers_job

    path = preset_path(save_gpu) if save_gpu else None
    machine = find_machine(measuring.device, measuring.threads)
    settings = measuring.settings(machine)
    seeded(seed)
    if calibration:
        from kvcalc.cli.measure_calibration import calibrated

        if text := load_note(machine):
            note(text)
        return calibrated(machine, settings, save_gpu, path, rows, output, _bar)
    chosen = chosen_model(model, set_) if model else None
    if generation.generate:
        decoders = run.decoders(chosen, variant)
        many = prompts, generation.generate, lists[2] or [1]
        job = generation_job(decoders, *many, settings, generation.modes, generation.head, machine)
    else:
        job = layers_job(run.planned(run.stacks(chosen, variant, machine), phase, machine, *lists), settings, machine, note)
    if text := load_note(machine):
        note(text)
    results, whole = _results(job, machine, settings, save_gpu, path)
    if results:
        _report(results, rows, output)
    elif whole:
        raise UserError("nothing was measured: no case fits this machine", hint="Lower --context or --batch-size")
    return 0 if whole else INTERRUPTED


def _results(
    job: "Job", machine: "Machine", settings: "MeasureSettings", name: str, preset: Path | None
) -> "tuple[list[Result], bool]":
    """What was measured, and whether that is all: Ctrl-C keeps the records that there are."""
    from kvcalc.measure.ceilings import as_gpu, measured_ceilings, save
    from kvcalc.measure.run import ceiling_dtypes

    found: list[Result] = []
    try:
        with _bar(job.steps) as begin:
            dtypes = ceiling_dtypes(settings.dtype, preset is not None)
            ceilings = measured_ceilings(machine, dtypes, lambda text: begin(text, 0), settings.seconds)
            gpu = as_gpu(machine, ceilings, name or "measured")
            if preset:
                save(gpu, preset)
                note(f"wrote {preset}")
            for result in job.results(ceilings, gpu, begin):
                found.append(result)
    except KeyboardInterrupt:
        note(f"interrupted: {len(found)} records were measured and are kept")
        return found, False
    return found, True


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr with the time left; yields what tells it what comes next and how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("ceilings", total=steps)

        def begin(text: str, done: int) -> None:
            progress.update(task, description=text, completed=done)

        yield begin


def _report(found: "list[Result]", rows: str, output: Output) -> None:
    """Files first, then the records on standard output."""
    from kvcalc.measure.machine import torch_version
    from kvcalc.report.export import to_csv
    from kvcalc.report.measured import generated_table, measured_table

    generated = found[0][0] is None
    records = [record for _, record in found]
    if rows:
        from kvcalc.measure.calibration_rows import measured_rows

        save_text(rows, to_csv(measured_rows(found)))
    if output.plot:
        from kvcalc.report.plots_measure import generation_chart, measured_chart

        output.picture(generation_chart(records) if generated else measured_chart(records))
    if not output.printed(records):
        output.show((generated_table if generated else measured_table)(records, torch_version()))


def _check_alone(model: str, variant: list[str], generation: Generation, output: Output) -> None:
    """Raises UserError for what `--calibration` does not take: it has shapes of its own."""
    from kvcalc.errors import UserError

    for given, name in ((model, "a model"), (variant, "--variant"), (generation.generate, "--generate"), (output.plot, "--plot")):
        if given:
            raise UserError(f"--calibration measures shapes of its own, and takes no {name.removeprefix('a ')}")


def _check_targets(rows: str, output: Output, generate: bool) -> None:
    """Raises UserError for files that cannot be written, before minutes are spent on what should stand in them."""
    from kvcalc.errors import UserError
    from kvcalc.library.writing import destination

    if rows and generate:
        raise UserError("--output holds the times of layers, and --generate measures none")
    if rows and Path(rows).suffix.lower() != ".csv":
        raise UserError(f"--output {rows!r} should end in .csv")
    plot = output.plot
    for target in (name for name in (rows, plot) if name not in ("", "-")):
        destination(target)
    if plot:
        from kvcalc.report.plots import STYLES, SUFFIXES

        if plot != "-" and Path(plot).suffix.lower() not in SUFFIXES:
            raise UserError(f"--plot {plot!r} should end in one of {', '.join(SUFFIXES)}, or be - for the terminal")
        if output.style not in STYLES:
            raise UserError(f"unknown style {output.style!r}", hint=f"Known: {', '.join(STYLES)}")
