"""`kvcalc plan`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from kvcalc.answers.answer import Answer
from kvcalc.answers.deployments import models_of, remarks
from kvcalc.question.plan_options import Requirement, SpaceOptions
from kvcalc.records import Settings

if TYPE_CHECKING:
    from kvcalc.model.model import Model
    from kvcalc.report.charts.chart import Chart


def run(
    models: list[str],
    *,
    need: Annotated[Settings, Requirement],
    space: Annotated[Settings, SpaceOptions],
    points: str = "",
    jobs: int = 1,
    emit: str = "",
    set_: list[str] = [],  # noqa: B006 (no function changes the list)
) -> Answer:
    """Find the best deployments for a load. The exit status is 1 if none meets the targets.

    The answer has at most five deployments for each model and each combination of load and targets.
    The best has the lowest price per hour, or without prices the smallest number of GPUs. Then the
    lowest TPOT decides. The best of each GPU model are included. If none meets the targets, the
    answer has the one that misses them least. Up to five with only datasheet bounds follow.

    Args:
        models: Models, each word a name or a comma-separated list.
        need: Option name → value, for the options in `Requirement`: the load, and the targets for
            latency and throughput.
        space: Option name → value, for the options in `SpaceOptions`: the GPUs, parallelism, data
            types and engines to try.
        points: File to write with every configuration that was tried; '' for none.
        jobs: Has no effect. Old scripts may use it.
        emit: Form in which the best deployment is printed: vllm, docker, compose or kubernetes; ''
            for a table.
        set_: Changes of the models' fields, such as `layers=40`.
    """
    return plan_answer(models_of(models, set_), need | space, points, emit)


def plan_answer(
    models: "Sequence[Model]", options: Settings, points: str = "", emit: str = ""
) -> Answer:
    """Return the best deployments for each combination of a load and its targets.

    At most five are returned for each model, the best first: the lowest price per hour, or without
    prices the smallest number of GPUs, then the lowest TPOT. Up to five with only datasheet bounds
    follow. The exit status of the answer is 1 if no deployment meets the targets. The answer then
    has the one of each model that misses them least.

    Args:
        models: The models. Each is tried.
        options: Option name → value, for the options in `Requirement` (load and targets) and
            `SpaceOptions` (the tried deployments).
        points: File to write with every configuration that was tried; '' for none.
        emit: Form in which the best deployment is printed: vllm, docker, compose or kubernetes; ''
            for a table.
    """
    from kvcalc.capacity.deployment_files import deployment_text
    from kvcalc.planning.best_configs import answer_records
    from kvcalc.planning.search import run_search
    from kvcalc.planning.search_space import question_of
    from kvcalc.report.text.plan_text import plan_table

    for model in models:
        model.check_generates()
    question = question_of(models, options)
    longest = max(need.lengths.context for need in question.needs)
    with _file_and_progress(points, question.prices) as on_batch:
        plan = run_search(question.needs, question.space, question.prices, on_batch)
    records = [answer_records(answer, plan.space) for answer in plan.answers]
    text, first = "", plan.answers[0]
    if emit and first.best:
        version, lead = plan.space.options.engine_version, first.lead
        text = deployment_text(
            records[0][lead], first.listed[lead].deployment.gpu, version, emit
        )

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.comparison_plot import front_chart

        return [front_chart(answer) for answer in plan.answers if len(answer.front.xs)]

    def formulas() -> str:
        from kvcalc.report.explain import explain_plan

        return "\n".join(explain_plan(answer, plan.space) for answer in plan.answers)

    return Answer(
        [record for part in records for record in part],
        lambda: [plan_table(plan, records)],
        draw,
        _yaml=text,
        _formulas=formulas,
        _notes=[*remarks(models, longest), *plan.remarks],
        _status=int(not any(answer.best for answer in plan.answers)),
    )


@contextmanager
def _file_and_progress(
    path: str, prices: Mapping[str, float]
) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes each batch to the file and moves the progress bar."""
    from kvcalc.answers.answer import note
    from kvcalc.planning.search import CandidateFile
    from kvcalc.report.text.measure_text import progress_bar

    with CandidateFile(path, prices) as points, progress_bar("points") as move:

        def take(batch: Any) -> None:
            points.write(batch)
            move(completed=points.count)

        yield take
    if path and path != "-":
        note(f"{points.count:,} points in {path}")
