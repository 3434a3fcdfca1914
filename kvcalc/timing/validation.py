"""Compare bounds and predictions with measured rows, and report the errors by group.

The error of a row is exp(|ln(predicted/measured)|) − 1: twice too fast and twice too slow are both
100 %. Rows without a kernel model count as rows, but not as predicted rows. Invalid rows and
unknown GPUs are counted and listed by line. Files may have any number of rows, because they are
read in blocks.

Layers: rows of `layer` name a model and one of its kinds of layer. `batch` sequences of query_len
new tokens attend to kv_len tokens, which include the new ones. Caches are cold. A layer does not
include the overhead of the engine.

Servers: the bound of the time per output token is

    TPOT ≥ decode step(batch, input + output/2) + batch/output · prefill(input)

A new prompt replaces each sequence that ends, so a step includes batch/output of a prefill.
"""

import csv
import io
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.errors import UserError, nearest, printable
from kvcalc.gpu.gpu import Gpu, least_time, roofline, total_seconds
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.library.presets import key
from kvcalc.model.forward_pass import forward
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.question.deployment_options import DATASHEET
from kvcalc.records import Record
from kvcalc.storage.quantization import stored_format
from kvcalc.timing.calibration import (
    Calibration,
    all_stacks,
    find_calibration,
    find_gpu,
    stacks_of,
)
from kvcalc.timing.kernel_models.families import kind_of
from kvcalc.timing.kernel_models.kernel_model import Array, figures_of
from kvcalc.timing.kernel_models.mla import MlaModule
from kvcalc.timing.kernel_times import mla_kernels_us
from kvcalc.timing.rows import (
    SERVING,
    MeasuredRow,
    MeasurementFile,
    ServedTimes,
    columns_of,
    cost_of,
    read_blocks,
    served_model,
)
from kvcalc.timing.steps import kernel_seconds

INFERENCEX = "inferencex"
# Formats of 4-bit weights and activations, by the label of a run.
FP4 = {"fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}
BoundAndTime = tuple[Array, Array]  # bounds and predictions in microseconds, NaN if unknown


def _layer_us(row: MeasuredRow, gpu: Gpu, calibration: Calibration | None) -> BoundAndTime:
    """Return the bound and the prediction of one layer.

    Its formats are as published if the row's dtype names the published format. Otherwise all
    matrices have the row's dtype.
    """
    model = served_model(row.model)
    if model is None:
        return math.nan, math.nan
    name = "fp8_block128" if row.dtype == "fp8_block" else row.dtype
    precision = Precision(kv_cache_dtype=row.cache or "auto", quantization=name)
    if name in {scheme.format for scheme in model.quantization}:
        precision = replace(precision, quantization="")
    elif name == "bfloat16":
        precision = replace(precision, quantization="", dtype="bf16")

    batch, query_len, kv_len, tp, ep = (int(size) for size in row.shape)
    prompt = Batch.prefill(query_len, batch, kv_len - query_len)
    us_per_layer = 1e6 / model.counts[row.kernel]
    try:
        ranks = Parallelism(tp=max(1, tp), ep=max(1, ep))
        operators = forward(model, prompt, precision, ranks)
        operators = tuple(o for o in operators if o.layer == row.kernel)
        bound_s = float(total_seconds(roofline(operators, gpu, query_len == 1)))
        predicted_s = math.nan
        if calibration:
            predicted_s = float(kernel_seconds(operators, gpu, calibration))
    except UserError:
        return math.nan, math.nan
    return us_per_layer * bound_s, us_per_layer * predicted_s


def bound_us(row: MeasuredRow, gpu: Gpu) -> float:
    """Return the bound of the microseconds per output token of a server; NaN for an unknown model
    or unsuitable ranks."""
    model = served_model(row.model) if row.model else None
    if model is None:
        return math.nan
    input_len, output_len, batch = (int(size) for size in row.shape[:3])
    step = Batch.decode(input_len + max(1, output_len // 2), batch)
    seconds = []
    try:
        for one_pass in (step, Batch.prefill(input_len)):
            operators = forward(model, one_pass, precision_of(row, model), ranks_of(row))
            seconds.append(float(total_seconds(roofline(operators, gpu))))
    except UserError:
        return math.nan
    step_s, prompt_s = seconds
    return 1e6 * (step_s + batch / output_len * prompt_s)


def precision_of(row: MeasuredRow, model: Model) -> Precision:
    """Return the formats of a run.

    A checkpoint that is published quantised runs as published, others in the row's format. A run in
    fp4 of a model that is published in a wider format (DeepSeek-R1 in fp8) is of an NVFP4
    checkpoint. fp8 mixtures and Qwen's fp8 checkpoints are published in blocks of 128 × 128.
    """
    cache = _cache_dtype(row)
    has_four_bits = any(stored_format(scheme.format).bits == 4 for scheme in model.quantization)
    if row.dtype in FP4 and not has_four_bits:
        return Precision(quantization=FP4[row.dtype], kv_cache_dtype=cache)
    if model.quantization or not row.dtype.startswith("fp8"):
        return Precision(kv_cache_dtype=cache)
    is_qwen = row.framework == "trtllm" and _model_key(row).startswith("qwen3")
    has_blocks = row.op == "e2e_moe" or row.dtype == "fp8_block" or is_qwen
    return Precision(quantization="fp8_block128" if has_blocks else "fp8", kv_cache_dtype=cache)


def _cache_dtype(row: MeasuredRow) -> str:
    """Return the cache's dtype. The queues of InferenceX's Llama-70B with vLLM on H100 show that
    its cache had 16 bits."""
    name = _model_key(row)
    if row.client == INFERENCEX:
        is_on_h100 = row.framework == "vllm" and "h100" in row.gpu.lower()
        if is_on_h100 and name.startswith("llama3170b"):
            return "auto"
        is_deepseek = row.framework == "trtllm" and name.startswith("deepseek")
        if not row.cache and (name.startswith("qwen35") or is_deepseek):
            return "fp8"
    return "fp8" if row.cache.startswith("fp8") else "auto"


def _model_key(row: MeasuredRow) -> str:
    return key(row.model.rsplit("/", 1)[-1])


def ranks_of(row: MeasuredRow) -> Parallelism:
    """Return the ranks of a run."""
    tp, *ep = (int(size) for size in row.shape[3:])
    return Parallelism(tp=tp, ep=max(1, *ep) if ep else 1)


Simulator = Callable[[Sequence[MeasuredRow], Gpu, Calibration | None], list[ServedTimes]]
UnknownGpu = tuple[str, str]  # GPU and operation of rows


class Validation(NamedTuple):
    """Rows with their bounds and predictions in microseconds, NaN if unknown.

    Attributes:
        table: The rows.
        bound: Bounds [rows].
        calibrated: Predictions [rows].
        gpus: Name of each row's GPU: its preset's, or the row's own if there is no preset.
        unknown: Lines of rows with an unknown GPU, by GPU and operation.
        served: All figures of each simulated server, by the index of its row.
    """

    table: MeasurementFile
    bound: Array
    calibrated: Array
    gpus: list[str]
    unknown: dict[UnknownGpu, list[str]]
    served: dict[int, ServedTimes]


def validate(
    tables: Iterable[MeasurementFile],
    stack: str = "",
    source: Gpu | None = None,
    simulate: Simulator | None = None,
) -> Iterator[Validation]:
    """Yield the tables with bounds and predictions.

    Args:
        tables: Rows, as `read_rows` or `read_blocks` give them.
        stack: Calibration to use instead of each row's framework.
        source: GPU whose calibration all GPUs use.
        simulate: Simulates servers; without it, their rows have only bounds.

    Raises:
        UserError: There is no calibration with that name or of that GPU, or a file is invalid.
    """
    stacks = [*all_stacks(), DATASHEET]
    if stack and stack not in stacks:
        text = f"no GPU has a calibration for stack {stack!r}"
        raise UserError(text, hint=nearest(stack, stacks))
    if source and not stacks_of(source):
        hint = "`kvcalc calibrate` makes one from measured rows"
        raise UserError(f"{source.name} has no calibration to take", hint=hint)
    for table in tables:
        yield _validate_table(table, stack, source, simulate)


def _validate_table(
    table: MeasurementFile, stack: str, source: Gpu | None, simulate: Simulator | None
) -> Validation:
    import numpy as np

    gpus = {name: find_gpu(name) for name in {row.gpu for row in table.rows}}
    names = {name: gpu.name if gpu else name for name, gpu in gpus.items()}
    bound = np.full(len(table.rows), np.nan)
    row_names = [names[row.gpu] for row in table.rows]
    validation = Validation(table, bound, bound.copy(), row_names, {}, {})
    cells: dict[tuple[str, str, str, str], list[int]] = {}
    for index, row in enumerate(table.rows):
        cell = row.gpu, stack or row.framework, row.op, kind_of(row.op, row.dtype, row.kernel)
        cells.setdefault(cell, []).append(index)
    for (name, framework, op, kind), indices in cells.items():
        rows = [table.rows[index] for index in indices]
        gpu = gpus[name]
        if gpu is None:
            lines = validation.unknown.setdefault((name, op), [])
            lines += [str(table.lines[row.row_index]) for row in rows]
            continue
        calibration = None
        if framework != DATASHEET:
            calibration = find_calibration(source or gpu, framework)
        times: Any
        if op == "layer":
            times = np.transpose([_layer_us(row, gpu, calibration) for row in rows])
        elif op not in SERVING:
            times = _kernels_us(rows, gpu, calibration, op, kind)
        else:
            figures = [ServedTimes()] * len(rows)
            if simulate and calibration:
                figures = simulate(rows, gpu, calibration)
                validation.served.update(zip(indices, figures, strict=True))
            times = [bound_us(row, gpu) for row in rows], [served.tpot_us for served in figures]
        validation.bound[indices], validation.calibrated[indices] = times
    return validation


def _kernels_us(
    rows: list[MeasuredRow], gpu: Gpu, calibration: Calibration | None, op: str, kind: str
) -> BoundAndTime:
    """Return the bounds and the predictions of kernels of one kind.

    The cache may be in the L2, as in the measurement, so a prediction may be below the bound.
    """
    import numpy as np

    bound_us: Array = math.nan
    shape = columns_of(rows)
    cost = cost_of(op, kind, shape)
    with suppress(UserError):  # a GPU without a peak for these products has no bound
        if cost is not None:
            bound_us = least_time(*cost, gpu).seconds * 1e6
    law = calibration.law(op, kind) if calibration else None
    if calibration is None or law is None:
        return bound_us, math.nan
    try:
        parameters = figures_of(gpu)
    except UserError:
        return bound_us, math.nan
    if isinstance(law, MlaModule):
        kernels = mla_kernels_us(kind, shape, parameters, calibration)
        if kernels is None:
            return bound_us, math.nan
        shape = (*shape, kernels)
    # Compute equal shapes once.
    distinct, index = np.unique(np.stack(shape, axis=1), axis=0, return_inverse=True)
    return bound_us, law.us(parameters, *distinct.T)[index.reshape(-1)]


KEYS = ("op", "gpu", "framework", "dtype", "model", "client")
DEFAULT_KEYS = KEYS[:4]
MAX_LINES = 5  # lines in a remark
PREDICTED_COLUMNS = ("roofline_us", "calibrated_us")
SERVER_COLUMNS = ("calibrated_ttft_us", "calibrated_tokens_per_s")  # if a file has serving rows
# Pairs of columns of a group, measured and predicted.
PAIRS = {"roofline": (0, 1), "ttft": (3, 4), "throughput": (5, 6)}


class ErrorTally:
    """Errors of rows by group. Raises UserError for an unknown key.

    Each group has seven columns of numbers, one item for each row: the time, its bound and its
    prediction in microseconds, then time to first token and tokens/s, each measured and simulated.
    """

    def __init__(self, by: Sequence[str] = DEFAULT_KEYS) -> None:
        unknown = [key for key in by if key not in KEYS]
        if unknown:
            raise UserError(f"cannot group by {unknown[0]!r}", hint=f"Known: {', '.join(KEYS)}")
        self._by = tuple(by)
        self._groups: dict[tuple[str, ...], list[array[float]]] = {}
        self._num_rows: Counter[str] = Counter()
        # By file, and by unknown GPU or None for invalid rows: their number, and the first lines.
        self._num_lines: Counter[tuple[str, UnknownGpu | None]] = Counter()
        self._first_lines: dict[tuple[str, UnknownGpu | None], list[str]] = {}

    def adding(self, validations: Iterable[Validation]) -> Iterator[Validation]:
        """Yield the same validations and count each one."""
        for validation in validations:
            self._add(validation)
            yield validation

    def _add(self, v: Validation) -> None:
        rows = zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist(), strict=True)
        for index, (row, gpu, bound, predicted) in enumerate(rows):
            values = {name: getattr(row, name) for name in KEYS} | {"gpu": gpu}
            group = tuple(values[name] for name in self._by)
            columns = self._groups.setdefault(group, [array("d") for _ in range(7)])
            figures = [row.time_us, bound, predicted, *(math.nan,) * 4]
            if row.op in SERVING:
                times = v.served.get(index, ServedTimes())
                figures[3:5] = row.ttft_us, times.ttft_us
                figures[5:7] = row.tokens_per_s, times.tokens_per_s
            for column, figure in zip(columns, figures, strict=True):
                column.append(figure)

        path = v.table.path
        self._num_rows[path] += len(v.table.rows)
        for unknown, lines in ((None, v.table.invalid), *v.unknown.items()):
            self._num_lines[path, unknown] += len(lines)
            first = self._first_lines.setdefault((path, unknown), [])
            first += lines[: MAX_LINES - len(first)]

    @property
    def empty(self) -> list[str]:
        """The files without a valid row."""
        return [path for path, num_rows in self._num_rows.items() if not num_rows]

    @property
    def remarks(self) -> list[str]:
        """Sentences on the invalid rows and unknown GPUs of each file, with the first lines."""
        sentences = []
        for (path, unknown), lines in self._first_lines.items():
            count = self._num_lines[path, unknown]
            if unknown:
                name, op = unknown
                about = f"{count:,} rows of {op} (lines {', '.join(lines)} …)"
                sentences.append(f"{path}: unknown GPU {printable(name, 60)!r}: {about}")
            elif count:
                more = f"; and {count - MAX_LINES:,} more" if count > MAX_LINES else ""
                rows = "row" if count == 1 else "rows"
                text = f"{count:,} {rows} cannot be read ({'; '.join(lines)}{more})"
                sentences.append(f"{path}: {text}")
        return sentences

    def records(self) -> list[Record]:
        """Return the errors of each group, in order of the groups' names."""
        import numpy as np

        records: list[Record] = []
        for names, arrays in sorted(self._groups.items()):
            columns = [np.frombuffer(column) for column in arrays]
            is_calibrated = bool(np.isfinite(columns[2]).any())
            record: dict[str, Any] = dict(zip(self._by, names, strict=True))
            record["rows"] = len(columns[0])
            record |= _error_figures(columns[0], columns[2 if is_calibrated else 1])
            record["basis"] = "calibrated" if is_calibrated else "roofline"
            for name, (measured, predicted) in PAIRS.items():
                errors = _error_figures(columns[measured], columns[predicted])
                for figure in ("median_abs_error", "p90_abs_error"):
                    record[f"{name}_{figure}"] = errors[figure]
            records.append(record)
        return records


def _error_figures(measured: Array, predicted: Array) -> Record:
    """Return the errors of the rows with both times."""
    import numpy as np

    is_known = np.isfinite(predicted) & (predicted > 0) & np.isfinite(measured)
    ratio = predicted[is_known] / measured[is_known]
    keys = ("median_abs_error", "p90_abs_error", "median_ratio")
    figures: list[float | None] = [None] * 3
    if len(ratio):
        error = np.exp(np.abs(np.log(ratio))) - 1
        quantiles = (np.median(error), np.quantile(error, 0.9), np.median(ratio))
        figures = [float(value) for value in quantiles]
    return {"predicted_rows": len(ratio), **dict(zip(keys, figures, strict=True))}


def predictions_csv(paths: Sequence[Path], validations: Iterable[Validation]) -> Iterator[str]:
    """Yield the files' rows as CSV with the columns op, roofline_us and calibrated_us, empty if
    unknown.

    If a file has rows of servers, mean time to first token and tokens/s follow.
    """
    names = dict.fromkeys(name for path in paths for name in next(read_blocks(path, 1)).header)
    added = [*PREDICTED_COLUMNS]
    if "silicon_tpot_ms" in names:
        added += SERVER_COLUMNS
    header = [name for name in names if name not in added]
    if "op" not in names:
        header.insert(0, "op")
    out = io.StringIO()
    writer = csv.DictWriter(
        out, [*header, *added], restval="", extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    for validation in validations:
        yield out.getvalue()
        out.seek(0)
        out.truncate()
        writer.writerows(_rows_with_predictions(validation))
    yield out.getvalue()


def _rows_with_predictions(v: Validation) -> list[dict[str, str]]:
    """Return all rows by column, with their operation and predictions."""
    names = v.table.header
    file_op = Path(v.table.path).stem
    columns = (*PREDICTED_COLUMNS, *SERVER_COLUMNS)
    rows = []
    for cells in v.table.cells:
        first_cells = zip(reversed(names[: len(cells)]), reversed(cells), strict=True)
        rows.append({"op": file_op, **dict(first_cells), **dict.fromkeys(columns, "")})
    for i, measured in enumerate(v.table.rows):
        row = rows[measured.row_index]
        if "op" not in names:
            row["op"] = measured.op
        served = v.served.get(i, ServedTimes())
        figures = v.bound[i], v.calibrated[i], *served[1:]
        for column, value in zip(columns, figures, strict=True):
            row[column] = f"{value:.6g}" if 0 < value < math.inf else ""
    return rows
