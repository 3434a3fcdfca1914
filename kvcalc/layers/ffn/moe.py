"""Mixture of experts: a router sends each token to num_experts_per_tok of num_experts FFNs.

Shared experts process every token. Sources: Shazeer et al. 2017, arXiv 1701.06538, section 2; DeepSeekMoE,
arXiv 2401.06066, section 3.
"""

from typing import ClassVar

from kvcalc.layers.cost import Cost, ExpertsShape, Operator, Role, expected_experts, reached_fraction
from kvcalc.layers.part import Count, Part, Size
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, matrix, vector
from kvcalc.units import Num, Real, ceil_div, minimum


class Moe(Part, frozen=True, tag="moe"):
    """num_experts experts of moe_intermediate_size, of which a token uses num_experts_per_tok.

    Attributes:
        shared_expert_intermediate_size: Total width of the shared experts.
        shared_expert_gate: Whether the shared experts have a scalar gate.
        moe_latent_size: Width of the experts' input, between a projection down and one up (Nemotron-3).
        router_width: Input width of the router after its own projection (Zaya).
        router_outputs: Outputs of the router if they are not one per expert (Doge's product keys).
        latent_bias: Whether the two latent projections have biases.
        zero_experts: Identity experts, which the router scores and which cost nothing (LongCat).
        zero_expert_weights: Whether they have unused gate and up matrices, as in transformers' LongCat.
        correction_bias: Whether the routing bias is a parameter. A buffer does not count.
    """

    ROLE: ClassVar[Role] = Role.FFN

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

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Router [D, E], two or three matrices of the experts, shared experts, and projections between."""
        routed = self.num_experts + self.zero_experts
        found = [matrix("router", self.router_width or hidden_size, self.router_outputs or routed, self.router_bias)]
        found += [vector("correction_bias", routed)] if self.correction_bias else []
        found += [vector("router_input_norm", hidden_size)] if self.router_input_norm else []
        found += [vector("expert_scales", self.num_experts)] if self.expert_scales else []
        width = hidden_size
        if self.moe_latent_size:
            width = self.moe_latent_size
            bias = self.latent_bias
            found += [matrix("latent_down", hidden_size, width, bias), matrix("latent_up", width, hidden_size, bias)]
        return (*found, *self._experts(width), *self._shared(hidden_size))

    def dims(self) -> dict[str, tuple[str, str]]:
        width = "Dl" if self.moe_latent_size else "D"
        experts = {"experts.gate": (width, "Fe"), "experts.up": (width, "Fe"), "experts.down": ("Fe", width)}
        shared = {"shared.gate": ("D", "Fs"), "shared.up": ("D", "Fs"), "shared.down": ("Fs", "D"), "shared.weight": ("D", "1")}
        return (
            experts
            | shared
            | {"router": ("Dr" if self.router_width else "D", "E"), "latent_down": ("D", "Dl"), "latent_up": ("Dl", "D")}
        )

    def letters(self) -> dict[str, int]:
        return {
            "E": self.router_outputs or self.num_experts + self.zero_experts, "k": self.num_experts_per_tok,
            "Fe": self.moe_intermediate_size, "Fs": self.shared_expert_intermediate_size, "Dl": self.moe_latent_size or 0,
            "Dr": self.router_width or 0,
        }  # fmt: skip

    def _experts(self, width: int) -> list[Weight]:
        inner = self.moe_intermediate_size
        idle = self.zero_experts if self.zero_expert_weights else 0

        def expert(name: str, inputs: int, outputs: int, rows_in: bool = False) -> Weight:
            return matrix(
                f"experts.{name}", inputs, outputs, self.bias, inner, rows_in,
                copies=self.num_experts + (0 if rows_in else idle), active=self.num_experts_per_tok, expert=True,
            )  # fmt: skip

        gate = [expert("gate", width, inner)] if self.gated else []
        return [*gate, expert("up", width, inner), expert("down", inner, width, rows_in=True)]

    def _shared(self, hidden_size: int) -> list[Weight]:
        inner = self.shared_expert_intermediate_size
        if not inner:
            return []
        gated = self.gated if self.shared_gated is None else self.shared_gated
        bias = self.bias if self.shared_bias is None else self.shared_bias
        gate = [matrix("shared.gate", hidden_size, inner, bias, shards=inner)] if gated else []
        scalar = [matrix("shared.weight", hidden_size, 1)] if self.shared_expert_gate else []
        up = matrix("shared.up", hidden_size, inner, bias, shards=inner)
        return [*gate, up, matrix("shared.down", inner, hidden_size, bias, shards=inner, rows_in=True), *scalar]

    def operators(self, p: Pass) -> list[Operator]:
        """Router, routed experts as one operator, products of the shared experts, collectives.

        Only weights of reached experts are read: E·(1 − (1 − k/E)^T) of E under uniform routing.
        """
        w = p.local(self.weights(p.width))
        ranks = p.ranks
        every = p.tokens * ranks.dp  # the experts serve the tokens of all data-parallel ranks
        routed = ceil_div(every * self.num_experts_per_tok, ranks.ep)
        reached = reached_fraction(every, self.num_experts_per_tok, self.num_experts)
        found = [p.gemm("router", w["router"])]
        found += [p.gemm("latent_down", w["latent_down"])] if "latent_down" in w else []
        distinct = expected_experts(every, self.num_experts_per_tok, self.num_experts) / ranks.ep
        found += self._fused(p, w, self._network(p, w, "experts", routed, reached, distinct), every, minimum(every, routed))
        found += self._network(p, w, "shared", p.tokens)
        found += [p.gemm("latent_up", w["latent_up"])] if "latent_up" in w else []
        return [*found, *self._exchange(p), *p.all_reduce(p.width)]

    def _exchange(self, p: Pass) -> list[Operator]:
        """Return the exchange of tokens with experts on other data-parallel ranks.

        The ranks of one tp group already have all tokens. With ep, each token goes to the ranks of its top-k;
        (ep − 1)/ep of them are other ranks. Without ep, it goes to every rank, because each rank has some columns
        of every expert.
        """
        ranks, rows = p.ranks, p.tokens * p.width * p.element
        if ranks.dp == 1:
            return []
        if ranks.ep > 1:
            routed = rows * self.num_experts_per_tok
            away = ceil_div(routed * (ranks.ep - ranks.near(ranks.ep)), ranks.ep)
            return [p.network("all_to_all", ceil_div(routed * (ranks.ep - 1), ranks.ep), away, times=2)]
        sent, away = rows * (ranks.dp - 1), rows * (ranks.dp - max(1, ranks.near(ranks.tp * ranks.dp) // ranks.tp))
        return [p.network(name, sent, away) for name in ("all_gather_tokens", "reduce_scatter")]

    def _fused(self, p: Pass, w: dict[str, Weight], parts: list[Operator], tokens: Num, rows: Num) -> list[Operator]:
        """Return the experts as engines run them: products and activation in one operator.

        It reads and writes the `rows` tokens of this rank once. What passes between the products stays on the chip.
        Products with different compute dtypes stay separate, because they have different peaks.
        """
        products = [o for o in parts if o.kind == "gemm"]
        if len({o.dtype for o in products}) > 1:
            return parts
        up, first = w["experts.up"], products[0]
        shape = ExpertsShape(
            tokens, up.inputs, up.outputs, self.num_experts_per_tok, self.num_experts, p.ranks.ep, self.gated, self.bias,
            p.format_of(up),
        )  # fmt: skip
        ends = rows * up.inputs * p.element  # of the first product's input, and of the last one's output
        costs = [o.cost._replace(activation_bytes=ends if o.kind == "gemm" else 0) for o in parts]
        fused = Operator(
            "experts", p.kind, p.count, "experts", sum(costs, Cost()), first.dtype,
            parts=tuple((o.name.removeprefix("experts_"), cost) for o, cost in zip(parts, costs, strict=True)),
            shape=shape, experts=first.experts,
            role=p.role, weights=tuple(name for o in products for name in o.weights),
        )  # fmt: skip
        return [fused]

    @staticmethod
    def _network(
        p: Pass, w: dict[str, Weight], prefix: str, tokens: Num, fraction: Real = 1, experts: Real = 0
    ) -> list[Operator]:
        wide = [w[n] for n in (f"{prefix}.gate", f"{prefix}.up") if n in w]
        if not wide:
            return []
        name = "gate_up" if len(wide) > 1 else "up"
        found = [
            p.gemm(f"{prefix}_{name}", *wide, tokens=tokens, fraction=fraction, experts=experts),
            p.activation(f"{prefix}_activation", tokens, wide[0].outputs, len(wide)),
            p.gemm(f"{prefix}_down", w[f"{prefix}.down"], tokens=tokens, fraction=fraction, experts=experts),
        ]
        scalar = w.get(f"{prefix}.weight")
        return [*found, p.gemm(f"{prefix}_gate", scalar)] if scalar else found

    def problem(self) -> str:
        if self.num_experts_per_tok > self.num_experts:
            return f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}"
        return ""
