"""Kernel models of matrix products: out[m, n] = x[m, k] · W[n, k]ᵀ, with a bf16 result.

Libraries of kernels (`Gemm`, `QuantizedGemm`). A library selects the tile tm × tn of one kernel,
and a split s of k. The compute time of this plan is the number of waves of tiles over the SMs times
the time of a tile. The memory time is the traffic of both operands and the result, which is equal
for all plans. Splits are tried in ascending order, until combining their parts takes longer than
any split can save.

    waves   = max(1, x + sg·(⌈x⌉ − x)),  x = ⌈m/tm⌉·⌈n/tn⌉·s / SMs
    tile    = max(2·tm·tn·k/s / (ec·P/SMs), (tm + tn)·(k/s)·bytes / r) + pro
    memory  = ((m + n)·k·bytes + 2·m·n) / (em·BW)
    t       = t0 + quantising + min over s of
              [pnorm_p(min over tiles of waves·tile, memory) + (s > 1)·(tr + 8·s·m·n / 6 TB/s)]

bf16 GEMMs have no quantising, sg = 0 and pro = 0. fp8 and fp4 GEMMs first quantise the bf16 input
in a separate kernel: (2 + bytes)·m·k / (bq·BW).

CUTLASS's fixed dispatch by rows (`CutlassGemm`), as vLLM and SGLang run fp8 GEMMs on Hopper. Tiles
are 64 × 64 if m ≤ 64, 64 × 128 if m ≤ 128, otherwise 128 × 128 in clusters of two rows, so rows are
padded to 256.

    tile   = 2·tm·tn·k / (ec·P/SMs) + pro
    memory = ((m + n)·k + 2·m·n) / (em·BW)
    t      = t0 + row·m + 3·m·k/(bq·BW) + pnorm_p(waves·tile, memory)

Weights that may stay in the L2 cache (`ResidentGemm`, `ResidentQuantizedGemm`), on GPUs with an L2
that is large for their memory rate. Measurements use several copies of the weights in turn. If all
copies fit into the L2, no call reads weights from memory:

    miss   = 1 / (1 + (cap·L2/W)^6),  W = bytes of the weights of one product
    memory = max((W·miss + inputs + outputs) / (em·BW), (W + inputs + outputs) / l2)

In serving, other weights replace them between two calls: the L2 is cold, and miss = 1.
"""

import math
from typing import Any, ClassVar

from kvcalc.arithmetic import ceil, is_any, least_over, maximum, minimum, where
from kvcalc.storage.formats import read_shapes
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    Arrays,
    GpuParameters,
    KernelModel,
    missed_share,
    pnorm,
)

# rows and columns of a tile
FP8_TILES = read_shapes("64x64 64x128 128x64 64x256 256x64 128x128 128x256 256x128")
BF16_TILES = FP8_TILES + read_shapes("32x64 64x32 32x128 128x32 96x128 128x96")
SPLITS = (1, 2, 4, 8, 16)
MIN_DEPTH = 64  # k of one pipeline stage
ROUNDING = 1e-9  # share of a time, more than its rounding error
# bytes per µs at which partial sums of a split, in the L2, are written and read again
PARTIALS_RATE = 6e6


class Gemm(KernelModel, frozen=True, tag="gemm"):
    """Time model of one bf16 GEMM on one rank, whose weights are read from memory.

    The method `us` takes m (tokens), n (output width) and k (input width), and then bytes per
    weight if the weights are not stored in bf16. A tile is a block of the result that one streaming
    multiprocessor (SM) computes. A wave is one tile on each SM.

    Attributes:
        t0: Launch, prologue and epilogue [µs].
        ec: Share of the datasheet's dense peak, about 1 at most, that the products reach.
        em: Share of the datasheet's bandwidth, about 1 at most, that reading weights reaches.
        p: Exponent p of the overlap of compute and memory time, (compute^p + memory^p)^(1/p): 1
            adds both times, ∞ gives the longer time.
        tr: Time of the second kernel that adds up partial results, if k is split among several SMs
            [µs].
        r: Rate at which one SM reads operands [bytes/µs].
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
        TILES: Rows and columns of the tiles from which the kernel library may choose.
    """

    RANGES = """
        t0 0.2 40
        ec 0.2 1.1
        em 0.2 1.1
        p 1 8
        tr 0.2 30
        r 1e4 1e6
    """
    TILES: ClassVar[list[tuple[int, ...]]] = BF16_TILES

    t0: float = 2.6
    ec: float = 0.8
    em: float = 0.85
    p: float = 2.5
    tr: float = 2.2
    r: float = 1.6e5

    def memory_us(self, machine: GpuParameters, weights: Array, others: Array) -> Array:
        """Return the microseconds of the memory traffic of one GEMM, without its compute time.

        Args:
            machine: Datasheet rates of the GPU.
            weights: Bytes of the weight matrix.
            others: Bytes of inputs and outputs together.
        """
        return (weights + others) / (self.em * machine.memory)

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        return self.t0 + self.best_plan_us(machine, shape, 2)

    def best_plan_us(
        self,
        machine: GpuParameters,
        shape: Arrays,
        element_bytes: float,
        prologue: Any = 0.0,
        stair: Any = 0.0,
    ) -> Array:
        """Return the least microseconds of one GEMM over all tiles and splits of k.

        A tile is a block of the result that one streaming multiprocessor (SM) computes. A split
        divides k among several SMs. The time to add up partial results is included.

        Args:
            machine: Datasheet rates of the GPU.
            shape: m (tokens), n (output width) and k (input width), and then bytes per weight if
                the weights are stored in another format than the operands.
            element_bytes: Bytes of one operand element of the products.
            prologue: Microseconds per wave (one tile on each SM) in addition to its products.
            stair: Cost of a partial last wave, from 0 (its share of a wave) to 1 (a full wave).
        """
        m, n, k, *stored = shape
        weights = n * k * (stored[0] if stored else element_bytes)
        memory = self.memory_us(machine, weights, m * (k * element_bytes + 2 * n))
        rate = self.ec * machine.peak(element_bytes) / machine.sms
        operand_rate = self.r / element_bytes

        def step_us(rows: Array, columns: Array) -> Array:  # time of a tile per element of k
            return maximum(2 * rows * columns / rate, (rows + columns) / operand_rate)

        def full_waves_us(rows: Array, columns: Array) -> Array:
            tiles = ceil(m / rows) * ceil(n / columns)
            return tiles * (k * step_us(rows, columns)) / machine.sms

        best = math.inf
        gain = math.inf
        for split in SPLITS:
            depth = maximum(k / split, MIN_DEPTH)
            waves_per_tile = split / machine.sms
            combine = 0.0 if split == 1 else self.tr + 8 * split * m * n / PARTIALS_RATE
            if split > 1 and not is_any(gain > combine):
                break

            def waves_us(
                rows: Array,
                columns: Array,
                depth: Array = depth,
                per_tile: float = waves_per_tile,
            ) -> Array:
                tiles = ceil(m / rows) * ceil(n / columns)
                wave_us = depth * step_us(rows, columns) + prologue
                return count_waves(tiles * per_tile, stair) * wave_us

            compute = least_over(self.TILES, waves_us, memory)
            us = pnorm(self.p, compute, memory) + combine
            if split == 1:
                gain = compute - least_over(self.TILES, full_waves_us, memory) + ROUNDING * us
            best = minimum(best, us)
        return best


def count_waves(tiles: Array, stair: Array | float) -> Array:
    """Return the number of waves, at least 1, in which a GPU processes the tiles of a kernel.

    A wave is one tile on each streaming multiprocessor (SM). Example: 2.25 tiles per SM are 2.25
    waves with stair 0, and 3 waves with stair 1.

    Args:
        tiles: Number of tiles ÷ number of SMs.
        stair: Cost of a partial last wave, from 0 (its share of a wave) to 1 (a full wave).
    """
    return maximum(1.0, tiles + stair * (ceil(tiles) - tiles))


class QuantizedGemm(Gemm, frozen=True, tag="gemm_fp8"):
    """Time model of one fp8 or fp4 GEMM on one rank, with a kernel that quantises its input.

    The method `us` takes m (tokens), n (output width) and k (input width), and then bytes per
    weight if the weights are stored in another format. A tile is a block of the result that one
    streaming multiprocessor (SM) computes. A wave is one tile on each SM.

    Attributes:
        bytes: Bytes of one operand element, with scales.
        t0: All launches, including that of the quantising kernel [µs].
        ec: Share of the datasheet's dense peak, about 1 at most, that the products reach.
        em: Share of the datasheet's bandwidth, about 1 at most, that reading weights reaches.
        p: Exponent p of the overlap of compute and memory time, (compute^p + memory^p)^(1/p): 1
            adds both times, ∞ gives the longer time.
        tr: Time of the second kernel that adds up partial results, if k is split among several SMs
            [µs].
        r: Rate at which one SM reads operands [bytes/µs].
        bq: Share of the datasheet's bandwidth that quantising the bf16 input reaches.
        pro: Time of scales, prologue and epilogue in each wave [µs].
        sg: Cost of a partial last wave, from 0 (its share of a wave) to 1 (a full wave).
        RANGES: A line for each further fitted parameter, in addition to those of `Gemm`: its name,
            and its minimum and maximum in a fit.
        TILES: Rows and columns of the tiles from which the kernel library may choose.
    """

    RANGES = """
        t0 0.2 60
        bq 0.05 1.2
        pro 0.02 10
        sg 0.01 1
    """
    TILES = FP8_TILES

    bytes: float = 1.0
    t0: float = 4.0
    ec: float = 0.75
    p: float = 2
    tr: float = 2.5
    bq: float = 0.45
    pro: float = 1.0
    sg: float = 0.3

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        m, _, k, *_ = shape
        start = self.t0 + (2 + self.bytes) * m * k / (self.bq * machine.memory)
        return start + self.best_plan_us(machine, shape, self.bytes, self.pro, self.sg)


class CutlassGemm(KernelModel, frozen=True, tag="gemm_cutlass"):
    """Time model of one fp8 GEMM on one rank, if CUTLASS selects the tile by the rows m.

    The method `us` takes m (tokens), n (output width) and k (input width), and then bytes per
    weight if the weights are stored in another format. A tile is a block of the result that one
    streaming multiprocessor (SM) computes. A wave is one tile on each SM.

    Attributes:
        t0: All launches, including that of the quantising kernel [µs].
        ec: Share of the datasheet's fp8 peak, about 1 at most, that the products reach.
        em: Share of the datasheet's bandwidth, about 1 at most, that reading weights reaches.
        p: Exponent p of the overlap of compute and memory time, (compute^p + memory^p)^(1/p): 1
            adds both times, ∞ gives the longer time.
        bq: Share of the datasheet's bandwidth that quantising the bf16 input reaches.
        row: Time to quantise one row of the input, in addition to its memory traffic [µs].
        pro: Time of prologue and epilogue of a tile, once per wave [µs].
        sg: Cost of a partial last wave, from 0 (its share of a wave) to 1 (a full wave).
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit.
    """

    RANGES = """
        t0 0.2 60
        ec 0.2 1.1
        em 0.2 1.1
        p 1 8
        bq 0.05 1.2
        pro 0.02 10
        sg 0.01 1
        row 1e-5 0.1
    """

    t0: float = 4.3
    ec: float = 0.72
    em: float = 0.82
    p: float = 2
    bq: float = 0.6
    pro: float = 0.8
    sg: float = 0.9
    row: float = 2e-3

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        m, n, k, *stored = shape
        moved = k * (m + n * (stored[0] if stored else 1)) + 2 * m * n
        memory = moved / (self.em * machine.memory)
        rows = where(m <= 128, 64.0, 128.0)
        columns = where(m <= 64, 64.0, 128.0)
        tiles = where(m <= 128, ceil(m / rows), 2 * ceil(m / 256)) * ceil(n / columns)
        tile = 2 * rows * columns * k * machine.sms / (self.ec * machine.fp8) + self.pro
        start = self.t0 + self.row * m + 3 * m * k / (self.bq * machine.memory)
        return start + pnorm(self.p, count_waves(tiles / machine.sms, self.sg) * tile, memory)


# Microseconds of memory traffic that the L2 of such a GPU stores: 84 and 116 on two GDDR GPUs with
# large L2s, 12 to 20 on HBM.
MIN_L2_US = 50.0


def l2_keeps_weights(machine: GpuParameters) -> bool:
    """Return whether weights stay in this GPU's L2 cache between repeated calls of a GEMM.

    Such calls measure a shorter time than in serving. It is so if the L2 stores more than the
    memory delivers in 50 µs.

    Args:
        machine: Datasheet rates and sizes of the GPU.
    """
    return machine.l2 > MIN_L2_US * machine.memory


def _resident_us(
    kernel_model: Any, machine: GpuParameters, weights: Array, others: Array
) -> Array:
    """Return microseconds to move the weights, which may be in the L2, and inputs and outputs."""
    missed = weights * missed_share(weights, kernel_model.cap, machine.l2, kernel_model.cold)
    moved_us = (missed + others) / (kernel_model.em * machine.memory)
    return maximum(moved_us, (weights + others) / kernel_model.l2)


class ResidentGemm(Gemm, frozen=True, tag="gemm_resident"):
    """Time model of one bf16 GEMM on one rank, whose weights may stay in the L2 between calls.

    It is for measurements on GPUs with a large L2 cache, which repeat a call. The method `us` takes
    m (tokens), n (output width) and k (input width), and then bytes per weight if the weights are
    not stored in bf16.

    Attributes:
        t0, ec, em, p, tr, r: Launch time [µs], shares of the peak and of the memory bandwidth that
            are reached, exponent of the overlap, time to add up the parts of a split of k [µs], and
            rate at which one SM reads operands [bytes/µs], as in `Gemm`.
        cap: Fitted part of the L2 cache that repeated calls can use; 1 is the whole L2. If a call
            reads this many bytes, half of them come from memory.
        l2: Read rate of the L2 [bytes/µs].
        cold: Whether the weights are never in the L2, as in serving.
        RANGES: A line for each further fitted parameter, in addition to those of `Gemm`: its name,
            and its minimum and maximum in a fit.
    """

    RANGES = """
        cap 0.02 1.5
        l2 3e5 6e7
    """

    cold: bool = False
    cap: float = 0.17
    l2: float = 3e6

    memory_us = _resident_us


class ResidentQuantizedGemm(QuantizedGemm, frozen=True, tag="gemm_quantized_resident"):
    """Time model of one fp8 or fp4 GEMM on one rank, whose weights may stay in the L2.

    It is for measurements on GPUs with a large L2 cache, which repeat a call. The method `us` takes
    m (tokens), n (output width) and k (input width), and then bytes per weight if the weights are
    stored in another format.

    Attributes:
        t0, ec, em, p, tr, r, bq, sg, bytes: Launch time, shares, overlap, rates, quantising,
            partial waves and bytes of an operand element, as in `QuantizedGemm`. Its `pro`, the
            prologue of a wave, is 0 here and not fitted.
        cap: Fitted part of the L2 cache that repeated calls can use; 1 is the whole L2. If a call
            reads this many bytes, half of them come from memory.
        l2: Read rate of the L2 [bytes/µs].
        cold: Whether the weights are never in the L2, as in serving.
        RANGES: A line for each further fitted parameter, in addition to those of `QuantizedGemm`:
            its name, and its minimum and maximum in a fit.
    """

    RANGES = """
        cap 0.02 1.5
        l2 3e5 6e7
    """

    cold: bool = False
    pro: float = 0.0
    cap: float = 0.17
    l2: float = 3e6

    memory_us = _resident_us
