"""Times of one model under one precision and split, for many numbers of sequences at once and one GPU after another.

Every figure is that of `latency` and `roofline` to the last bit: the same operators, under the same roof or laws, over arrays.

    TTFT    one prompt by itself, behind its cached prefix
    TPOT    of n sequences at once: a step at the context, or the mean over the steps of an answer
    e2e     n prompts at once, and their steps: `latency`'s of a batch of n
"""

from typing import Any, NamedTuple

import msgspec

from kvcalc.gpu.roof import Stack, roofline
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.model.operators import between_stages, through_layers
from kvcalc.planning.need import Lengths
from kvcalc.planning.space import Speculated
from kvcalc.serving.latency import BLOCK, blocks_of, prefill_passes, verification
from kvcalc.serving.speculation import StepTimes, draft_model
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.routing import Routing

Key = tuple[Any, ...]
MOST_KEPT = 1024  # passes whose operators are kept at a time
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


class Times(NamedTuple):
    """Seconds at each number of sequences, NaN where none is known. e2e: None where an answer has no end."""

    ttft: float
    tpot: Array
    e2e: Array | None


class Timed:
    """The passes of deployments that differ by their GPUs, calibrations and pipeline stages, for `counts` sequences at once.

    Operators are listed when they are first needed. Stages add but what they hand on: what a GPU takes for the layers is kept
    until another GPU is asked for.
    """

    def __init__(self, counts: Array) -> None:
        self.counts = counts.astype(float)
        self._operators: dict[Key, list[Operator]] = {}
        self._stacks: dict[Key, Stack] = {}
        self._kernels: dict[Key, Array] = {}
        self._gpu = ""

    def on(
        self, deployment: Deployment, lengths: Lengths, counts: Array, holds: Array, speculated: Speculated | None = None
    ) -> Times:
        """The times of that deployment for some of the counts, TPOT that of a speculative step where there is a draft.

        holds: which of them fit; whole answers are timed for these alone, as they take a step for each of their tokens.
        """
        import numpy as np

        nothing = np.full(counts.shape, np.nan)
        if not holds.any():
            return Times(np.nan, nothing, nothing if lengths.output else None)
        at = np.searchsorted(self.counts, counts)
        first = float(self._prefill(deployment, lengths, 1)[0])
        if speculated:
            tpot, more = self._speculative(deployment, lengths, speculated)[at], lengths.output - 1
            return Times(first, tpot, self._prefill(deployment, lengths)[at] + more * tpot if lengths.output else None)
        if not lengths.output:
            step = self._seconds(deployment, ("step", lengths.context), Batch.decode(lengths.context, self.counts))
            return Times(first, step[at], None)
        prompts, steps = np.where(holds, self._prefill(deployment, lengths)[at], np.nan), lengths.output - 1
        if not steps:
            return Times(first, nothing, prompts)
        wanted = np.zeros(self.counts.shape, bool)
        wanted[at] = holds
        total = np.where(holds, self._steps(deployment, lengths, wanted)[at], np.nan)
        return Times(first, total / steps, prompts + total)

    def _speculative(self, deployment: Deployment, lengths: Lengths, speculated: Speculated) -> Array:
        """Seconds per token of speculative steps half-way through an answer, as `latency` has them."""
        drafted, context = speculated.drafted, lengths.middle
        draft = msgspec.structs.replace(deployment, model=draft_model(deployment.model, speculated.draft))
        key = "draft", speculated.draft, context
        drafting = drafted * self._seconds(draft, key, Batch.decode(context, self.counts))
        check = "verify", drafted, context
        verifying = self._seconds(deployment, check, verification(self.counts, drafted, context), all_positions=True)
        return StepTimes(drafted, None, drafting, verifying).per_token(speculated.acceptance)

    def _prefill(self, deployment: Deployment, lengths: Lengths, count: int = 0) -> Array:
        """Seconds of the pass of `count` prompts, or of as many as each of the counts."""
        (batch,) = prefill_passes(lengths.prompt, 1, lengths.cached)
        group = msgspec.structs.replace(batch.groups[0], count=count or self.counts)
        key = "prefill", count, lengths.prompt, lengths.cached
        return self._seconds(deployment, key, Batch((group,)))

    def _steps(self, deployment: Deployment, lengths: Lengths, wanted: Array) -> Array:
        """Seconds of all steps after the first token at each of the counts that are wanted, added up as `latency` does.

        Points stand as [counts, contexts], BLOCK of them at a time.
        """
        import numpy as np

        total = np.zeros(self.counts.shape)
        for contexts in blocks_of(lengths.prompt + 1, lengths.context):
            several = max(1, BLOCK // len(contexts))
            for at in range(0, len(total), several):
                here = slice(at, at + several)
                if wanted[here].any():
                    each = self._block(deployment, contexts, self.counts[here])
                    total[here] += each.sum(axis=1) if each.shape[1] > 1 else len(contexts) * each[:, 0]
        return total

    def _block(self, deployment: Deployment, contexts: Array, counts: Array) -> Array:
        """Seconds of steps as [counts, contexts], or [counts, 1] where no figure changes with the context."""
        key = "steps", float(counts[0]), len(counts), float(contexts[0]), len(contexts)
        return self._seconds(deployment, key, Batch.decode(contexts[None, :], counts[:, None]))

    def _seconds(self, deployment: Deployment, key: Key, batch: Batch, all_positions: bool = False) -> Array:
        """Seconds of a pass at each point; NaN where it is no decode step and the GPU gives no matrix peak for it.

        Points have as many axes as the batch has, along which its figures change.
        """
        import numpy as np

        model, gpu, precision, ranks = deployment.model, deployment.gpu, deployment.precision, deployment.ranks
        if gpu.name != self._gpu:
            self._kernels.clear()
            self._gpu = gpu.name
        known = ranks.near(ranks.tp * ranks.dp), *key
        if len(self._operators) > MOST_KEPT and known not in self._operators:
            for kept in (self._operators, self._stacks, self._kernels):
                kept.clear()
        if known not in self._operators:
            self._operators[known] = through_layers(model, batch, precision, ranks, deployment.mla_form, all_positions)
        if (ranks, *key) not in self._operators:
            self._operators[ranks, *key] = between_stages(model, batch, precision, ranks)
        layers, sends = self._operators[known], self._operators[ranks, *key]
        if deployment.calibration:
            laws = gpu, deployment.calibration, deployment.routing
            return np.atleast_1d(self._predicted(known, layers, sends, *laws))
        if known not in self._stacks:
            self._stacks[known] = Stack(layers)
        stack = self._stacks[known]
        if not batch.decodes and not stack.computes(gpu):
            return np.full(stack.points or 1, np.nan)
        if known not in self._kernels:
            self._kernels[known] = stack.seconds(gpu, batch.decodes)
        sent = roofline(sends, gpu, batch.decodes)
        return np.atleast_1d(sum((placed.seconds for placed in sent), self._kernels[known]))

    def _predicted(
        self, known: Key, layers: list[Operator], sends: list[Operator], gpu: Gpu, calibration: Calibration, routing: Routing
    ) -> Array:
        """Seconds under a calibration, as `pass_seconds` has them."""
        from kvcalc.timing.steps import engine_seconds, kernel_seconds

        if known not in self._kernels:
            self._kernels[known] = kernel_seconds(layers, gpu, calibration, routing)
        kernels = kernel_seconds(sends, gpu, calibration, routing, self._kernels[known])
        return kernels + engine_seconds([*layers, *sends], calibration, kernels)
