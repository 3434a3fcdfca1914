"""Weights by name, from which parameters, weight bytes, shards and matrix products follow.

A part lists its weights once. A matrix [inputs, outputs] multiplies every token that reaches it, so
parameters and FLOPs come from the same line.

Formats of one model under one precision: bytes of every weight and cache row.
"""

from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntry
from kvcalc.storage.formats import FORMATS, RowFormat, cache_layout
from kvcalc.storage.quantization import (
    WEIGHT_FORMATS,
    Quantization,
    WeightFormat,
    stored_format,
)


class WeightKind(StrEnum):
    MATRIX = "matrix"  # factor of a matrix product, which quantisation covers
    VECTOR = "vector"  # elementwise: norms, separate biases, sinks, gates per channel
    TABLE = "table"  # rows looked up by token id or position; never multiplied


class Weight(msgspec.Struct, frozen=True):
    """`copies` equal matrices [inputs, outputs], or a vector or table with that number of elements.

    Attributes:
        active: Number of copies that one token uses (top-k of the experts); 0 for all.
        bias: Bias elements per copy.
        shards: Units (heads, columns) that tensor parallelism divides. More ranks than units
            replicate.
        expert: Whether the copies are experts, which expert parallelism spreads.
        rows_in: Whether `inputs` is the sharded axis (a row-parallel matrix, whose bias is on every
            rank).
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
        """Return the number of parameters: copies · (inputs · outputs + bias)."""
        return self.copies * (self.inputs * self.outputs + self.bias)

    @property
    def active_elements(self) -> int:
        """Return the number of parameters that one token uses: only the active copies."""
        return (self.active or self.copies) * (self.inputs * self.outputs + self.bias)

    def local(self, ranks: Parallelism) -> "Weight":
        """Return the part of the weight on one rank: whole heads, columns or experts."""
        copies = self.copies
        num_shares = ranks.tp
        is_matrix = self.kind is WeightKind.MATRIX
        if self.expert:
            copies = -(-copies // ranks.ep)
            num_shares = ranks.stage_gpus // ranks.ep
        elif is_matrix and copies > 1 and copies == self.shards:  # block-diagonal: whole blocks
            return replace(self, copies=-(-copies // num_shares))
        if num_shares == 1 or self.shards == 1:
            return replace(self, copies=copies)
        units = -(-self.shards // num_shares)
        if self.rows_in:
            inputs = self.inputs // self.shards * units
            return replace(self, copies=copies, inputs=inputs)
        outputs = self.outputs // self.shards * units
        bias = self.bias // self.shards * units
        return replace(self, copies=copies, outputs=outputs, bias=bias)


def matrix(
    name: str, inputs: int, outputs: int, bias: bool = False, shards: int = 1, **fields: Any
) -> Weight:
    """Return a weight matrix [inputs, outputs], with a bias of `outputs` elements if requested.

    `fields` are other fields of `Weight`.
    """
    bias_elements = outputs if bias else 0
    return Weight(name, inputs, outputs, bias=bias_elements, shards=shards, **fields)


def vector(name: str, elements: int, shards: int = 1) -> Weight:
    """Return an elementwise parameter."""
    return Weight(name, 1, elements, shards=shards, kind=WeightKind.VECTOR)


def table(name: str, rows: int, width: int, shards: int = 1) -> Weight:
    """Return a lookup table of rows × width elements; a token reads one row."""
    return Weight(name, rows, width, shards=shards, rows_in=True, kind=WeightKind.TABLE)


class Formats(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """The storage and compute formats of one model under one precision.

    Attributes:
        dtype: dtype of products, and of weights that no scheme covers.
        kv_cache_dtype: Name of the cache layout.
        reason: Reason why `auto` selected the layout, or ''.
        schemes: Quantisation schemes. The first scheme that covers a matrix applies.
        unquantized: Full names of matrices that stay in the dtype.
    """

    dtype: str
    kv_cache_dtype: str
    reason: str = ""
    schemes: tuple[Quantization, ...] = ()
    unquantized: frozenset[str] = frozenset()

    def cache_format(self, entry: CacheEntry) -> RowFormat:
        """Return the storage format of a cache entry: the format that the model fixes, or else the
        format of its role in the cache layout."""
        if entry.dtype:
            return FORMATS[entry.dtype]
        return cache_layout(self.kv_cache_dtype).get(entry.role) or FORMATS[self.dtype]

    def attention_dtype(self, entries: Iterable[CacheEntry]) -> str:
        """Return the dtype that attention over these entries can compute in: fp8 if all are fp8 or
        nvfp4, else the model's.

        FlashAttention-3, XQA and TensorRT-LLM's kernels multiply such caches in fp8 without a
        conversion.
        """
        names = [self.cache_format(entry).name for entry in entries]
        is_fp8 = bool(names) and all(name.startswith(("fp8", "nvfp4")) for name in names)
        return "fp8" if is_fp8 else self.dtype

    def entry_bytes(self, entry: CacheEntry, heads: int) -> int:
        """Return the bytes of one row of `heads` units of an entry."""
        return heads * self.cache_format(entry).row_bytes(entry.width)

    def weight_format(self, name: str, weight: Weight) -> WeightFormat:
        """Return the storage format of a weight: the first scheme that covers it, or the dtype."""
        key = name, weight.kind
        if key not in self._memo:
            schemes = self.schemes if name not in self.unquantized else ()
            formats = (scheme.weight_format(name, weight.kind) for scheme in schemes)
            self._memo[key] = next(filter(None, formats), WEIGHT_FORMATS[self.dtype])
        return self._memo[key]

    @cached_property
    def _memo(self) -> dict[tuple[str, str], WeightFormat]:
        """Return the formats of weights by full name and kind."""
        return {}

    def weight_bytes(self, name: str, weight: Weight) -> int:
        """Return the bytes of one weight with all copies and biases. Table rows are stored like
        matrix columns."""
        sides = weight.inputs, weight.outputs
        if weight.kind is not WeightKind.MATRIX:
            sides = weight.outputs, weight.inputs
        matrix_bytes = self.weight_format(name, weight).matrix_bytes(*sides)
        return weight.copies * (matrix_bytes + weight.bias * self.vector_bytes)

    def row_bytes(self, table: Weight) -> int:
        """Return the bytes of one row of a table."""
        return self.weight_format(table.name, table).matrix_bytes(table.outputs, 1)

    @cached_property
    def vector_bytes(self) -> int:
        """Return the bytes of an element of a vector or bias: of the dtype, unless a scheme covers
        vectors."""
        covering = (s for s in self.schemes if "vector" in s.kinds)
        return next((stored_format(s.format).bits // 8 for s in covering), self.element_bytes)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an activation element."""
        return FORMATS[self.dtype].bits // 8

    @property
    def quantized_dtypes(self) -> list[str]:
        """Return the compute dtype of the matrices of each scheme."""
        return [stored_format(s.format).computes or self.dtype for s in self.schemes]

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of all products: quantised matrices first, then the dtype of the
        model."""
        return tuple(dict.fromkeys([*self.quantized_dtypes, self.dtype]))

    @property
    def weights_label(self) -> str:
        """Return the weight formats as text for the assumptions of a table."""
        if self.schemes and self.schemes[0].label:
            return self.schemes[0].label
        return " + ".join(dict.fromkeys([*(s.format for s in self.schemes), self.dtype]))

    @property
    def computed(self) -> str:
        """Return the compute dtypes of quantised matrices, as a remark after `weights_label`.

        '' without quantised matrices, and for 4-bit activations, because not every GPU computes in
        fp4.
        """
        dtypes = dict.fromkeys(self.quantized_dtypes)
        if not dtypes or any("fp4" in dtype for dtype in dtypes):
            return ""
        return f" (quantised matrices computed in {' + '.join(dtypes)})"
