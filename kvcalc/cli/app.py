"""The entry point: registers commands, and turns every error that a user can cause into one line and exit status 2."""

import gc
import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from kvcalc.errors import UserError, printable

COMMANDS = {
    "size": "How big is the cache, beside the weights.",
    "compare": "The same model with other attention.",
    "roofline": "Where every operation lies: FLOPs, bytes, intensity, bound.",
    "latency": "One request: time to first token, time per token, end to end.",
    "serve": "A server under load, simulated.",
    "fit": "What fits on these GPUs, and what an engine really allocates.",
    "measure": "The real layers on this machine, beside the prediction.",
    "calibrate": "Fits the time laws to measured rows.",
    "validate": "The model against measured rows.",
    "plot": "The standing figures, for slides.",
    "models": "What model presets there are, and one in full.",
    "gpus": "What GPU presets there are, and one in full.",
}


def build(only: str = "") -> typer.Typer:
    """The application with all commands, or with the one that is about to run: the others cost start-up time."""
    app = typer.Typer(
        name="kvcalc",
        help="How big is the KV cache, what does it cost to read, and what will this GPU do with it?",
        no_args_is_help=True,
        add_completion=not only,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    for name in [only] if only in COMMANDS else COMMANDS:
        app.command(name, help=COMMANDS[name])(import_module(f"kvcalc.cli.{name}").run)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from kvcalc import __version__

        print(f"kvcalc {__version__}")
        raise typer.Exit


def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of `kvcalc` itself."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 a check failed, 2 the request is wrong."""
    gc.set_threshold(100_000)  # start-up makes many classes and no garbage; looking for it costs 5 % of a short run
    sys.exit(_guarded(sys.argv[1:]))


def _guarded(words: list[str]) -> int:
    try:
        result = build(words[0] if words else "")(words, standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except (BrokenPipeError, SystemExit):  # the reader, say `head`, has seen enough; typer and rich exit upon that
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        command = f"kvcalc {words[0]}" if words and words[0] in COMMANDS else "kvcalc"
        return _fail(f"{printable(error.format_message(), 600)} (see `{command} --help`)")
    return result if isinstance(result, int) else 0


def _fail(text: str) -> int:
    print(f"kvcalc: {text}", file=sys.stderr)
    return 2
