"""Load models and GPUs by name, and combine them into deployments."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import asdict, replace

from kvcalc.errors import UserError, printable
from kvcalc.question.deployment_options import (
    AUTO,
    DeploymentOptions,
    PlacementOptions,
    ShardingOptions,
)
from kvcalc.question.options import check_number, items_of

if TYPE_CHECKING:
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.layers.batch import Parallelism
    from kvcalc.library.load import Dimensions
    from kvcalc.model.model import Model
    from kvcalc.model.precision import Precision
    from kvcalc.question.size_options import ContextOptions, DimensionOptions
    from kvcalc.timing.deployment import TimedDeployment

    Stored = tuple[Model, Precision, Parallelism]

AUTO_TP = (1, 2, 4, 8)  # sizes that `--tp auto` tries
MAX_NAMES = 2000  # models or GPUs in a command
Sharding = TypeVar("Sharding", bound=ShardingOptions)


def model_words(names: Sequence[str]) -> list[str]:
    """Return the single model names in the words of a command line.

    A word may be a comma-separated list: ["a,b", "c"] gives ["a", "b", "c"]. A word that is the
    path of an existing file or folder is not divided, because its name may contain a comma.

    Args:
        names: Words that the user typed for the models.
    """
    words: list[str] = []
    for name in names:
        # Path.exists raises without permission
        words += [name] if os.path.exists(name) else items_of(name)  # noqa: PTH110
    return words


def models_of(names: Sequence[str], changes: Sequence[str] = ()) -> "list[Model]":
    """Return the models that the words of a command line name.

    If two models have the same name, each is renamed to the word that the user typed for it.
    Example: `a/m.json` and `b/m.json` both have the name `m`, and are renamed to these paths.

    Args:
        names: Words, each a model or a comma-separated list of models.
        changes: Changes of the models' fields by `--set`, such as `layers=40`. They apply to every
            model.
    """
    words = model_words(names)
    check_number("models", MAX_NAMES, words)
    models = [model_of(word, changes) for word in words]
    names = [model.name for model in models]
    return [
        replace(model, name=printable(word, 80)) if names.count(model.name) > 1 else model
        for model, word in zip(models, words)
    ]


def model_of(name: str, changes: Sequence[str]) -> "Model":
    """Return the model with a name, with the changes of `--set` applied.

    Args:
        name: Name of a preset, path of a file or folder, or a name on the Hugging Face Hub such as
            `org/name`.
        changes: Changes of the model's fields by `--set`, such as `layers=40`; empty for none.

    Raises:
        UserError: Nothing has this name, or a file or change is invalid.
    """
    from kvcalc.library.checkpoints import load_named
    from kvcalc.library.load import with_changes

    remaining = list(changes)
    # `load_named` takes the changes that an unknown type of file needs
    return with_changes(load_named(name, remaining), remaining)


def typed_dimensions(
    options: "DimensionOptions", models: Sequence[str], changes: Sequence[str]
) -> "Dimensions | None":
    """Return the dimensions of the layers that the user gave instead of a model.

    Return None if the user named a model.

    Args:
        options: The dimensions, such as `--layers 32 --kv-heads 8 --head-dim 128`; all 0 if the
            user gave none.
        models: Names of models that the user gave.
        changes: Changes of a model's fields by `--set`, which need a model.

    Raises:
        UserError: Dimensions are given together with a model or changes, or no model and no
            dimensions are given.
    """
    values = asdict(options)
    if not any(values.values()):
        if models:
            return None
        raise UserError(
            "no model is named",
            "Name one (`kvcalc models` lists them), or give --layers, --kv-heads and "
            "--head-dim",
        )
    if models or changes:
        change = f"layers={options.layers}" if options.layers else "KEY=VALUE"
        raise UserError(
            "dimensions cannot be combined with a model or --set",
            f"Change a model with --set {change}",
        )
    from kvcalc.library.load import Dimensions

    return Dimensions(**values)


def gpu_words(names: str) -> list[str]:
    """Return the single GPU names in a comma-separated list. `all` stands for every GPU preset.

    Example: `h100, a100` gives ["h100", "a100"].

    Each name can then be passed to `load_gpu`.

    Args:
        names: Names or files of GPUs, separated by commas.
    """
    from kvcalc.library.load import all_gpus

    words = []
    for name in names.split(","):
        word = name.strip()
        words += [gpu.name for gpu in all_gpus()] if word.lower() == "all" else [word]
    check_number("GPUs", MAX_NAMES, words)
    return words


def gpus_of(options: PlacementOptions, is_timed: bool = True) -> "list[Gpu]":
    """Return the GPUs that the options name.

    Args:
        options: The options with the names of GPUs. `memory` and `inter_node_bandwidth` replace
            the memory and the bandwidth between nodes in each GPU.
        is_timed: Whether the answer has times. If the request has `all` GPUs, GPUs without a
            published FLOP rate are then left out.
    """
    from kvcalc.library.load import load_gpu, with_memory, with_rate_between

    gpus = []
    for word in gpu_words(options.gpu):
        gpu = with_memory(load_gpu(word), options.memory)
        if mfu := getattr(options, "mfu", 0):
            gpu = replace(gpu, mfu=mfu)
        gpus.append(with_rate_between(gpu, options.inter_node_bandwidth))
    is_all = options.gpu.strip().lower() == "all"
    return [gpu for gpu in gpus if gpu.knee] if is_timed and is_all else gpus


def machine_of(num_gpus: int) -> "tuple[Gpu, int, list[str]]":
    """Return the preset of this machine's GPUs, their memory in use, and notes on their processes.

    The `num_gpus` GPUs with the least memory in use are selected. They have the same model as the
    machine's first GPU.

    Args:
        num_gpus: Number of GPUs that the deployment needs.

    Returns:
        The GPU preset; the bytes in use on the selected GPU that has the most in use; and notes for
        the user on the processes that use this memory.

    Raises:
        UserError: The machine has no GPU, or too few.
    """
    from kvcalc.errors import list_few
    from kvcalc.library.load import machine_gpu
    from kvcalc.library.machine import read_machine
    from kvcalc.units import format_bytes

    machine = read_machine()
    same = [gpu for gpu in machine if gpu.name == machine[0].name]
    if num_gpus > len(same):
        raise UserError(
            f"{num_gpus} GPUs are needed, and this machine has {len(same)}× {machine[0].name}",
            "Give a smaller --tp",
        )
    freest = sorted(same, key=lambda gpu: gpu.used_bytes)[:num_gpus]
    notes = []
    for gpu in freest:
        if not gpu.used_bytes:
            continue
        sizes = sorted(gpu.processes.items(), key=lambda item: -item[1])
        users = list_few([f"{name} {format_bytes(size)}" for name, size in sizes])
        text = f"GPU {gpu.number}: {format_bytes(gpu.used_bytes)} are in use"
        notes.append(f"{text}{f' ({users})' if users else ''}")
    numbers = sorted(gpu.number for gpu in freest)
    if numbers != list(range(num_gpus)):
        notes.append(
            "the GPUs with the most free memory are "
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, numbers))}"
        )
    return machine_gpu(freest[0]), freest[-1].used_bytes, notes


def precision_of(options: ShardingOptions) -> "Precision":
    """Return the data types of weights and cache that the options name.

    The values are unchanged: `auto` still means the checkpoint's data types, and '' no
    quantization.

    Args:
        options: The options `dtype`, `kv_cache_dtype` and `quantization`.
    """
    from kvcalc.model.precision import Precision

    return Precision(options.dtype, options.kv_cache_dtype, options.quantization)


def parallelism_of(options: ShardingOptions, engine: str = "") -> "Parallelism":
    """Return the tensor, pipeline, data, expert and context parallelism that the options name.

    With `enable_expert_parallel`, the experts are spread over all tp · dp GPUs. For llama.cpp, `tp`
    GPUs share the layers, which is its default split.

    Args:
        options: The options `tp`, `pp`, `dp`, `ep`, `dcp` and `enable_expert_parallel`. `tp` must
            be a number: `split_sizes` replaces `--tp auto`.
        engine: Name of the engine; '' if it does not matter.

    Raises:
        UserError: Both `enable_expert_parallel` and an `ep` above 1 are given.
    """
    from kvcalc.layers.batch import Parallelism

    ep = options.ep
    if options.enable_expert_parallel:
        if ep > 1:
            raise UserError("use either --enable-expert-parallel or --expert-parallel-size")
        ep = options.tp * options.dp
    tp, pp = options.tp, options.pp
    if engine == "llama.cpp":
        tp, pp = 1, max(tp, pp)
    return Parallelism(tp, pp, options.dp, ep, options.dcp)


def split_sizes(options: Iterable[Sharding], models: "Sequence[Model]") -> list[Sharding]:
    """Return options in which `--tp auto` is replaced by fixed numbers of GPUs.

    An item with `--tp auto` becomes several items: with tp 1, 2, 4 and 8, without the sizes by
    which a model cannot be split. If it cannot be split by any, nothing remains of the item.

    Args:
        options: Each an item with one value for tp. Items without `--tp auto` do not change.
        models: The models. The size must divide each of them.
    """
    from kvcalc.model.pipeline import check

    results = []
    for option in options:
        if option.tp != AUTO:
            results.append(option)
            continue
        for tp in AUTO_TP:
            sized = replace(option, tp=tp)
            with suppress(UserError):
                for model in models:
                    check(model, parallelism_of(sized))
                results.append(sized)
    return results


def stored_models(models: "Sequence[Model]", options: Iterable[Sharding]) -> "list[Stored]":
    """Return (model, data types, parallelism) for each pair of a model and an item of options.

    Args:
        models: The models.
        options: Each an item with data types and parallelism. An item with `--tp auto` counts as
            one item for each of tp 1, 2, 4 and 8 by which all models can be split.
    """
    return [
        (model, precision_of(option), parallelism_of(option))
        for model, option in product(models, split_sizes(options, models))
    ]


def axes_of(shapes: "Iterable[ContextOptions]") -> tuple[list[int], list[int]]:
    """Return the distinct contexts, and the distinct batch sizes, each in the order of the options.

    Args:
        shapes: Options with one context (tokens) and one batch size (sequences) each. They come
            from lists that the user typed, so contexts and batch sizes repeat.
    """
    contexts = dict.fromkeys(shape.context for shape in shapes)
    return list(contexts), list(dict.fromkeys(shape.batch_size for shape in shapes))


def deployment_of(
    model: "Model", gpu: "Gpu", options: DeploymentOptions, kind: Any = None
) -> "TimedDeployment":
    """Return a model on one replica of GPUs, ready to be timed with the options' engine.

    Times are predicted by the engine's calibration: time models fitted to measured kernels. Without
    one, they are datasheet bounds. If the engine does not support a float32 checkpoint, the data
    type is the one in which the engine loads it.

    Args:
        model: The model.
        gpu: The GPU.
        options: Data types, parallelism, engine and calibration.
        kind: Class of the result: `TimedDeployment` (None) or a subclass. The subclass `Deployment`
            adds the methods for notebooks.
    """
    from kvcalc.capacity.engines import ENGINES
    from kvcalc.timing.deployment import TimedDeployment

    kind, choice = kind or TimedDeployment, options.choice
    result: TimedDeployment = kind(
        model,
        gpu,
        ENGINES[choice.engine].loaded_precision(model, precision_of(options)),
        parallelism_of(options, options.engine),
        mla_form=options.mla_form,
        nodes=options.nodes,
        engine=choice.engine,
        engine_version=options.engine_version,
    )
    return result.with_calibration(choice.calibration, options.calibration_from)


def deployments_of(
    names: Sequence[str], options: Sequence[DeploymentOptions]
) -> "list[TimedDeployment]":
    """Return a deployment for each combination of model, GPU and item of `options`.

    With `--tp auto`, there is a deployment for each of tp 1, 2, 4 and 8 by which all models can be
    split.

    Args:
        names: Words, each a model or a comma-separated list of models.
        options: Items with data types, parallelism, engine and calibration. The first item also
            names the GPUs, and the `--set` changes of the models' fields.
    """
    models = models_of(names, options[0].set_)
    return [
        deployment_of(model, gpu, option)
        for model, gpu, option in product(
            models, gpus_of(options[0]), split_sizes(options, models)
        )
    ]


def remarks(models: "Iterable[Model]", longest: int) -> list[str]:
    """Return notes for the user about the models of an answer, each after the names of its models.

    These are the notes that each model has from its file, such as parts that are not counted. A
    further note says if the requested context exceeds a model's maximum.

    Args:
        models: The models.
        longest: Longest requested context in tokens; 0 leaves out the note on the maximum.
    """
    names_by_note: dict[str, list[str]] = {}
    for model in {m.name: m for m in models}.values():
        texts = list(model.notes)
        if model.max_context and longest > model.max_context:
            texts.append(
                f"context {longest:,} is beyond the model's own maximum of {model.max_context:,}"
            )
        for text in texts:
            names_by_note.setdefault(text, []).append(model.name)
    return [f"{', '.join(names)}: {text}" for text, names in names_by_note.items()]
