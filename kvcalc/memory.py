"""Bytes: what a cache holds, what a step reads of it, what whole blocks take, and what the weights take.

Four cache figures, never one. Stored: rows held after S tokens. Read: what one decode step moves (new = 1, past = S − 1),
the row it writes included. Allocated: the rows in whole blocks per sequence and layer kind. Slope and fixed part: what one
more token adds on average, and what no longer grows, for one sequence.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvcalc.batch import ONE_GPU, PUBLISHED, Parallelism, Precision
from kvcalc.cache import CacheEntry
from kvcalc.errors import UserError
from kvcalc.model import Model
from kvcalc.parallel import check, local, local_heads, stages
from kvcalc.precision import Formats
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


class Row(NamedTuple):
    """One cache entry of all layers of a kind: bytes of a row on one GPU times the layers that store or read it."""

    entry: CacheEntry
    row_bytes: int
    stored_layers: int
    read_layers: int
    spread: int  # ranks that share the tokens of this entry (decode-context parallelism)


def cache_rows(model: Model, counts: dict[str, int], formats: Formats, parallelism: Parallelism) -> list[Row]:
    """Every cache entry of the layers in `counts`, with its bytes per row on one GPU."""
    found = []
    for kind, count in counts.items():
        layer = model.kinds[kind]
        stored = 0 if layer.shares_cache else count
        for entry in layer.entries:
            row_bytes = formats.entry_bytes(entry, local_heads(entry, parallelism))
            spread = parallelism.dcp if entry.grows and not entry.limit else 1
            found.append(Row(entry, row_bytes, stored, count, spread))
    return found


def cache_size(
    model: Model,
    context: int,
    batch_size: int = 1,
    precision: Precision = PUBLISHED,
    block_size: int = 16,
    parallelism: Parallelism = ONE_GPU,
) -> CacheSize:
    """The cache after `context` tokens of each of `batch_size` sequences, on the GPU that holds the most.

    Stored = batch · Σ layers · rows(context) · Σ heads · row_bytes(width). Raises UserError on a length, batch or block
    that is no whole number from 1 to 10^12, or on ranks that do not divide the model.
    """
    for what, value in (("context", context), ("batch size", batch_size), ("block size", block_size)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
            raise UserError(f"{what} {value!r} is not a whole number from 1 to {MOST_TOKENS:,}")
    formats = Formats(model, precision)
    counts = fullest_stage(model, formats, parallelism, context, batch_size)
    rows = cache_rows(model, counts, formats, parallelism)
    return size_of(rows, context, parallelism.sequences(batch_size), block_size)


def size_of(rows: Iterable[Row], context: int, sequences: int, block_size: int) -> CacheSize:
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


def fullest_stage(model: Model, formats: Formats, parallelism: Parallelism, context: int, batch_size: int) -> dict[str, int]:
    """How many layers of each kind stand on the pipeline stage whose weights and stored cache are largest."""
    check(model, parallelism)
    if parallelism.pp == 1:
        return model.counts
    number = fullest_stage_number(model, formats, parallelism, context, batch_size)
    kinds = stages(model, parallelism.pp)[number]
    return {kind: kinds.count(kind) for kind in model.kinds}


def fullest_stage_number(model: Model, formats: Formats, parallelism: Parallelism, context: int, batch_size: int) -> int:
    """The pipeline stage whose weights and stored cache are largest, the first of equals."""
    candidates = []
    for number, kinds in enumerate(stages(model, parallelism.pp)):
        counts = {kind: kinds.count(kind) for kind in model.kinds}
        rows = cache_rows(model, counts, formats, parallelism)
        stored = size_of(rows, context, parallelism.sequences(batch_size), 16).stored
        weights = stage_weight_bytes(model, counts, formats, parallelism, number)
        candidates.append((stored + weights, -number))
    return -max(candidates)[1]


def weight_bytes(
    model: Model,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    context: int = 1,
    batch_size: int = 1,
) -> int:
    """Bytes of the weights on the GPU that holds the most weights and cache, scales of quantised matrices included."""
    formats = Formats(model, precision)
    check(model, parallelism)
    if parallelism.pp == 1:
        return stage_weight_bytes(model, model.counts, formats, parallelism, 0)
    counts = fullest_stage(model, formats, parallelism, context, batch_size)
    numbered = enumerate(stages(model, parallelism.pp))
    matching = [n for n, kinds in numbered if {k: kinds.count(k) for k in model.kinds} == counts]
    return max(stage_weight_bytes(model, counts, formats, parallelism, n) for n in matching)


def stage_weight_bytes(model: Model, counts: dict[str, int], formats: Formats, parallelism: Parallelism, stage: int) -> int:
    """Bytes of the weights of the layers in `counts`, with the embedding on the first stage and the head on the last."""
    total, last = 0, parallelism.pp - 1
    for name, weight, count in model.walk():
        kind = name.partition(".")[0] if "." in name else ""
        if kind in counts:
            held = min(counts[kind], count)
        elif name == "embedding":
            held = int(stage == 0 or (stage == last and model.tie_word_embeddings))
        elif name.startswith(("lm_head", "final_norm")):
            held = int(stage == last)
        else:
            held = int(stage == 0)
        if held:
            total += held * formats.weight_bytes(name, local(weight, parallelism))
    return total


def mha_ratio(model: Model, context: int, precision: Precision = PUBLISHED) -> float | None:
    """How many times as many bytes the model would store were every layer that attends plain MHA of its value width.

    No window, same dtype, one sequence of `context` tokens, over this model's stored bytes. None where nothing attends.
    """
    formats = Formats(model, precision)
    per_token = 0
    for kind, count in model.counts.items():
        for part in model.kinds[kind].mixers:
            heads, width = part.as_mha()
            if heads:
                per_token += count * sum(formats.entry_bytes(CacheEntry(role, heads, width), heads) for role in ("k", "v"))
    stored = cache_size(model, context, precision=precision).stored
    return per_token * context / stored if per_token and stored else None
