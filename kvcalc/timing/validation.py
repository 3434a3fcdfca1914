"""Compare bounds and predictions with measured rows, and report the errors by group.

The error of a row is exp(|ln(predicted/measured)|) − 1: twice too fast and twice too slow are both
100 %. Rows without a kernel model count as rows, but not as predicted rows. Invalid rows and
unknown GPUs are counted and listed by line. Files may have any number of rows: no table stays in
memory.

Layers: rows of `layer` name a model and one of its kinds of layer. `batch` sequences of query_len
new tokens attend to kv_len tokens, their own included. Caches are cold. A layer does not include
what the engine adds.

Servers: the bound of the time per output token is

    TPOT ≥ decode step(batch, input + output/2) + batch/output · prefill(input)

Each sequence that ends is replaced by a new prompt, so a step includes batch/output of a prefill.
"""

import csv
import io
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError, nearest, printable
from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.roof import least_time, roofline, total_seconds
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.layers.cost import Operator
from kvcalc.library.choices import DATASHEET
from kvcalc.library.presets import key
from kvcalc.model.forward_pass import forward
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records import Record
from kvcalc.storage.quantization import stored_format
from kvcalc.timing.calibration import (
    Calibration,
    all_stacks,
    find_calibration,
    gpu_named,
    stacks_of,
)
from kvcalc.timing.kernel_models.families import FAMILIES
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    figures_of,
)
from kvcalc.timing.kernel_models.mla import MlaModule
from kvcalc.timing.kernel_times import mla_kernels_us
from kvcalc.timing.rows import (
    SERVING,
    Broken,
    MeasuredRow,
    MeasurementFile,
    ServedTimes,
    cost_of,
    header_of,
    read_blocks,
    read_rows,
    served_model,
)
from kvcalc.timing.steps import kernel_seconds

_NAMES = {"fp8_block": "fp8_block128"}
_UNKNOWN = float("nan"), float("nan")


class _RequestedLayer(NamedTuple):
    """The operators of all layers of a row's kind, and the number of these layers."""

    operators: list[Operator]
    layers: int
    decodes: bool


def layer_us(
    row: MeasuredRow, gpu: Gpu, calibration: Calibration | None
) -> tuple[float, float]:
    """Return the bound and the prediction of a layer in microseconds; NaN if there is none."""
    model = served_model(row.model)
    if model is None:
        return _UNKNOWN
    try:
        layer = _requested_layer(row, model)
        bound_s = float(total_seconds(roofline(layer.operators, gpu, layer.decodes)))
        predicted_s = math.nan
        if calibration:
            predicted_s = float(kernel_seconds(layer.operators, gpu, calibration))
    except UserError:
        return _UNKNOWN
    return 1e6 * bound_s / layer.layers, 1e6 * predicted_s / layer.layers


def _requested_layer(row: MeasuredRow, model: Model) -> _RequestedLayer:
    batch, query, length, tp, ep = (int(x) for x in row.shape)
    ranks = Parallelism(tp=max(1, tp), ep=max(1, ep))
    passed = forward(
        model, Batch.prefill(query, batch, length - query), _stored(row, model), ranks
    )
    operators = [operator for operator in passed if operator.layer == row.kernel]
    return _RequestedLayer(operators, model.counts[row.kernel], query == 1)


def _stored(row: MeasuredRow, model: Model) -> Precision:
    """Return the formats of a row: as published if its dtype names that, else all matrices in
    it."""
    name, cache = _NAMES.get(row.dtype, row.dtype), row.cache or "auto"
    if name in {scheme.format for scheme in model.quantization}:
        return Precision(kv_cache_dtype=cache)
    if name == "bfloat16":
        return Precision("bf16", cache)
    return Precision(kv_cache_dtype=cache, quantization=name)


INFERENCEX = "inferencex"
# formats of 4-bit weights and activations, by a run's label
FP4 = {"fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}


def bound_us(row: MeasuredRow, gpu: Gpu) -> float:
    """Return the bound of the microseconds per output token of a server; NaN for an unknown model
    or unsuitable ranks."""
    model = served_model(row.model) if row.model else None
    if model is None:
        return float("nan")
    isl, osl, batch = (int(x) for x in row.shape[:3])
    precision, ranks = precision_of(row, model), ranks_of(row)
    try:
        decode = forward(model, Batch.decode(isl + max(1, osl // 2), batch), precision, ranks)
        prefill = forward(model, Batch.prefill(isl), precision, ranks)
        decodes, prompts = (
            float(total_seconds(roofline(operators, gpu))) for operators in (decode, prefill)
        )
        return 1e6 * (decodes + batch / osl * prompts)
    except UserError:
        return float("nan")


def precision_of(row: MeasuredRow, model: Model) -> Precision:
    """Return the formats of a run.

    A checkpoint that is published quantised runs as published, others in the row's format. A run in
    fp4 of a model that is published in a wider format (DeepSeek-R1 in fp8) is of an NVFP4
    checkpoint. fp8 mixtures and Qwen's fp8 checkpoints are published in blocks of 128 × 128.
    """
    cache = _cache(row)
    four_bits = any(stored_format(scheme.format).bits == 4 for scheme in model.quantization)
    if row.dtype in FP4 and not four_bits:
        return Precision(quantization=FP4[row.dtype], kv_cache_dtype=cache)
    if model.quantization or not row.dtype.startswith("fp8"):
        return Precision(kv_cache_dtype=cache)
    own = row.framework == "trtllm" and key(row.model.rsplit("/", 1)[-1]).startswith("qwen3")
    blocks = row.op == "e2e_moe" or row.dtype == "fp8_block" or own
    return Precision(quantization="fp8_block128" if blocks else "fp8", kv_cache_dtype=cache)


def _cache(row: MeasuredRow) -> str:
    """Return the cache's dtype. The queues of InferenceX's Llama-70B with vLLM on H100 show that
    its cache had 16 bits."""
    name = key(row.model.rsplit("/", 1)[-1])
    if row.client == INFERENCEX:
        if (
            row.framework == "vllm"
            and name.startswith("llama3170b")
            and "h100" in row.gpu.lower()
        ):
            return "auto"
        if not row.cache and (
            name.startswith("qwen35")
            or (row.framework == "trtllm" and name.startswith("deepseek"))
        ):
            return "fp8"
    return "fp8" if row.cache.startswith("fp8") else "auto"


def ranks_of(row: MeasuredRow) -> Parallelism:
    """Return the ranks of a run."""
    tp, *ep = (int(x) for x in row.shape[3:])
    return Parallelism(tp=tp, ep=max(1, *ep) if ep else 1)


Served = Callable[[Sequence[MeasuredRow], Gpu, Calibration | None], list[ServedTimes]]
Cell = tuple[str, str, str, str]  # GPU, framework, operation and kind of data


class Validation(NamedTuple):
    """Rows with their bounds and predictions in microseconds, NaN if there is none.

    Attributes:
        gpus: Preset of each row's GPU; '' if unknown.
        unknown: Lines of rows with an unknown GPU, by (GPU, framework, operation, kind).
        served: All figures of each simulated server, by the index of its row.
    """

    table: MeasurementFile
    bound: Array
    calibrated: Array
    gpus: list[str]
    unknown: dict[Cell, list[int]]
    served: dict[int, ServedTimes]


def validate(
    paths: Sequence[Path],
    stack: str = "",
    source: Gpu | None = None,
    served: Served | None = None,
) -> list[Validation]:
    """Return each file with bounds and predictions.

    Args:
        stack: Calibration to use instead of each row's framework.
        source: GPU whose calibration all GPUs use.
        served: Simulates servers; without it, their rows have only bounds.

    Raises:
        UserError: A file is not a file of measured rows.
    """
    _check(paths, stack, source)
    return [_validated(read_rows(path), stack, source, served) for path in paths]


def validated_blocks(
    paths: Sequence[Path],
    stack: str = "",
    source: Gpu | None = None,
    served: Served | None = None,
) -> Iterator[Validation]:
    """Yield the same for files of any length, in blocks of rows."""
    _check(paths, stack, source)
    for path in paths:
        for table in read_blocks(path):
            yield _validated(table, stack, source, served)


def _check(paths: Sequence[Path], stack: str, source: Gpu | None) -> None:
    if not paths:
        raise UserError("no file of measured rows is given")
    if stack and stack not in (known := [*all_stacks(), DATASHEET]):
        raise UserError(
            f"no GPU has a calibration for stack {stack!r}", hint=nearest(stack, known)
        )
    if source and not stacks_of(source):
        raise UserError(
            f"{source.name} has no calibration to take",
            hint="`kvcalc calibrate` makes one from measured rows",
        )


def _validated(
    table: MeasurementFile, stack: str, source: Gpu | None, served: Served | None
) -> Validation:
    import numpy as np

    count, times = len(table.rows), dict[int, ServedTimes]()
    bound, calibrated = np.full(count, np.nan), np.full(count, np.nan)
    cells: dict[Cell, list[int]] = {}
    for i, row in enumerate(table.rows):
        cells.setdefault((row.gpu, stack or row.framework, row.op, kind_of(row)), []).append(i)
    names: dict[str, Gpu | None] = {gpu: _gpu(gpu) for gpu in {row.gpu for row in table.rows}}
    unknown: dict[Cell, list[int]] = {}
    for cell, members in cells.items():
        name, framework, op, kind = cell
        gpu = names[name]
        if gpu is None:
            unknown[cell] = [table.lines[table.rows[i].at] for i in members]
            continue
        calibration = (
            None if framework == DATASHEET else find_calibration(source or gpu, framework)
        )
        if op in SERVING:
            bound[members] = [bound_us(table.rows[i], gpu) for i in members]
            if served and calibration:
                times |= zip(
                    members,
                    served([table.rows[i] for i in members], gpu, calibration),
                    strict=True,
                )
                calibrated[members] = [times[i].tpot_us for i in members]
            continue
        if op == "layer":
            for i in members:
                bound[i], calibrated[i] = layer_us(table.rows[i], gpu, calibration)
            continue
        rows = [table.rows[i] for i in members]
        bound[members], calibrated[members] = _predict(rows, gpu, calibration, op, kind)
    known = {name: gpu.name if gpu else "" for name, gpu in names.items()}
    return Validation(
        table, bound, calibrated, [known[row.gpu] for row in table.rows], unknown, times
    )


def _predict(
    rows: list[MeasuredRow],
    gpu: Gpu,
    calibration: Calibration | None,
    op: str,
    kind: str,
) -> tuple[Array, Array]:
    """Return the bounds and the predictions of kernels in microseconds; NaN if there is none."""
    import numpy as np

    bound: Array = math.nan
    shape = tuple(np.array(column) for column in zip(*(row.shape for row in rows), strict=True))
    least = cost_of(op, kind, shape)
    with suppress(UserError):  # a GPU without a peak for these products has no bound
        if least is not None:
            bound = least_time(*least, gpu).seconds * 1e6
    law = calibration.law(op, kind) if calibration else None
    figures = _gpu_parameters(gpu) if law is not None else None
    if calibration is None or law is None or figures is None:
        return bound, math.nan
    if isinstance(law, MlaModule):
        kernels = mla_kernels_us(kind, shape, figures, calibration)
        if kernels is None:
            return bound, math.nan
        shape = (*shape, kernels)
    # The cache may be in the L2, as in the measurement: such a time may be below the bound.
    return bound, _of_distinct(law, figures, shape)


def _of_distinct(law: KernelModel, figures: GpuParameters, shape: tuple[Array, ...]) -> Array:
    """Return the microseconds of a kernel model; equal shapes are computed once."""
    import numpy as np

    distinct, index = np.unique(np.stack(shape, axis=1), axis=0, return_inverse=True)
    return law.us(figures, *distinct.T)[index.reshape(-1)]


def kind_of(row: MeasuredRow) -> str:
    """Return the kind of data that selects the kernel model and cost of a row."""
    family = FAMILIES.get(row.op)
    return family.kind(row.dtype, row.kernel) if family else row.dtype


def _gpu_parameters(gpu: Gpu) -> GpuParameters | None:
    try:
        return figures_of(gpu)
    except UserError:
        return None


def _gpu(name: str) -> Gpu | None:
    try:
        return gpu_named(name) if name else None
    except UserError:
        return None


KEYS = ("op", "gpu", "framework", "dtype", "model", "client")
DEFAULT_KEYS = KEYS[:4]
NAMED = 5  # lines in a remark
OURS = ("roofline_us", "calibrated_us")
# beside them, where a file holds rows of servers
OF_SERVERS = ("calibrated_ttft_us", "calibrated_tokens_per_s")


class _Remarks(NamedTuple):
    """Remarks on one file: the first invalid rows, the lines of unknown GPUs, and counts of
    both."""

    broken: list[Broken]
    unknown: dict[Cell, list[int]]
    counts: dict[Any, int]


class ErrorTally:
    """Errors of rows by group. Raises UserError for an unknown key."""

    def __init__(self, by: Sequence[str] = DEFAULT_KEYS) -> None:
        unknown = [key for key in by if key not in KEYS]
        if unknown:
            raise UserError(f"cannot group by {unknown[0]!r}", hint=f"Known: {', '.join(KEYS)}")
        self._by = tuple(by)
        # measured, bound, calibrated
        self._groups: dict[tuple[str, ...], tuple[array[float], ...]] = {}
        # of servers: microseconds to the first token and tokens per second, each measured and
        # simulated
        self._servers: dict[tuple[str, ...], tuple[array[float], ...]] = {}
        self._files: dict[str, _Remarks] = {}

    def adding(self, validations: Iterable[Validation]) -> Iterator[Validation]:
        """Yield the same validations and count each one."""
        for validation in validations:
            self._add(validation)
            yield validation

    def _add(self, v: Validation) -> None:
        rows = zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist(), strict=True)
        for index, (row, gpu, bound, predicted) in enumerate(rows):
            values = {name: getattr(row, name) for name in KEYS} | {"gpu": gpu or row.gpu}
            key = tuple(values[name] for name in self._by)
            _append(self._groups, key, (row.time_us, bound, predicted))
            if row.op in SERVING:
                times = v.served.get(index, ServedTimes())
                figures = (
                    row.ttft_us,
                    times.ttft_us,
                    row.tokens_per_s,
                    times.tokens_per_s,
                )
                _append(self._servers, key, figures)
        remarks = self._files.setdefault(
            v.table.path, _Remarks([], {}, {"rows": 0, "broken": 0})
        )
        remarks.counts["rows"] += len(v.table.rows)
        remarks.counts["broken"] += len(v.table.broken)
        remarks.broken.extend(v.table.broken[: NAMED - len(remarks.broken)])
        for cell, lines in v.unknown.items():
            remarks.counts[cell] = remarks.counts.get(cell, 0) + len(lines)
            first = remarks.unknown.setdefault(cell, [])
            first.extend(lines[: NAMED - len(first)])

    @property
    def empty(self) -> list[str]:
        """The files without a valid row."""
        return [path for path, remarks in self._files.items() if not remarks.counts["rows"]]

    @property
    def remarks(self) -> list[str]:
        """Sentences on the invalid rows and unknown GPUs of each file, with the first lines."""
        sentences = []
        for path, remarks in self._files.items():
            if count := remarks.counts["broken"]:
                first = "; ".join(f"line {row.line}: {row.why}" for row in remarks.broken)
                more = f"; and {count - NAMED:,} more" if count > NAMED else ""
                rows = "row" if count == 1 else "rows"
                sentences.append(f"{path}: {count:,} {rows} cannot be read ({first}{more})")
            for cell, lines in remarks.unknown.items():
                name, _, op, _ = cell
                first = ", ".join(map(str, lines))
                about = f"{remarks.counts[cell]:,} rows of {op} (lines {first} …)"
                sentences.append(f"{path}: unknown GPU {printable(name, 60)!r}: {about}")
        return sentences

    def records(self) -> list[Record]:
        """Return the errors of each group, in order of the groups' names."""
        import numpy as np

        records = []
        for names, columns in sorted(self._groups.items()):
            measured, bound, predicted = map(np.frombuffer, columns)
            is_calibrated = bool(np.isfinite(predicted).any())
            servers = self._servers.get(names, (array("d"),) * 4)
            ttft, predicted_ttft, rate, predicted_rate = map(np.frombuffer, servers)
            record: Record = dict(zip(self._by, names, strict=True))
            record["rows"] = len(measured)
            record |= _figures(measured, predicted if is_calibrated else bound)
            record["basis"] = "calibrated" if is_calibrated else "roofline"
            for name, real, ours in (
                ("roofline", measured, bound),
                ("ttft", ttft, predicted_ttft),
                ("throughput", rate, predicted_rate),
            ):
                errors = _figures(real, ours)
                for figure in ("median_abs_error", "p90_abs_error"):
                    record[f"{name}_{figure}"] = errors[figure]
            records.append(record)
        return records


def _append(
    groups: dict[tuple[str, ...], tuple["array[float]", ...]],
    key: tuple[str, ...],
    values: tuple[float, ...],
) -> None:
    """Append a value to each column of a group."""
    columns = groups.setdefault(key, tuple(array("d") for _ in values))
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _figures(measured: Array, predicted: Array) -> Record:
    import numpy as np

    known = np.isfinite(predicted) & (predicted > 0) & np.isfinite(measured)
    if not known.any():
        return {
            "predicted_rows": 0,
            "median_abs_error": None,
            "p90_abs_error": None,
            "median_ratio": None,
        }
    ratio = predicted[known] / measured[known]
    error = np.exp(np.abs(np.log(ratio))) - 1
    return {
        "predicted_rows": int(known.sum()),
        "median_abs_error": float(np.median(error)),
        "p90_abs_error": float(np.quantile(error, 0.9)),
        "median_ratio": float(np.median(ratio)),
    }


def predictions_csv(paths: Sequence[Path], validations: Iterable[Validation]) -> Iterator[str]:
    """Yield the files' rows as CSV with the columns op, roofline_us and calibrated_us, empty if
    unknown.

    If a file has rows of servers, mean time to first token and tokens/s follow.
    """
    known = dict.fromkeys(name for path in paths for name in header_of(path))
    ours = (*OURS, *(OF_SERVERS if "silicon_tpot_ms" in known else ()))
    names = [name for name in known if name not in ours]
    header = ([] if "op" in names else ["op"]) + names
    yield _lines([[*header, *ours]])
    for v in validations:
        yield _lines(_repeated(v, v.table, header, len(ours)))


def _repeated(
    v: Validation, table: MeasurementFile, header: list[str], width: int
) -> Iterator[list[str]]:
    place = {name: i for i, name in reversed(list(enumerate(table.header)))}
    order = [place.get(name, -1) for name in header]
    figures = zip(v.bound.tolist(), v.calibrated.tolist(), strict=True)
    results = {
        row.at: (row.op, *both, *v.served.get(i, ServedTimes())[1:])
        for i, (row, both) in enumerate(zip(table.rows, figures, strict=True))
    }
    stem = Path(table.path).stem if "op" not in place else ""
    for at, cells in enumerate(table.cells):
        op, *values = results.get(at, (stem, *(float("nan"),) * 4))
        line = [cells[i] if 0 <= i < len(cells) else "" for i in order]
        if "op" not in place:
            line[header.index("op")] = op
        yield [*line, *map(_written, values[:width])]


def _lines(rows: Iterable[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _written(value: float) -> str:
    return f"{value:.6g}" if 0 < value < float("inf") else ""
