"""Times of one model under one precision, for many numbers of sequences, kinds of GPU and numbers of stages at once.

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
from kvcalc.model.operators import between_stages, through_layers
from kvcalc.model.spec import Model
from kvcalc.planning.fleet import Alike, alike
from kvcalc.planning.need import Lengths
from kvcalc.planning.space import Speculated
from kvcalc.serving.latency import BLOCK, blocks_of, prefill_passes, verification
from kvcalc.serving.speculation import StepTimes, draft_model
from kvcalc.timing.deployment import Deployment

Key = tuple[Any, ...]
MOST_KEPT = 1024  # passes whose operators are kept at a time
Array = Any  # of NumPy, whose kinds of number mypy tells apart more than is told here


class Times(NamedTuple):
    """Seconds [deployments], and [deployments, counts]; NaN where none is known. e2e: None where an answer has no end."""

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
        self._sends: dict[Key, list[Operator]] = {}
        self._stacks: dict[Key, tuple[Stack, Stack]] = {}
        self._kernels: dict[Key, Array] = {}
        self._drafts: dict[str, Model] = {}

    def forget(self) -> None:
        """Other GPUs come next."""
        self._kernels.clear()

    def on(self, fleet: Sequence[Deployment], lengths: Lengths, capacity: Array, speculated: Speculated | None = None) -> Times:
        """The times of deployments, TPOT that of a speculative step where there is a draft.

        capacity [deployments, counts]: sequences that fit at each setting. A deployment that holds no sequence is not timed.
        Whole answers are timed for counts that fit alone, as they take a step for each of their tokens.
        """
        import numpy as np

        holds, timed = capacity >= self.counts, np.flatnonzero((capacity > 0).any(axis=1))
        ttft, tpot = np.full(len(fleet), np.nan), np.full(holds.shape, np.nan)
        e2e = tpot.copy() if lengths.output else None
        if timed.size:
            found = self._on([fleet[at] for at in timed.tolist()], lengths, holds[timed], speculated)
            ttft[timed], tpot[timed] = found.ttft, found.tpot
            if e2e is not None:
                e2e[timed] = found.e2e
        return Times(ttft, tpot, e2e)

    def _on(self, deployments: Sequence[Deployment], lengths: Lengths, holds: Array, speculated: Speculated | None) -> Times:
        """The times of deployments of which some fit."""
        import numpy as np

        fleet = alike(deployments)
        first, steps = self._prefill(fleet, lengths, 1)[:, 0], lengths.output - 1
        if speculated:
            tpot = self._speculative(fleet, lengths, speculated)
            return Times(first, tpot, self._prefill(fleet, lengths) + steps * tpot if lengths.output else None)
        if not lengths.output:
            return Times(first, self._seconds(fleet, ("step", lengths.context), Batch.decode(lengths.context, self.counts)), None)
        prompts = np.where(holds, self._prefill(fleet, lengths), np.nan)
        if not steps:
            return Times(first, prompts * np.nan, prompts)
        total = np.stack([self._steps(one, lengths, which) for one, which in zip(deployments, holds, strict=True)])
        total = np.where(holds, total, np.nan)
        return Times(first, total / steps, prompts + total)

    def _speculative(self, fleet: list[Alike], lengths: Lengths, speculated: Speculated) -> Array:
        """Seconds per token of speculative steps half-way through an answer, as `latency` has them."""
        name, drafted, context = speculated.draft, speculated.drafted, lengths.middle
        if name not in self._drafts:
            self._drafts[name] = draft_model(fleet[0].kinds[0].model, name)
        model = self._drafts[name]
        drafts = [some._replace(kinds=[msgspec.structs.replace(one, model=model) for one in some.kinds]) for some in fleet]
        drafting = drafted * self._seconds(drafts, ("draft", name, context), Batch.decode(context, self.counts))
        check = "verify", drafted, context
        verifying = self._seconds(fleet, check, verification(self.counts, drafted, context), all_positions=True)
        return StepTimes(drafted, None, drafting, verifying).per_token(speculated.acceptance)

    def _prefill(self, fleet: list[Alike], lengths: Lengths, count: int = 0) -> Array:
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

        total, alone = np.zeros(self.counts.shape), alike([deployment])
        for contexts in blocks_of(lengths.prompt + 1, lengths.context):
            several = max(1, BLOCK // len(contexts))
            for at in range(0, len(total), several):
                here = slice(at, at + several)
                if wanted[here].any():
                    each = self._block(alone, contexts, self.counts[here])
                    total[here] += each.sum(axis=1) if each.shape[1] > 1 else len(contexts) * each[:, 0]
        return total

    def _block(self, alone: list[Alike], contexts: Array, counts: Array) -> Array:
        """Seconds of steps as [counts, contexts], or [counts, 1] where no figure changes with the context."""
        key = "steps", float(counts[0]), len(counts), float(contexts[0]), len(contexts)
        return self._seconds(alone, key, Batch.decode(contexts[None, :], counts[:, None]))[0]

    def _seconds(self, fleet: list[Alike], key: Key, batch: Batch, all_positions: bool = False) -> Array:
        """Seconds [deployments, points] of a pass; NaN where it is no decode step and the GPU gives no matrix peak for it.

        Points have as many axes as the batch has, along which its figures change.
        """
        import numpy as np

        each = [self._passed(some, (some.near, *key), batch, all_positions) for some in fleet]
        if len(fleet) == 1:
            return each[0]
        found = np.empty((sum(len(some.places) for some in fleet), *each[0].shape[1:]))
        for some, seconds in zip(fleet, each, strict=True):
            found[some.places] = seconds
        return found

    def _passed(self, some: Alike, key: Key, batch: Batch, all_positions: bool) -> Array:
        """Seconds [deployments, points] of a pass of those whose layers have the same operators."""
        one = some.kinds[0]
        if len(self._operators) > MOST_KEPT and key not in self._operators:
            for kept in (self._operators, self._sends, self._stacks, self._kernels):
                kept.clear()
        run = one.model, batch, one.precision, one.ranks
        if key not in self._operators:
            self._operators[key] = through_layers(*run, one.mla_form, all_positions)
        if some.handed.any() and key not in self._sends:
            self._sends[key] = between_stages(*run, (1, 1))
            self._stacks.pop(key, None)
        return self._predicted(some, key) if one.calibration else self._bounds(some, key, batch.decodes)

    def _bounds(self, some: Alike, key: Key, decodes: bool) -> Array:
        """The least seconds [deployments, points] of listed operators."""
        import numpy as np

        if key not in self._stacks:
            self._stacks[key] = Stack(self._operators[key]), Stack(self._sends.get(key, []))
        layers, sends = self._stacks[key]
        fresh = [one.gpu for one in some.kinds if (key, one.gpu.name) not in self._kernels]
        if fresh:
            least = _by_gpu(sum(layers.each(Roofs(fresh), decodes), 0.0))
            self._kernels |= {(key, gpu.name): each for gpu, each in zip(fresh, least, strict=True)}
        found = np.stack([self._kernels[key, one.gpu.name] for one in some.kinds])[some.which]
        if some.handed.any():
            for least, times in zip(sends.each(Roofs([one.gpu for one in some.kinds]), decodes), some.handed, strict=True):
                found = found + _by_gpu(least)[some.which] * _beside(times, found)
        return found

    def _predicted(self, some: Alike, key: Key) -> Array:
        """Seconds [deployments, points] of listed operators under calibrations, as `pass_seconds` has them."""
        import numpy as np

        from kvcalc.timing.steps import engine_seconds, kernel_seconds

        layers, each = self._operators[key], []
        for number, one in enumerate(some.kinds):
            known = key, one.gpu.name
            assert one.calibration
            if known not in self._kernels:
                self._kernels[known] = np.atleast_1d(kernel_seconds(layers, one.gpu, one.calibration, one.routing))
            times = some.handed[:, some.which == number]
            kernels = np.broadcast_to(self._kernels[known], (times.shape[1], *self._kernels[known].shape))
            sends = [
                msgspec.structs.replace(operator, count=_beside(count, kernels))
                for operator, count in zip(self._sends.get(key, []), times, strict=False)
                if count.any()
            ]
            kernels = kernel_seconds(sends, one.gpu, one.calibration, one.routing, kernels)
            each.append(kernels + engine_seconds(layers, one.calibration, kernels))
        found = np.concatenate(each)
        found[np.argsort(some.which, kind="stable")] = found.copy()
        return found


def _by_gpu(seconds: Array) -> Array:
    """Seconds [*points, GPUs] as [GPUs, points], with at least one axis of points."""
    import numpy as np

    return np.moveaxis(np.atleast_2d(seconds), -1, 0)


def _beside(each: Array, points: Array) -> Array:
    """A figure of each deployment, to broadcast beside those of [deployments, points]."""
    return each.reshape(-1, *(1 for _ in points.shape[1:]))
