"""The candidates of a plan in batches, with their capacity, times and missed targets.

A candidate is a deployment in some number of replicas. Its capacity is `fit`'s at the low end of
the range, and its times are `latency`'s. One batch is in memory at a time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import groupby, product
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.batched_fit import (
    BatchedFit,
    BatchedFitBuilder,
    Layouts,
    remaining_bytes,
)
from kvcalc.capacity.memory_budget import GIB
from kvcalc.errors import UserError, few
from kvcalc.layers.batch import Parallelism
from kvcalc.model.model import Model
from kvcalc.model.pipeline import check
from kvcalc.model.precision import Precision
from kvcalc.planning.candidate_times import Array, CandidateTimes, DeploymentTimer
from kvcalc.planning.search_space import (
    SEQUENCE_COUNTS,
    RequestLengths,
    Requirement,
    SearchSpace,
    Speculation,
)
from kvcalc.serving.speculation import draft_model
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.deployment import TimedDeployment

MAX_POINTS = 1 << 14  # candidates of a batch, so that their arrays stay in the CPU's cache
FAR = 1e9  # violation factor of a candidate that cannot serve at all


class Target(IntEnum):
    """The target that a candidate misses first, in the order of the checks; NONE if it meets
    all."""

    NONE = 0
    MEMORY = 1
    UNKNOWN = 2
    TTFT = 3
    TPOT = 4
    THROUGHPUT = 5
    GPUS = 6


class Candidate(NamedTuple):
    """A deployment in some number of replicas, under one requirement.

    Attributes:
        replicas: Replicas that decode.
        prefill_replicas: Further replicas for prefill; 0 if each replica does both.
        max_num_seqs: Sequences for which a replica is set up.
        capacity: Sequences that fit on a replica with this setting.
        remaining_bytes: Memory of a GPU for the cache; negative if the rest exceeds the memory.
        tokens_per_s: Output tokens per second of a replica at full load.
        total_tokens_per_s: Output tokens per second of all replicas under the required load.
        violated_target: The first target that is missed; NONE if there is none.
        violation_factor: Factor by which the worst target is missed; 1 if there is none.
    """

    need: Requirement
    speculation: Speculation | None
    deployment: TimedDeployment
    replicas: int
    prefill_replicas: int
    max_num_seqs: int
    capacity: int
    remaining_bytes: int
    ttft: float | None
    tpot: float | None
    e2e: float | None
    tokens_per_s: float | None
    total_tokens_per_s: float | None
    violated_target: int
    violation_factor: float

    @property
    def gpu(self) -> str:
        return self.deployment.gpu.name

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return (self.replicas + self.prefill_replicas) * self.deployment.parallelism.gpus

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        if self.tokens_per_s is None:
            return None
        shares = (self.replicas + self.prefill_replicas) / self.replicas
        return self.tokens_per_s / (self.deployment.parallelism.gpus * shares)

    @property
    def meets(self) -> bool:
        return self.violated_target == Target.NONE


class CandidateBatch(NamedTuple):
    """Candidates under one requirement, by deployment, then by replicas.

    Attributes:
        deployments: Deployments of one model that differ in GPU and pipeline stages.
        index: Index of each candidate's deployment.
    """

    need: Requirement
    speculation: Speculation | None
    deployments: Sequence[TimedDeployment]
    index: Array
    gpus_per_replica: Array
    replicas: Array
    prefill_replicas: Array
    max_num_seqs: Array
    capacity: Array
    remaining_bytes: Array
    ttft: Array
    tpot: Array
    e2e: Array
    tokens_per_s: Array
    total_tokens_per_s: Array
    violated_target: Array = None
    violation_factor: Array = None

    @property
    def gpus(self) -> Array:
        """GPUs of all replicas."""
        return (self.replicas + self.prefill_replicas) * self.gpus_per_replica

    @property
    def tokens_per_s_per_gpu(self) -> Array:
        shares = (self.replicas + self.prefill_replicas) / self.replicas
        return self.tokens_per_s / (self.gpus_per_replica * shares)

    def candidates(self, indices: Any = slice(None)) -> list[Candidate]:
        """Return some of the candidates."""
        import numpy as np

        columns = []
        for name in Candidate._fields[3:]:
            values = getattr(self, name)[indices]
            column = values.tolist()
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                column = [value if abs(value) < np.inf else None for value in column]
            columns.append(column)
        deployments = [self.deployments[index] for index in self.index[indices].tolist()]
        return [
            Candidate(self.need, self.speculation, *figures)
            for figures in zip(deployments, *columns, strict=True)
        ]


class DeploymentEstimates(NamedTuple):
    """Figures of deployments by sequences per replica [deployments, counts].

    Attributes:
        counts: Sequences per replica, in ascending order.
        transfer_s: Seconds to send a prompt's cache to another replica [deployments]; NaN if the
            rate of the link is unknown.
    """

    deployments: list[TimedDeployment]
    counts: Array
    remaining_bytes: Array
    capacity: Array
    times: CandidateTimes
    transfer_s: Array


def make_batch(
    need: Requirement,
    estimates: DeploymentEstimates,
    indices: Array,
    space: SearchSpace,
    speculation: Speculation | None,
    is_disaggregated: bool,
) -> CandidateBatch:
    """Return the candidates of some deployments.

    With disaggregated prefill, the cache of a prompt is sent after the first token, and prompts do
    not delay steps. A replica then makes n · output tokens in the time of output − 1 steps.
    ⌈requests per second · TTFT⌉ replicas process prompts.

    Args:
        indices: Indices of the deployments.
    """
    import numpy as np

    deployments = [estimates.deployments[index] for index in indices.tolist()]
    sizes = np.array([one.parallelism.gpus for one in deployments])
    num_replicas = _num_candidates(need, space, sizes)
    index = np.repeat(np.arange(len(sizes)), num_replicas)
    row = indices[index]
    replicas = np.arange(1, len(index) + 1)
    replicas -= np.repeat(np.cumsum(num_replicas) - num_replicas, num_replicas)
    sequences = np.tile(SEQUENCE_COUNTS, len(sizes))
    if need.users:
        sequences = -(-need.users // replicas)
    cells = row, np.searchsorted(estimates.counts, sequences)

    times, output = estimates.times, need.lengths.output
    capacity = estimates.capacity[cells]
    prefill_s = np.where(capacity > 0, times.ttft[row], np.nan)
    step_s = np.where(capacity > 0, times.tpot[cells], np.nan)
    tpot = np.where(capacity >= sequences, step_s, np.nan)
    ttft = prefill_s
    e2e = np.full(tpot.shape, np.nan) if times.e2e is None else times.e2e[cells]
    if is_disaggregated:
        ttft = prefill_s + estimates.transfer_s[row]
        e2e = ttft + (output - 1) * tpot
    per_sequence = 1 / tpot if times.e2e is None else output / e2e
    rate = sequences * per_sequence
    if is_disaggregated:
        rate = sequences * output / ((output - 1) * tpot)
    if need.users:
        total = need.users * per_sequence
    else:
        required = np.maximum(need.rate * output, need.min_throughput)
        carried = np.where(rate > 0, rate, np.inf)
        replicas = np.maximum(1, np.ceil(required / carried)).astype(np.int64)
        total = np.minimum(required, replicas * rate)
    prefill_replicas = replicas * 0
    if is_disaggregated:
        busy = np.ceil(np.nan_to_num(total / output * prefill_s))
        prefill_replicas = np.maximum(1, busy).astype(np.int64)

    batch = CandidateBatch(
        need=need,
        speculation=speculation,
        deployments=deployments,
        index=index,
        gpus_per_replica=sizes[index],
        replicas=replicas,
        prefill_replicas=prefill_replicas,
        max_num_seqs=sequences,
        capacity=capacity,
        remaining_bytes=estimates.remaining_bytes[cells],
        ttft=ttft,
        tpot=tpot,
        e2e=e2e,
        tokens_per_s=rate,
        total_tokens_per_s=total,
    )
    violated, factor = check_targets(batch._replace(tpot=step_s), space.max_gpus)
    return batch._replace(violated_target=violated, violation_factor=factor)


def _num_candidates(need: Requirement, space: SearchSpace, gpus_per_replica: Array) -> Array:
    """Return the number of candidates of each deployment."""
    import numpy as np

    if not need.users:
        return np.full(gpus_per_replica.shape, len(SEQUENCE_COUNTS))
    return np.minimum(space.max_gpus // gpus_per_replica, need.users)


def check_targets(batch: CandidateBatch, max_gpus: int) -> tuple[Array, Array]:
    """Return the first target that each candidate misses, and the factor of its worst miss.

    The factor is FAR and more if no sequence fits. If too few sequences fit and a step was not
    timed, the candidate comes after all that were timed: FAR / 2 is added.
    """
    import numpy as np

    need, capacity = batch.need, batch.capacity
    is_load_open = not need.users or bool(need.min_throughput)
    is_unknown = np.isnan(batch.total_tokens_per_s) & is_load_open
    is_unknown |= np.isnan(batch.ttft) & bool(need.max_ttft)
    has_memory = capacity >= batch.max_num_seqs
    # if no sequence fits, the fewest missing bytes are closest
    missing = FAR - batch.remaining_bytes / GIB
    lacks = batch.max_num_seqs / np.maximum(capacity, 1)
    factors = {
        Target.MEMORY: np.where(capacity > 0, lacks, missing),
        Target.UNKNOWN: np.where(is_unknown & has_memory, FAR, 0.0),
    }
    if need.max_ttft:
        factors[Target.TTFT] = batch.ttft / need.max_ttft
    if need.max_tpot:
        factors[Target.TPOT] = batch.tpot / need.max_tpot
    if need.min_throughput and need.users:
        factors[Target.THROUGHPUT] = need.min_throughput / batch.total_tokens_per_s
    if not need.users or batch.prefill_replicas.any():
        factors[Target.GPUS] = batch.gpus / max_gpus

    violated = np.zeros(capacity.shape, dtype=np.int8)
    worst = np.ones(capacity.shape)
    for target, factor in factors.items():
        factor = np.nan_to_num(factor)
        violated = np.where((violated == Target.NONE) & (factor > 1), target, violated)
        worst = np.maximum(worst, factor)
    is_untimed = (violated == Target.MEMORY) & np.isnan(batch.tpot) & (capacity > 0)
    return violated, worst + np.where(is_untimed & bool(need.max_tpot), FAR / 2, 0.0)


class PlacedFit(NamedTuple):
    """The memory of one split on several GPU models.

    Attributes:
        rows: Indices of the deployments.
        columns: Indices of the numbers of sequences.
        remaining: Bytes for the cache [stages, deployments, counts].
    """

    fit: BatchedFit
    rows: Array
    columns: Array
    remaining: Array


class ShardedModel(NamedTuple):
    """A model split over ranks, on any GPU.

    Attributes:
        counts: Sequences per replica of its candidates.
    """

    base: TimedDeployment
    builder: BatchedFitBuilder
    counts: Array


Member = tuple[ShardedModel, TimedDeployment]


class SearchGrid:
    """All candidates of a space under some requirements.

    Attributes:
        remarks: What was left out and why, as the keys. Complete after the last batch.
    """

    def __init__(self, needs: Sequence[Requirement], space: SearchSpace) -> None:
        self.needs = needs
        self.space = space
        self.remarks: dict[str, None] = {}
        self.calibrations = self._load_calibrations()

    def _load_calibrations(self) -> dict[str, Calibration | None]:
        """Return the calibration of each GPU model. GPUs without the requested one are left
        out."""
        space = self.space
        calibrations = {}
        for gpu in space.gpus:
            try:
                deployment = TimedDeployment(space.models[0], gpu, engine=space.options.engine)
                timed = deployment.under(space.calibration, space.calibration_from)
            except UserError as error:
                if not space.calibration or len(space.gpus) == 1:
                    raise
                self.remarks[str(error)] = None
            else:
                calibrations[gpu.name] = timed.calibration
        return calibrations

    def batches(self) -> Iterator[CandidateBatch]:
        """Yield all batches: by model, parallelism of a stage, precision, draft and need."""
        space = self.space
        for model in space.models:
            widths: dict[Parallelism, list[Parallelism]] = {}
            for ranks in space.splits(model):
                widths.setdefault(msgspec.structs.replace(ranks, pp=1), []).append(ranks)
            layouts: dict[object, Layouts] = defaultdict(dict)
            for splits, precision, speculation in product(
                widths.values(), space.precisions, space.drafts
            ):
                shared = layouts[precision, speculation]
                yield from self._shard(model, splits, precision, speculation, shared)
        self._note_links()

    def _note_links(self) -> None:
        """Add a remark on GPU models whose replicas have to be on one node."""
        max_gpus = self.space.max_gpus
        names = [
            gpu.name
            for gpu in self.space.gpus
            if gpu.link_domain and gpu.link_domain < max_gpus and not gpu.outer_link
        ]
        if names:
            limit = "replicas no larger than one link joins, as no rate between nodes is known"
            self.remarks[f"{few(names)}: {limit}; --inter-node-bandwidth gives one"] = None

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

        options = self.space.fit_options(self.needs[0])
        draft = None
        try:
            if speculation:
                options = speculation.options(model, options)
                if options.draft or model.mtp:
                    draft = options.draft or draft_model(model, speculation.draft)
        except UserError as error:
            self.remarks[str(error)] = None
            return
        shards = []
        for ranks in splits:
            base = TimedDeployment(
                model=model,
                gpu=self.space.gpus[0],
                precision=precision,
                parallelism=ranks,
                nodes=self.space.nodes,
                engine=self.space.options.engine,
                engine_version=self.space.options.engine_version,
            )
            try:
                if draft:
                    check(draft, ranks)
                builder = BatchedFitBuilder(base, options, layouts)
            except UserError as error:
                self.remarks[str(error)] = None
                continue
            max_replicas = self.space.max_gpus // ranks.gpus
            own_counts = {n for need in self.needs for n in need.sequence_counts(max_replicas)}
            shards.append(ShardedModel(base, builder, np.array(sorted(own_counts))))
        if not shards:
            return
        counts = np.unique(np.concatenate([shard.counts for shard in shards]))
        members = [*self._members(shards)]
        has_context_buffers = self.space.options.rules.add_context_buffers is not None
        requests: dict[int, dict[RequestLengths, list[Requirement]]] = {}
        for need in self.needs:
            longest = need.lengths.context if has_context_buffers else 1
            requests.setdefault(longest, {}).setdefault(need.lengths, []).append(need)
        for longest, needs_by_lengths in requests.items():
            for deployments, fits in self._place(members, longest, counts):
                timer = DeploymentTimer(deployments, counts, speculation, draft)
                for lengths, needs in needs_by_lengths.items():
                    estimates = self._estimate(timer, deployments, fits, lengths)
                    for need in needs:
                        yield from self._batches_of(need, estimates, speculation)

    def _members(self, shards: Sequence[ShardedModel]) -> Iterator[Member]:
        """Yield the deployments by split, then by GPU model."""
        for shard in shards:
            for gpu in self.space.gpus:
                if gpu.name not in self.calibrations:
                    continue
                if not self.space.includes(gpu, shard.base.parallelism):
                    continue
                deployment = msgspec.structs.replace(
                    shard.base, gpu=gpu, calibration=self.calibrations[gpu.name]
                )
                try:
                    deployment.ranks  # noqa: B018 (raises if the nodes do not fit)
                except UserError as error:
                    self.remarks[str(error)] = None
                else:
                    yield shard, deployment

    def _place(
        self, members: Sequence[Member], longest: int, counts: Array
    ) -> list[tuple[list[TimedDeployment], list[PlacedFit]]]:
        """Return the deployments with their memory. Refused deployments get a remark.

        If the engine refuses one of them, each half is tried separately.
        """
        try:
            return [([one for _, one in members], _fit(members, longest, counts))]
        except UserError as error:
            if len(members) == 1:
                self.remarks[str(error)] = None
                return []
            half = len(members) // 2
            halves = members[:half], members[half:]
            return [part for some in halves for part in self._place(some, longest, counts)]

    def _estimate(
        self,
        timer: DeploymentTimer,
        deployments: list[TimedDeployment],
        fits: Sequence[PlacedFit],
        lengths: RequestLengths,
    ) -> DeploymentEstimates:
        """Return memory and times for requests of these lengths."""
        import numpy as np

        remaining = np.zeros((len(deployments), len(timer.counts)), dtype=np.int64)
        capacity = remaining.copy()
        transfer_s = np.zeros(len(deployments))
        for one in fits:
            cells = np.ix_(one.rows, one.columns)
            remaining[cells] = one.remaining.min(axis=0)
            capacity[cells] = one.fit.sequences(one.remaining, lengths.context)
            if True in self.space.disaggregate:
                transfer_s[one.rows] = one.fit.transfer_seconds(lengths.prompt)
        times = timer.times(lengths, capacity)
        return DeploymentEstimates(
            deployments, timer.counts, remaining, capacity, times, transfer_s
        )

    def _batches_of(
        self,
        need: Requirement,
        estimates: DeploymentEstimates,
        speculation: Speculation | None,
    ) -> Iterator[CandidateBatch]:
        import numpy as np

        for is_disaggregated in self.space.disaggregate:
            indices = np.arange(len(estimates.deployments))
            if is_disaggregated:
                has_link = ~np.isnan(estimates.transfer_s)
                without = [estimates.deployments[n].gpu.name for n in np.flatnonzero(~has_link)]
                indices = indices[has_link]
                if without:
                    reason = "no rate of a link to another replica is known"
                    names = few([*dict.fromkeys(without)])
                    self.remarks[f"{names}: no disaggregated prefill, as {reason}"] = None
            sizes = np.array([one.parallelism.gpus for one in estimates.deployments])
            max_candidates = int(_num_candidates(need, self.space, sizes).max())
            step = max(1, MAX_POINTS // max_candidates)
            for start in range(0, len(indices), step):
                yield make_batch(
                    need=need,
                    estimates=estimates,
                    indices=indices[start : start + step],
                    space=self.space,
                    speculation=speculation,
                    is_disaggregated=is_disaggregated,
                )


def _fit(members: Sequence[Member], longest: int, counts: Array) -> list[PlacedFit]:
    """Return the memory of deployments for sequences of at most `longest` tokens."""
    import numpy as np

    fits: list[BatchedFit] = []
    rows = []
    own_counts = []
    first = 0
    for _, group in groupby(members, key=lambda member: id(member[0])):
        same_split = [*group]
        shard = same_split[0][0]
        gpus = [deployment.gpu for _, deployment in same_split]
        for fit in shard.builder.batches(gpus, longest):
            fits.append(fit)
            rows.append(np.array(fit.places) + first)
            own_counts.append(shard.counts)
        first += len(gpus)
    remaining = remaining_bytes([*zip(fits, own_counts, strict=True)])
    columns = [np.searchsorted(counts, own) for own in own_counts]
    return [PlacedFit(*figures) for figures in zip(fits, rows, columns, remaining, strict=True)]
