"""The records of `compare`: the same deployment with other attention, variant by variant."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec

from kvcalc.capacity.memory_record import batch_memory
from kvcalc.layers.cost import Role
from kvcalc.library.typed import UNKNOWN
from kvcalc.model.size import size_record
from kvcalc.model.spec import Model
from kvcalc.planning.quality import quality_of
from kvcalc.planning.variants import Variant, variant
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import roofline_records


def usual_variants(model: Model) -> str:
    """What a model is compared with unless something is asked for: MHA, its own attention (GQA where that is MHA), and others."""
    plain = variant(model, "mha").model.attention
    own = "none" if model.attention != plain else next((f"gqa:{n}" for n in (8, 4, 2) if _divides(model, n)), "none")
    others = [name for name in ("mqa", "mla", "dsa") if variant(model, name).model.attention != model.attention]
    return ",".join(["mha", own, *others])


def _divides(model: Model, groups: int) -> bool:
    heads = {p.as_mha()[0] for layer in model.kinds.values() for p in layer.mixers if p.attends}
    return all(n % groups == 0 and n > groups for n in heads)


def compare_records(
    chosen: Sequence[tuple[str, Variant]],
    deployment: Deployment,
    contexts: Sequence[int],
    batches: Sequence[int],
    block_size: int = 16,
) -> list[dict[str, Any]]:
    """A record for each variant, batch size and context (fastest): sizes, total of one decode step, sequences that fit.

    The first variant is the `reference`: stored_reduction (also `reduction`) and read_reduction are its bytes over this one's.
    attention_intensity: FLOPs of attention, its indexer and scans, per byte of cache that they read in a decode step.
    eviction_flops: vector FLOPs of a step that go into the scores of eviction. mha_parameters: of the same model as plain MHA.
    weight_bytes: held, as in `size`; the other figures of a step are those of `roofline`'s total. max_num_seqs: sequences of
    this context that fit in the replica, as `fit` has them. Raises UserError as `size_record` and `forward` do.
    """
    found = []
    plain = variant(deployment.model, "mha").model.parameters
    bases: dict[tuple[int, int], dict[str, Any]] = {}
    for name, (model, dtype, held) in chosen:
        precision = deployment.precision
        used = msgspec.structs.replace(precision, kv_cache_dtype=dtype) if dtype else precision
        varied = msgspec.structs.replace(deployment, model=model, precision=used)
        for batch_size, context in product(batches, contexts):
            record = size_record(model, context, batch_size, used, block_size, deployment.parallelism)
            base = bases.setdefault((batch_size, context), record)
            *operators, whole = roofline_records(varied, "decode", batch_size, context)
            reduced = _reduction(base, record, "kv_cache_bytes")
            found.append(
                {"variant": name, **varied.named, **record, "reduction": reduced, "reference": chosen[0][0]}
                | {"stored_reduction": reduced, "read_reduction": _reduction(base, record, "kv_cache_read_bytes")}
                | {"attention_intensity": _intensity(operators), "mha_parameters": plain}
                | {"eviction_flops": sum(o["vector_flops"] for o in operators if o["operator"] == "eviction")}
                | {k: v for k, v in whole.items() if k != "weight_bytes"}
                | batch_memory(varied, [(batch_size, context)])
                | {"held_equal": held}
                | _quality(name, model.attention)
            )
    return found


# What is known of layers of which the dimensions alone are given: nothing that hangs on weights, on the FFN or on a GPU.
OF_DIMENSIONS = {
    "variant", "model", "gpus", "tensor_parallel_size", "kv_cache_dtype", "attention", "context", "batch_size", "kv_cache_bytes",
    "kv_cache_read_bytes", "kv_cache_allocated_bytes", "bytes_per_token", "fixed_bytes", "eviction_score_bytes",
    "receptive_field", "mha_ratio", "block_size", "reduction", "reference", "stored_reduction", "read_reduction",
    "attention_intensity", "eviction_flops", "phase", "held_equal", "head_diversity", "quality", "trades",
}  # fmt: skip


def of_dimensions(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of `compare_records` without what hangs on more than dimensions; that of weights is null, as in `size`."""
    known = [{key: value for key, value in record.items() if key in OF_DIMENSIONS} for record in records]
    return [record | dict.fromkeys(UNKNOWN) for record in known]


def _reduction(base: dict[str, Any], record: dict[str, Any], key: str) -> float | None:
    """The reference's bytes over this variant's; None where it has none."""
    return base[key] / record[key] if record[key] else None


def _intensity(operators: Sequence[dict[str, Any]]) -> float | None:
    """FLOPs of what reads the cache per byte that it reads; None where nothing is read."""
    core = [o for o in operators if o["role"] == Role.CORE]
    read = sum(o["cache_read_bytes"] for o in core)
    return sum(o["flops"] for o in core) / read if read else None


def _quality(name: str, attention: str) -> dict[str, str | None]:
    """What is known of the quality of each step of a variant, with its source; null where nothing is noted here."""
    steps = quality_of(name, attention)
    notes = "; ".join(f"{step}: {known}" if len(steps) > 1 else str(known) for step, known in steps.items())
    trades = ", ".join(dict.fromkeys(known.trades for known in steps.values()))
    heads = next((known.head_diversity for known in steps.values()), None)
    return {"head_diversity": heads, "quality": notes or None, "trades": trades or None}
