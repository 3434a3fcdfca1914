"""`kvcalc compare`."""

from kvcalc.answers.answer import Answer
from kvcalc.answers.compare import VariantOptions, compare_answer
from kvcalc.answers.deployments import (
    deployment_of,
    deployments_of,
    models_of,
    split_sizes,
    typed_dimensions,
)
from kvcalc.errors import UserError
from kvcalc.question.deployment_options import (
    DeploymentOptions,
    OneModel,
)
from kvcalc.question.size_options import DimensionOptions, SizeOptions


def run(
    model: OneModel = "",
    *,
    compared: VariantOptions,
    shapes: list[SizeOptions],
    deploying: list[DeploymentOptions],
    dimensions: DimensionOptions,
) -> Answer:
    """Compare variants of a model's attention."""
    changes = deploying[0].set_
    if not model and dimensions == DimensionOptions():
        raise UserError(
            "compare takes a model, or --layers, --heads, --kv-heads and --head-dim",
            hint="kvcalc compare llama-7b --variants mha,gqa:8",
        )
    typed = typed_dimensions(dimensions, [model] if model else [], changes)
    if typed:
        from kvcalc.library.load import load_gpu

        layers, gpu = typed.compared(), load_gpu("h100")  # no figure depends on the GPU
        deployments = [
            deployment_of(layers, gpu, option) for option in split_sizes(deploying, [layers])
        ]
    else:
        deployments = deployments_of(models_of([model], changes), deploying)
    return compare_answer(deployments, compared.variants, shapes, is_typed=bool(typed))
