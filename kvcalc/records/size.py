"""Records of `size`, and the keys that other records share with them."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import Figure


class ReplicaRecord(TypedDict):
    """Model, formats and GPUs of a replica."""

    model: Annotated[str, Figure("model", "model name")]
    gpus: Annotated[int, Figure("GPUs", "GPUs of the replica")]
    tensor_parallel_size: Annotated[int, Figure("tp", "GPUs that share heads and columns")]
    kv_cache_dtype: Annotated[str, Figure("cache in", "format of the cache")]


class BatchRecord(TypedDict):
    """Concurrent sequences of equal length."""

    batch_size: Annotated[int, Figure("batch", "concurrent sequences", unit="sequences")]
    context: Annotated[
        int,
        Figure(
            "context",
            "tokens of each sequence, with the token of the step; in a mixed pass the longest",
            unit="tokens",
        ),
    ]


class WeightsRecord(TypedDict):
    """Parameters and weights of a model; null if only dimensions are known."""

    parameters: Annotated[
        int | None,
        Figure(
            "parameters",
            "parameters of the language model; tied embeddings count once; null without a model",
            format="count",
        ),
    ]
    active_parameters: Annotated[
        int | None,
        Figure(
            "active",
            "parameters without the experts beyond top-k; null without a model",
            format="count",
        ),
    ]
    parameters_exact: Annotated[
        bool | None,
        Figure(
            "",
            "whether the parameters are exact counts; no if general rules were used; null without "
            "a model",
        ),
    ]
    mtp_parameters: Annotated[
        int | None,
        Figure(
            "",
            "parameters of multi-token-prediction layers, not in `parameters`; null without a model",
        ),
    ]
    weight_bytes: Annotated[
        int | None, Figure("weights", "weights of one GPU; null without a model")
    ]
    cache_share_of_weights: Annotated[
        float | None,
        Figure(
            "",
            "stored bytes ÷ weight_bytes; null without a model",
            unit="ratio",
            formula="{kv_cache_bytes} / {weight_bytes}",
        ),
    ]
    equal_weights_context: Annotated[
        int | None,
        Figure(
            "= weights",
            "smallest context at which the KV cache equals the weights; null if there is none",
            unit="tokens",
            is_noted=True,
        ),
    ]
    dtype: Annotated[
        str | None, Figure("weights in", "format of the weights; null without a model")
    ]


class SizeRecord(ReplicaRecord, BatchRecord, WeightsRecord):
    """KV cache of a model at one context and batch size, and its weights."""

    attention: Annotated[str, Figure("attention", "attention variant")]
    kv_cache_bytes: Annotated[int, Figure("KV cache", "stored by all sequences on one GPU")]
    kv_cache_read_bytes: Annotated[int, Figure("read per step", "read by one decode step")]
    kv_cache_allocated_bytes: Annotated[
        int, Figure("allocated", "in whole blocks; the stored bytes, rounded up", is_noted=True)
    ]
    bytes_per_token: Annotated[
        float,
        Figure(
            "per token",
            "bytes per further token, 0 B if all windows are full; for one sequence at this "
            "context, an integer if it is whole",
            unit="bytes a token",
            is_noted=True,
        ),
    ]
    fixed_bytes: Annotated[
        int,
        Figure(
            "fixed",
            "full windows and recurrent states of one sequence; they no longer grow",
            is_noted=True,
        ),
    ]
    eviction_score_bytes: Annotated[
        int, Figure("", "scores that an eviction policy stores with keys and values")
    ]
    receptive_field: Annotated[
        int | None,
        Figure(
            "",
            "maximum distance that affects the output through all layers; null without a limit",
            unit="tokens",
        ),
    ]
    mha_ratio: Annotated[
        float | None,
        Figure(
            "MHA needs",
            "KV cache of multi-head attention ÷ this KV cache; null without a cache or a model",
            is_noted=True,
        ),
    ]
    block_size: Annotated[int, Figure("", "tokens per block of the cache", unit="tokens")]
