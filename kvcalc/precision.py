"""A `Precision` put together with a model: the format of every weight and of every cache role."""

from kvcalc.batch import Precision
from kvcalc.cache import CacheEntry
from kvcalc.dtypes import FORMATS, KEYS_AND_VALUES_ONLY, LATENT_ONLY, Format, cache_layout, canonical
from kvcalc.errors import UserError
from kvcalc.model import Model
from kvcalc.quantization import WEIGHT_FORMATS, Quantization, WeightFormat, load_weight_format
from kvcalc.weights import Kind, Weight


class Formats:
    """The formats of one model under one precision.

    dtype: of weights that no scheme covers, and of products. kv_cache_dtype: the name of the cache's layout. reason: why
    `auto` chose it, or ''. schemes: the quantisations in force, the first that covers a matrix counts.
    """

    __slots__ = ("_cache", "_kept", "dtype", "kv_cache_dtype", "reason", "schemes")

    def __init__(self, model: Model, precision: Precision) -> None:
        asked = canonical(precision.dtype)
        self.dtype = model.dtype if asked in ("auto", "fp8") else asked
        self.schemes: tuple[Quantization, ...] = model.quantization if asked == "auto" else ()
        if precision.quantization or asked == "fp8":
            chosen = load_weight_format(precision.quantization or "fp8")
            self.schemes = () if chosen.name in ("bf16", "fp16", "fp32", "fp64") else (Quantization(chosen.name),)
        self._kept = model.unquantized if self.schemes and self.schemes is model.quantization else frozenset()
        self.kv_cache_dtype, self.reason = self._cache_dtype(model, precision)
        self._cache = cache_layout(self.kv_cache_dtype)
        if self.kv_cache_dtype in LATENT_ONLY:
            self._check_latent(model)
        if self.kv_cache_dtype in KEYS_AND_VALUES_ONLY:
            self._check_keys_and_values(model)

    def _cache_dtype(self, model: Model, precision: Precision) -> tuple[str, str]:
        asked = canonical(precision.kv_cache_dtype)
        if asked != "auto":
            return asked, ""
        if model.kv_cache_dtype and canonical(precision.dtype) == "auto":
            return canonical(model.kv_cache_dtype), "the checkpoint declares it for its cache"
        return self.dtype, "the model's dtype"

    def _check_latent(self, model: Model) -> None:
        roles = {e.role for layer in model.kinds.values() for e in layer.entries}
        if roles & {"k", "v"} or "latent" not in roles:
            raise UserError(
                f"KV-cache dtype {self.kv_cache_dtype!r} is for latent attention, and {model.name} caches keys and values",
                hint="Use fp8",
            )

    def _check_keys_and_values(self, model: Model) -> None:
        roles = {e.role for layer in model.kinds.values() for e in layer.entries}
        if found := roles & {"latent", "rope_key", "index_key"}:
            raise UserError(
                f"KV-cache dtype {self.kv_cache_dtype!r} is for keys and values, and {model.name} caches "
                + " and ".join(sorted(r.replace("_", " ") + "s" for r in found)),
                hint="Use fp8",
            )

    def cache_format(self, entry: CacheEntry) -> Format:
        """The storage format of a cache entry's rows."""
        return FORMATS[entry.dtype] if entry.dtype else self._cache.get(entry.role) or FORMATS[self.dtype]

    def entry_bytes(self, entry: CacheEntry, heads: int) -> int:
        """Bytes of one row of `heads` units of an entry."""
        return heads * self.cache_format(entry).row_bytes(entry.width)

    def weight_format(self, name: str, weight: Weight) -> WeightFormat:
        """The storage format of a weight: the first scheme that covers a matrix, else the dtype."""
        if weight.kind is Kind.MATRIX and name not in self._kept:
            for scheme in self.schemes:
                if found := scheme.weight_format(name):
                    return found
        return WEIGHT_FORMATS[self.dtype]

    def weight_bytes(self, name: str, weight: Weight) -> int:
        """Bytes of one weight, all copies and biases included; biases and vectors keep the dtype."""
        plain = FORMATS[self.dtype].bits // 8
        matrices = weight.copies * self.weight_format(name, weight).matrix_bytes(weight.inputs, weight.outputs)
        return matrices + weight.copies * weight.bias * plain

    def compute_dtype(self, name: str, weight: Weight) -> str:
        """What a product with this weight computes in: the format's own dtype (W8A8), else the model's."""
        return self.weight_format(name, weight).computes or self.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation element: the dtype's."""
        return FORMATS[self.dtype].bits // 8

    @property
    def weights_label(self) -> str:
        """How the weights are stored, for the assumptions that a table prints."""
        return " + ".join(dict.fromkeys([*(s.format for s in self.schemes), self.dtype]))

    @property
    def computed(self) -> str:
        """What products with quantised matrices compute in, as a remark behind `weights_label`; '' without any."""
        dtypes = dict.fromkeys(load_weight_format(s.format).computes or self.dtype for s in self.schemes)
        return f" (quantised matrices computed in {' + '.join(dtypes)})" if dtypes else ""
