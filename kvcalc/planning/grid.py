"""The candidates of a plan in batches, with their capacity, times and missed targets.

A candidate is a deployment with a number of replicas. Its capacity is the capacity of `fit` at the
low end of the memory range, and its times are the times of `latency`. At a rate of requests,
prompts delay the time per output token. Only one batch is in memory at a time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import grouped
from kvcalc.capacity.batched_fit import BatchedFit, BatchedFitBuilder, Layouts
from kvcalc.capacity.memory_budget import GIB
from kvcalc.errors import UserError, list_few
from kvcalc.layers.batch import Parallelism
from kvcalc.library.load import load_gpu
from kvcalc.model.model import Model
from kvcalc.model.pipeline import check
from kvcalc.model.precision import Precision
from kvcalc.planning.candidate_times import Array, DeploymentTimer
from kvcalc.planning.search_space import SearchSpace, Speculation
from kvcalc.question.plan_options import SEQUENCE_COUNTS, RequestLengths, Requirement
from kvcalc.serving.request_latency import MAX_SUSTAINED_SHARE
from kvcalc.serving.speculation import draft_model
from kvcalc.timing.calibration import Calibration, load_calibration
from kvcalc.timing.deployment import TimedDeployment

MAX_POINTS = 1 << 14  # candidates of a batch, so that their arrays stay in the CPU's cache
FAR = 1e9  # violation factor of a candidate that cannot serve at all


class Target(IntEnum):
    """The targets of a plan, in the order in which they are checked.

    The value for a candidate (a deployment with a number of replicas) is the first target that it
    misses.

    Attributes:
        NONE: All targets are met.
        MEMORY: Fewer sequences fit on a replica than the replica should run (`max_num_seqs`).
        UNKNOWN: A time that a target or the load needs cannot be predicted.
        TTFT: The time to first token is too long.
        TPOT: The time per output token is too long.
        THROUGHPUT: All replicas together generate too few tokens per second.
        GPUS: The load needs more GPUs than the search allows.
    """

    NONE = 0
    MEMORY = 1
    UNKNOWN = 2
    TTFT = 3
    TPOT = 4
    THROUGHPUT = 5
    GPUS = 6


class Candidate(NamedTuple):
    """A deployment with a number of replicas under one requirement. Times are in seconds.

    A replica is one copy of the model, which may be split over several GPUs.

    Attributes:
        need: The requirement: the load (users or requests per second, lengths) and the targets.
        speculation: Speculative decoding; None without one.
        deployment: Model, GPU model, data types and parallelism of each replica.
        gpus: GPUs of all replicas, including prefill replicas.
        replicas: Number of replicas that decode.
        prefill_replicas: Number of further replicas that only process prompts; 0 if each replica
            does both.
        max_num_seqs: Concurrent sequences for which the engine of a replica is set up.
        capacity: Sequences that fit on a replica if its engine is set up for `max_num_seqs`.
        remaining_bytes: Low estimate of one GPU's bytes for the KV cache; negative if weights and
            buffers exceed its memory.
        ttft: Time to first token of one prompt on an idle replica; None if unknown.
        tpot: Mean time per output token while `max_num_seqs` sequences run, with the delay by
            arriving prompts (see `make_batch`); None if unknown or if they do not fit.
        e2e: Time of a batch of `max_num_seqs` requests from the prompts to the last token; None if
            unknown.
        tokens_per_s: Output tokens per second of one decode replica that runs `max_num_seqs`
            sequences; None if unknown.
        tokens_per_s_per_gpu: `tokens_per_s` divided by the GPUs of a replica and its share of the
            prefill replicas; None if unknown.
        total_tokens_per_s: Output tokens per second of all replicas under the required load; None
            if unknown.
        violated_target: Number of the first missed target in `Target`; 0 (NONE) if all are met.
        violation_factor: How far the worst target is missed: 1.2 if TPOT is 20% above its target; 1
            if all targets are met. `check_targets` defines it.
    """

    need: Requirement
    speculation: Speculation | None
    deployment: TimedDeployment
    gpus: int
    replicas: int
    prefill_replicas: int
    max_num_seqs: int
    capacity: int
    remaining_bytes: int
    ttft: float | None
    tpot: float | None
    e2e: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    total_tokens_per_s: float | None
    violated_target: int
    violation_factor: float

    @property
    def gpu(self) -> str:
        """Return the name of the GPU model."""
        return self.deployment.gpu.name

    @property
    def meets(self) -> bool:
        """Return whether the candidate meets all targets."""
        return self.violated_target == Target.NONE


class CandidateBatch(NamedTuple):
    """Many candidates under one requirement, as arrays. `candidates` makes objects of them.

    A candidate is a deployment with a number of replicas. Candidates are ordered by deployment,
    then by number of replicas.

    Attributes:
        need: The requirement: the load (users or requests per second, lengths) and the targets.
        speculation: Speculative decoding of all candidates; None without one.
        deployments: Deployments of one model that differ only in GPU model and pipeline stages.
        index: Index in `deployments` of each candidate's deployment [candidates].
        figures: One array [candidates] for each numeric field of `Candidate`, by field name, such
            as "tpot". NaN or infinity means unknown.
    """

    need: Requirement
    speculation: Speculation | None
    deployments: Sequence[TimedDeployment]
    index: Array
    figures: dict[str, Array]

    def candidates(self, indices: Any = slice(None)) -> list[Candidate]:
        """Return some candidates of the batch as objects, in which None replaces NaN and infinity.

        Args:
            indices: Positions of the candidates in the batch, as an array or a slice; by default
                all.
        """
        import numpy as np

        figures = [self.figures[name][indices] for name in Candidate._fields[3:]]
        # NaN and infinity become None
        columns: list[Array] = [
            np.where(np.isfinite(values), values, None) for values in figures
        ]
        deployments = [self.deployments[index] for index in self.index[indices].tolist()]
        return [
            Candidate(self.need, self.speculation, *row)
            for row in zip(deployments, *(column.tolist() for column in columns))
        ]


class DeploymentEstimates(NamedTuple):
    """Memory and times of deployments for several numbers of sequences per replica.

    Without another remark, a field is an array [deployments, counts]. A count is a number of
    concurrent sequences per replica, one of `timer.counts`.

    Attributes:
        timer: The timer that computed the times. It has the deployments, and the counts in
            ascending order.
        remaining_bytes: Low estimate of one GPU's bytes for the KV cache; negative if weights and
            buffers exceed its memory.
        capacity: Sequences that fit on a replica whose engine is set up for the count. A higher
            count reserves more memory outside the cache.
        transfer_s: Seconds to send a prompt's cache to another replica [deployments]; NaN if the
            rate of the link is unknown.
        ttft: Seconds to the first token of one prompt on an idle replica [deployments].
        tpot: Mean seconds per output token while the count of sequences runs.
        e2e: Seconds of a request from start to end; NaN if the output length is unknown.
    """

    timer: DeploymentTimer
    remaining_bytes: Array
    capacity: Array
    transfer_s: Array
    ttft: Array
    tpot: Array
    e2e: Array


def make_batch(
    need: Requirement,
    estimates: DeploymentEstimates,
    indices: Array,
    space: SearchSpace,
    is_disaggregated: bool,
) -> CandidateBatch:
    """Return the candidates of some deployments, with their times, GPUs and missed targets.

    A candidate is a deployment with a number of replicas.

    If the load is a number of users, a deployment has a candidate for each number of replicas.
    Otherwise it has one for each `max_num_seqs`, with as many replicas as the load needs.

    If the output length is known, prompts that arrive delay the decode steps of a replica, as
    `prompt_delays` says. n users of a replica send n ÷ e2e requests per second. At a rate, a
    replica gets at most 95% (MAX_SUSTAINED_SHARE) of the requests per second that it completes with
    as many sequences as fit, as in `serve`.

    With disaggregated prefill, the cache of a prompt is sent after the first token, and prompts do
    not delay steps. With m output tokens per request, a replica with n sequences then generates n ·
    m tokens in the time of m − 1 decode steps. ⌈requests per second · TTFT⌉ further replicas
    process prompts.

    Args:
        need: The requirement: the load and the targets.
        estimates: Memory and times of all deployments.
        indices: Positions of the deployments to include, in the first axis of the arrays in
            `estimates`.
        space: The search space. Only its maximum number of GPUs is used.
        is_disaggregated: Whether separate replicas process the prompts.
    """
    import numpy as np

    timer = estimates.timer
    deployments = [timer.deployments[index] for index in indices.tolist()]
    index, replicas, sequences = _number_candidates(need, space, deployments)
    row = indices[index]
    size = np.array([deployment.parallelism.gpus for deployment in deployments])[index]
    cells = row, np.searchsorted(timer.counts, sequences)
    capacity = estimates.capacity[cells]
    step_s = np.where(capacity > 0, estimates.tpot[cells], np.nan)
    tpot = np.where(capacity >= sequences, step_s, np.nan)
    ttft = prefill_s = np.where(capacity > 0, estimates.ttft[row], np.nan)
    e2e, output = estimates.e2e[cells], need.lengths.output
    steps_s = (output - 1) * tpot
    # at peak rates, a pass may overlap prompts and decodes, so only the decode step is a lower
    # bound of TPOT; a single sequence has no prompts beside it
    can_delay = output > 1 and not is_disaggregated
    num_stages = [d.parallelism.pp if d.calibration else 0 for d in deployments]
    stages = np.array(num_stages)[index] * (sequences > 1) * can_delay
    ranks = deployments[0].parallelism.dp
    prompt_s = _prompt_seconds(estimates, row, cells, steps_s, ranks)
    pass_s, request_s = prompt_delays(step_s, prompt_s, stages, ranks)
    e2e = np.where(stages, (output * pass_s + sequences * request_s).min(axis=0), e2e)
    if is_disaggregated:
        ttft = prefill_s + estimates.transfer_s[row]
        e2e = ttft + steps_s
    per_sequence = output / e2e if output else 1 / tpot
    rate = sequences * output / steps_s if is_disaggregated else sequences * per_sequence
    if need.users:
        total = need.users * per_sequence
    else:
        required = np.maximum(need.rate * output, need.min_throughput)
        replicas = _needed_replicas(rate.reshape(len(deployments), -1), required, need.rate > 0)
        total = np.minimum(required, replicas * rate)
    if can_delay:
        speeds = (1 - total / output / replicas * request_s) * step_s / pass_s
        speed = np.where(stages, speeds.max(axis=0), 1)
        step_s /= speed
        tpot /= speed
    prefill_replicas = replicas * 0
    if is_disaggregated:
        busy = np.ceil(np.nan_to_num(total / output * prefill_s))
        prefill_replicas = np.maximum(1, busy).astype(np.int64)
    all_replicas = replicas + prefill_replicas
    figures = {
        "gpus": all_replicas * size,
        "replicas": replicas,
        "prefill_replicas": prefill_replicas,
        "max_num_seqs": sequences,
        "capacity": capacity,
        "remaining_bytes": estimates.remaining_bytes[cells],
        "ttft": ttft,
        "tpot": tpot,
        "e2e": e2e,
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / (size * (all_replicas / replicas)),
        "total_tokens_per_s": total,
    }
    figures |= check_targets(need, figures | {"tpot": step_s}, space.max_gpus)
    return CandidateBatch(need, timer.speculation, deployments, index, figures)


def _prompt_seconds(
    estimates: DeploymentEstimates, row: Array, cells: Any, steps_s: Array, ranks: int
) -> Array:
    """Return the seconds by which a pass with one more prompt per data-parallel rank is longer.

    It is the mean of a prompt on an idle replica and of a prompt in a full batch, because a pass
    has one prompt or several. This is empirical: of four forms, it is the nearest to `serve`. 90%
    of the highest rates in `serve` are 0.98 to 1.06 of these estimates, with pp 0.93 to 1.17.

    Args:
        estimates: Memory and times of all deployments.
        row: Position of each candidate's deployment.
        cells: Index of each candidate in arrays [deployments, values of max_num_seqs].
        steps_s: Seconds of all decode steps of a request, by candidate.
        ranks: Number of data-parallel ranks.
    """
    import numpy as np

    timer = estimates.timer
    num_prompts = np.maximum(timer.sizes[timer.columns[cells]] / ranks, 1)
    in_batch_s = (estimates.e2e[cells] - steps_s) / num_prompts
    return (estimates.ttft[row] + in_batch_s) / 2


def _needed_replicas(tokens_per_s: Array, required: Any, has_rate: bool) -> Array:
    """Return the number of replicas of each candidate that generate the required tokens per second.

    Args:
        tokens_per_s: Tokens per second of one replica, [deployments, values of max_num_seqs].
        required: Tokens per second of all replicas.
        has_rate: Whether requests arrive at a rate. A replica then gets at most
            MAX_SUSTAINED_SHARE of the deployment's highest figure.
    """
    import numpy as np

    carried = np.where(tokens_per_s > 0, tokens_per_s, np.inf)
    if has_rate:
        highest = np.fmax.reduce(tokens_per_s, axis=1, keepdims=True)
        carried = np.fmin(carried, MAX_SUSTAINED_SHARE * highest)
    return np.maximum(1, np.ceil(required / carried)).astype(np.int64).ravel()


def prompt_delays(
    step_s: Array, prompt_s: Array, stages: Array, ranks: int
) -> tuple[Array, Array]:
    """Return seconds per pass and seconds per request, if prompts delay decode steps.

    With r requests per second, TPOT is pass ÷ (1 − r · request). Each result is an array [2,
    candidates], for two upper bounds of TPOT. The lower bound applies. With one pipeline stage
    they are equal. Example: 2 requests per second with prompts of 0.235 s leave a share of 0.53.
    A step of 24.6 ms becomes a TPOT of 46.4 ms, and `serve` simulates 48.4 ms.

    With several pipeline stages, a pass has a micro-batch per stage and takes as long as the
    largest one. The first bound holds if prompts come in different passes: each delays a whole
    pass. The second holds if many come in each pass: k prompts on p stages take the time of ⌈k/p⌉
    prompts, on average (k + (p − 1) / 2) / p.

    Args:
        step_s: Seconds of a decode step without prompts, by candidate.
        prompt_s: Seconds by which a pass with one more prompt of each data-parallel rank is longer.
        stages: Number of pipeline stages, by candidate.
        ranks: Number of data-parallel ranks.
    """
    import numpy as np

    stages = np.maximum(stages, 1)
    idle_s = prompt_s * (stages - 1) / (2 * stages)
    request_s = prompt_s / ranks
    return np.array([step_s, step_s + idle_s]), np.array([request_s, request_s / stages])


def _number_candidates(
    need: Requirement, space: SearchSpace, deployments: Sequence[TimedDeployment]
) -> tuple[Array, Array, Array]:
    """Return the index of each candidate's deployment, its replicas, and their sequences.

    With a number of users, there is a candidate for each number of replicas. Otherwise there is one
    for each of SEQUENCE_COUNTS.
    """
    import numpy as np

    max_replicas = (space.max_gpus // d.parallelism.gpus for d in deployments)
    counts = [min(count, need.users) or len(SEQUENCE_COUNTS) for count in max_replicas]
    index = np.repeat(np.arange(len(counts)), counts)
    replicas = np.concatenate([np.arange(count) for count in counts]) + 1
    if need.users:
        return index, replicas, -(-need.users // replicas)
    return index, replicas, np.array(SEQUENCE_COUNTS)[replicas - 1]


def check_targets(
    need: Requirement, figures: dict[str, Array], max_gpus: int
) -> dict[str, Array]:
    """Return which target each candidate misses first, and the factor of its worst miss.

    A candidate is a deployment with a number of replicas. The factor serves to find the candidate
    that misses most narrowly.

    The factor is the predicted ÷ the allowed value for times and GPUs. For throughput and for
    sequences in memory it is the required ÷ the predicted value. If no sequence fits, the factor is
    10^9 minus the (negative) KV cache budget in GiB, so the smallest lack of memory is closest.
    10^9 / 2 is added if TPOT has a target, some but too few sequences fit, and the step was not
    timed. Such a candidate then comes after all timed candidates.

    Args:
        need: The requirement: the load and the targets.
        figures: One array [candidates] for each numeric field of `Candidate`, by field name.
        max_gpus: Maximum number of GPUs of all replicas.

    Returns:
        Two arrays [candidates], by name. `violated_target` is the number of the first `Target` that
        is missed, in the order of the enumeration; 0 if none is missed. `violation_factor` is the
        factor of the worst miss; 1 if no target is missed.
    """
    import numpy as np

    capacity, sequences = figures["capacity"], figures["max_num_seqs"]
    total = figures["total_tokens_per_s"]
    is_load_open = not need.users or bool(need.min_throughput)
    is_unknown = np.isnan(total) & is_load_open
    is_unknown |= np.isnan(figures["ttft"]) & bool(need.max_ttft)
    # if no sequence fits, the smallest number of missing bytes is closest
    missing = FAR - figures["remaining_bytes"] / GIB
    factors = {
        Target.MEMORY: np.where(capacity > 0, sequences / np.maximum(capacity, 1), missing),
        Target.UNKNOWN: np.where(is_unknown & (capacity >= sequences), FAR, 0.0),
    }
    for time, limit in need.time_limits.items():
        factors[Target[time.upper()]] = figures[time] / limit
    if need.min_throughput and need.users:
        factors[Target.THROUGHPUT] = need.min_throughput / total
    if not need.users or figures["prefill_replicas"].any():
        factors[Target.GPUS] = figures["gpus"] / max_gpus

    violated = np.zeros(capacity.shape, dtype=np.int8)
    worst = np.ones(capacity.shape)
    for target, factor in factors.items():
        factor = np.nan_to_num(factor)
        violated = np.where((violated == Target.NONE) & (factor > 1), target, violated)
        worst = np.maximum(worst, factor)
    is_untimed = (violated == Target.MEMORY) & np.isnan(figures["tpot"]) & (capacity > 0)
    if need.max_tpot:
        worst[is_untimed] += FAR / 2
    return {"violated_target": violated, "violation_factor": worst}


# a split of the model, and the deployments with it, one for each GPU model
SplitMembers = tuple[BatchedFitBuilder, list[TimedDeployment]]
# the memory of one split on several GPU models, the indices of these deployments, and the bytes for
# the cache [stages, deployments, counts]
PlacedFit = tuple[BatchedFit, Array, Array]


class SearchGrid:
    """Makes all candidates of a search space: deployments with their replicas, memory and times.

    Args:
        needs: The requirements: each has a load and targets.
        space: The search space: models, GPU models, parallelism and data types to combine.

    Attributes:
        calibrations: Calibration of each GPU model (time models fitted to measured kernels), by the
            name of the GPU model; None if times are lower bounds from the datasheet.
        remarks: Sentences about deployments that were left out and why, as the keys of a dict in
            order of appearance. They are complete after the last batch.
    """

    def __init__(self, needs: Sequence[Requirement], space: SearchSpace) -> None:
        self.needs = needs
        self.space = space
        self.remarks: dict[str, None] = {}
        source = load_gpu(space.calibration_from) if space.calibration_from else None
        # GPU models without the requested calibration are left out
        self.calibrations: dict[str, Calibration | None] = {}
        for gpu in space.gpus:
            try:
                self.calibrations[gpu.name] = load_calibration(
                    gpu, space.calibration, source, space.options.engine
                )
            except UserError as error:
                if not space.calibration or len(space.gpus) == 1:
                    raise
                self.remarks[str(error)] = None

    def batches(self) -> Iterator[CandidateBatch]:
        """Yield all candidates of all requirements in batches, so that not all are in memory.

        The order is by model, parallelism of a pipeline stage, data types, draft and requirement. A
        batch has one model and one requirement.
        """
        space = self.space
        for model in space.models:
            widths = grouped((replace(ranks, pp=1), ranks) for ranks in space.splits(model))
            layouts: dict[object, Layouts] = defaultdict(dict)
            for splits, precision, speculation in product(
                widths.values(), space.precisions, space.drafts
            ):
                shared = layouts[precision, speculation]
                yield from self._shard(model, splits, precision, speculation, shared)
        names = [
            gpu.name
            for gpu in space.gpus
            if gpu.link_domain
            and gpu.link_domain < space.max_gpus
            and not gpu.inter_domain_rate
        ]
        if names:
            limit = "a replica uses one node, because no rate between nodes is known"
            self.remarks[f"{list_few(names)}: {limit}. Add --inter-node-bandwidth"] = None

    def _shard(
        self,
        model: Model,
        splits: Sequence[Parallelism],
        precision: Precision,
        speculation: Speculation | None,
        layouts: Layouts,
    ) -> Iterator[CandidateBatch]:
        """Yield the batches of deployments whose passes have the same layers."""
        import numpy as np

        space, options = self.space, self.space.fit_options(self.needs[0])
        draft = None
        members: list[SplitMembers] = []
        with self._noting_refusals():
            if speculation:
                options = speculation.options(model, options)
                if options.draft or model.mtp:
                    draft = options.draft or draft_model(model, speculation.draft)
            base = TimedDeployment(
                model=model,
                gpu=space.gpus[0],
                precision=options.rules.loaded_precision(model, precision),
                nodes=space.nodes,
                engine=options.engine,
                engine_version=options.engine_version,
            )
            for ranks in splits:
                with self._noting_refusals():
                    if draft:
                        check(draft, ranks)
                    split = replace(base, parallelism=ranks)
                    builder = BatchedFitBuilder(split, options, layouts)
                    members.append((builder, self._on_gpus(split)))
        sizes = [d.parallelism.gpus for _, deployments in members for d in deployments]
        if not sizes:
            return
        max_replicas = space.max_gpus // min(sizes)
        counts = np.unique(
            [n for need in self.needs for n in need.sequence_counts(max_replicas)]
        )
        requests = grouped((need.lengths, need) for need in self.needs)
        placed: dict[int, tuple[DeploymentTimer, list[PlacedFit]]] = {}
        for lengths, needs in requests.items():
            longest = lengths.context if options.rules.has_context_buffers else 1
            if longest not in placed:
                deployments, fits = self._place(members, longest, counts)
                timer = DeploymentTimer(deployments, counts, speculation, draft)
                placed[longest] = timer, fits
            timer, fits = placed[longest]
            if fits:
                estimates = self._estimate(timer, fits, lengths)
                for need in needs:
                    yield from self._batches_of(need, estimates)

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        """Catch a UserError in the block and store its message as a remark."""
        try:
            yield
        except UserError as error:
            self.remarks[str(error)] = None

    def _on_gpus(self, base: TimedDeployment) -> list[TimedDeployment]:
        """Return a deployment on each GPU model."""
        deployments = []
        for gpu in self.space.gpus:
            is_included = self.space.includes(gpu, base.parallelism)
            if gpu.name in self.calibrations and is_included:
                deployment = replace(base, gpu=gpu, calibration=self.calibrations[gpu.name])
                with self._noting_refusals():
                    _ = deployment.ranks  # raises UserError if the nodes do not fit
                    deployments.append(deployment)
        return deployments

    def _place(
        self, members: Sequence[SplitMembers], longest: int, counts: Array
    ) -> tuple[list[TimedDeployment], list[PlacedFit]]:
        """Return the deployments that the engine accepts, with their memory. Others get a remark.

        If the engine refuses a split on one of the GPU models, each GPU model is tried separately.

        Args:
            longest: Maximum number of tokens of a sequence.
        """
        import numpy as np

        accepted: list[TimedDeployment] = []
        fits: list[PlacedFit] = []
        attempts = [*members]
        while attempts:
            builder, deployments = attempts.pop(0)
            try:
                batches = builder.batches([d.gpu for d in deployments], longest)
                placed = [
                    (
                        fit,
                        np.array(fit.gpu_indices) + len(accepted),
                        fit.remaining_bytes(counts),
                    )
                    for fit in batches
                ]
            except UserError as error:
                if len(deployments) == 1:
                    self.remarks[str(error)] = None
                else:
                    attempts[:0] = [(builder, [deployment]) for deployment in deployments]
                continue
            fits += placed
            accepted += deployments
        return accepted, fits

    def _estimate(
        self, timer: DeploymentTimer, fits: Sequence[PlacedFit], lengths: RequestLengths
    ) -> DeploymentEstimates:
        """Return memory and times for requests of these lengths."""
        import numpy as np

        remaining = np.zeros(timer.columns.shape, dtype=np.int64)
        capacity = remaining.copy()
        transfer_s = np.zeros(len(remaining))
        for fit, rows, fit_remaining in fits:
            remaining[rows] = fit_remaining.min(axis=0)
            capacity[rows] = fit.sequences(fit_remaining, lengths.context)
            if True in self.space.disaggregate:
                transfer_s[rows] = fit.transfer_seconds(lengths.prompt)
        times = timer.times(lengths, capacity)
        return DeploymentEstimates(timer, remaining, capacity, transfer_s, *times)

    def _batches_of(
        self, need: Requirement, estimates: DeploymentEstimates
    ) -> Iterator[CandidateBatch]:
        """Yield the batches of a requirement, with and without disaggregated prefill."""
        import numpy as np

        deployments = estimates.timer.deployments
        step = max(
            1, MAX_POINTS // (min(self.space.max_gpus, need.users) or len(SEQUENCE_COUNTS))
        )
        for is_disaggregated in self.space.disaggregate:
            indices = np.arange(len(deployments))
            if is_disaggregated:
                is_unknown = np.isnan(estimates.transfer_s)
                indices = np.flatnonzero(~is_unknown)
                unknown = np.flatnonzero(is_unknown).tolist()
                if unknown:
                    reason = "no rate of a link to another replica is known"
                    remark = (
                        f"{list_few(deployments[n].gpu.name for n in unknown)}: "
                        f"no disaggregated prefill, as {reason}"
                    )
                    self.remarks[remark] = None
            for start in range(0, len(indices), step):
                selected = indices[start : start + step]
                yield make_batch(need, estimates, selected, self.space, is_disaggregated)
