"""Models with linear attention, delta rules, short convolutions or gated recurrences.

Qwen4-Exp has delta rules and block-sparse attention over several residual streams, and memories of
n-grams. Source: transformers' modelling code.
"""

from typing import Any

from kvcalc.layers.attention import BlockSparse
from kvcalc.layers.recurrent import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    NgramMemory,
    RgLru,
    ShortConv,
)
from kvcalc.layers.recurrent.ngram import ngram_rows
from kvcalc.library.huggingface.config import Config, Field, Reader, when
from kvcalc.library.huggingface.layer_types import (
    FULL,
    LINEAR,
    SLIDING,
    cycle,
    every,
    full_where,
    typed,
)
from kvcalc.library.huggingface.shapes import (
    after_first,
    attention_or,
    both,
    by_type,
    dense,
    grouped,
    head_dim,
    latent,
    mixer,
    moe,
    pick,
    projections,
    state_dtype,
    stepped,
)
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.records import JsonObject

FIRST_DENSE = "(first_k_dense_replace | 1)"

# --- Gated delta net ---

DELTA_NET = mixer(
    GatedDeltaNet,
    linear_num_key_heads="linear_num_key_heads",
    linear_num_value_heads="linear_num_value_heads",
    linear_key_head_dim="linear_key_head_dim",
    linear_value_head_dim="linear_value_head_dim",
    linear_conv_kernel_dim="linear_conv_kernel_dim",
    state_dtype=state_dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
)
GATED: JsonObject = {
    "qk_norm": "head",
    "output_gate": "full",
    "output_gate_bias": "attention_bias",
}
SHARED_MOE = moe(
    "num_experts", shared="shared_expert_intermediate_size", shared_expert_gate=True
)
QWEN3_5 = Type(
    attention_or(DELTA_NET, grouped(**GATED)),
    order=typed(every("full_attention_interval | 4", others=LINEAR)),
    inert="attn_output_gate full_attention_interval",
)
QWEN3_5_MOE = QWEN3_5.variant(ffn=SHARED_MOE)


def _key_width(c: Config) -> int:
    heads = c.size("linear_num_key_heads", c.size("num_attention_heads"))
    return c.size("linear_key_head_dim", int(0.75 * c.size("hidden_size") / heads))


# --- Kimi delta attention ---


def _kimi_layers(c: Config) -> list[str]:
    """Return the order of lists that count from 1, else every fourth layer but the first full."""
    inside = c.nested("linear_attn_config")
    if not (inside.has("full_attn_layers") and inside.has("kda_layers")):
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(c.layers)]
    full, linear = inside.sizes("full_attn_layers"), inside.sizes("kda_layers")
    if sorted([*full, *linear]) != list(range(1, c.layers + 1)):
        raise c.fail(
            "linear_attn_config",
            f"does not name each of the layers 1 to {c.layers} once",
        )
    return [FULL if i + 1 in full else LINEAR for i in range(c.layers)]


def kda(key: str, inner_key: str) -> Field:
    """Return the rule of a size that `linear_attn_config` gives under another name."""

    def rule(c: Config) -> Any:
        inside = c.nested("linear_attn_config")
        return inside.get(inner_key) if inside.has(inner_key) else c.get(key)

    return rule


KDA = mixer(
    KimiDeltaAttention,
    num_heads=kda("linear_num_heads", "num_heads"),
    head_dim=kda("linear_head_dim", "head_dim"),
    conv_kernel=kda("linear_conv_kernel_dim", "short_conv_kernel_size"),
    full_gate=lambda c: c.nested("linear_attn_config").flag("use_full_rank_gate"),
)


# Kimi-K3 has experts of a width of their own, behind a norm, gates on its latent attention, and
# before each block a vector that weighs the outputs of earlier ones (SGLang's kimi_k3.py).
def _residuals(*names: str) -> Reader:
    """Return the reader of a vector, as a matrix of one column, and a norm for each block."""
    return pick(
        "(attn_res_block_size | 0) > 0",
        projections(
            {f"{name}_residual": "hidden_size, 1" for name in names},
            {f"{name}_residual_norm": "hidden_size" for name in names},
        ),
    )


KIMI_LINEAR = Type(
    both(
        attention_or(KDA, latent(output_gate=when("mla_use_output_gate", "full"))),
        _residuals("mixer", "ffn"),
    ),
    after_first(
        FIRST_DENSE,
        both(
            moe(
                "num_local_experts",
                shared="(n_shared_experts | 0) * moe_intermediate_size",
                moe_latent_size="routed_expert_hidden_size",
            ),
            projections(
                vectors={
                    "latent_norm": when(
                        "(routed_expert_hidden_size | 0) > 0 and latent_moe_use_norm",
                        "routed_expert_hidden_size",
                    )
                }
            ),
        ),
    ),
    typed(_kimi_layers),
    model={"extra": _residuals("last"), "tie_word_embeddings": False},
    inert="moe_layer_freq mla_use_nope tie_word_embeddings",
)

# --- Short convolutions ---

CONV = mixer(ShortConv, width="hidden_size", conv_kernel="conv_L_cache", bias="conv_bias")


def _adjusted(c: Config) -> int:
    """Return LFM2's FFN width: two thirds of a size, times a factor, up to the next multiple."""
    size = c.size("block_ff_dim", c.size("intermediate_size"))
    if not c.flag("block_auto_adjust_ff_dim", True):
        return size
    size, key = int(2 * size / 3), "block_ffn_dim_multiplier"
    if key in c.file and c.get(key) is None:
        return size
    multiple = c.size("block_multiple_of")
    return -(-int(c.number(key, 1.0) * size) // multiple) * multiple


LFM2 = Type(
    by_type(full_attention=grouped(False, qk_norm="head"), conv=CONV),
    dense(_adjusted),
    typed(
        full_where(
            lambda c: not c.has("full_attn_idxs") or c.layer in c.sizes("full_attn_idxs"),
            others="conv",
        )
    ),
    model={"tie_word_embeddings": "tie_embedding | tie_word_embeddings | True"},
)
LFM3_ATTENTION = grouped(qk_norm="head", output_gate=when("use_attention_gate", "head"))

# --- Qwen4-Exp ---


def _mix(block: str, inject: Field = "hc_count * hidden_size, hc_count") -> dict[str, Field]:
    """Return how a block's input is mixed from the streams, and how its output goes back."""
    return {
        f"{block}_mix_down": "hc_count * hidden_size, hc_lowrank",
        f"{block}_mix_up": "hc_lowrank, hc_count * hidden_size",
        f"{block}_inject": inject,
    }


def _memory_index(c: Config) -> int:
    """Return which of the model's memories the current layer has; −1 if it has none."""
    layers = sorted(set(c.sizes("ple_layer_ids")))
    return layers.index(c.layer + 1) if c.layer + 1 in layers else -1


def _hashes(c: Config) -> int:
    count = (c.size("ngram_size", minimum=2) - 1) * c.size("heads_per_ngram")
    width = c.size("ple_embed_dim", c.size("hidden_size"))
    if count * (_memory_index(c) + 1) > 1000 or width % count:
        raise c.fail(
            "ple_embed_dim",
            f"does not divide among {count} hashes (ngram_size, heads_per_ngram)",
        )
    return count


MEMORY = mixer(
    NgramMemory,
    table_rows=lambda c: ngram_rows(
        c.size("ngram_vocab_size_base"),
        _hashes(c),
        _memory_index(c),
        c.size("make_ngram_vocab_size_divisible_by"),
    ),
    table_width=lambda c: c.size("ple_embed_dim", c.size("hidden_size")) // _hashes(c),
    hashes=_hashes,
    streams="hc_count",
    hidden_size="hidden_size",
    conv_kernel="ple_conv_kernel_size",
    dilation="ngram_size",
)
INDEXED = grouped(
    **GATED,
    spec=BlockSparse,
    index_block_size="indexer_compress_ratio",
    index_topk_blocks="indexer_budget // indexer_compress_ratio",
    index_n_heads="indexer_n_heads",
    index_head_dim="indexer_head_dim",
    index_pooled=True,
)

TYPES = {
    "qwen4_exp qwen4_exp_text": QWEN3_5_MOE.variant(
        mixer=both(
            by_type(
                indexed_attention=INDEXED,
                full_attention=INDEXED,
                linear_attention=DELTA_NET,
            ),
            pick(lambda c: _memory_index(c) >= 0, MEMORY),
            projections(
                _mix("mixer") | _mix("ffn"),
                {"block_stream_norms": "2 * hc_count * hidden_size"},
            ),
        ),
        norms=0,
        model={
            "final_norm": False,
            "extra": projections(
                _mix("last", inject=None),
                {"last_stream_norms": "hc_count * hidden_size"},
            ),
        },
    ),
    "qwen3_next": QWEN3_5.variant(ffn=stepped(SHARED_MOE)),
    "qwen3_5 qwen3_5_text": QWEN3_5,
    "qwen3_5_moe qwen3_5_moe_text": QWEN3_5_MOE,
    "olmo_hybrid": Type(
        attention_or(
            mixer(
                GatedDeltaNet,
                linear_num_key_heads="linear_num_key_heads | num_attention_heads",
                linear_num_value_heads="linear_num_value_heads | num_attention_heads",
                linear_key_head_dim=_key_width,
                linear_value_head_dim=lambda c: c.size(
                    "linear_value_head_dim", 2 * _key_width(c)
                ),
                linear_conv_kernel_dim="linear_conv_kernel_dim",
            ),
            grouped(qk_norm="full"),
        ),
        order=typed(
            full_where(
                "layer_index % 4 == 3 or layer_count < 4 and layer_index == layer_count - 1",
                others=LINEAR,
            )
        ),
    ),
    "kimi_linear": KIMI_LINEAR,
    "bailing_hybrid": KIMI_LINEAR.variant(
        mixer=attention_or(
            mixer(
                KimiDeltaAttention,
                num_heads="linear_num_heads | num_attention_heads",
                head_dim="linear_head_dim | head_dim",
                conv_kernel="linear_conv_kernel_dim | short_conv_kernel_size",
                factored=False,
            ),
            latent(output_gate="head"),
        ),
        ffn=after_first(
            FIRST_DENSE,
            moe(
                "num_local_experts",
                shared=(
                    "(n_shared_experts | 0)"
                    " * (moe_shared_expert_intermediate_size | moe_intermediate_size)"
                ),
            ),
        ),
        order=typed(every("layer_group_size", others=LINEAR)),
        inert=(
            "tie_word_embeddings no_kda_lora kda_safe_gate kda_lower_bound head_dim"
            " moe_router_enable_expert_bias use_qk_norm"
        ),
    ),
    "minimax": Type(
        attention_or(
            mixer(
                Lightning,
                num_attention_heads="num_attention_heads",
                head_dim=head_dim,
                # the model's own
                state_dtype=lambda c: state_dtype("dtype", "torch_dtype")(c) or "bf16",
            ),
            grouped(False),
        ),
        moe("num_local_experts", size="intermediate_size"),
        # flags of MiniMax's own configs: 1 is full attention
        typed(full_where("attn_type_list | (layer_index % 2 == 0)", others=LINEAR)),
        inert=(
            "postnorm shared_moe_mode layernorm_full_attention_alpha layernorm_full_attention_beta"
            " layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha"
            " layernorm_mlp_beta"
        ),
    ),
    "lfm2": LFM2,
    "lfm2_moe": LFM2.variant(
        ffn=after_first("(num_dense_layers | 0)", moe("num_experts")), order=typed()
    ),
    "lfm3": Type(
        by_type(full_attention=LFM3_ATTENTION, sliding_attention=LFM3_ATTENTION, conv=CONV),
        order=typed(
            lambda c: [
                FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else "conv"
                for i in range(c.layers)
            ]
        ),
        norms=when("use_sandwich_norm", 4, 2),
    ),
    "recurrent_gemma": Type(
        by_type(
            sliding_attention=grouped(o_bias=True, window="attention_window_size"),
            linear_attention=mixer(
                RgLru,
                lru_width="lru_width | hidden_size",
                num_heads="num_attention_heads",
                conv_kernel="conv1d_width",
            ),
        ),
        dense("intermediate_size // 2", bias=True),
        cycle("block_types", {"recurrent": LINEAR, "attention": SLIDING}),
    ),
}
