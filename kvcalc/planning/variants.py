"""The same model with its attention swapped: what a variant's name means, and what it leaves equal.

Layers, width, query heads, feed-forward parts and embeddings stay; every layer that attends gets the variant, recurrent
layers stay. Steps stack with `/`: `gqa:8/window:4096/int8` is all three at once.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
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
LOCAL = "_local"  # ends the name of a kind whose tokens a hybrid limits


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
    split = {kind: layer.label for kind, layer in model.kinds.items() if kind.endswith(LOCAL)}
    if split and all(label == _whole(model, kind) for kind, label in split.items()):
        raise UserError(f"variant {text!r}: a hybrid names what its other layers see", hint="Write hybrid:5/window:4096")
    key, problem = model.problem()
    if problem:
        raise UserError(f"variant {text!r}: {key}: {problem}")
    return Variant(model, dtype, "; ".join(held))


def _whole(model: Model, kind: str) -> str:
    """The label of the layers beside which a hybrid put those of `kind`."""
    return model.kinds[kind.removesuffix(LOCAL)].label


def _mapped(model: Model, change: Callable[[Part], Part]) -> Model:
    """`model` with `change` applied to every part that attends; layers that shared a cache now store their own."""

    def swapped(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(change(p) if p.attends else p for p in parts)

    kinds = {
        kind: msgspec.structs.replace(layer, parts=swapped(layer.parts), shared=swapped(layer.shared), shares_cache=False)
        for kind, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds)


def _grouped(model: Model, groups: int | None) -> tuple[Model, str]:
    def change(part: Part) -> Part:
        heads, key, value = part.as_mha()
        count = heads if groups is None else groups
        if heads % count:
            raise UserError(f"gqa:{count}: {count} KV heads do not divide the {heads} query heads of {model.name}")
        kept = _fields(Grouped, part) if isinstance(part, Grouped) else {"num_attention_heads": heads, "head_dim": key}
        named = {"num_key_value_heads": count, "v_head_dim": value, "kv_projection": True, "sink_tokens": 0}
        return Grouped(**kept | _UNLIMITED | named)

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
    rank, rope = _numbers("mla", value or USUAL_MLA, r"(\d+)\+(\d+)", "mla:512+64 (latent + RoPE key)")

    def change(part: Part) -> Part:
        if isinstance(part, Latent):
            return Latent(**_fields(Latent, part) | {"kv_lora_rank": rank, "qk_rope_head_dim": rope})
        heads, key, width = part.as_mha()
        return Latent(num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=key, qk_rope_head_dim=rope, v_head_dim=width)

    return _mapped(model, change), "value width; keys get the RoPE part beside"


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

    return _mapped(model, change), f"value width; {INDEX_HEADS} index heads as in DeepSeek-V3.2 where it has none"


def _fields(spec: type[Part], part: Part) -> dict[str, Any]:
    """The fields of `part` that `spec` has too: what a variant of it does not name, it keeps."""
    return {name: getattr(part, name) for name in spec.__struct_fields__}


def _limited(field: str) -> Callable[[Model, str], tuple[Model, str]]:
    def step(model: Model, value: str) -> tuple[Model, str]:
        tokens = parse_tokens(value, field)

        def change(part: Part) -> Part:
            if not isinstance(part, Grouped) or any(e.role not in ("k", "v") or e.top for e in part.cache()):
                raise UserError(
                    f"{field}:{value}: {model.name} does not cache plain keys and values", hint="Begin with mha or gqa:8"
                )
            return msgspec.structs.replace(part, **_UNLIMITED | {field: tokens})

        changed = _mapped(model, change)
        whole = {kind for kind in model.kinds if kind + LOCAL in model.kinds}  # of a hybrid, what stays as it is
        kinds = {kind: model.kinds[kind] if kind in whole else layer for kind, layer in changed.kinds.items()}
        return msgspec.structs.replace(changed, kinds=kinds), "KV heads"

    return step


def _hybrid(model: Model, value: str) -> tuple[Model, str]:
    """Every n-th layer that attends stays; the others become kinds of their own, for a window or budget behind the slash."""
    every = parse_tokens(value, "hybrid's layers")
    kinds, order, seen = dict(model.kinds), [], 0
    for kind in model.order:
        seen += any(p.attends for p in model.kinds[kind].parts)
        local = any(p.attends for p in model.kinds[kind].parts) and seen % every != 0
        if local:
            kinds[kind + LOCAL] = model.kinds[kind]
        order.append(kind + LOCAL if local else kind)
    return msgspec.structs.replace(model, kinds=kinds, pattern=tuple(order)), f"every {every}. layer as it was"


def _cla(model: Model, value: str) -> tuple[Model, str]:
    """Every n-th layer that attends stores its cache, from the first on; the others read it and project no K and V."""
    share = parse_tokens(value, "cla's layers per cache")
    kinds: dict[str, Layer] = {}
    order, seen = [], 0
    for kind in model.order:
        layer = model.kinds[kind]
        attends = any(p.attends for p in layer.parts)
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
    "window": _limited("sliding_window"),
    "evict": _limited("cache_budget"),
    "hybrid": _hybrid,
    "cla": _cla,
}
