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
sizes = st.integers(1, 1 << 16)


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


def test_small_tiles_wait_for_their_operands() -> None:
    # Two tiles of 32 × 64 at once, k = 64 · 16: (32 + 64) · 1024 · 2 bytes at 3e4 B/µs = 6.6 µs, above 4.2e6 FLOP at 1e6 FLOP/µs.
    slow, fast = Gemm(t0=1, ec=1, em=1, p=8, tr=30, r=3e4), Gemm(t0=1, ec=1, em=1, p=8, tr=30, r=1e6)
    assert one(slow, 64, 64, 1024) == pytest.approx(1 + (32 + 64) * 1024 * 2 / 3e4, rel=0.01)
    assert one(fast, 64, 64, 1024) == pytest.approx(1 + 2 * 32 * 64 * 1024 / 1e6, rel=0.01)


def test_weights_of_four_bits_stream_in_a_quarter_of_the_time() -> None:
    law = Gemm(t0=0.2, ec=1, em=1, p=8, tr=30, r=1e9)
    strong = ROUND._replace(bf16=1e12)
    whole, quarter = one(law, 1, 32768, 32768, on=strong), one(law, 1, 32768, 32768, 0.5, on=strong)
    assert whole / quarter == pytest.approx(4, rel=0.1)


def test_fp8_products_pay_for_quantising_their_input() -> None:
    law = QuantizedGemm(t0=1, bq=0.5)
    free = QuantizedGemm(t0=1, bq=float("inf"))
    assert one(law, 512, 4096, 8192) - one(free, 512, 4096, 8192) == pytest.approx(3 * 512 * 8192 / 0.5e6)


def test_a_long_cold_cache_is_read_at_the_bandwidth() -> None:
    # 64 sequences · 8 KV heads · 65536 tokens · 2 · 128 · 2 bytes = 17.18 GB at 0.95 TB/s = 18,084 µs; the tiles hide below.
    law = DecodeAttention(t0=5, tau=1, r=1e6, tramp=2)
    read = 64 * 8 * 65536 * 2 * 128 * 2
    assert one(law, 64, 32, 8, 128, 65536, 0) == pytest.approx(read / 0.95e6 + 7, rel=0.02)


def test_a_cache_in_the_l2_is_read_at_the_rate_of_the_sms() -> None:
    # 100 walks of 128 tokens on 100 SMs, 6.6 MB in 50 MB of L2: each takes 128 · 2 · 128 · 2 bytes at 0.02 TB/s, 3.3 µs.
    law = DecodeAttention(t0=0.3, tau=0.05, r=2e4, cap=1.5, tramp=0.1)
    assert one(law, 100, 4, 1, 128, 128, 0) == pytest.approx(0.3 + 0.05 + 65536 / 2e4 + 4 * 100 * 4 * 128 / 1e6, rel=0.01)


def test_weights_that_stay_in_the_l2_do_not_in_serving() -> None:
    # 1 × 1024 × 2048 in bf16: 4.2 MB of weights, of 50 MB of L2 with cap 1: at 3 TB/s 1.4 µs, from memory 4.2.
    warm, cold = (ResidentGemm(t0=0.2, ec=1, em=1, p=8, tr=30, r=1e6, cap=1, cold=c) for c in (False, True))
    weights, strong = 1024 * 2048 * 2, ROUND._replace(bf16=1e12)
    assert one(warm, 1, 1024, 2048, on=strong) == pytest.approx(0.2 + weights / 3e6, rel=0.1)
    assert one(cold, 1, 1024, 2048, on=strong) == pytest.approx(0.2 + weights / 1e6, rel=0.1)


def test_a_kernel_that_does_not_split_walks_a_long_cache_alone() -> None:
    # One tile of 65,536 tokens: 512 blocks of 128 · 2 · 128 · 2 bytes at 1e5 B/µs = 336 µs; in 128 parts four blocks, 2.6 µs.
    whole, split = (DecodeAttention(t0=1, tau=1, r=1e5, tramp=0.1, parts=p) for p in (1, 128))
    assert one(whole, 1, 8, 1, 128, 65536, 0) == pytest.approx(1 + 1 + 512 * 128 * 512 / 1e5, rel=0.02)
    assert one(split, 1, 8, 1, 128, 65536, 0) < 60


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


def test_a_kernel_splits_by_its_rule_even_where_whole_walks_are_faster() -> None:
    # 100 walks of 512 tokens on 100 SMs, tau 5 µs: XQA makes four waves of 5 µs of them, a free choice one.
    # Blocks of 128 · 2 · 128 · 2 bytes take 0.066 µs, queries and outputs 0.2, 100 sequences 1; the cache lies in the L2.
    free = DecodeAttention(t0=1, tau=5, r=1e6, tramp=0.1, cap=1.5)
    ruled = FlashDecode(t0=1, tb=0.01, tau=5, r=1e6, cap=1.5, rule="xqa")
    assert one(free, 100, 4, 1, 128, 512, 0) == pytest.approx(1 + 5 + 4 * 0.066 + 0.2, rel=0.02)
    assert one(ruled, 100, 4, 1, 128, 512, 0) == pytest.approx(1 + 1 + 4 * (5 + 0.066) + 0.8 * 2 + 0.2, rel=0.01)


def test_windows_may_be_taken_head_by_head() -> None:
    together, each = DecodeAttention(wide="grouped"), DecodeAttention(wide="windowed")
    assert one(each, 2048, 32, 2, 64, 4096, 128) > 3 * one(together, 2048, 32, 2, 64, 4096, 128)
    assert one(each, 64, 32, 2, 64, 4096, 0) == one(together, 64, 32, 2, 64, 4096, 0)


def test_which_gpus_keep_weights_between_calls() -> None:
    """L40S: 96 MiB at 0.86 TB/s, 116 µs. B200: 126 MiB at 7.7 TB/s, 17 µs."""
    kept = {name: keeps_weights(figures_of(load_gpu(name))) for name in ("l40s", "rtx-pro-6000", "b200", "h100", "a100")}
    assert kept == {"l40s": True, "rtx-pro-6000": True, "b200": False, "h100": False, "a100": False}


def test_a_window_limits_what_is_read() -> None:
    law = DecodeAttention()
    assert one(law, 8, 32, 8, 128, 65536, 1024) == one(law, 8, 32, 8, 128, 1024, 0)


def test_a_small_cache_stays_in_the_l2_unless_it_is_cold() -> None:
    hot, cold = DecodeAttention(cap=0.9), DecodeAttention(cap=0.9, cold=True)
    assert one(cold, 1, 32, 8, 128, 4096, 0) > one(hot, 1, 32, 8, 128, 4096, 0) + 0.9 * hot.tramp * 0.5
    assert one(cold, 64, 32, 8, 128, 65536, 0) == pytest.approx(one(hot, 64, 32, 8, 128, 65536, 0), rel=1e-3)


def test_a_long_prompt_takes_its_causal_flops() -> None:
    # 32 heads of 128, 16384 tokens: 4 · 128 · 32 · 16384 · 16385/2 FLOP at 0.5 · 100 TFLOP/s, and the 64 masked keys a tile.
    law = PrefillAttention(t0=1, ec=0.5, em=3, tau=0.02)
    flops = 4 * 128 * 32 * 16384 * (16385 / 2 + 64)
    assert one(law, 1, 32, 8, 128, 16384, 0) == pytest.approx(flops / 50e6, rel=0.03)


def test_a_chunk_behind_a_past_sees_more_keys() -> None:
    law = PrefillAttention()
    fresh = one(law, 1, 32, 8, 128, 2048, 0)
    assert one(law, 1, 32, 8, 128, 2048, 0, 2049 / 2) == pytest.approx(fresh, rel=1e-3)
    assert one(law, 1, 32, 8, 128, 2048, 0, 8192 + 2049 / 2) > 3 * fresh


def test_mla_prefill_absorbed_does_more_flops() -> None:
    plain, absorbed = MlaPrefill(attends="expanded", em=3), MlaPrefill(attends="absorbed", em=3)
    assert one(absorbed, 1, 128, 8192) / one(plain, 1, 128, 8192) == pytest.approx(1088 / 320, rel=0.02)


def test_an_all_reduce_takes_the_shorter_way() -> None:
    law = AllReduce(h=0.1, a1=4, e1=0.5, a2=10, e2=0.5, a3=50, e3=0.8, es=0.5)
    assert one(law, 4, 1000) == pytest.approx(4 + 0.3 + 3 * 1000 / (0.5 * 1e5))
    assert one(law, 4, 1e9) == pytest.approx(50 + 0.3 + 1.5 * 1e9 / (0.8 * 1e5))
    assert one(law, 1, 1e9) == 0


def test_an_all_reduce_reaches_another_rate_with_other_ranks() -> None:
    # Two ranks are one doubling below four, eight one above; sixteen are taken as the eight that were measured.
    ring = AllReduce(h=0.1, a1=60, e1=0.02, a2=120, e2=0.02, a3=50, e3=0.8, es=0.1, g3=1.25)
    assert one(ring, 2, 1e9) == pytest.approx(50 + 0.1 + 1e9 / (0.64 * 1e5))
    assert one(ring, 4, 1e9) == pytest.approx(50 + 0.3 + 1.5 * 1e9 / (0.8 * 1e5))
    assert one(ring, 8, 1e9) == pytest.approx(50 + 0.7 + 1.75 * 1e9 / (1.0 * 1e5))
    assert one(ring, 16, 1e9) == pytest.approx(50 + 1.5 + 1.875 * 1e9 / (1.0 * 1e5))
    two = AllReduce(h=0.1, a1=60, e1=0.02, a2=10, e2=0.4, a3=300, e3=0.1, es=0.1, g2=0.8)
    assert one(two, 2, 1e6) == pytest.approx(10 + 0.1 + 1e6 / (0.5 * 1e5))
    assert one(two, 8, 1e6) == pytest.approx(10 + 0.7 + 1.75e6 / (0.32 * 1e5))


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


@given(m=sizes, n=sizes, k=sizes)
def test_no_product_beats_its_launch_or_its_efficiencies(m: int, n: int, k: int) -> None:
    law = Gemm()
    least = max(2 * m * n * k / (law.ec * ROUND.bf16), ((m + n) * k * 2 + 2 * m * n) / (law.em * ROUND.memory))
    assert one(law, m, n, k) >= law.t0 + least * (1 - 1e-9)


@given(batch=st.integers(1, 512), length=st.integers(1, 1 << 17), group=st.sampled_from([1, 4, 8, 16]))
def test_decode_takes_longer_for_more_sequences(batch: int, length: int, group: int) -> None:
    law = DecodeAttention(cold=True)
    assert one(law, 2 * batch, 8 * group, 8, 128, length, 0) >= one(law, batch, 8 * group, 8, 128, length, 0) * (1 - 1e-9)


def test_a_machine_needs_sms() -> None:
    from kvcalc.errors import UserError

    assert figures_of(load_gpu("h100")) == GpuParameters(3.35e6, 989e6, 1978.9e6, 132, 52428800.0, 450e3, 989e6)
    with pytest.raises(UserError, match="gives no"):
        figures_of(load_gpu("tpu-v5e"))
