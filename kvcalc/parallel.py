"""What one GPU of several holds: which layers, which share of each weight, how many heads of each cache entry."""

import msgspec

from kvcalc.batch import Parallelism
from kvcalc.cache import CacheEntry
from kvcalc.errors import UserError
from kvcalc.model import Model
from kvcalc.weights import Kind, Weight


def divisors(n: int, most: int = 12) -> str:
    """The first divisors of n, for a message."""
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:most])) + (" …" if len(found) > most else "")


def check(model: Model, parallelism: Parallelism) -> None:
    """Raise UserError where tp divides neither a model's heads nor is a multiple of them, or pp exceeds the layers."""
    if parallelism.pp > model.layers:
        raise UserError(f"pipeline size {parallelism.pp} exceeds the {model.layers} layers of {model.name}")
    if parallelism.tp == 1 and parallelism.ep == 1:
        return
    for name, weight, _ in model.walk():
        units, ranks = weight.shards, parallelism.tp
        if weight.expert:
            if weight.copies % parallelism.ep:
                raise UserError(
                    f"ep {parallelism.ep} does not divide the {weight.copies} experts of {model.name}",
                    hint=f"Use one of {divisors(weight.copies)}",
                )
            ranks = parallelism.tp * parallelism.dp // parallelism.ep
        if weight.kind is Kind.TABLE or name == "lm_head":
            continue  # the vocabulary is padded
        whole = units % ranks == 0 or (ranks % units == 0 and not weight.expert and "norm" not in name)
        if units > 1 and not whole:
            raise UserError(
                f"tensor-parallel size {ranks} does not divide the {units} units of {name} in {model.name}",
                hint=f"Use one of {divisors(units)}",
            )


def stages(model: Model, pp: int) -> list[tuple[str, ...]]:
    """The kinds of layer on each pipeline stage: equal shares, the remainder to stages before the last.

    The rule is vLLM's (distributed/utils.py, get_pp_indices).
    """
    share, left = divmod(model.layers, pp)
    sizes = [share] * pp
    for i in range(2, left + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return [model.order[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def local(weight: Weight, parallelism: Parallelism) -> Weight:
    """The share of a weight that one rank holds: whole heads, columns, or experts."""
    copies, ranks = weight.copies, parallelism.tp
    if weight.expert:
        copies = -(-copies // parallelism.ep)
        ranks = parallelism.tp * parallelism.dp // parallelism.ep
    if weight.kind is Kind.MATRIX and weight.copies > 1 and not weight.expert and weight.copies == weight.shards:
        return msgspec.structs.replace(weight, copies=-(-copies // ranks))  # block-diagonal: whole blocks
    if ranks == 1 or weight.shards == 1:
        return weight if copies == weight.copies else msgspec.structs.replace(weight, copies=copies)
    units = -(-weight.shards // ranks)
    if weight.rows_in:
        return msgspec.structs.replace(weight, copies=copies, inputs=weight.inputs // weight.shards * units)
    outputs = weight.outputs // weight.shards * units
    bias = weight.bias // weight.shards * units
    return msgspec.structs.replace(weight, copies=copies, outputs=outputs, bias=bias)


def local_heads(entry: CacheEntry, parallelism: Parallelism) -> int:
    """Units of a cache entry on one rank; one, replicated, where there are fewer than ranks."""
    return parallelism.share(entry.heads)
