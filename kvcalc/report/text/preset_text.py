"""Tables of `models` and `gpus`."""

from collections.abc import Sequence

from kvcalc.records.presets import GpuPresetRecord, ModelPresetRecord
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import columns

MODEL_COLUMNS = columns(
    ModelPresetRecord,
    "model parameters active_parameters bytes_per_token attention max_context layers hidden_size "
    "family",
)
GPU_COLUMNS = columns(
    GpuPresetRecord,
    "gpu memory_bytes bandwidth_bytes_per_s bf16_flops_per_s fp8_flops_per_s fp4_flops_per_s knee "
    "link_bytes_per_s vendor",
)


def model_table(records: Sequence[ModelPresetRecord]) -> Table:
    """Return the table of model presets."""
    notes = [
        "",
        "per token: KV cache of one sequence at 8,192 tokens in bf16, all layers",
        "`kvcalc models NAME` shows one model with its sources.",
    ]
    return Table(records, MODEL_COLUMNS, _title(len(records), "model"), notes)


def gpu_table(records: Sequence[GpuPresetRecord]) -> Table:
    """Return the table of GPU presets."""
    notes = ["", "`kvcalc gpus NAME` shows one GPU with its sources."]
    return Table(records, GPU_COLUMNS, _title(len(records), "GPU"), notes)


def _title(count: int, noun: str) -> str:
    return f"{count} {noun}{'s are' if count != 1 else ' is'} known."
