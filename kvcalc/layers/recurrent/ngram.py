"""Hashed n-gram memories: table rows selected by the last tokens and gated into every residual
stream.

Qwen4-Exp stores (kernel − 1) · dilation columns of streams · hidden_size channels per sequence and
layer. DeepSeek-V4.1's Engram stores nothing, because the last tokens are known. Table sizes are
successive primes, one per hash. Sources: transformers, `qwen4_exp`; tensors of DeepSeek-V4.1-Flash.
"""

from functools import cache

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import Operator
from kvcalc.layers.part import Size, Sublayer, Tokens
from kvcalc.layers.passes import Pass
from kvcalc.layers.recurrent.delta_rule import conv_state
from kvcalc.layers.weights import Weight, matrix, table, vector


class NgramMemory(Sublayer, frozen=True, tag="ngram_memory"):
    """A table of table_rows rows of table_width. A token reads `hashes` rows.

    Their concatenation gives one value and one key per residual stream. A dilated convolution
    follows.
    """

    table_rows: Tokens
    table_width: Size
    hashes: Size
    streams: Size
    hidden_size: Size
    conv_kernel: Size = 4
    dilation: Size = 1

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: table [rows, w], key [h·w, S·D], value [h·w, D], norms of key, query
        and convolution [S·D], conv [S·D, k]."""
        inputs, channels = (
            self.hashes * self.table_width,
            self.streams * self.hidden_size,
        )
        return (
            table("ngram_table", self.table_rows, self.table_width, shards=self.table_rows),
            matrix("ngram_key", inputs, channels),
            matrix("ngram_value", inputs, hidden_size),
            vector("ngram_norms", 3 * channels),
            vector("ngram_conv", channels * self.conv_kernel),
        )

    def operators(self, p: Pass) -> list[Operator]:
        """Return operators: the rows that each token reads, then the operators of any
        recurrent mixer."""
        read = p.tokens * self.hashes * self.table_width
        return [
            p.vector("ngram_lookup", 0, read, 0, read * p.element),
            *super().operators(p),
        ]

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries of one sequence: (kernel − 1) · dilation columns of S·D
        channels."""
        return (
            conv_state(
                1,
                self.streams * self.hidden_size,
                (self.conv_kernel - 1) * self.dilation + 1,
            ),
        )


class Engram(Sublayer, frozen=True, tag="engram"):
    """A table of table_rows rows of table_width. A token reads `hashes` rows.

    They give one key per residual stream, and one value.
    """

    table_rows: Tokens
    table_width: Size
    hashes: Size
    streams: Size

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weights: table [rows, w], keys and value [h·w, (S + 1)·D], scales of keys and
        queries [S·D] each."""
        return (
            table(
                "engram_table",
                self.table_rows,
                self.table_width,
                shards=self.table_rows,
            ),
            matrix(
                "engram_kv",
                self.hashes * self.table_width,
                (self.streams + 1) * hidden_size,
            ),
            vector("engram_scales", 2 * self.streams * hidden_size),
        )

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
