"""`kvcalc compare`."""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_PASSES, check_number, remarks
from kvcalc.cli.groups import Deploying, Grid, Output, grouped

VARIANTS = (
    "Attention to swap in, the first being the reference: none, mha, mqa, gqa:8, mla:512+64, dsa:512+64+128@2048, "
    "window:4096, hybrid:5/window:4096, cla:2, evict:4096; / stacks them."
)


@grouped
def run(
    model: o.OneModel,
    *,
    variants: Annotated[str, typer.Option("--variants", help=VARIANTS)] = "",
    gpu: o.Gpus = "h100",
    grid: Grid,
    deploying: Deploying,
    block_size: o.BlockSize = 16,
    output: Output,
) -> None:
    """The same model with other attention."""
    from kvcalc.errors import UserError
    from kvcalc.planning.comparison import compare_records, usual_variants
    from kvcalc.planning.variants import variant

    contexts, batches = grid.contexts, grid.batches
    deployments = deploying.deployments([model], gpu)
    names = (variants or usual_variants(deployments[0].model)).split(",")
    check_number("rows", MOST_PASSES, names, deployments, contexts, batches)
    changed = deployments[0].model
    if any(d.model != changed for d in deployments):
        raise UserError("compare changes one model", hint="`kvcalc size A B` and `kvcalc latency A B` take several")
    chosen = [(name.strip(), variant(changed, name)) for name in names]
    records = [r for d in deployments for r in compare_records(chosen, d, contexts, batches, block_size)]
    remarks([changed], max(contexts))
    if output.plot:
        from kvcalc.report.comparison import compare_chart

        output.picture(compare_chart(deployments[0], chosen, records, max(contexts[-1], 131072)))
    if not output.printed(records):
        from kvcalc.report.comparison import compare_tables

        output.show(*compare_tables(deployments, records, block_size))
