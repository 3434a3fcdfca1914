"""Keys that several records share: the deployment, its time model and its memory."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import Figure
from kvcalc.records.size import ReplicaRecord


class DeploymentRecord(ReplicaRecord):
    """A replica on GPUs, with the engine and the time model."""

    dtype: Annotated[
        str | None, Figure("weights in", "format of the weights; null without a model")
    ]
    gpu: Annotated[str, Figure("GPU", "GPU name")]
    nodes: Annotated[int, Figure("", "nodes of the replica")]
    inter_node_bytes_per_s: Annotated[
        float | None, Figure("", "per GPU between nodes, in one direction; null on one node")
    ]
    engine: Annotated[str, Figure("engine", "engine whose memory rules and times apply")]
    basis: Annotated[str, Figure("times by", "name of the time model", format="basis")]
    calibration_from: Annotated[
        str | None,
        Figure("", "GPU whose kernel models were scaled; null if they are of this GPU"),
    ]


class DraftRecord(TypedDict):
    """Speculative decoding of a deployment; null without a draft."""

    draft: Annotated[str | None, Figure("draft", "draft model or method; null without a draft")]
    num_speculative_tokens: Annotated[
        int | None, Figure("draft tokens", "drafted per step; null without a draft")
    ]
    acceptance_rate: Annotated[
        float | None,
        Figure("", "accepted part of drafted tokens; null without a draft", unit="share"),
    ]


class TimeBasisRecord(TypedDict):
    """Reliability of a time."""

    time_basis: Annotated[str, Figure("", "calibrated, scaled or bound")]
    uncalibrated_share: Annotated[
        float, Figure("", "part of the time from operators without their own kernel model")
    ]
    time_p90_error: Annotated[
        float | None,
        Figure(
            "",
            "90 % of such steps on measured servers are within this error; null if unknown",
        ),
    ]
    fallback: Annotated[
        str | None,
        Figure(
            "",
            "dtype that replaces a missing matrix unit, as a sentence; null if no unit is missing",
        ),
    ]


class MemoryRecord(TypedDict):
    """Memory of the GPUs for a batch."""

    fits: Annotated[
        bool | None,
        Figure("fits", "whether the batch fits; null if the engine refuses the model"),
    ]
    kv_budget_bytes: Annotated[
        int | None,
        Figure(
            "",
            "KV cache budget of one GPU, the same as in `fit`; null if the engine refuses the "
            "model",
        ),
    ]
    kv_needed_bytes: Annotated[
        int | None,
        Figure("", "KV cache of the batch on one GPU; null if the engine refuses the model"),
    ]
    max_num_seqs: Annotated[
        int | None,
        Figure(
            "users",
            "requests that fit after the weights; sequences of this length on the replica; null if "
            "the engine refuses the model",
            is_noted=True,
            formula="⌊{kv_budget_bytes} / ({kv_needed_bytes} / {batch_size} sequences)⌋",
        ),
    ]
    memory_note: Annotated[
        str | None,
        Figure("", "reason why the engine refuses the model; null if it does not"),
    ]
