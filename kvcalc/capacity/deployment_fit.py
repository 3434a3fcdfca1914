"""What fits on GPUs: a KV cache budget, term by term, and what an engine makes of it.

Every figure is that of one GPU, of the pipeline stage that holds the fewest sequences. Only numbers
of sequences count the whole replica, as `--batch-size` does.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property

import msgspec

from kvcalc.capacity.engines import CacheLayout, Engine, EngineSettings
from kvcalc.capacity.engines.content import Content, content_of
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.fit_request import (
    CapacityLimits,
    FitRequest,
    held,
    longest,
    needed,
    request_of,
    started,
)
from kvcalc.capacity.memory_budget import ENDS, Budget, MemoryBreakdown
from kvcalc.errors import UserError, shown_briefly
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.weights import Formats
from kvcalc.model.model import Model
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes


class Fit(msgspec.Struct, frozen=True, dict=True):
    """What fits of a deployment. Figures are computed when they are first read.

    Attributes:
        asked: The deployment as it was given. `deployment` has the formats that the engine stores.
        request: The request with all defaults.
        remarks: Remarks on the engine's choices.
    """

    asked: TimedDeployment
    request: FitRequest
    remarks: tuple[str, ...]
    _stage_terms: dict[str, list[MemoryBreakdown]] = {}

    def __str__(self) -> str:
        stored = (
            f"{self.sequences:,} sequence{'s' * (self.sequences != 1)} of {self.length:,} "
            "tokens"
        )
        where = f"{self.ranks.gpus}× {self.gpu.name} ({self.engine.name})"
        return (
            f"{self.model.name} on {where}: {stored}, {format_bytes(self.kv_budget)} for the "
            "cache of a GPU"
        )

    _repr_pretty_ = shown_briefly

    @property
    def deployment(self) -> TimedDeployment:
        return self.request.run

    @property
    def options(self) -> FitOptions:
        return self.request.options

    @property
    def settings(self) -> EngineSettings:
        return self.request.settings

    @property
    def model(self) -> Model:
        return self.deployment.model

    @property
    def gpu(self) -> Gpu:
        return self.deployment.gpu

    @property
    def ranks(self) -> Parallelism:
        return self.deployment.parallelism

    @property
    def formats(self) -> Formats:
        return self.deployment.formats

    @property
    def engine(self) -> Engine:
        return self.options.rules

    @property
    def length(self) -> int:
        """Tokens of each sequence: max_model_len, or the model's own maximum."""
        return self.request.length

    @property
    def utilization(self) -> float:
        return self.request.utilization

    @property
    def of(self) -> str:
        """Memory that the utilization is a share of."""
        return self.request.of

    @property
    def beside(self) -> dict[str, int]:
        """Bytes of draft and prediction layers, by name."""
        return self.request.beside

    @property
    def end(self) -> str:
        """The end of the range that answers."""
        return self.options.end

    @property
    def given(self) -> bool:
        """Whether the size of the cache was given, so that the weights are not checked."""
        return self.options.given

    @cached_property
    def plans(self) -> list[CacheLayout]:
        """The layout of the cache on each pipeline stage."""
        planner = self.request.planner()
        return [planner(stage) for stage in range(self.ranks.pp)]

    @cached_property
    def stage(self) -> int:
        """The pipeline stage that holds the fewest sequences."""
        length, shared = self.length, self.options.shared_prefix
        self.stage_terms(self.end)  # they may refuse the deployment
        capacities = []
        for stage, plan in enumerate(self.plans):
            cache = self._cache(stage, self.end)
            sequences = plan.most_sequences(cache, length, shared)
            capacities.append((sequences, plan.concurrency(cache, length), cache, stage))
        return min(capacities)[-1]

    @property
    def plan(self) -> CacheLayout:
        return self.plans[self.stage]

    @cached_property
    def content(self) -> Content:
        """The part of the cache that holds data: no blocks, padding or reserve."""
        return content_of(self.request.held, self.ranks, self.stage, self.engine.content)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        return (*self.remarks, *self.plan.notes)

    def stage_terms(self, end: str) -> list[MemoryBreakdown]:
        """Return the terms of each pipeline stage at one end of the range."""
        if end not in self._stage_terms:
            self._stage_terms[end] = [
                self.request.terms(self.request.start(stage), end)
                for stage in range(self.ranks.pp)
            ]
        return self._stage_terms[end]

    def _cache(self, stage: int, end: str) -> int:
        """Return the bytes that the plan of a stage works with."""
        return self.request.cache(
            self.plans[stage], self.request.left(self.stage_terms(end)[stage])
        )

    @property
    def terms(self) -> MemoryBreakdown:
        """The terms in the middle of the range."""
        return self.stage_terms("middle")[self.stage]

    @property
    def end_terms(self) -> MemoryBreakdown:
        return self.stage_terms(self.end)[self.stage]

    @property
    def budget(self) -> Budget:
        return self.request.budget(self.terms)

    @property
    def end_budget(self) -> Budget:
        return self.request.budget(self.end_terms)

    @cached_property
    def left(self) -> dict[str, int]:
        """Bytes that the terms leave for the cache, by end of the range; negative if they exceed
        the share."""
        ends = ENDS if self.engine.ranged else ("middle",)
        return {end: self.request.left(self.stage_terms(end)[self.stage]) for end in ends}

    @cached_property
    def kv_budget(self) -> int:
        """Bytes that the plan works with, at the end that answers."""
        return self._cache(self.stage, self.end)

    @cached_property
    def capacity(self) -> int:
        """Sequences of `length` tokens that the replica's cache holds, for the requested
        settings."""
        shared = self.options.shared_prefix
        sequences = self.plan.most_sequences(self.kv_budget, self.length, shared)
        return sequences * self.ranks.dp

    @cached_property
    def sequences(self) -> int:
        """Sequences of `length` tokens that fit in the replica, at the end that answers."""
        return self.sequences_at(self.end)

    def sequences_at(self, end: str) -> int:
        """Return the sequences of `length` that fit at one end of the range, if the engine starts
        with `max_num_seqs` set to this number. A higher setting needs more memory outside the
        cache."""
        if end not in self.left:
            end = self.end
        largest = min(
            plan.most_sequences(
                self._cache(stage, end), self.length, self.options.shared_prefix
            )
            for stage, plan in enumerate(self.plans)
        )
        return held(self.request, self.plans, end, largest) * self.ranks.dp

    @cached_property
    def longest(self) -> int | None:
        """Tokens of each requested sequence that fit; None if the cache stops growing first."""
        lengths = (longest(self.request, n, plan) for n, plan in enumerate(self.plans))
        return min((tokens for tokens in lengths if tokens is not None), default=None)

    def longest_of(self, users: Iterable[int]) -> Iterator[int | None]:
        """Yield `longest` for each number of sequences in the replica, on the stage that
        decides."""
        for count in users:
            options = msgspec.structs.replace(self.options, users=count)
            yield longest(self.request._replace(options=options), self.stage, self.plan)

    @cached_property
    def needed(self) -> CapacityLimits:
        """See `CapacityLimits`."""
        return needed(self.request, self.plans)

    @property
    def shortage(self) -> int:
        """Bytes by which the terms exceed the share, at the end that answers; 0 if they do not."""
        return max(0, -self.request.left(self.end_terms))

    @property
    def over(self) -> int:
        """Bytes by which a given cache exceeds the memory that the terms leave."""
        return max(0, self.plan.pool(self.kv_budget) - self.left[self.end]) if self.given else 0

    @property
    def fits(self) -> bool:
        """Whether the requested sequences fit, in the remaining memory or in a given cache."""
        return (self.given or self.shortage == 0) and self.sequences >= self.options.wanted

    @property
    def needed_bytes(self) -> int:
        """Bytes of one GPU's cache that the requested sequences need."""
        return self.plan.needed(self.per_rank, self.length, self.options.shared_prefix)

    @property
    def headroom(self) -> int:
        """Bytes of a GPU's cache that the requested sequences leave; negative if they do not
        fit."""
        shortage = 0 if self.given else self.shortage
        return self.plan.pool(self.kv_budget) - shortage - self.needed_bytes

    @property
    def longest_context(self) -> int | None:
        """Return the tokens of the longest sequences that can be served; None without a limit.

        The limit is the memory, and the model's own maximum unless the request is longer. Example:
        203,776 tokens fit. A model made for 40,960 serves 40,960, but 203,776 if 102,400 were
        requested.
        """
        own = self.model.max_context
        if own is None or self.length > own:
            return self.longest
        return own if self.longest is None else min(self.longest, own)

    @property
    def margin(self) -> int:
        """Bytes that the end of the range that answers adds to its terms; negative at the high
        end."""
        return self.end_budget.cache - self.left[self.end]

    def memory_parts(self) -> dict[str, int]:
        """Return the bytes of one GPU's memory by name, which add up to `budget.memory`, at the end
        that answers.

        `KV cache` is negative if the other parts exceed the share. The last part is what the engine
        leaves: unused, or, if a share leaves out activations and CUDA graphs (SGLang), the memory
        of both.
        """
        terms, budget = self.end_terms, self.end_budget
        parts = {**terms.startup, "weights": terms.language, **terms.extra}
        if not budget.outside:
            parts |= {"activations": terms.activation, **terms.overhead}
        if self.margin:
            parts["margin"] = self.margin
        parts["KV cache"] = self.kv_budget if self.given else self.left[self.end]
        rest = budget.memory - sum(parts.values())
        if rest:
            unused = "left free" if rest > 0 else "missing"
            parts["activations and CUDA graphs" if budget.outside else unused] = rest
        return parts

    @property
    def starts(self) -> bool:
        """Whether the engine would start. Some refuse if not one sequence of `length` tokens
        fits."""
        return bool(self.sequences) or not self.engine.refuses_below_one_sequence

    @property
    def per_rank(self) -> int:
        """Requested sequences on one dp rank."""
        return self.ranks.sequences(self.options.wanted)

    def budget_at(self, end: str) -> int:
        """Return the bytes of the cache at one end of the range: as given, or the remaining
        memory."""
        return self.kv_budget if self.given else max(0, self.left[end])


def fit(deployment: TimedDeployment, options: FitOptions | None = None) -> Fit:
    """Return what fits of a deployment. Raises UserError on a request that the engine refuses."""
    options = options or FitOptions()
    for argument, kind in ((deployment, TimedDeployment), (options, FitOptions)):
        if not isinstance(argument, kind):
            raise UserError(
                f"{argument!r:.80} is no {kind.__name__.removeprefix('Timed')}",
                hint="`kvcalc.deploy(model, gpu).fit()` takes names",
            )
    run, release, remarks = started(deployment, options)
    request = request_of(run, options, deployment.precision.kv_cache_dtype, release)
    result = Fit(deployment, request, remarks)
    _ = result.stage  # an engine may refuse the layers
    return result


def shortened(found: Fit) -> Fit:
    """Return the answer at the longest context that fits.

    Return it unchanged if it fits, if a length was requested, or if no token fits.
    """
    if found.fits or found.options.max_model_len or not found.longest:
        return found
    shorter = fit(
        found.asked, msgspec.structs.replace(found.options, max_model_len=found.longest)
    )
    return shorter if shorter.fits else found


def most_sequences(deployment: TimedDeployment, options: FitOptions) -> int:
    """Return `Fit.sequences`, or 0 if the terms exceed the share. Raises UserError as `fit`."""
    result = fit(deployment, options)
    if not options.given and any(
        result.request.left(t) < 0 for t in result.stage_terms(result.end)
    ):
        return 0
    return result.sequences
