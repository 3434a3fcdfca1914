"""Plain decoders: grouped attention and a dense FFN or experts in every layer, after transformers' modelling code."""

from kvcalc.library.huggingface.fields import K, when
from kvcalc.library.huggingface.patterns import every, from_layer, stepped, typed, windowed
from kvcalc.library.huggingface.shapes import dense, even_head_dim, grouped, half_window, moe
from kvcalc.library.huggingface.types.entry import Type, outer_tie

LLAMA = Type(grouped(K("attention_bias")), dense(bias=K("mlp_bias")))
GPT2 = Type(
    grouped(True, kv_heads=K("num_attention_heads")),
    dense(K("n_inner", default=K("hidden_size", scale=4)), gated=False, bias=True),
    norm="layer",
    model={"position_embeddings": K("max_position_embeddings")},
)
QWEN2_ORDER = typed(from_layer(K("max_window_layers"), condition=K("use_sliding_window")))
QWEN2 = Type(grouped(qkv_bias=True), dense(), QWEN2_ORDER)
QWEN3 = Type(grouped(K("attention_bias"), qk_norm="head"), dense(), QWEN2_ORDER)
MISTRAL = Type(grouped(), dense(), typed(windowed()))
GEMMA2 = Type(grouped(K("attention_bias")), dense(), typed(every(2)), norms=4)
GEMMA3 = GEMMA2.variant(
    mixer=grouped(K("attention_bias"), qk_norm="head", window=half_window(True)),
    order=typed(every(K("sliding_window_pattern", "_sliding_window_pattern", default=6))),
)

TYPES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MISTRAL.variant(ffn=moe(size=K("intermediate_size"))),
    "gpt2": GPT2,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3.variant(order=typed(), model=outer_tie()),
    "qwen3_moe": QWEN3.variant(
        ffn=stepped(moe(), dense()), order=typed(windowed(K("use_sliding_window"))), inert=("use_qk_norm",)
    ),
    "qwen3_vl_moe_text": QWEN3.variant(ffn=stepped(moe(), dense()), order=typed(), model=outer_tie()),
    "gemma": Type(grouped(K("attention_bias")), dense()),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_oss": Type(
        grouped(K("attention_bias"), sinks=True),
        moe(bias=True, router_bias=True, size=K("intermediate_size")),
        typed(every(2)),
    ),
    "starcoder2": Type(
        grouped(K("use_bias")),
        dense(gated=False, bias=K("use_bias")),
        typed(windowed()),
        norm="layer",
    ),
    "minimax_m2": Type(
        grouped(qk_norm="full"),
        moe(size=K("intermediate_size")),
        inert=("use_qk_norm", "qk_norm_type", "use_routing_bias", "shared_intermediate_size"),
    ),
    "opt": Type(
        grouped(K("enable_bias"), kv_heads=K("num_attention_heads"), head=even_head_dim),
        dense(K("ffn_dim"), gated=False, bias=K("enable_bias")),
        norm=when(K("layer_norm_elementwise_affine", default=True), "layer", "none"),
        model={
            "position_embeddings": lambda c: c.size("max_position_embeddings") + 2,
            "embedding_size": K("word_embed_proj_dim"),
            "final_norm": lambda c: c.flag("do_layer_norm_before", True) and not c.flag("_remove_final_layer_norm"),
        },
    ),
}
