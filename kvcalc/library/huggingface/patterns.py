"""All the spellings of a layer order: which layers slide, recur or attend in full, and which have experts."""

from collections.abc import Callable
from typing import Any

from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.fields import Field, Reader, value_of

Order = Callable[[Config], list[str]]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Older names of layer types, which transformers renames for every model.
_RENAMED = {
    "mamba": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def uniform(kind: str = FULL) -> Order:
    """Every layer of one kind."""
    return lambda c: [kind] * c.layers


def typed(otherwise: Order | None = None, key: str = "layer_types") -> Order:
    """The file's own list, else an older spelling of it."""

    def order(c: Config) -> list[str]:
        found = c.items(key)
        if found is None:
            return (otherwise or uniform())(c)
        for name in found:
            if not isinstance(name, str):
                raise c.fail(key, f"holds {show(name)}, which is no layer type")
        drafts = c.get("num_nextn_predict_layers", 0)  # some files list these layers too, after the others
        if isinstance(drafts, int) and drafts > 0 and len(found) == c.layers + drafts:
            found = found[: c.layers]
        if len(found) != c.layers:
            raise c.fail(key, f"has {len(found)} entries for {c.layers} layers")
        return [_RENAMED.get(name, name) for name in found]

    return order


def every(interval: Field, full: str = FULL, others: str = SLIDING, offset: Field = 1) -> Order:
    """Layer i is `full` where (i + offset) is a multiple of the interval; without an interval all are full."""

    def order(c: Config) -> list[str]:
        step = value_of(interval, c)
        if step is None:
            return [full] * c.layers
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise c.fail("layer pattern", f"interval {show(step)} is not a whole number from 1 up")
        shift = value_of(offset, c)
        return [full if (i + shift) % step == 0 else others for i in range(c.layers)]

    return order


def full_at(test: Callable[[int, int], bool], others: str = SLIDING) -> Order:
    """Full attention in the layers for which `test(layer, layers)` holds, `others` elsewhere."""
    return lambda c: [FULL if test(i, c.layers) else others for i in range(c.layers)]


def flagged(items: Callable[[Config], list[Any] | None], kind: str, otherwise: Order | None = None) -> Order:
    """`kind` where the file's list of flags (0 and 1, true and false) says so; `otherwise` where there is no such list."""

    def order(c: Config) -> list[str]:
        flags = items(c)
        if not flags:
            return (otherwise or uniform())(c)
        if len(flags) != c.layers:
            raise c.fail("layer pattern", f"has {len(flags)} entries for {c.layers} layers")
        return [kind if flag else FULL for flag in flags]

    return order


def slides(c: Config) -> bool:
    """Whether this layer slides, as the file's own list of layers says."""
    return c.layer_type == SLIDING


def windowed(condition: Field = None) -> Order:
    """All layers slide where there is a window (and the condition holds), else none."""

    def order(c: Config) -> list[str]:
        on = c.get("sliding_window") is not None and (condition is None or value_of(condition, c))
        return [SLIDING if on else FULL] * c.layers

    return order


def from_layer(first: Field, kind: str = SLIDING, condition: Field = True) -> Order:
    """Full attention before layer `first`, `kind` from there on, if the condition holds."""

    def order(c: Config) -> list[str]:
        start = value_of(first, c) if value_of(condition, c) else c.layers
        start = c.layers if start is None else start
        if isinstance(start, bool) or not isinstance(start, int):
            raise c.fail("layer pattern", f"first layer {show(start)} is not a whole number")
        return [kind if i >= start else FULL for i in range(c.layers)]

    return order


def cycle(key: str, names: dict[str, str] | None = None, text: bool = False) -> Order:
    """A short list (or a text of one letter a layer) that repeats until the stack is full."""

    def order(c: Config) -> list[str]:
        items: list[Any] | str = c.word(key) if text else (c.items(key) or [])
        if not items:
            return [FULL] * c.layers
        found = []
        for i in range(c.layers):
            item = items[i % len(items)]
            if not isinstance(item, str) or (names is not None and item not in names):
                raise c.fail(key, f"holds {show(item)}, which is no layer type")
            found.append(names[item] if names else item)
        return found

    return order


def by_type(**readers: Reader) -> Reader:
    """The reader of the current layer's type. Raises UserError naming the types that are known."""

    def read(c: Config) -> tuple[Any, ...]:
        reader = readers.get(c.layer_type)
        if reader is None:
            raise c.fail("layer_types", f"unknown layer type {c.layer_type!r}", f"Known here: {', '.join(readers)}")
        return reader(c)

    return read


def pick(choose: Callable[[Config], Any], then: Reader, otherwise: Reader) -> Reader:
    """`then` in layers where `choose` holds, else `otherwise`."""
    return lambda c: (then if choose(c) else otherwise)(c)


def _said_sparse(c: Config) -> bool | None:
    """Whether the file's own list gives this layer experts; None where there is no such list."""
    kinds = c.items("mlp_layer_types")
    if kinds is None:
        return None
    if len(kinds) < c.layers or kinds[c.layer] not in ("sparse", "moe", "dense"):
        raise c.fail("mlp_layer_types", f"does not say of each of {c.layers} layers whether it is sparse or dense")
    return bool(kinds[c.layer] != "dense")


def after_first(count: Field, then: Reader, otherwise: Reader, freq: str = "moe_layer_freq") -> Reader:
    """`otherwise` in the first `count` layers, `then` after them (in every `freq`-th, or where its list says 1).

    count: a key, a number or a rule. A list `mlp_layer_types`, where a file has one, says it outright: `sparse` is `then`.
    """

    def read(c: Config) -> tuple[Any, ...]:
        if (sparse := _said_sparse(c)) is not None:
            return (then if sparse else otherwise)(c)
        step = c.get(freq, 1) if freq else 1
        if isinstance(step, bool) or not isinstance(step, int):
            raise c.fail(freq, f"should be a whole number, not {show(step)}")
        first = c.size(count, 0, least=0) if isinstance(count, str) else value_of(count, c)
        chosen = c.layer >= first and step > 0 and c.layer % step == 0
        return (then if chosen else otherwise)(c)

    return read


def stepped(then: Reader, otherwise: Reader, step: str = "decoder_sparse_step", only: str = "mlp_only_layers") -> Reader:
    """`then` where (i + 1) is a multiple of `step` and i is not among `only`; Qwen's rule."""

    def read(c: Config) -> tuple[Any, ...]:
        if (sparse := _said_sparse(c)) is not None:
            return (then if sparse else otherwise)(c)
        chosen = c.layer not in c.sizes(only) and (c.layer + 1) % c.size(step, 1) == 0
        return (then if chosen and c.has("num_experts") and c.get("num_experts") else otherwise)(c)

    return read
