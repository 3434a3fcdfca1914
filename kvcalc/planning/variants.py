"""The same model with its attention swapped: what a variant's name means, and what it leaves equal.

Layers, width, query heads, feed-forward parts and embeddings stay; every layer that attends gets
the variant, recurrent layers stay. Steps stack with `/`: `gqa:8/window:4096/int8` is all three at
once.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Sublayer
from kvcalc.model.model import Layer, Model
from kvcalc.records import Record
from kvcalc.storage.formats import cache_dtypes, canonical
from kvcalc.units import parse_tokens

FORMS = (
    "mha",
    "mqa",
    "gqa:8",
    "mla:512+64",
    "dsa:512+64+128@2048",
    "window:4096",
    "hybrid:5/window:4096",
    "cla:2",
    "evict:4096",
    "none",
    "int8 …",
)
# DeepSeek-V2's and V3's latent and RoPE key; V3.2's indexer beside them
USUAL_MLA, USUAL_DSA = "512+64", "512+64+128@2048"
INDEX_HEADS = 64  # DeepSeek-V3.2's indexer
_UNLIMITED = {
    "sliding_window": None,
    "attention_chunk_size": None,
    "cache_budget": None,
}
# steps, and the field that each sets
_LIMITS = {"window": "sliding_window", "evict": "cache_budget"}


class Variant(NamedTuple):
    """A model with other attention.

    Attributes:
        kv_cache_dtype: The cache dtype that the variant names, or ''.
        held: What stayed equal.
    """

    model: Model
    kv_cache_dtype: str
    held: str


def variant(model: Model, text: str) -> Variant:
    """`model` with the steps of `text` applied in order. Raises UserError naming the known
    forms."""
    dtype, stored = "", ["layers, width, query heads, FFN"]
    split: dict[str, str] = {}
    done: dict[str, str] = {}
    for step in map(str.strip, text.strip().lower().split("/")):
        name, _, value = step.partition(":")
        also, undone = "", [done[n] for n in done if n in _UNDOES.get(name, ())]
        if undone:
            raise UserError(
                f"variant {text!r}: {step} undoes {undone[0]}",
                hint=f"Write {step} before it, or one alone",
            )
        if canonical(name) in cache_dtypes() and not value:
            dtype = canonical(name)
        elif name in _NEEDS_VALUE and not value:
            example = next(form for form in FORMS if form.startswith(f"{name}:"))
            raise UserError(f"variant {step!r} needs a number", hint=f"Write {example}")
        elif name in _LIMITS:
            model, also = _limited(
                model, name, value, {*split} or {*model.kinds}, _LIMITS.keys() & done
            )
        elif name == "hybrid":
            model, also, split = _hybrid(model, value)
        elif name in _PLAIN_STEPS:
            if value:
                hint = f"Known forms: {', '.join(FORMS)}"
                raise UserError(f"variant {name}:{value} takes no value", hint=hint)
            model, also = _PLAIN_STEPS[name](model)
        elif name in _STEPS:
            model, also = _STEPS[name](model, value)
        else:
            raise UserError(
                f"unknown variant {step!r}",
                hint=f"Known forms: {', '.join(FORMS)}; stack them with /",
            )
        stored += [also] if also else []
        done[name] = step
    beside = [
        (model.kinds[near], model.kinds[whole])
        for near, whole in split.items()
        if {near, whole} <= {*model.kinds}
    ]
    if beside and all(near.label == whole.label for near, whole in beside):
        if [*done][-1] != "hybrid":
            why = f"all layers of {model.name} would see {beside[0][0].label}"
            raise UserError(
                f"variant {text!r}: {why}",
                hint="Give the other layers another window, as in hybrid:5/window:1024",
            )
        raise UserError(
            f"variant {text!r}: a hybrid names what its other layers see",
            hint="Write hybrid:5/window:4096",
        )
    key, problem = model.problem()
    if problem:
        raise UserError(f"variant {text!r}: {key}: {problem}")
    return Variant(model, dtype, "; ".join(stored))


def _mapped(layer: Layer, change: Callable[[Sublayer], Sublayer]) -> Layer:
    """A layer with `change` applied to every part that attends."""

    def swapped(parts: tuple[Sublayer, ...]) -> tuple[Sublayer, ...]:
        return tuple(change(p) if p.attends else p for p in parts)

    return msgspec.structs.replace(
        layer, parts=swapped(layer.parts), shared=swapped(layer.shared)
    )


def _replaced(model: Model, change: Callable[[Sublayer], Sublayer]) -> Model:
    """`model` with `change`, which makes other parts, applied to all that attend: each layer stores
    a cache of its own."""
    kinds = {
        k: msgspec.structs.replace(_mapped(layer, change), shares_cache=False)
        for k, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds)


def _grouped(model: Model, groups: int | None) -> tuple[Model, str]:
    """Return the model with this many KV heads, or as MHA if None. MHA's keys are as wide as its
    values."""
    narrows_keys = False

    def change(part: Sublayer) -> Sublayer:
        nonlocal narrows_keys
        heads, key, value = part.as_mha()
        count = groups or heads
        if groups is None and key != value:
            narrows_keys = True
            key = value
        if heads % count:
            message = f"{count} KV heads do not divide the {heads} query heads of {model.name}"
            raise UserError(f"gqa:{count}: {message}")
        fields = _fields(Grouped, part) if isinstance(part, Grouped) else {}
        fields |= _UNLIMITED | {
            "num_attention_heads": heads,
            "num_key_value_heads": count,
            "head_dim": key,
            "v_head_dim": value,
            "kv_projection": True,
            "sink_tokens": 0,
        }
        return Grouped(**fields)

    changed = _replaced(model, change)
    return changed, "value width, which keys get too" if narrows_keys else "head widths"


def _gqa(model: Model, value: str) -> tuple[Model, str]:
    if not value:
        raise UserError("gqa's KV heads '' is not a number", hint="Write gqa:8")
    return _grouped(model, parse_tokens(value, "gqa's KV heads"))


def _mla(model: Model, value: str) -> tuple[Model, str]:
    example = "mla:512+64 (latent + RoPE key)"
    rank, rope = _numbers("mla", value or USUAL_MLA, r"(\d+)\+(\d+)", example)
    changed = _latent(model, Latent, {"kv_lora_rank": rank, "qk_rope_head_dim": rope})
    return changed, "value width; keys get the RoPE part beside"


def _dsa(model: Model, value: str) -> tuple[Model, str]:
    example = "dsa:512+64+128@2048 (latent + RoPE key + index key @ top-k)"
    form = r"(\d+)\+(\d+)\+(\d+)@(\d+k?)"
    rank, rope, index, top = _numbers("dsa", value or USUAL_DSA, form, example)
    sizes = {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "index_topk": top,
        "index_head_dim": index,
    }
    stored = f"value width; {INDEX_HEADS} index heads as in DeepSeek-V3.2 where it has none"
    return _latent(model, Sparse, sizes), stored


def _latent(model: Model, spec: type[Latent], sizes: dict[str, int]) -> Model:
    """Return the model with latent attention of these sizes. Other sizes of a latent stay."""

    def change(part: Sublayer) -> Sublayer:
        if isinstance(part, spec):
            fields = _fields(spec, part)
        elif isinstance(part, Latent):
            fields = _fields(Latent, part)
        else:
            heads, key, width = part.as_mha()
            fields = {
                "num_attention_heads": heads,
                "qk_nope_head_dim": key,
                "v_head_dim": width,
            }
        if spec is Sparse:
            fields.setdefault("index_n_heads", INDEX_HEADS)
        return spec(**fields | sizes)

    return _replaced(model, change)


def _fields(spec: type[Sublayer], part: Sublayer) -> Record:
    """The fields of `part` that `spec` has too: what a variant of it does not name, it keeps."""
    return {name: getattr(part, name) for name in spec.__struct_fields__}


def _limited(
    model: Model, name: str, value: str, which: set[str], beside: set[str]
) -> tuple[Model, str]:
    """Every layer of the kinds in `which` that attends sees or keeps so many tokens; who reads
    whose cache stays as it is.

    Of its other limits those of the steps in `beside` stay: a window and a budget hold at once.
    """
    field = _LIMITS[name]
    tokens = parse_tokens(value, field)

    def change(part: Sublayer) -> Sublayer:
        if isinstance(part, Grouped) and not any(
            e.role not in ("k", "v") or e.top for e in part.cache()
        ):
            kept = {_LIMITS[step]: getattr(part, _LIMITS[step]) for step in beside}
            limited = msgspec.structs.replace(part, **_UNLIMITED | kept | {field: tokens})
            if all(e.limit for e in limited.cache()):
                return limited
        raise UserError(
            f"{name}:{value}: {model.name} does not cache plain keys and values",
            hint="Begin with mha or gqa:8",
        )

    kinds = {
        kind: _mapped(layer, change) if kind in which else layer
        for kind, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds), "KV heads"


def _hybrid(model: Model, value: str) -> tuple[Model, str, dict[str, str]]:
    """Every n-th layer that attends stays; the others become kinds of their own, for a window or
    budget behind the slash.

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
    return (
        msgspec.structs.replace(model, kinds=kinds, pattern=tuple(order)),
        f"every {every}. layer as it was",
        split,
    )


def _free(kind: str, ending: str, model: Model) -> str:
    """A name for layers made of a kind, that no kind of the model has."""
    name = kind + ending
    while name in model.kinds:
        name += "_"
    return name


def _cla(model: Model, value: str) -> tuple[Model, str]:
    """Of the layers that attend and keep the same rows every n-th stores its cache, from the first
    on; the others read it.

    These project no K and V. A layer with a window and one without read no cache of each other:
    neither holds what the other sees.
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
    """A layer with a cache of its own, or with another's. Raises UserError where a part has no form
    without its own."""
    parts = [(p.storing(own) if p.attends else p) for p in layer.parts]
    if any(p is None for p in parts):
        raise UserError(
            f"cla: no form of {layer.label} of {model.name} is known that reads another "
            "layer's cache",
            hint="Begin with mha or gqa:8",
        )
    return msgspec.structs.replace(
        layer, parts=tuple(p for p in parts if p), shares_cache=not own
    )


def _numbers(name: str, value: str, form: str, example: str) -> list[int]:
    match = re.fullmatch(form, value)
    if not match:
        raise UserError(f"variant {name}:{value} is incomplete", hint=f"Write {example}")
    return [parse_tokens(g, name) for g in match.groups()]


# steps without a value
_PLAIN_STEPS: dict[str, Callable[[Model], tuple[Model, str]]] = {
    "none": lambda model: (model, "attention"),
    "mha": lambda model: _grouped(model, None),
    "mqa": lambda model: _grouped(model, 1),
}
_STEPS: dict[str, Callable[[Model, str], tuple[Model, str]]] = {
    "gqa": _gqa,
    "mla": _mla,
    "dsa": _dsa,
    "cla": _cla,
}
NAMES = (*_PLAIN_STEPS, *_STEPS, *_LIMITS, "hybrid")
_FORMS = ("mha", "mqa", "gqa", "mla", "dsa")
_NEEDS_VALUE = ("gqa", "cla", "hybrid", *_LIMITS)
# steps, and earlier ones that they leave nothing of
_UNDOES = dict.fromkeys(_FORMS, (*_LIMITS, "cla", "hybrid"))
