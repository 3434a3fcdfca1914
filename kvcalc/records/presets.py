"""Records of `models` and `gpus`."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import Figure


class ModelPresetRecord(TypedDict):
    """A model preset."""

    model: Annotated[str, Figure("model", "preset name")]
    family: Annotated[str, Figure("family", "model family")]
    parameters: Annotated[
        int,
        Figure(
            "parameters",
            "parameters of the language model; tied embeddings count once",
            "count",
        ),
    ]
    active_parameters: Annotated[
        int, Figure("active", "without the experts beyond top-k", "count")
    ]
    parameters_exact: Annotated[bool, Figure("", "whether the parameters are exact counts")]
    layers: Annotated[int, Figure("layers", "number of layers")]
    hidden_size: Annotated[int, Figure("hidden", "width of the residual stream")]
    attention: Annotated[str, Figure("attention", "attention variant")]
    bytes_per_token: Annotated[
        float, Figure("per token", "at 8,192 tokens in bf16", unit="bytes a token")
    ]
    max_context: Annotated[
        int | None,
        Figure("max context", "the model's maximum; null without a limit", unit="tokens"),
    ]
    huggingface_id: Annotated[
        str | None, Figure("", "name on huggingface.co; null if the model has none")
    ]
    source: Annotated[str, Figure("", "addresses")]


class PeaksRecord(TypedDict):
    """Matrix peaks of a GPU by dtype."""

    fp64_flops_per_s: Annotated[
        float | None, Figure("", "dense matrix peak; null without such a unit")
    ]
    fp32_flops_per_s: Annotated[
        float | None, Figure("", "dense matrix peak; null without such a unit")
    ]
    tf32_flops_per_s: Annotated[
        float | None, Figure("", "dense matrix peak; null without such a unit")
    ]
    bf16_flops_per_s: Annotated[
        float | None,
        Figure(
            "bf16 FLOP/s",
            "dense matrix peak; null without such a unit",
            is_noted=True,
        ),
    ]
    fp16_flops_per_s: Annotated[
        float | None, Figure("", "dense matrix peak; null without such a unit")
    ]
    fp8_flops_per_s: Annotated[
        float | None, Figure("fp8", "dense matrix peak; null without such a unit")
    ]
    int8_flops_per_s: Annotated[
        float | None, Figure("", "dense matrix peak; null without such a unit")
    ]
    fp6_flops_per_s: Annotated[
        float | None, Figure("", "dense matrix peak; null without such a unit")
    ]
    fp4_flops_per_s: Annotated[
        float | None, Figure("fp4", "dense matrix peak; null without such a unit")
    ]


class GpuPresetRecord(PeaksRecord):
    """A GPU preset; null if the vendor does not publish a figure."""

    gpu: Annotated[str, Figure("GPU", "preset name")]
    vendor: Annotated[str, Figure("vendor", "vendor")]
    architecture: Annotated[str, Figure("", "GPU generation")]
    memory_bytes: Annotated[
        int, Figure("memory", "as the driver reports it, if known", "bytes1")
    ]
    usable_bytes: Annotated[int, Figure("", "memory that the system lets the GPU use")]
    memory_type: Annotated[str | None, Figure("", "such as HBM3; null if unknown")]
    bandwidth_bytes_per_s: Annotated[float, Figure("bandwidth", "rate of the GPU's memory")]
    vector_fp32_flops_per_s: Annotated[
        float | None, Figure("", "outside the matrix units; null if unknown")
    ]
    knee: Annotated[
        float | None,
        Figure(
            "ridge point",
            "FLOP per byte where bf16 products turn compute-bound; null without a bf16 peak",
            "{:.1f}",
            unit="FLOP per byte",
            is_noted=True,
            formula="{bf16_flops_per_s} / {bandwidth_bytes_per_s}",
        ),
    ]
    sms: Annotated[
        int | None,
        Figure("", "streaming multiprocessors or the vendor's equivalent; null if unknown"),
    ]
    register_bytes_per_sm: Annotated[
        int | None, Figure("", "registers; null if unknown", unit="bytes")
    ]
    shared_memory_bytes_per_sm: Annotated[
        int | None, Figure("", "shared memory and L1 cache; null if unknown", unit="bytes")
    ]
    shared_memory_bytes_per_s: Annotated[
        float | None, Figure("", "rate of all multiprocessors; null if unknown")
    ]
    l2_bytes: Annotated[int | None, Figure("", "L2 cache; null if unknown")]
    l2_bytes_per_s: Annotated[float | None, Figure("", "rate of the L2 cache; null if unknown")]
    link_bytes_per_s: Annotated[
        float | None,
        Figure(
            "link",
            "to other GPUs, in one direction; null without a link",
            is_noted=True,
        ),
    ]
    host_link_bytes_per_s: Annotated[
        float | None, Figure("", "to the host, in one direction; null if unknown")
    ]
    host: Annotated[
        str | None, Figure("", "a machine with such GPUs; null if the preset names none")
    ]
    host_gpus: Annotated[
        int | None, Figure("", "GPUs of this machine; null if the preset names none")
    ]
    host_memory_bytes: Annotated[
        int | None, Figure("", "CPU memory of this machine; null if unknown")
    ]
    disk_bytes: Annotated[int | None, Figure("", "disks of this machine; null if unknown")]
    disk_bytes_per_s: Annotated[
        float | None, Figure("", "read rate of all disks of this machine; null if unknown")
    ]
    power_w: Annotated[float | None, Figure("", "power limit of the board; null if unknown")]
    per: Annotated[str, Figure("", "the unit of the figures, card or die")]
    source: Annotated[str, Figure("", "addresses")]
