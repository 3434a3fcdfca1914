"""The share of one of several GPUs: heads and columns by tp, layers by pp, sequences by dp, experts by ep, tokens by dcp."""

import msgspec
import pytest
from conftest import Run
from specs import grouped, latent, of_kinds, sparse, stack

from kvcalc import Layer, Model, Parallelism, UserError, cache_size, load_model, weight_bytes
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.model.pipeline import stages

ROW = 2 * 16 * 2  # K and V of one head of 16 in bf16


def stored(model: Model, batch: int = 1, **ranks: int) -> int:
    return cache_size(model, 100, batch, parallelism=Parallelism(**ranks)).stored


def held(model: Model, **ranks: int) -> int:
    return weight_bytes(model, parallelism=Parallelism(**ranks))


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_kv_heads_divide_and_then_replicate(tp: int, heads: int) -> None:
    assert stored(stack(grouped(heads=16, groups=4), layers=3), tp=tp) == 3 * 100 * heads * ROW


@pytest.mark.parametrize("tp", [2, 8])
def test_latents_and_index_keys_replicate(tp: int) -> None:
    for mixer in (latent(heads=8), sparse(heads=8)):
        model = stack(mixer)
        assert cache_size(model, 100, parallelism=Parallelism(tp=tp)) == cache_size(model, 100)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_of_the_weights_sum_to_the_whole_and_what_is_replicated(tp: int) -> None:
    """4 KV heads: from tp 8 on, K and V projections are on two ranks each. Norms and row-parallel biases are on all ranks."""
    biased = grouped(heads=8, groups=4, q_bias=True, k_bias=True, o_bias=True)
    model = stack(biased, layers=2, ffn=128)
    norms, o_bias, key_copies = (2 * 2 + 1) * 64, 2 * 64, max(tp // 4, 1)
    kv = 2 * (2 * 64 * 64 + 64)  # k and v [64, 4·16], the bias of k
    repeated = 2 * ((tp - 1) * (norms + o_bias) + (key_copies - 1) * kv)
    assert tp * held(model, tp=tp) == held(model) + repeated


def test_embedding_and_head_split_over_a_padded_vocabulary() -> None:
    model = stack(grouped(), vocab_size=1001)
    whole, half = (msgspec.structs.replace(model, vocab_size=v) for v in (1001, 501))
    other = held(stack(grouped(), vocab_size=1000), tp=2) - 2 * 2 * 500 * 64
    assert held(whole, tp=2) == other + 2 * 2 * 501 * 64
    assert held(half) < held(whole)


def test_published_models_on_eight_gpus(kvcalc: Run) -> None:
    """Llama-3.1-70B: each GPU has one of 8 KV heads. DeepSeek-V3: each GPU has the whole latent."""
    llama, deepseek = kvcalc("size llama-3.1-70b deepseek-v3 --tp 8 --context 8k --format json").records
    assert llama["kv_cache_bytes"] == 2 * 80 * 1 * 128 * 2 * 8192
    assert deepseek["kv_cache_bytes"] == 61 * 576 * 2 * 8192
    assert llama["gpus"] == deepseek["gpus"] == 8


@pytest.mark.parametrize(
    ("line", "divisors"),
    [
        ("size qwen2.5-7b --tp 3", "1, 2, 4, or --pp 3"),  # 28 query heads, 4 KV heads
        ("size llama-3.1-8b --tp 64", "1, 2, 4, 8, 16, 32"),  # KV heads replicate, query heads do not
        ("size gpt-oss-20b --dp 7", "1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16 …"),  # the experts' 2880 columns
        ("size deepseek-v3 --dp 5 --ep 5", "1, 2, 4, 8, 16, 32, 64, 128, 256"),
    ],
)
def test_sizes_that_do_not_divide_name_those_that_do(kvcalc: Run, line: str, divisors: str) -> None:
    code, out, err = kvcalc(line)
    assert (code, out) == (2, "")
    assert f"Use one of {divisors}" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("size llama-3.1-8b --pp 33", "33 exceeds the 32 layers"),
        ("size llama-3.1-8b --tp 0", "tp '0'"),
        ("size llama-3.1-8b --dp -1", "dp -1"),
        ("size deepseek-v3 --tp 8 --ep 3", "ep 3 does not divide tp·dp = 8"),
        ("size deepseek-v3 --tp 8 --dcp 3", "3 does not divide tp 8"),
        ("size deepseek-v3 --tp 8 --enable-expert-parallel --ep 4", "use either"),
    ],
)
def test_impossible_ranks(kvcalc: Run, line: str, said: str) -> None:
    code, out, err = kvcalc(line)
    assert (code, out) == (2, "")
    assert said in err


def test_data_parallel_ranks_divide_the_sequences_rounded_up() -> None:
    model = stack(grouped())
    assert [stored(model, 10, dp=n) for n in (1, 2, 3, 4, 10, 20)] == [n * 100 * 2 * ROW for n in (10, 5, 4, 3, 1, 1)]
    assert held(model, dp=4) == held(model)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [(8, 1, [8]), (8, 2, [4, 4]), (10, 4, [2, 3, 3, 2]), (61, 4, [15, 15, 16, 15]), (7, 7, [1] * 7), (5, 3, [2, 2, 1])],
)
def test_pipeline_stages_get_equal_shares_and_the_last_the_fewest(layers: int, pp: int, sizes: list[int]) -> None:
    found = stages(stack(grouped(), layers=layers), pp)
    assert [len(s.order) for s in found] == sizes


def test_the_fullest_stage_holds_the_most_weights_and_cache_together() -> None:
    """A wide FFN over a window of 10, then a narrow one over all tokens, whose stage has the final norm too: the first stage has
    2·(3·64·(8192 − 128) − 64) = 3,096,448 bytes more of weights, which (24,201 − 10) rows of 128 bytes are.
    """
    near, full = (grouped(sliding_window=10), Dense(intermediate_size=8192)), (grouped(), Dense(intermediate_size=128))
    model = of_kinds({"near": Layer(parts=near), "full": Layer(parts=full)}, layers=2, pattern=("near", "full"))
    halves = Parallelism(pp=2)
    for context, rows in ((24_201, 10), (24_202, 24_202)):
        assert cache_size(model, context, parallelism=halves).stored == rows * 2 * ROW
    lighter = weight_bytes(model, parallelism=halves, context=24_202)
    assert held(model, pp=2) - lighter == 3_096_448
    middle = weight_bytes(load_model("gpt2"), parallelism=Parallelism(pp=5), batch_size=10**6)
    assert middle == 3 * 2 * (12 * 768**2 + 13 * 768)  # three layers, whose cache of one token exceeds the embedding


def moe_model() -> Model:
    moe = Moe(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    return of_kinds({"moe": Layer(parts=(grouped(heads=8, groups=8), moe), norms=0)}, layers=1, final_norm=False)


@pytest.mark.parametrize(
    ("ranks", "attention", "experts"),
    [
        ({}, 1, 1),
        ({"tp": 4}, 4, 4),  # every expert's columns over 4
        ({"tp": 4, "ep": 4}, 4, 4),  # 2 whole experts each
        ({"tp": 2, "dp": 2}, 2, 4),  # without ep the experts' columns spread over tp·dp
        ({"tp": 2, "dp": 2, "ep": 2}, 2, 4),  # 4 experts each, columns over 2
        ({"dp": 4, "ep": 4}, 1, 4),
        ({"tp": 4, "ep": 2}, 4, 4),
    ],
)
def test_experts_spread_over_tp_times_dp(ranks: dict[str, int], attention: int, experts: int) -> None:
    heads_and_columns = 4 * 64 * 128 + 3 * 64 * 32 + 2 * 1000 * 64  # attention, the shared expert, embedding and head
    routed, router = 8 * 3 * 64 * 32, 64 * 8
    assert held(moe_model(), **ranks) == 2 * (heads_and_columns // attention + routed // experts + router)


@pytest.mark.parametrize("dcp", [2, 4, 8])
def test_decode_context_parallel_spreads_the_tokens_of_a_replicated_cache(dcp: int) -> None:
    """The latents of 100 tokens on 8 ranks, in dcp shares."""
    model = stack(latent(heads=8))
    assert stored(model, tp=8, dcp=dcp) == -(-100 // dcp) * (32 + 8) * 2
    assert stored(stack(grouped(heads=8, groups=1)), tp=8, dcp=dcp) == -(-100 // dcp) * ROW


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_ranks_hold_the_whole_cache_however_it_is_split(groups: int) -> None:
    """tp ranks together store at least one copy of every row, with and without dcp."""
    model = stack(grouped(heads=8, groups=groups))
    for dcp in (d for d in (1, 2, 4) if d * groups <= 8):
        assert 8 * stored(model, tp=8, dcp=dcp) >= stored(model)
    with pytest.raises(UserError, match=f"{groups} KV heads"):
        stored(model, tp=8, dcp=16 // groups)
