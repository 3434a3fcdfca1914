"""The time laws against figures worked out by hand, and what must hold for any shape."""

import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.library.load import load_gpu
from kvcalc.timing.kernel_models.flash_attention import DecodeAttention, FlashDecode, PrefillAttention, Rule, split_parts
from kvcalc.timing.kernel_models.fused_moe import AllReduce, FusedMoe
from kvcalc.timing.kernel_models.gemm import CutlassGemm, Gemm, QuantizedGemm, ResidentGemm, ResidentQuantizedGemm, keeps_weights
from kvcalc.timing.kernel_models.kernel_model import Elementwise, GpuParameters, KernelModel, figures_of, pnorm
from kvcalc.timing.kernel_models.mla import MlaDecode, MlaPrefill, SparseDecode

# 1 TB/s, 100 and 200 TFLOP/s, 100 SMs, 50 MB of L2, 100 GB/s links: round figures for arithmetic by hand.
ROUND = GpuParameters(memory=1e6, bf16=100e6, fp8=200e6, sms=100, l2=50e6, link=1e5, fp4=400e6)
LAWS = (
    Gemm, QuantizedGemm, CutlassGemm, DecodeAttention, PrefillAttention, MlaDecode, MlaPrefill, AllReduce, Elementwise, FusedMoe,
    SparseDecode, ResidentGemm, ResidentQuantizedGemm, FlashDecode,
)  # fmt: skip
SHAPES: dict[type[KernelModel], tuple[float, ...]] = {
    Gemm: (64, 4096, 4096),
    QuantizedGemm: (64, 4096, 4096),
    CutlassGemm: (64, 4096, 4096),
    ResidentGemm: (64, 4096, 4096),
    ResidentQuantizedGemm: (64, 4096, 4096),
    FusedMoe: (64, 4096, 1536, 8, 128, 1, 1),
    SparseDecode: (8, 128, 4096, 7168, 1536, 512, 64, 128, 128, 64, 128, 2048),
    DecodeAttention: (8, 32, 8, 128, 4096, 0),
    FlashDecode: (8, 32, 8, 128, 4096, 0),
    PrefillAttention: (2, 32, 8, 128, 1024, 0),
    MlaDecode: (8, 16, 4096),
    MlaPrefill: (2, 16, 1024),
    AllReduce: (8, 1 << 20),
    Elementwise: (1 << 20,),
}


def one(law: KernelModel, *shape: float, on: GpuParameters = ROUND) -> float:
    return float(law.us(on, *(np.array([float(x)]) for x in shape))[0])


def test_a_large_product_takes_its_flops_at_the_efficiency() -> None:
    # 8192³: 1.0995e12 FLOP at 0.5 · 100 TFLOP/s = 21,990 µs; memory 402 MB / (1 TB/s) = 403 µs; p = 8 makes it negligible.
    law = Gemm(t0=3, ec=0.5, em=1.0, p=8, tr=5, r=1e6)
    assert one(law, 8192, 8192, 8192) == pytest.approx(3 + 2 * 8192**3 / 50e6, rel=1e-6)


def test_a_thin_product_streams_its_weights() -> None:
    # 1 × 16384 × 16384 in bf16: 536.9 MB of weights at 0.8 TB/s = 671 µs, and a little compute beside it.
    law = Gemm(t0=2, ec=0.8, em=0.8, p=8, tr=5, r=1e6)
    memory = ((1 + 16384) * 16384 * 2 + 2 * 16384) / 0.8e6
    assert memory + 2 <= one(law, 1, 16384, 16384) <= (memory + 2) * 1.09


def test_a_long_cold_cache_is_read_at_the_bandwidth() -> None:
    # 64 sequences · 8 KV heads · 65536 tokens · 2 · 128 · 2 bytes = 17.18 GB at 0.95 TB/s = 18,084 µs; the tiles hide below.
    law = DecodeAttention(t0=5, tau=1, r=1e6, tramp=2)
    read = 64 * 8 * 65536 * 2 * 128 * 2
    assert one(law, 64, 32, 8, 128, 65536, 0) == pytest.approx(read / 0.95e6 + 7, rel=0.02)


@pytest.mark.parametrize(
    ("rule", "walks", "tokens", "parts"),
    [
        ("flash3", 64, 512, 1),  # four blocks are never split
        ("flash3_bounded", 64, 512, 2),  # 64 · 4 · 1.1 / 132 SMs: 3 blocks to a part
        ("flash3", 64, 1024, 2),  # 64 · 8 · 1.1 / 132: 5 of 8 blocks
        ("flash3", 1, 16384, 64),  # 128 · 1.1 / 132: 2 of 128 blocks
        ("flash3", 120, 1024, 1),  # 120 · 8 · 1.1 / 132: exactly 8 of 8 blocks
        ("flash3_bounded", 1, 16384, 32),  # no more than the caller's bound
        ("xqa", 128, 512, 4),  # 512 / 128, in 3.9 waves
        ("xqa", 2, 65536, 64),  # √(8 · 512)
        ("xqa", 264, 32768, 4),  # √(8 · 256) would be 2 · 45 waves: no more than 8 of 132 parts
        ("xqa", 2048, 256, 1),  # 2 parts would be 31 waves
        ("xqa", 8, 100, 1),
    ],
)
def test_into_how_many_parts_kernels_split_a_walk(rule: Rule, walks: int, tokens: int, parts: int) -> None:
    """By hand from flash-attention's and TensorRT-LLM's rules on 132 SMs, in blocks of 128 tokens."""
    most = 32 if rule == "flash3_bounded" else 128
    n, blocks, length = (np.array([float(x)]) for x in (walks, math.ceil(tokens / 128), tokens))
    assert split_parts(rule, most, n, blocks, length, 132).tolist() == [parts]


def test_which_gpus_keep_weights_between_calls() -> None:
    """L40S: 96 MiB at 0.86 TB/s, 116 µs. B200: 126 MiB at 7.7 TB/s, 17 µs."""
    kept = {name: keeps_weights(figures_of(load_gpu(name))) for name in ("l40s", "rtx-pro-6000", "b200", "h100", "a100")}
    assert kept == {"l40s": True, "rtx-pro-6000": True, "b200": False, "h100": False, "a100": False}


def test_a_long_prompt_takes_its_causal_flops() -> None:
    # 32 heads of 128, 16384 tokens: 4 · 128 · 32 · 16384 · 16385/2 FLOP at 0.5 · 100 TFLOP/s, and the 64 masked keys a tile.
    law = PrefillAttention(t0=1, ec=0.5, em=3, tau=0.02)
    flops = 4 * 128 * 32 * 16384 * (16385 / 2 + 64)
    assert one(law, 1, 32, 8, 128, 16384, 0) == pytest.approx(flops / 50e6, rel=0.03)


def test_an_all_reduce_takes_the_shorter_way() -> None:
    law = AllReduce(h=0.1, a1=4, e1=0.5, a2=10, e2=0.5, a3=50, e3=0.8, es=0.5)
    assert one(law, 4, 1000) == pytest.approx(4 + 0.3 + 3 * 1000 / (0.5 * 1e5))
    assert one(law, 4, 1e9) == pytest.approx(50 + 0.3 + 1.5 * 1e9 / (0.8 * 1e5))
    assert one(law, 1, 1e9) == 0


@pytest.mark.parametrize("law", LAWS)
def test_every_parameter_has_a_range_around_its_default_and_a_word_in_the_docstring(law: type[KernelModel]) -> None:
    text = inspect.getdoc(law) or ""
    assert len(law.ranges()) <= 10
    for name, r in law.ranges().items():
        assert 0 < r.minimum <= r.typical <= r.maximum < math.inf, name
        assert f"{name}" in text, name


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_vectorised(law: type[KernelModel]) -> None:
    shape = SHAPES[law]
    many = law().us(ROUND, *(np.full(7, float(x)) for x in shape))
    assert many.shape == (7,)
    assert many.tolist() == pytest.approx([one(law(), *shape)] * 7)


@given(a=st.floats(1e-6, 1e9), b=st.floats(1e-6, 1e9), p=st.floats(1, 8))
def test_the_p_norm_lies_between_the_maximum_and_the_sum(a: float, b: float, p: float) -> None:
    found = float(pnorm(p, np.array([a]), np.array([b]))[0])
    assert max(a, b) * (1 - 1e-12) <= found <= (a + b) * (1 + 1e-12)


@given(batch=st.integers(1, 512), length=st.integers(1, 1 << 17), group=st.sampled_from([1, 4, 8, 16]))
def test_decode_takes_longer_for_more_sequences(batch: int, length: int, group: int) -> None:
    law = DecodeAttention(cold=True)
    assert one(law, 2 * batch, 8 * group, 8, 128, length, 0) >= one(law, batch, 8 * group, 8, 128, length, 0) * (1 - 1e-9)


def test_a_machine_needs_sms() -> None:
    from kvcalc.errors import UserError

    assert figures_of(load_gpu("h100")) == GpuParameters(3.35e6, 989e6, 1978.9e6, 132, 52428800.0, 450e3, 989e6)
    with pytest.raises(UserError, match="gives no"):
        figures_of(load_gpu("tpu-v5e"))
