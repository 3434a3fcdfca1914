"""Models with latent, sparse or compressed attention, after transformers' modelling code."""

from kvcalc.attention import Sparse
from kvcalc.huggingface.config import Config
from kvcalc.huggingface.fields import K
from kvcalc.huggingface.patterns import after_first, typed
from kvcalc.huggingface.shapes import both, compressed, dense, latent, moe, projections, shared_experts
from kvcalc.huggingface.types.entry import Type

EXPERTS = moe(K("n_routed_experts", "num_local_experts"), shared=shared_experts())
DEEPSEEK_V3 = Type(latent(K("attention_bias")), after_first("first_k_dense_replace", EXPERTS, dense()))


def has_indexer(c: Config) -> bool:
    """Whether this layer chooses for itself: the file's list, else every index_topk_freq-th after an offset."""
    kinds = c.items("indexer_types")
    if kinds is not None and c.layer < len(kinds):
        return bool(kinds[c.layer] == "full")
    return True


def _streams(c: Config) -> dict[str, tuple[int, ...]]:
    mult = c.size("hc_mult")
    mix = mult * c.size("hidden_size"), (2 + mult) * mult
    return {"attention_streams": mix, "ffn_streams": mix}


DEEPSEEK_V4 = Type(
    both(
        compressed(
            compress_ratio=lambda c: c.nested("compress_rates").get(c.layer_type, 0),
            overlap=lambda c: c.layer_type == "compressed_sparse_attention",
            index_topk=lambda c: c.get("index_topk") if c.layer_type == "compressed_sparse_attention" else 0,
            index_n_heads=K("index_n_heads"),
            index_head_dim=K("index_head_dim"),
        ),
        projections(_streams, lambda c: {"streams": 2 * ((2 + c.size("hc_mult")) * c.size("hc_mult") + 3)}),
    ),
    moe(K("n_routed_experts", "num_local_experts"), shared=shared_experts()),
)

LATENTS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3.variant(mixer=latent(K("attention_bias"), spec=Sparse)),
    "glm_moe_dsa": DEEPSEEK_V3.variant(mixer=latent(K("attention_bias"), spec=Sparse, indexer=has_indexer)),
    "deepseek_v4": DEEPSEEK_V4,
}
_ = typed
