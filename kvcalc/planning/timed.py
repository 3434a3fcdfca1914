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
from kvcalc.serving.latency import blocks_of, prefill_passes
from kvcalc.timing.deployment import Deployment

Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


class Times(NamedTuple):
    """Seconds at each number of sequences, NaN where none is known. e2e: None where an answer has no end."""

    ttft: float
    tpot: Array
    e2e: Array | None


class Timed:
    """The passes of a deployment for `counts` sequences at once, their operators listed when they are first needed."""

    def __init__(self, base: Deployment, counts: Array) -> None:
        self.base, self.counts = base, counts.astype(float)
        self._operators: dict[object, list[Operator]] = {}
        self._stacks: dict[object, Stack] = {}

    def on(self, deployment: Deployment, lengths: Lengths, wanted: Array) -> Times:
        """The times on that deployment, which differs from the base by its GPU and calibration.

        wanted: at which counts whole answers are timed, which takes a step for each of their tokens.
        """
        import numpy as np

        nothing = np.full(self.counts.shape, np.nan)
        if not wanted.any():
            return Times(np.nan, nothing, nothing if lengths.output else None)
        first = float(self._prefill(deployment, lengths, 1)[0])
        if not lengths.output:
            key = "step", lengths.context
            batch = Batch.decode(lengths.context, self.counts)
            return Times(first, self._seconds(deployment, key, self.counts.shape, self._listed(key, batch)), None)
        tpot, e2e = nothing, np.where(wanted, self._prefill(deployment, lengths), np.nan)
        for at in np.flatnonzero(wanted) if lengths.output > 1 else ():
            total = self._steps(deployment, lengths, int(self.counts[at]))
            tpot[at], e2e[at] = total / (lengths.output - 1), e2e[at] + total
        return Times(first, tpot, e2e)

    def _listed(self, key: tuple[Any, ...], batch: Batch) -> list[Operator]:
        if key not in self._operators:
            self._operators[key] = self.base.operators(batch)
        return self._operators[key]

    def _prefill(self, deployment: Deployment, lengths: Lengths, count: int = 0) -> Array:
        """Seconds of the pass of `count` prompts, or of as many as each of the counts."""
        (batch,) = prefill_passes(lengths.prompt, 1, lengths.cached)
        group = msgspec.structs.replace(batch.groups[0], count=count or self.counts)
        key = "prefill", count, lengths.prompt, lengths.cached
        return self._seconds(deployment, key, (1,) if count else self.counts.shape, self._listed(key, Batch((group,))))

    def _steps(self, deployment: Deployment, lengths: Lengths, count: int) -> float:
        """Seconds of all steps after the first token, of `count` sequences, added up as `latency` does."""
        total = 0.0
        for contexts in blocks_of(lengths.prompt + 1, lengths.context):
            batch = Batch.decode(contexts, count)
            key = "steps", count, float(contexts[0]), float(contexts[-1])
            operators = self._listed(key, batch)
            grows = any(hasattr(figure, "shape") for operator in operators for figure in operator.cost)
            each = self._seconds(deployment, key, contexts.shape if grows else (1,), operators)
            total += float(each.sum()) if grows else len(contexts) * float(each[0])
        return total

    def _seconds(self, deployment: Deployment, key: tuple[Any, ...], points: tuple[int, ...], operators: list[Operator]) -> Array:
        """Seconds of a pass at each point; NaN where it is no decode step and the GPU gives no matrix peak for it."""
        import numpy as np

        if deployment.calibration:
            from kvcalc.timing.steps import pass_seconds

            found = pass_seconds(operators, deployment.gpu, deployment.calibration, deployment.routing)
            return np.broadcast_to(np.asarray(found, dtype=float), points)
        if key not in self._stacks:
            self._stacks[key] = Stack(operators, points)
        stack, decodes = self._stacks[key], key[0] != "prefill"
        if not decodes and not stack.computes(deployment.gpu):
            return np.full(points, np.nan)
        seconds: Array = stack.seconds(deployment.gpu, memory_alone=decodes)
        return seconds
