"""Common fixtures: no presets of the user, commands that run in this process, reproducible property tests."""

import gc
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import settings
from record_checks import check_records

from kvcalc.layers.cost import Cost, Operator
from kvcalc.serving import server

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=25)
settings.register_profile("here", deadline=None)
settings.register_profile("many", deadline=None, max_examples=1000)  # pytest --hypothesis-profile many: minutes, not seconds
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from garbage collection, because they stay until the end."""
    gc.collect()
    gc.freeze()


class Result(NamedTuple):
    """The output and the exit status of one run of the command line."""

    code: int
    out: str
    err: str

    @property
    def joined(self) -> str:
        """Standard output without line breaks, so that wrapped sentences can be compared."""
        return " ".join(self.out.split())

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return the JSON array on standard output, strictly parsed: NaN and Infinity are no JSON.

        The exit status is 0, or 1 if the command's answer is no.
        """
        assert self.code in (0, 1), self.err

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} in JSON")

        found: list[dict[str, Any]] = json.loads(self.out, parse_constant=refuse)
        return found


Run = Callable[..., Result]


def unfused(operators: Iterable[Operator]) -> list[Operator]:
    """Return the operators of a pass with the experts' parts as separate operators. The total cost does not change."""
    found = []
    for operator in operators:
        if operator.kind != "experts":
            found.append(operator)
            continue
        assert sum((cost for _, cost in operator.parts), Cost()) == operator.cost
        for name, cost in operator.parts:
            dtype = operator.dtype if cost.flops else ""
            found.append(msgspec.structs.replace(operator, name=f"experts_{name}", cost=cost, dtype=dtype, parts=()))
    return found


@pytest.fixture(autouse=True, scope="session")
def _own_presets_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the user's presets and the width of the user's terminal from the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        for name in ("KVCALC_PRESETS", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
            patch.delenv(name, raising=False)
        yield


FEW = {"STEADY_REQUESTS": 60, "MAX_STARTED_REQUESTS": 16, "MIN_BACKLOG": 64}
USUAL = {name: getattr(server, name) for name in FEW}
for _name, _count in FEW.items():  # the saturation rate takes most of the time of a short `serve`
    setattr(server, _name, _count)


@pytest.fixture
def full_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the saturation rate from as many requests as in use, for tests that compare it with a figure."""
    for name, count in USUAL.items():
        monkeypatch.setattr(server, name, count)


@pytest.fixture
def kvcalc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command line in this process: `kvcalc("size gpt2", "--context", "8k")`. It
    also checks that every record key is described."""
    from kvcalc.cli.app import main

    def run(line: str, *more: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["kvcalc", *shlex.split(line), *more])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        found = Result(int(ended.value.code or 0), *capsys.readouterr())
        if "json" in sys.argv and found.code < 2 and found.out.startswith("["):
            check_records(sys.argv[1], found.records)
        return found

    return run
