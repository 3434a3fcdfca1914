"""Matrix products: out[m, n] = x[m, k] · W[n, k]ᵀ, the result in bf16.

A library selects the tile tm × tn of one kernel, and a split s of k. The compute time of this plan
is its waves of tiles over the SMs times the time of one tile. The memory time is the traffic of
both
operands and the result, which is equal for all plans.

    waves   = max(1, ⌈m/tm⌉·⌈n/tn⌉·s / SMs)
    tile    = max(2·tm·tn·k/s / (ec·P/SMs), (tm + tn)·(k/s)·bytes / r)
    memory  = ((m + n)·k·bytes + 2·m·n) / (em·BW)
    t       = t0 + min over s of pnorm_p(min over tiles of waves·tile, memory) + (s > 1)·(tr +
    8·s·m·n / 6 TB/s)

fp8 GEMMs under CUTLASS's fixed dispatch by rows, as vLLM and SGLang run them on Hopper. A kernel
quantises the input first.

tiles m × n: 64 × 64 where m ≤ 64, 64 × 128 where m ≤ 128, else 128 × 128 in clusters of two rows:
rows padded to 256 waves  = max(1, x + sg·(⌈x⌉ − x)),  x = tiles/SMs
tile   = 2·m·n·k / (ec·P/SMs) + pro
memory = ((m + n)·k + 2·m·n) / (em·BW)
t      = t0 + row·m + 3·m·k/(bq·BW) + pnorm_p(waves·tile, memory)

GEMMs with weights that may stay in the L2 cache, on GPUs with an L2 that is large for their memory
rate.

Measurements use several copies of the weights in turn. If all copies fit into the L2, no call reads
weights from memory:

    miss = 1 / (1 + (cap·L2/W)^6),  W = bytes of the weights of one product memory = max((W·miss +
    inputs + outputs) / (em·BW), (W + inputs + outputs) / l2)

In serving, other weights replace them between two calls: the L2 is cold, and miss = 1.
"""

import math
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec

from kvcalc.arithmetic import ceil, is_any, least_over, maximum, minimum, where
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    pnorm,
    within,
)

TILES = (
    (64, 64),
    (64, 128),
    (128, 64),
    (64, 256),
    (256, 64),
    (128, 128),
    (128, 256),
    (256, 128),
)
BF16_TILES = (*TILES, (32, 64), (64, 32), (32, 128), (128, 32), (96, 128), (128, 96))
SPLITS = (1, 2, 4, 8, 16)
LEAST_DEPTH = 64  # k of one pipeline stage
ROUNDED = 1e-9  # of a time, more than what rounding makes of it
# bytes per µs at which partial sums of a split, in the L2, are written and read again
PARTIALS_RATE = 6e6


class Gemm(KernelModel, frozen=True, tag="gemm"):
    """bf16 GEMMs that read their weights from memory.

    Attributes:
        t0: Launch, prologue and epilogue [µs].
        ec: Share of the datasheet's dense peak that the products reach.
        em: Share of the datasheet's bandwidth that reading weights reaches.
        p: Sharpness of the overlap of compute and memory; ∞ is a perfect overlap.
        tr: Second kernel of a split of k [µs].
        r: Rate at which one SM reads operands [bytes/µs].

    `us` takes one more array, bytes per weight, if the weights are stored in another format than
    the products compute in.
    """

    t0: Annotated[float, within(0.2, 40)] = 2.6
    ec: Annotated[float, within(0.2, 1.1)] = 0.8
    em: Annotated[float, within(0.2, 1.1)] = 0.85
    p: Annotated[float, within(1, 8)] = 2.5
    tr: Annotated[float, within(0.2, 30)] = 2.2
    r: Annotated[float, within(1e4, 1e6)] = 1.6e5

    def reading(self, machine: GpuParameters, weights: Array, others: Array) -> Array:
        """Return microseconds to move `weights` bytes of weights and the bytes of inputs and
        outputs."""
        return (weights + others) / (self.em * machine.memory)

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        m, n, k, *stored = shape
        weights = n * k * (stored[0] if stored else 2)
        memory = self.reading(machine, weights, 2 * m * (k + n))
        rate = self.ec * machine.bf16 / machine.sms
        plans = TilePlans(BF16_TILES, rate, self.r / 2, machine.sms, self.p, self.tr)
        return self.t0 + plans.best_us(m, n, k, memory)


class QuantizedGemm(KernelModel, frozen=True, tag="gemm_fp8"):
    """fp8 and fp4 GEMMs with a separate kernel that quantises the bf16 input: + (2 + bytes)·m·k /
    (bq·BW).

    Attributes:
        t0: Launches, including the quantising kernel [µs].
        ec, em, p, tr, r: As in `Gemm`.
        bq: Share of the datasheet's bandwidth that quantising reaches.
        pro: Scales, prologue and epilogue of each wave [µs].
        sg: Part by which a partial last wave counts as a full wave: 0 its share, 1 a wave.
    """

    bytes: float = 1.0
    t0: Annotated[float, within(0.2, 60)] = 4.0
    ec: Annotated[float, within(0.2, 1.1)] = 0.75
    em: Annotated[float, within(0.2, 1.1)] = 0.85
    p: Annotated[float, within(1, 8)] = 2
    tr: Annotated[float, within(0.2, 30)] = 2.5
    r: Annotated[float, within(1e4, 1e6)] = 1.6e5
    bq: Annotated[float, within(0.05, 1.2)] = 0.45
    pro: Annotated[float, within(0.02, 10)] = 1.0
    sg: Annotated[float, within(0.01, 1)] = 0.3

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        m, n, k, *stored = shape
        weights = n * k * (stored[0] if stored else self.bytes)
        memory = self.reading(machine, weights, m * (k * self.bytes + 2 * n))
        rate = self.ec * machine.peak(self.bytes) / machine.sms
        start = self.t0 + (2 + self.bytes) * m * k / (self.bq * machine.memory)
        operands = self.r / self.bytes
        plans = TilePlans(
            TILES, rate, operands, machine.sms, self.p, self.tr, self.pro, stair=self.sg
        )
        return start + plans.best_us(m, n, k, memory)

    def reading(self, machine: GpuParameters, weights: Array, others: Array) -> Array:
        """Return microseconds to move `weights` bytes of weights and the bytes of inputs and
        outputs."""
        return (weights + others) / (self.em * machine.memory)

    def quantised(self, t0: float) -> "QuantizedGemm":
        """Return the model of a GEMM with an already quantised input; launches take at most t0
        µs."""
        return msgspec.structs.replace(self, t0=min(self.t0, t0), bq=float("inf"))


def count_waves(tiles: Array, stair: Array | float) -> Array:
    """Return the waves of `x` tiles per SM, at least one.

    Args:
        stair: The part by which a last, partial wave counts as a whole one: 0 its share, 1 a wave.
    """
    return maximum(1.0, tiles + stair * (ceil(tiles) - tiles))


class TilePlans(NamedTuple):
    """The launch plans of a library of kernels.

    Attributes:
        tiles: Rows and columns of each kernel's tile.
        rate: FLOP per µs of one SM.
        operands: Elements per µs that one SM takes in.
        sms: SMs of the GPU.
        p: Sharpness of the overlap of compute and memory.
        tr: Microseconds of the second kernel of a split of k.
        pro: Microseconds that each wave takes besides its products.
        stair: As in `count_waves`.
    """

    tiles: tuple[tuple[int, int], ...]
    rate: Any
    operands: Any
    sms: int
    p: Any
    tr: Any
    pro: Any = 0.0
    stair: Any = 0.0

    def best_us(self, m: Array, n: Array, k: Array, memory: Array) -> Array:
        """Return the least microseconds over all tiles and splits of k.

        The minimum over tiles comes before the p-norm, which keeps its order. Splits end if none
        can be the best: a split takes at least the time of its products in full waves.

        Args:
            memory: Microseconds of the memory traffic, which is equal for all plans.
        """
        best: Array = math.inf
        gain: Array = math.inf
        for split in SPLITS:
            combine = 0.0 if split == 1 else self.tr + 8 * split * m * n / PARTIALS_RATE
            if split > 1 and not is_any(gain > combine):
                break
            compute = least_over(self.tiles, partial(self._tile_us, m, n, k, split), memory)
            us = pnorm(self.p, compute, memory) + combine
            if split == 1:
                full = least_over(self.tiles, partial(self._full_us, m, n, k), memory)
                gain = compute - full + ROUNDED * us
            best = minimum(best, us)
        return best

    def _tile_us(
        self, m: Array, n: Array, k: Array, split: int, rows: Array, columns: Array
    ) -> Array:
        """Return the compute microseconds of all waves of one kind of tile."""
        tiles = ceil(m / rows) * ceil(n / columns)
        waves = count_waves(tiles * (split / self.sms), self.stair)
        depth = maximum(k / split, LEAST_DEPTH)
        return waves * (depth * self._step_us(rows, columns) + self.pro)

    def _full_us(self, m: Array, n: Array, k: Array, rows: Array, columns: Array) -> Array:
        """Return the compute microseconds if all waves were full."""
        tiles = ceil(m / rows) * ceil(n / columns)
        return tiles * (k * self._step_us(rows, columns)) / self.sms

    def _step_us(self, rows: Array, columns: Array) -> Array:
        """Return the microseconds of a tile for each element of k."""
        return maximum(2 * rows * columns / self.rate, (rows + columns) / self.operands)


class CutlassGemm(KernelModel, frozen=True, tag="gemm_cutlass"):
    """fp8 GEMMs of m × n × k under CUTLASS's fixed dispatch.

    Attributes:
        t0: Launches, including the quantising kernel [µs].
        ec: Share of the datasheet's fp8 peak.
        em: Share of the bandwidth that reading weights reaches.
        p: Sharpness of the overlap of compute and memory.
        bq: Share of the bandwidth that quantising reaches.
        row: Quantising of each row [µs].
        pro: Prologue and epilogue of a tile [µs].
        sg: Part by which a partial last wave counts as a full wave.

    `us` takes one more array, bytes per weight, if the weights are stored in another format.
    """

    t0: Annotated[float, within(0.2, 60)] = 4.3
    ec: Annotated[float, within(0.2, 1.1)] = 0.72
    em: Annotated[float, within(0.2, 1.1)] = 0.82
    p: Annotated[float, within(1, 8)] = 2
    bq: Annotated[float, within(0.05, 1.2)] = 0.6
    pro: Annotated[float, within(0.02, 10)] = 0.8
    sg: Annotated[float, within(0.01, 1)] = 0.9
    row: Annotated[float, within(1e-5, 0.1)] = 2e-3

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        m, n, k, *stored = shape
        memory = (k * (m + n * (stored[0] if stored else 1)) + 2 * m * n) / (
            self.em * machine.memory
        )
        rows, columns = where(m <= 128, 64.0, 128.0), where(m <= 64, 64.0, 128.0)
        tiles = where(m <= 128, ceil(m / rows), 2 * ceil(m / 256)) * ceil(n / columns)
        tile = 2 * rows * columns * k * machine.sms / (self.ec * machine.fp8) + self.pro
        start = self.t0 + self.row * m + 3 * m * k / (self.bq * machine.memory)
        return start + pnorm(self.p, count_waves(tiles / machine.sms, self.sg) * tile, memory)

    def quantised(self, t0: float) -> "CutlassGemm":
        """Return the model of a GEMM with an already quantised input; launches take at most t0
        µs."""
        return msgspec.structs.replace(self, t0=min(self.t0, t0), bq=float("inf"), row=0.0)


LEAST_US = (
    # of memory traffic that the L2 holds on such a GPU: 12 to 20 on HBM, 84 and 116 on the GDDR of
    # two with large L2s
    50.0
)


def keeps_weights(machine: GpuParameters) -> bool:
    """Return whether weights stay in the L2 of this GPU between measured calls."""
    return machine.l2 > LEAST_US * machine.memory


def _reading(
    machine: GpuParameters,
    weights: Array,
    others: Array,
    em: float,
    miss: Array | float,
    l2: float,
) -> Array:
    return maximum((weights * miss + others) / (em * machine.memory), (weights + others) / l2)


class ResidentGemm(Gemm, frozen=True, tag="gemm_resident"):
    """bf16 GEMMs with weights that may stay in the L2 cache.

    Attributes:
        t0, ec, em, p, tr, r: As in `Gemm`.
        cap: Share of the L2 that the weights of one GEMM may fill and stay there until the next
            call.
        l2: Read rate of the L2 [bytes/µs].
        cold: Whether the weights are never in the L2, as in serving.
    """

    cold: bool = False
    cap: Annotated[float, within(0.02, 1.5)] = 0.17
    l2: Annotated[float, within(3e5, 6e7)] = 3e6

    def reading(self, machine: GpuParameters, weights: Array, others: Array) -> Array:
        miss = 1.0 if self.cold else 1 / (1 + (self.cap * machine.l2 / weights) ** 6)
        return _reading(machine, weights, others, self.em, miss, self.l2)


class ResidentQuantizedGemm(QuantizedGemm, frozen=True, tag="gemm_quantized_resident"):
    """fp8 and fp4 GEMMs with weights that may stay in the L2 cache.

    Attributes:
        t0, ec, em, p, tr, r, bq, sg: As in `QuantizedGemm`; there is no `pro`.
        cap, l2, cold: As in `ResidentGemm`.
    """

    cold: bool = False
    pro: float = 0.0
    cap: Annotated[float, within(0.02, 1.5)] = 0.17
    l2: Annotated[float, within(3e5, 6e7)] = 3e6

    def reading(self, machine: GpuParameters, weights: Array, others: Array) -> Array:
        miss = 1.0 if self.cold else 1 / (1 + (self.cap * machine.l2 / weights) ** 6)
        return _reading(machine, weights, others, self.em, miss, self.l2)
