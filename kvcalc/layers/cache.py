"""Cache entries: the rows that one layer stores for one sequence, as data.

Stored, read and allocated rows follow from an entry.
"""

from enum import StrEnum

import msgspec

from kvcalc.arithmetic import Num, at_least, ceil_div, floor_div, minimum
from kvcalc.layers.batch import Parallelism


class Span(StrEnum):
    """How the number of cached rows depends on the number of tokens of a sequence.

    `ratio` (tokens per row) and `limit` (maximum rows) are fields of `CacheEntry`.

    Attributes:
        TOKENS: One row for every `ratio` tokens, at most `limit` rows; 0 is no limit.
        CHUNK: As TOKENS, but a query reads only the rows of its own chunk of `limit` tokens.
        STATE: Always `limit` rows, as in a recurrent state.
        PARTIAL: A buffer with one row for each token of the unfinished block of `ratio` tokens,
            until the block is compressed.
        OVERLAP: A buffer with the `ratio` rows of the last finished block, which the next block
            needs if blocks overlap; no rows before a block is finished.
    """

    TOKENS = "tokens"  # one row for every `ratio` tokens, at most `limit` rows
    CHUNK = "chunk"  # as `tokens`, but a query sees only its own chunk of `limit` tokens
    STATE = "state"  # `limit` rows at every length
    PARTIAL = "partial"  # the tokens of the unfinished block of `ratio`
    OVERLAP = "overlap"  # the last finished block of `ratio`, once there is one


class EvictionRule(StrEnum):
    """Which rows a cache entry keeps if its sequence has more rows than `limit`.

    kvcalc's layouts of engines with a paged cache support only LAST.

    Attributes:
        LAST: The last rows, as in a sliding window.
        SINKS: The first few tokens and the last tokens.
        SCORED: The tokens with the highest eviction scores.
    """

    LAST = "last"
    SINKS = "sinks"  # the first few tokens, and the last
    SCORED = "scored"  # the tokens with the highest eviction scores


class CacheEntry(msgspec.Struct, frozen=True):
    """The rows of one role, such as keys, that one layer caches for one sequence.

    A row has `heads` · `width` elements.

    Attributes:
        role: What a row is: k, v, latent, rope_key, index_key, conv_state, recurrent_state,
            compressor (a buffer of an unfinished block), or score (of an eviction policy).
        heads: Units of a row, such as KV heads. Tensor parallelism divides the units. If there are
            fewer units than ranks, the units are replicated.
        width: Elements of one unit, such as the head dimension.
        ratio: Tokens per row.
        limit: Maximum number of rows (window, budget, chunk, rows of a state); 0 for no limit.
        max_rows_per_query: Maximum rows that one query reads (top-k); 0 for all visible rows.
        span: How the number of rows depends on the number of tokens.
        dtype: Storage format that the model fixes for this entry; '' for the format of the KV
            cache.
        eviction_rule: Which rows remain if the limit is reached.
        has_assumed_dtype: Whether `dtype` is an assumption, so an engine may use another dtype.
        is_stored_by_other_layer: Whether this layer only reads the rows, and another layer stores
            them.
    """

    role: str
    heads: int
    width: int
    ratio: int = 1
    limit: int = 0
    max_rows_per_query: int = 0
    span: Span = Span.TOKENS
    dtype: str = ""
    eviction_rule: EvictionRule = EvictionRule.LAST
    has_assumed_dtype: bool = False
    is_stored_by_other_layer: bool = False

    @property
    def grows(self) -> bool:
        """Return whether more tokens of the sequence can add rows, up to `limit` if there is one.

        Only such rows are stored in paged blocks. The result is False for recurrent states and for
        buffers of unfinished blocks, whose size is bounded.
        """
        return self.span in (Span.TOKENS, Span.CHUNK)

    def spread(self, ranks: Parallelism) -> int:
        """Return the number of ranks among which this entry's tokens are divided.

        Each rank stores an equal part of the rows. The number is dcp (decode-context parallelism)
        for an entry that grows without limit. It is 1 for windows and states, which dcp does not
        divide.

        Args:
            ranks: Number of ranks of each kind of parallelism.
        """
        return ranks.dcp if self.grows and not self.limit else 1

    def stored_rows(self, tokens: Num) -> Num:
        """Return the number of this entry's rows that one layer stores for one sequence.

        It is the number before rows are divided among ranks. It depends on `span`: ⌊tokens/ratio⌋
        but at most `limit` for TOKENS and CHUNK, `limit` for STATE, tokens mod ratio for PARTIAL,
        and for OVERLAP `ratio`, or 0 below `ratio` tokens.

        Args:
            tokens: Tokens of the sequence in the cache.
        """
        if self.grows:
            rows = floor_div(tokens, self.ratio)
            return minimum(rows, self.limit) if self.limit else rows
        if self.span is Span.STATE:
            return self.limit
        if self.span is Span.PARTIAL:
            return tokens % self.ratio
        return self.ratio * at_least(tokens, self.ratio)

    def allocated_rows(self, tokens: Num, block_size: int) -> Num:
        """Return the number of rows that a paged cache allocates in one layer for one sequence.

        The result is `stored_rows(tokens)`, rounded up to whole cache blocks.

        Args:
            tokens: Tokens of the sequence in the cache.
            block_size: Tokens of a cache block.
        """
        return self.in_blocks(self.stored_rows(tokens), block_size)

    def in_blocks(self, rows: Num, block_size: int) -> Num:
        """Return `rows` rounded up to a whole number of cache blocks.

        A block has block_size // ratio rows, at least 1. The rows of states and block buffers are
        not paged, so they stay unchanged.

        Args:
            rows: Number of stored rows.
            block_size: Tokens of a cache block.
        """
        if not self.grows:
            return rows
        rows_per_block = max(1, block_size // self.ratio)
        return ceil_div(rows, rows_per_block) * rows_per_block

    def read_rows(self, new: Num, past: Num) -> Num:
        """Return the number of distinct rows of one sequence that one layer reads in one pass.

        The rows that the pass itself writes are included. All queries together read at most limit −
        1 + new rows of a window, and at most new · max_rows_per_query rows with top-k selection.
        With chunks, they read every row since the start of the first query's chunk. A state is read
        once. Buffers of blocks are read only if the pass finishes a block.

        Args:
            new: New tokens of the sequence.
            past: Tokens of the sequence that are cached before the pass.
        """
        tokens = new + past
        if self.span is Span.STATE:
            return self.limit
        if not self.grows:
            finishes = at_least(floor_div(tokens, self.ratio) - floor_div(past, self.ratio), 1)
            return finishes * self.stored_rows(past)
        rows = floor_div(tokens, self.ratio)
        if self.span is Span.CHUNK:
            rows = tokens - floor_div(past, self.limit) * self.limit
        elif self.limit:
            rows = minimum(rows, self.limit - 1 + new)
        if self.max_rows_per_query:
            rows = minimum(rows, self.max_rows_per_query * new)
        return rows

    def written_rows(self, new: Num, past: Num) -> Num:
        """Return the number of rows of one sequence that one layer writes in one forward pass.

        It is one row for each `ratio` tokens that are completed, or all `limit` rows of a state. In
        a window, rows that a later token of the same pass evicts also count, because queries in
        between still read them. In a buffer of a block, only rows that stay after the pass count.

        Args:
            new: New tokens of the sequence.
            past: Tokens of the sequence that are cached before the pass.
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
        """Return the number of tokens in a sequence from which on this entry gets no more rows.

        The result is limit · ratio: a window of 4,096 tokens gives 4,096. It is 0 for a state or a
        block buffer, and −1 for an entry without a limit, which always grows. At these numbers of
        tokens, the bytes that one more token adds to the cache decrease.
        """
        if not self.grows:
            return 0
        return self.limit * self.ratio if self.limit else -1


CacheEntries = tuple[CacheEntry, ...]
