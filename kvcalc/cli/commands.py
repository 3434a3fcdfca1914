"""The commands in the order of help, their parameters, and the application that parses them."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvcalc.errors import UserError
from kvcalc.question.options import (
    Parameter,
    Question,
    arguments_for,
    parameters_in,
    read_question,
)
from kvcalc.question.size_options import Output, Printing
from kvcalc.units import bytes_shown_in

if TYPE_CHECKING:
    import typer

# by command: its help, its examples, and the module and name of its function
ENTRIES = msgspec.json.decode(Path(__file__).with_name("commands.json").read_bytes())
COMMANDS = {name: entry["help"] for name, entry in ENTRIES.items()}
# Options about printing, if they are not `Output`. The last four print no records.
_PRINTING = {
    **dict.fromkeys(("diagnose", "validate", "models"), Printing),
    **dict.fromkeys(("plot", "report", "schema", "mcp"), Question),
}
# Options of `kvcalc` itself.
FLAGS = {
    "--install-completion": "Install completion for bash, zsh or fish; default: this shell",
    "--show-completion": "Print the completion script of a shell",
    "--version": "Print the version",
    "--help": "Show this message",
    "--help-all": "Show every option of a command",
}


def function_of(command: str) -> Callable[..., Any]:
    """Return the Python function of a command, such as "fit". Calling it returns the answer.

    The function's module is imported only now, so that `kvcalc` starts fast: it needs only the
    modules of one command.
    """
    module, _, name = ENTRIES[command]["run"].rpartition(".")
    run: Callable[..., Any] = getattr(import_module(f"kvcalc.{module}"), name)
    return run


def parameters_of(command: str) -> list[Parameter]:
    """Return the visible arguments and options of a command, for help and completion.

    Options that help hides are left out.

    Args:
        command: Name of the command, such as "fit".
    """
    return [p for p in _all_parameters(command) if not p.option.is_hidden]


def _all_parameters(command: str) -> list[Parameter]:
    return [
        *parameters_in(function_of(command)),
        *parameters_in(_PRINTING.get(command, Output)),
    ]


def build(words: Sequence[str]) -> "typer.Typer":
    """Return the typer application that parses a command line.

    It starts fast, because it has only the command and the options that the words name. Without a
    known command, it has all commands.

    Args:
        words: Words of the command line, at least one. The first is the command.
    """
    import typer

    app = typer.Typer(
        name="kvcalc",
        add_completion=False,  # `completion` answers faster
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)
    for name in words[:1] if words[0] in COMMANDS else COMMANDS:
        app.command(name, help=COMMANDS[name])(_parsed(name, words))
    return app


def _parsed(command: str, words: Sequence[str]) -> Any:
    """Return a function whose parameters are the arguments of a command, and those of its options
    that the words of the command line name. They are declared for typer."""
    import typer

    parameters = _all_parameters(command)
    declared, line = [], " ".join(words)
    for parameter in parameters:
        # a short option may be joined with another, as in `-vq`
        is_named = any(len(name) == 2 or name in line for name in parameter.names)
        if not (parameter.is_argument or is_named):
            continue
        kind = str if parameter.is_text else parameter.type
        default = parameter.default
        if not (parameter.is_list or parameter.is_required):
            kind, default = kind | None, None
        info = (
            typer.Argument(metavar=parameter.placeholder)
            if parameter.is_argument
            else typer.Option(*parameter.declarations)
        )
        declared.append(
            inspect.Parameter(
                parameter.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, info],
            )
        )

    def run(**values: Any) -> int:
        typed = {name: value for name, value in values.items() if value not in (None, [])}
        _check_outputs(parameters, typed)
        output = read_question(_PRINTING.get(command, Output), typed)
        compute = function_of(command)
        arguments = arguments_for(compute, typed)
        if not isinstance(output, Printing):
            compute(**arguments)
            return 0
        from kvcalc.cli.printing import print_answer

        if isinstance(output, Output) and output.plot:
            from kvcalc.report.charts.drawing import check_picture

            check_picture(output.plot, output.style)
        with bytes_shown_in(output.units):
            try:
                answer = compute(**arguments)
            except UserError as error:
                arguments = arguments_for(compute, _with_preset(typed, error, parameters))
                answer = compute(**arguments)
            return print_answer(answer, output)

    function: Any = run
    function.__signature__ = inspect.Signature(declared)
    function.__annotations__ = {p.name: p.annotation for p in declared}
    return function


def _with_preset(
    typed: dict[str, Any], error: UserError, parameters: list[Parameter]
) -> dict[str, Any]:
    """Return typed values with the preset and the format that the name of a checkpoint means.

    Raises:
        UserError: The error, if there is no such preset, or if the format is typed or the command
            has no option for it.
    """
    if not error.read_as:
        raise error
    name, same = error.read_as
    places = {key: value for key, value in typed.items() if value in (name, [name])}
    stored = same.quantization or same.dtype
    formats = {"quantization" if same.quantization else "dtype": stored or "auto"}
    if not (places and formats.keys() <= {p.name for p in parameters} - typed.keys()):
        raise error
    print(f"note: {error.what}; read as {same.name} {stored}".rstrip(), file=sys.stderr)
    names = {k: [same.name] if isinstance(v, list) else same.name for k, v in places.items()}
    return typed | formats | names


def _check_outputs(parameters: list[Parameter], typed: Mapping[str, Any]) -> None:
    """Raise UserError if the command would overwrite a file that it reads."""
    words = set()  # that may name a file, whole and as items of a list
    for parameter in parameters:
        if not parameter.option.is_output and parameter.option.takes not in ("NAME", "TEXT"):
            value = typed.get(parameter.name, [])
            for word in map(str, value if isinstance(value, list) else [value]):
                words |= {word, *word.split(",")}
    for parameter in parameters:
        target = str(typed.get(parameter.name, ""))
        is_target = parameter.option.is_output and target
        if is_target and any(_is_same_file(target, word) for word in words):
            raise UserError("the command reads this file", "Write to another file", target)


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.isfile(path) and os.path.samefile(path, other)  # noqa: PTH113, PTH121
    except (OSError, ValueError):
        return False
