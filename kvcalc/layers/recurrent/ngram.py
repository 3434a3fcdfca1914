"""Hashed n-gram memories: table rows selected by the last tokens and gated into every residual
stream.

Qwen4-Exp stores (kernel − 1) · dilation columns of streams · hidden_size channels per sequence and
layer. DeepSeek-V4.1's Engram stores nothing, because the last tokens are known. Table sizes are
successive primes, one per hash. Sources: transformers, `qwen4_exp`; tensors of DeepSeek-V4.1-Flash.
"""

from functools import cache
from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import Operator
from kvcalc.layers.part import Size, Sublayer, Tokens
from kvcalc.layers.passes import Pass
from kvcalc.layers.recurrent.delta_rule import conv_state


class NgramMemory(Sublayer, frozen=True, tag="ngram_memory"):
    """A table of table_rows rows of table_width. A token reads `hashes` rows.

    Their concatenation gives one value and one key per residual stream. A dilated convolution
    follows.
    """

    LETTERS: ClassVar[str] = (
        "R=table_rows w=table_width h=hashes ns=streams C=hidden_size kc=conv_kernel"
    )
    WEIGHTS: ClassVar[str] = """
        ngram_table: R × w / R, table
        ngram_key: h·w × ns·C
        ngram_value: h·w × D
        ngram_norms: 3·ns·C
        ngram_conv: ns·C·kc
    """

    table_rows: Tokens
    table_width: Size
    hashes: Size
    streams: Size
    hidden_size: Size
    conv_kernel: Size = 4
    dilation: Size = 1

    def operators(self, p: Pass) -> list[Operator]:
        """Return operators: the rows that each token reads, then the operators of any
        recurrent mixer."""
        read = p.tokens * self.hashes * self.table_width
        return [p.vector("ngram_lookup", 0, read, 0, read * p.element), *super().operators(p)]

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: (kernel − 1) · dilation columns of S·D
        channels."""
        return (
            conv_state(
                1, self.streams * self.hidden_size, (self.conv_kernel - 1) * self.dilation + 1
            ),
        )


class Engram(Sublayer, frozen=True, tag="engram"):
    """A table of table_rows rows of table_width. A token reads `hashes` rows.

    They give one key per residual stream, and one value.
    """

    LETTERS: ClassVar[str] = "R=table_rows w=table_width h=hashes ns=streams"
    WEIGHTS: ClassVar[str] = """
        engram_table: R × w / R, table
        engram_kv: h·w × ns·D + D
        engram_scales: 2·ns·D
    """

    table_rows: Tokens
    table_width: Size
    hashes: Size
    streams: Size

    def operators(self, p: Pass) -> list[Operator]:
        """Return operators: the rows that each token reads, their product, and the
        gated addition to the streams."""
        read, mixed = (
            p.tokens * self.hashes * self.table_width,
            p.tokens * self.streams * p.width,
        )
        w = p.local(self.weights(p.width))
        lookup = p.vector(
            "engram_lookup",
            0,
            read,
            0,
            p.tokens * self.hashes * p.formats.row_bytes(w["engram_table"]),
        )
        gates = p.vector("engram_gate", 2 * mixed, mixed, 8 * mixed)
        return [lookup, p.gemm("engram_kv", w["engram_kv"]), gates]


def ngram_rows(base: int, hashes: int, index: int, divisor: int) -> int:
    """Return the rows of a model's `index`-th memory: the next primes from `base` on, padded to the
    divisor."""
    rows = sum(_primes(base, hashes * (index + 1))[hashes * index :])
    return -(-rows // divisor) * divisor


@cache
def _primes(base: int, count: int) -> tuple[int, ...]:
    primes: list[int] = []
    number = max(base, 2)
    while len(primes) < count:
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            primes.append(number)
        number += 1
    return tuple(primes)
