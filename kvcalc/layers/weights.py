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
    """How a weight is used, which decides whether quantisation can cover it.

    Attributes:
        MATRIX: Factor of a matrix product. Quantisation schemes usually cover only this kind.
        VECTOR: Values that are applied elementwise: norms, separate biases, sink logits, gates per
            channel.
        TABLE: Rows that are looked up by token id or position.
    """

    MATRIX = "matrix"
    VECTOR = "vector"
    TABLE = "table"


class Weight(msgspec.Struct, frozen=True):
    """A weight of the model: one or more equal matrices [inputs, outputs], a vector, or a table.

    Attributes:
        name: Name within its part, such as `q` or `experts.up`.
        inputs: Inputs of a matrix; rows of a table; 1 for a vector.
        outputs: Outputs of a matrix; elements of a table row or of a vector.
        copies: Number of equal matrices, such as experts or diagonal blocks.
        active: Number of copies that one token uses (top-k of the experts); 0 for all.
        bias: Bias elements per copy.
        shards: Number of units (heads, columns) that tensor parallelism divides; 1 if the weight is
            not divided. If there are more ranks than units, the units are replicated.
        expert: Whether the copies are experts, which expert parallelism divides.
        rows_in: Whether tensor parallelism divides `inputs` instead of `outputs`. This is a
            row-parallel matrix, whose bias is on every rank.
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
        """Return the number of parameters in all copies: copies · (inputs · outputs + bias)."""
        return self.copies * (self.inputs * self.outputs + self.bias)

    @property
    def active_elements(self) -> int:
        """Return the number of parameters that one token uses: only the `active` copies count."""
        return (self.active or self.copies) * (self.inputs * self.outputs + self.bias)

    def local(self, ranks: Parallelism) -> "Weight":
        """Return the share of the weight that one rank (GPU) stores, as a smaller weight.

        A share has whole heads, columns or experts. Example: a matrix with 5 heads on 2
        tensor-parallel ranks gives 3 heads. The result is the largest share of any rank. A weight
        that parallelism does not divide, such as a norm, stays complete.

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
        return replace(
            self, copies=copies, outputs=outputs, bias=self.bias // self.shards * units
        )


Weights = tuple[Weight, ...]
WeightsByName = dict[str, Weight]


def matrix(
    name: str, inputs: int, outputs: int, bias: bool = False, shards: int = 1, **fields: Any
) -> Weight:
    """Return a weight matrix, as a `Weight` with the shape [inputs, outputs].

    It is multiplied with rows of `inputs` elements and gives rows of `outputs` elements.

    Args:
        name: Name within its layer part, such as `q`.
        inputs: Rows of the matrix.
        outputs: Columns of the matrix.
        bias: Whether the matrix has a bias of `outputs` elements.
        shards: Number of units (heads, columns) that tensor parallelism divides; 1 if it is not
            divided.
        fields: Further fields of `Weight`, such as `copies`.
    """
    return Weight(name, inputs, outputs, bias=outputs * bias, shards=shards, **fields)


def vector(name: str, elements: int, shards: int = 1) -> Weight:
    """Return a weight vector that is applied elementwise, such as a norm.

    Args:
        name: Name within its layer part, such as `q_norm`.
        elements: Number of elements.
        shards: Number of units that tensor parallelism divides; 1 if it is not divided.
    """
    return Weight(name, 1, elements, shards=shards, kind=WeightKind.VECTOR)


def table(name: str, rows: int, width: int, shards: int = 1) -> Weight:
    """Return a lookup table, such as an embedding. A token reads one row.

    Args:
        name: Name within its layer part, such as `embedding`.
        rows: Number of rows.
        width: Elements of a row.
        shards: Number of groups of rows that tensor parallelism divides; 1 if it is not divided.
    """
    return Weight(name, rows, width, shards=shards, rows_in=True, kind=WeightKind.TABLE)


class Formats(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """Storage and compute formats of one model, for the precision that the user requested.

    Attributes:
        dtype: dtype of activations, and of weights and matrix products that no scheme covers.
        kv_cache_dtype: Name of the KV cache format, a value of `--kv-cache-dtype`.
        reason: Why `auto` selected this KV cache format; '' if the user requested it.
        schemes: Quantisation schemes. If several cover a matrix, the first applies.
        unquantized: Full names, such as `dense.q`, of matrices that no scheme covers.
    """

    dtype: str
    kv_cache_dtype: str
    reason: str = ""
    schemes: tuple[Quantization, ...] = ()
    unquantized: frozenset[str] = frozenset()

    def cache_format(self, entry: CacheEntry) -> RowFormat:
        """Return the storage format of the rows of a cache entry, such as keys.

        If the model fixes a dtype for the entry, such as fp32 for a recurrent state, it is this
        dtype. Otherwise it is the format that `kv_cache_dtype` has for the entry's role, such as
        `k`, or the model's dtype if it has none for this role.

        Args:
            entry: The cache entry.
        """
        if entry.dtype:
            return FORMATS[entry.dtype]
        return cache_layout(self.kv_cache_dtype).get(entry.role) or FORMATS[self.dtype]

    def attention_dtype(self, entries: Iterable[CacheEntry]) -> str:
        """Return the dtype in which attention over some cache entries computes: fp8 or the model's.

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
        """Return the bytes of one row of a cache entry on one GPU in one layer, with its scales.

        Args:
            entry: The cache entry.
            heads: Units of a row (KV heads, latents) that the GPU stores.
        """
        return heads * self.cache_format(entry).row_bytes(entry.width)

    def weight_format(self, name: str, weight: Weight) -> WeightFormat:
        """Return the storage format of a weight.

        It is the format of the first quantisation scheme that covers the weight, or else `dtype`.

        Args:
            name: Full name `kind.weight`, such as `dense.q`.
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
        """Return the bytes of a weight in one layer, with all copies, scales and biases.

        Args:
            name: Full name `kind.weight`, such as `dense.q`.
            weight: The complete weight, or the share of one rank for the bytes on one GPU.
        """
        sides = weight.inputs, weight.outputs
        if weight.kind is not WeightKind.MATRIX:
            sides = weight.outputs, weight.inputs
        matrix_bytes = self.weight_format(name, weight).matrix_bytes(*sides)
        return weight.copies * (matrix_bytes + weight.bias * self.vector_bytes)

    def row_bytes(self, table: Weight) -> int:
        """Return the bytes of one row of a lookup table, with its scales.

        A forward pass reads one row for each new token.

        Args:
            table: The table, such as an embedding.
        """
        return self.weight_format(table.name, table).matrix_bytes(table.outputs, 1)

    @cached_property
    def vector_bytes(self) -> int:
        """Return the bytes of one element of a vector weight or bias, such as 2 for bf16.

        An element has the dtype of the model, unless a quantisation scheme covers vectors.
        """
        covering = (s for s in self.schemes if "vector" in s.kinds)
        return next((stored_format(s.format).bits // 8 for s in covering), self.element_bytes)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one activation element, in the dtype of the model: 2 for bf16."""
        return FORMATS[self.dtype].bits // 8

    @property
    def quantized_dtypes(self) -> list[str]:
        """Return the dtype in which the matrices of each quantisation scheme are multiplied.

        Example: ["fp8"] for one scheme with fp8 weights and activations. The model's dtype means
        that weights are converted before the product, as in AWQ.
        """
        return [stored_format(s.format).computes or self.dtype for s in self.schemes]

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """Return the distinct compute dtypes of all matrix products of the model.

        The dtypes of quantised matrices come first, and the model's dtype last. Each has its own
        peak FLOP/s and ridge point on a GPU.
        """
        return tuple(dict.fromkeys([*self.quantized_dtypes, self.dtype]))

    @property
    def weights_label(self) -> str:
        """Return the printed name of the weight formats, such as `awq + bf16`.

        If the first quantisation scheme has a label, such as the GGUF file type `q4_k_m`, it is
        this label.
        """
        if self.schemes and self.schemes[0].label:
            return self.schemes[0].label
        return " + ".join(dict.fromkeys([*(s.format for s in self.schemes), self.dtype]))

    @property
    def computed(self) -> str:
        """Return a remark on the compute dtypes of quantised matrices, for printed text.

        Example: ` (quantised matrices computed in fp8)`. The result is '' without quantised
        matrices. It is also '' for 4-bit activations, because not every GPU computes in fp4.
        """
        dtypes = dict.fromkeys(self.quantized_dtypes)
        if not dtypes or any("fp4" in dtype for dtype in dtypes):
            return ""
        return f" (quantised matrices computed in {' + '.join(dtypes)})"
