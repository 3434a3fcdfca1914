"""`kvcalc compare --deployments`: sides in the words of `fit`, or as engines' command lines.

`kvcalc compare`.
"""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import ContextOptions, Deploying, Output
from kvcalc.cli.options import MAX_PASSES, Option, check_number, note, remarks
from kvcalc.cli.setup import DimensionOptions, alone
from kvcalc.records import Settings

if TYPE_CHECKING:
    from kvcalc.planning.comparison import Side


FLAG = "--deployments"


def spread(words: Sequence[str]) -> list[str]:
    """`--deployments A B` as `--deployments A --deployments B`: all words behind it but single
    options and what follows them."""
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


def run_deployments(texts: list[str], model: str, gpu: str, users: int, output: Output) -> None:
    """The sides beside each other, the first being before."""
    from kvcalc.errors import UserError
    from kvcalc.planning.comparison import compared

    if len(texts) < 2:
        raise UserError(
            "--deployments compares two or more",
            hint='Write --deployments "MODEL --tp 2" "MODEL --tp 4"',
        )
    sides = [_side(text, model, gpu) for text in texts]
    records, sentence, remark = compared(sides, users)
    if remark:
        note(remark)
    from kvcalc.report.text.compare_text import before_after_chart, before_after_table

    if output.plot:
        output.picture(before_after_chart(records))
    if not output.printed(records):
        output.show(before_after_table(records, sentence))


def _side(text: str, model: str, gpu: str) -> "Side":
    """One text: options of `fit`, behind the model's name or without it, or an engine's command
    line."""
    from kvcalc.capacity.command_line import is_command
    from kvcalc.capacity.fit_records import Typed
    from kvcalc.cli.fit import beside_words, points_of
    from kvcalc.cli.option_groups import chosen_gpus, gpu_words
    from kvcalc.errors import UserError
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
    given = _fit_arguments(words)
    _check_side(text, given)
    requested, set_, memory = given["asked"], given["set_"], given["memory"]
    models, formats, ranks = given["models"], given["formats"], given["ranks"]
    where = chosen_gpus(given["gpu"], memory), gpu_words(given["gpu"])
    placed = given["nodes"], given["inter_node_bandwidth"]
    points, typed, _ = points_of(models, where, requested, formats, set_, ranks, *placed)
    if len(points) != 1:
        raise UserError(
            f"{text!r} is {len(points)} deployments",
            hint="Each side is one: no lists in it",
        )
    deployment, options = points[0]
    named = Typed(
        typed[deployment.model.name],
        typed[deployment.gpu.name],
        beside_words(set_, requested.from_log, memory),
    )
    return Side(text, deployment, options, named)


def _fit_arguments(words: list[str]) -> Settings:
    """Return the arguments of `fit` for words that are typed behind its name.

    Raises:
        UserError: The parser refuses the words.
    """
    from typer.main import get_command

    from kvcalc.cli.commands import build, function_of
    from kvcalc.cli.help import parser_message
    from kvcalc.errors import UserError

    group: Any = get_command(build("fit"))
    try:
        context = group.commands["fit"].make_context("fit", words)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UserError(parser_message(error, "fit")) from None
    return o.arguments_for(function_of("fit"), context.params)


def _check_side(text: str, given: Settings) -> None:
    """Raise UserError where a side asks for more than a deployment: another answer of `fit`, or how
    it is shown."""
    from msgspec.structs import asdict

    from kvcalc.errors import UserError
    from kvcalc.library.choices import spelled

    usual = asdict(type(given["output"])())
    shown = [name for name, value in asdict(given["output"]).items() if value != usual[name]]
    more = [
        name for name in ("lengths", "allocations", "matrix", "seed") if given[name]
    ] + shown
    if more:
        options = " and ".join(
            f"--{spelled('format' if name == 'form' else name)}" for name in more
        )
        beside = (
            "How answers are shown stands behind the sides"
            if shown
            else "`kvcalc fit` takes it"
        )
        raise UserError(f"{text!r}: {options} is nothing of a deployment", hint=beside)


VARIANTS = (
    "none",
    "mha",
    "mqa",
    "gqa:8",
    "mla",
    "dsa",
    "window:4096",
    "evict:4096",
    "hybrid:5/window:4096",
    "cla:2",
)

EXAMPLE = "kvcalc compare llama-7b --variants mha,gqa:8"


def run(
    model: o.OneModel = "",
    *,
    variants: Annotated[
        str,
        Option(
            "Attention variants: mha, gqa:8, mqa, mla, window:4096, cla:2; a list",
            takes="LIST",
            is_common=True,
            words=VARIANTS,
            called="attention variant",
        ),
    ] = "",
    sides: Annotated[
        list[str],
        Option(
            "Deployments to compare, as options of fit or command lines",
            "--deployments",
            "SIDE",
            is_common=True,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    users: Annotated[
        int,
        Option("Concurrent users, for the times of --deployments", called=o.USER_WORDS),
    ] = 0,
    gpu: o.Gpus = "h100",
    grid: ContextOptions,
    deploying: Deploying,
    block_size: o.BlockSize = 16,
    typed: DimensionOptions,
    output: Output,
) -> None:
    """Compare variants of a model's attention, or deployments."""
    from kvcalc.errors import UserError

    if sides:
        run_deployments(sides, model, gpu, users, output)
        return
    if not (model or typed.dimensions().has_values()):
        raise UserError(
            "compare takes a model, or --layers, --heads, --kv-heads and --head-dim",
            hint=EXAMPLE,
        )
    from kvcalc.planning.comparison import (
        compare_records,
        of_dimensions,
        usual_variants,
    )
    from kvcalc.planning.variants import variant

    contexts, batches = grid.contexts, grid.batches
    dimensions = alone([model] if model else [], typed.dimensions(), deploying.set_)
    deployments = (
        deploying.of(dimensions.compared())
        if dimensions
        else deploying.deployments([model], gpu)
    )
    names = (variants or usual_variants(deployments[0].model)).split(",")
    check_number("rows", MAX_PASSES, names, deployments, contexts, batches)
    changed = deployments[0].model
    if any(d.model != changed for d in deployments):
        raise UserError(
            "compare changes one model",
            hint="`kvcalc size A B` and `kvcalc latency A B` take several",
        )
    chosen = [(name.strip(), variant(changed, name)) for name in names]
    compared = [
        r
        for d in deployments
        for r in compare_records(chosen, d, contexts, batches, block_size)
    ]
    records = of_dimensions(compared) if dimensions else compared
    remarks([changed], max(contexts))
    if output.plot:
        from kvcalc.planning.sweeps import comparison_sweep
        from kvcalc.report.charts.comparison_plot import compare_chart

        load, last = (batches[0], contexts[0]), max(contexts[-1], 131072)
        sweep = comparison_sweep(deployments, chosen, load, last)
        output.picture(compare_chart(deployments, records, sweep))
    if not output.printed(records):
        from kvcalc.report.text.compare_text import compare_tables

        output.show(*compare_tables(deployments, records, block_size))
