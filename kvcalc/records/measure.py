"""Records of `measure`, `calibrate` and `validate`."""

from typing import Annotated, NotRequired, TypedDict

from kvcalc.records.figures import FloatOrNull, Formula, IntOrNull, TextOrNull


class KernelModelRecord(TypedDict):
    """The fitted time model of one kernel family and data type or kernel, with its errors.

    `family` is a group of operators such as GEMMs, and `kind` a data type or kernel in it. `rows`
    counts the measurements to which it was fitted. If `form` is null, `why` says why no time model
    was accepted. Errors are shares: 0.1 means that half (median) or 90% (p90) of the predictions
    are within 10% of the measured time. For errors "on held-out rows", each row is predicted by a
    fit without this row.
    """

    gpu: NotRequired[Annotated[str, "with --all", "GPU"]]
    stack: NotRequired[Annotated[str, "with --all", "stack"]]
    family: Annotated[str, "family of operators", "family"]
    kind: Annotated[str, "data type or kernel", "kind"]
    form: Annotated[TextOrNull, "kernel model; null without a fit", "time model"]
    rows: Annotated[int, "rows of the fit", "rows"]
    median_abs_error: Annotated[
        FloatOrNull, "on held-out rows; null without a kernel model", "held-out median"
    ]
    p90_abs_error: Annotated[
        FloatOrNull, "on held-out rows; null without a kernel model", "held-out p90"
    ]
    fitted_median_abs_error: Annotated[
        FloatOrNull, "on the rows of the fit; null without a kernel model", "fitted median"
    ]
    fitted_p90_abs_error: Annotated[
        FloatOrNull, "on the rows of the fit; null without a kernel model", "fitted p90"
    ]
    parameters: Annotated[dict[str, float], "parameters of the kernel model, by name"]
    why: Annotated[str, "reason why there is no kernel model, '' if there is one"]


class ErrorRecord(TypedDict):
    """Errors of predicted times on a group of measured rows, as `validate` prints them.

    `--by` selects the keys that name the group; other such keys are absent. A row is one measured
    operation, or one measured server. An error is exp(|ln(predicted ÷ measured)|) − 1: 0.1 means
    10%. If `basis` is `roofline`, the errors are of the datasheet bound, because no time model
    exists. Keys with `roofline_` always compare the datasheet bound instead of the prediction.
    """

    op: NotRequired[Annotated[str, "operation", "operation"]]
    gpu: NotRequired[Annotated[str, "GPU name", "GPU"]]
    framework: NotRequired[Annotated[str, "measured framework", "framework"]]
    dtype: NotRequired[Annotated[str, "data type of the operation", "dtype"]]
    model: NotRequired[Annotated[str, "model of serving rows, with --by model", "model"]]
    client: NotRequired[Annotated[str, "client of serving rows, with --by client", "client"]]
    rows: Annotated[int, "rows of the group", "rows"]
    predicted_rows: Annotated[int, "rows with a prediction", "predicted"]
    median_abs_error: Annotated[
        FloatOrNull,
        "error of predictions; null without predictions",
        "median",
        Formula("median of exp(|ln(predicted/measured)|) − 1, of {predicted_rows} rows"),
    ]
    p90_abs_error: Annotated[
        FloatOrNull,
        "error of predictions; null without predictions",
        "p90",
        Formula(
            "90th percentile of exp(|ln(predicted/measured)|) − 1, of {predicted_rows} rows"
        ),
    ]
    median_ratio: Annotated[
        FloatOrNull, "predicted ÷ measured; null without predictions", "median ratio", "{:.3f}"
    ]
    basis: Annotated[str, "calibrated, or roofline without a kernel model", "basis", "text"]
    roofline_median_abs_error: Annotated[
        FloatOrNull, "error of the datasheet bound; null without a bound", "roofline median"
    ]
    roofline_p90_abs_error: Annotated[
        FloatOrNull, "error of the datasheet bound; null without a bound", "roofline p90"
    ]
    ttft_median_abs_error: Annotated[
        FloatOrNull,
        "error of the time to first token of servers; null for other rows",
        "TTFT median",
    ]
    ttft_p90_abs_error: Annotated[
        FloatOrNull,
        "error of the time to first token of servers; null for other rows",
        "TTFT p90",
    ]
    throughput_median_abs_error: Annotated[
        FloatOrNull, "error of tokens/s of servers; null for other rows", "tokens/s median"
    ]
    throughput_p90_abs_error: Annotated[
        FloatOrNull, "error of tokens/s of servers; null for other rows", "tokens/s p90"
    ]


class MachineRecord(TypedDict):
    """Keys of a `measure` record about the machine and the settings of the measurement.

    `measure` runs layers with torch on this machine, and compares them with predictions. `clock` is
    `events` (CUDA events), `cpu` (CPU time of one thread) or `wall` (wall clock). Bytes are of the
    KV cache of all sequences in the measured layers.
    """

    variant: Annotated[str, "attention variant, as on the command line", "variant", "variant"]
    attention: Annotated[str, "attention variant of the model", "attention"]
    batch_size: Annotated[int, "concurrent sequences", "batch"]
    dtype: Annotated[str, "data type of weights, products and cache"]
    device: Annotated[str, "device of the measurement"]
    threads: Annotated[IntOrNull, "CPU threads; null on a GPU"]
    clock: Annotated[str, "clock of the times"]
    core_share: Annotated[
        FloatOrNull, "share of the cores that other programs did not use; null on a GPU"
    ]
    ratio: Annotated[
        float,
        "measured ÷ predicted",
        "ratio",
        "{:.2f}×",
        Formula("{measured_s} / {predicted_s}"),
    ]
    predicted_bytes: Annotated[int, "bytes of the cache", "cache predicted", "{:,}"]
    allocated_bytes: Annotated[int, "storage of the cache's tensors", "in tensors", "{:,}"]


class CeilingsRecord(TypedDict):
    """Keys of a `measure` record about the highest rates that this machine reached in a benchmark.

    Rates are of GPU or CPU memory and of matrix products, in bytes or FLOPs per second. They
    replace datasheet values in the bounds of the measured layers.
    """

    bandwidth_bytes_per_s: Annotated[float, "the higher of copying and reading"]
    copy_bytes_per_s: Annotated[float, "rate of a copy"]
    read_bytes_per_s: Annotated[float, "rate of a read"]
    flops_per_s: Annotated[float, "rate of a product in this dtype"]
    launch_s: Annotated[float, "time of an empty operation"]


class MeasuredLayerRecord(MachineRecord, CeilingsRecord):
    """Measured times and bytes of layers with one attention variant, and of their attention only.

    Seconds are of one forward pass through all measured layers; keys with `attention_` are of the
    attention in these layers. `predicted_s` is computed from the rates of this machine. `bound_s`
    is the larger of bytes ÷ bandwidth and FLOPs ÷ FLOP rate. `bandwidth_share` and `flops_share`
    are the reached parts of these two rates, from 0 to 1. `cache_error` compares outputs with and
    without the cache, as a check that the layers work.
    """

    phase: Annotated[str, "decode or prefill", "phase"]
    context: Annotated[int, "per sequence", "context"]
    layers: Annotated[int, "measured layers"]
    kernel: Annotated[str, "attention kernel"]
    predicted_s: Annotated[float, "by rates measured before the layer", "predicted"]
    bound_s: Annotated[float, "bound on this machine's measured ceilings", "bound"]
    measured_s: Annotated[float, "median", "measured"]
    spread: Annotated[
        float, "90th − 10th percentile of the repeats ÷ median", "spread", "{:.0%}"
    ]
    graph: Annotated[bool, "whether a CUDA graph was replayed"]
    bound: Annotated[str, "compute or memory"]
    bytes: Annotated[int, "minimum traffic"]
    flops: Annotated[int, "FLOPs of matrix products"]
    bandwidth_share: Annotated[float, "reached part of the measured bandwidth"]
    flops_share: Annotated[float, "reached part of the measured matrix rate"]
    attention_predicted_s: Annotated[
        float, "predicted_s of attention only", "attention: predicted"
    ]
    attention_bound_s: Annotated[float, "bound_s of attention only", "attention bound"]
    attention_measured_s: Annotated[float, "measured_s of attention only", "measured"]
    attention_predicted_speedup: Annotated[
        FloatOrNull,
        "predicted time of mha's attention ÷ this; null without mha",
        "vs mha",
        "{:.2f}×",
    ]
    attention_measured_speedup: Annotated[
        FloatOrNull,
        "measured time of mha's attention ÷ this; null without mha",
        "measured",
        "{:.2f}×",
    ]
    cache_error: Annotated[
        float,
        "largest change of the last output by the cache ÷ largest output",
        "cache error",
        "{:.0e}",
    ]
    attention_ratio: Annotated[float, "ratio of attention only", "ratio", "{:.2f}×"]
    attention_spread: Annotated[float, "spread of attention only"]
    attention_graph: Annotated[bool, "graph of attention only"]
    attention_bound: Annotated[str, "bound of attention only"]
    attention_bytes: Annotated[int, "bytes of attention only"]
    attention_flops: Annotated[int, "flops of attention only"]
    attention_bandwidth_share: Annotated[
        float, "bandwidth_share of attention only", "of bandwidth", "{:.0%}"
    ]
    attention_flops_share: Annotated[
        float, "flops_share of attention only", "of FLOP/s", "{:.0%}"
    ]
    allocator_bytes: Annotated[
        IntOrNull,
        "allocated for the cache by the allocator; null if it does not report this",
        "allocator",
        "{:,}",
    ]


class GenerationRecord(MachineRecord):
    """Measured times and bytes of one way to generate tokens, such as with a KV cache.

    `mode` says whether the KV cache is used, and `head` whether the LM head computes the last
    position or all. `speedup` is how many times longer this way takes than the cached way. All
    sequences of the batch are generated together, so that the seconds of a token are the seconds of
    one forward pass for the batch.
    """

    model: Annotated[str, "model name"]
    mode: Annotated[str, "cached or uncached", "cache", "mode"]
    head: Annotated[str, "positions of the LM head", "LM head on"]
    prompt_len: Annotated[int, "tokens of the prompt", "prompt"]
    new_tokens: Annotated[int, "generated tokens"]
    total_s: Annotated[float, "time of all tokens", "measured"]
    tokens_per_s: Annotated[float, "rate of all sequences", "tokens/s", "{:.1f}"]
    first_token_s: Annotated[float, "measured", "first token"]
    last_token_s: Annotated[float, "median of the last five tokens", "last token"]
    predicted_total_s: Annotated[
        float, "by the rates of this machine during the run", "predicted"
    ]
    bound_total_s: Annotated[float, "on the machine's ceilings", "bound"]
    host_s: Annotated[float, "CPU time of a pass"]
    token_s: Annotated[list[float], "seconds of each token"]
    predicted_token_s: Annotated[list[float], "predicted seconds of each token"]
    same_tokens: Annotated[
        bool, "whether the tokens equal the tokens of the cached run", "same tokens"
    ]
    speedup: Annotated[
        float, "total time ÷ total time of the cached run", "cache saves", "{:.2f}×"
    ]
    predicted_speedup: Annotated[
        float,
        "predicted total time ÷ predicted total time of the cached run",
        "predicted",
        "{:.2f}×",
    ]
