"""Dense decoders whose code came with their weights: Qwen, ChatGLM, Baichuan, InternLM, MiniCPM, TeleChat and others.

transformers has no class of these. Each is written down after the code released with it, or the reading of it in vLLM 0.10
(`vllm/model_executor/models/`), SGLang (`sglang/srt/models/`) or mlx-lm (`mlx_lm/models/`); the comments name the file.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, value_of, when
from kvcalc.library.huggingface.patterns import from_layer, pick, typed
from kvcalc.library.huggingface.shapes import dense, even_head_dim, grouped, mha, moe
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
    ffn=pick(lambda c: bool(c.get("num_experts")), moe(K("num_experts"), size=K("intermediate_size")), dense()),
    defaults=TIED,
    inert=("dim_model_base", "scale_emb", "scale_depth", "mup_denominator", "rope_scaling"),
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

# --- TeleChat 1 and 2: biases on what projects back alone (vLLM's telechat2.py; the head is tied unless the file says
# otherwise, as in the 14,400,036,864 bytes of the released 7B) ---

TELECHAT = Type(
    grouped(o_bias=True),
    dense(down_bias=True),
    model={"embedding_norm": K("embed_layernorm")},
    defaults=TIED,
    spellings={"rms_norm_eps": ("layer_norm_epsilon",)},
    inert=("logn", "training_seqlen", "base_seqlen", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "semi_causal"),
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
    "solar": LLAMA.variant(inert=("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4", "bskcn_tv")),  # vLLM's solar.py
    "step1": LLAMA.variant(  # vLLM's step1.py
        mixer=grouped(BIAS, kv_heads=K("num_attention_groups", "num_key_value_heads", default=1), head=even_head_dim)
    ),
    "teleflm": LLAMA.variant(inert=("use_mup", "mup_scale_factor", "input_mult", "output_mult")),  # vLLM's teleflm.py
    "aquila": LLAMA,
    "PanguEmbedded": LLAMA.variant(mixer=grouped(K("bias", "attention_bias"))),  # vLLM's openpangu.py
    "skywork": LLAMA,
    "deci": LLAMA.variant(mixer=grouped(BIAS, kv_heads=K("num_key_value_heads_per_layer", "num_key_value_heads"))),
}
