"""The receptive field of windows through the layers, and the scores that eviction needs."""

from conftest import Run
from specs import grouped, of_kinds, sparse, stack

from kvcalc import Batch, Layer, Parallelism, Precision, forward, load_model
from kvcalc.layers.recurrent import Mamba2
from kvcalc.model.memory import eviction_score_bytes, reach_line, receptive_field
from kvcalc.planning.variants import variant


def test_mistral_reaches_as_far_as_its_paper_says() -> None:
    """arXiv 2310.06825 §2: window 4096 and 32 layers, about 131K tokens."""
    model = load_model("mistral-7b-v0.1")
    assert receptive_field(model) == 32 * 4096 == 131_072
    # a token sees itself and 4095 before it; each of 32 layers hands on 4095 further ones
    assert "131,041 where" in reach_line(model) and 1 + 32 * 4095 == 131_041


def test_windows_of_several_sizes_add_up() -> None:
    model = stack(grouped(sliding_window=100), grouped(sliding_window=30), layers=5)  # 3 of the first, 2 of the second
    assert receptive_field(model) == 3 * 100 + 2 * 30
    assert "2 × 30 + 3 × 100 = 360 tokens (356 where" in reach_line(model)


def test_one_layer_that_sees_all_takes_the_limit_away() -> None:
    for other in (grouped(), sparse(), Mamba2(num_heads=4, head_dim=8, state_size=16, conv_kernel=4, n_groups=1)):
        model = stack(grouped(sliding_window=100), other)
        assert receptive_field(model) is None
        assert "layers without a window: 1;" in reach_line(model)
    assert receptive_field(stack(grouped())) is None and reach_line(stack(grouped())) == ""


def test_a_hybrid_of_parallel_mixers_sees_as_far_as_the_farther() -> None:
    both = Layer(parts=(grouped(sliding_window=50), grouped(sliding_window=80)))
    assert receptive_field(of_kinds({"both": both}, layers=3)) == 3 * 80
    state = Mamba2(num_heads=4, head_dim=8, state_size=16, conv_kernel=4, n_groups=1)  # holds all that was
    assert receptive_field(of_kinds({"both": Layer(parts=(grouped(sliding_window=50), state))}, layers=3)) is None


def test_reach_is_printed_and_in_the_records(kvcalc: Run) -> None:
    assert "receptive field L·w: 32 × 4,096 = 131,072 tokens" in kvcalc("size mistral-7b-v0.1 --context 32k -v").joined
    assert "131,072 tokens" in kvcalc("size mistral-7b-v0.1 --explain").out
    records = kvcalc("compare llama-7b --variants mha,window:4096 --format json").records
    assert [r["receptive_field"] for r in records] == [None, 131_072]


def test_eviction_keeps_a_score_per_token_and_kv_head() -> None:
    """2 KV heads with a budget of 40: 80 scores of 2 bytes per layer and sequence; with 30 tokens only 60 scores."""
    model = variant(stack(grouped(), layers=3), "evict:40").model
    assert eviction_score_bytes(model, 1000) == 3 * 40 * 2 * 2
    assert eviction_score_bytes(model, 30, batch_size=5) == 5 * 3 * 30 * 2 * 2
    assert eviction_score_bytes(model, 1000, precision=Precision("fp32", "int8")) == 3 * 40 * 2 * 4  # not of the cache's dtype
    assert eviction_score_bytes(model, 1000, parallelism=Parallelism(2)) == 3 * 40 * 1 * 2
    assert eviction_score_bytes(stack(grouped()), 1000) == 0


def test_eviction_adds_each_query_heads_attention_and_chooses_once() -> None:
    """8 query heads over 40 tokens add 320 probabilities to 80 scores, of which the minimum is found (2 each)."""
    model = variant(stack(grouped()), "evict:40").model
    (decode,) = (o.cost for o in forward(model, Batch.decode(1000, 7)) if o.name == "eviction")
    assert decode.vector_flops == 7 * (8 * 40 + 2 * 80)
    assert (decode.activation_bytes, decode.flops, decode.cache_bytes) == (7 * 2 * 80 * 2, 0, 0)
    (prompt,) = (o.cost for o in forward(model, Batch.prefill(100)) if o.name == "eviction")
    pairs = 40 * 41 // 2 + 60 * 40
    assert prompt.vector_flops == 8 * pairs + 2 * 80
    assert prompt.activation_bytes == 80 * 2  # none are there to be read


def test_scores_of_eviction_are_not_in_the_cache(kvcalc: Run) -> None:
    """Llama-7B, 4096 tokens of 32 heads in 32 layers: 4,194,304 scores, 8 MiB beside 2 GiB of keys and values."""
    line = "compare llama-7b --variants mha,evict:4096 --context 32k"
    full, evicted = kvcalc(f"{line} --format json").records
    assert evicted["eviction_score_bytes"] == 32 * 32 * 4096 * 2 == 8 << 20
    assert (full["eviction_score_bytes"], evicted["kv_cache_bytes"]) == (0, 2 << 30)


def test_content_of_an_evicted_cache_holds_its_scores(kvcalc: Run) -> None:
    """`none` counts all that a sequence keeps: 2 GiB of rows and 8 MiB of scores; engines still refuse."""
    line = "fit llama-7b --set cache_budget=4096 --max-model-len 32k"
    (record,) = kvcalc(f"{line} --engine none --format json").records
    assert record["transfer_bytes"] == (2 << 30) + (8 << 20)
    assert kvcalc(f"{line} --engine vllm").code == 2
