"""Bytes of caches and weights, and the records of `size`.

The figures of a cache are: stored bytes after S tokens; bytes that one decode step reads (new = 1,
past = S − 1), including the row that it writes; allocated bytes in whole blocks per sequence and
layer kind; slope, the bytes that one more token of a sequence adds on average; and fixed bytes of a
sequence, which no longer grow.

Receptive field of windows: L layers of window w reach at most L·w tokens. Source: Jiang et al.
2023, arXiv 2310.06825, section 2 (Mistral 7B: 32 layers of window 4096 reach 131,072 tokens).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.batch import ONE_GPU, Parallelism
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.weights import Formats
from kvcalc.model.model import CountedWeight, Model, memoized
from kvcalc.model.pipeline import Stage, check, stages
from kvcalc.model.precision import PUBLISHED, Precision, formats_of, stored_as
from kvcalc.records.size import SizeRecord
from kvcalc.units import MAX_TOKENS


def windows(model: Model) -> dict[int, int]:
    """Return the number of layers with each sliding window: window in tokens → layers.

    The receptive field of the model follows from it. The key 0 counts the layers without a window,
    and recurrent layers. Layers that are only an FFN do not count. Example: {512: 5, 0: 1}.
    """
    layers: Counter[int] = Counter()
    for kind, count in model.counts.items():
        sizes = [part.window_tokens for part in model.kinds[kind].mixers]
        if sizes and count:
            window = 0 if 0 in sizes else max(sizes)
            layers[window] += count
    return layers


def receptive_field(model: Model) -> int | None:
    """Return the maximum distance in tokens from which an earlier token can affect the output.

    It is the sum of the sliding windows of all layers, because each layer passes information on by
    one window. The result is None if a layer has no window, as full attention or a recurrent layer,
    or if the model has no attention.
    """
    layers = windows(model)
    if not layers or 0 in layers:
        return None
    return sum(count * window for window, count in layers.items())


def reach_line(model: Model) -> str:
    """Return a line of text with the receptive field: `receptive field L·w: 32 × 4,096 = …`.

    The receptive field is the maximum distance in tokens from which an earlier token can affect the
    output: the number of layers times their sliding window. If only some layers have a window, the
    line says that the receptive field has no limit. It is '' for a model without sliding windows.
    """
    layers = windows(model)
    num_unlimited = layers.pop(0, 0)
    if not layers:
        return ""
    product = " + ".join(f"{count:,} × {window:,}" for window, count in sorted(layers.items()))
    if num_unlimited:
        return (
            f"receptive field: without limit, layers without a window: {num_unlimited:,}; "
            f"windows: {product} tokens"
        )
    total = sum(count * window for window, count in layers.items())
    exact = 1 + total - sum(layers.values())
    return (
        f"receptive field L·w: {product} = {total:,} tokens ({exact:,} where each window "
        "counts the token itself once)"
    )


class CacheSize(msgspec.Struct, frozen=True):
    """Bytes of the KV cache and recurrent states on one GPU, for sequences of equal length.

    Attributes:
        stored: Bytes that all sequences on the GPU store together.
        read: Bytes that one decode step of these sequences reads.
        allocated: Bytes that a paged cache allocates: `stored` with each sequence rounded up to
            whole cache blocks.
        fixed: Bytes of one sequence on this GPU that more tokens do not change: full windows and
            states.
        slope: Bytes that one more token adds to one sequence on this GPU, on average. It is a float
            only if it is not a whole number.
    """

    stored: int
    read: int
    allocated: int
    fixed: int
    slope: int | float


class LayerRows(NamedTuple):
    """What all layers of one kind cache for one cache entry, such as keys, on one GPU.

    Attributes:
        entry: The cache entry of one layer.
        row_bytes: Bytes of one row in one layer on this GPU, with its scales.
        stored_layers: Number of layers on this GPU that store the entry.
        read_layers: Number of layers on this GPU that read the entry, including layers that store
            it.
        spread: Number of decode-context-parallel ranks among which the entry's rows are divided; 1
            if each rank has all rows.
    """

    entry: CacheEntry
    row_bytes: int
    stored_layers: int
    read_layers: int
    spread: int


def cache_size(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> CacheSize:
    """Return the bytes of the KV cache on one GPU, the one with the most weights and cache.

    Stored bytes are sequences · Σ layers · rows(context) · heads · bytes per row and head. The sum
    is over all cache entries, such as keys and values. Sequences, layers and heads are those of
    this GPU.

    Args:
        model: The model.
        context: Tokens of each sequence in the cache.
        batch_size: Number of sequences, over all data-parallel ranks.
        precision: Requested formats of weights and KV cache.
        block_size: Tokens of a cache block, for the allocated bytes.
        parallelism: Number of ranks of each kind of parallelism.

    Raises:
        UserError: A length, batch or block is not a whole number from 1 to 10^12, or the
            parallelism does not divide the model.
    """
    sizes = {"context": context, "batch size": batch_size, "block size": block_size}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= MAX_TOKENS:
            raise UserError(f"{name} {value!r} is not a whole number from 1 to {MAX_TOKENS:,}")
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = stage_rows(model, stage, formats, parallelism)
    return size_of(rows, context, parallelism.sequences(batch_size), block_size)


def stage_rows(
    model: Model, stage: Stage, formats: Formats, parallelism: Parallelism
) -> list[LayerRows]:
    """Return what a stage's layers cache on one GPU: entries, numbers of layers, bytes of a row.

    The list has one item for each kind of layer and cache entry. `size_of` and `stored_bytes`
    compute the cache size for any context from it.

    Args:
        model: The model.
        stage: The pipeline stage.
        formats: Formats of weights and cache.
        parallelism: Number of ranks of each kind of parallelism.
    """
    return memoized(model, _rows_of_counts, tuple(stage.counts.items()), formats, parallelism)


def _rows_of_counts(
    model: Model,
    counts: tuple[tuple[str, int], ...],
    formats: Formats,
    parallelism: Parallelism,
) -> list[LayerRows]:
    rows = []
    for kind, count in counts:
        layer = model.kinds[kind]
        for entry in layer.entries:
            is_stored = not (layer.shares_cache or entry.is_stored_by_other_layer)
            row_bytes = formats.entry_bytes(entry, parallelism.share(entry.heads))
            spread = entry.spread(parallelism)
            rows.append(LayerRows(entry, row_bytes, count * is_stored, count, spread))
    return rows


def layer_bytes(model: Model, context: int, precision: Precision) -> list[tuple[int, str]]:
    """Return the stored bytes and the printed name of each layer with attention or recurrence.

    Bytes are of one sequence on one GPU without parallelism. A layer that reads another layer's
    cache stores 0 bytes.

    Args:
        model: The model.
        context: Tokens of the sequence.
        precision: Requested formats of weights and KV cache.
    """
    formats = formats_of(model, precision)
    layers = []
    for kind in model.order:
        if model.kinds[kind].mixers:
            rows = memoized(model, _rows_of_counts, ((kind, 1),), formats, ONE_GPU)
            layers.append((stored_bytes(rows, context), model.kinds[kind].label))
    return layers


def eviction_score_bytes(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
) -> int:
    """Return the bytes of eviction scores on one GPU, the one with the most weights and cache.

    A model that evicts tokens from its cache (H2O) stores one score per layer, stored token and KV
    head. The cache size does not include the scores. The result is 0 for a model without eviction.

    Args:
        model: The model.
        context: Tokens of each sequence.
        batch_size: Number of sequences, over all data-parallel ranks.
        precision: Requested formats of weights and KV cache.
        parallelism: Number of ranks of each kind of parallelism.
    """
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
    """Return the cache bytes on one GPU, added up over several cache entries, such as k and v.

    The entries are usually those of all layers of a pipeline stage.

    Args:
        rows: Cache entries with their bytes per row and numbers of layers, from `stage_rows`.
        context: Tokens of each sequence.
        sequences: Number of sequences on the GPU's data-parallel rank.
        block_size: Tokens of a cache block. It affects only the allocated bytes.
    """
    stored = read = allocated = fixed = 0
    slope: int | float = 0
    for entry, row_bytes, stored_layers, read_layers, spread in rows:
        num_rows = int(entry.stored_rows(context))
        block_rows = int(entry.in_blocks(num_rows, block_size))
        read_rows = int(entry.read_rows(1, context - 1))
        stored_bytes_of_row = stored_layers * row_bytes
        if spread > 1:
            num_rows, block_rows, read_rows = (
                -(-n // spread) for n in (num_rows, block_rows, read_rows)
            )
        stored += stored_bytes_of_row * num_rows
        allocated += stored_bytes_of_row * block_rows
        read += read_layers * row_bytes * read_rows
        full_from = entry.full_from()
        if full_from < 0 or context < full_from:
            slope += stored_bytes_of_row / (entry.ratio * spread)
        elif entry.grows or entry.limit:
            fixed += stored_bytes_of_row * num_rows
    if slope == int(slope):
        slope = int(slope)
    return CacheSize(stored * sequences, read * sequences, allocated * sequences, fixed, slope)


def stored_bytes(rows: Iterable[LayerRows], context: int) -> int:
    """Return the cache bytes that one sequence stores on one GPU, not rounded up to blocks.

    The result equals `size_of(rows, context, 1, 1).stored`, but is computed faster.

    Args:
        rows: Cache entries with their bytes per row and numbers of layers, from `stage_rows`.
        context: Tokens of the sequence.
    """
    total = 0
    for entry, row_bytes, stored_layers, _, spread in rows:
        total += stored_layers * row_bytes * -(-int(entry.stored_rows(context)) // spread)
    return total


def fullest_stage(
    model: Model, formats: Formats, parallelism: Parallelism, context: int, batch_size: int
) -> Stage:
    """Return the pipeline stage whose GPUs have the most bytes of weights and stored cache.

    Sizes for "one GPU" are for a GPU of this stage. If stages are equal, the first of them is
    returned.

    Args:
        model: The model.
        formats: Formats of weights and cache.
        parallelism: Number of ranks of each kind of parallelism.
        context: Tokens of each sequence.
        batch_size: Number of sequences, over all data-parallel ranks.

    Raises:
        UserError: The parallelism does not divide the model.
    """
    check(model, parallelism)
    all_stages = stages(model, parallelism.pp)
    if len(all_stages) == 1:
        return all_stages[0]
    sequences = parallelism.sequences(batch_size)

    def resident_bytes(stage: Stage) -> int:
        rows = stage_rows(model, stage, formats, parallelism)
        weights = stage_weight_bytes(model, stage, formats, parallelism)
        return stored_bytes(rows, context) * sequences + weights

    return max(all_stages, key=resident_bytes)


def weight_bytes(
    model: Model,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    context: int = 1,
    batch_size: int = 1,
) -> int:
    """Return the bytes of the weights, with scales, on the GPU with the most weights and cache.

    With tensor, pipeline or expert parallelism it is one GPU's share, and not the whole model. If
    the headers of the checkpoint's files were read, vision or audio towers and multi-token-
    prediction layers are included, unless other formats than the checkpoint's are requested.

    Args:
        model: The model.
        precision: Requested formats of weights and KV cache.
        parallelism: Number of ranks of each kind.
        context: Tokens of each sequence. With pipeline parallelism it affects which stage has the
            most bytes, and nothing else.
        batch_size: Number of sequences, over all data-parallel ranks. It has the same effect as
            `context`.
    """
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    weights = stage_weight_bytes(model, stage, formats, parallelism)
    return weights + checkpoint_share(
        model, model.other_part_bytes, stage, formats, parallelism
    )


def checkpoint_share(
    model: Model, num_bytes: int, stage: Stage, formats: Formats, parallelism: Parallelism
) -> int:
    """Return one GPU's share of checkpoint bytes that do not follow from the model's fields.

    An example is the bytes of a vision tower, read from the checkpoint's headers. They are on the
    first pipeline stage, divided by tp (tensor parallelism). The result is 0 on other stages. It is
    also 0 if the requested formats differ from the checkpoint's, because the bytes are then
    unknown.

    Args:
        model: The model.
        num_bytes: The bytes of this kind in the whole checkpoint.
        stage: Pipeline stage of the GPU.
        formats: Requested formats.
        parallelism: Number of ranks of each kind of parallelism.
    """
    is_published = formats.schemes == model.quantization and formats.dtype == model.dtype
    return -(-num_bytes // parallelism.tp) if stage.first and is_published else 0


def stage_weight_bytes(
    model: Model,
    stage: Stage,
    formats: Formats,
    parallelism: Parallelism,
    only_layers: bool = False,
) -> int:
    """Return the bytes of the weights on one GPU of a pipeline stage.

    The first stage has the embedding and the buffers, which are contents of a quantised file that
    are not parameters. The last stage has the LM head. Vision or audio towers are not included.

    Args:
        model: The model.
        stage: The pipeline stage.
        formats: Formats of the weights.
        parallelism: Number of ranks of each kind of parallelism.
        only_layers: Whether to leave out embedding, final norm, LM head and buffers.
    """
    ranks = parallelism.tp, parallelism.dp, parallelism.ep  # determine the share of each weight
    layers = (stage.first, stage.last, *stage.counts.values())
    key = "weights", layers, ranks, formats, only_layers
    if key not in model.memo:
        total = model.buffers if stage.first and formats.schemes and not only_layers else 0
        if not only_layers:
            total += checkpoint_share(model, model.uncounted_bytes, stage, formats, parallelism)
        for name, weight, count in walk_stage(model, stage):
            if not only_layers or name.partition(".")[0] in stage.counts:
                total += count * formats.weight_bytes(name, weight.local(parallelism))
        model.memo[key] = total
    return int(model.memo[key])


def walk_stage(model: Model, stage: Stage) -> Iterator[CountedWeight]:
    """Yield (full name, weight, number of times it occurs) for every weight on a pipeline stage.

    The full name is `kind.weight`, such as `dense.q`, and its number is the stage's layers of this
    kind. A weight outside the layers, such as `embedding`, has the number 1. A weight that several
    layers share has the number of its different copies. Weights are complete, not divided over the
    GPUs of the stage.

    Args:
        model: The model.
        stage: The pipeline stage.
    """
    for name, weight, count in model.walk():
        kind = name.partition(".")[0] if "." in name else ""
        if kind in stage.counts:
            stage_count = min(stage.counts[kind], count)
        elif name == "embedding":
            stage_count = int(stage.first or (stage.last and model.tie_word_embeddings))
        elif name.startswith(("lm_head", "final_norm")):
            stage_count = int(stage.last)
        else:
            stage_count = int(stage.first)
        if stage_count:
            yield name, weight, stage_count


def mha_ratio(model: Model, context: int, precision: Precision = PUBLISHED) -> float | None:
    """Return how many times larger the KV cache would be with plain multi-head attention (MHA).

    The result is stored bytes of one sequence with MHA in every attention layer ÷ stored bytes of
    the model. 4 means that MHA would need four times the bytes. The MHA layers have as many heads
    as the model has query heads, and no window. Their keys and values have the value width of the
    replaced attention. Recurrent states count unchanged in both sizes. The result is None without
    attention.

    Args:
        model: The model.
        context: Tokens of the sequence.
        precision: Requested formats of weights and KV cache.
    """
    rows = memoized(model, _as_mha_rows, formats_of(model, precision))
    cache_bytes = cache_size(model, context, precision=precision).stored
    return stored_bytes(rows, context) / cache_bytes if rows and cache_bytes else None


def _as_mha_rows(model: Model, formats: Formats) -> list[LayerRows]:
    """Return the rows of the model with plain MHA in every attention layer; none without
    attention."""
    rows = []
    has_attention = False
    for kind, layer in model.kinds.items():
        count = model.counts[kind]
        for part in layer.all_parts:
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
    """Return what `kvcalc size` prints, as a dictionary: bytes of KV cache and weights on one GPU.

    It is the GPU that has the most weights and cache.

    Args:
        model: The model.
        context: Tokens of each sequence.
        batch_size: Number of sequences, over all data-parallel ranks.
        precision: Requested formats of weights and KV cache.
        block_size: Tokens of a cache block, for the allocated bytes.
        parallelism: Number of ranks of each kind of parallelism.

    Raises:
        UserError: A value is out of range, or the parallelism does not divide the model.
    """
    size = cache_size(model, context, batch_size, precision, block_size, parallelism)
    formats = formats_of(model, precision)
    weights = weight_bytes(model, precision, parallelism, context, batch_size)
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
        "weight_bytes": weights,
        "cache_share_of_weights": size.stored / weights,
        "equal_weights_context": equal_context(
            model, weights, context, batch_size, precision, parallelism
        ),
        "dtype": formats.weights_label,
        "block_size": block_size,
        "gpus": parallelism.gpus,
        "tensor_parallel_size": parallelism.tp,
    }


def equal_context(
    model: Model,
    num_bytes: int,
    context: int,
    batch_size: int,
    precision: Precision,
    parallelism: Parallelism,
    is_read: bool = False,
) -> int | None:
    """Return the smallest context in tokens at which the KV cache has at least `num_bytes` bytes.

    With the bytes of the weights, it answers at which context the cache is as large as the weights.
    Both are counted on one GPU: the GPU that has the most weights and cache at `context`. The
    result is None if no context up to 10^12 tokens is enough.

    Args:
        model: The model.
        num_bytes: Bytes to reach on that GPU, such as the bytes of its weights.
        context: Tokens of each sequence, only to select the pipeline stage of the GPU.
        batch_size: Number of sequences, over all data-parallel ranks.
        precision: Requested formats of weights and KV cache.
        parallelism: Number of ranks of each kind of parallelism.
        is_read: Whether to count the bytes that one decode step reads, instead of the stored bytes.
    """
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = stage_rows(model, stage, formats, parallelism)
    sequences = parallelism.sequences(batch_size)

    def is_reached(tokens: int) -> bool:
        if is_read:
            return size_of(rows, tokens, sequences, block_size=1).read >= num_bytes
        return stored_bytes(rows, tokens) * sequences >= num_bytes

    tokens = bisect_left(range(MAX_TOKENS + 1), True, lo=1, key=is_reached)
    return tokens if tokens <= MAX_TOKENS else None


def assumptions(
    model: Model, precision: Precision, block_size: int, parallelism: Parallelism, weights: bool
) -> str:
    """Return a phrase that states the assumptions of a printed size: formats, block size and ranks.

    Example: `weights bf16, cache bf16 (the model's dtype), blocks of 16 tokens`.

    Args:
        model: The model.
        precision: Requested formats of weights and KV cache.
        block_size: Tokens of a cache block.
        parallelism: Number of ranks of each kind of parallelism.
        weights: Whether to include the weight formats.
    """
    formats = formats_of(model, precision)
    reason = f" ({formats.reason})" if formats.reason else ""
    words = [f"cache {formats.kv_cache_dtype}{reason}", f"blocks of {block_size} tokens"]
    if weights:
        words.insert(0, f"weights {formats.weights_label}{formats.computed}")
        if model.vocab_size % parallelism.tp:
            padded = parallelism.share(model.vocab_size) * parallelism.tp
            words.append(f"vocabulary padded from {model.vocab_size:,} to {padded:,}")
    if parallelism.gpus > 1:
        sizes = {n: getattr(parallelism, n) for n in ("tp", "pp", "dp", "ep", "dcp")}
        ranks = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        words.append(f"per GPU of {parallelism.gpus} ({ranks})")
    return ", ".join(words)
