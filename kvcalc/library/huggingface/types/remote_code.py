"""Dense decoders whose code came with their weights: Qwen, ChatGLM, Baichuan, MiniCPM and others.

transformers has no class of these. The sources are the code released with each type, or the file
of vLLM 0.10 (`vllm/model_executor/models/`), SGLang (`sglang/srt/models/`) or mlx-lm
(`mlx_lm/models/`) that the comments name.
"""

from kvcalc.layers.recurrent import Convolutions
from kvcalc.library.huggingface.config import Config, Field, value_of, when
from kvcalc.library.huggingface.layer_types import every, typed
from kvcalc.library.huggingface.shapes import (
    both,
    by_type,
    dense,
    even_head_dim,
    grouped,
    mha,
    mixer,
    moe,
    pick,
    projections,
)
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.llama import LLAMA, QWEN2, QWEN2_ORDER, QWEN3
from kvcalc.records import JsonObject

# what transformers' base class says where the released class is silent
TIED: JsonObject = {"tie_word_embeddings": True}


def half(width: Field) -> Field:
    """Return the rule of half of a width that gate and up share."""

    def read(c: Config) -> int:
        whole = value_of(width, c)
        if not isinstance(whole, int) or whole % 2:
            raise c.fail("intermediate_size", f"{whole} is no width that gate and up share")
        return whole // 2

    return read


# --- ChatGLM 2 and 3 and GLM-4 after vLLM's chatglm.py, ChatGLM 1 after modeling_chatglm.py ---


def is_first_chatglm(c: Config) -> bool:
    """Return whether this is ChatGLM 1."""
    return c.has("inner_hidden_size") or c.flag("position_encoding_2d")


CHATGLM_BIAS = when(is_first_chatglm, True, "add_bias_linear")
CHATGLM = Type(
    grouped(
        CHATGLM_BIAS,
        qkv_bias=when(is_first_chatglm, True, "add_bias_linear or add_qkv_bias"),
        kv_heads="multi_query_group_num if multi_query_attention else num_attention_heads",
        head=when("(kv_channels | 0) > 0", "kv_channels", even_head_dim),
    ),
    dense(
        "inner_hidden_size | ffn_hidden_size | intermediate_size",
        gated=when(is_first_chatglm, False, True),
        bias=CHATGLM_BIAS,
    ),
    norm=lambda c: "rms" if c.flag("rmsnorm", not is_first_chatglm(c)) else "layer",
    model={
        "final_norm": "post_layer_norm | True",
        "tie_word_embeddings": when(is_first_chatglm, "tie_word_embeddings | True", False),
    },
    spellings={"vocab_size": ("padded_vocab_size",)},
    inert="num_layers position_encoding_2d",
)

# --- MiniCPM and its vision models, after vLLM's minicpm.py and minicpmv.py ---

MINICPM = LLAMA.variant(
    ffn=pick("num_experts", moe("num_experts", size="intermediate_size"), dense()),
    defaults=TIED,
    inert="dim_model_base scale_emb scale_depth mup_denominator rope_scaling",
)
MINICPMV_STACKS = {
    "2": MINICPM,
    "2.0": MINICPM,
    "2.5": LLAMA,
    "2.6": QWEN2,
    "4": LLAMA,
    "4.0": LLAMA,
    "4.5": QWEN3,
}


def minicpmv(c: Config) -> Type:
    """Return the language model of a MiniCPM-V or -o, by its version."""
    is_first = (c.size("hidden_size"), c.get("query_num")) == (2304, 64)
    version = str(c.get("version", 2.0 if is_first else 2.5))
    if version not in MINICPMV_STACKS:
        raise c.fail(
            "version",
            f"{version[:20]!r} is no MiniCPM-V that is read",
            f"Known: {', '.join(MINICPMV_STACKS)}",
        )
    return MINICPMV_STACKS[version]


# --- OLMo's own format and Molmo, which grew from it: hf_olmo's modeling_olmo.py, vLLM's molmo.py
# ---


def olmo_norm(c: Config) -> str:
    """Return the kind of OLMo's norms."""
    if c.word("layer_norm_type", "default") == "rms":
        return "rms"
    if not c.flag("layer_norm_with_affine", True):
        return "none"
    return "layer" if c.flag("bias_for_layer_norm", True) else "layer_no_bias"


OLMO_ATTENTION: JsonObject = {
    "head": even_head_dim,
    "qk_norm": when("attention_layer_norm", "full"),
}
IS_SWIGLU = "(activation_type | 'swiglu') == 'swiglu'"
OLMO_WIDTH = "(mlp_hidden_size | (mlp_ratio | 4) * hidden_size)"


def openelm_width(c: Config) -> int:
    """Return a multiple of the model's width, rounded, and at most a tenth down."""
    divisor = c.size("ffn_dim_divisor", 256)
    width = c.number("ffn_multipliers") * c.size("hidden_size")
    rounded = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded


# --- Gear: convolutions in place of attention in some layers ---

QUERIES = "num_attention_heads * head_dim"
KEYS = "num_key_value_heads * head_dim"
GEAR_ATTENTION = grouped(qk_norm="head")


def biased(outputs: str) -> str:
    """Return the outputs of a matrix and its bias, which is as long or missing."""
    return f"{outputs}, {outputs} if attention_bias else 0"


LILLE = Type(
    grouped(False),
    dense(lambda c: 256 * round(int(8 * c.size("hidden_size") / 3) / 256)),
    defaults=TIED,
    spellings={"max_position_embeddings": ("block_size",)},
)
MHA = LLAMA.variant(mixer=grouped(kv_heads="num_key_value_heads | num_attention_heads"))

TYPES = {
    # vLLM's qwen.py and mlx-lm's qwen.py
    "qwen": Type(
        grouped(
            False,
            qkv_bias=True,
            o_bias="not (no_bias | True)",
            kv_heads="num_attention_heads",
            head=when("(kv_channels | 0) > 0", "kv_channels", even_head_dim),
        ),
        dense(half("intermediate_size | ffn_hidden_size"), bias="not (no_bias | True)"),
        inert="padded_vocab_size seq_length",
    ),
    "chatglm": CHATGLM,
    # vLLM's files of these names
    "baichuan xverse": MHA,
    "internlm internlm2": Type(grouped("bias | True"), inert="attn_implementation"),
    "orion": Type(grouped(False), norm="layer"),
    "stablelm_epoch": Type(
        grouped(False, qkv_bias="use_qkv_bias"),
        norm="layer",
        spellings={"num_attention_heads": ("num_heads",)},
        inert="norm_eps num_heads",
    ),
    # vLLM's jais.py
    "jais": Type(
        mha(True),
        dense(
            "n_inner | 4 * hidden_size",
            gated="(activation_function | 'gelu_new') == 'swiglu'",
            bias=True,
        ),
        norm="layer",
        model={
            "position_embeddings": when(
                "(position_embedding_type | 'learned') == 'alibi'",
                0,
                "max_position_embeddings",
            )
        },
        defaults=TIED,
    ),
    "mimo": QWEN2.variant(inert="attention_bias use_mrope"),  # mlx-lm's mimo.py
    "minicpm": MINICPM,
    "minicpmv minicpmo": LLAMA.variant(
        mixer=lambda c: minicpmv(c).mixer(c),
        model={
            "tie_word_embeddings": lambda c: c.flag(
                "tie_word_embeddings", minicpmv(c) is MINICPM
            )
        },
        order=QWEN2_ORDER,
        inert=(
            "dim_model_base scale_emb scale_depth version use_image_id sliding_window"
            " max_window_layers"
        ),
    ),
    # biases only on the output projections (vLLM's telechat2.py); the head is tied unless the file
    # says otherwise, as in the 14,400,036,864 bytes of the released 7B
    "telechat telechat2": Type(
        grouped(False, o_bias=True),
        dense(down_bias=True),
        model={"embedding_norm": "embed_layernorm"},
        defaults=TIED,
        spellings={"rms_norm_eps": ("layer_norm_epsilon",)},
        inert=(
            "logn training_seqlen base_seqlen skip_bias_add skip_bias_add_qkv offset_alibi"
            " semi_causal"
        ),
    ),
    "exaone": LLAMA.variant(defaults=TIED, inert="num_layers rotary_pct"),  # vLLM's exaone.py
    "solar": LLAMA.variant(inert="bskcn_1 bskcn_2 bskcn_3 bskcn_4 bskcn_tv"),  # vLLM's solar.py
    "step1": LLAMA.variant(  # vLLM's step1.py
        mixer=grouped(
            kv_heads="num_attention_groups | num_key_value_heads | 1",
            head=even_head_dim,
        )
    ),
    # vLLM's teleflm.py
    "teleflm": LLAMA.variant(inert="use_mup mup_scale_factor input_mult output_mult"),
    # vLLM's openpangu.py
    "PanguEmbedded": LLAMA.variant(mixer=grouped("bias | attention_bias")),
    "deci": LLAMA.variant(
        mixer=grouped(kv_heads="num_key_value_heads_per_layer | num_key_value_heads")
    ),
    "hf_olmo": Type(
        grouped(
            "include_bias",
            qkv_bias="include_bias or include_qkv_bias",
            kv_heads="1 if multi_query_attention else n_kv_heads | num_attention_heads",
            **OLMO_ATTENTION,
        ),
        # the FFN's width counts gate and up together
        dense(
            when(IS_SWIGLU, f"{OLMO_WIDTH} // 2", OLMO_WIDTH),
            gated=IS_SWIGLU,
            bias="include_bias",
        ),
        norm=olmo_norm,
        model={
            "vocab_size": "embedding_size | vocab_size",
            "tie_word_embeddings": "weight_tying | True",
            "position_embeddings": when("rope or alibi", 0, "max_position_embeddings"),
        },
        inert=(
            "n_layers block_type block_group_size mlp_ratio vocab_size layer_norm_type"
            " max_sequence_length"
        ),
    ),
    "molmo": Type(
        grouped(False, qkv_bias="qkv_bias", **OLMO_ATTENTION),
        dense(half("intermediate_size")),
        model={
            "vocab_size": "embedding_size | vocab_size",
            "tables": {"additional_embedding": "128, hidden_size"},
            "tie_word_embeddings": "weight_tying | False",
        },
        inert="vocab_size norm_after layer_norm_type tie_word_embeddings use_position_ids",
    ),
    # mlx-lm's openelm.py: heads and widths of each layer
    "openelm": Type(
        grouped(
            heads="num_query_heads",
            kv_heads="num_kv_heads",
            qk_norm=when("normalize_qk_projections | True", "head"),
        ),
        dense(openelm_width, gated="ffn_with_glu | True"),
        model={"tie_word_embeddings": "share_input_output_layers | True"},
        layers_key="num_transformer_layers",
        spellings={"max_position_embeddings": ("max_context_length",)},
        inert="num_gqa_groups qkv_multipliers activation_fn_name",
    ),
    "plamo": Type(  # mlx-lm's plamo.py
        grouped(False, kv_heads="(num_attention_heads - 1) // (n_shared_head | 8) + 1"),
        norms=1,
        inert="n_shared_head",
    ),
    "plamo3": Type(
        grouped(False, qk_norm="head", window="sliding_window | window_size | 2048"),
        order=typed(every("sliding_window_pattern | 8")),
        norms=4,
        defaults=TIED,
        inert="image_feature_size linear_type",
    ),
    "phi3small": Type(  # mlx-lm's phi3small.py
        grouped(True),
        dense("ff_intermediate_size", bias=True),
        norm="layer",
        defaults=TIED,
        inert=(
            "dense_attention_every_n_layers blocksparse_block_size blocksparse_num_local_blocks"
            " blocksparse_vert_stride blocksparse_homo_head_pattern"
            " blocksparse_triton_kernel_block_size dummy_token_indices ff_dim_multiplier"
            " rope_embedding_base rope_position_scale gegelu_limit gegelu_pad_to_256"
            " pad_sequence_to_multiple_of_64"
        ),
    ),
    "lille-130m": LILLE,
    "spark2_5": Type(  # mlx-lm's spark2_5.py
        grouped(output_gate="head", output_gate_bias="attention_bias"),
        dense(bias="mlp_bias"),
        typed(every(4)),
        defaults=TIED,
        inert="headwise_attn_output_gate gate_attn_act_mode",
    ),
    # no weight in any norm, a gain per head and branch
    "talkie": Type(
        both(
            grouped(False, kv_heads="num_attention_heads"),
            projections(vectors={"gains": "num_attention_heads + 3"}),
        ),
        norm="none",
        model={"extra": projections(vectors={"head_gain": 1})},
    ),
    "gear": Type(
        by_type(
            full_attention=GEAR_ATTENTION,
            sliding_attention=GEAR_ATTENTION,
            conv_mixer=both(
                projections(
                    {
                        "q": f"hidden_size, {biased(QUERIES)}",
                        "k": f"hidden_size, {biased(KEYS)}",
                        "v": f"hidden_size, {biased(KEYS)}",
                        "o": f"{QUERIES}, {biased('hidden_size')}",
                    },
                    {"qk_norms": "2 * head_dim"},
                ),
                mixer(
                    Convolutions,
                    channels={"k_conv": KEYS, "v_conv": KEYS},
                    conv_kernel="conv_L_cache | 3",
                    bias="attention_bias",
                ),
            ),
        ),
        norms=4,
        defaults=TIED,
    ),
}
