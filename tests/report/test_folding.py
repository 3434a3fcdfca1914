"""YAML folded for a terminal says the same, and only words as long as addresses are longer than the terminal is wide."""

from pathlib import Path

import pytest
import yaml

from kvcalc.report.text.table_layout import folded

PRESETS = Path(__file__).parent.parent.parent / "presets"
FILES = [PRESETS / "models" / f"{name}.yaml" for name in ("llama-3.1-8b", "deepseek-v4-pro", "gemma-3-27b", "zamba2-1.2b")]


@pytest.mark.parametrize("path", [*FILES, *sorted((PRESETS / "gpus").glob("[am]*.yaml"))], ids=lambda path: path.stem)
@pytest.mark.parametrize("width", [40, 80])
def test_the_same_in_fewer_columns(path: Path, width: int) -> None:
    text = path.read_text(encoding="utf-8")
    shown = folded(text, width)
    assert yaml.safe_load(shown) == yaml.safe_load(text)
    longest = [max(line.split(), key=len) for line in shown.splitlines() if len(line) > width]
    assert all(len(word) > width - 12 for word in longest), "what could be folded is"


def test_a_remark_stands_above_and_marks_in_quotes_are_none() -> None:
    line = "a: 'one # two'  # three four five six seven eight"
    assert folded(line, 30) == "# three four five six seven\n# eight\na: 'one # two'\n"
    assert folded("b: [1, 2, 3, 4, 5, 6]", 14) == "b: [1, 2, 3,\n    4, 5, 6]\n"
