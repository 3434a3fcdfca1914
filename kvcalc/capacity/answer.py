"""What fits on GPUs: a budget for the cache, term by term, and what an engine makes of it. Two steps, apart.

Every figure is that of one GPU: of the pipeline stage that holds the fewest sequences. `max_num_seqs` alone, asked and
answered, counts the whole replica's, as `--batch-size` does: dp divides it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvcalc.capacity.engines import Engine, EngineSettings, Plan
from kvcalc.capacity.engines.content import Content, content_of
from kvcalc.capacity.inverse import Needed, held, longest, needed
from kvcalc.capacity.memory_terms import ENDS, Budget, Terms
from kvcalc.capacity.options import FitOptions
from kvcalc.capacity.request import Request, request_of, started
from kvcalc.errors import UserError, shown_briefly
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.spec import Model
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes


class Fit(msgspec.Struct, frozen=True):
    """What fits of a deployment, as `fit` answers: `sequences` of `length` tokens, and how it came to that.

    asked: the deployment as it was given; deployment: as the engine runs it, in the formats that it stores. stage: the
    pipeline stage that decides. length: max_model_len as asked, or the model's own. terms, budget: of the middle of the range;
    end_terms, end_budget: of the end that answers.
    left: by end of the range, bytes that the terms leave for the cache, negative where there are too few. kv_budget: bytes that
    the plan works with, at the end that answers. content: what that stage's cache holds of what the engine stores, without
    blocks, padding or reserve. capacity: sequences of `length` that the cache of the replica holds, set up as asked; held: by
    end of the range, those of them that hold once an engine is set up for as many. longest: tokens of each asked for; None
    where the cache stops growing before the budget ends. beside: bytes of weights that are not the model's own, by name.
    needed: see `Needed`.
    """

    asked: Deployment
    deployment: Deployment
    options: FitOptions
    settings: EngineSettings
    terms: Terms
    budget: Budget
    end_terms: Terms
    end_budget: Budget
    left: dict[str, int]
    utilization: float
    of: str
    stage: int
    plan: Plan
    content: Content
    kv_budget: int
    length: int
    capacity: int
    held: dict[str, int]
    longest: int | None
    beside: dict[str, int]
    needed: Needed
    notes: tuple[str, ...]

    def __str__(self) -> str:
        held = f"{self.sequences:,} sequence{'s' * (self.sequences != 1)} of {self.length:,} tokens"
        where = f"{self.ranks.gpus}× {self.gpu.name} ({self.engine.name})"
        return f"{self.model.name} on {where}: {held}, {format_bytes(self.kv_budget)} for the cache of a GPU"

    _repr_pretty_ = shown_briefly

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
    def sequences(self) -> int:
        """Sequences of `length` that fit in the replica, at the end that answers."""
        return self.sequences_at(self.end)

    @property
    def shortage(self) -> int:
        """Bytes by which weights, activations and overhead exceed the share, at the end that answers; 0 where they do not."""
        return max(0, -self.left[self.end])

    @property
    def end(self) -> str:
        """The end of the range that answers."""
        return self.options.end

    @property
    def given(self) -> bool:
        """Whether the cache's size was given, which leaves the weights unchecked."""
        return self.options.given

    @property
    def over(self) -> int:
        """Bytes by which a cache of a given size exceeds what weights, activations and overhead leave."""
        return max(0, self.plan.pool(self.kv_budget) - self.left[self.end]) if self.given else 0

    @property
    def fits(self) -> bool:
        """Whether max_num_seqs sequences of max_model_len tokens fit: beside the weights, or in a cache of a given size."""
        return (self.given or self.shortage == 0) and self.sequences >= self.options.wanted

    @property
    def headroom(self) -> int:
        """See `Capacity`."""
        shortage = 0 if self.given else self.shortage
        needed = self.plan.needed(self.per_rank, self.length, self.options.shared_prefix)
        return self.plan.pool(self.kv_budget) - shortage - needed

    @property
    def longest_context(self) -> int | None:
        """Return the tokens of the longest sequences that can be served; None without a limit.

        The limit is the memory, and the model's own maximum unless the request is longer. Example: 203,776 tokens fit. A model
        made for 40,960 serves 40,960, but 203,776 if 102,400 were requested.
        """
        own = self.model.max_context
        if own is None or self.length > own:
            return self.longest
        return own if self.longest is None else min(self.longest, own)

    @property
    def margin(self) -> int:
        """Return the bytes that the end of the range which answers leaves free beyond its terms; negative at the high end."""
        return self.end_budget.cache - self.left[self.end]

    def memory_parts(self) -> dict[str, int]:
        """Return the bytes of one GPU's memory by name, which add up to `budget.memory`, at the end that answers.

        `KV cache` is negative if the other parts exceed the share. The last part is what the engine leaves: unused, or, if a
        share leaves out activations and CUDA graphs (SGLang), the memory of both.
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
            parts["activations and CUDA graphs" if budget.outside else "left free" if rest > 0 else "missing"] = rest
        return parts

    @property
    def starts(self) -> bool:
        """Whether the engine would start: some refuse where not even one sequence of `length` tokens fits."""
        return bool(self.sequences) or not self.engine.refuses_below_one_sequence

    @property
    def per_rank(self) -> int:
        """Of the sequences asked for, those on one of the dp ranks."""
        return self.ranks.sequences(self.options.wanted)

    def budget_at(self, end: str) -> int:
        """Bytes for the cache at one end of the range: as given, or what is left."""
        return self.kv_budget if self.given else max(0, self.left[end])

    def sequences_at(self, end: str) -> int:
        """Sequences of `length` tokens in the replica at one end of the range."""
        return self.held.get(end, self.held[self.end])


class Capacity(NamedTuple):
    """The KV cache budget of a deployment, and what it stores. `fit` gives the same figures.

    Attributes:
        settings: The engine's settings.
        max_num_seqs: Sequences that the engine is set up for, of one data-parallel rank.
        plan: Layout of the cache on the pipeline stage that stores the fewest sequences.
        content: What the cache of that stage stores, without blocks and padding.
        kv_budget: Bytes for the cache of one GPU of that stage.
        shortage: Bytes by which weights, activations and overhead exceed the engine's share.
        sequences: Sequences of `length` tokens that fit in the replica.
        requested_sequences: Sequences of `length` tokens that have to fit in the replica.
        length: Tokens of each sequence.
        needed: Bytes of one GPU's cache that the requested sequences need.
    """

    settings: EngineSettings
    max_num_seqs: int
    plan: Plan
    content: Content
    kv_budget: int
    shortage: int
    sequences: int
    requested_sequences: int
    length: int
    needed: int

    @property
    def fits(self) -> bool:
        """Whether the requested sequences fit."""
        return not self.shortage and self.sequences >= self.requested_sequences

    @property
    def headroom(self) -> int:
        """Bytes of a GPU's cache that the requested sequences leave; negative if they do not fit."""
        return self.plan.pool(self.kv_budget) - self.shortage - self.needed


class _Stage(NamedTuple):
    """One pipeline stage's terms and plan, and what fits there."""

    number: int
    terms: Terms
    end_terms: Terms
    left: dict[str, int]
    plan: Plan
    kv_budget: int
    sequences: int
    concurrency: float


def fit(deployment: Deployment, options: FitOptions | None = None) -> Fit:
    """What fits of a deployment. Raises UserError on a request that no engine could be given."""
    for given, kind in ((deployment, Deployment), (options or FitOptions(), FitOptions)):
        if not isinstance(given, kind):
            raise UserError(f"{given!r:.80} is no {kind.__name__}", hint="`kvcalc.deploy(model, gpu).fit()` takes names")
    request, notes = _requested(deployment, options or FitOptions())
    ranks = deployment.parallelism
    found, decides = _stages(request, ENDS if request.options.rules.ranged else ("middle",))
    longests = (longest(request, s.number, s.plan) for s in found)
    return Fit(
        asked=deployment,
        deployment=request.run,
        options=request.options,
        settings=request.settings,
        terms=decides.terms,
        budget=request.budget(decides.terms),
        end_terms=decides.end_terms,
        end_budget=request.budget(decides.end_terms),
        left=decides.left,
        utilization=request.utilization,
        of=request.of,
        stage=decides.number,
        plan=decides.plan,
        content=content_of(request.held, ranks, decides.number, request.options.rules.content),
        kv_budget=decides.kv_budget,
        length=request.length,
        capacity=decides.sequences * ranks.dp,
        held={end: _held(request, [(s.plan, s.left[end]) for s in found], end) * ranks.dp for end in decides.left},
        longest=min((tokens for tokens in longests if tokens is not None), default=None),
        beside=request.beside,
        needed=needed(request, [s.plan for s in found]),
        notes=(*notes, *decides.plan.notes),
    )


def capacity_of(deployment: Deployment, options: FitOptions) -> Capacity:
    """Return the cache budget of a deployment, and whether the requested sequences fit.

    Raises:
        UserError: The engine cannot run the deployment, as `fit`.
    """
    request, _ = _requested(deployment, options)
    asked, end, ranks = request.options, request.end, deployment.parallelism
    found, decides = _stages(request, (end,))
    count = ranks.sequences(asked.wanted)
    return Capacity(
        settings=request.settings,
        max_num_seqs=request.sequences,
        plan=decides.plan,
        content=content_of(request.held, ranks, decides.number, asked.rules.content),
        kv_budget=decides.kv_budget,
        shortage=0 if asked.given else max(0, -decides.left[end]),
        sequences=_held(request, [(s.plan, s.left[end]) for s in found], end) * ranks.dp,
        requested_sequences=asked.wanted,
        length=request.length,
        needed=decides.plan.needed(count, request.length, asked.shared_prefix),
    )


def most_sequences(deployment: Deployment, options: FitOptions) -> int:
    """`Fit.sequences` alone, 0 where the terms exceed the share: for trying a change. Raises UserError as `fit`."""
    request, _ = _requested(deployment, options)
    stages = []
    for number in range(deployment.parallelism.pp):
        left = request.left(request.terms(request.start(number), request.end))
        if left < 0 and not options.given:
            return 0
        stages.append((request.plan(number), left))
    return _held(request, stages, request.end) * deployment.parallelism.dp


def longest_of(found: Fit, users: Iterable[int]) -> Iterator[int | None]:
    """Tokens of each number of sequences at once in the replica, on the stage that decides, as `Fit.longest`."""
    request, _ = _requested(found.asked, found.options)
    for count in users:
        asked = msgspec.structs.replace(request.options, users=count)
        yield longest(request._replace(options=asked), found.stage, found.plan)


def _held(request: Request, stages: Sequence[tuple[Plan, int]], end: str) -> int:
    """Sequences on a rank that hold, of stages with so many bytes left at an end of the range."""
    length, shared = request.length, request.options.shared_prefix
    most = min(plan.most_sequences(request.cache(plan, left), length, shared) for plan, left in stages)
    return held(request, [plan for plan, _ in stages], end, most)


def _requested(deployment: Deployment, asked: FitOptions) -> tuple[Request, tuple[str, ...]]:
    """The request with every choice made, and what its engine remarks."""
    run, release, notes = started(deployment, asked)
    return request_of(run, asked, deployment.precision.kv_cache_dtype, release), notes


def _stages(request: Request, ends: Sequence[str]) -> tuple[list[_Stage], _Stage]:
    """All of them at these ends of the range, and the one that holds least."""
    found = [_stage(request, number, ends) for number in range(request.run.parallelism.pp)]
    return found, min(found, key=lambda s: (s.sequences, s.concurrency, s.kv_budget))


def _stage(request: Request, number: int, ends: Sequence[str]) -> _Stage:
    """The terms of one stage at some ends of the range, the engine's plan, and what fits at the end that answers."""
    asked, start = request.options, request.start(number)
    found = {end: request.terms(start, end) for end in ends}
    left = {end: request.left(terms) for end, terms in found.items()}
    plan = request.plan(number)
    cache = request.cache(plan, left[request.end])
    sequences = plan.most_sequences(cache, request.length, asked.shared_prefix)
    concurrency = plan.concurrency(cache, request.length)
    terms = found[request.end]
    middle = found.get("middle", terms)
    return _Stage(number, middle, terms, left, plan, cache, sequences, concurrency)
