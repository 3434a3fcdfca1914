"""Requested precision, and the formats that result for a model."""

import msgspec
from msgspec.structs import force_setattr, replace

from kvcalc.errors import UserError, nearest
from kvcalc.layers.weights import Formats
from kvcalc.model.gguf_layout import stored_by_mix
from kvcalc.model.model import Model, memoized
from kvcalc.storage.formats import (
    COMPUTE,
    KEYS_AND_VALUES_ONLY,
    LATENT_ONLY,
    cache_layout,
    canonical,
)
from kvcalc.storage.ggml import mix_of
from kvcalc.storage.quantization import (
    WEIGHT_FORMATS,
    Quantization,
    WeightFormat,
    family,
    load_weight_format,
    stored_format,
)


class Precision(msgspec.Struct, frozen=True):
    """The formats of weights, matrix products and KV cache that the user requests.

    Attributes:
        dtype: dtype of weights and matrix products. `auto` keeps the checkpoint's dtype and
            quantisation. `fp8` keeps the dtype, and stores and multiplies matrices in fp8. Any
            other value replaces dtype and quantisation.
        kv_cache_dtype: Format of the KV cache. `auto` is the format that the checkpoint declares
            for its cache, otherwise the dtype.
        quantization: Format of quantised weights, such as `awq`; '' for none. Formats without
            quantisation, such as `bf16`, become the dtype if that is `auto`. If the checkpoint is
            published in this format, it covers the matrices that the publisher quantised. A GGUF
            file type such as `q4_k_m` covers the whole model. `q4_k_m+imatrix` is a file that was
            made with an importance matrix.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = ""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not isinstance(value, str):
                raise UserError(
                    f"{name} {value!r:.80} is no name of a format",
                    "Write 'bf16', 'fp8' or 'auto'",
                )
        if canonical(self.dtype) not in (*COMPUTE, "auto"):
            low = canonical(self.dtype)
            hint = nearest(low, [*COMPUTE, "auto"])
            if low in WEIGHT_FORMATS or mix_of(low):
                hint = f"Weights stored so are --quantization {self.dtype}"
            raise UserError(f"unknown dtype {self.dtype!r}", hint)
        plain = canonical(self.quantization)
        if self.dtype == "auto" and plain in COMPUTE and plain != "fp8":
            force_setattr(self, "dtype", plain)
            force_setattr(self, "quantization", "")


PUBLISHED = Precision()


def stored_as(model: Model, precision: Precision) -> Model:
    """Return the model with the storage formats of a requested GGUF file type.

    A GGUF file type, such as `q4_k_m`, mixes formats within and between layers, so layers of one
    kind can become several kinds. If the precision names no GGUF file type, the result is `model`
    itself, and `formats_of` alone gives the formats.

    Args:
        model: The model.
        precision: Requested formats.

    Raises:
        UserError: llama.cpp's tensors of the model are unknown.
    """
    mix = mix_of(precision.quantization)
    return stored_by_mix(model, *mix) if mix else model


def formats_of(model: Model, precision: Precision) -> Formats:
    """Return the storage and compute formats of a model for the precision that the user requested.

    The result says for each weight and cache row in which format it is stored.

    Args:
        model: The model.
        precision: Requested formats. `auto` becomes the checkpoint's format.

    Raises:
        UserError: A format is unknown or does not suit the model.
    """
    return memoized(model, _formats_of, precision)


def _formats_of(model: Model, precision: Precision) -> Formats:
    requested = canonical(precision.dtype)
    dtype = model.dtype if requested in ("auto", "fp8") else requested
    schemes = model.quantization if requested == "auto" else ()
    unquantized = model.unquantized if schemes else frozenset()
    if mix_of(precision.quantization):
        schemes = stored_as(model, precision).quantization
        unquantized = frozenset()
    elif precision.quantization or requested == "fp8":
        weight_format = load_weight_format(precision.quantization or "fp8")
        if not _is_published(schemes, weight_format):
            schemes = (Quantization(weight_format.name),)
            unquantized = frozenset()
    cache, reason = _cache_dtype(model, precision, dtype)
    cache_layout(cache)
    _check_roles(model, cache)
    return Formats(dtype, cache, reason, schemes, unquantized)


def _is_published(schemes: tuple[Quantization, ...], weight_format: WeightFormat) -> bool:
    """Return whether the model is published in this format and no other, under any name of the
    format."""
    if len(schemes) != 1:
        return False
    published = stored_format(family(schemes[0].format))
    return replace(published, name=weight_format.name) == weight_format


def _cache_dtype(model: Model, precision: Precision, dtype: str) -> tuple[str, str]:
    requested = canonical(precision.kv_cache_dtype)
    if requested != "auto":
        return requested, ""
    declared = canonical(model.kv_cache_dtype or "auto")
    if declared != "auto" and canonical(precision.dtype) == "auto":
        return declared, "the checkpoint declares it for its cache"
    return dtype, "the model's dtype"


def _check_roles(model: Model, cache_dtype: str) -> None:
    """Raise UserError for a layout of latents on a model that caches K and V, or the reverse."""
    if cache_dtype not in (*LATENT_ONLY, *KEYS_AND_VALUES_ONLY):
        return
    roles = model.roles
    other_roles = roles & {"latent", "rope_key", "index_key"}
    if cache_dtype in LATENT_ONLY and (roles & {"k", "v"} or "latent" not in roles):
        problem = f"is for latent attention, and {model.name} caches keys and values"
    elif cache_dtype in KEYS_AND_VALUES_ONLY and other_roles:
        names = " and ".join(sorted(role.replace("_", " ") + "s" for role in other_roles))
        problem = f"is for keys and values, and {model.name} caches {names}"
    else:
        return
    raise UserError(f"KV-cache dtype {cache_dtype!r} {problem}", "Use fp8")
