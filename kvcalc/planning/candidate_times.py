"""TTFT, TPOT and end-to-end times of many deployments of one model, for many numbers of sequences.

All times equal those of `latency` and `roofline` to the last bit. They come from the same
operators and time models, evaluated over arrays.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvcalc.gpu.roof import OperatorBatch, Roofs
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.model.forward_pass import between_stages, handings, through_layers
from kvcalc.model.model import Model
from kvcalc.planning.search_space import RequestLengths, Speculation
from kvcalc.serving.request_latency import (
    BLOCK,
    blocks_of,
    prefill_passes,
    verification,
)
from kvcalc.serving.speculation import StepTimes
from kvcalc.timing.deployment import TimedDeployment

Array = Any  # a NumPy array; its element types are not checked


class CandidateTimes(NamedTuple):
    """Seconds of deployments; NaN if unknown.

    Attributes:
        ttft: One prompt on an idle replica [deployments].
        tpot: A decode step, or the mean step of an answer [deployments, counts].
        e2e: As many prompts as sequences, and their steps [deployments, counts]. None if the
            output length is unknown.
    """

    ttft: Array
    tpot: Array
    e2e: Array | None


class StageVariants(NamedTuple):
    """Deployments on one GPU model that differ only in their number of pipeline stages.

    Attributes:
        deployment: One of them.
        indices: Their indices among all deployments.
        transfers: Numbers of transfers between stages, within a node and to another node
            [2, deployments].
    """

    deployment: TimedDeployment
    indices: Array
    transfers: Array

    def only(self, is_selected: Array) -> "StageVariants":
        """Return the selected ones of all deployments."""
        selected = is_selected[self.indices]
        return self._replace(
            indices=self.indices[selected], transfers=self.transfers[:, selected]
        )


def group_stage_variants(deployments: Sequence[TimedDeployment]) -> list[StageVariants]:
    """Return the deployments by GPU model and by the ranks of a stage that share a node."""
    import numpy as np

    members: dict[tuple[str, int], list[int]] = {}
    transfers = []
    for index, deployment in enumerate(deployments):
        ranks = deployment.ranks
        key = deployment.gpu.name, ranks.near(ranks.tp * ranks.dp)
        members.setdefault(key, []).append(index)
        transfers.append(handings(ranks, range(ranks.pp - 1)))
    all_transfers = np.array(transfers).T
    return [
        StageVariants(deployments[indices[0]], np.array(indices), all_transfers[:, indices])
        for indices in members.values()
    ]


class TimedPass:
    """A pass whose operators are listed once for all GPU models.

    Args:
        batch: Sequences of the pass; its figures may be arrays [*points].
        model: The model; that of the deployments if None.
    """

    def __init__(
        self, batch: Batch, model: Model | None = None, all_positions: bool = False
    ) -> None:
        self.batch = batch
        self.model = model
        self.all_positions = all_positions
        self._operators: dict[int, tuple[list[Operator], list[Operator]]] = {}
        self._stacked: dict[int, tuple[OperatorBatch, OperatorBatch]] = {}

    def seconds(self, variants: Sequence[StageVariants]) -> list[Array]:
        """Return the seconds of the pass [deployments, *points] for each GPU model.

        They are NaN if the pass is a prefill and the GPU has no matrix peak for it.
        """
        results: dict[int, Array] = {}
        bounds: dict[int, list[int]] = {}
        for number, one in enumerate(variants):
            if one.deployment.calibration:
                results[number] = self._predicted(one)
            else:
                ranks = one.deployment.ranks
                bounds.setdefault(ranks.near(ranks.tp * ranks.dp), []).append(number)
        for numbers in bounds.values():
            seconds = self._bounds([variants[number] for number in numbers])
            results.update(zip(numbers, seconds, strict=True))
        return [results[number] for number in range(len(variants))]

    def _listed(
        self, deployment: TimedDeployment
    ) -> tuple[int, list[Operator], list[Operator]]:
        """Return the key of the operators, those of all layers, and a transfer of each kind."""
        ranks = deployment.ranks
        near = ranks.near(ranks.tp * ranks.dp)
        if near not in self._operators:
            run = (
                self.model or deployment.model,
                self.batch,
                deployment.precision,
                ranks,
            )
            self._operators[near] = (
                through_layers(*run, deployment.mla_form, self.all_positions),
                between_stages(*run, (1, 1)),
            )
        return near, *self._operators[near]

    def _bounds(self, variants: Sequence[StageVariants]) -> Iterator[Array]:
        """Yield the datasheet bounds for GPU models with the same operators."""
        import numpy as np

        near, layers, transfers = self._listed(variants[0].deployment)
        if near not in self._stacked:
            self._stacked[near] = OperatorBatch(layers), OperatorBatch(transfers)
        stacked_layers, stacked_transfers = self._stacked[near]
        roofs = Roofs([one.deployment.gpu for one in variants])

        def by_gpu(seconds: Array) -> Array:  # from [*points, gpus]
            return np.moveaxis(np.atleast_2d(seconds), -1, 0)

        through = by_gpu(sum(stacked_layers.each(roofs, self.batch.decodes), 0.0))
        between = [
            by_gpu(seconds) for seconds in stacked_transfers.each(roofs, self.batch.decodes)
        ]
        for number, one in enumerate(variants):
            seconds = np.broadcast_to(
                through[number], (len(one.indices), *through[number].shape)
            )
            for transfer, counts in zip(between, one.transfers, strict=True):
                if counts.any():
                    seconds = seconds + transfer[number] * _along_first_axis(counts, seconds)
            yield seconds

    def _predicted(self, variants: StageVariants) -> Array:
        """Return the predictions for a GPU model with a calibration, as `pass_seconds`."""
        import numpy as np

        from kvcalc.timing.steps import engine_seconds, kernel_seconds

        deployment = variants.deployment
        calibration = deployment.calibration
        assert calibration
        _, layers, transfers = self._listed(deployment)
        kernels = kernel_seconds(layers, deployment.gpu, calibration, deployment.routing)
        kernels = np.atleast_1d(kernels)
        kernels = np.broadcast_to(kernels, (len(variants.indices), *kernels.shape))
        repeated = [
            msgspec.structs.replace(transfer, count=_along_first_axis(counts, kernels))
            for transfer, counts in zip(transfers, variants.transfers, strict=True)
            if counts.any()
        ]
        kernels = kernel_seconds(
            repeated, deployment.gpu, calibration, deployment.routing, kernels
        )
        return kernels + engine_seconds(layers, calibration, kernels)


def _along_first_axis(values: Array, like: Array) -> Array:
    """Return values [deployments] with the number of axes of `like`."""
    return values.reshape(-1, *(1 for _ in like.shape[1:]))


class DeploymentTimer:
    """Times deployments of one model that differ in GPU and pipeline stages.

    Args:
        counts: Numbers of sequences per replica.
        draft: The draft model of the speculation.

    Attributes:
        sizes: Numbers of sequences of a micro-batch, of all deployments.
        columns: Index in `sizes` of the micro-batch for each count [deployments, counts].
    """

    def __init__(
        self,
        deployments: Sequence[TimedDeployment],
        counts: Array,
        speculation: Speculation | None = None,
        draft: Model | None = None,
    ) -> None:
        import numpy as np

        self.counts = counts.astype(float)
        batch = Batch.decode(1, self.counts)
        shares = [one.timed_batch(batch).groups[0].count for one in deployments]
        self.sizes, columns = np.unique(np.array(shares), return_inverse=True)
        self.columns = columns.reshape(len(deployments), len(counts))
        self.speculation = speculation
        self.draft = draft
        self.variants = group_stage_variants(deployments)

    def times(self, lengths: RequestLengths, capacity: Array) -> CandidateTimes:
        """Return the times of requests of these lengths.

        Deployments without memory for one sequence are not timed. Whole answers are timed only for
        counts that fit, because each of their tokens takes a step.

        Args:
            capacity: Sequences that fit, by deployment and by sequences per replica
                [deployments, counts].
        """
        import numpy as np

        fits = capacity >= self.counts
        variants = self._select((capacity > 0).any(axis=1))
        unknown = np.full(fits.shape, np.nan)
        if not variants:
            return CandidateTimes(unknown[:, 0], unknown, unknown if lengths.output else None)

        def seconds(timed: TimedPass) -> Array:
            results = np.full((len(fits), len(self.sizes)), np.nan)
            for one, part in zip(variants, timed.seconds(variants), strict=True):
                results[one.indices] = part
            return np.take_along_axis(results, self.columns, axis=1)

        (prompt,) = prefill_passes(lengths.prompt, 1, lengths.cached)
        ttft = seconds(TimedPass(prompt))[:, 0]
        if self.speculation:
            draft_s = seconds(
                TimedPass(Batch.decode(lengths.middle, self.sizes), model=self.draft)
            )
            tokens = self.speculation.num_tokens
            check = TimedPass(
                verification(self.sizes, tokens, lengths.middle), all_positions=True
            )
            step = StepTimes(tokens, None, tokens * draft_s, seconds(check))
            tpot = step.per_token(self.speculation.acceptance)
        elif not lengths.output:
            tpot = seconds(TimedPass(Batch.decode(lengths.context, self.sizes)))
        if not lengths.output:
            return CandidateTimes(ttft, tpot, None)

        group = msgspec.structs.replace(prompt.groups[0], count=self.sizes)
        prompts = seconds(TimedPass(Batch((group,))))
        later_tokens = lengths.output - 1
        if self.speculation:
            return CandidateTimes(ttft, tpot, prompts + later_tokens * tpot)
        steps = np.where(fits, self._steps(lengths, fits), np.nan)
        tpot = steps / (later_tokens or np.nan)
        return CandidateTimes(ttft, tpot, np.where(fits, prompts, np.nan) + steps)

    def _select(self, is_selected: Array) -> list[StageVariants]:
        variants = [one.only(is_selected) for one in self.variants]
        return [one for one in variants if one.indices.size]

    def _steps(self, lengths: RequestLengths, fits: Array) -> Array:
        """Return the seconds of all steps after the first token [deployments, counts], added up as
        in `latency`."""
        import numpy as np

        num_sizes = len(self.sizes)
        rows, counts = np.nonzero(fits)
        has_size = np.zeros((len(fits), num_sizes), dtype=bool)
        has_size[rows, self.columns[rows, counts]] = True
        total = np.zeros(has_size.shape)
        for contexts in blocks_of(lengths.prompt + 1, lengths.context):
            num_columns = max(1, BLOCK // len(contexts))
            for start in range(0, num_sizes, num_columns):
                columns = slice(start, start + num_columns)
                batch = Batch.decode(contexts[None, :], self.sizes[columns, None])
                timed = TimedPass(batch)
                for one in self._select(has_size[:, columns].any(axis=1)):
                    (seconds,) = timed.seconds([one])
                    # one column stands for all contexts if no figure depends on the context
                    repeats = 1 if seconds.shape[-1] > 1 else len(contexts)
                    total[one.indices, columns] += repeats * seconds.sum(axis=-1)
        return np.take_along_axis(total, self.columns, axis=1)
