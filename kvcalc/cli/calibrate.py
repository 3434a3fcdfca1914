"""`kvcalc calibrate`.

`kvcalc validate`.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Output, Printing
from kvcalc.cli.options import Argument, Option, note, save_text
from kvcalc.records import Settings

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.report.text.table_layout import Column, Table
    from kvcalc.timing.fitting import FittedKernelModel
    from kvcalc.timing.rows import MeasurementFile as Rows

_source = partial(Option, takes="TEXT")


def run(
    rows: Annotated[list[Path], Argument("CSV files of measured rows", takes="FILE…")],
    *,
    gpu: Annotated[
        str,
        Option(
            "Measured GPU: preset or YAML file",
            takes="GPU",
            is_common=True,
            words=o.gpu_names,
        ),
    ] = "",
    stack: Annotated[
        str,
        Option(
            "Measured software: vllm, sglang or your own name",
            takes="NAME",
            is_common=True,
            words=o.stack_names,
        ),
    ] = "",
    out: Annotated[
        str,
        Option(
            "YAML file to write; default: in the folder of your presets",
            "--output -o",
            "FILE",
            is_common=True,
            is_output=True,
        ),
    ] = "",
    every: Annotated[
        bool,
        Option(
            "Fit every GPU and stack in the rows, one file each",
            "--all",
            is_common=True,
        ),
    ] = False,
    origin: Annotated[str, _source("Source of the rows, written to the file")] = "",
    commit: Annotated[str, _source("Commit of the rows, written to the file")] = "",
    license_: Annotated[str, _source("License of the rows, written to the file")] = "",
    date: Annotated[str, _source("Date of the fit, written to the file; default: today")] = "",
    output: Output,
) -> None:
    """Fit the time models to measured rows."""
    from kvcalc.errors import UserError
    from kvcalc.library.load import load_gpu
    from kvcalc.timing.rows import read_rows

    about = {"origin": origin, "commit": commit, "license": license_, "date": date}
    if every:
        if gpu or stack or output.plot:
            raise UserError(
                "--all takes every GPU and stack",
                hint="Leave out --gpu, --stack and --plot",
            )
        _every([read_rows(p) for p in rows], out, about, output)
        return
    for name, value in (("--gpu", gpu), ("--stack", stack)):
        if not value:
            raise UserError(
                f"{name} is missing",
                hint="It names what was measured; --all fits all that the rows name",
            )
    _one(rows, load_gpu(gpu), stack, out, about, output)


def _one(
    rows: list[Path],
    machine: "Gpu",
    stack: str,
    out: str,
    about: dict[str, str],
    output: Output,
) -> None:
    from kvcalc.errors import UserError
    from kvcalc.library.files import make_folder
    from kvcalc.serving.server_validation import steps_validated
    from kvcalc.timing.calibration import preset_path, to_yaml
    from kvcalc.timing.fitting import (
        calibrate,
        chosen_rows,
        fit_records,
        make_calibration,
    )
    from kvcalc.timing.rows import read_rows

    path = out or str(preset_path(machine, stack))
    used = chosen_rows([read_rows(p) for p in rows], machine, stack, note)
    fits = calibrate(used, machine, stack, note)
    fitted = [fit for fit in fits if fit.entry]
    if not fitted:
        raise UserError(
            "no family has enough rows to be fitted",
            hint="; ".join(f"{f.family} {f.kind}: {f.why}" for f in fits),
        )
    text = to_yaml(make_calibration(fits, machine, stack, used, about, steps_validated))
    if output.plot:
        from kvcalc.report.charts.measured_plot import predicted_against_measured

        series = [(f"{f.family} {f.kind}", f.measured, f.predicted) for f in fitted]
        output.picture(predicted_against_measured(series, "held out"))
    if not out:
        make_folder(Path(path).parent)
    save_text(path, text)
    if out != "-" and not output.printed(fit_records(fits)):
        output.show(fits_table(fits, machine, stack))


def _every(tables: "list[Rows]", out: str, about: dict[str, str], output: Output) -> None:
    """Each GPU and stack that the rows name, side by side on the cores there are, and what was held
    out of each."""
    from kvcalc.errors import UserError
    from kvcalc.library.files import make_folder
    from kvcalc.report.text.table_layout import Column, Table
    from kvcalc.serving.server_validation import steps_validated
    from kvcalc.timing.calibration import preset_path
    from kvcalc.timing.fitting import calibrated_stacks

    records = []
    for machine, stack, text, fits in calibrated_stacks(tables, about, steps_validated):
        path = (
            Path(out) / machine.name / f"{stack}.yaml" if out else preset_path(machine, stack)
        )
        make_folder(path.parent)
        save_text(str(path), text)
        records += [{"gpu": machine.name, "stack": stack, **fit} for fit in fits]
    if not records:
        raise UserError("no family has enough rows of a known GPU and a framework to be fitted")
    if not output.printed(records):
        lead = (
            Column("gpu", "GPU", right=False),
            Column("stack", "stack", right=False),
        )
        title = f"{len(records)} time models are fitted."
        output.show(Table(records, (*lead, *_columns()[:-1]), title))


def _columns() -> "tuple[Column, ...]":
    from kvcalc.report.text.table_layout import Column

    return (
        Column("family", "family", right=False),
        Column("kind", "kind", right=False),
        Column("form", "time model", right=False),
        Column("rows", "rows", "{:,}".format),
        Column("fitted_median_abs_error", "fitted median", _percent),
        Column("fitted_p90_abs_error", "fitted p90", _percent),
        Column("median_abs_error", "held-out median", _percent),
        Column("p90_abs_error", "held-out p90", _percent),
        Column("parameters_text", "parameters", right=False),
    )


def fits_table(fits: "list[FittedKernelModel]", gpu: "Gpu", stack: str) -> "Table":
    from kvcalc.report.text.table_layout import Table
    from kvcalc.timing.fitting import FOLDS, fit_records

    shown: list[Settings] = [r | {"parameters_text": _written(r)} for r in fit_records(fits)]
    fitted = sum(bool(fit.entry) for fit in fits)
    title = f"{fitted} of {len(fits)} time models of {stack} on {gpu.name} are fitted."
    notes = [
        "error of a row: exp(|ln(predicted/measured)|) − 1",
        f"held out: each row is predicted by one of {FOLDS} fits without that row",
    ]
    return Table(shown, _columns(), title, ["", *notes])


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _written(record: Settings) -> str:
    return (
        ", ".join(f"{k} {v:.3g}" for k, v in record["parameters"].items())
        if record["parameters"]
        else record["why"]
    )


def run_validate(
    rows: Annotated[list[Path], Argument("CSV files of measured rows", takes="FILE…")],
    *,
    by: Annotated[
        str,
        Option(
            "Keys of a group: op, gpu, framework, dtype, model, client; a list",
            takes="LIST",
        ),
    ] = "op,gpu,framework,dtype",
    predictions: Annotated[
        str,
        Option(
            "Write every row with both predictions to a CSV file",
            takes="FILE",
            is_output=True,
        ),
    ] = "",
    fail_above: Annotated[
        float, Option("Exit with 1 if the median error of a group exceeds X percent")
    ] = float("inf"),
    stack: Annotated[
        str,
        Option(
            "Calibration for all rows; default: that of each row's framework",
            takes="NAME",
            words=o.stack_names,
        ),
    ] = "",
    calibration_from: Annotated[
        str,
        Option(
            "Use this GPU's calibrations, scaled by datasheets",
            takes="GPU",
            words=o.gpu_names,
        ),
    ] = "",
    output: Printing,
) -> int:
    """Compare predictions with measured rows. Return 1 if `--fail-above` fails."""
    from kvcalc.errors import UserError, visible
    from kvcalc.library.load import load_gpu
    from kvcalc.serving.server_validation import served_times
    from kvcalc.timing.rows import read_blocks
    from kvcalc.timing.validation import (
        KEYS,
        ErrorTally,
        predictions_csv,
        validate,
    )

    if not fail_above >= 0:
        raise UserError(f"--fail-above {fail_above} is not a percentage")
    source = load_gpu(calibration_from) if calibration_from else None
    tally = ErrorTally([key.strip() for key in by.split(",")])
    tables = (table for path in rows for table in read_blocks(path))
    result = tally.adding(validate(tables, stack, source, served_times))
    if predictions:
        pieces = predictions_csv(rows, result)
        save_text(predictions, map(visible, pieces) if predictions == "-" else pieces)
    for _ in result:
        pass
    records = tally.records()
    for text in tally.remarks:
        note(text)
    if predictions != "-" and not output.printed(records):
        output.show(_table(records, source.name if source else ""))
    empty = tally.empty if fail_above < float("inf") else []
    for path in empty:
        note(f"{path}: no row can be read, so nothing is below {fail_above:g} %")
    bad = [r for r in records if not _passes(r, fail_above)]
    if bad:
        named = ", ".join(" ".join(str(r[k]) for k in KEYS if r.get(k)) for r in bad[:5])
        note(f"{len(bad)} groups above {fail_above:g} %: {named}")
    return int(bool(bad or empty))


def _passes(record: Settings, most: float) -> bool:
    error = record["median_abs_error"]
    return most == float("inf") or (error is not None and 100 * error <= most)


def _table(records: list[Settings], source: str) -> "Table":
    from kvcalc.report.text.table_layout import Column, Table

    columns = (
        Column("op", "operation", right=False),
        Column("gpu", "GPU", right=False),
        Column("framework", "framework", right=False),
        Column("dtype", "dtype", right=False),
        Column("model", "model", right=False),
        Column("client", "client", right=False),
        Column("rows", "rows", "{:,}".format),
        Column("predicted_rows", "predicted", "{:,}".format),
        Column("basis", "basis", right=False),
        Column("median_abs_error", "median", _percent_validate),
        Column("p90_abs_error", "p90", _percent_validate),
        Column("median_ratio", "median ratio", lambda v: f"{v:.3f}"),
        Column("ttft_median_abs_error", "TTFT median", _percent_validate),
        Column("ttft_p90_abs_error", "TTFT p90", _percent_validate),
        Column(
            "throughput_median_abs_error",
            "tokens/s median",
            _percent_validate,
            wide=True,
        ),
        Column("throughput_p90_abs_error", "tokens/s p90", _percent_validate, wide=True),
        Column("roofline_median_abs_error", "roofline median", _percent_validate),
        Column("roofline_p90_abs_error", "roofline p90", _percent_validate),
    )
    rows, predicted = (sum(r[key] or 0 for r in records) for key in ("rows", "predicted_rows"))
    title = f"{predicted:,} of {rows:,} measured rows are predicted."
    notes = [
        "error of a row: exp(|ln(predicted/measured)|) − 1, ratio: predicted / measured",
        "basis roofline: the datasheet bound, for rows without a calibration",
    ]
    notes += [f"calibrations of {source}, scaled by datasheet figures"] if source else []
    return Table(records, columns, title, ["", *notes])


def _percent_validate(value: float) -> str:
    return f"{value:.1%}"
