"""Options are declared in questions: a command shows the options of its questions, and gets typed questions."""

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from conftest import Run

from kvcalc import load_model
from kvcalc.answers.deployments import parallelism_of, split_sizes
from kvcalc.answers.pictures import FigureOptions
from kvcalc.cli.commands import COMMANDS, function_of, parameters_of
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.question import options
from kvcalc.question.deployment_options import DeploymentOptions, ShardingOptions
from kvcalc.question.fit_question import FitQuestion, StudyOptions
from kvcalc.question.options import arguments_for, parameters_in, read_question, read_questions
from kvcalc.question.size_options import ContextOptions


def run(
    models: list[str],
    *,
    study: StudyOptions,
    shapes: list[ContextOptions],
    figure: FigureOptions,
    typed: Annotated[dict[str, Any], ContextOptions],
    matrix: bool = False,
) -> None:
    raise AssertionError


def test_a_question_is_replaced_by_its_options() -> None:
    models, lengths, *_ = parameters_in(run)
    assert models.is_argument and models.is_required and models.is_list
    assert (lengths.name, lengths.default, lengths.names, lengths.is_argument) == ("lengths", "", ["--lengths"], False)
    names = {p.name: p.names for p in parameters_in(FitQuestion)}
    assert names["max_model_len"] == ["--max-model-len", "--context"]
    assert names["hybrid"] == ["--disable-hybrid-kv-cache-manager"]


def test_a_command_gets_its_questions() -> None:
    """The list with the smaller number changes faster; a tuple is one value."""
    lists = {"context": "1k,2k", "batch_size": [1, 8]}
    typed = arguments_for(run, {"models": ["x"], "seed": 3, "matrix": True} | lists)
    assert typed == {
        "models": ["x"],
        "study": StudyOptions(seed=3),
        "shapes": [ContextOptions(context, batch) for batch in (1, 8) for context in (1024, 2048)],
        "figure": FigureOptions(context=(1024, 2048), batch_size=(1, 8)),
        "typed": lists,
        "matrix": True,
    }


def test_values_out_of_range_or_of_another_type_are_refused() -> None:
    for value in (-1, (1 << 20) + 1, True, 1.5):
        with pytest.raises(UserError, match=r"max-loras .* is not a whole number from 0 to 1,048,576"):
            FitQuestion(max_loras=value)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="max-loras 'x' is not a whole number"):
        read_question(FitQuestion, {"max_loras": "x"})
    with pytest.raises(UserError, match="context '1,,2' has an empty item"):
        read_questions(ContextOptions, {"context": "1,,2"})
    with pytest.raises(UserError, match=r"'8,000' is a list. Write 8000"):
        read_questions(ContextOptions, {"context": "8,000"})
    with pytest.raises(UserError, match="the maximum is 250,000"):
        read_questions(ContextOptions, {"context": range(1, 1002), "batch_size": range(1, 1001)})


def test_every_entry_is_of_an_option() -> None:
    """`OWNER.NAME` is about a question or a module of a command; an entry without an option would never be seen."""
    entries = json.loads(Path(options.__file__).with_name("options.json").read_text(encoding="utf-8"))
    names = {parameter.name for command in COMMANDS for parameter in parameters_in(function_of(command))}
    names |= {"format", "wide", "verbose", "units", "plot", "style"}
    assert {key.rpartition(".")[2] for key in entries} == names


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
