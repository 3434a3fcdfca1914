"""`kvcalc roofline`."""

from itertools import product
from typing import TYPE_CHECKING, Annotated

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import ContextOptions, Deploying, Output, timed_gpus
from kvcalc.cli.options import (
    MAX_PASSES,
    MAX_TABLES,
    Argument,
    Option,
    check_number,
    remarks,
    say,
)
from kvcalc.records import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcalc.gpu.gpu import Gpu
    from kvcalc.model.precision import Precision
    from kvcalc.timing.deployment import TimedDeployment

    Timed = tuple[TimedDeployment, list[Settings]]


def run(
    models: Annotated[
        list[str],
        Argument(
            "Preset, file or Hub name; without it, attention of every variant",
            takes="MODEL…",
            words=o.model_names,
        ),
    ] = [],  # noqa: B006
    *,
    gpu: o.Gpus = "h100",
    phase: Annotated[
        str,
        Option("Phase: decode or prefill", is_common=True, words=("decode", "prefill")),
    ] = "decode",
    batch: Annotated[
        str,
        Option(
            "Mixed pass: 500+4x1@4k is one prompt and four decodes",
            takes="PASS",
            panel="Workload",
        ),
    ] = "",
    grid: ContextOptions,
    deploying: Deploying,
    output: Output,
) -> None:
    """Show FLOPs, bytes, intensity and bound of each operator."""
    if not models:
        _attention(
            timed_gpus(gpu, deploying.memory),
            grid,
            deploying.precisions.precisions(),
            output,
        )
        return
    contexts, batches = grid.contexts, grid.batches
    deployments = deploying.deployments(models, gpu)
    tells = output.tells and not output.explain
    check_number(
        "tables" if tells else "passes",
        MAX_TABLES if tells else MAX_PASSES,
        deployments,
        contexts,
        batches,
    )
    passes = _passes(deployments, phase, batch, batches, contexts)
    remarks(
        [d.model for d in deployments],
        passes[0][1][-1]["context"] if batch else max(contexts),
    )
    if output.explain:
        _explained(deployments, phase, batch, batches, contexts)
        return
    if output.plot:
        from kvcalc.report.charts.roofline_plot import roofline_chart

        gpus = {d.gpu.name: d.gpu for d in deployments}
        output.picture(roofline_chart([rows for _, rows in passes], [*gpus.values()]))
    if not output.printed([row for _, rows in passes for row in rows]):
        from kvcalc.report.text.roofline_text import pass_tables

        for table in pass_tables(passes):
            output.show(table)


def _passes(
    deployments: "list[TimedDeployment]",
    phase: str,
    mixed: str,
    batches: list[int],
    contexts: list[int],
) -> "list[Timed]":
    """Each pass asked for with its records."""
    from kvcalc.capacity.fit_records import pass_with_memory
    from kvcalc.layers.batch import Batch
    from kvcalc.timing.operator_times import mixed_records, roofline_records

    if mixed:
        batch = Batch.parse(mixed)
        return [(d, pass_with_memory(d, mixed_records(d, mixed), batch)) for d in deployments]
    passes = []
    for d, b, s in product(deployments, batches, contexts):
        records = roofline_records(d, phase, b, s)
        passes.append((d, pass_with_memory(d, records, Batch.of_phase(phase, s, b))))
    return passes


def _explained(
    deployments: "list[TimedDeployment]",
    phase: str,
    mixed: str,
    batches: list[int],
    contexts: list[int],
) -> None:
    from kvcalc.layers.batch import Batch
    from kvcalc.report.explain_sums import explain_roofline

    requested = (
        [Batch.parse(mixed)]
        if mixed
        else [Batch.of_phase(phase, s, b) for b, s in product(batches, contexts)]
    )
    for deployment, batch in product(deployments, requested):
        say(explain_roofline(deployment, batch, deployment.placed(batch)))


def _attention(
    gpus: "Sequence[Gpu]",
    grid: ContextOptions,
    precisions: "list[Precision]",
    output: Output,
) -> None:
    """Without a model: where attention of every variant lies."""
    from kvcalc.planning.comparison import SHAPE, attention_records
    from kvcalc.planning.sweeps import attention_sweep
    from kvcalc.report.charts.roofline_plot import attention_chart
    from kvcalc.report.text.roofline_text import attention_table

    contexts, batches = grid.contexts, grid.batches
    check_number("rows", MAX_PASSES, gpus, precisions, contexts, batches)
    records = [
        r
        for gpu, p in product(gpus, precisions)
        for r in attention_records(gpu, contexts, batches, p)
    ]
    if output.plot:
        first = attention_records(gpus[0], contexts[:1], batches[:1], precisions[0])
        sweep = attention_sweep(gpus[0], batches[0], precisions[0])
        output.picture(attention_chart(first, sweep, gpus, SHAPE))
    if not output.printed(records):
        output.show(attention_table(records))
