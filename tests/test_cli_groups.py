"""Options are declared in questions. A command shows the options of its questions and receives typed questions."""

import pytest
from conftest import Run

from kvcalc import load_model
from kvcalc.answers.deployments import parallelism_of, split_sizes
from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.question.deployment_options import ShardingOptions
from kvcalc.question.fit_question import FitQuestion
from kvcalc.question.options import read_question, read_questions
from kvcalc.question.size_options import ContextOptions


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


FALLBACK = "computed in bf16: a100-80gb has no fp8 unit"


@pytest.mark.parametrize("command", ["roofline", "compare --variants none,mqa", "latency", "serve --num-prompts 3 --osl 3"])
def test_a_fallback_is_never_silent(kvcalc: Run, command: str) -> None:
    """An A100 has no fp8 units: table and record name the compute dtype. An H100 has them. bf16 on an A100 needs none."""
    name, _, more = command.partition(" ")
    line = f"{name} llama-3.1-8b {more} --dtype"
    assert FALLBACK in kvcalc(f"{line} fp8 --gpu a100-80gb").out.splitlines()
    assert kvcalc(f"{line} fp8 --gpu a100-80gb --format json").records[-1]["fallback"] == FALLBACK
    for other in ("fp8 --gpu h100", "bf16 --gpu a100-80gb"):
        assert {r["fallback"] for r in kvcalc(f"{line} {other} --format json").records} == {None}
        assert "computed in bf16:" not in kvcalc(f"{line} {other}").out
