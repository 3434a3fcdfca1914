"""Outputs in the documents equal the output of the commands, and every named option and command exists."""

import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.cli.app import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"^…\n?", re.MULTILINE)  # a line of its own: some of what the command prints is not shown


def width_of(document: str) -> int:
    """Return the columns of a document's outputs: of a terminal in the README, of a pipe in other documents."""
    return 80 if document == "README.md" else 100


def shown() -> list[tuple[str, str, str]]:
    """Return (document, command line, output) of every command in a fenced console block. A block may have several."""
    found = []
    for path in DOCUMENTS:
        for block in _FENCE.findall(path.read_text(encoding="utf-8")):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                if command.startswith("kvcalc "):
                    found.append((path.relative_to(ROOT).as_posix(), command.removeprefix("kvcalc "), output))
    return found


def is_shown(printed: str, output: str) -> bool:
    """Return whether a document's `output` equals the printed text, except for marked gaps."""
    parts = LEFT_OUT.split(output.rstrip("\n") + "\n")
    return bool(re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, parts)), printed.rstrip("\n") + "\n"))


SHOWN = shown()


def test_readme_shows_real_output() -> None:
    assert any(name == "README.md" for name, _, _ in SHOWN)


@pytest.mark.usefixtures("full_backlog")
@pytest.mark.parametrize(("document", "command", "output"), SHOWN, ids=[f"{d}: {c}" for d, c, _ in SHOWN])
def test_output_is_what_the_command_prints(
    kvcalc: Run, document: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width_of(document)))
    found = kvcalc(command)
    printed = found.err if found.code == 2 else found.out  # a page may show a refusal
    assert is_shown(printed, output), printed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert any(f"kvcalc {name}" in path.read_text(encoding="utf-8") for path in DOCUMENTS)


def test_documented_options_exist(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # help cuts long names off to fit the terminal
    known = {"--version", "--help", "--help-all", "--install-completion", "--show-completion"}
    for name in COMMANDS:
        known |= set(re.findall(r"--[a-z][a-z0-9-]+", kvcalc(f"{name} --help-all").out))
    for path in DOCUMENTS:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "kvcalc " in line]
        for option in {o for line in lines for o in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)}:
            assert option in known, f"{path.name}: {option}"


CLAIM = re.compile(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|`kvcalc ([^`|]+)`\|$", re.MULTILINE)
CLAIMS = [row for kind in ("memory", "speed") for row in CLAIM.findall((ROOT / f"docs/explanation/claims-{kind}.md").read_text())]


@pytest.mark.parametrize(("claim", "verdict", "figure", "command"), CLAIMS, ids=[row[0] for row in CLAIMS])
def test_a_claim_has_a_verdict_and_a_figure_that_its_command_prints(
    kvcalc: Run, claim: str, verdict: str, figure: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert verdict.startswith(("right", "rough", "wrong", "depends on"))
    found = kvcalc(command)
    assert found.code in (0, 1), found.err
    numbers = [number.rstrip(".,") for number in re.findall(r"\d[\d.,]*", figure)]
    printed = [number for number in numbers if number in found.out and len(number) > 1]
    assert printed or not numbers, found.out


FOLDERS = ("tutorials", "how-to", "explanation", "reference")
PAGES = [path for path in DOCUMENTS if path.parent.name in FOLDERS or path.stem in ("index", "gallery")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Return the text of a page outside code fences."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_answers_one_question(path: Path) -> None:
    titles = re.findall(r"^# (.*)$", prose(path), re.MULTILINE)
    assert len(titles) == 1 and titles[0].endswith("?"), titles
    assert len(prose(path).split()) <= 900


def test_the_documents_stay_short() -> None:
    assert sum(len(prose(path).split()) for path in PAGES) <= 22_000
    assert len(DOCUMENTS[0].read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.parametrize(
    "path", [DOCUMENTS[0], *PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_links_lead_to_files(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        target = link.partition("#")[0]
        if target and "://" not in target:
            assert (path.parent / target).exists(), link


def test_the_navigation_lists_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]))
    generated = {"reference/generated/options.md", "reference/generated/records.md"}
    assert listed == generated | {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
