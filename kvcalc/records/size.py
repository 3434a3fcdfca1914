"""Records of `size`, and the keys that other records share with them."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import FloatOrNull, Formula, IntOrNull, TextOrNull


class ReplicaRecord(TypedDict):
    """JSON keys about the model, the KV cache format and the number of GPUs of a replica.

    A replica is the group of GPUs that together serve one copy of the model. Other records extend
    this class.
    """

    model: Annotated[str, "model name", "model"]
    gpus: Annotated[int, "GPUs of the replica", "GPUs"]
    tensor_parallel_size: Annotated[int, "GPUs that share heads and columns", "tp"]
    kv_cache_dtype: Annotated[str, "format of the cache", "cache in"]


class ShardedRecord(ReplicaRecord):
    """JSON keys about a replica: its GPU model, and how the model is split over its GPUs.

    Other records extend this class. After a key's meaning comes the heading of its table column.
    """

    gpu: Annotated[str, "GPU name", "GPU"]
    pipeline_parallel_size: Annotated[int, "GPUs that share the layers"]
    data_parallel_size: Annotated[int, "groups that share the sequences"]


class BatchRecord(TypedDict):
    """JSON keys about a batch: its number of concurrent sequences, and the tokens of each sequence.

    Other records extend this class. After a key's meaning comes the heading of its table column.
    """

    batch_size: Annotated[int, "concurrent sequences", "batch"]
    context: Annotated[
        int,
        "tokens of each sequence, with the token of the step; in a mixed pass the longest",
        "context",
    ]


class WeightsRecord(TypedDict):
    """JSON keys about the parameters and weights of a model; null if only dimensions are known.

    `parameters_exact` is false if the config.json was read by general rules instead of rules for
    its model type. `active_parameters` counts the parameters that one token uses. After a key's
    meaning come the heading and the format of its table column.
    """

    parameters: Annotated[
        IntOrNull,
        "parameters of the language model; tied embeddings count once; null without a model",
        "parameters",
        "parameters",
    ]
    active_parameters: Annotated[
        IntOrNull,
        "parameters without the experts beyond top-k; null without a model",
        "active",
        "parameters",
    ]
    parameters_exact: Annotated[
        bool | None,
        "whether the parameters are exact counts; no if general rules were used; null without "
        "a model",
    ]
    mtp_parameters: Annotated[
        IntOrNull,
        "parameters of multi-token-prediction layers, not in `parameters`; null without a "
        "model",
    ]
    weight_bytes: Annotated[IntOrNull, "weights of one GPU; null without a model", "weights"]
    cache_share_of_weights: Annotated[
        FloatOrNull,
        "stored bytes ÷ weight_bytes; null without a model",
        Formula("{kv_cache_bytes} / {weight_bytes}"),
    ]
    equal_weights_context: Annotated[
        IntOrNull,
        "smallest context at which the KV cache equals the weights; null if there is none",
        "equal at",
    ]
    dtype: Annotated[TextOrNull, "format of the weights; null without a model", "weights in"]


class SizeRecord(ReplicaRecord, BatchRecord, WeightsRecord):
    """KV cache of a model at one context and batch size, and the model's weights.

    Bytes are of the GPU that stores the most. `kv_cache_bytes`, `…_read_bytes` and
    `…_allocated_bytes` are for the whole batch; `bytes_per_token` and `fixed_bytes` are for one
    sequence. With a sliding window, the cache stops growing when the window is full. `mha_ratio` of
    8 means that multi-head attention with the same query heads would store 8 times as much.
    """

    attention: Annotated[str, "attention variant", "attention"]
    kv_cache_bytes: Annotated[int, "stored by all sequences on one GPU", "KV cache"]
    kv_cache_read_bytes: Annotated[int, "read by one decode step", "read per step"]
    kv_cache_allocated_bytes: Annotated[
        int, "in whole blocks; the stored bytes, rounded up", "allocated"
    ]
    bytes_per_token: Annotated[
        float,
        "bytes per further token, 0 B if all windows are full; for one sequence at this "
        "context, an integer if it is whole",
        "per token",
    ]
    fixed_bytes: Annotated[
        int, "full windows and recurrent states of one sequence; they no longer grow", "fixed"
    ]
    eviction_score_bytes: Annotated[
        int, "scores that an eviction policy stores with keys and values"
    ]
    receptive_field: Annotated[
        IntOrNull,
        "maximum distance that affects the output through all layers; null without a limit",
    ]
    mha_ratio: Annotated[
        FloatOrNull,
        "KV cache of multi-head attention ÷ this KV cache; null without a cache or a model",
        "MHA needs",
    ]
    block_size: Annotated[int, "tokens per block of the cache"]


class DeploymentRecord(ReplicaRecord):
    """JSON keys about a replica on GPUs, with its engine and its time model.

    `basis` names the calibration (time models fitted to measured kernels) that predicts the times.
    Without one, times are datasheet bounds. Other records extend this class. After a key's meaning
    come the heading and the format of its table column.
    """

    dtype: Annotated[TextOrNull, "format of the weights; null without a model", "weights in"]
    gpu: Annotated[str, "GPU name", "GPU"]
    nodes: Annotated[int, "nodes of the replica"]
    inter_node_bytes_per_s: Annotated[
        FloatOrNull, "per GPU between nodes, in one direction; null on one node"
    ]
    engine: Annotated[str, "engine whose memory rules and times apply", "engine"]
    basis: Annotated[str, "name of the time model", "times by", "basis"]
    calibration_from: Annotated[
        TextOrNull, "GPU whose kernel models were scaled; null if they are of this GPU"
    ]


class DraftRecord(TypedDict):
    """JSON keys about the speculative decoding of a deployment; null without a draft.

    Other records extend this class. `acceptance_rate` is from 0 to 1.
    """

    draft: Annotated[TextOrNull, "draft model or method; null without a draft", "draft"]
    num_speculative_tokens: Annotated[
        IntOrNull, "drafted per step; null without a draft", "draft tokens"
    ]
    acceptance_rate: Annotated[
        FloatOrNull, "accepted part of drafted tokens; null without a draft"
    ]


class TimeBasisRecord(TypedDict):
    """JSON keys about the time model of a predicted time and its expected error.

    `time_basis` is calibrated (fitted to measurements of this GPU), scaled (from another GPU) or
    bound (from the datasheet). `uncalibrated_share` is the part of the time that is estimated
    without measurements of the same kernels. Shares and errors are parts of 1: an error of 0.1 is
    10%. `fallback` says that the GPU lacks matrix units for a dtype, and in which dtype it computes
    instead.
    """

    time_basis: Annotated[str, "calibrated, scaled or bound"]
    uncalibrated_share: Annotated[
        float, "part of the time from operators without their own kernel model"
    ]
    time_p90_error: Annotated[
        FloatOrNull,
        "90% of such steps on measured servers are within this error; null if unknown",
    ]
    fallback: Annotated[
        TextOrNull,
        "dtype that replaces a missing matrix unit, as a sentence; null if no unit is missing",
    ]


class MemoryRecord(TypedDict):
    """JSON keys about whether a batch fits in the memory of the GPUs.

    `kv_needed_bytes` is for the batch that the rest of the record is about. Bytes are of one GPU,
    and `max_num_seqs` is of the replica. "The engine refuses the model" means that the selected
    engine cannot serve it; `memory_note` says why, and the other keys are null. But `fits` is false
    if even the stored data exceeds the memory.
    """

    fits: Annotated[
        bool | None, "whether the batch fits; null if the engine refuses the model", "fits"
    ]
    kv_budget_bytes: Annotated[
        IntOrNull,
        "KV cache budget of one GPU, the same as in `fit`; null if the engine refuses the "
        "model",
    ]
    kv_needed_bytes: Annotated[
        IntOrNull, "KV cache of the batch on one GPU; null if the engine refuses the model"
    ]
    max_num_seqs: Annotated[
        IntOrNull,
        "requests that fit after the weights; sequences of this length on the replica; null if "
        "the engine refuses the model",
        "users",
        Formula("⌊{kv_budget_bytes} / ({kv_needed_bytes} / {batch_size} sequences)⌋"),
    ]
    memory_note: Annotated[
        TextOrNull, "reason why the engine refuses the model; null if it does not"
    ]


class HostWeightsRecord(TypedDict):
    """JSON keys about weights in CPU memory, which a decode step reads over the link to the GPU.

    `cpu_offload_bytes` are of one GPU. `cpu_offload_read_bytes` are of one GPU; with pipeline
    parallelism, of one GPU per stage in sum. `cpu_offload_s` is the seconds of one decode step in
    which they cross the link between CPU and GPU. Without weights in CPU memory, the bytes are 0,
    and `cpu_offload_s` is 0 in `fit` and null in `latency`.
    """

    cpu_offload_bytes: Annotated[int, "bytes of a GPU's weights in CPU memory"]
    cpu_offload_read_bytes: Annotated[
        int, "bytes of them that a decode step reads over the link"
    ]
    cpu_offload_s: Annotated[
        FloatOrNull,
        "time of the bytes read on the link; null if the rate is unknown, in latency without them",
    ]
    cpu_offload_basis: Annotated[
        TextOrNull,
        "at least, by the documented rate of the link, or predicted, by a measured rate; null if "
        "cpu_offload_s is null",
    ]
