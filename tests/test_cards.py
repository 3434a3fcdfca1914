"""Small GPUs and unified memory: figures compared with vendors and drivers, and GPUs without a matrix peak."""

import pytest
from conftest import Run

from kvcalc import load_gpu
from kvcalc.gpu.gpu import Gpu
from kvcalc.library.load import with_memory

GIB = 1 << 30
AI_TOPS = {
    "rtx-5090": 3352, "rtx-5080": 1801, "rtx-5070-ti": 1406, "rtx-5070": 988, "rtx-5060-ti-16gb": 759,
    "rtx-4090": 1321, "rtx-4080-super": 836, "rtx-4080": 780, "rtx-4060-ti-16gb": 353,
    "rtx-5060-ti-8gb": 759, "rtx-5060": 614, "rtx-4070-ti": 641, "rtx-4070": 466, "rtx-4060-ti-8gb": 353, "rtx-4060": 242,
}  # fmt: skip


@pytest.mark.parametrize("name", AI_TOPS)
def test_peaks_are_those_of_the_ai_tops(name: str) -> None:
    """AI TOPS are sparse rates, twice the dense rates: fp4 for Blackwell, fp8 with fp16 accumulation (8 × bf16) for Ada."""
    peaks = load_gpu(name).flops_per_s
    ratios = [peaks[dtype] / peaks["bf16"] for dtype in ("fp8", "int8")]
    if name.startswith("rtx-50"):
        assert abs(2 * peaks["fp4"] / 1e12 - AI_TOPS[name]) <= 1
        assert [peaks["fp4"] / peaks["bf16"], *ratios] == pytest.approx([8, 2, 4], rel=2e-3)
    else:
        assert abs(8 * peaks["bf16"] / 1e12 - AI_TOPS[name]) <= 1
        assert ratios == pytest.approx([2, 4], rel=2e-3)


WORKING_SETS = [
    ("m1", 8, 5726.63), ("m4", 16, 12713.12), ("m4", 24, 19069.67), ("m4", 32, 26800.60), ("m3-pro", 36, 30150.67),
    ("m4-pro", 48, 40200.90), ("m1-max", 64, 55662.79), ("m4-max", 128, 115448.73),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gib", "megabytes"), WORKING_SETS)
def test_working_set_is_what_metal_says(name: str, gib: int, megabytes: float) -> None:
    """recommendedMaxWorkingSetSize as llama.cpp prints it on these machines, in units of 10^6 bytes."""
    gpu = with_memory(load_gpu(name), f"{gib}GiB")
    assert gpu.memory_bytes == gib * GIB
    assert f"{gpu.usable_bytes / 1e6:.2f}" == f"{megabytes:.2f}"
    assert gpu.usable_bytes < gpu.memory_bytes


def test_memory_of_a_card_is_all_its_own() -> None:
    gpu = load_gpu("rtx-3080")
    assert gpu.usable_bytes == gpu.memory_bytes == 10_472_390_656
    assert with_memory(gpu, "20GiB").usable_bytes == 20 * GIB  # a modified card


def test_fit_keeps_within_the_working_set(kvcalc: Run) -> None:
    """Llama-3.1-8B in q4_k_m with a bf16 cache: the budget is the rest of 12,713,115,648 bytes, not of 16 GiB."""
    (record,) = kvcalc("fit llama-3.1-8b --gpu m4 --memory 16GiB --engine llama.cpp -q q4_k_m --format json").records
    assert (record["machine_memory_bytes"], record["memory_bytes"]) == (16 * GIB, 12_713_115_648)
    taken = record["weight_bytes"] + record["activation_bytes"] + record["overhead_bytes"]
    assert record["kv_budget_bytes"] == record["share_bytes"] - taken


def test_a_decode_step_is_bound_by_memory_alone(kvcalc: Run) -> None:
    """The bound is the bytes of `roofline` at 546 GB/s. The bytes are equal on a GPU with matrix peaks."""
    *_, whole = kvcalc("roofline llama-3.1-8b --gpu m4-max --context 4096 --format json").records
    *_, other = kvcalc("roofline llama-3.1-8b --gpu a100 --context 4096 --format json").records
    assert whole["bytes"] == other["bytes"]
    assert whole["bound"] == "memory"
    assert whole["roofline_s"] == pytest.approx(whole["bytes"] / 546e9, rel=1e-12)
    assert whole["fallback"] == "memory-bound: no matrix peak for bf16"


def test_what_needs_a_peak_is_null_or_refused(kvcalc: Run) -> None:
    (record,) = kvcalc("latency llama-3.1-8b --gpu m4-max --input-len 4095 --output-len 2 --format json").records
    assert record["ttft_s"] is None
    assert record["e2e_s"] is None
    assert record["output_tokens_per_s"] is None
    *_, step = kvcalc("roofline llama-3.1-8b --gpu m4-max --context 4096 --format json").records
    assert record["tpot_s"] == pytest.approx(step["roofline_s"], rel=1e-12)
    message = "kvcalc: apple-m4-max has no matrix peak for bf16. Its preset gives: none. Only decode steps have a bound"
    for command in ("roofline --phase prefill", "serve --rate 1 --num-prompts 2", "latency --no-cache"):
        code, _, err = kvcalc(command.replace(" ", " llama-3.1-8b --gpu m4-max ", 1))
        assert code == 2
        assert err.startswith(message)


def test_shares_are_by_size_whatever_their_order() -> None:
    gpu = Gpu(
        name="x", vendor="x", memory_bytes=24 * GIB, bandwidth_bytes_per_s=1e11, flops_per_s={}, source=(),
        usable_share=((32, 0.75), (16, 0.5)),
    )  # fmt: skip
    assert gpu.usable_bytes == 12 * GIB
    assert with_memory(gpu, "8GiB").usable_bytes == with_memory(gpu, "8 GB").usable_bytes == 4 * GIB
