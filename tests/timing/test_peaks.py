"""Bounds are correct: no kernel and no published run is faster than `≥` and "at most" allow."""

import json

import pytest

from kvcalc.gpu.gpu import cost_bound
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.precision import Precision
from kvcalc.serving.measured_servers import bound_us, precision_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.rows import MeasuredRow
from tests.conftest import Run

LLAMA = load_model("llama-3.1-8b")

# Weights, GPU, and the dense matrix FLOP/s of the fastest documented unit that multiplies them: the vendor's documents.
FASTEST = [
    # 4-bit weights and activations: fp4 on Blackwell and CDNA 4, weight-only kernels in bf16 before
    ("nvfp4", "b200", 9000e12), ("nvfp4", "gb200", 10000e12), ("nvfp4", "b300", 13500e12), ("nvfp4", "gb300", 15000e12),
    ("nvfp4", "rtx-pro-6000-blackwell", 2000e12), ("nvfp4", "rtx-5090", 1676e12), ("nvfp4", "h100-sxm", 989e12),
    ("mxfp4", "mi355x", 10066e12), ("mxfp4", "mi300x", 1307.4e12), ("nvfp4", "a100-80gb", 312e12),
    # weight-only: the model's bf16
    ("awq", "b200", 2250e12), ("gptq", "b200", 2250e12), ("int4", "gb300", 2500e12), ("awq", "h100-sxm", 989e12),
    ("nvfp4_weight_only", "b200", 2250e12), ("mxfp4_weight_only", "b200", 2250e12), ("fp8_weight_only", "h100-sxm", 989e12),
    # 8-bit weights and activations
    ("fp8", "b200", 4500e12), ("fp8", "l40s", 733e12), ("mxfp8", "mi355x", 5033e12), ("fp8", "a100-80gb", 312e12),
    ("int8", "a100-80gb", 624e12), ("int8", "b300", 2250e12),
    # GeForce: fp16 accumulators double fp16 and fp8, but not bf16. The 2080 Ti runs bf16 models in fp16
    ("", "rtx-4090", 165.2e12), ("fp8", "rtx-4080", 389.9e12), ("f16", "rtx-4090", 330.3e12), ("", "rtx-3090", 71e12),
    ("", "rtx-5090", 209.5e12), ("fp8", "rtx-5090", 838e12), ("", "rtx-6000-ada", 364.2e12), ("", "rtx-2080-ti", 107.6e12),
    # GGUF: int8 tensor cores, fp4 for 4-bit floats on Blackwell
    ("q4_k_m", "rtx-4080", 389.9e12), ("q8_0", "a100-80gb", 624e12), ("q4_0", "rtx-pro-6000-blackwell", 1000e12),
    ("iq4_xs", "rtx-3090", 284e12), ("q6_k", "mi300x", 2614.9e12),
]  # fmt: skip


def gate(model_name: str, gpu: str, quantization: str, tokens: int = 1 << 16) -> tuple[Operator, float]:
    """Return the first FFN product of a long prompt, and its bound in seconds."""
    card = load_gpu(gpu)
    found = TimedDeployment(load_model(model_name), card, Precision(quantization=quantization)).operators(Batch.prefill(tokens))
    operator = next(o for o in found if "gate" in o.name or "up" in o.name)
    return operator, cost_bound(operator.cost, operator.dtype, card).seconds


@pytest.mark.parametrize(("quantization", "gpu", "peak"), FASTEST)
def test_long_prompts_are_bound_by_the_fastest_documented_unit(quantization: str, gpu: str, peak: float) -> None:
    operator, seconds = gate("llama-3.1-8b", gpu, quantization)
    flops = 2 * 65_536 * 4096 * 14_336  # of gate and of up each
    assert operator.cost.flops in (flops, 2 * flops)
    assert seconds == pytest.approx(operator.cost.flops / peak)


EXPERTS = [
    ("", "b200", 9000e12), ("", "rtx-5090", 1676e12), ("", "h100-sxm", 989e12), ("", "mi355x", 10066e12), ("", "rtx-4090", 165.2e12),
    ("mxfp4_moe", "rtx-5090", 1676e12), ("mxfp4_moe", "rtx-4090", 660.6e12), ("mxfp4_moe", "h100-sxm", 1978.9e12),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "gpu", "peak"), EXPERTS)
def test_experts_in_mxfp4_compute_in_fp4_if_a_gpu_has_it_and_ggufs_else_in_int8(quantization: str, gpu: str, peak: float) -> None:
    card = load_gpu(gpu)
    timed = TimedDeployment(load_model("gpt-oss-120b"), card, Precision(quantization=quantization))
    experts = [o for o in timed.operators(Batch.prefill(1 << 17)) if o.experts]
    assert experts
    for operator in experts:  # on some GPUs what moves between the memory and experts of 2,880 columns takes longer
        least = max(operator.cost.flops / peak, operator.cost.bytes / card.bandwidth_bytes_per_s)
        assert cost_bound(operator.cost, operator.dtype, card).seconds == pytest.approx(least)


@pytest.mark.parametrize(
    ("cache", "gpu", "peak"),
    [("bf16", "h100-sxm", 989e12), ("fp8", "h100-sxm", 1978.9e12), ("fp8", "a100-80gb", 312e12), ("nvfp4", "b200", 4500e12)],
)
def test_attention_over_an_fp8_cache_may_compute_in_fp8(cache: str, gpu: str, peak: float) -> None:
    """One token after 8,191 attends to 8,192 in 32 layers, in a batch of 1,024, with 128 queries per KV head."""
    card = load_gpu(gpu)
    found = TimedDeployment(LLAMA, card, Precision(kv_cache_dtype=cache)).operators(Batch.prefill(8192))
    (attention,) = [o for o in found if o.kind == "attention"]
    pairs = 8192 * 8193 // 2
    assert attention.cost.flops == 4 * pairs * 32 * 128
    assert cost_bound(attention.cost, attention.dtype, card).seconds == pytest.approx(4 * pairs * 32 * 128 / peak)


# Published output tokens per second: NVIDIA's TensorRT-LLM performance overview, NVFP4 with an fp8 cache, 8,192 in, 1,024 out.
SERVED = [
    ("llama-3.1-70b --gpu b200", 1362),
    ("llama-3.1-70b --gpu rtx-pro-6000-blackwell", 296),
    ("llama-3.1-405b --gpu b200 --tp 8", 1616),
]


@pytest.mark.parametrize(("what", "published"), SERVED)
def test_no_published_server_beats_at_most(kvcalc: Run, what: str, published: float) -> None:
    how = "-q nvfp4 --kv-cache-dtype fp8 --isl 8192 --osl 1024 --stack datasheet --rate inf --num-prompts 400 --format json"
    code, out, err = kvcalc(f"serve {what} {how}")
    assert (code, err) == (0, "")
    (record,) = json.loads(out)
    assert record["time_basis"] == "bound"
    assert record["throughput_tokens_per_s"] > published


@pytest.mark.parametrize("how", ["--dtype fp16", "-q f16"])
def test_no_published_prompt_beats_at_most(kvcalc: Run, how: str) -> None:
    """6,758.90 prompt tokens a second of Llama-3-8B in F16 on an RTX 4080 (XiongjieDai/GPU-Benchmarks-on-LLM-Inference)."""
    code, out, _ = kvcalc(f"latency llama-3-8b --input-len 1024 --output-len 1 --gpu rtx-4080 {how} --format json")
    assert code == 0
    assert 1024 / json.loads(out)[0]["ttft_s"] > 6759


def served(model: str, dtype: str, gpu: str = "b200") -> MeasuredRow:
    return MeasuredRow(0, "e2e_moe", gpu, "trtllm", dtype, (1024.0, 1024.0, 64.0, 8.0, 1.0), 1.0, model, "")


@pytest.mark.parametrize(
    ("model", "label", "quantization"),
    [
        ("meta-llama/Llama-3.1-70B", "nvfp4", "nvfp4"), ("meta-llama/Llama-3.1-70B", "fp4", "nvfp4"),
        ("meta-llama/Llama-3.1-70B", "fp8", "fp8_block128"), ("meta-llama/Llama-3.1-70B", "bfloat16", ""),
        ("deepseek-ai/DeepSeek-R1", "nvfp4", "nvfp4"), ("deepseek-ai/DeepSeek-R1", "fp8", ""),
        ("openai/gpt-oss-120b", "fp4", ""), ("moonshotai/Kimi-K2.5", "int4_wo", ""),
    ],
)  # fmt: skip
def test_published_runs_in_fp4_are_read_as_fp4(model: str, label: str, quantization: str) -> None:
    from kvcalc.timing.rows import served_model

    found = served_model(model)
    assert found is not None
    assert precision_of(served(model, label), found).quantization == quantization


def test_the_bound_of_a_run_in_fp4_is_below_that_in_fp8_and_bf16() -> None:
    b200 = load_gpu("b200")
    bounds = [bound_us(served("meta-llama/Llama-3.1-70B", label), b200) for label in ("nvfp4", "fp8", "bfloat16")]
    assert bounds == sorted(bounds) and len(set(bounds)) == 3
