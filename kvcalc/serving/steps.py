"""Seconds of a server's passes, remembered: exact where a batch is small, else straight lines between close contexts.

A pass is chunks of prompts and a group of decodes at their mean context. For full attention the mean is exact, since time is
linear in context between the points where a bound changes; under a window it is the mean sequence that counts. With a draft
decodes are verifications, and what the draft takes is added: its own pass over the chunks, and a decode pass a drafted token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcalc.layers.batch import Batch, Sequences
from kvcalc.serving.latency import BLOCK, block_of
from kvcalc.serving.speculation import Drafting
from kvcalc.timing.deployment import Deployment

# Tokens between the contexts that are computed, and how many intervals a table has: for decodes alone, and beside chunks of
# prompts, which seldom come again.
DECODES, MIXED = (16, 256), (128, 4)
MOST_TABLES, MOST_AHEAD = 50_000, 32

Chunks = tuple[tuple[int, int], ...]  # (new, past) of each piece of a prompt in the pass


class Line(NamedTuple):
    """Decode passes in a row over the same sequences: seconds of the first, what each adds, and for how many this holds.

    each: the seconds of each of them, where they lie on no line.
    """

    first: float
    rise: float = 0.0
    passes: int = 1
    each: Sequence[float] = ()


class Steps:
    """Passes of one data-parallel rank; each other rank is taken to run the same batch at the same time."""

    def __init__(self, deployment: Deployment, drafting: Drafting | None = None) -> None:
        self.deployment, self.ranks, self.drafting = deployment, deployment.parallelism.dp, drafting
        self.queries = 1 + (drafting.drafted if drafting else 0)  # of a sequence that decodes, in one pass
        self._tables: dict[tuple[Chunks, int, int], tuple[Any, Any]] = {}
        self._prompts: dict[tuple[Chunks, int], float] = {}

    def prefill(self, chunks: Chunks, times: int = 1) -> float:
        """Seconds of a pass of prompts alone, each chunk `times` times."""
        key = (chunks, times)
        if key not in self._prompts:
            if len(self._prompts) > MOST_TABLES:
                self._prompts.clear()
            self._prompts[key] = sum(float(d.seconds(Batch(self._groups(chunks, times)))) for d in self._models)
        return self._prompts[key]

    def mixed(self, chunks: Chunks, count: int, context: float) -> float:
        """Seconds of a pass with chunks of prompts and `count` decodes of mean `context` after the step."""
        import numpy as np

        if not count:
            return self.prefill(chunks)
        return float(np.interp(context, *self._table(chunks, count, context)))

    def decode(self, count: int, context: float, steps: int) -> Any:
        """Seconds of up to `steps` decode passes in turn, the mean context of the first being `context`, one more in each.

        At least one pass, and as many as the table at hand covers.
        """
        import numpy as np

        contexts, seconds = self._table((), count, context)
        steps = max(1, min(steps, int(contexts[-1] - context) + 1))
        return np.interp(context + np.arange(steps), contexts, seconds)

    def line(self, count: int, context: float) -> Line:
        """Decode passes in turn, the mean context of the first being `context`, one more in each."""
        contexts, seconds = self._table((), count, context)
        if count == 1 and context == int(context):
            each = seconds[int(context - contexts[0]) :].tolist()
            return Line(each[0], 0.0, len(each), each)
        place = min(max(int(contexts.searchsorted(context, "right")) - 1, 0), len(contexts) - 2)
        low, high = contexts[place : place + 2].tolist()
        first, last = seconds[place : place + 2].tolist()
        rise = (last - first) / (high - low) if high > low else 0.0
        return Line(first + rise * (context - low), rise, max(1, int(high - context) + 1))

    def _table(self, chunks: Chunks, count: int, context: float) -> tuple[Any, Any]:
        """Contexts and seconds around this one. As many tables ahead are filled at once as were asked for in a row before."""
        import numpy as np

        spacing, intervals = MIXED if chunks else DECODES
        spacing = spacing if chunks or count > 1 else 1
        width = spacing * intervals
        start = int(context // width) * width
        key = (chunks, count, start)
        if key not in self._tables:
            if len(self._tables) > MOST_TABLES:
                self._tables.clear()
            many = 1
            while (chunks, count, start - many * width) in self._tables and many < self._most_ahead:
                many += 1
            contexts = np.arange(start, start + many * width + spacing, spacing, dtype=float)
            contexts = np.maximum(contexts, 1)
            seconds = np.broadcast_to(self._seconds(chunks, count * self.ranks, contexts), contexts.shape)
            for place in range(many):
                cut = slice(place * intervals + (spacing == 1 and not start and not place), (place + 1) * intervals + 1)
                self._tables[chunks, count, start + place * width] = contexts[cut], seconds[cut]
        return self._tables[key]

    @property
    def _most_ahead(self) -> int:
        return MOST_AHEAD * block_of(self.deployment.model) // BLOCK

    @property
    def _models(self) -> tuple[Deployment, ...]:
        return (self.deployment, self.drafting.draft) if self.drafting else (self.deployment,)

    def _seconds(self, chunks: Chunks, count: int, contexts: Any) -> Any:
        """One pass at each of `contexts`. The head works on every position of a verification, on the last of a chunk."""
        prompts, decodes = self._groups(chunks), Sequences(count, self.queries, contexts - 1)
        seconds = self.deployment.seconds(Batch((*prompts, decodes)))
        if not self.drafting:
            return seconds
        draft, alone = self.drafting.draft, Batch((decodes,))
        heads = self.deployment.seconds(alone, all_positions=True) - self.deployment.seconds(alone)
        drafting = self.drafting.drafted * draft.seconds(Batch.decode(contexts, count))
        return seconds + heads + drafting + (draft.seconds(Batch(prompts)) if prompts else 0.0)

    def _groups(self, chunks: Chunks, times: int = 1) -> tuple[Sequences, ...]:
        kinds = dict.fromkeys(chunks)
        return tuple(Sequences(chunks.count(c) * times * self.ranks, c[0], c[1]) for c in kinds)
