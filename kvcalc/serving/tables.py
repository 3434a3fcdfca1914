"""Seconds of a server's passes, added up from tables: fast where hardly two passes are alike.

    pass = products and all else that sees tokens alone (all tokens of the pass)
         + the head (sequences) + attention of the decodes (how many, their mean context) + attention of each piece of a prompt

The tables are filled by whole passes through the model, so nothing is timed here that a pass would not time, and nothing of it
is lost: what a pass behind a context takes more than a prompt of as many tokens goes with its attention. Between their points
lie straight lines. A sequence alone and the first EXACT kinds of prompts are timed as whole passes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from typing import Any, TypeAlias

from kvcalc.gpu.roof import roofline
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.cost import AttentionShape, Operator, Role
from kvcalc.serving.steps import Chunks, Line, Steps
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.families import MOST_DECODE_TOKENS
from kvcalc.timing.steps import Host, host_of, operator_seconds

EXACT = 64  # kinds of passes of prompts alone that are timed as they are
DENSE = 512  # tokens up to which each number of them has its own entry
TOKENS_RATIO, LENGTH_RATIO, CONTEXT_RATIO, COUNT_RATIO = 1.01, 1.08, 1.12, 1.2  # of one point of a table to the next
MOST_KNOWN = 1 << 15  # values of a table that are remembered
TOKENS, HEAD, GROUP = "tokens", "head", "group"
NO_HOST = Host(0.0, 0.0, 1.0, 0.0)


def ladder(first: int, last: int, ratio: float, dense: int = 0) -> list[int]:
    """Whole numbers from first to at least last: each up to `dense`, then growing by `ratio`, or by 1 where that is more."""
    found = [first]
    while found[-1] < last:
        at = found[-1]
        found.append(at + 1 if at < dense else max(at + 1, round(at * ratio)))
    return found


def part_of(operator: Operator) -> str:
    """What the time of an operator depends on: all tokens of the pass, its sequences, or each group of sequences."""
    if operator.role is Role.HEAD and not operator.layer:
        return HEAD
    apart = isinstance(operator.shape, AttentionShape) or operator.role is Role.CORE or operator.kind == "scan"
    return GROUP if apart or operator.form else TOKENS


class Table:
    """Straight lines between points; beyond the last one the last line goes on."""

    def __init__(self, at: Sequence[int], values: Sequence[float]) -> None:
        self.at, self.values = list(at), list(values)
        self.known: dict[float, float] = {}

    def __call__(self, x: float) -> float:
        if x not in self.known and len(self.known) < MOST_KNOWN:
            self.known[x] = self._between(x)
        return self.known[x] if x in self.known else self._between(x)

    def _between(self, x: float) -> float:
        place = min(max(bisect_right(self.at, x) - 1, 0), len(self.at) - 2)
        low, high = self.at[place], self.at[place + 1]
        first = self.values[place]
        return first + (self.values[place + 1] - first) * (x - low) / (high - low)


class Tables:
    """Passes of one data-parallel rank, as `Steps` gives them; each other rank is taken to run the same at the same time.

    most: tokens that a sequence holds at most. exact: whether small runs are timed as whole passes where that is cheap.
    """

    drafting = None
    queries = 1

    def __init__(self, deployment: Deployment, most: int, tokens: int, sequences: int, exact: bool = True) -> None:
        self.deployment, self.ranks, self.sizes = deployment, deployment.parallelism.dp, (most, tokens, sequences)
        self.most, self.tokens = max(most, 2), max(tokens, sequences, 2)
        self.alone = Steps(deployment) if exact else None
        self.host = NO_HOST
        self.work = self._by_tokens(max(tokens, sequences, most, 2))
        self.head, self.counts, self.contexts, self.decodes = self._by_sequences(max(sequences, 2))
        self._rows: dict[int, list[float]] = {}
        self._others: dict[int, float] = {}  # of decode passes by their sequences, what is no attention
        self._pieces: dict[int, Table] = {}
        self._prompts: dict[tuple[Chunks, int], float] = {}
        self._lengths = ladder(1, self.most, LENGTH_RATIO, 16)
        self._prompt = self._of_prompts(self._lengths)

    def covers(self, most: int, tokens: int, sequences: int) -> bool:
        """Whether the tables reach so far."""
        return self.most >= most and self.tokens >= tokens and self.counts[-1] >= sequences

    def again(self) -> "Tables":
        """The same tables, before any pass: which prompts are timed as whole passes is a run's own."""
        found = copy(self)
        found._prompts = {}
        return found

    def prefill(self, chunks: Chunks, times: int = 1) -> float:
        """Seconds of a pass of prompts alone, each chunk `times` times."""
        key = chunks, times
        if self.alone and (key in self._prompts or len(self._prompts) < EXACT):
            if key not in self._prompts:
                self._prompts[key] = self.alone.prefill(chunks, times)
            return self._prompts[key]
        tokens = sum(new for new, _ in chunks) * times
        pieces = sum(self._piece(new, past) for new, past in chunks) * times
        many = len(chunks) * times
        kernels = self.work(tokens) + self.head(many) + pieces
        return float(self.host.with_prompts(kernels)) + self.host.fixed + self.host.sequence * many

    def mixed(self, chunks: Chunks, count: int, context: float) -> float:
        """Seconds of a pass with chunks of prompts and `count` decodes of mean `context` after the step."""
        if not count:
            return self.prefill(chunks)
        pieces, prompts, behind = 0.0, 0, 0.0
        tokens = count
        for new, past in chunks:
            tokens += new
            if new > MOST_DECODE_TOKENS:
                pieces += self._piece(new, past)
                prompts += 1
            else:  # kernels take it with the decodes
                behind += past + new - context
        many = count + len(chunks) - prompts
        attention = self._attention(many, context + behind / many)
        kernels = self.work(tokens) + self.head(count + len(chunks)) + pieces + attention
        added = self.host.fixed + self.host.sequence * (count + len(chunks))
        return float(self.host.with_prompts(kernels) if prompts else kernels) + added

    def line(self, count: int, context: float) -> Line:
        """Decode passes in turn, the mean context of the first being `context`, one more in each."""
        if count == 1 and self.alone:
            return self.alone.line(count, context)
        row, contexts = self._row(count), self.contexts
        place = min(max(bisect_right(contexts, context) - 1, 0), len(contexts) - 2)
        low, high = contexts[place], contexts[place + 1]
        rise = (row[place + 1] - row[place]) / (high - low)
        return Line(row[place] + rise * (context - low), rise, max(1, int(high - context) + 1))

    def _attention(self, count: int, context: float) -> float:
        """Seconds of what a decode pass takes beside its tokens and its head."""
        row, contexts = self._row(count), self.contexts
        place = min(max(bisect_right(contexts, context) - 1, 0), len(contexts) - 2)
        low, high = contexts[place], contexts[place + 1]
        whole = row[place] + (row[place + 1] - row[place]) * (context - low) / (high - low)
        return whole - self._others[count]

    def _beside(self, count: int) -> float:
        """Seconds of a decode pass of so many sequences but for their attention."""
        return self.work(count) + self.head(count) + self.host.fixed + self.host.sequence * count

    def _row(self, count: int) -> list[float]:
        """Seconds of a decode pass of so many sequences at each of `contexts`."""
        if count not in self._rows and self.alone:
            seconds = self.deployment.seconds(Batch((Sequences(count * self.ranks, 1, _array(self.contexts) - 1),)))
            self._rows[count] = _listed(seconds, self.contexts)
        elif count not in self._rows:
            place = min(max(bisect_right(self.counts, count) - 1, 0), len(self.counts) - 2)
            low, high = self.counts[place], self.counts[place + 1]
            share = (count - low) / (high - low)
            attention = self.decodes[place] + (self.decodes[place + 1] - self.decodes[place]) * share
            self._rows[count] = (attention + self._beside(count)).tolist()
        if count not in self._others:
            self._others[count] = self._beside(count)
        return self._rows[count]

    def _piece(self, new: int, past: int) -> float:
        """Seconds of what a piece of a prompt takes beside what its tokens take: attention, mostly."""
        step = past // 512
        for at in (step, step + 1):
            if at not in self._pieces:
                batch = Batch((Sequences(self._ones(self._lengths) * self.ranks, _array(self._lengths), 512 * at),))
                self._pieces[at] = Table(self._lengths, _listed(self._beyond(batch, self._prompt), self._lengths))
        low = self._pieces[step](new)
        return low + (self._pieces[step + 1](new) - low) * (past / 512 - step) if past % 512 else low

    def _by_tokens(self, most: int) -> Table:
        """Seconds of what sees tokens alone."""
        tokens = ladder(1, most, TOKENS_RATIO, DENSE)
        return Table(tokens, self._of_prompts(tokens).tolist())

    def _of_prompts(self, tokens: Sequence[int]) -> Any:
        """Seconds of what sees tokens alone in a pass of one prompt of so many tokens, for each."""
        parts = self._parts(Batch((Sequences(self._ones(tokens) * self.ranks, _array(tokens), 0),)))
        return _array(_listed(parts[TOKENS], tokens), float)

    def _beyond(self, batch: Batch, prompts: Any) -> Any:
        """Seconds of what hangs on the groups of a batch: their attention, and by how much what is taken to see tokens alone
        takes more, or less, than in prompts of as many tokens.
        """
        parts = self._parts(batch)
        return prompts * 0 + parts[GROUP] + (parts[TOKENS] - prompts)

    def _by_sequences(self, most: int) -> tuple[Table, list[int], list[int], Any]:
        """Seconds of the head, and of the attention of decodes by their number and context."""
        import numpy as np

        many = ladder(1, most, 1.1, 64)
        heads = self._parts(Batch((Sequences(_array(many) * self.ranks, 1, 0),)))[HEAD]
        counts, contexts = ladder(1, most, COUNT_RATIO), ladder(1, self.most, CONTEXT_RATIO, 2)
        grid = np.array([(n, c) for n in counts for c in contexts])
        prompt = np.repeat(self._of_prompts(counts), len(contexts))
        beyond = self._beyond(Batch((Sequences(grid[:, 0] * self.ranks, 1, grid[:, 1] - 1),)), prompt)
        return Table(many, _listed(heads, many)), counts, contexts, beyond.reshape(len(counts), len(contexts))

    def _ones(self, like: Sequence[int]) -> Any:
        import numpy as np

        return np.ones(len(like), dtype=np.int64)

    def _parts(self, batch: Batch) -> dict[str, Any]:
        """Seconds of a pass's operators by what they depend on. Notes what the engine adds to such passes."""
        d = self.deployment
        operators = d.operators(batch)
        found: dict[str, Any] = dict.fromkeys((TOKENS, HEAD, GROUP), 0.0)
        if d.calibration:
            timed = operator_seconds(operators, d.gpu, d.calibration, d.routing)
            times = [t.seconds for t in timed]
            found[GROUP] = found[GROUP] + sum(t.overhead.seconds for t in timed if t.overhead)
            self.host = host_of(operators, d.calibration)
        else:
            times = [p.seconds for p in roofline(operators, d.gpu)]
        for operator, seconds in zip(operators, times, strict=True):
            part = part_of(operator)
            found[part] = found[part] + seconds
        return found


def _array(values: Sequence[Any], dtype: type = int) -> Any:
    import numpy as np

    return np.array(values, dtype=np.int64 if dtype is int else dtype)


def _listed(values: Any, like: Sequence[int]) -> list[float]:
    import numpy as np

    return np.broadcast_to(np.asarray(values, dtype=float), (len(like),)).tolist()  # type: ignore[no-any-return]


Passes: TypeAlias = Steps | Tables
