"""Dense FFNs, plain (two matrices) or gated (three), and separate projections."""

from typing import Annotated, ClassVar

import msgspec

from kvcalc.layers.cost import Operator, Role
from kvcalc.layers.part import Count, Part, Size
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, WeightKind, matrix, vector


class Dense(Part, frozen=True, tag="dense"):
    """up [D, F] (and gate [D, F] if gated), down [F, D]. Sources: Vaswani et al. 2017, section 3.3; Shazeer 2020."""

    ROLE: ClassVar[Role] = Role.FFN

    intermediate_size: Size
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None
    input_size: Size | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Two or three matrices. `down_bias` equals `bias` by default."""
        inner, width = self.intermediate_size, self.input_size or hidden_size
        down_bias = self.bias if self.down_bias is None else self.down_bias
        up = matrix("up", width, inner, self.bias, shards=inner)
        down = matrix("down", inner, hidden_size, down_bias, shards=inner, rows_in=True)
        return (matrix("gate", width, inner, self.bias, shards=inner), up, down) if self.gated else (up, down)

    def dims(self) -> dict[str, tuple[str, str]]:
        source = "Di" if self.input_size else "D"
        return {"gate": (source, "F"), "up": (source, "F"), "down": ("F", "D")}

    def letters(self) -> dict[str, int]:
        return {"F": self.intermediate_size, "Di": self.input_size or 0}

    def operators(self, p: Pass) -> list[Operator]:
        """up (with gate in one product), activation, down."""
        w = p.local(self.weights(p.width))
        wide = [w[n] for n in ("gate", "up") if n in w]
        name = "gate_up" if len(wide) > 1 else "up"
        found = [p.gemm(name, *wide), p.activation("activation", p.tokens, w["up"].outputs, len(wide)), p.gemm("down", w["down"])]
        return [*found, *p.all_reduce(w["down"].outputs)]


class Projections(Part, frozen=True, tag="projections"):
    """Named matrices and vectors outside mixers and FFNs: adapters, stream mixing, per-layer gates.

    Attributes:
        matrices: Name → [inputs, outputs] or [inputs, outputs, bias elements].
        vectors: Name → elements.
    """

    ROLE: ClassVar[Role] = Role.OTHER

    matrices: dict[str, Annotated[tuple[Count, ...], msgspec.Meta(min_length=2, max_length=3)]] = {}
    vectors: dict[str, Count] = {}

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Each matrix and vector once, replicated on every rank."""
        found = [matrix(n, m[0], m[1]) if len(m) == 2 else Weight(n, m[0], m[1], bias=m[2]) for n, m in self.matrices.items()]
        return (*found, *(vector(n, size) for n, size in self.vectors.items()))

    def operators(self, p: Pass) -> list[Operator]:
        """One product per matrix, over all tokens."""
        return [p.gemm(w.name, w) for w in p.local(self.weights(p.width)).values() if w.kind is WeightKind.MATRIX]

    def problem(self) -> str:
        twice = sorted(self.matrices.keys() & self.vectors.keys())
        return f"{twice[0]!r} is the name of a matrix and of a vector" if twice else ""
