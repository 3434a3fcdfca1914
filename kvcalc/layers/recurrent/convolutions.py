"""Short depthwise convolutions and delays beside a mixer: over keys, values or a sublayer's output, without projections.

State per sequence and layer: the last columns of every channel, kernel − 1 of them. Sources: transformers' modelling code
for `inkling` (keys, values and both residual branches) and `zaya` (queries and keys, and values that lag by one token).
"""

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size
from kvcalc.layers.recurrent.state import conv_state
from kvcalc.layers.weights import Weight, vector


class Convolutions(Part, frozen=True, tag="convolutions"):
    """Causal depthwise convolutions: name → channels, all of one kernel.

    bias: one element per channel. weighted: false for a plain delay, which has no weights. columns: kept of each channel
    where further convolutions follow the first without a state of their own; kernel − 1 unless given.
    """

    channels: dict[str, Size]
    conv_kernel: Size
    bias: bool = False
    weighted: bool = True
    columns: Size | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """[channels, kernel] each, with a bias if `bias`."""
        if not self.weighted:
            return ()
        return tuple(vector(name, width * (self.conv_kernel + self.bias), shards=width) for name, width in self.channels.items())

    def cache(self) -> tuple[CacheEntry, ...]:
        """kernel − 1 columns, or `columns`, of each channel."""
        kept = self.columns + 1 if self.columns else self.conv_kernel
        return tuple(conv_state(width, 1, kept) for width in self.channels.values()) if kept > 1 else ()
