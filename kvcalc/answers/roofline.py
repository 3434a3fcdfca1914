"""`kvcalc roofline`."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from kvcalc.answers.answer import MAX_PASSES, Answer
from kvcalc.answers.deployments import axes_of, deployments_of, gpus_of, precision_of, remarks
from kvcalc.question.deployment_options import DeploymentOptions
from kvcalc.question.options import Question, check_number
from kvcalc.question.size_options import ContextOptions

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.model.precision import Precision
    from kvcalc.report.charts.chart import Chart
    from kvcalc.timing.deployment import TimedDeployment


class PassOptions(Question, frozen=True):
    """The forward pass that `roofline` shows.

    Attributes:
        phase: decode or prefill.
        batch: A mixed pass instead of `phase`, such as `500+4x1@4k`: one prompt of 500 tokens, and
            four sequences that decode one token each after 4,096 cached tokens. '' for a pass of
            one phase.
        head: Positions for which the LM head is computed: last or all.
    """

    phase: str = "decode"
    batch: str = ""
    head: str = "last"


def run(
    models: list[str] = [],  # noqa: B006 (no function changes the list)
    *,
    pass_: PassOptions,
    shapes: list[ContextOptions],
    deploying: list[DeploymentOptions],
) -> Answer:
    """Return FLOPs, bytes, FLOP per byte and bound of each operator in a forward pass, on one GPU.

    The answer has a record per operator, then the total of the pass. The bound is compute, memory
    or network. With pipeline parallelism, values are sums over one GPU of each stage.

    Args:
        models: Models, each word a name or a comma-separated list. If empty, the answer compares
            the attention of one layer instead: MHA, GQA, MQA, MLA and DSA, on each GPU.
        pass_: Phase of the forward pass, or its mixed batch.
        shapes: Each context and batch size for which a pass is computed. A mixed batch replaces
            them.
        deploying: GPU, data types, parallelism and engine of each deployment.
    """
    if not models:
        precisions = list(dict.fromkeys(map(precision_of, deploying)))
        return _attention_answer(gpus_of(deploying[0]), shapes, precisions)
    return roofline_answer(deployments_of(models, deploying), pass_, shapes)


def roofline_answer(
    deployments: "Sequence[TimedDeployment]",
    pass_: PassOptions,
    shapes: Sequence[ContextOptions],
) -> Answer:
    """Return FLOPs, bytes and seconds of each operator in a forward pass, and of the whole pass.

    Each deployment, context and batch size has a pass. Values are sums over one GPU of each stage.

    Args:
        deployments: The deployments, each a model on one replica of GPUs.
        pass_: Phase or mixed batch of the pass, and the positions of the LM head.
        shapes: Contexts and batch sizes. A mixed batch replaces them.
    """
    from kvcalc.capacity.fit_records import pass_with_memory
    from kvcalc.layers.batch import Batch
    from kvcalc.report.text.roofline_text import pass_tables
    from kvcalc.timing.deployment import mixed_records, roofline_records

    phase, all_positions = pass_.phase, pass_.head == "all"
    passes = []
    shapes = shapes[:1] if pass_.batch else shapes
    check_number("passes", MAX_PASSES, deployments, shapes)
    for deployment, shape in product(deployments, shapes):
        if pass_.batch:
            batch = Batch.parse(pass_.batch)
            records = mixed_records(deployment, pass_.batch, all_positions)
        else:
            if phase == "decode":
                deployment.model.check_generates()
            size = shape.batch_size, shape.context
            records = roofline_records(deployment, phase, *size, all_positions)
            batch = Batch.of_phase(phase, shape.context, shape.batch_size)
        passes.append((deployment, batch, pass_with_memory(deployment, records, batch)))
    longest = max(records[-1]["context"] for *_, records in passes)

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.roofline_plot import roofline_chart

        gpus = [deployment.gpu for deployment in deployments]
        return roofline_chart([records for *_, records in passes], gpus)

    def formulas() -> str:
        from kvcalc.report.explain import explain_roofline

        return "\n".join(
            explain_roofline(
                deployment, batch, deployment.operator_bounds(batch, all_positions)
            )
            for deployment, batch, _ in passes
        )

    return Answer(
        [record for *_, records in passes for record in records],
        lambda: list(pass_tables(passes)),
        draw,
        -1,
        _formulas=formulas,
        _notes=remarks([deployment.model for deployment in deployments], longest),
    )


def _attention_answer(
    gpus: "Sequence[Gpu]", shapes: Sequence[ContextOptions], precisions: "list[Precision]"
) -> Answer:
    """Return the roofline of the attention of every variant, without a model."""
    from kvcalc.planning.comparison import SHAPE, attention_records
    from kvcalc.report.text.roofline_text import attention_table

    check_number("rows", MAX_PASSES, gpus, precisions, shapes)
    contexts, batches = axes_of(shapes)
    records = [
        record
        for gpu, precision in product(gpus, precisions)
        for record in attention_records(gpu, contexts, batches, precision)
    ]

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.roofline_plot import attention_chart

        first = attention_records(gpus[0], contexts[:1], batches[:1], precisions[0])
        return [attention_chart(first, gpus, SHAPE)]

    return Answer(records, lambda: [attention_table(records)], draw)
