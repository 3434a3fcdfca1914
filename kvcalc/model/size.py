"""The records of `size`: one model at one context and batch, every figure under its own key."""

from typing import Any

from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.model.memory import cache_size, eviction_score_bytes, mha_ratio, weight_bytes
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.model.reach import receptive_field
from kvcalc.model.spec import Model


def size_record(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> dict[str, Any]:
    """Cache and weights of one GPU as a flat record; integers are exact bytes. Raises UserError on an impossible request."""
    size = cache_size(model, context, batch_size, precision, block_size, parallelism)
    formats = formats_of(model, precision)
    return {
        "model": model.name,
        "attention": model.attention,
        "context": context,
        "batch_size": batch_size,
        "kv_cache_dtype": formats.kv_cache_dtype,
        "kv_cache_bytes": size.stored,
        "kv_cache_read_bytes": size.read,
        "kv_cache_allocated_bytes": size.allocated,
        "bytes_per_token": size.slope,
        "fixed_bytes": size.fixed,
        "eviction_score_bytes": eviction_score_bytes(model, context, batch_size, precision, parallelism),
        "receptive_field": receptive_field(model),
        "mha_ratio": mha_ratio(model, context, precision),
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "parameters_exact": model.parameters_exact,
        "mtp_parameters": model.mtp_parameters,
        "weight_bytes": weight_bytes(model, precision, parallelism, context, batch_size),
        "dtype": formats.weights_label,
        "block_size": block_size,
        "gpus": parallelism.gpus,
    }


def assumptions(model: Model, precision: Precision, block_size: int, parallelism: Parallelism) -> str:
    """One sentence of what a size was computed under."""
    formats = formats_of(model, precision)
    words = [f"weights {formats.weights_label}{formats.computed}", f"cache {formats.kv_cache_dtype}"]
    if formats.reason:
        words[-1] += f" ({formats.reason})"
    words.append(f"blocks of {block_size} tokens")
    if model.vocab_size % parallelism.tp:
        words.append(f"vocabulary padded from {model.vocab_size:,} to {parallelism.share(model.vocab_size) * parallelism.tp:,}")
    if parallelism.gpus > 1:
        ranks = " ".join(f"{n}={getattr(parallelism, n)}" for n in ("tp", "pp", "dp", "ep", "dcp") if getattr(parallelism, n) > 1)
        words.append(f"per GPU of {parallelism.gpus} ({ranks})")
    return ", ".join(words)
