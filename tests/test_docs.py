"""What the documents show is what the commands print, and every option and command they name exists."""

import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.cli.app import COMMANDS
from kvcalc.report import layout

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"^…\n?", re.MULTILINE)  # a line of its own: some of what the command prints is not shown


def width_of(document: str) -> int:
    """Columns of a document's outputs: a terminal's in the front page, a pipe's elsewhere."""
    return 80 if document == "README.md" else layout.WIDTH


def shown() -> list[tuple[str, str, str]]:
    """(document, command line, output) of every command in a fenced console block; a block may hold several."""
    found = []
    for path in DOCUMENTS:
        for block in _FENCE.findall(path.read_text(encoding="utf-8")):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                if command.startswith("kvcalc "):
                    found.append((path.name, command.removeprefix("kvcalc "), output))
    return found


def is_shown(printed: str, output: str) -> bool:
    """Whether a document's `output` is what was printed, lines left out where it says so."""
    parts = LEFT_OUT.split(output.rstrip("\n") + "\n")
    return bool(re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, parts)), printed.rstrip("\n") + "\n"))


SHOWN = shown()


def test_readme_shows_real_output() -> None:
    assert any(name == "README.md" for name, _, _ in SHOWN)


@pytest.mark.parametrize(("document", "command", "output"), SHOWN, ids=[f"{d}: {c}" for d, c, _ in SHOWN])
def test_output_is_what_the_command_prints(
    kvcalc: Run, document: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "WIDTH", width_of(document))
    found = kvcalc(command)
    assert found.code in (0, 1), found.err  # 1 if the answer is no
    assert is_shown(found.out, output), found.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert any(f"kvcalc {name}" in path.read_text(encoding="utf-8") for path in DOCUMENTS)


def test_documented_options_exist(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # help cuts long names off to fit the terminal
    known = {"--version", "--help"}
    for name in COMMANDS:
        known |= set(re.findall(r"--[a-z][a-z0-9-]+", kvcalc(f"{name} --help").out))
    for path in DOCUMENTS:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "kvcalc " in line]
        for option in {o for line in lines for o in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)}:
            assert option in known, f"{path.name}: {option}"
