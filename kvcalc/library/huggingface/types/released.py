"""Dense decoders whose code came with their weights: Qwen, ChatGLM, Baichuan, InternLM, MiniCPM, TeleChat and others.

transformers has no class of these. Each is written down after the code released with it, or the reading of it in vLLM 0.10
(`vllm/model_executor/models/`), SGLang (`sglang/srt/models/`) or mlx-lm (`mlx_lm/models/`); the comments name the file.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, value_of, when
from kvcalc.library.huggingface.patterns import every, from_layer, typed
from kvcalc.library.huggingface.shapes import dense, even_head_dim, grouped, mha
from kvcalc.library.huggingface.types.decoders import LLAMA, QWEN2, QWEN3
from kvcalc.library.huggingface.types.entry import Type

TIED: dict[str, Any] = {"tie_word_embeddings": True}  # what transformers' base class says where the released one is silent
BIAS = K("attention_bias")
ONE_BIAS = K("bias", default=True)
HALVES = ("intermediate_size", "ffn_hidden_size")  # of a width that counts gate and up together


def half(*keys: str, otherwise: Field = None) -> Field:
    """Half of a width that gate and up share."""

    def read(c: Config) -> int:
        whole = next((c.size(key) for key in keys if c.has(key)), None) or value_of(otherwise, c)
        if not isinstance(whole, int) or whole % 2:
            raise c.fail(keys[0], f"{whole} is no width that gate and up share")
        return whole // 2

    return read


# --- Qwen (the first), after vLLM's qwen.py and mlx-lm's qwen.py ---

QWEN = Type(
    grouped(
        qkv_bias=True,
        o_bias=lambda c: not c.flag("no_bias", True),
        kv_heads=K("num_attention_heads"),
        head=K("kv_channels", default=even_head_dim),
    ),
    dense(half(*HALVES), bias=lambda c: not c.flag("no_bias", True)),
    inert=("padded_vocab_size", "seq_length"),
)

# --- ChatGLM 2 and 3, GLM-4 as first released, after vLLM's chatglm.py; ChatGLM 1 after its modeling_chatglm.py ---


def first_chatglm(c: Config) -> bool:
    return c.has("inner_hidden_size") or c.flag("position_encoding_2d")


def chatglm_groups(c: Config) -> int:
    return c.size("multi_query_group_num") if c.flag("multi_query_attention") else c.size("num_attention_heads")


CHATGLM = Type(
    grouped(
        when(first_chatglm, True, K("add_bias_linear")),
        qkv_bias=lambda c: first_chatglm(c) or c.flag("add_bias_linear") or c.flag("add_qkv_bias"),
        kv_heads=chatglm_groups,
        head=K("kv_channels", default=even_head_dim),
    ),
    dense(
        K("inner_hidden_size", "ffn_hidden_size", "intermediate_size"),
        gated=lambda c: not first_chatglm(c),
        bias=when(first_chatglm, True, K("add_bias_linear")),
    ),
    norm=lambda c: "rms" if c.flag("rmsnorm", not first_chatglm(c)) else "layer",
    model={
        "final_norm": lambda c: c.flag("post_layer_norm", True),
        "tie_word_embeddings": lambda c: first_chatglm(c) and c.flag("tie_word_embeddings", True),
    },
    spellings={"vocab_size": ("padded_vocab_size",)},
    inert=("num_layers", "position_encoding_2d"),
)

# --- Baichuan, XVERSE, Orion, StableLM's first, InternLM 1 and 2: vLLM's files of those names ---

MHA = LLAMA.variant(mixer=grouped(BIAS, kv_heads=K("num_key_value_heads", "num_attention_heads")))
INTERNLM = Type(grouped(ONE_BIAS), dense(), inert=("attn_implementation",))
STABLELM = Type(
    grouped(qkv_bias=K("use_qkv_bias")),
    dense(),
    norm="layer",
    spellings={"num_attention_heads": ("num_heads",)},
    inert=("norm_eps", "num_heads"),
)

# --- Jais, after vLLM's jais.py ---


def alibi(c: Config) -> bool:
    return c.word("position_embedding_type", "learned") == "alibi"


JAIS = Type(
    mha(True),
    dense(
        K("n_inner", default=K("hidden_size", scale=4)),
        gated=lambda c: c.word("activation_function", "gelu_new") == "swiglu",
        bias=True,
    ),
    norm="layer",
    model={"position_embeddings": when(alibi, 0, K("max_position_embeddings"))},
    defaults=TIED,
)

# --- MiniCPM and its vision models, after vLLM's minicpm.py and minicpmv.py: which stack is inside hangs on the version ---

MINICPM = LLAMA.variant(
    ffn=dense(),
    defaults=TIED,
    inert=("dim_model_base", "scale_emb", "scale_depth", "mup_denominator", "rope_scaling", "num_experts"),
)


def minicpmv(c: Config) -> str:
    """The language model of a MiniCPM-V or -o: of 2.0, 2.5, 2.6, 4.0, 4.5."""
    given = c.get("version")
    version = str(given if given is not None else 2.0 if (c.size("hidden_size"), c.get("query_num")) == (2304, 64) else 2.5)
    found = {"2": "minicpm", "2.0": "minicpm", "2.5": "llama", "2.6": "qwen2", "4": "llama", "4.0": "llama", "4.5": "qwen3"}
    if version not in found:
        raise c.fail("version", f"{version[:20]!r} is no MiniCPM-V that is read", f"Known: {', '.join(found)}")
    return found[version]


MINICPMV_STACKS = {"minicpm": MINICPM, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
MINICPMV = LLAMA.variant(
    mixer=lambda c: MINICPMV_STACKS[minicpmv(c)].mixer(c),
    model={"tie_word_embeddings": lambda c: c.flag("tie_word_embeddings", minicpmv(c) == "minicpm")},
    order=typed(from_layer(K("max_window_layers"), condition=K("use_sliding_window"))),
    inert=("dim_model_base", "scale_emb", "scale_depth", "version", "use_image_id", "sliding_window", "max_window_layers"),
)

# --- TeleChat 1 and 2: biases on what projects back alone (vLLM's telechat2.py) ---

TELECHAT = Type(
    grouped(o_bias=True),
    dense(down_bias=True),
    spellings={"rms_norm_eps": ("layer_norm_epsilon",)},
    inert=("embed_layernorm", "logn", "training_seqlen", "base_seqlen"),
)

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
    inert=("n_layers", "block_type", "block_group_size", "vocab_size", "layer_norm_type", "max_sequence_length"),
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

TYPES = {
    "qwen": QWEN,
    "chatglm": CHATGLM,
    "baichuan": MHA,
    "xverse": MHA,
    "internlm": INTERNLM,
    "internlm2": INTERNLM,
    "orion": Type(grouped(), dense(), norm="layer"),
    "stablelm_epoch": STABLELM,
    "jais": JAIS,
    "mimo": QWEN2.variant(inert=("attention_bias", "use_mrope")),  # mlx-lm's mimo.py
    "minicpm": MINICPM,
    "minicpmv": MINICPMV,
    "minicpmo": MINICPMV,
    "telechat": TELECHAT,
    "telechat2": TELECHAT,
    "telechat3": LLAMA,  # mlx-lm's telechat3.py
    "exaone": LLAMA.variant(defaults=TIED, inert=("num_layers", "rotary_pct")),  # vLLM's exaone.py
    "hf_olmo": HF_OLMO,
    "molmo": MOLMO,
    "openelm": OPENELM,
    "plamo": PLAMO,
    "plamo3": PLAMO3,
    "phi3small": PHI3SMALL,
    "lille-130m": LILLE,
    "solar": LLAMA.variant(inert=("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4", "bskcn_tv")),  # vLLM's solar.py
    "step1": LLAMA.variant(  # vLLM's step1.py
        mixer=grouped(BIAS, kv_heads=K("num_attention_groups", "num_key_value_heads", default=1), head=even_head_dim)
    ),
    "teleflm": LLAMA.variant(inert=("use_mup", "mup_scale_factor", "input_mult", "output_mult")),  # vLLM's teleflm.py
    "spark2_5": SPARK,  # mlx-lm's spark2_5.py
    "aquila": LLAMA,
    "skywork": LLAMA,
    "deci": LLAMA.variant(mixer=grouped(BIAS, kv_heads=K("num_key_value_heads_per_layer", "num_key_value_heads"))),
}
