"""Gemma 3n and Gemma 4: per-layer embeddings, layers that read another layer's cache, wide heads.

Source: transformers' modelling code.
"""

from kvcalc.library.huggingface.config import Config, Field, when
from kvcalc.library.huggingface.layer_types import FULL, every, typed
from kvcalc.library.huggingface.shapes import (
    both,
    dense,
    grouped,
    half_window,
    moe,
    pick,
    projections,
)
from kvcalc.library.huggingface.types.entry import Type


def shares(c: Config) -> bool:
    """Return whether this layer reads the cache of the last layer of its type that has one."""
    count = c.size("num_kv_shared_layers", 0, minimum=0)
    if count >= c.layers:
        raise c.fail(
            "num_kv_shared_layers",
            f"{count} of {c.layers} layers leave none that has a cache",
        )
    return c.layer >= c.layers - count


def has_own_cache(c: Config) -> bool:
    """Return whether this layer projects keys and values."""
    return not shares(c)


def is_double(c: Config) -> bool:
    """Return whether this layer has an FFN of twice the width."""
    return shares(c) and c.flag("use_double_wide_mlp")


def _stream_projections(c: Config) -> dict[str, tuple[int, int]]:
    """Return the projections into AltUp's further streams and back."""
    sides = (c.size("hidden_size"), c.size("hidden_size"))
    numbers = range(1, c.size("altup_num_inputs"))
    return {f"stream_{way}_{i}": sides for way in ("in", "out") for i in numbers}


# A layer's gate on its own embedding of the token, and the way back.
INPUT_GATE = pick(
    "(hidden_size_per_layer_input | 0) > 0",
    projections(
        {
            "input_gate": "hidden_size, hidden_size_per_layer_input",
            "input_up": "hidden_size_per_layer_input, hidden_size",
        },
        {"input_norm": "hidden_size"},
    ),
)
ALL_INPUTS = "layer_count * hidden_size_per_layer_input"
# One row of all layers' own embeddings for each token.
TABLES: dict[str, Field] = {
    "input_embedding": when(
        "(hidden_size_per_layer_input | 0) > 0",
        f"vocab_size_per_layer_input, {ALL_INPUTS}",
    )
}
INPUT_PROJECTION = pick(
    "(hidden_size_per_layer_input | 0) > 0",
    projections(
        {"input_projection": f"hidden_size, {ALL_INPUTS}"},
        {"input_projection_norm": "hidden_size_per_layer_input"},
    ),
)
IS_FULL = "layer_type == 'full_attention'"
# per_layer_config already says what differs in full layers
IS_WIDE = f"{IS_FULL} and not per_layer_config"
ATTENTION = grouped(
    window=half_window("all"),
    head=when(IS_WIDE, "global_head_dim | 512", "head_dim"),
    kv_heads=when(
        f"{IS_WIDE} and attention_k_eq_v",
        "num_global_key_value_heads | num_key_value_heads",
        "num_key_value_heads",
    ),
    qk_norm="head",
    k_is_v=f"{IS_FULL} and attention_k_eq_v",
    kv_projection=has_own_cache,
)
FFN = dense(when(is_double, "2 * intermediate_size", "intermediate_size"))
EXPERTS = moe(size="moe_intermediate_size", router_input_norm=True, expert_scales=True)
GEMMA4_UNIFIED = Type(
    ATTENTION,
    FFN,
    # the last layer is full in any case
    lambda c: [*typed(every(6))(c)[:-1], FULL],
    norms=4,
    layer={"shares_cache": shares},
)

TYPES = {
    "gemma3n_text": Type(
        grouped(qk_norm="head", kv_projection=has_own_cache),
        both(
            dense(),
            # AltUp's mixing of the streams, and Laurel's low-rank residual
            projections(
                {
                    "altup.router": "hidden_size, altup_num_inputs",
                    "altup.predict": "altup_num_inputs, altup_num_inputs * altup_num_inputs",
                    "altup.correct": "altup_num_inputs, altup_num_inputs",
                    "laurel.down": "hidden_size, laurel_rank",
                    "laurel.up": "laurel_rank, hidden_size",
                },
                dict.fromkeys(("altup.norm", "altup.scale", "laurel.norm"), "hidden_size"),
            ),
            INPUT_GATE,
        ),
        typed(every(5)),
        norms=4,
        layer={"shares_cache": shares},
        model={
            "tables": TABLES,
            "extra": both(INPUT_PROJECTION, projections(_stream_projections)),
        },
    ),
    "gemma4_text": GEMMA4_UNIFIED.variant(
        ffn=both(FFN, pick("enable_moe_block", EXPERTS), INPUT_GATE),
        norms=when("enable_moe_block", 7, 4),
        model={"tables": TABLES, "extra": INPUT_PROJECTION},
    ),
    "gemma4_unified_text": GEMMA4_UNIFIED,
}
