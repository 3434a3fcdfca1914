"""What a plan looks through: models, GPUs, ways to split a model over them, and formats."""

from collections.abc import Iterator

import msgspec

from kvcalc.capacity import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.pipeline import check
from kvcalc.model.precision import PUBLISHED, Precision
from kvcalc.model.spec import Model
from kvcalc.planning.need import Need
from kvcalc.serving.speculation import draft_model

NODE = 8  # GPUs of a server where a preset does not say how many its links join
MOST_SPLIT = 4096


class Speculated(msgspec.Struct, frozen=True):
    """A draft beside the model, as `draft_model` takes it: `drafted` tokens a step, each accepted with that probability."""

    draft: str
    drafted: int
    acceptance: float

    def options(self, model: Model, options: FitOptions) -> FitOptions:
        """`fit`'s options with the draft's weights and cache beside the model's. Raises UserError as `draft_model`."""
        beside = {"mtp": True} if self.draft == "mtp" else {"draft": draft_model(model, self.draft)}
        return msgspec.structs.replace(options, num_speculative_tokens=self.drafted, **beside)


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Every combination is a deployment, in as many replicas as max_gpus GPUs hold.

    tp, pp, dp, ep: sizes; () for every one that the model divides into, with tensor parallelism inside one server, and data
    parallelism inside a replica for mixtures of experts alone: without experts it is another replica. options: of
    the engine; its lengths, sequences and end of the range are the plan's. calibration, calibration_from: as
    `Deployment.under` takes them. nodes: of a replica, 0 for the fewest.
    drafts: None for none. disaggregate: whether prompts are processed on replicas of their own.
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
    drafts: tuple[Speculated | None, ...] = (None,)
    disaggregate: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        if not 1 <= self.max_gpus <= MOST_SPLIT:
            raise UserError(f"max-gpus {self.max_gpus} is outside 1 to {MOST_SPLIT:,}")

    def splits(self, model: Model) -> Iterator[Parallelism]:
        """The ways to cut a model over at most max_gpus GPUs, fewest first. Raises UserError where none of those given does."""
        tried: list[Parallelism | UserError] = []
        for tp, dp, ep in self._widths(model):
            stages = [pp for pp in self.pp or range(1, model.layers + 1) if tp * dp * pp <= self.max_gpus]
            one = _cut(model, tp, 1, dp, ep)  # what is refused for its width is refused in any number of stages
            tried += [_cut(model, tp, pp, dp, ep) for pp in stages] if isinstance(one, Parallelism) else [one] * bool(stages)
        found = [ranks for ranks in tried if isinstance(ranks, Parallelism)]
        refused = [error for error in tried if isinstance(error, UserError)]
        if refused and not found:
            raise refused[-1]
        return iter(sorted(found, key=lambda r: (r.gpus, -r.tp, r.dp, r.ep)))

    def _widths(self, model: Model) -> Iterator[tuple[int, int, int]]:
        """(tp, dp, ep) of a stage, on at most max_gpus GPUs."""
        most, experts = self.max_gpus, _experts(model)
        within = max(self.within(gpu) for gpu in self.gpus)
        for tp in self.tp or range(1, min(most, within) + 1):
            for dp in self.dp or (range(1, most // tp + 1) if experts else (1,)):
                whole = {1, tp * dp} if dp == 1 or self.dp else {tp * dp}
                for ep in (self.ep or sorted(whole)) if experts else (1,):
                    yield tp, dp, ep

    def within(self, gpu: Gpu) -> int:
        """GPUs over which tensor parallelism spreads: those of a server, unless sizes are given."""
        return self.max_gpus if self.tp else NODE if gpu.bridged else gpu.link_domain or NODE

    def options_of(self, need: Need, count: int = 0) -> FitOptions:
        """What `fit` is asked of a replica for `count` sequences, to say what a point says."""
        length = need.lengths.context
        return msgspec.structs.replace(self.options, max_model_len=length, max_num_seqs=count or None, budget="low")

    def takes(self, gpu: Gpu, ranks: Parallelism) -> bool:
        """Whether this split is looked at on these GPUs; beyond one link only where there is a rate between nodes."""
        joined = not gpu.link_domain or ranks.gpus <= gpu.link_domain or bool(gpu.outer_link)
        return ranks.tp <= self.within(gpu) and joined


def _cut(model: Model, tp: int, pp: int, dp: int, ep: int) -> Parallelism | UserError:
    """The ranks, or why the model is not cut over them."""
    try:
        ranks = Parallelism(tp, pp, dp, ep)
        check(model, ranks)
    except UserError as error:
        return error
    return ranks


def _experts(model: Model) -> bool:
    return any(weight.expert for _, weight, _ in model.walk())
