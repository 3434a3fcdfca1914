"""The search space of `plan`: models, GPUs, parallelism, formats and drafts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.capacity import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.library.load import all_gpus, load_gpu, with_rate_between
from kvcalc.model.model import Model
from kvcalc.model.pipeline import check
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.question.deployment_options import engine_choice
from kvcalc.question.options import (
    check_known,
    check_number,
    items_of,
    read_question,
    read_questions,
    spelled,
)
from kvcalc.question.plan_options import Requirement, SpaceOptions
from kvcalc.serving.request_latency import prices_of
from kvcalc.serving.speculation import ACCEPTANCE, draft_model

GPUS_PER_SERVER = 8  # if the preset does not say how many GPUs a link joins
MAX_GPUS = 4096


class Speculation(msgspec.Struct, frozen=True):
    """Settings of speculative decoding: the draft, its tokens per step and their acceptance.

    Attributes:
        draft: Name of the draft: a model, or "mtp" for the model's own multi-token-prediction
            layers.
        num_tokens: Draft tokens per sequence and step.
        acceptance: Probability that a draft token is accepted if all earlier draft tokens of the
            step are, from 0 to 1.
    """

    draft: str
    num_tokens: int
    acceptance: float

    def options(self, model: Model, options: FitOptions) -> FitOptions:
        """Return the memory options of the engine with the draft's weights and cache included.

        Args:
            model: The target model, whose output the draft proposes.
            options: Memory options without the draft, with which `fit` computes the sequences that
                fit.

        Raises:
            UserError: The draft is unknown or does not match the model.
        """
        is_mtp = self.draft == "mtp"
        return replace(
            options,
            num_speculative_tokens=self.num_tokens,
            mtp=is_mtp or options.mtp,
            draft=options.draft if is_mtp else draft_model(model, self.draft),
        )


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The deployments that `plan` tries: every combination of the values in its tuples.

    Combinations into which the model does not divide are left out. The fields that are not tuples
    apply to all deployments.

    Attributes:
        models: The models.
        gpus: The GPU models.
        max_gpus: Maximum number of GPUs of all replicas together.
        tp: Tensor-parallel sizes; () for all sizes within one server into which the model divides.
        pp: Numbers of pipeline stages; () for all from 1 to the number of layers.
        dp: Data-parallel sizes within a replica; () for all if the model has experts, otherwise 1.
        ep: Expert-parallel sizes; () for the number of GPUs of a pipeline stage, and also for 1 if
            dp is 1 or `dp` states sizes. Without experts, the size is always 1.
        precisions: Data types of weights and KV cache, each pair in one item.
        options: Memory options of the engine. Their lengths and numbers of sequences are replaced
            by those of the requirement.
        calibration: Name or file of a calibration, which has time models fitted to measured
            kernels; `datasheet` for lower bounds without one. "" takes the calibration with the
            name of the engine in `options`, and lower bounds if there is none.
        calibration_from: GPU model whose calibration is scaled to every other GPU model; "" for
            each GPU model's own calibration.
        nodes: Number of nodes of one replica; 0 for as few as possible.
        drafts: Settings of speculative decoding to try; None in it tries no speculation.
        disaggregate: Whether separate replicas process the prompts. (False, True) tries both ways.
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

    def splits(self, model: Model) -> list[Parallelism]:
        """Return the ways to split one replica of a model over GPUs, the fewest GPUs first.

        A way is a combination of tensor-, pipeline-, data- and expert-parallel sizes with at most
        `max_gpus` GPUs.

        Raises:
            UserError: The model divides into none of the requested sizes.
        """
        splits: list[Parallelism] = []
        refusal = None
        for tp, dp, ep in self._widths(model):
            sizes = self.pp or range(1, model.layers + 1)
            for pp in sizes:
                if tp * dp * pp > self.max_gpus:
                    continue
                try:
                    ranks = Parallelism(tp, pp, dp, ep)
                    check(model, ranks)
                    splits.append(ranks)
                except UserError as error:
                    refusal = error
        if refusal and not splits:
            raise refusal
        return sorted(splits, key=lambda ranks: (ranks.gpus, -ranks.tp, ranks.dp, ranks.ep))

    def _widths(self, model: Model) -> Iterator[tuple[int, int, int]]:
        """Yield (tp, dp, ep) of a pipeline stage."""
        has_experts = model.has_experts
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
        """Return the largest tensor-parallel size to try on a GPU model.

        This is the number of GPUs that one link, such as NVLink, connects, or 8 if the preset does
        not state it or if a bridge joins cards only in pairs. It is 1 for llama.cpp on machines
        with one GPU, such as a Mac, because it divides tensors only within a machine. If the
        field `tp` states sizes, it is `max_gpus`.
        """
        if self.tp:
            return self.max_gpus
        if gpu.per == "SoC" and self.options.engine == "llama.cpp":
            return 1
        return GPUS_PER_SERVER if gpu.is_bridged else gpu.link_domain or GPUS_PER_SERVER

    def includes(self, gpu: Gpu, ranks: Parallelism) -> bool:
        """Return whether a split of the model is worth trying on a GPU model.

        The tensor-parallel size must not exceed `max_tp(gpu)`. If one link, such as NVLink, cannot
        connect all GPUs of a replica, the GPU preset must give the rate between nodes.

        Args:
            gpu: GPU model.
            ranks: Tensor-, pipeline-, data- and expert-parallel sizes of a replica.
        """
        is_one_node = not gpu.link_domain or ranks.gpus <= gpu.link_domain
        return ranks.tp <= self.max_tp(gpu) and (is_one_node or bool(gpu.inter_domain_rate))

    def fit_options(self, requirement: Requirement, max_num_seqs: int = 0) -> FitOptions:
        """Return the options with which `fit` computes how many sequences fit on a replica.

        They select the low estimate of the KV cache budget, so that plans are cautious.

        Args:
            requirement: The requirement, which gives the tokens of each sequence.
            max_num_seqs: Concurrent sequences for which the engine of a replica is set up; 0 for
                the engine's default.
        """
        return replace(
            self.options,
            max_model_len=requirement.lengths.context,
            max_num_seqs=max_num_seqs or None,
            budget="low",
        )


MAX_REQUIREMENTS = 1000
# Options for which `plan` takes one value, and a command that accepts a list.
SINGLE = {"engine": "fit", "calibration": "latency", "stack": "latency"}
KEYS = (*Requirement.__struct_fields__, *SpaceOptions.__struct_fields__)


class PlanQuestion(NamedTuple):
    """What a user asks of `plan`: requirements, search space and prices.

    Attributes:
        needs: The requirements: each has a load (users or requests per second, lengths) and
            targets.
        space: The deployments to try.
        prices: Price per hour of one GPU of each model, by the name of the GPU model; empty without
            prices.
    """

    needs: list[Requirement]
    space: SearchSpace
    prices: dict[str, float]


def question_of(models: Sequence[Model], options: Mapping[str, Any]) -> PlanQuestion:
    """Parse the options of the command `plan` into requirements, search space and prices.

    Args:
        models: The models to plan for.
        options: Value of each option of `plan` by its name with underscores, such as {"users": 16,
            "max_tpot": "30ms"}. A value is a text, a number, or a list of them. None, "" and a
            missing option select the default.

    Raises:
        UserError: An option is unknown or has a wrong value.
    """
    check_known(options, KEYS)
    for name, command in SINGLE.items():
        words = items_of(options.get(name) or "")
        if len(words) > 1:
            raise UserError(
                f"a plan takes one {spelled(name)}, not {','.join(words)}",
                f"`kvcalc {command}` takes a list",
            )
    space_options = read_question(SpaceOptions, options)
    choice = engine_choice(
        space_options.engine,
        space_options.calibration,
        space_options.bounds,
        space_options.stack,
    )
    gpus = _gpus(space_options)

    def values(names: str) -> dict[str, Any]:
        return {name: getattr(space_options, name) for name in names.split()}

    space = SearchSpace(
        models=tuple(models),
        gpus=tuple(gpus),
        **values("max_gpus tp pp dp ep nodes calibration_from"),
        precisions=_precisions(space_options),
        options=FitOptions(
            engine=choice.engine,
            **values(
                "engine_version gpu_memory_utilization max_num_batched_tokens enforce_eager"
            ),
        ),
        calibration=choice.calibration,
        drafts=tuple(_drafts(space_options)),
        disaggregate=(False, True) if space_options.disaggregate else (False,),
    )
    needs = read_questions(Requirement, options)
    check_number("requirements", MAX_REQUIREMENTS, needs)
    if space_options.disaggregate and min(need.output_len for need in needs) < 2:
        raise UserError(
            "disaggregated prefill needs answers of 2 tokens or more",
            "Give --input-len and --output-len",
        )
    return PlanQuestion(needs, space, prices_of(space_options.price_per_hour, gpus))


def _gpus(space_options: SpaceOptions) -> list[Gpu]:
    """Return every requested GPU once, with the requested rate between nodes."""
    lists = [all_gpus() if w.lower() == "all" else [load_gpu(w)] for w in space_options.gpu]
    gpus = {gpu.name: gpu for gpu in chain.from_iterable(lists)}
    return [with_rate_between(gpu, space_options.inter_node_bandwidth) for gpu in gpus.values()]


def _precisions(space_options: SpaceOptions) -> tuple[Precision, ...]:
    """Return every combination of data types, quantizations and cache types."""
    formats = space_options.dtype, space_options.quantization, space_options.kv_cache_dtype
    default = "fp16" if space_options.engine == "llama.cpp" else "auto"
    return tuple(
        Precision(
            dtype,
            default if cache == "auto" else cache,
            "" if quantization in ("auto", "none") else quantization,
        )
        for dtype, quantization, cache in product(*formats)
    )


def _drafts(space_options: SpaceOptions) -> list[Speculation | None]:
    """Return every combination of drafts, draft tokens and acceptance rates. `none` is no draft."""
    counts, acceptances = space_options.num_speculative_tokens, space_options.acceptance_rate
    if not space_options.draft:
        if counts or acceptances:
            raise UserError("num-speculative-tokens and acceptance-rate need a draft")
        return [None]
    models = [name for name in space_options.draft if name != "none"]
    if models and not counts:
        raise UserError(
            "a draft needs num-speculative-tokens", "`kvcalc latency --draft` finds the best"
        )
    drafts = [
        Speculation(*values) for values in product(models, counts, acceptances or [ACCEPTANCE])
    ]
    return [None, *drafts] if "none" in space_options.draft else [*drafts]
