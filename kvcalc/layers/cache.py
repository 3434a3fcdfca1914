"""Cache entries: what one layer keeps of one sequence, as data. Stored, read and allocated rows follow from them alone."""

from enum import StrEnum

import msgspec

from kvcalc.layers.ranks import Parallelism
from kvcalc.units import Num, at_least, ceil_div, floor_div, minimum


class Span(StrEnum):
    """How an entry's rows grow with the tokens cached."""

    TOKENS = "tokens"  # one row for every `ratio` tokens, `limit` rows at most
    CHUNK = "chunk"  # the same, but a query sees only the chunk of `limit` tokens that it stands in
    STATE = "state"  # `limit` rows whatever the length
    PARTIAL = "partial"  # the tokens of the unfinished block of `ratio`
    OVERLAP = "overlap"  # the last finished block of `ratio`, once there is one


class Keeps(StrEnum):
    """Which rows a limit leaves."""

    LAST = "last"
    SINKS = "sinks"  # the first few tokens, and the last
    CHOSEN = "chosen"  # those that eviction scores highest


class CacheEntry(msgspec.Struct, frozen=True):
    """Rows of one role that a layer caches for a sequence; a row has `heads` units of `width` elements.

    role: k, v, latent, rope_key, index_key, conv_state, recurrent_state, hidden or compressor.
    heads: units that tensor parallelism divides; fewer heads than ranks are replicated.
    limit: rows at most (window, budget), the chunk, or the rows of a state; 0 means no limit.
    keeps: the rows that a limit leaves.
    top: rows that one query reads at most (top-k); 0 means all that it may see.
    dtype: the format that the model fixes for this state; '' follows the cache's dtype. assumed: the model fixes none, and
    another program may choose another.
    lent: another layer stores these rows; this one reads them.
    """

    role: str
    heads: int
    width: int
    ratio: int = 1
    limit: int = 0
    top: int = 0
    span: Span = Span.TOKENS
    dtype: str = ""
    keeps: Keeps = Keeps.LAST
    assumed: bool = False
    lent: bool = False

    @property
    def grows(self) -> bool:
        """Whether rows come with tokens, without end or up to a limit."""
        return self.span in (Span.TOKENS, Span.CHUNK)

    def spread(self, ranks: Parallelism) -> int:
        """Ranks that share this entry's tokens: decode-context parallelism leaves windows and states whole."""
        return ranks.dcp if self.grows and not self.limit else 1

    def stored_rows(self, tokens: Num) -> Num:
        """Rows held after `tokens` tokens of one sequence: ⌊tokens/ratio⌋, at most `limit`."""
        if self.grows:
            rows = floor_div(tokens, self.ratio)
            return minimum(rows, self.limit) if self.limit else rows
        if self.span is Span.STATE:
            return self.limit
        return tokens % self.ratio if self.span is Span.PARTIAL else self.ratio * at_least(tokens, self.ratio)

    def allocated_rows(self, tokens: Num, block_size: int) -> Num:
        """`stored_rows` in whole blocks."""
        return self.in_blocks(self.stored_rows(tokens), block_size)

    def in_blocks(self, rows: Num, block_size: int) -> Num:
        """`rows` in whole blocks of `block_size` tokens, each of at least one row. State is not paged."""
        if not self.grows:
            return rows
        rows_per_block = max(1, block_size // self.ratio)
        return ceil_div(rows, rows_per_block) * rows_per_block

    def read_rows(self, new: Num, past: Num) -> Num:
        """Rows that a pass of `new` tokens over `past` cached ones reads, its own included, each once.

        A window shows min(past, limit − 1) + new rows to a group of queries, a chunk every row since the start of the first
        chunk that they touch, a top-k at most `new · top`. A state is read once. Block buffers are read when the pass
        finishes a block.
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
        return minimum(rows, self.top * new) if self.top else rows

    def written_rows(self, new: Num, past: Num) -> Num:
        """Rows that a pass of `new` tokens over `past` cached ones writes: every one that it adds.

        A row that a later token of the pass pushes out of a window is written all the same: a query between them reads it.
        """
        tokens = new + past
        if self.span is Span.STATE:
            return self.limit
        if self.span is Span.PARTIAL:
            return minimum(new, tokens % self.ratio)
        finished = floor_div(tokens, self.ratio) - floor_div(past, self.ratio)
        if self.span is Span.OVERLAP:
            return self.ratio * at_least(finished, 1)
        return finished

    def full_from(self) -> int:
        """The token count from which this entry no longer grows; 0 for one that never does, −1 for one that always does."""
        if not self.grows:
            return 0
        return self.limit * self.ratio if self.limit else -1
