"""Records of `measure`, `calibrate` and `validate`."""

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


class MachineRecord(TypedDict):
    """Machine and settings of a measurement."""

    variant: Annotated[
        str, Figure("variant", "attention variant, as on the command line", "variant")
    ]
    attention: Annotated[str, Figure("attention", "attention variant of the model")]
    batch_size: Annotated[int, Figure("batch", "concurrent sequences", unit="sequences")]
    dtype: Annotated[str, Figure("", "data type of weights, products and cache")]
    device: Annotated[str, Figure("", "device of the measurement")]
    threads: Annotated[int | None, Figure("", "CPU threads; null on a GPU")]
    clock: Annotated[str, Figure("", "clock of the times")]
    core_share: Annotated[
        float | None,
        Figure("", "share of the cores that other programs did not use; null on a GPU"),
    ]
    ratio: Annotated[
        float,
        Figure(
            "ratio", "measured ÷ predicted", "{:.2f}×", formula="{measured_s} / {predicted_s}"
        ),
    ]
    predicted_bytes: Annotated[int, Figure("cache predicted", "bytes of the cache", "int")]
    allocated_bytes: Annotated[
        int, Figure("in tensors", "storage of the cache's tensors", "int")
    ]


class CeilingsRecord(TypedDict):
    """Measured ceilings of the machine."""

    bandwidth_bytes_per_s: Annotated[float, Figure("", "the higher of copying and reading")]
    copy_bytes_per_s: Annotated[float, Figure("", "rate of a copy")]
    read_bytes_per_s: Annotated[float, Figure("", "rate of a read")]
    flops_per_s: Annotated[float, Figure("", "rate of a product in this dtype")]
    launch_s: Annotated[float, Figure("", "time of an empty operation")]


class MeasuredLayerRecord(MachineRecord, CeilingsRecord):
    """Times and bytes of one layer. Keys that begin with `attention_` are of attention only."""

    phase: Annotated[str, Figure("phase", "decode or prefill")]
    context: Annotated[int, Figure("context", "per sequence", unit="tokens")]
    layers: Annotated[int, Figure("", "measured layers")]
    kernel: Annotated[str, Figure("", "attention kernel")]
    predicted_s: Annotated[float, Figure("bound", "bound on this machine's measured ceilings")]
    measured_s: Annotated[float, Figure("measured", "median")]
    spread: Annotated[
        float,
        Figure(
            "spread", "90th − 10th percentile of the repeats ÷ median", "{:.0%}", unit="share"
        ),
    ]
    repeats: Annotated[int, Figure("", "repeats of the measurement")]
    graph: Annotated[bool, Figure("", "whether a CUDA graph was replayed")]
    bound: Annotated[str, Figure("", "compute or memory")]
    bytes: Annotated[int, Figure("", "minimum traffic")]
    flops: Annotated[int, Figure("", "FLOPs of matrix products")]
    bandwidth_share: Annotated[float, Figure("", "reached part of the measured bandwidth")]
    flops_share: Annotated[float, Figure("", "reached part of the measured matrix rate")]
    difference: Annotated[str, Figure("", "main reason of a longer time, in a word")]
    attention_predicted_s: Annotated[
        float, Figure("attention: bound", "predicted_s of attention only")
    ]
    attention_measured_s: Annotated[float, Figure("measured", "measured_s of attention only")]
    attention_ratio: Annotated[float, Figure("ratio", "ratio of attention only", "{:.2f}×")]
    attention_spread: Annotated[float, Figure("", "spread of attention only", unit="share")]
    attention_repeats: Annotated[int, Figure("", "repeats of attention only")]
    attention_graph: Annotated[bool, Figure("", "graph of attention only")]
    attention_bound: Annotated[str, Figure("", "bound of attention only")]
    attention_bytes: Annotated[int, Figure("", "bytes of attention only")]
    attention_flops: Annotated[int, Figure("", "flops of attention only")]
    attention_bandwidth_share: Annotated[
        float, Figure("of bandwidth", "bandwidth_share of attention only", "{:.0%}")
    ]
    attention_flops_share: Annotated[
        float, Figure("of FLOP/s", "flops_share of attention only", "{:.0%}")
    ]
    attention_difference: Annotated[str, Figure("because", "difference of attention only")]
    allocator_bytes: Annotated[
        int | None,
        Figure(
            "allocator",
            "allocated for the cache by the allocator; null if it does not report this",
            "int",
        ),
    ]
    copies: Annotated[int, Figure("", "copies of the inputs, so that none stays in a cache")]
    attention_copies: Annotated[int, Figure("", "copies of attention only")]
    launches: Annotated[int, Figure("", "launched operations")]
    attention_launches: Annotated[int, Figure("", "launched operations of attention only")]


class GenerationRecord(MachineRecord):
    """Times and bytes of one way to generate tokens."""

    model: Annotated[str, Figure("", "model name")]
    mode: Annotated[str, Figure("cache", "cached or uncached", "mode")]
    head: Annotated[str, Figure("head on", "positions of the LM head")]
    prompt_len: Annotated[int, Figure("prompt", "tokens of the prompt")]
    new_tokens: Annotated[int, Figure("", "generated tokens")]
    total_s: Annotated[float, Figure("measured", "time of all tokens")]
    tokens_per_s: Annotated[float, Figure("tokens/s", "rate of all sequences", "{:.1f}")]
    first_token_s: Annotated[float, Figure("first token", "measured")]
    last_token_s: Annotated[float, Figure("last token", "median of the last five tokens")]
    predicted_total_s: Annotated[
        float, Figure("predicted", "by the rates of this machine during the run")
    ]
    ratio_p10: Annotated[
        float, Figure("", "measured ÷ predicted, 10th percentile of the tokens", unit="ratio")
    ]
    ratio_p90: Annotated[
        float, Figure("", "measured ÷ predicted, 90th percentile of the tokens", unit="ratio")
    ]
    bound_total_s: Annotated[float, Figure("bound", "on the machine's ceilings")]
    host_s: Annotated[float, Figure("", "CPU time of a pass")]
    token_s: Annotated[list[float], Figure("", "seconds of each token", unit="list")]
    predicted_token_s: Annotated[
        list[float], Figure("", "predicted seconds of each token", unit="list")
    ]
    same_tokens: Annotated[
        bool,
        Figure(
            "same tokens",
            "whether the tokens equal the tokens of the cached run",
            unit="yes or no",
        ),
    ]
    speedup: Annotated[
        float,
        Figure(
            "cache saves", "total time ÷ total time of the cached run", "{:.2f}×", unit="ratio"
        ),
    ]
    predicted_speedup: Annotated[
        float,
        Figure(
            "predicted",
            "predicted total time ÷ predicted total time of the cached run",
            "{:.2f}×",
        ),
    ]
