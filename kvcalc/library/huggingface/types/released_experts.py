"""Decoders with experts whose code came with their weights: Arctic, Grok, DeepSeek's first, Ling, Klear, Phixtral and others.

As in `released`, each after the code released with it or the reading of it that the comments name. A routing bias that the
released code keeps as a buffer is no parameter.
"""

from typing import Any

from kvcalc.layers.recurrent import Lightning
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, when
from kvcalc.library.huggingface.patterns import FULL, LINEAR, after_first, by_type, pick, stepped
from kvcalc.library.huggingface.shapes import (
    both,
    dense,
    even_head_dim,
    grouped,
    latent,
    mha,
    mixer,
    moe,
    projections,
    shared_experts,
)
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.latents import LONGCAT

LOCAL = K("num_local_experts", "num_experts")
WIDE = K("intermediate_size")

# --- Snowflake Arctic, after vLLM 0.10's arctic.py: beside the experts a dense FFN as wide as the stream, with a norm ---


def routes(c: Config) -> bool:
    return (c.layer + 1) % c.size("moe_layer_frequency", 2) == 0


def residual(c: Config) -> bool:
    return routes(c) and (c.flag("use_residual") or c.flag("parallel_attn_mlp_res"))


ARCTIC = Type(
    grouped(),
    pick(routes, both(moe(LOCAL, size=WIDE), pick(residual, dense(K("hidden_size")), both())), dense()),
    norms=lambda c: 3 if residual(c) else 2,
    inert=(
        "parallel_attn_mlp_res",
        "use_residual",
        "moe_train_capacity_factor",
        "moe_eval_capacity_factor",
        "moe_min_capacity",
        "moe_token_dropping",
    ),
)

# --- Grok 1 and 2, after SGLang's grok.py: four norms; Grok 2 has a dense FFN beside its experts ---

GROK = Type(
    grouped(),
    both(
        moe(LOCAL, size=K("moe_intermediate_size", "intermediate_size")),
        pick(lambda c: c.flag("residual_moe"), dense(), both()),
    ),
    norms=4,
    inert=("max_attn_value", "attn_temperature_len", "sliding_window_size", "global_attn_every_n", "embedding_multiplier_scale"),
)

# --- DeepSeek's first experts (vLLM 0.10's deepseek.py), and XVERSE's, which are alike (SGLang's xverse_moe.py) ---

DEEPSEEK = Type(
    grouped(K("attention_bias"), head=even_head_dim),
    pick(
        lambda c: bool(c.get("n_routed_experts")),
        after_first("first_k_dense_replace", moe(K("n_routed_experts"), shared=shared_experts()), dense()),
        dense(),
    ),
)
XVERSE_MOE = Type(
    grouped(),
    moe(K("num_experts"), K("moe_top_k"), WIDE, shared_experts("num_shared_experts", "intermediate_size")),
)

# --- Ling and Ring: vLLM's bailing_moe.py, mlx-lm's bailing_moe.py and bailing_moe_linear.py ---


def shared_width(c: Config) -> int:
    if not c.flag("moe_router_enable_shared_expert", True):
        return 0
    each = "moe_shared_expert_intermediate_size"
    return c.size("num_shared_experts", 0, least=0) * c.size(each if c.has(each) else "moe_intermediate_size")


BAILING_EXPERTS = after_first(
    lambda c: c.size("first_k_dense_replace", 0, least=0),
    moe(K("num_experts"), size=K("moe_intermediate_size"), shared=shared_width, bias=K("use_bias")),
    dense(bias=K("use_bias")),
    freq="",
)
BAILING_INERT = (
    "norm_head",
    "use_rmsnorm",
    "moe_router_enable_expert_bias",
    "max_window_layers",
    "sliding_window",
    "group_norm_size",
)
BAILING_ATTENTION = grouped(K("use_bias"), qkv_bias=K("use_qkv_bias"), qk_norm=when(K("use_qk_norm"), "head"))
BAILING = Type(BAILING_ATTENTION, BAILING_EXPERTS, inert=BAILING_INERT)


def global_layers(c: Config) -> list[str]:
    """Full attention in the last layer of every group, and in those that make no whole group."""
    group = c.size("layer_group_size")
    whole = c.layers // group * group
    return [FULL if (i + 1) % group == 0 or i >= whole else LINEAR for i in range(c.layers)]


def linear_vectors(c: Config) -> dict[str, int]:
    """Norms on queries and keys, and biases, of linear attention."""
    width = head(c) * c.size("num_attention_heads")
    found = {"qk_norms": 2 * head(c)} if c.flag("use_qk_norm") else {}
    biases = 3 * width * c.flag("use_qkv_bias") + c.size("hidden_size") * c.flag("use_bias")
    return found | ({"biases": biases} if biases else {})


def head(c: Config) -> int:
    return c.size("head_dim") if c.has("head_dim") else even_head_dim(c)


LIGHTNING = both(
    mixer(Lightning, num_attention_heads=K("num_attention_heads"), head_dim=head), projections(vectors=linear_vectors)
)
RING = BAILING.variant(
    mixer=by_type(full_attention=BAILING_ATTENTION, linear_attention=LIGHTNING),
    order=global_layers,
)
LING_2_5 = RING.variant(mixer=by_type(full_attention=latent(K("use_qkv_bias")), linear_attention=LIGHTNING))

# --- Klear (mlx-lm's Klear.py): what experts and the shared one give is weighed by two numbers ---

KLEAR = Type(
    grouped(K("attention_bias"), head=even_head_dim, qk_norm="head"),
    stepped(
        both(
            moe(K("num_experts"), shared=shared_experts(), correction_bias=True),
            projections(lambda c: {"coefficient": (c.size("hidden_size"), 2, 2)}),
        ),
        dense(),
    ),
)

# --- Phixtral: Phi-2 with experts, under the keys of its first release (mlx-lm's phixtral.py); and Phi's own under them ---


def four_times(c: Config) -> int:
    return c.size("n_inner", 4 * c.size("hidden_size"))


PHI_MSFT: dict[str, Any] = {
    "norms": 1,
    "norm": "layer",
    "model": {"lm_head_bias": True},
    "spellings": {"vocab_size": ("num_vocab",)},
    "inert": ("architecture", "rotary_dim", "attn_pdrop", "fused_dense", "flash_attn", "flash_rotary"),
}
PHIXTRAL = Type(mha(True), moe(LOCAL, size=four_times, gated=False, bias=True), **PHI_MSFT)
PHI_OR_PHIXTRAL = Type(
    mha(True),
    pick(
        lambda c: c.has("num_local_experts"),
        moe(LOCAL, size=four_times, gated=False, bias=True),
        dense(four_times, gated=False, bias=True),
    ),
    **PHI_MSFT,
)

# --- LongCat-Flash-Lite (mlx-lm's longcat_flash_ngram.py): tables of n-grams, each projected into the stream ---


def ngrams(c: Config) -> tuple[int, int]:
    """(tables, the width of each)."""
    count = c.size("emb_split_num", 4) * (c.size("emb_neighbor_num", 4) - 1)
    if not 1 <= count <= 1000:
        raise c.fail("emb_split_num", f"gives {count} tables of n-grams")
    return count, c.size("hidden_size") // count


def ngram_tables(c: Config) -> dict[str, tuple[int, int]]:
    """Table i has 2·i + 1 rows more than so many times the vocabulary."""
    count, width = ngrams(c)
    rows = c.size("ngram_vocab_size_ratio", 78) * c.size("vocab_size")
    return {f"ngram_{i}": (rows + 2 * i + 1, width) for i in range(count)}


def ngram_projections(c: Config) -> dict[str, tuple[int, int]]:
    count, width = ngrams(c)
    return {f"ngram_up_{i}": (width, c.size("hidden_size")) for i in range(count)}


LONGCAT_NGRAM = LONGCAT.variant(
    ffn=both(
        dense(K("ffn_hidden_size", "intermediate_size")),
        dense(K("ffn_hidden_size", "intermediate_size")),
        moe(
            K("n_routed_experts"),
            K("moe_topk", "num_experts_per_tok"),
            K("expert_ffn_hidden_size", "moe_intermediate_size"),
            zero_experts=K("zero_expert_num"),
            router_bias=K("router_bias"),
        ),
    ),
    model={"tables": ngram_tables, "extra": projections(ngram_projections), "tie_word_embeddings": False},
    inert=("zero_expert_type", "mla_scale_q_lora", "mla_scale_kv_lora", "attention_method", "ngram_vocab_size_ratio"),
)

# --- Sarvam, after vLLM's sarvam.py: Ling's experts over its attention, or over latents ---

SARVAM_MLA: dict[str, Field] = {"mixer": latent()}

TYPES = {
    "arctic": ARCTIC,
    "grok": GROK,
    "grok-1": GROK,
    "deepseek": DEEPSEEK,
    "xverse_moe": XVERSE_MOE,
    "bailing_moe": BAILING,
    "bailing_moe_v2": BAILING,
    "bailing_moe_linear": RING,
    "bailing_moe_linear_v2": RING,
    "bailing_moe_v2_5": LING_2_5,
    "Klear": KLEAR,
    "klear": KLEAR,
    "phixtral": PHIXTRAL,
    "phi-msft": PHI_OR_PHIXTRAL,
    "longcat_flash_ngram": LONGCAT_NGRAM,
    "sarvam_moe": BAILING,
    "sarvam_mla": BAILING.variant(**SARVAM_MLA),
}
