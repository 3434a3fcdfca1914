"""The shapes that model types share. Each gives a reader: a function from a config to the parts of the current layer.

A type's entry names a shape and what is its own: `grouped(bias=K("attention_bias"), qk_norm="head")`. Every further
keyword is a field of the spec, which a key, a condition, a rule or a literal fills.
"""

from typing import Any

from kvcalc.layers.attention import Compressed, Grouped, Latent, Sparse
from kvcalc.layers.ffn import Dense, Moe, Projections
from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.fields import Field, K, Reader, filled, value_of

SLIDING = ("sliding_attention", "sliding", "local_attention", "local", "attention_sliding")
WHOLE = ("full_attention", "hybrid", "hybrid_sliding", "indexed_attention", "reference_sliding_attention", "minimax_m3_sparse")
CHUNKED = ("chunked_attention",)
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def head_dim(c: Config, key: str = "head_dim", heads: str = "num_attention_heads") -> int:
    """The head size that the file gives, else hidden size over heads."""
    return c.size(key) if c.has(key) else even_head_dim(c, heads)


def even_head_dim(c: Config, heads: str = "num_attention_heads") -> int:
    """Hidden size over heads, whatever head size the file names."""
    hidden, count = c.size("hidden_size"), c.size(heads)
    if hidden % count:
        raise c.fail(heads, f"{count} does not divide hidden_size {hidden}, and no head_dim is read")
    return hidden // count


def counted(*keys: str, offset: int = 0) -> Field:
    """The whole number under the first of `keys` that is set: for fields of the model, which nothing checks after."""
    return lambda c: c.size(next((key for key in keys if c.has(key)), keys[-1]), least=0) + offset


def grouped(
    bias: Field = False,
    qkv_bias: Field = None,
    o_bias: Field = None,
    window: Field = None,
    heads: Field = None,
    kv_heads: Field = None,
    head: Field = None,
    spec: type[Grouped] = Grouped,
    **fields: Field,
) -> Reader:
    """MHA, MQA or GQA. bias: on all four projections; qkv_bias and o_bias override it.

    A layer whose type slides gets `sliding_window` (or `window`), a chunked one `attention_chunk_size`.
    """

    def read(c: Config) -> tuple[Any, ...]:
        count = _whole(c, value_of(heads, c), "num_attention_heads") or c.size("num_attention_heads")
        groups = _whole(c, value_of(kv_heads, c), "num_key_value_heads") or c.size("num_key_value_heads", count)
        both = value_of(bias, c) or False
        qkv = both if qkv_bias is None else value_of(qkv_bias, c) or False
        out = both if o_bias is None else value_of(o_bias, c) or False
        given = filled(fields, c)
        if c.layer_type in SLIDING:
            limit = value_of(window, c) if window else c.get("sliding_window")
            if limit is not None and limit != -1:
                given["sliding_window"] = _whole(c, limit, "sliding_window")
        elif c.layer_type in CHUNKED:
            given["attention_chunk_size"] = c.size("attention_chunk_size")
        elif c.layer_type not in WHOLE:
            raise c.fail("layer_types", f"{show(c.layer_type)} is no kind of attention that this model type has")
        biases = {"q_bias": qkv, "k_bias": qkv, "v_bias": qkv, "o_bias": out}
        shape = {"num_attention_heads": count, "num_key_value_heads": groups, "head_dim": value_of(head, c) or head_dim(c)}
        return (make(c, spec, shape | biases | given),)

    return read


def mha(bias: Field = False, heads: str = "num_attention_heads", kv_heads: Field = None, **fields: Field) -> Reader:
    """Attention as first made: hidden size over heads wide, one key and value per head, whatever other keys say."""

    def count(c: Config) -> int:
        return c.size(heads)

    def width(c: Config) -> int:
        if c.size("hidden_size") % count(c):
            raise c.fail(heads, f"{count(c)} does not divide hidden_size {c.size('hidden_size')}")
        return c.size("hidden_size") // count(c)

    return grouped(bias, heads=count, kv_heads=kv_heads or count, head=width, **fields)


def crossed(c: Config) -> bool:
    """Whether every layer of a decoder has attention to an encoder too."""
    return c.flag("add_cross_attention")


def cross_attention(
    bias: Field = True, k_bias: Field = None, o_bias: Field = None, source: Field = None, on: Field = crossed
) -> Reader:
    """The four projections of attention to an encoder of width `source`, which caches nothing while there is none."""

    def read(c: Config) -> tuple[Any, ...]:
        if not value_of(on, c):
            return ()
        width, every = c.size("hidden_size"), value_of(bias, c)
        inputs = _whole(c, value_of(source, c), "cross_attention_hidden_size") or width
        biases = {"q": every, "k": every if k_bias is None else value_of(k_bias, c), "v": every}
        biases["o"] = every if o_bias is None else value_of(o_bias, c)
        rows = {"q": width, "k": inputs, "v": inputs, "o": width}
        sizes = {f"cross_{name}": (rows[name], width, width if flag else 0) for name, flag in biases.items()}
        return projections(sizes)(c)

    return read


def half_window(both_ways: Any) -> Field:
    """The window, of which half lies ahead where `use_bidirectional_attention` has the value `both_ways` (Gemma)."""

    def read(c: Config) -> int | None:
        window = c.size("sliding_window") if c.has("sliding_window") else None
        return window // 2 + 1 if window and c.get("use_bidirectional_attention") == both_ways else window

    return read


def latent(bias: Field = None, spec: type[Latent] = Latent, **fields: Field) -> Reader:
    """MLA; with spec=Sparse, DSA. bias: on the two down-projections and the output."""
    keys = {
        "q_lora_rank": K("q_lora_rank"), "kv_lora_rank": K("kv_lora_rank"), "qk_nope_head_dim": K("qk_nope_head_dim"),
        "qk_rope_head_dim": K("qk_rope_head_dim"), "v_head_dim": K("v_head_dim"),
        "num_attention_heads": K("num_attention_heads"), "qkv_bias": bias, "o_bias": bias,
    }  # fmt: skip
    if issubclass(spec, Sparse):
        keys |= {name: K(name) for name in ("index_topk", "index_n_heads", "index_head_dim")}

    def read(c: Config) -> tuple[Any, ...]:
        return (make(c, spec, filled(keys | fields, c)),)

    return read


def compressed(spec: type[Compressed] = Compressed, **fields: Field) -> Reader:
    """DeepSeek-V4's attention, whose kind follows from the layer's type."""
    names = ("num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window")
    keys = {name: K(name) for name in (*names, "qk_rope_head_dim")}

    def read(c: Config) -> tuple[Any, ...]:
        return (make(c, spec, filled(keys | fields, c)),)

    return read


def mixer(spec: type[Any], **fields: Field) -> Reader:
    """Any other mixer, all of whose fields the entry names."""
    return lambda c: (make(c, spec, filled(fields, c)),)


def dense(size: Field = K("intermediate_size"), gated: Field = True, bias: Field = False, **fields: Field) -> Reader:
    """A dense FFN of `size`."""

    def read(c: Config) -> tuple[Any, ...]:
        shape = {"intermediate_size": size, "gated": gated, "bias": bias} | fields
        return (make(c, Dense, filled(shape, c)),)

    return read


def moe(
    experts: Field = K("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts"),
    top_k: Field = K("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts"),
    size: Field = K("moe_intermediate_size", "intermediate_size"),
    shared: Field = None,
    **fields: Field,
) -> Reader:
    """A mixture of `experts` experts of `size`, and shared ones of `shared` elements in all."""

    def read(c: Config) -> tuple[Any, ...]:
        shape = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": size}
        return (make(c, Moe, filled(shape | {"shared_expert_intermediate_size": shared} | fields, c)),)

    return read


def shared_experts(count: str = "n_shared_experts", size: str = "moe_intermediate_size") -> Field:
    """`count` shared experts of `size` each."""
    return lambda c: (number := c.size(count, 0, least=0)) and number * c.size(size)


def state_dtype(*keys: str) -> Field:
    """The format in which the file wants recurrent states; the spec's own where no key says it, or says `auto`."""

    def rule(c: Config) -> str | None:
        words = [word for key in keys if (word := c.word(key)) not in ("", "auto")]
        return _STATE_DTYPES.get(words[0], words[0]) if words else None

    return rule


def projections(matrices: Field = None, vectors: Field = None) -> Reader:
    """Loose matrices and vectors, by name."""

    def read(c: Config) -> tuple[Any, ...]:
        return (make(c, Projections, filled({"matrices": matrices or {}, "vectors": vectors or {}}, c)),)

    return read


def both(*readers: Reader) -> Reader:
    """The parts of several readers, one after the other."""
    return lambda c: tuple(part for reader in readers for part in reader(c))


def nothing(c: Config) -> tuple[Any, ...]:
    """No part."""
    return ()


def make(c: Config, spec: type[Any], fields: dict[str, Any]) -> Any:
    """A spec from looked-up fields. Raises UserError naming the field whose value does not fit."""
    from kvcalc.library import catalog

    found = catalog.build(fields, spec, f"{c.where}: layer {c.layer}")
    if problem := found.problem():
        raise c.fail(f"layer {c.layer}", problem)
    return found


def _whole(c: Config, value: Any, key: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**12:
        raise c.fail(key, f"should be a whole number from 1 up, not {show(value)}")
    return value
