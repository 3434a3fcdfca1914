"""`kvcalc fit`."""

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_gpus, gpu_names, listed
from kvcalc.cli.common import check_number, note, remarks, say
from kvcalc.cli.common import lengths as numbers
from kvcalc.cli.groups import Group, Output, Precisions, Ranks, grouped
from kvcalc.cli.lines import filled, told_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcalc.capacity import Fit, FitOptions
    from kvcalc.timing.deployment import Deployment

MOST_CONFIGURATIONS = 1000
LISTS = ("engine", "max_num_seqs", "max_model_len")


def _bytes(name: str, help: str) -> Any:
    return typer.Option(name, help=help + " Digits, 40GiB or 40GB.", rich_help_panel="Instead of what is computed")


_engine = partial(typer.Option, rich_help_panel="Engine")


class EngineOptions(Group, frozen=True):
    """What `fit` is asked, by the names of `FitOptions`, those of LISTS as lists; and how many sequences are required."""

    max_model_len: Annotated[
        str, typer.Option("--max-model-len", "--context", help="Tokens of each sequence, a list; the model's own by default.")
    ] = ""
    max_num_seqs: Annotated[
        str,
        typer.Option("--max-num-seqs", help="Sequences at once, of the whole replica, a list.", metavar="N", show_default=False),
    ] = ""
    require: Annotated[
        int, typer.Option("--require", help="Exit 1 unless so many sequences of --max-model-len fit.", show_default=False)
    ] = 0
    users: Annotated[
        int, typer.Option("--users", help="Conversations that have to fit, whatever --max-num-seqs is.", show_default=False)
    ] = 0
    from_log: Annotated[
        str, typer.Option("--from-log", help="What `diagnose --save` learned of this machine.", show_default=False)
    ] = ""
    budget: Annotated[
        str, typer.Option("--budget", help="End of the range that answers: low, middle or high; low with --require.")
    ] = ""
    engine: Annotated[str, _engine("--engine", help="none (content), {engines}; a list.")] = "none"
    engine_version: Annotated[str, _engine("--engine-version", help="0.11, 0.11.2 or latest.")] = ""
    enforce_eager: Annotated[bool, _engine("--enforce-eager", help="No CUDA graphs, nothing compiled.")] = False
    max_loras: Annotated[int, _engine("--max-loras", help="Slots for adapters.")] = 0
    max_lora_rank: Annotated[int, _engine("--max-lora-rank", help="Rank that each slot holds.")] = 16
    limit_mm_per_prompt: Annotated[
        str, _engine("--limit-mm-per-prompt", help="image=0 leaves a vision tower out.", show_default=False)
    ] = ""
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", help="Share of the memory; the engine's own by default.")
    ] = None
    utilization_of: Annotated[
        str, typer.Option("--utilization-of", help="total or free; the engine's own by default.", show_default=False)
    ] = ""
    max_num_batched_tokens: Annotated[
        str, _engine("--max-num-batched-tokens", help="Tokens of one pass; the engine's default by GPU.")
    ] = ""
    max_in_flight_batches: Annotated[
        int, _engine("--max-in-flight-batches", help="Passes scheduled at once; 0: the engine's own.")
    ] = 0
    num_speculative_tokens: Annotated[
        int, _engine("--num-speculative-tokens", help="Drafted per step; 0: none, or 1 beside a draft.")
    ] = 0
    block_size: Annotated[int, _engine("--block-size", help="Tokens in a cache block; 0: the engine's own.")] = 0
    mamba_cache_mode: Annotated[str, _engine("--mamba-cache-mode", help="none or align: one state page a sequence, or two.")] = (
        "none"
    )
    mamba_checkpoint_blocks: Annotated[
        int, _engine("--mamba-checkpoint-blocks", help="State pages more under align, for checkpoints that layers export.")
    ] = 0
    mamba_ssm_cache_dtype: Annotated[
        str, _engine("--mamba-ssm-cache-dtype", help="Recurrent states: auto, fp32, bf16 or fp16.")
    ] = "auto"
    disable_hybrid: Annotated[
        bool, _engine("--disable-hybrid-kv-cache-manager", help="Windows and chunks allocated like full attention.")
    ] = False
    kv_unified: Annotated[
        bool, _engine("--kv-unified/--no-kv-unified", "-kvu/-no-kvu", help="llama.cpp: one cache for all sequences, or one each.")
    ] = False
    swa_full: Annotated[bool, _engine("--swa-full", help="llama.cpp: windows hold the whole context.")] = False
    cache_type_k: Annotated[
        str, _engine("--cache-type-k", "-ctk", help="llama.cpp: keys in f16, bf16, f32, q8_0 … iq4_nl.", show_default=False)
    ] = ""
    cache_type_v: Annotated[str, _engine("--cache-type-v", "-ctv", help="llama.cpp: values.", show_default=False)] = ""
    n_gpu_layers: Annotated[
        int, _engine("--n-gpu-layers", "-ngl", help="llama.cpp: layers on the GPU, the head among them; -1: all.")
    ] = -1
    n_cpu_moe: Annotated[int, _engine("--n-cpu-moe", "-ncmoe", help="llama.cpp: first layers with experts on the CPU.")] = 0
    cpu_moe: Annotated[bool, _engine("--cpu-moe", "-cmoe", help="llama.cpp: all experts on the CPU.")] = False
    kv_cache_memory_bytes: Annotated[str, _bytes("--kv-cache-memory-bytes", "The budget; weights are not checked.")] = ""
    num_gpu_blocks_override: Annotated[
        int, typer.Option("--num-gpu-blocks-override", help="vLLM's blocks.", rich_help_panel="Instead of what is computed")
    ] = 0
    weight_bytes: Annotated[str, _bytes("--weight-bytes", "Weights of one GPU.")] = ""
    activation_bytes: Annotated[str, _bytes("--activation-bytes", "Activation peak of one GPU.")] = ""
    overhead_bytes: Annotated[str, _bytes("--overhead-bytes", "Libraries, graphs and collectives of one GPU.")] = ""
    shared_prefix: Annotated[str, typer.Option("--shared-prefix", help="First tokens that all sequences have in common.")] = "0"
    mtp: Annotated[bool, typer.Option("--mtp", help="With the multi-token-prediction layers.")] = False
    draft: Annotated[str, typer.Option("--draft", help="A draft model beside this one.", show_default=False)] = ""
    cpu_offload_gb: Annotated[float, typer.Option("--cpu-offload-gb", help="GiB of each GPU's weights in the host's memory.")] = (
        0.0
    )
    disk_bandwidth: Annotated[
        str, typer.Option("--disk-bandwidth", help="That weights are loaded at, as 7GB/s.", show_default=False)
    ] = ""
    kv_offloading_bytes: Annotated[
        str, typer.Option("--kv-offloading-bytes", help="Host memory for the cache, per GPU.", show_default=False)
    ] = ""

    def options(self, told: "Mapping[str, Any]") -> "list[FitOptions]":
        """Every combination of the lists, for at least as many sequences as are required.

        told: by a command line, where nothing else is said here.
        """
        from kvcalc.capacity import FitOptions
        from kvcalc.capacity.learned import read_learned
        from kvcalc.errors import UserError
        from kvcalc.library.words import from_words, spelled

        if self.require < 0:
            raise UserError(f"--require {self.require} is not a number of sequences")
        default = EngineOptions()
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if value != getattr(default, name)}
        if self.from_log and "engine" not in own:
            told = {"engine": read_learned(self.from_log).engine} | dict(told)
        given = dict(told) | own | ({"hybrid": False} if self.disable_hybrid else {})
        points = product(*(listed(str(given.get(name, getattr(default, name))), spelled(name)) for name in LISTS))
        return [from_words(FitOptions, given | dict(zip(LISTS, point, strict=True))) for point in points]


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
    seed: Annotated[int, typer.Option("--seed", help="Of drawn lengths and of the simulated allocator.")] = 0,
    matrix: Annotated[bool, typer.Option("--matrix", help="Users × contexts: of each the verdict and what is left.")] = False,
    output: Output,
) -> int:
    """What fits on these GPUs, and what an engine really allocates."""
    from kvcalc.capacity.fragmentation import read_lengths
    from kvcalc.capacity.record import Typed, fit_record, smallest_first
    from kvcalc.report.explain_budget import explain_fit
    from kvcalc.report.figures_fit import memory_chart
    from kvcalc.report.fit import fit_table

    points, words, told = points_of(models, gpu=gpu, memory=memory, asked=asked, formats=formats, set_=set_, ranks=ranks)
    drawn = read_lengths(lengths, seed) if lengths else []
    if matrix:
        return _matrix([(d, one) for d, one in points if one == points[0][1]], asked, told, output)
    answers = smallest_first(_answers(points))
    if allocations:
        return _played(answers[0], allocations, output)
    said = beside_words(set_, asked.from_log, memory)
    typed = [Typed(words[f.model.name], words[f.gpu.name], said) for f in answers]
    records = [fit_record(f, drawn, seed, one) for f, one in zip(answers, typed, strict=True)]
    _remarks(answers, drawn, said=output.tells)
    if output.plot:
        output.picture(memory_chart(records))
    if output.explain:
        say("\n".join(explain_fit(f, r) for f, r in zip(answers, records, strict=True)))
    elif not output.printed(records):
        output.show(fit_table(records, answers))
    return int(bool(asked.require) and not any(f.fits for f in answers))


def points_of(
    models: list[str], gpu: str, memory: str, asked: EngineOptions, formats: Precisions, set_: list[str], ranks: Ranks
) -> "tuple[list[tuple[Deployment, FitOptions]], dict[str, str], dict[str, Any]]":
    """(every deployment with its options, the words by which models and GPUs were typed, what a command line told)."""
    from kvcalc.timing.deployment import Deployment

    (named, chosen), told = told_by(models, set_)
    options, gpus = asked.options(told), chosen_gpus(gpu, memory)
    splits = msgspec.structs.replace(filled(ranks, told), further=filled(ranks.further, told)).parallelisms(chosen)
    lists = chosen, gpus, splits, filled(formats, told).precisions(), options
    check_number("configurations", MOST_CONFIGURATIONS, *lists)
    words = {m.name: name for m, name in zip(chosen, named, strict=True)}
    words |= {card.name: word for card, word in zip(gpus, gpu_names(gpu), strict=True)}
    return [(Deployment(m, card, p, r), one) for m, card, r, p, one in product(*lists)], words, told


def beside_words(set_: list[str], from_log: str, memory: str) -> tuple[str, ...]:
    """Options that no engine's command line tells, as they were typed."""
    given = (("--set", set_), ("--from-log", [from_log]), ("--memory", [memory]))
    return tuple(word for name, values in given for value in values if value for word in (name, value))


def _matrix(
    points: "list[tuple[Deployment, FitOptions]]", asked: EngineOptions, told: "Mapping[str, Any]", output: Output
) -> int:
    """Users × contexts of each point, those of the lists where they are given."""
    from kvcalc.capacity.matrix import USERS, contexts_of, matrix_records
    from kvcalc.report.matrix import matrix_chart, matrix_table

    (options, *_) = msgspec.structs.replace(asked, max_num_seqs="", max_model_len="").options(told)
    users = numbers(asked.max_num_seqs, "max-num-seqs") if asked.max_num_seqs else [*USERS]
    found = []
    for d, _ in points:
        contexts = numbers(asked.max_model_len, "max-model-len") if asked.max_model_len else contexts_of(d.model.max_context)
        check_number("cells", MOST_CONFIGURATIONS, points, users, contexts)
        found.append(matrix_records(d, options, users, contexts))
    if output.plot:
        output.picture(*map(matrix_chart, found))
    if not output.printed([record for records in found for record in records]):
        output.show(*map(matrix_table, found))
    return 0


def _played(found: "Fit", path: str, output: Output) -> int:
    """A file of allocations, in as many token slots as it says, or as the cache has."""
    from kvcalc.capacity.allocations import play, read_script

    script = read_script(path)
    memory = script.memory or found.plan.tokens(found.kv_budget, found.length)
    played = play(script.steps, memory, found.length, found.plan.block_size or 16)
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
            found.append(fit(deployment, options))
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    for text in dict.fromkeys(map(str, refused)):
        note(f"left out: {text}")
    return found


def _remarks(answers: "list[Fit]", drawn: list[int], said: bool) -> None:
    """What is to be said on stderr. said: that a sentence on stdout tells what is missing where nothing fits."""
    from kvcalc.capacity.remedy import advice
    from kvcalc.units import format_bytes

    models = {f.model.name: f.model for f in answers}.values()
    remarks(models, 0)
    for model in models:
        length = max(f.length for f in answers if f.model.name == model.name)
        if model.max_context and length > model.max_context:
            note(f"{model.name}: {length:,} tokens are beyond the model's own maximum of {model.max_context:,}")
    length = max(f.length for f in answers)
    if drawn and max(drawn) > length:
        note(f"lengths above --max-model-len are cut to {length:,} tokens")
    lines = []
    for f in answers:
        if not f.shortage and not f.starts:
            need = format_bytes(f.plan.needed(1, f.length))
            helps = f"; it would with --max-model-len {f.longest}" if f.longest and f.options.wanted == 1 else ""
            lines.append(
                f"{f.gpu.name}: {f.engine.title} does not start: one sequence of {f.length:,} tokens needs {need}{helps}"
            )
        if f.over:
            lines.append(f"{f.gpu.name}: a cache of that size is {format_bytes(f.over)} more than the rest leaves")
    if not said and not any(f.fits for f in answers):
        lines += [f"{f.model.name} on {f.ranks.gpus}× {f.gpu.name}: {advice(f)}" for f in answers]
    for text in dict.fromkeys(lines):
        note(text)
