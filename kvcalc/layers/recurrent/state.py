"""States of recurrent mixers: short-convolution states and recurrent states, both of constant size."""

from kvcalc.layers.cache import CacheEntry, Span


def conv_state(heads: int, width: int, kernel: int) -> CacheEntry:
    """Return the last kernel − 1 columns of `heads · width` channels in the dtype of the model."""
    return CacheEntry("conv_state", heads, width, limit=kernel - 1, span=Span.STATE)


def recurrent_state(heads: int, rows: int, width: int, dtype: str | None) -> CacheEntry:
    """Return a matrix of rows × width per head in the dtype that the model fixes.

    '' is the dtype of the model. None means that the model fixes none; fp32 is assumed.
    """
    fixed = "fp32" if dtype is None else dtype
    return CacheEntry("recurrent_state", heads, width, limit=rows, span=Span.STATE, dtype=fixed, assumed=dtype is None)
