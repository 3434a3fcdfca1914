"""The KV cache budget of one GPU: weights, shares, options and constants, one by one."""

from typing import Any

import pytest
from conftest import Run
from specs import fitted, grouped, of_kinds, one_kind

from kvcalc import Layer, Parallelism, UserError, load_gpu
from kvcalc.capacity import FitOptions, budget
from kvcalc.capacity.fit_records import fit_record
from kvcalc.capacity.memory_budget import MemoryBreakdown
from kvcalc.layers.attention import Grouped
from kvcalc.layers.feed_forward import Dense

GIB = 2**30
H100 = load_gpu("h100")


def terms(weights: int = 0, activation: int = 0, overhead: int = 0, startup: int = 0) -> MemoryBreakdown:
    return MemoryBreakdown(weights, {}, activation, {"all": overhead}, {"all": startup})


def test_weights_of_a_fit() -> None:
    """4 layers of 64 wide on 2 stages and 2 ranks, bf16, 1000 tokens of vocabulary.

    A layer: q 64 · 64, k and v 64 · 32, o 64 · 64, gate and up 64 · 256, down 128 · 64, halved on 2 ranks; 2 norms of 64,
    whole. The embedding stands on the first stage, final norm and head on the last, 500 rows of 64 each.
    """
    part = Grouped(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = one_kind(part, Dense(intermediate_size=128), layers=4)
    layer = 64 * (64 + 2 * 32 + 64 + 256 + 128) // 2 + 2 * 64
    ranks = Parallelism(tp=2, pp=2)
    answer = fitted(model, "none", ranks=ranks, max_model_len=100)
    assert answer.stage == 1  # one norm more than the first
    assert answer.budget.weights == 2 * (2 * layer + 500 * 64 + 64)
    assert fitted(model, "none").budget.weights == 2 * (4 * (2 * layer - 128) + 2 * 64_000 + 64)
    assert fitted(model, "none", weight_bytes=0).budget.weights == 0


def test_pieces_of_content() -> None:
    """2 layers of 128 B per token: one has a window or a chunk of 10, is full from 10 tokens on, and is named."""
    for limit, cause in (({"sliding_window": 10}, "window"), ({"attention_chunk_size": 10}, "chunk")):
        kinds = {"full": Layer(parts=(grouped(),)), "near": Layer(parts=(grouped(**limit),))}
        model = of_kinds(kinds, layers=2, pattern=("full", "near"), max_context=4096)
        near, far = fitted(model, "none").plan.breakpoints()
        assert near == {"from_tokens": 0, "fixed_bytes": 0, "bytes_per_token": 256, "block_tokens": 1, "cause": ""}
        assert far == {"from_tokens": 10, "fixed_bytes": 1280, "bytes_per_token": 128, "block_tokens": 1, "cause": cause}


def test_waste_where_the_longest_does_not_fit() -> None:
    """A pool of 100 tokens: pieces of 60 and 100 can be tried, pieces of 101 cannot. Pages and slots are counted in any case."""
    model = one_kind(grouped(), layers=1)
    answer = fitted(model, "none", kv_cache_memory_bytes=100 * 128, max_model_len=200)
    fits, over = fit_record(answer, [60, 100]), fit_record(answer, [60, 101])
    assert fits["external_requests"] == 40  # each length 20 times
    assert [over[key] for key in ("external_requests", "external_failures", "external_waste")] == [None, None, None]
    assert over["paged_waste_tokens"] == (64 + 112) - 161


def test_nothing_left() -> None:
    """A budget of exactly 0 bytes starts nothing and has no shortage. One byte less is a shortage of one byte."""
    model = one_kind(grouped())
    share = fitted(model, "none").budget.share
    terms = {"weight_bytes": share - 30, "activation_bytes": 20}
    for overhead, cache in ((10, 0), (11, -1), (9, 1)):
        answer = fitted(model, "none", **terms, overhead_bytes=overhead)
        assert (answer.budget.cache, answer.kv_budget) == (cache, max(0, cache))
        assert (answer.sequences, answer.fits, answer.longest_length) == (0, False, 0)
        assert answer.shortage_bytes == max(0, -cache)
        assert (" more; " in str(fit_record(answer)["advice"])) == (cache < 0)


def test_a_share_of_what_remains() -> None:
    """Of 1000 B, 100 are in use and 175 are other memory: 0.9 of 725 is 652.5."""
    found = budget(1000, 0.9, terms(100, 50, 25, 100), "remaining")
    assert (found.share, found.cache) == (175 + 652, 652)
    assert budget(1000, 0.9, terms(100, 50, 25, 100), "remaining", excludes_activations=True).cache == int(0.9 * 800)
    assert budget(1000, 0.9, terms(800, 50, 50, 100), "remaining").cache == 0
    assert budget(1000, 0.9, terms(800, 50, 51, 100), "remaining").cache == -1


OPTIONS: list[tuple[str, Any, Any]] = [
    ("max_num_seqs", 1, 0), ("max_model_len", 10**12, 10**12 + 1), ("max_num_batched_tokens", 10**12, 10**12 + 1),
    ("shared_prefix", 0, -1), ("shared_prefix", 10**12, 10**12 + 1), ("block_size", 1 << 20, (1 << 20) + 1),
    ("mamba_checkpoint_blocks", 1 << 20, (1 << 20) + 1), ("max_in_flight_batches", 1 << 20, (1 << 20) + 1),
    ("kv_cache_memory_bytes", 1, 0), ("kv_cache_memory_bytes", 1 << 60, (1 << 60) + 1), ("weight_bytes", 0, -1),
    ("weight_bytes", 1 << 60, (1 << 60) + 1), ("kv_offloading_bytes", 1 << 60, (1 << 60) + 1),
    ("gpu_memory_utilization", 1.0, 1.0000001), ("gpu_memory_utilization", 1e-9, -1e-9), ("max_num_seqs", 2, 2.0),
    ("max_num_seqs", 2, True), ("kv_cache_memory_bytes", None, "1GiB"), ("utilization_of", "remaining", "rest"),
    ("mamba_ssm_cache_dtype", "float32", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "good", "bad"), OPTIONS)
def test_the_last_option_that_is_taken_and_the_next(name: str, good: Any, bad: Any) -> None:
    assert getattr(FitOptions(**{name: good}), name) == good
    with pytest.raises(UserError, match=name.partition("_")[0].replace("mamba", "state dtype|mamba")):
        FitOptions(**{name: bad})


@pytest.mark.parametrize("text", ["0.5", "0.9B", "0", "0.0001KB"])
def test_less_than_a_byte_is_no_size(kvcalc: Run, text: str) -> None:
    result = kvcalc(f"fit gpt2 --kv-cache-memory-bytes {text}")
    assert (result.code, "kv-cache-memory-bytes" in result.err) == (2, True)
