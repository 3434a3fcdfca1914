"""`kvcalc calibrate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli.common import note, save_text
from kvcalc.cli.groups import Output, grouped

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.report.layout import Column, Table
    from kvcalc.timing.calibrator import FittedLaw
    from kvcalc.timing.rows import Table as Rows


@grouped
def run(
    rows: Annotated[list[Path], typer.Argument(help="CSV files of measured rows.", show_default=False)],
    *,
    gpu: Annotated[str, typer.Option("--gpu", help="The GPU that was measured: a preset or a YAML file.")] = "",
    stack: Annotated[str, typer.Option("--stack", help="The software that was measured: vllm, sglang, your own name.")] = "",
    out: Annotated[
        str, typer.Option("--output", "-o", help="Where the YAML goes; by default among your own presets.", show_default=False)
    ] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Every GPU and stack among the rows, a file each, in the folder that --output names.")
    ] = False,
    origin: Annotated[str, typer.Option("--origin", help="Where the rows come from; kept in the file.")] = "",
    commit: Annotated[str, typer.Option("--commit", help="Of the origin.")] = "",
    license_: Annotated[str, typer.Option("--license", help="Of the rows.")] = "",
    date: Annotated[str, typer.Option("--date", help="Of the fit; by default today.")] = "",
    output: Output,
) -> None:
    """Fits the time laws to measured rows."""
    from kvcalc.errors import UserError
    from kvcalc.library.load import load_gpu
    from kvcalc.timing.rows import read_rows

    about = {"origin": origin, "commit": commit, "license": license_, "date": date}
    if every:
        if gpu or stack or output.plot:
            raise UserError("--all takes every GPU and stack", hint="Leave out --gpu, --stack and --plot")
        _every([read_rows(p) for p in rows], out, about, output)
        return
    for name, value in (("--gpu", gpu), ("--stack", stack)):
        if not value:
            raise UserError(f"{name} is missing", hint="It names what was measured; --all fits all that the rows name")
    _one(rows, load_gpu(gpu), stack, out, about, output)


def _one(rows: list[Path], machine: "Gpu", stack: str, out: str, about: dict[str, str], output: Output) -> None:
    from kvcalc.errors import UserError
    from kvcalc.library.writing import make_folder
    from kvcalc.serving.measured import steps_validated
    from kvcalc.timing.calibration import preset_path, to_yaml
    from kvcalc.timing.calibrator import calibrate, fit_records, summed
    from kvcalc.timing.choosing import chosen_rows
    from kvcalc.timing.rows import read_rows

    path = out or str(preset_path(machine, stack))
    used = chosen_rows([read_rows(p) for p in rows], machine, stack, note)
    fits = calibrate(used, machine, stack, note)
    fitted = [fit for fit in fits if fit.entry]
    if not fitted:
        raise UserError("no family has enough rows to be fitted", hint="; ".join(f"{f.family} {f.kind}: {f.why}" for f in fits))
    text = to_yaml(summed(fits, machine, stack, used, about, steps_validated))
    if output.plot:
        from kvcalc.report.plots_timing import predicted_against_measured

        series = [(f"{f.family} {f.kind}", f.measured, f.predicted) for f in fitted]
        output.picture(predicted_against_measured(series, "held out"))
    if not out:
        make_folder(Path(path).parent)
    save_text(path, text)
    if out != "-" and not output.printed(fit_records(fits)):
        output.show(fits_table(fits, machine, stack))


def _every(tables: "list[Rows]", out: str, about: dict[str, str], output: Output) -> None:
    """Each GPU and stack that the rows name, side by side on the cores there are, and what was held out of each."""
    from kvcalc.errors import UserError
    from kvcalc.library.writing import make_folder
    from kvcalc.report.layout import Column, Table
    from kvcalc.serving.measured import steps_validated
    from kvcalc.timing.calibration import preset_path
    from kvcalc.timing.every import calibrated_stacks

    records = []
    for machine, stack, text, fits in calibrated_stacks(tables, about, steps_validated):
        path = Path(out) / machine.name / f"{stack}.yaml" if out else preset_path(machine, stack)
        make_folder(path.parent)
        save_text(str(path), text)
        records += [{"gpu": machine.name, "stack": stack, **fit} for fit in fits]
    if not records:
        raise UserError("no family has enough rows of a known GPU and a framework to be fitted")
    if not output.printed(records):
        lead = (Column("gpu", "GPU", right=False), Column("stack", "stack", right=False))
        output.show(Table(records, (*lead, *_columns()[:-1]), "Calibrations", []))


def _columns() -> "tuple[Column, ...]":
    from kvcalc.report.layout import Column
    from kvcalc.report.tables import integer

    return (
        Column("family", "family", right=False), Column("kind", "kind", right=False), Column("form", "law", right=False),
        Column("rows", "rows", integer), Column("fitted_median_abs_error", "fitted median", _percent),
        Column("fitted_p90_abs_error", "fitted p90", _percent), Column("median_abs_error", "held-out median", _percent),
        Column("p90_abs_error", "held-out p90", _percent), Column("parameters_text", "parameters", right=False),
    )  # fmt: skip


def fits_table(fits: "list[FittedLaw]", gpu: "Gpu", stack: str) -> "Table":
    from kvcalc.report.layout import Table
    from kvcalc.timing.calibrator import FOLDS, fit_records

    shown: list[dict[str, Any]] = [r | {"parameters_text": _written(r)} for r in fit_records(fits)]
    notes = [
        "error of a row: exp(|ln(predicted/measured)|) − 1",
        f"held out: each row predicted by one of {FOLDS} fits that did not see it; the law kept is fitted on all rows",
    ]
    return Table(shown, _columns(), f"{gpu.name} under {stack}", ["", *notes])


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _written(record: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3g}" for k, v in record["parameters"].items()) if record["parameters"] else record["why"]
