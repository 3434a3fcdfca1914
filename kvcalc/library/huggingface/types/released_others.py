"""More dense decoders with code of their own: OLMo's first format, Molmo, OpenELM, PLaMo, Phi-3-small, Spark, Talkie, Gear.

As in `released`: after the code released with them, or the reading of it that the comments name.
"""

from kvcalc.layers.recurrent import Convolutions
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import K, when
from kvcalc.library.huggingface.patterns import by_type, every, typed
from kvcalc.library.huggingface.shapes import both, dense, even_head_dim, grouped, mixer, projections
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.released import BIAS, TIED, half

# --- OLMo's own format and Molmo, which grew from it: hf_olmo's modeling_olmo.py, vLLM's molmo.py ---


def olmo_norm(c: Config) -> str:
    kind = c.word("layer_norm_type", "default")
    if kind == "rms":
        return "rms"
    return (
        "none"
        if not c.flag("layer_norm_with_affine", True)
        else "layer"
        if c.flag("bias_for_layer_norm", True)
        else "layer_no_bias"
    )


def swiglu(c: Config) -> bool:
    return c.word("activation_type", "swiglu") == "swiglu"


def olmo_width(c: Config) -> int:
    """What the FFN projects to: gate and up together under SwiGLU."""
    return c.size("mlp_hidden_size") if c.has("mlp_hidden_size") else c.size("mlp_ratio", 4) * c.size("hidden_size")


def olmo_groups(c: Config) -> int:
    return 1 if c.flag("multi_query_attention") else c.size("n_kv_heads", c.size("num_attention_heads"))


ROWS = K("embedding_size", "vocab_size")
HF_OLMO = Type(
    grouped(
        K("include_bias"),
        qkv_bias=lambda c: c.flag("include_bias") or c.flag("include_qkv_bias"),
        kv_heads=olmo_groups,
        head=even_head_dim,
        qk_norm=when(K("attention_layer_norm"), "full"),
    ),
    dense(lambda c: olmo_width(c) // (2 if swiglu(c) else 1), gated=swiglu, bias=K("include_bias")),
    norm=olmo_norm,
    model={
        "vocab_size": ROWS,
        "tie_word_embeddings": lambda c: c.flag("weight_tying", True),
        "position_embeddings": lambda c: 0 if c.flag("rope") or c.flag("alibi") else c.size("max_position_embeddings"),
    },
    inert=("n_layers", "block_type", "block_group_size", "mlp_ratio", "vocab_size", "layer_norm_type", "max_sequence_length"),
)
MOLMO = Type(
    grouped(qkv_bias=K("qkv_bias"), head=even_head_dim, qk_norm=when(K("attention_layer_norm"), "full")),
    dense(half("intermediate_size")),
    model={
        "vocab_size": ROWS,
        "tables": lambda c: {"additional_embedding": (128, c.size("hidden_size"))},
        "tie_word_embeddings": lambda c: c.flag("weight_tying"),
    },
    inert=("vocab_size", "norm_after", "layer_norm_type", "tie_word_embeddings", "use_position_ids"),
)

# --- OpenELM, after mlx-lm's openelm.py: heads and widths of each layer ---


def openelm_width(c: Config) -> int:
    """A multiple of the model's width, rounded to `ffn_dim_divisor`, and not more than a tenth down."""
    divisor, wanted = c.size("ffn_dim_divisor", 256), c.number("ffn_multipliers") * c.size("hidden_size")
    rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * wanted else rounded


OPENELM = Type(
    grouped(
        heads=K("num_query_heads"),
        kv_heads=K("num_kv_heads"),
        qk_norm=when(K("normalize_qk_projections", default=True), "head"),
    ),
    dense(openelm_width, gated=K("ffn_with_glu", default=True)),
    model={"tie_word_embeddings": lambda c: c.flag("share_input_output_layers", True)},
    layers_key="num_transformer_layers",
    spellings={"max_position_embeddings": ("max_context_length",)},
    inert=("num_gqa_groups", "qkv_multipliers", "activation_fn_name"),
)

# --- PLaMo (mlx-lm's plamo.py), Phi-3-small (phi3small.py), lille (lille-130m.py), Spark 2.5, PLaMo 3 ---


def shared_heads(c: Config) -> int:
    return -(-c.size("num_attention_heads") // c.size("n_shared_head", 8))


def lille_width(c: Config) -> int:
    return 256 * round(int(8 * c.size("hidden_size") / 3) / 256)


PLAMO = Type(grouped(kv_heads=shared_heads), dense(), norms=1, inert=("n_shared_head",))
PHI3SMALL = Type(
    grouped(True),
    dense(K("ff_intermediate_size"), bias=True),
    norm="layer",
    defaults=TIED,
    inert=(
        "dense_attention_every_n_layers", "blocksparse_block_size", "blocksparse_num_local_blocks", "blocksparse_vert_stride",
        "blocksparse_homo_head_pattern", "blocksparse_triton_kernel_block_size", "dummy_token_indices", "ff_dim_multiplier",
        "rope_embedding_base", "rope_position_scale", "gegelu_limit", "gegelu_pad_to_256", "pad_sequence_to_multiple_of_64",
    ),
)  # fmt: skip
LILLE = Type(grouped(), dense(lille_width), defaults=TIED, spellings={"max_position_embeddings": ("block_size",)})
SPARK = Type(
    grouped(BIAS, output_gate="head", output_gate_bias=BIAS),
    dense(bias=K("mlp_bias")),
    typed(every(4)),
    defaults=TIED,
    inert=("headwise_attn_output_gate", "gate_attn_act_mode"),
)
PLAMO3 = Type(
    grouped(qk_norm="head", window=K("sliding_window", "window_size", default=2048)),
    dense(),
    typed(every(K("sliding_window_pattern", default=8))),
    norms=4,
    defaults=TIED,
    inert=("image_feature_size", "linear_type"),
)

# --- Talkie: no weight in any norm, a gain per head and branch; Gear: convolutions in place of attention in some layers ---

TALKIE = Type(
    both(
        grouped(kv_heads=K("num_attention_heads")),
        projections(vectors=lambda c: {"gains": c.size("num_attention_heads") + 3}),
    ),
    dense(),
    norm="none",
    model={"extra": projections(vectors={"head_gain": 1})},
)


def wide(c: Config) -> int:
    return c.size("num_attention_heads") * c.size("head_dim")


def narrow(c: Config) -> int:
    return c.size("num_key_value_heads") * c.size("head_dim")


def gear_mixer(c: Config) -> dict[str, tuple[int, ...]]:
    """Queries, keys, values and output around the convolutions."""
    width, bias = c.size("hidden_size"), c.flag("attention_bias")
    sizes = {"q": (width, wide(c)), "k": (width, narrow(c)), "v": (width, narrow(c)), "o": (wide(c), width)}
    return {name: (*size, size[1] * bias) for name, size in sizes.items()}


GEAR_ATTENTION = grouped(BIAS, qk_norm="head")
GEAR = Type(
    by_type(
        full_attention=GEAR_ATTENTION,
        sliding_attention=GEAR_ATTENTION,
        conv_mixer=both(
            projections(gear_mixer, lambda c: {"qk_norms": 2 * c.size("head_dim")}),
            mixer(
                Convolutions,
                channels=lambda c: {"k_conv": narrow(c), "v_conv": narrow(c)},
                conv_kernel=K("conv_L_cache", default=3),
                bias=BIAS,
            ),
        ),
    ),
    dense(),
    typed(),
    norms=4,
    defaults=TIED,
)

TYPES = {
    "hf_olmo": HF_OLMO,
    "molmo": MOLMO,
    "openelm": OPENELM,
    "plamo": PLAMO,
    "plamo3": PLAMO3,
    "phi3small": PHI3SMALL,
    "lille-130m": LILLE,
    "spark2_5": SPARK,  # mlx-lm's spark2_5.py
    "talkie": TALKIE,
    "gear": GEAR,
}
