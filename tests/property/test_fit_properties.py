"""Requests that `fit` accepts are within the budget to the byte, and the next larger request is not. The bytes
are computed here again."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import of_kinds

from kvcalc import Deployment, Layer, Model, Parallelism, Precision, UserError, cache_size, load_gpu, load_model
from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.allocations import paged_waste, simulate_first_fit
from kvcalc.capacity.engines import ENGINES
from kvcalc.capacity.engines.layout import BlockDemand, CacheLayout
from kvcalc.capacity.fit_records import fit_record
from kvcalc.layers.attention import Grouped
from kvcalc.library.presets import shipped_folder
from kvcalc.units import MAX_TOKENS

H100 = load_gpu("h100")
budgets = st.integers(2**20, 2**38)
lengths = st.integers(1, 300_000)
counts = st.integers(1, 200)
heads = st.integers(1, 8)
windows = st.integers(1, 9000)


def two_kinds(full: int, near: int, groups: int, window: int, chunk: bool) -> Model:
    limit = {"attention_chunk_size": window} if chunk else {"sliding_window": window}
    parts = {"full": {}, "near": limit}
    kinds = {
        name: Layer(parts=(Grouped(num_attention_heads=groups, num_key_value_heads=groups, head_dim=16, **more),))  # type: ignore[arg-type]
        for name, more in parts.items()
    }
    return of_kinds(kinds, layers=full + near, pattern=(f"{full} full", f"{near} near"))


models = st.builds(two_kinds, st.integers(1, 12), st.integers(1, 40), heads, windows, st.booleans())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks(model: Model, length: int, in_flight: int) -> tuple[int, int]:
    """Return the bytes of a block and the blocks of one sequence for a model of two kinds, directly from vLLM's rules."""
    counts, near = model.counts, model.kinds["near"].parts[0]
    assert isinstance(near, Grouped)
    few, many = sorted(counts.values())
    size = many if many < 1.5 * few else few
    page = 16 * near.num_key_value_heads * 32 * 2
    if near.sliding_window:
        local = ceil_div(min(near.sliding_window - 1 + in_flight, length), 16) + 1
    else:
        local = ceil_div(min((near.attention_chunk_size or 0) + in_flight, length), 16)
    groups = {kind: ceil_div(n, size) for kind, n in counts.items()}
    largest = max(ceil_div(n, groups[kind]) for kind, n in counts.items())
    return page * largest, groups["full"] * ceil_div(length, 16) + groups["near"] * local


def answer(model: Model, engine: str, budget: int, length: int, count: int, **more: Any) -> Fit:
    given_ = {"max_model_len": length, "max_num_seqs": count, "kv_cache_memory_bytes": budget, "activation_bytes": 0}
    return fit(Deployment(model, H100), FitOptions(engine=engine, **given_, **more))


@given(models, budgets, lengths, counts, st.sampled_from([2048, 8192]), st.integers(1, 3))
def test_vllm_to_the_byte(model: Model, budget: int, length: int, count: int, batched: int, batches: int) -> None:
    more = {"max_num_batched_tokens": batched, "max_in_flight_batches": batches}
    found = answer(model, "vllm", budget, length, count, **more)
    size, each = blocks(model, length, batched * batches)
    assert found.plan.bytes_per_block == size
    assert found.plan.request_blocks(length) == each
    assert size * (1 + found.sequences * each) <= budget or found.sequences == 0
    assert size * (1 + (found.sequences + 1) * each) > budget // size * size
    longest = found.longest_length
    assert longest is not None  # full layers grow for ever
    for tokens, fits in ((longest, True), (longest + 1, False)):
        size, each = blocks(model, tokens, batched * batches)
        if tokens:
            assert (size * (1 + count * each) <= budget) == fits


@given(models, budgets, lengths, counts)
def test_content_to_the_byte(model: Model, budget: int, length: int, count: int) -> None:
    found = answer(model, "none", budget, length, count)
    stored = cache_size(model, length).stored
    assert found.sequences * stored <= budget < (found.sequences + 1) * stored
    longest = found.longest_length
    assert longest is not None
    assert not longest or count * cache_size(model, longest).stored <= budget
    assert count * cache_size(model, longest + 1).stored > budget


@given(models, budgets, lengths, counts, st.sampled_from(["none", "vllm", "sglang", "llama.cpp"]), st.integers(0, 10_000))
def test_every_engine_answers_with_the_last_that_fits(
    model: Model, budget: int, length: int, count: int, engine: str, shared: int
) -> None:
    found = answer(model, engine, budget, length, count, shared_prefix=shared)
    pool, plan = found.plan.pool(budget), found.plan
    assert pool <= budget
    assert found.sequences == 0 or plan.needed(found.sequences, length, shared) <= pool
    assert found.sequences == MAX_TOKENS or plan.needed(found.sequences + 1, length, shared) > pool
    assert plan.needed(count + 1, length, shared) >= plan.needed(count, length, shared)
    if engine != "llama.cpp":  # its allocation follows from what is asked, not from the budget
        assert engine == "none" or plan.allocated(budget, count, length) <= budget
    assert found.fits == (found.sequences >= count)


@given(models, budgets, lengths, counts, st.integers(0, 20_000))
def test_a_common_prefix_never_costs(model: Model, budget: int, length: int, count: int, shared: int) -> None:
    for engine in ("none", "vllm", "sglang", "llama.cpp"):
        plain = answer(model, engine, budget, length, count)
        common = answer(model, engine, budget, length, count, shared_prefix=shared)
        assert common.sequences >= plain.sequences


PRESETS = sorted(path.stem for path in (shipped_folder() / "models").glob("*.yaml"))


def assert_holds_its_content(
    name: str, engine: str, cache_dtype: str, ranks: Parallelism, lengths: list[int], **more: Any
) -> bool:
    """Return whether an engine accepts a preset. If so, check that it stores at least the transferred content at each length."""
    run = Deployment(load_model(name), H100, Precision(kv_cache_dtype=cache_dtype), ranks)
    given_ = {"kv_cache_memory_bytes": 2**45, "kv_offloading_bytes": 2**45, "weight_bytes": 0, "activation_bytes": 0}
    try:
        found = fit(run, FitOptions(engine=engine, **(given_ | more)))
    except UserError:
        return False
    for length in lengths:
        content, held = found.content.needed(1, length), found.plan.needed(1, length)
        assert found.content.step_read(length) <= content <= held, (name, engine, cache_dtype, ranks, length)
    record = fit_record(found)
    assert record["transfer_bytes"] <= found.plan.needed(1, found.length)
    assert record["offload_step_bytes"] <= 2**45
    return True


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_holds_the_content_of_every_preset(engine: str, every: bool) -> None:
    """transfer_bytes, offload_step_bytes and the sums of --explain never exceed the stored bytes, and most presets have rules."""
    answered = [
        assert_holds_its_content(name, engine, cache_dtype, Parallelism(), [1, 5000, 163_840] if every else [5000])
        for number, name in enumerate(PRESETS if every else PRESETS[::5])
        for cache_dtype in (("auto", "fp16") if every else ("auto", "fp16")[number % 2 :][:1])
    ]
    least = {"trtllm": 0.7, "none": 0.97, "vllm": 0.97, "sglang": 0.97, "llama.cpp": 0.97}  # trtllm: no states, no index keys
    assert sum(answered) > least.get(engine, 0) * len(answered)


@given(
    st.sampled_from(PRESETS),
    st.sampled_from([*ENGINES]),
    st.sampled_from(["auto", "bf16", "fp8", "fp8_ds_mla", "nvfp4", "q8_0", "fp32"]),
    st.sampled_from([Parallelism(*ranks) for ranks in ((1,), (2,), (8,), (1, 2), (2, 1, 1, 1, 2), (8, 2, 2, 1, 4))]),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "mamba_ssm_cache_dtype": st.sampled_from(["auto", "bf16", "float32"]),
            "mamba_cache_mode": st.just("align"),
            "hybrid": st.just(False),
            "mtp": st.just(True),
            "block_size": st.sampled_from([1, 16, 100]),
            "max_num_batched_tokens": st.integers(1, 20_000),
            "max_model_len": st.integers(1, 10**6),
        },
    ),
)
@settings(max_examples=50)
def test_content_is_held_under_any_settings(
    name: str, engine: str, cache_dtype: str, ranks: Parallelism, sizes: list[int], more: dict[str, Any]
) -> None:
    assert_holds_its_content(name, engine, cache_dtype, ranks, sizes, **more)


demands = st.builds(BlockDemand, *map(st.integers, (1, 1, -1, 0), (100, 64, 500, 2)))
terms = st.lists(demands, min_size=1, max_size=4)


@given(terms, st.integers(0, 1000))
def test_pieces_add_up_in_whole_blocks(parts: list[BlockDemand], tokens: int) -> None:
    """fixed + slope · tokens is the bytes of one sequence whose tokens fill the blocks of all growing parts."""
    layout = type("Parts", (CacheLayout,), {"demands": parts})()
    piece = [p for p in layout.breakpoints() if p["from_tokens"] <= tokens][-1]
    growing = [t for t in parts if t.cap < 0 or t.cap > piece["from_tokens"]]
    if all(tokens % t.block == 0 for t in growing):
        cost = sum(t.unit * t.count(tokens) for t in parts)
        assert abs(piece["fixed_bytes"] + piece["bytes_per_token"] * tokens - cost) < 1e-6 * max(1, cost)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 64), st.integers(500, 3000), st.integers(0, 9))
def test_waste_is_bounded(sizes: list[int], block: int, capacity: int, seed: int) -> None:
    assert 0 <= paged_waste(sizes, block).tokens <= (block - 1) * len(sizes)
    assert paged_waste(sizes, max(sizes)).tokens >= 0
    pieces = simulate_first_fit(sizes, capacity, seed)
    assert 0 <= pieces.largest <= pieces.free < 1
    assert pieces.largest < pieces.free or not pieces.failures
