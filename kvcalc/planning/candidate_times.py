"""TTFT, TPOT and end-to-end times of many deployments of one model, for many numbers of sequences.

All times equal the times of `latency` and `roofline` to the last bit. They come from the same
operators and time models, evaluated over arrays.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.gpu.gpu import GpuRates
from kvcalc.layers.batch import Batch
from kvcalc.model.forward_pass import between_stages, handings, through_layers
from kvcalc.model.model import Model
from kvcalc.planning.search_space import Speculation
from kvcalc.question.plan_options import RequestLengths
from kvcalc.serving.request_latency import BLOCK, blocks_of, prefill_passes
from kvcalc.serving.speculation import StepTimes, verification
from kvcalc.timing.deployment import TimedDeployment

Array = Any  # a NumPy array; its element types are not checked


class StageVariants(NamedTuple):
    """Deployments on one GPU model that differ only in their number of pipeline stages.

    Attributes:
        deployment: One of the deployments. It stands for all of them in calculations that do not
            depend on the number of pipeline stages.
        indices: Position of each deployment in the list that `group_stage_variants` was given.
        transfers: Number of times that a forward pass sends activations from one pipeline stage to
            the next, as an array [2, deployments]. The first row counts transfers within a node,
            the second row transfers to another node.
    """

    deployment: TimedDeployment
    indices: Array
    transfers: Array


def group_stage_variants(deployments: Sequence[TimedDeployment]) -> list[list[StageVariants]]:
    """Return groups of deployments that differ only in GPU model and number of pipeline stages.

    All deployments of a group run the same operators in a forward pass, apart from transfers
    between stages. So the operators of a group are computed only once. A stage may be spread over
    several nodes; groups differ in the number of a stage's GPUs that are on one node.

    Args:
        deployments: Deployments of one model that differ only in GPU model and number of pipeline
            stages.

    Returns:
        A list of groups. A group is a list with one `StageVariants` for each GPU model.
    """
    import numpy as np

    members: dict[int, dict[str, list[int]]] = {}
    transfers = []
    for index, deployment in enumerate(deployments):
        ranks = deployment.ranks
        by_gpu = members.setdefault(ranks.near(ranks.stage_gpus), {})
        by_gpu.setdefault(deployment.gpu.name, []).append(index)
        transfers.append(handings(ranks, range(ranks.pp - 1)))
    all_transfers = np.array(transfers).T
    return [
        [
            StageVariants(deployments[indices[0]], np.array(indices), all_transfers[:, indices])
            for indices in by_gpu.values()
        ]
        for by_gpu in members.values()
    ]


def time_pass(
    group: Sequence[StageVariants],
    batch: Batch,
    model: Model | None = None,
    all_positions: bool = False,
) -> Iterator[tuple[Array, Array]]:
    """Yield the seconds of one forward pass for the deployments of a group, GPU model by GPU model.

    The seconds are predictions if a deployment has a calibration (time models fitted to
    measurements), otherwise datasheet bounds. They are NaN if the pass contains prompts and the GPU
    has no matrix peak for its products.

    Args:
        group: One `StageVariants` for each GPU model, from `group_stage_variants`.
        batch: Sequences that run through the pass together, such as a micro-batch. Their number and
            lengths may be arrays of shape [*points], to time many passes in one call.
        model: Model that runs, such as a draft model; None for the model of the deployments.
        all_positions: Whether the LM head runs on all new tokens of a sequence instead of the last
            one.

    Yields:
        For each GPU model, a pair (indices, seconds). `indices` are the positions of its
        deployments in the list given to `group_stage_variants`. `seconds` is an array [deployments,
        *points]. An axis has length 1 if the time does not depend on it.
    """
    import numpy as np

    from kvcalc.timing.steps import engine_seconds, kernel_seconds

    deployment = group[0].deployment
    run = (model or deployment.model, batch, deployment.precision, deployment.ranks)
    layers = through_layers(*run, deployment.mla_form, all_positions)
    transfers = between_stages(*run, (1, 1))
    num_axes = max(1, np.ndim(batch.groups[0].count))
    deployments = [variants.deployment for variants in group]
    bounded_gpus = [d.gpu for d in deployments if not d.calibration]
    roofs = GpuRates(bounded_gpus)
    through_s: Array = sum((roofs.seconds(operator, batch.decodes) for operator in layers), 0.0)
    between_s = [roofs.seconds(operator, batch.decodes) for operator in transfers]
    for variants in group:
        counts = [count.reshape(-1, *[1] * num_axes) for count in variants.transfers]
        gpu, calibration = variants.deployment.gpu, variants.deployment.calibration
        if calibration:
            operators = layers + [
                replace(transfer, count=count)
                for transfer, count in zip(transfers, counts)
                if count.any()
            ]
            kernels_s = kernel_seconds(operators, gpu, calibration)
            seconds = kernels_s + engine_seconds(operators, calibration, kernels_s)
        else:
            index = bounded_gpus.index(gpu)
            seconds = through_s[..., index]
            for transfer_s, count in zip(between_s, counts):
                if count.any():
                    seconds = seconds + transfer_s[..., index] * count
        yield variants.indices, seconds


class DeploymentTimer:
    """Computes TTFT, TPOT and end-to-end times of requests for deployments of one model.

    The deployments differ only in GPU model and number of pipeline stages.

    Args:
        deployments: The deployments.
        counts: Numbers of concurrent sequences per replica for which times are computed.
        speculation: Speculative decoding of all deployments; None without speculative decoding.
        draft: The draft model of `speculation`; None without one.

    Attributes:
        sizes: Distinct numbers of sequences in a micro-batch, in ascending order. A micro-batch is
            the part of a replica's sequences that goes through a pipeline stage together. Times
            depend only on its size.
        columns: For each deployment and each number in `counts`, the index in `sizes` of its
            micro-batch, as an array [deployments, counts].
        groups: The deployments, as `group_stage_variants` returns them.
    """

    def __init__(
        self,
        deployments: Sequence[TimedDeployment],
        counts: Array,
        speculation: Speculation | None,
        draft: Model | None,
    ) -> None:
        import numpy as np

        self.deployments = deployments
        self.counts = counts.astype(float)
        batch = Batch.decode(1, self.counts)
        shares = [deployment.timed_batch(batch).groups[0].count for deployment in deployments]
        self.sizes, columns = np.unique(np.array(shares), return_inverse=True)
        self.columns = columns.reshape(len(deployments), len(counts))
        self.speculation = speculation
        self.draft = draft
        self.groups = group_stage_variants(deployments)

    def times(self, lengths: RequestLengths, capacity: Array) -> tuple[Array, Array, Array]:
        """Return (TTFT, TPOT, end-to-end time) of requests in seconds; NaN if unknown.

        TTFT is the time to the first token, TPOT the time per output token. The axes of the arrays
        are the deployments of the timer, and its numbers of concurrent sequences (`counts`).
        Without speculative decoding, all steps of an answer are timed. This takes long, so it is
        done only for counts that fit; for others, TPOT and end-to-end time are NaN.

        Args:
            lengths: Tokens of prompt and answer of each request; all requests are equal.
            capacity: Number of sequences that fit on a replica, as an array [deployments, counts].
                It depends on the count because an engine that is set up for more sequences reserves
                more memory.

        Returns:
            TTFT of one prompt on an idle replica [deployments]. TPOT [deployments, counts], as a
            mean over the tokens of an answer after the first. With speculative decoding, it is the
            TPOT in the middle of the answer. If the output length is unknown, it is the time of a
            decode step at the full context. End-to-end time [deployments, counts]: the prefill of
            all sequences together, plus all decode steps. It is NaN if the output length is
            unknown.
        """
        import numpy as np

        fits = capacity >= self.counts

        def seconds(
            batch: Batch, model: Model | None = None, all_positions: bool = False
        ) -> Array:
            results = np.full((len(fits), len(self.sizes)), np.nan)
            for group in self.groups:
                for indices, pass_s in time_pass(group, batch, model, all_positions):
                    results[indices] = pass_s
            return np.take_along_axis(results, self.columns, axis=1)

        (prompt,) = prefill_passes(lengths.prompt, 1, lengths.cached)
        ttft = seconds(prompt)[:, 0]
        later_tokens = lengths.output - 1
        if self.speculation:
            tokens = self.speculation.num_tokens
            draft_s = seconds(Batch.decode(lengths.middle, self.sizes), model=self.draft)
            verify_s = seconds(
                verification(self.sizes, tokens, lengths.middle), all_positions=True
            )
            step = StepTimes(tokens, None, tokens * draft_s, verify_s)
            tpot = step.per_token(self.speculation.acceptance)
            steps = later_tokens * tpot
        elif lengths.output:
            steps = np.where(fits, self._steps(lengths, fits), np.nan)
            tpot = steps / (later_tokens or np.nan)
        else:
            tpot = seconds(Batch.decode(lengths.context, self.sizes))
        if not lengths.output:
            return ttft, tpot, np.full(fits.shape, np.nan)
        return (
            ttft,
            tpot,
            seconds(Batch((replace(prompt.groups[0], count=self.sizes),))) + steps,
        )

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
                is_timed: Array = has_size[:, columns].any(axis=1)
                for group in self.groups:
                    variants = [variant for variant in group if is_timed[variant.indices].any()]
                    for indices, seconds in time_pass(variants, batch) if variants else ():
                        # one column stands for all contexts if no figure depends on them
                        repeats = 1 if seconds.shape[-1] > 1 else len(contexts)
                        total[indices, columns] += repeats * seconds.sum(axis=-1)
        return np.take_along_axis(total, self.columns, axis=1)
