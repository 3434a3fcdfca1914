"""The commands in the order of help, their parameters, and the application that parses them."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from kvcalc.cli.options import Parameter, arguments_for, parameters_in
from kvcalc.errors import UserError
from kvcalc.units import bytes_shown_in

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "size": "Compute KV cache size and compare it with the weights.",
    "compare": "Compare variants of a model's attention, or deployments.",
    "roofline": "Show FLOPs, bytes, intensity and bound of each operator.",
    "latency": "Predict TTFT, TPOT and end-to-end time of one request.",
    "serve": "Simulate a server under load.",
    "plan": "Find the smallest deployment that meets your targets.",
    "fit": "Compute how many users and tokens fit on the GPUs.",
    "diagnose": "Explain the memory of an engine from its start-up log.",
    "measure": "Time the layers on this machine and compare predictions.",
    "calibrate": "Fit the time models to measured rows.",
    "validate": "Compare predictions with measured rows.",
    "plot": "Draw a standard figure for slides.",
    "report": "Write one self-contained HTML page about a deployment.",
    "models": "List model presets, or show one in full.",
    "gpus": "List GPU presets, or show one in full.",
}
# Commands that share a file with another command: file and function.
_PLACES = {
    "validate": ("calibrate", "run_validate"),
    "plot": ("pictures", "run_plot"),
    "report": ("pictures", "run_report"),
    "models": ("catalogue", "run_models"),
    "gpus": ("catalogue", "run_gpus"),
}
# Options of `kvcalc` itself.
FLAGS = {
    "--install-completion": "Install completion for bash, zsh or fish; default: this shell",
    "--show-completion": "Print the completion script of a shell",
    "--version": "Print the version",
    "--help": "Show this message",
    "--help-all": "Show every option of a command",
}


class Done(NamedTuple):
    """The exit status of a command that returned."""

    status: int


def function_of(command: str) -> Callable[..., int | None]:
    """Return the function of a command, importing its file."""
    module, function = _PLACES.get(command, (command, "run"))
    run: Callable[..., int | None] = getattr(import_module(f"kvcalc.cli.{module}"), function)
    return run


def parameters_of(command: str) -> list[Parameter]:
    """Return the arguments and options of a command, without hidden options."""
    parameters = parameters_in(function_of(command))
    return [parameter for parameter in parameters if not parameter.option.is_hidden]


def build(only: str = "") -> "typer.Typer":
    """Return the application with all commands, or with one command because that starts faster."""
    import typer

    app = typer.Typer(
        name="kvcalc",
        add_completion=False,  # `completion` answers faster
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        result_callback=lambda status, **_: Done(status or 0),
    )
    flags = [name for name in FLAGS if "help" not in name]
    declared = [_declared(name, bool, False, typer.Option(name)) for name in flags]
    app.callback()(_with_signature(lambda **_: None, declared))
    for name in [only] if only in COMMANDS else COMMANDS:
        app.command(name, help=COMMANDS[name])(_parsed(function_of(name)))
    return app


def _parsed(run: Callable[..., Any]) -> Any:
    """Return a function whose parameters are the options of `run`, declared for typer."""
    import typer

    parameters = list(parameters_in(run))
    declared = []
    for parameter in parameters:
        option = parameter.option
        info = (
            typer.Argument(metavar=parameter.placeholder)
            if parameter.is_argument
            else typer.Option(*parameter.declarations, min=option.min, max=option.max)
        )
        declared.append(_declared(parameter.name, parameter.type, parameter.default, info))

    def command(**values: Any) -> Any:
        _check_outputs(parameters, values)
        with bytes_shown_in(values.get("units", "gib")):
            return run(**arguments_for(run, values))

    return _with_signature(command, declared)


def _declared(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    identifier = name.strip("-").replace("-", "_")
    annotation = Annotated[kind, info]
    return inspect.Parameter(
        identifier,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=annotation,
    )


def _with_signature(run: Any, parameters: list[inspect.Parameter]) -> Any:
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _check_outputs(parameters: list[Parameter], values: Mapping[str, Any]) -> None:
    """Raise UserError if the command would overwrite a file that it reads."""
    texts = [p for p in parameters if p.option.takes not in ("NAME", "TEXT")]
    read = [word for p in texts if not p.option.is_output for word in _words(values[p.name])]
    for parameter in parameters:
        target = values[parameter.name]
        if parameter.option.is_output and any(_is_same_file(target, word) for word in read):
            raise UserError("the command reads this file", target, "Write to another file")


def _words(value: Any) -> Iterable[str]:
    """Yield each word that may name a file, whole and as the items of a list."""
    for word in value if isinstance(value, list) else [value]:
        text = str(word)
        yield from {text, *text.split(",")}


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.isfile(one) and os.path.samefile(one, other)  # noqa: PTH113, PTH121
    except (OSError, ValueError):
        return False
