"""RWKV-4: linear attention with a decay per channel, behind a mix of each token with the one before.

State per sequence and layer: numerator, denominator and running maximum of every channel in fp32, and two last inputs
as wide as the residual stream: one for time mixing, one for the channel mixing after it. Source: Peng et al. 2023,
arXiv 2305.13048 §3.
"""

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Part, Size, StateDtype
from kvcalc.layers.recurrent.state import conv_state, recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class Rwkv(Part, frozen=True, tag="rwkv"):
    """Time mixing of attention_hidden_size channels. shift_size: width of the inputs that it and its FFN each keep."""

    attention_hidden_size: Size
    shift_size: Size
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """key, value and receptance [D, A], out [A, D]; decay and bonus per channel, three mixes."""
        width = self.attention_hidden_size
        return (
            *(matrix(name, hidden_size, width, shards=width) for name in ("key", "value", "receptance")),
            vector("decay_first", 2 * width, shards=width),
            vector("time_mix", 3 * hidden_size),
            matrix("out", width, hidden_size, shards=width, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Two last inputs, and three numbers per channel."""
        shift = conv_state(1, 2 * self.shift_size, kernel=2)
        return shift, recurrent_state(self.attention_hidden_size, 1, 3, self.state_dtype)

    @property
    def label(self) -> str:
        return "RWKV"
