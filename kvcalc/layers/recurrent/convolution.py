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

from kvcalc.layers.cache import CacheEntries
from kvcalc.layers.cost import Operator
from kvcalc.layers.part import Size, Sublayer, Tokens
from kvcalc.layers.passes import Pass
from kvcalc.layers.recurrent.delta_rule import RecurrentMixer, conv_state
from kvcalc.layers.weights import Weights, vector


class NgramMemory(Sublayer, frozen=True, tag="ngram_memory"):
    """An n-gram memory: a lookup table by the last tokens, projections and a convolution.

    The last few token ids (the n-gram) are hashed in several ways, and each hash selects one row of
    the table. From these rows the layer projects one value, and one key per residual stream. A
    dilated convolution over tokens follows. The fields are the keys of such a layer part in a model
    preset, a YAML file.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides it into H units. `norm: d` is an undivided vector of d
            elements. `table` is a lookup table. Tensor parallelism divides its rows.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        table_rows: Rows of the table.
        table_width: Elements of a row.
        hashes: Rows that each token reads.
        streams: Number of residual streams.
        hidden_size: Width of a residual stream, equal to the model's hidden size.
        conv_kernel: Taps of the convolution.
        dilation: Distance in tokens between two taps.
    """

    LETTERS = "R=table_rows w=table_width h=hashes ns=streams C=hidden_size kc=conv_kernel"
    WEIGHTS = """
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
        """Return this memory's operators in a forward pass, with costs of one layer on one GPU.

        In order: the table lookup, the projections of the rows, and the convolution.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        read = p.tokens * self.hashes * self.table_width
        return [p.vector("ngram_lookup", 0, read, 0, read * p.element), *super().operators(p)]

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one entry, for the convolution's state.

        The state is the inputs of the last (conv_kernel − 1) · dilation tokens, with streams ·
        hidden_size channels per token.
        """
        return (
            conv_state(
                1, self.streams * self.hidden_size, (self.conv_kernel - 1) * self.dilation + 1
            ),
        )


class Engram(Sublayer, frozen=True, tag="engram"):
    """An Engram memory: a lookup table, and a projection of the rows that a token reads.

    The last few token ids (the n-gram) are hashed in several ways, and each hash selects one row of
    the table. From these rows the layer projects one value, and one key per residual stream. The
    fields are the keys of such a layer part in a model preset, a YAML file.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides it into H units. `norm: d` is an undivided vector of d
            elements. `table` is a lookup table. Tensor parallelism divides its rows.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        table_rows: Rows of the table.
        table_width: Elements of a row.
        hashes: Rows that each token reads.
        streams: Number of residual streams.
    """

    LETTERS = "R=table_rows w=table_width h=hashes ns=streams"
    WEIGHTS = """
        engram_table: R × w / R, table
        engram_kv: h·w × ns·D + D
        engram_scales: 2·ns·D
    """

    table_rows: Tokens
    table_width: Size
    hashes: Size
    streams: Size

    def operators(self, p: Pass) -> list[Operator]:
        """Return this memory's operators in a forward pass, with costs of one layer on one GPU.

        In order: the table lookup, the projection of the rows, and the addition of gated values to
        the residual streams.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        read = p.tokens * self.hashes * self.table_width
        w = self.local_weights(p)
        lookup = p.vector(
            "engram_lookup",
            0,
            read,
            0,
            p.tokens * self.hashes * p.formats.row_bytes(w["engram_table"]),
        )
        gates = p.activation("engram_gate", p.tokens * self.streams * p.width, 2)
        return [lookup, p.gemm("engram_kv", w["engram_kv"]), gates]


def ngram_rows(base: int, hashes: int, index: int, divisor: int) -> int:
    """Return the number of rows in the lookup table of one n-gram memory of a model.

    A memory has `hashes` hash tables, which are joined to one lookup table. The sizes of the hash
    tables of all memories are consecutive primes from `base` on. Example: base 10 and 2 hashes give
    the sizes 11 and 13 for memory 0, which are 24 rows, and 17 and 19 for memory 1, which are 36.
    The sum is rounded up to a multiple of `divisor`.

    Args:
        base: Lower bound of the smallest hash table's size, in rows.
        hashes: Number of hash tables of one memory.
        index: Index of the memory in the model, from 0.
        divisor: Number of which the result is a multiple.
    """
    return -(-sum(_primes(base, hashes * (index + 1))[hashes * index :]) // divisor) * divisor


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

    Some models apply them to keys, values or the output of a sublayer. The fields are the keys of
    such a layer part in a model preset, a YAML file.

    Attributes:
        channels: Name of each convolution → its number of channels.
        conv_kernel: Taps of each convolution, in tokens.
        bias: Whether each channel has a bias.
        weighted: False for a plain delay by conv_kernel − 1 tokens, which has no weights.
        columns: Past tokens whose inputs the cache stores per channel; null for conv_kernel − 1. It
            is larger if the state also serves convolutions that follow.
    """

    channels: dict[str, Size]
    conv_kernel: Size
    bias: bool = False
    weighted: bool = True
    columns: Size | None = None

    def weights(self, hidden_size: int) -> Weights:
        """Return one weight vector for each convolution; an empty tuple if `weighted` is False.

        A vector has conv_kernel elements per channel, and one more per channel if there is a bias.

        Args:
            hidden_size: Not used, because each convolution states its channels.
        """
        if not self.weighted:
            return ()
        return tuple(
            vector(name, width * (self.conv_kernel + self.bias), shards=width)
            for name, width in self.channels.items()
        )

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one entry per convolution, for its state.

        A state is the inputs of the last `columns` tokens, by default of conv_kernel − 1 tokens.
        The result is empty if that is 0 tokens.
        """
        kernel = self.columns + 1 if self.columns else self.conv_kernel
        if kernel == 1:
            return ()
        return tuple(conv_state(width, 1, kernel) for width in self.channels.values())


class ShortConv(RecurrentMixer, frozen=True, tag="short_conv"):
    """The gated short convolution of LFM2: a depthwise convolution between two gates.

    Attributes:
        WEIGHTS: A line per weight, such as `q: D × H·d / H`: matrix q has D inputs and H·d outputs,
            and tensor parallelism divides the outputs into H units. If a matrix has D outputs, the
            inputs are divided instead. `norm: d` is an undivided vector of d elements. `bias f`
            adds a bias if field f is set.
        LETTERS: The field that each letter of a size stands for. D is the hidden size.
        STATES: State of one sequence in one layer: the last kc − 1 inputs of W channels.
        LABEL: Printed name.
        width: Number of channels.
        conv_kernel: Taps of the convolution, in tokens.
        bias: Whether convolution and projections have biases.
    """

    LETTERS = "W=width kc=conv_kernel bc=bias"
    LABEL = "ShortConv"
    STATES = "conv: W × 1 × kc"
    WEIGHTS = """
        in: D × 3·W / W, bias bias
        conv: W·kc + W·bc / W
        out: W × D / W, bias bias
    """

    width: Size
    conv_kernel: Size = 3
    bias: bool = False
