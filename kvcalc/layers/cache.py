"""Cache entries: the rows that one layer stores for one sequence, as data.

Stored, read and allocated rows follow from an entry.
"""

from enum import StrEnum

import msgspec

from kvcalc.arithmetic import Num, at_least, ceil_div, floor_div, minimum
from kvcalc.layers.batch import Parallelism


class Span(StrEnum):
    """How the rows of an entry grow with cached tokens."""

    TOKENS = "tokens"  # one row for every `ratio` tokens, at most `limit` rows
    CHUNK = "chunk"  # as `tokens`, but a query sees only its own chunk of `limit` tokens
    STATE = "state"  # `limit` rows at every length
    PARTIAL = "partial"  # the tokens of the unfinished block of `ratio`
    OVERLAP = "overlap"  # the last finished block of `ratio`, once there is one


class EvictionRule(StrEnum):
    """Which rows a limit keeps: the last rows, the first and last rows, or the rows with the
    highest scores."""

    LAST = "last"
    SINKS = "sinks"  # the first few tokens, and the last
    SCORED = "scored"  # the tokens with the highest eviction scores


class CacheEntry(msgspec.Struct, frozen=True):
    """Rows of one role that a layer caches for a sequence. A row has `heads` units of `width`
    elements.

    Attributes:
        role: k, v, latent, rope_key, index_key, conv_state, recurrent_state or compressor.
        heads: Units that tensor parallelism divides. Fewer heads than ranks are replicated.
        limit: Maximum number of rows (window, budget, chunk, rows of a state); 0 for no limit.
        eviction_rule: Which rows remain if the limit is reached.
        max_rows_per_query: Maximum rows that one query reads (top-k); 0 for all visible rows.
        dtype: Format that the model fixes for this state; '' follows the dtype of the cache.
        has_assumed_dtype: Whether the model fixes no dtype, so another engine may use another.
        is_stored_by_other_layer: Whether this layer only reads these rows.
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
        """Return whether tokens add rows, up to a limit or without one."""
        return self.span in (Span.TOKENS, Span.CHUNK)

    def spread(self, ranks: Parallelism) -> int:
        """Return the ranks that share this entry's tokens. Decode context parallelism does not
        split windows and states."""
        return ranks.dcp if self.grows and not self.limit else 1

    def stored_rows(self, tokens: Num) -> Num:
        """Return the number of rows stored after `tokens` tokens of one sequence: ⌊tokens/ratio⌋,
        at most `limit`."""
        if self.grows:
            rows = floor_div(tokens, self.ratio)
            return minimum(rows, self.limit) if self.limit else rows
        if self.span is Span.STATE:
            return self.limit
        if self.span is Span.PARTIAL:
            return tokens % self.ratio
        return self.ratio * at_least(tokens, self.ratio)

    def allocated_rows(self, tokens: Num, block_size: int) -> Num:
        """Return `stored_rows` rounded up to whole blocks."""
        return self.in_blocks(self.stored_rows(tokens), block_size)

    def in_blocks(self, rows: Num, block_size: int) -> Num:
        """Return `rows` in whole blocks of `block_size` tokens, each of at least one row. States
        are not paged."""
        if not self.grows:
            return rows
        rows_per_block = max(1, block_size // self.ratio)
        return ceil_div(rows, rows_per_block) * rows_per_block

    def read_rows(self, new: Num, past: Num) -> Num:
        """Return the number of distinct rows that a pass of `new` tokens after `past` cached tokens
        reads.

        The rows that the pass writes are included. A window shows min(past, limit − 1) + new rows
        to a group of queries. A chunk shows every row since the start of the first chunk that the
        queries touch. A top-k shows at most `new · max_rows_per_query`. A state is read once. Block
        buffers are read if the pass finishes a block.
        """
        tokens = new + past
        if self.span is Span.STATE:
            return self.limit
        if not self.grows:
            finishes = at_least(floor_div(tokens, self.ratio) - floor_div(past, self.ratio), 1)
            return finishes * self.stored_rows(past)
        rows: Num = floor_div(tokens, self.ratio)
        if self.span is Span.CHUNK:
            rows = tokens - floor_div(past, self.limit) * self.limit
        elif self.limit:
            rows = minimum(rows, self.limit - 1 + new)
        if self.max_rows_per_query:
            rows = minimum(rows, self.max_rows_per_query * new)
        return rows

    def written_rows(self, new: Num, past: Num) -> Num:
        """Return the number of rows that a pass of `new` tokens after `past` cached tokens writes.

        A row that a later token of the same pass evicts from a window counts too, because a query
        between them reads it.
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
        """Return the token count from which this entry no longer grows; 0 if it never grows, −1 if
        it always grows."""
        if not self.grows:
            return 0
        return self.limit * self.ratio if self.limit else -1
