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
    """Use of a weight.

    Attributes:
        MATRIX: Factor of a matrix product, which quantisation covers.
        VECTOR: Values that are applied elementwise: norms, separate biases, sinks, gates per
            channel.
        TABLE: Rows that are looked up by token id or position.
    """

    MATRIX = "matrix"
    VECTOR = "vector"
    TABLE = "table"


class Weight(msgspec.Struct, frozen=True):
    """A weight of the model: equal matrices [inputs, outputs], a vector, or a lookup table.

    Attributes:
        name: Name within its part, such as `q` or `experts.up`.
        inputs: Inputs of a matrix; rows of a table; 1 for a vector.
        outputs: Outputs of a matrix; elements of a table row or of a vector.
        copies: Number of equal matrices, such as experts or diagonal blocks.
        active: Number of copies that one token uses (top-k of the experts); 0 for all.
        bias: Bias elements per copy.
        shards: Units (heads, columns) that tensor parallelism divides. If there are more ranks than
            units, the units are replicated.
        expert: Whether the copies are experts, which expert parallelism divides.
        rows_in: Whether tensor parallelism divides `inputs` (a row-parallel matrix, whose bias is
            on every rank).
        kind: Matrix, vector or table.
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
        """Return the number of parameters in total: copies · (inputs · outputs + bias)."""
        return self.copies * (self.inputs * self.outputs + self.bias)

    @property
    def active_elements(self) -> int:
        """Return the number of parameters that one token uses. Only active copies count."""
        return (self.active or self.copies) * (self.inputs * self.outputs + self.bias)

    def local(self, ranks: Parallelism) -> "Weight":
        """Return the share of the weight that one rank stores.

        Shares have whole heads, columns or experts. The result is the largest share of any rank.

        Args:
            ranks: Number of ranks of each kind of parallelism.
        """
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
            return replace(self, copies=copies, inputs=self.inputs // self.shards * units)
        outputs = self.outputs // self.shards * units
        bias = self.bias // self.shards * units
        return replace(self, copies=copies, outputs=outputs, bias=bias)


def matrix(
    name: str, inputs: int, outputs: int, bias: bool = False, shards: int = 1, **fields: Any
) -> Weight:
    """Return a weight matrix [inputs, outputs].

    Args:
        name: Name within its part.
        inputs: Elements of an input row.
        outputs: Elements of an output row.
        bias: Whether the matrix has a bias of `outputs` elements.
        shards: Units (heads, columns) that tensor parallelism divides; 1 if it is not divided.
        fields: Further fields of `Weight`.
    """
    bias_elements = outputs if bias else 0
    return Weight(name, inputs, outputs, bias=bias_elements, shards=shards, **fields)


def vector(name: str, elements: int, shards: int = 1) -> Weight:
    """Return a weight vector that is applied elementwise, such as a norm.

    Args:
        name: Name within its part.
        elements: Number of elements.
        shards: Units that tensor parallelism divides; 1 if it is not divided.
    """
    return Weight(name, 1, elements, shards=shards, kind=WeightKind.VECTOR)


def table(name: str, rows: int, width: int, shards: int = 1) -> Weight:
    """Return a lookup table, such as an embedding. A token reads one row.

    Args:
        name: Name within its part.
        rows: Number of rows.
        width: Elements of a row.
        shards: Groups of rows that tensor parallelism divides; 1 if it is not divided.
    """
    return Weight(name, rows, width, shards=shards, rows_in=True, kind=WeightKind.TABLE)


class Formats(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """Storage and compute formats of one model, under one requested precision.

    Attributes:
        dtype: dtype of matrix products, and of weights that no scheme covers.
        kv_cache_dtype: Name of the KV cache format, a value of `--kv-cache-dtype`.
        reason: Why `auto` selected this KV cache format; '' if the user requested it.
        schemes: Quantisation schemes. The first scheme that covers a matrix applies.
        unquantized: Full names of matrices that are stored in `dtype`.
    """

    dtype: str
    kv_cache_dtype: str
    reason: str = ""
    schemes: tuple[Quantization, ...] = ()
    unquantized: frozenset[str] = frozenset()

    def cache_format(self, entry: CacheEntry) -> RowFormat:
        """Return the storage format of the rows of a cache entry.

        It is the format that the model fixes for the entry, such as fp32 for a recurrent state.
        Otherwise it is the format that `kv_cache_dtype` has for the entry's role, such as `k`. A
        role without such a format has the model's dtype.

        Args:
            entry: The cache entry.
        """
        if entry.dtype:
            return FORMATS[entry.dtype]
        return cache_layout(self.kv_cache_dtype).get(entry.role) or FORMATS[self.dtype]

    def attention_dtype(self, entries: Iterable[CacheEntry]) -> str:
        """Return the dtype in which attention over some cache entries can compute.

        It is fp8 if all entries are stored in fp8 or nvfp4, and otherwise the dtype of the model.
        FlashAttention-3, XQA and TensorRT-LLM's kernels multiply such caches in fp8 without a
        conversion.

        Args:
            entries: Cache entries that the attention reads, such as keys and values.
        """
        names = [self.cache_format(entry).name for entry in entries]
        is_fp8 = bool(names) and all(name.startswith(("fp8", "nvfp4")) for name in names)
        return "fp8" if is_fp8 else self.dtype

    def entry_bytes(self, entry: CacheEntry, heads: int) -> int:
        """Return the bytes of one row of a cache entry on one rank, with its scales.

        Args:
            entry: The cache entry.
            heads: Units of a row (KV heads, latents) that the rank stores.
        """
        return heads * self.cache_format(entry).row_bytes(entry.width)

    def weight_format(self, name: str, weight: Weight) -> WeightFormat:
        """Return the storage format of a weight: of the first scheme that covers it, or of the
        dtype.

        Args:
            name: Full name, such as `dense.q`.
            weight: The weight.
        """
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
        """Return the bytes of a weight, with all copies, scales and biases.

        Args:
            name: Full name, such as `dense.q`.
            weight: The complete weight, or the share of one rank.
        """
        sides = weight.inputs, weight.outputs
        if weight.kind is not WeightKind.MATRIX:
            sides = weight.outputs, weight.inputs
        matrix_bytes = self.weight_format(name, weight).matrix_bytes(*sides)
        return weight.copies * (matrix_bytes + weight.bias * self.vector_bytes)

    def row_bytes(self, table: Weight) -> int:
        """Return the bytes of one row of a lookup table, with its scales.

        Args:
            table: The table, such as an embedding.
        """
        return self.weight_format(table.name, table).matrix_bytes(table.outputs, 1)

    @cached_property
    def vector_bytes(self) -> int:
        """Return the bytes of one element of a vector or bias.

        An element has the dtype of the model, unless a quantisation scheme covers vectors.
        """
        covering = (s for s in self.schemes if "vector" in s.kinds)
        return next((stored_format(s.format).bits // 8 for s in covering), self.element_bytes)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one activation element, which has the dtype of the model."""
        return FORMATS[self.dtype].bits // 8

    @property
    def quantized_dtypes(self) -> list[str]:
        """Return the compute dtype of each quantisation scheme's matrix products."""
        return [stored_format(s.format).computes or self.dtype for s in self.schemes]

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """Return the distinct compute dtypes of all matrix products of the model.

        The dtypes of quantised matrices come first, and the model's dtype last.
        """
        return tuple(dict.fromkeys([*self.quantized_dtypes, self.dtype]))

    @property
    def weights_label(self) -> str:
        """Return the printed name of the weight formats, such as `awq + bf16`.

        It is the label of the first quantisation scheme if it has one, such as a GGUF file type.
        """
        if self.schemes and self.schemes[0].label:
            return self.schemes[0].label
        return " + ".join(dict.fromkeys([*(s.format for s in self.schemes), self.dtype]))

    @property
    def computed(self) -> str:
        """Return the compute dtypes of quantised matrices, as text after `weights_label`.

        Example: ` (quantised matrices computed in fp8)`. The result is '' without quantised
        matrices. It is also '' for 4-bit activations, because not every GPU computes in fp4.
        """
        dtypes = dict.fromkeys(self.quantized_dtypes)
        if not dtypes or any("fp4" in dtype for dtype in dtypes):
            return ""
        return f" (quantised matrices computed in {' + '.join(dtypes)})"
