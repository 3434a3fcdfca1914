"""Records of `roofline`: a pass and its operators, and attention without a model."""

from typing import Annotated, Any, NotRequired, TypedDict

from kvcalc.records.figures import Figure
from kvcalc.records.size import BatchRecord, DeploymentRecord, MemoryRecord, TimeBasisRecord


class WorkRecord(TypedDict):
    """Work and time of an operator or of a pass, without the bytes of the weights."""

    phase: Annotated[str, Figure("phase", "decode, prefill or mixed")]
    operator: Annotated[str, Figure("operator", "operator name; total is the sum of the pass")]
    layer: Annotated[str, Figure("layer", "kind of layer; '' outside layers")]
    role: Annotated[str, Figure("", "kind of work; '' for the total")]
    count: Annotated[
        int, Figure("runs", "runs in the pass; all other figures are for all runs together")
    ]
    flops: Annotated[int, Figure("FLOP", "matrix products only, two per multiply-add")]
    vector_flops: Annotated[
        int, Figure("vector FLOP", "norms, softmax, activation functions and similar")
    ]
    cache_bytes: Annotated[int, Figure("cache", "cache read and written", format="si B")]
    cache_read_bytes: Annotated[int, Figure("", "cache read")]
    cache_write_bytes: Annotated[int, Figure("", "cache written")]
    activation_bytes: Annotated[
        int, Figure("activations", "activations read and written", format="si B")
    ]
    bytes: Annotated[int, Figure("bytes", "all traffic of the GPU's memory", format="si B")]
    network_bytes: Annotated[int, Figure("", "sent between GPUs")]
    inter_node_bytes: Annotated[int, Figure("", "sent between nodes")]
    intensity: Annotated[
        float | None,
        Figure(
            "FLOP/B",
            "flops ÷ bytes; null without traffic",
            unit="FLOP per byte",
            formula="{flops} / {bytes}",
        ),
    ]
    bound: Annotated[
        str | None,
        Figure(
            "bound",
            "compute, memory or network, by the roofline; null for engine_overhead and "
            "module_overhead",
        ),
    ]
    computed_in: Annotated[
        str | None, Figure("", "dtypes of the matrix units; null without a product")
    ]
    roofline_s: Annotated[
        float,
        Figure(
            "at least",
            "datasheet bound with full overlap and no launches",
            format="kernel",
            is_noted=True,
        ),
    ]
    time_s: Annotated[
        float | None,
        Figure(
            "predicted", "predicted time; null without a calibration", "kernel", mark="time"
        ),
    ]
    overhead: Annotated[
        float | None,
        Figure(
            "overhead",
            "predicted time ÷ bound; null without one of them",
            "{:.3g}×",
            unit="ratio",
            is_noted=True,
            formula="{time_s} / {roofline_s}",
        ),
    ]
    share: Annotated[
        float,
        Figure(
            "share",
            "share of the time of the pass; by time_s or else roofline_s",
            "{:.1%}",
            unit="share",
            is_noted=True,
        ),
    ]


class PassTotalRecord(WorkRecord):
    """Sum of a pass, without the bytes of the weights."""

    mla_form: Annotated[
        str | None,
        Figure("MLA form", "absorbed, expanded or mixed; null without latent attention"),
    ]
    time_note: Annotated[
        str | None,
        Figure("", "a warning on the measured rows behind a time; null if there is none"),
    ]


class TimedWorkRecord(DeploymentRecord, BatchRecord, WorkRecord, TimeBasisRecord):
    """Work and time of an operator or of a pass of a deployment."""

    weight_bytes: Annotated[int, Figure("weights", "weights read", format="si B")]


class RooflineRecord(TimedWorkRecord, PassTotalRecord, MemoryRecord):
    """Sum of a pass of a deployment, with the memory that its batch needs."""


class OperatorRecord(TimedWorkRecord):
    """One operator of a pass, for all its runs together."""

    heads: Annotated[
        int | None, Figure("", "heads of attention; null for other operators", unit="count")
    ]
    m: Annotated[
        int | None,
        Figure("", "rows of a product, or queries of attention; null for other operators"),
    ]
    k: Annotated[
        int | None,
        Figure("", "inner width of a product, or width of a key; null for other operators"),
    ]
    n: Annotated[
        float | None,
        Figure(
            "",
            "columns of a product, or mean keys that a query sees; null for other operators",
        ),
    ]
    parts: NotRequired[
        Annotated[
            list[dict[str, Any]],
            Figure("", "operator, flops and vector_flops of each part of a fused operator"),
        ]
    ]
    expected_experts: NotRequired[
        Annotated[float, Figure("", "mean number of experts that the pass reaches")]
    ]
    time_note: NotRequired[
        Annotated[
            str | None,
            Figure("", "a warning on the measured rows behind a time; null if there is none"),
        ]
    ]


class AttentionRecord(BatchRecord):
    """Attention of a variant in one layer, without projections."""

    gpu: Annotated[str, Figure("GPU", "GPU name")]
    attention: Annotated[str, Figure("attention", "model family with this shape")]
    variant: Annotated[str, Figure("", "the shape as `compare` reads it")]
    phase: Annotated[str, Figure("", "decode or prefill")]
    mla_form: Annotated[
        str | None,
        Figure("MLA form", "absorbed or expanded; null without latent attention"),
    ]
    kv_cache_dtype: Annotated[str, Figure("cache in", "format of the cache")]
    flops: Annotated[
        int, Figure("FLOP", "FLOPs of attention, its indexer and its expansions in one layer")
    ]
    bytes: Annotated[int, Figure("bytes", "traffic of the same operators")]
    intensity: Annotated[
        float,
        Figure(
            "FLOP/B",
            "flops ÷ bytes",
            "{:,.1f}",
            unit="FLOP per byte",
            formula="{flops} / {bytes}",
        ),
    ]
    bound: Annotated[str, Figure("bound", "compute or memory")]
    roofline_s: Annotated[float, Figure("at least", "datasheet bound", "kernel")]
    knee: Annotated[
        float,
        Figure(
            "ridge point",
            "ridge point of this GPU, from which products are compute-bound",
            "{:.1f}",
            unit="FLOP per byte",
        ),
    ]
    to_knee: Annotated[
        float,
        Figure(
            "gap to ridge",
            "ridge point ÷ intensity",
            "{:,.2f}×",
            unit="ratio",
            formula="{knee} / {intensity}",
        ),
    ]
    computed_in: Annotated[str, Figure("", "dtypes of the matrix units")]
