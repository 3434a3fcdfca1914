"""Decoders with experts in an order of their own: chunks beside full attention, heads of two kinds, chosen blocks.

As in `experts`, a key that transformers maps to another is named in the form that its `attribute_map` accepts.
"""

from typing import Any

from kvcalc.layers.attention import BlockSparse
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, when
from kvcalc.library.huggingface.patterns import SLIDING, after_first, by_type, every, flagged, full_at, pick, slides, typed
from kvcalc.library.huggingface.shapes import both, dense, grouped, moe, projections, shared_experts
from kvcalc.library.huggingface.types.entry import Type, outer_tie
from kvcalc.library.huggingface.types.experts import BIAS, ERNIE_BIAS, LOCAL, WIDE, split_head


def size(key: str, default: int | None = None, least: int = 1) -> Field:
    """A whole number, where an arithmetic or a default of its own hangs on it."""
    return lambda c: c.size(key, default, least)


def nth(key: str, index: int, default: int) -> Field:
    """Entry `index` of a list of sizes, as in `[text, vision]`."""

    def read(c: Config) -> int:
        found = c.sizes(key)
        if found and index >= len(found):
            raise c.fail(key, f"has {len(found)} entries")
        return found[index] if found else default

    return read


ERNIE_WIDTHS = [nth("moe_intermediate_size", i, default) for i, default in enumerate((1536, 512))]
ERNIE_VL = Type(  # text and image tokens have experts of their own, and share the shared ones
    grouped(ERNIE_BIAS),
    after_first(
        1,
        both(
            moe(
                K("num_experts"),
                K("num_experts_per_tok"),
                ERNIE_WIDTHS[0],
                lambda c: c.size("moe_num_shared_experts", 0, least=0) * ERNIE_WIDTHS[0](c),
                shared_bias=ERNIE_BIAS,
                correction_bias=True,
            ),
            moe(K("num_experts"), K("num_experts_per_tok"), ERNIE_WIDTHS[1], correction_bias=True),
        ),
        dense(bias=ERNIE_BIAS),
        freq="",
    ),
    model=outer_tie(True),
)
COHERE2_MOE = Type(  # one norm: attention and FFN stand side by side
    grouped(BIAS),
    after_first(
        size("first_k_dense_replace", 0, 0),
        moe(K("num_experts"), size=WIDE, shared=shared_experts("num_shared_experts", "intermediate_size")),
        dense(K("prefix_dense_intermediate_size", "intermediate_size")),
        freq="",
    ),
    typed(
        lambda c: (
            every(K("prefix_dense_sliding_window_pattern", default=1))(c)[: c.size("first_k_dense_replace", 0, 0)]
            + every(K("sliding_window_pattern"))(c)[: max(0, c.layers - c.size("first_k_dense_replace", 0, 0))]
        )
    ),
    norms=1,
    norm=when(K("rms_norm_eps"), "rms", "layer_no_bias"),
)
OCR = after_first(  # DeepSeek's experts, with biases if the MLPs have them
    size("first_k_dense_replace", 1, 0),
    moe(K("num_experts"), shared=shared_experts(), shared_bias=K("mlp_bias")),
    dense(bias=K("mlp_bias")),
    freq="",
)

OCR_TEXT = Type(grouped(BIAS, head=split_head), OCR, model=outer_tie())

# --- windows, chunks and blocks ---

LLAMA4 = Type(
    grouped(BIAS),
    pick(
        lambda c: (
            c.layer in c.sizes("moe_layers")
            if c.items("moe_layers") is not None
            else (c.layer + 1) % c.size("interleave_moe_layer_step", 1) == 0
        ),
        moe(LOCAL, size=WIDE, shared=WIDE),
        dense(K("intermediate_size_mlp")),
    ),
    typed(
        flagged(
            lambda c: c.items("no_rope_layers"),
            "chunked_attention",
            every(K("no_rope_layer_interval", default=4), others="chunked_attention"),
        )
    ),
)


def in_window(key: str, inside: Field, outside: Field) -> Field:
    """`swa_`-`key` in a sliding layer, else `inside`; `outside` in the others."""
    return when(slides, K(f"swa_{key}", default=inside), outside)


MIMO = Type(
    grouped(
        qkv_bias=BIAS,
        heads=in_window("num_attention_heads", K("num_attention_heads"), K("num_attention_heads")),
        kv_heads=in_window("num_key_value_heads", K("num_key_value_heads", scale=2), K("num_key_value_heads")),
        head=in_window("head_dim", K("head_dim"), K("head_dim")),
        v_head_dim=in_window("v_head_dim", K("v_head_dim"), K("v_head_dim")),
        sinks=when(slides, K("add_swa_attention_sink_bias", default=True), K("add_full_attention_sink_bias")),
        window=lambda c: c.size("sliding_window_size") + 1 if c.has("sliding_window_size") else c.get("sliding_window"),
    ),
    after_first(lambda c: 0 if c.items("moe_layer_freq") else 1, moe(LOCAL), dense()),
    typed(flagged(lambda c: c.items("hybrid_layer_pattern"), SLIDING, full_at(lambda i, _: i == 0 or i % 6 == 5))),
    inert=("attention_chunk_size",),
)


def index(key: str, older: str) -> Field:
    """An indexer's size, from the older mapping where a file still has it."""

    def read(c: Config) -> Any:
        inside = c.nested("sparse_attention_config")
        return inside.get(older) if inside.has(older) else c.get(key)

    return read


MINIMAX_M3 = Type(
    by_type(
        full_attention=grouped(qk_norm="head"),
        minimax_m3_sparse=grouped(
            qk_norm="head",
            spec=BlockSparse,
            index_n_heads=index("index_n_heads", "sparse_num_index_heads"),
            index_head_dim=index("index_head_dim", "sparse_index_dim"),
            index_block_size=index("index_block_size", "sparse_block_size"),
            index_topk_blocks=index("index_topk_blocks", "sparse_topk_blocks"),
        ),
    ),
    after_first(
        0,
        moe(K("num_experts"), size=WIDE, shared=K("shared_intermediate_size")),
        dense(K("dense_intermediate_size")),
    ),
    typed(flagged(lambda c: c.nested("sparse_attention_config").items("sparse_attention_freq"), "minimax_m3_sparse")),
    inert=(
        "index_local_blocks", "sparse_local_block", "sparse_init_block", "sparse_score_type", "sparse_disable_index_value",
        "use_sparse_attention", "first_k_dense_replace", "moe_intermediate_size", "n_shared_experts", "qk_norm_type",
        "use_qk_norm", "use_gemma_norm", "use_routing_bias", "num_mtp_modules",
    ),
)  # fmt: skip

MUSE_SPARK = Type(  # experts at a width of their own, between two norms; a gate per channel on both branches
    both(
        grouped(qkv_bias=BIAS, o_bias=BIAS, output_gate="full"),
        projections(vectors=lambda c: {"residual_gates": 2 * c.size("hidden_size")}),
    ),
    after_first(
        0,
        both(
            moe(LOCAL, moe_latent_size=K("moe_hidden_size")),
            projections(vectors=lambda c: {"expert_norms": 2 * c.size("moe_hidden_size")}),
        ),
        dense(),
        freq="",
    ),
    typed(full_at(lambda i, layers: (layers - 1 - i) % 4 == 0)),
    norms=3,
    model=outer_tie(),
)

TYPES = {
    "cohere2_moe": COHERE2_MOE,
    "deepseek_ocr2_text": OCR_TEXT,
    "ernie4_5_vl_moe_text": ERNIE_VL,
    "llama4_text": LLAMA4,
    "mimo_v2_flash": MIMO,
    "minimax_m3_vl_text": MINIMAX_M3,
    "muse_spark_text": MUSE_SPARK,
    "unlimited_ocr_text": OCR_TEXT,  # its window thins decoded tokens, not a prompt's
}
