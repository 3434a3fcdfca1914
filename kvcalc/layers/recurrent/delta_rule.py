"""States of recurrent mixers: short-convolution states and recurrent states, both of constant size.

Gated delta rule: gated delta net (Qwen3-Next) and Kimi delta attention (KDA).

State per sequence and layer: one matrix key_dim × value_dim per value head, and kernel − 1 columns
of queries, keys and values. Sources: Yang et al. 2024, arXiv 2412.06464, section 3; Kimi Linear
technical report, arXiv 2510.26692, section 4.
"""

from typing import ClassVar

from kvcalc.layers.cache import CacheEntries, CacheEntry, Span
from kvcalc.layers.part import Size, StateDtype, Sublayer, number_of


def conv_state(heads: int, width: int, kernel: int) -> CacheEntry:
    """Return the cache entry of a convolution's state: the inputs of the last kernel − 1 tokens.

    The state of a sequence has heads · width elements per token, in the dtype of the model.

    Args:
        heads: Number of units that tensor parallelism divides.
        width: Channels of a unit.
        kernel: Taps of the convolution, in tokens.
    """
    return CacheEntry("conv_state", heads, width, limit=kernel - 1, span=Span.STATE)


class RecurrentMixer(Sublayer, frozen=True):
    """Base class of recurrent layers such as Mamba, whose cache has a fixed size per sequence.

    Attributes:
        LABEL: Printed name of the layer, such as `Mamba-2`.
        STATES: States of one sequence, separated by `; `. `conv: heads × width × kernel` is the
            last kernel − 1 inputs of heads · width channels, in the dtype of the model. `state:
            heads × rows × width` is a matrix per head, in the dtype of the field `state_dtype`. If
            this field is null, the model fixes no dtype, and fp32 is assumed. Sizes are formulas in
            the letters of the subclass's LETTERS: for `H=heads d=head_dim`, `state: H × d × d` is
            a d × d matrix for each head.
    """

    LABEL: ClassVar[str] = ""
    STATES: ClassVar[str] = ""

    def cache(self) -> CacheEntries:
        letters = self.letters()
        entries = []
        for state in self.STATES.split("; "):
            kind, _, text = state.partition(": ")
            heads, rows, width = (number_of(size, letters) for size in text.split(" × "))
            if kind == "conv":
                entries.append(conv_state(heads, rows, kernel=width))
                continue
            dtype = getattr(self, "state_dtype", None)
            entry = CacheEntry(
                "recurrent_state",
                heads,
                width,
                limit=rows,
                span=Span.STATE,
                dtype=dtype or "fp32",
                has_assumed_dtype=dtype is None,
            )
            entries.append(entry)
        return tuple(entries)

    @property
    def label(self) -> str:
        return self.LABEL


class GatedDeltaNet(RecurrentMixer, frozen=True, tag="gated_delta_net"):
    """Gated DeltaNet (Qwen3-Next): linear attention with the delta rule.

    Each head has one decay and one step size per token. The state of a sequence is a matrix per
    value head, linear_key_head_dim × linear_value_head_dim. The output is normalised per head and
    gated by a projection as wide as the values.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: States of one sequence in one layer: `conv` are the last kc − 1 inputs of 2·dk
            channels for each of Hk heads, and of dv channels for each of Hv heads. `state` is a dk
            × dv matrix for each of Hv heads.
        STATE_FLOPS: FLOPs of the scan per state element and token.
        MULTIPLE: The first of these fields must be a multiple of the second.
        LABEL: Printed name.
        linear_num_key_heads: Heads of queries and keys.
        linear_num_value_heads: Heads of values, a multiple of the key heads.
        linear_key_head_dim: Elements of a key of one head.
        linear_value_head_dim: Elements of a value of one head.
        linear_conv_kernel_dim: Taps of the convolution over queries, keys and values, in tokens.
        conv_bias: Whether the convolution has a bias.
        state_dtype: dtype of the state in the model's config.json; null if it states none. kvcalc
            then assumes fp32 without an engine, or uses the engine's default.
    """

    LABEL = "GatedDeltaNet"
    STATES = "conv: Hk × 2·dk × kc; conv: Hv × dv × kc; state: Hv × dk × dv"
    WEIGHTS = """
        qk: D × 2·Hk·dk / Hk
        v_gate: D × 2·Hv·dv / Hv
        step_decay: D × 2·Hv / Hv
        conv_qk: 2·Hk·dk·kc + 2·Hk·dk·bc / Hk
        conv_v: Hv·dv·kc + Hv·dv·bc / Hv
        a_dt: 2·Hv / Hv
        norm: dv
        out: Hv·dv × D / Hv
    """
    STATE_FLOPS = 6  # k·S, the outer product, q·S
    MULTIPLE = ("linear_num_value_heads", "linear_num_key_heads")
    LETTERS = """
        Hk=linear_num_key_heads Hv=linear_num_value_heads dk=linear_key_head_dim
        dv=linear_value_head_dim kc=linear_conv_kernel_dim bc=conv_bias
    """

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size = 4
    conv_bias: bool = False
    state_dtype: StateDtype | None = None


class KimiDeltaAttention(RecurrentMixer, frozen=True, tag="kda"):
    """Kimi delta attention (KDA): linear attention with the delta rule, and a decay per channel.

    The state of a sequence is a matrix head_dim × head_dim per head.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias f`
            adds a bias if field f is set. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: States of one sequence in one layer: `conv` is the last kc − 1 inputs of 3·d
            channels for each of H heads, and `state` a d × d matrix for each head.
        STATE_FLOPS: FLOPs of the scan per state element and token.
        LABEL: Printed name.
        num_heads: Number of heads.
        head_dim: Elements of a query, key or value of one head.
        conv_kernel: Taps of the convolution over queries, keys and values, in tokens.
        gate_bias: Whether the output gate has a bias.
        factored: Whether decay and output gate each have two matrices, with head_dim elements
            between them. If not, each has one matrix.
        full_gate: Whether the output gate has one matrix even if `factored` is set (Kimi-K3).
        state_dtype: dtype of the state.
    """

    LETTERS = "H=num_heads d=head_dim kc=conv_kernel"
    LABEL = "KDA"
    STATES = "conv: H × 3·d × kc; state: H × d × d"
    WEIGHTS = """
        q: D × H·d / H
        k: D × H·d / H
        v: D × H·d / H
        conv: 3·H·d·kc / H
        decay_down: D × d, if factored
        gate_down: D × d, if factored and not full_gate
        decay_up: d × H·d / H, if factored
        decay_up: D × H·d / H, if not factored
        gate_up: d × H·d / H, bias gate_bias, if factored and not full_gate
        gate_up: D × H·d / H, bias gate_bias, if not factored
        gate_up: D × H·d / H, bias gate_bias, if factored and full_gate
        step: D × H / H
        a_dt: H + H·d / H
        norm: d
        out: H·d × D / H
    """
    STATE_FLOPS = 6

    num_heads: Size
    head_dim: Size
    conv_kernel: Size = 4
    gate_bias: bool = False
    factored: bool = True
    full_gate: bool = False
    state_dtype: StateDtype = "fp32"
