"""`kvcalc compare`."""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_PASSES, check_number, remarks
from kvcalc.cli.dimensions import DimensionOptions, alone
from kvcalc.cli.groups import Deploying, Grid, Output, grouped

VARIANTS = (
    "Attention to swap in, the first being the reference: none, mha, mqa, gqa:8, mla:512+64, dsa:512+64+128@2048, "
    "window:4096, hybrid:5/window:4096, cla:2, evict:4096; / stacks them."
)

EXAMPLE = "kvcalc compare llama-7b --variants mha,gqa:8"


@grouped
def run(
    model: Annotated[str, typer.Argument(help=o.MODEL_HELP, show_default=False)] = "",
    *,
    sides: Annotated[
        list[str],
        typer.Option("--deployments", help="Two or more, in fit's words or as command lines.", show_default=False),
    ] = [],  # noqa: B006 (typer copies it)
    users: Annotated[int, typer.Option("--users", help="At once, for the times of --deployments.", show_default=False)] = 0,
    variants: Annotated[str, typer.Option("--variants", help=VARIANTS)] = "",
    gpu: o.Gpus = "h100",
    grid: Grid,
    deploying: Deploying,
    block_size: o.BlockSize = 16,
    typed: DimensionOptions,
    output: Output,
) -> None:
    """The same model with other attention."""
    from kvcalc.errors import UserError

    if sides:
        from kvcalc.cli.compare_deployments import run_deployments

        run_deployments(sides, model, gpu, users, output)
        return
    if not (model or typed.dimensions().given()):
        raise UserError("compare takes a model, or --layers, --heads, --kv-heads and --head-dim", hint=EXAMPLE)
    from kvcalc.planning.comparison import compare_records, of_dimensions, usual_variants
    from kvcalc.planning.variants import variant

    contexts, batches = grid.contexts, grid.batches
    dimensions = alone([model] if model else [], typed.dimensions(), deploying.set_)
    deployments = deploying.of(dimensions.compared()) if dimensions else deploying.deployments([model], gpu)
    names = (variants or usual_variants(deployments[0].model)).split(",")
    check_number("rows", MOST_PASSES, names, deployments, contexts, batches)
    changed = deployments[0].model
    if any(d.model != changed for d in deployments):
        raise UserError("compare changes one model", hint="`kvcalc size A B` and `kvcalc latency A B` take several")
    chosen = [(name.strip(), variant(changed, name)) for name in names]
    records = [r for d in deployments for r in compare_records(chosen, d, contexts, batches, block_size)]
    records = of_dimensions(records) if dimensions else records
    remarks([changed], max(contexts))
    if output.plot:
        from kvcalc.report.figures_compare import compare_chart

        output.picture(compare_chart(deployments, chosen, records, max(contexts[-1], 131072)))
    if not output.printed(records):
        from kvcalc.report.comparison import compare_tables

        output.show(*compare_tables(deployments, records, block_size))
