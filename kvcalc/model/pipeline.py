"""Sharding over GPUs: layers of a stage, shares of weights, heads of cache entries."""

from collections.abc import Callable
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.model.model import Model, memoized

# Weights of KV heads, or of the groups of a state space's B and C. Fewer units than ranks are
# replicated.
REPLICATED = ("k", "v", "k_norm", "in_bc", "conv_bc")

_HEADS = {"q": "query heads", "q_up": "query heads", "k": "KV heads"}  # the shards of weights

MAX_NAMES = 12  # divisors in an error message


def divisors(n: int, is_valid: Callable[[int], bool] = bool) -> str:
    """Return the smallest divisors of a number as text, such as `1, 2, 3, 4, 6, 12` for 12.

    Error messages use it to list valid parallel sizes. After 12 divisors, … follows. Divisors
    above 4,096 are left out.

    Args:
        n: The number.
        is_valid: Condition of the divisors in the text.
    """
    results = [str(d) for d in range(1, min(n, 4096) + 1) if n % d == 0 and is_valid(d)]
    return ", ".join(results[:MAX_NAMES]) + " …" * (len(results) > MAX_NAMES)


def check(model: Model, parallelism: Parallelism) -> None:
    """Check that a model can be divided over the ranks of a parallelism.

    Tensor parallelism (tp) must divide the heads of every matrix, expert parallelism (ep) the
    experts, and pp may be at most the number of layers. If there are fewer KV heads than tp ranks,
    their number must divide tp. Each KV head is then on several ranks, and decode-context
    parallelism (dcp) may be at most their number. A pipeline stage may not read cached rows that
    another stage stores.

    Args:
        model: The model.
        parallelism: Number of ranks of each kind of parallelism.

    Raises:
        UserError: A size does not suit the model. The message names the size and the problem.
    """
    memoized(model, _check, parallelism)


def _check(model: Model, parallelism: Parallelism) -> None:
    """Raise UserError if the parallelism is invalid. `memoized` stores that it is valid."""
    if parallelism.pp > model.layers:
        raise UserError(
            f"pipeline size {parallelism.pp} exceeds the {model.layers} layers of {model.name}"
        )
    _check_shared_rows(model, parallelism.pp)
    if parallelism.stage_gpus == 1:
        return
    _check_context(model, parallelism)
    for name, weight, _ in model.walk():
        units = weight.shards
        ranks = parallelism.tp
        if weight.expert:
            if weight.copies % parallelism.ep:
                raise UserError(
                    f"ep {parallelism.ep} does not divide the {weight.copies} experts of "
                    f"{model.name}",
                    f"Use one of {divisors(weight.copies)}",
                )
            ranks = parallelism.stage_gpus // parallelism.ep
        if not _splits(name, weight, ranks):
            noun = _HEADS.get(name.rpartition(".")[2], f"units of {name}")
            problem = f"{ranks} does not divide the {units} {noun} of {model.name}"
            if weight.expert and ranks != parallelism.tp:
                raise UserError(f"tp·dp/ep = {problem}", f"Use one of {divisors(units)}")
            sizes = divisors(
                units, lambda tp: all(_splits(n, w, tp) for n, w, _ in model.walk())
            )
            raise UserError(
                f"tensor-parallel size {problem}", f"Use one of {sizes}, or --pp {ranks}"
            )


def _splits(name: str, weight: Weight, ranks: int) -> bool:
    """Return whether the units of a weight can be divided over ranks of tensor parallelism."""
    is_padded = weight.kind is WeightKind.TABLE or name == "lm_head"  # the vocabulary
    is_replicated = ranks % weight.shards == 0 and name.rpartition(".")[2] in REPLICATED
    return weight.shards == 1 or weight.shards % ranks == 0 or is_padded or is_replicated


def _check_shared_rows(model: Model, pp: int) -> None:
    """Raise UserError if layers on different stages share rows, because the cost of a copy is
    unknown."""
    if pp == 1 or not any(entry.is_stored_by_other_layer for entry in model.entries):
        return
    for stage in stages(model, pp):
        stored_rows = set()
        for entry in (e for kind in stage.order for e in model.kinds[kind].entries):
            row = entry.role, entry.width, entry.ratio, entry.limit
            if not entry.is_stored_by_other_layer:
                stored_rows.add(row)
            elif row not in stored_rows:
                raise UserError(
                    f"stage {stage.number + 1} of {pp} of {model.name} reads cached rows that "
                    "an earlier one stores"
                )


def _check_context(model: Model, parallelism: Parallelism) -> None:
    # the other ranks store other tokens of the same heads
    copies = parallelism.tp // parallelism.dcp
    for layer in model.kinds.values():
        for entry in layer.entries:
            if parallelism.dcp > 1 and entry.grows and entry.heads > copies:
                raise UserError(
                    f"decode-context parallel size {parallelism.dcp} with tp {parallelism.tp} "
                    f"leaves {copies} ranks for the "
                    f"{entry.heads} KV heads of {model.name}",
                    f"It may be at most tp / {entry.heads}",
                )


class Stage(NamedTuple):
    """A pipeline stage of a model: consecutive layers whose weights are on the same GPUs.

    Attributes:
        number: Index of the stage, from 0.
        order: Name of the kind of each of the stage's layers, in order.
        counts: Name of each kind of layer → number of the stage's layers of this kind; may be 0.
        first: Whether the stage is the first, with the embedding.
        last: Whether the stage is the last, with the LM head.
    """

    number: int
    order: tuple[str, ...]
    counts: dict[str, int]
    first: bool
    last: bool


def stages(model: Model, pp: int) -> list[Stage]:
    """Return the pipeline stages of a model, with equal numbers of layers if possible.

    vLLM divides the layers in the same way. Remaining layers go to the stages directly before the
    last stage, one layer each. Example: 30 layers in 4 stages give 7, 8, 8 and 7 layers. Source:
    vLLM, distributed/utils.py, get_pp_indices.

    Args:
        model: The model.
        pp: Number of pipeline stages.
    """
    return memoized(model, _split_layers, pp)


def _split_layers(model: Model, pp: int) -> list[Stage]:
    share, remainder = divmod(model.layers, pp)
    sizes = [share] * pp
    for i in range(2, remainder + 2):
        sizes[-i] += 1
    result = []
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        order = model.order[start : start + size]
        counts = {kind: order.count(kind) for kind in model.kinds}
        result.append(Stage(number, order, counts, number == 0, number == pp - 1))
    return result
