"""What one GPU of several holds: which layers, which share of each weight, how many heads of each cache entry."""

import msgspec

from kvcalc.batch import Parallelism
from kvcalc.cache import CacheEntry
from kvcalc.errors import UserError
from kvcalc.model import Model
from kvcalc.weights import Kind, Weight

# Weights of KV heads, or of the groups of a state space's B and C: where there are fewer than ranks, each is replicated.
REPLICATED = ("k", "v", "k_norm", "in_bc", "conv_bc")


def divisors(n: int, most: int = 12) -> str:
    """The first divisors of n, for a message."""
    found = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
    return ", ".join(map(str, found[:most])) + (" …" if len(found) > most else "")


def check(model: Model, parallelism: Parallelism) -> None:
    """Raise UserError where tp does not divide a model's heads, ep its experts, or pp exceeds its layers.

    KV heads may also be fewer than ranks and divide them: then they are replicated, and dcp spreads at most the copies.
    """
    if parallelism.pp > model.layers:
        raise UserError(f"pipeline size {parallelism.pp} exceeds the {model.layers} layers of {model.name}")
    if parallelism.tp * parallelism.dp == 1:
        return
    _check_context(model, parallelism)
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
        whole = units % ranks == 0 or (ranks % units == 0 and name.rpartition(".")[2] in REPLICATED)
        if units > 1 and not whole:
            size = "tp·dp/ep =" if weight.expert and ranks != parallelism.tp else "tensor-parallel size"
            raise UserError(
                f"{size} {ranks} does not divide the {units} units of {name} in {model.name}",
                hint=f"Use one of {divisors(units)}",
            )


def _check_context(model: Model, parallelism: Parallelism) -> None:
    copies = parallelism.tp // parallelism.dcp  # ranks beyond these hold other tokens of the same heads
    for layer in model.kinds.values():
        for entry in layer.entries:
            if parallelism.dcp > 1 and entry.grows and entry.heads > copies:
                raise UserError(
                    f"decode-context parallel size {parallelism.dcp} with tp {parallelism.tp} leaves {copies} ranks for the "
                    f"{entry.heads} KV heads of {model.name}",
                    hint=f"It may be at most tp / {entry.heads}",
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
