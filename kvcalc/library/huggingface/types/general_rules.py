"""General rules for a decoder whose model type is not known: standard keys in their usual sense.

A missing key has the value that most decoders have. They follow Llama, with RMS norms, a gated FFN
and no biases. A file that gives LayerNorm's epsilon and an ungated activation follows GPT-2. The
result is marked as ≈. `general.yaml` names the rules.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, Reader
from kvcalc.library.huggingface.shapes import SLIDING, windowed

ACTIVATIONS = [
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "activation_type",
]
UNGATED = [
    "gelu",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "relu2",
    "relu_squared",
    "gelu_python",
]
EPSILONS = ["layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon", "ln_eps"]
QKV_BIAS = ["qkv_bias", "use_qkv_bias", "add_qkv_bias"]
ALL_BIASES = ["use_bias", "add_bias_linear", "include_bias"]
QK_NORMS = ["use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"]
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")


def first_word(c: Config, *keys: str) -> str:
    """Return the first of these keys that is a text, in small letters."""
    return next((value.lower() for key in keys if isinstance(value := c.get(key), str)), "")


def any_true(c: Config, *keys: str) -> bool:
    """Return whether one of the keys is true. All keys are read, so that none is left unread."""
    values = [c.get(key) for key in keys]
    return any(value is True for value in values)


def has_layer_norms(c: Config) -> bool:
    """Return whether norms are LayerNorms: by their name, else by the epsilon in the file."""
    kind = first_word(c, "norm_type", "layer_norm_type", "normalization_type")
    if "rms" in kind or any_true(c, "rmsnorm", "use_rmsnorm", "use_rms_norm"):
        return False
    return "layer" in kind or (c.has(*EPSILONS) and not c.has("rms_norm_eps"))


def is_gated(c: Config) -> bool:
    """Return whether the FFN has a gate, by its activation."""
    return first_word(c, *ACTIVATIONS) not in UNGATED


def has_biases(c: Config) -> bool:
    """Return whether all projections have biases, as in GPT-2 if no key says it."""
    if any_true(c, *ALL_BIASES) or c.get("no_bias") is False:
        return True
    has_key = c.has("bias", "attention_bias", "mlp_bias", "no_bias", *QKV_BIAS, *ALL_BIASES)
    return has_layer_norms(c) and not is_gated(c) and not has_key


def has_attention_bias(c: Config) -> bool:
    """Return whether the projections of attention have biases."""
    return any_true(c, "attention_bias", "bias") or has_biases(c)


def has_qkv_bias(c: Config) -> bool:
    """Return whether queries, keys and values have biases."""
    return any_true(c, *QKV_BIAS) or has_attention_bias(c)


def has_ffn_bias(c: Config) -> bool:
    """Return whether the FFN has biases."""
    if any_true(c, "mlp_bias") or (any_true(c, "bias") and has_layer_norms(c)):
        return True
    return has_biases(c)


def has_qk_norm(c: Config) -> bool:
    """Return whether queries and keys have a norm per head."""
    return any_true(c, *QK_NORMS)


def shared_width(c: Config) -> int:
    """Return the width of all shared experts: as the file gives it, or their number times one."""
    if c.has(*SHARED):
        return c.size(next(key for key in SHARED if c.has(key)), minimum=0)
    own_key = "moe_shared_expert_intermediate_size"
    count = c.size("n_shared_experts", 0, minimum=0)
    return count and count * c.size(own_key if c.has(own_key) else "moe_intermediate_size")


def check_limit(attention: Reader) -> Reader:
    """Return the reader of attention with a window or a chunk.

    Raises:
        UserError: The limit is on latents, or the window is missing.
    """

    def read(c: Config) -> tuple[Any, ...]:
        if c.has("kv_lora_rank"):
            text = "a window over latents is not read by the general rules"
            raise c.fail("sliding_window", text)
        if c.layer_type == SLIDING and not c.has("sliding_window"):
            text = "is missing, and layer_types names layers with a window"
            raise c.fail("sliding_window", text, "Add --set sliding_window=TOKENS")
        return attention(c)

    return read


def has_head_bias(c: Config) -> bool:
    """Return whether the LM head has a bias."""
    return any_true(c, "lm_head_bias")


def window_order(c: Config) -> list[str]:
    """Return the types of layers if the file has no list of them.

    A list of windows has an entry for each layer.
    """
    if isinstance(c.raw("sliding_window"), list):
        return [SLIDING] * c.layers
    return windowed("use_sliding_window | True")(c)


def position_rows(c: Config) -> int:
    """Return the rows of a table of learned positions."""
    kind = first_word(c, "position_embedding_type")
    return c.size("max_position_embeddings") if kind in ("learned", "absolute") else 0
