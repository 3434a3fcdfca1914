"""Shell completion: the real program by typer's protocol, and in each installed shell."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.cli import completion
from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.library.presets import preset_files
from kvcalc.storage.formats import cache_dtypes

MODELS, GPUS = [*preset_files("models")], [*preset_files("gpus")]
LLAMAS = sorted(name for name in MODELS if name.startswith("llama-3.1"))


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    found = {k: v for k, v in os.environ.items() if k not in ("KVCALC_PRESETS", "COLUMNS")} | environment
    return subprocess.run(words, capture_output=True, text=True, env=found, check=False)


def asked(shell: str, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Return the program's answer to a shell whose line is `line`, with the cursor at its end."""
    words = shlex.split(line) + [""] * line.endswith(" ")
    typed = (
        {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)} if shell == "bash" else {"_TYPER_COMPLETE_ARGS": line}
    )
    return run([sys.executable, "-m", "kvcalc"], _KVCALC_COMPLETE=f"complete_{shell}", **typed, **more)


def offered(line: str) -> list[str]:
    done = asked("bash", line)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_commands_models_gpus_and_words_of_options_are_known() -> None:
    assert offered("kvcalc ") == [*COMMANDS]
    assert offered("kvcalc si") == ["size"] and offered("kvcalc --v") == ["--version"]
    assert sorted(offered("kvcalc size llama-3.1")) == LLAMAS
    assert sorted(offered("kvcalc size gpt2 LLAMA-3.1")) == LLAMAS
    assert sorted(offered("kvcalc size --context 4k --wide llama-3.1")) == LLAMAS
    assert sorted(offered("kvcalc models llama-3.1")) == LLAMAS
    assert sorted(offered("kvcalc latency gpt2 --gpu ")) == sorted(["all", "auto", *GPUS])
    assert sorted(offered("kvcalc gpus mi3")) == sorted(name for name in GPUS if name.startswith("mi3"))
    assert offered("kvcalc plot ") == [
        "cache-vs-context", "cache-vs-parameters", "no-cache", "roofline", "memory", "dsa-vs-mla",
        "measured",
    ]  # fmt: skip
    assert sorted(offered("kvcalc plot memory llama-3.1")) == LLAMAS
    assert offered("kvcalc size x --format ") == ["table", "json", "csv", "markdown"]
    assert offered("kvcalc size x --style ") == ["light", "dark", "slides"]
    assert offered("kvcalc size x --kv-cache-dtype fp8_") == [d for d in cache_dtypes() if d.startswith("fp8_")]
    assert offered("kvcalc size x --context ") == []
    assert offered("kvcalc validate ") == offered("kvcalc nonsense ") == []


def test_a_list_and_a_joined_value_are_completed_at_their_end() -> None:
    assert offered("kvcalc latency x --gpu h100-sxm,h20") == ["h100-sxm,h20", "h100-sxm,h200"]
    assert offered("kvcalc latency x --gpu = h20") == ["h20", "h200"]  # as bash splits --gpu=h20
    assert asked("fish", "kvcalc latency x --gpu=h20", _TYPER_COMPLETE_FISH_ACTION="get-args").stdout == "--gpu=h20\n--gpu=h200\n"
    assert "h20,h20" not in offered("kvcalc latency x --gpu h20,")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_offered_until_it_is_given(command: str, kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word.value for word in completion.candidates([command], "--")]
    parameters = parameters_of(command)
    assert {*words} == {n for p in parameters for n in p.names if n[1] == "-"} | {"--help", "--help-all"}
    for parameter in (p for p in parameters if not p.is_argument):
        again = {word.value for word in completion.candidates([command, parameter.names[0], "x"], "--")}
        assert ({*parameter.names} & again != set()) == parameter.is_list


def test_odd_questions_get_an_answer_and_no_traceback() -> None:
    done = run([sys.executable, "-m", "kvcalc"], _KVCALC_COMPLETE="complete_bash", COMP_WORDS='kvcalc size "lla', COMP_CWORD="2")
    assert (done.returncode, done.stderr) == (0, "")
    for instruction in ("complete_tcsh", "complete", "source_", "source_tcsh"):
        done = run([sys.executable, "-m", "kvcalc"], _KVCALC_COMPLETE=instruction, SHELL="/bin/tcsh")
        assert done.returncode == 2 and done.stderr.startswith("kvcalc: no completion for the shell 'tcsh'")
    assert asked("fish", "kvcalc validate ", _TYPER_COMPLETE_FISH_ACTION="is-args").returncode == 1
    assert asked("fish", "kvcalc size ", _TYPER_COMPLETE_FISH_ACTION="is-args").returncode == 0


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_is_shown_by_name_by_shell_and_by_protocol(shell: str) -> None:
    named = run([sys.executable, "-m", "kvcalc", "--show-completion", shell])
    bare = run([sys.executable, "-m", "kvcalc", "--show-completion"], SHELL=f"/usr/bin/{shell}")
    source = run([sys.executable, "-m", "kvcalc"], _KVCALC_COMPLETE=f"source_{shell}")
    assert named.returncode == bare.returncode == source.returncode == 0
    assert named.stdout == bare.stdout == source.stdout and f"_KVCALC_COMPLETE=complete_{shell}" in named.stdout


@pytest.fixture
def program(tmp_path: Path) -> Iterator[str]:
    """Return a PATH on which `kvcalc` is this version."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kvcalc"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvcalc "$@"\n')
    script.chmod(0o755)
    yield f"{folder}{os.pathsep}{os.environ['PATH']}"


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(shell), reason=f"{shell} is not installed")


@needs("bash")
def test_bash_completes(program: str, tmp_path: Path) -> None:
    assert run(["bash", "-c", "kvcalc --install-completion bash"], HOME=str(tmp_path), PATH=program).returncode == 0
    line = 'COMP_WORDS=(kvcalc size llama-3.1); COMP_CWORD=2; _kvcalc_completion kvcalc; printf "%s\\n" "${COMPREPLY[@]}"'
    done = run(
        ["bash", "--rcfile", str(tmp_path / ".bashrc"), "-ic", f"{line}; complete -p kvcalc"], HOME=str(tmp_path), PATH=program
    )
    *names, registered = done.stdout.splitlines()
    assert sorted(names) == LLAMAS
    assert registered.endswith("-F _kvcalc_completion kvcalc")


@needs("fish")
def test_fish_completes(program: str, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": program}
    assert run(["fish", "-c", "kvcalc --install-completion"], SHELL="/usr/bin/fish", **environment).returncode == 0
    done = run(["fish", "-c", 'complete -C "kvcalc size llama-3.1"; complete -C "kvcalc size --ten"'], **environment)
    *names, option = done.stdout.splitlines()
    assert sorted(names) == LLAMAS
    assert option == "--tensor-parallel-size\tGPUs for tensor parallelism; a list, or auto"


@needs("zsh")
def test_zsh_completes(program: str, tmp_path: Path) -> None:
    """This checks the specification that reaches zsh's `_arguments`, and the words that zsh makes of it."""
    environment = {"HOME": str(tmp_path), "PATH": program}
    assert run(["zsh", "-fc", "kvcalc --install-completion zsh"], **environment).returncode == 0
    assert (tmp_path / ".zfunc" / "_kvcalc").read_text().startswith("#compdef kvcalc\n")
    line = "\n".join(
        (
            'compdef() { }; _arguments() { local -a found; eval "found=( ${${1#*: :\\(\\(}%\\)\\)} )"; print -rl -- $found }',
            "source $HOME/.zfunc/_kvcalc",
            "words=(kvcalc compare x --variants g); CURRENT=5; _kvcalc_completion",
            "words=(kvcalc size --decode); CURRENT=3; _kvcalc_completion",
        )
    )
    done = run(["zsh", "-fc", line], **environment)
    assert done.stdout.splitlines() == ["gqa\\:8", "--decode-context-parallel-size:GPUs for decode context parallelism"]


def test_installing_twice_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias k=kvcalc\n")
    for _ in range(2):
        assert run([sys.executable, "-m", "kvcalc", "--install-completion", "bash"], HOME=str(tmp_path)).returncode == 0
    path = tmp_path / ".bash_completions" / "kvcalc.sh"
    assert (tmp_path / ".bashrc").read_text().split("\n") == ["alias k=kvcalc", "", f"source '{path}'", "", ""]
