"""Engine `none`: only the bytes of the content, the minimum of every engine."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcalc.arithmetic import ceil_div
from kvcalc.capacity.engines.engine import (
    Engine,
    EngineSettings,
    layer_entries,
    stage_by_stage,
)
from kvcalc.capacity.engines.layout import CacheLayout, LayerCache, StoredEntry, counted
from kvcalc.capacity.engines.vllm_versions import LATEST, defaults
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import Span
from kvcalc.model.memory import LayerRows, size_of, stored_bytes
from kvcalc.records import Record


class Content(CacheLayout):
    """The rows of every cache entry, without blocks, padding or reserve."""

    def __init__(self, rows: Iterable[LayerRows]) -> None:
        self.rows = list(rows)
        self._drops = sorted({r.entry.ratio for r in self.rows if r.entry.span is Span.PARTIAL})
        self._last: tuple[tuple[int, int], list[tuple[int, int]]] = ((-1, 0), [])

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The most that `sequences` sequences store on their way to `length` tokens; a common
        prefix is stored once.

        Shared are the rows of entries without a limit. Only where blocks are compressed does the
        content ever shrink.
        """
        if self._last[0] != (length, shared):
            points = {length, *(length - (length + 1) % r for r in self._drops)}
            self._last = (
                (length, shared),
                [self._stored(s, shared) for s in points if s >= 0],
            )
        return max(sequences * (stored - saved) + saved for stored, saved in self._last[1])

    def step_read(self, length: int) -> int:
        """Return the bytes that a decode step reads of one sequence of `length` tokens.

        A cache that several layers share counts once. Unfinished blocks do not count.
        """
        resident = (r for r in self.rows if r.entry.span not in (Span.PARTIAL, Span.OVERLAP))
        return size_of(
            (r._replace(read_layers=r.stored_layers) for r in resident), length, 1, 1
        ).read

    def _stored(self, length: int, shared: int) -> tuple[int, int]:
        """Return the bytes of one sequence, and the part that all sequences share."""
        common = [r for r in self.rows if shared and r.entry.grows and not r.entry.limit]
        return stored_bytes(self.rows, length), stored_bytes(common, min(shared, length))

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.needed(sequences, length)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        import numpy as np

        return np.maximum.accumulate(stored_at(self.rows, tokens))

    def breakpoints(self) -> list[Record]:
        full_from = {r.entry.full_from() for r in self.rows if r.stored_layers}
        blocks = max((r.entry.ratio for r in self.rows), default=1)
        pieces = []
        for start in sorted({0, *(tokens for tokens in full_from if tokens > 0)}):
            size = size_of(self.rows, max(start, 1), 1, 1)
            full = [r.entry for r in self.rows if start and r.entry.full_from() == start]
            chunk = full and full[0].span is Span.CHUNK
            pieces.append(
                {
                    "from_tokens": start,
                    "fixed_bytes": size.fixed,
                    "bytes_per_token": size.slope,
                    "block_tokens": blocks,
                    "cause": "chunk" if chunk else "window" if full else "",
                }
            )
        return pieces

    def describe(self, length: int) -> list[str]:
        lines = []
        for entry, row_bytes, layers, _, spread in self.rows:
            if layers:
                rows = int(ceil_div(entry.stored_rows(length), spread))
                total = layers * rows * row_bytes
                lines.append(
                    f"{entry.role}: {layers} layers × {rows:,} rows × {row_bytes:,} B = {total:,}"
                )
        return lines


def stored_at(rows: Iterable[LayerRows], tokens: Any) -> Any:
    """Return the bytes that one sequence stores, for an array of its numbers of tokens."""
    import numpy as np

    result = np.zeros(tokens.size, dtype=np.int64)
    for entry, row_bytes, layers, _, spread in rows:
        stored = np.asarray(ceil_div(entry.stored_rows(tokens), spread))
        result += (layers * row_bytes * stored).astype(np.int64)
    return result


def content_of(
    held: Sequence[LayerCache],
    ranks: Parallelism,
    stage: int,
    kept: Callable[[LayerCache], Iterable[StoredEntry]] = layer_entries,
) -> Content:
    """Return the content of the layers on one stage, in the engine's formats.

    Args:
        kept: The engine's rule for the entries that it stores of a layer.
    """
    rows: list[LayerRows] = []
    for h, count in counted(held, stage):
        for s in kept(h):
            stored = 0 if h.layer.shares_cache or s.entry.is_stored_by_other_layer else count
            rows.append(LayerRows(s.entry, s.row_bytes, stored, count, s.entry.spread(ranks)))
    return Content(rows)


def _plan(
    held: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    return content_of(held, ranks, stage)


NONE = Engine(
    name="none",
    title="engine none",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, *asked: defaults(gpu, ranks, LATEST, *asked)._replace(
        sequences=1
    ),
    spreads_context=True,
    smaller_weights=("fp8", "int4"),
)
