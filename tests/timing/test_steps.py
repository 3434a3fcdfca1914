"""Whole passes in calibrated time: sums of laws, glue, error bars, and what they rest on."""

import numpy as np
import pytest

from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.cost import AttentionShape, CollectiveShape, GemmShape
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.timing.calibration import Calibration, Entry
from kvcalc.timing.decode_attention import DecodeAttention
from kvcalc.timing.families import AnyLaw
from kvcalc.timing.figures import figures_of
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.prefill_attention import PrefillAttention
from kvcalc.timing.served import served_model
from kvcalc.timing.steps import error_bar, glue_seconds, operator_seconds, pass_seconds

H100 = load_gpu("h100")
LLAMA = load_model("llama-3.1-8b")


def entry(law: AnyLaw, p90: float = 0.1) -> Entry:
    return Entry(law=law, rows=100, median_abs_error=0.05, p90_abs_error=p90)


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
    assert operators["qkv"].shape == GemmShape(16, (16 + 2 * 4) * 128, 4096, 2.0)
    assert operators["gate_up"].shape == GemmShape(16, 14336, 4096, 2.0)
    assert operators["attention"].shape == AttentionShape(16, 4, 128, 128, 2.0, ((16, 1, 1023, 16 * 1024),))
    assert operators["all_reduce"].shape == CollectiveShape(2, 16 * 4096 * 2)


def test_routed_experts_are_products_of_those_that_are_reached() -> None:
    # 256 experts, 8 a token: one token reaches exactly 8, each with its one token.
    operators = {o.name: o for o in forward(load_model("deepseek-v3"), Batch.decode(1024, 1))}
    shape = operators["experts_down"].shape
    assert isinstance(shape, GemmShape)
    assert (shape.m, shape.n, shape.k) == pytest.approx((1, 8 * 7168, 2048))
    latent = operators["attention"].shape
    assert isinstance(latent, AttentionShape)
    assert (latent.heads, latent.kv_heads, latent.key + latent.value) == (128, 0, 1088)


def test_a_decode_step_is_the_sum_of_its_laws_with_glue() -> None:
    operators = forward(LLAMA, Batch.decode(4096, 8))
    timed = dict(zip((o.name for o in operators), operator_seconds(operators, H100, MINE), strict=True))
    figures = figures_of(H100)
    qkv = GEMM.us(figures, np.array([8.0]), np.array([6144.0]), np.array([4096.0]))[0]
    cold = DecodeAttention(cold=True).us(figures, *(np.array([float(x)]) for x in (8, 32, 8, 128, 4096, 0)))[0]
    assert timed["qkv"].seconds == pytest.approx(32 * qkv / 1e6)
    assert timed["attention"].seconds == pytest.approx(32 * cold / 1e6)
    assert glue_seconds(operators, MINE) == pytest.approx(32 * 8e-6)
    assert pass_seconds(operators, H100, MINE) == pytest.approx(sum(t.seconds for t in timed.values()) + 32 * 8e-6)
    assert {t.basis for t in timed.values()} == {"calibrated"}


def test_no_pass_beats_its_bound() -> None:
    for batch in (Batch.decode(4096, 8), Batch.prefill(2048, 2), Batch((Sequences(1, 500, 0), Sequences(4, 1, 900)))):
        operators = forward(LLAMA, batch)
        assert pass_seconds(operators, H100, MINE) > total_seconds(roofline(operators, H100))


def test_a_mixed_batch_pays_for_its_prompt_and_its_decodes() -> None:
    def attention(batch: Batch) -> float:
        operators = forward(LLAMA, batch)
        return float(
            next(
                t.seconds
                for o, t in zip(operators, operator_seconds(operators, H100, MINE), strict=True)
                if o.kind == "attention"
            )
        )

    mixed = attention(Batch((Sequences(1, 500, 0), Sequences(4, 1, 900))))
    assert mixed == pytest.approx(attention(Batch.prefill(500)) + attention(Batch.decode(901, 4)), rel=0.01)


def test_products_in_fp8_take_an_input_that_is_quantised_already() -> None:
    operators = forward(LLAMA, Batch.decode(1024, 8), Precision(quantization="fp8"))
    timed = {o.name: t.seconds for o, t in zip(operators, operator_seconds(operators, H100, MINE), strict=True)}
    figures = figures_of(H100)
    measured = FP8.us(figures, np.array([8.0]), np.array([6144.0]), np.array([4096.0]))[0]
    own_pass = FP8.t0 - GEMM.t0 + 3 * 8 * 4096 / (FP8.bq * figures.memory)  # its launch and its bytes
    assert timed["qkv"] == pytest.approx(32 * (measured - own_pass) / 1e6, rel=1e-3)


def test_arrays_of_batches_give_what_each_gives_alone() -> None:
    contexts = np.array([512.0, 4096.0, 65536.0])
    batches = np.array([1.0, 16.0, 256.0])
    many = pass_seconds(forward(LLAMA, Batch.decode(contexts, batches)), H100, MINE)
    alone = [
        pass_seconds(forward(LLAMA, Batch.decode(int(s), int(b))), H100, MINE) for s, b in zip(contexts, batches, strict=True)
    ]
    assert many.tolist() == pytest.approx(alone)


def test_operators_without_a_law_take_their_bound_and_say_so() -> None:
    operators = forward(load_model("deepseek-v3.2"), Batch.decode(8192, 4))
    timed = {o.name: t for o, t in zip(operators, operator_seconds(operators, H100, MINE), strict=True)}
    assert timed["indexer"].basis == "bound"
    assert timed["attention"].basis == "calibrated"


def test_the_error_bar_is_that_of_the_worst_family_used() -> None:
    assert error_bar(forward(LLAMA, Batch.decode(1024, 8)), MINE) == 0.2
    assert error_bar(forward(LLAMA, Batch.decode(1024, 8), Precision(quantization="fp8")), MINE) == 0.4


def test_a_served_model_is_found_by_its_hugging_face_name() -> None:
    for path, name in (
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
    ):
        model = served_model(path)
        assert model is not None
        assert model.name == name
    assert served_model("nobody/nothing-1b") is None
