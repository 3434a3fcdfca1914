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

from kvcalc.arithmetic import Num, at_least, ceil_div, floor_div, minimum
from kvcalc.layers.batch import Parallelism
from kvcalc.storage.formats import FORMATS, RowFormat, cache_layout
from kvcalc.storage.quantization import (
    WEIGHT_FORMATS,
    Quantization,
    WeightFormat,
    stored_format,
)


class Span(StrEnum):
    """How the rows of an entry grow with cached tokens."""

    TOKENS = "tokens"  # one row for every `ratio` tokens, at most `limit` rows
    CHUNK = "chunk"  # as `tokens`, but a query sees only its own chunk of `limit` tokens
    STATE = "state"  # `limit` rows at every length
    PARTIAL = "partial"  # the tokens of the unfinished block of `ratio`
    OVERLAP = "overlap"  # the last finished block of `ratio`, once there is one


class Keeps(StrEnum):
    """Rows that a limit keeps."""

    LAST = "last"
    SINKS = "sinks"  # the first few tokens, and the last
    SCORED = "scored"  # the tokens with the highest eviction scores


class CacheEntry(msgspec.Struct, frozen=True):
    """Rows of one role that a layer caches for a sequence. A row has `heads` units of `width`
    elements.

    Attributes:
        role: k, v, latent, rope_key, index_key, conv_state, recurrent_state or compressor.
        heads: Units that tensor parallelism divides. Fewer heads than ranks are replicated.
        limit: Maximum number of rows (window, budget, chunk, rows of a state); 0 for no limit.
        keeps: Rows that the limit keeps.
        top: Maximum number of rows that one query reads (top-k); 0 for all visible rows.
        dtype: Format that the model fixes for this state; '' follows the dtype of the cache.
        assumed: Whether the model fixes no dtype, so another engine may use another.
        is_stored_by_other_layer: Whether this layer only reads these rows.
    """

    role: str
    heads: int
    width: int
    ratio: int = 1
    limit: int = 0
    top: int = 0
    span: Span = Span.TOKENS
    dtype: str = ""
    keeps: Keeps = Keeps.LAST
    assumed: bool = False
    is_stored_by_other_layer: bool = False

    @property
    def grows(self) -> bool:
        """Whether tokens add rows, without end or up to a limit."""
        return self.span in (Span.TOKENS, Span.CHUNK)

    def spread(self, ranks: Parallelism) -> int:
        """Return the ranks that share this entry's tokens. Decode context parallelism does not
        split windows and states."""
        return ranks.dcp if self.grows and not self.limit else 1

    def stored_rows(self, tokens: Num) -> Num:
        """Return rows stored after `tokens` tokens of one sequence: ⌊tokens/ratio⌋, at most
        `limit`."""
        if self.grows:
            rows = floor_div(tokens, self.ratio)
            return minimum(rows, self.limit) if self.limit else rows
        if self.span is Span.STATE:
            return self.limit
        if self.span is Span.PARTIAL:
            return tokens % self.ratio
        return self.ratio * at_least(tokens, self.ratio)

    def allocated_rows(self, tokens: Num, block_size: int) -> Num:
        """Return `stored_rows` rounded up to whole blocks."""
        return self.in_blocks(self.stored_rows(tokens), block_size)

    def in_blocks(self, rows: Num, block_size: int) -> Num:
        """Return `rows` in whole blocks of `block_size` tokens, each of at least one row. States
        are not paged."""
        if not self.grows:
            return rows
        rows_per_block = max(1, block_size // self.ratio)
        return ceil_div(rows, rows_per_block) * rows_per_block

    def read_rows(self, new: Num, past: Num) -> Num:
        """Return rows that a pass of `new` tokens after `past` cached tokens reads, each row once.

        The rows that the pass writes are included. A window shows min(past, limit − 1) + new rows
        to a group of queries. A chunk shows every row since the start of the first chunk that the
        queries touch. A top-k shows at most `new · top`. A state is read once. Block buffers are
        read if the pass finishes a block.
        """
        tokens = new + past
        if self.span is Span.STATE:
            return self.limit
        if not self.grows:
            finishes = at_least(floor_div(tokens, self.ratio) - floor_div(past, self.ratio), 1)
            return finishes * self.stored_rows(past)
        rows: Num = floor_div(tokens, self.ratio)
        if self.span is Span.CHUNK:
            rows = tokens - floor_div(past, self.limit) * self.limit
        elif self.limit:
            rows = minimum(rows, self.limit - 1 + new)
        if self.top:
            rows = minimum(rows, self.top * new)
        return rows

    def written_rows(self, new: Num, past: Num) -> Num:
        """Return rows that a pass of `new` tokens after `past` cached tokens writes.

        A row that a later token of the same pass evicts from a window counts too, because a query
        between them reads it.
        """
        tokens = new + past
        if self.span is Span.STATE:
            return self.limit
        if self.span is Span.PARTIAL:
            unfinished: Num = minimum(new, tokens % self.ratio)
            return unfinished
        finished = floor_div(tokens, self.ratio) - floor_div(past, self.ratio)
        if self.span is Span.OVERLAP:
            return self.ratio * at_least(finished, 1)
        return finished

    def full_from(self) -> int:
        """Return the token count from which this entry no longer grows; 0 if it never grows, −1 if
        it always grows."""
        if not self.grows:
            return 0
        return self.limit * self.ratio if self.limit else -1


class WeightKind(StrEnum):
    MATRIX = "matrix"  # factor of a matrix product, which quantisation covers
    VECTOR = "vector"  # elementwise: norms, separate biases, sinks, gates per channel
    TABLE = "table"  # rows looked up by token id or position; never multiplied


class Weight(msgspec.Struct, frozen=True):
    """`copies` equal matrices [inputs, outputs], or a vector or table with that number of elements.

    Attributes:
        active: Copies that one token uses (top-k of the experts); 0 for all.
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
        """Parameters: copies · (inputs · outputs + bias)."""
        return self.copies * (self.inputs * self.outputs + self.bias)

    @property
    def active_elements(self) -> int:
        """Parameters that one token uses: the same with only the active copies."""
        return (self.active or self.copies) * (self.inputs * self.outputs + self.bias)

    def local(self, ranks: Parallelism) -> "Weight":
        """Return the share on one rank: whole heads, columns or experts."""
        copies = self.copies
        num_shares = ranks.tp
        is_matrix = self.kind is WeightKind.MATRIX
        if self.expert:
            copies = -(-copies // ranks.ep)
            num_shares = ranks.tp * ranks.dp // ranks.ep
        elif is_matrix and copies > 1 and copies == self.shards:  # block-diagonal: whole blocks
            return msgspec.structs.replace(self, copies=-(-copies // num_shares))
        if num_shares == 1 or self.shards == 1:
            return msgspec.structs.replace(self, copies=copies)
        units = -(-self.shards // num_shares)
        if self.rows_in:
            inputs = self.inputs // self.shards * units
            return msgspec.structs.replace(self, copies=copies, inputs=inputs)
        outputs = self.outputs // self.shards * units
        bias = self.bias // self.shards * units
        return msgspec.structs.replace(self, copies=copies, outputs=outputs, bias=bias)


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
    """Formats by name.

    Attributes:
        dtype: dtype of products, and of weights that no scheme covers.
        kv_cache_dtype: Name of the cache layout.
        reason: Reason why `auto` selected the layout, or ''.
        schemes: Quantisations in use. The first that covers a matrix applies.
        unquantized: Full names of matrices that stay in the dtype.
    """

    dtype: str
    kv_cache_dtype: str
    reason: str = ""
    schemes: tuple[Quantization, ...] = ()
    unquantized: frozenset[str] = frozenset()

    def cache_format(self, entry: CacheEntry) -> RowFormat:
        """Return the storage format of an entry: the format that the model fixes, or the format of
        its role."""
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
        """Formats of weights by full name and kind."""
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
        """Return the bytes of an element of a vector or bias: the dtype, if not a scheme covers
        vectors."""
        covering = (s for s in self.schemes if "vector" in s.kinds)
        return next((stored_format(s.format).bits // 8 for s in covering), self.element_bytes)

    def compute_dtype(self, name: str, weight: Weight) -> str:
        """Return the dtype of products with this weight: the dtype of the format (W8A8), or of the
        model."""
        return self.weight_format(name, weight).computes or self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation element."""
        return FORMATS[self.dtype].bits // 8

    @property
    def quantized_dtypes(self) -> list[str]:
        """The dtypes of products with the matrices that each scheme covers."""
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
