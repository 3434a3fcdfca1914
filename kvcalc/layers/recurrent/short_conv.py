"""The gated short convolution of LFM2, whose state is only the last columns of the convolution.

State per sequence and layer: kernel − 1 columns of D channels. Sources: Liquid AI, LFM2 technical report,
section 2; transformers, `lfm2`.
"""

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size
from kvcalc.layers.recurrent.state import conv_state
from kvcalc.layers.weights import Weight, matrix, vector


class ShortConv(Part, frozen=True, tag="short_conv"):
    """A depthwise convolution of `width` channels between two gates."""

    width: Size
    conv_kernel: Size = 3
    bias: bool = False

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """in [D, 3·W], conv [W, k], out [W, D], each with a bias if `bias`."""
        return (
            matrix("in", hidden_size, 3 * self.width, self.bias, shards=self.width),
            vector("conv", self.width * (self.conv_kernel + self.bias), shards=self.width),
            matrix("out", self.width, hidden_size, self.bias, shards=self.width, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """kernel − 1 columns of W channels."""
        return (conv_state(self.width, 1, self.conv_kernel),)

    @property
    def label(self) -> str:
        return "ShortConv"
