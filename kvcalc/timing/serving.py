"""The bound of a served model's time per output token, out of whole steps.

    TPOT ≥ decode step(batch, input + output/2) + batch/output · prefill(input)

While a sequence decodes, a new prompt is taken in for each one that ends, so each step pays batch/output of a prefill.
"""

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.served import served_model


def bound_us(row: MeasuredRow, gpu: Gpu) -> float:
    """µs per output token of a serving row at the least; NaN where the model is unknown or the ranks do not divide it."""
    model = served_model(row.model) if row.model else None
    if model is None:
        return float("nan")
    isl, osl, batch, tp, *ep = (int(x) for x in row.shape)
    fp8 = row.dtype.startswith("fp8") and not model.quantization
    precision = Precision(quantization="fp8" if fp8 else "", kv_cache_dtype="fp8" if row.cache.startswith("fp8") else "auto")
    ranks = Parallelism(tp=tp, ep=max(1, *ep) if ep else 1)
    try:
        decode = forward(model, Batch.decode(isl + max(1, osl // 2), batch), precision, ranks)
        prefill = forward(model, Batch.prefill(isl), precision, ranks)
        decodes, prompts = (float(total_seconds(roofline(operators, gpu))) for operators in (decode, prefill))
        return 1e6 * (decodes + batch / osl * prompts)
    except UserError:
        return float("nan")
