"""The general rules for a decoder whose model type is not known: standard keys in their standard
sense.

What the file does not say is taken as most decoders of its kind have it: after Llama (RMS norms, a
gated FFN, no biases) or, where it names LayerNorm's epsilon and an activation that gates nothing,
after GPT-2. What comes out is marked as ≈.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, when
from kvcalc.library.huggingface.layer_types import (
    SLIDING,
    typed,
    windowed,
)
from kvcalc.library.huggingface.shapes import (
    after_first,
    by_type,
    dense,
    grouped,
    latent,
    moe,
    pick,
    stepped,
)
from kvcalc.library.huggingface.types import Type

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVATIONS = [
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "activation",
    "activation_type",
]
_UNGATED = [
    "gelu",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "relu2",
    "relu_squared",
    "gelu_python",
]
_EPSILONS = ["layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon", "ln_eps"]
_QKV_BIAS = ["qkv_bias", "use_qkv_bias", "add_qkv_bias"]
_EVERY_BIAS = ["use_bias", "add_bias_linear", "include_bias"]
_QK_NORMS = ["use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"]
_SHARED = ["shared_expert_intermediate_size", "shared_intermediate_size"]


def _word(c: Config, *keys: str) -> str:
    """The first of these keys that is a text, in small letters."""
    return next((value.lower() for key in keys if isinstance(value := c.get(key), str)), "")


def _on(c: Config, *keys: str) -> bool:
    """Whether one of them is true; all of them are asked for, so that none is left unread."""
    given = [c.get(key) for key in keys]
    return any(value is True for value in given)


def _layer_norms(c: Config) -> bool:
    """Whether norms are LayerNorms: as the file says, else by whose epsilon it gives."""
    said = _word(c, "norm_type", "layer_norm_type", "normalization_type")
    if "rms" in said or _on(c, "rmsnorm", "use_rmsnorm", "use_rms_norm"):
        return False
    return "layer" in said or (c.has(*_EPSILONS) and not c.has("rms_norm_eps"))


def _gated(c: Config) -> bool:
    return _word(c, *_ACTIVATIONS) not in _UNGATED


def _like_gpt(c: Config) -> bool:
    """Return whether a file without keys for biases has biases: with LayerNorms and plain FFNs."""
    has_key = c.has("bias", "attention_bias", "mlp_bias", "no_bias", *_QKV_BIAS, *_EVERY_BIAS)
    return _layer_norms(c) and not _gated(c) and not has_key


def _every_bias(c: Config) -> bool:
    return _on(c, *_EVERY_BIAS) or c.get("no_bias") is False or _like_gpt(c)


def _attention_bias(c: Config) -> bool:
    return _on(c, "attention_bias", "bias") or _every_bias(c)


def _ffn_bias(c: Config) -> bool:
    return _on(c, "mlp_bias") or (_on(c, "bias") and _layer_norms(c)) or _every_bias(c)


def _shared(c: Config) -> int:
    """Shared experts: their width in all, or how many there are of one width."""
    if c.has(*_SHARED):
        return c.size(next(key for key in _SHARED if c.has(key)), minimum=0)
    own = "moe_shared_expert_intermediate_size"
    count = c.size("n_shared_experts", 0, minimum=0)
    return count and count * c.size(own if c.has(own) else "moe_intermediate_size")


_GROUPED = grouped(
    _attention_bias,
    qkv_bias=lambda c: _on(c, *_QKV_BIAS) or _attention_bias(c),
    qk_norm=when(lambda c: _on(c, *_QK_NORMS), "head"),
)


def _latent(c: Config) -> bool:
    return c.has("kv_lora_rank")


def _limited(c: Config) -> tuple[Any, ...]:
    """Return attention with a window or a chunk. Raises UserError for a window over latents."""
    if _latent(c):
        raise c.fail("sliding_window", "a window over latents is not read by the general rules")
    if c.layer_type == SLIDING and not c.has("sliding_window"):
        text = "is missing, and layer_types names layers with a window"
        raise c.fail("sliding_window", text, "Add --set sliding_window=TOKENS")
    return _GROUPED(c)


def _by_window(c: Config) -> list[str]:
    """Return the types of layers that no list names: a list of windows has its own entry for each
    layer."""
    if isinstance(c.raw("sliding_window"), list):
        return [SLIDING] * c.layers
    return windowed("use_sliding_window | True")(c)


_MOE = moe(" | ".join(_EXPERTS), shared=_shared)
_DENSE = dense(gated=_gated, bias=_ffn_bias)

GENERAL = Type(
    by_type(
        full_attention=pick(_latent, latent(), _GROUPED),
        sliding_attention=_limited,
        chunked_attention=_limited,
    ),
    pick(
        lambda c: c.has(*_EXPERTS),
        pick(
            lambda c: c.has("decoder_sparse_step") or c.has("mlp_only_layers"),
            stepped(_MOE, _DENSE),
            after_first("(first_k_dense_replace | 0)", _MOE, _DENSE, "moe_layer_freq"),
        ),
        _DENSE,
    ),
    typed(_by_window),
    norm=lambda c: "layer" if _layer_norms(c) else "rms",
    model={
        "lm_head_bias": lambda c: _on(c, "lm_head_bias"),
        "position_embeddings": lambda c: (
            c.size("max_position_embeddings")
            if _word(c, "position_embedding_type") in ("learned", "absolute")
            else 0
        ),
    },
    spellings={
        "vocab_size": ("padded_vocab_size",),
        "num_experts": ("num_local_experts", "n_routed_experts"),
        "head_dim": ("kv_channels", "attention_head_dim", "hidden_size_per_head"),
        "tie_word_embeddings": (
            "weight_tying",
            "share_input_output_layers",
            "tie_embedding",
        ),
    },
)
