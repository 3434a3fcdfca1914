"""Options are declared in questions: a command shows the options of its questions, and gets typed questions."""

from typing import Annotated, Any

import pytest
from conftest import Run

from kvcalc import load_model
from kvcalc.answers.deployments import parallelism_of, split_sizes
from kvcalc.cli.commands import COMMANDS, function_of, parameters_of
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.question.deployment_options import DeploymentOptions, ShardingOptions
from kvcalc.question.options import Argument, Option, Question, arguments_for, parameters_in, read_question, read_questions
from kvcalc.units import parse_tokens


class First(Question, frozen=True):
    deep: Annotated[int, Option("Depth", max=9)] = 7
    words: Annotated[list[str], Option("Names", "--words -m")] = []
    last: Annotated[bool, Option("Last", "/--no-last")] = True


class Second(Question, frozen=True):
    slow: Annotated[int, Option("Slow", read=parse_tokens, list_order=2)] = 1
    fast: Annotated[float, Option("Fast", list_order=1)] = 0.0
    sizes: Annotated[tuple[int, ...], Option("Sizes", read=parse_tokens)] = ()


def run(
    name: Annotated[str, Argument("Name")],
    *,
    first: First,
    seconds: list[Second],
    typed: Annotated[dict[str, Any], Second],
    own: Annotated[int, Option("Own")] = 1,
) -> None:
    raise AssertionError


def test_a_question_is_replaced_by_its_options() -> None:
    parameters = list(parameters_in(run))
    assert [(p.name, p.default, p.names) for p in parameters[1:4]] == [
        ("deep", 7, ["--deep"]),
        ("words", [], ["--words", "-m"]),
        ("last", True, ["--no-last"]),
    ]
    assert parameters[0].is_argument and parameters[0].is_required


def test_a_command_gets_its_questions() -> None:
    """The list with the smaller number changes faster; a tuple is one value."""
    lists = {"slow": "1k,2k", "fast": [0.5, 1], "sizes": "1,4k"}
    values = {"name": "x", "deep": 3, "words": ["u"], "last": False, "own": 9} | lists
    assert arguments_for(run, values) == {
        "name": "x",
        "first": First(3, ["u"], False),
        "seconds": [Second(slow, fast, (1, 4096)) for slow in (1024, 2048) for fast in (0.5, 1)],
        "typed": lists,
        "own": 9,
    }


def test_values_out_of_range_or_of_another_type_are_refused() -> None:
    for value in (-1, 10, True, 1.5):
        with pytest.raises(UserError, match=r"deep .* is not a whole number from 0 to 9"):
            First(deep=value)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"deep 'x': Expected `int`"):
        read_question(First, {"deep": "x"})
    with pytest.raises(UserError, match="slow '1,,2' has an empty item"):
        read_questions(Second, {"slow": "1,,2"})
    with pytest.raises(UserError, match=r"'8,000' is a list. Write 8000"):
        read_questions(Second, {"slow": "8,000"})
    with pytest.raises(UserError, match="the maximum is 250,000"):
        read_questions(Second, {"slow": range(1, 1002), "fast": range(1000)})


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_is_declared_twice(command: str) -> None:
    names = [name for parameter in parameters_of(command) for name in parameter.names]
    assert len(names) == len({*names})


def test_ranks_from_options() -> None:
    sharded = read_questions(ShardingOptions, {"tp": "8,4", "pp": 2, "dp": 4, "dcp": 2})
    assert [*map(parallelism_of, sharded)] == [Parallelism(8, 2, 4, 1, 2), Parallelism(4, 2, 4, 1, 2)]
    assert parallelism_of(ShardingOptions(tp=8, dp=4, enable_expert_parallel=True)) == Parallelism(8, 1, 4, 32)
    with pytest.raises(UserError, match="use either"):
        parallelism_of(ShardingOptions(tp=2, ep=2, enable_expert_parallel=True))
    model = load_model("smollm-360m")  # 15 heads: only 1 of 1, 2, 4 and 8 divides them
    assert [one.tp for one in split_sizes(read_questions(ShardingOptions, {"tp": "auto"}), [model])] == [1]


@pytest.mark.parametrize("command", ["compare", "roofline", "latency", "serve"])
def test_commands_that_deploy_share_its_options(command: str) -> None:
    assert {p.name for p in parameters_in(DeploymentOptions)} <= {p.name for p in parameters_in(function_of(command))}


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
