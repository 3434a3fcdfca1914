"""Receptive field of windows: L layers of window w reach at most L·w tokens.

Source: Jiang et al. 2023, arXiv 2310.06825, section 2 (Mistral 7B: 32 layers of window 4096 reach
131,072 tokens).

Bytes of caches and weights.

There are four cache figures. Stored: rows after S tokens. Read: bytes that one decode step reads
(new = 1, past = S − 1), including the row that it writes. Allocated: rows in whole blocks per
sequence and layer kind. Slope and fixed part: bytes that one more token adds on average, and bytes
that no longer grow, both for one sequence.

The records of `size`: one model at one context and batch, every figure under its own key.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.batch import ONE_GPU, Parallelism
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.weights import Formats, Weight
from kvcalc.model.model import Model, kept
from kvcalc.model.pipeline import Stage, check, stages
from kvcalc.model.precision import PUBLISHED, Precision, formats_of, stored_as
from kvcalc.records.size import SizeRecord
from kvcalc.units import MAX_TOKENS


def windows(model: Model) -> dict[int, int]:
    """Return the number of layers by window size; 0 means no window."""
    results: dict[int, int] = {}
    for kind, count in model.counts.items():
        sights = [part.window_tokens for part in model.kinds[kind].mixers]
        if sights and count:
            sight = 0 if 0 in sights else max(sights)
            results[sight] = results.get(sight, 0) + count
    return results


def receptive_field(model: Model) -> int | None:
    """Return the sum of windows over all layers in tokens, or None if a layer sees all tokens."""
    result = windows(model)
    return (
        None
        if not result or 0 in result
        else sum(count * window for window, count in result.items())
    )


def reach_line(model: Model) -> str:
    """Return a sentence with the receptive field as a sum, or '' for a model without windows."""
    result = windows(model)
    limited = {window: count for window, count in sorted(result.items()) if window}
    if not limited:
        return ""
    product = " + ".join(f"{count:,} × {window:,}" for window, count in limited.items())
    if 0 in result:
        return (
            f"receptive field: without limit, layers without a window: {result[0]:,}; "
            f"windows: {product} tokens"
        )
    exact = 1 + sum(count * (window - 1) for window, count in limited.items())
    total = sum(count * window for window, count in limited.items())
    return (
        f"receptive field L·w: {product} = {total:,} tokens ({exact:,} where each window "
        "counts the token itself once)"
    )


class CacheSize(msgspec.Struct, frozen=True):
    """Bytes on one GPU: stored, read and allocated for all its sequences; fixed and slope for one
    sequence.

    slope is an int if the cache adds whole rows per token, otherwise a fraction.
    """

    stored: int
    read: int
    allocated: int
    fixed: int
    slope: int | float


class LayerRows(NamedTuple):
    """One cache entry of all layers of a kind: bytes of a row on one GPU · the layers that store or
    read it."""

    entry: CacheEntry
    row_bytes: int
    stored_layers: int
    read_layers: int
    spread: int  # ranks that share the tokens of this entry (decode-context parallelism)


def cache_rows(
    model: Model, counts: dict[str, int], formats: Formats, parallelism: Parallelism
) -> list[LayerRows]:
    """Return every cache entry of the layers in `counts`, with its bytes per row on one GPU."""
    results = []
    for kind, count in counts.items():
        layer = model.kinds[kind]
        for entry in layer.entries:
            stored = 0 if layer.shares_cache or entry.is_stored_by_other_layer else count
            row_bytes = formats.entry_bytes(entry, parallelism.share(entry.heads))
            results.append(
                LayerRows(entry, row_bytes, stored, count, entry.spread(parallelism))
            )
    return results


def cache_size(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> CacheSize:
    """Return the cache after `context` tokens per sequence, on the GPU with the most weights and
    cache.

    Stored = batch · Σ layers · rows(context) · Σ heads · row_bytes(width).

    Raises:
        UserError: A length, batch or block is not a whole number from 1 to 10^12, or the
            parallelism does not divide the model.
    """
    for what, value in (
        ("context", context),
        ("batch size", batch_size),
        ("block size", block_size),
    ):
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 1 <= value <= MAX_TOKENS
        ):
            raise UserError(f"{what} {value!r} is not a whole number from 1 to {MAX_TOKENS:,}")
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = stage_rows(model, stage, formats, parallelism)
    return size_of(rows, context, parallelism.sequences(batch_size), block_size)


def stage_rows(
    model: Model, stage: Stage, formats: Formats, parallelism: Parallelism
) -> list[LayerRows]:
    """Return the rows of a pipeline stage's layers."""
    counts = tuple(stage.counts.items())
    return kept(model, _rows_of_counts, counts, formats, parallelism)


def _rows_of_counts(
    model: Model,
    counts: tuple[tuple[str, int], ...],
    formats: Formats,
    parallelism: Parallelism,
) -> list[LayerRows]:
    return cache_rows(model, dict(counts), formats, parallelism)


def eviction_score_bytes(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
) -> int:
    """Return the bytes of eviction scores on the fullest GPU: one per stored token and KV head; 0
    without eviction."""
    if not any(
        part.eviction_scores() for layer in model.kinds.values() for part in layer.mixers
    ):
        return 0
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    total = 0
    for kind, count in stage.counts.items():
        layer = model.kinds[kind]
        for part in layer.mixers if not layer.shares_cache else ():
            for entry in part.eviction_scores():
                row_bytes = formats.entry_bytes(entry, parallelism.share(entry.heads))
                total += count * row_bytes * int(entry.stored_rows(context))
    return total * parallelism.sequences(batch_size)


def size_of(
    rows: Iterable[LayerRows], context: int, sequences: int, block_size: int
) -> CacheSize:
    """Return the five figures of `CacheSize` for a list of rows."""
    stored = read = allocated = fixed = 0
    slope: int | float = 0
    for entry, row_bytes, storing, reading, spread in rows:
        resident = int(entry.stored_rows(context))
        blocks, seen = (
            int(entry.in_blocks(resident, block_size)),
            int(entry.read_rows(1, context - 1)),
        )
        if spread > 1:
            resident, blocks, seen = (-(-n // spread) for n in (resident, blocks, seen))
        stored += storing * row_bytes * resident
        allocated += storing * row_bytes * blocks
        read += reading * row_bytes * seen
        full = entry.full_from()
        if full < 0 or context < full:
            slope += storing * row_bytes / (entry.ratio * spread)
        elif entry.grows or entry.limit:
            fixed += storing * row_bytes * resident
    whole = int(slope) if slope == int(slope) else slope
    return CacheSize(stored * sequences, read * sequences, allocated * sequences, fixed, whole)


def stored_bytes(rows: Iterable[LayerRows], context: int) -> int:
    """Return only the stored bytes of one sequence, for searches."""
    total = 0
    for entry, row_bytes, storing, _, spread in rows:
        total += storing * row_bytes * -(-int(entry.stored_rows(context)) // spread)
    return total


def fullest_stage(
    model: Model,
    formats: Formats,
    parallelism: Parallelism,
    context: int,
    batch_size: int,
) -> Stage:
    """Return the pipeline stage with the most weights and stored cache; the first of equal
    stages."""
    check(model, parallelism)
    every = stages(model, parallelism.pp)
    if len(every) == 1:
        return every[0]

    def held(stage: Stage) -> int:
        stored = stored_bytes(
            stage_rows(model, stage, formats, parallelism), context
        ) * parallelism.sequences(batch_size)
        return stored + stage_weight_bytes(model, stage, formats, parallelism)

    return max(every, key=held)


def weight_bytes(
    model: Model,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    context: int = 1,
    batch_size: int = 1,
) -> int:
    """Return weight bytes on the fullest GPU, including scales of quantised matrices."""
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    return stage_weight_bytes(model, stage, formats, parallelism)


def stage_weight_bytes(
    model: Model,
    stage: Stage,
    formats: Formats,
    parallelism: Parallelism,
    only_layers: bool = False,
) -> int:
    """Return weight bytes of a stage. Embedding and buffers are on the first stage, the LM head on
    the last.

    Args:
        only_layers: Leave out embedding, final norm, LM head and buffers.
    """
    key = "weights", stage.held, parallelism.of_a_stage, formats, only_layers
    if key not in model.memo:
        model.memo[key] = _weight_bytes_of(model, stage, formats, parallelism, only_layers)
    resident: int = model.memo[key]
    return resident


def _weight_bytes_of(
    model: Model,
    stage: Stage,
    formats: Formats,
    parallelism: Parallelism,
    only_layers: bool,
) -> int:
    total = model.buffers if stage.first and formats.schemes and not only_layers else 0
    for name, weight, count in walk_stage(model, stage):
        if not only_layers or name.partition(".")[0] in stage.counts:
            total += count * formats.weight_bytes(name, weight.local(parallelism))
    return total


def walk_stage(model: Model, stage: Stage) -> Iterator[tuple[str, Weight, int]]:
    """Yield (full name, weight, count) for every weight on a pipeline stage."""
    for name, weight, count in model.walk():
        kind = name.partition(".")[0] if "." in name else ""
        if kind in stage.counts:
            resident = min(stage.counts[kind], count)
        elif name == "embedding":
            resident = int(stage.first or (stage.last and model.tie_word_embeddings))
        elif name.startswith(("lm_head", "final_norm")):
            resident = int(stage.last)
        else:
            resident = int(stage.first)
        if resident:
            yield name, weight, resident


def mha_ratio(model: Model, context: int, precision: Precision = PUBLISHED) -> float | None:
    """Return stored bytes of this model as plain MHA ÷ its stored bytes, or None without attention.

    The MHA model has the value width of each layer, no window and the same dtype, with one sequence
    of `context` tokens. Recurrent states are unchanged on both sides.
    """
    rows = kept(model, _as_mha_rows, formats_of(model, precision))
    stored = cache_size(model, context, precision=precision).stored
    return stored_bytes(rows, context) / stored if rows and stored else None


def _as_mha_rows(model: Model, formats: Formats) -> list[LayerRows]:
    """Return the rows of the model with plain MHA in every attention layer; none without
    attention."""
    rows = []
    has_attention = False
    for kind, layer in model.kinds.items():
        count = model.counts[kind]
        for part in (*layer.parts, *layer.shared):
            heads, _, width = part.as_mha()
            has_attention |= heads > 0
            entries = part.cache()
            if heads:
                entries = tuple(CacheEntry(role, heads, width) for role in ("k", "v"))
            for entry in entries:
                row_bytes = formats.entry_bytes(entry, entry.heads)
                rows.append(LayerRows(entry, row_bytes, count, count, spread=1))
    return rows if has_attention else []


def size_record(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> SizeRecord:
    """Return the record of cache and weights on the GPU with the most of them.

    Raises:
        UserError: The request is impossible.
    """
    size = cache_size(model, context, batch_size, precision, block_size, parallelism)
    formats = formats_of(model, precision)
    resident = weight_bytes(model, precision, parallelism, context, batch_size)
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
        "eviction_score_bytes": eviction_score_bytes(
            model, context, batch_size, precision, parallelism
        ),
        "receptive_field": receptive_field(model),
        "mha_ratio": mha_ratio(model, context, precision),
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "parameters_exact": model.parameters_exact,
        "mtp_parameters": model.mtp_parameters,
        "weight_bytes": resident,
        "cache_share_of_weights": size.stored / resident,
        "equal_weights_context": equal_context(
            model, resident, context, batch_size, precision, parallelism
        ),
        "dtype": formats.weights_label,
        "block_size": block_size,
        "gpus": parallelism.gpus,
        "tensor_parallel_size": parallelism.tp,
    }


def equal_context(
    model: Model,
    held: int,
    context: int,
    batch_size: int,
    precision: Precision,
    parallelism: Parallelism,
) -> int | None:
    """The least context at which `batch_size` sequences store `held` bytes; None where they never
    do."""
    formats, sequences = formats_of(model, precision), parallelism.sequences(batch_size)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    key = "equal", stage.number, formats, parallelism
    known: tuple[int, int, int | None] | None = model.memo.get(key)
    if known is None or known[:2] != (held, sequences):
        known = (
            held,
            sequences,
            _reaching(stage_rows(model, stage, formats, parallelism), held, sequences),
        )
        model.memo[key] = known
    return known[2]


def _reaching(rows: list[LayerRows], held: int, sequences: int) -> int | None:
    """The least context at which these rows take `held` bytes."""
    low, high = 0, 1
    while stored_bytes(rows, high) * sequences < held:
        low, high = high, 2 * high
        if high > MAX_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if stored_bytes(rows, middle) * sequences < held else (low, middle)
        )
    return high


def assumptions(
    model: Model,
    precision: Precision,
    block_size: int,
    parallelism: Parallelism,
    weights: bool = True,
) -> str:
    """One sentence of what a size was computed under; without weights where they are not known."""
    formats = formats_of(model, precision)
    words = [f"weights {formats.weights_label}{formats.computed}"] if weights else []
    words.append(f"cache {formats.kv_cache_dtype}")
    if formats.reason:
        words[-1] += f" ({formats.reason})"
    words.append(f"blocks of {block_size} tokens")
    if weights and model.vocab_size % parallelism.tp:
        words.append(
            f"vocabulary padded from {model.vocab_size:,} to "
            f"{parallelism.share(model.vocab_size) * parallelism.tp:,}"
        )
    if parallelism.gpus > 1:
        ranks = " ".join(
            f"{n}={getattr(parallelism, n)}"
            for n in ("tp", "pp", "dp", "ep", "dcp")
            if getattr(parallelism, n) > 1
        )
        words.append(f"per GPU of {parallelism.gpus} ({ranks})")
    return ", ".join(words)
