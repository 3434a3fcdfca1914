"""The time per output token of a served model, out of whole steps: a bound and a calibrated figure for `validate`.

    TPOT = decode step(batch, input + output/2, caches cold) + STEP_US + INTERLEAVED · (batch − 1)/output · prefill(input)

While a sequence decodes, a new prompt is taken in for each other one that ends, so each step pays (batch − 1)/output of a
prefill. The bound has the decode step and batch/output prefills, nothing else.
"""

from collections.abc import Sequence
from typing import Any

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.memory import cache_size, weight_bytes
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.timing.calibration import Calibration, Validated
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.served import served_model
from kvcalc.timing.steps import pass_seconds

NOTHING = float("nan")
LEAST_RUNS = 8  # measured servers that make an error
# Fitted to the 153 measured serving runs that the accuracy page counts; they are the only figures fitted on servers.
STEP_US = 300.0  # what an engine spends on a step beside its kernels: scheduling, sampling, sending out tokens
INTERLEAVED = 0.92  # of the other sequences' prefills, what falls between a sequence's own tokens


def tpot_us(row: MeasuredRow, gpu: Gpu, calibration: Calibration | None) -> tuple[float, float]:
    """(bound, calibrated) µs per output token of a serving row; NaN where the model is unknown or there is no calibration."""
    model = served_model(row.model) if row.model else None
    isl, osl, batch = (int(x) for x in row.shape[:3])
    if model is None:
        return NOTHING, NOTHING
    try:
        precision, ranks = _precision(row, model), _ranks(row)
        decode = forward(model, Batch.decode(isl + max(1, osl // 2), batch), precision, ranks)
        prefill = forward(model, Batch.prefill(isl), precision, ranks)
        bound = 1e6 * (total_seconds(roofline(decode, gpu)) + batch / osl * total_seconds(roofline(prefill, gpu)))
        if calibration is None:
            return bound, NOTHING
        others = INTERLEAVED * (batch - 1) / osl * pass_seconds(prefill, gpu, calibration)
        return bound, STEP_US + 1e6 * (pass_seconds(decode, gpu, calibration) + others)
    except UserError:
        return NOTHING, NOTHING


def _ranks(row: MeasuredRow) -> Parallelism:
    tp, *ep = (int(x) for x in row.shape[3:])
    return Parallelism(tp=tp, ep=max(1, *ep) if ep else 1)


def _holds(row: MeasuredRow, gpu: Gpu) -> bool:
    """Whether weights and the caches of all clients at full length fit into the GPUs' memory."""
    model = served_model(row.model) if row.model else None
    if model is None:
        return False
    isl, osl, batch = (int(x) for x in row.shape[:3])
    try:
        precision, ranks = _precision(row, model), _ranks(row)
        cache = cache_size(model, isl + osl, batch, precision, parallelism=ranks).stored
        return weight_bytes(model, precision, ranks) + cache <= gpu.usable_bytes
    except UserError:
        return False


def _precision(row: MeasuredRow, model: Model) -> Precision:
    """As the run was quantised: a checkpoint that is published quantised runs as published, others in fp8 if the row says so.

    fp8 mixtures are published in blocks of 128 × 128, whatever a run's label calls them.
    """
    cache = "fp8" if row.cache.startswith("fp8") else "auto"
    if model.quantization or not row.dtype.startswith("fp8"):
        return Precision(kv_cache_dtype=cache)
    blocks = row.op == "e2e_moe" or row.dtype == "fp8_block"
    return Precision(quantization="fp8_block128" if blocks else "fp8", kv_cache_dtype=cache)


def steps_validated(calibration: Calibration, gpu: Gpu, rows: Sequence[MeasuredRow]) -> dict[Any, Validated]:
    """Errors of the time per output token of dense models and of mixtures, against measured servers.

    Runs that hit a prefix cache are left out, those with more clients than the GPUs hold sequences, and kinds of fewer than
    LEAST_RUNS runs.
    """
    import numpy as np

    found: dict[Any, Validated] = {}
    for op, kind in (("e2e_dense", "dense"), ("e2e_moe", "mixture")):
        runs = [row for row in rows if row.op == op and not row.odd and _holds(row, gpu)]
        pairs = [(tpot_us(row, gpu, calibration)[1], row.time_us) for row in runs]
        logs = [abs(float(np.log(predicted / measured))) for predicted, measured in pairs if predicted > 0]
        if len(logs) >= LEAST_RUNS:
            each = np.expm1(logs)
            median, p90 = (round(float(np.quantile(each, q)), 4) for q in (0.5, 0.9))
            found[kind] = Validated(rows=len(logs), median_abs_error=median, p90_abs_error=p90)
    return found
