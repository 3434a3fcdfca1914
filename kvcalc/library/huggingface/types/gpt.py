"""Decoders of the first generations: GPT and similar types.

Source: transformers' modelling code.
"""

from kvcalc.library.huggingface.config import Config, when
from kvcalc.library.huggingface.layer_types import full_where, typed
from kvcalc.library.huggingface.shapes import (
    both,
    cross_attention,
    dense,
    mha,
    projections,
)
from kvcalc.library.huggingface.types.entry import Type

# Attention to an encoder has a norm too.
NORMS = "3 if add_cross_attention else 2"
WIDE = "4 * hidden_size"
GPT = Type(
    both(mha(True), cross_attention()),
    dense("n_inner | 4 * hidden_size", gated=False, bias=True),
    norms=NORMS,
    norm="layer",
    model={"position_embeddings": "max_position_embeddings"},
)
NEOX = Type(mha("attention_bias"), dense(gated=False, bias=True), norm="layer")


def _mpt_groups(c: Config) -> int:
    """Return the heads of keys and values, as the code of MPT reads `attn_config`."""
    attention = c.nested("attn_config")
    kind = attention.word("attn_type", "multihead_attention")
    heads = c.size("num_attention_heads")
    if kind == "grouped_query_attention":
        return attention.size("kv_n_heads", heads)
    return 1 if kind.startswith("multiquery") else heads


def _modernbert_window(c: Config) -> int | None:
    """Return half of `local_attention`, unless the file gives the window itself."""
    if c.in_file("sliding_window"):
        return c.size("sliding_window")
    return c.size("local_attention", 0, minimum=0) // 2 or None


TYPES: dict[str, Type] = {
    "gpt-sw3": GPT,
    "gpt_bigcode": GPT.variant(
        mixer=both(
            mha(True, kv_heads="1 if multi_query else num_attention_heads"),
            cross_attention(),
        )
    ),
    "gpt_neo": GPT.variant(  # its local layers mask what is out of the window, and keep it
        mixer=mha(o_bias=True),
        ffn=dense("intermediate_size | 4 * hidden_size", gated=False, bias=True),
        norms=2,
    ),
    "openai-gpt": GPT.variant(
        mixer=mha(True),
        ffn=dense(WIDE, gated=False, bias=True),
        norms=2,
        model={"final_norm": False},
    ),
    "xglm": GPT.variant(
        ffn=dense("ffn_dim", gated=False, bias=True), model={"position_embeddings": 0}
    ),
    "bloom": Type(
        mha(True),
        dense(WIDE, gated=False, bias=True),
        norm="layer",
        model={"embedding_norm": True},
    ),
    "mpt": Type(
        mha(kv_heads=_mpt_groups),
        dense(WIDE, gated=lambda c: c.nested("ffn_config").word("ffn_type") == "mptglu"),
        norm="layer_no_bias",
        inert="fc_type ffn_type alibi_bias_max attn_uses_sequence_id prefix_lm",
    ),
    # One norm for attention and FFN side by side; rotary positions; a bias on the LM head alone.
    "gptj codegen": GPT.variant(
        mixer=mha(), norms=1, model={"position_embeddings": 0, "lm_head_bias": True}
    ),
    "gpt_neox": NEOX,
    "gpt_neox_japanese": NEOX.variant(
        mixer=both(
            mha(),
            projections(
                vectors={"dense_bias": when("layer_index == layer_count - 1", "hidden_size")}
            ),
        ),
        ffn=dense(
            lambda c: int(c.size("hidden_size") * c.number("intermediate_multiple_size")),
            gated=False,
        ),
    ),
    # The first layer has no norm before attention. The head has a matrix and a norm of its own.
    "modernbert-decoder": Type(
        mha("attention_bias", window=_modernbert_window),
        dense(bias="mlp_bias"),
        typed(full_where("layer_index % (global_attn_every_n_layers | 3) == 0")),
        norms=when("layer_index == 0", 1, 2),
        norm=when("norm_bias", "layer", "layer_no_bias"),
        model={
            "embedding_norm": True,
            "lm_head_bias": "decoder_bias",
            "extra": projections(
                {
                    "head": when(
                        "classifier_bias",
                        "hidden_size, hidden_size, hidden_size",
                        "hidden_size, hidden_size",
                    )
                },
                {"head_norm": "2 * hidden_size if norm_bias else hidden_size"},
            ),
        },
    ),
}
