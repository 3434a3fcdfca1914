"""Records of `size`, and the keys that other records share with them."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import Figure


class ReplicaRecord(TypedDict):
    """Model, formats and GPUs of a replica."""

    model: Annotated[str, Figure("model name", "model")]
    gpus: Annotated[int, Figure("GPUs of the replica", "GPUs")]
    tensor_parallel_size: Annotated[int, Figure("GPUs that share heads and columns", "tp")]
    kv_cache_dtype: Annotated[str, Figure("format of the cache", "cache in")]


class BatchRecord(TypedDict):
    """Concurrent sequences of equal length."""

    batch_size: Annotated[int, Figure("concurrent sequences", "batch", unit="sequences")]
    context: Annotated[
        int,
        Figure(
            "tokens of each sequence, with the token of the step; in a mixed pass the longest",
            "context",
            unit="tokens",
        ),
    ]


class WeightsRecord(TypedDict):
    """Parameters and weights of a model; null if only dimensions are known."""

    parameters: Annotated[
        int | None,
        Figure(
            "parameters of the language model; tied embeddings count once; null without a model",
            "parameters",
            format="count",
        ),
    ]
    active_parameters: Annotated[
        int | None,
        Figure(
            "parameters without the experts beyond top-k; null without a model",
            "active",
            format="count",
        ),
    ]
    parameters_exact: Annotated[
        bool | None,
        "whether the parameters are exact counts; no if general rules were used; null without "
        "a model",
    ]
    mtp_parameters: Annotated[
        int | None,
        "parameters of multi-token-prediction layers, not in `parameters`; null without a "
        "model",
    ]
    weight_bytes: Annotated[
        int | None, Figure("weights of one GPU; null without a model", "weights")
    ]
    cache_share_of_weights: Annotated[
        float | None,
        Figure(
            "stored bytes ÷ weight_bytes; null without a model",
            unit="ratio",
            formula="{kv_cache_bytes} / {weight_bytes}",
        ),
    ]
    equal_weights_context: Annotated[
        int | None,
        Figure(
            "smallest context at which the KV cache equals the weights; null if there is none",
            "= weights",
            unit="tokens",
            is_noted=True,
        ),
    ]
    dtype: Annotated[
        str | None, Figure("format of the weights; null without a model", "weights in")
    ]


class SizeRecord(ReplicaRecord, BatchRecord, WeightsRecord):
    """KV cache of a model at one context and batch size, and its weights."""

    attention: Annotated[str, Figure("attention variant", "attention")]
    kv_cache_bytes: Annotated[int, Figure("stored by all sequences on one GPU", "KV cache")]
    kv_cache_read_bytes: Annotated[int, Figure("read by one decode step", "read per step")]
    kv_cache_allocated_bytes: Annotated[
        int, Figure("in whole blocks; the stored bytes, rounded up", "allocated", is_noted=True)
    ]
    bytes_per_token: Annotated[
        float,
        Figure(
            "bytes per further token, 0 B if all windows are full; for one sequence at this "
            "context, an integer if it is whole",
            "per token",
            unit="bytes a token",
            is_noted=True,
        ),
    ]
    fixed_bytes: Annotated[
        int,
        Figure(
            "full windows and recurrent states of one sequence; they no longer grow",
            "fixed",
            is_noted=True,
        ),
    ]
    eviction_score_bytes: Annotated[
        int, "scores that an eviction policy stores with keys and values"
    ]
    receptive_field: Annotated[
        int | None,
        Figure(
            "maximum distance that affects the output through all layers; null without a limit",
            unit="tokens",
        ),
    ]
    mha_ratio: Annotated[
        float | None,
        Figure(
            "KV cache of multi-head attention ÷ this KV cache; null without a cache or a model",
            "MHA needs",
            is_noted=True,
        ),
    ]
    block_size: Annotated[int, Figure("tokens per block of the cache", unit="tokens")]


class DeploymentRecord(ReplicaRecord):
    """A replica on GPUs, with the engine and the time model."""

    dtype: Annotated[
        str | None, Figure("format of the weights; null without a model", "weights in")
    ]
    gpu: Annotated[str, Figure("GPU name", "GPU")]
    nodes: Annotated[int, "nodes of the replica"]
    inter_node_bytes_per_s: Annotated[
        float | None, "per GPU between nodes, in one direction; null on one node"
    ]
    engine: Annotated[str, Figure("engine whose memory rules and times apply", "engine")]
    basis: Annotated[str, Figure("name of the time model", "times by", format="basis")]
    calibration_from: Annotated[
        str | None,
        "GPU whose kernel models were scaled; null if they are of this GPU",
    ]


class DraftRecord(TypedDict):
    """Speculative decoding of a deployment; null without a draft."""

    draft: Annotated[str | None, Figure("draft model or method; null without a draft", "draft")]
    num_speculative_tokens: Annotated[
        int | None, Figure("drafted per step; null without a draft", "draft tokens")
    ]
    acceptance_rate: Annotated[
        float | None,
        Figure("accepted part of drafted tokens; null without a draft", unit="share"),
    ]


class TimeBasisRecord(TypedDict):
    """Reliability of a time."""

    time_basis: Annotated[str, "calibrated, scaled or bound"]
    uncalibrated_share: Annotated[
        float, "part of the time from operators without their own kernel model"
    ]
    time_p90_error: Annotated[
        float | None,
        "90 % of such steps on measured servers are within this error; null if unknown",
    ]
    fallback: Annotated[
        str | None,
        "dtype that replaces a missing matrix unit, as a sentence; null if no unit is missing",
    ]


class MemoryRecord(TypedDict):
    """Memory of the GPUs for a batch."""

    fits: Annotated[
        bool | None,
        Figure("whether the batch fits; null if the engine refuses the model", "fits"),
    ]
    kv_budget_bytes: Annotated[
        int | None,
        "KV cache budget of one GPU, the same as in `fit`; null if the engine refuses the "
        "model",
    ]
    kv_needed_bytes: Annotated[
        int | None,
        "KV cache of the batch on one GPU; null if the engine refuses the model",
    ]
    max_num_seqs: Annotated[
        int | None,
        Figure(
            "requests that fit after the weights; sequences of this length on the replica; null if "
            "the engine refuses the model",
            "users",
            is_noted=True,
            formula="⌊{kv_budget_bytes} / ({kv_needed_bytes} / {batch_size} sequences)⌋",
        ),
    ]
    memory_note: Annotated[
        str | None,
        "reason why the engine refuses the model; null if it does not",
    ]
