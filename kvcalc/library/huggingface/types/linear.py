"""Models with linear attention, delta rules, short convolutions or gated recurrences, after transformers' code."""

from kvcalc.layers.recurrent import GatedDeltaNet, KimiDeltaAttention, Lightning, RgLru, ShortConv
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, Reader, when
from kvcalc.library.huggingface.patterns import (
    FULL,
    LINEAR,
    SLIDING,
    after_first,
    by_type,
    cycle,
    every,
    flagged,
    full_at,
    pick,
    stepped,
    typed,
    uniform,
)
from kvcalc.library.huggingface.shapes import (
    both,
    dense,
    grouped,
    head_dim,
    latent,
    mixer,
    moe,
    nothing,
    projections,
    shared_experts,
    state_dtype,
)
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.hybrids import attends

BIAS = K("attention_bias")
STATE = state_dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
LINEAR_SIZES = {
    name: K(name)
    for name in (
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
}  # fmt: skip

# --- Gated delta net ---

DELTA_NET = mixer(GatedDeltaNet, **LINEAR_SIZES, state_dtype=STATE)
GATED: dict[str, Field] = {"bias": BIAS, "qk_norm": "head", "output_gate": "full", "output_gate_bias": BIAS}
SHARED_MOE = moe(K("num_experts"), shared=K("shared_expert_intermediate_size"), shared_expert_gate=True)
INTERVAL = every(K("full_attention_interval", default=4), others=LINEAR)
QWEN3_5 = Type(
    by_type(full_attention=grouped(**GATED), linear_attention=DELTA_NET),
    dense(),
    typed(INTERVAL),
    inert=("attn_output_gate", "full_attention_interval"),
)
QWEN3_5_MOE = QWEN3_5.variant(ffn=SHARED_MOE)
QWEN3_NEXT = QWEN3_5.variant(ffn=stepped(SHARED_MOE, dense()))


def _key_width(c: Config) -> int:
    heads = c.size("linear_num_key_heads", c.size("num_attention_heads"))
    return c.size("linear_key_head_dim", int(0.75 * c.size("hidden_size") / heads))


OLMO_HYBRID = Type(
    by_type(
        full_attention=grouped(BIAS, qk_norm="full"),
        linear_attention=mixer(
            GatedDeltaNet,
            linear_num_key_heads=K("linear_num_key_heads", "num_attention_heads"),
            linear_num_value_heads=K("linear_num_value_heads", "num_attention_heads"),
            linear_key_head_dim=_key_width,
            linear_value_head_dim=lambda c: c.size("linear_value_head_dim", 2 * _key_width(c)),
            linear_conv_kernel_dim=K("linear_conv_kernel_dim"),
        ),
    ),
    dense(),
    typed(full_at(lambda i, n: i % 4 == 3 or (i == n - 1 and n < 4), LINEAR)),
)

# --- Kimi delta attention ---


def _kimi_layers(c: Config) -> list[str]:
    """Layers counted from 1 in `linear_attn_config`, else every fourth but the first."""
    inside = c.nested("linear_attn_config")
    if not (inside.has("full_attn_layers") and inside.has("kda_layers")):
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(c.layers)]
    full, linear = inside.sizes("full_attn_layers"), inside.sizes("kda_layers")
    if sorted([*full, *linear]) != list(range(1, c.layers + 1)):
        raise c.fail("linear_attn_config", f"does not name each of the layers 1 to {c.layers} once")
    attending = set(full)
    return [FULL if i + 1 in attending else LINEAR for i in range(c.layers)]


def kda(key: str, inner: str) -> Field:
    """A size of KDA, which `linear_attn_config` gives under another name."""
    return lambda c: inside.get(inner) if (inside := c.nested("linear_attn_config")).has(inner) else c.get(key)


KDA = mixer(
    KimiDeltaAttention,
    num_heads=kda("linear_num_heads", "num_heads"),
    head_dim=kda("linear_head_dim", "head_dim"),
    conv_kernel=kda("linear_conv_kernel_dim", "short_conv_kernel_size"),
    full_gate=lambda c: c.nested("linear_attn_config").flag("use_full_rank_gate"),
)


# Kimi-K3 has experts of a width of their own, behind a norm, gates on its latent attention, and before each block a vector
# that weighs the outputs of earlier ones (SGLang's kimi_k3.py).
def _latent_norm(c: Config) -> dict[str, int]:
    normed = c.has("routed_expert_hidden_size") and c.flag("latent_moe_use_norm")
    return {"latent_norm": c.size("routed_expert_hidden_size")} if normed else {}


def _residuals(*names: str) -> Reader:
    """A vector, as a matrix of one column, and a norm for each block whose input weighs earlier outputs."""
    pairs = projections(
        lambda c: {f"{name}_residual": (c.size("hidden_size"), 1) for name in names},
        lambda c: {f"{name}_residual_norm": c.size("hidden_size") for name in names},
    )
    return pick(lambda c: c.has("attn_res_block_size"), pairs, nothing)


KIMI_EXPERTS = both(
    moe(K("num_local_experts"), shared=shared_experts(), moe_latent_size=K("routed_expert_hidden_size")),
    pick(_latent_norm, projections(vectors=_latent_norm), nothing),
)
KIMI_LINEAR = Type(
    both(
        by_type(full_attention=latent(BIAS, output_gate=when(K("mla_use_output_gate"), "full")), linear_attention=KDA),
        _residuals("mixer", "ffn"),
    ),
    after_first(lambda c: c.size("first_k_dense_replace", 1, least=0), KIMI_EXPERTS, dense(), freq=""),
    typed(_kimi_layers),
    model={"extra": _residuals("last"), "tie_word_embeddings": False},
    inert=("moe_layer_freq", "mla_use_nope", "tie_word_embeddings"),
)


def _ling_shared(c: Config) -> int:
    each = "moe_shared_expert_intermediate_size"
    return c.size("n_shared_experts", 0, least=0) * c.size(each if c.has(each) else "moe_intermediate_size")


BAILING = KIMI_LINEAR.variant(
    mixer=by_type(
        full_attention=latent(BIAS, output_gate="head"),
        linear_attention=mixer(
            KimiDeltaAttention,
            num_heads=K("linear_num_heads", "num_attention_heads"),
            head_dim=K("linear_head_dim", "head_dim"),
            conv_kernel=K("linear_conv_kernel_dim", "short_conv_kernel_size"),
            factored=False,
        ),
    ),
    ffn=after_first(
        lambda c: c.size("first_k_dense_replace", 1, least=0), moe(K("num_local_experts"), shared=_ling_shared), dense(), freq=""
    ),
    order=typed(every(K("layer_group_size"), others=LINEAR)),
    inert=(
        "tie_word_embeddings",
        "no_kda_lora",
        "kda_safe_gate",
        "kda_lower_bound",
        "head_dim",
        "moe_router_enable_expert_bias",
        "use_qk_norm",
    ),
)

# --- Lightning attention, short convolutions, gated recurrences ---


def recurs(c: Config) -> list[bool]:
    """The flags of MiniMax's own configs, where 1 is full attention."""
    return [not full for full in c.items("attn_type_list") or ()]


MINIMAX = Type(
    by_type(
        full_attention=grouped(),
        linear_attention=mixer(
            Lightning,
            num_attention_heads=K("num_attention_heads"),
            head_dim=head_dim,
            state_dtype=lambda c: state_dtype("dtype", "torch_dtype")(c) or "bf16",  # the model's own
        ),
    ),
    moe(K("num_local_experts"), size=K("intermediate_size")),
    typed(flagged(recurs, LINEAR, every(2, others=LINEAR, offset=0))),
    inert=(
        "postnorm", "shared_moe_mode", "layernorm_full_attention_alpha", "layernorm_full_attention_beta",
        "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta", "layernorm_mlp_alpha", "layernorm_mlp_beta",
    ),
)  # fmt: skip
CONV: Reader = mixer(ShortConv, width=K("hidden_size"), conv_kernel=K("conv_L_cache"), bias=K("conv_bias"))
TIED = {"tie_word_embeddings": lambda c: c.flag("tie_embedding", c.flag("tie_word_embeddings", True))}


def _adjusted(c: Config) -> int:
    """LFM2's FFN: two thirds of the size that the file names, times a factor, rounded up to a multiple."""
    size = c.size("block_ff_dim", c.size("intermediate_size"))
    if not c.flag("block_auto_adjust_ff_dim", True):
        return size
    size, key = int(2 * size / 3), "block_ffn_dim_multiplier"
    if key in c.file and c.get(key) is None:
        return size
    multiple = c.size("block_multiple_of")
    return -(-int(c.number(key, 1.0) * size) // multiple) * multiple


LFM2 = Type(
    by_type(full_attention=grouped(qk_norm="head"), conv=CONV),
    dense(_adjusted),
    typed(lambda c: (attends("full_attn_idxs", "conv") if c.has("full_attn_idxs") else uniform())(c)),
    model=TIED,
)
LFM2_MOE = LFM2.variant(ffn=after_first("num_dense_layers", moe(K("num_experts")), dense(), freq=""), order=typed())
LFM3_ATTENTION = grouped(BIAS, qk_norm="head", output_gate=when(K("use_attention_gate"), "head"))
LFM3 = Type(
    by_type(full_attention=LFM3_ATTENTION, sliding_attention=LFM3_ATTENTION, conv=CONV),
    dense(),
    typed(lambda c: [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else "conv" for i in range(c.layers)]),
    norms=when(K("use_sandwich_norm"), 4, 2),
)
RECURRENT_GEMMA = Type(
    by_type(
        sliding_attention=grouped(BIAS, o_bias=True, window=K("attention_window_size")),
        linear_attention=mixer(
            RgLru,
            lru_width=K("lru_width", "hidden_size"),
            num_heads=K("num_attention_heads"),
            conv_kernel=K("conv1d_width"),
        ),
    ),
    dense(lambda c: c.size("intermediate_size") // 2, bias=True),
    cycle("block_types", {"recurrent": LINEAR, "attention": SLIDING}),
)

TYPES = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "olmo_hybrid": OLMO_HYBRID,
    "kimi_linear": KIMI_LINEAR,
    "bailing_hybrid": BAILING,
    "minimax": MINIMAX,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": LFM3,
    "recurrent_gemma": RECURRENT_GEMMA,
}
