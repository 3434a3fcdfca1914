"""Records of `roofline`: a pass and its operators."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import Figure


class PassTotalRecord(TypedDict):
    """Sum of a pass, or one of its operators, without the bytes of the weights."""

    phase: Annotated[str, Figure("phase", "decode, prefill or mixed")]
    operator: Annotated[str, Figure("operator", "operator name; total is the sum of the pass")]
    layer: Annotated[str, Figure("layer", "kind of layer; '' outside layers")]
    role: Annotated[str, Figure("", "kind of work; '' for the total")]
    count: Annotated[
        int, Figure("runs", "runs in the pass; all other figures are for all runs together")
    ]
    flops: Annotated[int, Figure("FLOP", "matrix products only, two per multiply-add")]
    vector_flops: Annotated[
        int, Figure("vector FLOP", "norms, softmax, activation functions and similar")
    ]
    cache_bytes: Annotated[int, Figure("cache", "cache read and written", format="si B")]
    cache_read_bytes: Annotated[int, Figure("", "cache read")]
    cache_write_bytes: Annotated[int, Figure("", "cache written")]
    activation_bytes: Annotated[
        int, Figure("activations", "activations read and written", format="si B")
    ]
    bytes: Annotated[int, Figure("bytes", "all traffic of the GPU's memory", format="si B")]
    network_bytes: Annotated[int, Figure("", "sent between GPUs")]
    inter_node_bytes: Annotated[int, Figure("", "sent between nodes")]
    mla_form: Annotated[
        str | None,
        Figure("MLA form", "absorbed, expanded or mixed; null without latent attention"),
    ]
    intensity: Annotated[
        float | None,
        Figure(
            "FLOP/B",
            "flops ÷ bytes; null without traffic",
            unit="FLOP per byte",
            formula="{flops} / {bytes}",
        ),
    ]
    bound: Annotated[
        str | None,
        Figure(
            "bound",
            "compute, memory or network, by the roofline; null for engine_overhead and "
            "module_overhead",
        ),
    ]
    computed_in: Annotated[
        str | None, Figure("", "dtypes of the matrix units; null without a product")
    ]
    roofline_s: Annotated[
        float,
        Figure(
            "at least",
            "datasheet bound with full overlap and no launches",
            format="kernel",
            is_noted=True,
        ),
    ]
    time_s: Annotated[
        float | None,
        Figure(
            "predicted", "predicted time; null without a calibration", "kernel", mark="time"
        ),
    ]
    overhead: Annotated[
        float | None,
        Figure(
            "overhead",
            "predicted time ÷ bound; null without one of them",
            "{:.3g}×",
            unit="ratio",
            is_noted=True,
            formula="{time_s} / {roofline_s}",
        ),
    ]
    share: Annotated[
        float,
        Figure(
            "share",
            "share of the time of the pass; by time_s or else roofline_s",
            "{:.1%}",
            unit="share",
            is_noted=True,
        ),
    ]
    time_note: Annotated[
        str | None,
        Figure("", "a warning on the measured rows behind a time; null if there is none"),
    ]
