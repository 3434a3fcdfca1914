"""What `plan` searches for and where: targets, models, GPUs, parallelism, formats and drafts."""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.library.choices import Tokens, spelled, tokens_called
from kvcalc.model.model import Model
from kvcalc.model.pipeline import check
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.serving.speculation import draft_model
from kvcalc.units import parse_seconds

# sequences per replica that are tried if the users do not determine them
SEQUENCE_COUNTS = (
    1,
    2,
    4,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
)
GPUS_PER_SERVER = 8  # if the preset does not say how many GPUs a link joins
MAX_GPUS = 4096


def parse_number(text: str, what: str) -> float:
    """Return a finite number from 0 up. Raises UserError, which names `what`, otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise UserError(f"{what} {text!r} is not a number from 0 up")
    return value


Seconds = Annotated[float, parse_seconds]
Number = Annotated[float, parse_number]


class RequestLengths(msgspec.Struct, frozen=True):
    """Tokens of a request.

    Attributes:
        prompt: Tokens before the first output token.
        context: Tokens at the end.
        output: Output tokens; 0 if unknown. A step is then timed at the end.
        cached: Tokens of the prompt that are a cached prefix.
    """

    prompt: int
    context: int
    output: int = 0
    cached: int = 0

    @property
    def middle(self) -> int:
        """Tokens half-way through the answer, or at the end if the output length is unknown."""
        return self.prompt + max(1, self.output // 2) if self.output else self.context


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """The load and the targets of a plan. 0 leaves a figure out.

    Attributes:
        users: Concurrent sequences over all replicas.
        context: Tokens of each request. Alternative: input_len and output_len.
        rate: Requests per second, instead of users.
        max_ttft: Maximum seconds to the first token.
        max_tpot: Maximum seconds per further token.
        min_throughput: Minimum output tokens per second of all replicas.
        prefix_hit_rate: Share of each prompt that is cached.
    """

    users: Annotated[int, tokens_called("number of users")] = 0
    context: Tokens = 0
    input_len: Tokens = 0
    output_len: Tokens = 0
    rate: Number = 0.0
    max_ttft: Seconds = 0.0
    max_tpot: Seconds = 0.0
    min_throughput: Number = 0.0
    prefix_hit_rate: Number = 0.0

    def __post_init__(self) -> None:
        problems = (
            (
                self.context and (self.input_len or self.output_len),
                "context and input-len exclude each other",
                "A context is the end of input and output",
            ),
            (
                bool(self.input_len) != bool(self.output_len),
                "input-len and output-len go together",
                "Or give a context",
            ),
            (
                not self.context and not self.input_len,
                "a plan needs the tokens of a request",
                "Give --context, or --input-len and --output-len",
            ),
            (
                self.users and self.rate,
                "use either --users or --rate",
                "Users wait for their answers, requests at a rate do not",
            ),
            (
                not (self.users or self.rate or self.min_throughput),
                "a plan needs a load",
                "Give --users, --rate or --min-throughput",
            ),
            (
                not self.users and not self.output_len,
                "a rate needs requests with an end",
                "Give --input-len and --output-len",
            ),
        )
        for is_wrong, message, hint in problems:
            if is_wrong:
                raise UserError(message, hint=hint)
        for name in ("rate", "min_throughput", "max_ttft", "max_tpot"):
            if not 0 <= getattr(self, name) <= 1e12:
                raise UserError(f"{spelled(name)} {getattr(self, name)} is outside 0 to 10^12")
        if not 0 <= self.prefix_hit_rate < 1:
            raise UserError(f"prefix-hit-rate {self.prefix_hit_rate} is not from 0 to below 1")

    @property
    def lengths(self) -> RequestLengths:
        """The tokens of each request."""
        prompt = self.context or self.input_len
        return RequestLengths(
            prompt=prompt,
            context=self.context or self.input_len + self.output_len,
            output=self.output_len,
            cached=int(prompt * self.prefix_hit_rate),
        )

    def sequence_counts(self, max_replicas: int) -> set[int]:
        """Return the numbers of sequences per replica to try with at most so many replicas."""
        if not self.users:
            return set(SEQUENCE_COUNTS)
        replicas = range(1, min(max_replicas, self.users) + 1)
        return {-(-self.users // number) for number in replicas}


class Speculation(msgspec.Struct, frozen=True):
    """Speculative decoding of a deployment.

    Attributes:
        draft: Name of the draft, as `draft_model` takes it.
        num_tokens: Draft tokens per step.
        acceptance: Probability that a draft token is accepted.
    """

    draft: str
    num_tokens: int
    acceptance: float

    def options(self, model: Model, options: FitOptions) -> FitOptions:
        """Return `fit`'s options with the draft's weights and cache. Raises UserError as
        `draft_model`."""
        is_mtp = self.draft == "mtp"
        return msgspec.structs.replace(
            options,
            num_speculative_tokens=self.num_tokens,
            mtp=is_mtp or options.mtp,
            draft=options.draft if is_mtp else draft_model(model, self.draft),
        )


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The deployments that `plan` tries: every combination of the fields.

    Attributes:
        max_gpus: Maximum number of GPUs of all replicas.
        tp: Tensor-parallel sizes; () for all that the model divides into on one server.
        pp: Pipeline-parallel sizes; () for all.
        dp: Data-parallel sizes in a replica; () for all if the model has experts, otherwise 1.
        ep: Expert-parallel sizes; () for 1 and all ranks.
        options: Options of the engine. Lengths and sequences come from the requirement.
        calibration: As in `TimedDeployment.under`.
        calibration_from: As in `TimedDeployment.under`.
        nodes: Nodes of a replica; 0 for the smallest number.
        drafts: Drafts to try; None for no draft.
        disaggregate: Whether prefill has separate replicas; both values try both.
    """

    models: tuple[Model, ...]
    gpus: tuple[Gpu, ...]
    max_gpus: int = 16
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    precisions: tuple[Precision, ...] = (PUBLISHED,)
    options: FitOptions = FitOptions()
    calibration: str = ""
    calibration_from: str = ""
    nodes: int = 0
    drafts: tuple[Speculation | None, ...] = (None,)
    disaggregate: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        if not 1 <= self.max_gpus <= MAX_GPUS:
            raise UserError(f"max-gpus {self.max_gpus} is outside 1 to {MAX_GPUS:,}")

    def splits(self, model: Model) -> list[Parallelism]:
        """Return the ways to split a model over at most max_gpus GPUs, the smallest first.

        Raises:
            UserError: The model divides into none of the requested sizes.
        """
        splits: list[Parallelism] = []
        refusal = None
        for tp, dp, ep in self._widths(model):
            sizes = self.pp or range(1, model.layers + 1)
            stages = [pp for pp in sizes if tp * dp * pp <= self.max_gpus]
            if not stages:
                continue
            try:
                check(model, Parallelism(tp, 1, dp, ep))
            except UserError as error:
                refusal = error
                continue
            for pp in stages:
                try:
                    ranks = Parallelism(tp, pp, dp, ep)
                    check(model, ranks)
                except UserError as error:
                    refusal = error
                else:
                    splits.append(ranks)
        if refusal and not splits:
            raise refusal
        return sorted(splits, key=lambda ranks: (ranks.gpus, -ranks.tp, ranks.dp, ranks.ep))

    def _widths(self, model: Model) -> Iterator[tuple[int, int, int]]:
        """Yield (tp, dp, ep) of a pipeline stage."""
        has_experts = any(weight.expert for _, weight, _ in model.walk())
        max_tp = min(self.max_gpus, max(map(self.max_tp, self.gpus)))
        for tp in self.tp or range(1, max_tp + 1):
            for dp in self.dp or (range(1, self.max_gpus // tp + 1) if has_experts else (1,)):
                if not has_experts:
                    yield tp, dp, 1
                    continue
                sizes = {1, tp * dp} if dp == 1 or self.dp else {tp * dp}
                for ep in self.ep or sorted(sizes):
                    yield tp, dp, ep

    def max_tp(self, gpu: Gpu) -> int:
        """Return the largest tensor-parallel size to try: the GPUs of a server, if no sizes are
        requested."""
        if self.tp:
            return self.max_gpus
        return GPUS_PER_SERVER if gpu.bridged else gpu.link_domain or GPUS_PER_SERVER

    def includes(self, gpu: Gpu, ranks: Parallelism) -> bool:
        """Return whether to try these ranks on a GPU model. Several nodes need a known rate."""
        is_one_node = not gpu.link_domain or ranks.gpus <= gpu.link_domain
        return ranks.tp <= self.max_tp(gpu) and (is_one_node or bool(gpu.outer_link))

    def fit_options(self, requirement: Requirement, max_num_seqs: int = 0) -> FitOptions:
        """Return the options with which `fit` gives a candidate's capacity."""
        return msgspec.structs.replace(
            self.options,
            max_model_len=requirement.lengths.context,
            max_num_seqs=max_num_seqs or None,
            budget="low",
        )
