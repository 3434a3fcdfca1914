"""The records of `size`: one model at one context and batch, every figure under its own key."""

from typing import Any

from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.model.memory import (
    LayerRows,
    cache_size,
    eviction_score_bytes,
    fullest_stage,
    mha_ratio,
    stage_rows,
    stored_bytes,
    weight_bytes,
)
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.model.reach import receptive_field
from kvcalc.model.spec import Model
from kvcalc.units import MOST_TOKENS


def size_record(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> dict[str, Any]:
    """Cache and weights of one GPU as a flat record; integers are exact bytes. Raises UserError on an impossible request.

    cache_share_of_weights: stored bytes of all sequences over weight_bytes. equal_weights_context: the least context at which
    that is 1; null where the cache stops growing before.
    """
    size = cache_size(model, context, batch_size, precision, block_size, parallelism)
    formats = formats_of(model, precision)
    held = weight_bytes(model, precision, parallelism, context, batch_size)
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
        "weight_bytes": held,
        "cache_share_of_weights": size.stored / held,
        "equal_weights_context": equal_context(model, held, context, batch_size, precision, parallelism),
        "dtype": formats.weights_label,
        "block_size": block_size,
        "gpus": parallelism.gpus,
        "tensor_parallel_size": parallelism.tp,
    }


def equal_context(
    model: Model, held: int, context: int, batch_size: int, precision: Precision, parallelism: Parallelism
) -> int | None:
    """The least context at which `batch_size` sequences store `held` bytes; None where they never do."""
    formats, sequences = formats_of(model, precision), parallelism.sequences(batch_size)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    key = "equal", stage.number, formats, parallelism
    known: tuple[int, int, int | None] | None = model.known.get(key)
    if known is None or known[:2] != (held, sequences):
        known = held, sequences, _reaching(stage_rows(model, stage, formats, parallelism), held, sequences)
        model.known[key] = known
    return known[2]


def _reaching(rows: list[LayerRows], held: int, sequences: int) -> int | None:
    """The least context at which these rows take `held` bytes."""
    low, high = 0, 1
    while stored_bytes(rows, high) * sequences < held:
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if stored_bytes(rows, middle) * sequences < held else (low, middle)
    return high


def assumptions(model: Model, precision: Precision, block_size: int, parallelism: Parallelism, weights: bool = True) -> str:
    """One sentence of what a size was computed under; without weights where they are not known."""
    formats = formats_of(model, precision)
    words = [f"weights {formats.weights_label}{formats.computed}"] if weights else []
    words.append(f"cache {formats.kv_cache_dtype}")
    if formats.reason:
        words[-1] += f" ({formats.reason})"
    words.append(f"blocks of {block_size} tokens")
    if weights and model.vocab_size % parallelism.tp:
        words.append(f"vocabulary padded from {model.vocab_size:,} to {parallelism.share(model.vocab_size) * parallelism.tp:,}")
    if parallelism.gpus > 1:
        ranks = " ".join(f"{n}={getattr(parallelism, n)}" for n in ("tp", "pp", "dp", "ep", "dcp") if getattr(parallelism, n) > 1)
        words.append(f"per GPU of {parallelism.gpus} ({ranks})")
    return ", ".join(words)
