"""`kvcalc compare --deployments`: sides in the words of `fit`, or as engines' command lines."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.cli.common import note
from kvcalc.cli.groups import Output, arguments_of

if TYPE_CHECKING:
    from kvcalc.planning.before_after import Side

FLAG = "--deployments"


def spread(words: Sequence[str]) -> list[str]:
    """`--deployments A B` as `--deployments A --deployments B`: all words behind it but single options and what follows them."""
    found: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word != FLAG:
            found.append(word)
            continue
        while waiting and waiting[0] != FLAG and (" " in waiting[0] or not waiting[0].startswith("-")):
            found += [FLAG, waiting.pop(0)]
    return found


def run_deployments(texts: list[str], model: str, gpu: str, users: int, output: Output) -> None:
    """The sides beside each other, the first being before."""
    from kvcalc.errors import UserError
    from kvcalc.planning.before_after import compared

    if len(texts) < 2:
        raise UserError("--deployments compares two or more", hint='Write --deployments "MODEL --tp 2" "MODEL --tp 4"')
    sides = [_side(text, model, gpu) for text in texts]
    records, sentence, remark = compared(sides, users)
    if remark:
        note(remark)
    from kvcalc.report.before_after import before_after_chart, before_after_table

    if output.plot:
        output.picture(before_after_chart(records))
    if not output.printed(records):
        output.show(before_after_table(records, sentence))


def _side(text: str, model: str, gpu: str) -> "Side":
    """One text: options of `fit`, behind the model's name or without it, or an engine's command line."""
    from kvcalc.capacity.commands import is_command
    from kvcalc.capacity.record import Typed
    from kvcalc.cli.chosen import chosen_gpus, gpu_names
    from kvcalc.cli.fit import beside_words, points_of
    from kvcalc.errors import UserError
    from kvcalc.planning.before_after import Side

    try:
        words = shlex.split(text)
    except ValueError:
        raise UserError(f"{text!r} has a quotation mark without its partner") from None
    if is_command(words):
        words = ["--gpu", gpu, "--", *words]
    else:
        own = [] if words and not words[0].startswith("-") else [model]
        if own == [""]:
            raise UserError(f"{text!r} names no model", hint="Begin with it, or give it before --deployments")
        words = [*own, *([] if "--gpu" in words else ["--gpu", gpu]), *words]
    given = arguments_of("fit", words)
    _check_side(text, given)
    asked, set_, memory = given["asked"], given["set_"], given["memory"]
    models, formats, ranks = given["models"], given["formats"], given["ranks"]
    where = chosen_gpus(given["gpu"], memory), gpu_names(given["gpu"])
    placed = given["nodes"], given["inter_node_bandwidth"]
    points, typed, _ = points_of(models, where, asked, formats, set_, ranks, *placed)
    if len(points) != 1:
        raise UserError(f"{text!r} is {len(points)} deployments", hint="Each side is one: no lists in it")
    deployment, options = points[0]
    named = Typed(typed[deployment.model.name], typed[deployment.gpu.name], beside_words(set_, asked.from_log, memory))
    return Side(text, deployment, options, named)


def _check_side(text: str, given: dict[str, Any]) -> None:
    """Raise UserError where a side asks for more than a deployment: another answer of `fit`, or how it is shown."""
    from msgspec.structs import asdict

    from kvcalc.errors import UserError
    from kvcalc.library.words import spelled

    usual = asdict(type(given["output"])())
    shown = [name for name, value in asdict(given["output"]).items() if value != usual[name]]
    more = [name for name in ("lengths", "allocations", "matrix", "seed") if given[name]] + shown
    if more:
        options = " and ".join(f"--{spelled('format' if name == 'form' else name)}" for name in more)
        beside = "How answers are shown stands behind the sides" if shown else "`kvcalc fit` takes it"
        raise UserError(f"{text!r}: {options} is nothing of a deployment", hint=beside)
