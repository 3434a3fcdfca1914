"""Kernel models compared with figures by hand, and rules for any shape."""

import inspect
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.library.load import load_gpu
from kvcalc.timing.kernel_models.families import AnyKernelModel
from kvcalc.timing.kernel_models.flash_attention import DecodeAttention, FlashDecode, PrefillAttention, Rule, split_parts
from kvcalc.timing.kernel_models.fused_moe import AllReduce, FusedMoe
from kvcalc.timing.kernel_models.gemm import (
    CutlassGemm,
    Gemm,
    QuantizedGemm,
    ResidentGemm,
    ResidentQuantizedGemm,
    l2_keeps_weights,
)
from kvcalc.timing.kernel_models.kernel_model import GpuParameters, KernelModel, figures_of
from kvcalc.timing.kernel_models.mla import MlaDecode, MlaModule, MlaPrefill, SparseDecode

# 1 TB/s, 100 and 200 TFLOP/s, 100 SMs, 50 MB of L2, 100 GB/s links: round figures for arithmetic by hand.
ROUND = GpuParameters(memory=1e6, bf16=100e6, fp8=200e6, sms=100, l2=50e6, link=1e5, fp4=400e6)
KERNEL_MODELS = get_args(AnyKernelModel)
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
    MlaModule: (8, 16, 4096, 40),
    AllReduce: (8, 1 << 20),
}


def one(kernel_model: KernelModel, *shape: float, on: GpuParameters = ROUND) -> float:
    return float(kernel_model.us(on, *(np.array([float(x)]) for x in shape))[0])


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
    """By hand, from the rules of flash-attention and TensorRT-LLM, on 132 SMs and in blocks of 128 tokens."""
    most = 32 if rule == "flash3_bounded" else 128
    n, blocks, length = (np.array([float(x)]) for x in (walks, math.ceil(tokens / 128), tokens))
    assert split_parts(rule, most, n, blocks, length, 132).tolist() == [parts]


def test_which_gpus_keep_weights_between_calls() -> None:
    """L40S: 96 MiB at 0.86 TB/s, 116 µs. B200: 126 MiB at 7.7 TB/s, 17 µs."""
    kept = {name: l2_keeps_weights(figures_of(load_gpu(name))) for name in ("l40s", "rtx-pro-6000", "b200", "h100", "a100")}
    assert kept == {"l40s": True, "rtx-pro-6000": True, "b200": False, "h100": False, "a100": False}


@pytest.mark.parametrize("kernel_model", KERNEL_MODELS)
def test_every_parameter_has_a_range_around_its_default_and_a_word_in_the_docstring(kernel_model: type[KernelModel]) -> None:
    text = inspect.getdoc(kernel_model) or ""
    assert len(kernel_model.ranges()) <= 10
    for name, r in kernel_model.ranges().items():
        assert 0 < r.minimum <= r.typical <= r.maximum < math.inf, name
        assert name in text, f"write the meaning of {name} into the docstring of {kernel_model.__name__}"


@pytest.mark.parametrize("kernel_model", KERNEL_MODELS)
def test_a_kernel_model_is_vectorised(kernel_model: type[KernelModel]) -> None:
    assert kernel_model in SHAPES, f"add a shape of {kernel_model.__name__} to SHAPES"
    shape = SHAPES[kernel_model]
    many = kernel_model().us(ROUND, *(np.full(7, float(x)) for x in shape))
    assert many.shape == (7,)
    assert many.tolist() == pytest.approx([one(kernel_model(), *shape)] * 7)


@given(batch=st.integers(1, 512), length=st.integers(1, 1 << 17), group=st.sampled_from([1, 4, 8, 16]))
def test_decode_takes_longer_for_more_sequences(batch: int, length: int, group: int) -> None:
    kernel_model = DecodeAttention(cold=True)
    assert one(kernel_model, 2 * batch, 8 * group, 8, 128, length, 0) >= one(
        kernel_model, batch, 8 * group, 8, 128, length, 0
    ) * (1 - 1e-9)


def test_a_machine_needs_sms() -> None:
    from kvcalc.errors import UserError

    assert figures_of(load_gpu("h100")) == GpuParameters(3.35e6, 989e6, 1978.9e6, 132, 52428800.0, 450e3, 989e6)
    with pytest.raises(UserError, match="gives no"):
        figures_of(load_gpu("tpu-v5e"))
