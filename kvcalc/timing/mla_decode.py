"""MLA decode in the absorbed form: all heads attend to one latent of 512 with a RoPE key of 64 beside it.

As decode attention, with tiles of 64 heads and blocks of 64 tokens, and products that near the tensor cores' rate:

    n      = batch·⌈q_heads/64⌉,  blocks = ⌈kv_len/64⌉
    tile   = tau + ⌈blocks/s⌉·max(64·576·bytes / r, 2·64·64·1088 / (ec·P/SMs)) / pace
    memory = that of decode attention / pace
"""

from typing import TYPE_CHECKING, Annotated

from kvcalc.timing.decode_attention import best_split, misses
from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

ROWS, BLOCK, LATENT, ROPE = 64, 64, 512, 64
COMBINE = 2.5  # µs of the kernel that combines a split


class MlaDecode(Law, frozen=True, tag="mla_decode"):
    """One decode step of latent attention.

    t0 [µs]: launch, prologue, cache write. tau [µs]: what a tile pays beside its walk. r [bytes/µs]: at what rate one SM
    streams latents. ec: of the datasheet's bf16 peak. cap: the share of the L2 in which a cache stays between calls.
    tramp [µs]: ramp of HBM, and the tail. cast: passes over the whole cache before the attention, in its own bytes
    (converting an fp8 cache to bf16 reads one and writes two; a bf16 cache needs next to none).
    reach: of the datasheet's bandwidth, by a long read. h32, h64: at what pace, of the usual one, kernels walk for 17 to 32
    and for 33 to 64 heads, where they take several tiles over one cache.
    bytes: of one cached element.
    """

    bytes: int = 2
    cold: bool = False
    t0: Annotated[float, within(0.3, 80)] = 6.3
    tau: Annotated[float, within(0.05, 30)] = 5.5
    r: Annotated[float, within(5e3, 2e6)] = 3e5
    ec: Annotated[float, within(0.05, 1.2)] = 0.9
    cap: Annotated[float, within(0.05, 1.5)] = 0.4
    tramp: Annotated[float, within(0.1, 60)] = 7
    cast: Annotated[float, within(1e-3, 40)] = 0.05
    reach: Annotated[float, within(0.5, 1.1)] = 0.95
    h32: Annotated[float, within(0.3, 1.5)] = 1
    h64: Annotated[float, within(0.3, 1.5)] = 1

    def us(self, machine: "Figures", *shape: Array) -> Array:
        import numpy as np

        batch, heads, length = shape
        read = batch * length * (LATENT + ROPE) * self.bytes
        miss = misses(read, self.cap, machine.l2, self.cold)
        memory = miss * (read / (self.reach * machine.memory) + self.tramp)
        rate = self.ec * machine.bf16 / machine.sms
        pace = np.select([heads <= 16, heads <= 32, heads <= 64], [1.0, self.h32, self.h64], 1.0)
        memory = memory / pace
        block = np.maximum(BLOCK * (LATENT + ROPE) * self.bytes / self.r, 2 * ROWS * BLOCK * (2 * LATENT + ROPE) / rate) / pace
        tiles = batch * np.ceil(heads / ROWS) / machine.sms
        best = best_split(tiles, np.ceil(length / BLOCK), np.asarray(self.tau), np.asarray(block), memory, COMBINE)
        moved = 2 * batch * heads * (2 * LATENT + ROPE) + self.cast * read
        return self.t0 + best + moved / machine.memory
