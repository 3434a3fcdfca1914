"""Comparisons: attention variants of one layer or of a model, KV heads, and deployments."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, cast

from msgspec.structs import replace

from kvcalc.capacity.fit_records import batch_memory
from kvcalc.gpu.gpu import Gpu, mla_form, roofline, total_bound, total_seconds
from kvcalc.layers.attention import Grouped
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Role
from kvcalc.library.load import UNKNOWN
from kvcalc.model.forward_pass import forward, total
from kvcalc.model.memory import size_record
from kvcalc.model.model import Layer, Model
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.planning.variants import Variant, quality_of, variant
from kvcalc.records import Record
from kvcalc.records.compare import CompareRecord, QualityRecord, VariantRecord
from kvcalc.records.size import SizeRecord
from kvcalc.serving.request_latency import request
from kvcalc.timing.deployment import TimedDeployment, roofline_records

# query heads and their width in Llama-3.1-405B and DeepSeek-V3 (their config.json)
HEADS, WIDTH = 128, 128
SHAPE = f"one layer of {HEADS} heads of {WIDTH}"


class AttentionPoint(NamedTuple):
    """An attention variant and a phase for which `attention_records` computes roofline points.

    The class has no numbers. FLOPs and bytes follow from variant, phase, batch size and context.

    Attributes:
        label: Name of the variant in the printed table, such as "GQA-8".
        variant: Name of the variant as in the option `compare --variants`, such as "gqa:8".
        phase: "decode" or "prefill".
    """

    label: str
    variant: str
    phase: str


POINT_LINES = """\
MHA: mha: decode
GQA-8: gqa:8: decode
GQA-4: gqa:4: decode
GQA-8 window 1024: gqa:8/window:1024: decode
MQA: mqa: decode
MLA absorbed: mla: decode
DSA top-2048: dsa: decode
MHA prefill: mha: prefill
MLA prefill: mla/expanded: prefill
"""
POINTS = [AttentionPoint(*line.split(": ")) for line in POINT_LINES.splitlines()]


def attention_records(
    gpu: Gpu, contexts: Sequence[int], batches: Sequence[int], precision: Precision = PUBLISHED
) -> list[Record]:
    """Return FLOPs, bytes and minimum seconds of one attention layer on one GPU, by variant.

    There is one record for each combination of attention variant, batch size and context. The
    variants are fixed: MHA, GQA with and without a window, MQA, MLA and DSA in decode, and MHA and
    MLA in prefill. The layer has 128 query heads of width 128. Only the attention over the KV cache
    counts, not the projections. All numbers are for one pass of the batch. `knee` is the GPU's
    FLOPs per byte at the ridge point, for the dtype of the products. `to_knee` is `knee` ÷ the
    attention's FLOPs per byte: above 1, attention is memory-bound.

    Args:
        gpu, precision: GPU model, and data types of the KV cache and the products.
        contexts: Numbers of tokens of each sequence; each number gives further records.
        batches: Batch sizes in sequences; each number gives further records.

    Raises:
        UserError: The GPU has no matrix peak.
    """
    mixer = Grouped(num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH)
    layer = Model(
        name=SHAPE,
        hidden_size=HEADS * WIDTH,
        vocab_size=1,
        layers=1,
        kinds={"layer": Layer(parts=(mixer,))},
    )
    records: list[Record] = []
    for point, batch_size, context in product(POINTS, batches, contexts):
        changed = variant(layer, point.variant)
        operators = forward(
            changed.model,
            Batch.of_phase(point.phase, context, batch_size),
            precision,
            mla_form=changed.mla_form or "auto",
        )
        core = [operator for operator in operators if operator.role == Role.CORE]
        placed, cost = roofline(core, gpu), total(core)
        peak, computed_in = gpu.peak(core[-1].dtype)
        knee = peak / gpu.bandwidth_bytes_per_s
        records.append(
            {
                "gpu": gpu.name,
                "attention": point.label,
                "variant": point.variant,
                "phase": point.phase,
                "mla_form": mla_form(placed),
                "batch_size": batch_size,
                "context": context,
                "kv_cache_dtype": formats_of(layer, precision).kv_cache_dtype,
                "flops": cost.flops,
                "bytes": cost.bytes,
                "intensity": cost.flops / cost.bytes,
                "bound": total_bound(placed),
                "roofline_s": total_seconds(placed),
                "knee": knee,
                "to_knee": knee * cost.bytes / cost.flops,
                "computed_in": computed_in,
            }
        )
    return records


def usual_variants(model: Model) -> str:
    """Return the attention variants that `compare` shows by default, joined with commas.

    A model with GQA gives "mha,none,mqa,mla,dsa". "none" is the model's own attention. Variants
    equal to it are left out. A model with MHA gives "mha,gqa:8,mqa,mla,dsa", or gqa:4, gqa:2 or
    "none" if so many KV heads do not suit its query heads.
    """

    def differs(name: str) -> bool:
        return variant(model, name).model.attention != model.attention

    names = ["mha", "none"]
    if not differs("mha"):
        heads = {part.as_mha()[0] for part in model.mixers if part.attends}
        groups = [n for n in (8, 4, 2) if all(h % n == 0 and h > n for h in heads)]
        names = ["mha", f"gqa:{groups[0]}" if groups else "none"]
    return ",".join([*names, *filter(differs, ("mqa", "mla", "dsa"))])


def compare_records(
    variants: Sequence[tuple[str, Variant]],
    deployment: TimedDeployment,
    contexts: Sequence[int],
    batches: Sequence[int],
    block_size: int,
) -> list[CompareRecord]:
    """Return a record for each attention variant, batch size and context of one deployment.

    A variant is the model with its attention replaced, for example by MQA. A record has the bytes
    of KV cache and weights on the GPU that has the most, the seconds of a decode step and a
    prefill, and the number of requests that fit in the replica. `stored_reduction` and
    `read_reduction` are the KV cache bytes of the first variant ÷ those of this variant.

    Args:
        variants: Pairs (name, changed model).
        deployment: The deployment with the original model.
        contexts: Numbers of tokens of each sequence; each number gives further records.
        batches: Sequences of the whole replica; each number gives further records.
        block_size: Tokens of a KV cache block, for the allocated bytes.

    Raises:
        UserError: A length or batch size is invalid, or the parallelism does not divide the model.
    """
    records: list[CompareRecord] = []
    mha_parameters = variant(deployment.model, "mha").model.parameters
    references: dict[tuple[int, int], SizeRecord] = {}
    for name, changed in variants:
        model, precision = changed.model, changed.precision(deployment.precision)
        varied = replace(
            deployment,
            model=model,
            precision=precision,
            mla_form=changed.mla_form or deployment.mla_form,
        )
        for batch_size, context in product(batches, contexts):
            shape = context, batch_size, precision, block_size
            size = size_record(model, *shape, deployment.parallelism)
            reference = references.setdefault((batch_size, context), size)
            *operators, step = roofline_records(varied, "decode", batch_size, context)
            prefill = request(varied, context, output_len=1, batch_size=batch_size)
            core = [operator for operator in operators if operator["role"] == Role.CORE]
            core_bytes, core_s, core_flops = (
                sum(operator[key] for operator in core)
                for key in ("cache_read_bytes", "roofline_s", "flops")
            )
            stored_reduction, read_reduction = (
                reference[key] / size[key] if size[key] else None
                for key in ("kv_cache_bytes", "kv_cache_read_bytes")
            )
            record = {
                "variant": name,
                **varied.identifying_keys,
                **size,
                "reduction": stored_reduction,
                "reference": variants[0][0],
                "stored_reduction": stored_reduction,
                "read_reduction": read_reduction,
                "attention_intensity": core_flops / core_bytes if core_bytes else None,
                "attention_flops_per_s": core_flops / core_s if core_s else None,
                "mha_parameters": mha_parameters,
                "eviction_flops": sum(
                    r["vector_flops"] for r in operators if r["operator"] == "eviction"
                ),
                **step,
                "weight_bytes": size["weight_bytes"],  # the step does not read all weights
                "ttft_s": prefill.ttft_s,
                "prefill_flops": prefill.flops,
                **batch_memory(varied, [(batch_size, context)]),
                "held_equal": changed.held_equal,
                **_quality(name, model),
            }
            records.append(cast(CompareRecord, record))
    return records


def of_dimensions(records: Sequence[CompareRecord]) -> list[VariantRecord]:
    """Return comparison records without times, GPUs and weights: only the KV cache remains.

    They are for a model that is described only by the dimensions of its attention, so that its
    weights are unknown. Keys about weights and parameters become None. Keys about times and GPUs
    are removed.

    Args:
        records: Records that `compare_records` returned for the attention variants of the model.
    """
    keys = VariantRecord.__annotations__.keys() - UNKNOWN.keys()
    results = []
    for record in records:
        dimensions = {key: value for key, value in record.items() if key in keys}
        results.append(cast(VariantRecord, dimensions | UNKNOWN))
    return results


def _quality(name: str, model: Model) -> QualityRecord:
    """Return the published quality of each step in a variant's name, with sources.

    The head diversity is the diversity of the resulting attention, such as GQA with a window.
    """
    steps = quality_of(name, model.attention)
    notes = [
        f"{step}: {quality.note}" if len(steps) > 1 else quality.note
        for step, quality in steps.items()
    ]
    own = quality_of("none", model.attention).values()
    shares = [
        score.value / score.full
        for quality in steps.values()
        for score in quality.scores
        if score.noun.lower().endswith(f" {model.name}")
    ]
    trades = dict.fromkeys(quality.trades for quality in steps.values())
    return {
        "head_diversity": next((quality.head_diversity for quality in own), None),
        "quality_share": shares[0] if shares else None,
        "quality": "; ".join(notes) or None,
        "trades": ", ".join(trades) or None,
    }
