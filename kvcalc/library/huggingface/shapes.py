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
    Parts,
    Reader,
    field_values,
    is_true,
    show,
    value_of,
)
from kvcalc.records import JsonObject

Order = Callable[[Config], list[str]]
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
# Older names of layer types, which transformers renames for every model.
_RENAMED = {
    "mamba": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def uniform(kind: str = FULL) -> Order:
    """Return a function that gives one layer type to every layer of the model.

    The function takes a `Config` (a read config.json) and returns a list with the type of each
    layer.

    Args:
        kind: The layer type, such as `full_attention`.
    """
    return lambda c: [kind] * c.layers


ALL_FULL = uniform()


def each_layer(kind: Field) -> Order:
    """Return a function that computes the type of each layer by a formula or a rule.

    The function takes a `Config` (a read config.json) and returns a list with the type of each
    layer, such as `full_attention`. Example:
    `each_layer("'full_attention' if layer_index in full_layers else 'sliding_attention'")`.

    Args:
        kind: Rule (function of the `Config`) or formula (text with keys of the file) whose value is
            the type of the current layer.
    """

    def order(c: Config) -> list[str]:
        names = []
        for layer in range(c.layers):
            c.layer = layer
            names.append(value_of(kind, c))
        c.layer = 0
        return names

    return order


def full_where(condition: Field, full: str = FULL, others: str = SLIDING) -> Order:
    """Return a function that gives each layer one of two types, by a condition.

    The function takes a `Config` (a read config.json) and returns a list with the type of each
    layer. Example: `full_where("layer_index % 4 == 3")` has full attention in layers 3, 7, 11 …

    Args:
        condition: Rule (function of the `Config`) or formula (text with keys of the file) that is
            true or false for the current layer.
        full: Layer type if the condition is true.
        others: Layer type if the condition is false.
    """
    return each_layer(lambda c: full if is_true(condition, c) else others)


def typed(otherwise: Field = ALL_FULL, key: str = "layer_types") -> Order:
    """Return a function that reads the type of each layer from a list in the file.

    The function takes a `Config` (a read config.json) and returns the list. Older names of types
    are replaced: `mamba` becomes `linear_attention`.

    Args:
        otherwise: Function of the `Config`, or list, that gives the types if the file has no such
            list.
        key: Key of the list in the file.
    """

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
    """Raise UserError unless all layer types in a list of config.json are allowed.

    Args:
        c: The config.json.
        key: Key of the list, for the error message.
        names: Layer types in the list.
        known_names: Layer types that are allowed; None allows every text.
    """
    for name in names:
        if not isinstance(name, str) or (known_names is not None and name not in known_names):
            raise c.fail(key, f"holds {show(name)}, which is no layer type")


def cycle(key: str, kinds: dict[str, str]) -> Order:
    """Return a function that repeats a short list of the file until all layers have a type.

    The function takes a `Config` (a read config.json) and returns a list with the type of each
    layer. If the file has no short list, all layers have full attention. Example: the text "LLG"
    and the kinds {"L": "sliding_attention", "G": "full_attention"} give full attention to layers 2,
    5, 8 …

    Args:
        key: Key of the list, or of a text whose letters are the list.
        kinds: Item of the list → layer type.
    """

    def order(c: Config) -> list[str]:
        text = c.raw(key)
        items = text if isinstance(text, str) else c.items(key)
        if not items:
            return [FULL] * c.layers
        check_names(c, key, items, kinds)
        return [kinds[items[i % len(items)]] for i in range(c.layers)]

    return order


SLIDING_TYPES = "sliding_attention sliding local_attention local attention_sliding"
_FULL_TYPES = """
    full_attention hybrid hybrid_sliding indexed_attention reference_sliding_attention
    minimax_m3_sparse
"""
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LATENT_KEYS = """
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_attention_heads
"""
_INDEX_KEYS = ("index_topk", "index_n_heads", "index_head_dim")


def head_dim(c: Config) -> int:
    """Return the width of an attention head in elements, for the current layer.

    It is `head_dim` in config.json, or hidden size ÷ number of query heads without this key.
    """
    return c.size("head_dim") if c.has("head_dim") else even_head_dim(c)


def even_head_dim(c: Config, heads: str = "num_attention_heads") -> int:
    """Return the width of an attention head in elements: hidden size ÷ number of heads.

    Args:
        c: The config.json.
        heads: Key of config.json with the number of heads.

    Raises:
        UserError: The number of heads does not divide the hidden size.
    """
    hidden = c.size("hidden_size")
    count = c.size(heads)
    if hidden % count:
        raise c.fail(
            heads, f"{count} does not divide hidden_size {hidden}, and no head_dim is read"
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
    """Return a reader that builds the MHA, MQA or GQA of a layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    Args:
        bias: Whether all four projections have biases, unless qkv_bias or o_bias say otherwise.
        qkv_bias: Whether the projections of queries, keys and values have biases; None for `bias`.
        o_bias: Whether the output projection has a bias; None for `bias`.
        window: Window of sliding layers in tokens. Chunked layers use `attention_chunk_size`.
        heads: Number of query heads; None for the key `num_attention_heads`.
        kv_heads: Number of KV heads; None for `num_key_value_heads`, or else one per query head.
        head: Width of a head; None for `head_dim`, or hidden size ÷ query heads without this key.
        spec: Class of the part, such as `Grouped`.
        **fields: Further fields of the class `spec` → rule, formula or literal.
    """

    def read(c: Config) -> Parts:
        count = _size(c, heads, "num_attention_heads")
        groups = _size(c, kv_heads, "num_key_value_heads", count)
        every_bias = value_of(bias, c) or False
        qkv = every_bias if qkv_bias is None else value_of(qkv_bias, c) or False
        out = every_bias if o_bias is None else value_of(o_bias, c) or False
        values = field_values(fields, c)
        if c.layer_type in SLIDING_TYPES.split():
            limit = value_of(window, c)
            if limit not in (None, -1):
                values["sliding_window"] = c.checked_size("sliding_window", limit)
        elif c.layer_type == "chunked_attention":
            values["attention_chunk_size"] = c.size("attention_chunk_size")
        elif c.layer_type not in _FULL_TYPES.split():
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
    """Return a reader that builds the plain multi-head attention of a layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    The width of a head is the hidden size divided by the query heads.

    Args:
        bias: Whether the projections of queries, keys, values and outputs have biases.
        heads: Key of the number of query heads.
        kv_heads: Number of KV heads; None for one per query head.
        **fields: Further fields of the class `Grouped` → rule, formula or literal.
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
    """Return a reader that builds the projections of a decoder's attention to an encoder.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    The part has only the four matrices. It caches nothing, because kvcalc models no encoder.

    Args:
        bias: Whether the projections of queries, keys, values and outputs have biases.
        k_bias: Whether the key projection has a bias; None for `bias`.
        o_bias: Whether the output projection has a bias; None for `bias`.
        source: Width of the encoder's output; None for the hidden size.
        is_on: Whether the model has cross attention. If not, the reader gives no part.
    """

    def read(c: Config) -> Parts:
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
    """Return a reader that builds the multi-head latent attention of a layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    Args:
        bias: Whether the two down-projections and the output projection have biases.
        spec: Class of the part: Latent for MLA, Sparse for DeepSeek sparse attention.
        **fields: Further fields of the class `spec` → rule, formula or literal.
    """
    index = _INDEX_KEYS if issubclass(spec, Sparse) else ()
    keys = {name: name for name in (*_LATENT_KEYS.split(), *index)}
    return mixer(spec, **(keys | {"qkv_bias": bias, "o_bias": bias} | fields))


def mixer(spec: type[Any], **fields: Field) -> Reader:
    """Return a reader that builds one mixer or FFN, an object of the class `spec`.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    Args:
        spec: Class of the part, such as `Grouped`.
        **fields: Field of the part → rule, formula or literal.
    """
    return lambda c: (make(c, spec, field_values(fields, c)),)


def dense(
    size: Field = "intermediate_size", gated: Field = True, bias: Field = False, **fields: Field
) -> Reader:
    """Return a reader that builds the dense FFN of a layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    Args:
        size: Intermediate size.
        gated: Whether the FFN has a gate.
        bias: Whether its matrices have biases.
        **fields: Further fields of the class `Dense` → rule, formula or literal.
    """
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
    """Return a reader that builds the mixture of experts of a layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal. A text such
    as 'attention_bias' is a formula of one key.

    Args:
        experts: Number of experts.
        top_k: Experts that a token uses.
        size: Intermediate size of an expert.
        shared: Intermediate size of all shared experts together; None for no shared experts.
        **fields: Further fields of the class `Moe` → rule, formula or literal.
    """
    return mixer(
        Moe,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=shared,
        **fields,
    )


GROUPED = grouped()
DENSE = dense()


def state_dtype(*keys: str) -> Field:
    """Return a rule that gives the dtype of recurrent states, such as `fp32`.

    A rule is a function of the `Config`, the read config.json. The first of the keys with a value
    other than `auto` decides. Without such a key the rule gives None.

    Args:
        keys: Keys of config.json that may have the dtype, the most important first.
    """

    def rule(c: Config) -> str | None:
        words = [word for key in keys if (word := c.word(key)) not in ("", "auto")]
        return _STATE_DTYPES.get(words[0], words[0]) if words else None

    return rule


def projections(matrices: Field = None, vectors: Field = None) -> Reader:
    """Return a reader that builds named matrices and vectors, for weights that no other part has.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. The table of model types names a reader for each type. A `Field`
    is a rule (a function of the `Config`), a formula of the file's keys, or a literal.

    If no matrix and no vector has a size, the reader gives no part. Example: `projections({"gate":
    "hidden_size, num_attention_heads"}, {"gains": "head_dim"})` builds a matrix of these two sizes
    and a vector of head_dim elements.

    Args:
        matrices: Name → formula of the two sides of a matrix.
        vectors: Name → formula of the number of elements.
    """

    def read(c: Config) -> Parts:
        sizes = {"matrices": value_of(matrices, c) or {}, "vectors": value_of(vectors, c) or {}}
        return (make(c, Projections, sizes),) if any(sizes.values()) else ()

    return read


def both(*readers: Reader) -> Reader:
    """Return a reader that gives the parts of several readers, one reader after another.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. A model type combines readers in this way.

    Example: `both(mha(), cross_attention())` reads a layer of a decoder that attends to an encoder.
    """
    return lambda c: tuple(part for reader in readers for part in reader(c))


def nothing(c: Config) -> Parts:
    """Return an empty tuple: the parts of a layer without an FFN, or without a mixer.

    This function is itself a reader: a function that takes a `Config` (a read config.json) and
    returns parts of its current layer. The table of model types uses it where a layer has no such
    part.

    Args:
        c: The config.json, which is not used.
    """
    return ()


def refuse(condition: Field, key: str, text: str, hint: str = "") -> Reader:
    """Return a reader that gives no parts, and raises UserError if a condition is true.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. A model type combines readers in this way.

    Args:
        condition: Rule (function of the `Config`) or formula (text with keys of the file) that is
            true or false for the current layer.
        key: Key of the file that the message names.
        text: The problem.
        hint: What the user can do.
    """

    def read(c: Config) -> Parts:
        if is_true(condition, c):
            raise c.fail(key, text, hint)
        return ()

    return read


def pick(condition: Field, then: Reader, otherwise: Reader = nothing) -> Reader:
    """Return a reader that selects one of two readers for each layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. A model type combines readers in this way.

    Args:
        condition: Rule (function of the `Config`) or formula (text with keys of the file) that is
            true or false for the current layer.
        then: Reader if the condition is true.
        otherwise: Reader if the condition is false.
    """
    return lambda c: (then if is_true(condition, c) else otherwise)(c)


def by_type(**readers: Reader) -> Reader:
    """Return a reader that selects a reader by the type of the current layer.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. A model type combines readers in this way.

    The new reader raises UserError for a layer type without a reader.

    Args:
        **readers: Layer type → reader.
    """

    def read(c: Config) -> Parts:
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
    """Return a reader that selects the FFN of each layer: mixture of experts or dense.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. A model type combines readers in this way.

    If the file has a list `mlp_layer_types`, the list decides instead of the condition.

    Args:
        condition: Rule (function of the `Config`) or formula (text with keys of the file) that is
            true for layers with a mixture of experts.
        then: Reader of the mixture of experts.
        otherwise: Reader of the dense FFN.
    """

    def read(c: Config) -> Parts:
        kinds = c.items("mlp_layer_types")
        if kinds is None:
            return pick(condition, then, otherwise)(c)
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
    """Return a reader for the FFNs of a model whose first layers have a dense FFN.

    A reader is a function that takes a `Config` (a read config.json) and returns parts of its
    current layer: mixers and FFNs. A model type combines readers in this way.

    If the file has a list `mlp_layer_types`, the list decides instead of `count` and `freq`.

    Args:
        count: Number of first layers that use `otherwise`, or a formula of it.
        then: Reader of the later layers' FFN, usually a mixture of experts.
        otherwise: Reader of the first layers' FFN, and of later layers that `freq` excludes.
        freq: Key of config.json. If its value is a number n, only layers whose index is a multiple
            of n use `then`. If it is a list, only layers with a 1 in the list do. '' for no such
            key.
    """
    condition = f"layer_index >= {count}"
    if freq:
        condition = f"({freq} | 1) > 0 and layer_index % ({freq} | 1) == 0 and {condition}"
    return sparse_where(condition, then, otherwise)


def make(c: Config, spec: type[Any], fields: JsonObject) -> Any:
    """Return an object of a part's class with the given fields, after checks of the fields.

    A part is an attention or recurrent mixer, or an FFN.

    Args:
        c: The config.json and its current layer, for error messages.
        spec: Class of the part, such as `Grouped`.
        fields: Field name → value.

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
