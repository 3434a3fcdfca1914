"""`kvcalc calibrate` and `kvcalc validate`."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvcalc.answers.answer import Answer, note, save_text
from kvcalc.errors import UserError, visible
from kvcalc.gpu.gpu import Gpu
from kvcalc.library.files import make_folder
from kvcalc.library.load import load_gpu
from kvcalc.question.options import Question
from kvcalc.records import Record, Records, Settings
from kvcalc.records.measure import ErrorRecord, KernelModelRecord
from kvcalc.report.text.table_layout import Column, Table
from kvcalc.report.text.tables import columns
from kvcalc.serving.measured_servers import steps_validated
from kvcalc.serving.validation import KEYS, error_records, predictions_csv, remarks, validate
from kvcalc.timing.calibration import find_gpu, preset_path, to_yaml
from kvcalc.timing.fitting import (
    FOLDS,
    FittedKernelModel,
    calibrate,
    fit_records,
    make_calibration,
    select_rows,
)
from kvcalc.timing.rows import MeasuredRow, MeasurementFile, read_rows

if TYPE_CHECKING:
    from kvcalc.report.charts.chart import Chart

FIT_KEYS = (
    "family kind form rows fitted_median_abs_error fitted_p90_abs_error median_abs_error "
    "p90_abs_error"
)
ERROR_NOTE = "error of a row: exp(|ln(predicted/measured)|) − 1"


class SourceOptions(Question, frozen=True):
    """The origin of the measured kernel times to which `calibrate` fits its time models.

    The texts are copied into the calibration file, so that its readers can find the measurements.

    Attributes:
        origin: Where the measurements come from, such as a name or an address.
        commit: Commit of the repository that contains the measurements.
        license_: License of the measurements.
        date: Date of the fit; '' for today.
    """

    origin: str = ""
    commit: str = ""
    license_: str = ""
    date: str = ""


def run(
    rows: list[Path],
    *,
    gpu: str = "",
    stack: str = "",
    out: str = "",
    all_stacks: bool = False,
    source: SourceOptions,
) -> Answer:
    """Fit the time models of GPU kernels to measured times, and write them to calibration files.

    A calibration file lets other commands predict times for this GPU and software. Without it, they
    print only datasheet bounds.

    Args:
        rows: CSV files with one measured operation per row: its GPU, software, shape and time.
        gpu: The measured GPU, whose rows are used: preset name or YAML file.
        stack: The measured software, whose rows are used, such as `vllm`.
        out: YAML file to write, `-` for stdout, or a folder with `all_stacks`; '' for the folder of
            the user's presets.
        all_stacks: Whether to fit every GPU and software that the rows name, with a file for each.
            Then `gpu` and `stack` must be ''; otherwise both are required.
        source: Origin of the rows, which the files state.

    Returns:
        An answer with a record per fitted time model: its parameters and its errors.

    Raises:
        UserError: `gpu` or `stack` is missing, or given with `all_stacks`, or no time model has
            enough rows.
    """
    provenance = {name.strip("_"): getattr(source, name) for name in source.__struct_fields__}
    if all_stacks:
        if gpu or stack:
            raise UserError("--all takes every GPU and stack", "Leave out --gpu and --stack")
        return _calibrate_all_stacks([read_rows(path) for path in rows], out, provenance)
    for name, value in (("--gpu", gpu), ("--stack", stack)):
        if not value:
            raise UserError(
                f"{name} is missing", "Name the measured GPU and software, or use --all"
            )
    return calibrate_stack(rows, load_gpu(gpu), stack, out, provenance)


def _fit_stack(
    gpu: Gpu,
    stack: str,
    rows: Sequence[MeasuredRow],
    provenance: Settings,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[FittedKernelModel], str]:
    """Return the fits to rows of a GPU and stack, and the text of the calibration; '' if no family
    could be fitted."""
    fits = calibrate(rows, gpu, stack, progress)
    if not any(fit.entry or fit.refused for fit in fits):
        return fits, ""
    calibration = make_calibration(fits, gpu, stack, rows, provenance)
    return fits, to_yaml(
        replace(calibration, validation=steps_validated(calibration, gpu, rows))
    )


def calibrate_stack(
    paths: list[Path], gpu: Gpu, stack: str, out: str, provenance: Settings
) -> Answer:
    """Fit the kernel time models of one GPU and software to measured times, and write them.

    Args:
        paths: CSV files with one measured operation per row.
        gpu: Measured GPU. Rows of other GPUs are ignored.
        stack: Measured software, such as `vllm`. Rows of other software are ignored.
        out: YAML file to write; '' for the folder of the user's presets, `-` for stdout.
        provenance: Origin of the rows, which the file states: origin, commit, license and date.

    Returns:
        An answer with a record per time model: its parameters and its errors.

    Raises:
        UserError: The rows are too few for every time model.
    """
    path = out or str(preset_path(gpu, stack))
    rows = select_rows([read_rows(path) for path in paths], gpu, stack, note)
    fits, text = _fit_stack(gpu, stack, rows, provenance, note)
    fitted = [fit for fit in fits if fit.entry]
    if not fitted:
        raise UserError(
            "no family has enough rows to be fitted",
            "; ".join(f"{fit.family} {fit.kind}: {fit.why}" for fit in fits),
        )
    if not out:
        make_folder(Path(path).parent)
    save_text(path, text)
    records = fit_records(fits)

    def tables() -> list[Table]:
        parameters = Column("parameters_text", "parameters", right=False)
        rows = [{**record, "parameters_text": _parameters(record)} for record in records]
        title = f"{len(fitted)} of {len(fits)} time models of {stack} on {gpu.name} are fitted."
        held_out = f"held out: each row is predicted by one of {FOLDS} fits without that row"
        fit_columns = (*columns(KernelModelRecord, FIT_KEYS), parameters)
        return [Table(rows, fit_columns, title, ["", ERROR_NOTE, held_out])]

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.comparison_plot import predicted_against_measured

        series = [(f"{f.family} {f.kind}", f.measured, f.predicted) for f in fitted]
        return predicted_against_measured(series, "held out")

    return Answer(records, tables, draw, _is_silent=out == "-")


def _calibrate_all_stacks(
    tables: list[MeasurementFile], out: str, provenance: Settings
) -> Answer:
    """Fit the time models of each GPU and stack that the rows name, in parallel on all cores.

    Each file depends only on its own rows, so its bytes do not depend on the number of cores.
    """
    names = {(row.gpu, row.framework) for table in tables for row in table.rows}
    gpus = {
        (gpu.name, stack): gpu for name, stack in names if stack and (gpu := find_gpu(name))
    }
    pairs = [(gpus[name], name[1]) for name in sorted(gpus)]
    rows = [select_rows(tables, *pair, lambda text: None) for pair in pairs]
    records = []
    with ProcessPoolExecutor() as pool:
        results = pool.map(_fit_stack, *zip(*pairs), rows, repeat(provenance))
        for (gpu, stack), (fits, text) in zip(pairs, results):
            if text:
                path = (
                    Path(out) / gpu.name / f"{stack}.yaml" if out else preset_path(gpu, stack)
                )
                make_folder(path.parent)
                save_text(str(path), text)
                records += [
                    {"gpu": gpu.name, "stack": stack, **fit} for fit in fit_records(fits)
                ]
    if not records:
        raise UserError("no family has enough rows of a known GPU and a framework to be fitted")
    title = f"{len(records)} time models are fitted."
    fit_columns = columns(KernelModelRecord, f"gpu stack {FIT_KEYS}")
    return Answer(records, lambda: [Table(records, fit_columns, title)])


def _parameters(record: Record) -> str:
    words = [f"{name} {value:.3g}" for name, value in record["parameters"].items()]
    return ", ".join(words) or str(record["why"])


class ValidationOptions(Question, frozen=True):
    """How `validate` compares predicted times with measured times.

    A row is one measured operation or server in a CSV file. A calibration is a set of time models
    that were fitted to measurements of one GPU and software.

    Attributes:
        by: Keys by which rows are grouped, separated by commas: op, gpu, framework, dtype, model or
            client. Each group becomes one record.
        predictions: CSV file to write with every row and its prediction; '' for none. `-` prints it
            on stdout instead of the errors.
        fail_above: Median error of a group, in percent, above which the exit status is 1; infinite
            for no limit.
        stack: Software whose calibration predicts all rows; '' for the software that each row
            names.
        calibration_from: GPU whose calibrations are scaled to the measured GPUs; '' for the
            measured GPUs' own calibrations.
    """

    by: str = "op,gpu,framework,dtype"
    predictions: str = ""
    fail_above: float = float("inf")
    stack: str = ""
    calibration_from: str = ""


def run_validate(rows: list[Path], *, options: ValidationOptions) -> Answer:
    """Compare predicted with measured times, and return the errors of each group of measurements.

    An error of 0.1 means that prediction and measurement differ by 10%. If `options.fail_above` is
    finite, the exit status is 1 in three cases: the median error of a group exceeds it in percent,
    a group has no prediction, or a file has no row that can be read.

    Args:
        rows: CSV files with one measured operation or server per row.
        options: How rows are grouped and predicted, and which error is too large.
    """
    limit = options.fail_above
    source = load_gpu(options.calibration_from) if options.calibration_from else None
    validations = validate(map(read_rows, rows), options.stack, source)
    records = error_records(validations, [key.strip() for key in options.by.split(",")])
    if path := options.predictions:
        text = predictions_csv(validations)
        save_text(path, visible(text) if path == "-" else text)
    notes = [text for validation in validations for text in remarks(validation)]
    failures = []
    if limit < float("inf"):
        failures += [v.table.path for v in validations if not v.table.rows]
        notes += [
            f"{path}: no row can be read, so nothing is below {limit:g} %" for path in failures
        ]
        groups = [
            " ".join(str(record[key]) for key in KEYS if record.get(key))
            for record in records
            if record["median_abs_error"] is None or 100 * record["median_abs_error"] > limit
        ]
        if groups:
            notes.append(f"{len(groups)} groups above {limit:g} %: {', '.join(groups[:5])}")
        failures += groups
    return Answer(
        records,
        lambda: [_validation_table(records, source)],
        _notes=notes,
        _status=1 if failures else 0,
        _is_silent=options.predictions == "-",
    )


def _validation_table(records: Records, source: Gpu | None) -> Table:
    keys = (
        "op gpu framework dtype model client rows predicted_rows basis median_abs_error "
        "p90_abs_error median_ratio ttft_median_abs_error ttft_p90_abs_error "
        "roofline_median_abs_error roofline_p90_abs_error | throughput_median_abs_error "
        "throughput_p90_abs_error"
    )
    rows, predicted = (
        sum(record[key] for record in records) for key in ("rows", "predicted_rows")
    )
    notes = [
        "",
        f"{ERROR_NOTE}, ratio: predicted / measured",
        "basis roofline: the datasheet bound, for rows without a calibration",
    ]
    if source:
        notes.append(f"calibrations of {source.name}, scaled by datasheet figures")
    title = f"{predicted:,} of {rows:,} measured rows are predicted."
    return Table(records, columns(ErrorRecord, keys), title, notes)
