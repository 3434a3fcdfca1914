"""`kvcalc fit`: deployments by options, or by an engine's own command line."""

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from kvcalc.answers.answer import Answer, LazyRecords
from kvcalc.answers.deployments import (
    gpu_words,
    gpus_of,
    machine_of,
    model_words,
    models_of,
    parallelism_of,
    precision_of,
    remarks,
    split_sizes,
)
from kvcalc.errors import UserError
from kvcalc.question.deployment_options import PlacementOptions
from kvcalc.question.fit_question import FitQuestion, StudyOptions, TypedWords
from kvcalc.question.options import check_number, read_questions, spelled
from kvcalc.records import Settings

if TYPE_CHECKING:
    from kvcalc.capacity import Fit, FitOptions
    from kvcalc.model.model import Model
    from kvcalc.records import Record
    from kvcalc.report.charts.chart import Chart
    from kvcalc.timing.deployment import TimedDeployment

    Point = tuple[TimedDeployment, FitOptions]

MAX_CONFIGURATIONS = 1000
# flags of engines without a note that their memory is not counted
NO_MEMORY = (
    "--?(host|port|api.key|served.model.name|alias|trust.remote.code|(dis|en)able.log|log|verbose|"
    "enable.auto.tool|tool.call|reasoning|chat.template|jinja|metrics|enable.metrics|ssl|uvicorn|"
    "root.path|allowed|enable.chunked.prefill)"
)
# an option of kvcalc, and the setting of an engine's command line that it replaces
OVERRIDES = {
    "max_num_seqs": "users",
    "draft": "typed_flags",
    "mtp": "typed_flags",
    "num_speculative_tokens": "typed_flags",
}


def run(
    models: list[str] = [],  # noqa: B006 (no function changes the list)
    *,
    fit_values: Annotated[Settings, FitQuestion],
    placing: Annotated[Settings, PlacementOptions],
    studies: StudyOptions,
    allocations: str = "",
    matrix: bool = False,
    file: str = "",
    emit: str = "",
) -> Answer:
    """Compute how many users and tokens fit. The exit status is 1 if the request fits nowhere.

    Args:
        models: Models, each on every GPU and with every item of the options, or the words of an
            engine's command line such as `vllm serve …`.
        fit_values: Option name → value, for the options in `FitQuestion`: lengths, users and
            settings of the engine.
        placing: Option name → value, for the options in `PlacementOptions`: GPUs, data types and
            parallelism.
        studies: Request lengths for which the waste of memory allocators is computed too.
        allocations: Steps of sequences to simulate in the KV cache, instead of the users that fit:
            `A 1024 50; free A` reserves 1,024 tokens for A, stores 50, then releases A. Or the path
            of a file with steps; '' for none.
        matrix: Whether to answer instead with a matrix for each deployment: the free KV cache bytes
            of one GPU for each number of users and each context. They come from the options
            max_num_seqs and max_model_len, or else are usual values.
        file: Docker Compose or Kubernetes file whose servers are checked, instead of `models`; ''
            for none.
        emit: Form in which the first deployment is printed: vllm, docker, compose or kubernetes; ''
            for a table.
    """
    if not models and not file:
        raise UserError(
            "MODEL… is missing",
            "Write `kvcalc fit llama-3.1-70b --gpu h100 --tp 4 --max-model-len 32k`, or a file "
            "with -f",
        )
    if file:
        if models or emit:
            raise UserError("--file names the models; leave out MODEL… and --emit")
        return _file_answer(file, placing, fit_values, studies)
    points, words = fit_points(models, placing, fit_values)
    if matrix:
        return _matrix_answer(points, fit_values, words)
    return fit_answer(points, studies, words, allocations, emit)


def _file_answer(
    path: str, placing: Settings, fit_values: Settings, studies: StudyOptions
) -> Answer:
    """Return the capacity of each server in a file. The exit status is 1 if a server cannot
    start."""
    from kvcalc.capacity.deployment_files import read_servers

    servers = read_servers(path)
    answers = []
    notes, refused, unstarted = [], [], []
    for server in servers:
        version = {"engine_version": server.version} if server.version else {}
        gpu, replicas = server.scope.gpu, server.scope.replicas
        if replicas != 1:
            notes.append(f"{server.name}: the figures are of one of {replicas} replicas")
        try:
            points, words = fit_points(
                server.words, ({"gpu": gpu} if gpu else {}) | placing, version | fit_values
            )
            needed = min(
                deployment.parallelism.tp * deployment.parallelism.pp
                for deployment, _ in points
            )
            if 0 < server.num_gpus < needed:
                unstarted.append(
                    f"{server.name} does not start: it needs {needed} GPUs, and the file gives "
                    f"it {server.num_gpus}."
                )
                continue
            answer = fit_answer(points, studies, words)
            answers.append((server.name, answer))
            notes += [f"{server.name}: {note}".removeprefix(": ") for note in answer._notes]
        except UserError as error:
            refused.append(error)
            notes.append(f"{server.name} is left out: {error}")
    if refused and not answers:
        raise refused[0]

    def tables() -> Any:
        from kvcalc.report.text.table_layout import Table

        return [Table([], [], text) for text in unstarted] + [
            replace(table, title=f"{name}: {table.title}" if name else table.title)
            for name, answer in answers
            for table in answer._tables()
        ]

    return Answer(
        [{"server": name, **record} for name, answer in answers for record in answer._records],
        tables,
        lambda: [chart for _, answer in answers for chart in answer._charts()],
        _formulas=lambda: "\n".join(a._formulas() for _, a in answers if a._formulas),
        _notes=notes,
        _status=int(len(answers) < len(servers) or any(a._status for _, a in answers)),
    )


def fit_points(
    models: Sequence[str], placing: Settings, fit_values: Settings
) -> "tuple[list[Point], TypedWords]":
    """Return (deployment, its fit options) pairs, and the words that the user typed.

    There is a pair for each combination of model, GPU and item of an option that is a list.

    Args:
        models: Models, or the words of an engine's command line such as `vllm serve …`.
        placing: Values of options by name: GPUs, data types and parallelism (`PlacementOptions`).
        fit_values: Values of options by name: lengths, users and engine settings (`FitQuestion`).
    """
    from kvcalc.capacity.fit_options import read_fit_options
    from kvcalc.library.load import AUTO, with_memory
    from kvcalc.storage.ggml import mix_of
    from kvcalc.timing.deployment import TimedDeployment

    typed_models, loaded, stated, notes, flags = _read_models(models, placing.get("set_", ()))
    placements = split_sizes(read_questions(PlacementOptions, stated | placing), loaded)
    first = placements[0]
    for name in OVERRIDES.keys() & fit_values.keys():
        stated.pop(OVERRIDES[name], None)
    for name in placing | fit_values:
        if name in stated:
            notes.append(f"kvcalc's --{spelled(name)} replaces the one of the command line")
    asked = stated | fit_values
    if first.gpu.strip().lower() == AUTO:
        num_gpus = max(parallelism_of(placement).gpus for placement in placements)
        gpu, in_use, machine_notes = machine_of(num_gpus)
        gpus = [with_memory(gpu, first.memory)]
        asked.setdefault("memory_in_use", in_use)
        notes += machine_notes
    else:
        gpus = gpus_of(first, is_timed=False)
    formats = [placement.quantization for placement in placements]
    formats += [stored.label for model in loaded for stored in model.quantization]
    if "engine" not in asked and any(name == "gguf" or mix_of(name) for name in formats):
        notes.append(
            "GGUF formats are llama.cpp's, these figures are vLLM's: --engine llama.cpp"
        )
    options = read_fit_options(asked)
    stages = range(sum(placement.pp for placement in placements))
    check_number("pipeline stages", MAX_CONFIGURATIONS, loaded, gpus, stages, options)
    names = {model.name: word for model, word in zip(loaded, typed_models)}
    names |= {gpu.name: word for gpu, word in zip(gpus, gpu_words(first.gpu))}
    points = []
    for model, gpu, placement, fit_option in product(loaded, gpus, placements, options):
        deployment = TimedDeployment(
            model,
            gpu,
            precision_of(placement),
            parallelism_of(placement, fit_option.engine * ("tp" in placing)),
            nodes=placement.nodes,
            engine=fit_option.engine,
            engine_version=fit_option.engine_version,
        )
        points.append((deployment, fit_option))
    pairs = [("--set", change) for change in placing.get("set_", ())]
    pairs += [("--from-log", fit_values.get("from_log")), ("--memory", first.memory)]
    extra_words = tuple(word for pair in pairs if pair[1] for word in pair)
    for gpu in gpus[:2]:
        if gpu.usable_share and not first.memory:
            notes.append(
                f"{gpu.name} has {gpu.memory_bytes / 2**30:.2f} GiB here; "
                "--memory SIZE states another machine's"
            )
    typed = TypedWords(names, extra_words, first.enable_expert_parallel, stated, notes, flags)
    return points, typed


def _read_models(
    words: Sequence[str], changes: Sequence[str]
) -> "tuple[list[str], list[Model], Settings, list[str], str]":
    """Return the typed words with their models, the options stated in an engine's command line,
    notes, and the flags that are not counted."""
    if len(words) > 1 or " " in words[0].strip():
        from kvcalc.capacity.command_line import is_command, read_command
        from kvcalc.capacity.engine_flags import DIALECTS
        from kvcalc.library.load import with_changes

        if is_command(words):
            remaining = list(changes)
            command = read_command(words, remaining)
            notes = list(command.remarks)
            if flags := [flag for flag in command.ignored if not re.match(NO_MEMORY, flag)]:
                text = ", ".join(flags).replace(
                    "--enable-prefix-caching",
                    "--enable-prefix-caching (add --shared-prefix TOKENS)",
                )
                notes.append(f"not counted here: {text}")
            stated: Settings = {"engine": command.engine} | command.settings
            dialect = DIALECTS[command.engine]
            if not dialect.max_slots and "max_num_seqs" in stated:
                stated["users"] = 1  # the engine starts if one sequence fits
            expert_flag = dialect.flag("ep")
            if expert_flag and expert_flag.is_switch and stated.pop("ep", 1) > 1:
                # over the GPUs that an option before the line may change
                stated["enable_expert_parallel"] = True
            return (
                [command.model_words],
                [with_changes(command.model, remaining)],
                stated,
                notes,
                " ".join(command.ignored),
            )
    return model_words(words), models_of(words, changes), {}, [], ""


def fit_answer(
    points: "Sequence[Point]",
    studies: StudyOptions,
    words: TypedWords = TypedWords(),  # noqa: B008 (immutable)
    allocations: str = "",
    emit: str = "",
) -> Answer:
    """Return how many users fit in each deployment, and its memory; the smallest that fits first.

    Args:
        points: Pairs of a deployment with its fit options: lengths, users and engine settings.
        studies: Request lengths for which the waste of memory allocators is computed too.
        words: The words that the user typed, which suggested commands repeat.
        allocations: Steps such as `A 1024 50; free A`, or their file. The answer then simulates
            them in the first deployment's KV cache, instead of the users that fit. '' for none.
        emit: Form in which the first deployment is printed: vllm, docker, compose or kubernetes; ''
            for a table.
    """
    from kvcalc.capacity.fit_records import fit_record, smallest_first
    from kvcalc.capacity.suggested_fixes import at_longest_length
    from kvcalc.report.text.fit_text import fit_table

    fits, notes = _fits(points)
    if not words.stated:  # an engine's own command line refuses a maximum that does not fit
        fits = [*map(at_longest_length, fits)]
    fits = smallest_first(fits)
    if allocations:
        return _allocations_answer(fits[0], allocations)
    lengths = []
    if studies.lengths:
        from kvcalc.capacity.allocations import read_lengths

        lengths = read_lengths(studies.lengths, studies.seed)
    records = [fit_record(fit, lengths, studies.seed, words) for fit in fits]

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.fit_plot import memory_chart

        return [memory_chart(records)]

    def formulas() -> str:
        from kvcalc.report.explain import explain_fit

        return "\n".join(map(explain_fit, fits, records))

    text, first = "", fits[0]
    if emit and first.fits:
        from kvcalc.capacity.deployment_files import deployment_text

        text = deployment_text(records[0], first.gpu, first.options.engine_version, emit)
    return Answer(
        records,
        lambda: [fit_table(records, fits, words)],
        draw,
        _yaml=text,
        _formulas=formulas,
        _notes=[*words.notes, *notes, *_notes_on_fits(fits, lengths)],
        _status=int(not any(fit.fits for fit in fits)),
    )


def _notes_on_fits(fits: "Sequence[Fit]", lengths: Sequence[int]) -> list[str]:
    """Return notes on the models, on lengths above a maximum and on cache sizes in the options.

    Args:
        lengths: Tokens of each sequence of `--lengths`.
    """
    from kvcalc.capacity.engine_flags import DIALECTS
    from kvcalc.units import format_bytes

    notes = remarks([fit.model for fit in fits], 0)
    notes += _notes_beyond_maximum((fit.requested, fit.options) for fit in fits)
    longest = max(fit.length for fit in fits)
    if lengths and max(lengths) > longest:
        notes.append(f"lengths above --max-model-len are cut to {longest:,} tokens")
    for fit in fits:
        if fit.excess_bytes:
            notes.append(
                f"{fit.gpu.name}: weights are not checked; with this cache they need "
                f"{format_bytes(fit.excess_bytes)} more"
            )
        given = fit.options.kv_cache_memory_bytes or 0
        if fit.kv_budget < given:
            notes.append(
                f"{fit.gpu.name}: {fit.engine.title} takes at most "
                f"{format_bytes(fit.kv_budget)} for the cache"
            )
        dialect = DIALECTS.get(fit.engine.name)
        if (
            given
            and dialect
            and not (dialect.flag("kv_cache_memory_bytes") or dialect.max_slots)
        ):
            notes.append(
                f"no flag of {fit.engine.title} sets a cache size; the command has none"
            )
    return notes


def _fits(points: "Sequence[Point]") -> "tuple[list[Fit], list[str]]":
    """Return the capacity of each point, and notes on deployments that are impossible.

    Raises:
        UserError: No deployment is possible.
    """
    from kvcalc.capacity import fit

    results, refused = [], []
    for deployment, options in points:
        try:
            _ = deployment.ranks  # raises UserError if they cannot be placed on nodes
            results.append(fit(deployment, options))
        except UserError as error:
            refused.append(error)
    if not results:
        raise refused[0]
    return results, [f"left out: {text}" for text in dict.fromkeys(map(str, refused))]


def _notes_beyond_maximum(points: "Iterable[Point]") -> list[str]:
    """Return a note on each model whose longest request is beyond the model's maximum."""
    notes = {}
    for deployment, options in sorted(points, key=lambda point: point[1].max_model_len):
        model, length = deployment.model, options.longest_sequence(deployment.model)
        if model.max_context and length > model.max_context:
            variable = options.rules.long_context_variable
            notes[model.name, options.engine] = (
                f"{model.name}: {length:,} tokens are beyond the model's own maximum of "
                f"{model.max_context:,}"
                f"{f'; {options.rules.title} starts only with {variable}=1' * bool(variable)}"
            )
    return [*notes.values()]


def _matrix_answer(
    points: "Sequence[Point]", fit_values: Settings, words: TypedWords
) -> Answer:
    """Return a matrix of users × contexts for each deployment. Users and contexts come from the
    lists in the options, if given."""
    from kvcalc.capacity.fit_records import USERS, contexts_of, matrix_records
    from kvcalc.report.text.fit_text import matrix_table

    users, requested = list(USERS), []
    if "max_num_seqs" in fit_values:
        users = [*dict.fromkeys(options.max_num_seqs or 1 for _, options in points)]
    if "max_model_len" in fit_values:
        requested = [*dict.fromkeys(options.max_model_len for _, options in points)]
    first = points[0][1]
    options = replace(first, max_num_seqs=words.stated.get("max_num_seqs"))
    verdicts, cells, longest = [], [], []
    for deployment, other in points:
        if other != first:
            continue
        contexts = requested or contexts_of(deployment.model.max_context)
        check_number("cells", MAX_CONFIGURATIONS, points, users, contexts)
        cells.append((deployment, options, users, contexts))
        verdicts.append(matrix_records(*cells[-1], only_verdicts=True))
        longest.append((deployment, replace(options, max_model_len=max(contexts))))

    def records() -> "Iterable[Record]":
        return (record for cell in cells for record in matrix_records(*cell))

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.fit_plot import matrix_charts

        return matrix_charts(verdicts)

    return Answer(
        LazyRecords(records, sum(map(len, verdicts))),
        lambda: [*map(matrix_table, verdicts)],
        draw,
        _notes=[*words.notes, *_notes_beyond_maximum(longest)],
        _status=int(not any(record["fits"] for part in verdicts for record in part)),
    )


def _allocations_answer(fit: "Fit", text: str) -> Answer:
    """Return the result of allocation steps in the cache of a deployment.

    If the maximum length exceeds the memory, contiguous slots have the size of the largest request.
    """
    from kvcalc.capacity.allocations import read_script, run_allocations
    from kvcalc.report.text.fit_text import allocation_table

    steps, memory = read_script(text)
    slots = memory or fit.plan.tokens(fit.kv_budget, fit.length)
    longest = fit.length
    if longest > slots:
        longest = max((step.tokens for step in steps if step.name), default=longest)
    played = run_allocations(steps, slots, longest, fit.plan.block_size or 16)

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.fit_plot import allocations_chart

        return [allocations_chart(played)]

    return Answer(played.records, lambda: [allocation_table(played)], draw)
