"""Records of `calibrate` and `validate`: fitted kernel models, and errors on measured rows."""

from typing import Annotated, NotRequired, TypedDict

from kvcalc.records.figures import Figure


class KernelModelRecord(TypedDict):
    """The kernel model of a family and kind of data, with its errors."""

    gpu: NotRequired[Annotated[str, Figure("GPU", "with --all")]]
    stack: NotRequired[Annotated[str, Figure("stack", "with --all")]]
    family: Annotated[str, Figure("family", "family of operators")]
    kind: Annotated[str, Figure("kind", "data type or kernel")]
    form: Annotated[str | None, Figure("time model", "kernel model; null without a fit")]
    rows: Annotated[int, Figure("rows", "rows of the fit")]
    median_abs_error: Annotated[
        float | None,
        Figure("held-out median", "on held-out rows; null without a kernel model", "{:.1%}"),
    ]
    p90_abs_error: Annotated[
        float | None,
        Figure("held-out p90", "on held-out rows; null without a kernel model", "{:.1%}"),
    ]
    fitted_median_abs_error: Annotated[
        float | None,
        Figure(
            "fitted median", "on the rows of the fit; null without a kernel model", "{:.1%}"
        ),
    ]
    fitted_p90_abs_error: Annotated[
        float | None,
        Figure("fitted p90", "on the rows of the fit; null without a kernel model", "{:.1%}"),
    ]
    parameters: Annotated[
        dict[str, float], Figure("", "parameters of the kernel model, by name", unit="figures")
    ]
    why: Annotated[str, Figure("", "reason why there is no kernel model, '' if there is one")]


class ErrorRecord(TypedDict):
    """Errors of bounds and predictions on a group of measured rows. `--by` selects the first
    keys."""

    op: NotRequired[Annotated[str, Figure("operation", "operation")]]
    gpu: NotRequired[Annotated[str, Figure("GPU", "GPU name")]]
    framework: NotRequired[Annotated[str, Figure("framework", "measured framework")]]
    dtype: NotRequired[Annotated[str, Figure("dtype", "data type of the operation")]]
    model: NotRequired[
        Annotated[str, Figure("model", "model of serving rows, with --by model")]
    ]
    client: NotRequired[
        Annotated[str, Figure("client", "client of serving rows, with --by client")]
    ]
    rows: Annotated[int, Figure("rows", "rows of the group")]
    predicted_rows: Annotated[
        int, Figure("predicted", "rows with a prediction", "int", "count")
    ]
    median_abs_error: Annotated[
        float | None,
        Figure(
            "median",
            "error of predictions; null without predictions",
            "{:.1%}",
            formula="median of exp(|ln(predicted/measured)|) − 1, of {predicted_rows} rows",
        ),
    ]
    p90_abs_error: Annotated[
        float | None,
        Figure(
            "p90",
            "error of predictions; null without predictions",
            "{:.1%}",
            formula="90th percentile of exp(|ln(predicted/measured)|) − 1, of {predicted_rows} rows",
        ),
    ]
    median_ratio: Annotated[
        float | None,
        Figure("median ratio", "predicted ÷ measured; null without predictions", "{:.3f}"),
    ]
    basis: Annotated[
        str, Figure("basis", "calibrated, or roofline without a kernel model", "text")
    ]
    roofline_median_abs_error: Annotated[
        float | None,
        Figure(
            "roofline median", "error of the datasheet bound; null without a bound", "{:.1%}"
        ),
    ]
    roofline_p90_abs_error: Annotated[
        float | None,
        Figure("roofline p90", "error of the datasheet bound; null without a bound", "{:.1%}"),
    ]
    ttft_median_abs_error: Annotated[
        float | None,
        Figure(
            "TTFT median",
            "error of the time to first token of servers; null for other rows",
            "{:.1%}",
        ),
    ]
    ttft_p90_abs_error: Annotated[
        float | None,
        Figure(
            "TTFT p90",
            "error of the time to first token of servers; null for other rows",
            "{:.1%}",
        ),
    ]
    throughput_median_abs_error: Annotated[
        float | None,
        Figure(
            "tokens/s median", "error of tokens/s of servers; null for other rows", "{:.1%}"
        ),
    ]
    throughput_p90_abs_error: Annotated[
        float | None,
        Figure("tokens/s p90", "error of tokens/s of servers; null for other rows", "{:.1%}"),
    ]
