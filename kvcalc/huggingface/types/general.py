"""The general rules for a decoder whose model type is not known: standard keys in their standard sense."""

from kvcalc.huggingface.fields import K
from kvcalc.huggingface.patterns import after_first, pick, typed, windowed
from kvcalc.huggingface.shapes import dense, grouped, latent, moe, shared_experts
from kvcalc.huggingface.types.entry import Type

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

GENERAL = Type(
    pick(
        lambda c: c.has("kv_lora_rank"),
        latent(K("attention_bias")),
        grouped(K("attention_bias"), qkv_bias=K("qkv_bias", "attention_bias")),
    ),
    pick(
        lambda c: c.has(*_EXPERTS),
        after_first("first_k_dense_replace", moe(K(*_EXPERTS), shared=shared_experts()), dense()),
        dense(bias=K("mlp_bias")),
    ),
    typed(windowed(K("use_sliding_window", default=True))),
)
