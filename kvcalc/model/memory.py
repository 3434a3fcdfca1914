"""Bytes: what a cache holds, what a step reads of it, what whole blocks take, and what the weights take.

Four cache figures, never one. Stored: rows held after S tokens. Read: what one decode step moves (new = 1, past = S − 1),
the row it writes included. Allocated: the rows in whole blocks per sequence and layer kind. Slope and fixed part: what one
more token adds on average, and what no longer grows, for one sequence.
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
    """Bytes on one GPU, for all its sequences: stored, read, allocated. For one sequence: fixed, and slope per token.

    slope is a whole number of bytes wherever the cache adds whole rows per token, else a fraction.
    """

    stored: int
    read: int
    allocated: int
    fixed: int
    slope: int | float


class LayerRows(NamedTuple):
    """One cache entry of all layers of a kind: bytes of a row on one GPU times the layers that store or read it."""

    entry: CacheEntry
    row_bytes: int
    stored_layers: int
    read_layers: int
    spread: int  # ranks that share the tokens of this entry (decode-context parallelism)


def cache_rows(model: Model, counts: dict[str, int], formats: Formats, parallelism: Parallelism) -> list[LayerRows]:
    """Every cache entry of the layers in `counts`, with its bytes per row on one GPU."""
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
    """The cache after `context` tokens of each of `batch_size` sequences, on the GPU that holds the most weights and cache.

    Stored = batch · Σ layers · rows(context) · Σ heads · row_bytes(width). Raises UserError on a length, batch or block
    that is no whole number from 1 to 10^12, or on ranks that do not divide the model.
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
    """The rows of a stage's layers."""
    key = "rows", stage.number, parallelism.pp, formats, parallelism
    if key not in model.known:
        model.known[key] = cache_rows(model, stage.counts, formats, parallelism)
    found: list[LayerRows] = model.known[key]
    return found


def eviction_score_bytes(
    model: Model, context: int, batch_size: int = 1, precision: Precision = PUBLISHED, parallelism: Parallelism = ONE_GPU
) -> int:
    """What eviction keeps beside the cache to choose by, on the fullest GPU: a score per token kept and KV head; 0 without it."""
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
    """The five figures of a list of rows; see `CacheSize`."""
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
    """Of those figures the stored bytes of one sequence alone, for searches."""
    total = 0
    for entry, row_bytes, storing, _, spread in rows:
        total += storing * row_bytes * -(-int(entry.stored_rows(context)) // spread)
    return total


def fullest_stage(model: Model, formats: Formats, parallelism: Parallelism, context: int, batch_size: int) -> Stage:
    """The pipeline stage whose weights and stored cache are largest, the first of equals."""
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
    """Bytes of the weights on the GPU that holds the most weights and cache, scales of quantised matrices included."""
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    stage = fullest_stage(model, formats, parallelism, context, batch_size)
    return stage_weight_bytes(model, stage, formats, parallelism)


def stage_weight_bytes(model: Model, stage: Stage, formats: Formats, parallelism: Parallelism) -> int:
    """Bytes of the weights of a stage's layers, with embedding and buffers on the first stage and the head on the last."""
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
    """How many times as many bytes the model would store were every layer that attends plain MHA of its value width.

    No window, same dtype, one sequence of `context` tokens, over this model's stored bytes; what keeps a state keeps it on both
    sides. None where nothing attends.
    """
    rows = _as_mha_rows(model, formats_of(model, precision))
    stored = cache_size(model, context, precision=precision).stored
    return stored_bytes(rows, context) / stored if rows and stored else None


def _as_mha_rows(model: Model, formats: Formats) -> list[LayerRows]:
    """What all layers would keep, were every one that attends plain MHA; nothing where none does."""
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
