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

from kvcalc.layers.part import Count, Size, StateDtype
from kvcalc.layers.recurrent.delta_rule import RecurrentMixer


class Lightning(RecurrentMixer, frozen=True, tag="lightning"):
    """Lightning attention: linear attention with a fixed decay per head (MiniMax-Text-01).

    The state of a sequence is a matrix head_dim × head_dim per head. A norm and a gate precede the
    output projection.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: State of one sequence in one layer: a d × d matrix for each of H heads.
        LABEL: Printed name.
        num_attention_heads: Number of heads.
        head_dim: Elements of a query, key or value of one head.
        state_dtype: dtype of the state.
    """

    LETTERS = "H=num_attention_heads d=head_dim"
    LABEL = "Lightning"
    STATES = "state: H × d × d"
    WEIGHTS = """
        qkv: D × 3·H·d / H
        gate: D × H·d / H
        norm: H·d / H
        out: H·d × D / H
    """

    num_attention_heads: Size
    head_dim: Size
    state_dtype: StateDtype = "fp32"


class Rwkv7(RecurrentMixer, frozen=True, tag="rwkv7"):
    """Time mixing of RWKV-7: linear attention with a decay per channel.

    The state of a sequence is a matrix head_dim × head_dim per head, and the last token's inputs of
    the time mixing and of the FFN after it.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias` adds
            a bias. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: States of one sequence in one layer: `conv` is the last input of 2·ds channels,
            which tensor parallelism does not divide, and `state` a d × d matrix for each of H
            heads.
        STATE_FLOPS: FLOPs of the scan per state element and token.
        LABEL: Printed name.
        num_heads: Number of heads.
        head_dim: Elements of a key or value of one head.
        decay_low_rank_dim: Rank of the factored projection of the decay.
        a_low_rank_dim: Rank of the factored projection of the in-context learning rate.
        v_low_rank_dim: Rank of the factored projection that mixes a layer's values with the first
            layer's; 0 in the first layer.
        gate_low_rank_dim: Rank of the factored projection of the gate.
        shift_size: Elements of each of the two stored inputs.
        state_dtype: dtype of the matrices.
    """

    LETTERS = """
        H=num_heads d=head_dim rd=decay_low_rank_dim ra=a_low_rank_dim rv=v_low_rank_dim
        rg=gate_low_rank_dim ds=shift_size
    """
    LABEL = "RWKV-7"
    STATES = "conv: 1 × 2·ds × 2; state: H × d × d"
    WEIGHTS = """
        receptance: D × H·d / H
        key: D × H·d / H
        value: D × H·d / H
        decay_down: D × rd
        a_down: D × ra
        v_down: D × rv, if v_low_rank_dim
        gate_down: D × rg
        decay_up: rd × H·d / H, bias
        a_up: ra × H·d / H, bias
        v_up: rv × H·d / H, bias, if v_low_rank_dim
        gate_up: rg × H·d / H
        time_mix: 6·D
        scales: 3·H·d / H
        norm: 2·H·d / H
        out: H·d × D / H
    """

    # state·a and its outer product with b, the outer product of values and keys, state·r
    STATE_FLOPS = 6

    num_heads: Size
    head_dim: Size
    decay_low_rank_dim: Size
    a_low_rank_dim: Size
    v_low_rank_dim: Count
    gate_low_rank_dim: Size
    shift_size: Size
    state_dtype: StateDtype = "fp32"


class RgLru(RecurrentMixer, frozen=True, tag="rg_lru"):
    """The real-gated linear recurrent unit of Griffin and RecurrentGemma.

    The state of a sequence is one number per channel, and the last conv_kernel − 1 inputs of a
    convolution per channel.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias` adds
            a bias. `copies E` is E equal matrices.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: States of one sequence in one layer: `conv` is the last kc − 1 inputs of w channels
            for each of H heads, and `state` one number for each of these channels.
        STATE_FLOPS: FLOPs of the scan per state element and token.
        MULTIPLE: The first of these fields must be a multiple of the second.
        LABEL: Printed name.
        lru_width: Number of channels.
        num_heads: Blocks of the two block-diagonal gate matrices.
        conv_kernel: Taps of the convolution, in tokens.
        state_dtype: dtype of the numbers; the convolution has the dtype of the model.
    """

    LETTERS = "W=lru_width H=num_heads w=block_width kc=conv_kernel"
    LABEL = "RG-LRU"
    STATES = "conv: H × w × kc; state: H × 1 × w"
    WEIGHTS = """
        x: D × W / H, bias
        y: D × W / H, bias
        conv: W·kc + W / H
        gates: w × 2·w / H, bias, copies H
        decay: W / H
        out: W × D / H, bias
    """
    STATE_FLOPS = 0  # the recurrence is elementwise
    MULTIPLE = ("lru_width", "num_heads")

    lru_width: Size
    num_heads: Size
    conv_kernel: Size = 4
    state_dtype: StateDtype = "fp32"

    @property
    def block_width(self) -> int:
        """Return the channels in one block of the gate matrices: lru_width / num_heads.

        The two gate matrices are block-diagonal, with one block per head.
        """
        return self.lru_width // self.num_heads
