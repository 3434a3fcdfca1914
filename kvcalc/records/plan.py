"""Records of `plan` and `diagnose`."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import FloatOrNull, IntOrNull, TextOrNull
from kvcalc.records.size import DraftRecord, ShardedRecord


class AdviceRecord(TypedDict):
    """A change of an engine's flags with which the required users fit.

    Attributes:
        flags: The flags to add to the engine's command line.
        cost: The disadvantage of the change, in words; "" for none.
        command: The engine's command line with the change; None if the engine has none.
        kvcalc_command: The `kvcalc fit` command that checks the changed deployment; None without
            `command`.
        holds: Number of sequences of the required length that fit in the replica after the change.
    """

    flags: str
    cost: str
    command: str | None
    kvcalc_command: str | None
    holds: int


class DiagnoseRecord(TypedDict):
    """One memory item of a logged engine start; the last record also has the summary.

    Bytes are of one GPU. An item (`term`) is for example the weights or the CUDA graphs. The last
    record of a start has the term `what fits`: the number of sequences, and changes that help. "The
    request" is the number of users and tokens that must fit. After a key's meaning comes the
    heading of its table column.
    """

    log: Annotated[str, "the file"]
    boot: Annotated[int, "number of the start in the file"]
    engine: Annotated[str, "engine that wrote the log"]
    engine_version: Annotated[TextOrNull, "null if it is not in the log"]
    model: Annotated[str, "preset of the model"]
    gpu: Annotated[str, "GPU name"]
    gpus: Annotated[int, "GPUs of the replica"]
    term: Annotated[str, "memory item; the last record of a start is `what fits`", "of one GPU"]
    logged_bytes: Annotated[IntOrNull, "in the log; null if it is not in the log", "logged"]
    predicted_bytes: Annotated[IntOrNull, "null without a prediction", "predicted"]
    difference_bytes: Annotated[
        IntOrNull, "logged − predicted; null without one of them", "logged − predicted"
    ]
    fits: Annotated[
        bool | None, "whether the request fits by the log's figures; null for memory items"
    ]
    failure: Annotated[
        TextOrNull, "reason of a failed start; null if it did not fail, and for memory items"
    ]
    tokens: Annotated[IntOrNull, "in the cache, by the log; null if they are not in the log"]
    max_num_seqs: Annotated[
        IntOrNull, "sequences that fit by the log's figures; null for memory items"
    ]
    command: Annotated[
        TextOrNull,
        "the engine's command line; null for memory items, or if the engine has none",
    ]
    taken: Annotated[TextOrNull, "result of the start, as a sentence; null for memory items"]
    change: Annotated[TextOrNull, "changes that help, as a sentence; null if none is needed"]
    advice: Annotated[
        list[AdviceRecord] | None,
        "flags, cost, command, kvcalc_command and holds of each change; null for memory items",
    ]


class RequirementRecord(TypedDict):
    """Keys of a `plan` record about the requested load: users or request rate, and lengths.

    Users and rate are of all replicas together. Lengths are tokens of one request. After a key's
    meaning come the heading and the format of its table column.
    """

    users: Annotated[IntOrNull, "requested concurrent users; null with a rate", "users"]
    rate: Annotated[FloatOrNull, "requested rate; null with users", "requests/s", "{:g}"]
    context: Annotated[int, "per user", "context"]
    input_len: Annotated[IntOrNull, "null if only a context was requested"]
    output_len: Annotated[IntOrNull, "null if only a context was requested"]


class CandidateRecord(RequirementRecord, ShardedRecord, DraftRecord):
    """One configuration that `plan` tried: a deployment with a number of replicas, under one load.

    `replicas` decode. `prefill_replicas` are further ones that process only prompts; 0 if each
    replica does both. `max_num_seqs` and `capacity_sequences` are sequences per replica. TPOT is of
    a decode step with `max_num_seqs` sequences on each replica. If the output length is known,
    arriving prompts delay the step. At a rate, the engine's command allows more sequences for
    peaks. Tokens per second are output tokens. `time_basis` says where the times come from: fitted
    to this GPU (calibrated), scaled from another GPU, or a datasheet bound. After a key's meaning
    come the heading and the format of its table column.
    """

    nodes: Annotated[int, "nodes of one replica", "servers"]
    expert_parallel_size: Annotated[int, "GPUs that share the experts"]
    dtype: Annotated[str, "format of the weights", "weights in"]
    quantization: Annotated[TextOrNull, "requested weight format; null as published"]
    replicas: Annotated[int, "replicas of the deployment", "replicas"]
    prefill_replicas: Annotated[int, "replicas that process only prompts", "prefill replicas"]
    total_gpus: Annotated[int, "all replicas", "GPUs"]
    max_num_seqs: Annotated[int, "sequences per replica for the times", "target users/replica"]
    capacity_sequences: Annotated[int, "maximum that fits on a replica"]
    kv_budget_low_bytes: Annotated[int, "KV cache budget of one GPU, low end of the range"]
    ttft_s: Annotated[
        FloatOrNull,
        "one prompt on an idle replica; null without a bound, or if no prompt was requested",
        "TTFT",
    ]
    tpot_s: Annotated[
        FloatOrNull,
        "with the target users, delayed by prompts if lengths are given; null if nothing fits",
        "TPOT",
    ]
    e2e_s: Annotated[FloatOrNull, "time of a batch of requests; null without their lengths"]
    tokens_per_s: Annotated[
        FloatOrNull, "rate of a replica at this setting; null if nothing fits"
    ]
    tokens_per_s_per_gpu: Annotated[
        FloatOrNull,
        "per GPU; null if nothing fits",
        "tokens/s/GPU",
    ]
    total_tokens_per_s: Annotated[
        FloatOrNull,
        "rate of all replicas at the requested load; null if nothing fits",
        "tokens/s",
    ]
    cost_per_hour: Annotated[
        FloatOrNull,
        "all GPUs, in the unit of --price-per-hour; null without a price",
        "cost/hour",
        "price",
    ]
    cost_per_million_tokens: Annotated[
        FloatOrNull, "output tokens; null without a price", "cost/1M output"
    ]
    energy_per_token_j: Annotated[
        FloatOrNull, "all GPUs at full power; null if the power is unknown", "J/token"
    ]
    time_basis: Annotated[str, "calibrated, scaled or bound"]
    meets: Annotated[bool, "whether all targets are met"]
    reason: Annotated[
        TextOrNull, "the first missed target; null if all are met", "missed target"
    ]


class PlanRecord(CandidateRecord):
    """One of the best configurations of `plan`, with its time model and its command lines.

    `pareto` is true if every other configuration has a higher TPOT or fewer tokens per second per
    GPU (per price, if prices are given). `uncalibrated_share` is the part of a decode step's time,
    from 0 to 1, that is estimated without measurements of the same kernels. `time_p90_error` of 0.1
    means that 90% of measured steps of this kind are within 10% of the prediction.
    """

    pareto: Annotated[
        bool, "Pareto-optimal in TPOT and tokens/s per GPU or price", "Pareto-optimal"
    ]
    basis: Annotated[str, "name of the time model"]
    uncalibrated_share: Annotated[
        float, "part of a decode step from operators without their own kernel model"
    ]
    time_p90_error: Annotated[
        FloatOrNull, "90% of such steps are within this error; null if unknown"
    ]
    quality: Annotated[
        TextOrNull, "published quality of lower precision; null at the published precision"
    ]
    engine: Annotated[str, "engine whose rules apply"]
    command: Annotated[
        TextOrNull,
        "the engine's command line of one decode replica; null if the engine has none",
    ]
    commands: Annotated[
        list[str], "command lines of every replica, and of the proxy of disaggregated prefill"
    ]
