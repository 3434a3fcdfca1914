"""Decoders whose layers differ one by one, or read each other's caches, and whose code came with their weights.

Nemotron-NAS: an architecture search chose attention, a matrix or nothing, and the FFN's width, layer by layer (vLLM's
nemotron_nas.py, mlx-lm's nemotron-nas.py). Apple's foundation model: the last layers read the last cache (afm7.py).
Baichuan-M1: keys and values through a convolution of two tokens (baichuan_m1.py). PLaMo 2: Mamba of heads with norms inside
(plamo2.py). RWKV-7 (rwkv7.py). Files without a folder are mlx-lm's, in `mlx_lm/models/`.
"""

from typing import Any

from kvcalc.layers.recurrent import Convolutions, Mamba, Rwkv7
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K
from kvcalc.library.huggingface.patterns import FULL, LINEAR, SLIDING, by_type, pick, slides
from kvcalc.library.huggingface.shapes import both, dense, even_head_dim, grouped, mixer, nothing, projections
from kvcalc.library.huggingface.types.entry import Type

BIAS = K("attention_bias")
TIED = {"tie_word_embeddings": True}

# --- Nemotron-NAS ---


def chosen(c: Config, part: str) -> dict[str, Any]:
    """What the search chose for a part of the current layer."""
    blocks = c.items("block_configs")
    if not blocks or len(blocks) != c.layers or not all(isinstance(block, dict) for block in blocks):
        raise c.fail("block_configs", f"does not describe each of {c.layers} layers")
    found = blocks[c.layer].get(part)
    if not isinstance(found, dict) or found.get("window_length"):
        raise c.fail("block_configs", f"layer {c.layer} has no {part} that is read")
    return found


def kept(part: str) -> Field:
    return lambda c: not chosen(c, part).get("no_op")


def replaced(part: str) -> Field:
    return lambda c: bool(chosen(c, part).get("replace_with_linear"))


def nas_groups(c: Config) -> int:
    each = chosen(c, "attention").get("n_heads_in_group")
    heads = c.size("num_attention_heads")
    if isinstance(each, bool) or not isinstance(each, int) or each < 1 or heads % each:
        raise c.fail("block_configs", f"layer {c.layer}: n_heads_in_group {str(each)[:20]} does not divide {heads} heads")
    return heads // each


def nas_width(c: Config) -> int:
    """Two thirds of the width times `ffn_mult`, rounded up to 256; or the width itself."""
    given = chosen(c, "ffn")
    if isinstance(given.get("intermediate_size"), int):
        return int(given["intermediate_size"])
    factor = given.get("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
        raise c.fail("block_configs", f"layer {c.layer}: ffn_mult {str(factor)[:20]} is no factor")
    return -(-int(2 * factor * c.size("hidden_size") / 3) // 256) * 256


def square(c: Config) -> dict[str, tuple[int, int]]:
    return {"linear": (c.size("hidden_size"), c.size("hidden_size"))}


def nas_part(part: str, own: Any) -> Any:
    """A part as chosen: its own, a matrix in its place, or nothing."""
    return pick(kept(part), pick(replaced(part), projections(square), own), nothing)


NEMOTRON_NAS = Type(
    nas_part("attention", grouped(BIAS, kv_heads=nas_groups, head=even_head_dim)),
    nas_part("ffn", dense(nas_width, bias=K("mlp_bias"))),
    norms=lambda c: sum(kept(part)(c) for part in ("attention", "ffn")),
    inert=("intermediate_size", "num_key_value_heads"),
)

# --- Apple's foundation model ---


def reuses(c: Config) -> bool:
    return c.layer >= c.layers - c.size("num_kv_reuse_layers", 0, least=0)


AFM7 = Type(
    grouped(qk_norm="head", head=even_head_dim, kv_projection=lambda c: not reuses(c)),
    dense(lambda c: int(c.size("hidden_size") * c.number("hidden_dim_scale_factor", 3.25))),
    layer={"shares_cache": reuses},
    spellings={"hidden_size": ("hidden_dim",)},
    defaults=TIED,
)

# --- Baichuan-M1 ---


def in_window(key: str, otherwise: str) -> Field:
    """A sliding layer's own number, where the file gives one."""
    return lambda c: c.size(key) if slides(c) and c.get(key) else c.size(otherwise)


M1_HEADS = in_window("num_swa_attention_heads", "num_attention_heads")
M1_GROUPS = in_window("num_swa_key_value_heads", "num_key_value_heads")


def m1_kernels(c: Config) -> dict[str, int]:
    """One kernel per head, for keys and for values."""
    return {"k_conv": M1_GROUPS(c) * c.size("conv_window"), "v_conv": M1_GROUPS(c) * c.size("conv_window")}


BAICHUAN_M1 = Type(
    both(
        grouped(heads=M1_HEADS, kv_heads=M1_GROUPS, head=lambda c: c.size("hidden_size") // M1_HEADS(c)),
        mixer(
            Convolutions,
            channels=lambda c: dict.fromkeys(("late_k", "late_v"), M1_GROUPS(c) * (c.size("hidden_size") // M1_HEADS(c))),
            conv_kernel=K("conv_window"),
            weighted=False,
        ),
        projections(vectors=m1_kernels),
    ),
    dense(),
    lambda c: [SLIDING if i in set(c.sizes("sliding_window_layers")) else FULL for i in range(c.layers)],
)

# --- PLaMo 2 ---


def plamo2_order(c: Config) -> list[str]:
    """Attention in the middle layer of every `mamba_step`, in the last of a stack that has no middle, or everywhere."""
    step = c.size("mamba_step", 2)
    if not c.flag("mamba_enabled", True):
        return [SLIDING] * c.layers
    if c.layers <= step // 2:
        return [*[LINEAR] * (c.layers - 1), SLIDING]
    return [SLIDING if i % step == step // 2 else LINEAR for i in range(c.layers)]


def plamo2_window(c: Config) -> int | None:
    return None if c.layer in c.sizes("full_attention_idx") else c.size("attention_window_size", 2048)


def channels(c: Config) -> int:
    return c.size("mamba_num_heads", 64) * c.size("hidden_size_per_head", 128)


PLAMO2 = Type(
    by_type(
        sliding_attention=grouped(head=K("hidden_size_per_head", default=128), qk_norm="full", window=plamo2_window),
        linear_attention=mixer(
            Mamba,
            intermediate_size=channels,
            state_size=K("mamba_d_state", default=64),
            time_step_rank=lambda c: max(64, c.size("hidden_size") // 16),
            conv_kernel=K("mamba_d_conv", default=4),
            num_heads=K("mamba_num_heads", default=64),
            conv_bias=False,
            inner_norms=True,
        ),
    ),
    dense(),
    plamo2_order,
    norms=4,
    defaults=TIED,
    inert=("mamba_chunk_size",),
)

# --- RWKV-7 ---


def mixing(c: Config) -> dict[str, int]:
    return {"time_mix": c.size("hidden_size")}


RWKV7 = Type(
    mixer(
        Rwkv7,
        num_heads=lambda c: c.size("hidden_size") // c.size("head_dim", 64),
        head_dim=K("head_dim", default=64),
        decay_low_rank_dim=K("decay_low_rank_dim"),
        a_low_rank_dim=K("a_low_rank_dim"),
        v_low_rank_dim=lambda c: c.size("v_low_rank_dim") if c.layer else 0,
        gate_low_rank_dim=K("gate_low_rank_dim"),
        shift_size=K("hidden_size"),
    ),
    both(dense(K("intermediate_size", default=K("hidden_size", scale=4)), gated=False), projections(vectors=mixing)),
    norms=lambda c: 3 if c.layer == 0 and c.flag("norm_first", True) else 2,
    norm=lambda c: "layer" if c.flag("norm_bias", True) else "layer_no_bias",
    inert=("num_heads", "value_dim", "hidden_ratio", "attn_mode", "fuse_norm", "fuse_cross_entropy"),
)

TYPES = {
    "nemotron-nas": NEMOTRON_NAS,
    "afm7": AFM7,
    "baichuan_m1": BAICHUAN_M1,
    "plamo2": PLAMO2,
    "rwkv7": RWKV7,
}
