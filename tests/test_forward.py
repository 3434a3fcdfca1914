"""Passes over all kinds of batches: mixed, chunked, padded, drafted; experts; several GPUs; all kinds of attention; formats."""

import numpy as np
import pytest
from conftest import unfused
from specs import csa, grouped, latent, of_kinds, stack

from kvcalc import Batch, Cost, Layer, Model, Operator, Parallelism, Precision, Sequences, UserError, forward, load_model, total
from kvcalc.layers.feed_forward import Moe, Projections
from kvcalc.layers.recurrent import GatedDeltaNet

E = 2


def named(model: Model, batch: Batch, **options: object) -> dict[str, Operator]:
    found = {o.name: o for o in unfused(forward(model, batch, **options))}  # type: ignore[arg-type]
    assert all(o.cost.flops >= 0 and o.cost.bytes >= 0 for o in found.values())
    return found


def group(count: int, new: int, past: int) -> Sequences:
    return Sequences(count, new, past)


def pass_of(*groups: tuple[int, int, int]) -> Batch:
    return Batch(tuple(group(*g) for g in groups))


# ---- batches


def test_verifying_a_draft_of_four_is_five_new_tokens() -> None:
    """Five queries read the cache once: 5·past + 15 pairs."""
    found = named(load_model("llama-2-7b"), pass_of((8, 5, 1000)), all_positions=True)
    assert found["attention"].cost.flops == 4 * 8 * (5 * 1000 + 15) * 4096
    assert found["attention"].cost.cache_read_bytes == 8 * 1005 * 2 * 4096 * 2
    assert found["attention"].cost.cache_write_bytes == 8 * 5 * 2 * 4096 * 2
    assert found["qkv"].cost.flops == 2 * 40 * 4096 * 12_288
    assert found["lm_head"].cost.flops == 2 * 40 * 4096 * 32_000  # every position is verified


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: Batch(()), "at least one group"),
        (lambda: pass_of((0, 1, 0)), "count 0"),
        (lambda: pass_of((1, 0, 0)), "new 0"),
        (lambda: pass_of((1, 1, -1)), "past -1"),
        (lambda: Batch.decode(0), "context 0 is outside 1"),
        (lambda: Batch.decode(4096.0), "neither a whole number nor an array"),
        (lambda: pass_of((True, 1, 0)), "count True"),
        (lambda: Batch.prefill(10**12 + 1), "outside 1 to 1,000,000,000,000"),
        (lambda: Batch.prefill(np.array([1.0, float("nan")])), "whole numbers"),
        (lambda: Batch.prefill(np.array([1.0, float("inf")])), "whole numbers"),
        (lambda: Batch.prefill(np.array([1.5, 2.0])), "whole numbers"),
        (lambda: Batch.prefill(np.array(["many"])), "whole numbers"),
        (lambda: Batch((group(np.ones(2), np.ones(3), np.ones(2)),)), "do not broadcast"),
    ],
)
def test_impossible_batches(bad: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        bad()  # type: ignore[operator]


# ---- mixture of experts


def moe(experts: int = 160, top: int = 6, width: int = 10) -> Model:
    part = Moe(num_experts=experts, num_experts_per_tok=top, moe_intermediate_size=width)
    return of_kinds({"moe": Layer(parts=(grouped(), part))}, layers=1)


def distinct_of(name: str, model: Model, tokens: int) -> int:
    return named(model, pass_of((tokens, 1, 0)))[name].cost.weight_bytes  # type: ignore[return-value]


def distinct(model: Model, tokens: int) -> tuple[int, int]:
    return distinct_of("experts_gate_up", model, tokens), distinct_of("experts_down", model, tokens)


def test_one_token_reads_exactly_its_top_k() -> None:
    for experts, top in ((3, 1), (160, 6), (256, 8), (384, 8), (60, 4)):
        assert distinct(moe(experts, top), 1) == (top * 2 * 640 * E, top * 640 * E)


def test_expected_experts_round_half_up_once_for_each_product() -> None:
    """2 of 4 experts for 2 tokens: 3 of 4 are reached. 1 of 3 experts for 2 tokens: 5/3, times 2560 bytes is 4266.67, times
    1280 is 2133.3."""
    assert distinct(moe(4, 2), 2) == (3 * 2 * 640 * E, 3 * 640 * E)
    assert distinct(moe(3, 1, width=10), 2) == (4267, 2133)
    # 64 experts of one fp32 weight, half of them a token: 256 · (1 − 2^−T) is 255.5 for 9 tokens
    one = Moe(num_experts=64, num_experts_per_tok=32, moe_intermediate_size=1, gated=False)
    tiny = of_kinds({"moe": Layer(parts=(one,))}, layers=1, hidden_size=1, dtype="fp32")
    assert [distinct_of("experts_down", tiny, t) for t in (7, 8, 9, 10)] == [254, 255, 256, 256]


def test_expected_experts_of_a_gpu() -> None:
    """2 of 8 for 3 tokens: 8 · (1 − 0.75³) = 4.625 in total, a quarter of them on each of 4 ranks. One token reaches 2."""

    def found(tokens: int, ranks: Parallelism) -> list[object]:
        operators = forward(moe(8, 2, width=16), pass_of((tokens, 1, 0)), parallelism=ranks)
        return [o.experts for o in operators if o.experts]

    assert found(3, Parallelism()) == [4.625]
    assert found(3, Parallelism(tp=4, ep=4)) == [4.625 / 4]
    assert found(1, Parallelism()) == [2.0]


def test_experts_flops_are_of_the_tokens_routed_not_of_the_experts_read() -> None:
    found = named(moe(), pass_of((7, 3, 10)))
    assert found["router"].cost.flops == 2 * 21 * 64 * 160
    assert found["experts_gate_up"].cost.flops == 2 * 21 * 6 * 64 * 20
    assert found["experts_down"].cost.flops == 2 * 21 * 6 * 10 * 64
    assert found["experts_gate_up"].cost.activation_bytes == found["experts_down"].cost.activation_bytes == 21 * 64 * E
    assert found["experts_activation"].cost.activation_bytes == 0  # between the products nothing leaves the chip


# ---- the LM head


def test_lm_head_runs_for_last_positions_or_for_all() -> None:
    model = stack(grouped(), vocab_size=1000, tie_word_embeddings=True)
    last, every = (named(model, Batch.prefill(10, 3), all_positions=a) for a in (False, True))
    assert last["lm_head"].cost == Cost(2 * 3 * 64 * 1000, 0, 64 * 1000 * E, activation_bytes=3 * 1064 * E)  # tied, and read
    assert every["lm_head"].cost.flops == 10 * last["lm_head"].cost.flops
    assert every["lm_head"].cost.weight_bytes == last["lm_head"].cost.weight_bytes
    assert every["sampling"].cost.vector_flops == 5 * 30 * 1000
    assert last["final_norm"].cost.vector_flops == 4 * 3 * 64


# ---- several GPUs


def test_tensor_parallel_collectives() -> None:
    """Two all-reduces per layer, and one after the embedding: 2·(n − 1)/n of [T, D] over each link. Logits are gathered."""
    found = forward(stack(grouped(), layers=5), Batch.decode(100, 3), parallelism=Parallelism(tp=4))
    each = 2 * 3 * 3 * 64 * E / 4
    reduces = [(o.layer, o.count, o.cost) for o in found if o.name == "all_reduce"]
    assert reduces == [("", 1, Cost(network_bytes=each)), *[("k0", 5, Cost(network_bytes=each))] * 2]
    (gather,) = [o for o in found if o.name == "all_gather_logits"]
    assert gather.cost == Cost(network_bytes=3 * 3 * 250 * E)
    assert not [o for o in forward(stack(grouped()), Batch.decode(100, 3)) if o.kind == "network"]


def test_data_parallel_ranks_take_their_share_of_every_group_rounded_up() -> None:
    model = stack(grouped())
    found = forward(model, pass_of((10, 1, 99), (1, 7, 0)), parallelism=Parallelism(dp=4))
    assert found == forward(model, pass_of((3, 1, 99), (1, 7, 0)))


def test_expert_parallel_ranks() -> None:
    """160 experts, 6 per token. 4 ranks have 40 experts and 2 tokens each, so 8·6/4 = 12 rows on the reached of 40 experts."""
    found = named(moe(), pass_of((8, 1, 99)), parallelism=Parallelism(dp=4, ep=4))
    assert found["experts_down"].cost.flops == 2 * 12 * 10 * 64
    assert found["experts_down"].cost.weight_bytes == int(40 * 640 * E * (1 - (1 - 6 / 160) ** 8) + 0.5)
    assert found["router"].cost.flops == 2 * 2 * 64 * 160
    assert (found["all_to_all"].count, found["all_to_all"].cost) == (2, Cost(network_bytes=2 * 6 * 64 * E * 3 / 4))


def test_experts_of_data_parallel_ranks_without_ep_share_columns_and_gather_tokens() -> None:
    found = named(moe(width=12), pass_of((8, 1, 99)), parallelism=Parallelism(dp=4))
    assert found["experts_gate_up"].cost.flops == 2 * 8 * 6 * 64 * 2 * 3
    assert [found[n].cost for n in ("all_gather_tokens", "reduce_scatter")] == [Cost(network_bytes=2 * 64 * E * 3)] * 2


def test_decode_context_ranks_read_their_share_of_the_tokens() -> None:
    """A rank reads latent rows of 40 elements for 100 of 200 tokens. The ranks exchange queries of 40 and outputs of 32 for
    2 heads."""
    found = named(stack(latent()), Batch.decode(200, 3), parallelism=Parallelism(tp=4, dcp=2))
    assert found["attention"].cost.cache_read_bytes == 3 * 100 * 40 * E
    assert found["attention"].cost.network_bytes == 3 * 2 * (40 + 32) * E
    assert found["attention"].cost.flops == 2 * 600 * 2 * 72
    new = named(stack(latent()), pass_of((1, 3, 197)), parallelism=Parallelism(tp=4, dcp=2), mla_form="absorbed")
    assert new["attention"].cost.cache_write_bytes == 2 * 40 * E  # two of three rows on the fullest rank


@pytest.mark.parametrize("ranks", [{"tp": 3}, {"pp": 2}, {"dp": 3, "ep": 3}])
def test_ranks_that_do_not_divide(ranks: dict[str, int]) -> None:
    with pytest.raises(UserError):
        forward(moe(), Batch.decode(10), parallelism=Parallelism(**ranks))


# ---- attention that is not plain


def attention(model: Model, batch: Batch) -> Cost:
    return named(model, batch)["attention"].cost


@pytest.mark.parametrize(
    ("part", "pairs", "rows"),
    [
        (grouped(sliding_window=10), 10 * 4, 10 - 1 + 4),
        (grouped(sliding_window=10, sink_tokens=2), 12 * 4, 12 - 1 + 4),
        (grouped(cache_budget=10), 10 * 4, 10 - 1 + 4),
        (grouped(attention_chunk_size=64), 37 + 38 + 39 + 40, 40),  # tokens 65 … 104 are the chunk that they stand in
        (grouped(), 101 + 102 + 103 + 104, 104),
    ],
)
def test_four_tokens_behind_a_hundred(part: object, pairs: int, rows: int) -> None:
    cost = attention(stack(part), pass_of((1, 4, 100)))  # type: ignore[arg-type]
    assert cost.flops == 4 * pairs * 8 * 16
    assert cost.cache_read_bytes == rows * 2 * 2 * 16 * E
    assert cost.cache_write_bytes == 4 * 2 * 2 * 16 * E


def test_attention_that_sees_what_comes_after() -> None:
    """No token can be cached. All 10 × 10 pairs count."""
    found = named(stack(grouped(cached=False)), Batch.prefill(10))
    assert found["attention"].cost.flops == 4 * 100 * 8 * 16
    assert found["attention"].cost.cache_bytes == 0


def test_compressed_attention_reads_a_window_and_top_of_the_blocks() -> None:
    """V4-Flash's CSA at 8192 tokens: 128 rows of the window and 512 of 2048 entries, rows of 512, and 2048 index keys of 128."""
    found = named(stack(csa(), hidden_size=4096), Batch.decode(8192))
    assert found["attention"].cost.flops == 4 * (128 + 512) * 64 * 512
    assert found["attention"].cost.cache_read_bytes == (128 + 512) * 512 * E
    assert found["attention"].cost.cache_write_bytes == 2 * 512 * E  # its own row, and the entry that it completes
    assert found["indexer"].cost.flops == 2 * 2048 * 64 * 128
    assert found["indexer"].cost.cache_read_bytes == 2048 * 128 * E
    # the block is complete: 3 rows of the unfinished one and 4 of the overlap are read, with KV and gate
    assert found["compress"].cost.cache_read_bytes == (3 * 4 * 640 + 4 * 2 * 640) * E
    assert found["compress"].cost.cache_write_bytes == 4 * 2 * 640 * E
    # in: key-values and gates of two series for one token; out: one entry and its index key
    assert found["compress"].cost.activation_bytes == (2 * 2 * 640 + 640) * E


def test_gated_delta_net_scans_a_state_of_constant_size() -> None:
    """4 value heads of 16 × 8 in fp32, read and written. 6 FLOPs per element and token: k·S, the update, q·S."""
    part = GatedDeltaNet(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8)
    decode, prefill = (named(stack(part), b)["scan"].cost for b in (Batch.decode(10_000, 3), Batch.prefill(500)))
    state, columns = 4 * 16 * 8, 2 * 2 * 16 + 4 * 8
    assert decode.flops == 3 * 6 * state
    assert decode.cache_read_bytes == decode.cache_write_bytes == 3 * (state * 4 + 3 * columns * E)
    assert prefill.flops == 500 * 6 * state
    assert prefill.cache_read_bytes == state * 4 + 3 * columns * E  # once, whatever the length
    projected = 2 * 2 * 16 + 2 * 4 * 8 + 2 * 4  # q and k, v and gate, step and decay
    assert decode.activation_bytes == 3 * (projected + 32) * E
    found = named(stack(part), Batch.decode(10_000, 3))
    assert found["in_proj"].cost.flops == 2 * 3 * 64 * projected
    assert found["out_proj"].cost.flops == 2 * 3 * 32 * 64
    assert decode.weight_bytes == (4 * columns + 2 * 4 + 8) * E  # convolution, decay and step bias, norm


def test_norms_sinks_and_convolutions_inside_a_part_are_read_with_it() -> None:
    found = named(stack(grouped(qk_norm="head", sinks=True)), Batch.decode(5))
    assert found["rope"].cost.weight_bytes == (16 + 16 + 8) * E
    scale = of_kinds({"k": Layer(parts=(Projections(vectors={"scale": 3}),))}, layers=2)
    assert [(o.count, o.cost.weight_bytes) for o in forward(scale, Batch.decode(5)) if o.name == "scale"] == [(2, 3 * E)]


# ---- formats


@pytest.mark.parametrize(
    ("quantization", "bits", "dtype"),
    [
        ("fp8", 8, "fp8"),
        ("awq", 4, "fp16"),
        ("int4", 4, "fp16"),
        ("mxfp4", 4, "fp4"),
        ("mxfp4_weight_only", 4, "fp16"),
        ("int8_weight_only", 8, "fp16"),
    ],
)
def test_stored_small_computed_as_before(quantization: str, bits: int, dtype: str) -> None:
    """Weight bytes fall, FLOPs are equal. W8A8 computes in fp8, 4-bit weights and activations in fp4."""
    model, batch = load_model("llama-2-7b"), Batch.decode(4096, 4)
    plain, small = (named(model, batch, precision=Precision(quantization=q)) for q in ("", quantization))
    for name, o in small.items():
        assert o.cost._replace(weight_bytes=0) == plain[name].cost._replace(weight_bytes=0)
    ratio = plain["qkv"].cost.weight_bytes / small["qkv"].cost.weight_bytes
    assert 16 / bits * 0.9 < ratio <= 16 / bits
    assert small["qkv"].dtype == dtype
    assert small["attention"].dtype == small["lm_head"].dtype == "fp16"
    assert small["lm_head"].cost == plain["lm_head"].cost


@pytest.mark.parametrize(("dtype", "row"), [("bf16", 256), ("fp8", 128), ("int8", 128), ("int4", 64 + 8), ("fp32", 512)])
def test_cache_dtype_changes_the_cache_alone(dtype: str, row: int) -> None:
    model, batch = load_model("llama-2-7b"), Batch.decode(4096)
    plain, other = (named(model, batch, precision=Precision(kv_cache_dtype=d)) for d in ("auto", dtype))
    assert other["attention"].cost.cache_read_bytes == 4096 * 2 * 32 * row
    assert other["attention"].cost.flops == plain["attention"].cost.flops
    assert {n: o for n, o in other.items() if n != "attention"} == {n: o for n, o in plain.items() if n != "attention"}


# ---- whole models

WITH_EVERY_PART = (
    "deepseek-v3.2", "deepseek-v4-flash", "glm-5.2", "gpt-oss-20b", "gemma-3n-e4b", "jamba-v0.1", "minimax-m3", "kimi-k2",
    "nemotron-h-8b", "qwen3-next-80b-a3b", "recurrentgemma-2b", "zamba2-7b", "command-r-plus", "lfm2-1.2b", "falcon-h1-7b",
    "llama-4-scout", "gpt2", "hunyuan-large", "phi-3.5-moe", "minimax-m1",
)  # fmt: skip


@pytest.mark.parametrize("name", WITH_EVERY_PART)
def test_a_lone_token_multiplies_each_active_matrix_once_and_reads_every_active_byte(name: str) -> None:
    """No weight is left out or read twice, in any kind of layer: 2 FLOPs per weight, and its bytes. Tables are read by row.

    A shared block counts for each layer that runs it. A tied table is the LM head. Experts beyond top-k do not count.
    """
    model = load_model(name)
    found = forward(model, Batch.decode(1), Precision("bf16"), mla_form="absorbed")
    flops = weight_bytes = 0
    for kind, count in (("", 1), *model.counts.items()):
        for w in (*model.layer_weights(kind), *model.shared_weights(kind)) if kind else model.outer_weights:
            if w.kind == "table":
                head = w.name == "embedding" and model.tie_word_embeddings
                weight_bytes += (1 + w.inputs * head) * w.outputs * E
                flops += 2 * w.inputs * w.outputs * head
            else:
                weight_bytes += count * w.active_elements * E
                flops += count * 2 * (w.active or w.copies) * w.inputs * w.outputs * (w.kind == "matrix")
    assert total(found).weight_bytes == weight_bytes
    assert total(o for o in found if o.kind in ("gemm", "experts")).flops == flops
