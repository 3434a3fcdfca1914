"""Engine `none`: the bytes of the content, nothing else. What any engine has to hold at least."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvcalc.capacity.engines.engine import ContentRule, Engine, EngineSettings, as_kept, nothing, stage_by_stage
from kvcalc.capacity.engines.layout import Plan
from kvcalc.capacity.engines.stored import Held, counted
from kvcalc.capacity.engines.vllm_versions import LATEST, defaults
from kvcalc.layers.cache import Span
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.memory import LayerRows, size_of, stored_bytes
from kvcalc.units import ceil_div


class Content(Plan):
    """Rows of every cache entry after so many tokens, without blocks, padding or reserve."""

    def __init__(self, rows: Iterable[LayerRows]) -> None:
        self.rows = list(rows)
        self._drops = sorted({r.entry.ratio for r in self.rows if r.entry.span is Span.PARTIAL})
        self._last: tuple[tuple[int, int], list[tuple[int, int]]] = ((-1, 0), [])

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The most that `sequences` sequences store on their way to `length` tokens; a common prefix is stored once.

        Shared are the rows of entries without a limit. Only where blocks are compressed does the content ever shrink.
        """
        if self._last[0] != (length, shared):
            points = {length, *(length - (length + 1) % r for r in self._drops)}
            self._last = (length, shared), [self._stored(s, shared) for s in points if s >= 0]
        return max(sequences * (stored - saved) + saved for stored, saved in self._last[1])

    def step_read(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens that a decode step reads: each cache once, however many layers share it.

        Unfinished blocks apart, which the step that finishes one takes up.
        """
        held = (r for r in self.rows if r.entry.span not in (Span.PARTIAL, Span.OVERLAP))
        return size_of((r._replace(read_layers=r.stored_layers) for r in held), length, 1, 1).read

    def _stored(self, length: int, shared: int) -> tuple[int, int]:
        """Bytes of one sequence, and those of them that all have in common."""
        saved = 0
        if shared:
            for entry, row_bytes, layers, _, spread in self.rows:
                if entry.grows and not entry.limit:
                    saved += layers * row_bytes * int(ceil_div(entry.stored_rows(min(shared, length)), spread))
        return stored_bytes(self.rows, length), saved

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.needed(sequences, length)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        import numpy as np

        return np.maximum.accumulate(stored_at(self.rows, tokens))

    def breakpoints(self) -> list[dict[str, Any]]:
        starts = sorted({0, *(r.entry.full_from() for r in self.rows if r.entry.full_from() > 0 and r.stored_layers)})
        found = []
        for start in starts:
            size = size_of(self.rows, max(start, 1), 1, 1)
            full = [r.entry for r in self.rows if r.entry.full_from() == start and start]
            cause = "chunk" if full and full[0].span is Span.CHUNK else "window" if full else ""
            piece = {"from_tokens": start, "fixed_bytes": size.fixed, "bytes_per_token": size.slope}
            found.append(piece | {"block_tokens": max((r.entry.ratio for r in self.rows), default=1), "cause": cause})
        return found

    def describe(self, length: int) -> list[str]:
        lines = []
        for entry, row_bytes, layers, _, spread in self.rows:
            if layers:
                rows = int(ceil_div(entry.stored_rows(length), spread))
                total = layers * rows * row_bytes
                lines.append(f"{entry.role}: {layers} layers × {rows:,} rows × {row_bytes:,} B = {total:,}")
        return lines


def stored_at(rows: Iterable[LayerRows], tokens: Any) -> Any:
    """Return the bytes that one sequence stores, for an array of its numbers of tokens."""
    import numpy as np

    found = np.zeros(tokens.size, dtype=np.int64)
    for entry, row_bytes, layers, _, spread in rows:
        stored = np.asarray(ceil_div(entry.stored_rows(tokens), spread))
        found += (layers * row_bytes * stored).astype(np.int64)
    return found


def content_of(held: Sequence[Held], ranks: Parallelism, stage: int, kept: ContentRule = as_kept) -> Content:
    """The content of the layers on one stage, each entry in the format in which the engine at hand stores it.

    kept: the engine's rule for what it holds of a layer.
    """
    rows: list[LayerRows] = []
    for h, count in counted(held, stage):
        for s in kept(h):
            stored = 0 if h.layer.shares_cache or s.entry.lent else count
            rows.append(LayerRows(s.entry, s.row_bytes, stored, count, s.entry.spread(ranks)))
    return Content(rows)


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    return content_of(held, ranks, stage)


NONE = Engine(
    name="none",
    title="engine none",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, *asked: defaults(gpu, ranks, LATEST, *asked)._replace(sequences=1),
    spreads_context=True,
    told=nothing,
    smaller_weights=("fp8", "int4"),
)
