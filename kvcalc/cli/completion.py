"""Completion in bash, zsh and fish, by typer's protocol: `_KVCALC_COMPLETE=complete_bash kvcalc` prints what may come next.

Names are read from the presets' folders; nothing that computes is loaded.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError, nearest

VARIABLE = "_KVCALC_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
FLAGS = {
    "--help": "Show this message.",
    "--version": "Print the version.",
    "--install-completion": "Complete words in this shell.",
    "--show-completion": "Print the script that does.",
}
_SCRIPTS = {
    "bash": """\
_kvcalc_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _KVCALC_COMPLETE=complete_bash "$1" 2>/dev/null))
}
complete -o default -F _kvcalc_completion kvcalc
""",
    "zsh": """\
#compdef kvcalc

_kvcalc_completion() {
    eval "$(_TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _KVCALC_COMPLETE=complete_zsh kvcalc 2>/dev/null)"
}
compdef _kvcalc_completion kvcalc
""",
    "fish": """\
function __kvcalc_completion
    _TYPER_COMPLETE_ARGS=(commandline -cp) _TYPER_COMPLETE_FISH_ACTION=$argv[1] _KVCALC_COMPLETE=complete_fish kvcalc 2>/dev/null
end
complete --command kvcalc --no-files --condition "__kvcalc_completion is-args" --arguments "(__kvcalc_completion get-args)"
""",
}


class Word(NamedTuple):
    """What may come next, and what it means."""

    text: str
    help: str = ""


def _models() -> Iterable[str]:
    from kvcalc.library.catalog import preset_files

    return preset_files("models")


def _gpus() -> Iterable[str]:
    from kvcalc.library.catalog import preset_files

    return preset_files("gpus")


def _listed_gpus() -> Iterable[str]:
    return ["all", *_gpus()]


def _stacks() -> Iterable[str]:
    from kvcalc.library.catalog import preset_files

    found = (stack for gpu in _gpus() for stack in preset_files(f"calibrations/{gpu}") if stack != "nccl")  # all-reduces alone
    return [*dict.fromkeys(found), "datasheet"]


def _engines() -> Iterable[str]:
    from kvcalc.library.engine_choice import ENGINE_NAMES

    return ENGINE_NAMES


def _dtypes() -> Iterable[str]:
    from kvcalc.storage.dtypes import COMPUTE

    return ("auto", *COMPUTE)


def _cache_dtypes() -> Iterable[str]:
    from kvcalc.storage.dtypes import cache_dtypes

    return ("auto", *cache_dtypes())


def _quantizations() -> Iterable[str]:
    from kvcalc.storage.quantization import WEIGHT_FORMATS

    return WEIGHT_FORMATS


def _styles() -> Iterable[str]:
    from kvcalc.report.plots import STYLES

    return STYLES


def _words(*words: str) -> Callable[[], Iterable[str]]:
    return lambda: words


# What a parameter takes, by its name, or by command and name. Words of rooms that are slow to load stand here.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "model": _models,
    "models": _models,
    "models name": _models,
    "gpus name": _gpus,
    "draft": _models,
    "gpu": _listed_gpus,
    "calibrate gpu": _gpus,
    "calibration_from": _gpus,
    "stack": _stacks,
    "dtype": _dtypes,
    "kv_cache_dtype": _cache_dtypes,
    "quantization": _quantizations,
    "style": _styles,
    "engine": _engines,
    "calibration": _stacks,
    "variants": _words("none", "mha", "mqa", "gqa:8", "mla", "dsa", "window:4096", "evict:4096", "hybrid:5/window:4096", "cla:2"),
    "phase": _words("decode", "prefill"),
    "measure phase": _words("decode", "prefill", "both"),
    "mla_form": _words("auto", "absorbed", "expanded"),
    "policy": _words("continuous", "static"),
    "cache": _words("paged", "contiguous"),
    "preemption": _words("recompute", "swap"),
    "device": _words("auto", "cpu", "cuda"),
}


def answer(instruction: str) -> int:
    """Do what the protocol asks: `complete_SHELL` or `source_SHELL`. Returns the exit status."""
    action, _, shell = instruction.partition("_")
    if action == "source":
        return show(shell)
    _known(shell)
    args, typed = _typed(shell)
    words = candidates(args, typed)
    if shell == "fish" and os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        return int(not words)
    sys.stdout.write(_written(words, shell))
    return 0


def candidates(args: list[str], typed: str) -> list[Word]:
    """What may stand where `typed` was begun, after the words `args`."""
    from kvcalc.cli.commands import COMMANDS, parameters_of

    option, equals, rest = typed.partition("=")
    if equals and option.startswith("--"):
        return [Word(f"{option}={word.text}") for word in candidates([*args, option], rest)]
    if not args or args[0] not in COMMANDS:
        known = FLAGS if typed.startswith("-") else COMMANDS
        return [] if args else [Word(name, text) for name, text in known.items() if name.startswith(typed)]
    parameters = parameters_of(args[0])
    takes = next((p for p in parameters if args[-1] in p.opts and not _is_flag(p)), None)
    if takes is None and typed.startswith("-"):
        return _options(parameters, args, typed)
    takes = takes or _argument(parameters, args[1:])
    return _values(args[0], takes, typed) if takes else []


def _is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def _options(parameters: list[Any], args: list[str], typed: str) -> list[Word]:
    """Options that were not given yet, or may be given again."""
    fresh = [p for p in parameters if p.param_type_name == "option" and (p.multiple or not {*p.opts} & {*args})]
    named = [Word(name, p.help or "") for p in fresh for name in [*p.opts, *p.secondary_opts]]
    whole = "-" if typed in ("-", "--") else typed
    return [w for w in [*named, Word("--help", FLAGS["--help"])] if w.text.startswith(whole) and w.text.startswith("--")]


def _argument(parameters: list[Any], args: list[str]) -> Any:
    """The argument that comes after those in `args`; None where there is none."""
    valued = {name for p in parameters if p.param_type_name == "option" and not _is_flag(p) for name in p.opts}
    given = [word for before, word in zip(["", *args], args, strict=False) if not word.startswith("-") and before not in valued]
    places = [p for p in parameters if p.param_type_name == "argument"]
    for number, place in enumerate(places):
        if place.nargs < 0 or number >= len(given):
            return place
    return None


def _values(command: str, parameter: Any, typed: str) -> list[Word]:
    """What a parameter takes; of a list, what its last word may be."""
    before, comma, last = typed.rpartition(",")
    choices = getattr(parameter.type, "choices", None)
    known = VALUES.get(f"{command} {parameter.name}") or VALUES.get(parameter.name)
    words = known() if known else [str(getattr(c, "value", c)) for c in choices or ()]
    given = before.split(",") if comma else []
    return [Word(before + comma + word) for word in words if word.startswith(last.lower()) and word not in given]


def _typed(shell: str) -> tuple[list[str], str]:
    """The words before the one that is being typed, and that one."""
    if shell == "bash":
        words, place = _split(os.environ.get("COMP_WORDS", "")), os.environ.get("COMP_CWORD", "")
        at = int(place) if place.isdecimal() else 0
        args, typed = words[1:at], words[at] if at < len(words) else ""
        return [word for word in args if word != "="], typed.removeprefix("=")  # bash gives --gpu=h as three words
    text = os.environ.get("_TYPER_COMPLETE_ARGS", "")
    words = _split(text)[1:]
    return (words[:-1], words[-1]) if words and not text.endswith(" ") else (words, "")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is still open
        return text.split()


def _written(words: list[Word], shell: str) -> str:
    if shell == "bash":
        return "".join(f"{word.text}\n" for word in words)
    if shell == "fish":
        return "".join(f"{word.text}\t{word.help}".rstrip() + "\n" for word in words)
    shown = "\n".join(f'"{_escaped(w.text)}":"{_escaped(w.help)}"' if w.help else f'"{_escaped(w.text)}"' for w in words)
    return f"_arguments '*: :(({shown}))'\n" if words else "_files\n"


def _escaped(text: str) -> str:
    """As zsh takes it between quotes: no marks of its own, and colons that separate nothing."""
    return re.sub(r"[\"'`$\\()]", "", text).replace(":", r"\\:")


def show(shell: str = "") -> int:
    """Print the script that makes a shell complete; by default of the shell that $SHELL names."""
    sys.stdout.write(_SCRIPTS[_known(shell)])
    return 0


def install(shell: str = "") -> int:
    """Put the script where the shell looks for it at its start."""
    from kvcalc.library.writing import make_folder, write_text

    name, home = _known(shell), Path.home()
    path = {
        "bash": home / ".bash_completions" / "kvcalc.sh",
        "zsh": home / ".zfunc" / "_kvcalc",
        "fish": Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "kvcalc.fish",
    }[name]
    make_folder(path.parent)
    write_text(path, _SCRIPTS[name])
    if name == "bash":
        _add_line(home / ".bashrc", f"source {shlex.quote(str(path))}")
    elif name == "zsh":
        _add_line(home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    print(f"wrote {path}; it takes effect in the next {name}", file=sys.stderr)
    return 0


def _add_line(path: Path, line: str) -> None:
    from kvcalc.library.files import read_text
    from kvcalc.library.writing import write_text

    text = read_text(path, 4 << 20) if path.exists() else ""
    if line not in text.splitlines():
        write_text(path, f"{text}\n{line}\n".lstrip("\n"))


def _known(shell: str) -> str:
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        what = f"no completion for the shell {name!r}" if name else "which shell is this?"
        raise UserError(what, hint=f"{nearest(name, SHELLS)}; `kvcalc --show-completion bash` prints the script")
    return name
