"""The formats of one model under one precision, as a value: what every weight and every cache row takes."""

from collections.abc import Iterable
from functools import cached_property

import msgspec

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.storage.dtypes import FORMATS, RowFormat, cache_layout
from kvcalc.storage.quantization import WEIGHT_FORMATS, Quantization, WeightFormat, stored_format


class Formats(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """Formats by name.

    dtype: of weights that no scheme covers, and of products. kv_cache_dtype: the name of the cache's layout. reason: why
    `auto` chose it, or ''. schemes: the quantisations in force, the first that covers a matrix counts. kept: matrices, by
    full name, that stay in the dtype all the same.
    """

    dtype: str
    kv_cache_dtype: str
    reason: str = ""
    schemes: tuple[Quantization, ...] = ()
    kept: frozenset[str] = frozenset()

    def cache_format(self, entry: CacheEntry) -> RowFormat:
        """The storage format of a cache entry's rows: the one that the model fixes, else its role's in the layout."""
        if entry.dtype:
            return FORMATS[entry.dtype]
        return cache_layout(self.kv_cache_dtype).get(entry.role) or FORMATS[self.dtype]

    def attention_dtype(self, entries: Iterable[CacheEntry]) -> str:
        """Return the dtype that attention over these entries can compute in: fp8 if all are fp8 or nvfp4, else the model's.

        FlashAttention-3, XQA and TensorRT-LLM's kernels multiply such caches in fp8 without a conversion.
        """
        names = [self.cache_format(entry).name for entry in entries]
        return "fp8" if names and all(name.startswith(("fp8", "nvfp4")) for name in names) else self.dtype

    def entry_bytes(self, entry: CacheEntry, heads: int) -> int:
        """Bytes of one row of `heads` units of an entry."""
        return heads * self.cache_format(entry).row_bytes(entry.width)

    def weight_format(self, name: str, weight: Weight) -> WeightFormat:
        """The storage format of a weight: the first scheme that covers it, else the dtype."""
        key = name, weight.kind
        if key not in self._known:
            schemes = self.schemes if name not in self.kept else ()
            covering = filter(None, (scheme.weight_format(name, weight.kind) for scheme in schemes))
            self._known[key] = next(covering, WEIGHT_FORMATS[self.dtype])
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, str], WeightFormat]:
        """The formats of weights by full name and kind."""
        return {}

    def weight_bytes(self, name: str, weight: Weight) -> int:
        """Bytes of one weight, all copies and biases included. The rows of a table are stored like the columns of a matrix."""
        sides = (weight.inputs, weight.outputs) if weight.kind is WeightKind.MATRIX else (weight.outputs, weight.inputs)
        matrices = weight.copies * self.weight_format(name, weight).matrix_bytes(*sides)
        return matrices + weight.copies * weight.bias * self.vector_bytes

    def row_bytes(self, table: Weight) -> int:
        """Bytes of one row of a table."""
        return self.weight_format(table.name, table).matrix_bytes(table.outputs, 1)

    @cached_property
    def vector_bytes(self) -> int:
        """Bytes of an element of a vector or a bias: the dtype's, unless a scheme covers vectors."""
        covering = (s for s in self.schemes if "vector" in s.kinds)
        return next((stored_format(s.format).bits // 8 for s in covering), self.element_bytes)

    def compute_dtype(self, name: str, weight: Weight) -> str:
        """What a product with this weight computes in: the format's own dtype (W8A8), else the model's."""
        return self.weight_format(name, weight).computes or self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation element: the dtype's."""
        return FORMATS[self.dtype].bits // 8

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """The dtypes that products compute in: those of the quantised matrices, then the model's."""
        quantised = (stored_format(s.format).computes or self.dtype for s in self.schemes)
        return tuple(dict.fromkeys([*quantised, self.dtype]))

    @property
    def weights_label(self) -> str:
        """How the weights are stored, for the assumptions that a table prints."""
        if self.schemes and self.schemes[0].label:
            return self.schemes[0].label
        return " + ".join(dict.fromkeys([*(s.format for s in self.schemes), self.dtype]))

    @property
    def computed(self) -> str:
        """What products with quantised matrices compute in, as a remark behind `weights_label`.

        '' without any, and for 4-bit activations: whether a GPU computes in fp4 depends on the GPU.
        """
        dtypes = dict.fromkeys(stored_format(s.format).computes or self.dtype for s in self.schemes)
        if any("fp4" in dtype for dtype in dtypes):
            return ""
        return f" (quantised matrices computed in {' + '.join(dtypes)})" if dtypes else ""
