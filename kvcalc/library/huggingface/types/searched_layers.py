"""Decoders with layers that differ one by one, read another layer's cache, convolve, or repeat.

Nemotron-NAS: an architecture search chose each layer's attention, matrix or nothing, and the FFN's
width (vLLM's nemotron_nas.py, mlx-lm's nemotron-nas.py). Apple's foundation model: the last layers
read the last cache (afm7.py). Baichuan-M1: keys and values through a convolution of two tokens
(baichuan_m1.py). PLaMo 2: Mamba of heads with norms inside (plamo2.py). RWKV-7 (rwkv7.py).
Nanbeige and IQuest-Coder's loop: the stack runs several times, and each turn has a cache of its own
(nanbeige.py, iquestloopcoder.py). Files without a folder are mlx-lm's, in `mlx_lm/models/`.
Inkling and Zaya: transformers' modelling code.
"""

from kvcalc.layers.recurrent import Convolutions, Mamba, Rwkv7
from kvcalc.library.huggingface.config import Config, Field, Reader, when
from kvcalc.library.huggingface.layer_types import (
    FULL,
    LINEAR,
    SLIDING,
    full_where,
    typed,
    uniform,
)
from kvcalc.library.huggingface.shapes import (
    after_first,
    both,
    by_type,
    dense,
    even_head_dim,
    grouped,
    mixer,
    moe,
    nothing,
    pick,
    projections,
)
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.llama import LLAMA
from kvcalc.records import JsonObject

MOST_LAYERS = 10_000
SLIDES = "layer_type == 'sliding_attention'"
TIED = {"tie_word_embeddings": True}

# --- Nemotron-NAS ---


def block(c: Config, part: str) -> JsonObject:
    """Return what the search chose for a part of the current layer."""
    blocks = c.items("block_configs") or []
    if len(blocks) != c.layers or not all(isinstance(item, dict) for item in blocks):
        raise c.fail("block_configs", f"does not describe each of {c.layers} layers")
    choice = blocks[c.layer].get(part)
    if not isinstance(choice, dict) or choice.get("window_length"):
        raise c.fail("block_configs", f"layer {c.layer} has no {part} that is read")
    return choice


def nas_groups(c: Config) -> int:
    """Return the heads of keys and values."""
    group_size = block(c, "attention").get("n_heads_in_group")
    heads = c.size("num_attention_heads")
    if type(group_size) is not int or group_size < 1 or heads % group_size:
        raise c.fail(
            "block_configs",
            f"layer {c.layer}: n_heads_in_group {str(group_size)[:20]} does not divide "
            f"{heads} heads",
        )
    return heads // group_size


def nas_width(c: Config) -> int:
    """Return the FFN's width: two thirds of a multiple of the model's, up to the next 256."""
    choice = block(c, "ffn")
    if isinstance(choice.get("intermediate_size"), int):
        return int(choice["intermediate_size"])
    factor = choice.get("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
        raise c.fail(
            "block_configs",
            f"layer {c.layer}: ffn_mult {str(factor)[:20]} is no factor",
        )
    return -(-int(2 * factor * c.size("hidden_size") / 3) // 256) * 256


def nas_part(part: str, own: Reader) -> Reader:
    """Return the reader of a part as chosen: its own, a matrix in its place, or nothing."""
    linear = projections({"linear": "hidden_size, hidden_size"})
    replaced = pick(lambda c: block(c, part).get("replace_with_linear"), linear, own)
    return pick(lambda c: block(c, part).get("no_op"), nothing, replaced)


def nas_norms(c: Config) -> int:
    """Return a norm for each part that is not left out."""
    return sum(not block(c, part).get("no_op") for part in ("attention", "ffn"))


# --- Baichuan-M1: sliding layers may have their own numbers of heads ---


def m1_heads(c: Config) -> int:
    """Return the heads of this layer."""
    key = "num_swa_attention_heads"
    is_own = c.layer_type == SLIDING and c.get(key)
    return c.size(key if is_own else "num_attention_heads")


def m1_groups(c: Config) -> int:
    """Return the heads of keys and values of this layer."""
    key = "num_swa_key_value_heads"
    is_own = c.layer_type == SLIDING and c.get(key)
    return c.size(key if is_own else "num_key_value_heads")


def m1_head(c: Config) -> int:
    """Return the width of a head of this layer."""
    return c.size("hidden_size") // m1_heads(c)


def m1_channels(c: Config) -> int:
    """Return the channels of keys, and of values."""
    return m1_groups(c) * m1_head(c)


def m1_kernels(c: Config) -> int:
    """Return the elements of one kernel per head."""
    return m1_groups(c) * c.size("conv_window")


# --- PLaMo 2 ---


def plamo2_order(c: Config) -> list[str]:
    """Return attention in the middle layer of every `mamba_step`, or in the last of a short stack.

    All layers have attention if Mamba is not enabled.
    """
    step = c.size("mamba_step", 2)
    if not c.flag("mamba_enabled", True):
        return [SLIDING] * c.layers
    if c.layers <= step // 2:
        return [*[LINEAR] * (c.layers - 1), SLIDING]
    return [SLIDING if i % step == step // 2 else LINEAR for i in range(c.layers)]


# --- Inkling: convolutions on keys, values and both branches; relative positions by projection ---

IS_LOCAL = "layer_type == 'hybrid_sliding'"
LOCAL_EVERY_6 = full_where("layer_index % 6 == 5", "hybrid", "hybrid_sliding")


def by_window(formula: str) -> Field:
    """Return the rule of a formula with `swa_` before the keys of heads in a sliding layer."""
    local = formula
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        local = local.replace(key, f"swa_{key}")
    return when(IS_LOCAL, local.replace("rel_extent", "sliding_window"), formula)


KEYS = "num_key_value_heads * head_dim"
INKLING_HEADS: dict[str, Field] = {
    "heads": by_window("num_attention_heads"),
    "kv_heads": by_window("num_key_value_heads"),
    "head": by_window("head_dim"),
    "sliding_window": when(IS_LOCAL, "sliding_window"),
}
INKLING_CONVOLUTIONS = mixer(
    Convolutions,
    channels={
        "k_conv": by_window(KEYS),
        "v_conv": by_window(KEYS),
        "attention_conv": "hidden_size",
        "ffn_conv": "hidden_size",
    },
    conv_kernel="sconv_kernel_size",
)
# A vector of d_rel per head, and what turns it into a logit per distance.
RELATIVE: dict[str, Field] = {
    "relative": by_window("hidden_size, num_attention_heads * d_rel"),
    "distances": by_window("d_rel, rel_extent"),
}
# What a full layer adds to the static kernel of its convolutions, from the input.
DYNAMIC_KERNEL = when(IS_LOCAL, None, "hidden_size, num_key_value_heads * sconv_kernel_size")
# The width of an expert, which a file that gives `dense_intermediate_size` calls intermediate_size.
ROUTED = when("(dense_intermediate_size | 0) > 0", "intermediate_size", "moe_intermediate_size")
INKLING_SHARED = "(n_shared_experts | 0)"

# --- Zaya: queries and keys through two convolutions, half of each value one token late ---


def zaya_bias(c: Config) -> bool:
    """Return whether layers have biases.

    Raises:
        UserError: The file is as ZAYA's makers write it, where attention and experts alternate.
    """
    for key in ("zaya_mlp_expansion", "swa_layers"):
        if c.has(key):
            raise c.fail(
                key,
                f"counts attention and experts as separate layers: {c.layers} are twice the "
                "number read",
                "Give the config.json of the same weights for transformers",
            )
    return c.flag("attention_bias")


QK_CHANNELS = "(num_attention_heads + num_key_value_heads) * head_dim"
ROUTER = "router_hidden_size"

# --- Stacks that run several times ---


def looped_depth(c: Config) -> int:
    """Return the layers of all turns of Nanbeige."""
    layers = c.size("num_loops", 1) * c.size("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise c.fail("num_loops", f"gives {layers:,} layers")
    return layers


def two_turns(c: Config) -> list[str]:
    """Return the stack, and once more within a window, with the weights of the first turn."""
    if c.size("loop_num", 2) != 2:
        raise c.fail("loop_num", f"{c.size('loop_num')} turns are not read, only 2")
    return [FULL] * c.layers + [SLIDING] * c.layers


SECOND_TURN = both(grouped(window="loop_window_size | 64"), LLAMA.ffn)

TYPES = {
    "nemotron-nas": Type(
        nas_part("attention", grouped(kv_heads=nas_groups, head=even_head_dim)),
        nas_part("ffn", dense(nas_width, bias="mlp_bias")),
        norms=nas_norms,
        inert="intermediate_size num_key_value_heads",
    ),
    "afm7": Type(
        grouped(
            False,
            qk_norm="head",
            head=even_head_dim,
            kv_projection="layer_index < layer_count - (num_kv_reuse_layers | 0)",
        ),
        dense(lambda c: int(c.size("hidden_size") * c.number("hidden_dim_scale_factor", 3.25))),
        layer={"shares_cache": "layer_index >= layer_count - (num_kv_reuse_layers | 0)"},
        spellings={"hidden_size": ("hidden_dim",)},
        defaults=TIED,
    ),
    "baichuan_m1": Type(
        both(
            grouped(False, heads=m1_heads, kv_heads=m1_groups, head=m1_head),
            mixer(
                Convolutions,
                channels={"late_k": m1_channels, "late_v": m1_channels},
                conv_kernel="conv_window",
                weighted=False,
            ),
            projections(vectors={"k_conv": m1_kernels, "v_conv": m1_kernels}),
        ),
        order=full_where("layer_index in sliding_window_layers", SLIDING, FULL),
    ),
    "plamo2": Type(
        by_type(
            sliding_attention=grouped(
                False,
                head="hidden_size_per_head | 128",
                qk_norm="full",
                window=when(
                    "layer_index in full_attention_idx",
                    None,
                    "attention_window_size | 2048",
                ),
            ),
            linear_attention=mixer(
                Mamba,
                intermediate_size="(mamba_num_heads | 64) * (hidden_size_per_head | 128)",
                state_size="mamba_d_state | 64",
                time_step_rank=lambda c: max(64, c.size("hidden_size") // 16),
                conv_kernel="mamba_d_conv | 4",
                num_heads="mamba_num_heads | 64",
                conv_bias=False,
                inner_norms=True,
            ),
        ),
        order=plamo2_order,
        norms=4,
        defaults=TIED,
        inert="mamba_chunk_size",
    ),
    "rwkv7": Type(
        mixer(
            Rwkv7,
            num_heads="hidden_size // (head_dim | 64)",
            head_dim="head_dim | 64",
            decay_low_rank_dim="decay_low_rank_dim",
            a_low_rank_dim="a_low_rank_dim",
            v_low_rank_dim="v_low_rank_dim if layer_index > 0 else 0",
            gate_low_rank_dim="gate_low_rank_dim",
            shift_size="hidden_size",
        ),
        both(
            dense("intermediate_size | 4 * hidden_size", gated=False),
            projections(vectors={"time_mix": "hidden_size"}),
        ),
        norms="3 if layer_index == 0 and (norm_first | True) else 2",
        norm=when("norm_bias | True", "layer", "layer_no_bias"),
        inert="num_heads value_dim hidden_ratio attn_mode fuse_norm fuse_cross_entropy",
    ),
    "inkling_text": Type(
        both(
            grouped(qk_norm="head", **INKLING_HEADS),
            INKLING_CONVOLUTIONS,
            projections(RELATIVE),
        ),
        after_first(
            "(dense_mlp_idx | 0)",
            both(
                moe(
                    "num_local_experts",
                    size=ROUTED,
                    shared=when(
                        "(dense_intermediate_size | 0) > 0",
                        f"{INKLING_SHARED} * intermediate_size",
                        f"{INKLING_SHARED} * moe_intermediate_size",
                    ),
                ),
                projections(
                    {"shared_router": f"hidden_size, {INKLING_SHARED}"},
                    {"router_scale": 1},
                ),
            ),
            both(
                dense("dense_intermediate_size | intermediate_size"),
                projections(vectors={"scale": 1}),
            ),
        ),
        typed(
            lambda c: (
                full_where("layer_index in local_layer_ids", "hybrid_sliding", "hybrid")
                if c.has("local_layer_ids")
                else LOCAL_EVERY_6
            )(c)
        ),
        model={"embedding_norm": True, "tie_word_embeddings": False},
    ),
    "inkling2_text": Type(
        both(
            grouped(output_gate="full", **INKLING_HEADS),
            INKLING_CONVOLUTIONS,
            projections(
                RELATIVE
                | {
                    "sinks": by_window("hidden_size, num_attention_heads"),
                    "k_kernel": DYNAMIC_KERNEL,
                    "v_kernel": DYNAMIC_KERNEL,
                },
                {
                    "clips": by_window("num_attention_heads * (head_dim + d_rel)"),
                    "block_queries": when(
                        "layer_index == 0",
                        "hidden_size",
                        when(IS_LOCAL, "2 * hidden_size", "4 * hidden_size"),
                    ),
                },
            ),
        ),
        moe("num_local_experts", size="moe_intermediate_size"),
        typed(LOCAL_EVERY_6),
        norms=when(IS_LOCAL, 2, 4),
        model={
            "embedding_norm": True,
            "tie_word_embeddings": False,
            "extra": projections(vectors={"block_queries": "hidden_size"}),
        },
    ),
    "zaya": Type(
        both(
            grouped(zaya_bias, sliding_window=when(IS_LOCAL, "sliding_window")),
            mixer(
                Convolutions,
                channels={"qk_conv": QK_CHANNELS},
                conv_kernel="cca_time0",
                bias=True,
                columns=lambda c: c.size("cca_time0") + c.size("cca_time1") - 2 or None,
            ),
            mixer(
                Convolutions,
                channels={"late_v": f"{KEYS} // 2"},
                conv_kernel=2,
                weighted=False,
            ),
            projections(
                {"qk_conv_by_head": f"head_dim * cca_time1, {QK_CHANNELS}, {QK_CHANNELS}"},
                {
                    "temperature": "num_key_value_heads",
                    "residual_scales": "8 * hidden_size",
                },
            ),
        ),
        # a router of a depth of its own
        both(
            projections(
                {
                    "router_down": f"hidden_size, {ROUTER}, {ROUTER}",
                    "router_1": f"{ROUTER}, {ROUTER}, {ROUTER}",
                    "router_2": f"{ROUTER}, {ROUTER}, {ROUTER}",
                },
                {"router_norms": f"2 * {ROUTER} if layer_index > 0 else {ROUTER}"},
            ),
            moe("num_experts", zero_experts=1, router_width=ROUTER),
        ),
        typed(uniform("hybrid")),
        model={
            "lm_head_bias": "lm_head_bias",
            "extra": projections(vectors={"input_scales": "2 * hidden_size"}),
        },
    ),
    "nanbeige": Type(
        nothing,
        nothing,
        order=lambda c: [FULL] * looped_depth(c),
        norms=0,
        layer={
            "shared": both(
                LLAMA.mixer,
                LLAMA.ffn,
                projections(vectors={"norms": "2 * hidden_size"}),
            ),
            "weight_sets": "num_hidden_layers",
        },
        model={"layers": looped_depth},
        inert="skip_loop_final_norm loop_loss_weights",
    ),
    # a gate per head between the two turns, from the query
    "iquestloopcoder": Type(
        pick(
            SLIDES,
            nothing,
            both(
                LLAMA.mixer,
                LLAMA.ffn,
                projections(
                    {"loop_gate": "head_dim, num_attention_heads, num_attention_heads"}
                ),
            ),
        ),
        nothing,
        order=two_turns,
        norms=when(SLIDES, 0, 2),
        layer={
            "shared": lambda c: SECOND_TURN(c) if c.layer_type == SLIDING else None,
            "weight_sets": when(SLIDES, 0),
        },
        model={"layers": "2 * layer_count"},
    ),
}
