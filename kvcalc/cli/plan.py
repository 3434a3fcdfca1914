"""`kvcalc plan`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_models
from kvcalc.cli.common import note, remarks, say
from kvcalc.cli.groups import Group, Output, TimedEngine, grouped

if TYPE_CHECKING:
    from kvcalc.planning.question import Question

_need = partial(typer.Option, rich_help_panel="The need")
_space = partial(typer.Option, rich_help_panel="What is looked through")


class NeedOptions(Group, frozen=True):
    """What has to be met, by the names of `Need`; those of tokens, users and rates are lists."""

    users: Annotated[str, _need("--users", help="Users at once, over all replicas; a list makes more rows.")] = ""
    context: Annotated[str, _need("--context", help="Tokens of each: 16k; or --input-len and --output-len.")] = ""
    input_len: Annotated[str, _need("--input-len", "--isl", help="Prompt tokens.")] = ""
    output_len: Annotated[str, _need("--output-len", "--osl", help="Generated tokens.")] = ""
    rate: Annotated[str, _need("--rate", "--request-rate", help="Requests per second, instead of users.")] = ""
    max_ttft: Annotated[str, _need("--max-ttft", "--slo-ttft", help="To the first token at most: 2s.")] = ""
    max_tpot: Annotated[str, _need("--max-tpot", "--slo-tpot", help="From token to token at most: 50ms.")] = ""
    min_throughput: Annotated[str, _need("--min-throughput", help="Output tokens per second of all replicas.")] = ""
    prefix_hit_rate: Annotated[str, _need("--prefix-hit-rate", help="Share of a prompt that is cached already, 0 to 1.")] = ""


class SpaceOptions(TimedEngine, frozen=True):
    """What is looked through; lists, of which every combination is."""

    gpu: Annotated[str, typer.Option("--gpu", help="all, or presets and YAML files, comma-separated.")] = "all"
    max_gpus: Annotated[int, _space("--max-gpus", help="Of all replicas together.")] = 16
    tp: Annotated[str, _space("--tensor-parallel-size", "-tp", "--tp", help="A list; every split of the model unless given.")] = (
        ""
    )
    pp: Annotated[str, _space("--pipeline-parallel-size", "-pp", "--pp", help="Likewise.")] = ""
    dp: Annotated[str, _space("--data-parallel-size", "-dp", "--dp", help="Likewise, inside a replica.")] = ""
    ep: Annotated[str, _space("--expert-parallel-size", "--ep", help="Likewise.")] = ""
    nodes: o.Nodes = 0
    inter_node_bandwidth: o.InterNode = ""
    dtype: o.Dtype = "auto"
    kv_cache_dtype: o.CacheDtype = "auto"
    quantization: o.Quant = ""
    gpu_memory_utilization: Annotated[
        str, _space("--gpu-memory-utilization", help="Share of the memory; the engine's own by default.", show_default=False)
    ] = ""
    max_num_batched_tokens: Annotated[
        str, _space("--max-num-batched-tokens", help="Tokens of one pass; the engine's default by GPU.", show_default=False)
    ] = ""
    enforce_eager: Annotated[bool, _space("--enforce-eager", help="No CUDA graphs, nothing compiled.")] = False
    draft: Annotated[
        str, _space("--draft", help="Speculation, a list: none, a model, layers=N of this one, or mtp.", show_default=False)
    ] = ""
    num_speculative_tokens: Annotated[
        str, _space("--num-speculative-tokens", help="Drafted per step; a list.", show_default=False)
    ] = ""
    acceptance_rate: Annotated[
        str, _space("--acceptance-rate", help="Of a drafted token, 0 to 1; 0.8 unless given.", show_default=False)
    ] = ""
    disaggregate: Annotated[bool, _space("--disaggregate", help="Also with replicas for prompts alone.")] = False
    price_per_hour: Annotated[
        str,
        typer.Option("--price-per-hour", help="h100=2.5,h200=3.1, one number for one GPU, or a YAML file.", show_default=False),
    ] = ""


@grouped
def run(
    models: o.SomeModels,
    *,
    need: NeedOptions,
    space: SpaceOptions,
    file: Annotated[str, typer.Option("--file", help="YAML with these options as keys; those given here come first.")] = "",
    points: Annotated[str, typer.Option("--points", help="Write every point to a .csv or .jsonl file.", metavar="FILE")] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes that look through it; the answer is the same.")] = 1,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    output: Output,
) -> None:
    """What do I need, and what is the best of it. Exits with 1 if nothing meets the targets."""
    from kvcalc.planning.records import answer_records
    from kvcalc.planning.search import searched

    chosen = chosen_models(models, set_)
    found = _question(chosen, need, space, file)
    remarks(chosen, max(need.lengths.context for need in found.needs))
    with _sink(points, found) as (seen, rows):
        plan = searched(found.needs, found.space, found.prices, seen, rows, jobs)
    for text in plan.remarks:
        note(text)
    records = [answer_records(answer, plan.space) for answer in plan.answers]
    if output.plot:
        from kvcalc.report.figures_plan import fronts

        charts, empty = fronts(plan)
        for text in empty:
            note(text)
        if charts:
            output.picture(*charts)
    if output.explain:
        from kvcalc.report.explain_point import explain_plan

        say("\n".join(explain_plan(answer, plan.space) for answer in plan.answers))
    elif not output.printed([record for part in records for record in part]):
        from kvcalc.report.plans import plan_tables

        output.show(*plan_tables(plan, records))
    if not any(answer.best for answer in plan.answers):
        raise typer.Exit(1)


def _question(models: "list[Any]", need: NeedOptions, space: SpaceOptions, file: str) -> "Question":
    """The question of the command line; what it leaves at its default is a file's."""
    from kvcalc.errors import UserError
    from kvcalc.planning.question import file_options, question_of

    typed = msgspec.structs.asdict(need) | msgspec.structs.asdict(space)
    if not file:
        return question_of(models, typed)
    usual = msgspec.structs.asdict(NeedOptions()) | msgspec.structs.asdict(SpaceOptions())
    given = {name: value for name, value in typed.items() if value != usual[name]}
    options = file_options(file)
    try:
        return question_of(models, typed | options | given)
    except UserError as error:
        if error.where or _refused(models, given) == str(error):
            raise
        raise UserError(error.what, file, error.hint) from None


def _refused(models: "list[Any]", given: dict[str, Any]) -> str:
    """What is said of the command line's own options; '' where nothing is."""
    from kvcalc.errors import UserError
    from kvcalc.planning.question import question_of

    try:
        question_of(models, given)
    except UserError as error:
        return str(error)
    return ""


@contextmanager
def _sink(path: str, found: "Question") -> Iterator[Any]:
    """Where blocks go as they are made, and what makes rows of them: a file, and a bar on stderr where that is a terminal."""
    from kvcalc.planning.points import Points

    if not path and not sys.stderr.isatty():
        yield None, None
        return
    with Points(path, found.prices) as points, _progress() as told:

        def seen(blocks: Any, rows: str) -> None:
            points.take(blocks, rows)
            told(points.count)

        yield seen, points.rows
    if path and path != "-":
        note(f"{points.count:,} points in {path}")


@contextmanager
def _progress() -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.completed:,} points"), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("points", total=None)
        yield lambda count: bar.update(task, completed=count)
