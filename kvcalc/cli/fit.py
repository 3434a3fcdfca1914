"""Models' names, or an engine's command line in their place: what it says of the options of a
command.

`kvcalc fit`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import (
    Output,
    Precisions,
    Ranks,
    chosen_gpus,
    chosen_models,
    gpu_words,
    model_words,
)
from kvcalc.cli.options import (
    Argument,
    Option,
    OptionGroup,
    check_number,
    note,
    remarks,
    say,
)
from kvcalc.cli.options import lengths as numbers
from kvcalc.cli.setup import EngineOptions
from kvcalc.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcalc.capacity import Fit, FitOptions
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.model.model import Model
    from kvcalc.timing.deployment import TimedDeployment


Options = TypeVar("Options", bound=OptionGroup)


def told_by(
    words: Sequence[str], changes: list[str]
) -> "tuple[tuple[list[str], list[Model]], Record]":
    """((names as they were typed, their models), what a command line says of the rest); flags that
    are not read are named."""
    if len(words) > 1 or " " in words[0].strip():
        from kvcalc.capacity.command_line import is_command, read_command
        from kvcalc.capacity.dialects import DIALECTS
        from kvcalc.library.load import edited

        if is_command(words):
            left = list(changes)
            command = read_command(words, left)
            for text in command.remarks:
                note(text)
            if command.ignored:
                note(f"{command.engine}: not counted here: {', '.join(command.ignored)}")
            stated: Record = {"engine": command.engine} | command.given
            if DIALECTS[command.engine].max_num_seqs_is_cap and "max_num_seqs" in stated:
                stated["users"] = 1  # the engine starts if one sequence fits
            if DIALECTS[command.engine].flag("all_experts") and stated.pop("ep", 1) > 1:
                # over the GPUs that an option before the line may change
                stated["enable_expert_parallel"] = True
            return ([command.named], [edited(command.model, left)]), stated
    return (model_words(words), chosen_models(words, changes)), {}


def filled(group: Options, told: Mapping[str, Any]) -> Options:
    """A group of options, those that were left as they are by default as a command line told
    them."""
    defaults = {
        f.name: f.default for f in msgspec.structs.fields(type(group)) if f.name in told
    }
    left = [name for name, default in defaults.items() if getattr(group, name) == default]
    return msgspec.structs.replace(
        group,
        **{n: str(told[n]) if isinstance(defaults[n], str) else told[n] for n in left},
    )


MAX_CONFIGURATIONS = 1000
MAX_LAYERS = 1 << 17  # times the stages whose plans they are part of
_study = partial(Option, panel="Allocator studies")


def run(
    models: Annotated[
        list[str],
        Argument(
            "Preset, file or Hub name, or -- vllm serve …",
            takes="MODEL…",
            words=o.model_names,
        ),
    ],
    *,
    gpu: o.Gpus = "h100",
    memory: o.Memory = "",
    asked: EngineOptions,
    lengths: Annotated[
        str,
        _study("Memory waste for lengths from a file or lognormal:MEAN,P99", takes="FILE"),
    ] = "",
    allocations: Annotated[
        str,
        _study("File of steps for an allocator: A 50, free A, ask 2049", takes="FILE"),
    ] = "",
    formats: Precisions,
    set_: o.Settings = [],  # noqa: B006 (typer copies it)
    ranks: Ranks,
    nodes: o.Nodes = 0,
    inter_node_bandwidth: o.NodeBandwidth = "",
    seed: Annotated[int, _study("Seed of random lengths and of the simulated allocator")] = 0,
    matrix: Annotated[
        bool, Option("Print a matrix of users × contexts that fit", panel="Output")
    ] = False,
    output: Output,
) -> int:
    """Compute how many users and tokens fit. Return 1 if nothing fits."""
    from kvcalc.capacity.allocations import read_lengths
    from kvcalc.capacity.deployment_fit import shortened
    from kvcalc.capacity.fit_records import Typed, fit_record, smallest_first
    from kvcalc.report.text.fit_text import fit_table

    where = chosen_gpus(gpu, memory), gpu_words(gpu)
    points, words, stated = points_of(
        models, where, asked, formats, set_, ranks, nodes, inter_node_bandwidth
    )
    drawn = read_lengths(lengths, seed) if lengths else []
    if matrix:
        return _matrix(
            [(d, one) for d, one in points if one == points[0][1]],
            asked,
            stated,
            output,
        )
    answers = _answers(points)
    if not stated:  # an engine's own command line refuses a maximum that does not fit
        answers = [*map(shortened, answers)]
    answers = smallest_first(answers)
    if allocations:
        return _played(answers[0], allocations, output)
    said = beside_words(set_, asked.from_log, memory)
    all_experts = ranks.enable_expert_parallel or "enable_expert_parallel" in stated
    typed = [Typed(words[f.model.name], words[f.gpu.name], said, all_experts) for f in answers]
    records = [fit_record(f, drawn, seed, one) for f, one in zip(answers, typed, strict=True)]
    _remarks(answers, records, drawn, said=output.tells)
    if output.plot:
        from kvcalc.report.charts.fit_plot import memory_chart

        output.picture(memory_chart(records))
    if output.explain:
        from kvcalc.report.explain_sums import explain_fit

        say("\n".join(explain_fit(f, r) for f, r in zip(answers, records, strict=True)))
    elif not output.printed(records):
        output.show(fit_table(records, answers, words if stated else None, all_experts))
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
) -> "tuple[list[tuple[TimedDeployment, FitOptions]], dict[str, str], Record]":
    """(every deployment with its options, the words by which models and GPUs were typed, what a
    command line told).

    where: GPUs, and how they were typed. between: nodes, the rate of a GPU.
    """
    from kvcalc.library.load import with_rate_between
    from kvcalc.timing.deployment import TimedDeployment

    (named, chosen), stated = told_by(models, set_)
    options, gpus = (
        asked.options(stated),
        [with_rate_between(card, between) for card in where[0]],
    )
    splits = filled(ranks, stated).parallelisms(chosen)
    lists = chosen, gpus, splits, filled(formats, stated).precisions(), options
    check_number("configurations", MAX_CONFIGURATIONS, *lists)
    stages = range(sum(split.pp for split in splits))  # each has terms and a plan of its own
    check_number("pipeline stages", MAX_CONFIGURATIONS, chosen, gpus, stages, *lists[3:])
    layers = range(
        max(model.layers for model in chosen)
    )  # of which each stage looks for its own
    check_number(
        "layers of pipeline stages",
        MAX_LAYERS,
        chosen,
        gpus,
        stages,
        layers,
        *lists[3:],
    )
    words = {m.name: name for m, name in zip(chosen, named, strict=True)}
    words |= {card.name: word for card, word in zip(gpus, where[1], strict=True)}
    points = []
    for m, card, r, p, one in product(*lists):
        run = TimedDeployment(
            m,
            card,
            p,
            r,
            nodes=nodes,
            engine=one.engine,
            engine_version=one.engine_version,
        )
        points.append((run, one))
    return points, words, stated


def beside_words(set_: list[str], from_log: str, memory: str) -> tuple[str, ...]:
    """Options that no engine's command line tells, as they were typed."""
    given = (("--set", set_), ("--from-log", [from_log]), ("--memory", [memory]))
    return tuple(
        word for name, values in given for value in values if value for word in (name, value)
    )


def _matrix(
    points: "list[tuple[TimedDeployment, FitOptions]]",
    asked: EngineOptions,
    told: "Mapping[str, Any]",
    output: Output,
) -> int:
    """Users × contexts of each point, those of the lists where they are given."""
    from kvcalc.capacity.fit_records import (
        USERS,
        contexts_of,
        matrix_records,
    )
    from kvcalc.report.text.fit_text import matrix_charts, matrix_table

    (options, *_) = msgspec.structs.replace(asked, max_num_seqs="", max_model_len="").options(
        told
    )
    users = numbers(asked.max_num_seqs, "max-num-seqs") if asked.max_num_seqs else [*USERS]
    results = []
    for d, _ in points:
        contexts = (
            numbers(asked.max_model_len, "max-model-len")
            if asked.max_model_len
            else contexts_of(d.model.max_context)
        )
        check_number("cells", MAX_CONFIGURATIONS, points, users, contexts)
        _beyond_maximum([(d, msgspec.structs.replace(options, max_model_len=max(contexts)))])
        is_table = output.form in (o.OutputFormat.table, o.OutputFormat.markdown)
        results.append(matrix_records(d, options, users, contexts, only_verdicts=is_table))
    if output.plot:
        output.picture(*matrix_charts(results))
    if not output.printed([record for records in results for record in records]):
        output.show(*map(matrix_table, results))
    return int(not any(record["fits"] for records in results for record in records))


def _played(found: "Fit", path: str, output: Output) -> int:
    """A file of allocations, in as many token slots as it says, or as the cache has."""
    from kvcalc.capacity.allocations import play, read_script

    script = read_script(path)
    memory = script.memory or found.plan.tokens(found.kv_budget, found.length)
    played = play(script.steps, memory, found.length, found.plan.block_size or 16)
    if output.plot:
        from kvcalc.report.charts.fit_plot import allocations_chart

        output.picture(allocations_chart(played))
    if not output.printed(played.records):
        from kvcalc.report.text.fit_text import allocation_table

        output.show(allocation_table(played, found.length, found.options.wanted))
    return 0


def _answers(points: "list[tuple[TimedDeployment, FitOptions]]") -> "list[Fit]":
    """One answer a point; of several, those that the model cannot be cut into are left out with a
    note."""
    from kvcalc.capacity import fit
    from kvcalc.errors import UserError

    result, refused = [], []
    for deployment, options in points:
        try:
            # refused where they do not stand on so many
            _ = deployment.ranks if deployment.nodes else None
            result.append(fit(deployment, options))
        except UserError as error:
            refused.append(error)
    if not result:
        raise refused[0]
    for text in dict.fromkeys(map(str, refused)):
        note(f"left out: {text}")
    return result


def _remarks(
    answers: "list[Fit]", records: "list[Record]", drawn: list[int], said: bool
) -> None:
    """What is to be said on stderr. said: that a sentence on stdout tells what is missing where
    nothing fits."""
    from kvcalc.units import format_bytes

    remarks({f.model.name: f.model for f in answers}.values(), 0)
    _beyond_maximum((f.requested, f.options) for f in answers)
    length = max(f.length for f in answers)
    if drawn and max(drawn) > length:
        note(f"lengths above --max-model-len are cut to {length:,} tokens")
    lines = []
    for f in answers:
        if not said and not f.shortage and not f.starts:
            need = format_bytes(f.plan.needed(1, f.length))
            lines.append(
                f"{f.gpu.name}: {f.engine.title} does not start: one sequence of {f.length:,} "
                f"tokens needs {need}"
            )
        if f.excess:
            lines.append(
                f"{f.gpu.name}: a cache of that size is {format_bytes(f.excess)} more than the "
                "rest leaves"
            )
    if not said and not any(f.fits for f in answers):
        advised = zip(answers, records, strict=True)
        lines += [
            f"{f.model.name} on {f.ranks.gpus}× {f.gpu.name}: {r['advice']}" for f, r in advised
        ]
    for text in dict.fromkeys(lines):
        note(text)


def _beyond_maximum(points: "Iterable[tuple[TimedDeployment, FitOptions]]") -> None:
    """Note each model whose longest requested context is beyond its own maximum, and what its
    engine requires then."""
    longest: dict[tuple[str, str], tuple[int, str]] = {}
    for deployment, options in points:
        model, length = deployment.model, options.longest(deployment.model)
        if model.max_context and length > model.max_context:
            variable = options.rules.long_context_variable
            needs = f"; {options.rules.title} starts only with {variable}=1" if variable else ""
            text = (
                f"{length:,} tokens are beyond the model's own maximum of "
                f"{model.max_context:,}{needs}"
            )
            key = model.name, options.engine
            longest[key] = max(longest.get(key, (0, "")), (length, text))
    for (name, _), (_, text) in longest.items():
        note(f"{name}: {text}")
