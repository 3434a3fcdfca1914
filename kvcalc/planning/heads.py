"""The same model over its number of KV heads: what is cached, what a step takes, what is published of quality."""

from typing import Any, NamedTuple

import msgspec

from kvcalc.layers.batch import Batch
from kvcalc.planning.quality import OVER_HEADS
from kvcalc.planning.variants import variant
from kvcalc.timing.deployment import Deployment

MOST_POINTS = 10


class OverHeads(NamedTuple):
    """heads: divisors of the query heads, up to all. cache, step: stored bytes and seconds of a decode step over those of MHA.

    published: (what, KV heads, score over that of MHA in the same table); all heads stand at the most.
    """

    heads: list[int]
    cache: list[float]
    step: list[float]
    published: list[tuple[str, list[int], list[float]]]


def over_heads(deployment: Deployment, context: int, batch_size: int) -> OverHeads | None:
    """None where a layer attends with another number of query heads than the others, or with one."""
    counts = {p.as_mha()[0] for layer in deployment.model.kinds.values() for p in layer.mixers if p.attends}
    most = counts.pop() if len(counts) == 1 else 1
    if most == 1:
        return None
    heads = [n for n in range(1, most + 1) if most % n == 0][-MOST_POINTS:]
    made = [msgspec.structs.replace(deployment, model=variant(deployment.model, f"gqa:{n}").model) for n in heads]
    stored = [d.cache_size(context, batch_size).stored for d in made]
    steps: list[Any] = [float(d.seconds(Batch.decode(context, batch_size))) for d in made]
    published = [
        (f"{what} ({source})", [n or most for n, _ in points], [score / points[-1][1] for _, score in points])
        for (what, source), points in OVER_HEADS.items()
        if most > max(n for n, _ in points)
    ]
    return OverHeads(heads, [s / stored[-1] for s in stored], [s / steps[-1] for s in steps], published)
