"""Times of one model under one precision and split, for many numbers of sequences at once and one GPU after another.

Every figure is that of `latency` and `roofline` to the last bit: the same operators, under the same roof or laws, over arrays.

    TTFT    one prompt by itself, behind its cached prefix
    TPOT    of n sequences at once: a step at the context, or the mean over the steps of an answer
    e2e     n prompts at once, and their steps: `latency`'s of a batch of n
"""

from typing import Any, NamedTuple

import msgspec

from kvcalc.gpu.roof import Stack
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.planning.need import Lengths
from kvcalc.planning.space import Speculated
from kvcalc.serving.latency import blocks_of, prefill_passes, verification
from kvcalc.serving.speculation import StepTimes, draft_model
from kvcalc.timing.deployment import Deployment

Key = tuple[Any, ...]
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


class Times(NamedTuple):
    """Seconds at each number of sequences, NaN where none is known. e2e: None where an answer has no end."""

    ttft: float
    tpot: Array
    e2e: Array | None


class Timed:
    """The passes of deployments that differ by their GPUs and calibrations, for `counts` sequences at once.

    Operators are listed when they are first needed.
    """

    def __init__(self, counts: Array) -> None:
        self.counts = counts.astype(float)
        self._operators: dict[object, list[Operator]] = {}
        self._stacks: dict[object, Stack] = {}

    def on(self, deployment: Deployment, lengths: Lengths, wanted: Array, speculated: Speculated | None = None) -> Times:
        """The times of that deployment, TPOT that of a speculative step where there is a draft.

        wanted: at which counts whole answers are timed, which takes a step for each of their tokens.
        """
        import numpy as np

        nothing = np.full(self.counts.shape, np.nan)
        if not wanted.any():
            return Times(np.nan, nothing, nothing if lengths.output else None)
        first = float(self._prefill(deployment, lengths, 1)[0])
        if speculated:
            tpot = self._speculative(deployment, lengths, speculated)
            burst = self._prefill(deployment, lengths) if lengths.output else None
            return Times(first, tpot, None if burst is None else burst + (lengths.output - 1) * tpot)
        if not lengths.output:
            key = "step", lengths.context
            operators = self._listed(deployment, key, Batch.decode(lengths.context, self.counts))
            return Times(first, self._seconds(deployment, key, self.counts.shape, operators), None)
        tpot, e2e = nothing, np.where(wanted, self._prefill(deployment, lengths), np.nan)
        for at in np.flatnonzero(wanted) if lengths.output > 1 else ():
            total = self._steps(deployment, lengths, int(self.counts[at]))
            tpot[at], e2e[at] = total / (lengths.output - 1), e2e[at] + total
        return Times(first, tpot, e2e)

    def _speculative(self, deployment: Deployment, lengths: Lengths, speculated: Speculated) -> Array:
        """Seconds per token of speculative steps half-way through an answer, as `latency` has them."""
        drafted, context = speculated.drafted, lengths.middle
        draft = msgspec.structs.replace(deployment, model=draft_model(deployment.model, speculated.draft))
        key = "draft", speculated.draft, context
        operators = self._listed(draft, key, Batch.decode(context, self.counts))
        drafting = drafted * self._seconds(draft, key, self.counts.shape, operators)
        check = "verify", drafted, context
        operators = self._listed(deployment, check, verification(self.counts, drafted, context), all_positions=True)
        verifying = self._seconds(deployment, check, self.counts.shape, operators)
        return StepTimes(drafted, None, drafting, verifying).per_token(speculated.acceptance)

    def _listed(self, deployment: Deployment, key: Key, batch: Batch, all_positions: bool = False) -> list[Operator]:
        """The operators of a pass, which hang on a GPU only by how many of them one link joins."""
        known = deployment.ranks.per_node, *key
        if known not in self._operators:
            self._operators[known] = deployment.operators(batch, all_positions)
        return self._operators[known]

    def _prefill(self, deployment: Deployment, lengths: Lengths, count: int = 0) -> Array:
        """Seconds of the pass of `count` prompts, or of as many as each of the counts."""
        (batch,) = prefill_passes(lengths.prompt, 1, lengths.cached)
        group = msgspec.structs.replace(batch.groups[0], count=count or self.counts)
        key = "prefill", count, lengths.prompt, lengths.cached
        operators = self._listed(deployment, key, Batch((group,)))
        return self._seconds(deployment, key, (1,) if count else self.counts.shape, operators)

    def _steps(self, deployment: Deployment, lengths: Lengths, count: int) -> float:
        """Seconds of all steps after the first token, of `count` sequences, added up as `latency` does."""
        total = 0.0
        for contexts in blocks_of(lengths.prompt + 1, lengths.context):
            batch = Batch.decode(contexts, count)
            key = "steps", count, float(contexts[0]), float(contexts[-1])
            operators = self._listed(deployment, key, batch)
            grows = any(hasattr(figure, "shape") for operator in operators for figure in operator.cost)
            each = self._seconds(deployment, key, contexts.shape if grows else (1,), operators)
            total += float(each.sum()) if grows else len(contexts) * float(each[0])
        return total

    def _seconds(self, deployment: Deployment, key: Key, points: tuple[int, ...], operators: list[Operator]) -> Array:
        """Seconds of a pass at each point; NaN where it is no decode step and the GPU gives no matrix peak for it."""
        import numpy as np

        if deployment.calibration:
            from kvcalc.timing.steps import pass_seconds

            found = pass_seconds(operators, deployment.gpu, deployment.calibration, deployment.routing)
            return np.broadcast_to(np.asarray(found, dtype=float), points)
        known = deployment.ranks.per_node, *key
        if known not in self._stacks:
            self._stacks[known] = Stack(operators, points)
        stack, decodes = self._stacks[known], key[0] not in ("prefill", "verify")
        if not decodes and not stack.computes(deployment.gpu):
            return np.full(points, np.nan)
        seconds: Array = stack.seconds(deployment.gpu, memory_alone=decodes)
        return seconds
