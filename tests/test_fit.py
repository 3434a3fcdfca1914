"""`fit`: the terms of the budget, the table, its first row, and the messages for requests that do not fit."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from specs import of_kinds

from kvcalc import Deployment, Layer, Parallelism, Precision, UserError, load_gpu, load_model, weight_bytes
from kvcalc.capacity import FitOptions, budget, fit
from kvcalc.capacity.fit_records import fit_record
from kvcalc.capacity.memory_budget import (
    COLLECTIVE_BYTES,
    CONTEXT_BYTES,
    GRAPH_BYTES,
    LIBRARY_BYTES,
    MemoryBreakdown,
    activation_peak,
    mtp_weights,
)
from kvcalc.layers.attention import Grouped
from kvcalc.layers.feed_forward import Dense
from kvcalc.model.model import Model, Mtp
from kvcalc.model.precision import formats_of

GIB = 2**30


def small(layers: int = 4, **fields: Any) -> Model:
    """Return a model of width 64: q 64 · 64, k and v 64 · 32, o 64 · 64, a gated FFN of 128."""
    part = Grouped(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    kinds = {"k": Layer(parts=(part, Dense(intermediate_size=128)))}
    return of_kinds(kinds, layers=layers, max_context=4096, **fields)


def test_a_published_pool(kvcalc: Run) -> None:
    """vLLM on an H100: 0.9 of 79.18 GiB, minus 14.99 of weights, 4.76 of activations and 0.13 of other memory: 51.38 GiB."""
    terms = "--weight-bytes 14.99GiB --activation-bytes 4.76GiB --overhead-bytes 0.13GiB"
    line = f"fit llama-3.1-8b --gpu h100 --engine vllm --gpu-memory-utilization 0.9 --format json {terms}"
    (record,) = kvcalc(line).records
    assert record["kv_budget_bytes"] / GIB == pytest.approx(51.38, abs=0.005)


def terms(weights: int, activation: int = 0, overhead: int = 0, startup: int = 0) -> MemoryBreakdown:
    return MemoryBreakdown(weights, {}, activation, {"all": overhead}, {"all": startup})


def test_budget_of_total_memory_rounds_the_share_up() -> None:
    found = budget(1001, 0.9, terms(100, 50, 25))
    assert (found.share, found.cache) == (901, 726)
    assert budget(1001, 0.9, terms(901)).weights_fit
    assert not budget(1001, 0.9, terms(902)).weights_fit
    assert budget(1001, 0.9, terms(902, 50)).cache == -51


def test_budget_of_free_memory() -> None:
    found = budget(1001, 0.9, terms(100, 50, 25, 100), "free")
    assert (found.share, found.cache) == (810, 635)  # ⌊901 · 0.9⌋
    outside = budget(1001, 0.9, terms(100, 50, 25, 100), "free", excludes_activations=True)
    assert outside.cache == 710


def test_overheads_are_stated() -> None:
    one, two = Parallelism(), Parallelism(tp=2)
    for graphs, ranks, basis, inside, before in (
        (True, one, "total", LIBRARY_BYTES + GRAPH_BYTES, 0),
        (True, two, "total", LIBRARY_BYTES + GRAPH_BYTES + COLLECTIVE_BYTES, 0),
        (False, one, "free", LIBRARY_BYTES, CONTEXT_BYTES),
        (True, two, "free", LIBRARY_BYTES + GRAPH_BYTES, CONTEXT_BYTES + COLLECTIVE_BYTES),
    ):
        options = FitOptions(engine="none", enforce_eager=not graphs, utilization_of=basis)
        stated = fit(Deployment(small(), load_gpu("h100"), parallelism=ranks), options).terms
        assert (sum(stated.overhead.values()), stated.startup_bytes) == (inside, before)


def test_the_whole_budget_of_one_gpu() -> None:
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
    record = fit_record(fit(Deployment(model, gpu), FitOptions(engine="vllm")))
    share = ceil(gpu.memory_bytes * 0.92)
    assert record["language_weight_bytes"] == weight_bytes(model) == 16_060_522_496
    assert record["extra_weight_bytes"] == 2 * 131_072 * 128  # the rotary table; no matrix needs rounding
    assert record["weight_bytes"] == record["language_weight_bytes"] + record["extra_weight_bytes"]
    taken = record["weight_bytes"] + record["activation_bytes"] + record["overhead_bytes"]
    assert record["kv_budget_bytes"] == share - taken
    assert record["num_blocks"] == record["kv_budget_bytes"] // 2_097_152


def test_activation_peak() -> None:
    """100 tokens: the FFN's activation reads 2 · 128 and writes 128; the product before it reads 64 and writes 256.

    Logits read 1 row of 64 and write 1000. The largest set is 100 · 384 elements, in addition to the residual stream's
    100 · 64.
    """
    assert activation_peak(small(), Precision(), Parallelism(), tokens=100) == 2 * 100 * (384 + 64)
    # one prompt of 2 tokens: one row of logits, 64 + 1000 elements, more than the FFN's 2 · 384
    assert activation_peak(small(), Precision(), Parallelism(), tokens=2) == 2 * (1064 + 2 * 64)
    # 100 prompts of one token: 100 rows of logits, 64 + 1000 elements each
    assert activation_peak(small(), Precision(), Parallelism(), 100, sequences=100) == 2 * 100 * (1064 + 64)
    assert activation_peak(small(), Precision(), Parallelism(), 101, sequences=3) == 2 * 101 * (384 + 64)


def test_the_smallest_that_fits_is_named_first(kvcalc: Run) -> None:
    """DeepSeek-V3 does not start on 8 H100, but on 8 H200 and on 16 H100. Other rows have the order of the options."""
    line = "fit deepseek-v3 --gpu h100,h200 --tp 8,16 --engine vllm --max-num-seqs 2 --max-model-len 128K --format json"
    records = kvcalc(line).records
    assert [(r["gpu"], r["gpus"], r["fits"]) for r in records] == [
        ("h200", 8, True), ("h100-sxm", 8, False), ("h100-sxm", 16, True), ("h200", 16, True),
    ]  # fmt: skip
    users = f"with memory for {records[0]['max_num_seqs']}, at least {records[0]['low_num_seqs']}"
    assert users in kvcalc(line.replace("json", "table")).joined


def test_sizes_that_do_not_divide_are_left_out_of_a_grid(kvcalc: Run) -> None:
    result = kvcalc("fit llama-3.1-8b --tp 2,3,4 --format json")
    assert [r["gpus"] for r in result.records] == [2, 4]
    assert "left out: tensor-parallel size 3" in result.err
    apart = kvcalc("fit llama-3.1-8b --gpu h100,mi250x --tp 8 --context 8k")
    assert apart.code == 0 and "left out: one link joins 4 mi250x" in apart.err
    assert kvcalc("fit llama-3.1-8b --tp 3").code == 2


def test_weights_that_do_not_fit(kvcalc: Run) -> None:
    line = "fit llama-3.1-405b --engine vllm --format json"
    result = kvcalc(line)
    (record,) = result.records
    assert (record["weights_fit"], record["fits"], record["max_num_seqs"], record["kv_tokens"]) == (False, False, 0, 0)
    over = record["weight_bytes"] - record["share_bytes"]
    assert f"weights exceed the engine's share by {over / GIB:.2f} GiB; it fits with `--tp 16` (16 GPUs)" in record["advice"]
    assert kvcalc(line + " --require 1").code == 1
    assert kvcalc("fit llama-3.1-8b --engine vllm --context 128k --require 3").code == 0
    assert kvcalc("fit llama-3.1-8b --engine vllm --context 128k --require 4").code == 1


def test_a_given_size_skips_the_weight_check(kvcalc: Run) -> None:
    result = kvcalc("fit llama-3.1-405b --engine vllm --kv-cache-memory-bytes 80GiB --require 1 --format json")
    (record,) = result.records
    assert (record["weights_fit"], record["kv_budget_bytes"], record["max_num_seqs"]) == (False, 80 * GIB, 1)
    assert "weights are not checked; with this cache they need 765.48 GiB more" in result.err
    line = "fit llama-2-7b --gpu h100 --kv-cache-memory-bytes 69.5e9 --engine"
    assert not kvcalc(f"{line} vllm --format json").err  # beyond the share, within the memory
    result = kvcalc(f"{line} trtllm --format json")  # max_gpu_total_bytes is a maximum
    assert result.records[0]["max_num_seqs"] == 29
    assert "TensorRT-LLM takes at most 58.38 GiB for the cache" in result.err
    assert "no flag of TensorRT-LLM sets a cache size; the command has none" in result.err


def test_data_parallel_replicas_share_the_sequences() -> None:
    """dp 4: each rank has a quarter of the requested sequences, and in total four times the sequences fit."""
    model, gpu = small(), load_gpu("h100")
    given = {"engine": "vllm", "kv_cache_memory_bytes": GIB, "max_model_len": 4096}
    one = fit(Deployment(model, gpu), FitOptions(**given))
    four = fit(Deployment(model, gpu, parallelism=Parallelism(dp=4)), FitOptions(**given, max_num_seqs=8))
    assert four.sequences == 4 * one.sequences
    assert four.longest_length == fit(Deployment(model, gpu), FitOptions(**given, max_num_seqs=2)).longest_length


def test_pipeline_stages_are_each_asked() -> None:
    """5 layers on 2 stages, 3 and 2 (the remainder is before the last stage): the first stage is the limit, with 3 layers."""
    found = fit(Deployment(small(5), load_gpu("h100"), parallelism=Parallelism(pp=2)), FitOptions(engine="vllm"))
    assert (found.stage, found.plan.bytes_per_block) == (0, 3 * 16 * 2 * 32 * 2)


def test_prediction_layers_and_drafts() -> None:
    """One more layer with its projection of 2 · 64 by 64 and three norms, or a draft model's weights and pages in addition."""
    model, gpu = small(mtp=Mtp(kind="k")), load_gpu("h100")
    plain = fit(Deployment(model, gpu), FitOptions(engine="vllm"))
    mtp = fit(Deployment(model, gpu), FitOptions(engine="vllm", mtp=True))
    layer = sum(w.elements for w in model.layer_weights("k"))
    assert mtp.budget.weights - plain.budget.weights == 2 * (layer + 2 * 64 * 64 + 3 * 64) == 2 * model.mtp_parameters
    assert mtp.plan.bytes_per_block == 5 * 16 * 2 * 32 * 2
    # attention has a gate of 4,096 · 4,096, and the network has one too
    attention, network, norms = 3 * 4096**2 + 2 * 4096 * 1024, 3 * 4096 * 12_288, 5 * 4096 + 2 * 256
    gated = mtp_weights(load_model("qwen3.5-9b"), formats_of(load_model("qwen3.5-9b"), Precision()), Parallelism())
    assert gated == 2 * (attention + network + 2 * 4096**2 + norms) == 486_581_248
    draft = small(1)
    beside = fit(Deployment(model, gpu), FitOptions(engine="vllm", draft=draft))
    assert beside.budget.weights - plain.budget.weights == weight_bytes(draft)
    assert beside.plan.bytes_per_block == 5 * 16 * 2 * 32 * 2
    with pytest.raises(UserError, match="no multi-token-prediction"):
        fit(Deployment(small(), gpu), FitOptions(mtp=True))


def test_cost_has_breakpoints(kvcalc: Run) -> None:
    """gpt-oss-120b: 36 layers of 2048 B per token until 127 + 16,384 tokens fill the windows, then 18 layers."""
    (record,) = kvcalc("fit gpt-oss-120b --engine vllm --format json").records
    near, far = record["breakpoints"]
    assert (near["from_tokens"], near["bytes_per_token"], near["fixed_bytes"]) == (0, 36 * 2048, 589_824)
    assert (far["from_tokens"], far["bytes_per_token"], far["fixed_bytes"]) == (16_511, 18 * 2048, 1033 * 589_824)
    assert [k for k, v in record.items() if isinstance(v, list | dict)] == ["breakpoints"]
    shown = kvcalc("fit gpt-oss-120b --engine vllm --explain").out
    lines = [line for line in shown.splitlines() if "per token" in line]
    for line, piece in zip(lines, record["breakpoints"], strict=True):
        assert f"{piece['fixed_bytes']:,} bytes" in line and f"{piece['bytes_per_token']:,} bytes" in line


def test_lengths_add_what_allocation_wastes(kvcalc: Run, tmp_path: Path) -> None:
    """Lengths 50 and 100 in slots of 1024: 1898 of 2048 slots are empty. Pages of 16 need 64 + 112 slots for 150 tokens."""
    path = tmp_path / "lengths.txt"
    path.write_text("50\n100\n")
    line = "fit llama-3.1-8b --engine vllm --max-model-len 1024 --format json --lengths"
    (record,) = kvcalc(line, str(path)).records
    assert (record["contiguous_waste_tokens"], record["paged_waste_tokens"]) == (1898, 26)
    assert (record["contiguous_waste"], record["paged_waste"]) == (1898 / 2048, 26 / 176)
    assert record["paged_num_seqs"] == record["kv_tokens"] * 2 // 176
    assert "pages 14.8%" in kvcalc(line.replace("json", "table"), str(path)).out


BAD = [
    ("--max-num-seqs 0", "max-num-seqs 0"), ("--max-model-len 0", "max-model-len"), ("--engine TGI", "not known: --engine none"),
    ("--engine none --num-gpu-blocks-override 5", "does not model num-gpu-blocks"), ("--mtp", "no multi-token-prediction"),
    ("--mamba-cache-mode all", "mamba-cache-mode"), ("--utilization-of some", "utilization"), ("--draft x-7b", "unknown model"),
    ("--lengths nowhere.txt", "nowhere.txt"), ("--lengths uniform:3,4", "unknown distribution"), ("--pp 33", "exceeds the 32"),
    ("--kv-cache-dtype fp7", "no cache dtype"), ("--budget lower", "unknown budget 'lower'"), ("--max-lora-rank 0", "rank 0"),
    ("--engine vllm --engine-version new", "unknown engine-version 'new'"), ("--mamba-ssm-cache-dtype fp7", "state dtype"),
    ("--engine trtllm --engine-version 3", "no versions are known"),
    ("--engine vllm --limit-mm-per-prompt imge=0", "Invalid enum value 'imge'"),
    ("--engine trtllm --max-loras 2", "engine trtllm does not model max-loras. Engines that do: sglang, vllm"),
    ("--limit-mm-per-prompt one", "is not a limit"), ("--limit-mm-per-prompt image=-1", "is not a limit"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), BAD)
def test_bad_requests_say_so_in_one_line(kvcalc: Run, options: str, said: str) -> None:
    model = "falcon-h1-0.5b --engine vllm" if "ssm" in options else "llama-3.1-8b"
    result = kvcalc(f"fit {model} {options}")
    assert result.code == 2 and said in result.err and result.err.count("\n") == 1


def test_a_model_without_a_cache_leaves_its_budget_free() -> None:
    part = Grouped(num_attention_heads=4, num_key_value_heads=4, head_dim=16, cached=False)
    result = fit(Deployment(of_kinds({"k": Layer(parts=(part,))}, layers=2), load_gpu("h100")))
    assert result.fits and result.needed.cache == 0 and result.longest_length is None
