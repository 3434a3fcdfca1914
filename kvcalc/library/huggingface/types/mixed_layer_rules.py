"""Rules of decoders with layers that differ one by one, borrow a cache, convolve, or repeat.

`mixed_layers.yaml` names the rules and their sources.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, Field, Reader, value_of
from kvcalc.library.huggingface.shapes import (
    FULL,
    LINEAR,
    SLIDING,
    both,
    full_where,
    latent,
    nothing,
    pick,
    projections,
    typed,
)
from kvcalc.records import JsonObject

MAX_TURN_LAYERS = 10_000


def in_window(key: str, otherwise: str = "") -> Field:
    """Return the rule of `swa_`-`key`, else `otherwise`, in a sliding layer; `key` in the others.

    `per_layer_config` already says the sizes of each layer.
    """

    def read(c: Config) -> Any:
        is_own = c.layer_type == SLIDING and not c.has("per_layer_config")
        return value_of(f"swa_{key} | {otherwise or key}" if is_own else key, c)

    return read


def hrm_layers(c: Config) -> int:
    """Return the layers as they run: a round takes the low stack L_cycles times, the high once."""
    key = "num_layers_per_stack"
    stack = c.size(key if c.has(key) else "num_hidden_layers")
    count = stack * c.size("H_cycles") * (c.size("L_cycles") + 1)
    if count > MAX_TURN_LAYERS:
        raise c.fail("H_cycles", f"gives {count:,} layers")
    return count


def hrm_order(c: Config) -> list[str]:
    """Return full attention in each layer of each turn of HRM."""
    return [FULL] * hrm_layers(c)


def nanbeige_layers(c: Config) -> int:
    """Return the layers of all turns of Nanbeige."""
    count = c.size("num_loops", 1) * c.size("num_hidden_layers")
    if count > MAX_TURN_LAYERS:
        raise c.fail("num_loops", f"gives {count:,} layers")
    return count


def nanbeige_order(c: Config) -> list[str]:
    """Return full attention in each layer of each turn of Nanbeige."""
    return [FULL] * nanbeige_layers(c)


def two_turn_order(c: Config) -> list[str]:
    """Return the stack, and once more within a window, with the weights of the first turn."""
    if c.size("loop_num", 2) != 2:
        raise c.fail("loop_num", f"{c.size('loop_num')} turns are not read, only 2")
    return [FULL] * c.layers + [SLIDING] * c.layers


def dots3_rope_dim(c: Config) -> int:
    """Return the rest of a sliding layer's head_dim, unless the file says otherwise."""
    if c.layer_type != SLIDING or c.has("per_layer_config"):
        return c.size("qk_rope_head_dim")
    remaining_dim = c.size("swa_head_dim", 256) - c.size("swa_qk_nope_head_dim", 192)
    return c.size("swa_qk_rope_head_dim", max(1, remaining_dim))


def dots3_attention(**fields: Any) -> Reader:
    """Return the reader of dots3's MLA, with a norm on the rope key and a gate per head."""
    heads = in_window("num_attention_heads", "64")
    return both(
        latent(
            num_attention_heads=heads,
            q_lora_rank=in_window("q_lora_rank", "1024"),
            kv_lora_rank=in_window("kv_lora_rank", "1024"),
            qk_nope_head_dim=in_window("qk_nope_head_dim", "192"),
            qk_rope_head_dim=dots3_rope_dim,
            v_head_dim=in_window("v_head_dim", "128"),
            **fields,
        ),
        projections(
            {"gate": lambda c: (c.size("hidden_size"), heads(c))},
            {"rope_key_norm": dots3_rope_dim},
        ),
    )


def dots3_order(c: Config) -> list[str]:
    """Return the listed types, or windows except in layers 0, 1, 5, 9 …

    `use_dsa` says whether full layers have an indexer.
    """
    names = typed(
        full_where("layer_index < 2 or layer_index % 4 == 1 or not (use_sliding_window | True)")
    )(c)
    if c.get("use_dsa") is None and c.has("per_layer_config"):
        return names
    full = "indexed_attention" if c.flag("use_dsa", True) else FULL
    return [name if name == SLIDING else full for name in names]


def nas_block(c: Config, part: str) -> JsonObject:
    """Return the choice of the architecture search for a part of the current layer."""
    blocks = c.items("block_configs") or []
    if len(blocks) != c.layers or not all(isinstance(item, dict) for item in blocks):
        raise c.fail("block_configs", f"does not describe each of {c.layers} layers")
    choice = blocks[c.layer].get(part)
    if not isinstance(choice, dict) or choice.get("window_length"):
        raise c.fail("block_configs", f"layer {c.layer} has no {part} that is read")
    return choice


def nas_groups(c: Config) -> int:
    """Return the heads of keys and values."""
    group_size = nas_block(c, "attention").get("n_heads_in_group")
    heads = c.size("num_attention_heads")
    if type(group_size) is not int or group_size < 1 or heads % group_size:
        text = f"n_heads_in_group {str(group_size)[:20]} does not divide {heads} heads"
        raise c.fail("block_configs", f"layer {c.layer}: {text}")
    return heads // group_size


def nas_width(c: Config) -> int:
    """Return the FFN's width: two thirds of a multiple of the model's, up to the next 256."""
    choice = nas_block(c, "ffn")
    if isinstance(choice.get("intermediate_size"), int):
        return int(choice["intermediate_size"])
    factor = choice.get("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
        text = f"layer {c.layer}: ffn_mult {str(factor)[:20]} is no factor"
        raise c.fail("block_configs", text)
    return -(-int(2 * factor * c.size("hidden_size") / 3) // 256) * 256


def nas_part(part: str, own: Reader) -> Reader:
    """Return the reader of a part: its own, a matrix in its place, or nothing, as the file says."""
    linear = projections({"linear": "hidden_size, hidden_size"})
    replaced = pick(lambda c: nas_block(c, part).get("replace_with_linear"), linear, own)
    return pick(lambda c: nas_block(c, part).get("no_op"), nothing, replaced)


def nas_norms(c: Config) -> int:
    """Return a norm for each part that is not left out."""
    return sum(not nas_block(c, part).get("no_op") for part in ("attention", "ffn"))


def m1_heads(key: str) -> Field:
    """Return the rule of a number of heads of Baichuan-M1; sliding layers may have their own."""

    def read(c: Config) -> int:
        own_key = f"num_swa_{key}"
        is_own = c.layer_type == SLIDING and c.get(own_key)
        return c.size(own_key if is_own else f"num_{key}")

    return read


m1_query_heads = m1_heads("attention_heads")
m1_kv_heads = m1_heads("key_value_heads")


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


def plamo2_rank(c: Config) -> int:
    """Return the rank of PLaMo 2's time step."""
    return max(64, c.size("hidden_size") // 16)


def by_window(formula: str) -> Field:
    """Return the rule of an Inkling formula, with `swa_` before the keys of heads in a window."""
    local = formula.replace("rel_extent", "sliding_window")
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        local = local.replace(key, f"swa_{key}")
    return lambda c: value_of(local if c.layer_type == "hybrid_sliding" else formula, c)


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


def zaya_columns(c: Config) -> int | None:
    """Return the columns that the convolution stores; None without any."""
    return c.size("cca_time0") + c.size("cca_time1") - 2 or None
