"""Records of `diagnose`: memory items of a start-up log, and figures of a running server."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import Figure


class AdviceRecord(TypedDict):
    """A change of flags that helps.

    Attributes:
        flags: The flags to type.
        cost: The disadvantage of the change, in words; '' for none.
        command: The engine's command line with the change.
        kvcalc_command: The `kvcalc fit` command of the changed deployment.
        holds: Users that fit after the change.
    """

    flags: str
    cost: str
    command: str | None
    kvcalc_command: str | None
    holds: int


class DiagnoseRecord(TypedDict):
    """A memory item of one start, or its summary."""

    log: Annotated[str, Figure("", "the file")]
    boot: Annotated[int, Figure("", "number of the start in the file")]
    engine: Annotated[str, Figure("", "engine that wrote the log")]
    engine_version: Annotated[str | None, Figure("", "null if it is not in the log")]
    model: Annotated[str, Figure("", "preset of the model")]
    gpu: Annotated[str, Figure("", "GPU name")]
    gpus: Annotated[int, Figure("", "GPUs of the replica")]
    term: Annotated[
        str, Figure("of one GPU", "memory item; the last record of a start is `what fits`")
    ]
    logged_bytes: Annotated[
        int | None, Figure("logged", "in the log; null if it is not in the log", "signed bytes")
    ]
    predicted_bytes: Annotated[
        int | None, Figure("predicted", "null without a prediction", "signed bytes")
    ]
    difference_bytes: Annotated[
        int | None,
        Figure(
            "logged − predicted", "logged − predicted; null without one of them", "signed bytes"
        ),
    ]
    fits: Annotated[
        bool | None,
        Figure("", "whether the request fits by the log's figures; null for memory items"),
    ]
    failure: Annotated[
        str | None,
        Figure("", "reason of a failed start; null if it did not fail, and for memory items"),
    ]
    tokens: Annotated[
        int | None, Figure("", "in the cache, by the log; null if they are not in the log")
    ]
    max_num_seqs: Annotated[
        int | None, Figure("", "sequences that fit by the log's figures; null for memory items")
    ]
    command: Annotated[
        str | None,
        Figure(
            "", "the engine's command line; null for memory items, or if the engine has none"
        ),
    ]
    taken: Annotated[
        str | None, Figure("", "result of the start, as a sentence; null for memory items")
    ]
    change: Annotated[
        str | None, Figure("", "changes that help, as a sentence; null if none is needed")
    ]
    advice: Annotated[
        list[AdviceRecord] | None,
        Figure(
            "",
            "flags, cost, command, kvcalc_command and holds of each change; null for memory items",
        ),
    ]


class RunningRecord(TypedDict):
    """A figure of a running server, or the verdict on it."""

    engine: Annotated[str, Figure("", "engine of the metrics")]
    model: Annotated[str, Figure("", "preset of the model")]
    gpu: Annotated[str, Figure("", "GPU name")]
    gpus: Annotated[int, Figure("", "GPUs of the replica")]
    max_concurrency: Annotated[int, Figure("", "clients in the prediction")]
    input_len: Annotated[int, Figure("", "length of the predicted prompts")]
    output_len: Annotated[int, Figure("", "length of the predicted answers")]
    time_basis: Annotated[str, Figure("", "calibrated, scaled or bound")]
    figure: Annotated[str, Figure("figure", "name of the figure; verdict is the last")]
    measured: Annotated[
        float | None,
        Figure("measured", "by the server; null if the server does not report it", "text"),
    ]
    predicted: Annotated[
        float | None, Figure("predicted", "by `serve`; null without a prediction", "text")
    ]
    unit: Annotated[str | None, Figure("", "unit of both figures; null for the verdict")]
    said: Annotated[str | None, Figure("", "the verdict as a sentence; null for figures")]
