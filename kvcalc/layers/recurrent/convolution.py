"""Short depthwise convolutions and delays on keys, values or a sublayer's output, without
projections.

State per sequence and layer: the last kernel − 1 columns of every channel. Sources: transformers,
`inkling` (keys, values and both residual branches) and `zaya` (queries, keys, and values delayed by
one token).

The gated short convolution of LFM2, whose state is only the last columns of the convolution.

State per sequence and layer: kernel − 1 columns of D channels. Sources: Liquid AI, LFM2 technical
report, section 2; transformers, `lfm2`.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Size, Sublayer
from kvcalc.layers.recurrent.delta_rule import RecurrentMixer, conv_state
from kvcalc.layers.weights import Weight, vector


class Convolutions(Sublayer, frozen=True, tag="convolutions"):
    """Causal depthwise convolutions of one kernel size: name → channels.

    Attributes:
        bias: Whether each channel has a bias.
        weighted: False for a plain delay without weights.
        columns: Stored columns per channel; kernel − 1 by default. More are stored if later
            convolutions follow without a state.
    """

    channels: dict[str, Size]
    conv_kernel: Size
    bias: bool = False
    weighted: bool = True
    columns: Size | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: [channels, kernel] for each convolution, with a bias if `bias`."""
        if not self.weighted:
            return ()
        return tuple(
            vector(name, width * (self.conv_kernel + self.bias), shards=width)
            for name, width in self.channels.items()
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return kernel − 1 columns, or `columns`, for each channel."""
        kernel = self.columns + 1 if self.columns else self.conv_kernel
        if kernel == 1:
            return ()
        return tuple(conv_state(width, 1, kernel) for width in self.channels.values())


class ShortConv(RecurrentMixer, frozen=True, tag="short_conv"):
    """A depthwise convolution of `width` channels between two gates."""

    LETTERS: ClassVar[str] = "W=width kc=conv_kernel bc=bias"
    LABEL: ClassVar[str] = "ShortConv"
    STATES: ClassVar[str] = "conv: W × 1 × kc"
    WEIGHTS: ClassVar[str] = """
        in: D × 3·W / W, bias bias
        conv: W·kc + W·bc / W
        out: W × D / W, bias bias
    """

    width: Size
    conv_kernel: Size = 3
    bias: bool = False
