"""Help: examples that run, the most important options, names that are not divided in 80 columns, and output without arguments."""

import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.capacity.engines import ENGINES
from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.cli.help import EXAMPLES
from kvcalc.question.deployment_options import ENGINE_NAMES
from kvcalc.question.options import PANELS

FIGURES = [
    "cache-vs-context", "cache-vs-parameters", "no-cache", "roofline", "memory", "dsa-vs-mla",
        "measured",
]  # fmt: skip
NEED_ROWS = ("measure", "calibrate", "validate", "diagnose", "mcp")
PAGES = EXAMPLES["report"][1:]  # which take seconds each, and differ from the first in names alone
RUN = [line for command, lines in EXAMPLES.items() if command not in NEED_ROWS for line in lines if line not in PAGES]


def options(command: str) -> list[str]:
    return [name for parameter in parameters_of(command) for name in parameter.names]


def listed(text: str) -> list[str]:
    """Return the names of options that lines of help begin with."""
    heads = [re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if line.startswith("  -")]
    return [name for head in heads for name in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", head)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_lists_every_option_once_in_eighty_columns(kvcalc: Run, command: str) -> None:
    shown = kvcalc(f"{command} --help-all")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert COMMANDS[command] in shown.out
    examples = lines[lines.index("Examples:") + 1 :][:3]
    assert [line.strip() for line in examples] == [*EXAMPLES[command]]
    assert sorted(name for name in listed(shown.out) if name in options(command)) == sorted(options(command))
    heads = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Examples", *(panel for panel in PANELS if panel in heads)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_at_most_twelve_options_and_names_help_all(kvcalc: Run, command: str) -> None:
    shown = kvcalc(f"{command} --help").out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    number = sum(not parameter.is_argument for parameter in parameters_of(command))
    assert min(number, 1) <= sum(line.startswith("  -") for line in lines) <= 12
    assert ("Common options:" in lines) == bool(number)
    assert (f"kvcalc {command} --help-all shows all {number} options." in lines) == (number > 12)
    assert kvcalc(f"{command} -h").out == kvcalc(f"{command} gpt2 --help --wide").out == shown


@pytest.mark.parametrize("command", COMMANDS)
def test_a_description_is_one_phrase_of_at_most_seventy_characters(command: str) -> None:
    assert len(COMMANDS[command]) <= 70
    for parameter in parameters_of(command):
        text, place = parameter.option.help, f"the entry of {parameter.name!r} in kvcalc/question/options.json"
        assert text, f"write a help text: {place}"
        assert len(text) <= 70 and not text.endswith("."), f"write one phrase of at most 70 characters: {place}"
        if parameter.option.choices and "|" in parameter.option.takes:
            assert parameter.option.takes == "|".join(parameter.option.choices), f"takes lists the choices: {place}"


@pytest.mark.parametrize("line", RUN)
def test_examples_run(kvcalc: Run, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = kvcalc(line.removeprefix("kvcalc ") + " --num-prompts 50" * line.startswith("kvcalc serve"))
    assert found.code in (0, 1) and "kvcalc: " not in found.err, found.err
    assert found.out or [*tmp_path.iterdir()]


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
    """gpt-3-small is also called gpt3-small and gpt-3-125m."""
    for line in ("size lama-7b", "size llama2-7", "size gpt3smal", "latency gpt2 --gpu h10x", "size deepsek-v3"):
        near = kvcalc(line).err.partition("Did you mean ")[2].partition("?")[0].split(", ")
        assert 1 <= len(near) <= 5
        kind = "gpus" if "--gpu" in line else "models"
        found = [kvcalc(f"{kind} {name} --format json").records[0][kind[:-1]] for name in near]
        assert found == near


@pytest.mark.parametrize("command", ["fit", "plan", "report"])
def test_engines_are_named_by_the_code(command: str, kvcalc: Run) -> None:
    """A new engine appears in all help texts and in completion."""
    assert {*ENGINE_NAMES} == {*ENGINES}
    text = " ".join(kvcalc(f"{command} --help").out.split())
    assert all(name in re.split(r"--engine [A-Z]+ ", text)[1].partition("[")[0] for name in ENGINES)


def test_help_as_a_word(kvcalc: Run) -> None:
    assert kvcalc("help size").out == kvcalc("size --help").out != kvcalc("help").out == kvcalc("--help").out
    assert "No such command 'nothing'" in kvcalc("help nothing").err
