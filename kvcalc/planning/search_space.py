"""The search space of `plan`: models, GPUs, parallelism, formats and drafts."""

from collections.abc import Iterator

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.model.model import Model
from kvcalc.model.pipeline import check
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.question.plan_options import RequestLengths as RequestLengths
from kvcalc.question.plan_options import Requirement as Requirement
from kvcalc.serving.speculation import draft_model

GPUS_PER_SERVER = 8  # if the preset does not say how many GPUs a link joins
MAX_GPUS = 4096


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
