"""Short convolutions, delays and n-gram tables.

Depthwise convolutions and delays act on keys, values or a sublayer's output, without projections.

State per sequence and layer: the last kernel − 1 columns of every channel. Sources: transformers,
`inkling` (keys, values and both residual branches) and `zaya` (queries, keys, and values delayed by
one token).

The gated short convolution of LFM2, whose state is only the last columns of the convolution.

State per sequence and layer: kernel − 1 columns of D channels. Sources: Liquid AI, LFM2 technical
report, section 2; transformers, `lfm2`.
"""

from functools import cache
from typing import ClassVar

from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import Operator
from kvcalc.layers.part import Size, Sublayer, Tokens
from kvcalc.layers.passes import Pass
from kvcalc.layers.recurrent.delta_rule import RecurrentMixer, conv_state
from kvcalc.layers.weights import Weight, vector


class NgramMemory(Sublayer, frozen=True, tag="ngram_memory"):
    """An n-gram memory: a lookup table, projections of a token's rows, and a convolution.

    A token reads one row for each hash of its last tokens. These rows give one value, and one key
    per residual stream. A dilated convolution follows.

    Attributes:
        table_rows: Rows of the table.
        table_width: Elements of a row.
        hashes: Rows that each token reads.
        streams: Number of residual streams.
        hidden_size: Width of a residual stream.
        conv_kernel: Taps of the convolution.
        dilation: Distance in tokens between two taps.
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
        """Return the operators of one pass on one rank: the table lookup, then a recurrent mixer's.

        Args:
            p: Context of the pass: its sequences, formats and ranks.
        """
        read = p.tokens * self.hashes * self.table_width
        return [p.vector("ngram_lookup", 0, read, 0, read * p.element), *super().operators(p)]

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the convolution state: the last (conv_kernel − 1) · dilation columns.

        A column has streams · hidden_size channels.
        """
        return (
            conv_state(
                1, self.streams * self.hidden_size, (self.conv_kernel - 1) * self.dilation + 1
            ),
        )


class Engram(Sublayer, frozen=True, tag="engram"):
    """An Engram memory: a lookup table, and a projection of the rows that a token reads.

    A token reads one row for each hash of its last tokens. These rows give one key per residual
    stream, and one value.

    Attributes:
        table_rows: Rows of the table.
        table_width: Elements of a row.
        hashes: Rows that each token reads.
        streams: Number of residual streams.
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
        """Return the operators of one pass on one rank: lookup, projection, and gated addition.

        The gated values are added to the residual streams.

        Args:
            p: Context of the pass: its sequences, formats and ranks.
        """
        read, mixed = (
            p.tokens * self.hashes * self.table_width,
            p.tokens * self.streams * p.width,
        )
        w = self.local_weights(p)
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
    """Return the number of rows in the table of one of a model's n-gram memories.

    The sizes of all hash tables are consecutive primes from `base` on, `hashes` primes for each
    memory. The rows are the sum of the memory's primes, rounded up to a multiple of `divisor`.

    Args:
        base: Smallest size of a hash table.
        hashes: Hash tables of one memory.
        index: Index of the memory in the model, from 0.
        divisor: Number of which the rows are a multiple.
    """
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


class Convolutions(Sublayer, frozen=True, tag="convolutions"):
    """Causal depthwise convolutions without projections, all with one kernel size.

    Attributes:
        channels: Name → number of channels.
        conv_kernel: Taps of each convolution, in tokens.
        bias: Whether each channel has a bias.
        weighted: False for a plain delay without weights.
        columns: Stored columns per channel; kernel − 1 by default. More columns are stored if later
            convolutions have no state.
    """

    channels: dict[str, Size]
    conv_kernel: Size
    bias: bool = False
    weighted: bool = True
    columns: Size | None = None

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return the weight vector of each convolution.

        It has conv_kernel elements per channel, and one more if there is a bias. The result is
        empty if `weighted` is False.

        Args:
            hidden_size: Not used, because each convolution states its channels.
        """
        if not self.weighted:
            return ()
        return tuple(
            vector(name, width * (self.conv_kernel + self.bias), shards=width)
            for name, width in self.channels.items()
        )

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the state of each convolution, as one cache entry: its last `columns` inputs.

        By default `columns` is conv_kernel − 1.
        """
        kernel = self.columns + 1 if self.columns else self.conv_kernel
        if kernel == 1:
            return ()
        return tuple(conv_state(width, 1, kernel) for width in self.channels.values())


class ShortConv(RecurrentMixer, frozen=True, tag="short_conv"):
    """The gated short convolution of LFM2: a depthwise convolution between two gates.

    Attributes:
        width: Number of channels.
        conv_kernel: Taps of the convolution, in tokens.
        bias: Whether convolution and projections have biases.
    """

    LETTERS: ClassVar[str] = "W=width kc=conv_kernel bc=bias"
    LABEL: ClassVar[str] = "ShortConv"
    STATES: ClassVar[str] = "conv: W × 1 × kc"
    WEIGHTS: ClassVar[str] = """
        in: D × 3·W / W, bias bias
        conv: W·kc + W·bc / W
        out: W × D / W, bias bias
    """

    width: Size
    conv_kernel: Size = 3
    bias: bool = False
