"""fp8 products under CUTLASS's fixed dispatch by rows, as vLLM and SGLang run them on Hopper, their input quantised first.

tiles m × n: 64 × 64 where m ≤ 64, 64 × 128 where m ≤ 128, else 128 × 128 in clusters of two rows: rows padded to 256
waves  = max(1, x + sg·(⌈x⌉ − x)),  x = tiles/SMs
tile   = 2·m·n·k / (ec·P/SMs) + pro
memory = ((m + n)·k + 2·m·n) / (em·BW)
t      = t0 + row·m + 3·m·k/(bq·BW) + pnorm_p(waves·tile, memory)
"""

from typing import TYPE_CHECKING, Annotated

import msgspec

from kvcalc.timing.gemm import stairs
from kvcalc.timing.law import Array, Law, pnorm, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures


class CutlassGemm(Law, frozen=True, tag="gemm_cutlass"):
    """One product of m × n × k.

    t0 [µs]: launches, of quantising too. ec: of the datasheet's fp8 peak. em: of the bandwidth, what streaming weights
    reaches. p: how sharply compute and memory overlap. bq: of the bandwidth, what quantising reaches; row [µs]: what it takes
    for each row. pro [µs]: prologue and epilogue of a tile. sg: how far the last wave counts as a whole one.

    `us` takes one more array where weights are stored in another format: bytes of one weight.
    """

    t0: Annotated[float, within(0.2, 60)] = 4.3
    ec: Annotated[float, within(0.2, 1.1)] = 0.72
    em: Annotated[float, within(0.2, 1.1)] = 0.82
    p: Annotated[float, within(1, 8)] = 2
    bq: Annotated[float, within(0.05, 1.2)] = 0.6
    pro: Annotated[float, within(0.02, 10)] = 0.8
    sg: Annotated[float, within(0.01, 1)] = 0.9
    row: Annotated[float, within(1e-5, 0.1)] = 2e-3

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        m, n, k, *stored = shape
        memory = (k * (m + n * (stored[0] if stored else 1)) + 2 * m * n) / (self.em * machine.memory)
        rows, columns = np.where(m <= 128, 64.0, 128.0), np.where(m <= 64, 64.0, 128.0)
        tiles = np.where(m <= 128, np.ceil(m / rows), 2 * np.ceil(m / 256)) * np.ceil(n / columns)
        tile = 2 * rows * columns * k * machine.sms / (self.ec * machine.fp8) + self.pro
        start = self.t0 + self.row * m + 3 * m * k / (self.bq * machine.memory)
        return start + pnorm(self.p, stairs(tiles / machine.sms, self.sg) * tile, memory)

    def quantised(self, t0: float) -> "CutlassGemm":
        """The law of a product whose input arrives quantised, with launches of at most t0 µs."""
        return msgspec.structs.replace(self, t0=min(self.t0, t0), bq=float("inf"), row=0.0)
