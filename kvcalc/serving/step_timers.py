"""Times of a server's passes.

A pass consists of chunks of prompts and a group of decodes at their mean context. For full
attention the mean is exact, because time is linear in context between the points at which a bound
changes.

`StepTimer` times whole passes, and interpolates between close contexts. `InterpolatedStepTimer`
adds up tables, which is fast if almost all passes differ:

    pass = GEMMs and all other work that depends on the number of tokens only
         + LM head, by the number of sequences
         + attention of the decodes, by their number and mean context
         + attention of each chunk of a prompt

The tables are filled from whole passes through the model. The time by which a pass behind a
context exceeds a prompt of equal length counts as attention, so no time is lost. A single sequence
and the first MAX_EXACT_PROMPTS kinds of prompts are timed as whole passes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvcalc.gpu.gpu import roofline
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.cost import AttentionShape, Operator, Role
from kvcalc.serving.speculation import Drafting
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.timing.kernel_models.families import MAX_DECODE_TOKENS
from kvcalc.timing.steps import HostTime, host_time_of, operator_seconds

SPACING = 16  # tokens between the contexts at which decode passes are timed
INTERVALS = 256  # intervals between contexts that are timed in one call
MAX_EXACT_PROMPTS = 64  # kinds of passes with prompts only that are timed as whole passes
# ratios of neighbouring points of the tables
TOKENS_RATIO, LENGTH_RATIO, CONTEXT_RATIO, HEAD_RATIO = 1.01, 1.08, 1.12, 1.1
# every number up to these is a point
DENSE_TOKENS, DENSE_HEADS, DENSE_LENGTHS = 512, 64, 16
PAST_SPACING = 512  # tokens between the contexts for which chunks are timed
ROWS_PER_CALL = 16  # numbers of sequences whose decode passes are timed in one call
TOKENS, HEAD, GROUP = "tokens", "head", "group"

Chunks: TypeAlias = tuple[tuple[int, int], ...]  # (new, past) of each chunk of a prompt


class StepTimeSegment(NamedTuple):
    """Seconds of consecutive decode passes over the same sequences.

    The sequences grow from pass to pass, so each pass takes longer. The times grow linearly, or as
    `exact_seconds` lists them.

    Attributes:
        first: Seconds of the first pass.
        increase_s: Seconds by which each pass takes longer than the previous pass.
        passes: Number of passes that this object describes.
        exact_seconds: Seconds of each pass if they do not grow linearly; otherwise empty.
    """

    first: float
    increase_s: float = 0.0
    passes: int = 1
    exact_seconds: Sequence[float] = ()

    def seconds(self, passes: int) -> float:
        """Return the seconds that the first `passes` passes take together.

        Args:
            passes: Number of passes, counted from the first one that this object describes.
        """
        if self.exact_seconds:
            return sum(self.exact_seconds[:passes])
        return passes * self.first + self.increase_s * passes * (passes - 1) / 2

    def passes_until(self, max_passes: int, seconds: float) -> int:
        """Return the smallest number of passes, from the first on, that take at least `seconds`.

        It tells after which pass an arriving request can join.

        Args:
            max_passes: Maximum result, which is also returned if these passes take less time.
            seconds: Seconds from the beginning of the first pass.
        """
        return bisect_left(range(1, max_passes), seconds, key=self.seconds) + 1


def largest_micro_batch(
    deployment: TimedDeployment, chunks: Chunks, count: int
) -> tuple[Chunks, int]:
    """Return the largest micro-batch of a forward pass, as (its prompt chunks, its decodes).

    The sequences of a pass are divided into one micro-batch per pipeline stage, and the stages work
    on different micro-batches at the same time. A chunk is never divided. The largest micro-batch
    determines the time. Datasheet bounds divide the pass in `TimedDeployment`, so without a
    calibration the whole pass is returned.

    Example: with 2 stages, chunks of 900, 500 and 300 tokens and 5 decodes give chunks of 900 and
    300 tokens and 3 decodes.

    Args:
        deployment: Model on one replica of GPUs, with its number of pipeline stages.
        chunks: One pair (new tokens, cached tokens before them) for each chunk of a prompt in the
            pass.
        count: Number of decoding sequences in the pass.
    """
    stages = deployment.parallelism.pp
    if stages == 1 or not deployment.calibration:
        return chunks, count
    return tuple(sorted(chunks, reverse=True)[::stages]), -(-count // stages)


class StepTimer:
    """Computes the seconds of forward passes of one data-parallel rank, for a simulation.

    It assumes that every other rank runs an equal batch at the same time.

    Attributes:
        deployment: Model on one replica of GPUs.
        queries: New tokens of a decoding sequence in one pass: 1, or more if a pass verifies draft
            tokens.
        stages: Number of pipeline stages, which work on different micro-batches at the same time.
        ranks: Number of data-parallel ranks.
        drafting: Settings of speculative decoding; None without a draft.
    """

    drafting: Drafting | None = None

    def __init__(self, deployment: TimedDeployment, queries: int = 1) -> None:
        self.stages = deployment.parallelism.pp
        self.deployment = deployment.as_server() if self.stages > 1 else deployment
        self.queries = queries
        self.ranks = deployment.parallelism.dp
        self._tables: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._prompts: dict[Chunks, float] = {}

    def reset(self) -> None:
        """Prepare for a new simulated run, so that equal runs get equal times.

        This base class does nothing. A subclass discards its choices, made during the last run, of
        the passes that it times exactly.
        """

    def prefill(self, chunks: Chunks) -> float:
        """Return the seconds of a forward pass of the rank that contains only prompts.

        With several pipeline stages, it is the time of the largest micro-batch.

        Args:
            chunks: One pair (new tokens, cached tokens before them) for each chunk of a prompt.
        """
        chunks, _ = largest_micro_batch(self.deployment, chunks, 0)
        if chunks not in self._prompts:
            groups = tuple(
                Sequences(chunks.count((new, past)) * self.ranks, new, past)
                for new, past in dict.fromkeys(chunks)
            )
            self._prompts[chunks] = float(self.deployment.seconds(Batch(groups)))
        return self._prompts[chunks]

    def line(self, count: int, context: float) -> StepTimeSegment:
        """Return the seconds of consecutive decode passes over the same sequences.

        In each pass, every sequence grows by one token. The timer tabulates times for intervals of
        contexts. The result has the passes, at least one, up to the end of the interval of
        `context`. Its field `passes` is their number.

        Args:
            count: Number of decoding sequences of the rank.
            context: Mean tokens of a sequence in the first pass, including the new token.
        """
        _, count = largest_micro_batch(self.deployment, (), count)
        spacing = SPACING if count > 1 else 1
        width = spacing * INTERVALS
        start = int(context // width) * width
        if (count, start) not in self._tables:
            contexts = np.arange(start, start + width + spacing, spacing, dtype=float)
            if not start:
                # context 0 becomes 1, or is left out if 1 is a point
                contexts = contexts[1:] if spacing == 1 else np.maximum(contexts, 1)
            seconds = np.broadcast_to(self._decode_seconds(count, contexts), contexts.shape)
            self._tables[count, start] = contexts, seconds
        contexts, seconds = self._tables[count, start]
        exact_seconds = np.interp(
            np.arange(context, contexts[-1] + 1), contexts, seconds
        ).tolist()
        return StepTimeSegment(exact_seconds[0], 0.0, len(exact_seconds), exact_seconds)

    def _decode_seconds(self, counts: Any, contexts: Any) -> Any:
        """Return the seconds of decode passes of `counts` sequences at `contexts`."""
        decodes = Batch((Sequences(counts * self.ranks, self.queries, contexts - 1),))
        return self.deployment.seconds(decodes, all_positions=self.queries > 1)


def geometric_points(first: int, last: int, ratio: float, dense: int = 0) -> list[int]:
    """Return ascending whole numbers from `first` to at least `last`, as points of a table.

    Up to `dense` they grow by 1, then by the factor `ratio`, but at least by 1. Example:
    geometric_points(1, 10, 1.5, 4) is 1, 2, 3, 4, 6, 9, 14.

    Args:
        first: First number.
        last: Number that the last point reaches or exceeds.
        ratio: Factor between neighbouring points beyond `dense`, above 1.
        dense: Number up to which every whole number is a point.
    """
    points = [first]
    while points[-1] < last:
        point = points[-1]
        points.append(point + 1 if point < dense else max(point + 1, round(point * ratio)))
    return points


def driving_quantity(operator: Operator) -> str:
    """Return the name of the quantity on which the time of an operator depends.

    It is "tokens" (number of new tokens of the pass), "head" (number of tokens on which the LM head
    runs) or "group" (number and lengths of the sequences, for attention and scans). A timer
    tabulates each operator by this quantity.

    Args:
        operator: An operator of a forward pass, such as a GEMM.
    """
    if operator.role is Role.HEAD and not operator.layer:
        return HEAD
    if isinstance(operator.shape, AttentionShape) or operator.role is Role.CORE:
        return GROUP
    return GROUP if operator.kind == "scan" or operator.form else TOKENS


def _index_below(points: Sequence[float], x: float) -> int:
    """Return the index of the interval around `x`; the last interval continues beyond its end."""
    return min(max(bisect_right(points, x) - 1, 0), len(points) - 2)


def interpolate(points: Sequence[float], values: Any, x: float) -> Any:
    """Return the value at `x` by linear interpolation between the given points.

    Before the first and beyond the last point, the line through the two nearest points continues.

    Args:
        points: Ascending positions, such as numbers of tokens.
        values: Value at each point, such as seconds: a sequence of equal length.
        x: Position at which the value is wanted, in the unit of `points`.
    """
    index = _index_below(points, x)
    low, high = points[index], points[index + 1]
    first = values[index]
    return first + (values[index + 1] - first) * (x - low) / (high - low)


def make_table(points: Sequence[int], seconds: Any) -> Callable[[float], float]:
    """Return a function of a position that interpolates seconds linearly between points.

    Beyond the last point, the line through the last two points continues.

    Args:
        points: Ascending positions, such as numbers of tokens.
        seconds: Seconds at each point, or one number that holds for all points.
    """
    return partial(interpolate, points, np.broadcast_to(seconds, (len(points),)).tolist())


class InterpolatedStepTimer(StepTimer):
    """Computes the seconds of forward passes quickly, by interpolation in tables.

    A simulation runs many thousand passes, for which exact times would take too long. This timer
    also times passes with both prompts and decodes.

    Args:
        deployment: Model on one replica of GPUs.
        max_len: Maximum tokens of a sequence, prompt and answer, up to which tables go.
        max_tokens: Maximum new tokens of a pass.
        max_num_seqs: Maximum number of sequences of a pass.
        queries: New tokens of a decoding sequence in one pass: 1, or more if a pass verifies draft
            tokens.
    """

    def __init__(
        self,
        deployment: TimedDeployment,
        max_len: int,
        max_tokens: int,
        max_num_seqs: int,
        queries: int = 1,
    ) -> None:
        super().__init__(deployment, queries)
        self.max_len, self.max_num_seqs = max(max_len, 2), max(max_num_seqs, 2)
        max_tokens = max(max_tokens, self.max_num_seqs * queries, self.max_len)

        tokens = geometric_points(1, max_tokens, TOKENS_RATIO, DENSE_TOKENS)
        self.work = make_table(tokens, self._prompt_seconds(tokens))
        positions = geometric_points(1, self.max_num_seqs * queries, HEAD_RATIO, DENSE_HEADS)
        heads = self._parts(Sequences(np.array(positions) * self.ranks, 1, 0))[HEAD]
        self.head = make_table(positions, heads)

        self.contexts = geometric_points(1, self.max_len, CONTEXT_RATIO, 2)
        self.lengths = geometric_points(1, self.max_len, LENGTH_RATIO, DENSE_LENGTHS)
        self.length_seconds = self._prompt_seconds(self.lengths)
        self._rows: dict[int, list[float]] = {}
        self._chunk_tables: dict[int, Callable[[float], float]] = {}
        self.exact_prompts: set[Chunks] = set()

    @cached_property
    def host(self) -> HostTime:
        """Return the time that the engine's host code adds to the kernels of a forward pass.

        It is given as seconds per pass, seconds per sequence, and a factor and a minimum for passes
        with prompts. Without a calibration, times are datasheet bounds and it adds nothing.
        """
        if not self.deployment.calibration:
            return HostTime(0.0, 0.0, 1.0, 0.0)
        batch = Batch((Sequences(np.ones(1), 1, 0),))
        return host_time_of(self.deployment.operators(batch), self.deployment.calibration)

    def reset(self) -> None:
        # which prompts are timed as whole passes depends on the run only
        self.exact_prompts.clear()

    def prefill(self, chunks: Chunks) -> float:
        if len(self.exact_prompts) < MAX_EXACT_PROMPTS:
            self.exact_prompts.add(chunks)
        if chunks in self.exact_prompts:
            return super().prefill(chunks)
        chunks, _ = largest_micro_batch(self.deployment, chunks, 0)
        tokens = sum(new for new, _ in chunks)
        attention = sum(self._chunk(new, past) for new, past in chunks)
        kernels = self.work(tokens) + self.head(len(chunks)) + attention
        host = self.host
        return float(host.with_prompts(kernels)) + host.fixed + host.sequence * len(chunks)

    def mixed(self, chunks: Chunks, count: int, context: float) -> float:
        """Return the seconds of a forward pass with both chunks of prompts and decodes.

        Args:
            chunks: One pair (new tokens, cached tokens before them) for each chunk of a prompt.
            count: Number of decoding sequences of the rank; 0 for prompts only.
            context: Mean tokens of a decoding sequence, including the new token.
        """
        if not count:
            return self.prefill(chunks)
        chunks, count = largest_micro_batch(self.deployment, chunks, count)
        prompts = 0
        attention = extra_context = 0.0
        tokens = count * self.queries
        for new, past in chunks:
            tokens += new
            if new > MAX_DECODE_TOKENS or self.queries > 1:
                attention += self._chunk(new, past)
                prompts += 1
            else:  # decode kernels process such short chunks
                extra_context += past + new - context
        decodes = count + len(chunks) - prompts
        row = self._row(decodes)
        decode_attention = interpolate(self.contexts, row, context + extra_context / decodes)
        decode_attention -= self._without_attention(decodes)
        head = self.head(count * self.queries + len(chunks))
        kernels = self.work(tokens) + head + attention + decode_attention
        host = self.host
        added = host.fixed + host.sequence * (count + len(chunks))
        return float(host.with_prompts(kernels) if prompts else kernels) + added

    def line(self, count: int, context: float) -> StepTimeSegment:
        _, count = largest_micro_batch(self.deployment, (), count)
        if count == 1:
            return super().line(count, context)
        row = self._row(count)
        index = _index_below(self.contexts, context)
        low, high = self.contexts[index], self.contexts[index + 1]
        increase_s = (row[index + 1] - row[index]) / (high - low)
        first = row[index] + increase_s * (context - low)
        return StepTimeSegment(first, increase_s, max(1, int(high - context) + 1))

    def _without_attention(self, count: int) -> float:
        """Return the seconds of a decode pass without its attention."""
        queries = count * self.queries
        kernels = self.work(queries) + self.head(queries)
        return kernels + self.host.fixed + self.host.sequence * count

    def _row(self, count: int) -> list[float]:
        """Return the seconds of a decode pass of `count` sequences at each of `contexts`."""
        if count in self._rows:
            return self._rows[count]
        first = count - (count - 1) % ROWS_PER_CALL
        counts = range(first, first + ROWS_PER_CALL)
        rows = np.array(counts, dtype=float)[:, None]
        seconds = self._decode_seconds(rows, np.array(self.contexts))
        seconds = np.broadcast_to(seconds, (len(counts), len(self.contexts))).tolist()
        self._rows.update(zip(counts, seconds))
        return self._rows[count]

    def _chunk(self, new: int, past: int) -> float:
        """Return the seconds that a chunk takes in addition to the work of its tokens: mostly
        attention."""
        step, remainder = divmod(past, PAST_SPACING)
        low = self._chunk_table(step)(new)
        if not remainder:
            return low
        return low + (self._chunk_table(step + 1)(new) - low) * (past / PAST_SPACING - step)

    def _chunk_table(self, step: int) -> Callable[[float], float]:
        """Return a table of the seconds of chunks by length, with `step` · PAST_SPACING cached
        tokens before them."""
        if step not in self._chunk_tables:
            chunks = Sequences(self.ranks, np.array(self.lengths), PAST_SPACING * step)
            seconds = self._attention(chunks, self.length_seconds)
            self._chunk_tables[step] = make_table(self.lengths, seconds)
        return self._chunk_tables[step]

    def _prompt_seconds(self, tokens: Sequence[int]) -> Any:
        """Return the part of a prompt's seconds that depends only on the number of tokens, for each
        length."""
        parts = self._parts(Sequences(self.ranks, np.array(tokens), 0))
        return np.broadcast_to(parts[TOKENS], (len(tokens),))

    def _attention(self, sequences: Sequences, prompt_seconds: Any) -> Any:
        """Return the part of a pass's seconds that depends on the group of sequences: mostly
        attention.

        It includes the difference between the other seconds of the pass and `prompt_seconds` for
        the same number of tokens.
        """
        parts = self._parts(sequences)
        return prompt_seconds * 0 + parts[GROUP] + (parts[TOKENS] - prompt_seconds)

    def _parts(self, sequences: Sequences) -> dict[str, Any]:
        """Return the seconds of a pass's operators by part: TOKENS, HEAD and GROUP."""
        deployment = self.deployment
        operators = deployment.operators(deployment.timed_batch(Batch((sequences,))))
        parts = dict.fromkeys((TOKENS, HEAD, GROUP), 0.0)
        if deployment.calibration:
            timed = operator_seconds(operators, deployment.gpu, deployment.calibration)
            times = [t.seconds for t in timed]
            parts[GROUP] = parts[GROUP] + sum(t.overhead.seconds for t in timed if t.overhead)
        else:
            times = [p.seconds for p in roofline(operators, deployment.gpu)]
        for operator, seconds in zip(operators, times):
            part = driving_quantity(operator)
            parts[part] = parts[part] + seconds
        return parts


class SpeculativeStepTimer(StepTimer):
    """Computes the seconds of forward passes of a server with speculative decoding.

    A pass is one pass of the target model and the passes of the draft model before it. In decoding,
    the draft model runs once for each draft token, and the target verifies all draft tokens. The
    draft model also processes the prompts.

    Attributes:
        target: Timer of the target model. In its decode pass, a sequence has one new token per
            draft token, plus one.
        draft: Timer of the draft model.
        drafting: Draft model, draft tokens per step and acceptance.
    """

    def __init__(
        self, target: InterpolatedStepTimer, draft: InterpolatedStepTimer, drafting: Drafting
    ) -> None:
        super().__init__(target.deployment, target.queries)
        self.target = target
        self.draft = draft
        self.drafting = drafting

    def reset(self) -> None:
        self.target.reset()
        self.draft.reset()

    def mixed(self, chunks: Chunks, count: int, context: float) -> float:
        """Return the seconds of a pass with prompts and decodes, of target plus draft model.

        Args:
            chunks: One pair (new tokens, cached tokens before them) for each chunk of a prompt.
            count: Number of decoding sequences of the rank; 0 for prompts only.
            context: Mean tokens of a decoding sequence, including the last accepted token but not
                the draft tokens.
        """
        seconds = self.target.mixed(chunks, count, context) + self.draft.prefill(chunks)
        return seconds + (self._draft_seconds(count, context) if count else 0.0)

    def line(self, count: int, context: float) -> StepTimeSegment:
        """Return the seconds of one decode pass, of target plus draft model.

        The result describes only one pass, because each pass adds a random number of tokens.

        Args:
            count: Number of decoding sequences of the rank.
            context: Mean tokens of a sequence, including the last accepted token but not the draft
                tokens.
        """
        seconds = self.target.line(count, context).first + self._draft_seconds(count, context)
        return StepTimeSegment(seconds)

    def _draft_seconds(self, count: int, context: float) -> float:
        return (self.queries - 1) * self.draft.line(count, context).first
