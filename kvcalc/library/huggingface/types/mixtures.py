"""Decoders with grouped attention and experts in some or all layers.

Sources: transformers' modelling code. For types whose code came with their weights (Arctic, Grok,
DeepSeek's first, Ling, Klear, Phixtral and others), that code or the file that the comments name.
A key that transformers maps to another key is named as its `attribute_map` accepts it. A routing
bias that the released code keeps as a buffer is not a parameter.
"""

from kvcalc.layers.recurrent import Lightning
from kvcalc.library.huggingface.config import Config, when
from kvcalc.library.huggingface.layer_types import (
    LINEAR,
    every,
    full_where,
    typed,
    windowed,
)
from kvcalc.library.huggingface.shapes import (
    after_first,
    attention_or,
    both,
    dense,
    even_head_dim,
    grouped,
    head_dim,
    latent,
    mha,
    mixer,
    moe,
    pick,
    projections,
    stepped,
)
from kvcalc.library.huggingface.types.deepseek import FREQUENCY, LONGCAT
from kvcalc.library.huggingface.types.entry import Type, outer_tie

LOCAL = "num_local_experts"
WIDE = "intermediate_size"
SPLIT_HEAD = "hidden_size // num_attention_heads"  # rounded down, as transformers does
HEAD = f"head_dim | {SPLIT_HEAD}"
QK_NORM = when("use_qk_norm", "head")
SHARED = "shared_expert_intermediate_size"
N_SHARED = "(n_shared_experts | 0) * moe_intermediate_size"
NUM_SHARED = "(num_shared_experts | 0) * moe_intermediate_size"
MOE_NUM_SHARED = "(moe_num_shared_experts | 0)"
EXPERT_WIDTH = "(moe_shared_expert_intermediate_size | moe_intermediate_size)"
FIRST_DENSE = "(first_k_dense_replace | 0)"
PER_HEAD_GATE = when(lambda c: c.get("gating", True) in (True, "per-head"), "head", "full")

GRANITE = Type(ffn=moe(LOCAL, size=WIDE))
GRANITE_SHARED = moe(LOCAL, size=WIDE, shared="shared_intermediate_size")
OLMOE = GRANITE.variant(mixer=grouped(qk_norm="full"))
DEEPSEEK_LIKE = moe(LOCAL, shared=N_SHARED)
GLM4_MOE = Type(
    grouped(False, qkv_bias="attention_bias", head=HEAD, qk_norm=QK_NORM),
    after_first(FIRST_DENSE, DEEPSEEK_LIKE),
)


def hunyuan_shared(c: Config) -> int:
    """Return the width of one shared expert, or of as many as Tencent's own keys say."""
    if c.flag("use_cla"):
        raise c.fail("use_cla", "layers that share keys and values are not read in this type")
    count = (
        c.size("num_shared_expert", 1, minimum=0) if c.flag("use_mixed_mlp_moe", True) else 0
    )
    return count * c.size("intermediate_size")


# --- Snowflake Arctic, after vLLM 0.10's arctic.py: a dense FFN with a norm beside the experts ---

ROUTES = "(layer_index + 1) % (moe_layer_frequency | 2) == 0"
IS_RESIDUAL = f"{ROUTES} and (use_residual or parallel_attn_mlp_res)"

# --- Ling and Ring: vLLM's bailing_moe.py, mlx-lm's bailing_moe.py and bailing_moe_linear.py ---

BAILING_ATTENTION = grouped("use_bias", qkv_bias="use_qkv_bias", qk_norm=QK_NORM)
BAILING = Type(
    BAILING_ATTENTION,
    after_first(
        FIRST_DENSE,
        moe(
            "num_experts",
            size="moe_intermediate_size",
            shared=when(
                "moe_router_enable_shared_expert | True",
                f"(num_shared_experts | 0) * {EXPERT_WIDTH}",
                0,
            ),
            bias="use_bias",
        ),
        dense(bias="use_bias"),
    ),
    inert=(
        "norm_head use_rmsnorm moe_router_enable_expert_bias max_window_layers sliding_window"
        " group_norm_size"
    ),
)


def linear_biases(c: Config) -> int | None:
    """Return the elements of all biases of linear attention; None without biases."""
    width = head_dim(c) * c.size("num_attention_heads")
    biases = 3 * width * c.flag("use_qkv_bias") + c.size("hidden_size") * c.flag("use_bias")
    return biases or None


LIGHTNING = both(
    mixer(Lightning, num_attention_heads="num_attention_heads", head_dim=head_dim),
    projections(
        vectors={
            "qk_norms": when("use_qk_norm", lambda c: 2 * head_dim(c)),
            "biases": linear_biases,
        }
    ),
)
# full attention in the last layer of every group, and in those that make no whole group
RING = BAILING.variant(
    mixer=attention_or(LIGHTNING, BAILING_ATTENTION),
    order=full_where(
        "(layer_index + 1) % layer_group_size == 0"
        " or layer_index >= layer_count // layer_group_size * layer_group_size",
        others=LINEAR,
    ),
)

# --- Phixtral: Phi-2 with experts, under the keys of its first release (mlx-lm's phixtral.py) ---

PHI_WIDTH = "n_inner | 4 * hidden_size"
PHI_EXPERTS = moe(f"{LOCAL} | num_experts", size=PHI_WIDTH, gated=False, bias=True)
PHIXTRAL = Type(
    mha(True),
    PHI_EXPERTS,
    norms=1,
    norm="layer",
    model={"lm_head_bias": True},
    spellings={"vocab_size": ("num_vocab",)},
    inert="architecture rotary_dim attn_pdrop fused_dense flash_attn flash_rotary",
)

# --- LongCat-Flash-Lite (mlx-lm's longcat_flash_ngram.py): tables of n-grams, each projected ---


def ngrams(c: Config) -> tuple[int, int]:
    """Return the number of tables, and the width of each."""
    count = c.size("emb_split_num", 4) * (c.size("emb_neighbor_num", 4) - 1)
    if not 1 <= count <= 1000:
        raise c.fail("emb_split_num", f"gives {count} tables of n-grams")
    return count, c.size("hidden_size") // count


def ngram_tables(c: Config) -> dict[str, tuple[int, int]]:
    """Return the tables. Table i has 2·i + 1 rows more than a multiple of the vocabulary."""
    count, width = ngrams(c)
    rows = c.size("ngram_vocab_size_ratio", 78) * c.size("vocab_size")
    return {f"ngram_{i}": (rows + 2 * i + 1, width) for i in range(count)}


def ngram_projections(c: Config) -> dict[str, tuple[int, int]]:
    """Return the projection of each table into the stream."""
    count, width = ngrams(c)
    return {f"ngram_up_{i}": (width, c.size("hidden_size")) for i in range(count)}


TYPES = {
    "afmoe": Type(
        grouped(qk_norm="head", output_gate="full"),
        after_first(
            "(num_dense_layers | 0)",
            moe("num_experts", shared=NUM_SHARED, correction_bias=True),
        ),
        typed(every("global_attn_every_n_layers")),
        norms=4,
    ),
    "aria_text": Type(
        ffn=moe(
            "moe_num_experts",
            "moe_topk",
            WIDE,
            f"{MOE_NUM_SHARED} * intermediate_size",
            shared_bias="mlp_bias",
        )
    ),
    "beam": Type(
        both(
            grouped(qk_norm="head", output_gate="full"),
            projections(vectors={"gate_bias": "num_attention_heads"}),
        ),
        after_first(3, moe("num_experts")),
        typed(full_where("layer_index % 6 == 5 or layer_index == layer_count - 1")),
        norms=4,
    ),
    "cohere_compass_text": Type(grouped(head=HEAD), norms=1, norm="layer_no_bias"),
    "dbrx": Type(
        grouped(False, kv_heads="attn_config.kv_n_heads | 1", head=SPLIT_HEAD),
        moe(
            "ffn_config.moe_num_experts | 4",
            "ffn_config.moe_top_k | 1",
            "ffn_config.ffn_hidden_size | 3584",
        ),
        norm="layer_no_bias",
    ),
    "dots1": Type(
        grouped(qk_norm="head"),
        after_first(FIRST_DENSE, DEEPSEEK_LIKE),
        typed(
            full_where(
                lambda c: (
                    c.get("sliding_window") is None
                    or c.layer < c.size("max_window_layers", c.layers, minimum=0)
                )
            )
        ),
    ),
    "ernie4_5_moe": Type(
        grouped("use_bias"),
        pick(
            lambda c: (
                (c.layer + 1) % c.size("moe_layer_interval", 1) == 0
                and c.size("moe_layer_start_index", 0, minimum=0) <= c.layer
                and (
                    (end := c.size("moe_layer_end_index", -1, minimum=-1)) == -1
                    or c.layer <= end
                )
            ),
            moe(
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                f"{MOE_NUM_SHARED} * moe_intermediate_size",
                shared_bias="use_bias",
                correction_bias=True,
            ),
            dense(bias="use_bias"),
        ),
        model={"lm_head_bias": "use_bias"},
    ),
    "exaone_moe": Type(
        grouped(False, qk_norm="head"),
        after_first(FIRST_DENSE, moe("num_experts", shared=NUM_SHARED)),
        typed(every(when("(sliding_window | 0) > 0", "sliding_window_pattern"))),
    ),
    "flint": Type(
        grouped(qk_norm="head", sinks=True),
        pick(
            lambda c: (
                c.layer
                not in (c.sizes("mlp_only_layers") if c.has("mlp_only_layers") else (0, 1))
                and (c.layer + 1) % c.size("decoder_sparse_step", 1) == 0
            ),
            moe("num_experts", shared=SHARED),
            dense(),
        ),
        typed(
            full_where(
                "layer_index < 2 or layer_index % 4 == 1 or layer_index == layer_count - 1"
            )
        ),
    ),
    "glm4_moe": GLM4_MOE,
    "glm4v_moe_text": GLM4_MOE.variant(
        mixer=grouped(False, qkv_bias="attention_bias", head=HEAD), model=outer_tie()
    ),
    "granitemoe": GRANITE,
    "granitemoe_swa": Type(
        grouped(sinks=True), GRANITE_SHARED, typed(full_where("layer_index % 4 == 0"))
    ),
    "granitemoeshared": Type(ffn=GRANITE_SHARED),
    "hunyuan_v1_moe": Type(
        grouped(
            head="head_dim | attention_head_dim",
            qk_norm=when("use_qk_norm | True", "head"),
        ),
        moe(LOCAL, shared=hunyuan_shared),
        inert="norm_type attention_head_dim cla_share_factor",
    ),
    "hy_v3": Type(
        grouped(qk_norm="head"),
        after_first(
            1,
            moe(LOCAL, shared=NUM_SHARED, shared_bias="mlp_bias"),
            dense(bias="mlp_bias"),
        ),
    ),
    "kolibri1": Type(
        grouped(False, qk_norm="head"),
        moe("num_experts", size="moe_intermediate_size", shared=SHARED),
        typed(every(5)),
        norms=4,
    ),
    "laguna": Type(
        grouped(
            heads="num_attention_heads_per_layer",
            qk_norm="head",
            output_gate=PER_HEAD_GATE,
        ),
        after_first(1, moe("num_experts", shared=SHARED, correction_bias=True)),
        inert="mlp_only_layers decoder_sparse_step gating_types",
    ),
    "mellum": Type(grouped(qk_norm="head"), after_first(0, moe("num_experts"))),
    "olmoe flex_olmo": OLMOE,
    "phimoe": GRANITE.variant(
        order=typed(windowed()), norm="layer", model={"lm_head_bias": "lm_head_bias"}
    ),
    # every other layer below `max_window_layers` slides
    "qwen2_moe": Type(
        grouped(False, qkv_bias="qkv_bias"),
        stepped(moe(shared=SHARED, shared_expert_gate=True)),
        typed(
            full_where(
                "not use_sliding_window or layer_index % 2 == 1"
                " or layer_index >= (max_window_layers | 0)"
            )
        ),
    ),
    "qwen3_omni_moe_text": Type(
        grouped(head=HEAD, qk_norm="head"), stepped(moe()), model=outer_tie()
    ),
    "solar_open": Type(grouped(False, qkv_bias="attention_bias"), DEEPSEEK_LIKE),
    "arctic": Type(
        grouped(False),
        pick(
            ROUTES,
            both(
                moe(f"{LOCAL} | num_experts", size=WIDE),
                pick(IS_RESIDUAL, dense("hidden_size")),
            ),
            dense(),
        ),
        norms=when(IS_RESIDUAL, 3, 2),
        inert=(
            "parallel_attn_mlp_res use_residual moe_train_capacity_factor"
            " moe_eval_capacity_factor moe_min_capacity moe_token_dropping"
        ),
    ),
    # SGLang's grok.py: four norms; Grok 2 has a dense FFN beside its experts
    "grok grok-1": Type(
        grouped(False),
        both(moe(f"{LOCAL} | num_experts"), pick("residual_moe", dense())),
        norms=4,
        inert=(
            "max_attn_value attn_temperature_len sliding_window_size global_attn_every_n"
            " embedding_multiplier_scale"
        ),
    ),
    # DeepSeek's first experts (vLLM 0.10's deepseek.py)
    "deepseek": Type(
        grouped(head=even_head_dim),
        pick(
            "(n_routed_experts | 0) > 0",
            after_first(FIRST_DENSE, moe("n_routed_experts", shared=N_SHARED), freq=FREQUENCY),
            dense(),
        ),
    ),
    "xverse_moe": Type(  # SGLang's xverse_moe.py
        grouped(False),
        moe(
            "num_experts",
            "moe_top_k",
            WIDE,
            "(num_shared_experts | 0) * intermediate_size",
        ),
    ),
    # Sarvam, after vLLM's sarvam.py: Ling's experts over its attention, or over latents
    "bailing_moe bailing_moe_v2 sarvam_moe": BAILING,
    "sarvam_mla": BAILING.variant(mixer=latent(None)),
    "bailing_moe_linear bailing_moe_linear_v2": RING,
    "bailing_moe_v2_5": RING.variant(mixer=attention_or(LIGHTNING, latent("use_qkv_bias"))),
    # mlx-lm's Klear.py: two numbers weigh what experts and the shared one give
    "Klear klear": Type(
        grouped(head=even_head_dim, qk_norm="head"),
        stepped(
            both(
                moe("num_experts", shared=N_SHARED, correction_bias=True),
                projections({"coefficient": "hidden_size, 2, 2"}),
            )
        ),
    ),
    "phixtral": PHIXTRAL,
    "phi-msft": PHIXTRAL.variant(
        ffn=pick(f"({LOCAL} | 0) > 0", PHI_EXPERTS, dense(PHI_WIDTH, gated=False, bias=True))
    ),
    "longcat_flash_ngram": LONGCAT.variant(
        ffn=both(
            dense("ffn_hidden_size | intermediate_size"),
            dense("ffn_hidden_size | intermediate_size"),
            moe(
                "n_routed_experts",
                "moe_topk | num_experts_per_tok",
                "expert_ffn_hidden_size | moe_intermediate_size",
                zero_experts="zero_expert_num",
                router_bias="router_bias",
            ),
        ),
        model={
            "tables": ngram_tables,
            "extra": projections(ngram_projections),
            "tie_word_embeddings": False,
        },
        inert=(
            "zero_expert_type mla_scale_q_lora mla_scale_kv_lora attention_method"
            " ngram_vocab_size_ratio"
        ),
    ),
}
