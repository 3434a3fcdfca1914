"""The smallest resources for a request, the estimate that answers, the largest settings, and TensorRT-LLM's share."""

import random
from typing import Any

import pytest
from conftest import Run
from specs import grouped, latent, of_kinds

from kvcalc import Deployment, Layer, Model, Parallelism, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.fit_records import fit_record
from kvcalc.capacity.memory_budget import CONTEXT_BYTES, GRAPH_BYTES, LIBRARY_BYTES, activation_peak
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.recurrent import Mamba2

GIB = 2**30
ENGINES = ("none", "vllm", "sglang", "trtllm", "llama.cpp")


def asked(model: Model | str, engine: str, gpu: str = "h100-sxm", ranks: Parallelism | None = None, **options: Any) -> Fit:
    spec = load_model(model) if isinstance(model, str) else model
    return fit(Deployment(spec, load_gpu(gpu), Precision(), ranks or Parallelism()), FitOptions(engine=engine, **options))


def small(**fields: Any) -> Model:
    return of_kinds({"k": Layer(parts=(grouped(), Dense(intermediate_size=128)))}, layers=4, max_context=4096, **fields)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "gemma-3-12b"])
def test_what_just_holds_a_need(engine: str, model: str, pp: int, dp: int) -> None:
    """A cache of these bytes fits 6 sequences of 20,000 tokens, and one byte less does not. So does the smallest share."""
    ranks, need = Parallelism(pp=pp, dp=dp), {"max_num_seqs": 6, "max_model_len": 20_000}
    found = asked(model, engine, ranks=ranks, **need)
    least = found.needed.cache
    for size, holds in ((least, True), (least - 1, False)):
        given = asked(model, engine, ranks=ranks, kv_cache_memory_bytes=size, **need)
        assert given.fits == holds
    share = found.needed.utilization
    assert share
    assert asked(model, engine, ranks=ranks, gpu_memory_utilization=share, **need).fits
    assert not asked(model, engine, ranks=ranks, gpu_memory_utilization=round(share - 1e-4, 4), **need).fits


@pytest.mark.parametrize("engine", ENGINES)
def test_a_need_beyond_the_memory_has_no_share(engine: str) -> None:
    found = asked("llama-3.1-8b", engine, max_num_seqs=100, max_model_len=131_072)
    assert found.needed.utilization is None
    assert found.needed.cache > 80 * GIB


@pytest.mark.parametrize("version", ["0.11", "0.19", "0.28", "0.33"])
@pytest.mark.parametrize("length", [1000, 8000, 131_072])
def test_the_greatest_settings_hold_and_the_next_do_not(version: str, length: int) -> None:
    """The engine is set up for the tested number of requests, whose sampler needs more memory; the longest length of 8 is
    tested with 8."""
    given: dict[str, Any] = {"engine_version": version, "max_model_len": length}
    most = asked("llama-3.1-8b", "vllm", **given).needed.sequences
    assert asked("llama-3.1-8b", "vllm", max_num_seqs=most, **given).fits
    assert not asked("llama-3.1-8b", "vllm", max_num_seqs=most + 1, **given).fits
    longest = asked("llama-3.1-8b", "vllm", require=8, budget="middle", engine_version=version).needed.length
    assert longest
    for tokens, holds in ((longest, True), (longest + 1, False)):
        assert asked("llama-3.1-8b", "vllm", max_num_seqs=8, max_model_len=tokens, engine_version=version).fits == holds


@pytest.mark.parametrize("length", [512, 40_000])
@pytest.mark.parametrize("asked_for", [1, 20])
@pytest.mark.parametrize("unified", [False, True])
def test_the_longest_has_the_terms_of_its_own_length(unified: bool, asked_for: int, length: int) -> None:
    """llama.cpp's mask has the length of the context."""
    given: dict[str, Any] = {"gpu": "a100-80gb", "max_num_seqs": asked_for, "kv_unified": unified}
    found, other = (asked("llama-3.1-8b", "llama.cpp", max_model_len=tokens, **given) for tokens in (length, 1000))
    assert found.longest_length == found.needed.length == other.longest_length
    assert found.longest_length
    for tokens, holds in ((found.longest_length, True), (found.longest_length + 1, False)):
        assert asked("llama-3.1-8b", "llama.cpp", max_model_len=tokens, **given).fits == holds


@pytest.mark.parametrize("model", ["llama-3.1-8b", "bloom-7b1", "gemma-4-e2b", "granite-4-h-micro"])
def test_numbers_that_are_given_back_hold(model: str) -> None:
    """Each printed number fits if it is requested: users at both ends of the range, largest settings and smallest share."""
    chance = random.Random(model)
    for engine in ENGINES[:3] * 2 + ENGINES[4:]:
        gpu, length = chance.choice(["a10", "h100", "mi300x"]), chance.choice([1, 16, 1000, 8192, 30_000])
        ranks, how = Parallelism(chance.choice([1, 2]), 1, chance.choice([1, 2])), {"engine": engine, "gpu": gpu}
        given = {"max_model_len": length, "max_num_seqs": chance.choice([None, 7, 64]), "ranks": ranks} | how
        found = asked(model, **given)
        back: list[dict[str, Any]] = [{"max_num_seqs": found.sequences_at(end), "budget": end} for end in found.remaining]
        back += [{"max_num_seqs": found.needed.sequences}, {"max_model_len": found.needed.length}]
        back += [{"max_model_len": found.longest_length}, {"gpu_memory_utilization": found.needed.utilization}]
        for again in back:
            if next(iter(again.values())):
                assert asked(model, **given | again).fits, (given, again)


def test_more_sequences_take_more_beside_the_cache() -> None:
    """The cache fits thousands of sequences of one token, but the sampler for this number would need the memory."""
    found = asked("gpt-3-medium", "vllm", "gh200", Parallelism(2), max_model_len=100, max_num_seqs=7)
    assert found.sequences < found.capacity
    assert asked("gpt-3-medium", "vllm", "gh200", Parallelism(2), max_model_len=100, max_num_seqs=found.sequences).fits
    assert not asked("gpt-3-medium", "vllm", "gh200", Parallelism(2), max_model_len=100, max_num_seqs=found.sequences + 1).fits


def test_a_need_that_is_not_given_is_one_and_the_engine_keeps_its_default() -> None:
    """The sampler has 1024 requests unless max_num_seqs is lower. `require` does not change the engine's setting."""
    plain, given, required = (
        asked("llama-3.1-8b", "vllm", engine_version="0.11", **more) for more in ({}, {"max_num_seqs": 8}, {"require": 8})
    )
    assert (plain.options.requested_num_seqs, given.options.requested_num_seqs, required.options.requested_num_seqs) == (1, 8, 8)
    assert plain.terms == required.terms
    assert given.terms.activation < plain.terms.activation


def test_an_end_of_the_range_answers() -> None:
    ends = {end: asked("llama-3.1-8b", "vllm", budget=end) for end in ("low", "middle", "high")}
    low, middle, high = ends.values()
    assert low.kv_budget < middle.kv_budget < high.kv_budget
    assert low.remaining == middle.remaining == high.remaining
    record = fit_record(low)
    assert [record[f"kv_budget{end}_bytes"] for end in ("_low", "", "_high")] == [f.kv_budget for f in ends.values()]
    assert record["kv_tokens"] < fit_record(middle)["kv_tokens"]
    assert (record["budget"], record["low_num_seqs"]) == ("low", low.sequences)


def test_engine_none_has_no_range() -> None:
    record = fit_record(asked("llama-3.1-8b", "none", budget="low"))
    assert (record["kv_budget_low_bytes"], record["kv_budget_high_bytes"], record["low_num_seqs"]) == (None, None, None)
    assert record["budget"] == "middle"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_given_cache_has_no_range(engine: str) -> None:
    record = fit_record(asked("llama-3.1-8b", engine, kv_cache_memory_bytes=GIB))
    assert {record[f"kv_budget{end}_bytes"] for end in ("_low", "", "_high")} == {GIB}


def test_given_terms_leave_no_margin() -> None:
    found = asked("llama-3.1-8b", "vllm", weight_bytes=GIB, activation_bytes=GIB, overhead_bytes=GIB)
    assert len(set(found.remaining.values())) == 1


def test_require_counts_the_low_end(kvcalc: Run) -> None:
    """DeepSeek-V3 on 8 H200: 5 in the middle, 4 at the low end."""
    line = "fit deepseek-v3 --gpu h200 --tp 8 --engine vllm --max-model-len 128K"
    (record,) = kvcalc(f"{line} --format json").records
    assert (record["max_num_seqs"], record["low_num_seqs"]) == (5, 4)
    assert [kvcalc(f"{line} --require {n}").code for n in (4, 5)] == [0, 1]
    assert kvcalc(f"{line} --require 5 --budget middle").code == 0
    assert kvcalc(line).out.startswith("5 users of 131,072 tokens, at least 4, fit on 8× h200 with tp 8")
    # without a length, the longest that fits at the low end
    shown, needed = (kvcalc(f"fit qwen3-32b --gpu h100{more} --json").records[0] for more in ("", " --require 1"))
    assert shown["low_num_seqs"] == 1 and f"--max-model-len {needed['requested_model_len']}" in shown["command"]


def test_tensorrt_llm_takes_a_share_of_what_remains() -> None:
    """Blocks of 32 tokens: 4 layers of 2 · 2 · 16 bf16 elements. The share is 0.9 of the memory minus all terms."""
    model = small()
    found = asked(model, "trtllm", max_model_len=100)
    assert (found.plan.block_size, found.plan.bytes_per_block) == (32, 32 * 4 * 2 * 2 * 16 * 2)
    assert found.plan.needed(3, 100) == 3 * 4 * 32 * 4 * 128
    assert found.plan.needed(3, 100, shared=70) == (2 + 3 * 2) * 32 * 4 * 128
    weights = asked(model, "none").budget.weights + 2 * 4096 * 16
    terms = weights + activation_peak(model, Precision(), Parallelism(), 8192) + LIBRARY_BYTES + GRAPH_BYTES
    memory = load_gpu("h100").memory_bytes
    assert found.budget.cache == int((memory - CONTEXT_BYTES - terms) * 0.9)


def test_tensorrt_llms_pools() -> None:
    """Latents are in blocks of 64, windows are stored in full with a remark, and states are refused."""
    kinds = {"k": Layer(parts=(latent(),))}
    assert asked(of_kinds(kinds, layers=2, max_context=100), "trtllm").plan.bytes_per_block == 64 * 2 * 40 * 2
    near = of_kinds({"k": Layer(parts=(grouped(sliding_window=10),))}, layers=2, max_context=100)
    found = asked(near, "trtllm")
    assert found.plan.needed(1, 100) == 4 * 32 * 2 * 128
    assert "keeps every token" in found.notes[0]
    states = of_kinds({"k": Layer(parts=(Mamba2(num_heads=4, head_dim=8, state_size=16),))}, layers=2, max_context=100)
    with pytest.raises(UserError, match="pools of recurrent states are not modelled"):
        asked(states, "trtllm")
