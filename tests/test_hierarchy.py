"""The memory hierarchy, from registers to disk: figures in presets, the time to load weights, and the place of data."""

from pathlib import Path

import pytest
from conftest import Run

from kvcalc import Parallelism, Precision, UserError, deploy, load_gpu, load_model
from kvcalc.capacity.memory_budget import replicated_data
from kvcalc.library.load import all_gpus
from kvcalc.model.precision import formats_of
from kvcalc.report.text.roofline_text import memory_levels

# Compute capability: (KiB of shared memory of an SM at most, fp32 lanes of it). CUDA C++ Programming Guide, technical
# specifications and arithmetic throughput per compute capability.
CAPABILITIES = {
    "6.1": (96, 128), "7.0": (96, 64), "7.5": (64, 64), "8.0": (164, 64), "8.6": (100, 128), "8.7": (164, 128), "8.9": (100, 128),
    "9.0": (228, 128), "10.0": (228, 128), "10.3": (228, 128), "12.0": (100, 128), "12.1": (100, 128), "11.0": (228, 128),
}  # fmt: skip
GPUS = {
    "p40": "6.1", "v100": "7.0", "v100-16gb": "7.0", "rtx-2080-ti": "7.5", "t4": "7.5", "a100-80gb": "8.0", "a100-80gb-pcie": "8.0",
    "a100-40gb-sxm": "8.0", "a100-40gb-pcie": "8.0", "a30": "8.0", "a10": "8.6", "rtx-3090": "8.6", "l4": "8.9", "l40s": "8.9", "rtx-4090": "8.9",
    "h100-sxm": "9.0", "h100-pcie": "9.0", "h100-nvl": "9.0", "h200": "9.0", "h20": "9.0", "h800": "9.0", "gh200": "9.0",
    "gh200-144gb": "9.0", "b200": "10.0", "gb200": "10.0", "b300": "10.3", "gb300": "10.3", "rtx-5090": "12.0",
    **dict.fromkeys(["rtx-3080", "rtx-3080-12gb", "a40", "rtx-a6000", "a10g", "rtx-3060", "rtx-3060-ti", "rtx-3070", "rtx-3090-ti"], "8.6"),
    **dict.fromkeys(["rtx-a4000", "rtx-a5000"], "8.6"), "jetson-agx-orin-64gb": "8.7", "jetson-agx-orin-32gb": "8.7",
    **dict.fromkeys(["rtx-4080", "rtx-4080-super", "rtx-4060-ti-16gb", "rtx-6000-ada", "l40", "rtx-4060", "rtx-4060-ti-8gb"], "8.9"),
    **dict.fromkeys(["rtx-4070", "rtx-4070-ti", "rtx-4000-ada"], "8.9"), "dgx-spark": "12.1", "jetson-agx-thor": "11.0",
    **dict.fromkeys(["rtx-5060-ti-16gb", "rtx-5060-ti-8gb", "rtx-5060", "rtx-5070", "rtx-5070-ti", "rtx-5080"], "12.0"),
    "rtx-pro-6000-blackwell": "12.0", "rtx-pro-6000-blackwell-workstation": "12.0", "jetson-orin-nx-16gb": "8.7", "jetson-orin-nano-super": "8.7",
}  # fmt: skip


def test_every_nvidia_preset_has_its_compute_capabilitys_figures() -> None:
    """64Ki registers of 4 bytes; 32 banks of 4 bytes per cycle, and two FLOPs of each lane: 128/(2 · lanes) bytes per FLOP."""
    assert {g.name for g in all_gpus("nvidia")} == set(GPUS)
    for name, capability in GPUS.items():
        gpu, (shared, lanes) = load_gpu(name), CAPABILITIES[capability]
        assert gpu.register_bytes_per_sm == 65_536 * 4
        assert gpu.shared_memory_bytes_per_sm == shared * 1024
        assert gpu.vector_peak and gpu.shared_memory_bytes_per_s == pytest.approx(gpu.vector_peak * 128 / (2 * lanes))


def test_h100_level_by_level() -> None:
    """132 SMs: 33 MiB of registers, 29.39 MiB of shared memory at 128 B · 132 · 1.98 GHz = 33.45 TB/s; 85.0 GB at 3.35 TB/s.

    L2: 4,528.92 GiB/s in MT4G's results. Host and disk: Azure ND H100 v5, 1,900 and 28,000 GiB, the disks at 55.4 GB/s.
    """
    found = {one["level"]: one for one in memory_levels(load_gpu("h100"))}
    assert list(found) == ["registers", "shared memory, L1", "L2", "HBM3", "another GPU's", "the host's", "disk"]
    assert found["registers"]["bytes"] == 132 * 262_144 == 33 << 20
    assert found["registers"]["bytes_per_s"] == pytest.approx(3 * 4 * 128 * 132 * 1.98e9, rel=1e-3)  # 128 multiply-adds a cycle
    assert found["shared memory, L1"]["bytes"] == 132 * 228 * 1024
    assert found["shared memory, L1"]["bytes_per_s"] == pytest.approx(128 * 132 * 1.98e9, rel=1e-3)
    assert found["L2"]["bytes"] == 50 << 20
    assert found["L2"]["bytes_per_s"] == pytest.approx(4528.92 * 2**30, rel=1e-3)
    assert found["HBM3"]["seconds"] == 85_017_755_648 / 3.35e12
    assert (found["the host's"]["bytes"], found["the host's"]["bytes_per_s"]) == (1900 << 30, 64e9)
    assert (found["disk"]["bytes"], found["disk"]["bytes_per_s"]) == (28_000 << 30, 55.4e9)


def test_the_hierarchy_is_drawn(kvcalc: Run, tmp_path: Path) -> None:
    target = tmp_path / "memories.svg"
    assert kvcalc(f"gpus h100 --plot {target}").code == 0
    drawn = target.read_text()
    assert all(name in drawn for name in ("registers", "L2", "HBM3", "disk", "another GPU"))


def test_l2_of_a100_by_its_white_paper() -> None:
    """5120 bytes per cycle at 1410 MHz; for the V100, 2048 at 1530."""
    assert load_gpu("a100").l2_bytes_per_s == pytest.approx(5120 * 1.41e9, rel=1e-3)
    assert load_gpu("v100").l2_bytes_per_s == pytest.approx(2048 * 1.53e9, rel=2e-3)


# ---- weights on their way in


def test_loading_is_as_slow_as_the_disk_or_the_link(kvcalc: Run) -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters of 2 bytes. A disk of 7 GB/s takes 2.294 s, PCIe of 64 GB/s takes 0.251 s."""
    (record,) = kvcalc("fit llama-3.1-8b --disk-bandwidth 7gb/s --format json").records
    size = 2 * 8_030_261_248
    assert record["checkpoint_bytes"] == size
    assert (record["load_disk_s"], record["load_link_s"]) == (size / 7e9, size / 64e9)
    assert record["load_s"] == size / 7e9
    (record,) = kvcalc("fit llama-3.1-8b --format json").records
    assert record["load_disk_s"] is None and record["load_s"] == size / 64e9
    shown = kvcalc("fit llama-3.1-8b -v").out
    assert "14.96 GiB from host to each GPU at least 251 ms" in shown
    assert "from disk to host at least 2.29 s" in kvcalc("fit llama-3.1-8b --disk-bandwidth 56Gb/s -v").out


# ---- weights in host memory


def test_offloaded_weights_leave_room_and_cross_in_every_pass(kvcalc: Run) -> None:
    """vLLM's --cpu-offload-gb is in GiB: 4 GiB fewer weights, and 4·2^30 ÷ 64e9 = 67.1 ms over PCIe."""
    line = "fit llama-3.1-8b --engine none"
    plain, offloaded = (kvcalc(f"{line} {more} --format json").records[0] for more in ("", "--cpu-offload-gb 4"))
    assert plain["weight_bytes"] - offloaded["weight_bytes"] == offloaded["cpu_offload_bytes"] == 4 << 30
    assert offloaded["kv_budget_bytes"] - plain["kv_budget_bytes"] == 4 << 30
    assert offloaded["cpu_offload_s"] == (4 << 30) / 64e9
    (all_of_it,) = kvcalc("fit llama-3.1-8b --engine none --cpu-offload-gb 100 --format json").records
    stays = 2 * 128_256 * 4_096 * 2 + 4_096 * 2  # embedding, head and final norm are in no layer
    assert (all_of_it["weight_bytes"], all_of_it["cpu_offload_bytes"]) == (stays, plain["weight_bytes"] - stays)
    (predicted,) = kvcalc("fit llama-3.1-8b --cpu-offload-gb 4 --format json").records
    assert predicted["cpu_offload_s"] == (4 << 30) / 51e9  # measured in an Azure ND H100 v5


def test_a_token_waits_for_the_link(kvcalc: Run) -> None:
    """4 GiB of layers cross the link in each pass: in a bound at its documented 64 GB/s, in a prediction at 51 GB/s."""
    line = "latency llama-3.1-8b --input-len 100 --output-len 2 --format json"
    (bound,) = kvcalc(f"{line} --stack datasheet --cpu-offload-gb 4").records
    assert bound["cpu_offload_s"] == (4 << 30) / 64e9
    assert bound["tpot_s"] == bound["cpu_offload_s"]  # the link is slower than all that it overlaps
    plain, away = (kvcalc(f"{line} --cpu-offload-gb {n}").records[0] for n in (0, 4))
    assert away["cpu_offload_s"] == (4 << 30) / 51e9
    assert away["tpot_s"] - plain["tpot_s"] == pytest.approx(away["cpu_offload_s"], rel=1e-9)  # one after the other
    assert away["cpu_offload_bytes"] == 4 << 30 and plain["cpu_offload_s"] is None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("how", ["--gpu h100", "--gpu h200 --tp 8", "--gpu a100-80gb --pp 2", "--gpu rtx-4090", "--engine none"])
def test_fit_and_latency_give_the_same_transfer_time(kvcalc: Run, model: str, how: str) -> None:
    (fitted,) = kvcalc(f"fit {model} {how} --cpu-offload-gb 5 --format json").records
    (timed,) = kvcalc(f"latency {model} {how} --cpu-offload-gb 5 --format json").records
    assert fitted["cpu_offload_s"] == timed["cpu_offload_s"] > 0


def test_of_experts_those_that_tokens_reach_cross(kvcalc: Run) -> None:
    """A token reaches 2 of Mixtral's 8 experts, so a step reads less than half of its layers."""
    (timed,) = kvcalc("latency mixtral-8x7b --cpu-offload-gb 40 --engine none --format json").records
    assert 2 / 8 < timed["cpu_offload_read_bytes"] / (40 << 30) < 0.3
    assert timed["cpu_offload_s"] == pytest.approx(timed["cpu_offload_read_bytes"] / 64e9)


@pytest.mark.parametrize(("gpu", "rate", "basis"), [("h100", 51e9, "predicted"), ("l40s", 32e9, "at least")])
def test_what_is_stored_is_sent_at_the_rate_of_the_link(kvcalc: Run, gpu: str, rate: float, basis: str) -> None:
    """AWQ: 4 bits per weight, and 16 + 4 bits per 128. A quarter of 80 layers is less than the 10 GiB that may be offloaded.

    The host link of an H100 was measured. The L40S has the documented PCIe 4, so its time is a bound.
    """
    matrices = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    size = matrices * (4 * 128 + 20) // 128 // 8 // 4 + 80 * 2 * 8192 * 2
    for command in ("fit", "latency"):
        line = f"{command} llama-3.1-70b --gpu {gpu} --tp 4 -q awq --cpu-offload-gb 10"
        (record,) = kvcalc(f"{line} --json").records
        assert record["cpu_offload_bytes"] == record["cpu_offload_read_bytes"] == size
        assert (record["cpu_offload_s"], record["cpu_offload_basis"]) == (size / rate, basis)
        assert f"reads 8.28 GiB of them, {basis} {1000 * size / rate:.0f} ms" in kvcalc(f"{line} -v").joined


def test_times_that_rest_partly_on_bounds_claim_no_error(kvcalc: Run) -> None:
    """Transfers, steps over several nodes, latents without a kernel model, and weights in formats without rows have no error
    value."""
    known = kvcalc("latency llama-3.1-70b --gpu h100 --tp 4 --format json").records[0]
    assert known["time_p90_error"] and known["uncalibrated_share"] < 0.01
    lines = ("llama-3.1-70b --cpu-offload-gb 80", "llama-3.1-70b --gpu h100 --tp 16", "llama-3.1-70b --tp 2 -q awq")
    for line in (*lines, "qwen3-next-80b-a3b --tp 4", "llama-3.1-70b --tp 2 -q nvfp4"):
        found = kvcalc(f"latency {line} --format json").records[0]
        assert found["time_p90_error"] is None, line
    for line in ("llama-3.1-70b --gpu h100 --tp 16", "llama-3.1-70b --tp 2 -q awq"):
        served = kvcalc(f"serve {line} --rate 1 --num-prompts 20 --format json").records[0]
        assert all(served[f"{name}_p90_error"] is None for name in ("time", "tpot", "ttft", "throughput"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fit llama-3.1-8b --cpu-offload-gb 2 --weight-bytes 10GiB", "weight-bytes are the bytes on the GPU"),
        (
            "fit llama-3.1-8b --engine llama.cpp --cpu-offload-gb 2",
            "llama.cpp has no cpu-offload-gb. `kvcalc fit` takes --n-gpu-layers N; times",
        ),
        ("latency llama-3.1-8b --cpu-offload-gb nan", "cpu-offload-gb nan is not a number from 0 to 1,048,576"),
        ("latency llama-3.1-8b --gpu tpu-v7 --cpu-offload-gb 2", "has no host_link_bytes_per_s"),
        ("fit llama-3.1-8b --disk-bandwidth fast", "disk-bandwidth 'fast' is not a number of bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(kvcalc: Run, line: str, said: str) -> None:
    result = kvcalc(line)
    assert result.code == 2 and said in result.err and len(result.err.splitlines()) == 1


def test_a_draft_stays_on_the_gpu() -> None:
    found = deploy("llama-3.1-70b", "h200", tp=4)
    drafted = (found.latency(draft="llama-3.2-1b", num_speculative_tokens=4, cpu_offload_gb=n).draft_s for n in (0, 20))
    assert len(set(drafted)) == 1
    with pytest.raises(UserError, match="not a number from 0 to 1,048,576"):
        found.latency(cpu_offload_gb=-2)


# ---- data that several GPUs store


def test_kv_heads_fewer_than_gpus_are_held_twice() -> None:
    """Llama-3.1-70B on 16 GPUs: each KV head is on two GPUs, with its projections [8192, 128] in 80 layers. Norms are on all."""
    model = load_model("llama-3.1-70b")
    formats, projection = formats_of(model, Precision()), 80 * 8192 * 128 * 2
    norms = {"norms": 80 * 2 * 8192 * 2, "final_norm": 8192 * 2}
    assert replicated_data(model, formats, Parallelism(16)) == ({"k": projection, "v": projection, **norms}, {"k": 2, "v": 2})
    assert replicated_data(model, formats, Parallelism(8))[1] == {}
    assert replicated_data(model, formats, Parallelism(1)) == ({}, {})


def test_latents_are_held_on_every_gpu(kvcalc: Run) -> None:
    """DeepSeek-V3: 61 projections [7168, 512 + 64] and [7168, 1536] are on each of 8 GPUs, and so are the latents."""
    model = load_model("deepseek-v3")
    weights, copies = replicated_data(model, formats_of(model, Precision("bf16")), Parallelism(8))
    assert copies == {"latent": 8, "rope_key": 8}
    assert weights["kv_down"] == 61 * 7168 * 576 * 2
    assert weights["q_down"] == 61 * 7168 * 1536 * 2
    assert not {"q_up", "kv_up", "o", "embedding", "lm_head"} & set(weights)
    (record,) = kvcalc("fit deepseek-v3 --gpu h200 --tp 8 --dtype bf16 --format json").records
    assert record["kv_copies"] == 8 and record["replicated_weight_bytes"] == sum(weights.values())
    # 2 ranks of the 8 store other tokens
    assert replicated_data(model, formats_of(model, Precision()), Parallelism(8, dcp=2))[1] == {"latent": 4, "rope_key": 4}
