"""Short depthwise convolutions and delays on keys, values or a sublayer's output, without projections.

State per sequence and layer: the last kernel − 1 columns of every channel. Sources: transformers,
`inkling` (keys, values and both residual branches) and `zaya` (queries, keys, and values delayed by one
token).
"""

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size
from kvcalc.layers.recurrent.state import conv_state
from kvcalc.layers.weights import Weight, vector


class Convolutions(Part, frozen=True, tag="convolutions"):
    """Causal depthwise convolutions of one kernel size: name → channels.

    Attributes:
        bias: Whether each channel has a bias.
        weighted: False for a plain delay without weights.
        columns: Stored columns per channel; kernel − 1 by default. More are stored if later convolutions
            follow without a state.
    """

    channels: dict[str, Size]
    conv_kernel: Size
    bias: bool = False
    weighted: bool = True
    columns: Size | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """[channels, kernel] for each convolution, with a bias if `bias`."""
        if not self.weighted:
            return ()
        return tuple(vector(name, width * (self.conv_kernel + self.bias), shards=width) for name, width in self.channels.items())

    def cache(self) -> tuple[CacheEntry, ...]:
        """kernel − 1 columns, or `columns`, of each channel."""
        kept = self.columns + 1 if self.columns else self.conv_kernel
        return tuple(conv_state(width, 1, kept) for width in self.channels.values()) if kept > 1 else ()
