"""Exact parameter counts of real models, equal to transformers' count of the causal language model on the meta device."""

import pytest
from conftest import Run
from specs import csa, grouped, hca, latent, of_kinds, sparse, stack

from kvcalc import Layer, Model, load_model
from kvcalc.layers.attention import BlockSparse
from kvcalc.layers.feed_forward import Dense, Moe, Projections
from kvcalc.model.model import Mtp

COUNTED = {
    "gpt2": 124_439_808,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-13b": 13_015_864_320,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "kimi-k2": 1_026_408_209_408,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "gemma-3-27b": 27_009_346_304,  # the text model
    "glm-5.2": 743_377_000_704,
    # Falcon-7B: 71 query heads and one KV head of 64 on 4544; FFN of 4 times the width; one norm for both; no biases
    "falcon-7b": 32 * (4544 * (71 + 2) * 64 + 4544 * 4544 + 8 * 4544 * 4544 + 2 * 4544) + 65_024 * 4544 + 2 * 4544,
    # Llama 4 Scout's text model: 16 experts and a shared one of 8192 in every layer
    "llama-4-scout": 48 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 5120 * 16 + 17 * 3 * 5120 * 8192 + 2 * 5120)
    + 2 * 202_048 * 5120
    + 5120,
}
ACTIVE = {
    "llama-3.1-8b": 8_030_261_248,
    # all but 6 of the 8 experts of each of 32 layers
    "mixtral-8x7b": 46_702_792_704 - 32 * 6 * 3 * 4096 * 14_336,
    # all but 248 of the 256 experts of each of 58 layers
    "deepseek-v3": 671_026_404_352 - 58 * 248 * 3 * 7168 * 2048,
    # the experts have biases: 124 of 128 idle in each of 36 layers, gate and up [2880, 2880], down [2880, 2880]
    "gpt-oss-120b": 116_829_156_672 - 36 * 124 * (3 * 2880 * 2880 + 3 * 2880),
    "qwen3-235b-a22b": 235_093_634_560 - 94 * 120 * 3 * 4096 * 1536,
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_of_a_preset(name: str) -> None:
    assert load_model(name).parameters == COUNTED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_of_a_preset(kvcalc: Run, name: str) -> None:
    (record,) = kvcalc(f"size {name} --format json").records
    assert record["parameters"] == COUNTED[name]
    assert record["active_parameters"] == load_model(name).active_parameters == ACTIVE[name]


D, V, F = 64, 1000, 128
BARE = 2 * V * D + D  # embedding, LM head, last norm
FFN = 3 * D * F + D  # gate, up, down and the FFN's norm


def alone(mixer: object) -> int:
    """Return the parameters of a mixer in a one-layer model, including its norm."""
    return stack(mixer).parameters - BARE - FFN  # type: ignore[arg-type]


MIXERS = [
    # q [64, 128], k and v [64, 32], o [128, 64], a norm
    (grouped(), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64),
    (grouped(q_bias=True, k_bias=True, v_bias=True, o_bias=True), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 128 + 32 + 32 + 64),
    (grouped(v_head_dim=8), 64 * 128 + 64 * 32 + 64 * 16 + 64 * 64 + 64),
    (grouped(k_is_v=True), 64 * 128 + 64 * 32 + 128 * 64 + 64),
    (grouped(kv_projection=False), 64 * 128 + 128 * 64 + 64),
    (grouped(qo_projection=False), 2 * 64 * 32 + 64),
    (grouped(qk_norm="head"), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 2 * 16),
    (grouped(qk_norm="full"), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 8 * 16 + 2 * 16),
    (grouped(qk_norm="head", qk_norm_bias=True), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 4 * 16),
    (grouped(qk_norm="head", q_norm_only=True), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 16),
    (grouped(v_norm=True), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 16),
    (grouped(sinks=True), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 8),
    (grouped(output_gate="full"), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 64 * 128),
    (grouped(output_gate="head", output_gate_bias=True), 64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 64 * 8 + 8),
    (grouped(input_size=128, output_size=32), 128 * 128 + 2 * 128 * 32 + 128 * 32 + 64),
    # q [64, 8·24], kv_down [64, 40], norm 32, kv_up [32, 8·32], o [128, 64]
    (latent(), 64 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64),
    (latent(q_lora_rank=16), 64 * 16 + 16 + 16 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64),
    (
        latent(q_lora_rank=16, qkv_bias=True, o_bias=True),
        64 * 16 + 16 + 16 + 16 * 192 + 64 * 40 + 40 + 32 + 32 * 256 + 128 * 64 + 64 + 64,
    ),
    (latent(kv_norm=False, sinks=True), 64 * 192 + 64 * 40 + 32 * 256 + 128 * 64 + 64 + 8),
    (latent(output_gate="full"), 64 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64 + 64 * 128),
    (latent(output_gate="head"), 64 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64 + 64 * 8),
    (latent(q_lora_rank=16, q_up_size=48), 64 * 16 + 16 + 48 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64),
    # MLA's, and index queries [64, 4·16] or from the query latent, key [64, 16] with a LayerNorm, head weights [64, 4]
    (sparse(), 64 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64 + 64 * 64 + 64 * 16 + 2 * 16 + 64 * 4),
    (sparse(q_lora_rank=16), 64 * 16 + 16 + 16 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64 + 16 * 64 + 64 * 16 + 32 + 64 * 4),
    # pooled by a gate [64, 16], with a bias for each of 4 positions
    (
        sparse(index_pool=4),
        64 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64 + 64 * 64 + 64 * 16 + 2 * 16 + 64 * 4 + 64 * 16 + 4 * 16,
    ),
    (
        sparse(q_lora_rank=16, index_query_from_hidden=True),
        64 * 16 + 16 + 16 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64 + 64 * 64 + 64 * 16 + 32 + 64 * 4,
    ),
    (sparse(indexer=False), 64 * 192 + 64 * 40 + 32 + 32 * 256 + 128 * 64 + 64),
    (
        BlockSparse(
            num_attention_heads=8, num_key_value_heads=2, head_dim=16,
            index_block_size=32, index_topk_blocks=4, index_n_heads=4, index_head_dim=8,
        ),
        64 * 128 + 2 * 64 * 32 + 128 * 64 + 64 + 64 * 32 + 64 * 8 + 2 * 8,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mixer", "worked"), MIXERS, ids=lambda v: getattr(v, "label", None))
def test_parameters_of_an_attention(mixer: object, worked: int) -> None:
    assert alone(mixer) == worked


def test_parameters_of_compressed_attention() -> None:
    """V4-Flash with width 4096: queries through 1024, one KV row of 512, o in 8 groups, sinks; compressors, at ratio 4 of
    two series."""
    plain = 4096 * 1024 + 1024 + 1024 * 64 * 512 + 4096 * 512 + 512 + (64 * 512) * 1024 + 8 * 1024 * 4096 + 64

    def compressor(ratio: int, columns: int, width: int) -> int:
        return 2 * 4096 * columns + ratio * columns + width  # KV and gate, a bias per position of the block, a norm

    indexer = compressor(4, 2 * 128, 128) + 1024 * 64 * 128 + 4096 * 64
    counted = {p.label: sum(w.elements for w in p.weights(4096)) for p in (csa(), hca())}
    assert counted["HCA 1:128"] == plain + compressor(128, 512, 512)
    assert counted["CSA 1:4"] == plain + compressor(4, 2 * 512, 512) + indexer


def moe(**fields: object) -> Moe:
    return Moe(**({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | fields))  # type: ignore[arg-type]


FFNS = [
    (Dense(intermediate_size=128), 3 * 64 * 128),
    (Dense(intermediate_size=128, gated=False), 2 * 64 * 128),
    (Dense(intermediate_size=128, bias=True), 3 * 64 * 128 + 2 * 128 + 64),
    (Dense(intermediate_size=128, gated=False, bias=True, down_bias=False), 2 * 64 * 128 + 128),
    (Dense(intermediate_size=128, input_size=32), 2 * 32 * 128 + 128 * 64),
    # router and 4 experts
    (moe(), 64 * 4 + 4 * 3 * 64 * 32),
    (moe(bias=True), 64 * 4 + 4 * (3 * 64 * 32 + 2 * 32 + 64)),
    (moe(gated=False), 64 * 4 + 4 * 2 * 64 * 32),
    (
        moe(shared_expert_intermediate_size=48, shared_expert_gate=True),
        64 * 4 + 4 * 3 * 64 * 32 + 3 * 64 * 48 + 64,
    ),
    (moe(moe_latent_size=16), 64 * 4 + 2 * 64 * 16 + 4 * 3 * 16 * 32),
    (moe(zero_experts=2), 64 * 6 + 4 * 3 * 64 * 32),
    # LongCat's idle experts: scored, and with gate and up matrices all the same
    (moe(zero_experts=2, zero_expert_weights=True), 64 * 6 + 4 * 3 * 64 * 32 + 2 * 2 * 64 * 32),
    (moe(router_input_norm=True, expert_scales=True, router_width=16), 16 * 4 + 64 + 4 + 4 * 3 * 64 * 32),
    (
        moe(router_bias=True, correction_bias=True),
        64 * 4 + 4 + 4 + 4 * 3 * 64 * 32,
    ),
    (Projections(matrices={"a": (64, 8), "b": (8, 64, 64)}, vectors={"c": 5}), 64 * 8 + 8 * 64 + 64 + 5),
]  # fmt: skip


@pytest.mark.parametrize(("ffn", "worked"), FFNS, ids=lambda v: type(v).__name__ if not isinstance(v, int) else "")
def test_parameters_of_a_feed_forward_part(ffn: Dense | Moe | Projections, worked: int) -> None:
    assert sum(w.elements for w in ffn.weights(64)) == worked


def test_active_experts_and_nothing_else() -> None:
    moe = Moe(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    model = of_kinds({"moe": Layer(parts=(grouped(), moe))}, layers=3)
    assert model.parameters - model.active_parameters == 3 * (8 - 2) * 3 * 64 * 32


def shape(**fields: object) -> Model:
    return stack(grouped(), layers=2, **fields)


def test_what_surrounds_the_layers() -> None:
    plain = shape().parameters
    assert shape(tie_word_embeddings=True).parameters == plain - V * D
    assert shape(position_embeddings=50).parameters == plain + 50 * D
    assert shape(norm="layer").parameters == plain + (2 * 2 + 1) * D  # a bias beside each norm's weight
    assert shape(norm="none").parameters == plain - (2 * 2 + 1) * D
    assert shape(final_norm=False).parameters == plain - D
    assert shape(embedding_norm=True).parameters == plain + D
    assert shape(lm_head_bias=True).parameters == plain + V
    assert shape(embedding_size=16).parameters == plain - 2 * V * (D - 16) + 2 * 16 * D


def test_shared_blocks_count_once_and_their_caches_every_time() -> None:
    """Zamba: one attention block, used in 4 layers."""
    from kvcalc import cache_size

    shared = Layer(shared=(grouped(), Dense(intermediate_size=F)), norms=0)
    own = Layer(parts=(grouped(), Dense(intermediate_size=F)), norms=0)
    block = 64 * 128 + 2 * 64 * 32 + 128 * 64 + 3 * D * F
    one, two, four = (
        of_kinds({"a": layer}, layers=4) for layer in (shared, Layer(shared=shared.shared, norms=0, weight_sets=2), own)
    )
    assert [m.parameters - BARE for m in (one, two, four)] == [block, 2 * block, 4 * block]
    assert cache_size(one, 100).stored == cache_size(four, 100).stored == 4 * 2 * 2 * 16 * 2 * 100


def test_multi_token_prediction_layers_stand_apart() -> None:
    plain, with_mtp = shape(), shape(mtp=Mtp(kind="k0", layers=2))
    layer = (plain.parameters - BARE) // 2
    assert with_mtp.parameters == plain.parameters
    assert with_mtp.mtp_parameters == 2 * (layer + 2 * D * D + 3 * D)
