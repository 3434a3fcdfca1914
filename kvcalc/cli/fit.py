"""`kvcalc fit`."""

from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_gpus, gpu_names
from kvcalc.cli.common import check_number, note, remarks, say
from kvcalc.cli.common import lengths as numbers
from kvcalc.cli.engine_options import EngineOptions
from kvcalc.cli.groups import Output, Precisions, Ranks, grouped
from kvcalc.cli.lines import filled, told_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcalc.capacity import Fit, FitOptions
    from kvcalc.gpu.spec import Gpu
    from kvcalc.timing.deployment import Deployment

MOST_CONFIGURATIONS = 1000
MOST_LAYERS = 1 << 17  # times the stages whose plans they are part of


@grouped
def run(
    models: Annotated[
        list[str],
        typer.Argument(help=o.MODELS_HELP + " Or a command line: -- vllm serve …", metavar="MODEL…", show_default=False),
    ],
    *,
    gpu: o.Gpus = "h100",
    memory: o.Memory = "",
    asked: EngineOptions,
    lengths: Annotated[
        str,
        typer.Option("--lengths", help="A file of lengths, or lognormal:MEAN,P99: what allocation wastes.", show_default=False),
    ] = "",
    allocations: Annotated[
        str,
        typer.Option("--allocations", help="A file of A 50, free A, ask 2049 …: what allocators make of it.", show_default=False),
    ] = "",
    formats: Precisions,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    ranks: Ranks,
    nodes: o.Nodes = 0,
    inter_node_bandwidth: o.InterNode = "",
    seed: Annotated[int, typer.Option("--seed", help="Of drawn lengths and of the simulated allocator.")] = 0,
    matrix: Annotated[bool, typer.Option("--matrix", help="Users × contexts: of each the verdict and what is left.")] = False,
    output: Output,
) -> int:
    """What fits on these GPUs, and what an engine really allocates. Exits with 1 if nothing fits."""
    from kvcalc.capacity.fragmentation import read_lengths
    from kvcalc.capacity.record import Typed, fit_record, smallest_first
    from kvcalc.report.explain_budget import explain_fit
    from kvcalc.report.figures_fit import memory_chart
    from kvcalc.report.fit import fit_table

    where = chosen_gpus(gpu, memory), gpu_names(gpu)
    points, words, told = points_of(models, where, asked, formats, set_, ranks, nodes, inter_node_bandwidth)
    drawn = read_lengths(lengths, seed) if lengths else []
    if matrix:
        return _matrix([(d, one) for d, one in points if one == points[0][1]], asked, told, output)
    answers = smallest_first(_answers(points))
    if allocations:
        return _played(answers[0], allocations, output)
    said = beside_words(set_, asked.from_log, memory)
    all_experts = ranks.further.enable_expert_parallel or "enable_expert_parallel" in told
    typed = [Typed(words[f.model.name], words[f.gpu.name], said, all_experts) for f in answers]
    records = [fit_record(f, drawn, seed, one) for f, one in zip(answers, typed, strict=True)]
    _remarks(answers, records, drawn, said=output.tells)
    if output.plot:
        output.picture(memory_chart(records))
    if output.explain:
        say("\n".join(explain_fit(f, r) for f, r in zip(answers, records, strict=True)))
    elif not output.printed(records):
        output.show(fit_table(records, answers, words if told else None))
    return int(not any(f.fits for f in answers))


def points_of(
    models: list[str],
    where: "tuple[list[Gpu], list[str]]",
    asked: EngineOptions,
    formats: Precisions,
    set_: list[str],
    ranks: Ranks,
    nodes: int = 0,
    between: str = "",
) -> "tuple[list[tuple[Deployment, FitOptions]], dict[str, str], dict[str, Any]]":
    """(every deployment with its options, the words by which models and GPUs were typed, what a command line told).

    where: GPUs, and how they were typed. between: nodes, the rate of a GPU.
    """
    from kvcalc.library.load import with_rate_between
    from kvcalc.timing.deployment import Deployment

    (named, chosen), told = told_by(models, set_)
    options, gpus = asked.options(told), [with_rate_between(card, between) for card in where[0]]
    splits = msgspec.structs.replace(filled(ranks, told), further=filled(ranks.further, told)).parallelisms(chosen)
    lists = chosen, gpus, splits, filled(formats, told).precisions(), options
    check_number("configurations", MOST_CONFIGURATIONS, *lists)
    stages = range(sum(split.pp for split in splits))  # each has terms and a plan of its own
    check_number("pipeline stages", MOST_CONFIGURATIONS, chosen, gpus, stages, *lists[3:])
    layers = range(max(model.layers for model in chosen))  # of which each stage looks for its own
    check_number("layers of pipeline stages", MOST_LAYERS, chosen, gpus, stages, layers, *lists[3:])
    words = {m.name: name for m, name in zip(chosen, named, strict=True)}
    words |= {card.name: word for card, word in zip(gpus, where[1], strict=True)}
    points = []
    for m, card, r, p, one in product(*lists):
        run = Deployment(m, card, p, r, nodes=nodes, engine=one.engine, engine_version=one.engine_version)
        points.append((run, one))
    return points, words, told


def beside_words(set_: list[str], from_log: str, memory: str) -> tuple[str, ...]:
    """Options that no engine's command line tells, as they were typed."""
    given = (("--set", set_), ("--from-log", [from_log]), ("--memory", [memory]))
    return tuple(word for name, values in given for value in values if value for word in (name, value))


def _matrix(
    points: "list[tuple[Deployment, FitOptions]]", asked: EngineOptions, told: "Mapping[str, Any]", output: Output
) -> int:
    """Users × contexts of each point, those of the lists where they are given."""
    from kvcalc.capacity.matrix import USERS, contexts_of, matrix_records, matrix_verdicts
    from kvcalc.report.matrix import matrix_charts, matrix_table

    (options, *_) = msgspec.structs.replace(asked, max_num_seqs="", max_model_len="").options(told)
    users = numbers(asked.max_num_seqs, "max-num-seqs") if asked.max_num_seqs else [*USERS]
    found = []
    for d, _ in points:
        contexts = numbers(asked.max_model_len, "max-model-len") if asked.max_model_len else contexts_of(d.model.max_context)
        check_number("cells", MOST_CONFIGURATIONS, points, users, contexts)
        _beyond_maximum([(d, msgspec.structs.replace(options, max_model_len=max(contexts)))])
        made = matrix_verdicts if output.form in (o.OutputFormat.table, o.OutputFormat.markdown) else matrix_records
        found.append(made(d, options, users, contexts))
    if output.plot:
        output.picture(*matrix_charts(found))
    if not output.printed([record for records in found for record in records]):
        output.show(*map(matrix_table, found))
    return int(not any(record["fits"] for records in found for record in records))


def _played(found: "Fit", path: str, output: Output) -> int:
    """A file of allocations, in as many token slots as it says, or as the cache has."""
    from kvcalc.capacity.allocations import play, read_script

    script = read_script(path)
    memory = script.memory or found.plan.tokens(found.kv_budget, found.length)
    played = play(script.steps, memory, found.length, found.plan.block_size or 16)
    if output.plot:
        from kvcalc.report.figures_allocations import allocations_chart

        output.picture(allocations_chart(played))
    if not output.printed(played.records):
        from kvcalc.report.allocations import allocation_table

        output.show(allocation_table(played, found.length, found.options.wanted))
    return 0


def _answers(points: "list[tuple[Deployment, FitOptions]]") -> "list[Fit]":
    """One answer a point; of several, those that the model cannot be cut into are left out with a note."""
    from kvcalc.capacity import fit
    from kvcalc.errors import UserError

    found, refused = [], []
    for deployment, options in points:
        try:
            _ = deployment.ranks if deployment.nodes else None  # refused where they do not stand on so many
            found.append(fit(deployment, options))
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    for text in dict.fromkeys(map(str, refused)):
        note(f"left out: {text}")
    return found


def _remarks(answers: "list[Fit]", records: "list[dict[str, Any]]", drawn: list[int], said: bool) -> None:
    """What is to be said on stderr. said: that a sentence on stdout tells what is missing where nothing fits."""
    from kvcalc.units import format_bytes

    remarks({f.model.name: f.model for f in answers}.values(), 0)
    _beyond_maximum((f.asked, f.options) for f in answers)
    length = max(f.length for f in answers)
    if drawn and max(drawn) > length:
        note(f"lengths above --max-model-len are cut to {length:,} tokens")
    lines = []
    for f in answers:
        if not f.shortage and not f.starts:
            need = format_bytes(f.plan.needed(1, f.length))
            lines.append(f"{f.gpu.name}: {f.engine.title} does not start: one sequence of {f.length:,} tokens needs {need}")
        if f.over:
            lines.append(f"{f.gpu.name}: a cache of that size is {format_bytes(f.over)} more than the rest leaves")
    if not said and not any(f.fits for f in answers):
        advised = zip(answers, records, strict=True)
        lines += [f"{f.model.name} on {f.ranks.gpus}× {f.gpu.name}: {r['advice']}" for f, r in advised]
    for text in dict.fromkeys(lines):
        note(text)


def _beyond_maximum(points: "Iterable[tuple[Deployment, FitOptions]]") -> None:
    """Note each model whose longest requested context is beyond its own maximum, and what its engine requires then."""
    longest: dict[tuple[str, str], tuple[int, str]] = {}
    for deployment, options in points:
        model, length = deployment.model, options.longest(deployment.model)
        if model.max_context and length > model.max_context:
            variable = options.rules.long_context_variable
            needs = f"; {options.rules.title} starts only with {variable}=1" if variable else ""
            text = f"{length:,} tokens are beyond the model's own maximum of {model.max_context:,}{needs}"
            key = model.name, options.engine
            longest[key] = max(longest.get(key, (0, "")), (length, text))
    for (name, _), (_, text) in longest.items():
        note(f"{name}: {text}")
