"""Calibrated times of whole passes: sums of kernel models, overhead, errors, and their basis."""

from typing import Any

import msgspec
import numpy as np
import pytest

from kvcalc.gpu.gpu import roofline
from kvcalc.layers.batch import Batch, Parallelism, Sequences
from kvcalc.layers.cost import AttentionShape, CollectiveShape, ExpertsShape, GemmShape
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.forward_pass import forward
from kvcalc.timing.calibration import Calibration, EngineOverheads, ErrorStatistics, HostOverheads, KernelModelEntry
from kvcalc.timing.deployment import TimedDeployment, pass_records
from kvcalc.timing.kernel_models.families import AnyKernelModel
from kvcalc.timing.kernel_models.flash_attention import DecodeAttention, PrefillAttention
from kvcalc.timing.kernel_models.fused_moe import FusedMoe, busiest_load, expert_kinds
from kvcalc.timing.kernel_models.gemm import Gemm, QuantizedGemm
from kvcalc.timing.kernel_models.kernel_model import figures_of
from kvcalc.timing.kernel_models.mla import MlaDecode
from kvcalc.timing.steps import OperatorTime, engine_seconds, operator_seconds, pass_time, step_error

H100 = load_gpu("h100")
LLAMA = load_model("llama-3.1-8b")


def entry(law: AnyKernelModel, p90: float = 0.1) -> KernelModelEntry:
    return KernelModelEntry(law=law, rows=100, median_abs_error=0.05, p90_abs_error=p90)


GEMM, FP8, DECODE, PREFILL, MLA = Gemm(), QuantizedGemm(t0=12), DecodeAttention(), PrefillAttention(), MlaDecode()
MINE = Calibration(
    gpu="h100-sxm",
    stack="mine",
    glue_us=8.0,
    laws={
        "gemm": {"bfloat16": entry(GEMM), "fp8": entry(FP8, 0.4)},
        "decode_attention": {"bfloat16": entry(DECODE, 0.2)},
        "prefill_attention": {"bfloat16/bfloat16": entry(PREFILL)},
        "mla_decode": {"bfloat16": entry(MLA)},
    },
)


def test_operators_carry_the_shapes_that_laws_need() -> None:
    operators = {o.name: o for o in forward(LLAMA, Batch.decode(1024, 16), parallelism=Parallelism(tp=2))}
    assert operators["qkv"].shape == GemmShape(16, (16 + 2 * 4) * 128, 4096, 2.0, "bf16")
    assert operators["gate_up"].shape == GemmShape(16, 14336, 4096, 2.0, "bf16")
    assert operators["attention"].shape == AttentionShape(16, 4, 128, 128, ("bf16",), ((16, 1, 1023, 16 * 1024),))
    assert operators["all_reduce"].shape == CollectiveShape(2, 16 * 4096 * 2, 2)


def test_routed_experts_are_one_operator_with_what_is_in_it() -> None:
    operators = {
        o.name: o for o in forward(load_model("deepseek-v3"), Batch.decode(1024, 1), parallelism=Parallelism(tp=8, ep=8))
    }
    assert operators["experts"].shape == ExpertsShape(1, 7168, 2048, 8, 256, 8, True, False, "fp8_block128")
    assert [name for name, _ in operators["experts"].parts] == ["gate_up", "activation", "down"]
    latent = operators["attention"].shape
    assert isinstance(latent, AttentionShape)
    assert (latent.heads, latent.kv_heads, latent.key + latent.value) == (16, 0, 1088)


def test_a_decode_step_is_the_sum_of_its_laws_with_glue() -> None:
    operators = forward(LLAMA, Batch.decode(4096, 8))
    timed = dict(zip((o.name for o in operators), operator_seconds(operators, H100, MINE), strict=True))
    figures = figures_of(H100)
    qkv = GEMM.us(figures, np.array([8.0]), np.array([6144.0]), np.array([4096.0]))[0]
    cold = DecodeAttention(cold=True).us(figures, *(np.array([float(x)]) for x in (8, 32, 8, 128, 4096, 0)))[0]
    assert timed["qkv"].seconds == pytest.approx(32 * qkv / 1e6)
    assert timed["attention"].seconds == pytest.approx(32 * cold / 1e6)
    assert engine_seconds(operators, MINE, 1.0) == pytest.approx(32 * 8e-6)
    assert pass_time(operators, H100, MINE).seconds == pytest.approx(sum(t.seconds for t in timed.values()) + 32 * 8e-6)
    assert {t.basis for name, t in timed.items() if name in ("qkv", "attention", "o", "gate_up", "down")} == {"calibrated"}
    chains = ("embedding", "norm", "rope", "activation", "sampling")  # no rows are of them
    assert {timed[name].basis for name in chains} == {"scaled"}


def test_an_engine_adds_to_layers_ranks_passes_sequences_and_prompts() -> None:
    """A decode step of 8 sequences on 4 GPUs: 32 · (2 + 3 · log2(4)) + 100 + 8 · 5 µs in addition to its kernels. With
    prompts, kernels take a tenth more."""
    terms = HostOverheads(glue_us=2.0, skew_us=3.0, step_us=100.0, sequence_us=5.0, prompts=1.1)
    laws = msgspec.structs.replace(MINE, engine=EngineOverheads(stack="mine", dense=terms, mixture=HostOverheads()))
    decode = forward(LLAMA, Batch.decode(1024, 8), parallelism=Parallelism(tp=4))
    assert engine_seconds(decode, laws, 1.0) == pytest.approx((32 * (2 + 3 * 2) + 100 + 8 * 5) / 1e6)
    prompt = forward(LLAMA, Batch.prefill(1024, 2))
    assert engine_seconds(prompt, laws, 1.0) == pytest.approx((32 * 2 + 100 + 2 * 5) / 1e6 + 0.1)
    lengths = forward(LLAMA, Batch((Sequences(1, np.array([8, 1024]), 0),)))
    assert engine_seconds(lengths, laws, 1.0) == pytest.approx([(32 * 2 + 105) / 1e6, (32 * 2 + 105) / 1e6 + 0.1])
    slow = msgspec.structs.replace(
        laws, engine=EngineOverheads(stack="mine", dense=HostOverheads(launch_us=5e4), mixture=HostOverheads())
    )
    assert engine_seconds(prompt, slow, 1.0) == pytest.approx(32 * 0.05 - 1.0)
    assert engine_seconds(prompt, slow, 2.0) == engine_seconds(decode, slow, 1.0) == 0
    assert engine_seconds(forward(load_model("mixtral-8x7b"), Batch.decode(64, 8)), laws, 1.0) == 0


def timed(name: str, batch: Batch, laws: Calibration, **options: Any) -> dict[str, OperatorTime]:
    """Return every operator of the last kind of layer that has it."""
    operators = forward(load_model(name), batch, **options)
    return dict(zip((o.name for o in operators), operator_seconds(operators, H100, laws), strict=True))


def with_laws(**laws: dict[str, KernelModelEntry]) -> Calibration:
    return msgspec.structs.replace(MINE, laws=MINE.laws | laws)


def test_operators_without_a_law_take_their_bound_and_a_launch() -> None:
    """They read at most 80% of the bandwidth. An estimate, so it is marked as scaled: only a time equal to the datasheet bound is marked as a bound."""
    found = timed("deepseek-v3.2", Batch.decode(8192, 4), MINE)
    bounds = {p.operator.name: p for p in roofline(forward(load_model("deepseek-v3.2"), Batch.decode(8192, 4)), H100)}
    for name in ("indexer", "experts"):
        assert found[name].basis == "scaled"
        launches = 1.5e-6 * bounds[name].operator.count
        reads_s = bounds[name].operator.cost.bytes * bounds[name].operator.count / (0.8 * 3.35e12)
        assert found[name].seconds == pytest.approx(max(bounds[name].seconds, reads_s) + launches)
    assert found["attention"].basis == "calibrated"


TRITON, FUSED = FusedMoe(tiles="vllm_block", bytes=1.0, compute=1), FusedMoe(bytes=1.0, compute=1, t0=60)
EXPERTS = with_laws(moe={"fp8_block/triton": entry(TRITON), "fp8_block/flashinfer": entry(FUSED, 0.3)})


def experts_us(law: FusedMoe, tokens: int, ranks: int) -> float:
    """Return the time of DeepSeek-V3's experts in 58 layers by the kernel model, spread as whole experts over `ranks` ranks."""
    sizes = [np.array([float(x)]) for x in (tokens, 7168, 2048, 8, 256, 1, ranks)]
    load = busiest_load(sizes[0], sizes[3], sizes[4], sizes[6])
    return float(law.us(figures_of(H100), *sizes, load.rows, load.touched, *load.tiles)[0])


def test_experts_follow_the_law_of_their_kernel_at_a_router_s_load() -> None:
    """FlashInfer's kernel if experts are spread over ranks and it was measured tuned, otherwise Triton's, on the busiest rank."""
    batch = Batch.decode(4096, 64)
    one, eight = (timed("deepseek-v3", batch, EXPERTS, parallelism=Parallelism(tp=n, ep=n))["experts"] for n in (1, 8))
    assert one.seconds == pytest.approx(58e-6 * experts_us(TRITON, 64, 1))
    assert eight.seconds == pytest.approx(58e-6 * experts_us(FUSED, 64, 8))
    assert (eight.basis, eight.entry) == ("calibrated", EXPERTS.laws["moe"]["fp8_block/flashinfer"])
    untuned = with_laws(moe=EXPERTS.laws["moe"] | {"fp8_block/flashinfer": entry(msgspec.structs.replace(FUSED, em=0.2))})
    eight = timed("deepseek-v3", batch, untuned, parallelism=Parallelism(tp=8, ep=8))["experts"]
    assert eight.seconds == pytest.approx(58e-6 * experts_us(TRITON, 64, 8))


def test_experts_beyond_a_node_have_no_calibrated_time() -> None:
    assert H100.link_domain == 8
    found = timed("deepseek-v3", Batch.decode(4096, 64), EXPERTS, parallelism=Parallelism(tp=8, dp=2, ep=16))
    assert found["experts"].basis == found["all_to_all"].basis == "scaled"


CELLS = [  # experts' format, gated, biased, ranks; the cells that may time them, best first
    ("bf16", True, False, 1, ["bfloat16/triton", "bfloat16/oai"]),
    ("bf16", False, False, 1, ["bfloat16/triton/ungated"]),
    ("fp8_block128", True, False, 8, ["fp8_block/flashinfer", "fp8_block/cutlass", "fp8_block/triton"]),
    ("int4_g32", True, False, 1, ["int4_wo/triton"]),
    ("mxfp4", True, True, 1, ["w4a16_mxfp4/oai", "w4a16_mxfp4/triton", "w4a16_mxfp4"]),
    ("mxfp4", True, False, 8, ["w4a16_mxfp4/marlin", "w4a16_mxfp4"]),
    ("nvfp4", True, False, 1, ["nvfp4/triton"]),
    ("nf4", True, False, 1, []),
]


@pytest.mark.parametrize(("stored", "gated", "bias", "ranks", "first"), CELLS)
def test_which_cells_may_time_experts(stored: str, gated: bool, bias: bool, ranks: int, first: list[str]) -> None:
    found = expert_kinds(ExpertsShape(8, 7168, 2048, 8, 256, ranks, gated, bias, stored))
    assert list(found[: len(first)]) == first
    assert bool(found) == bool(first)


def test_a_step_s_error_is_that_of_measured_steps_and_never_of_an_operator() -> None:
    known = msgspec.structs.replace(
        MINE, validation={"dense": ErrorStatistics(rows=30, median_abs_error=0.06, p90_abs_error=0.17)}
    )
    step, prompt = forward(LLAMA, Batch.decode(1024, 8)), forward(LLAMA, Batch.prefill(1024))
    assert step_error(step, H100, known) == 0.17
    assert step_error(step, H100, MINE) is None
    assert step_error(prompt, H100, known) is None
    assert step_error(step, load_gpu("h200"), known) is None
    assert step_error(forward(load_model("deepseek-v3"), Batch.decode(1024, 8)), H100, known) is None


def test_what_a_time_rests_on_is_in_its_record() -> None:
    laws = with_laws(moe={"fp8_block/flashinfer": entry(FUSED, 0.3)})
    deployed = TimedDeployment(load_model("deepseek-v3"), H100, calibration=laws)
    *each, whole = pass_records(deployed.operator_bounds(Batch.decode(4096, 8)), H100, laws)
    (experts,) = [r for r in each if r["operator"] == "experts"]
    assert {(r["time_basis"], r["time_p90_error"]) for r in (experts, whole)} == {("calibrated", None)}
    assert whole["uncalibrated_share"] == pytest.approx(deployed.uncalibrated_share(Batch.decode(4096, 8)))
    borrowed = pass_records(deployed.operator_bounds(Batch.decode(4096, 8)), load_gpu("h200"), laws)
    assert {(r["time_basis"], r["time_p90_error"]) for r in borrowed} == {("scaled", None)}
    bounds = pass_records(deployed.operator_bounds(Batch.decode(4096, 8)), H100)
    assert {r["time_basis"] for r in bounds} == {"bound"}
    assert (deployed.time_basis, msgspec.structs.replace(deployed, calibration=None).time_basis) == ("calibrated", "bound")
