"""Matrix products: out[m, n] = x[m, k] · W[n, k]ᵀ, the result in bf16.

A library picks a tile tm × tn among those of its kernels, and a split s of k. The compute side of such a plan is its waves of
tiles over the SMs times the time of one tile; the memory side is the compulsory traffic of both operands and the result, the
same for all plans.

    waves   = max(1, ⌈m/tm⌉·⌈n/tn⌉·s / SMs)
    tile    = max(2·tm·tn·k/s / (ec·P/SMs), (tm + tn)·(k/s)·bytes / r)
    memory  = ((m + n)·k·bytes + 2·m·n) / (em·BW)
    t       = t0 + min over s of pnorm_p(min over tiles of waves·tile, memory) + (s > 1)·(tr + 8·s·m·n / 6 TB/s)
"""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvcalc.timing.law import Array, Law, pnorm, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

TILES = ((64, 64), (64, 128), (128, 64), (64, 256), (256, 64), (128, 128), (128, 256), (256, 128))
BF16_TILES = (*TILES, (32, 64), (64, 32), (32, 128), (128, 32), (96, 128), (128, 96))
SPLITS = (1, 2, 4, 8, 16)
LEAST_DEPTH = 64  # k of one pipeline stage
BLOCK = 1 << 11  # products whose plans are tried at once: their arrays stay in the CPU's cache
ROUNDED = 1e-9  # of a time, more than what rounding makes of it
PARTIALS_RATE = 6e6  # bytes per µs at which partial sums of a split, in the L2, are written and read again


class Gemm(Law, frozen=True, tag="gemm"):
    """bf16 products, weights cold.

    t0 [µs]: launch, prologue and epilogue. ec: of the datasheet's dense peak, what power and the pipeline leave. em: of the
    datasheet's bandwidth, what streaming weights reaches. p: how sharply compute and memory overlap (∞: perfectly). tr
    [µs]: the second kernel of a split of k. r [bytes/µs]: at what rate one SM takes in operands.

    `us` takes one more array where weights are stored in another format than they are computed in: bytes of one weight.
    """

    t0: Annotated[float, within(0.2, 40)] = 2.6
    ec: Annotated[float, within(0.2, 1.1)] = 0.8
    em: Annotated[float, within(0.2, 1.1)] = 0.85
    p: Annotated[float, within(1, 8)] = 2.5
    tr: Annotated[float, within(0.2, 30)] = 2.2
    r: Annotated[float, within(1e4, 1e6)] = 1.6e5

    def reading(self, machine: "Figures", weights: Array, others: Array) -> Array:
        """µs to move so many bytes of weights, and so many of inputs and outputs."""
        return (weights + others) / (self.em * machine.memory)

    def us(self, machine: "Figures", *shape: Array) -> Array:
        m, n, k, *stored = shape
        weights = n * k * (stored[0] if stored else 2)
        memory = self.reading(machine, weights, 2 * m * (k + n))
        rate = self.ec * machine.bf16 / machine.sms
        return self.t0 + _best_plan(m, n, k, memory, rate, self.r / 2, machine.sms, self.p, self.tr, BF16_TILES)


class QuantizedGemm(Law, frozen=True, tag="gemm_fp8"):
    """fp8 and fp4 products that quantise their bf16 input first, in a kernel of its own: + (2 + bytes)·m·k / (bq·BW).

    t0, ec, em, p, tr, r: as of Gemm, t0 with the launch of that kernel. bq: of the datasheet's bandwidth, what quantising
    reaches. pro [µs]: what each wave pays beside its
    products: scales, prologue, epilogue. sg: how far the last wave counts as a whole one (0: not at all).
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

    def us(self, machine: "Figures", *shape: Array) -> Array:
        m, n, k, *stored = shape
        weights = n * k * (stored[0] if stored else self.bytes)
        memory = self.reading(machine, weights, m * (k * self.bytes + 2 * n))
        rate = self.ec * machine.peak(self.bytes) / machine.sms
        start = self.t0 + (2 + self.bytes) * m * k / (self.bq * machine.memory)
        operands, sms = self.r / self.bytes, machine.sms
        return start + _best_plan(m, n, k, memory, rate, operands, sms, self.p, self.tr, TILES, self.pro, self.sg)

    def reading(self, machine: "Figures", weights: Array, others: Array) -> Array:
        """µs to move so many bytes of weights, and so many of inputs and outputs."""
        return (weights + others) / (self.em * machine.memory)

    def quantised(self, t0: float) -> "QuantizedGemm":
        """The law of a product whose input arrives quantised, with launches of at most t0 µs."""
        return msgspec.structs.replace(self, t0=min(self.t0, t0), bq=float("inf"))


def stairs(tiles: Array, stair: Array | float) -> Array:
    """Waves of so many tiles per SM, at least one; a last, partial wave counts between its share and a whole one."""
    import numpy as np

    return np.maximum(1.0, tiles + stair * (np.ceil(tiles) - tiles))


def _best_plan(
    m: Array, n: Array, k: Array, memory: Array, rate: float, elements: float, sms: int, p: float, tr: float,
    tiles: tuple[tuple[int, int], ...], pro: float = 0.0, stair: float = 0.0,
) -> Array:  # fmt: skip
    """The least time over tiles and splits of k. The minimum over tiles comes before the p-norm, which keeps its order.

    Splits end where none can be the best: one takes at least the products by themselves, without prologues or waves that are
    not full, and the p-norm grows by no more than they do.
    """
    import numpy as np

    if memory.size > BLOCK:
        return _in_blocks(m, n, k, memory, rate, elements, sms, p, tr, tiles, pro, stair)
    rows, columns = np.array(tiles, float).T.reshape(2, -1, *[1] * memory.ndim)
    count = np.ceil(m / rows) * np.ceil(n / columns)  # [tiles, products], in a fit [tiles, points, products]
    step = np.maximum(2 * rows * columns / rate, (rows + columns) / elements)
    best, gain = np.array(np.inf), np.array(np.inf)
    for split in SPLITS:
        if not (gain > tr + 8 * split * m * n / PARTIALS_RATE).any():
            break
        waves = stairs(count * (split / sms), stair)
        compute = (waves * (np.maximum(k / split, LEAST_DEPTH) * step + pro)).min(axis=0)
        found = pnorm(p, compute, memory)
        if split == 1:
            gain = compute - (count * (k * step)).min(axis=0) / sms + ROUNDED * found
        else:
            found = found + tr + 8 * split * m * n / PARTIALS_RATE
        best = np.minimum(best, found)
    return best


def _in_blocks(m: Array, n: Array, k: Array, memory: Array, *others: Any) -> Array:
    """The same of many products, some at a time."""
    import numpy as np

    m, n, k, _ = np.broadcast_arrays(m, n, k, memory[(0,) * (memory.ndim - 1)])
    ends = range(0, len(m), max(1, BLOCK * len(m) // memory.size))
    cuts = [slice(at, at + ends.step) for at in ends]
    return np.concatenate([_best_plan(m[c], n[c], k[c], memory[..., c], *others) for c in cuts], axis=-1)
