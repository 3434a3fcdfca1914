"""Compare bounds and predictions with measured rows, and report the errors by group.

The error of a row is exp(|ln(predicted/measured)|) − 1: twice too fast and twice too slow are both
100 %. Rows without a kernel model count as rows, but not as predicted rows. Invalid rows and
unknown GPUs are counted and listed by line.

Layers: rows of `layer` name a model and one of its kinds of layer. `batch` sequences of query_len
new tokens attend to kv_len tokens, which include the new tokens. Caches are cold. A layer does not
include the overhead of the engine.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvcalc.arithmetic import grouped
from kvcalc.errors import UserError, nearest, printable
from kvcalc.gpu.gpu import Gpu, cost_bound, roofline, total_seconds
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.model.forward_pass import forward
from kvcalc.model.precision import Precision
from kvcalc.question.deployment_options import DATASHEET
from kvcalc.records import Record
from kvcalc.serving.measured_servers import bound_us, served_times
from kvcalc.timing.calibration import (
    Calibration,
    all_stacks,
    find_calibration,
    find_gpu,
    stacks_of,
)
from kvcalc.timing.fitting import row_errors
from kvcalc.timing.kernel_models.families import kind_of
from kvcalc.timing.kernel_models.kernel_model import Array, figures_of
from kvcalc.timing.kernel_models.mla import MlaModule
from kvcalc.timing.kernel_times import mla_kernels_us
from kvcalc.timing.rows import (
    MAX_LINES,
    SERVING,
    MeasuredRow,
    MeasurementFile,
    ServedTimes,
    columns_of,
    cost_of,
    served_model,
)
from kvcalc.timing.steps import kernel_seconds

UNKNOWN = ServedTimes()
BoundAndTime = tuple[Array, Array]  # bounds and predictions in microseconds, NaN if unknown


def _layer_us(row: MeasuredRow, gpu: Gpu, calibration: Calibration | None) -> BoundAndTime:
    """Return the bound and the prediction of one layer.

    If the row's dtype is the published format, the layer has the published formats. Otherwise all
    matrices have the row's dtype.
    """
    model = served_model(row.model)
    if model is None:
        return nan, nan
    name = row.dtype.replace("fp8_block", "fp8_block128")
    precision = Precision(kv_cache_dtype=row.cache or "auto")
    if name not in {scheme.format for scheme in model.quantization}:
        formats = {"dtype": "bf16"} if name == "bfloat16" else {"quantization": name}
        precision = replace(precision, **formats)

    batch, query_len, kv_len, tp, ep = map(int, row.shape)
    prompt = Batch.prefill(query_len, batch, kv_len - query_len)
    us_per_layer = 1e6 / model.counts[row.kernel]
    predicted_s = nan
    try:
        operators = forward(model, prompt, precision, Parallelism(tp=max(1, tp), ep=max(1, ep)))
        operators = tuple(o for o in operators if o.layer == row.kernel)
        bound_s = float(total_seconds(roofline(operators, gpu, query_len == 1)))
        if calibration:
            predicted_s = float(kernel_seconds(operators, gpu, calibration))
    except UserError:
        return nan, nan
    return us_per_layer * bound_s, us_per_layer * predicted_s


class Validation(NamedTuple):
    """A file of measured times, with the bound and the prediction for each valid row.

    A row is a measured kernel, layer or server. Times are microseconds of one call of a kernel or
    layer, or per output token of a server. A time is NaN if unknown.

    Attributes:
        table: The file with its measured rows.
        bound: Lower bound of each row's time from the GPU's datasheet [rows].
        calibrated: Time of each row that the calibration (fitted time models) of its GPU predicts
            [rows].
        gpus: Name of each row's GPU: the name of its preset. If there is no preset, it is the name
            in the row.
        unknown: Line numbers, as texts, of the rows whose GPU has no preset, by (GPU name,
            operation).
        served: Simulated TPOT (time per output token), TTFT (time to first token) and tokens/s of
            each measured server, by the index of its row in `table.rows`.
    """

    table: MeasurementFile
    bound: Array
    calibrated: Array
    gpus: list[str]
    unknown: dict[tuple[str, str], list[str]]
    served: dict[int, ServedTimes]


def validate(
    tables: Iterable[MeasurementFile], stack: str = "", source: Gpu | None = None
) -> list[Validation]:
    """Compute bounds and predictions for the rows of measurement files, one result per file.

    A software stack is an engine or kernel library, such as `vllm`. A calibration is a set of time
    models fitted to measured kernels of one GPU model with one stack.

    Args:
        tables: Files of measured rows, as `read_rows` returns them.
        stack: Name of the stack whose calibration predicts all rows; '' for the stack that each row
            names as its framework.
        source: GPU model whose calibration predicts the rows of all GPU models, scaled by datasheet
            rates; None for the calibration of each row's own GPU model.

    Raises:
        UserError: No GPU has a calibration for this stack, or the source GPU has none, or a
            calibration file is invalid.
    """
    stacks = [*all_stacks(), DATASHEET]
    if stack and stack not in stacks:
        text = f"no GPU has a calibration for stack {stack!r}"
        raise UserError(text, nearest(stack, stacks))
    if source and not stacks_of(source):
        hint = "`kvcalc calibrate` makes one from measured rows"
        raise UserError(f"{source.name} has no calibration to take", hint)
    return [_validate_table(table, stack, source) for table in tables]


def _validate_table(table: MeasurementFile, stack: str, source: Gpu | None) -> Validation:
    gpus = {name: find_gpu(name) for name in {row.gpu for row in table.rows}}
    names = {name: gpu.name if gpu else name for name, gpu in gpus.items()}
    bound, calibrated = np.full((2, len(table.rows)), np.nan)
    row_names = [names[row.gpu] for row in table.rows]
    validation = Validation(table, bound, calibrated, row_names, defaultdict(list), {})
    cells = grouped(
        ((r.gpu, stack or r.framework, r.op, kind_of(r.op, r.dtype, r.kernel)), index)
        for index, r in enumerate(table.rows)
    )
    for (name, framework, op, kind), indices in cells.items():
        rows = [table.rows[index] for index in indices]
        gpu = gpus[name]
        if gpu is None:
            validation.unknown[name, op] += [str(table.lines[row.row_index]) for row in rows]
            continue
        calibration = None
        if framework != DATASHEET:
            calibration = find_calibration(source or gpu, framework)
        if op == "layer":
            layers = [_layer_us(row, gpu, calibration) for row in rows]
            bound[indices], calibrated[indices] = np.transpose(layers)
        elif op in SERVING:
            bound[indices] = [bound_us(row, gpu) for row in rows]
            if calibration:
                served = served_times(rows, gpu, calibration)
                calibrated[indices] = [figures.tpot_us for figures in served]
                validation.served.update(zip(indices, served))
        else:
            times = _kernels_us(op, kind, columns_of(rows), gpu, calibration)
            bound[indices], calibrated[indices] = times
    return validation


def _kernels_us(
    op: str, kind: str, shape: tuple[Array, ...], gpu: Gpu, calibration: Calibration | None
) -> BoundAndTime:
    """Return the bounds and the predictions of kernels of one kind.

    The cache may be in the L2, as in the measurement, so a prediction may be below the bound.
    """
    bound_us = nan
    cost = cost_of(op, kind, shape)
    with suppress(UserError):  # a GPU without a peak for these products has no bound
        bound_us = cost_bound(*cost, gpu).seconds * 1e6
    kernel_model = calibration.kernel_model(op, kind) if calibration else None
    if calibration is None or kernel_model is None:
        return bound_us, nan
    try:
        parameters = figures_of(gpu)
    except UserError:
        return bound_us, nan
    if isinstance(kernel_model, MlaModule):
        kernels = mla_kernels_us(kind, shape, parameters, calibration)
        if kernels is None:
            return bound_us, nan
        shape = (*shape, kernels)
    # Compute equal shapes once.
    distinct, index = np.unique(np.stack(shape, axis=1), axis=0, return_inverse=True)
    return bound_us, kernel_model.us(parameters, *distinct.T)[index.reshape(-1)]


KEYS = ("op", "gpu", "framework", "dtype", "model", "client")
# Pairs of columns of a group, measured and predicted.
PAIRS = {"roofline": [0, 1], "ttft": [3, 5], "throughput": [4, 6]}


def remarks(validation: Validation) -> list[str]:
    """Return sentences on the measured rows that have no bound or prediction, with the reason.

    Such rows are invalid, or their GPU is unknown. The list is empty if there are none.

    Args:
        validation: A file of measured rows, with bounds and predictions.
    """
    sentences = [validation.table.remark] if validation.table.invalid else []
    for (name, op), lines in validation.unknown.items():
        about = f"{len(lines):,} rows of {op} (lines {', '.join(lines[:MAX_LINES])} …)"
        sentences.append(
            f"{validation.table.path}: unknown GPU {printable(name, 60)!r}: {about}"
        )
    return sentences


def error_records(validations: Iterable[Validation], by: Sequence[str]) -> list[Record]:
    """Return the errors of predictions against measured times, in one record per group of rows.

    A record has the number of rows, and the median and the 90th percentile of the relative errors:
    0.05 is 5%. `basis` is "calibrated". Groups without predictions have the errors of the datasheet
    bounds, and "roofline" as `basis`. Records are sorted by the names of the groups.

    Args:
        validations: Files of measured rows, with bounds and predictions.
        by: Names of columns: op, gpu, framework, dtype, model or client. Rows that are equal in
            these columns form one group. An empty list gives one group of all rows.

    Raises:
        UserError: `by` contains a name that is not one of these columns.
    """
    unknown = [key for key in by if key not in KEYS]
    if unknown:
        raise UserError(f"cannot group by {unknown[0]!r}", f"Known: {', '.join(KEYS)}")
    # Each row has seven numbers: the time, its bound and its prediction in microseconds, then
    # measured time to first token and tokens/s, then both simulated.
    groups = defaultdict(list)
    for v in validations:
        rows = zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist())
        for index, (row, gpu, bound, predicted) in enumerate(rows):
            group = tuple(gpu if key == "gpu" else getattr(row, key) for key in by)
            measured = row.served if row.op in SERVING else UNKNOWN
            simulated = v.served.get(index, UNKNOWN)
            groups[group].append((row.time_us, bound, predicted, *measured[1:], *simulated[1:]))
    records: list[Record] = []
    for names, figures in sorted(groups.items()):
        columns = np.transpose(figures)
        is_calibrated = bool(np.isfinite(columns[2]).any())
        record = {
            **dict(zip(by, names)),
            "rows": columns.shape[1],
            **_error_figures(columns[[0, 2 if is_calibrated else 1]]),
            "basis": "calibrated" if is_calibrated else "roofline",
        }
        for name, pair in PAIRS.items():
            errors = _error_figures(columns[pair])
            for figure in ("median_abs_error", "p90_abs_error"):
                record[f"{name}_{figure}"] = errors[figure]
        records.append(record)
    return records


def _error_figures(pair: Array) -> Record:
    """Return the errors of the rows with both times, measured and predicted [2, rows]."""
    measured, predicted = pair[:, np.isfinite(pair).all(axis=0) & (pair[1] > 0)]
    figures: list[float | None] = [None] * 3
    if len(measured):
        error = row_errors(predicted, measured)
        ratio = np.median(predicted / measured)
        figures = [float(f) for f in (np.median(error), np.quantile(error, 0.9), ratio)]
    keys = ("median_abs_error", "p90_abs_error", "median_ratio")
    return {"predicted_rows": len(measured), **dict(zip(keys, figures))}


PREDICTED_COLUMNS = ("roofline_us", "calibrated_us")
SERVER_COLUMNS = ("calibrated_ttft_us", "calibrated_tokens_per_s")  # if a file has serving rows


def predictions_csv(validations: Sequence[Validation]) -> str:
    """Return all rows of the files as CSV text, with added columns for bounds and predictions.

    The added columns are `op` (the operation), `roofline_us` (datasheet bound) and `calibrated_us`
    (prediction), in microseconds. The last two are empty if unknown. If a file has rows of servers,
    `calibrated_ttft_us` and `calibrated_tokens_per_s` follow: simulated mean time to first token,
    and output tokens per second.

    Args:
        validations: Files of rows with bounds and predictions, as `validate` returns them.
    """
    names = dict.fromkeys(name for v in validations for name in v.table.header)
    added = [*PREDICTED_COLUMNS]
    if "silicon_tpot_ms" in names:
        added += SERVER_COLUMNS
    header = [name for name in names if name not in added]
    if "op" not in names:
        header.insert(0, "op")
    out = io.StringIO()
    writer = csv.DictWriter(out, [*header, *added], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for validation in validations:
        writer.writerows(_rows_with_predictions(validation))
    return out.getvalue()


def _rows_with_predictions(v: Validation) -> list[dict[str, str]]:
    """Return all rows by column, with their operation and predictions."""
    names = v.table.header
    file_op = Path(v.table.path).stem
    columns = (*PREDICTED_COLUMNS, *SERVER_COLUMNS)
    rows = []
    for cells in v.table.cells:
        # the first of equal names counts
        first_cells = zip(reversed(names[: len(cells)]), reversed(cells))
        rows.append({"op": file_op, **dict(first_cells), **dict.fromkeys(columns, "")})
    for i, measured in enumerate(v.table.rows):
        row = rows[measured.row_index]
        if "op" not in names:
            row["op"] = measured.op
        figures = v.bound[i], v.calibrated[i], *v.served.get(i, UNKNOWN)[1:]
        for column, value in zip(columns, figures):
            row[column] = f"{value:.6g}" if 0 < value < inf else ""
    return rows
