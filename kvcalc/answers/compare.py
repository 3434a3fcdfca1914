"""`kvcalc compare`: variants of a model's attention."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from kvcalc.answers.answer import MAX_PASSES, Answer
from kvcalc.answers.deployments import (
    axes_of,
    deployment_of,
    deployments_of,
    remarks,
    split_sizes,
    typed_dimensions,
)
from kvcalc.errors import UserError, join_words
from kvcalc.question.deployment_options import DeploymentOptions
from kvcalc.question.options import Question, check_number
from kvcalc.question.size_options import DimensionOptions, SizeOptions

if TYPE_CHECKING:
    from kvcalc.report.charts.chart import Chart
    from kvcalc.timing.deployment import TimedDeployment


class VariantOptions(Question, frozen=True):
    """The attention variants to compare.

    Attributes:
        variants: Names, such as `none` (the model's own attention), `mha`, or `gqa:8` (8 KV heads).
            () for `mha`, `none`, `mqa`, `mla` and `dsa`, but without the last three if they equal
            the model's own attention. For a model with MHA, a `gqa` with 8, 4 or 2 KV heads
            replaces `none`, if possible.
    """

    variants: tuple[str, ...] = ()


def run(
    model: str = "",
    *,
    compared: VariantOptions,
    shapes: list[SizeOptions],
    deploying: list[DeploymentOptions],
    dimensions: DimensionOptions,
) -> Answer:
    """Compare KV cache, decode step time and quality of a model with other kinds of attention.

    The answer has a record for each deployment, variant, context and batch size. Bytes are of one
    GPU.

    Args:
        model: Name or file of the model; '' if `dimensions` are given.
        compared: The attention variants, such as MHA or GQA, that replace the model's attention.
        shapes: Each context and batch size at which the variants are compared.
        deploying: GPU, data types and parallelism of each deployment.
        dimensions: Number and widths of the layers, given instead of a model. Then the answer has
            no weights and no times.
    """
    typed = typed_dimensions(dimensions, [model] if model else [], deploying[0].set_)
    if typed:
        from kvcalc.library.load import load_gpu

        layers, gpu = typed.compared(), load_gpu("h100")  # no figure depends on the GPU
        deployments = [
            deployment_of(layers, gpu, option) for option in split_sizes(deploying, [layers])
        ]
    else:
        deployments = deployments_of([model], deploying)
    return compare_answer(deployments, compared.variants, shapes, is_typed=bool(typed))


def compare_answer(
    deployments: "Sequence[TimedDeployment]",
    names: Sequence[str],
    shapes: Sequence[SizeOptions],
    is_typed: bool = False,
) -> Answer:
    """Return a record for each deployment, attention variant, context and batch size.

    A record has the bytes of the KV cache per GPU and the seconds of a decode step. Reductions are
    values of the first variant ÷ values of the record's variant.

    Args:
        deployments: Deployments of one model.
        names: Names of variants such as `gqa:8`; empty for the model's default variants.
        shapes: Each context and batch size. All have the block size of the first.
        is_typed: Whether the user gave dimensions of layers instead of a model. Records then have
            no weights and no times.

    Raises:
        UserError: The deployments have different models.
    """
    from kvcalc.planning.comparison import compare_records, of_dimensions, usual_variants
    from kvcalc.planning.variants import variant
    from kvcalc.report.text.compare_text import compare_table
    from kvcalc.storage.ggml import mix_of

    model, block_size = deployments[0].model, shapes[0].block_size
    model.check_generates()
    usual = usual_variants(model)
    if any(mix_of(deployment.precision.quantization) for deployment in deployments):
        usual = usual.removesuffix(",dsa")  # the tensors of an indexer in GGUF are unknown
    names = names or usual.split(",")
    check_number("rows", MAX_PASSES, names, deployments, shapes)
    models = " ".join(dict.fromkeys(deployment.model.name for deployment in deployments))
    if models != model.name:
        raise UserError(
            "compare changes one model",
            f"`kvcalc size {models}` and `kvcalc latency {models}` take several",
        )
    variants = [(name.strip(), variant(model, name)) for name in names]
    contexts, batches = axes_of(shapes)
    compared = [
        record
        for deployment in deployments
        for record in compare_records(variants, deployment, contexts, batches, block_size)
    ]
    records = of_dimensions(compared) if is_typed else compared
    notes = remarks([model], max(contexts))
    plain = [name for name, other in variants if "window" not in other.model.attention]
    if "window" in model.attention and plain:
        notes.append(f"without the windows of {model.name}: {join_words(plain)}")
    if "MLA" in model.attention and "mha" in dict(variants):
        notes.append("the keys of mha are as wide as its values, without RoPE dimensions")

    def draw() -> "list[Chart]":
        from kvcalc.planning.sweeps import comparison_sweep
        from kvcalc.report.charts.comparison_plot import compare_chart

        sweep = comparison_sweep(deployments, variants, batches[0], max(contexts[-1], 131072))
        return compare_chart(deployments, records, sweep)

    def formulas() -> str:
        from kvcalc.report.explain import explain_size, explain_table

        texts = [explain_table(compare_table(deployments, records))]
        rows = product(deployments, variants, batches, contexts)
        for record, (deployment, (_, changed), batch_size, context) in zip(records, rows):
            shape = context, batch_size, changed.precision(deployment.precision), block_size
            texts.append(explain_size(record, changed.model, *shape, deployment.parallelism))
        return "\n".join(texts)

    return Answer(
        records,
        lambda: [compare_table(deployments, records)],
        draw,
        _formulas=formulas,
        _notes=notes,
    )
