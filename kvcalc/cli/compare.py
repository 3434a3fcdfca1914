"""`kvcalc compare`, with `--deployments` as options of `fit` or as command lines."""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kvcalc.answers.answer import Answer
from kvcalc.answers.compare import VariantOptions, compare_answer, sides_answer
from kvcalc.answers.deployments import (
    deployment_of,
    deployments_of,
    models_of,
    split_sizes,
    typed_dimensions,
)
from kvcalc.errors import UserError
from kvcalc.question.deployment_options import (
    USER_WORDS,
    DeploymentOptions,
    OneModel,
)
from kvcalc.question.options import Option, arguments_for, parameters_in, spelled
from kvcalc.question.size_options import DimensionOptions, SizeOptions

if TYPE_CHECKING:
    from kvcalc.planning.comparison import Side

FLAG = "--deployments"


def run(
    model: OneModel = "",
    *,
    compared: VariantOptions,
    sides: Annotated[
        list[str],
        Option(
            "Deployments to compare, as options of fit or command lines",
            FLAG,
            "SIDE",
            is_common=True,
        ),
    ] = [],  # noqa: B006
    users: Annotated[
        int,
        Option("Concurrent users, for the times of --deployments", called=USER_WORDS),
    ] = 0,
    shapes: list[SizeOptions],
    deploying: list[DeploymentOptions],
    dimensions: DimensionOptions,
) -> Answer:
    """Compare variants of a model's attention, or deployments."""
    if sides:
        return sides_answer([_side(text, model, deploying[0].gpu) for text in sides], users)
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


def spread(words: Sequence[str]) -> list[str]:
    """Return words in which `--deployments A B` is `--deployments A --deployments B`.

    Each word up to the next option is a side, and so is a word with blanks.
    """
    results: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word != FLAG:
            results.append(word)
            continue
        while (
            waiting
            and waiting[0] != FLAG
            and (" " in waiting[0] or not waiting[0].startswith("-"))
        ):
            results += [FLAG, waiting.pop(0)]
    return results


def _side(text: str, model: str, gpu: str) -> "Side":
    """Return the deployment of a text: options of `fit`, or an engine's command line.

    Args:
        model: The model, if the text begins with an option.
        gpu: The GPU, if the text does not name one.
    """
    from kvcalc.answers.fit import fit_points
    from kvcalc.capacity.command_line import is_command
    from kvcalc.planning.comparison import Side

    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"{text!r} has a quotation mark without its partner") from None
    if is_command(words):
        words = ["--gpu", gpu, "--", *words]
    else:
        own = [] if words and not words[0].startswith("-") else [model]
        if own == [""]:
            raise UserError(
                f"{text!r} names no model",
                hint="Begin with it, or give it before --deployments",
            )
        words = [*own, *([] if "--gpu" in words else ["--gpu", gpu]), *words]
    points, typed = fit_points(**_fit_arguments(text, words))
    if len(points) != 1:
        raise UserError(
            f"{text!r} is {len(points)} deployments",
            hint="Each side is one: no lists in it",
        )
    deployment, options = points[0]
    return Side(text, deployment, options, typed.typed_words_of(deployment))


def _fit_arguments(text: str, words: list[str]) -> Mapping[str, Any]:
    """Return the arguments of `fit_points` for words that are typed after `fit`.

    Raises:
        UserError: The parser refuses the words, or they request more than a deployment.
    """
    from typer.main import get_command

    from kvcalc.answers.fit import fit_points
    from kvcalc.cli.commands import build, typed_values
    from kvcalc.cli.help import parser_message
    from kvcalc.question.output_options import Output

    group: Any = get_command(build("fit"))
    try:
        context = group.commands["fit"].make_context("fit", words)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UserError(parser_message(error, "fit")) from None
    values = typed_values(context.params)
    deployment_options = {parameter.name for parameter in parameters_in(fit_points)}
    printing = {parameter.name for parameter in parameters_in(Output)}
    if more := [name for name in values if name not in deployment_options]:
        options = " and ".join(f"--{spelled(name)}" for name in more)
        hint = (
            "Options about printing go behind the sides"
            if printing & {*more}
            else "`kvcalc fit` takes it"
        )
        raise UserError(f"{text!r}: {options} is not part of a deployment", hint=hint)
    return arguments_for(fit_points, values)
