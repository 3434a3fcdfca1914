"""Advice for a request that does not fit: the missing memory, and the smallest changes that help.

Each change is tried before it is named.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvcalc.capacity.command_line import command_of
from kvcalc.capacity.deployment_fit import Fit, fit
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism
from kvcalc.model.memory import weight_bytes
from kvcalc.storage.formats import canonical
from kvcalc.storage.ggml import mix_of
from kvcalc.storage.quantization import loss_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

LARGEST_TP = 64
# of the memory: a larger share leaves nothing to other processes and to unpredicted memory
LARGEST_SHARE = 0.97
# of the bytes before: a format that saves less is not worth another checkpoint
SMALLER_WEIGHTS = 0.9
NO_FIX = f"no smaller format helps, nor `--tp` up to {LARGEST_TP}"
# a cache of half the bytes, by the engines' names
EIGHT_BITS = ("fp8", "q8_0")


class ConfigChange(NamedTuple):
    """A change of a request, and the sequences that fit with it.

    Attributes:
        words: Options to type after the request.
        deployment: The changed deployment.
        options: The changed options.
        sequences: Sequences that fit; 0 if the engine cannot be started with the change.
        quality: The published quality of a smaller format, or "".
    """

    words: tuple[str, ...]
    deployment: TimedDeployment
    options: FitOptions
    sequences: int
    quality: str = ""


class Advice(NamedTuple):
    """Advice for a request that does not fit.

    Attributes:
        missing: The missing memory, in words.
        num_fitting: Sequences of the requested length that fit.
        fixes: The changes that make the request fit, each tried, by the options to type.
        num_gpus: GPUs of the request.
    """

    missing: str
    num_fitting: int
    fixes: dict[str, ConfigChange]
    num_gpus: int

    @property
    def quality(self) -> str:
        """The published quality of the formats in the changes, or ""."""
        return "; ".join(change.quality for change in self.fixes.values() if change.quality)

    @property
    def text(self) -> str:
        """The missing memory, and the changes that help."""
        parts = [self.missing]
        if self.num_fitting:
            parts.append(f"{self.num_fitting:,} fit{'s' * (self.num_fitting == 1)}")
        fixes = []
        for words, change in self.fixes.items():
            gpus = change.deployment.parallelism.gpus
            fixes.append(f"`{words}`" + (f" ({gpus:,} GPUs)" if gpus != self.num_gpus else ""))
        parts.append(f"it fits with {joined(fixes)}" if fixes else NO_FIX)
        return "; ".join(parts)


def joined(words: Sequence[str]) -> str:
    """Return a list in words: a, b or c."""
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def try_change(
    result: Fit,
    words: tuple[str, ...],
    quality: str = "",
    deployment: TimedDeployment | None = None,
    **changes: object,
) -> ConfigChange:
    """Return a change with the sequences that fit.

    Args:
        words: Options to type after the request.
        deployment: The changed deployment; None for the requested one.
        changes: Changed options.
    """
    deployment = deployment or result.requested
    options: FitOptions = msgspec.structs.replace(result.options, **changes)
    sequences = 0
    try:
        if deployment.nodes:
            _ = deployment.ranks
        had_flags = command_of(result.requested, result.options)
        if not had_flags or command_of(deployment, options):
            changed = fit(deployment, options)
            if options.given or not changed.lacks_memory:
                sequences = changed.sequences
    except UserError:
        pass
    return ConfigChange(words, deployment, options, sequences, quality)


def small_cache(result: Fit) -> ConfigChange | None:
    """Return the change to a cache of 8 bits; None if the GPU or the engine has none, or if no more
    sequences fit."""
    dtypes = result.engine.dtypes or EIGHT_BITS
    dtype = next(name for name in EIGHT_BITS if name in dtypes)
    if dtype == "fp8" and "fp8" not in result.gpu.flops_per_s:
        return None
    quality = f"cache in {dtype}: {loss_of('cache', dtype)}"
    if result.options.cache_type_k or result.options.cache_type_v:
        change = try_change(
            result,
            ("--cache-type-k", dtype, "--cache-type-v", dtype),
            quality,
            cache_type_k=dtype,
            cache_type_v=dtype,
        )
    else:
        deployment = _with_precision(result, kv_cache_dtype=dtype)
        change = try_change(result, ("--kv-cache-dtype", dtype), quality, deployment)
    return change if change.sequences > result.sequences else None


def _with_precision(result: Fit, **formats: str) -> TimedDeployment:
    precision = msgspec.structs.replace(result.requested.precision, **formats)
    return msgspec.structs.replace(result.requested, precision=precision)


def without_sharing(result: Fit) -> int:
    """Return the sequences that fit if no sequence shares tokens."""
    return try_change(result, (), shared_prefix=0).sequences


def advice(
    result: Fit, model_name: str = "", as_command: bool = False, all_experts: bool = False
) -> Advice | None:
    """Return the missing memory and the changes that help; None if the request fits.

    Args:
        result: The fit of a request.
        model_name: The model as typed.
        as_command: Whether the request is an engine's command line. The changes are then the
            engine's own flags.
        all_experts: Whether the request has `--enable-expert-parallel`, which excludes `--ep`.
    """
    if result.fits:
        return None
    fixes = {}
    for changes in (_same_gpus(result), _more_gpus(result, all_experts), _shorter(result)):
        fitting = (c for c in changes if c and c.sequences >= result.options.wanted)
        if change := next(fitting, None):
            words = shlex.join(change.words)
            if as_command:
                words = _as_flags(result, change, model_name)
            if words:
                fixes[words] = change
    return Advice(_missing(result), result.sequences, fixes, result.ranks.gpus)


def _as_flags(result: Fit, change: ConfigChange, model_name: str) -> str:
    """Return the engine's flags that are new with a change; "" if flags cannot express it."""
    before = command_of(result.requested, result.options, model_name)
    after = command_of(change.deployment, change.options, model_name)
    if (
        not before
        or not after
        or (before.model, before.options) != (after.model, after.options)
    ):
        return ""
    changed = [words for name, words in after.words.items() if words != before.words.get(name)]
    return shlex.join(word for words in changed for word in words)


def _missing(result: Fit) -> str:
    """Return the missing memory in words."""
    if result.shortage and not result.has_given_cache:
        budget = result.estimate_budget
        if budget.weights_fit:
            shortage = format_bytes(result.shortage)
            return f"weights, activations and overhead are {shortage} over"
        return f"weights alone are {format_bytes(budget.weights - budget.share)} over"
    pool = result.plan.pool(result.kv_budget)
    return f"needs {format_bytes(result.needed.cache)} of KV cache, has {format_bytes(pool)}"


def _same_gpus(result: Fit) -> Iterator[ConfigChange | None]:
    """Yield a larger share, a smaller cache and smaller weights: the smallest change first."""
    share = result.needed.utilization
    is_larger = share and result.utilization < share <= LARGEST_SHARE
    if is_larger and not result.has_given_cache:
        words = ("--gpu-memory-utilization", f"{share:g}")
        yield try_change(result, words, gpu_memory_utilization=share)
    yield small_cache(result)
    precision = result.requested.precision
    is_gguf = any(q.label == "gguf" or mix_of(q.label) for q in result.model.quantization)
    is_fixed = is_gguf and result.options.engine != "llama.cpp"
    if canonical(precision.dtype) == "fp8" or is_fixed:
        return
    limit = SMALLER_WEIGHTS * weight_bytes(result.model, precision)
    for name in result.engine.smaller_weights:
        if name == "fp8" and ("fp8" not in result.gpu.flops_per_s or result.model.quantization):
            continue
        deployment = _with_precision(result, quantization=name)
        try:
            is_smaller = weight_bytes(result.model, deployment.precision) <= limit
        except UserError:  # the model cannot have this format
            continue
        if is_smaller:
            quality = f"weights in {name}: {loss_of('weights', name)}"
            change = try_change(result, ("--quantization", name), quality, deployment)
            yield change


def _more_gpus(result: Fit, all_experts: bool) -> Iterator[ConfigChange | None]:
    """Yield doubled tensor-parallel ranks and then doubled pipeline stages, up to LARGEST_TP.

    llama.cpp shares layers unless the request shares tensors.
    """
    ranks = result.ranks
    names: tuple[str, ...] = ("tp", "pp")
    if result.options.engine == "llama.cpp":
        names = ("tp",) if ranks.tp > 1 else ("pp",)
    for name in names:
        size = getattr(ranks, name)
        while size < LARGEST_TP:
            size *= 2
            words: tuple[str, ...] = (f"--{name}", str(size))
            experts = ranks.ep
            if name == "tp" and 1 < ranks.ep == ranks.tp * ranks.dp:
                experts = size * ranks.dp
                words += () if all_experts else ("--ep", str(experts))
            try:
                wider: Parallelism = msgspec.structs.replace(ranks, ep=experts, **{name: size})
            except UserError:
                break
            deployment = msgspec.structs.replace(result.requested, parallelism=wider)
            yield try_change(result, words, deployment=deployment)


def _shorter(result: Fit) -> Iterator[ConfigChange]:
    """Yield the longest context that fits; nothing if not one token fits, or if some sequences of
    the requested length fit."""
    if result.longest and not result.sequences:
        words = ("--max-model-len", str(result.longest))
        yield try_change(result, words, max_model_len=result.longest)
