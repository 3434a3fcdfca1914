"""llama.cpp: cells for the whole context of all sequences, allocated at start, and a smaller cache for windows.

Rules as of llama.cpp's `llama-kv-cache-iswa.cpp`, `llama-context.cpp` and `llama-memory-recurrent.cpp` (2026): a unified
cache, f16 keys and values unless `--cache-type-k/-v` say otherwise, states in f32.
"""

from collections.abc import Sequence

import msgspec

from kvcalc.capacity.engines.engine import Defaults, Engine, EngineSettings
from kvcalc.capacity.engines.layout import Plan, Term
from kvcalc.capacity.engines.stored import Held, counted, pages
from kvcalc.capacity.memory_terms import Start, Terms, stated
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS, RowFormat

PAD, FLASH_PAD = 32, 256  # cells
UBATCH = 512  # --ubatch-size


class LlamaCpp(Plan):
    """`full` bytes per cell of layers without a window, `window` bytes per cell of those with, `state` bytes a sequence."""

    def __init__(self, full: int, window: int, limit: int, state: int, settings: EngineSettings) -> None:
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.pad = FLASH_PAD if settings.flash_attention else PAD
        self.ubatch = settings.max_num_batched_tokens
        self.block_size = self.pad

    def cells(self, sequences: int, length: int, shared: int = 0) -> int:
        """Cells of layers without a window: the context of all sequences, a common prefix once, padded."""
        common = min(shared, length)
        return self._padded(common + sequences * (length - common))

    def window_cells(self, sequences: int, length: int) -> int:
        """min(cells, pad(W · sequences + ubatch))."""
        return min(self.cells(sequences, length), self._padded(self.limit * sequences + self.ubatch))

    def _padded(self, cells: int) -> int:
        return -(-cells // self.pad) * self.pad

    def cache_bytes(self, sequences: int, length: int, shared: int = 0) -> int:
        """Bytes of the cells, as llama.cpp logs them: full and window caches together, recurrent states apart."""
        found = self.cells(sequences, length, shared) * self.full
        return found + self.window_cells(sequences, length) * self.window if self.window else found

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        return self.cache_bytes(sequences, length, shared) + sequences * self.state

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.cache_bytes(sequences, length)

    def parts(self, sequences: int, length: int) -> dict[str, int]:
        """The window caches, which kv_cache_allocated_bytes includes, and the recurrent states, which it does not."""
        window = self.window_cells(sequences, length) * self.window if self.window else 0
        return {"window_cache_bytes": window, "state_bytes": sequences * self.state}

    def terms(self) -> list[Term]:
        found = [Term(self.pad * self.full, self.pad)] if self.full else []
        if self.window:
            most = self._padded(self.limit + self.ubatch)
            found.append(Term(self.pad * self.window, self.pad, most, 0, "window and micro-batch"))
        return [*found, *([Term(self.state, 1, 0, 1, "state")] if self.state else [])]

    def describe(self, length: int) -> list[str]:
        cells = self.cells(1, length)
        lines = [f"{cells:,} cells × {self.full:,} B in layers without a window = {cells * self.full:,} B"]
        if self.window:
            held = self.window_cells(1, length)
            lines.append(
                f"{held:,} cells (least of all and {self.limit:,} + {self.ubatch:,}, padded to {self.pad}) × {self.window:,} B "
                f"in layers with one = {held * self.window:,} B"
            )
        return [*lines, *([f"recurrent states, in a buffer of their own: {self.state:,} B a sequence"] if self.state else [])]


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The caches on one stage. Raises UserError for layers that llama.cpp has no cache for."""
    full = window = limit = state = 0
    for kept, count in [(p, n) for h, n in counted(held, stage) for p in pages(LLAMA_CPP.title, h)]:
        state += count * kept.state_bytes
        full += count * kept.index_bytes
        if kept.limit:
            window, limit = window + count * kept.row_bytes, max(limit, kept.limit)
        else:
            full += count * kept.row_bytes
    return LlamaCpp(full, window, limit, state, settings)


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """fp16 where nothing is asked for: llama.cpp's own default, whatever the model's dtype."""
    if precision.kv_cache_dtype == "auto":
        precision = msgspec.structs.replace(precision, kv_cache_dtype="fp16")
    return precision, ()


def _row_format(entry: CacheEntry, beside: Sequence[CacheEntry], formats: Formats, settings: EngineSettings) -> RowFormat:
    """States of both kinds in fp32; all else as the cache's type says."""
    return FORMATS["fp32"] if entry.span is Span.STATE else formats.cache_format(entry)


def compute_buffer(start: Start) -> int:
    """The graph reserved for a micro-batch, all of whose tokens give logits, in fp32: 4 · ubatch · (V + D) where they decide.

    llama-context.cpp: graph_reserve(n_tokens, n_seqs, n_tokens). Llama-3.1-8B's log says 258.50 MiB for 512 tokens.
    """
    return 4 * start.tokens * (start.model.vocab_size + start.model.hidden_size) if start.last else 0


def _terms(start: Start, end: str) -> Terms:
    found = stated(start, end, graphs=False)
    return found._replace(activation=max(found.activation, compute_buffer(start)))


LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    plan=_plan,
    defaults=lambda gpu, ranks, release, tokens, model: Defaults(tokens or UBATCH, 1, 1.0),
    memory=_terms,
    dtypes=("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),  # --cache-type-k, --cache-type-v
    precision=_precision,
    row_format=_row_format,
    of="free",
)
