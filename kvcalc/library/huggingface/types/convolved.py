"""Attention with experts and short convolutions on keys, values or branches, after transformers' modelling code."""

from kvcalc.layers.recurrent import Convolutions
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, when
from kvcalc.library.huggingface.patterns import after_first, every, typed
from kvcalc.library.huggingface.shapes import both, dense, grouped, mixer, moe, projections
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.experts import LOCAL


def slides(c: Config) -> bool:
    return c.layer_type == "hybrid_sliding"


def in_window(key: str) -> Field:
    """`swa_`-`key` in a sliding layer, `key` elsewhere."""
    return when(slides, K(f"swa_{key}"), K(key))


def here(c: Config, key: str) -> int:
    """The size that `in_window` chooses, for arithmetic."""
    return c.size(f"swa_{key}" if slides(c) else key)


WINDOW = when(slides, K("sliding_window"))

# --- Inkling: short convolutions on keys, values and both branches; relative positions by projection ---


def relative(c: Config) -> dict[str, tuple[int, int]]:
    """A vector of d_rel per head, and what turns it into a logit per distance."""
    width, extent = c.size("d_rel"), c.size("sliding_window" if slides(c) else "rel_extent")
    return {"relative": (c.size("hidden_size"), here(c, "num_attention_heads") * width), "distances": (width, extent)}


INKLING_CONVOLUTIONS = mixer(
    Convolutions,
    channels=lambda c: {
        "k_conv": here(c, "num_key_value_heads") * here(c, "head_dim"),
        "v_conv": here(c, "num_key_value_heads") * here(c, "head_dim"),
        "attention_conv": c.size("hidden_size"),
        "ffn_conv": c.size("hidden_size"),
    },
    conv_kernel=K("sconv_kernel_size"),
)
INKLING_HEADS: dict[str, Field] = {
    "heads": in_window("num_attention_heads"),
    "kv_heads": in_window("num_key_value_heads"),
    "head": in_window("head_dim"),
    "sliding_window": WINDOW,
}


def routed(c: Config) -> int:
    """The width of an expert, which a file that gives `dense_intermediate_size` calls intermediate_size."""
    return c.size("intermediate_size" if c.has("dense_intermediate_size") else "moe_intermediate_size")


INKLING = Type(
    both(grouped(qk_norm="head", **INKLING_HEADS), INKLING_CONVOLUTIONS, projections(relative)),
    after_first(
        lambda c: c.size("dense_mlp_idx", 0, least=0),
        both(
            moe(LOCAL, size=routed, shared=lambda c: c.size("n_shared_experts", 0, least=0) * routed(c)),
            projections(
                lambda c: {"shared_router": (c.size("hidden_size"), c.size("n_shared_experts", 0, least=0))},
                {"router_scale": 1},
            ),
        ),
        both(dense(K("dense_intermediate_size", "intermediate_size")), projections(vectors={"scale": 1})),
        freq="",
    ),
    typed(
        lambda c: (
            ["hybrid_sliding" if i in c.sizes("local_layer_ids") else "hybrid" for i in range(c.layers)]
            if c.has("local_layer_ids")
            else every(6, "hybrid", "hybrid_sliding")(c)
        )
    ),
    model={"embedding_norm": True, "tie_word_embeddings": False},
)


def dynamic_kernel(c: Config) -> tuple[int, int]:
    """What a full layer adds to the static kernel of its key and value convolutions, from the input."""
    return c.size("hidden_size"), here(c, "num_key_value_heads") * c.size("sconv_kernel_size")


INKLING2_CLIPS = projections(
    lambda c: {
        **relative(c),
        "sinks": (c.size("hidden_size"), here(c, "num_attention_heads")),
        **({} if slides(c) else dict.fromkeys(("k_kernel", "v_kernel"), dynamic_kernel(c))),
    },
    lambda c: {
        "clips": here(c, "num_attention_heads") * (here(c, "head_dim") + c.size("d_rel")),
        "block_queries": c.size("hidden_size") * (1 + (0 if c.layer == 0 else 1 if slides(c) else 3)),
    },
)


INKLING2 = Type(
    both(grouped(output_gate="full", **INKLING_HEADS), INKLING_CONVOLUTIONS, INKLING2_CLIPS),
    moe(LOCAL, size=K("moe_intermediate_size")),
    typed(every(6, "hybrid", "hybrid_sliding")),
    norms=when(slides, 2, 4),
    model={
        "embedding_norm": True,
        "tie_word_embeddings": False,
        "extra": projections(vectors=lambda c: {"block_queries": c.size("hidden_size")}),
    },
)

# --- Zaya: queries and keys through two convolutions, half of each value one token late, a router of its own depth ---


def channels(c: Config) -> int:
    """Channels of all queries and keys."""
    return (c.size("num_attention_heads") + c.size("num_key_value_heads")) * c.size("head_dim")


def _in_whole_layers(c: Config) -> bool:
    """Whether layers have biases. Raises UserError on a file as ZAYA's makers write it, where attention and experts alternate."""
    if key := next((key for key in ("zaya_mlp_expansion", "swa_layers") if c.has(key)), ""):
        said = f"this file counts attention and experts as layers of their own, which makes {c.layers} twice as many as are read"
        raise c.fail(key, said, "Read is the config.json of the same weights as transformers has them")
    return c.flag("attention_bias")


ZAYA = Type(
    both(
        grouped(_in_whole_layers, sliding_window=WINDOW),
        mixer(
            Convolutions,
            channels=lambda c: {"qk_conv": channels(c)},
            conv_kernel=K("cca_time0"),
            bias=True,
            columns=lambda c: c.size("cca_time0") + c.size("cca_time1") - 2 or None,
        ),
        mixer(
            Convolutions,
            channels=lambda c: {"late_v": c.size("num_key_value_heads") * c.size("head_dim") // 2},
            conv_kernel=2,
            weighted=False,
        ),
        projections(
            lambda c: {"qk_conv_by_head": (c.size("head_dim") * c.size("cca_time1"), channels(c), channels(c))},
            lambda c: {"temperature": c.size("num_key_value_heads"), "residual_scales": 8 * c.size("hidden_size")},
        ),
    ),
    both(
        projections(
            lambda c: (
                {"router_down": (c.size("hidden_size"), *(2 * (c.size("router_hidden_size"),)))}
                | dict.fromkeys(("router_1", "router_2"), 3 * (c.size("router_hidden_size"),))
            ),
            lambda c: {"router_norms": c.size("router_hidden_size") * (2 if c.layer else 1)},
        ),
        moe(K("num_experts"), zero_experts=1, router_width=K("router_hidden_size")),
    ),
    typed(lambda c: ["hybrid"] * c.layers),
    model={
        "lm_head_bias": K("lm_head_bias"),
        "extra": projections(vectors=lambda c: {"input_scales": 2 * c.size("hidden_size")}),
    },
)

TYPES = {"inkling_text": INKLING, "inkling2_text": INKLING2, "zaya": ZAYA}
