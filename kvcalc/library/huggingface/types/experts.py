"""Decoders with grouped attention and experts in some or all layers, after transformers' modelling code.

A key that transformers maps to another (`num_local_experts` → `n_routed_experts`) is named here in the form that its
`attribute_map` accepts, so that both spellings are found.
"""

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import K, when
from kvcalc.library.huggingface.patterns import (
    FULL,
    SLIDING,
    after_first,
    every,
    from_layer,
    full_at,
    pick,
    stepped,
    typed,
    windowed,
)
from kvcalc.library.huggingface.shapes import both, dense, grouped, moe, projections, shared_experts
from kvcalc.library.huggingface.types.entry import Type, outer_tie

LOCAL = K("num_local_experts")
WIDE = K("intermediate_size")
BIAS = K("attention_bias")
SHARED = K("shared_expert_intermediate_size")


def split_head(c: Config) -> int:
    """Hidden size over heads, rounded down as transformers does."""
    return c.size("hidden_size") // c.size("num_attention_heads")


HEAD = K("head_dim", default=split_head)


def has_window(c: Config) -> bool:
    return c.get("sliding_window") is not None


def slides(c: Config, layer: int) -> bool:
    """Qwen2-MoE's rule: every other layer below `max_window_layers`, if windows are on."""
    return c.flag("use_sliding_window") and layer % 2 == 0 and layer < c.size("max_window_layers", least=0)


# --- Llama-like attention, experts everywhere ---

GRANITE = Type(grouped(BIAS), moe(LOCAL, size=WIDE))
GRANITE_SHARED = moe(LOCAL, size=WIDE, shared=K("shared_intermediate_size"))
OLMOE = Type(grouped(BIAS, qk_norm="full"), moe(LOCAL, size=WIDE))
PHIMOE = GRANITE.variant(
    order=typed(windowed()),
    norm="layer",
    model={"lm_head_bias": K("lm_head_bias")},
)
DBRX = Type(
    grouped(kv_heads=lambda c: c.nested("attn_config").size("kv_n_heads", 1), head=split_head),
    moe(
        lambda c: c.nested("ffn_config").size("moe_num_experts", 4),
        lambda c: c.nested("ffn_config").size("moe_top_k", 1),
        lambda c: c.nested("ffn_config").size("ffn_hidden_size", 3584),
    ),
    norm="layer_no_bias",
)
ARIA = Type(
    grouped(BIAS),
    moe(
        K("moe_num_experts"),
        K("moe_topk"),
        WIDE,
        shared_experts("moe_num_shared_experts", "intermediate_size"),
        shared_bias=K("mlp_bias"),
    ),
)
KOLIBRI = Type(
    grouped(qk_norm="head"),
    moe(K("num_experts"), size=K("moe_intermediate_size"), shared=SHARED),
    typed(every(5)),
    norms=4,
)


def hunyuan_shared(c: Config) -> int:
    """One shared expert, unless the file has Tencent's own keys, which say how many."""
    if c.flag("use_cla"):
        raise c.fail("use_cla", "layers that share keys and values are not read in this type")
    return c.size("num_shared_expert", 1, least=0) * c.size("intermediate_size") if c.flag("use_mixed_mlp_moe", True) else 0


HUNYUAN_V1 = Type(
    grouped(BIAS, head=K("head_dim", "attention_head_dim"), qk_norm=when(K("use_qk_norm", default=True), "head")),
    moe(LOCAL, K("num_experts_per_tok"), K("moe_intermediate_size", "intermediate_size"), shared=hunyuan_shared),
    inert=("norm_type", "attention_head_dim", "cla_share_factor"),
)

# --- dense layers first ---

QWEN2_MOE = Type(
    grouped(qkv_bias=K("qkv_bias")),
    stepped(moe(shared=SHARED, shared_expert_gate=True), dense()),
    typed(lambda c: [SLIDING if slides(c, i) else FULL for i in range(c.layers)]),
)
DEEPSEEK_LIKE = moe(LOCAL, shared=shared_experts())
DOTS1 = Type(
    grouped(BIAS, qk_norm="head"),
    after_first("first_k_dense_replace", DEEPSEEK_LIKE, dense(), freq=""),
    typed(from_layer(K("max_window_layers"), condition=has_window)),
)
GLM4_MOE = Type(
    grouped(qkv_bias=BIAS, head=HEAD, qk_norm=when(K("use_qk_norm"), "head")),
    after_first("first_k_dense_replace", DEEPSEEK_LIKE, dense(), freq=""),
)
SOLAR_OPEN = Type(grouped(qkv_bias=BIAS), DEEPSEEK_LIKE)
COUNTED = shared_experts("num_shared_experts")
AFMOE = Type(
    grouped(BIAS, qk_norm="head", output_gate="full"),
    after_first("num_dense_layers", moe(K("num_experts"), shared=COUNTED, correction_bias=True), dense(), freq=""),
    typed(every(K("global_attn_every_n_layers"))),
    norms=4,
)
EXAONE_MOE = Type(
    grouped(qk_norm="head"),
    after_first("first_k_dense_replace", moe(K("num_experts"), shared=COUNTED), dense(), freq=""),
    typed(every(when(has_window, K("sliding_window_pattern")))),
)
BEAM = Type(
    both(
        grouped(BIAS, qk_norm="head", output_gate="full"),
        projections(vectors=lambda c: {"gate_bias": c.size("num_attention_heads")}),
    ),
    after_first(3, moe(K("num_experts")), dense(), freq=""),
    typed(full_at(lambda i, layers: i % 6 == 5 or i == layers - 1)),
    norms=4,
)
HY_V3 = Type(
    grouped(BIAS, qk_norm="head"),
    after_first(1, moe(LOCAL, shared=COUNTED, shared_bias=K("mlp_bias")), dense(bias=K("mlp_bias")), freq=""),
)
FLINT = Type(
    grouped(BIAS, qk_norm="head", sinks=True),
    pick(
        lambda c: (
            c.layer not in (c.sizes("mlp_only_layers") if c.has("mlp_only_layers") else (0, 1))
            and (c.layer + 1) % c.size("decoder_sparse_step", 1) == 0
        ),
        moe(K("num_experts"), shared=SHARED),
        dense(),
    ),
    typed(full_at(lambda i, layers: i < 2 or i % 4 == 1 or i == layers - 1)),
)
PER_HEAD_GATE = when(lambda c: c.get("gating", True) in (True, "per-head"), "head", "full")
LAGUNA = Type(
    grouped(BIAS, heads=K("num_attention_heads_per_layer"), qk_norm="head", output_gate=PER_HEAD_GATE),
    after_first(1, moe(K("num_experts"), shared=SHARED, correction_bias=True), dense(), freq=""),
    inert=("mlp_only_layers", "decoder_sparse_step", "gating_types"),
)
MELLUM = Type(grouped(BIAS, qk_norm="head"), after_first(0, moe(K("num_experts")), dense(), freq=""))
ERNIE_BIAS = K("use_bias")
ERNIE = moe(
    K("num_experts"),
    K("num_experts_per_tok"),
    K("moe_intermediate_size"),
    shared_experts("moe_num_shared_experts"),
    shared_bias=ERNIE_BIAS,
    correction_bias=True,
)
ERNIE_MOE = Type(
    grouped(ERNIE_BIAS),
    pick(
        lambda c: (
            (c.layer + 1) % c.size("moe_layer_interval", 1) == 0
            and c.size("moe_layer_start_index", 0, least=0) <= c.layer
            and ((end := c.size("moe_layer_end_index", -1, least=-1)) == -1 or c.layer <= end)
        ),
        ERNIE,
        dense(bias=ERNIE_BIAS),
    ),
    model={"lm_head_bias": ERNIE_BIAS},
)
TYPES = {
    "afmoe": AFMOE,
    "aria_text": ARIA,
    "beam": BEAM,
    "cohere_compass_text": Type(grouped(BIAS, head=HEAD), dense(), norms=1, norm="layer_no_bias"),
    "dbrx": DBRX,
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE_MOE,
    "exaone_moe": EXAONE_MOE,
    "flex_olmo": OLMOE,
    "flint": FLINT,
    "glm4_moe": GLM4_MOE,
    "glm4v_moe_text": GLM4_MOE.variant(
        mixer=grouped(qkv_bias=BIAS, head=HEAD),
        model=outer_tie(),
    ),
    "granitemoe": GRANITE,
    "granitemoe_swa": Type(grouped(BIAS, sinks=True), GRANITE_SHARED, typed(every(4, offset=0))),
    "granitemoeshared": GRANITE.variant(ffn=GRANITE_SHARED),
    "hunyuan_v1_moe": HUNYUAN_V1,
    "hy_v3": HY_V3,
    "kolibri1": KOLIBRI,
    "laguna": LAGUNA,
    "mellum": MELLUM,
    "olmoe": OLMOE,
    "phimoe": PHIMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_omni_moe_text": Type(grouped(BIAS, head=HEAD, qk_norm="head"), stepped(moe(), dense()), model=outer_tie()),
    "solar_open": SOLAR_OPEN,
}
