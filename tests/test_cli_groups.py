"""Options in groups: a command shows what its groups hold, and gets them back as one value."""

import inspect
from typing import Annotated, Any

import pytest
import typer
from conftest import Run
from typer.testing import CliRunner

from kvcalc.capacity import FitOptions
from kvcalc.cli.app import COMMANDS
from kvcalc.cli.engine_options import EngineOptions
from kvcalc.cli.groups import Deploying, FurtherRanks, Group, Ranks, grouped
from kvcalc.cli.latency import RequestOptions
from kvcalc.cli.serve import LoadOptions, ServerOptions
from kvcalc.errors import UserError
from kvcalc.layers.ranks import Parallelism
from kvcalc.serving.request_record import LatencyOptions
from kvcalc.serving.run import Load, ServerSettings


class Inner(Group, frozen=True):
    deep: Annotated[int, typer.Option("--deep")] = 7
    many: Annotated[list[str], typer.Option("--many")] = []


class Outer(Group, frozen=True, kw_only=True):
    first: Annotated[str, typer.Option("--first")] = "a"
    inner: Inner
    last: Annotated[bool, typer.Option("--last")] = False


def sample(taken: list[Any]) -> Any:
    @grouped
    def run(name: str, *, outer: Outer, own: Annotated[int, typer.Option("--own")] = 1) -> None:
        """What it does."""
        taken.append((name, outer, own))

    return run


def test_a_group_stands_in_its_place_as_the_options_it_holds() -> None:
    run = sample([])
    parameters = inspect.signature(run).parameters
    assert [(p.name, p.default) for p in parameters.values()] == [
        ("name", inspect.Parameter.empty), ("first", "a"), ("deep", 7), ("many", []), ("last", False), ("own", 1),
    ]  # fmt: skip
    assert {name: p.annotation for name, p in parameters.items()} == run.__annotations__
    assert (run.__name__, run.__doc__) == ("run", "What it does.")


def test_the_command_gets_its_groups_back() -> None:
    taken: list[Any] = []
    app = typer.Typer()
    app.command()(sample(taken))
    words = ["x", "--deep", "3", "--many", "u", "--many", "v", "--last", "--own", "9"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, ["y"]).exit_code == 0
    assert taken == [
        ("x", Outer(first="a", inner=Inner(3, ["u", "v"]), last=True), 9),
        ("y", Outer(inner=Inner()), 1),
    ]


def test_groups_that_hold_an_option_of_one_name_are_refused() -> None:
    class Twice(Group, frozen=True):
        deep: Annotated[int, typer.Option("--deep")] = 1

    def run(*, inner: Inner, twice: Twice) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="duplicate parameter name: 'deep'"):
        grouped(run)


@pytest.mark.parametrize(
    ("group", "specs", "apart"),
    [
        (EngineOptions, [FitOptions], {"disable_hybrid"}),
        (RequestOptions, [LatencyOptions], set()),
        (LoadOptions, [Load], set()),
        (ServerOptions, [ServerSettings], set()),
    ],
)
def test_options_bear_the_names_of_what_they_set(group: type[Group], specs: list[Any], apart: set[str]) -> None:
    """A misspelled field would leave its option without effect."""
    known = {name for spec in specs for name in spec.__struct_fields__}
    assert set(group.__struct_fields__) - known == apart
    assert known - set(group.__struct_fields__) <= {"hybrid", "page_tuples"}  # which no option names


def test_ranks_from_options() -> None:
    further = FurtherRanks(pp=2, dp=4, dcp=2)
    assert Ranks(tp="8,4", further=further).parallelisms([]) == [Parallelism(8, 2, 4, 1, 2), Parallelism(4, 2, 4, 1, 2)]
    assert FurtherRanks(dp=4, enable_expert_parallel=True).beside(8) == Parallelism(8, 1, 4, 32)
    with pytest.raises(UserError, match="exclude each other"):
        FurtherRanks(ep=2, enable_expert_parallel=True).beside(2)


def test_commands_that_deploy_share_its_options(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = [p.annotation.__metadata__[0] for p in inspect.signature(grouped(_deploys)).parameters.values()]
    names = [name for option in options if not option.hidden for name in (option.default, *(option.param_decls or ())) if name]
    assert {"--dtype", "--kv-cache-dtype", "--mla-form", "--set", "--tp", "--dcp"} <= set(names)
    assert {"--engine", "--engine-version", "--bounds", "--calibration"} <= set(names)
    for command in ("compare", "roofline", "latency", "serve"):
        shown = kvcalc(f"{command} --help").out
        assert [name for name in names if name not in shown] == [], command


def _deploys(*, deploying: Deploying) -> None: ...


FALLBACK = "computed in bf16: a100-80gb has no fp8 unit"


@pytest.mark.parametrize("command", ["roofline", "compare --variants none,mqa", "latency", "serve --num-prompts 3 --osl 3"])
def test_a_fallback_is_never_silent(kvcalc: Run, command: str) -> None:
    """An A100 multiplies no fp8: table and record say what it computes in; an H100 does, and so does bf16 on an A100."""
    name, _, more = command.partition(" ")
    line = f"{name} llama-3.1-8b {more} --dtype"
    assert FALLBACK in kvcalc(f"{line} fp8 --gpu a100-80gb").out.splitlines()
    assert kvcalc(f"{line} fp8 --gpu a100-80gb --format json").records[-1]["fallback"] == FALLBACK
    for other in ("fp8 --gpu h100", "bf16 --gpu a100-80gb"):
        assert {r["fallback"] for r in kvcalc(f"{line} {other} --format json").records} == {None}
        assert "computed in bf16:" not in kvcalc(f"{line} {other}").out


def test_a_draft_falls_back_too(kvcalc: Run) -> None:
    """The draft, DeepSeek-V3, is published in fp8; the model beside it is bf16."""
    line = "latency llama-3.1-8b --set vocab_size=129280 --gpu a100-80gb --tp 8 --format json"
    assert kvcalc(line).records[0]["fallback"] is None
    assert kvcalc(f"{line} --draft deepseek-v3 --num-speculative-tokens 1").records[0]["fallback"] == FALLBACK


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help(kvcalc: Run, name: str) -> None:
    found = kvcalc(f"{name} --help")
    assert (found.code, found.err) == (0, "")
    assert COMMANDS[name] in found.out
