"""The records of `compare`: the same deployment with other attention, variant by variant."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec

from kvcalc.layers.batch import Batch
from kvcalc.model.size import size_record
from kvcalc.planning.quality import quality_of
from kvcalc.planning.variants import Variant
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import pass_records


def compare_records(
    chosen: Sequence[tuple[str, Variant]],
    deployment: Deployment,
    contexts: Sequence[int],
    batches: Sequence[int],
    block_size: int = 16,
) -> list[dict[str, Any]]:
    """A record for each variant, batch size and context (fastest): sizes, total of one decode step, sequences that fit.

    weight_bytes: held, as in `size`; the other figures of a step are those of `roofline`'s total. reduction: the first
    variant's stored bytes over this one's. max_num_seqs: whole sequences of this context, of the replica, beside the weights
    in the GPUs' memory, with nothing else in it. Raises UserError as `size_record` and `forward` do.
    """
    found = []
    bases: dict[tuple[int, int], int] = {}
    for name, (model, dtype, held) in chosen:
        precision = deployment.precision
        used = msgspec.structs.replace(precision, kv_cache_dtype=dtype) if dtype else precision
        varied = msgspec.structs.replace(deployment, model=model, precision=used)
        for batch_size, context in product(batches, contexts):
            record = size_record(model, context, batch_size, used, block_size, deployment.parallelism)
            stored = record["kv_cache_bytes"]
            base = bases.setdefault((batch_size, context), stored)
            common = {"gpu": deployment.gpu.name, "phase": "decode"}
            whole = pass_records(varied.placed(Batch.decode(context, batch_size)), common, varied.gpu, varied.calibration)[-1]
            found.append(
                {"variant": name, **record, "reduction": base / stored if stored else None}
                | {k: v for k, v in whole.items() if k != "weight_bytes"}
                | {"max_num_seqs": _sequences(deployment, record, batch_size), "held_equal": held}
                | _quality(name)
            )
    return found


def _sequences(deployment: Deployment, record: dict[str, Any], batch_size: int) -> int | None:
    """Sequences that the replica holds beside its weights; None where nothing is stored."""
    stored, ranks = record["kv_cache_bytes"], deployment.parallelism
    each = -(-stored // ranks.sequences(batch_size))
    free = deployment.gpu.memory_bytes - record["weight_bytes"]
    return max(0, free // each) * ranks.dp if each else None


def _quality(name: str) -> dict[str, str | None]:
    """What is known of a variant's quality, with its source; null for a variant of which nothing is noted here."""
    known = quality_of(name)
    heads, note, trades = known or (None, None, None)
    return {"head_diversity": heads, "quality": note, "trades": trades}
