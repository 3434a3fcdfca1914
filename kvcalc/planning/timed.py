"""Times of one model under one precision and split, for many numbers of sequences and kinds of GPU at once.

Every figure is that of `latency` and `roofline` to the last bit: the same operators, under the same roof or laws, over arrays.

    TTFT    one prompt by itself, behind its cached prefix
    TPOT    of n sequences at once: a step at the context, or the mean over the steps of an answer
    e2e     n prompts at once, and their steps: `latency`'s of a batch of n
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.gpu.roof import Roofs, Stack
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.operators import between_stages, through_layers
from kvcalc.model.spec import Model
from kvcalc.planning.need import Lengths
from kvcalc.planning.space import Speculated
from kvcalc.serving.latency import BLOCK, blocks_of, prefill_passes, verification
from kvcalc.serving.speculation import StepTimes, draft_model
from kvcalc.timing.deployment import Deployment

Key = tuple[Any, ...]
MOST_KEPT = 1024  # passes whose operators are kept at a time
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


class Times(NamedTuple):
    """Seconds [GPUs], and [GPUs, counts]; NaN where none is known. e2e: None where an answer has no end."""

    ttft: Array
    tpot: Array
    e2e: Array | None


class Timed:
    """The passes of deployments that differ by their GPUs, calibrations and pipeline stages, for `counts` sequences at once.

    Operators are listed when they are first needed. Stages add but what they hand on: what a GPU takes for the layers is kept
    until `forget`.
    """

    def __init__(self, counts: Array) -> None:
        self.counts = counts.astype(float)
        self._operators: dict[Key, list[Operator]] = {}
        self._stacks: dict[Key, Stack] = {}
        self._kernels: dict[Key, Array] = {}
        self._drafts: dict[str, Model] = {}

    def forget(self) -> None:
        """Other GPUs come next."""
        self._kernels.clear()

    def on(
        self,
        fleet: Sequence[Deployment],
        lengths: Lengths,
        counts: Array,
        holds: Array,
        speculated: Speculated | None = None,
    ) -> Times:
        """The times of deployments for some of the counts, TPOT that of a speculative step where there is a draft.

        holds [GPUs, counts]: which of them fit; a deployment of which none does is not timed, and whole answers are timed for
        these alone, as they take a step for each of their tokens.
        """
        import numpy as np

        timed = np.flatnonzero(holds.any(axis=1)).tolist()
        some = [fleet[at] for at in timed]
        found = self._on(some, lengths, np.searchsorted(self.counts, counts), holds[timed], speculated) if some else None
        ttft, tpot = np.full(len(fleet), np.nan), np.full(holds.shape, np.nan)
        e2e = tpot.copy() if lengths.output else None
        if found:
            ttft[timed], tpot[timed] = found.ttft, found.tpot
            if e2e is not None:
                e2e[timed] = found.e2e
        return Times(ttft, tpot, e2e)

    def _on(self, fleet: Sequence[Deployment], lengths: Lengths, at: Array, holds: Array, speculated: Speculated | None) -> Times:
        """The times of deployments at those places of the counts."""
        import numpy as np

        first, steps = self._prefill(fleet, lengths, 1)[:, 0], lengths.output - 1
        if speculated:
            tpot = self._speculative(fleet, lengths, speculated)[:, at]
            return Times(first, tpot, self._prefill(fleet, lengths)[:, at] + steps * tpot if lengths.output else None)
        if not lengths.output:
            return Times(
                first, self._seconds(fleet, ("step", lengths.context), Batch.decode(lengths.context, self.counts))[:, at], None
            )
        prompts = np.where(holds, self._prefill(fleet, lengths)[:, at], np.nan)
        if not steps:
            return Times(first, prompts * np.nan, prompts)
        wanted = np.zeros((len(fleet), *self.counts.shape), bool)
        wanted[:, at] = holds
        total = np.stack([self._steps(one, lengths, which) for one, which in zip(fleet, wanted, strict=True)])[:, at]
        total = np.where(holds, total, np.nan)
        return Times(first, total / steps, prompts + total)

    def _speculative(self, fleet: Sequence[Deployment], lengths: Lengths, speculated: Speculated) -> Array:
        """Seconds per token of speculative steps half-way through an answer, as `latency` has them."""
        name, drafted, context = speculated.draft, speculated.drafted, lengths.middle
        if name not in self._drafts:
            self._drafts[name] = draft_model(fleet[0].model, name)
        drafts = [msgspec.structs.replace(one, model=self._drafts[name]) for one in fleet]
        drafting = drafted * self._seconds(drafts, ("draft", name, context), Batch.decode(context, self.counts))
        check = "verify", drafted, context
        verifying = self._seconds(fleet, check, verification(self.counts, drafted, context), all_positions=True)
        return StepTimes(drafted, None, drafting, verifying).per_token(speculated.acceptance)

    def _prefill(self, fleet: Sequence[Deployment], lengths: Lengths, count: int = 0) -> Array:
        """Seconds of the pass of `count` prompts, or of as many as each of the counts."""
        (batch,) = prefill_passes(lengths.prompt, 1, lengths.cached)
        group = msgspec.structs.replace(batch.groups[0], count=count or self.counts)
        key = "prefill", count, lengths.prompt, lengths.cached
        return self._seconds(fleet, key, Batch((group,)))

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
        return self._seconds([deployment], key, Batch.decode(contexts[None, :], counts[:, None]))[0]

    def _seconds(self, fleet: Sequence[Deployment], key: Key, batch: Batch, all_positions: bool = False) -> Array:
        """Seconds [GPUs, points] of a pass; NaN where it is no decode step and the GPU gives no matrix peak for it.

        Points have as many axes as the batch has, along which its figures change.
        """
        import numpy as np

        alike: dict[tuple[Parallelism, bool], list[int]] = {}
        for at, deployment in enumerate(fleet):
            alike.setdefault((deployment.ranks, bool(deployment.calibration)), []).append(at)
        found: list[Array] = [None] * len(fleet)
        for (ranks, predicted), places in alike.items():
            some = [fleet[at] for at in places]
            known, handed = (ranks.near(ranks.tp * ranks.dp), *key), (ranks, *key)
            self._list(some[0], known, handed, batch, all_positions)
            if predicted:
                seconds = [self._predicted(one, known, handed) for one in some]
            else:
                seconds = self._bounds(some, known, handed, batch.decodes)
            for at, each in zip(places, seconds, strict=True):
                found[at] = each
        return np.stack(found)

    def _list(self, deployment: Deployment, known: Key, handed: Key, batch: Batch, all_positions: bool) -> None:
        """Have the operators of a pass through the layers, and of what stages hand on."""
        if len(self._operators) > MOST_KEPT and known not in self._operators:
            for kept in (self._operators, self._stacks, self._kernels):
                kept.clear()
        run = deployment.model, batch, deployment.precision, deployment.ranks
        if known not in self._operators:
            self._operators[known] = through_layers(*run, deployment.mla_form, all_positions)
        if handed not in self._operators:
            self._operators[handed] = between_stages(*run)

    def _bounds(self, fleet: Sequence[Deployment], known: Key, handed: Key, decodes: bool) -> Array:
        """The least seconds [GPUs, points] of listed operators."""
        import numpy as np

        for key in (known, handed):
            if key not in self._stacks:
                self._stacks[key] = Stack(self._operators[key])
        fresh = [one.gpu for one in fleet if (known, one.gpu.name) not in self._kernels]
        if fresh:
            least = np.moveaxis(self._stacks[known].seconds(Roofs(fresh), decodes), -1, 0)
            self._kernels |= {(known, gpu.name): each for gpu, each in zip(fresh, least, strict=True)}
        kernels = np.stack([self._kernels[known, one.gpu.name] for one in fleet], axis=-1)
        if self._operators[handed]:
            kernels = self._stacks[handed].seconds(Roofs([one.gpu for one in fleet]), decodes, kernels)
        return np.moveaxis(np.atleast_2d(kernels), -1, 0)

    def _predicted(self, deployment: Deployment, known: Key, handed: Key) -> Array:
        """Seconds of listed operators under a calibration, as `pass_seconds` has them."""
        import numpy as np

        from kvcalc.timing.steps import engine_seconds, kernel_seconds

        layers, sends = self._operators[known], self._operators[handed]
        gpu, calibration, routing = deployment.gpu, deployment.calibration, deployment.routing
        assert calibration
        if (known, gpu.name) not in self._kernels:
            self._kernels[known, gpu.name] = kernel_seconds(layers, gpu, calibration, routing)
        kernels = kernel_seconds(sends, gpu, calibration, routing, self._kernels[known, gpu.name])
        return np.atleast_1d(kernels + engine_seconds([*layers, *sends], calibration, kernels))
