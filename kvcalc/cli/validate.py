"""`kvcalc validate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli.common import note, save_text
from kvcalc.cli.groups import Printing, grouped

if TYPE_CHECKING:
    from kvcalc.report.layout import Table


@grouped
def run(
    rows: Annotated[list[Path], typer.Argument(help="CSV files of measured rows.", show_default=False)],
    *,
    by: Annotated[
        str, typer.Option("--by", help="What makes a group: op, gpu, framework, dtype, model, client.")
    ] = "op,gpu,framework,dtype",
    predictions: Annotated[
        str, typer.Option("--predictions", help="Write every row with both predictions to this CSV.", show_default=False)
    ] = "",
    fail_above: Annotated[
        float, typer.Option("--fail-above", help="Exit with 1 if a group's median error exceeds so many per cent.")
    ] = float("inf"),
    stack: Annotated[str, typer.Option("--stack", help="Calibration for all rows; by default each row's framework.")] = "",
    calibration_from: Annotated[
        str, typer.Option("--calibration-from", help="Take this GPU's calibrations, scaled by datasheet figures.")
    ] = "",
    output: Printing,
) -> None:
    """The model against measured rows."""
    from kvcalc.errors import UserError, visible
    from kvcalc.library.load import load_gpu
    from kvcalc.serving.measured import served_times
    from kvcalc.timing.tally import KEYS, Tally, predictions_csv
    from kvcalc.timing.validation import validated_blocks

    if not fail_above >= 0:
        raise UserError(f"--fail-above {fail_above} is not a percentage")
    source = load_gpu(calibration_from) if calibration_from else None
    tally = Tally([key.strip() for key in by.split(",")])
    found = tally.adding(validated_blocks(rows, stack, source, served_times))
    if predictions:
        pieces = predictions_csv(rows, found)
        save_text(predictions, map(visible, pieces) if predictions == "-" else pieces)
    for _ in found:
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
    if bad or empty:
        raise typer.Exit(1)


def _passes(record: dict[str, Any], most: float) -> bool:
    error = record["median_abs_error"]
    return most == float("inf") or (error is not None and 100 * error <= most)


def _table(records: list[dict[str, Any]], source: str) -> "Table":
    from kvcalc.report.layout import Column, Table
    from kvcalc.report.tables import integer

    columns = (
        Column("op", "operation", right=False), Column("gpu", "GPU", right=False),
        Column("framework", "framework", right=False), Column("dtype", "dtype", right=False),
        Column("model", "model", right=False), Column("client", "client", right=False),
        Column("rows", "rows", integer), Column("predicted_rows", "predicted", integer),
        Column("basis", "basis", right=False), Column("median_abs_error", "median", _percent),
        Column("p90_abs_error", "p90", _percent), Column("median_ratio", "median ratio", lambda v: f"{v:.3f}"),
        Column("ttft_median_abs_error", "TTFT median", _percent), Column("ttft_p90_abs_error", "TTFT p90", _percent),
        Column("throughput_median_abs_error", "tokens/s median", _percent, wide=True),
        Column("throughput_p90_abs_error", "tokens/s p90", _percent, wide=True),
        Column("roofline_median_abs_error", "roofline median", _percent),
        Column("roofline_p90_abs_error", "roofline p90", _percent),
    )  # fmt: skip
    notes = [
        "error of a row: exp(|ln(predicted/measured)|) − 1; ratio: predicted over measured",
        "basis calibrated: the stack's laws; roofline: the datasheet bound, where no calibration applies",
    ]
    notes += [f"calibrations of {source}, scaled by datasheet figures"] if source else []
    return Table(records, columns, notes=["", *notes])


def _percent(value: float) -> str:
    return f"{value:.1%}"
