"""`kvcalc gpus`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import emit


def run(
    name: Annotated[str, typer.Argument(help="One GPU, shown in full.", show_default=False)] = "",
    vendor: Annotated[str, typer.Option("--vendor", "--family", help="Keep GPUs of this vendor or architecture.")] = "",
    output: o.Output = o.OutputFormat.table,
) -> None:
    """What GPU presets there are, and one in full."""
    from kvcalc.gpu.spec import Gpu
    from kvcalc.library.catalog import find, preset_files
    from kvcalc.library.load import load_gpu, read

    if name:
        gpu = load_gpu(name)
        if not emit([record(gpu)], output):
            path = Path(name) if name.endswith((".yaml", ".yml")) else find(name, "gpus")
            sys.stdout.write(path.read_text(encoding="utf-8"))
        return
    found = [read(path, Gpu) for path in preset_files("gpus").values()]
    kept = [g for g in found if vendor.lower() in f"{g.vendor} {g.architecture} {g.name}".lower()]
    records = [record(g) for g in sorted(kept, key=lambda g: (g.vendor, -g.bandwidth_bytes_per_s))]
    if not emit(records, output):
        from kvcalc.report.tables import GPU_COLUMNS, show

        notes = ["", "dense matrix peaks; knee: FLOP per byte where bf16 products turn compute-bound; link: one direction"]
        show(records, GPU_COLUMNS, notes=notes)


def record(gpu: Any) -> dict[str, Any]:
    """One GPU as a flat record; null where its vendor gives no figure."""
    from kvcalc.gpu.spec import PEAKS

    peaks = {f"{d}_flops_per_s": gpu.flops_per_s.get(d) for d in PEAKS}
    return {
        "gpu": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "memory_bytes": gpu.memory_bytes,
        "memory_type": gpu.memory_type or None,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        **peaks,
        "vector_fp32_flops_per_s": gpu.vector_flops_per_s.get("fp32"),
        "knee": gpu.knee,
        "sms": gpu.sms,
        "l2_bytes": gpu.l2_bytes,
        "link_bytes_per_s": gpu.link_bytes_per_s,
        "host_link_bytes_per_s": gpu.host_link_bytes_per_s,
        "power_w": gpu.power_w,
        "per": gpu.per,
        "source": "; ".join(s.url for s in gpu.source),
    }
