"""Shapes that model types share: readers of the parts of a layer, and orders of layers.

A type's entry names a shape and the differences from its defaults, such as
`grouped(qk_norm="head")`. Each keyword that is not listed is a field of the part. A formula of
keys, a rule or a literal gives its value. An order states which layers have a sliding window, a
recurrent mixer or full attention.
"""

from collections.abc import Callable
from typing import Any

from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.feed_forward import Dense, Moe, Projections
from kvcalc.library.huggingface.config import (
    Config,
    Field,
    Reader,
    field_values,
    is_true,
    show,
    value_of,
)
from kvcalc.records import JsonObject

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
    """Return the order in which all layers are of one type."""
    return lambda c: [kind] * c.layers


ALL_FULL = uniform()


def each_layer(kind: Field) -> Order:
    """Return the order in which a formula or a rule gives the type of each layer."""

    def order(c: Config) -> list[str]:
        names = []
        for layer in range(c.layers):
            c.layer = layer
            names.append(value_of(kind, c))
        c.layer = 0
        return names

    return order


def full_where(condition: Field, full: str = FULL, others: str = SLIDING) -> Order:
    """Return the order with `full` in the layers for which the condition is true.

    Example: `full_where("layer_index % 4 == 3")` has full attention in layers 3, 7, 11 …
    """
    return each_layer(lambda c: full if is_true(condition, c) else others)


def typed(otherwise: Field = ALL_FULL, key: str = "layer_types") -> Order:
    """Return the order of the list under `key` in the file, or under an older spelling of the
    key."""

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
    """Raise UserError unless all names under `key` are known names."""
    for name in names:
        if not isinstance(name, str) or (known_names is not None and name not in known_names):
            raise c.fail(key, f"holds {show(name)}, which is no layer type")


def cycle(key: str, kinds: dict[str, str]) -> Order:
    """Return the order that repeats a short list, or the letters of a text, over all layers."""

    def order(c: Config) -> list[str]:
        text = c.raw(key)
        items: Any = text if isinstance(text, str) else c.items(key)
        if not items:
            return [FULL] * c.layers
        check_names(c, key, items, kinds)
        return [kinds[items[i % len(items)]] for i in range(c.layers)]

    return order


SLIDING_TYPES = (
    "sliding_attention",
    "sliding",
    "local_attention",
    "local",
    "attention_sliding",
)
_FULL_TYPES = (
    "full_attention",
    "hybrid",
    "hybrid_sliding",
    "indexed_attention",
    "reference_sliding_attention",
    "minimax_m3_sparse",
)
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_attention_heads",
)
_INDEX_KEYS = ("index_topk", "index_n_heads", "index_head_dim")


def head_dim(c: Config) -> int:
    """Return the width of a head that the file gives, else hidden size ÷ heads."""
    return c.size("head_dim") if c.has("head_dim") else even_head_dim(c)


def even_head_dim(c: Config, heads: str = "num_attention_heads") -> int:
    """Return the width of a head, hidden size ÷ heads.

    Raises:
        UserError: The number of heads does not divide the hidden size.
    """
    hidden, count = c.size("hidden_size"), c.size(heads)
    if hidden % count:
        raise c.fail(
            heads,
            f"{count} does not divide hidden_size {hidden}, and no head_dim is read",
        )
    return hidden // count


def grouped(
    bias: Field = "attention_bias",
    qkv_bias: Field = None,
    o_bias: Field = None,
    window: Field = "sliding_window",
    heads: Field = None,
    kv_heads: Field = None,
    head: Field = None,
    spec: type[Grouped] = Grouped,
    **fields: Field,
) -> Reader:
    """Return the reader of MHA, MQA or GQA.

    Args:
        bias: Whether all four projections have biases, unless qkv_bias or o_bias say otherwise.
        window: Tokens of a sliding window. Chunked layers have `attention_chunk_size`.
        heads: Number of query heads; by default the standard key.
        kv_heads: Number of KV heads; by default the standard key, or without it one per query head.
        head: Width of a head; by default the rule `head_dim`.
        spec: Class of the part.
        **fields: Further fields of the part.
    """

    def read(c: Config) -> tuple[Any, ...]:
        count = _size(c, heads, "num_attention_heads")
        groups = _size(c, kv_heads, "num_key_value_heads", count)
        every_bias = value_of(bias, c) or False
        qkv = every_bias if qkv_bias is None else value_of(qkv_bias, c) or False
        out = every_bias if o_bias is None else value_of(o_bias, c) or False
        values = field_values(fields, c)
        if c.layer_type in SLIDING_TYPES:
            limit = value_of(window, c)
            if limit not in (None, -1):
                values["sliding_window"] = c.checked_size("sliding_window", limit)
        elif c.layer_type == "chunked_attention":
            values["attention_chunk_size"] = c.size("attention_chunk_size")
        elif c.layer_type not in _FULL_TYPES:
            raise c.fail(
                "layer_types",
                f"{show(c.layer_type)} is no kind of attention that this model type has",
            )
        shape = {
            "num_attention_heads": count,
            "num_key_value_heads": groups,
            "head_dim": value_of(head, c) or head_dim(c),
            "q_bias": qkv,
            "k_bias": qkv,
            "v_bias": qkv,
            "o_bias": out,
        }
        return (make(c, spec, shape | values),)

    return read


def mha(
    bias: Field = False,
    heads: str = "num_attention_heads",
    kv_heads: Field = None,
    **fields: Field,
) -> Reader:
    """Return the reader of plain multi-head attention, which has no further keys.

    The width of a head is the hidden size divided by the heads. Each head has its own key and
    value.
    """
    return grouped(
        bias,
        heads=heads,
        kv_heads=kv_heads or heads,
        head=lambda c: even_head_dim(c, heads),
        **fields,
    )


def cross_attention(
    bias: Field = True,
    k_bias: Field = None,
    o_bias: Field = None,
    source: Field = None,
    is_on: Field = "add_cross_attention",
) -> Reader:
    """Return the reader of the four projections of attention to an encoder of width `source`.

    The part caches nothing, because kvcalc models no encoder.
    """

    def read(c: Config) -> tuple[Any, ...]:
        if not value_of(is_on, c):
            return ()
        width = c.size("hidden_size")
        inputs = value_of(source, c) or width
        flags = {"q": bias, "k": k_bias, "v": bias, "o": o_bias}
        sizes = {}
        for name, flag in flags.items():
            has_bias = value_of(bias if flag is None else flag, c)
            rows = inputs if name in "kv" else width
            sizes[f"cross_{name}"] = (rows, width, width if has_bias else 0)
        return projections(sizes)(c)

    return read


def latent(
    bias: Field = "attention_bias", spec: type[Latent] = Latent, **fields: Field
) -> Reader:
    """Return the reader of MLA, or of DSA with spec=Sparse.

    The bias is on the two down-projections and the output.
    """
    index = _INDEX_KEYS if issubclass(spec, Sparse) else ()
    keys: dict[str, Field] = {name: name for name in (*_LATENT_KEYS, *index)}
    return mixer(spec, **(keys | {"qkv_bias": bias, "o_bias": bias} | fields))


def mixer(spec: type[Any], **fields: Field) -> Reader:
    """Return the reader of one part of the class `spec`, with these fields."""
    return lambda c: (make(c, spec, field_values(fields, c)),)


def dense(
    size: Field = "intermediate_size",
    gated: Field = True,
    bias: Field = False,
    **fields: Field,
) -> Reader:
    """Return the reader of a dense FFN of `size`."""
    return mixer(Dense, intermediate_size=size, gated=gated, bias=bias, **fields)


def moe(
    experts: Field = (
        "num_experts | num_local_experts | n_routed_experts | num_routed_experts | moe_num_experts"
    ),
    top_k: Field = (
        "num_experts_per_tok | num_experts_per_token | moe_k | moe_top_k | top_k_experts"
    ),
    size: Field = "moe_intermediate_size | intermediate_size",
    shared: Field = None,
    **fields: Field,
) -> Reader:
    """Return the reader of a mixture of `experts` experts of `size`.

    Args:
        experts: Number of experts.
        top_k: Experts of a token.
        size: Width of an expert.
        shared: Width of all shared experts together.
        **fields: Further fields of the part.
    """
    return mixer(
        Moe,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=shared,
        **fields,
    )


GROUPED, DENSE = grouped(), dense()


def state_dtype(*keys: str) -> Field:
    """Return a rule for the format of recurrent states.

    The rule returns the format under the first key that has one, or None if all are missing or
    `auto`.
    """

    def rule(c: Config) -> str | None:
        words = [word for key in keys if (word := c.word(key)) not in ("", "auto")]
        return _STATE_DTYPES.get(words[0], words[0]) if words else None

    return rule


def projections(matrices: Field = None, vectors: Field = None) -> Reader:
    """Return the reader of named matrices and vectors. If all are None, there is no part.

    Example: `projections({"gate": "hidden_size, num_attention_heads"}, {"gains": "head_dim"})`.
    """

    def read(c: Config) -> tuple[Any, ...]:
        sizes = {
            "matrices": value_of(matrices, c) or {},
            "vectors": value_of(vectors, c) or {},
        }
        return (make(c, Projections, sizes),) if any(sizes.values()) else ()

    return read


def both(*readers: Reader) -> Reader:
    """Return a reader that joins the parts of several readers, in their order.

    Example: `both(mha(), cross_attention())` reads a layer of a decoder that attends to an encoder.
    """
    return lambda c: tuple(part for reader in readers for part in reader(c))


def nothing(c: Config) -> tuple[Any, ...]:
    """Return no parts. This is the reader of layers without such a part, such as layers without an
    FFN."""
    return ()


def refuse(condition: Field, key: str, text: str, hint: str = "") -> Reader:
    """Return a reader of no parts that refuses the file, with a text about `key`, if the condition
    is true."""

    def read(c: Config) -> tuple[Any, ...]:
        if is_true(condition, c):
            raise c.fail(key, text, hint)
        return ()

    return read


def pick(condition: Field, then: Reader, otherwise: Reader = nothing) -> Reader:
    """Return the reader that is `then` in layers where the condition is true, else `otherwise`."""
    return lambda c: (then if is_true(condition, c) else otherwise)(c)


def by_type(**readers: Reader) -> Reader:
    """Return the reader of the current layer's type.

    Raises:
        UserError: There is no reader of this type.
    """

    def read(c: Config) -> tuple[Any, ...]:
        reader = readers.get(c.layer_type)
        if reader is None:
            raise c.fail(
                "layer_types",
                f"unknown layer type {c.layer_type!r}",
                f"Known here: {', '.join(readers)}",
            )
        return reader(c)

    return read


def sparse_where(condition: Field, then: Reader, otherwise: Reader = DENSE) -> Reader:
    """Return the reader that is `then` in layers where the condition is true, else `otherwise`. If
    the file has a list `mlp_layer_types`, the list decides.
    """

    def read(c: Config) -> tuple[Any, ...]:
        kinds = c.items("mlp_layer_types")
        if kinds is None:
            return (then if is_true(condition, c) else otherwise)(c)
        if len(kinds) < c.layers or kinds[c.layer] not in ("sparse", "moe", "dense"):
            raise c.fail(
                "mlp_layer_types",
                f"does not say of each of {c.layers} layers whether it is sparse or dense",
            )
        return (otherwise if kinds[c.layer] == "dense" else then)(c)

    return read


def after_first(
    count: int | str, then: Reader, otherwise: Reader = DENSE, freq: str = ""
) -> Reader:
    """Return the reader that is `otherwise` in the first `count` layers and `then` after them.

    If the value under the key `freq` is a number, only each `freq`-th layer is `then`. If the value
    is a list, only the layers with a 1 in the list are `then`.
    """
    condition = f"layer_index >= {count}"
    if freq:
        condition = f"({freq} | 1) > 0 and layer_index % ({freq} | 1) == 0 and {condition}"
    return sparse_where(condition, then, otherwise)


def make(c: Config, spec: type[Any], fields: JsonObject) -> Any:
    """Return a part of the class `spec` with these fields.

    Raises:
        UserError: A value is invalid. The message names the field.
    """
    from kvcalc.library import presets

    part = presets.build(fields, spec, f"{c.file_name}: layer {c.layer}")
    if problem := part.problem():
        raise c.fail(f"layer {c.layer}", problem)
    return part


def _size(c: Config, field: Field, key: str, default: int | None = None) -> int:
    """Return the size that a field gives, else the size under `key`."""
    value = value_of(field, c)
    return c.size(key, default) if value is None else c.checked_size(key, value)
