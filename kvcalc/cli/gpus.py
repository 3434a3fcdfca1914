"""`kvcalc gpus`."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvcalc.cli.chosen import chosen_gpus
from kvcalc.cli.common import say_yaml
from kvcalc.cli.groups import Output, grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcalc.gpu.spec import Gpu
    from kvcalc.report.export import Record
    from kvcalc.report.layout import Table


@grouped
def run(
    name: Annotated[
        str, typer.Argument(help="One GPU, shown in full; a list; or part of a name: those that match.", show_default=False)
    ] = "",
    *,
    vendor: Annotated[str, typer.Option("--vendor", "--family", help="Keep GPUs of this vendor or architecture.")] = "",
    output: Output,
) -> None:
    """What GPU presets there are, and one in full."""
    from kvcalc.library.listing import all_gpus, beginning
    from kvcalc.library.load import load_gpu

    several = chosen_gpus(name) if "," in name else []
    names = beginning(name, "gpus") if name and not several else []
    if name and not names and not several and name.lower() in {gpu.vendor.lower() for gpu in all_gpus()}:
        several = all_gpus(name)
    if name and not names and not several:
        _one(name, load_gpu(name), output)
    else:
        _listed(several or all_gpus(vendor, names), output)


def _one(name: str, gpu: "Gpu", output: Output) -> None:
    """Its memories, and its preset with the sources."""
    from kvcalc.library.listing import gpu_record, preset_text

    if output.plot:
        from kvcalc.report.figures_gpus import hierarchy_chart

        output.picture(hierarchy_chart(gpu))
    if output.printed([gpu_record(gpu)]):
        return
    from kvcalc.report.hierarchy import hierarchy_table

    if output.explain:
        output.show(_table([gpu_record(gpu)]), hierarchy_table(gpu))
    else:
        from kvcalc.report.tables import fitted

        lines = fitted(hierarchy_table(gpu), beside=2)
        say_yaml("".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + preset_text(name, "gpus"))


def _listed(gpus: "Sequence[Gpu]", output: Output) -> None:
    from kvcalc.library.listing import gpu_record

    if output.plot:
        from kvcalc.report.figures_gpus import peaks_chart

        output.picture(peaks_chart(gpus))
    if not output.printed(records := [gpu_record(gpu) for gpu in gpus]):
        output.show(_table(records))


def _table(records: "Sequence[Record]") -> "Table":
    from kvcalc.report.layout import Table
    from kvcalc.report.tables import GPU_COLUMNS

    return Table(records, GPU_COLUMNS, notes=["", "`kvcalc gpus NAME` shows all of one, with its sources"])
