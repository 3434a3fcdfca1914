"""Attention variants of a model, by name, and the published quality of formats and variants.

A variant changes the attention of every layer that attends. It does not change the number of
layers, the width, the query heads, the feed-forward parts, the embeddings and recurrent layers. `/`
combines steps: `gqa:8/window:4096/int8` has 8 KV heads, a window of 4,096 tokens and a cache in
int8.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Sublayer
from kvcalc.model.model import Layer, Model
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.storage.formats import FORMATS, cache_dtypes, canonical
from kvcalc.storage.quantization import LOSSES, Score, cache_family, load_weight_format, loss_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import parse_tokens


def _stored_formats(model: Model, precision: Precision) -> tuple[str, str]:
    """Return the narrowest format of the weights, and the cache's label."""
    formats = formats_of(model, precision)
    return min(formats.weights_label.split(" + "), key=_weight_bits), formats.kv_cache_dtype


def precision_losses(model: Model, precision: Precision) -> list[str]:
    """Return the published quality losses of quantised weights or a quantised KV cache, as texts.

    A text is for the weights or for the KV cache. It is left out if they have at least as many bits
    as in the published checkpoint. A text begins, for example, with "cache in fp8, published in
    bf16: ".

    Args:
        model: The model, which states the data types of the published checkpoint.
        precision: Data types of weights and KV cache that are used.
    """
    formats = zip(
        ("weights", "cache"),
        _stored_formats(model, precision),
        _stored_formats(model, PUBLISHED),
        (_weight_bits, _cache_bits),
    )
    return [
        f"{content} in {name}, published in {former}: {loss_of(content, name)}"
        for content, name, former, bits in formats
        if bits(name) < bits(former)
    ]


def narrower_formats(deployment: TimedDeployment, is_weights_only: bool) -> dict[str, str]:
    """Return narrower data types for a deployment that lacks memory, by field of `Precision`.

    If the GPU has fp8 matrix units, weights and KV cache may become fp8. Weights become int4 if
    they are fp8 already or the GPU has no fp8 unit. A field that cannot get narrower is left out.
    Example: {"kv_cache_dtype": "fp8", "quantization": "fp8"}.

    Args:
        deployment: The deployment, which states the present data types and the GPU.
        is_weights_only: Whether to suggest only narrower weights, because a smaller KV cache does
            not help.
    """
    weights, cache = _stored_formats(deployment.model, deployment.precision)
    names = ["fp8", "int4"] if "fp8" in deployment.gpu.flops_per_s else ["int4"]
    narrower = {}
    if "fp8" in names and _cache_bits(cache) > 8 and not is_weights_only:
        narrower["kv_cache_dtype"] = "fp8"
    smaller = [name for name in names if _weight_bits(name) < _weight_bits(weights)]
    return narrower | ({"quantization": smaller[0]} if smaller else {})


def _cache_bits(label: str) -> float:
    """Return the bits of the narrowest format in a cache's label. Packed rows count as the format
    of their packed elements."""
    widths = [FORMATS[part].bits for part in label.split(" + ") if part in FORMATS]
    return min(widths, default=8 if label.startswith("fp8") else 4)


def _weight_bits(name: str) -> float:
    try:
        return load_weight_format(name).bits or 4
    except UserError:
        return 4


class Quality(msgspec.Struct, frozen=True):
    """Published findings on the model quality of an attention variant, such as MQA or a window.

    Attributes:
        head_diversity: How different keys and values of the heads can be: "full", "grouped" or
            "shared". "as before" means that the variant, such as a window, does not change this.
        note: One or more published findings with scores and sources, as text.
        trades: What the variant gives up, as a noun such as "memory" or "quality".
        scores: Published benchmark scores that `note` cites. Each names its benchmark and model.
    """

    head_diversity: str
    note: str
    trades: str
    scores: Sequence[Score] = ()


QUALITY = msgspec.json.decode(
    Path(__file__).with_name("quality.json").read_bytes(), type=dict[str, Quality]
)
for _family, _loss in LOSSES["cache"].items():
    QUALITY[_family] = Quality(
        "as before",
        f"{_loss.finding}, {_loss.scores[0]} ({_loss.scores[0].source})",
        "precision",
        _loss.scores,
    )
REPLACING_STEPS = "mha gqa mqa mla dsa"  # steps that replace the whole attention
# the variant by its name in a model's attention
OWN_NAMES = {name.upper(): name for name in REPLACING_STEPS.split()} | {
    "window": "window",
    "budget": "evict",
}


def quality_of(variant: str, attention: str) -> dict[str, Quality]:
    """Return published findings on the model quality of each step in an attention variant's name.

    The result maps a step to its findings. Example: "gqa:8/window:4096" has the steps "gqa:8" and
    "window:4096". Steps without published findings are left out.

    Args:
        variant: The variant's name. "none" in it stands for the steps in `attention`.
        attention: Description of the model's own attention, such as "GQA-8 window 4096".
    """
    steps = {}
    names = [word.strip().lower() for word in variant.split("/")]
    if "none" in names:
        own = re.findall(rf"\b({'|'.join(OWN_NAMES)})\b", attention)
        steps = {word: OWN_NAMES[word] for word in own}
    for step in names:
        is_dtype = canonical(step) in cache_dtypes()
        steps[step] = cache_family(step) if is_dtype else step.partition(":")[0]
    return {step: QUALITY[name] for step, name in steps.items() if name in QUALITY}


FORMS = (
    "mha, mqa, gqa:8, mla:512+64, mla:512+64/expanded, dsa:512+64+128@2048, window:4096, "
    "hybrid:5/window:4096, full, cla:2, evict:4096, none, int8 …"
)
INDEX_HEADS = 64  # DeepSeek-V3.2's indexer
# the field that limits the tokens of a layer, by step
LIMITS = {"window": "sliding_window", "evict": "cache_budget"}
UNLIMITED = {"sliding_window": None, "attention_chunk_size": None, "cache_budget": None}
MLA_STEPS = ("absorbed", "expanded")
PLAIN_STEPS = ("none", "full", "global", "mha", "mqa", *MLA_STEPS)
NUMBER_STEPS = ("gqa", "cla", "hybrid", *LIMITS)
NAMES = (*PLAIN_STEPS, "mla", "dsa", *NUMBER_STEPS)
# steps whose effect a later step of REPLACING_STEPS undoes
REPLACED_STEPS = (*LIMITS, "cla", "hybrid")
_MLA_SIZES = re.compile(r"(?P<kv_lora_rank>\d+)(\+(?P<qk_rope_head_dim>\d+))?")
_DSA_SIZES = re.compile(rf"{_MLA_SIZES.pattern}\+(?P<index_head_dim>\d+)@(?P<index_topk>\d+k?)")
ChangePart = Callable[[Sublayer], Sublayer]


class Variant(NamedTuple):
    """A model whose attention was replaced, for example by MQA, for a comparison.

    Attributes:
        model: The changed model.
        kv_cache_dtype: Data type of the KV cache that the variant's name states; "" if it states
            none.
        mla_form: Form of multi-head latent attention (MLA) that the name states, "absorbed" or
            "expanded"; "" if it states none.
        held_equal: What the variant leaves unchanged in the model, as text such as "layers, width,
            query heads, FFN".
    """

    model: Model
    kv_cache_dtype: str
    mla_form: str
    held_equal: str

    def precision(self, precision: Precision) -> Precision:
        """Return `precision` with the data type of the KV cache that the variant's name states.

        If the name states none, `precision` is returned unchanged.

        Args:
            precision: Data types of weights and KV cache of the deployment.
        """
        dtype = self.kv_cache_dtype
        return replace(precision, kv_cache_dtype=dtype) if dtype else precision


def variant(model: Model, text: str) -> Variant:
    """Return a model whose attention is changed by the steps of a variant's name, in order.

    Example: "gqa:8/window:4096/int8" has 8 KV heads, a sliding window and an int8 KV cache.

    Args:
        model: The model to change.
        text: Steps separated by "/". "none" keeps the attention, full or global removes its
            windows. mha, mqa, gqa:N (N KV heads), mla:512+64 (widths of latents and RoPE keys) and
            dsa:512+64+128@2048 (also index keys, and selected tokens) replace it; mla and dsa have
            these sizes by default. window:N and evict:N limit the cached tokens, hybrid:N before
            them not in every N-th layer. N layers share a cache by cla:N. absorbed and expanded
            are forms of mla.

    Raises:
        UserError: A step is unknown, lacks its number or does not suit the model.
    """
    cache_dtype, mla_form, equal = "", "", ["layers, width, query heads, FFN"]
    local_kinds: dict[str, str] = {}
    steps: dict[str, str] = {}
    for step in map(str.strip, text.strip().lower().split("/")):
        name, _, value = step.partition(":")
        _check_step(text, step, steps)
        if canonical(name) in cache_dtypes() and not value:
            cache_dtype = canonical(name)
        elif name in MLA_STEPS:
            mla_form = name
        elif name in LIMITS:
            kinds = local_kinds or model.kinds
            model = _limit_tokens(model, name, value, kinds, LIMITS.keys() & steps)
            equal.append("KV heads")
        elif name == "hybrid":
            period = parse_tokens(value, "hybrid's layers")
            model, local_kinds = _split_kinds(model, period)
            equal.append(f"one of every {period} layers")
        elif name in ("none", "full", "global"):
            model = model if name == "none" else _replace_attention(model, _without_limits)
            equal.append("attention")
        elif name == "cla":
            model = _share_caches(model, parse_tokens(value, "cla's layers per cache"))
            equal.append("KV heads")
        elif name in ("mla", "dsa"):
            model = _latent(model, name, value)
            equal.append(
                "value width; a RoPE part is added to the keys, if any"
                if name == "mla"
                else f"value width; {INDEX_HEADS} index heads as in DeepSeek-V3.2 if it has none"
            )
        else:
            count = parse_tokens(value or "1", "gqa's KV heads")
            model, widths = _grouped(model, None if name == "mha" else count)
            equal.append(widths)
        steps[name] = step
    _check_hybrid(model, text, local_kinds, is_last=list(steps)[-1] == "hybrid")
    key, problem = model.problem()
    if problem:
        raise UserError(f"variant {text!r}: {key}: {problem}")
    if mla_form and not any(isinstance(part, Latent) for part in model.mixers):
        raise UserError(f"variant {text!r}: {mla_form} needs MLA", f"Write mla/{mla_form}")
    return Variant(model, cache_dtype, mla_form, "; ".join(equal))


def _check_step(text: str, step: str, steps: Mapping[str, str]) -> None:
    """Raise UserError if a step is unknown, has a wrong value, or undoes an earlier step."""
    name, _, value = step.partition(":")
    forms = f"Known forms: {FORMS}"
    undone = [steps[other] for other in steps if other in REPLACED_STEPS]
    if undone and name in ("full", "global", *REPLACING_STEPS.split()):
        raise UserError(
            f"variant {text!r}: {step} undoes {undone[0]}",
            f"Write {step} before it, or only one of them",
        )
    if name in NUMBER_STEPS and not value:
        example = next(form for form in FORMS.split(", ") if form.startswith(f"{name}:"))
        raise UserError(f"variant {step!r} needs a number", f"Write {example}")
    if name in PLAIN_STEPS and value:
        raise UserError(f"variant {step} takes no value", forms)
    if name not in NAMES and (value or canonical(name) not in cache_dtypes()):
        raise UserError(f"unknown variant {step!r}", f"{forms}; stack them with /")


def _check_hybrid(
    model: Model, text: str, local_kinds: Mapping[str, str], is_last: bool
) -> None:
    """Raise UserError if the local layers of a hybrid see the same tokens as the other layers.

    Args:
        local_kinds: The kind that each local kind was split from.
        is_last: Whether no window or budget follows the hybrid.
    """
    pairs = [
        (model.kinds[local], model.kinds[kind])
        for local, kind in local_kinds.items()
        if local in model.kinds and kind in model.kinds
    ]
    if not pairs or any(local.label != layer.label for local, layer in pairs):
        return
    problem = "a hybrid needs a limit for its other layers"
    hint = f"Write {text}/window:4096"
    if not is_last:
        problem = f"all layers of {model.name} would see {pairs[0][0].label}"
        hint = "Give the other layers another window, as in hybrid:5/window:1024"
    raise UserError(f"variant {text!r}: {problem}", hint)


def _change_layer(layer: Layer, change: ChangePart, **fields: Any) -> Layer:
    """Return a layer in which `change` is applied to every part that attends, with other fields as
    given."""
    parts, shared = (
        tuple(change(part) if part.attends else part for part in old)
        for old in (layer.parts, layer.shared)
    )
    return replace(layer, parts=parts, shared=shared, **fields)


def _replace_attention(model: Model, change: ChangePart) -> Model:
    """Return a model in which `change` is applied to the attention. Each layer stores its own
    cache."""
    kinds = {
        kind: _change_layer(layer, change, shares_cache=False)
        for kind, layer in model.kinds.items()
    }
    return replace(model, kinds=kinds)


def _without_limits(part: Sublayer) -> Sublayer:
    return replace(part, **UNLIMITED) if isinstance(part, Grouped) else part


def _fields(spec: type[Sublayer], part: Sublayer) -> dict[str, Any]:
    """Return the fields of a part that the class `spec` has too."""
    return {name: getattr(part, name) for name in spec.__struct_fields__}


def _grouped(model: Model, groups: int | None) -> tuple[Model, str]:
    """Return the model with `groups` KV heads (None for MHA), and the widths that did not change.

    The keys of MHA are as wide as its values.
    """
    widths = "head widths"

    def change(part: Sublayer) -> Sublayer:
        nonlocal widths
        heads, key, value = part.as_mha()
        count = groups or heads
        if groups is None and key != value:
            widths = "value width, which keys get too"
            key = value
        if heads % count:
            message = f"{count} KV heads do not divide the {heads} query heads of {model.name}"
            raise UserError(f"gqa:{count}: {message}")
        fields = _fields(Grouped, part) if isinstance(part, Grouped) else {}
        sizes = {
            "num_attention_heads": heads,
            "num_key_value_heads": count,
            "head_dim": key,
            "v_head_dim": value,
            "kv_projection": True,
            "sink_tokens": 0,
        }
        return Grouped(**fields | UNLIMITED | sizes)

    return _replace_attention(model, change), widths


def _latent(model: Model, name: str, value: str) -> Model:
    """Return the model with latent attention of this size. An MLA model keeps its other sizes.

    The default sizes are from DeepSeek-V2 and V3 for `mla`, and from V3.2 for `dsa`.
    """
    spec, pattern, usual, meaning = (
        (Latent, _MLA_SIZES, "512+64", "latent + RoPE key")
        if name == "mla"
        else (Sparse, _DSA_SIZES, "512+64+128@2048", "latent + RoPE key + index key @ top-k")
    )
    match = pattern.fullmatch(value or usual)
    if not match:
        hint = f"Write {name}:{usual} ({meaning})"
        raise UserError(f"variant {name}:{value} is incomplete", hint)
    sizes = {
        field: parse_tokens(size, name, minimum=int(field != "qk_rope_head_dim"))
        for field, size in match.groupdict("0").items()
    }

    def change(part: Sublayer) -> Sublayer:
        if isinstance(part, Latent):
            fields = _fields(spec if isinstance(part, spec) else Latent, part)
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

    return _replace_attention(model, change)


def _limit_tokens(
    model: Model, name: str, value: str, kinds: Collection[str], other_limits: Collection[str]
) -> Model:
    """Return the model with a window or a cache budget.

    Args:
        kinds: Names of the layer kinds that get the limit.
        other_limits: Limits of earlier steps that stay in force. A layer can have a window and a
            budget.
    """
    tokens = parse_tokens(value, LIMITS[name])

    def change(part: Sublayer) -> Sublayer:
        entries = part.cache()
        is_plain = all(
            entry.role in ("k", "v") and not entry.max_rows_per_query for entry in entries
        )
        if isinstance(part, Grouped) and is_plain:
            limits = {LIMITS[step]: getattr(part, LIMITS[step]) for step in other_limits}
            limits = UNLIMITED | limits | {LIMITS[name]: tokens}
            limited = replace(part, **limits)
            if all(entry.limit for entry in limited.cache()):
                return limited
        raise UserError(
            f"{name}:{value}: {model.name} does not cache plain keys and values",
            "Begin with mha or gqa:8",
        )

    changed = {
        kind: _change_layer(layer, change) if kind in kinds else layer
        for kind, layer in model.kinds.items()
    }
    return replace(model, kinds=changed)


def _split_kinds(model: Model, period: int) -> tuple[Model, dict[str, str]]:
    """Return the model with new kinds for all layers that attend, except every `period`-th one.

    Returns:
        The model, and the old kind of each new kind.
    """
    kinds, order, num_attending = dict(model.kinds), [], 0
    old_kinds = {}
    for kind in model.order:
        layer = model.kinds[kind]
        if any(part.attends for part in layer.parts):
            num_attending += 1
            if num_attending % period:
                local = _free_name(kind, "_local", model)
                old_kinds[local], kinds[local] = kind, layer
                kind = local
        order.append(kind)
    return replace(model, kinds=kinds, pattern=tuple(order)), old_kinds


def _free_name(kind: str, ending: str, model: Model) -> str:
    """Return a name that no kind of the model has."""
    name = kind + ending
    while name in model.kinds:
        name += "_"
    return name


def _share_caches(model: Model, layers_per_cache: int) -> Model:
    """Return the model in which only every n-th layer stores a cache, and the others read it.

    Layers count separately by the rows that they store, because a layer with a window does not
    store the rows that a layer without a window needs. Layers without a cache project no K and V.
    """
    kinds: dict[str, Layer] = {}
    order, counts = [], Counter[tuple[CacheEntry, ...]]()
    for kind in model.order:
        layer = model.kinds[kind]
        attends = any(part.attends for part in layer.parts)
        is_reader = attends and counts[layer.entries] % layers_per_cache != 0
        counts[layer.entries] += 1
        name = _free_name(kind, "_shared", model) if is_reader else kind
        if name not in kinds:
            kinds[name] = _with_cache(model, layer, not is_reader) if attends else layer
        order.append(name)
    return replace(model, kinds=kinds, pattern=tuple(order))


def _with_cache(model: Model, layer: Layer, has_own: bool) -> Layer:
    """Return a layer that stores its own cache or reads another layer's.

    Raises:
        UserError: A part has no known form without its own cache.
    """

    def change(part: Sublayer) -> Sublayer:
        changed = part.storing(has_own)
        if changed is None:
            raise UserError(
                f"cla: no form of {layer.label} of {model.name} is known that reads another "
                "layer's cache",
                "Begin with mha or gqa:8",
            )
        return changed

    return _change_layer(layer, change, shares_cache=not has_own)
