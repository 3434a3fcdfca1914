"""Dense FFNs, plain (two matrices) or gated (three), and separate projections.

Mixture of experts: a router sends each token to num_experts_per_tok of num_experts FFNs.

Shared experts process every token. Sources: Shazeer et al. 2017, arXiv 1701.06538, section 2;
DeepSeekMoE, arXiv 2401.06066, section 3.
"""

from typing import Annotated

import msgspec

from kvcalc.arithmetic import Num, Real, ceil_div, minimum
from kvcalc.layers.cost import (
    Cost,
    ExpertsShape,
    Operator,
    Role,
    expected_experts,
    reached_fraction,
)
from kvcalc.layers.part import Count, Size, Sublayer
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, WeightKind, Weights, WeightsByName, vector


class Dense(Sublayer, frozen=True, tag="dense"):
    """A dense FFN: matrices up [D, F], gate [D, F] if `gated`, and down [F, D].

    D is the hidden size and F is `intermediate_size`. The fields are the keys of such a layer part
    in a model preset, a YAML file. Sources: Vaswani et al. 2017, section 3.3; Shazeer 2020.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias f`
            adds a bias if field f is set. `if` is the condition for the weight.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        ROLE: Group of this part's operators, by which reports select operators.
        intermediate_size: Width between up and down, F.
        gated: Whether the FFN has a gate matrix.
        bias: Whether gate and up have biases.
        down_bias: Whether down has a bias; null if `bias` also applies to down.
        input_size: Input width of gate and up; null for the hidden size.
    """

    WEIGHTS = """
        gate: Di × F / F, bias bias, if gated and input_size
        gate: D × F / F, bias bias, if gated and not input_size
        up: Di × F / F, bias bias, if input_size
        up: D × F / F, bias bias, if not input_size
        down: F × D / F, bias has_down_bias
    """
    ROLE = Role.FFN
    LETTERS = "F=intermediate_size Di=input_size"

    intermediate_size: Size
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None
    input_size: Size | None = None

    @property
    def has_down_bias(self) -> bool:
        """Return whether the matrix `down` has a bias: `down_bias`, or `bias` if that is null."""
        return self.bias if self.down_bias is None else self.down_bias

    def operators(self, p: Pass) -> list[Operator]:
        """Return this FFN's operators in a forward pass, with costs of one layer on one GPU.

        They are up and gate as one matrix product, the activation, and down. With tensor
        parallelism an all-reduce follows.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        w = self.local_weights(p)
        return [*_network(p, w, p.tokens), *p.all_reduce(w["down"].outputs)]


class Projections(Sublayer, frozen=True, tag="projections"):
    """Named matrices and vectors outside attention and FFN, such as adapters and per-layer gates.

    The fields are the keys of such a layer part in a model preset, a YAML file. `matrices` is, for
    example, {"mixer_mix_down": (10240, 320)}.

    Attributes:
        ROLE: Group of this part's operators, by which reports select operators.
        matrices: Name → [inputs, outputs], or [inputs, outputs, bias elements].
        vectors: Name → number of elements.
    """

    ROLE = Role.OTHER

    matrices: dict[
        str, Annotated[tuple[Count, ...], msgspec.Meta(min_length=2, max_length=3)]
    ] = {}
    vectors: dict[str, Count] = {}

    def weights(self, hidden_size: int) -> Weights:
        """Return all matrices and vectors as weights that tensor parallelism does not divide.

        Every GPU stores all of them completely.

        Args:
            hidden_size: Not used, because each matrix states its own sizes.
        """
        results = [
            Weight(name, rows, columns, bias=sum(biases))
            for name, (rows, columns, *biases) in self.matrices.items()
        ]
        return (*results, *(vector(n, size) for n, size in self.vectors.items()))

    def operators(self, p: Pass) -> list[Operator]:
        """Return one matrix product per matrix, with costs of one layer on one GPU.

        Each multiplies all new tokens of the forward pass. Vectors have no operators.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        return [
            p.gemm(w.name, w)
            for w in self.local_weights(p).values()
            if w.kind is WeightKind.MATRIX
        ]

    def problem(self) -> str:
        twice = sorted(self.matrices.keys() & self.vectors.keys())
        return f"{twice[0]!r} is the name of a matrix and of a vector" if twice else ""


class Moe(Sublayer, frozen=True, tag="moe"):
    """A mixture of experts (MoE): FFNs of which a router selects some for each token.

    The fields are the keys of such a layer part in a model preset, a YAML file.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, or
            `rows`, the inputs are divided instead. `norm: d` is an undivided vector of d elements.
            `bias f` adds a bias if field f is set. `if` is the condition for the weight. `copies E`
            is E equal matrices; a token uses k of them (`active k`).
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        ROLE: Group of this part's operators, by which reports select operators.
        num_experts: Number of routed experts in the layer.
        num_experts_per_tok: Routed experts that one token uses (top-k).
        moe_intermediate_size: Intermediate width of one routed expert.
        gated: Whether each expert has a gate matrix.
        bias: Whether experts have biases.
        shared_expert_intermediate_size: Total intermediate width of the shared experts; 0 for none.
        shared_expert_gate: Whether a scalar per token scales the output of the shared experts.
        shared_gated: Whether shared experts have a gate matrix; null if `gated` applies to them.
        shared_bias: Whether shared experts have biases; null if `bias` applies to them.
        router_bias: Whether the router has a bias.
        router_outputs: Outputs of the router if it has not one output per expert (Doge's product
            keys); null for one output per expert.
        router_width: Input width of the router if a projection precedes it (Zaya); null for the
            hidden size.
        correction_bias: Whether the routing bias is a parameter. A bias that is a buffer is not
            counted.
        moe_latent_size: Input width of the experts if the layer projects its input down before them
            and projects their output up (Nemotron-3); null for the hidden size.
        latent_bias: Whether these two latent projections have biases.
        zero_experts: Number of identity experts, which the router can select and which return their
            input without any work (LongCat).
        zero_expert_weights: Whether identity experts have unused gate and up matrices, as in
            transformers' LongCat.
        router_input_norm: Whether the router's input has a norm vector.
        expert_scales: Whether each expert has a scalar scale.
    """

    WEIGHTS = """
        router: Dr × E, bias router_bias, if router_width
        router: D × E, bias router_bias, if not router_width
        correction_bias: Er, if correction_bias
        router_input_norm: D, if router_input_norm
        expert_scales: Ex, if expert_scales
        latent_down: D × Dl, bias latent_bias, if moe_latent_size
        latent_up: Dl × D, bias latent_bias, if moe_latent_size
        experts.gate: Dl × Fe / Fe, bias bias, copies Ew, active k, if gated and moe_latent_size
        experts.gate: D × Fe / Fe, bias bias, copies Ew, active k, if gated and not moe_latent_size
        experts.up: Dl × Fe / Fe, bias bias, copies Ew, active k, if moe_latent_size
        experts.up: D × Fe / Fe, bias bias, copies Ew, active k, if not moe_latent_size
        experts.down: Fe × Dl / Fe, rows, bias bias, copies Ex, active k, if moe_latent_size
        experts.down: Fe × D / Fe, bias bias, copies Ex, active k, if not moe_latent_size
        shared.gate: D × Fs / Fs, bias has_shared_bias, if has_shared_gate
        shared.up: D × Fs / Fs, bias has_shared_bias, if shared_expert_intermediate_size
        shared.down: Fs × D / Fs, bias has_shared_bias, if shared_expert_intermediate_size
        shared.weight: D × 1, if shared_expert_gate and shared_expert_intermediate_size
    """
    ROLE = Role.FFN
    LETTERS = """
        E=num_outputs k=num_experts_per_tok Fe=moe_intermediate_size
        Fs=shared_expert_intermediate_size Dl=moe_latent_size Dr=router_width
        Ex=num_experts Er=num_routed Ew=num_wide_copies
    """

    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    gated: bool = True
    bias: bool = False
    shared_expert_intermediate_size: Count = 0
    shared_expert_gate: bool = False
    shared_gated: bool | None = None
    shared_bias: bool | None = None
    router_bias: bool = False
    router_outputs: Size | None = None
    router_width: Size | None = None
    correction_bias: bool = False
    moe_latent_size: Size | None = None
    latent_bias: bool = False
    zero_experts: Count = 0
    zero_expert_weights: bool = False
    router_input_norm: bool = False
    expert_scales: bool = False

    @property
    def num_routed(self) -> int:
        """Return the number of experts that the router can select, including identity experts."""
        return self.num_experts + self.zero_experts

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs of the router.

        It is `router_outputs`, or one for each expert that the router can select.
        """
        return self.router_outputs or self.num_routed

    @property
    def num_wide_copies(self) -> int:
        """Return the number of experts that have gate and up matrices.

        They are the `num_experts` routed experts. Identity experts are added only if
        `zero_expert_weights` is set.
        """
        return self.num_routed if self.zero_expert_weights else self.num_experts

    @property
    def has_shared_bias(self) -> bool:
        return self.bias if self.shared_bias is None else self.shared_bias

    @property
    def has_shared_gate(self) -> bool:
        """Return whether the layer has shared experts, and they have a gate matrix."""
        gated = self.gated if self.shared_gated is None else self.shared_gated
        return gated and self.shared_expert_intermediate_size > 0

    def operators(self, p: Pass) -> list[Operator]:
        """Return this MoE's operators in a forward pass, with costs of one layer on one GPU.

        They are the router, the experts and the collectives. The routed experts are one fused
        operator, which reads only the weights of experts that a token uses. Routing is assumed
        uniform. The expected share of these experts is then 1 − (1 − k/E)^T, with T tokens, E
        experts in the layer and k experts per token.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        w = self.local_weights(p)
        ranks = p.ranks
        # the experts serve the tokens of all data-parallel ranks
        all_tokens = p.tokens * ranks.dp
        routed = ceil_div(all_tokens * self.num_experts_per_tok, ranks.ep)
        reached = reached_fraction(all_tokens, self.num_experts_per_tok, self.num_experts)
        distinct = (
            expected_experts(all_tokens, self.num_experts_per_tok, self.num_experts) / ranks.ep
        )
        experts = _network(p, w, routed, "experts", reached, distinct)

        operators = [p.gemm("router", w["router"])]
        if "latent_down" in w:
            operators.append(p.gemm("latent_down", w["latent_down"]))
        operators += self._fused(p, w, experts, all_tokens, minimum(all_tokens, routed))
        if "shared.up" in w:
            operators += _network(p, w, p.tokens, "shared")
        if "shared.weight" in w:
            operators.append(p.gemm("shared_gate", w["shared.weight"]))
        if "latent_up" in w:
            operators.append(p.gemm("latent_up", w["latent_up"]))
        return [*operators, *self._exchange(p), *p.all_reduce(p.width)]

    def _exchange(self, p: Pass) -> list[Operator]:
        """Return the exchange of tokens with experts on other data-parallel ranks.

        The ranks of one tp group already have all tokens. With ep, each token goes to the ranks of
        its top-k; (ep − 1)/ep of them are other ranks. Without ep, it goes to every rank, because
        each rank has some columns of every expert.
        """
        ranks = p.ranks
        rows = p.tokens * p.width * p.element
        if ranks.dp == 1:
            return []
        if ranks.ep > 1:
            routed = rows * self.num_experts_per_tok
            away = ceil_div(routed * (ranks.ep - ranks.near(ranks.ep)), ranks.ep)
            return [
                p.network(
                    "all_to_all", ceil_div(routed * (ranks.ep - 1), ranks.ep), away, times=2
                )
            ]
        sent = rows * (ranks.dp - 1)
        away = rows * (ranks.dp - max(1, ranks.near(ranks.stage_gpus) // ranks.tp))
        return [p.network(name, sent, away) for name in ("all_gather_tokens", "reduce_scatter")]

    def _fused(
        self, p: Pass, w: WeightsByName, parts: list[Operator], tokens: Num, rows: Num
    ) -> list[Operator]:
        """Return the experts as engines run them: products and activation in one operator.

        It reads and writes the `rows` tokens of this rank once. Values between the products
        stay on the chip. Products with different compute dtypes stay separate, because they have
        different peaks.
        """
        products = [o for o in parts if o.kind == "gemm"]
        if len({o.dtype for o in products}) > 1:
            return parts
        up = w["experts.up"]
        shape = ExpertsShape(
            tokens=tokens,
            hidden=up.inputs,
            width=up.outputs,
            top_k=self.num_experts_per_tok,
            experts=self.num_experts,
            ranks=p.ranks.ep,
            gated=self.gated,
            bias=self.bias,
            format=p.format_of(up),
        )
        # bytes of the first product's input, and of the last product's output
        ends = rows * up.inputs * p.element
        costs = [
            o.cost._replace(activation_bytes=ends if o.kind == "gemm" else 0) for o in parts
        ]
        names = [o.name.removeprefix("experts_") for o in parts]
        fused = p.operator(
            "experts",
            "experts",
            sum(costs, Cost()),
            dtype=products[0].dtype,
            parts=tuple(zip(names, costs)),
            shape=shape,
            experts=products[0].experts,
            role=p.role,
            weights=tuple(name for o in products for name in o.weights),
        )
        return [fused]

    def problem(self) -> str:
        if self.num_experts_per_tok > self.num_experts:
            return (
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts "
                f"{self.num_experts}"
            )
        return ""


def _network(
    p: Pass,
    w: WeightsByName,
    tokens: Num,
    name: str = "",
    fraction: Real = 1,
    experts: Real = 0,
) -> list[Operator]:
    """Return the operators of the FFN `name`: up (with gate in one product), activation and
    down."""
    weights = [w.get(f"{name}.{n}" if name else n) for n in ("gate", "up", "down")]
    *wide, down = [weight for weight in weights if weight]
    prefix = f"{name}_" if name else ""
    up_name = "gate_up" if len(wide) > 1 else "up"
    return [
        p.gemm(prefix + up_name, *wide, tokens=tokens, fraction=fraction, experts=experts),
        p.activation(prefix + "activation", tokens * wide[0].outputs, len(wide)),
        p.gemm(prefix + "down", down, tokens=tokens, fraction=fraction, experts=experts),
    ]
