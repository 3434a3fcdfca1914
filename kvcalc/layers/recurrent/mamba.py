"""Mamba and Mamba-2: selective state spaces after a short convolution.

State per sequence and layer: intermediate_size × state_size (Mamba) or num_heads × head_dim ×
state_size (Mamba-2), in fp32 unless the model sets another dtype, and kernel − 1 columns of the
convolution's input. Sources: Gu & Dao 2023, arXiv 2312.00752, section 3; Dao & Gu 2024, arXiv
2405.21060, section 7.
"""

from kvcalc.layers.part import Size, StateDtype
from kvcalc.layers.recurrent.delta_rule import RecurrentMixer


class Mamba(RecurrentMixer, frozen=True, tag="mamba"):
    """A Mamba block: a selective state space after a short convolution.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, or
            `rows`, the inputs are divided instead. `norm: d` is an undivided vector of d elements.
            `bias f` adds a bias if field f is set. `if` is the condition for the weight. `copies E`
            is E equal matrices.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: States of one sequence in one layer: `conv` is the last kc − 1 inputs of Em
            channels, and `state` N numbers for each channel.
        MULTIPLE: The first of these fields must be a multiple of the second.
        LABEL: Printed name.
        intermediate_size: Number of channels.
        state_size: State elements of each channel.
        time_step_rank: Width between the two projections that compute the time step.
        conv_kernel: Taps of the convolution, in tokens.
        n_mamba_heads: Number of independent groups of channels, each with its own projections
            (Zamba).
        num_heads: Number of heads, each with one time step, decay and skip weight (PLaMo 2); null
            if each channel has its own.
        conv_bias: Whether the convolution has a bias.
        proj_bias: Whether the input and output projections have biases.
        inner_norms: Whether the time step and the projections B and C have RMSNorms (Jamba).
        state_dtype: dtype of the state in the model's config.json; null if it states none. kvcalc
            then assumes fp32 without an engine, or uses the engine's default.
    """

    LETTERS = """
        Em=intermediate_size N=state_size R=time_step_rank kc=conv_kernel bc=conv_bias
        g=n_mamba_heads Eg=group_size H=num_steps Hg=group_steps
    """
    LABEL = "Mamba"
    MULTIPLE = ("intermediate_size", "n_mamba_heads")
    STATES = "conv: Em × 1 × kc; state: Em × 1 × N"
    WEIGHTS = """
        in: D × 2·Em / Em, bias proj_bias
        conv: Em·kc + Em·bc / Em
        x: Eg × R + 2·N / Eg, rows, copies g
        dt: R × Hg / Hg, bias, copies g
        a: H / H, if num_heads
        a: H·N / H, if not num_heads
        d: H / H
        out: Em × D / Em, bias proj_bias
        dt_norm: R, if inner_norms
        b_norm: N, if inner_norms
        c_norm: N, if inner_norms
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

    @property
    def group_size(self) -> int:
        return self.intermediate_size // self.n_mamba_heads

    @property
    def num_steps(self) -> int:
        """Return the number of time steps Δ that the layer computes per token.

        Each head has its own if `num_heads` is set, and otherwise each channel.
        """
        return self.num_heads or self.intermediate_size

    @property
    def group_steps(self) -> int:
        return self.num_steps // self.n_mamba_heads


class Mamba2(RecurrentMixer, frozen=True, tag="mamba2"):
    """A Mamba-2 block: a selective state space with one decay per head, after a short convolution.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias f`
            adds a bias if field f is set. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: States of one sequence in one layer: `conv` are the last kc − 1 inputs of d channels
            for each of H heads, and of 2·N channels for each of G groups. `state` is a d × N matrix
            for each head.
        LABEL: Printed name.
        num_heads: Number of heads.
        head_dim: Channels of a head.
        state_size: State elements of each channel.
        n_groups: Number of groups of heads. The heads of a group share the projections B and C.
        conv_kernel: Taps of the convolution, in tokens.
        conv_bias: Whether the convolution has a bias.
        proj_bias: Whether the input projections have biases.
        gate_norm: Whether the gated output has a norm.
        out_bias: Whether the output projection has a bias; null if `proj_bias` applies to it.
        state_dtype: dtype of the state in the model's config.json; null if it states none. kvcalc
            then assumes fp32 without an engine, or uses the engine's default.
    """

    LABEL = "Mamba-2"
    STATES = "conv: H × d × kc; conv: G × 2·N × kc; state: H × d × N"
    WEIGHTS = """
        in: D × 2·H·d + H / H, bias proj_bias
        in_bc: D × 2·G·N / G, bias proj_bias
        conv: H·d·kc + H·d·bc / H
        conv_bc: 2·G·N·kc + 2·G·N·bc / G
        a_d_dt: 3·H / H
        norm: H·d / H, if gate_norm
        out: H·d × D / H, bias has_out_bias
    """
    LETTERS = "H=num_heads d=head_dim G=n_groups N=state_size kc=conv_kernel bc=conv_bias"

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

    @property
    def has_out_bias(self) -> bool:
        return self.proj_bias if self.out_bias is None else self.out_bias
