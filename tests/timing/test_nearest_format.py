"""Cache formats without measured rows use the nearest kernel model, and their times are marked as scaled."""

import msgspec
import pytest

from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.forward_pass import forward
from kvcalc.model.precision import Precision
from kvcalc.timing.calibration import Calibration, ErrorStatistics, KernelModelEntry
from kvcalc.timing.kernel_models.families import AnyKernelModel
from kvcalc.timing.kernel_models.flash_attention import DecodeAttention
from kvcalc.timing.kernel_models.gemm import Gemm
from kvcalc.timing.kernel_models.mla import MlaDecode, MlaPrefill, SparseDecode
from kvcalc.timing.steps import operator_seconds, pass_time, step_error

H100 = load_gpu("h100")
LLAMA = load_model("llama-3.1-8b")


def entry(law: AnyKernelModel) -> KernelModelEntry:
    return KernelModelEntry(law=law, rows=100, median_abs_error=0.05, p90_abs_error=0.1)


LAWS = Calibration(
    gpu="h100-sxm",
    stack="mine",
    laws={
        "gemm": {"bfloat16": entry(Gemm())},
        "decode_attention": {"bfloat16": entry(DecodeAttention()), "fp8": entry(DecodeAttention(bytes=1, t0=9))},
        "dsa_decode_module": {"fp8/fp8_block": entry(SparseDecode(bytes=1))},
    },
    validation={"dense": ErrorStatistics(rows=40, median_abs_error=0.03, p90_abs_error=0.12)},
)


@pytest.mark.parametrize("cache", ["int4", "nvfp4", "int8", "turboquant_k8v4"])
def test_a_cache_without_rows_takes_the_nearest_law_and_says_so(cache: str) -> None:
    """The time equals attention over an fp8 cache, but is not marked as calibrated. No error of a step is known."""
    near, own = (forward(LLAMA, Batch.decode(8192, 8), Precision(kv_cache_dtype=name)) for name in ("fp8", cache))
    both = [dict(zip((o.name for o in each), operator_seconds(each, H100, LAWS), strict=True)) for each in (near, own)]
    assert [timed["attention"].basis for timed in both] == ["calibrated", "scaled"]
    assert both[0]["attention"].seconds == both[1]["attention"].seconds
    chains = sum(t.seconds for o, t in zip(near, operator_seconds(near, H100, LAWS), strict=True) if o.kind == "vector")
    assert pass_time(near, H100, LAWS).uncalibrated_share == pytest.approx(chains / pass_time(near, H100, LAWS).seconds)
    share = (both[1]["attention"].seconds + chains) / pass_time(own, H100, LAWS).seconds
    assert pass_time(own, H100, LAWS).uncalibrated_share == pytest.approx(share)
    assert (step_error(near, H100, LAWS), step_error(own, H100, LAWS)) == (0.12, None)


def test_a_module_over_a_cache_without_rows_is_scaled() -> None:
    """DeepSeek-V3.2's latents in nvfp4, index keys in fp8: the module takes the time of a module over an fp8 cache."""

    def inside(cache: str) -> tuple[str, str, float]:
        precision = Precision(kv_cache_dtype=cache)
        operators = forward(load_model("deepseek-v3.2"), Batch.decode(4096, 8), precision, Parallelism(tp=8))
        timed = operator_seconds(operators, H100, LAWS)
        scores = next(t for o, t in zip(operators, timed, strict=True) if o.name == "indexer")
        overhead = next(t.overhead for t in timed if t.overhead)
        return scores.basis, overhead.basis, scores.seconds

    near, own = inside("fp8_ds_mla"), inside("nvfp4_ds_mla")
    assert (near[:2], own[:2]) == (("calibrated", "calibrated"), ("scaled", "scaled"))
    assert own[2] == pytest.approx(near[2])


@pytest.mark.parametrize(("name", "basis"), [("deepseek-v3", "calibrated"), ("deepseek-v4-flash", "scaled"), ("glm-5", "scaled")])
def test_latent_attention_of_other_widths_than_the_measured_is_scaled(name: str, basis: str) -> None:
    """Measured widths are 576 and 512 (absorbed) or 192 and 128 (expanded). DeepSeek-V4's are 512, GLM-5's prompts 256."""
    latent = {"mla_decode": {"bfloat16": entry(MlaDecode())}, "mla_prefill": {"bfloat16": entry(MlaPrefill())}}
    laws = msgspec.structs.replace(LAWS, laws=LAWS.laws | latent)
    for batch in [Batch.prefill(16384), Batch.decode(16384, 8)][: 1 if name == "glm-5" else 2]:
        operators = forward(load_model(name), batch, parallelism=Parallelism(tp=8))
        timed = zip(operators, operator_seconds(operators, H100, laws), strict=True)
        assert {each.basis for operator, each in timed if operator.name == "attention"} == {basis}


@pytest.mark.parametrize(("name", "law"), [("a100-80gb", DecodeAttention()), ("h100", DecodeAttention(bytes=1))])
def test_fp8_with_only_bf16_measured(name: str, law: DecodeAttention) -> None:
    """Attention on an A100, which converts fp8 to bf16, takes the time of a bf16 cache; GEMMs at least half that of bf16."""
    gemm, wide = LAWS.laws["gemm"], {"bfloat16": entry(DecodeAttention())}
    own, near = ({"gemm": gemm, "decode_attention": each} for each in ({"fp8": entry(law)}, wide))
    times = {}
    for case, laws, quantization in (("bf16", near, ""), ("own", own, "fp8"), ("near", near, "fp8")):
        operators = forward(LLAMA, Batch.decode(8192, 8), Precision("auto", "fp8", quantization=quantization))
        timed = operator_seconds(operators, load_gpu(name), msgspec.structs.replace(LAWS, laws=laws))
        times[case] = {o.name: t for o, t in zip(operators, timed, strict=True)}
    assert times["near"]["attention"].seconds == times["own"]["attention"].seconds
    assert 0.5 < times["near"]["down"].seconds / times["bf16"]["down"].seconds < 0.6  # 59 of 117 MB, and a launch
    assert (times["near"]["attention"].basis, times["near"]["down"].basis) == ("scaled", "scaled")
