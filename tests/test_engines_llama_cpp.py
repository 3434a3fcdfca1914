"""llama.cpp's cells, types and placement, compared with its output and computed by hand."""

import pytest
from conftest import Run
from specs import fitted, hybrid, of_kinds

from kvcalc import Deployment, Layer, Parallelism, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.engines.llama_cpp import LlamaCpp
from kvcalc.capacity.fit_records import fit_record
from kvcalc.layers.attention import Grouped
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.library.huggingface import model_from

MIB = 2**20
H100 = load_gpu("h100")
GEMMA_3_4B = {"heads": 8, "groups": 4, "width": 256, "window": 1024, "local": 29, "full": 5}
GPT_OSS_20B = {"heads": 64, "groups": 8, "width": 64, "window": 128, "local": 12, "full": 12}


# What llama.cpp logs: (model, context, sequences, micro-batch, cells, window cells, MiB without window, MiB with one).
LOGGED = [
    (GEMMA_3_4B, 131072, 1, 512, 131072, 1536, 2560, 174),
    (GPT_OSS_20B, 131072, 1, 512, 131072, 768, 3072, 18),
    (GPT_OSS_20B, 131072, 1, 2048, 131072, 2304, 3072, 54),
]


@pytest.mark.parametrize(("sizes", "context", "sequences", "batch", "cells", "near", "full", "window"), LOGGED)
def test_cells_as_llama_cpp_logs_them(
    sizes: dict[str, int], context: int, sequences: int, batch: int, cells: int, near: int, full: int, window: int
) -> None:
    options = {"max_model_len": context, "max_num_seqs": sequences, "max_num_batched_tokens": batch}
    found = fitted(hybrid(**sizes), "llama.cpp", **options)
    assert isinstance(found.plan, LlamaCpp)
    assert found.plan.cells(sequences, context) == cells
    assert found.plan.window_cells(sequences, context) == near
    record = fit_record(found)
    assert record["kv_cache_allocated_bytes"] == (full + window) * MIB
    assert record["window_cache_bytes"] == window * MIB


# Bytes that llama.cpp's own caches of tiny models take in autumn 2026: (sizes, tokens, sequences, unified, bytes).
# W 128 and 1024; 512 and 1024 B a cell and layer. 4000 tokens → 4096 + 768 cells; four of 4096 + 1536, or 16384 + 4608.
ALLOCATED = [
    ({"heads": 8, "groups": 2, "width": 64, "window": 128, "local": 3, "full": 3}, 4000, 1, False, 7_471_104),
    ({"heads": 8, "groups": 4, "width": 64, "window": 1024, "local": 5, "full": 1}, 4096, 4, False, 48_234_496),
    ({"heads": 8, "groups": 4, "width": 64, "window": 1024, "local": 5, "full": 1}, 4096, 4, True, 40_370_176),
]


@pytest.mark.parametrize(("sizes", "tokens", "sequences", "unified", "allocated"), ALLOCATED)
def test_caches_of_sequences(sizes: dict[str, int], tokens: int, sequences: int, unified: bool, allocated: int) -> None:
    options = {"max_model_len": tokens, "max_num_seqs": sequences, "kv_unified": unified}
    assert fit_record(fitted(hybrid(**sizes), "llama.cpp", **options))["kv_cache_allocated_bytes"] == allocated


def test_windows_that_are_not_read() -> None:
    """With --swa-full, 34 layers of 4 · 256 · 2 · 2 B have 8192 cells each. mistral-7b-v0.1 is a llama for llama.cpp, without
    a window: 32 layers of 8 · 128 · 2 · 2 B, 32,768 cells."""
    for model, length, layers in ((hybrid(**GEMMA_3_4B), 8192, 34), (load_model("mistral-7b-v0.1"), 32_768, 32)):
        record = fit_record(fitted(model, "llama.cpp", max_model_len=length, swa_full=layers == 34))
        assert (record["kv_cache_allocated_bytes"], record["window_cache_bytes"]) == (layers * 4096 * length, 0)


def test_hybrid_states_are_a_buffer_of_their_own() -> None:
    """Qwen3.6-27B: 16 layers of 4 KV heads × 256 at 262,144 cells are 16,384 MiB. States and convolutions are in fp32."""
    full = Grouped(num_attention_heads=24, num_key_value_heads=4, head_dim=256)
    delta = GatedDeltaNet(
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128
    )  # fmt: skip
    kinds = {"delta": Layer(parts=(delta,)), "full": Layer(parts=(full,))}
    model = of_kinds(kinds, layers=64, pattern=("3 delta", "full"), max_context=262144)
    record = fit_record(fitted(model, "llama.cpp"))
    assert record["kv_cache_allocated_bytes"] == 16_384 * MIB
    assert record["state_bytes"] == 48 * 4 * (10_240 * 3 + 48 * 128 * 128)


TYPED = [("q8_0", "q4_0", 34, 18), ("f32", "", 128, 64), ("", "q5_0", 64, 22), ("BF16", "iq4_nl", 64, 18)]


@pytest.mark.parametrize(("keys", "values", "of_keys", "of_values"), TYPED)
def test_keys_and_values_of_their_own_types(keys: str, values: str, of_keys: int, of_values: int) -> None:
    """8 KV heads · 128 wide are 32 blocks of 32 for keys and 32 for values per cell, in 32 layers. The default is fp16."""
    found = fitted(load_model("llama-3.1-8b"), "llama.cpp", max_model_len=4096, cache_type_k=keys, cache_type_v=values)
    assert fit_record(found)["kv_cache_allocated_bytes"] == 4096 * 32 * 32 * (of_keys + of_values)


def test_types_that_llama_cpp_refuses(kvcalc: Run) -> None:
    def said(line: str) -> str:
        result = kvcalc(f"fit {line}")
        assert (result.code, result.out) == (2, "")
        return result.err

    assert "engine vllm does not model cache-type-k" in said("llama-3.1-8b --engine vllm --cache-type-k q8_0")
    assert "llama.cpp has no cache dtype 'fp8'" in said("llama-3.1-8b --engine llama.cpp --cache-type-v fp8")
    assert "Write --cache-type-k q8_0 --cache-type-v q8_0" in said("deepseek-v3 --engine llama.cpp --cache-type-v q8_0")
    assert "only with flash attention. Write --flash-attn on" in said("gpt2 --engine llama.cpp -ctv q8_0 -fa off")
    with pytest.raises(UserError, match="blocks of 32 do not divide a head of 80"):
        fitted(hybrid(8, 4, 80, 128, 1, 1), "llama.cpp", Precision(kv_cache_dtype="q8_0"))


def test_the_buffer_that_llama_cpp_reserves() -> None:
    """Llama-3.1-8B, 512 tokens in a micro-batch: "CUDA0 compute buffer size = 258.50 MiB"; at 2048, four times this size."""
    model = load_model("llama-3.1-8b")
    assert fitted(model, "llama.cpp").budget.activation == 258.5 * MIB
    assert fitted(model, "llama.cpp", max_num_batched_tokens=2048).budget.activation == 1034 * MIB
    assert fitted(model, "llama.cpp", max_model_len=32_768, flash_attn="off").budget.activation == 2144 * MIB  # as logged


def test_the_buffer_of_a_wide_network() -> None:
    """A build on a CPU, at a quarter of Mistral-7B's widths and cells, prints a quarter of 120.04 MiB at 4096 cells and of 124.04
    at 8192: 4 · 512 · (3 · 14,336 + 4 · 4096) and 2 · 512 bytes of the mask a cell; 62.5 + 8 of logits are less."""
    model = load_model("mistral-7b-v0.1")
    assert fitted(model, "llama.cpp", max_model_len=4000).budget.activation == 120 * MIB
    assert fitted(model, "llama.cpp", max_model_len=8192).budget.activation == 124 * MIB
    assert fitted(model, "llama.cpp", max_model_len=2000, max_num_seqs=4, kv_unified=True).budget.activation == 124 * MIB


@pytest.mark.parametrize(("inner", "used", "printed"), [(2048, 2, 30), (1024, 8, 54)])
def test_the_buffer_of_experts(inner: int, used: int, printed: int) -> None:
    """A build at 4096 cells prints 30.01 and 54.01 MiB. 4 MiB are the mask, the rest 4 · 512 · (3 · used · inner + 4 · 256)."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": inner,
        "num_experts": 16, "num_experts_per_tok": used, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
        "num_key_value_heads": 2, "head_dim": 64, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert fitted(model_from(config, "f", "x"), "llama.cpp", max_model_len=4096).budget.activation == printed * MIB


def test_the_token_table_stays_with_the_host() -> None:
    """128,256 · 4096 in bf16 or in blocks of 256 of 144 bytes (q4_K). The table of llama-3.2-1b is also its head. gpt2's
    positions are 1024 · 768. A chip with one memory has the whole table there."""
    for quantization, table in (("", 128_256 * 4096 * 2), ("q4_k_m", 128_256 * 16 * 144)):
        found = fitted(load_model("llama-3.1-8b"), "llama.cpp", Precision(quantization=quantization))
        whole = fitted(load_model("llama-3.1-8b"), "none", Precision(quantization=quantization)).budget.weights
        assert (found.terms.host, found.budget.weights) == (table, whole - table)
    assert fitted(load_model("llama-3.2-1b"), "llama.cpp").terms.host == 0
    assert fitted(load_model("gpt2"), "llama.cpp").terms.host == 1024 * 768 * 2
    chip = Deployment(load_model("llama-3.1-8b"), load_gpu("apple-m3-max"))
    assert fit(chip, FitOptions(engine="llama.cpp")).terms.host == 0


def test_layers_on_the_gpu() -> None:
    """-ngl 17 of llama-3.1-8b: the head and the last 16 of 32 layers, with their caches.

    A layer has q, o 4096², k, v 4096 · 1024, MLP 3 · 4096 · 14,336, norms 2 · 4096, in bf16, and 4096 cells of 8 · 128 ·
    2 · 2 B.
    """
    layer = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096)
    found = fitted(load_model("llama-3.1-8b"), "llama.cpp", n_gpu_layers=17, max_model_len=4096)
    record = fit_record(found)
    assert record["host_weight_bytes"] == 16 * layer + 2 * 128_256 * 4096
    assert record["weight_bytes"] == 16 * layer + 2 * (128_256 * 4096 + 4096)
    assert record["kv_cache_allocated_bytes"] == record["host_cache_bytes"] == 16 * 4096 * 4096
    assert "llama.cpp: the first 16 layers and their caches are in host memory" in found.notes
    every = [fitted(load_model("llama-3.1-8b"), "llama.cpp", n_gpu_layers=n).terms.host for n in (-1, 33, 99)]
    assert every == [2 * 128_256 * 4096] * 3


def test_layers_on_the_gpu_of_two_kinds() -> None:
    """Two layers with windows, then two full layers: with -ngl 3 the full layers are on the GPU, with -ngl 4 also one with a
    window."""
    model = hybrid(heads=8, groups=2, width=64, window=128, local=2, full=2)
    for layers, here, there in ((3, 2 * 4096, 2 * 768), (4, 2 * 4096 + 768, 768)):
        record = fit_record(fitted(model, "llama.cpp", n_gpu_layers=layers, max_model_len=4096))
        assert (record["kv_cache_allocated_bytes"], record["host_cache_bytes"]) == (512 * here, 512 * there)


def test_experts_on_the_cpu() -> None:
    """mixtral-8x7b: 8 experts of 3 · 4096 · 14,336 in bf16 per layer, of three or all 32 layers. The cache is unchanged."""
    layer, table = 2 * 8 * 3 * 4096 * 14_336, 2 * 32_000 * 4096
    model = load_model("mixtral-8x7b")
    plain = fitted(model, "llama.cpp", max_model_len=4096)
    for layers, option in ((3, {"n_cpu_moe": 3}), (32, {"cpu_moe": True}), (32, {"n_cpu_moe": 40})):
        found = fitted(model, "llama.cpp", max_model_len=4096, **option)
        assert found.terms.host == layers * layer + table
        assert found.budget.weights == plain.budget.weights - layers * layer
        assert found.plan.needed(1, 4096) == plain.plan.needed(1, 4096)
    halves = [fitted(model, "llama.cpp", ranks=Parallelism(pp=2), n_cpu_moe=n).stage_terms["middle"] for n in (0, 20)]
    saved = [before.language - after.language for before, after in zip(*halves, strict=True)]
    assert saved == [16 * layer, 4 * layer]  # of 16 layers on each GPU


PLACED_NOWHERE = [
    ("llama-3.1-8b --n-gpu-layers 1", "n-gpu-layers 1 leaves no layer of llama-3.1-8b on the GPU"),
    ("llama-3.1-8b -ngl 20 --tp 2", "with several GPUs, or with tp, are not modelled"),
    ("llama-3.1-8b -ngl 20 --gpu apple-m3-max", "apple-m3-max has one memory"),
    ("llama-3.1-8b --cpu-moe", "llama-3.1-8b has no experts"),
    ("zamba2-1.2b -ngl 20", "zamba2-1.2b shares blocks of weights"),
    ("deepseek-v3 -ngl 20", "deepseek-v3 has prediction layers"),
    ("llama-3.1-8b -ngl 20 --kv-offloading-bytes 1GiB", "n-gpu-layers together are not modelled"),
    ("jamba-v0.1 --n-cpu-moe -1", "n-cpu-moe -1 is not a whole number"),
]


@pytest.mark.parametrize(("line", "said"), PLACED_NOWHERE)
def test_placements_that_are_not_modelled(kvcalc: Run, line: str, said: str) -> None:
    result = kvcalc(f"fit {line} --engine llama.cpp")
    assert (result.code, result.out, said in result.err) == (2, "", True)


def test_the_advised_command_has_a_slot_for_each_user(kvcalc: Run) -> None:
    line = "fit qwen3-14b --gpu rtx-4090 --engine llama.cpp -q q8_0 --context 32k --users 2"
    assert " --ctx-size 65536 --parallel 2 --cache-type-k q8_0 " in kvcalc(line).joined
