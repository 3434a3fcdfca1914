"""The bound of a served model's time per output token, out of whole steps.

    TPOT ≥ decode step(batch, input + output/2) + batch/output · prefill(input)

While a sequence decodes, a new prompt is taken in for each one that ends, so each step pays batch/output of a prefill.
"""

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.catalog import key
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.quantization import stored_format
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.served import served_model

INFERENCEX = "inferencex"
FP4 = {"fp4": "nvfp4", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}  # formats of 4-bit weights and activations, by a run's label


def bound_us(row: MeasuredRow, gpu: Gpu) -> float:
    """µs per output token of a serving row at the least; NaN where the model is unknown or the ranks do not divide it."""
    model = served_model(row.model) if row.model else None
    if model is None:
        return float("nan")
    isl, osl, batch = (int(x) for x in row.shape[:3])
    precision, ranks = precision_of(row, model), ranks_of(row)
    try:
        decode = forward(model, Batch.decode(isl + max(1, osl // 2), batch), precision, ranks)
        prefill = forward(model, Batch.prefill(isl), precision, ranks)
        decodes, prompts = (float(total_seconds(roofline(operators, gpu))) for operators in (decode, prefill))
        return 1e6 * (decodes + batch / osl * prompts)
    except UserError:
        return float("nan")


def precision_of(row: MeasuredRow, model: Model) -> Precision:
    """Return the formats of a run. A checkpoint that is published quantised runs as published; others as the row says.

    A run in fp4 of a model that is published in wider formats (DeepSeek-R1 in fp8) is of a checkpoint in NVFP4. fp8 mixtures,
    and Qwen's own fp8 checkpoints, are published in blocks of 128 × 128, whatever a run's label calls them.
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
    """The cache's dtype. Of Llama-70B under vLLM on H100 the queues tell that it was 16 bits wide, whatever is said."""
    name = key(row.model.rsplit("/", 1)[-1])
    if row.client == INFERENCEX:
        if row.framework == "vllm" and name.startswith("llama3170b") and "h100" in row.gpu.lower():
            return "auto"
        if not row.cache and (name.startswith("qwen35") or (row.framework == "trtllm" and name.startswith("deepseek"))):
            return "fp8"
    return "fp8" if row.cache.startswith("fp8") else "auto"


def ranks_of(row: MeasuredRow) -> Parallelism:
    """The ranks of a run."""
    tp, *ep = (int(x) for x in row.shape[3:])
    return Parallelism(tp=tp, ep=max(1, *ep) if ep else 1)
