"""`kvcalc compare`."""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_PASSES, check_number, remarks
from kvcalc.cli.groups import Deploying, Grid, Output, chosen_gpu, chosen_model, grouped

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
    from kvcalc.planning.comparison import DEFAULT, compare_records
    from kvcalc.planning.variants import variant

    names, contexts, batches = (variants or DEFAULT).split(","), grid.contexts, grid.batches
    check_number("rows", MOST_PASSES, names, contexts, batches)
    (deployment,) = deploying.on(chosen_model(model, deploying.set_), [chosen_gpu(gpu)])
    chosen = [(name.strip(), variant(deployment.model, name)) for name in names]
    records = compare_records(chosen, deployment, contexts, batches, block_size)
    remarks(deployment.model, max(contexts))
    if output.plot:
        from kvcalc.report.comparison import compare_chart

        output.picture(compare_chart(deployment, chosen, batches[0], max(contexts[-1], 131072)))
    if not output.printed(records):
        from kvcalc.report.comparison import compare_tables

        output.show(*compare_tables(deployment, records, block_size))
