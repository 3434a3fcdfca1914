"""Records of `roofline`: a pass and its operators, and attention without a model."""

from typing import Annotated, Any, NotRequired, TypedDict

from kvcalc.records.figures import FloatOrNull, Formula, IntOrNull, TextOrNull
from kvcalc.records.size import BatchRecord, DeploymentRecord, MemoryRecord, TimeBasisRecord


class WorkRecord(TypedDict):
    """JSON keys about work and time of an operator or a forward pass, without the weights' bytes.

    FLOPs and bytes are of one GPU; with pipeline parallelism, they are sums over one GPU of each
    stage. They are for all runs of the operator in the pass, such as one run per layer. The
    operators `engine_overhead` and `module_overhead` have no FLOPs: their time is what the engine,
    or a sparse-attention module, takes in addition to its kernels. `role` is projection, core (work
    that depends on cached tokens), ffn, head or other. After a key's meaning come the heading and
    the format of its table column.
    """

    phase: Annotated[str, "decode, prefill or mixed", "phase"]
    operator: Annotated[str, "operator name; total is the sum of the pass", "operator"]
    layer: Annotated[str, "kind of layer; '' outside layers", "layer"]
    role: Annotated[str, "kind of work; '' for the total"]
    count: Annotated[
        int, "runs in the pass; all other figures are for all runs together", "runs"
    ]
    flops: Annotated[int, "matrix products only, two per multiply-add", "FLOP"]
    vector_flops: Annotated[
        int, "norms, softmax, activation functions and similar", "vector FLOP"
    ]
    cache_bytes: Annotated[int, "cache read and written", "cache", "decimal bytes"]
    cache_read_bytes: Annotated[int, "cache read"]
    cache_write_bytes: Annotated[int, "cache written"]
    activation_bytes: Annotated[
        int, "activations read and written", "activations", "decimal bytes"
    ]
    bytes: Annotated[int, "all traffic of the GPU's memory", "bytes", "decimal bytes"]
    network_bytes: Annotated[int, "sent between GPUs"]
    inter_node_bytes: Annotated[int, "sent between nodes"]
    intensity: Annotated[
        FloatOrNull,
        "flops ÷ bytes; null without traffic",
        "FLOP/B",
        Formula("{flops} / {bytes}"),
    ]
    bound: Annotated[
        TextOrNull,
        "compute, memory or network, by the roofline; null for engine_overhead and "
        "module_overhead",
        "bound",
    ]
    computed_in: Annotated[TextOrNull, "dtypes of the matrix units; null without a product"]
    roofline_s: Annotated[
        float, "datasheet bound with full overlap and no launches", "at least", "kernel"
    ]
    time_s: Annotated[
        FloatOrNull, "predicted time; null without a calibration", "predicted", "kernel"
    ]
    overhead: Annotated[
        FloatOrNull,
        "predicted time ÷ bound; null without one of them",
        "overhead",
        "{:.3g}×",
        Formula("{time_s} / {roofline_s}"),
    ]
    share: Annotated[
        float, "share of the time of the pass; by time_s or else roofline_s", "share"
    ]


class PassTotalRecord(WorkRecord):
    """JSON keys about the total of a forward pass, without the weights' bytes.

    `mla_form` is how multi-head latent attention is computed: with latents (absorbed), or with keys
    and values expanded from them. `equal_reads_context` is only for decode steps. After a key's
    meaning comes the heading of its table column.
    """

    mla_form: Annotated[
        TextOrNull, "absorbed, expanded or mixed; null without latent attention", "MLA form"
    ]
    equal_reads_context: Annotated[
        IntOrNull,
        "smallest context at which the step reads as much cache as weights; null if there is "
        "none, and for other passes",
        "reads = weights",
    ]


class TimedWorkRecord(DeploymentRecord, BatchRecord, WorkRecord, TimeBasisRecord):
    """Work and time of an operator or a forward pass, with its deployment and batch.

    `weight_bytes` are the bytes of weights that the operator or pass reads on one GPU. After a
    key's meaning come the heading and the format of its table column.
    """

    weight_bytes: Annotated[int, "weights read", "weights", "decimal bytes"]


class RooflineRecord(TimedWorkRecord, PassTotalRecord, MemoryRecord):
    """Total of a forward pass of a deployment, and whether its batch fits in GPU memory.

    `roofline` prints it as the last record of a pass, after a record per operator.
    """


class OperatorRecord(TimedWorkRecord):
    """One operator of a forward pass; the values are sums over all its runs in the pass.

    For a GEMM, m × k × n are the sizes of x[m, k] · W[k, n]. For attention, they are the number of
    queries, the width of a key, and the mean number of keys that a query sees. `parts` says what an
    operator would cost if each of its operations ran in a separate kernel. `expected_experts`
    counts the experts whose weights one GPU reads in one run.
    """

    heads: Annotated[IntOrNull, "heads of attention; null for other operators"]
    m: Annotated[
        IntOrNull, "rows of a product, or queries of attention; null for other operators"
    ]
    k: Annotated[
        IntOrNull, "inner width of a product, or width of a key; null for other operators"
    ]
    n: Annotated[
        FloatOrNull,
        "columns of a product, or mean keys that a query sees; null for other operators",
    ]
    parts: NotRequired[
        Annotated[
            list[dict[str, Any]],
            "work and bound of each operation as a kernel of its own; not summed",
        ]
    ]
    expected_experts: NotRequired[
        Annotated[float, "mean number of experts that the pass reaches"]
    ]


class AttentionRecord(BatchRecord):
    """Attention of one layer for an attention variant on one GPU, without its projections.

    The layer has 128 query heads of width 128, in the attention style of a model family. `knee` is
    the GPU's ridge point in FLOP per byte. If `to_knee` (ridge point ÷ intensity) is above 1,
    attention is memory-bound. After a key's meaning come the heading and the format of its table
    column.
    """

    gpu: Annotated[str, "GPU name", "GPU"]
    attention: Annotated[str, "model family with this shape", "attention"]
    variant: Annotated[str, "the shape as `compare` reads it"]
    phase: Annotated[str, "decode or prefill"]
    mla_form: Annotated[
        TextOrNull, "absorbed or expanded; null without latent attention", "MLA form"
    ]
    kv_cache_dtype: Annotated[str, "format of the cache", "cache in"]
    flops: Annotated[
        int, "FLOPs of attention, its indexer and its expansions in one layer", "FLOP"
    ]
    bytes: Annotated[int, "traffic of the same operators", "bytes"]
    intensity: Annotated[
        float, "flops ÷ bytes", "FLOP/B", "{:,.1f}", Formula("{flops} / {bytes}")
    ]
    bound: Annotated[str, "compute or memory", "bound"]
    roofline_s: Annotated[float, "datasheet bound", "at least", "kernel"]
    knee: Annotated[
        float,
        "ridge point of this GPU, from which products are compute-bound",
        "ridge point",
        "{:.1f}",
    ]
    to_knee: Annotated[
        float,
        "ridge point ÷ intensity",
        "gap to ridge",
        "{:,.2f}×",
        Formula("{knee} / {intensity}"),
    ]
    computed_in: Annotated[str, "dtypes of the matrix units"]
