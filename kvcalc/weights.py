"""Weights by name: the one description from which parameters, weight bytes, shards and matrix products all follow.

A part of a layer lists its weights once. A matrix [inputs, outputs] multiplies every token that reaches it, so its
parameters and its FLOPs come from the same line and cannot disagree.
"""

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    MATRIX = "matrix"  # a matrix product, and what quantisation covers
    VECTOR = "vector"  # elementwise: norms, biases of their own, sinks, gates per channel
    TABLE = "table"  # rows looked up by token id or position; never multiplied


class Weight(msgspec.Struct, frozen=True):
    """`copies` equal matrices [inputs, outputs], or a vector or table of as many elements.

    active: how many of the copies one token uses (top-k of the experts); 0 means all of them.
    bias: bias elements per copy, beside the matrix.
    shards: the units (heads, columns) that tensor parallelism divides; a weight is replicated beyond that many ranks.
    expert: the copies are experts, which expert parallelism spreads.
    rows_in: the sharded axis is `inputs` (a row-parallel matrix, whose bias every rank keeps whole).
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
    kind: Kind = Kind.MATRIX

    @property
    def elements(self) -> int:
        """Parameters: copies · (inputs · outputs + bias)."""
        return self.copies * (self.inputs * self.outputs + self.bias)

    @property
    def active_elements(self) -> int:
        """Parameters that one token meets: the same with the active copies alone."""
        return (self.active or self.copies) * (self.inputs * self.outputs + self.bias)


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
    """A weight matrix [inputs, outputs], with a bias of `outputs` elements if it has one."""
    return Weight(name, inputs, outputs, copies, active, outputs if bias else 0, shards, expert, rows_in)


def vector(name: str, elements: int, shards: int = 1) -> Weight:
    """An elementwise parameter of so many elements."""
    return Weight(name, 1, elements, shards=shards, kind=Kind.VECTOR)


def table(name: str, rows: int, width: int, shards: int = 1) -> Weight:
    """A lookup table of rows × width elements, of which a token reads one row."""
    return Weight(name, rows, width, shards=shards, rows_in=True, kind=Kind.TABLE)
