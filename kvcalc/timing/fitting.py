"""Fit calibrations to measured rows: one kernel model per family and kind of data.

Errors are measured on held-out rows. A hash of the shape divides the rows into FOLDS folds, and
each of FOLDS fits leaves out one fold. So each row is predicted by a fit without this row. The
final kernel model is fitted on all rows.

A calibration is fitted on rows of one GPU and one stack.
"""

import datetime
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvcalc.arithmetic import grouped
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Record, Settings
from kvcalc.timing.calibration import Calibration, KernelModelEntry, RefusedFit, find_gpu
from kvcalc.timing.kernel_models.families import FAMILIES, kind_of
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    Arrays,
    GpuParameters,
    KernelModel,
    figures_of,
)
from kvcalc.timing.kernel_times import mla_kernels_us
from kvcalc.timing.rows import SERVING, MeasuredRow, MeasurementFile, columns_of

STARTS, STEPS = 5, 40
# As PRIOR_DEVIATION, for a kernel model that should resemble another.
SIMILAR_MODEL_DEVIATION = 0.5
STEP = 1e-3  # step of a parameter's logarithm: wider than the steps of full waves
# One for each parameter of a kernel model, at most ten.
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


Notify = Callable[[str], None]  # shows a sentence to the user


class ModelFit(NamedTuple):
    """A time model of a kernel, fitted to measured rows, and the remaining loss.

    Attributes:
        kernel_model: The time model with its fitted parameters.
        loss: Value of the loss function at these parameters; smaller is better. `FitObjective`
            defines it.
    """

    kernel_model: KernelModel
    loss: float


def fit(
    model_class: type[KernelModel],
    machine: GpuParameters,
    shape: Arrays,
    measured: Array,
    weight: Array | None = None,
    starts: int = STARTS,
    similar_model: KernelModel | None = None,
    **fixed: Any,
) -> ModelFit:
    """Return the time model of a kernel that predicts measured times best.

    All forms in the class's `CHOICES` are fitted. The one with the least loss is returned.

    Args:
        model_class: Class of the time model to fit, such as `Gemm`.
        machine: Datasheet rates of the measured GPU.
        shape: Sizes of the measured calls, in the order in which the method `us` of the class takes
            them, such as m, n and k. Each is an array [rows].
        measured: Measured microseconds [rows].
        weight: Weight of each row in the loss [rows]; None for equal weights.
        starts: Number of points from which the search for the best parameters starts.
        similar_model: A fitted time model of a similar kernel, if there are few rows. Its form is
            used, and the fit stays near its parameters.
        fixed: Fields that are not fitted, with their values, such as the bytes of an element.
    """
    weights = np.ones_like(measured) if weight is None else weight
    target = np.log(measured)
    ranges = model_class.ranges()
    low = np.log([r.minimum for r in ranges.values()])
    high = np.log([r.maximum for r in ranges.values()])
    typical = np.log([getattr(similar_model, name, r.typical) for name, r in ranges.items()])

    def fit_form(form: Settings) -> ModelFit:
        def residual(points: Array) -> Array:
            # [parameters, points, 1] broadcasts to [points, rows] in the kernel model.
            values = np.exp(points).T[..., None]
            us = model_class(**form, **dict(zip(ranges, values))).us(machine, *shape)
            return np.log(np.maximum(us, 1e-9)) - target

        deviation = SIMILAR_MODEL_DEVIATION if similar_model else model_class.PRIOR_DEVIATION
        objective = FitObjective(residual, weights, model_class.SOFTNESS, typical, deviation)
        minima = [
            (*_descend(objective, start, low, high), start)
            for start in start_points(typical, low, high, starts)
        ]
        point, loss, start = min(minima, key=lambda minimum: minimum[1])
        values = np.exp(np.clip(_reset_unused(objective, point, start), low, high)).tolist()
        return ModelFit(
            round_parameters(model_class(**form, **dict(zip(ranges, values)))),
            loss,
        )

    forms = _forms(similar_model or model_class, fixed)
    return min(map(fit_form, forms), key=lambda fitted: fitted.loss)


def _forms(form_of: KernelModel | type[KernelModel], fixed: Settings) -> list[Settings]:
    """Return the fields that select a form of a kernel model.

    Args:
        form_of: A kernel model, which has one form, or a class, which may have several.
        fixed: Fields with a fixed value.
    """
    choices = form_of.CHOICES
    if isinstance(form_of, KernelModel):
        names = form_of.__struct_fields__
        ranges = form_of.ranges()
        choices = ({name: getattr(form_of, name) for name in names if name not in ranges},)
    return [*{repr(choice | fixed): choice | fixed for choice in choices}.values()]


class FitObjective(NamedTuple):
    """The loss function that the fit of a kernel's time model minimises.

    A point is an array with the natural logarithms of all fitted parameters. A residual is
    ln(predicted/measured) of one measured row.

    Attributes:
        residual: Function from points [points, parameters] to residuals [points, rows].
        weight: Weight of each row [rows].
        softness: Residual at which the loss changes from quadratic to linear, so that outliers
            count less.
        typical: Point at which all parameters have their typical value.
        prior_deviation: Scale, in natural logarithms, of the penalty for a parameter's distance
            from `typical`; 0 for no penalty.
    """

    residual: Callable[[Array], Array]
    weight: Array
    softness: float
    typical: Array
    prior_deviation: float

    def loss(self, point: Array, residual: Array) -> float:
        """Return the weighted mean loss of the rows, plus a penalty for untypical parameters.

        The loss of a row is quadratic in its residual r for small r and linear for large r: √(1 +
        (r/softness)²) − 1.

        Args:
            point: Logarithms of all fitted parameters [parameters].
            residual: ln(predicted/measured) of each row at this point [rows].
        """
        total = float((self.weight * (np.sqrt(1 + (residual / self.softness) ** 2) - 1)).sum())
        if self.prior_deviation:
            total += float((((point - self.typical) / self.prior_deviation) ** 2).sum()) / 2
        return total / float(self.weight.sum())


def round_parameters(kernel_model: KernelModel) -> KernelModel:
    """Return a time model of a kernel with fitted parameters rounded to four significant digits.

    A rounded parameter stays within the minimum and maximum of its range in `KernelModel.RANGES`.

    Args:
        kernel_model: The fitted time model.
    """
    values = {}
    for name, r in kernel_model.ranges().items():
        values[name] = min(
            r.maximum, max(r.minimum, float(f"{getattr(kernel_model, name):.4g}"))
        )
    return replace(kernel_model, **values)


def start_points(typical: Array, low: Array, high: Array, count: int) -> list[Array]:
    """Return the points from which a fit starts: the typical point, and points around it.

    A point is an array with the natural logarithms of all fitted parameters. The points around the
    typical one are from a Halton sequence, which fills the space evenly. So equal arguments give
    equal points.

    Args:
        typical: Logarithms of the parameters' typical values [parameters].
        low: Logarithms of the parameters' minimum values [parameters].
        high: Logarithms of the parameters' maximum values [parameters].
        count: Number of points.
    """
    points = [typical]
    for index in range(1, count):
        step = np.array([_halton(index, prime) for prime in PRIMES[: len(typical)]]) - 0.5
        points.append(np.clip(typical + step * np.minimum(high - low, 2.5), low, high))
    return points


def _halton(index: int, base: int) -> float:
    value = 0.0
    scale = 1.0
    while index:
        scale /= base
        value += scale * (index % base)
        index //= base
    return value


def _descend(
    objective: FitObjective, start: Array, low: Array, high: Array
) -> tuple[Array, float]:
    """Return the nearest minimum to a starting point, and the loss there."""
    point = start
    damping = 1e-2
    residual = objective.residual(point[None])[0]
    loss = objective.loss(point, residual)
    prior_weight = 0.0
    if objective.prior_deviation:
        prior_weight = (objective.softness / objective.prior_deviation) ** 2
    for _ in range(STEPS):
        slopes = ((objective.residual(point + np.eye(len(point)) * STEP) - residual) / STEP).T
        row_weight = objective.weight / np.sqrt(1 + (residual / objective.softness) ** 2)
        square = slopes.T @ (row_weight[:, None] * slopes) + prior_weight * np.eye(len(point))
        gradient = slopes.T @ (row_weight * residual) + prior_weight * (
            point - objective.typical
        )
        for _ in range(8):
            damped = square + damping * np.diag(np.diag(square) + 1e-6)
            move = np.clip(-np.linalg.solve(damped, gradient), -1, 1)
            trial = np.clip(point + move, low, high)
            trial_residual = objective.residual(trial[None])[0]
            trial_loss = objective.loss(trial, trial_residual)
            if trial_loss < loss:
                break
            damping *= 4
        else:
            return point, loss
        gain = loss - trial_loss
        point = trial
        residual = trial_residual
        loss = trial_loss
        damping = max(damping / 5, 1e-6)
        if gain < 1e-6 * (1 + loss):
            return point, loss
    return point, loss


def _reset_unused(objective: FitObjective, point: Array, start: Array) -> Array:
    """Return the point with the typical value for each parameter that affects no row."""
    residual = objective.residual(point[None])
    for index in np.flatnonzero(point == start):
        trial = point.copy()
        trial[index] = objective.typical[index]
        if np.array_equal(objective.residual(trial[None]), residual):
            point = trial
    return point


FOLDS, FOLD_STARTS = 4, 2
# Minimum rows for a fit, for a kernel model with a penalty for untypical parameters, and for a
# stack's second kernel.
MIN_ROWS, MIN_PRIOR_ROWS, MIN_SECOND_ROWS = 12, 8, 5
MIN_OWN_FIT_ROWS = (
    20  # rows of a second kernel from which on it is fitted without the usual kernel
)
# Held-out p90 error above which a bound is better than a kernel model, and the minimum weight of
# the rows that count.
MAX_ERROR, MIN_WEIGHT = 1.0, 0.5
# Rows that are not the speed of their kernel, by (GPU, stack, family), with the reason.
UNTRUSTED = {
    ("a100-80gb", "trtllm", "decode_attention"): (
        "rows of TensorRT-LLM 1.0.0 read caches far beyond the L2 at up to 170 % of the memory's "
        "bandwidth"
    )
}
# Kernels of latent attention that vLLM 0.24 shares with other stacks: stack/kernel/cache of
# their rows. On Hopper FlashAttention-3 and FlashMLA, on Blackwell TensorRT-LLM's kernels in
# FlashInfer.
SHARED_LATENT_KERNELS = {
    "Hopper": "sglang/flash_attention/bfloat16 trtllm/default/fp8",
    "Blackwell": "sglang/trtllm_mla/bfloat16 sglang/trtllm_mla/fp8",
}
ERROR_FIELDS = [name for name in KernelModelEntry.__struct_fields__ if name.endswith("_error")]


class FittedKernelModel(NamedTuple):
    """The fit of one kernel family, such as `gemm`, to measurements of one kind of data.

    A kind of data names the data types of the operands, such as `bfloat16`.

    Attributes:
        family: Kernel family.
        kind: Kind of data.
        members: The measured rows.
        measured: Measured microseconds [rows].
        predicted: Microseconds of each row [rows], predicted by a fit without this row; NaN without
            a fit.
        entry: The fitted time model with its errors. None if there are too few rows or no time
            model for this kind, or if the fit is not used because of its errors.
        refused: Errors of the fitted time model if it is not used; otherwise None.
        why: Reason why `entry` is None; '' otherwise.
    """

    family: str
    kind: str
    members: Sequence[MeasuredRow]
    measured: Array
    predicted: Array
    entry: KernelModelEntry | None = None
    refused: RefusedFit | None = None
    why: str = ""

    @property
    def rows(self) -> int:
        """Return the number of measured rows of this kernel family and kind of data."""
        return len(self.members)


def calibrate(
    rows: Sequence[MeasuredRow],
    gpu: Gpu,
    stack: str,
    progress: Notify = lambda text: None,
) -> list[FittedKernelModel]:
    """Fit a time model to each kernel family and each kind of data in measured rows.

    A kind of data names the data types of the operands. Rows of servers and of whole layers are not
    fitted, nor rows that are marked as artefacts.

    Args:
        rows: Measured rows of one GPU and one stack.
        gpu: The measured GPU.
        stack: Name of the measured engine or kernel library, such as `vllm`.
        progress: Function that receives a sentence before each fit.

    Returns:
        One fit for each kernel family and kind of data, used or refused.

    Raises:
        UserError: The GPU preset lacks a rate or size that time models need.
    """
    parameters = figures_of(gpu)
    cells = grouped(
        ((row.op, kind_of(row.op, row.dtype, row.kernel)), row)
        for row in rows
        if row.op not in (*SERVING, "layer") and not row.is_excluded
    )
    fits: dict[tuple[str, str], FittedKernelModel] = {}
    for (op, kind), members in sorted(cells.items()):
        progress(f"{op} {kind}: {len(members)} rows")
        measured = np.array([row.time_us for row in members])
        result = FittedKernelModel(op, kind, members, measured, measured * np.nan)
        if op == "mla_decode_module":  # the families of its kernels come before it
            fields = _calibration_fields(fits.values())
            calibration = Calibration(gpu=gpu.name, stack=stack, **fields)
            kernels = mla_kernels_us(kind, columns_of(members), parameters, calibration)
            if kernels is None:
                fits[op, kind] = result._replace(why="no law of its kernels")
                continue
            timed = zip(members, kernels.tolist())
            members = [row._replace(shape=(*row.shape, us)) for row, us in timed]
            result = result._replace(members=members)
        usual = fits.get((op, kind.rpartition("/")[0]))
        usual_model = usual.entry.law if usual and usual.entry else None
        fits[op, kind] = _fit(result, gpu, stack, usual_model)
    return list(fits.values())


def _calibration_fields(fits: Iterable[FittedKernelModel]) -> Record:
    """Return the fields `laws` and `refused` of a calibration: by family, then by kind."""
    laws: dict[str, dict[str, KernelModelEntry]] = {}
    refused: dict[str, dict[str, RefusedFit]] = {}
    for result in fits:
        if result.entry:
            laws.setdefault(result.family, {})[result.kind] = result.entry
        if result.refused:
            refused.setdefault(result.family, {})[result.kind] = result.refused
    return {"laws": laws, "refused": refused}


def _fit(
    result: FittedKernelModel, gpu: Gpu, stack: str, usual: KernelModel | None
) -> FittedKernelModel:
    """Return a result with the kernel model that is fitted to its rows.

    Args:
        result: The result so far, with the measured rows.
        usual: The stack's kernel model for the same data with its usual kernel, if the rows are
            from another kernel.
    """
    op, kind, rows, measured, *_ = result
    family = FAMILIES[op]
    candidates = family.candidates(kind, stack, gpu)
    if not candidates:
        return result._replace(why="no law for it")
    similar_model = usual if len(rows) < MIN_OWN_FIT_ROWS else None
    has_priors = all(model_class.PRIOR_DEVIATION for model_class, _ in candidates)
    min_rows = MIN_PRIOR_ROWS if has_priors else MIN_ROWS
    if similar_model:
        min_rows = MIN_SECOND_ROWS
        candidates = ((type(similar_model), candidates[0][1]),)
    if len(rows) < min_rows:
        return result._replace(why=f"fewer than {min_rows} rows")

    shape = columns_of(rows)
    weight = family.weight(*shape)
    parameters = figures_of(gpu)

    def best_fit(mask: Array, starts: int) -> KernelModel:
        """Return the best kernel model after fits of the rows at which a mask [rows] is true."""
        columns = tuple(column[mask] for column in shape)
        data = parameters, columns, measured[mask], weight[mask], starts, similar_model
        fits = [fit(model_class, *data, **fixed) for model_class, fixed in candidates]
        return min(fits, key=lambda fitted: fitted.loss).kernel_model

    texts = [f"{row.op}|{row.dtype}|{row.shape}".encode() for row in rows]
    folds = np.array([int(hashlib.sha256(text).hexdigest()[:8], 16) for text in texts]) % FOLDS
    predicted = np.empty(len(rows))  # each row by a fit without its fold
    for fold in range(FOLDS):
        mask = folds == fold
        if not mask.any() or mask.all():
            mask = np.arange(len(rows)) % FOLDS == fold
        kernel_model = best_fit(~mask, FOLD_STARTS)
        predicted[mask] = kernel_model.us(parameters, *(column[mask] for column in shape))
    result = result._replace(predicted=predicted)
    kernel_model = best_fit(measured > 0, STARTS)
    fitted = kernel_model.us(parameters, *shape)
    return _accept_or_refuse(result, kernel_model, fitted, weight, (gpu.name, stack))


def _accept_or_refuse(
    result: FittedKernelModel,
    kernel_model: KernelModel,
    fitted: Array,
    weight: Array,
    origin: tuple[str, str],
) -> FittedKernelModel:
    """Return the result with a kernel model, or refuse the model if its error is too large.

    Args:
        result: The result so far, with measured rows and held-out predictions.
        fitted: Predictions of the kernel model [rows].
        weight: Weight of each row.
        origin: GPU and stack.
    """
    op, _, rows, measured, held_out, *_ = result
    gpu, stack = origin
    # With fewer rows, held-out errors are not reliable.
    checked = held_out if len(rows) >= MIN_ROWS else fitted
    usual_rows = weight >= MIN_WEIGHT
    if not usual_rows.any():
        usual_rows = weight > 0
    _, usual_p90 = median_and_p90(checked[usual_rows], measured[usual_rows])
    reason = UNTRUSTED.get((gpu, stack, op), "")
    if usual_p90 > MAX_ERROR and not reason:
        reason = f"a tenth of its usual rows are missed by {usual_p90:.0%} or more"
    median, p90 = median_and_p90(held_out, measured)
    accuracy: Settings = {"rows": len(rows), "median_abs_error": median, "p90_abs_error": p90}
    if reason:
        return result._replace(why=reason, refused=RefusedFit(why=reason, **accuracy))
    fitted_median, fitted_p90 = median_and_p90(fitted, measured)
    entry = KernelModelEntry(
        law=kernel_model,
        fitted_median_abs_error=fitted_median,
        fitted_p90_abs_error=fitted_p90,
        **accuracy,
    )
    return result._replace(entry=entry)


def row_errors(predicted: Array, measured: Array) -> Array:
    """Return the relative error of each row, exp(|ln(predicted/measured)|) − 1: 0.05 is 5%.

    Args:
        predicted: Predicted times [rows].
        measured: Measured times [rows], in the same unit.
    """
    return np.exp(np.abs(np.log(predicted / measured))) - 1


def median_and_p90(predicted: Array, measured: Array) -> tuple[float, float]:
    """Return (median, 90th percentile) of the relative errors of the rows: 0.05 is 5%.

    The error of a row is exp(|ln(predicted/measured)|) − 1. Results have four decimals.

    Args:
        predicted: Predicted times [rows].
        measured: Measured times [rows], in the same unit.
    """
    error = row_errors(predicted, measured)
    return round(float(np.median(error)), 4), round(float(np.quantile(error, 0.9)), 4)


def make_calibration(
    fits: Sequence[FittedKernelModel],
    gpu: Gpu,
    stack: str,
    rows: Sequence[MeasuredRow],
    provenance: Settings,
) -> Calibration:
    """Return a calibration with the given fits of kernels' time models, ready to be saved.

    Its field `validation`, the errors against measured servers, is empty.

    Args:
        fits: Fits of all kernel families and kinds of data, as `calibrate` returns them. Refused
            fits are listed too.
        gpu: The measured GPU.
        stack: Name of the measured engine or kernel library, such as `vllm`.
        rows: All measured rows, from which the versions of the stack are taken.
        provenance: Origin, commit, license and date of the measurements, by the names of the fields
            of `Calibration`. Without a date, today is used.
    """
    versions = sorted({row.version for row in rows if row.op not in SERVING} - {""})
    date = provenance.get("date") or datetime.date.today().isoformat()
    return Calibration(
        gpu=gpu.name,
        stack=stack,
        version=", ".join(versions)[:200],
        rows=sum(result.rows for result in fits if result.entry),
        **provenance | {"date": date},
        **_calibration_fields(fits),
    )


def fit_records(fits: Sequence[FittedKernelModel]) -> list[Record]:
    """Return a JSON record for each fit of a kernel's time model, to print.

    The keys are family (such as `gemm`), kind (data types), form (variant of the time model), rows
    (number of measurements), errors (0.05 is 5%), parameters and why. If no time model was fitted
    or used, `why` states the reason and the errors are None.

    Args:
        fits: Fits of all kernel families and kinds of data, as `calibrate` returns them.
    """
    records: list[Record] = []
    for fitted in fits:
        entry = fitted.entry
        form = None
        parameters = {}
        if entry:
            form = str(entry.law.__struct_config__.tag)
            parameters = {name: getattr(entry.law, name) for name in entry.law.ranges()}
        records.append(
            {
                "family": fitted.family,
                "kind": fitted.kind,
                "form": form,
                "rows": fitted.rows,
                **{name: getattr(entry, name, None) for name in ERROR_FIELDS},
                "parameters": parameters,
                "why": fitted.why,
            }
        )
    return records


def select_rows(
    tables: Sequence[MeasurementFile], gpu: Gpu, stack: str, note: Notify
) -> list[MeasuredRow]:
    """Return the measured rows to which a calibration of a GPU and a stack can be fitted.

    A row counts if its GPU is `gpu` or empty, and its framework is `stack` or empty. Three kinds of
    other rows are added:

    - All-reduce rows of GPUs with an equal interconnect.
    - If vLLM has no rows of latent-attention decode, such rows of other stacks with the same
      kernels.
    - If the files contain rows of only one framework, its rows, even if it is not `stack`.

    Args:
        tables: The files of measured rows.
        gpu: The GPU to calibrate.
        stack: Name of the engine or kernel library, such as `vllm`, which rows name as framework.
        note: Function that receives a sentence about rows that are left out or added.

    Raises:
        UserError: The rows are of several frameworks but not of `stack`, or no row remains.
    """
    for table in tables:
        if table.invalid:
            note(table.remark)
    rows = _rows_of_gpu([row for table in tables for row in table.rows], gpu, note)
    frameworks = {row.framework for row in rows} - {""}
    if stack not in frameworks and len(frameworks) == 1:
        (stack,) = frameworks
    if frameworks and stack not in frameworks:
        text = f"the rows are of several frameworks, none of them {stack!r}"
        raise UserError(text, f"Name one of them: {', '.join(sorted(frameworks))}")
    own_rows = [row for row in rows if row.framework in ("", stack)]
    if not own_rows:
        paths = ", ".join(table.path for table in tables)
        raise UserError(f"no row of {gpu.name} can be used", where=paths)

    shared_rows = []
    if stack == "vllm" and not any(row.op == "mla_decode" for row in own_rows):
        kernels = SHARED_LATENT_KERNELS.get(gpu.architecture.partition(" ")[0], "").split()
        for row in rows:
            name = f"{row.framework}/{row.kernel}/{row.dtype}"
            if row.op == "mla_decode" and name in kernels:
                shared_rows.append(row._replace(version=""))
    if shared_rows:
        note(
            f"{len(shared_rows):,} rows of latent attention of "
            f"{', '.join(sorted({row.framework for row in shared_rows}))} count too: same kernels"
        )
    num_other = len(rows) - len(own_rows) - len(shared_rows)
    if num_other:
        note(f"{num_other:,} rows of other frameworks are left out")
    return [*own_rows, *shared_rows]


def _rows_of_gpu(rows: list[MeasuredRow], gpu: Gpu, note: Notify) -> list[MeasuredRow]:
    """Return the rows of a GPU, and all-reduces of GPUs with the same links."""
    own_names = {""}
    linked_names = set()
    links = gpu.link_bytes_per_s, gpu.link_domain
    names = {row.gpu for row in rows}
    for name in names:
        other = find_gpu(name)
        if other and other.name == gpu.name:
            own_names.add(name)
        elif other and links[0] and (other.link_bytes_per_s, other.link_domain) == links:
            linked_names.add(name)
    selected_rows = []
    for row in rows:
        is_linked = row.op == "allreduce" and row.gpu in linked_names
        if is_linked or row.gpu in own_names:
            selected_rows.append(row)
    if any(row.gpu in linked_names for row in selected_rows):
        note(
            f"all-reduces of {', '.join(sorted(linked_names))} count too: the links are the same"
        )
    if len(selected_rows) < len(rows):
        note(
            f"{len(rows) - len(selected_rows):,} rows of other GPUs are left out: "
            f"{', '.join(sorted(names - own_names))}"
        )
    return selected_rows
