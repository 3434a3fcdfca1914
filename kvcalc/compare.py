"""The same model with its attention swapped: what a variant's name means, and what it leaves equal.

Layers, width, query heads, feed-forward parts and embeddings stay; every layer that attends gets the variant, recurrent
layers stay. Steps stack with `/`: `gqa:8/window:4096/int8` is all three at once.
"""

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.attention import BlockSparse, Compressed, Grouped, Latent, Mixer, Sparse
from kvcalc.batch import Batch, Parallelism, Precision
from kvcalc.dtypes import cache_dtypes, canonical
from kvcalc.errors import UserError
from kvcalc.ffn import FeedForward
from kvcalc.gpu import Gpu
from kvcalc.model import Layer, Model
from kvcalc.quality import quality_of
from kvcalc.roofline import placed_pass, records
from kvcalc.size import size_record
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.timing.calibration import Calibration

ATTENDS = (Grouped, Latent, Compressed)
FORMS = ("mha", "mqa", "gqa:8", "mla:512+64", "dsa:512+64+128@2048", "window:4096", "cla:2", "evict:4096", "none", "int8 …")
INDEX_HEADS = 64  # DeepSeek-V3.2's indexer


class Variant(NamedTuple):
    """A model with other attention; the cache dtype that the variant names, or ''; and what was held equal."""

    model: Model
    kv_cache_dtype: str
    held: str


def variant(model: Model, text: str) -> Variant:
    """`model` with the steps of `text` applied in order. Raises UserError naming the known forms."""
    dtype, held = "", ["layers, width, query heads, FFN"]
    for step in text.strip().lower().split("/"):
        name, _, value = step.strip().partition(":")
        if canonical(name) in cache_dtypes() and not value:
            dtype = canonical(name)
        elif name in _STEPS:
            model, also = _STEPS[name](model, value)
            held += [also] if also else []
        else:
            raise UserError(f"unknown variant {step!r}", hint=f"Known forms: {', '.join(FORMS)}; stack them with /")
    key, problem = model.problem()
    if problem:
        raise UserError(f"variant {text!r}: {key}: {problem}")
    return Variant(model, dtype, "; ".join(held))


def heads_of(part: Mixer) -> tuple[int, int, int]:
    """(query heads, key width, value width) that a grouped form of this attention would have."""
    if isinstance(part, Grouped):
        return part.num_attention_heads, part.head_dim, part.value_width
    heads, width = part.as_mha()
    return heads, width, width


def _mapped(model: Model, change: Callable[[Mixer], Mixer]) -> Model:
    """`model` with `change` applied to every part that attends; layers that shared a cache now store their own."""

    def swapped(parts: tuple[Mixer | FeedForward, ...]) -> tuple[Mixer | FeedForward, ...]:
        return tuple(change(p) if isinstance(p, ATTENDS) else p for p in parts)

    kinds = {
        kind: msgspec.structs.replace(layer, parts=swapped(layer.parts), shared=swapped(layer.shared), shares_cache=False)
        for kind, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds)


def _grouped(model: Model, groups: int | None) -> tuple[Model, str]:
    def change(part: Mixer) -> Mixer:
        heads, key, value = heads_of(part)
        count = heads if groups is None else groups
        if heads % count:
            raise UserError(f"gqa:{count}: {count} KV heads do not divide the {heads} query heads of {model.name}")
        return Grouped(num_attention_heads=heads, num_key_value_heads=count, head_dim=key, v_head_dim=value)

    return _mapped(model, change), "head widths"


def _mha(model: Model, value: str) -> tuple[Model, str]:
    _no_value("mha", value)
    return _grouped(model, None)


def _mqa(model: Model, value: str) -> tuple[Model, str]:
    _no_value("mqa", value)
    return _grouped(model, 1)


def _gqa(model: Model, value: str) -> tuple[Model, str]:
    return _grouped(model, parse_tokens(value, "gqa's KV heads"))


def _mla(model: Model, value: str) -> tuple[Model, str]:
    rank, rope = _numbers("mla", value, r"(\d+)\+(\d+)", "mla:512+64 (latent + RoPE key)")

    def change(part: Mixer) -> Mixer:
        heads, key, width = heads_of(part)
        return Latent(num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=key, qk_rope_head_dim=rope, v_head_dim=width)

    return _mapped(model, change), "value width; keys get the RoPE part beside"


def _dsa(model: Model, value: str) -> tuple[Model, str]:
    form = "dsa:512+64+128@2048 (latent + RoPE key + index key @ top-k)"
    rank, rope, index, top = _numbers("dsa", value, r"(\d+)\+(\d+)\+(\d+)@(\d+k?)", form)

    def change(part: Mixer) -> Mixer:
        heads, key, width = heads_of(part)
        return Sparse(
            num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=key, qk_rope_head_dim=rope, v_head_dim=width,
            index_topk=top, index_n_heads=INDEX_HEADS, index_head_dim=index,
        )  # fmt: skip

    return _mapped(model, change), f"value width; {INDEX_HEADS} index heads as in DeepSeek-V3.2"


def _limited(field: str) -> Callable[[Model, str], tuple[Model, str]]:
    def step(model: Model, value: str) -> tuple[Model, str]:
        tokens = parse_tokens(value, field)

        def change(part: Mixer) -> Mixer:
            if isinstance(part, BlockSparse) or not isinstance(part, Grouped):
                raise UserError(
                    f"{field}:{value}: {model.name} does not cache plain keys and values", hint="Begin with mha or gqa:8"
                )
            cleared = msgspec.structs.replace(part, sliding_window=None, attention_chunk_size=None, cache_budget=None)
            return msgspec.structs.replace(cleared, **{field: tokens})

        return _mapped(model, change), "KV heads"

    return step


def _cla(model: Model, value: str) -> tuple[Model, str]:
    """Every n-th layer that attends stores its cache, from the first on; the others read it and project no K and V."""
    share = parse_tokens(value, "cla's layers per cache")
    kinds: dict[str, Layer] = {}
    order, seen = [], 0
    for kind in model.order:
        layer = model.kinds[kind]
        attends = any(isinstance(p, ATTENDS) for p in layer.parts)
        borrows = attends and seen % share != 0
        seen += attends
        name = f"{kind}_shared" if borrows else kind
        kinds.setdefault(name, _borrowing(layer) if borrows else msgspec.structs.replace(layer, shares_cache=False))
        order.append(name)
    return msgspec.structs.replace(model, kinds=kinds, pattern=tuple(order)), "KV heads"


def _borrowing(layer: Layer) -> Layer:
    parts = tuple(msgspec.structs.replace(p, kv_projection=False) if isinstance(p, Grouped) else p for p in layer.parts)
    return msgspec.structs.replace(layer, parts=parts, shares_cache=True)


def _as_is(model: Model, value: str) -> tuple[Model, str]:
    _no_value("none", value)
    return model, "all"


def _no_value(name: str, value: str) -> None:
    if value:
        raise UserError(f"variant {name}:{value} takes no value", hint=f"Known forms: {', '.join(FORMS)}")


def _numbers(name: str, value: str, form: str, example: str) -> list[int]:
    match = re.fullmatch(form, value)
    if not match:
        raise UserError(f"variant {name}:{value} is incomplete", hint=f"Write {example}")
    return [parse_tokens(g, name) for g in match.groups()]


_STEPS: dict[str, Callable[[Model, str], tuple[Model, str]]] = {
    "none": _as_is,
    "mha": _mha,
    "mqa": _mqa,
    "gqa": _gqa,
    "mla": _mla,
    "dsa": _dsa,
    "window": _limited("sliding_window"),
    "evict": _limited("cache_budget"),
    "cla": _cla,
}


def compare_records(
    chosen: Sequence[tuple[str, Variant]],
    gpu: Gpu,
    contexts: Sequence[int],
    batches: Sequence[int],
    precision: Precision,
    ranks: Parallelism,
    block_size: int = 16,
    mla_form: str = "auto",
    calibration: "Calibration | None" = None,
) -> list[dict[str, Any]]:
    """A record for each variant, batch size and context (fastest): sizes, total of one decode step, sequences that fit.

    weight_bytes: held, as in `size`; the other figures of a step are those of `roofline`'s total on `gpu`.
    reduction: the first variant's stored bytes over this one's. max_num_seqs: whole sequences of this context beside the
    weights in the GPU's memory, with nothing else in it. Raises UserError as `size_record` and `forward` do.
    """
    found = []
    bases: dict[tuple[int, int], int] = {}
    for name, (model, dtype, held) in chosen:
        used = msgspec.structs.replace(precision, kv_cache_dtype=dtype) if dtype else precision
        for batch_size, context in product(batches, contexts):
            record = size_record(model, context, batch_size, used, block_size, ranks)
            placed = placed_pass(model, Batch.decode(context, batch_size), gpu, used, ranks, mla_form)
            stored, common = record["kv_cache_bytes"], {"gpu": gpu.name, "phase": "decode"}
            base = bases.setdefault((batch_size, context), stored)
            free = gpu.memory_bytes - record["weight_bytes"]
            each = -(-stored // ranks.sequences(batch_size))
            whole = records(placed, common, gpu, calibration)[-1]
            found.append(
                {"variant": name, **record, "reduction": base / stored if stored else None}
                | {k: v for k, v in whole.items() if k != "weight_bytes"}
                | {"max_num_seqs": max(0, free // each) if each else None, "held_equal": held}
                | _quality(name)
            )
    return found


def _quality(name: str) -> dict[str, str | None]:
    """What is known of a variant's quality, with its source; null for a variant of which nothing is noted here."""
    known = quality_of(name)
    heads, note, trades = known or (None, None, None)
    return {"head_diversity": heads, "quality": note, "trades": trades}
