"""What recurrent mixers keep: a short-convolution state and a recurrent state, both of constant size."""

from kvcalc.layers.cache import CacheEntry, Span


def conv_state(heads: int, width: int, kernel: int) -> CacheEntry:
    """The last kernel − 1 columns of `heads · width` channels, in the model's dtype; the new column is computed."""
    return CacheEntry("conv_state", heads, width, limit=kernel - 1, span=Span.STATE)


def recurrent_state(heads: int, rows: int, width: int, dtype: str | None) -> CacheEntry:
    """A matrix of rows × width per head, in the dtype that the model fixes ('': its own); fp32 is assumed where it says None."""
    fixed = "fp32" if dtype is None else dtype
    return CacheEntry("recurrent_state", heads, width, limit=rows, span=Span.STATE, dtype=fixed, assumed=dtype is None)
