"""The general rules for a decoder whose model type is not known: standard keys in their standard sense."""

from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import K
from kvcalc.library.huggingface.patterns import after_first, by_type, pick, typed, windowed
from kvcalc.library.huggingface.shapes import dense, grouped, latent, moe, shared_experts
from kvcalc.library.huggingface.types.entry import Type

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

_GROUPED = grouped(K("attention_bias"), qkv_bias=K("qkv_bias", "attention_bias"))


def _latent(c: Config) -> bool:
    return c.has("kv_lora_rank")


def _limited(c: Config) -> tuple[Any, ...]:
    """Attention within a window or a chunk. Raises UserError beside a latent, where nothing says what the window keeps."""
    if _latent(c):
        raise c.fail("sliding_window", "a window over latents is not read by the general rules")
    return _GROUPED(c)


GENERAL = Type(
    by_type(
        full_attention=pick(_latent, latent(K("attention_bias")), _GROUPED),
        sliding_attention=_limited,
        chunked_attention=_limited,
    ),
    pick(
        lambda c: c.has(*_EXPERTS),
        after_first("first_k_dense_replace", moe(K(*_EXPERTS), shared=shared_experts()), dense()),
        dense(bias=K("mlp_bias")),
    ),
    typed(windowed(K("use_sliding_window", default=True))),
)
