"""The real-gated linear recurrent unit of Griffin and RecurrentGemma.

State per sequence and layer: one fp32 number per channel, and kernel − 1 columns of lru_width channels.
Source: De et al. 2024, arXiv 2402.19427, section 2.4.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size, StateDtype
from kvcalc.layers.recurrent.state import conv_state, recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class RgLru(Part, frozen=True, tag="rg_lru"):
    """A recurrent block of lru_width channels; its two gates are block-diagonal over num_heads blocks."""

    STATE_FLOPS: ClassVar[int] = 0  # the recurrence is elementwise

    lru_width: Size
    num_heads: Size
    conv_kernel: Size = 4
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """x and y [D, W], conv [W, k], two gates of H blocks [W/H, W/H], a decay per channel, out [W, D]; all biases."""
        width, heads = self.lru_width, self.num_heads
        block = width // heads
        return (
            matrix("x", hidden_size, width, bias=True, shards=heads),
            matrix("y", hidden_size, width, bias=True, shards=heads),
            vector("conv", width * (self.conv_kernel + 1), shards=heads),
            matrix("gates", block, 2 * block, bias=True, shards=heads, copies=heads),
            vector("decay", width, shards=heads),
            matrix("out", width, hidden_size, bias=True, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """kernel − 1 columns of W channels, and one state per channel."""
        block = self.lru_width // self.num_heads
        return (
            conv_state(self.num_heads, block, self.conv_kernel),
            recurrent_state(self.num_heads, 1, block, self.state_dtype),
        )

    def problem(self) -> str:
        if self.lru_width % self.num_heads:
            return f"num_heads {self.num_heads} does not divide lru_width {self.lru_width}"
        return ""

    @property
    def label(self) -> str:
        return "RG-LRU"
