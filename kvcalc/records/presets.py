"""Records of `models` and `gpus`."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import FloatOrNull, Formula, IntOrNull, TextOrNull

MatrixPeak = Annotated[FloatOrNull, "dense matrix peak; null without such a unit"]


class ModelPresetRecord(TypedDict):
    """One model preset, as `kvcalc models` lists it.

    `bytes_per_token` is what one more token adds to a bf16 KV cache, over all layers and before any
    split over GPUs. `active_parameters` counts the parameters that one token uses.
    `parameters_exact` is false if the counts may be wrong, because kvcalc has no rules for the
    architecture.
    """

    model: Annotated[str, "preset name", "model"]
    family: Annotated[str, "model family", "family"]
    parameters: Annotated[
        int,
        "parameters of the language model; tied embeddings count once",
        "parameters",
        "parameters",
    ]
    active_parameters: Annotated[
        int, "without the experts beyond top-k", "active", "parameters"
    ]
    parameters_exact: Annotated[bool, "whether the parameters are exact counts"]
    layers: Annotated[int, "number of layers", "layers"]
    hidden_size: Annotated[int, "width of the residual stream", "hidden"]
    attention: Annotated[str, "attention variant", "attention"]
    bytes_per_token: Annotated[float, "at 8,192 tokens in bf16", "per token"]
    max_context: Annotated[
        IntOrNull, "the model's maximum; null without a limit", "max context"
    ]
    huggingface_id: Annotated[TextOrNull, "name on huggingface.co; null if the model has none"]
    source: Annotated[str, "addresses"]


class PeaksRecord(TypedDict):
    """Datasheet peak rates of one GPU's matrix units in FLOP/s, by data type, without sparsity.

    A key is null if the GPU has no such unit or the vendor publishes no rate.
    """

    fp64_flops_per_s: MatrixPeak
    fp32_flops_per_s: MatrixPeak
    tf32_flops_per_s: MatrixPeak
    bf16_flops_per_s: Annotated[MatrixPeak, "bf16 FLOP/s"]
    fp16_flops_per_s: MatrixPeak
    fp8_flops_per_s: Annotated[MatrixPeak, "fp8"]
    int8_flops_per_s: MatrixPeak
    fp6_flops_per_s: MatrixPeak
    fp4_flops_per_s: Annotated[MatrixPeak, "fp4"]


class GpuPresetRecord(PeaksRecord):
    """One GPU preset, as `kvcalc gpus` lists it. A key is null if the vendor publishes no value.

    Values are of one GPU: `per` says whether this is a card or one die of it. `host…` and `disk…`
    keys are of a server with `host_gpus` such GPUs.
    """

    gpu: Annotated[str, "preset name", "GPU"]
    vendor: Annotated[str, "vendor", "vendor"]
    architecture: Annotated[str, "GPU generation"]
    memory_bytes: Annotated[
        int, "as the driver reports it, if known", "memory", "bytes, one digit"
    ]
    usable_bytes: Annotated[int, "memory that the system lets the GPU use"]
    memory_type: Annotated[TextOrNull, "such as HBM3; null if unknown"]
    bandwidth_bytes_per_s: Annotated[float, "rate of the GPU's memory", "bandwidth"]
    vector_fp32_flops_per_s: Annotated[FloatOrNull, "outside the matrix units; null if unknown"]
    knee: Annotated[
        FloatOrNull,
        "FLOP per byte where bf16 products turn compute-bound; null without a bf16 peak",
        "ridge point",
        "{:.1f}",
        Formula("{bf16_flops_per_s} / {bandwidth_bytes_per_s}"),
    ]
    sms: Annotated[
        IntOrNull, "streaming multiprocessors or the vendor's equivalent; null if unknown"
    ]
    register_bytes_per_sm: Annotated[IntOrNull, "registers; null if unknown"]
    shared_memory_bytes_per_sm: Annotated[
        IntOrNull, "shared memory and L1 cache; null if unknown"
    ]
    shared_memory_bytes_per_s: Annotated[
        FloatOrNull, "rate of all multiprocessors; null if unknown"
    ]
    l2_bytes: Annotated[IntOrNull, "L2 cache; null if unknown"]
    l2_bytes_per_s: Annotated[FloatOrNull, "rate of the L2 cache; null if unknown"]
    link_bytes_per_s: Annotated[
        FloatOrNull, "to other GPUs, in one direction; null without a link", "link"
    ]
    host_link_bytes_per_s: Annotated[
        FloatOrNull, "to the host, in one direction; null if unknown"
    ]
    host: Annotated[TextOrNull, "a machine with such GPUs; null if the preset names none"]
    host_gpus: Annotated[IntOrNull, "GPUs of this machine; null if the preset names none"]
    host_memory_bytes: Annotated[IntOrNull, "CPU memory of this machine; null if unknown"]
    disk_bytes: Annotated[IntOrNull, "disks of this machine; null if unknown"]
    disk_bytes_per_s: Annotated[
        FloatOrNull, "read rate of all disks of this machine; null if unknown"
    ]
    power_w: Annotated[FloatOrNull, "power limit of the board; null if unknown"]
    per: Annotated[str, "the unit of the figures, card or die"]
    source: Annotated[str, "addresses"]
