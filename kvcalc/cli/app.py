"""The entry point: each error that a user can cause becomes one line and exit status 2."""

import atexit
import gc
import os
import sys

from kvcalc.answers.answer import print_to_stderr
from kvcalc.cli.commands import COMMANDS, build
from kvcalc.errors import UserError, printable

INTERRUPTED = 130


def main() -> None:
    """Run the command line in `sys.argv` and exit.

    Exit status:

    - 0: the command is done
    - 1: nothing fits, no plan meets the targets, or a check failed
    - 2: the request is invalid
    - 130: Ctrl-C
    """
    # A short run makes many classes and no garbage. The search for garbage would take 5 % of its
    # time, and another 20 % at exit.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    code = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        code = max(code, _report_lost_output(error))
    sys.exit(code)


def _run(words: list[str]) -> int:
    """Return the exit status of a command line."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    command = words[0] if words else ""
    own_words = words[: words.index("--")] if "--" in words else words
    if "--json" in own_words:
        words[own_words.index("--json")] = "--format=json"
    try:
        status = _complete(words)
        if status is None:
            status = _show_help(words, own_words)
        if status is not None:
            return status
        result = build(words)(words, standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    # rich and typer end with it if the reader of stdout has gone
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _report_lost_output(error.__context__)
    except OSError as error:
        return _report_lost_output(error)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        from kvcalc.cli.help import parser_message

        return _fail(parser_message(error, command))
    # a command's status, or typer's Exit, also for Ctrl-C
    return _interrupted() if result == INTERRUPTED else int(result or 0)


def _show_help(words: list[str], own_words: list[str]) -> int | None:
    """Print the version or help if it is requested; return None if there is a command to run.

    Args:
        words: Words of the command line.
        own_words: The words before `--`. Words after it are the command line of an engine.
    """
    command = words[0] if words else ""
    if command == "--version":
        from kvcalc import __version__

        print(f"kvcalc {__version__}")
        return 0
    if words and not {"-h", "--help", "--help-all"} & {*own_words}:
        return None
    if words and command not in COMMANDS and not command.startswith("-"):
        return None
    from kvcalc.cli.help import command_help, first_steps, general_help

    text = general_help() if words else first_steps()
    if command in COMMANDS:
        text = command_help(command, "--help-all" in own_words)
    sys.stdout.write(text)
    return 0


def _complete(words: list[str]) -> int | None:
    """Handle a request for completion words or for the completion script. Return None for other
    commands."""
    instruction = os.environ.get("_KVCALC_COMPLETE")
    is_install = words[:1] == ["--install-completion"]
    if not (instruction or is_install or words[:1] == ["--show-completion"]):
        return None
    from kvcalc.cli import completion

    if instruction:
        return completion.answer(instruction)
    return (completion.install if is_install else completion.show)(*words[1:2])


def _interrupted() -> int:
    print_to_stderr("kvcalc: interrupted")
    return INTERRUPTED


def _report_lost_output(error: OSError) -> int:
    """Return the exit status if stdout cannot be written: 0 if the reader of a pipe, such as
    `head`, has ended."""
    if error.filename is None:  # drop the rest of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    place = printable(error.filename or "standard output")
    return _fail(f"{place}: {(error.strerror or 'cannot be used').lower()}")


def _fail(text: str) -> int:
    print_to_stderr(f"kvcalc: {text}")
    return 2
