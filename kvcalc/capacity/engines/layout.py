"""The layout of one GPU's cache memory, and the capacity that follows from it.

A `CacheLayout` gives the bytes that one GPU needs for some sequences of a length. The maximum
number of sequences and the maximum length follow from it.

Its input is every layer with a cache, each entry in the engine's format. Engines have pages for
keys and values, latents, index keys and states. Other entries are refused here, so no engine
mistakes an unknown variant for a known one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.arithmetic import by_number, ceil_div, maximum, minimum, where
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntries, CacheEntry, EvictionRule, Span
from kvcalc.model.memory import LayerRows, size_of, stored_bytes
from kvcalc.model.model import Layer, Model
from kvcalc.records import Record
from kvcalc.records.fit import LoggedCacheRecord
from kvcalc.storage.formats import RowFormat
from kvcalc.units import MAX_TOKENS

# roles that make up one token's row
PAGES = (("k", "v"), ("latent",), ("latent", "rope_key"))
STATES = ("conv_state", "recurrent_state")


class StoredEntry(NamedTuple):
    """A cache entry as one GPU stores it. A cache entry is a kind of stored row, such as keys.

    Attributes:
        entry: The cache entry of the model, with its role, its width per head in elements and its
            limit in tokens, such as a window.
        heads: Heads on one GPU; 1 for entries that all heads share.
        format: Format in which the engine stores the rows.
    """

    entry: CacheEntry
    heads: int
    format: RowFormat

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of all heads on one GPU: usually one token in one layer."""
        return self.heads * self.format.row_bytes(self.entry.width)


Remarks = tuple[str, ...]  # sentences for the user
StoredPart = tuple[StoredEntry, ...]


class LayerCache(NamedTuple):
    """The stored cache entries of one layer, and the layer's pipeline stage.

    Attributes:
        model: The model of the layer: the target or a draft.
        kind: Name of the layer kind, a key of `model.kinds`.
        stage: Index of the pipeline stage.
        parts: One tuple for each sublayer with a cache, such as an attention. It has the sublayer's
            stored cache entries on one GPU, such as keys and values.
    """

    model: Model
    kind: str
    stage: int
    parts: tuple[StoredPart, ...]

    @property
    def layer(self) -> Layer:
        return self.model.kinds[self.kind]


class Pages(NamedTuple):
    """The stored cache entries of one sublayer, separated by the kind of page that stores them.

    A page is the part of a block that one layer uses.

    Attributes:
        rows: Entries with one row per token: keys and values, or latents.
        index_keys: Entries with the keys of an indexer of sparse attention.
        states: Entries with a state of fixed size per sequence, as in Mamba.
    """

    rows: StoredPart
    index_keys: StoredPart
    states: StoredPart

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token in this sublayer on one GPU, without index keys."""
        return sum(stored_entry.row_bytes for stored_entry in self.rows)

    @property
    def index_bytes(self) -> int:
        """Return the bytes of one token's index keys in this sublayer on one GPU."""
        return sum(stored_entry.row_bytes for stored_entry in self.index_keys)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one sequence's states in this sublayer on one GPU."""
        return sum(
            stored_entry.entry.limit * stored_entry.row_bytes for stored_entry in self.states
        )

    @property
    def limit(self) -> int:
        """Return the tokens of the sliding window or attention chunk; 0 for full attention."""
        return self.rows[0].entry.limit if self.rows else 0

    @property
    def is_latent(self) -> bool:
        """Return whether the rows are latents (MLA), one for all heads."""
        return any(stored_entry.entry.role == "latent" for stored_entry in self.rows)


LayerCaches = Sequence[LayerCache]


def distinct_layers(layers: LayerCaches) -> list[LayerCache]:
    """Return one layer of each set with equal cache entries, of all pipeline stages."""
    return [*{id(layer.parts): layer for layer in layers}.values()]


def count_layers(layers: LayerCaches, stage: int) -> list[tuple[LayerCache, int]]:
    """Return pairs (layer, count) of each distinct layer of a pipeline stage and its repetitions.

    Layers are equal if their stored cache entries are. `count` includes the layer itself. Example:
    32 equal layers on the stage give one pair with count 32.

    Args:
        layers: All layers of the model, in order.
        stage: Index of the pipeline stage.
    """
    on_stage = [layer for layer in layers if layer.stage == stage]
    counts = Counter(id(layer.parts) for layer in on_stage)
    return [(layer, counts[id(layer.parts)]) for layer in distinct_layers(on_stage)]


def pages(engine: str, layer: LayerCache, shared: bool = False) -> list[Pages]:
    """Return a `Pages` for each sublayer of a layer: its cache entries, separated by kind.

    The kinds are rows of tokens, index keys and states. A layer that stores nothing gives [].

    Args:
        engine: Name of the engine, for the message.
        layer: The layer.
        shared: Whether a layer that reads the cache of another layer gets pages too, as in SGLang.

    Raises:
        UserError: Engines have no pages for a cache entry. The message names the model.
    """
    results = []
    for part in () if layer.layer.shares_cache and not shared else layer.parts:
        if find_unsupported(tuple(stored_entry.entry for stored_entry in part)):
            raise UserError(
                f"no memory rules of {engine} are known for {layer.model.name}",
                f"Use {'--engine vllm or ' * (engine != 'vLLM')}--engine none for its content",
            )
        states = tuple(s for s in part if s.entry.span is Span.STATE)
        index_keys = tuple(s for s in part if s.entry.role == "index_key")
        rows = tuple(s for s in part if s not in (*states, *index_keys))
        results.append(Pages(rows, index_keys, states))
    return results


def stage_pages(
    engine: str, layers: LayerCaches, stage: int, shared: bool = False
) -> list[tuple[Pages, int]]:
    """Return the pages of a pipeline stage's sublayers, and how many layers have such pages.

    The items are pairs (cache entries of a sublayer by kind of page, number of equal layers).

    Args:
        engine: Name of the engine, for the message.
        layers: All layers of the model, in order.
        stage: Index of the pipeline stage.
        shared: Whether layers that read the cache of another layer get pages too, as in SGLang.

    Raises:
        UserError: Engines have no pages for a cache entry. The message names the model.
    """
    return [
        (part, count)
        for layer, count in count_layers(layers, stage)
        for part in pages(engine, layer, shared)
    ]


def find_unsupported(entries: CacheEntries) -> str:
    """Return why engines have no pages for the cache entries of one sublayer; "" if they have.

    Engines have pages for recurrent and convolution states. They also have pages for one row of
    keys and values, or of latents, per token. Such rows have the dtype of the cache, and at most
    one limit, which keeps the last rows (a window). At most one index key per token is allowed.
    """
    for entry in entries:
        role = entry.role.replace("_", " ")
        is_state = entry.span is Span.STATE
        problems = {
            f"it reads {role} rows of another layer": entry.is_stored_by_other_layer,
            "it stores unfinished blocks": entry.span in (Span.PARTIAL, Span.OVERLAP),
            f"one {role} row stands for {entry.ratio} tokens": entry.ratio > 1,
            f"it does not keep the last {role} rows": entry.eviction_rule
            is not EvictionRule.LAST,
            f"it stores {role} rows": is_state != (entry.role in STATES),
            f"its {role} rows are always {entry.dtype}": entry.dtype and not is_state,
        }
        for problem, is_true in problems.items():
            if is_true:
                return problem
    rows = [e for e in entries if e.span is not Span.STATE and e.role != "index_key"]
    index_keys = [e for e in entries if e.role == "index_key"]
    if len(rows) + len(index_keys) not in (0, len(entries)):
        return "it stores states and rows of tokens"
    roles = tuple(sorted(entry.role for entry in rows))
    if (rows or index_keys) and roles not in PAGES:
        return f"it stores {' + '.join(roles) or 'index key'} rows"
    if len({(entry.limit, entry.span) for entry in rows}) > 1:
        return "its rows have different limits"
    if len(index_keys) > 1 or any(entry.limit for entry in index_keys):
        return "it does not store one index key per token"
    return ""


class BlockDemand(NamedTuple):
    """The KV cache of one sequence on one GPU in one group of layers: a summand of its bytes.

    The bytes are unit · (⌈min(tokens, cap) / block⌉ + extra), where tokens is the length of the
    sequence. With cap −1, the length is not limited. Example: a window of 1,000 tokens with unit
    4096, block 16 and cap 1000 needs 63 blocks, 258,048 bytes, from 1,000 tokens on.

    Attributes:
        unit: Bytes of one block on one GPU.
        block: Tokens of one block.
        cap: Length in tokens from which the bytes no longer grow, as with a sliding window; −1 for
            none.
        extra: Blocks in addition, at every length.
        cause: What limits the length, such as "window"; "" for none.
    """

    unit: int
    block: int
    cap: int = -1
    extra: int = 0
    cause: str = ""

    def count(self, tokens: Any) -> Any:
        """Return the number of blocks of one sequence of `tokens` tokens (int or integer array)."""
        if self.cap >= 0:
            tokens = minimum(tokens, self.cap)
        return -(-tokens // self.block) + self.extra


class CacheLayout:
    """How the KV cache is laid out in the memory of one GPU. Each engine has a subclass.

    A layout converts between bytes, sequences and lengths. A budget is the bytes of one GPU for the
    KV cache. The pool is the part of the budget that the engine allocates, such as whole blocks.
    Numbers of sequences are for one data-parallel rank.

    Attributes:
        block_size: Tokens of a block; None without blocks.
        page_bytes: Bytes of the largest page: a block's part that one layer uses; None if unused.
        bytes_per_block: Bytes of a block on one GPU, over all layers that share it; None if unused.
        notes: Remarks for the user.
        demands: Summands of the bytes that one sequence needs.
    """

    block_size: int | None = None
    page_bytes: int | None = None
    bytes_per_block: int | None = None
    notes: Remarks = ()
    demands: Sequence[BlockDemand] = ()

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """Return the smallest budget in bytes of one GPU that fits some sequences of equal length.

        Args:
            sequences: Number of sequences of one data-parallel rank.
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        raise NotImplementedError

    def pool(self, budget: Any) -> Any:
        """Return the bytes that the engine allocates of one GPU's budget, such as whole blocks.

        Both are bytes on one GPU: ints or integer arrays.
        """
        return budget

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        """Return the bytes of KV cache that the engine allocates on one GPU when it starts.

        Most engines allocate as much as the budget allows. llama.cpp allocates only what the
        requested sequences need.

        Args:
            budget: Bytes of the GPU for the KV cache.
            sequences: Requested sequences of one data-parallel rank.
            length: Tokens of each sequence.
        """
        return int(self.pool(budget))

    def extra_buffers(self, sequences: int, length: int) -> LoggedCacheRecord:
        """Return the bytes of those parts of one GPU's KV cache that the engine logs separately.

        The keys are in the record of `fit`, such as `window_cache_bytes`. Most engines have none.

        Args:
            sequences: Requested sequences of one data-parallel rank.
            length: Tokens of each sequence.
        """
        return {}

    def num_blocks(self, budget: int) -> int | None:
        """Return the number of blocks in one GPU's budget in bytes; None without blocks."""
        return None

    def request_blocks(self, length: int) -> int | None:
        """Return one sequence's blocks on one GPU, at `length` tokens; None without blocks."""
        return None

    def concurrency(self, budget: int, length: int) -> float:
        """Return how many sequences of `length` tokens one GPU's KV cache stores, such as 13.7.

        The result is the allocated bytes ÷ the bytes of one sequence; 0 if a sequence needs no
        bytes.

        Args:
            budget: Bytes of the GPU for the KV cache.
            length: Tokens of each sequence.
        """
        size = self.needed(1, length)
        return self.pool(budget) / size if size else 0.0

    def tokens(self, budget: int, length: int) -> int:
        """Return how many tokens one GPU's KV cache stores in all its sequences together.

        Args:
            budget: Bytes of the GPU for the KV cache.
            length: Tokens of each sequence. With windows, longer sequences need less per token.
        """
        return int(self.concurrency(budget, length) * length)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        """Return the bytes of one GPU's KV cache that a request needs at each length, as an array.

        Args:
            budget: Bytes of the GPU for the KV cache. Only SGLang's layout uses them.
            tokens: Array of lengths of the request in tokens.
        """
        return sum((d.unit * d.count(tokens) for d in self.demands), tokens * 0)

    def breakpoints(self) -> list[Record]:
        """Return the bytes of one sequence on one GPU as linear pieces: fixed + slope · tokens.

        A piece begins at each length at which a summand stops growing, such as the size of a
        sliding window. The pieces are exact for lengths in whole blocks. Round other lengths up
        first.

        Returns:
            One dict per piece: its first length `from_tokens`, `fixed_bytes`, the slope
            `bytes_per_token` (an int if it is whole, otherwise a float), `block_tokens` (tokens of
            the largest block that still grows), and `cause`: the part that stops growing at this
            length, such as "window"; "" from 0 tokens on.
        """
        causes = {0: ""} | {
            demand.cap: demand.cause for demand in self.demands if demand.cap > 0
        }
        results: list[Record] = []
        for start, cause in sorted(causes.items()):
            growing = [d for d in self.demands if d.cap < 0 or d.cap > start]
            full = [d for d in self.demands if 0 <= d.cap <= start]
            slope = sum((Fraction(d.unit, d.block) for d in growing), Fraction(0))
            fixed = sum(d.unit * d.count(d.cap) for d in full)
            results.append(
                {
                    "from_tokens": start,
                    "fixed_bytes": fixed + sum(d.unit * d.extra for d in growing),
                    "bytes_per_token": int(slope) if slope.denominator == 1 else float(slope),
                    "block_tokens": max((d.block for d in growing), default=1),
                    "cause": cause,
                }
            )
        return results

    def describe(self, length: int) -> list[str]:
        """Return how the bytes of a sequence of `length` tokens on one GPU are computed, as lines.

        Example: "2,048 blocks of 16 tokens × 2,097,152 B = 4,294,967,296 B".
        """
        lines = []
        for demand in self.demands:
            count, unit = demand.count(length), f"{demand.unit:,} B"
            blocks = (
                f"{count:,} blocks of {demand.block:,} tokens" if demand.cap else f"{count:,}"
            )
            limit = f" (limit: {demand.cause})" if demand.cause else ""
            lines.append(f"{blocks} × {unit} = {count * demand.unit:,} B{limit}")
        return lines

    def max_sequences(self, budget: Any, length: int, shared: int = 0) -> Any:
        """Return how many sequences of `length` tokens of one data-parallel rank fit in a budget.

        Args:
            budget: Bytes of one GPU for the KV cache; an int or an integer array. The result has
                its shape.
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        return by_number(
            budget,
            lambda size: largest_fitting(
                lambda n: self.needed(n, length, shared) <= self.pool(int(size))
            ),
        )

    def max_extra_sequences(self, memory: int, length: int) -> int:
        """Return how many sequences' caches fit in memory outside the GPU, such as host memory.

        The number is for one data-parallel rank. It is 0 if sequences need no bytes.

        Args:
            memory: Bytes of this other memory per GPU.
            length: Tokens of each sequence.
        """
        empty = self.needed(0, length)
        if self.needed(1, length) <= empty:
            return 0
        return largest_fitting(lambda n: self.needed(n, length) - empty <= memory)

    def max_length(self, budget: int, sequences: int, shared: int = 0) -> int | None:
        """Return the maximum tokens of each of some concurrent sequences; None without a limit.

        Args:
            budget: Bytes of one GPU for the KV cache.
            sequences: Number of concurrent sequences of one data-parallel rank.
            shared: Number of first tokens that all sequences have in common and share.
        """
        pool = self.pool(budget)
        length = largest_fitting(lambda tokens: self.needed(sequences, tokens, shared) <= pool)
        return None if length == MAX_TOKENS else length


class NoCache(CacheLayout):
    """The layout of a model without a KV cache: only `max_num_seqs` limits its sequences."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        return 0

    def max_sequences(self, budget: Any, length: int, shared: int = 0) -> Any:
        return where(budget >= 0, self.max_num_seqs, 0)


Costs = list[tuple[int, int]]  # bytes of all sequences together, and of each


class LinearLayout(CacheLayout):
    """A layout in which n sequences of equal length need common + n · own bytes on one GPU.

    A subclass states both numbers in `costs`.
    """

    def costs(self, length: int, shared: int) -> Costs:
        """Return pairs (common, own) of bytes on one GPU, which give the bytes of n sequences.

        n sequences need the maximum of common + n · own over all pairs. `common` are bytes that do
        not depend on n, such as a shared prefix. `own` are bytes of each sequence.

        Args:
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        raise NotImplementedError

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        return max(common + sequences * own for common, own in self.costs(length, shared))

    def max_sequences(self, budget: Any, length: int, shared: int = 0) -> Any:
        pool, sequences = self.pool(budget), MAX_TOKENS
        for common, own in self.costs(length, shared):
            free = pool - common
            fitting = maximum(0, free // own) if own else where(free >= 0, MAX_TOKENS, 0)
            sequences = minimum(sequences, fitting)
        return sequences


class BlockPool(LinearLayout):
    """A pool of equal blocks on one GPU, from which every KV cache group of layers takes blocks.

    Attributes:
        bytes_per_block: Bytes of a block: the pages of all layers of the largest group on a stage.
        null_blocks: Number of placeholder blocks that no sequence gets.
    """

    bytes_per_block: int
    null_blocks = 0

    def num_blocks(self, budget: Any) -> Any:
        """Return the number of blocks in a budget: ⌊budget / bytes_per_block⌋, with null blocks.

        No sequence gets the null blocks. A stage without cached layers has only these.

        Args:
            budget: Bytes of one GPU for the KV cache; an int or an integer array.
        """
        return budget // self.bytes_per_block if self.bytes_per_block else self.null_blocks

    def request_blocks(self, length: int) -> int:
        return sum(demand.count(length) for demand in self.demands)

    def costs(self, length: int, shared: int) -> Costs:
        """Return one pair (common, own) of bytes on one GPU; n sequences need common + n · own.

        `common` are the bytes of shared and placeholder blocks, `own` the bytes of one sequence's
        other blocks. Sequences share the full blocks of a common prefix. Layers with a sliding
        window or chunks share none.

        Args:
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        common = sum(min(shared, length) // d.block for d in self.demands if d.cap < 0)
        own = self.request_blocks(length) - common
        return [
            (self.bytes_per_block * (self.null_blocks + common), self.bytes_per_block * own)
        ]

    def pool(self, budget: Any) -> Any:
        return self.num_blocks(budget) * self.bytes_per_block

    def concurrency(self, budget: int, length: int) -> float:
        """Return how many sequences of `length` tokens fit in a budget in bytes, such as 13.7.

        It is the blocks of one GPU ÷ the blocks of one sequence, which vLLM logs when it starts as
        "Maximum concurrency". Like vLLM, it does not subtract the placeholder block.
        """
        blocks = self.request_blocks(length)
        return float(self.num_blocks(budget) / blocks) if blocks else 0.0


class Content(LinearLayout):
    """The content of one GPU's KV cache, without an engine's blocks, padding or reserve.

    Like every layout, it computes the bytes of n sequences. No engine needs fewer bytes.

    Args:
        rows: The cache entries (kinds of stored rows, such as keys), each with its bytes per row
            and its number of layers on the pipeline stage.
    """

    def __init__(self, rows: Iterable[LayerRows]) -> None:
        self.rows = list(rows)
        self._ratios = {r.entry.ratio for r in self.rows if r.entry.span is Span.PARTIAL}

    def costs(self, length: int, shared: int) -> Costs:
        """Return pairs (common, own) of bytes on one GPU, which give the bytes of n sequences.

        n sequences need the maximum of common + n · own over all pairs. `common` are bytes that all
        sequences share, `own` the other bytes of each sequence. Only a model that compresses blocks
        of tokens has more than one pair. A sequence may store the most just before a block is
        compressed, so this length has its own pair. Sequences share the rows of a common prefix,
        but not in layers with a sliding window.

        Args:
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        lengths = {length, *(length - (length + 1) % ratio for ratio in self._ratios)}
        growing = [r for r in self.rows if shared and r.entry.grows and not r.entry.limit]
        results = []
        for tokens in lengths:
            if tokens >= 0:
                common = stored_bytes(growing, min(shared, tokens))
                results.append((common, stored_bytes(self.rows, tokens) - common))
        return results

    def step_read(self, length: int) -> int:
        """Return the bytes of one sequence's cache that a decode step reads on one GPU.

        A cache that several layers share counts once. Blocks of tokens that are not compressed yet
        do not count.

        Args:
            length: Tokens of the sequence.
        """
        finished = (
            row._replace(read_layers=row.stored_layers)
            for row in self.rows
            if row.entry.span not in (Span.PARTIAL, Span.OVERLAP)
        )
        return size_of(finished, length, 1, 1).read

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.needed(sequences, length)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        import numpy as np

        return np.maximum.accumulate(stored_at(self.rows, tokens))

    def breakpoints(self) -> list[Record]:
        caps = {row.entry.full_from(): row.entry.span for row in self.rows if row.stored_layers}
        pieces: list[Record] = []
        for start in sorted({0, *(tokens for tokens in caps if tokens > 0)}):
            size = size_of(self.rows, max(start, 1), 1, 1)
            cause = "chunk" if caps.get(start) is Span.CHUNK else "window"
            pieces.append(
                {
                    "from_tokens": start,
                    "fixed_bytes": size.fixed,
                    "bytes_per_token": size.slope,
                    "block_tokens": max((row.entry.ratio for row in self.rows), default=1),
                    "cause": cause if start else "",
                }
            )
        return pieces


def stored_at(rows: Iterable[LayerRows], tokens: Any) -> Any:
    """Return the bytes that one sequence stores on one GPU at each length, as an integer array.

    Args:
        rows: The cache entries (kinds of stored rows), each with its bytes per row and its number
            of layers on the pipeline stage.
        tokens: Array of lengths of the sequence in tokens.
    """
    import numpy as np

    result = np.zeros(tokens.size, dtype=np.int64)
    for entry, row_bytes, layers, _, spread in rows:
        stored_rows = np.asarray(ceil_div(entry.stored_rows(tokens), spread))
        result += (layers * row_bytes * stored_rows).astype(np.int64)
    return result


def layer_entries(layer: LayerCache) -> Iterable[StoredEntry]:
    """Return the stored cache entries, such as keys and values, of all sublayers of a layer."""
    return (entry for part in layer.parts for entry in part)


def content_of(
    layers: LayerCaches,
    ranks: Parallelism,
    stage: int,
    content: Callable[[LayerCache], Iterable[StoredEntry]] = layer_entries,
) -> Content:
    """Return a layout that computes the cache bytes of n sequences on one GPU of a stage.

    It counts the stored rows only, without blocks and padding, so that no engine needs less.

    Args:
        layers: All layers of the model, in order.
        ranks: The parallelism.
        stage: Index of the pipeline stage.
        content: The engine's rule that returns the stored cache entries of a layer.
    """
    rows = []
    for layer, count in count_layers(layers, stage):
        for stored_entry in content(layer):
            entry = stored_entry.entry
            storing = 0 if layer.layer.shares_cache or entry.is_stored_by_other_layer else count
            spread = entry.spread(ranks)
            rows.append(LayerRows(entry, stored_entry.row_bytes, storing, count, spread))
    return Content(rows)


def largest_fitting(fits: Callable[[int], bool], limit: int = MAX_TOKENS) -> int:
    """Return the largest number from 1 to `limit` for which `fits` is true, or 0 if there is none.

    Every number below a number that fits must fit too.

    Args:
        fits: Returns whether a number of sequences or tokens fits.
        limit: Largest number to try.
    """
    high = 1
    while high < limit and fits(high):
        high *= 2
    return bisect_left(range(1, min(high, limit) + 1), True, key=lambda n: not fits(n))
