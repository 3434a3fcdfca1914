"""`kvcalc gpus`."""

import sys
from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import emit


def run(
    name: Annotated[str, typer.Argument(help="One GPU, shown in full.", show_default=False)] = "",
    vendor: Annotated[str, typer.Option("--vendor", "--family", help="Keep GPUs of this vendor or architecture.")] = "",
    output: o.PrintedAs = o.OutputFormat.table,
) -> None:
    """What GPU presets there are, and one in full."""
    from kvcalc.library.listing import all_gpus, gpu_record, preset_text
    from kvcalc.library.load import load_gpu

    if name:
        if not emit([gpu_record(load_gpu(name))], output):
            sys.stdout.write(preset_text(name, "gpus"))
    elif not emit(records := [gpu_record(g) for g in all_gpus(vendor)], output):
        from kvcalc.report.tables import GPU_COLUMNS, Table, show

        notes = ["", "dense matrix peaks; knee: FLOP per byte where bf16 products turn compute-bound; link: one direction"]
        show(Table(records, GPU_COLUMNS, notes=notes))
