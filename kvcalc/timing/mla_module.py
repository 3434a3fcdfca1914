"""Decode step of a whole MLA module: its matrix products and its attention, and what the module takes beyond these kernels.

    overhead = t0 + t1·log2(b) + th·h + b·(tb + tbh·h)        b tokens, h heads of the rank

The overhead is the small kernels between the products: norms, RoPE, quantisation, copies and the write of the cache.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcalc.timing.law import Array, Law, within

if TYPE_CHECKING:
    from kvcalc.timing.figures import Figures

MAX_TOKENS = 1024  # of the measured modules
# Of DeepSeek-V3, whose modules were measured: hidden size, q_lora_rank, kv_lora_rank, RoPE, key and value widths.
WIDTHS = (7168, 1536, 512, 64, 128, 128)


class MlaModule(Law, frozen=True, tag="mla_decode_module"):
    """The overhead of one module.

    Attributes:
        t0: Microseconds of each module.
        t1: Microseconds for each doubling of the tokens.
        th: Microseconds for each head.
        tb: Microseconds for each token.
        tbh: Microseconds for each head of each token.
    """

    SOFTNESS: ClassVar[float] = 0.06
    PULL: ClassVar[float] = 1.0

    t0: Annotated[float, within(0.1, 150)] = 10
    t1: Annotated[float, within(0.01, 40)] = 2
    th: Annotated[float, within(1e-3, 2)] = 0.05
    tb: Annotated[float, within(1e-4, 1)] = 0.02
    tbh: Annotated[float, within(1e-5, 0.05)] = 1e-3

    def overhead_us(self, tokens: Array, heads: Array) -> Array:
        """Return the microseconds beyond the kernels. More tokens than were measured count as the most measured."""
        import numpy as np

        counted = np.clip(tokens, 1, MAX_TOKENS)
        return self.t0 + self.t1 * np.log2(counted) + self.th * heads + counted * (self.tb + self.tbh * heads)

    def us(self, machine: "Figures", *shape: Array) -> Array:
        """Return the microseconds of the module. shape: batch, q_heads, kv_len, and the microseconds of its kernels."""
        batch, heads, _, kernels = shape
        return kernels + self.overhead_us(batch, heads)
