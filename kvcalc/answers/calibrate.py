"""`kvcalc calibrate` and `kvcalc validate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcalc.answers.answer import Answer, note, save_text
from kvcalc.errors import UserError, visible
from kvcalc.question.options import Question

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.records import Record
    from kvcalc.report.charts.chart import Chart
    from kvcalc.report.text.table_layout import Table
    from kvcalc.timing.fitting import FittedKernelModel
    from kvcalc.timing.rows import MeasurementFile

FIT_KEYS = (
    "family kind form rows fitted_median_abs_error fitted_p90_abs_error median_abs_error "
    "p90_abs_error"
)
ERROR_NOTE = "error of a row: exp(|ln(predicted/measured)|) − 1"


class SourceOptions(Question, frozen=True):
    """The source of measured rows, which the calibration repeats."""

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
    """Fit the time models to measured rows."""
    from kvcalc.library.load import load_gpu
    from kvcalc.timing.rows import read_rows

    about = {name.strip("_"): getattr(source, name) for name in source.__struct_fields__}
    if all_stacks:
        if gpu or stack:
            raise UserError(
                "--all takes every GPU and stack", hint="Leave out --gpu and --stack"
            )
        return _every_stack([read_rows(path) for path in rows], out, about)
    for name, value in (("--gpu", gpu), ("--stack", stack)):
        if not value:
            raise UserError(
                f"{name} is missing",
                hint="Name the measured GPU and software, or use --all",
            )
    return _one_stack(rows, load_gpu(gpu), stack, out, about)


def _one_stack(
    rows: list[Path], gpu: "Gpu", stack: str, out: str, about: dict[str, str]
) -> Answer:
    from msgspec.structs import replace

    from kvcalc.library.files import make_folder
    from kvcalc.serving.server_validation import steps_validated
    from kvcalc.timing.calibration import preset_path, to_yaml
    from kvcalc.timing.fitting import calibrate, chosen_rows, make_calibration
    from kvcalc.timing.rows import read_rows

    path = out or str(preset_path(gpu, stack))
    used = chosen_rows([read_rows(row) for row in rows], gpu, stack, note)
    fits = calibrate(used, gpu, stack, note)
    if not any(fit.entry for fit in fits):
        raise UserError(
            "no family has enough rows to be fitted",
            hint="; ".join(f"{fit.family} {fit.kind}: {fit.why}" for fit in fits),
        )
    text = to_yaml(make_calibration(fits, gpu, stack, used, about, steps_validated))
    if not out:
        make_folder(Path(path).parent)
    save_text(path, text)
    return replace(fits_answer(fits, gpu, stack), _is_silent=out == "-")


def _every_stack(tables: "list[MeasurementFile]", out: str, about: dict[str, str]) -> Answer:
    """Fit each GPU and stack that the rows name, side by side on all cores."""
    from kvcalc.library.files import make_folder
    from kvcalc.records.measure import KernelModelRecord
    from kvcalc.report.text.table_layout import Table
    from kvcalc.report.text.tables import columns
    from kvcalc.serving.server_validation import steps_validated
    from kvcalc.timing.calibration import preset_path
    from kvcalc.timing.fitting import calibrated_stacks

    records: list[Record] = []
    for gpu, stack, text, fits in calibrated_stacks(tables, about, steps_validated):
        path = Path(out) / gpu.name / f"{stack}.yaml" if out else preset_path(gpu, stack)
        make_folder(path.parent)
        save_text(str(path), text)
        records += [{"gpu": gpu.name, "stack": stack, **fit} for fit in fits]
    if not records:
        raise UserError("no family has enough rows of a known GPU and a framework to be fitted")
    title = f"{len(records)} time models are fitted."
    columns_of_stacks = columns(KernelModelRecord, f"gpu stack {FIT_KEYS}")
    return Answer(records, lambda: [Table(records, columns_of_stacks, title)])


def fits_answer(fits: "Sequence[FittedKernelModel]", gpu: "Gpu", stack: str) -> Answer:
    """Return the parameters and errors of fitted time models."""
    from kvcalc.timing.fitting import fit_records

    records = fit_records(fits)
    fitted = [fit for fit in fits if fit.entry]

    def tables() -> "list[Table]":
        from kvcalc.records.measure import KernelModelRecord
        from kvcalc.report.text.table_layout import Column, Table
        from kvcalc.report.text.tables import columns
        from kvcalc.timing.fitting import FOLDS

        parameters = Column("parameters_text", "parameters", right=False)
        rows = [{**record, "parameters_text": _parameters(record)} for record in records]
        title = f"{len(fitted)} of {len(fits)} time models of {stack} on {gpu.name} are fitted."
        held_out = f"held out: each row is predicted by one of {FOLDS} fits without that row"
        fit_columns = (*columns(KernelModelRecord, FIT_KEYS), parameters)
        return [Table(rows, fit_columns, title, ["", ERROR_NOTE, held_out])]

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.comparison_plot import predicted_against_measured

        series = [(f"{f.family} {f.kind}", f.measured, f.predicted) for f in fitted]
        return [predicted_against_measured(series, "held out")]

    return Answer(records, tables, draw)


def _parameters(record: "Record") -> str:
    parameters = record["parameters"] or {}
    words = [f"{name} {value:.3g}" for name, value in parameters.items()]
    return ", ".join(words) or str(record["why"])


class ValidationOptions(Question, frozen=True):
    """How measured rows are compared with predictions."""

    by: str = "op,gpu,framework,dtype"
    predictions: str = ""
    fail_above: float = float("inf")
    stack: str = ""
    calibration_from: str = ""


def run_validate(rows: list[Path], *, options: ValidationOptions) -> Answer:
    """Compare predictions with measured rows. The status is 1 if `--fail-above` fails."""
    from kvcalc.library.load import load_gpu
    from kvcalc.serving.server_validation import served_times
    from kvcalc.timing.rows import read_blocks
    from kvcalc.timing.validation import KEYS, ErrorTally, predictions_csv, validate

    limit = options.fail_above
    if not limit >= 0:
        raise UserError(f"--fail-above {limit} is not a percentage")
    source = load_gpu(options.calibration_from) if options.calibration_from else None
    tally = ErrorTally([key.strip() for key in options.by.split(",")])
    tables = (table for path in rows for table in read_blocks(path))
    blocks = tally.adding(validate(tables, options.stack, source, served_times))
    if path := options.predictions:
        pieces = predictions_csv(rows, blocks)
        save_text(path, map(visible, pieces) if path == "-" else pieces)
    for _ in blocks:
        pass
    records = tally.records()
    empty = tally.empty if limit < float("inf") else []
    notes = [
        *tally.remarks,
        *(f"{path}: no row can be read, so nothing is below {limit:g} %" for path in empty),
    ]
    groups = []
    for record in records if limit < float("inf") else []:
        error = record["median_abs_error"]
        if error is None or 100 * error > limit:
            groups.append(" ".join(str(record[key]) for key in KEYS if record.get(key)))
    if groups:
        notes.append(f"{len(groups)} groups above {limit:g} %: {', '.join(groups[:5])}")
    source_name = source.name if source else ""
    return Answer(
        records,
        lambda: [_validation_table(records, source_name)],
        _notes=notes,
        _status=int(bool(groups or empty)),
        _is_silent=options.predictions == "-",
    )


def _validation_table(records: "Sequence[Record]", source: str) -> "Table":
    from kvcalc.records.measure import ErrorRecord
    from kvcalc.report.text.table_layout import Table
    from kvcalc.report.text.tables import columns

    throughput = "throughput_median_abs_error throughput_p90_abs_error"
    keys = (
        "op gpu framework dtype model client rows predicted_rows basis median_abs_error "
        "p90_abs_error median_ratio ttft_median_abs_error ttft_p90_abs_error "
        f"{throughput} roofline_median_abs_error roofline_p90_abs_error"
    )
    error_columns = columns(ErrorRecord, keys, wide=throughput)
    rows = sum(record["rows"] or 0 for record in records)
    predicted = sum(record["predicted_rows"] or 0 for record in records)
    title = f"{predicted:,} of {rows:,} measured rows are predicted."
    notes = [
        f"{ERROR_NOTE}, ratio: predicted / measured",
        "basis roofline: the datasheet bound, for rows without a calibration",
    ]
    notes += [f"calibrations of {source}, scaled by datasheet figures"] if source else []
    return Table(records, error_columns, title, ["", *notes])
