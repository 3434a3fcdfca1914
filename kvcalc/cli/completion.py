"""Completion in bash, zsh and fish by typer's protocol.

`_KVCALC_COMPLETE=complete_bash kvcalc` prints the words that may follow. Names come from the
folders of presets. For speed, no module that computes is loaded.
"""

import os
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import UserError

if TYPE_CHECKING:
    from kvcalc.question.options import Parameter

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_KVCALC_COMPLETE"


class Word(NamedTuple):
    """A word that shell completion offers.

    Attributes:
        value: The word.
        help: Its meaning, which zsh and fish show; '' if it needs none.
    """

    value: str
    help: str = ""


def answer(instruction: str) -> int:
    """Answer a request of the shell for completion on stdout, and return the exit status.

    Args:
        instruction: `complete_SHELL` prints the words that may follow the typed words, which the
            shell gives in environment variables. `source_SHELL` prints the completion script. SHELL
            is `bash`, `zsh` or `fish`.

    Returns:
        0. If fish asks only whether words follow, the program exits: with 0 if they do, else 1.
    """
    action, _, shell = instruction.partition("_")
    if action == "source":
        return show(shell)
    from typer import _completion_classes

    protocol: Any = getattr(_completion_classes, f"{_check_shell(shell).title()}Complete")
    request = protocol(None, {}, "kvcalc", VARIABLE)
    # bash gives --gpu=h as three words; zsh runs some characters of a help text
    request.get_completions = lambda words, typed: [
        Word(word.value, re.sub(r"[\"'`$\\()]", "", word.help))
        for word in candidates([w for w in words if w != "="], typed.removeprefix("="))
    ]
    print(request.complete())
    return 0


def candidates(args: list[str], typed: str) -> list[Word]:
    """Return the words that shell completion offers for an incomplete command line.

    Args:
        args: The words before the incomplete word, without `kvcalc`.
        typed: The incomplete word; '' if a new word begins.
    """
    from kvcalc.cli.commands import COMMANDS, FLAGS, parameters_of

    option, equals, rest = typed.partition("=")
    if equals and option.startswith("--"):
        return [Word(f"{option}={word.value}") for word in candidates([*args, option], rest)]
    if not args or args[0] not in COMMANDS:
        known = FLAGS if typed.startswith("-") else COMMANDS
        return [Word(*item) for item in known.items() if not args and item[0].startswith(typed)]
    parameters = parameters_of(args[0])
    for parameter in parameters:
        if args[-1] in parameter.names and not parameter.is_flag:
            return _values(parameter, typed)
    if typed.startswith("-"):
        # options that are not given yet, or may be repeated
        words = [Word(name, FLAGS[name]) for name in ("--help", "--help-all")]
        for parameter in parameters:
            if parameter.is_list or not {*parameter.names} & {*args}:
                words += [Word(name, parameter.option.help) for name in parameter.names]
        beginning = typed if typed.startswith("--") else "--"
        return [word for word in words if word.value.startswith(beginning)]
    valued = [name for p in parameters if not p.is_flag for name in p.names]
    pairs = pairwise(["", *args[1:]])
    num_given = sum(not word.startswith("-") and before not in valued for before, word in pairs)
    for index, argument in enumerate(p for p in parameters if p.is_argument):
        if argument.is_list or index >= num_given:
            return _values(argument, typed)
    return []


def _values(parameter: "Parameter", typed: str) -> list[Word]:
    """Return the values of a parameter, or of the last item of a list."""
    earlier_items, comma, item_start = typed.rpartition(",")
    words = parameter.option.words
    known = _listed(words) if isinstance(words, str) else words or parameter.option.choices
    return [
        Word(earlier_items + comma + word)
        for word in known
        if word.startswith(item_start.lower()) and word not in earlier_items.split(",")
    ]


def _listed(name: str) -> Iterable[str]:
    """Return the words of the list `name`, such as models or GPUs."""
    from kvcalc.library.presets import preset_files
    from kvcalc.question.deployment_options import DATASHEET
    from kvcalc.storage.formats import COMPUTE, cache_dtypes
    from kvcalc.storage.quantization import WEIGHT_FORMATS

    if name == "calibrations":
        names = [n for gpu in preset_files("gpus") for n in preset_files(f"calibrations/{gpu}")]
        return [n for n in dict.fromkeys([*names, DATASHEET]) if n != "nccl"]
    if name in ("models", "gpus"):
        return preset_files(name)
    lists = {
        "all gpus": ["all", "auto", *preset_files("gpus")],
        "dtypes": ["auto", *COMPUTE],
        "cache dtypes": ["auto", *cache_dtypes()],
        "quantizations": WEIGHT_FORMATS,
    }
    return lists[name]


def show(shell: str = "") -> int:
    """Print the completion script of a shell, and return the exit status 0.

    Args:
        shell: `bash`, `zsh` or `fish`; '' for the shell in the environment variable SHELL.

    Raises:
        UserError: The shell is unknown or not supported.
    """
    from typer._completion_shared import get_completion_script

    name = _check_shell(shell)
    print(get_completion_script(prog_name="kvcalc", complete_var=VARIABLE, shell=name))
    return 0


def install(shell: str = "") -> int:
    """Write the completion script of a shell to the user's files, and return the exit status 0.

    Args:
        shell: `bash`, `zsh` or `fish`; '' for the shell in the environment variable SHELL.

    Raises:
        UserError: The shell is unknown or not supported.
    """
    from typer._completion_shared import install as install_script

    name, path = install_script(_check_shell(shell), "kvcalc", VARIABLE)
    print(f"wrote {path}; it takes effect in the next {name}", file=sys.stderr)
    return 0


def _check_shell(shell: str) -> str:
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        problem = f"no completion for the shell {name!r}"
        raise UserError(problem, "Write `kvcalc --show-completion bash`")
    return name
