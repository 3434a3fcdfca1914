"""What `measure` measures: stacks of one or two layers, as models that hold nothing but their mixers."""

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.layers.attention import Grouped
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.model.spec import Layer, Model
from kvcalc.planning.variants import variant

NAMES = ("mha", "gqa", "mqa", "mla", "dsa", "window", "cla", "recurrent")
_MEANS = {"window": "mha/window:1024", "cla": "cla:2"}


def standard_model(heads: int) -> Model:
    """One MHA layer of so many heads of width 128 on a residual as wide as they are together."""
    mixer = Grouped(num_attention_heads=heads, num_key_value_heads=heads, head_dim=128)
    return _bare(Model(name="standard", hidden_size=heads * 128, vocab_size=1, layers=1, kinds={"full": Layer(parts=(mixer,))}))


def named(base: Model, text: str) -> Model:
    """The stack for a variant: one of `NAMES` at its usual size, or a form that `compare` knows (gqa:4, window:512 …).

    Two layers where they share a cache, else one. Raises UserError for an unknown form.
    """
    return whole(msgspec.structs.replace(base, layers=2 if "cla" in _steps(base, text) else 1), text)


def whole(model: Model, text: str) -> Model:
    """`model` with the variant in every layer that attends. Raises UserError for an unknown form."""
    steps = _steps(model, text)
    if steps == "recurrent":
        return _recurrent(model)
    found = variant(model, steps)
    if found.kv_cache_dtype:
        raise UserError(f"variant {text!r}: `measure` keeps the cache in the dtype of its products", hint="Use --dtype")
    return found.model


def _steps(model: Model, text: str) -> str:
    """What `compare` calls a variant. Raises UserError for one that `measure` has no layers of."""
    name = text.strip().lower()
    steps = f"gqa:{max(1, _heads(model) // 4)}" if name == "gqa" else _MEANS.get(name, name)
    known = [*NAMES, "none", "hybrid"]
    if steps.partition(":")[0].partition("/")[0] not in [*known, "evict"]:
        raise UserError(f"unknown variant {text!r}", hint=nearest(name, known))
    return steps


def base_of(model: Model) -> Model:
    """One layer of the model's first kind that attends, for other variants to be put in place of."""
    for kind in model.order:
        layer = model.kinds[kind]
        if any(part.attends for part in layer.mixers):
            return _bare(msgspec.structs.replace(model, layers=1, kinds={kind: layer}, pattern=(), mtp=None))
    raise UserError(f"{model.name} has no attention to put a variant in place of")


def stacks_of(model: Model) -> dict[str, Model]:
    """Kind → the stack of a model's own layer of that kind, behind the layer whose cache it reads where it has none."""
    found = {}
    for index, kind in enumerate(model.order):
        layer = model.kinds[kind]
        if kind in found or not layer.mixers:
            continue
        owners = [k for k in model.order[:index] if not model.kinds[k].shares_cache and model.kinds[k].mixers]
        names = (owners[-1], kind) if layer.shares_cache and owners else (kind,)
        kinds = {name: model.kinds[name] for name in names}
        found[kind] = _bare(msgspec.structs.replace(model, layers=len(names), kinds=kinds, pattern=names, mtp=None))
    return found


def _bare(model: Model) -> Model:
    """The same layers without feed-forward parts and norms."""
    kinds = {
        name: Layer(parts=tuple(p for p in layer.parts if p.label), norms=0, shares_cache=layer.shares_cache)
        for name, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds, norm="none")


def _heads(base: Model) -> int:
    return max(part.as_mha()[0] for layer in base.kinds.values() for part in layer.mixers)


def _recurrent(model: Model) -> Model:
    """Gated delta nets with as many heads as the attention, of the same widths, in its place."""
    heads, _, width = max(part.as_mha() for layer in model.kinds.values() for part in layer.mixers)
    mixer = GatedDeltaNet(
        linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=width, linear_value_head_dim=width
    )
    kinds = {
        kind: msgspec.structs.replace(layer, parts=tuple(mixer if p.attends else p for p in layer.parts), shares_cache=False)
        for kind, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds)
