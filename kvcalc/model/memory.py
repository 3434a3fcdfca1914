"""Bytes of caches and weights.

There are four cache figures. Stored: rows after S tokens. Read: bytes that one decode step reads
(new = 1, past = S − 1), including the row that it writes. Allocated: rows in whole blocks per sequence
and layer kind. Slope and fixed part: bytes that one more token adds on average, and bytes that no longer
grow, both for one sequence.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.model.pipeline import Stage, check, stages
from kvcalc.model.precision import PUBLISHED, Precision, formats_of, stored_as
from kvcalc.model.spec import Model
from kvcalc.units import MOST_TOKENS


class CacheSize(msgspec.Struct, frozen=True):
    """Bytes on one GPU: stored, read and allocated for all its sequences; fixed and slope for one sequence.

    slope is an int if the cache adds whole rows per token, otherwise a fraction.
    """

    stored: int
    read: int
    allocated: int
    fixed: int
    slope: int | float


class LayerRows(NamedTuple):
    """One cache entry of all layers of a kind: bytes of a row on one GPU · the layers that store or read it."""

    entry: CacheEntry
    row_bytes: int
    stored_layers: int
    read_layers: int
    spread: int  # ranks that share the tokens of this entry (decode-context parallelism)


def cache_rows(model: Model, counts: dict[str, int], formats: Formats, parallelism: Parallelism) -> list[LayerRows]:
    """Return every cache entry of the layers in `counts`, with its bytes per row on one GPU."""
    found = []
    for kind, count in counts.items():
        layer = model.kinds[kind]
        for entry in layer.entries:
            stored = 0 if layer.shares_cache or entry.lent else count
            row_bytes = formats.entry_bytes(entry, parallelism.share(entry.heads))
            found.append(LayerRows(entry, row_bytes, stored, count, entry.spread(parallelism)))
    return found


def cache_size(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> CacheSize:
    """Return the cache after `context` tokens per sequence, on the GPU with the most weights and cache.

    Stored = batch · Σ layers · rows(context) · Σ heads · row_bytes(width).

    Raises:
        UserError: A length, batch or block is not a whole number from 1 to 10^12, or the parallelism does
            not divide the model.
    """
    for what, value in (("context", context), ("batch size", batch_size), ("block size", block_size)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
            raise UserError(f"{what} {value!r} is not a whole number from 1 to {MOST_TOKENS:,}")
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = stage_rows(model, stage, formats, parallelism)
    return size_of(rows, context, parallelism.sequences(batch_size), block_size)


def stage_rows(model: Model, stage: Stage, formats: Formats, parallelism: Parallelism) -> list[LayerRows]:
    """Return the rows of a pipeline stage's layers."""
    key = "rows", stage.number, parallelism.pp, formats, parallelism
    if key not in model.known:
        model.known[key] = cache_rows(model, stage.counts, formats, parallelism)
    found: list[LayerRows] = model.known[key]
    return found


def eviction_score_bytes(
    model: Model, context: int, batch_size: int = 1, precision: Precision = PUBLISHED, parallelism: Parallelism = ONE_GPU
) -> int:
    """Return the bytes of eviction scores on the fullest GPU: one per stored token and KV head; 0 without eviction."""
    if not any(part.eviction_scores() for layer in model.kinds.values() for part in layer.mixers):
        return 0
    formats = formats_of(model, precision)
    total = 0
    for kind, count in fullest_stage(model, formats, parallelism, context, batch_size).counts.items():
        layer = model.kinds[kind]
        for entry in () if layer.shares_cache else (e for part in layer.mixers for e in part.eviction_scores()):
            total += count * formats.entry_bytes(entry, parallelism.share(entry.heads)) * int(entry.stored_rows(context))
    return total * parallelism.sequences(batch_size)


def size_of(rows: Iterable[LayerRows], context: int, sequences: int, block_size: int) -> CacheSize:
    """Return the five figures of `CacheSize` for a list of rows."""
    stored = read = allocated = fixed = 0
    slope: int | float = 0
    for entry, row_bytes, storing, reading, spread in rows:
        held = int(entry.stored_rows(context))
        blocks, seen = int(entry.in_blocks(held, block_size)), int(entry.read_rows(1, context - 1))
        if spread > 1:
            held, blocks, seen = (-(-n // spread) for n in (held, blocks, seen))
        stored += storing * row_bytes * held
        allocated += storing * row_bytes * blocks
        read += reading * row_bytes * seen
        full = entry.full_from()
        if full < 0 or context < full:
            slope += storing * row_bytes / (entry.ratio * spread)
        elif entry.grows or entry.limit:
            fixed += storing * row_bytes * held
    whole = int(slope) if slope == int(slope) else slope
    return CacheSize(stored * sequences, read * sequences, allocated * sequences, fixed, whole)


def stored_bytes(rows: Iterable[LayerRows], context: int) -> int:
    """Return only the stored bytes of one sequence, for searches."""
    total = 0
    for entry, row_bytes, storing, _, spread in rows:
        total += storing * row_bytes * -(-int(entry.stored_rows(context)) // spread)
    return total


def fullest_stage(model: Model, formats: Formats, parallelism: Parallelism, context: int, batch_size: int) -> Stage:
    """Return the pipeline stage with the most weights and stored cache; the first of equal stages."""
    check(model, parallelism)
    every = stages(model, parallelism.pp)
    if len(every) == 1:
        return every[0]

    def held(stage: Stage) -> int:
        stored = stored_bytes(stage_rows(model, stage, formats, parallelism), context) * parallelism.sequences(batch_size)
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


def stage_weight_bytes(model: Model, stage: Stage, formats: Formats, parallelism: Parallelism) -> int:
    """Return weight bytes of a stage. Embedding and buffers are on the first stage, the LM head on the last."""
    key = "weights", stage.held, parallelism.of_a_stage, formats
    if key not in model.known:
        model.known[key] = _weight_bytes_of(model, stage, formats, parallelism)
    held: int = model.known[key]
    return held


def _weight_bytes_of(model: Model, stage: Stage, formats: Formats, parallelism: Parallelism) -> int:
    total = model.buffers if stage.first and formats.schemes else 0
    for name, weight, count in model.walk():
        kind = name.partition(".")[0] if "." in name else ""
        if kind in stage.counts:
            held = min(stage.counts[kind], count)
        elif name == "embedding":
            held = int(stage.first or (stage.last and model.tie_word_embeddings))
        elif name.startswith(("lm_head", "final_norm")):
            held = int(stage.last)
        else:
            held = int(stage.first)
        if held:
            total += held * formats.weight_bytes(name, weight.local(parallelism))
    return total


def mha_ratio(model: Model, context: int, precision: Precision = PUBLISHED) -> float | None:
    """Return stored bytes of this model as plain MHA ÷ its stored bytes, or None without attention.

    The MHA model has the value width of each layer, no window and the same dtype, with one sequence of
    `context` tokens. Recurrent states are unchanged on both sides.
    """
    rows = _as_mha_rows(model, formats_of(model, precision))
    stored = cache_size(model, context, precision=precision).stored
    return stored_bytes(rows, context) / stored if rows and stored else None


def _as_mha_rows(model: Model, formats: Formats) -> list[LayerRows]:
    """Return the rows of the model with plain MHA in every attention layer; none without attention."""
    key = "mha", formats
    if key not in model.known:
        parts = [(part, model.counts[kind]) for kind, layer in model.kinds.items() for part in (*layer.parts, *layer.shared)]
        found = []
        for part, count in parts if any(part.attends for part, _ in parts) else ():
            heads, _, width = part.as_mha()
            entries = tuple(CacheEntry(role, heads, width) for role in ("k", "v")) if heads else part.cache()
            found += [LayerRows(e, formats.entry_bytes(e, e.heads), count, count, 1) for e in entries]
        model.known[key] = found
    rows: list[LayerRows] = model.known[key]
    return rows
