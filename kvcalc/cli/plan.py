"""`kvcalc plan`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Output, TimedEngine, chosen_models
from kvcalc.cli.options import Option, OptionGroup, note, remarks, say
from kvcalc.records import Record

if TYPE_CHECKING:
    from kvcalc.planning.question import PlanQuestion

_need = partial(Option, panel="Workload")
_space = partial(Option, panel="Search space")


class NeedOptions(OptionGroup, frozen=True):
    """What has to be met, by the names of `Need`; those of tokens, users and rates are lists."""

    users: Annotated[
        str,
        Option(
            "Concurrent users over all replicas; a list adds rows",
            takes="N",
            is_common=True,
            called=o.USER_WORDS,
        ),
    ] = ""
    context: Annotated[
        str,
        Option(
            "Tokens per user: 16k; or --input-len and --output-len",
            takes="TOKENS",
            is_common=True,
            called=o.CONTEXT_WORDS,
        ),
    ] = ""
    input_len: Annotated[
        str,
        _need(
            "Prompt tokens; a list",
            "--input-len --isl",
            "TOKENS",
            called=o.PROMPT_WORDS,
        ),
    ] = ""
    output_len: Annotated[
        str,
        _need(
            "Output tokens; a list",
            "--output-len --osl",
            "TOKENS",
            called=o.OUTPUT_WORDS,
        ),
    ] = ""
    rate: Annotated[
        str,
        _need(
            "Requests per second, instead of --users",
            "--rate --request-rate",
            "R",
            called=o.RATE_WORDS,
        ),
    ] = ""
    max_ttft: Annotated[
        str,
        Option(
            "Longest time to first token: 2s",
            "--max-ttft --slo-ttft",
            "TIME",
            is_common=True,
            called=o.TTFT_WORDS,
        ),
    ] = ""
    max_tpot: Annotated[
        str,
        Option(
            "Longest time per output token: 50ms",
            "--max-tpot --slo-tpot",
            "TIME",
            is_common=True,
            called=o.TPOT_WORDS,
        ),
    ] = ""
    min_throughput: Annotated[
        str,
        Option(
            "Smallest output tokens per second of all replicas",
            takes="X",
            panel="Targets",
        ),
    ] = ""
    prefix_hit_rate: Annotated[
        str,
        _need(
            "Share of each prompt that is cached, 0 to 1",
            takes="X",
            called=o.PREFIX_WORDS,
        ),
    ] = ""


class SpaceOptions(TimedEngine, frozen=True):
    """What is looked through; lists, of which every combination is."""

    gpu: o.Gpus = "all"
    max_gpus: Annotated[
        int, Option("Largest number of GPUs of all replicas together", is_common=True)
    ] = 16
    tp: Annotated[
        str,
        _space(
            "GPUs for tensor parallelism; a list; default: every size that fits",
            "--tensor-parallel-size --tp -tp",
            "N",
        ),
    ] = ""
    pp: Annotated[
        str,
        _space(
            "GPUs for pipeline parallelism; a list; default: every size",
            "--pipeline-parallel-size --pp -pp",
            "N",
        ),
    ] = ""
    dp: Annotated[
        str,
        _space(
            "Groups for data parallelism in a replica; a list; default: all",
            "--data-parallel-size --dp -dp",
            "N",
        ),
    ] = ""
    ep: Annotated[
        str,
        _space(
            "GPUs for expert parallelism; a list; default: every size",
            "--expert-parallel-size --ep",
            "N",
        ),
    ] = ""
    nodes: o.Nodes = 0
    inter_node_bandwidth: o.NodeBandwidth = ""
    dtype: o.Dtype = "auto"
    kv_cache_dtype: o.CacheDtype = "auto"
    quantization: o.Quantization = ""
    gpu_memory_utilization: Annotated[
        str,
        _space("Share of GPU memory for the engine; default: the engine's", takes="X"),
    ] = ""
    max_num_batched_tokens: Annotated[
        str, _space("Tokens of one forward pass; default: the engine's", takes="TOKENS")
    ] = ""
    enforce_eager: Annotated[
        bool, _space("Run without CUDA graphs and compilation, as in vLLM")
    ] = False
    draft: Annotated[
        str,
        _space(
            "Draft models to try: none, a model, layers=N or mtp; a list",
            takes="MODEL",
            words=o.model_names,
            called=o.DRAFT_WORDS,
        ),
    ] = ""
    num_speculative_tokens: Annotated[
        str, _space("Draft tokens per step; a list", takes="N")
    ] = ""
    acceptance_rate: Annotated[
        str, _space("Share of draft tokens that is accepted; default: 0.8", takes="X")
    ] = ""
    disaggregate: Annotated[
        bool,
        _space(
            "Also try prefill on separate replicas",
            called="disaggregated disaggregation prefill-decode pd",
        ),
    ] = False
    price_per_hour: Annotated[
        str,
        Option(
            "Price per GPU and hour: 2.5, h100=2.5,h200=3.1 or a YAML file",
            takes="MONEY",
            is_common=True,
            called="price cost cost-per-hour",
        ),
    ] = ""


def run(
    models: o.Models,
    *,
    need: NeedOptions,
    space: SpaceOptions,
    file: Annotated[
        str,
        Option("YAML file of these options; typed options override it", takes="FILE"),
    ] = "",
    points: Annotated[
        str,
        Option(
            "Write every configuration to a .csv or .jsonl file",
            takes="FILE",
            panel="Output",
            is_output=True,
        ),
    ] = "",
    jobs: Annotated[
        int, Option("Kept for old scripts; has no effect", "--jobs -j", is_hidden=True)
    ] = 1,
    set_: o.Settings = [],  # noqa: B006 (typer copies it)
    output: Output,
) -> int:
    """Find the best deployments. Return 1 if none meets the targets."""
    from kvcalc.planning.best_configs import answer_records
    from kvcalc.planning.search import run_search

    chosen = chosen_models(models, set_)
    result = _question(chosen, need, space, file)
    remarks(chosen, max(need.lengths.context for need in result.needs))
    with _sink(points, result) as on_batch:
        plan = run_search(result.needs, result.space, result.prices, on_batch)
    for text in plan.remarks:
        note(text)
    records = [answer_records(answer, plan.space) for answer in plan.answers]
    if output.plot:
        from kvcalc.planning.sweeps import front_curve
        from kvcalc.report.charts.comparison_plot import front_charts

        charts, empty = front_charts([front_curve(answer) for answer in plan.answers])
        for text in empty:
            note(text)
        if charts:
            output.picture(*charts)
    if output.explain:
        from kvcalc.report.explain_sums import explain_plan

        say("\n".join(explain_plan(answer, plan.space) for answer in plan.answers))
    elif not output.printed([record for part in records for record in part]):
        from kvcalc.report.text.plan_text import plan_tables

        output.show(*plan_tables(plan, records))
    return int(not any(answer.best for answer in plan.answers))


def _question(
    models: "list[Any]", need: NeedOptions, space: SpaceOptions, file: str
) -> "PlanQuestion":
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


def _refused(models: "list[Any]", given: Record) -> str:
    """What is said of the command line's own options; '' where nothing is."""
    from kvcalc.errors import UserError
    from kvcalc.planning.question import question_of

    try:
        question_of(models, given)
    except UserError as error:
        return str(error)
    return ""


@contextmanager
def _sink(path: str, found: "PlanQuestion") -> Iterator[Any]:
    """Yield the function that gets each batch: it writes the file and moves the progress bar."""
    from kvcalc.planning.search import CandidateFile

    if not path and not sys.stderr.isatty():
        yield None
        return
    with CandidateFile(path, found.prices) as points, _progress() as show:

        def take(batch: Any) -> None:
            points.write(batch)
            show(points.count)

        yield take
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
        TextColumn("{task.completed:,} points"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("points", total=None)
        yield lambda count: bar.update(task, completed=count)
