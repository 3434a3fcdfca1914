"""Rooflines: no calibrated time is below its bound; ridge points, and bounds of measured operations, by hand."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvcalc import Batch, Gpu, Operator, Parallelism, Precision, Sequences, UserError, bounds, forward, load_gpu, load_model
from kvcalc.gpu.gpu import cost_bound, total_seconds
from kvcalc.layers.cost import Cost
from kvcalc.library import presets
from kvcalc.timing.calibration import Calibration, find_calibration, stacks_of
from kvcalc.timing.kernel_models.families import FAMILIES
from kvcalc.timing.rows import cost_of
from kvcalc.timing.steps import operator_seconds, pass_time

MODELS = sorted(presets.preset_files("models"))
DTYPES = ("auto", "fp32", "bf16", "fp8")
CONTEXTS, COUNTS = np.array([17.0, 4096.0, 131_072.0]), np.array([256.0, 8.0, 1.0])
PASSES = {  # arrays, and whole numbers where phases mix
    "decode": Batch.decode(CONTEXTS, COUNTS),
    "prefill": Batch.prefill(CONTEXTS, COUNTS),
    "verify": Batch((Sequences(4, 5, CONTEXTS),)),
    "mixed": Batch((Sequences(64, 1, 32_767), Sequences(1, 2048, 0), Sequences(2, 300, 5000))),
    "mixed arrays": Batch((Sequences(COUNTS, 1, CONTEXTS - 1), Sequences(1, CONTEXTS, 0))),
}


@cache
def calibrated() -> list[tuple[Gpu, Calibration]]:
    """Return every GPU that has calibrations, with each of its stacks."""
    gpus = [load_gpu(name) for name in sorted(presets.preset_files("gpus"))]
    pairs = [(gpu, find_calibration(gpu, stack)) for gpu in gpus for stack in stacks_of(gpu)]
    assert len(pairs) >= 8
    return [(gpu, laws) for gpu, laws in pairs if laws]


def check(operators: tuple[Operator, ...], gpu: Gpu, laws: Calibration) -> None:
    placed, timed = bounds(operators, gpu), operator_seconds(operators, gpu, laws)
    for one, time in zip(placed, timed, strict=True):
        assert np.all(time.seconds >= one.seconds), (one.operator.name, one.operator.layer, time.seconds, one.seconds)
    assert np.all(pass_time(operators, gpu, laws).seconds >= total_seconds(placed))


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))])
def test_no_calibrated_time_is_below_its_roof(number: int) -> None:
    """Each preset runs a sixth of all dtypes and kinds of pass, on a different calibrated GPU and stack."""
    laws = calibrated()
    for n, name in list(enumerate(MODELS))[number::8]:
        model = load_model(name)
        for i, (dtype, phase) in list(enumerate(itertools.product(DTYPES, PASSES)))[n % 6 :: 6]:
            operators = forward(model, PASSES[phase], Precision(dtype))
            check(operators, *laws[(n + i) % len(laws)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3.2", "qwen3-next-80b-a3b", "gpt-oss-120b", "nemotron-h-47b"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_nor_on_several_gpus_or_over_another_cache(name: str, cache_dtype: str) -> None:
    for gpu, laws in calibrated()[::2]:
        for ranks, phase in ((Parallelism(tp=2), "decode"), (Parallelism(tp=2, dp=2, ep=4), "mixed")):
            if name == "nemotron-h-47b" or ranks.ep == 1:
                ranks = Parallelism(tp=2)
            check(forward(load_model(name), PASSES[phase], Precision("auto", cache_dtype), ranks), gpu, laws)


def toy(**peaks: float) -> Gpu:
    return Gpu(name="toy", vendor="none", memory_bytes=1, source=(), bandwidth_bytes_per_s=100.0, flops_per_s=peaks)


def test_the_knee_is_bf16_s_else_fp16_s() -> None:
    """FLOP per byte: the peak divided by 100 bytes per second."""
    assert toy(bf16=1000.0).knee == 10
    assert toy(fp16=500.0).knee == 5
    assert toy(bf16=1000.0, fp16=500.0).knee == 10
    assert toy(bf16=300.0, fp16=500.0, fp8=9999.0).knee == 5  # bf16 may run in fp16
    assert toy(fp32=1000.0, fp8=1000.0).knee is None
    # a V100 has fp16 units alone: 125 TFLOP/s over 900 GB/s
    assert load_gpu("v100").knee == 125e12 / 900e9


def test_a_peak_is_the_dtype_s_own_or_the_next_wider_one_s() -> None:
    assert toy(bf16=3.0, fp16=2.0, fp32=1.0).peak("bf16") == (3.0, "bf16")
    assert replace(toy(bf16=3.0), mfu=0.5).peak("bf16") == (1.5, "bf16")
    assert toy(fp16=2.0, fp32=1.0).peak("bf16") == (2.0, "fp16")
    assert toy(bf16=3.0, fp32=1.0).peak("fp16") == (3.0, "bf16")
    assert toy(tf32=2.0, fp32=1.0).peak("fp16") == (2.0, "tf32")
    assert toy(bf16=3.0, fp32=1.0).peak("int8") == (3.0, "bf16")
    assert toy(fp8=4.0, bf16=3.0).peak("fp4") == (3.0, "bf16")
    assert toy(bf16=3.0, int8=1.0).peak("int8") == (3.0, "int8")  # converted where that is faster
    assert toy(int8=4.0, bf16=3.0).peak("fp4/int8") == (4.0, "int8")
    assert toy(fp4=9.0, int8=4.0).peak("fp4/int8") == (9.0, "fp4")
    with pytest.raises(UserError, match="toy has no matrix peak for fp32"):
        toy(bf16=3.0).peak("fp32")


# op, kind, shape, matrix FLOPs, bytes to and from memory, dtype of the products: each worked out by hand
OPERATIONS: list[tuple[str, str, tuple[float, ...], float, float, str]] = [
    # 8 × 16 over 32: 2·8·16·32 FLOP; both operands and a result of 2 bytes an element
    ("gemm", "bfloat16", (8, 16, 32), 8192, 2 * (8 * 32 + 16 * 32 + 8 * 16), "bf16"),
    ("gemm", "fp8", (8, 16, 32), 8192, 8 * 32 + 16 * 32 + 2 * 8 * 16, "fp8"),
    ("gemm", "fp8_block", (8, 16, 32), 8192, 8 * 32 + 16 * 32 + 2 * 8 * 16, "fp8"),
    # 2 sequences, 8 heads over 4, 64 wide, 100 tokens: scores and values of 100 pairs each; K and V, queries and outputs
    ("decode_attention", "bfloat16", (2, 8, 4, 64, 100, 0),
     4 * 2 * 8 * 100 * 64, 2 * (2 * 2 * 4 * 100 * 64 + 2 * 2 * 8 * 64), "bf16"),
    ("decode_attention", "fp8", (2, 8, 4, 64, 100, 0), 4 * 2 * 8 * 100 * 64, 2 * 2 * 4 * 100 * 64 + 2 * 2 * 2 * 8 * 64, "fp8"),
    ("decode_attention", "bfloat16", (2, 8, 4, 64, 100, 30),
     4 * 2 * 8 * 30 * 64, 2 * (2 * 2 * 4 * 30 * 64 + 2 * 2 * 8 * 64), "bf16"),
    ("decode_attention", "bfloat16", (2, 8, 4, 64, 100, 200),
     4 * 2 * 8 * 100 * 64, 2 * (2 * 2 * 4 * 100 * 64 + 2 * 2 * 8 * 64), "bf16"),
    # 10 tokens: 55 pairs a head; queries and outputs, keys and values in, and these again into the cache
    ("prefill_attention", "bfloat16/bfloat16", (2, 8, 4, 64, 10, 0),
     4 * 2 * 55 * 8 * 64, 2 * 10 * 64 * (2 * 2 * 8 + 2 * 2 * 4 + 2 * 2 * 4), "bf16"),
    ("prefill_attention", "bfloat16/fp8", (2, 8, 4, 64, 10, 0),
     4 * 2 * 55 * 8 * 64, 2 * 10 * 64 * (2 * 2 * 8 + 2 * 2 * 4 + 2 * 4), "bf16"),
    ("prefill_attention", "fp8/fp8", (2, 8, 4, 64, 10, 0),
     4 * 2 * 55 * 8 * 64, 2 * 10 * 64 * (2 * 2 * 8 + 2 * 2 * 4 + 2 * 4), "fp8"),
    # under a window of 4: 1 + 2 + 3 + 7·4 pairs
    ("prefill_attention", "bfloat16/bfloat16", (2, 8, 4, 64, 10, 4),
     4 * 2 * 34 * 8 * 64, 2 * 10 * 64 * (2 * 2 * 8 + 2 * 2 * 4 + 2 * 2 * 4), "bf16"),
    # 576 wide scores and 512 wide values over 50 latents; those, queries and outputs
    ("mla_decode", "bfloat16", (3, 16, 50), 2 * 3 * 16 * 50 * (576 + 512), 2 * (3 * 50 * 576 + 3 * 16 * (576 + 512)), "bf16"),
    ("mla_decode", "fp8", (3, 16, 50), 2 * 3 * 16 * 50 * (576 + 512), 3 * 50 * 576 + 2 * 3 * 16 * (576 + 512), "fp8"),
    # expanded: keys of 192, values of 128; queries, keys, values, outputs
    ("mla_prefill", "bfloat16", (3, 16, 10), 2 * 3 * 55 * 16 * (192 + 128), 2 * 3 * 10 * 16 * (192 + 192 + 128 + 128), "bf16"),
    # 4 tokens to 2 of 8 experts each: 8·(1 − (3/4)^4) = 5.46875 of them reached, three matrices 1000 × 500, a half on each of
    # two ranks; 8 rows in all; tokens in and out
    ("moe", "bfloat16", (4, 1000, 500, 2, 8, 2, 1),
     2 * 3 * 8 * 1000 * 250, 2 * 3 * 5.46875 * 1000 * 250 + 2 * 2 * 4 * 1000, "bf16"),
    # spread over 4 groups of experts: a quarter of them, and of the rows: 2, in and out
    ("moe", "fp8", (4, 1000, 500, 2, 8, 1, 4), 2 * 3 * 2 * 1000 * 500, 3 * 5.46875 / 4 * 1000 * 500 + 2 * 2 * 2 * 1000, "fp8"),
    # as routed, where rows say so: 3 pairs on 2 experts, without a gate
    ("moe", "fp8/cutlass/ungated", (4, 1000, 500, 2, 8, 1, 4, 3, 2),
     2 * 2 * 3 * 1000 * 500, 2 * 2 * 1000 * 500 + 2 * 2 * 3 * 1000, "fp8"),
    ("moe", "int4_wo/marlin", (4, 1000, 500, 2, 8, 1, 4, 3, 2),
     2 * 3 * 3 * 1000 * 500, 3 * 2 * 1000 * 500 / 2 + 2 * 2 * 3 * 1000, "bf16"),
    # 2 sequences of 100 tokens, 4 heads of a toy DSA layer: D 10, q 6, latent 8 + 2, 3 + 5 wide, 2 index heads of 4, top 50
    ("dsa_decode_module", "bfloat16/fp8_block", (2, 4, 100, 10, 6, 8, 2, 3, 5, 2, 4, 50),
     2 * 2 * (10 * 16 + 6 * 4 * 5 + 4 * 5 * 10 + 6 * 8 + 10 * 6 + 8 * 4 * 8) + 2 * 2 * 4 * 50 * 18 + 2 * 2 * 100 * 2 * 4,
     10 * 16 + 6 * 4 * 5 + 4 * 5 * 10 + 6 * 8 + 10 * 6 + 2 * 8 * 4 * 8 + 2 * 2 * 50 * 10 + 2 * 100 * 8, "fp8"),
    # the same where another layer chooses: neither the indexer nor its keys
    ("dsa_decode_module", "bfloat16/fp8_block", (2, 4, 100, 10, 6, 8, 2, 3, 5, 0, 4, 50),
     2 * 2 * (10 * 16 + 6 * 4 * 5 + 4 * 5 * 10 + 8 * 4 * 8) + 2 * 2 * 4 * 50 * 18,
     10 * 16 + 6 * 4 * 5 + 4 * 5 * 10 + 2 * 8 * 4 * 8 + 2 * 2 * 50 * 10, "fp8"),
    # one token reaches its two, whatever their number
    ("moe", "bfloat16", (1, 1000, 500, 2, 64, 1, 1), 2 * 3 * 2 * 1000 * 500, 2 * 3 * 2 * 1000 * 500 + 2 * 2 * 1000, "bf16"),
    # as many as there are: all, once
    ("moe", "bfloat16", (7, 1000, 500, 8, 8, 1, 1),
     2 * 3 * 7 * 8 * 1000 * 500, 2 * 3 * 8 * 1000 * 500 + 2 * 2 * 7 * 1000, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "kind", "shape", "flops", "moved", "dtype"), OPERATIONS)
def test_what_a_measured_operation_costs_at_least(
    op: str, kind: str, shape: tuple[float, ...], flops: float, moved: float, dtype: str
) -> None:
    cost, products = cost_of(op, kind, tuple(np.array([x]) for x in shape))
    assert products == dtype
    assert [float(x[0]) for x in (cost.flops, cost.bytes)] == pytest.approx([flops, moved], rel=1e-12)
    h100 = load_gpu("h100")
    seconds = max(flops / {"bf16": 989e12, "fp8": 1978.9e12}[dtype], moved / 3.35e12)
    assert float(cost_bound(cost, products, h100).seconds[0]) == pytest.approx(seconds, rel=1e-12)


def test_an_all_reduce_sends_twice_all_but_its_own_share() -> None:
    found = cost_of("allreduce", "bfloat16", (np.array([4.0]), np.array([1000.0])))
    assert (found[0].bytes, found[0].network_bytes[0], found[1]) == (0, 1500, "")  # type: ignore[index]
    assert cost_bound(*found, load_gpu("h100")).seconds[0] == 1500 / 450e9


def test_every_family_of_laws_has_a_bound() -> None:
    shapes = {"gemm": 3, "decode_attention": 6, "prefill_attention": 6, "mla_decode": 3, "mla_prefill": 3, "allreduce": 2}
    shapes |= {"moe": 7, "dsa_decode_module": 12, "mla_decode_module": 3}
    assert shapes.keys() == FAMILIES.keys()
    for op, width in shapes.items():
        assert cost_of(op, "bfloat16", tuple(np.array([8.0]) for _ in range(width)))


def test_an_array_takes_the_largest_of_its_limits_point_by_point() -> None:
    """Rates per second are 100 bytes, 1000 bf16 FLOP, 50 vector FLOP and 10 network bytes: the limits are memory, compute,
    vector and network in turn."""
    gpu = Gpu(
        name="toy", vendor="none", memory_bytes=1, source=(), bandwidth_bytes_per_s=100.0, flops_per_s={"bf16": 1000.0},
        vector_flops_per_s={"fp32": 50.0}, link_bytes_per_s=10.0,
    )  # fmt: skip
    table: dict[str, Any] = {
        "activation_bytes": [300, 100, 100, 100],
        "flops": [1000, 4000, 1000, 1000],
        "vector_flops": [50, 50, 250, 50],
        "network_bytes": [10, 10, 10, 60],
    }
    cost = Cost(**{name: np.array(column, dtype=float) for name, column in table.items()})
    found = cost_bound(cost, "bf16", gpu)
    assert (found.seconds.tolist(), found.bound, found.computed_in) == ([3, 4, 5, 6], "", "bf16")
    for i, (seconds, bound) in enumerate([(3.0, "memory"), (4.0, "compute"), (5.0, "compute"), (6.0, "network")]):
        one = cost_bound(Cost(**{name: column[i] for name, column in table.items()}), "bf16", gpu)
        assert (one.seconds, one.bound) == (seconds, bound)
