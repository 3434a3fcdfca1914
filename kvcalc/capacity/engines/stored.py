"""What an engine is handed: every layer that keeps a cache, each entry in the format in which that engine stores it.

Engines know pages of keys and values, of latents, of index keys, and states; whatever else a mixer says that it keeps is
refused here, by what the entry says of itself, so that no engine takes an unknown variant for one that it knows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry, Keeps, Span
from kvcalc.model.spec import Layer, Model
from kvcalc.storage.dtypes import RowFormat

PAGES = (("k", "v"), ("latent",), ("latent", "rope_key"))  # roles that make up one token's row
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


class Held(NamedTuple):
    """One layer as it is run: its model and kind, its pipeline stage, and what each of its parts stores and reads."""

    model: Model
    kind: str
    stage: int
    parts: tuple[StoredPart, ...]

    @property
    def layer(self) -> Layer:
        return self.model.kinds[self.kind]


class Pages(NamedTuple):
    """What one part keeps: `rows` of a token with `index_keys` beside them, or `states`."""

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


def counted(held: Iterable[Held], stage: int) -> list[tuple[Held, int]]:
    """The different layers of a pipeline stage, in order, and how many there are of each."""
    here = [h for h in held if h.stage == stage]
    count = Counter(id(h.parts) for h in here)
    return [(h, count[key]) for key, h in {id(h.parts): h for h in here}.items()]


def pages(engine: str, held: Held, shared: bool = False) -> list[Pages]:
    """What a layer keeps, part by part: nothing where it shares another's cache, unless `shared`.

    Raises UserError naming the layer where a part keeps what `engine` has no pages for.
    """
    found = []
    for part in () if held.layer.shares_cache and not shared else held.parts:
        entries = [s.entry for s in part]
        if why := unknown(entries):
            raise UserError(
                f"{engine} has no pages for {held.layer.label or held.kind} of {held.model.name}: {why}",
                hint="Engine none counts its content",
            )
        states = tuple(s for s in part if s.entry.span is Span.STATE)
        index = tuple(s for s in part if s.entry.role == "index_key")
        rows = tuple(s for s in part if s not in (*states, *index))
        found.append(Pages(rows, index, states))
    return found


def unknown(entries: Sequence[CacheEntry]) -> str:
    """Why the entries of one part are no pages that any engine here knows, in a clause; '' where they are.

    Known: rows of one token each, of the roles in PAGES, in the cache's dtype, all of them under one limit that keeps the
    last; at most one index key per token beside them; or states of the roles in STATES.
    """
    for e in entries:
        if e.lent:
            return f"it reads {_words(e)} rows of another layer"
        if e.span in (Span.PARTIAL, Span.OVERLAP):
            return "it keeps blocks of tokens that are not compressed yet"
        if e.ratio > 1:
            return f"one {_words(e)} row stands for {e.ratio} tokens"
        if e.keeps is not Keeps.LAST:
            return f"the {_words(e)} rows that it keeps are not the last ones"
        if (e.span is Span.STATE) != (e.role in STATES):
            return f"it keeps {_words(e)} rows" + (" whatever the length" if e.span is Span.STATE else "")
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
