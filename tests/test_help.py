"""Help: examples that run, the options that one needs first, every name whole in 80 columns; and what is shown without words."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.capacity.engines import ENGINES
from kvcalc.cli import completion
from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.cli.help import EXAMPLES, FIRST, METAVARS, PANELS
from kvcalc.library.engine_choice import ENGINE_NAMES

FIGURES = [
    "cache-vs-context", "cache-vs-parameters", "no-cache", "roofline", "memory", "dsa-vs-mla", "cost-vs-context",
        "measured",
]  # fmt: skip
NEED_ROWS = ("measure", "calibrate", "validate", "diagnose")
PAGES = EXAMPLES["report"][1:]  # which take seconds each, and differ from the first in names alone
RUN = [line for command, lines in EXAMPLES.items() if command not in NEED_ROWS for line in lines if line not in PAGES]


def options(command: str) -> list[str]:
    found = (p for p in parameters_of(command) if p.param_type_name == "option")
    return [name for p in found for name in [*p.opts, *p.secondary_opts]]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_holds_every_option_once_whole_in_eighty_columns(kvcalc: Run, command: str) -> None:
    shown = kvcalc(f"{command} --help")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert COMMANDS[command] in shown.out
    examples = lines[lines.index("Examples:") + 1 :][:3]
    assert [line.strip() for line in examples] == [*EXAMPLES[command]]
    listed = [name for line in lines if line.startswith("  -") for name in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", line[:60])]
    assert sorted(name for name in listed if name in options(command)) == sorted(options(command))
    assert kvcalc(f"{command} -h").out == kvcalc(f"{command} gpt2 --help --wide").out == shown.out


@pytest.mark.parametrize("command", FIRST)
def test_ten_options_come_first_and_the_rest_by_panel(kvcalc: Run, command: str) -> None:
    lines = kvcalc(f"{command} --help").out.splitlines()
    start = lines.index("First of all:") + 1
    assert sum(line.startswith("  -") for line in lines[start : lines.index("", start)]) == 10
    heads = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads[:2] == ["Examples", "First of all"] and "Output" in heads and len(heads) == len({*heads})


def test_what_help_names_exists() -> None:
    parameters = {command: {p.name for p in parameters_of(command)} for command in COMMANDS}
    known = set().union(*parameters.values())
    for command, names in FIRST.items():
        assert {*names.split()} <= parameters[command]
    assert {name for names in PANELS.values() for name in names.split()} <= known
    assert {*METAVARS} <= known
    assert {*EXAMPLES} == {*COMMANDS} and all(len(lines) == 3 for lines in EXAMPLES.values())


@pytest.mark.parametrize("line", RUN)
def test_examples_run(kvcalc: Run, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = kvcalc(line.removeprefix("kvcalc "))
    assert found.code in (0, 1) and "kvcalc: " not in found.err, found.err
    assert found.out or [*tmp_path.iterdir()]


def test_examples_on_rows_name_options_that_are_there() -> None:
    for command in NEED_ROWS:
        for line in EXAMPLES[command]:
            assert {word for word in shlex.split(line) if word.startswith("-")} <= {*options(command)}


def test_kvcalc_alone_shows_six_lines_to_try(kvcalc: Run) -> None:
    shown = kvcalc("")
    lines = shown.out.splitlines()
    assert (shown.code, len(lines), max(map(len, lines)) <= 80) == (0, 6, True)
    for line in lines[:-1]:
        assert kvcalc(re.split(r"\s{2,}", line)[0].removeprefix("kvcalc ")).code == 0
    assert lines[-1].startswith("kvcalc --help ")


def test_help_of_all_names_every_command(kvcalc: Run) -> None:
    for words in ("--help", "-h"):
        lines = kvcalc(words).out.splitlines()
        assert max(map(len, lines)) <= 80
        assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == [*COMMANDS]


def test_plot_alone_lists_the_figures(kvcalc: Run) -> None:
    shown = kvcalc("plot")
    assert shown.code == 0
    assert [line.split()[2] for line in shown.out.splitlines()] == FIGURES
    assert max(map(len, shown.out.splitlines())) <= 80


def test_what_follows_two_dashes_is_no_question_for_help(kvcalc: Run) -> None:
    assert kvcalc("size gpt2 -- --help").code == 2


def test_part_of_a_name_lists_what_has_it(kvcalc: Run) -> None:
    records = kvcalc("models LLAMA_3.1 --format json").records
    assert len(records) >= 3 and all(r["model"].startswith("llama-3.1-") for r in records)
    assert [r["model"] for r in kvcalc("models llama-3.1-8b --format json").records] == ["llama-3.1-8b"]
    shown = kvcalc("models llama-3.1").out
    assert all(f"\n{r['model']} " in shown for r in records)
    rtx = kvcalc("gpus rtx --format json").records
    assert len(rtx) > 3 and all(r["gpu"].startswith("rtx-") for r in rtx)
    assert kvcalc("models nonsense").code == 2


def test_near_misses_name_a_model_once(kvcalc: Run) -> None:
    """gpt-3-small is gpt3-small and gpt-3-125m too."""
    for line in ("size lama-7b", "size llama2-7", "size gpt3smal", "latency gpt2 --gpu h10x", "size deepsek-v3"):
        near = kvcalc(line).err.partition("Did you mean ")[2].strip().rstrip("?").split(", ")
        assert 1 <= len(near) <= 5
        kind = "gpus" if "--gpu" in line else "models"
        found = [kvcalc(f"{kind} {name} --format json").records[0][kind[:-1]] for name in near]
        assert found == near


@pytest.mark.parametrize("command", ["fit", "plan", "report"])
def test_engines_are_named_by_the_code(command: str, kvcalc: Run) -> None:
    """A new engine stands in every help and in completion."""
    assert {*ENGINE_NAMES} == {*ENGINES}
    text = " ".join(kvcalc(f"{command} --help").out.split())
    assert all(name in re.split(r"--engine [A-Z]+ ", text)[1].partition("[")[0] for name in ENGINES)
    assert "{engines}" not in text + "".join(w.help for w in completion.candidates([command], "--"))


def test_help_as_a_word(kvcalc: Run) -> None:
    assert kvcalc("help size").out == kvcalc("size --help").out != kvcalc("help").out == kvcalc("--help").out
    assert "No such command 'nothing'" in kvcalc("help nothing").err
