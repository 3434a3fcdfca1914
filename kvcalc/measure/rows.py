"""Measured rows: the one CSV format of timings, in which an `op` column says what each row is.

Times are microseconds of one call on this device: attention with the write to the cache, or a whole DSA module; `bound_us` is
the least that this takes at the ceilings measured here. What the format has no operation for (recurrent layers, layers that
share a cache) is left out.
"""

from collections.abc import Iterable
from typing import Any

import torch

from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.measure.stack import Case

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_GPUS = (("H100 80GB HBM3", "h100_sxm"), ("H100 PCIe", "h100_pcie"), ("H200", "h200_sxm"), ("A100-SXM4-80GB", "a100-80gb"),
         ("GB300", "gb300"), ("B300", "b300"), ("GB200", "gb200"), ("B200", "b200"), ("L40S", "l40s"),
         ("RTX PRO 6000 Blackwell Server", "rtx-pro-6000-blackwell"))  # fmt: skip
MLA = (512, 64, 128)  # kv_lora_rank, qk_rope_head_dim and v_head_dim that the format means by MLA


def measured_rows(found: Iterable[tuple[Case | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows for cases and their records."""
    return [row for case, record in found if case and (row := _row(case, record))]


def gpu_name(device: str) -> str:
    """The name that presets and rows know a device by, else the vendor's own."""
    return next((name for mark, name in _GPUS if mark in device), device)


def _row(case: Case, record: dict[str, Any]) -> dict[str, Any] | None:
    spec, decode = next(iter(case.model.kinds.values())).mixers[0], case.phase == "decode"
    if case.model.layers > 1 or not isinstance(spec, Grouped | Latent):
        return None
    dtype, length = DTYPES[record["dtype"]], "kv_len" if decode else "seq_len"
    whole = isinstance(spec, Sparse)
    if whole and not decode:
        return None
    op = "dsa_decode_module" if whole else f"mla_{case.phase}" if isinstance(spec, Latent) else f"{case.phase}_attention"
    row = {
        "op": op,
        "gpu": gpu_name(record["device"]),
        "framework": "torch",
        "version": torch.__version__,
        "table": "kvcalc_measure",
        "kernel": record["kernel"],
        "kv_dtype": dtype,
        "batch": case.batch_size,
        "q_heads": spec.num_attention_heads,
        length: case.context,
        "time_us": record["measured_s" if whole else "attention_measured_s"] * 1e6,
        "bound_us": record["predicted_s" if whole else "attention_predicted_s"] * 1e6,
    }
    if isinstance(spec, Grouped):
        return row | _grouped(spec, dtype, decode)
    if (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.v_head_dim) != MLA:
        return None
    return row | ({"gemm_dtype": dtype, "model": case.model.name} if whole else {"attn_dtype": dtype})


def _grouped(spec: Grouped, dtype: str, decode: bool) -> dict[str, Any]:
    shape = {"kv_heads": spec.num_key_value_heads, "head_dim": spec.head_dim, "window": spec.sliding_window or 0}
    return shape if decode else shape | {"attn_dtype": dtype}
