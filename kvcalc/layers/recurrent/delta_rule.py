"""States of recurrent mixers: short-convolution states and recurrent states, both of constant size.

Gated delta rule: gated delta net (Qwen3-Next) and Kimi delta attention (KDA).

State per sequence and layer: one matrix key_dim × value_dim per value head, and kernel − 1 columns
of queries, keys and values. Sources: Yang et al. 2024, arXiv 2412.06464, section 3; Kimi Linear
technical report, arXiv 2510.26692, section 4.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.part import Size, StateDtype, Sublayer
from kvcalc.layers.weights import Weight, matrix, vector


def conv_state(heads: int, width: int, kernel: int) -> CacheEntry:
    """Return the last kernel − 1 columns of `heads · width` channels in the dtype of the model."""
    return CacheEntry("conv_state", heads, width, limit=kernel - 1, span=Span.STATE)


def recurrent_state(heads: int, rows: int, width: int, dtype: str | None) -> CacheEntry:
    """Return a matrix of rows × width per head in the dtype that the model fixes.

    '' is the dtype of the model. None means that the model fixes none; fp32 is assumed.
    """
    fixed = "fp32" if dtype is None else dtype
    return CacheEntry(
        "recurrent_state",
        heads,
        width,
        limit=rows,
        span=Span.STATE,
        dtype=fixed,
        assumed=dtype is None,
    )


class GatedDeltaNet(Sublayer, frozen=True, tag="gated_delta_net"):
    """linear_num_value_heads states of linear_key_head_dim × linear_value_head_dim, with decay and
    step per head.

    The output is normalised per head and gated by a projection as wide as the values.

    Attributes:
        state_dtype: dtype in the config. null means that the config has none: fp32 here, and the
            engine's default in an engine.
    """

    STATE_FLOPS: ClassVar[int] = 6  # k·S, the outer product, q·S
    SIDES: ClassVar[str] = (
        "qk: D × 2·Hk·dk; v_gate: D × 2·Hv·dv; step_decay: D × 2·Hv; out: Hv·dv × D"
    )
    LETTERS: ClassVar[str] = (
        "Hk=linear_num_key_heads Hv=linear_num_value_heads dk=linear_key_head_dim "
        "dv=linear_value_head_dim"
    )

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size = 4
    conv_bias: bool = False
    state_dtype: StateDtype | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: q and k [D, Hk·dk], v and gate [D, Hv·dv], step and decay [D, Hv],
        conv, A, step bias, norm [dv], out."""
        kh, vh = self.linear_num_key_heads, self.linear_num_value_heads
        keys, values = kh * self.linear_key_head_dim, vh * self.linear_value_head_dim
        columns = self.linear_conv_kernel_dim + self.conv_bias
        return (
            matrix("qk", hidden_size, 2 * keys, shards=kh),
            matrix("v_gate", hidden_size, 2 * values, shards=vh),
            matrix("step_decay", hidden_size, 2 * vh, shards=vh),
            vector("conv_qk", 2 * keys * columns, shards=kh),
            vector("conv_v", values * columns, shards=vh),
            vector("a_dt", 2 * vh, shards=vh),
            vector("norm", self.linear_value_head_dim),
            matrix("out", values, hidden_size, shards=vh, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: kernel − 1 columns of queries, keys and values,
        and dk × dv per value head."""
        kernel, dk, dv = (
            self.linear_conv_kernel_dim,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )
        return (
            conv_state(self.linear_num_key_heads, 2 * dk, kernel),
            conv_state(self.linear_num_value_heads, dv, kernel),
            recurrent_state(self.linear_num_value_heads, dk, dv, self.state_dtype),
        )

    def problem(self) -> str:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            return (
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}"
            )
        return ""

    @property
    def label(self) -> str:
        return "GatedDeltaNet"


class KimiDeltaAttention(Sublayer, frozen=True, tag="kda"):
    """num_heads states of head_dim × head_dim with a decay per channel.

    Attributes:
        factored: Whether decay and output gate are projected through head_dim, not by one matrix
            each.
        full_gate: Whether the gate is one matrix even if `factored` (Kimi-K3).
    """

    STATE_FLOPS: ClassVar[int] = 6

    num_heads: Size
    head_dim: Size
    conv_kernel: Size = 4
    gate_bias: bool = False
    factored: bool = True
    full_gate: bool = False
    state_dtype: StateDtype = "fp32"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: q, k, v [D, H·d]; decay and gate as [D, d] and [d, H·d], or [D, H·d];
        step [D, H]; conv; A, bias; norm; out."""
        heads, d = self.num_heads, self.head_dim
        inner = heads * d
        through = [
            *(["decay"] if self.factored else []),
            *(["gate"] if self.factored and not self.full_gate else []),
        ]
        return (
            *(matrix(n, hidden_size, inner, shards=heads) for n in ("q", "k", "v")),
            vector("conv", 3 * inner * self.conv_kernel, shards=heads),
            *(matrix(f"{name}_down", hidden_size, d) for name in through),
            matrix(
                "decay_up",
                d if "decay" in through else hidden_size,
                inner,
                shards=heads,
            ),
            matrix(
                "gate_up",
                d if "gate" in through else hidden_size,
                inner,
                self.gate_bias,
                shards=heads,
            ),
            matrix("step", hidden_size, heads, shards=heads),
            vector("a_dt", heads + inner, shards=heads),
            vector("norm", d),
            matrix("out", inner, hidden_size, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: kernel − 1 columns of queries, keys and values,
        and d × d per head."""
        return (
            conv_state(self.num_heads, 3 * self.head_dim, self.conv_kernel),
            recurrent_state(self.num_heads, self.head_dim, self.head_dim, self.state_dtype),
        )

    @property
    def label(self) -> str:
        return "KDA"
