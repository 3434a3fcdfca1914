"""The README, CONTRIBUTING, CI and the pre-commit hooks all run the same checks."""

from pathlib import Path

import pytest
import yaml
from check import LINTERS

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / ".ci" / "run").is_file(), reason="not a checkout")
COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[dev]' && .venv/bin/pytest"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_one_command_runs_the_tests(name: str) -> None:
    assert COMMAND in (ROOT / name).read_text(encoding="utf-8").splitlines()


def test_hooks_run_the_linters() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = [hook["entry"].removeprefix("python -m ").split() for hook in repository["hooks"]]
    assert [hook[:2] for hook in hooks] == [[word for word in linter if word != "--check"][:2] for linter in LINTERS]
