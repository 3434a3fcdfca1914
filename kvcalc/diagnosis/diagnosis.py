"""Compare the memory of a logged engine start with the prediction, item by item."""

import re
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from kvcalc.capacity import Fit, fit
from kvcalc.capacity.command_line import Command, interpret_flags
from kvcalc.capacity.engine_flags import DIALECTS
from kvcalc.capacity.memory_budget import LogCorrections
from kvcalc.capacity.suggested_fixes import join_with_or
from kvcalc.diagnosis.log_reader import Boot
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.library.checkpoints import checkpoint
from kvcalc.library.load import driver_gpu, load_gpu
from kvcalc.records import Settings
from kvcalc.units import format_bytes

# Names of the memory items, in the order in which an engine takes memory.
_NAMES_TABLE = """
    memory: memory of the GPU
    before: in use before the start
    share: share that the engine takes
    weights: weights
    activations: activations
    libraries: libraries and collectives
    graphs: CUDA graphs
    rest: other memory, not itemised
    cache: cache
    short: missing before any cache
    left: left free
    host_weights: in the host's memory: weights
    host_cache: in the host's memory: cache
"""
ITEM_NAMES = dict(re.findall(r"(\w+): (.+)", _NAMES_TABLE))
OUTSIDE_CACHE = ("activations", "libraries")
MEMORY_TOLERANCE = 0.012  # relative difference of a GPU's total memory between drivers
MACHINE_GIB = "8 16 18 24 32 36 48 64 96 128 192 256 512"  # unified memory
# GPUs to compare if only the memory is known, most frequent first
USUAL_GPUS = """
    h100-sxm a100-80gb h200 b200 l40s a100-40gb-sxm rtx-4090 rtx-3090 l4 t4 a10 rtx-5090 mi300x
    h20 v100-16gb v100 gh200 b300 mi325x mi355x rtx-pro-6000-blackwell
"""
TOLERANCE = 0.02  # relative difference of sizes that match; half of a tensor's bytes does not


class MemoryItem(NamedTuple):
    """One part of a GPU's memory, such as weights: logged and predicted bytes of one GPU.

    Attributes:
        logged: Bytes that the engine's start-up log states; None if it states none.
        predicted: Bytes that kvcalc predicts; None if it predicts none.
    """

    logged: int | None
    predicted: int | None

    @property
    def difference(self) -> int | None:
        """Return this item's logged minus predicted bytes on one GPU; None if either is unknown."""
        if self.logged is None or self.predicted is None:
            return None
        return self.logged - self.predicted


class Diagnosis(NamedTuple):
    """An engine start from a log, and kvcalc's prediction of its memory.

    Attributes:
        boot: The logged start.
        command: The engine's command line, from the flags in the log and the user's overrides.
        predicted: The predicted memory and number of sequences that fit, without corrections from
            the log. The GPU has the memory that the log states.
        items: Memory items of one GPU, by key, such as "weights", "activations" and "cache".
        corrections: Logged minus predicted bytes of one GPU, for later calls of `fit`.
        remarks: Sentences to print.
    """

    boot: Boot
    command: Command
    predicted: Fit
    items: dict[str, MemoryItem]
    corrections: LogCorrections
    remarks: tuple[str, ...]


def diagnose(boot: Boot, model: str, gpu_name: str, overrides: Settings) -> Diagnosis:
    """Compute the memory of a logged engine start, and compare it with the logged bytes.

    The comparison has one item per part of one GPU's memory, such as weights and cache.

    Args:
        boot: The logged start.
        model: Name that replaces the model's name in the log; "" for none.
        gpu_name: Name that replaces the GPU's name in the log; "" for none.
        overrides: Values that replace the flags in the log, by kvcalc's option names, such as
            {"tp": 2}.

    Raises:
        UserError: No engine ran, or vLLM's V0 engine. Or model or GPU are neither in the log nor in
            the arguments.
    """
    if boot.is_v0 or boot.engine not in DIALECTS:
        problem = "PyTorch alone and vLLM's V0 engine are not predicted"
        raise UserError(problem, "`kvcalc fit MODEL --gpu GPU` shows what fits")
    # experts that cover all GPUs follow the logged tp
    flags = {n: v for n, v in boot.flags.items() if n == "tp" or n not in overrides}
    num_devices = max(Counter(item for item, _ in boot.buffers).values(), default=1)
    if num_devices > 1:
        flags.setdefault("tensor_split", ",".join("1" * num_devices))
    command = interpret_flags(
        DIALECTS[boot.engine], model or _model_name(boot, gpu_name), flags
    )
    values = command.settings | overrides
    release = re.match(r"\d+\.\d+(?:\.\d+)?", boot.version)
    if release:  # a build of llama.cpp begins with a letter
        values["engine_version"] = release[0]
    command = command._replace(settings=values)

    gpu, remark = (load_gpu(gpu_name), "") if gpu_name else find_gpu(boot)
    free = boot.size("free")
    if gpu.usable_share and free and not boot.memory:
        boot.memory = _unified_memory(gpu, free)
        remark = f"a {boot.memory >> 30} GiB machine: {format_bytes(free)} are free for its GPU"
    gpu = replace(gpu, memory_bytes=boot.memory or gpu.memory_bytes)
    command = _with_ranks(boot, command, gpu)
    predicted = fit(command.deployment(gpu), command.options)
    if boot.engine == "llama.cpp" and "cache" in boot.figures and "max_model_len" not in values:
        tokens = boot.counts.get(
            "cells", predicted.plan.tokens(boot.size("cache"), predicted.length)
        )
        length = tokens // (values.get("max_num_seqs") or 1)
        values["max_model_len"] = min(length, predicted.model.max_context or length)
        predicted = fit(command.deployment(gpu), command.options)
    if "cache" not in boot.figures and (size := _cache_bytes(boot, command, predicted)):
        boot.figures["cache"] = boot.figures["computed_cache"] = size
    items = _memory_items(boot, predicted)
    remarks = [*command.remarks, remark, _contradiction(boot, predicted, items)]
    return Diagnosis(
        boot=boot,
        command=command,
        predicted=predicted,
        items=items,
        corrections=_corrections(boot, predicted, items),
        remarks=tuple(filter(None, remarks)),
    )


def find_gpu(boot: Boot) -> tuple[Gpu, str]:
    """Return the GPU model that a log names, and a remark for the user.

    If the log has no known name, the GPU preset with this memory is used, which the remark states.
    If the log has a cache but no memory either, an H100 is assumed: the logged cache answers how
    many users fit. Otherwise, the remark is "".

    Args:
        boot: The logged start.

    Raises:
        UserError: No preset matches, or several GPU models have this memory.
    """
    name, memory = boot.gpu, boot.memory
    if preset := driver_gpu(name, memory):
        return preset, ""
    gpus = [
        gpu
        for gpu in map(load_gpu, USUAL_GPUS.split())
        if memory and abs(gpu.memory_bytes / memory - 1) <= MEMORY_TOLERANCE
    ]
    has_cache = boot.size("cache") or boot.counts or boot.concurrency
    if has_cache and not (gpus or name or boot.failure):
        return load_gpu("h100-sxm"), "the log names no GPU: h100-sxm is assumed; add --gpu"
    if not gpus:
        problem = f"the log's GPU {name!r} is not a preset" if name else "the log names no GPU"
        raise UserError(problem, f"Add --gpu, such as --gpu {'card.yaml' if name else 'h100'}")
    size = f"{memory / 2**30:.2f} GiB"
    if len(gpus) > 1:
        names = join_with_or([gpu.name for gpu in gpus])
        problem = f"the log names no GPU, and {size} can be {names}"
        raise UserError(problem, f"Add --gpu, such as --gpu {gpus[0].name}")
    return gpus[0], f"the log names no GPU: {size} match {gpus[0].name}; --gpu overrides it"


def _unified_memory(gpu: Gpu, free_bytes: float) -> int:
    """Return the total bytes of the smallest machine whose GPU may use at least `free_bytes`.

    Such a machine, for example a Mac, has unified memory, and its GPU may use only a share of it.
    The sizes to choose from are usual sizes from 8 to 512 GiB.

    Args:
        gpu: The GPU preset of the machine. Its memory is the largest possible result.
        free_bytes: Bytes that the log states as free for the GPU.
    """
    sizes = (int(gib) << 30 for gib in MACHINE_GIB.split())
    fitting = (
        size for size in sizes if replace(gpu, memory_bytes=size).usable_bytes >= free_bytes
    )
    return min(next(fitting, gpu.memory_bytes), gpu.memory_bytes)


def _model_name(boot: Boot, gpu_name: str) -> str:
    """Return the model's name: the path in the log, else the title and file type of a GGUF file.

    Example: "Meta Llama 3.1 8B Instruct" in "Q4_K - Medium" is meta-llama-3.1-8b-instruct-q4_k_m.
    """
    names = [boot.model]
    if boot.title:
        format_ = re.match(r"(?:all )?([A-Z]+[0-9]*[A-Z0-9_]*)(?: - ([SML]))?", boot.file_type)
        words = boot.title.split()
        if format_:
            words.append("_".join(filter(None, format_.groups())).lower())
        names.append("-".join(words))
    for name in filter(None, names):
        try:
            if "/" not in checkpoint(name).name:
                return name
        except UserError:
            continue
    hint = "Add --model and --gpu, such as --model qwen3-8b --gpu h100"
    if boot.gpu or boot.memory or gpu_name:
        hint = "Add --model, such as --model qwen3-8b"
    if not boot.model:
        raise UserError("the log names no model", hint)
    if boot.model.startswith(("/", ".", "~")) or boot.engine == "llama.cpp":
        raise UserError(f"the log's model {boot.model!r} is not a known model", hint)
    return boot.model


def _with_ranks(boot: Boot, command: Command, gpu: Gpu) -> Command:
    """Return the command line with a tensor-parallel size. If the log states none, it is the
    smallest that predicts the logged weights, or without weights the smallest at which they fit. A
    remark states it.

    Example: 13.95 GiB are half of the weights of a model with 27.59 GiB, so the size is 2.
    """
    settings = command.settings
    if boot.engine == "llama.cpp" or "tp" in settings:
        return command
    with suppress(UserError):  # the size does not divide the heads
        for tp in (1, 2, 4, 8):
            ranked = command._replace(settings=settings | {"tp": tp})
            budget = fit(ranked.deployment(gpu), ranked.options).budget
            is_match = budget.weights_fit
            if "weights" in boot.figures:
                is_match = abs(boot.size("weights") / budget.weights - 1) < TOLERANCE
            if is_match:
                command = ranked
                break
    tp = command.settings.get("tp", 1)
    remark = f"the log names no tensor-parallel size: tp {tp} is assumed; add --tp"
    return command._replace(remarks=(*command.remarks, remark))


def _cache_bytes(boot: Boot, command: Command, predicted: Fit) -> int:
    """Return the bytes of one GPU's cache that stores the logged tokens or concurrency; 0 if the
    log has neither.

    A cache format that the user names may be a change of the start. So the start's own format
    counts if its bytes are nearer to the prediction.

    If layers have windows or states, vLLM before 0.21 logs too few tokens, but the right
    concurrency. So the larger of concurrency and tokens ÷ max_model_len counts. Example: the
    concurrency is 33.04, and a request needs 45 blocks of 49 MiB. The cache has 71.15 GiB.
    """
    length = predicted.length
    requests = max(boot.concurrency, boot.counts.get("tokens", 0) / length)
    command = command._replace(
        settings=command.settings | {"kv_cache_dtype": boot.flags.get("kv_cache_dtype", "auto")}
    )
    sizes = (
        round(requests * (result.plan.needed(1, length) - result.plan.needed(0, 0)))
        for result in (predicted, fit(command.deployment(predicted.gpu), command.options))
    )
    return min(sizes, key=lambda size: abs(size - predicted.budget_at("middle")))


def _memory_items(boot: Boot, predicted: Fit) -> dict[str, MemoryItem]:
    """Return the memory items that the log states, and for vLLM also the items that are only
    predicted.

    If the log does not separate activations from other memory, their prediction is one item too.
    """
    is_vllm, budget = boot.engine == "vllm", predicted.budget
    logged = boot.figures.copy()
    overhead = dict(predicted.terms.overhead)
    if boot.memory:
        logged["memory"] = boot.memory
        if "free" in logged:
            logged["before"] = predicted.gpu.usable_bytes - logged["free"]
    if is_vllm:
        if "gpu_memory_utilization" in boot.flags:
            logged.setdefault("share", budget.share)
        if "weights" in logged and "cache" in logged:
            sizes = [logged[name] for name in OUTSIDE_CACHE if name in logged]
            if len(sizes) < 2:
                logged["rest"] = budget.share - logged["weights"] - logged["cache"] - sum(sizes)
    if logged.get("cache", 0) < 0:  # vLLM logs a negative size before it stops
        logged |= {"short": -logged["cache"], "cache": 0}
    cache = predicted.budget_at("middle")
    if boot.engine == "llama.cpp":
        cache = predicted.plan.needed(predicted.num_requested, predicted.length)
    expected = {
        "memory": budget.memory,
        "share": None if boot.engine == "llama.cpp" else budget.share,
        "weights": budget.weights,
        "activations": budget.activation,
        "graphs": overhead.pop("CUDA graphs", None),
        "libraries": sum(overhead.values()),
        "cache": cache,
        "short": max(0, -budget.cache) or None,
        "host_weights": predicted.terms.host or None,
    }
    if "rest" in logged:
        expected["rest"] = sum(
            expected.pop(name) or 0 for name in OUTSIDE_CACHE if name not in logged
        )
    items = {}
    for key in ITEM_NAMES:
        size = logged.get(key)
        # a negative difference shows that the log is of another GPU
        item = MemoryItem(size if size is None or size >= 0 else None, expected.get(key))
        is_expected = item.predicted is not None and (is_vllm or item.predicted)
        if item.logged is not None or is_expected:
            items[key] = item
    return items


def _contradiction(boot: Boot, predicted: Fit, items: dict[str, MemoryItem]) -> str:
    """Return a sentence if the logged weights and cache exceed the share of this GPU's memory, else
    ''. The item "rest" then has no logged bytes, and is removed. Without logged weights, the
    predicted weights count."""
    share, weights = predicted.budget.share, predicted.budget.weights
    left = share - boot.size("cache")
    if (
        boot.engine == "vllm"
        and "cache" in boot.figures
        and items["weights"].logged is None
        and left < weights
    ):
        return (
            f"the log's cache leaves {format_bytes(left)} of {predicted.gpu.name} for "
            f"{format_bytes(weights)} of weights: check --gpu, --tp, -q and --kv-cache-dtype"
        )
    if "rest" not in items or items["rest"].logged is not None:
        return ""
    del items["rest"]
    used = format_bytes(boot.size("weights") + boot.size("cache"))
    share = f"the {format_bytes(predicted.budget.share)} of {predicted.gpu.name}"
    return f"the log's weights and cache, {used}, exceed {share}: name the GPU with --gpu"


def _corrections(boot: Boot, predicted: Fit, items: dict[str, MemoryItem]) -> LogCorrections:
    """Return the logged bytes minus the predicted bytes. If the log states no weights, the
    difference of the cache is one of the other memory, and beyond it one of the weights. The cache
    of llama.cpp is not the rest."""
    weights = items["weights"].difference or 0
    difference = 0
    if boot.engine != "llama.cpp" and "cache" in boot.figures:
        difference = predicted.budget.cache - boot.size("cache") - weights
        working_bytes = predicted.terms.working_bytes
        if items["weights"].logged is None and difference < -working_bytes:
            weights = difference + working_bytes
            difference = -working_bytes
    ranks = predicted.ranks
    return LogCorrections(
        engine=boot.engine,
        gpu=predicted.gpu.name,
        memory_bytes=predicted.gpu.memory_bytes,
        model=predicted.model.name,
        parameters=predicted.model.parameters,
        weights_in=predicted.formats.weights_label,
        tensor_parallel_size=ranks.tp,
        pipeline_parallel_size=ranks.pp,
        version=boot.version[:40],
        weights_beyond_bytes=weights,
        beside_beyond_bytes=difference,
        others_bytes=items.get("before", MemoryItem(None, None)).logged or 0,
    )
