"""The commands: their names in the order of help, and the application that holds them."""

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

COMMANDS = {
    "size": "How big is the cache, beside the weights.",
    "compare": "The same model with other attention.",
    "roofline": "Where every operation lies: FLOPs, bytes, intensity, bound.",
    "latency": "One request: time to first token, per token, end to end; energy with --wide.",
    "serve": "A server under load, simulated.",
    "plan": "What do I need, and what is the best of it.",
    "fit": "What fits on these GPUs, and what an engine really allocates.",
    "diagnose": "A start-up log beside the prediction: where each GiB went, and what to change.",
    "measure": "The real layers on this machine, beside the prediction.",
    "calibrate": "Fits the time laws to measured rows.",
    "validate": "The model against measured rows.",
    "plot": "The standing figures, for slides.",
    "report": "One self-contained page to send.",
    "models": "What model presets there are, and one in full.",
    "gpus": "What GPU presets there are, and one in full.",
}


class Done(NamedTuple):
    """How a command ended by itself: what it returned, or 0."""

    status: int


def build(only: str = "") -> typer.Typer:
    """The application with all commands, or with the one that is about to run: the others cost start-up time."""
    app = typer.Typer(
        name="kvcalc",
        add_completion=False,  # `completion` answers sooner
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        result_callback=lambda status, **_: Done(status or 0),
    )
    app.callback()(_version)
    for name in [only] if only in COMMANDS else COMMANDS:
        app.command(name, help=COMMANDS[name])(import_module(f"kvcalc.cli.{name}").run)
    return app


def parameters_of(command: str) -> list[Any]:
    """Return the parameters of a command as its parser has them, without hidden options."""
    from typer.main import get_command

    group: Any = get_command(build(command))
    parameters: list[Any] = group.commands[command].params
    return [parameter for parameter in parameters if not getattr(parameter, "hidden", False)]


def _print_version(asked: bool) -> None:
    if asked:
        from kvcalc import __version__

        print(f"kvcalc {__version__}")
        raise typer.Exit


def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    install_completion: Annotated[
        bool, typer.Option("--install-completion", help="Complete words in this shell, or in the one named: bash, zsh, fish.")
    ] = False,
    show_completion: Annotated[bool, typer.Option("--show-completion", help="Print the script that does.")] = False,
) -> None:
    """Options of `kvcalc` itself."""
