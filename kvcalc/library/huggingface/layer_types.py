"""Orders of layers: which layers slide, recur or attend in full, in all spellings of files."""

from collections.abc import Callable
from typing import Any

from kvcalc.library.huggingface.config import Config, Field, is_true, show, value_of

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
    """Return the order in which all layers are of one kind."""
    return lambda c: [kind] * c.layers


ALL_FULL = uniform()


def full_where(condition: Field, full: str = FULL, others: str = SLIDING) -> Order:
    """Return the order with `full` in the layers for which the condition is true.

    Example: `full_where("layer_index % 4 == 3")` has full attention in layers 3, 7, 11 …
    """

    def order(c: Config) -> list[str]:
        names = []
        for layer in range(c.layers):
            c.layer = layer
            names.append(full if is_true(condition, c) else others)
        c.layer = 0
        return names

    return order


def every_nth(interval: Field, full: str = FULL, others: str = SLIDING) -> Order:
    """Return the order in which each `interval`-th layer is `full`; all are, without an interval.

    Example: an interval of 4 has full attention in layers 3, 7, 11 …
    """

    def is_full(c: Config) -> bool:
        step = value_of(interval, c)
        if step is None:
            return True
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise c.fail(
                "layer pattern",
                f"interval {show(step)} is not a whole number from 1 up",
            )
        return (c.layer + 1) % step == 0

    return full_where(is_full, full, others)


def windowed(condition: Field = True) -> Order:
    """Return the order in which all layers slide if there is a window and the condition is true."""
    return full_where(lambda c: c.get("sliding_window") is None or not is_true(condition, c))


def typed(otherwise: Field = ALL_FULL, key: str = "layer_types") -> Order:
    """Return the order of the file's own list, else an older spelling of it."""

    def order(c: Config) -> list[str]:
        names = c.items(key)
        if names is None:
            order_names: list[str] = value_of(otherwise, c)
            return order_names
        check_names(c, key, names)
        # some files list these layers too, after the others
        drafts = c.get("num_nextn_predict_layers", 0)
        if isinstance(drafts, int) and drafts > 0 and len(names) == c.layers + drafts:
            names = names[: c.layers]
        if len(names) != c.layers:
            raise c.fail(key, f"has {len(names)} entries for {c.layers} layers")
        return [_RENAMED.get(name, name) for name in names]

    return order


def check_names(c: Config, key: str, names: Any, known_names: Any = None) -> None:
    """Raise UserError unless these are known texts."""
    for name in names:
        if not isinstance(name, str) or (known_names is not None and name not in known_names):
            raise c.fail(key, f"holds {show(name)}, which is no layer type")


def cycle(key: str, kinds: dict[str, str], is_text: bool = False) -> Order:
    """Return the order of a short list, or of a text of letters, repeated until the stack is
    full."""

    def order(c: Config) -> list[str]:
        items: Any = c.word(key) if is_text else c.items(key)
        if not items:
            return [FULL] * c.layers
        check_names(c, key, items, kinds)
        return [kinds[items[i % len(items)]] for i in range(c.layers)]

    return order
