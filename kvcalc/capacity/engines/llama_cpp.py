"""llama.cpp: cells for the whole context of all sequences, allocated at start, and a smaller cache for windows.

Rules as of llama.cpp's `llama-kv-cache-iswa.cpp`, `llama-context.cpp` and `llama-memory-recurrent.cpp` (2026): a unified
cache, f16 keys and values unless `--cache-type-k/-v` say otherwise, states in f32.
"""

from collections.abc import Sequence

from kvcalc.capacity.engines.plan import EngineSettings, Held, Plan, Term
from kvcalc.errors import UserError
from kvcalc.layers.cache import Span
from kvcalc.layers.ranks import Parallelism
from kvcalc.storage.dtypes import FORMATS

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


def plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The caches on one stage. Raises UserError for layers that llama.cpp has no cache for."""
    full = window = limit = state = 0
    for h in held:
        if h.stage != stage or h.layer.shares_cache:
            continue
        for e in h.layer.entries:
            heads = ranks.share(e.heads)
            if e.span in (Span.PARTIAL, Span.OVERLAP) or e.ratio > 1:
                raise UserError(f"no rules for {h.layer.label} under llama.cpp", hint="--engine none counts its content")
            if e.span is Span.STATE:
                state += e.limit * heads * FORMATS["fp32"].row_bytes(e.width)
            elif e.limit:
                window, limit = window + h.formats.entry_bytes(e, heads), max(limit, e.limit)
            else:
                full += h.formats.entry_bytes(e, heads)
    return LlamaCpp(full, window, limit, state, settings)
