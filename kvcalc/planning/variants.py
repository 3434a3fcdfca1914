"""The same model with its attention swapped: what a variant's name means, and what it leaves equal.

Layers, width, query heads, feed-forward parts and embeddings stay; every layer that attends gets the variant, recurrent
layers stay. Steps stack with `/`: `gqa:8/window:4096/int8` is all three at once.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part
from kvcalc.model.spec import Layer, Model
from kvcalc.storage.dtypes import cache_dtypes, canonical
from kvcalc.units import parse_tokens

FORMS = (
    "mha", "mqa", "gqa:8", "mla:512+64", "dsa:512+64+128@2048", "window:4096", "hybrid:5/window:4096", "cla:2", "evict:4096",
    "none", "int8 …",
)  # fmt: skip
USUAL_MLA, USUAL_DSA = "512+64", "512+64+128@2048"  # DeepSeek-V2's and V3's latent and RoPE key; V3.2's indexer beside them
INDEX_HEADS = 64  # DeepSeek-V3.2's indexer
_UNLIMITED = {"sliding_window": None, "attention_chunk_size": None, "cache_budget": None}
_LIMITS = {"window": "sliding_window", "evict": "cache_budget"}  # steps, and the field that each sets


class Variant(NamedTuple):
    """A model with other attention; the cache dtype that the variant names, or ''; and what was held equal."""

    model: Model
    kv_cache_dtype: str
    held: str


def variant(model: Model, text: str) -> Variant:
    """`model` with the steps of `text` applied in order. Raises UserError naming the known forms."""
    dtype, held = "", ["layers, width, query heads, FFN"]
    split: dict[str, str] = {}
    done: dict[str, str] = {}
    for step in map(str.strip, text.strip().lower().split("/")):
        name, _, value = step.partition(":")
        also, undone = "", [done[n] for n in done if n in _UNDOES.get(name, ())]
        if undone:
            raise UserError(f"variant {text!r}: {step} undoes {undone[0]}", hint=f"Write {step} before it, or one alone")
        if canonical(name) in cache_dtypes() and not value:
            dtype = canonical(name)
        elif name in _LIMITS:
            model, also = _limited(model, name, value, {*split} or {*model.kinds}, _LIMITS.keys() & done)
        elif name == "hybrid":
            model, also, split = _hybrid(model, value)
        elif name in _STEPS:
            model, also = _STEPS[name](model, value)
        else:
            raise UserError(f"unknown variant {step!r}", hint=f"Known forms: {', '.join(FORMS)}; stack them with /")
        held += [also] if also else []
        done[name] = step
    beside = [(model.kinds[near], model.kinds[whole]) for near, whole in split.items() if {near, whole} <= {*model.kinds}]
    if beside and all(near.label == whole.label for near, whole in beside):
        if [*done][-1] != "hybrid":
            why = f"all layers of {model.name} would see {beside[0][0].label}"
            raise UserError(f"variant {text!r}: {why}", hint="Give the other layers another window, as in hybrid:5/window:1024")
        raise UserError(f"variant {text!r}: a hybrid names what its other layers see", hint="Write hybrid:5/window:4096")
    key, problem = model.problem()
    if problem:
        raise UserError(f"variant {text!r}: {key}: {problem}")
    return Variant(model, dtype, "; ".join(held))


def _mapped(layer: Layer, change: Callable[[Part], Part]) -> Layer:
    """A layer with `change` applied to every part that attends."""

    def swapped(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(change(p) if p.attends else p for p in parts)

    return msgspec.structs.replace(layer, parts=swapped(layer.parts), shared=swapped(layer.shared))


def _replaced(model: Model, change: Callable[[Part], Part]) -> Model:
    """`model` with `change`, which makes other parts, applied to all that attend: each layer stores a cache of its own."""
    kinds = {k: msgspec.structs.replace(_mapped(layer, change), shares_cache=False) for k, layer in model.kinds.items()}
    return msgspec.structs.replace(model, kinds=kinds)


def _grouped(model: Model, groups: int | None) -> tuple[Model, str]:
    """Every layer that attends with so many KV heads, or as MHA with None, whose keys are as wide as its values."""
    narrowed = []

    def change(part: Part) -> Part:
        heads, key, value = part.as_mha()
        count = heads if groups is None else groups
        if groups is None and key != value:
            narrowed.append(part)
            key = value
        if heads % count:
            raise UserError(f"gqa:{count}: {count} KV heads do not divide the {heads} query heads of {model.name}")
        kept = _fields(Grouped, part) if isinstance(part, Grouped) else {"num_attention_heads": heads, "head_dim": key}
        named = {"num_key_value_heads": count, "v_head_dim": value, "kv_projection": True, "sink_tokens": 0}
        return Grouped(**kept | _UNLIMITED | named | {"head_dim": key})

    changed = _replaced(model, change)
    return changed, "value width, which keys get too" if narrowed else "head widths"


def _mha(model: Model, value: str) -> tuple[Model, str]:
    _no_value("mha", value)
    return _grouped(model, None)


def _mqa(model: Model, value: str) -> tuple[Model, str]:
    _no_value("mqa", value)
    return _grouped(model, 1)


def _gqa(model: Model, value: str) -> tuple[Model, str]:
    if not value:
        raise UserError("gqa's KV heads '' is not a number", hint="Write gqa:8")
    return _grouped(model, parse_tokens(value, "gqa's KV heads"))


def _mla(model: Model, value: str) -> tuple[Model, str]:
    rank, rope = _numbers("mla", value or USUAL_MLA, r"(\d+)\+(\d+)", "mla:512+64 (latent + RoPE key)")

    def change(part: Part) -> Part:
        if isinstance(part, Latent):
            return Latent(**_fields(Latent, part) | {"kv_lora_rank": rank, "qk_rope_head_dim": rope})
        heads, key, width = part.as_mha()
        return Latent(num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=key, qk_rope_head_dim=rope, v_head_dim=width)

    return _replaced(model, change), "value width; keys get the RoPE part beside"


def _dsa(model: Model, value: str) -> tuple[Model, str]:
    form = "dsa:512+64+128@2048 (latent + RoPE key + index key @ top-k)"
    rank, rope, index, top = _numbers("dsa", value or USUAL_DSA, r"(\d+)\+(\d+)\+(\d+)@(\d+k?)", form)

    named: dict[str, Any] = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "index_topk": top, "index_head_dim": index}

    def change(part: Part) -> Part:
        if isinstance(part, Sparse):
            return Sparse(**_fields(Sparse, part) | named)
        if isinstance(part, Latent):
            return Sparse(**_fields(Latent, part) | named, index_n_heads=INDEX_HEADS)
        heads, key, width = part.as_mha()
        own: dict[str, Any] = {"num_attention_heads": heads, "qk_nope_head_dim": key, "v_head_dim": width}
        return Sparse(**own, **named, index_n_heads=INDEX_HEADS)

    return _replaced(model, change), f"value width; {INDEX_HEADS} index heads as in DeepSeek-V3.2 where it has none"


def _fields(spec: type[Part], part: Part) -> dict[str, Any]:
    """The fields of `part` that `spec` has too: what a variant of it does not name, it keeps."""
    return {name: getattr(part, name) for name in spec.__struct_fields__}


def _limited(model: Model, name: str, value: str, which: set[str], beside: set[str]) -> tuple[Model, str]:
    """Every layer of the kinds in `which` that attends sees or keeps so many tokens; who reads whose cache stays as it is.

    Of its other limits those of the steps in `beside` stay: a window and a budget hold at once.
    """
    field = _LIMITS[name]
    tokens = parse_tokens(value, field)

    def change(part: Part) -> Part:
        if isinstance(part, Grouped) and not any(e.role not in ("k", "v") or e.top for e in part.cache()):
            kept = {_LIMITS[step]: getattr(part, _LIMITS[step]) for step in beside}
            limited = msgspec.structs.replace(part, **_UNLIMITED | kept | {field: tokens})
            if all(e.limit for e in limited.cache()):
                return limited
        raise UserError(f"{name}:{value}: {model.name} does not cache plain keys and values", hint="Begin with mha or gqa:8")

    kinds = {kind: _mapped(layer, change) if kind in which else layer for kind, layer in model.kinds.items()}
    return msgspec.structs.replace(model, kinds=kinds), "KV heads"


def _hybrid(model: Model, value: str) -> tuple[Model, str, dict[str, str]]:
    """Every n-th layer that attends stays; the others become kinds of their own, for a window or budget behind the slash.

    With the kinds that are new, and beside which of the old ones they stand.
    """
    every = parse_tokens(value, "hybrid's layers")
    kinds, order, seen = dict(model.kinds), [], 0
    local = {kind: _free(kind, "_local", model) for kind in model.kinds}
    for kind in model.order:
        seen += any(p.attends for p in model.kinds[kind].parts)
        if any(p.attends for p in model.kinds[kind].parts) and seen % every != 0:
            kinds[local[kind]] = model.kinds[kind]
            order.append(local[kind])
        else:
            order.append(kind)
    split = {near: kind for kind, near in local.items() if near in kinds}
    return msgspec.structs.replace(model, kinds=kinds, pattern=tuple(order)), f"every {every}. layer as it was", split


def _free(kind: str, ending: str, model: Model) -> str:
    """A name for layers made of a kind, that no kind of the model has."""
    name = kind + ending
    while name in model.kinds:
        name += "_"
    return name


def _cla(model: Model, value: str) -> tuple[Model, str]:
    """Of the layers that attend and keep the same rows every n-th stores its cache, from the first on; the others read it.

    These project no K and V. A layer with a window and one without read no cache of each other: neither holds what the other
    sees.
    """
    share = parse_tokens(value, "cla's layers per cache")
    kinds: dict[str, Layer] = {}
    order, seen = [], Counter[tuple[CacheEntry, ...]]()
    for kind in model.order:
        layer = model.kinds[kind]
        attends = any(p.attends for p in layer.parts)
        borrows = attends and seen[layer.entries] % share != 0
        seen[layer.entries] += 1
        name = _free(kind, "_shared", model) if borrows else kind
        kinds.setdefault(name, _storing(model, layer, not borrows) if attends else layer)
        order.append(name)
    return msgspec.structs.replace(model, kinds=kinds, pattern=tuple(order)), "KV heads"


def _storing(model: Model, layer: Layer, own: bool) -> Layer:
    """A layer with a cache of its own, or with another's. Raises UserError where a part has no form without its own."""
    parts = [(p.storing(own) if p.attends else p) for p in layer.parts]
    if any(p is None for p in parts):
        raise UserError(
            f"cla: no form of {layer.label} of {model.name} is known that reads another layer's cache",
            hint="Begin with mha or gqa:8",
        )
    return msgspec.structs.replace(layer, parts=tuple(p for p in parts if p), shares_cache=not own)


def _as_is(model: Model, value: str) -> tuple[Model, str]:
    _no_value("none", value)
    return model, "attention"


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
    "cla": _cla,
}
NAMES = (*_STEPS, *_LIMITS, "hybrid")
_FORMS = ("mha", "mqa", "gqa", "mla", "dsa")
_UNDOES = dict.fromkeys(_FORMS, (*_LIMITS, "cla", "hybrid"))  # steps, and earlier ones that they leave nothing of
