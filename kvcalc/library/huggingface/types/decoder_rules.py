"""Rules of decoders that a formula cannot express. `decoders.yaml` and other tables name them.

A rule gives a size, a condition or an order of layers from one config. The comments in the tables
name the sources.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, Field, facts, value_of
from kvcalc.library.huggingface.shapes import (
    FULL,
    SLIDING,
    cycle,
    even_head_dim,
    every_nth,
    head_dim,
    typed,
)

Matrices = dict[str, tuple[int, ...]]
MINICPMV_STACKS = {
    "2": "minicpm",
    "2.0": "minicpm",
    "2.5": "llama",
    "2.6": "qwen2",
    "4": "llama",
    "4.0": "llama",
    "4.5": "qwen3",
}


def outer_tie(default: bool) -> Field:
    """Return a rule: whether the LM head of a multimodal model is tied to its embedding.

    The text part of a multimodal file has no LM head, so the whole file states this. In some
    classes, the text part may state it too.

    Args:
        default: The value if the file does not state it.
    """

    def is_tied(c: Config) -> bool:
        key = "tie_word_embeddings"
        if c.outer is c.file:
            return c.flag(key)
        outer_facts = facts().get(str(c.outer.get("model_type")), {})
        is_outer_tied = Config(c.outer, c.file_name).flag(key, default)
        return is_outer_tied or bool(outer_facts.get("either") and c.flag(key))

    return is_tied


def exaone_order(c: Config) -> list[str]:
    """Return EXAONE 4's order of layers, from a number n (each n-th layer is full) or letters
    (LLLG)."""
    key = "sliding_window_pattern"
    if not c.has("sliding_window"):
        return [FULL] * c.layers
    if isinstance(c.get(key), str):
        return cycle(key, {"L": SLIDING, "G": FULL})(c)
    return every_nth(key)(c)


def is_newer_falcon(c: Config) -> bool:
    """Return whether the file has the architecture of Falcon 40B, by a key or by an early type
    name."""
    return c.file.get("model_type") == "RefinedWeb" or c.flag("new_decoder_architecture")


def falcon_norms(c: Config) -> int:
    """Return the norms of a layer: 1 for parallel parts, 2 for sequential parts or if each parallel
    part has a norm."""
    default = 2 if is_newer_falcon(c) else 1
    if not c.flag("parallel_attn", True):
        return 2
    return 2 if c.size("num_ln_in_parallel_attn", default) == 2 else 1


def image_attention(c: Config) -> Matrices:
    """Return the matrices of cross-attention to the image. Text tokens add nothing to its cache."""
    width = c.size("hidden_size")
    head = even_head_dim(c)
    queries = c.size("num_attention_heads") * head
    keys = c.size("num_key_value_heads", c.size("num_attention_heads")) * head
    return {
        "cross.q": (width, queries),
        "cross.k": (width, keys),
        "cross.v": (width, keys),
        "cross.o": (queries, width),
    }


def shares_gemma_cache(c: Config) -> bool:
    """Return whether this layer reads the cache of the last layer of its type that has one."""
    count = c.size("num_kv_shared_layers", 0, minimum=0)
    if count >= c.layers:
        raise c.fail(
            "num_kv_shared_layers",
            f"{count} of {c.layers} layers leave none that has a cache",
        )
    return c.layer >= c.layers - count


def gemma4_order(c: Config) -> list[str]:
    """Return the listed layer types, or full attention in each sixth layer. The last layer is
    always full."""
    return [*typed(every_nth(6))(c)[:-1], FULL]


def altup_projections(c: Config) -> Matrices:
    """Return the projections into AltUp's further streams and back."""
    sides = (c.size("hidden_size"), c.size("hidden_size"))
    numbers = range(1, c.size("altup_num_inputs"))
    return {f"stream_{way}_{i}": sides for way in ("in", "out") for i in numbers}


def mpt_groups(c: Config) -> int:
    """Return the number of KV heads, as the code of MPT reads it from `attn_config`."""
    attention = c.nested("attn_config")
    kind = attention.word("attn_type", "multihead_attention")
    heads = c.size("num_attention_heads")
    if kind == "grouped_query_attention":
        return attention.size("kv_n_heads", heads)
    return 1 if kind.startswith("multiquery") else heads


def modernbert_window(c: Config) -> int | None:
    """Return half of `local_attention`, unless the file gives the window itself."""
    if c.in_file("sliding_window"):
        return c.size("sliding_window")
    return c.size("local_attention", 0, minimum=0) // 2 or None


def hunyuan_shared(c: Config) -> int:
    """Return the total width of the shared experts of Hunyuan. Tencent's own keys give their
    number."""
    if c.flag("use_cla"):
        raise c.fail("use_cla", "layers that share keys and values are not read in this type")
    if not c.flag("use_mixed_mlp_moe", True):
        return 0
    return c.size("num_shared_expert", 1, minimum=0) * c.size("intermediate_size")


def ernie_has_experts(c: Config) -> bool:
    """Return whether a layer of ERNIE 4.5 has experts. Layers from a first to a last index have
    experts, at an interval. A last index of -1 means the end of the stack.
    """
    first = c.size("moe_layer_start_index", 0, minimum=0)
    last = c.size("moe_layer_end_index", -1, minimum=-1)
    is_step = (c.layer + 1) % c.size("moe_layer_interval", 1) == 0
    return is_step and first <= c.layer and (last == -1 or c.layer <= last)


def linear_biases(c: Config) -> int | None:
    """Return the elements of all biases of linear attention; None without biases."""
    width = head_dim(c) * c.size("num_attention_heads")
    biases = 3 * width * c.flag("use_qkv_bias") + c.size("hidden_size") * c.flag("use_bias")
    return biases or None


def half_width(width: Field) -> Field:
    """Return a rule for half of a width, for files whose width counts gate and up together."""

    def read(c: Config) -> int:
        joint_width = value_of(width, c)
        if not isinstance(joint_width, int) or joint_width % 2:
            text = f"{joint_width} is no width that gate and up share"
            raise c.fail("intermediate_size", text)
        return joint_width // 2

    return read


def minicpmv_stack(c: Config) -> str:
    """Return the type of the language model of a MiniCPM-V or -o, by its version."""
    is_first = (c.size("hidden_size"), c.get("query_num")) == (2304, 64)
    version = str(c.get("version", 2.0 if is_first else 2.5))
    if version not in MINICPMV_STACKS:
        raise c.fail(
            "version",
            f"{version[:20]!r} is no MiniCPM-V that is read",
            f"Known: {', '.join(MINICPMV_STACKS)}",
        )
    return MINICPMV_STACKS[version]


def expert_width(index: int, default: int) -> Field:
    """Return a rule for an expert's width from the list `[text, vision]` of ERNIE 4.5 VL."""

    def read(c: Config) -> int:
        key = "moe_intermediate_size"
        widths = c.sizes(key)
        if widths and index >= len(widths):
            raise c.fail(key, f"has {len(widths)} entries")
        return widths[index] if widths else default

    return read


text_expert_width = expert_width(0, 1536)


def step_has_experts(c: Config) -> bool:
    """Return whether a layer of Step has experts. `moe_layers_enum` lists these layers, as a list
    or a text."""
    layers = c.get("moe_layers_enum")
    if layers is None:
        return c.layer >= 3
    items = layers.split(",") if isinstance(layers, str) else c.items("moe_layers_enum") or []
    return str(c.layer) in {str(item).strip() for item in items}


def step_expert_count(c: Config) -> Any:
    """Return the number of experts of Step. A key in the file has priority over the default of
    another key."""
    key = "moe_num_experts"
    return c.get(key if c.in_file(key) else "num_local_experts")


def has_no_rope_list(c: Config) -> bool:
    """Return whether the file has no list of layers without rotary positions."""
    return c.get("no_rope_layers") in (None, [])


def cohere2_order(c: Config) -> list[str]:
    """Return Cohere2's order of layers: first the dense layers, then the layers with experts."""
    count = min(c.size("first_k_dense_replace", 0, 0), c.layers)
    dense_layers = every_nth("prefix_dense_sliding_window_pattern | 1")(c)[:count]
    return dense_layers + every_nth("sliding_window_pattern")(c)[: c.layers - count]
