"""Write the help of a command: three examples, the common options, and with `--help-all` every
option.

For an unknown option or command, write a message with suggestions.
"""

import shutil
import sys
from collections.abc import Iterable
from typing import Any

from kvcalc.arithmetic import grouped
from kvcalc.cli.commands import COMMANDS, ENTRIES, FLAGS, parameters_of
from kvcalc.errors import printable
from kvcalc.question.options import PANELS, Parameter
from kvcalc.report.row_names import texts_by_name
from kvcalc.report.text.table_layout import wrapped

ABOUT = "Memory and time of LLM inference: KV cache size, users per GPU, latency, servers."
EXIT_STATUS = (
    "Exit status: 0 done; 1 nothing fits, no plan meets the targets, or a check failed; "
    "2 the request is wrong."
)
FIRST_STEPS = texts_by_name("""
    kvcalc size llama-3.1-8b --context 128k: KV cache size
    kvcalc fit llama-3.1-70b --gpu h100 --tp 4: how many users fit
    kvcalc compare llama-7b --variants mha,gqa:8: savings of other attention
    kvcalc latency llama-3.1-8b --gpu h100: how long one request takes
    kvcalc models llama: model presets
""")
EXAMPLES = {name: entry["examples"] for name, entry in ENTRIES.items()}
MAX_COMMON = 12  # options that `--help` shows
INDENT = 27  # columns before the description of an option
SIMILARITY = 0.7  # a name that shares fewer letters is another word


def first_steps() -> str:
    """Return the text of `kvcalc` without arguments: five commands to try first."""
    lines = [f"{line:<48}{text}" for line, text in FIRST_STEPS.items()]
    return "\n".join([*lines, f"{'kvcalc --help':<48}all commands"]) + "\n"


def general_help() -> str:
    """Return the text of `kvcalc --help`: all commands, and the options of `kvcalc` itself."""
    width = _width()
    lines = ["kvcalc COMMAND …", "", *wrapped(ABOUT, width), "", "Try first:"]
    lines += [f"  {line}" for line in FIRST_STEPS]
    lines += ["", "Commands (kvcalc COMMAND --help shows examples and options):"]
    for name, text in COMMANDS.items():
        lines += _row(name, text, width, 14)
    lines += ["", "Options:"]
    for name, text in FLAGS.items():
        lines += _row(
            f"{name} [SHELL]" if "completion" in name else name, text, width, INDENT + 4
        )
    return _with_exit_status(lines, width)


def command_help(command: str, is_whole: bool) -> str:
    """Return the text of `kvcalc COMMAND --help` or `--help-all`.

    Args:
        command: Name of the command, such as "fit".
        is_whole: Whether to list every option, as `--help-all` does. Otherwise a command with many
            options lists only the common ones.
    """
    width = _width()
    parameters = parameters_of(command)
    arguments = [p for p in parameters if p.is_argument]
    options = [p for p in parameters if not p.is_argument]
    words = [p.placeholder if p.is_required else f"[{p.placeholder}]" for p in arguments]
    lines = [" ".join(["kvcalc", command, *words, "[options]"]), ""]
    lines += [*wrapped(COMMANDS[command], width), "", "Examples:"]
    lines += [f"  {line}" for line in EXAMPLES[command]]
    lines.append("")
    for argument in arguments:
        lines += _row(argument.placeholder, argument.option.help, width, INDENT)
    groups = panels(options)
    is_short = not is_whole and len(options) > MAX_COMMON
    for panel in [PANELS[0]] if is_short else groups:
        lines += ["", f"{panel}:"]
        for option in groups[panel]:
            lines += _row(spelling(option), meaning(option), width, INDENT)
    if is_short:
        lines += ["", f"kvcalc {command} --help-all shows all {len(options)} options."]
    return _with_exit_status(lines, width)


def _width() -> int:
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, 100))


def _with_exit_status(lines: list[str], width: int) -> str:
    return "\n".join([*lines, "", *wrapped(EXIT_STATUS, width)]) + "\n"


def panels(options: Iterable[Parameter]) -> dict[str, list[Parameter]]:
    """Return options grouped by their heading in help, such as "Memory", in the order of help.

    Common options are under the first heading, "Common options".

    Args:
        options: Options of a command.
    """
    groups: dict[str, list[Parameter]] = {panel: [] for panel in PANELS}
    for parameter in options:
        option = parameter.option
        groups[PANELS[0] if option.is_common else option.panel].append(parameter)
    return {panel: members for panel, members in groups.items() if members}


def _row(name: str, text: str, width: int, indent: int) -> list[str]:
    """Return the lines of a name and its description. Below a long name, the description begins on
    a new line."""
    lines = [" " * indent + line for line in wrapped(text, width - indent)]
    if len(name) + 4 > indent:
        return [f"  {name}", *lines]
    return [f"  {name}".ljust(indent) + lines[0][indent:], *lines[1:]]


def spelling(option: Parameter) -> str:
    """Return an option as help writes it: all its names, and a placeholder such as TOKENS.

    Example: "--quantization, -q FORMAT". An option without a value has no placeholder: "--verbose,
    -v".
    """
    names = ", ".join(option.names)
    return names if option.is_flag else f"{names} {option.placeholder}"


def meaning(option: Parameter) -> str:
    """Return an option's description as help writes it, with the default in brackets.

    A default that is empty or 0 is not written.
    """
    default, text = option.default, option.option.help
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if option.is_flag or default in (None, "", 0, [], float("inf")):
        return text
    return f"{text} [{default}]"


# If many commands have an option, suggest `fit` first.
IN_CPU_MEMORY = "n-gpu-layers n-cpu-moe"  # names with `cpu-moe` in it
FIT_FIRST = sorted(COMMANDS, key=lambda command: command != "fit")


def parser_message(error: Any, command: str) -> str:
    """Return the message of a command line's parse error: the problem, then the text to type.

    It is one line, such as "fit has no --user. Did you mean --users? …".

    Args:
        error: Exception of typer's parser.
        command: The first word of the command line. It may be unknown.
    """
    text = printable(error.format_message(), 600)
    text = text.replace("is not a valid int.", "is not a whole number.")
    text = text.replace("is not a valid float.", "is not a number.")
    if command in ("version", "-v", "-V"):
        return "unknown command. Write `kvcalc --version` (see `kvcalc --help`)"
    if command not in COMMANDS:
        is_model = command and not command.startswith("-") and "Did you mean" not in text
        hint = (
            f" Put a command first: `kvcalc size {printable(command, 100)}`" if is_model else ""
        )
        return f"{text}{hint} (see `kvcalc --help`)"
    see = f"(see `kvcalc {command} --help`)"
    if type(error).__name__ == "NoSuchOption":
        name = printable(error.option_name, 100)
        typed = name if name.startswith("--") else _whole_word(command, name)
        from kvcalc.capacity.command_line import is_command

        if command == "fit" and is_command(sys.argv[2:]):
            return (
                f"fit has no {typed}. Put -- before an engine's command line: `kvcalc fit "
                "--gpu h100 -- llama-server -m FILE …`"
            )
        return f"{command} has no {typed}. {_suggestion(command, typed)}"
    missing = text.removeprefix("Missing argument '").rstrip("'.")
    if type(error).__name__ == "MissingParameter" and missing != text:
        return f"{missing} is missing. Write `{EXAMPLES[command][0]}` {see}"
    extra = text.removeprefix("Got unexpected extra argument(s) (").removesuffix(")")
    if extra == text:
        return f"{text} {see}"
    hint = "Write a list as a,b"
    if command in ("compare", "report"):
        hint = "`--variants` takes mha,mla. `kvcalc size A B` takes several models"
    return f"{command} takes no further word: {extra}. {hint} {see}"


def _whole_word(command: str, letter: str) -> str:
    """Return the typed word whose first letter the parser refused: `-dtype` for `-d`."""
    names = {name for parameter in parameters_of(command) for name in parameter.names}
    for word in sys.argv:
        if word.startswith(letter) and word.partition("=")[0] not in names:
            return printable(word, 100)
    return letter


def _suggestion(command: str, typed: str) -> str:
    """Return a suggestion for an unknown option."""
    word = typed.lstrip("-").partition("=")[0].replace("_", "-")
    list_hint = f"`kvcalc {command} --help-all` lists its options"
    option_names = _long_names(command)
    suggestions = (
        [word]
        if word in option_names
        else [name for name, called in option_names.items() if word in called]
    )
    if not suggestions and (elsewhere := _other_commands(command, word)):
        return f"{elsewhere}; {list_hint}"
    if not suggestions:
        from difflib import get_close_matches

        suggestions = get_close_matches(word, option_names, n=3, cutoff=SIMILARITY)
    return (
        f"Did you mean {' or '.join(f'--{name}' for name in suggestions)}? {list_hint}"
        if suggestions
        else list_hint
    )


def _other_commands(command: str, word: str) -> str:
    """Return a sentence on other commands that have an option with this name, or else with this
    meaning."""
    homes = grouped(
        (name, f"`kvcalc {other}`")
        for other in FIT_FIRST
        for name, called in _long_names(other).items()
        if other != command and (name == word or word in called)
    )
    for name, commands in {word: [], **homes}.items():
        if commands:
            *first, last = commands[:3]
            places = f"{', '.join(first)} and {last} have" if first else f"{last} has"
            return (
                f"{places} --{name}"
                f"{', but times with it are not predicted' * (name in IN_CPU_MEMORY)}"
            )
    return ""


def _long_names(command: str) -> dict[str, list[str]]:
    """Return the names that other tools give to the options of a command, by long name.

    Only the first long name of an option has them; for its other long names the list is empty.
    """
    names = {}
    for parameter in parameters_of(command):
        called = parameter.option.called.split()
        for name in parameter.names:
            if name.startswith("--"):
                names[name[2:]] = called if name == parameter.names[0] else []
    return names
