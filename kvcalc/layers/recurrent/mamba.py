"""Mamba and Mamba-2: selective state spaces after a short convolution.

State per sequence and layer: intermediate_size × state_size (Mamba) or num_heads × head_dim ×
state_size (Mamba-2), in fp32 unless the model sets another dtype, and kernel − 1 columns of the
convolution's input. Sources: Gu & Dao 2023, arXiv 2312.00752, section 3; Dao & Gu 2024, arXiv
2405.21060, section 7.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Size, StateDtype, Sublayer
from kvcalc.layers.recurrent.delta_rule import conv_state, recurrent_state
from kvcalc.layers.weights import Weight, matrix, vector


class Mamba(Sublayer, frozen=True, tag="mamba"):
    """A Mamba block of intermediate_size channels with state_size states each.

    Attributes:
        time_step_rank: Width of the factored step projection.
        inner_norms: Whether step, B and C have RMSNorms (Jamba).
        n_mamba_heads: Independent groups of channels with their own projections (Zamba).
        num_heads: Heads that share one step, decay and skip (PLaMo 2); by default each channel has
            its own.
        state_dtype: dtype in the config. null means that the config has none: fp32 here, and the
            engine's default in an engine.
    """

    intermediate_size: Size
    state_size: Size
    time_step_rank: Size
    conv_kernel: Size = 4
    n_mamba_heads: Size = 1
    num_heads: Size | None = None
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: bool = False
    state_dtype: StateDtype | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: in [D, 2·E], conv [E, k], x [E, R + 2N], dt [R, E] with bias, A [E,
        N], D [E], out [E, D].

        With num_heads H: dt [R, H] with bias, A [H], D [H].
        """
        inner, states, rank, heads = (
            self.intermediate_size,
            self.state_size,
            self.time_step_rank,
            self.n_mamba_heads,
        )
        steps = self.num_heads or inner
        norms = (
            (
                vector("dt_norm", rank),
                vector("b_norm", states),
                vector("c_norm", states),
            )
            if self.inner_norms
            else ()
        )
        return (
            matrix("in", hidden_size, 2 * inner, self.proj_bias, shards=inner),
            vector("conv", inner * (self.conv_kernel + self.conv_bias), shards=inner),
            matrix(
                "x",
                inner // heads,
                rank + 2 * states,
                shards=inner // heads,
                rows_in=True,
                copies=heads,
            ),
            matrix(
                "dt",
                rank,
                steps // heads,
                bias=True,
                shards=steps // heads,
                copies=heads,
            ),
            vector("a", steps * (1 if self.num_heads else states), shards=steps),
            vector("d", steps, shards=steps),
            matrix("out", inner, hidden_size, self.proj_bias, shards=inner, rows_in=True),
            *norms,
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: kernel − 1 columns of E channels, and a state
        of E × N."""
        conv = conv_state(self.intermediate_size, 1, self.conv_kernel)
        return conv, recurrent_state(
            self.intermediate_size, 1, self.state_size, self.state_dtype
        )

    def problem(self) -> str:
        if self.intermediate_size % self.n_mamba_heads:
            return (
                f"n_mamba_heads {self.n_mamba_heads} does not divide intermediate_size "
                f"{self.intermediate_size}"
            )
        return ""

    @property
    def label(self) -> str:
        return "Mamba"


class Mamba2(Sublayer, frozen=True, tag="mamba2"):
    """A Mamba-2 block of num_heads heads of head_dim, with n_groups shared B and C of
    state_size."""

    SIDES: ClassVar[str] = "in: D × 2·H·d + H; in_bc: D × 2·G·N; out: H·d × D"
    LETTERS: ClassVar[str] = "H=num_heads d=head_dim G=n_groups N=state_size"

    num_heads: Size
    head_dim: Size
    state_size: Size
    n_groups: Size = 1
    conv_kernel: Size = 4
    conv_bias: bool = True
    proj_bias: bool = False
    gate_norm: bool = True
    out_bias: bool | None = None
    state_dtype: StateDtype | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: in [D, 2·E + 2·G·N + H], conv over E + 2·G·N channels, A, D and step
        bias per head, norm [E], out [E, D]."""
        inner, heads, shared = (
            self.num_heads * self.head_dim,
            self.num_heads,
            self.n_groups * self.state_size,
        )
        out_bias = self.proj_bias if self.out_bias is None else self.out_bias
        columns = self.conv_kernel + self.conv_bias
        return (
            matrix("in", hidden_size, 2 * inner + heads, self.proj_bias, shards=heads),
            matrix("in_bc", hidden_size, 2 * shared, self.proj_bias, shards=self.n_groups),
            vector("conv", inner * columns, shards=heads),
            vector("conv_bc", 2 * shared * columns, shards=self.n_groups),
            vector("a_d_dt", 3 * heads, shards=heads),
            *((vector("norm", inner, shards=heads),) if self.gate_norm else ()),
            matrix("out", inner, hidden_size, out_bias, shards=heads, rows_in=True),
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: kernel − 1 columns of E + 2·G·N channels, and a
        state of head_dim × state_size per head."""
        return (
            conv_state(self.num_heads, self.head_dim, self.conv_kernel),
            conv_state(self.n_groups, 2 * self.state_size, self.conv_kernel),
            recurrent_state(self.num_heads, self.head_dim, self.state_size, self.state_dtype),
        )

    @property
    def label(self) -> str:
        return "Mamba-2"
