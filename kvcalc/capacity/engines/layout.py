"""The layout of one GPU's cache memory, and the capacity that follows from it.

A `CacheLayout` gives the bytes that the GPU of a pipeline stage allocates for a number of sequences
of a length. The maximum number of sequences and the maximum length follow from it.

Its input is every layer with a cache, each entry in the engine's format. Engines have pages for
keys and values, latents, index keys and states. Other entries are refused here, so no engine
mistakes an unknown variant for a known one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.arithmetic import maximum, minimum
from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry, Keeps, Span
from kvcalc.model.model import Layer, Model
from kvcalc.records import Record
from kvcalc.storage.formats import RowFormat
from kvcalc.units import MAX_TOKENS

PAGES = (
    ("k", "v"),
    ("latent",),
    ("latent", "rope_key"),
)  # roles that make up one token's row
STATES = ("conv_state", "recurrent_state")


class StoredEntry(NamedTuple):
    """A cache entry on one rank: `heads` units of its width, in `format`."""

    entry: CacheEntry
    heads: int
    format: RowFormat

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on this rank."""
        return self.heads * self.format.row_bytes(self.entry.width)


StoredPart = tuple[StoredEntry, ...]


class LayerCache(NamedTuple):
    """One layer: its model and kind, its pipeline stage, and the stored entries of its parts."""

    model: Model
    kind: str
    stage: int
    parts: tuple[StoredPart, ...]

    @property
    def layer(self) -> Layer:
        return self.model.kinds[self.kind]


class Pages(NamedTuple):
    """The stored entries of one part: rows of each token with index keys, or states."""

    rows: StoredPart
    index_keys: StoredPart
    states: StoredPart

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, index keys apart."""
        return sum(s.row_bytes for s in self.rows)

    @property
    def index_bytes(self) -> int:
        """Bytes of one token's index keys."""
        return sum(s.row_bytes for s in self.index_keys)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(s.entry.limit * s.row_bytes for s in self.states)

    @property
    def limit(self) -> int:
        """Tokens of the window or chunk; 0 for none."""
        return self.rows[0].entry.limit if self.rows else 0

    @property
    def chunked(self) -> bool:
        """Whether the limit is that of a chunk."""
        return bool(self.rows) and self.rows[0].entry.span is Span.CHUNK

    @property
    def latent(self) -> bool:
        """Whether the rows are latents, one for all heads."""
        return any(s.entry.role == "latent" for s in self.rows)


def counted(held: Iterable[LayerCache], stage: int) -> list[tuple[LayerCache, int]]:
    """The different layers of a pipeline stage, in order, and how many there are of each."""
    here = [h for h in held if h.stage == stage]
    count = Counter(id(h.parts) for h in here)
    return [(h, count[key]) for key, h in {id(h.parts): h for h in here}.items()]


def pages(engine: str, held: LayerCache, shared: bool = False) -> list[Pages]:
    """Return the stored entries of each part of a layer.

    Args:
        shared: Whether to include parts that share another layer's cache.

    Raises:
        UserError: The engine has no pages for an entry. The message names the layer.
    """
    results = []
    for part in () if held.layer.shares_cache and not shared else held.parts:
        entries = [s.entry for s in part]
        if why := unknown(entries):
            raise UserError(
                f"{engine} has no pages for {held.layer.label or held.kind} of "
                f"{held.model.name}: {why}",
                hint="Engine none counts its content",
            )
        states = tuple(s for s in part if s.entry.span is Span.STATE)
        index = tuple(s for s in part if s.entry.role == "index_key")
        rows = tuple(s for s in part if s not in (*states, *index))
        results.append(Pages(rows, index, states))
    return results


def unknown(entries: Sequence[CacheEntry]) -> str:
    """Why the entries of one part are no pages that any engine here knows, in a clause; '' where
    they are.

    Known: rows of one token each, of the roles in PAGES, in the cache's dtype, all of them under
    one limit that keeps the last; at most one index key per token beside them; or states of the
    roles in STATES.
    """
    for e in entries:
        if e.is_stored_by_other_layer:
            return f"it reads {_words(e)} rows of another layer"
        if e.span in (Span.PARTIAL, Span.OVERLAP):
            return "it keeps blocks of tokens that are not compressed yet"
        if e.ratio > 1:
            return f"one {_words(e)} row stands for {e.ratio} tokens"
        if e.keeps is not Keeps.LAST:
            return f"the {_words(e)} rows that it keeps are not the last ones"
        if (e.span is Span.STATE) != (e.role in STATES):
            return f"it keeps {_words(e)} rows" + (
                " whatever the length" if e.span is Span.STATE else ""
            )
        if e.dtype and e.span is not Span.STATE:
            return f"its {_words(e)} rows are {e.dtype} whatever the cache's dtype"
    rows = [e for e in entries if e.span is not Span.STATE and e.role != "index_key"]
    index = [e for e in entries if e.role == "index_key"]
    if len(rows) + len(index) not in (0, len(entries)):
        return "it keeps a state beside rows of tokens"
    if (rows or index) and tuple(sorted(e.role for e in rows)) not in PAGES:
        return f"it keeps {' + '.join(map(_words, rows)) or 'index key'} rows"
    if len({(e.limit, e.span) for e in rows}) > 1:
        return "its rows have different limits"
    if len(index) > 1 or any(e.limit for e in index):
        return "its index keys are not one for every token"
    return ""


def _words(entry: CacheEntry) -> str:
    return entry.role.replace("_", " ")


class BlockDemand(NamedTuple):
    """A share of one sequence's bytes: unit · (⌈min(tokens, cap)/block⌉ + extra). cap −1 is no cap;
    cause names the cap."""

    unit: int
    block: int
    cap: int = -1
    extra: int = 0
    cause: str = ""

    def count(self, tokens: int) -> int:
        """Blocks of a sequence of so many tokens."""
        return (
            -(-(min(tokens, self.cap) if self.cap >= 0 else tokens) // self.block) + self.extra
        )


class CacheLayout:
    """How one GPU's cache memory is laid out. Engines subclass it; figures that an engine has not
    are None."""

    block_size: int | None = None
    page_bytes: int | None = None
    bytes_per_block: int | None = None
    notes: tuple[str, ...] = ()

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The least budget with which `sequences` sequences of `length` tokens fit, their first
        `shared` tokens common."""
        raise NotImplementedError

    def pool(self, budget: int) -> int:
        """The bytes that the engine takes of a budget."""
        return budget

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        """The bytes that the engine allocates for the cache, given a budget and what it is to
        hold."""
        return self.pool(budget)

    def parts(self, sequences: int, length: int) -> dict[str, int]:
        """Buffers that the engine logs apart, by the record's key."""
        return {}

    def num_blocks(self, budget: int) -> int | None:
        """Blocks in the pool."""
        return None

    def request_blocks(self, length: int) -> int | None:
        """Blocks that one sequence of `length` tokens may hold."""
        return None

    def concurrency(self, budget: int, length: int) -> float:
        """Sequences of `length` tokens in the pool, as a fraction: pool ÷ what one needs."""
        one = self.needed(1, length)
        return self.pool(budget) / one if one else 0.0

    def tokens(self, budget: int, length: int) -> int:
        """Tokens in the pool, in sequences of `length`: int(concurrency · length)."""
        return int(self.concurrency(budget, length) * length)

    def terms(self) -> Sequence[BlockDemand]:
        """One sequence's bytes as a sum of terms."""
        return ()

    def request_pool(self, budget: int) -> int:
        """Return the bytes of the pool that requests may take."""
        return self.pool(budget) - self.needed(0, 0)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        """Return the pool's bytes that one request takes, for an array of its numbers of tokens."""
        import numpy as np

        taken = np.zeros(tokens.size, dtype=np.int64)
        for term in self.terms():
            counted = np.minimum(tokens, term.cap) if term.cap >= 0 else tokens
            taken += term.unit * (-(-counted // term.block) + term.extra)
        return taken

    def breakpoints(self) -> list[Record]:
        """One sequence's cost as fixed + slope·tokens, in whole blocks, from each breakpoint on."""
        return segments(self.terms())

    def describe(self, length: int) -> list[str]:
        """The layout with the numbers put in, a line each."""
        return []

    def most_sequences(self, budget: int, length: int, shared: int = 0) -> int:
        """The most sequences of `length` tokens whose bytes are within the pool."""
        return reached(lambda n: self.needed(n, length, shared), self.pool(budget))

    def many_sequences(self, budgets: Any, length: int, shared: int = 0) -> Any:
        """`most_sequences` of each of an array of budgets, as int64; of equal ones once."""
        import numpy as np

        distinct, places = np.unique(budgets, return_inverse=True)
        sequences = [self.most_sequences(int(budget), length, shared) for budget in distinct]
        return np.array(sequences, dtype=np.int64)[places].reshape(budgets.shape)

    def most_beside(self, memory: int, length: int) -> int:
        """Return the sequences of `length` tokens that fit in `memory` bytes outside an existing
        pool; 0 if they need none."""
        empty = self.needed(0, length)
        return (
            largest(lambda n: self.needed(n, length) - empty <= memory)
            if self.needed(1, length) > empty
            else 0
        )

    def longest(self, budget: int, sequences: int, shared: int = 0) -> int | None:
        """Return the maximum length of concurrent sequences in the pool; None without a limit."""
        result = reached(lambda s: self.needed(sequences, s, shared), self.pool(budget))
        return None if result == MAX_TOKENS else result


class BlockPool(CacheLayout):
    """A pool of equal blocks.

    Attributes:
        unit: Bytes of a block.
        demands: Blocks of one sequence, for each group of layers that takes its own.
        null_blocks: Placeholders that no sequence gets.
    """

    unit: int
    demands: Sequence[BlockDemand]
    null_blocks = 0

    def num_blocks(self, budget: int) -> int:
        """Return ⌊budget / unit⌋, null blocks included. A stage without cached layers has only
        those."""
        return budget // self.unit if self.unit else self.null_blocks

    def request_blocks(self, length: int) -> int:
        return sum(demand.count(length) for demand in self.demands)

    def _blocks(self, length: int, shared: int) -> tuple[int, int]:
        """Return the blocks that all sequences share, and the blocks of each sequence.

        Shared are the full blocks of a common prefix, once per group without a window.
        """
        common = sum(min(shared, length) // d.block for d in self.demands if d.cap < 0)
        return common, self.request_blocks(length) - common

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        common, own = self._blocks(length, shared)
        return self.unit * (self.null_blocks + common + sequences * own)

    def most_sequences(self, budget: Any, length: int, shared: int = 0) -> Any:
        common, own = self._blocks(length, shared)
        free = self.num_blocks(budget) - self.null_blocks - common
        if own and self.unit:
            return maximum(0, minimum(MAX_TOKENS, free // own))
        return MAX_TOKENS if free >= 0 or not self.unit else 0

    def many_sequences(self, budgets: Any, length: int, shared: int = 0) -> Any:
        _, own = self._blocks(length, shared)
        method = self.most_sequences if own and self.unit else super().many_sequences
        return method(budgets, length, shared)

    def pool(self, budget: int) -> int:
        return self.num_blocks(budget) * self.unit

    def concurrency(self, budget: int, length: int) -> float:
        """Return num_blocks ÷ blocks per request. vLLM's log does not subtract the null block."""
        own = self.request_blocks(length)
        return self.num_blocks(budget) / own if own else 0.0

    def terms(self) -> Sequence[BlockDemand]:
        return self.demands


def largest(fits: Callable[[int], bool], most: int = MAX_TOKENS) -> int:
    """The largest number from 0 to `most` that fits, where whatever is below a number that fits
    does too."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def reached(cost: Callable[[int], int], pool: int, most: int = MAX_TOKENS) -> int:
    """The largest number from 0 to `most` whose cost is within a pool, 0 where none is; a cost
    never falls.

    As `largest`, in few steps where the cost is nearly a line: on the line through both ends, and
    in the middle every third.
    """
    low, high, under, over = 0, most, cost(0), cost(most)
    if over <= pool:
        return most
    step = 0
    while high - low > 1:
        step += 1
        middle = (
            low + (pool - under) * (high - low) // (over - under)
            if step % 3 and under <= pool
            else (low + high) // 2
        )
        middle = min(max(middle, low + 1), high - 1)
        value = cost(middle)
        if value <= pool:
            low, under = middle, value
        else:
            high, over = middle, value
    return low


def segments(terms: Sequence[BlockDemand]) -> list[Record]:
    """Terms as pieces: from so many tokens on, bytes = fixed + slope · tokens (tokens in whole
    blocks).

    The slope is a whole number of bytes where it is one, else a fraction as a float.
    """
    caps: dict[int, str] = {0: ""}
    for term in terms:
        if term.cap > 0:
            caps[term.cap] = term.cause
    results = []
    for start, cause in sorted(caps.items()):
        growing = [t for t in terms if t.cap < 0 or t.cap > start]
        full = [t for t in terms if 0 <= t.cap <= start]
        slope = sum((Fraction(t.unit, t.block) for t in growing), Fraction(0))
        fixed = sum(t.unit * t.count(t.cap) for t in full) + sum(
            t.unit * t.extra for t in growing
        )
        results.append(
            {
                "from_tokens": start,
                "fixed_bytes": fixed,
                "bytes_per_token": int(slope) if slope.denominator == 1 else float(slope),
                "block_tokens": max((t.block for t in growing), default=1),
                "cause": cause,
            }
        )
    return results
