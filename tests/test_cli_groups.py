"""Options in groups: a command shows what its groups hold, and gets them back as one value."""

from typing import Annotated, Any

import pytest
from conftest import Run

from kvcalc.capacity import FitOptions
from kvcalc.cli.commands import COMMANDS, function_of, parameters_of
from kvcalc.cli.latency import RequestOptions
from kvcalc.cli.option_groups import Deploying, Ranks
from kvcalc.cli.options import Argument, Option, OptionGroup, arguments_for, parameters_in
from kvcalc.cli.serve import LoadOptions, ServerOptions
from kvcalc.cli.setup import EngineOptions
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.serving.request_record import LatencyOptions
from kvcalc.serving.server import ServerSettings, Workload


class Inner(OptionGroup, frozen=True):
    deep: Annotated[int, Option("Depth")] = 7
    many: Annotated[list[str], Option("Names", "--many -m")] = []


class Outer(OptionGroup, frozen=True, kw_only=True):
    first: Annotated[str, Option("First")] = "a"
    inner: Inner
    last: Annotated[bool, Option("Last")] = False


def run(name: Annotated[str, Argument("Name")], *, outer: Outer, own: Annotated[int, Option("Own", max=9)] = 1) -> None:
    raise AssertionError


def test_a_group_is_replaced_by_its_options() -> None:
    parameters = list(parameters_in(run))
    assert [(p.name, p.default, p.names) for p in parameters[1:]] == [
        ("first", "a", ["--first"]),
        ("deep", 7, ["--deep"]),
        ("many", [], ["--many", "-m"]),
        ("last", False, ["--last"]),
        ("own", 1, ["--own"]),
    ]
    assert parameters[0].is_argument and parameters[0].is_required


def test_a_command_gets_its_groups() -> None:
    values = {"name": "x", "first": "a", "deep": 3, "many": ["u"], "last": True, "own": 9}
    assert arguments_for(run, values) == {"name": "x", "outer": Outer(first="a", inner=Inner(3, ["u"]), last=True), "own": 9}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_is_declared_twice(command: str) -> None:
    names = [name for parameter in parameters_of(command) for name in parameter.names]
    assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("group", "specs", "apart"),
    [
        (EngineOptions, [FitOptions], {"disable_hybrid"}),
        (RequestOptions, [LatencyOptions], set()),
        (LoadOptions, [Workload], set()),
        (ServerOptions, [ServerSettings], set()),
    ],
)
def test_options_bear_the_names_of_what_they_set(group: type[OptionGroup], specs: list[Any], apart: set[str]) -> None:
    """A misspelled field would leave its option without effect."""
    known = {name for spec in specs for name in spec.__struct_fields__}
    assert set(group.__struct_fields__) - known == apart
    assert known - set(group.__struct_fields__) <= {"hybrid", "page_tuples"}  # which no option names


def test_ranks_from_options() -> None:
    assert Ranks(tp="8,4", pp=2, dp=4, dcp=2).parallelisms([]) == [Parallelism(8, 2, 4, 1, 2), Parallelism(4, 2, 4, 1, 2)]
    assert Ranks(tp="8", dp=4, enable_expert_parallel=True).parallelisms([]) == [Parallelism(8, 1, 4, 32)]
    with pytest.raises(UserError, match="use either"):
        Ranks(tp="2", ep=2, enable_expert_parallel=True).parallelisms([])


@pytest.mark.parametrize("command", ["compare", "roofline", "latency", "serve"])
def test_commands_that_deploy_share_its_options(command: str) -> None:
    assert {p.name for p in parameters_in(Deploying)} <= {p.name for p in parameters_in(function_of(command))}


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
