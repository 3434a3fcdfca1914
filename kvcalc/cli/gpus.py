"""`kvcalc gpus`."""

from typing import Annotated

import typer

from kvcalc.cli.chosen import chosen_gpus
from kvcalc.cli.common import say_yaml
from kvcalc.cli.groups import Printing, grouped


@grouped
def run(
    name: Annotated[
        str, typer.Argument(help="One GPU, shown in full; a list; or part of a name: those that match.", show_default=False)
    ] = "",
    *,
    vendor: Annotated[str, typer.Option("--vendor", "--family", help="Keep GPUs of this vendor or architecture.")] = "",
    output: Printing,
) -> None:
    """What GPU presets there are, and one in full."""
    from kvcalc.library.listing import all_gpus, beginning, gpu_record, preset_text
    from kvcalc.library.load import load_gpu

    several = chosen_gpus(name) if "," in name else []
    names = beginning(name, "gpus") if name and not several else []
    alone = bool(name) and not names and not several
    if alone and output.explain:
        several = [load_gpu(name)]
    if alone and not output.explain:
        if not output.printed([gpu_record(gpu := load_gpu(name))]):
            from kvcalc.report.hierarchy import hierarchy_table
            from kvcalc.report.tables import fitted

            lines = fitted(hierarchy_table(gpu), beside=2)
            say_yaml("".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + preset_text(name, "gpus"))
    elif not output.printed(records := [gpu_record(g) for g in several or all_gpus(vendor, names)]):
        from kvcalc.report.layout import Table
        from kvcalc.report.tables import GPU_COLUMNS

        output.show(Table(records, GPU_COLUMNS, notes=["", "`kvcalc gpus NAME` shows all of one, with its sources"]))
