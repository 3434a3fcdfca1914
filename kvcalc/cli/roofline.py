"""`kvcalc roofline`."""

from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import timed_gpus
from kvcalc.cli.common import MOST_PASSES, MOST_TABLES, check_number, remarks, say
from kvcalc.cli.groups import Deploying, Grid, Output, grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcalc.gpu.spec import Gpu
    from kvcalc.model.precision import Precision
    from kvcalc.timing.deployment import Deployment

    Timed = tuple[Deployment, list[dict[str, Any]]]


@grouped
def run(
    models: Annotated[
        list[str], typer.Argument(help=o.MODELS_HELP + " Without one: attention of every variant.", show_default=False)
    ] = [],  # noqa: B006
    *,
    gpu: o.Gpus = "h100",
    phase: Annotated[str, typer.Option("--phase", help="decode or prefill.")] = "decode",
    batch: Annotated[str, typer.Option("--batch", help="A mixed pass instead: 500+4x1@4k, a prompt and four decodes.")] = "",
    grid: Grid,
    deploying: Deploying,
    output: Output,
) -> None:
    """Where every operation lies."""
    if not models:
        _attention(timed_gpus(gpu, deploying.memory), grid, deploying.precisions.precisions(), output)
        return
    contexts, batches = grid.contexts, grid.batches
    deployments = deploying.deployments(models, gpu)
    tells = output.tells and not output.explain
    check_number("tables" if tells else "passes", MOST_TABLES if tells else MOST_PASSES, deployments, contexts, batches)
    passes = _passes(deployments, phase, batch, batches, contexts)
    remarks([d.model for d in deployments], passes[0][1][-1]["context"] if batch else max(contexts))
    if output.explain:
        _explained(deployments, phase, batch, batches, contexts)
        return
    if output.plot:
        from kvcalc.report.roof import roofline_chart

        gpus = {d.gpu.name: d.gpu for d in deployments}
        output.picture(roofline_chart([(f"{d.model.name} {r[0]['phase']}", r) for d, r in passes], [*gpus.values()]))
    if not output.printed([row for _, rows in passes for row in rows]):
        from kvcalc.report.passes import pass_tables

        for table in pass_tables(passes):
            output.show(table)


def _passes(deployments: "list[Deployment]", phase: str, mixed: str, batches: list[int], contexts: list[int]) -> "list[Timed]":
    """Each pass asked for with its records."""
    from kvcalc.capacity.memory_record import pass_with_memory
    from kvcalc.layers.batch import Batch
    from kvcalc.timing.records import mixed_records, roofline_records

    if mixed:
        batch = Batch.parse(mixed)
        return [(d, pass_with_memory(d, mixed_records(d, mixed), batch)) for d in deployments]
    passes = []
    for d, b, s in product(deployments, batches, contexts):
        records = roofline_records(d, phase, b, s)
        passes.append((d, pass_with_memory(d, records, Batch.of_phase(phase, s, b))))
    return passes


def _explained(deployments: "list[Deployment]", phase: str, mixed: str, batches: list[int], contexts: list[int]) -> None:
    from kvcalc.layers.batch import Batch
    from kvcalc.report.explain_pass import explain_roofline

    asked = [Batch.parse(mixed)] if mixed else [Batch.of_phase(phase, s, b) for b, s in product(batches, contexts)]
    for deployment, batch in product(deployments, asked):
        say(explain_roofline(deployment, batch, deployment.placed(batch)))


def _attention(gpus: "Sequence[Gpu]", grid: Grid, precisions: "list[Precision]", output: Output) -> None:
    """Without a model: where attention of every variant lies."""
    from kvcalc.planning.attention import attention_records
    from kvcalc.report.attention import attention_chart, attention_table

    contexts, batches = grid.contexts, grid.batches
    check_number("rows", MOST_PASSES, gpus, precisions, contexts, batches)
    records = [r for gpu, p in product(gpus, precisions) for r in attention_records(gpu, contexts, batches, p)]
    if output.plot:
        output.picture(attention_chart(gpus, contexts[0], batches[0]))
    if not output.printed(records):
        output.show(attention_table(records))
