"""The time per output token of a served model, out of whole steps: a bound and a calibrated figure for `validate`.

    TPOT = decode step(batch, input + output/2, caches cold) + STEP_US + INTERLEAVED · (batch − 1)/output · prefill(input)

While a sequence decodes, a new prompt is taken in for each other one that ends, so each step pays (batch − 1)/output of a
prefill. The bound has the decode step and batch/output prefills, nothing else.
"""

from functools import cache
from pathlib import Path

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.ranks import Parallelism
from kvcalc.library import catalog
from kvcalc.library.load import read
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.timing.calibration import find_calibration
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.steps import pass_seconds

NOTHING = float("nan")
# Fitted to the 153 measured serving runs that the accuracy page counts; they are the only figures fitted on servers.
STEP_US = 300.0  # what an engine spends on a step beside its kernels: scheduling, sampling, sending out tokens
INTERLEAVED = 0.92  # of the other sequences' prefills, what falls between a sequence's own tokens


@cache
def served_model(path: str) -> Model | None:
    """The preset whose huggingface_id a served model's path has, or begins with (an instruction-tuned or fp8 copy of it).

    The longest such name wins, and of names that differ by dots alone (OPT-1.3B, OPT-13B) the one with the path's dots.
    """
    name = path.rsplit("/", 1)[-1]
    wanted, exact = catalog.key(name), catalog.key(name, dots=True)
    best, rank = None, (0, False)
    for found in catalog.preset_files("models").values():
        model = _model_of(found)
        if model and model.huggingface_id:
            own = model.huggingface_id.rsplit("/", 1)[-1]
            known = len(catalog.key(own)), exact.startswith(catalog.key(own, dots=True))
            if wanted.startswith(catalog.key(own)) and known > rank:
                best, rank = model, known
    return best


def _model_of(path: Path) -> Model | None:
    try:
        return read(path, Model)
    except UserError:
        return None


def tpot_us(row: MeasuredRow, gpu: Gpu, stack: str, source: Gpu | None = None) -> tuple[float, float]:
    """(bound, calibrated) µs per output token of a serving row; NaN where the model is unknown or no calibration applies."""
    model = served_model(row.model) if row.model else None
    isl, osl, batch, tp = (int(x) for x in row.shape)
    if model is None:
        return NOTHING, NOTHING
    precision = Precision(quantization="fp8") if row.dtype.startswith("fp8") else Precision()
    ranks = Parallelism(tp=tp)
    try:
        decode = forward(model, Batch.decode(isl + max(1, osl // 2), batch), precision, ranks)
        prefill = forward(model, Batch.prefill(isl), precision, ranks)
        bound = 1e6 * (total_seconds(roofline(decode, gpu)) + batch / osl * total_seconds(roofline(prefill, gpu)))
        calibration = find_calibration(source or gpu, stack)
        if calibration is None:
            return bound, NOTHING
        others = INTERLEAVED * (batch - 1) / osl * pass_seconds(prefill, gpu, calibration)
        return bound, STEP_US + 1e6 * (pass_seconds(decode, gpu, calibration) + others)
    except UserError:
        return NOTHING, NOTHING
