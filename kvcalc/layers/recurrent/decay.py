"""Lightning attention: linear attention with a fixed decay per head (MiniMax-Text-01, MiniMax-M1).

State per sequence and layer: one matrix head_dim × head_dim per head; no convolution. Source:
MiniMax-01, arXiv 2501.08313, section 2.2.

RWKV-7: linear attention with a decay per channel, behind a mix of each token with the one before.

State per sequence and layer: a matrix head_dim × head_dim per head in fp32, and two last inputs as
wide as the residual stream, one for time mixing, one for the channel mixing after it. Source: Peng
et al. 2025, arXiv 2503.14456 §4.

The real-gated linear recurrent unit of Griffin and RecurrentGemma.

State per sequence and layer: one fp32 number per channel, and kernel − 1 columns of lru_width
channels. Source: De et al. 2024, arXiv 2402.19427, section 2.4.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Count, Size, StateDtype, Sublayer
from kvcalc.layers.recurrent.delta_rule import conv_state, recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class Lightning(Sublayer, frozen=True, tag="lightning"):
    """Linear attention of num_attention_heads heads, with norm and gate before the output
    projection."""

    num_attention_heads: Size
    head_dim: Size
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: qkv [D, 3·H·d], gate [D, H·d], norm [H·d], out [H·d, D]."""
        heads = self.num_attention_heads
        inner = heads * self.head_dim
        return (
            matrix("qkv", hidden_size, 3 * inner, shards=heads),
            matrix("gate", hidden_size, inner, shards=heads),
            vector("norm", inner, shards=heads),
            matrix("out", inner, hidden_size, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: d × d per head."""
        return (
            recurrent_state(
                self.num_attention_heads, self.head_dim, self.head_dim, self.state_dtype
            ),
        )

    @property
    def label(self) -> str:
        return "Lightning"


class Rwkv7(Sublayer, frozen=True, tag="rwkv7"):
    """Time mixing of num_heads heads of head_dim; decay, learning rate, value mix and gate through
    low ranks.

    v_low_rank_dim: 0 in the first layer, whose values are mixed with none. shift_size: width of the
    inputs that it and its FFN each keep.
    """

    # state·a and its outer product with b, the outer product of values and keys, state·r
    STATE_FLOPS: ClassVar[int] = 6

    num_heads: Size
    head_dim: Size
    decay_low_rank_dim: Size
    a_low_rank_dim: Size
    v_low_rank_dim: Count
    gate_low_rank_dim: Size
    shift_size: Size
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: receptance, key, value [D, H·d] and out [H·d, D]; four pairs [D, r]
        and [r, H·d]; mixes, scales and the norm."""
        heads = self.num_heads
        inner = heads * self.head_dim
        ranks = {
            "decay": self.decay_low_rank_dim,
            "a": self.a_low_rank_dim,
            "v": self.v_low_rank_dim,
        }
        low = {
            **{name: rank for name, rank in ranks.items() if rank},
            "gate": self.gate_low_rank_dim,
        }
        return (
            *(
                matrix(name, hidden_size, inner, shards=heads)
                for name in ("receptance", "key", "value")
            ),
            *(matrix(f"{name}_down", hidden_size, rank) for name, rank in low.items()),
            *(
                matrix(f"{name}_up", rank, inner, bias=name != "gate", shards=heads)
                for name, rank in low.items()
            ),
            vector("time_mix", 6 * hidden_size),
            vector("scales", 3 * inner, shards=heads),
            vector("norm", 2 * inner, shards=heads),
            matrix("out", inner, hidden_size, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: two last inputs, and d × d per head."""
        shift = conv_state(1, 2 * self.shift_size, kernel=2)
        return shift, recurrent_state(
            self.num_heads, self.head_dim, self.head_dim, self.state_dtype
        )

    @property
    def label(self) -> str:
        return "RWKV-7"


class RgLru(Sublayer, frozen=True, tag="rg_lru"):
    """A recurrent block of lru_width channels; its two gates are block-diagonal over num_heads
    blocks."""

    STATE_FLOPS: ClassVar[int] = 0  # the recurrence is elementwise

    lru_width: Size
    num_heads: Size
    conv_kernel: Size = 4
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: x and y [D, W], conv [W, k], two gates of H blocks [W/H, W/H], a
        decay per channel, out [W, D]; all biases."""
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
        """Return the cache entries of one sequence: kernel − 1 columns of W channels, and one state
        per channel."""
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
