"""Weights by name, from which parameters, weight bytes, shards and matrix products follow.

A part lists its weights once. A matrix [inputs, outputs] multiplies every token that reaches it, so
parameters and FLOPs come from the same line.
"""

from enum import StrEnum

import msgspec

from kvcalc.layers.ranks import Parallelism


class WeightKind(StrEnum):
    MATRIX = "matrix"  # a matrix product, and what quantisation covers
    VECTOR = "vector"  # elementwise: norms, biases of their own, sinks, gates per channel
    TABLE = "table"  # rows looked up by token id or position; never multiplied


class Weight(msgspec.Struct, frozen=True):
    """`copies` equal matrices [inputs, outputs], or a vector or table with that number of elements.

    Attributes:
        active: Copies that one token uses (top-k of the experts); 0 for all.
        bias: Bias elements per copy.
        shards: Units (heads, columns) that tensor parallelism divides. More ranks than units replicate.
        expert: Whether the copies are experts, which expert parallelism spreads.
        rows_in: Whether `inputs` is the sharded axis (a row-parallel matrix, whose bias is on every rank).
    """

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    active: int = 0
    bias: int = 0
    shards: int = 1
    expert: bool = False
    rows_in: bool = False
    kind: WeightKind = WeightKind.MATRIX

    @property
    def elements(self) -> int:
        """Parameters: copies · (inputs · outputs + bias)."""
        return self.copies * (self.inputs * self.outputs + self.bias)

    @property
    def active_elements(self) -> int:
        """Parameters that one token uses: the same with only the active copies."""
        return (self.active or self.copies) * (self.inputs * self.outputs + self.bias)

    def local(self, ranks: Parallelism) -> "Weight":
        """Return the share on one rank: whole heads, columns or experts."""
        copies, over = self.copies, ranks.tp
        if self.expert:
            copies = -(-copies // ranks.ep)
            over = ranks.tp * ranks.dp // ranks.ep
        if self.kind is WeightKind.MATRIX and self.copies > 1 and not self.expert and self.copies == self.shards:
            return msgspec.structs.replace(self, copies=-(-copies // over))  # block-diagonal: whole blocks
        if over == 1 or self.shards == 1:
            return self if copies == self.copies else msgspec.structs.replace(self, copies=copies)
        units = -(-self.shards // over)
        if self.rows_in:
            return msgspec.structs.replace(self, copies=copies, inputs=self.inputs // self.shards * units)
        outputs = self.outputs // self.shards * units
        bias = self.bias // self.shards * units
        return msgspec.structs.replace(self, copies=copies, outputs=outputs, bias=bias)


def matrix(
    name: str,
    inputs: int,
    outputs: int,
    bias: bool = False,
    shards: int = 1,
    rows_in: bool = False,
    copies: int = 1,
    active: int = 0,
    expert: bool = False,
) -> Weight:
    """Return a weight matrix [inputs, outputs], with a bias of `outputs` elements if requested."""
    return Weight(name, inputs, outputs, copies, active, outputs if bias else 0, shards, expert, rows_in)


def vector(name: str, elements: int, shards: int = 1) -> Weight:
    """Return an elementwise parameter."""
    return Weight(name, 1, elements, shards=shards, kind=WeightKind.VECTOR)


def table(name: str, rows: int, width: int, shards: int = 1) -> Weight:
    """Return a lookup table of rows × width elements; a token reads one row."""
    return Weight(name, rows, width, shards=shards, rows_in=True, kind=WeightKind.TABLE)
