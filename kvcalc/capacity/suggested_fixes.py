"""What is missing where something does not fit, and the smallest changes that mend it: each is run
before it is named."""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvcalc.capacity.command_line import flags_of
from kvcalc.capacity.deployment_fit import Fit, most_sequences
from kvcalc.capacity.dialects import DIALECTS
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
# of the memory: what is above leaves nothing to other processes and to what terms leave out
LARGEST_SHARE = 0.97
# of the bytes before: a format that saves less is not worth another checkpoint
SMALLER_WEIGHTS = 0.9
NO_FIX = f"no smaller format helps, nor `--tp` up to {LARGEST_TP}"
EIGHT_BITS = (
    "fp8",
    "q8_0",
)  # a cache of half the bytes, by the names that engines have for it


class ConfigChange(NamedTuple):
    """A change of a request, and what it holds.

    Attributes:
        words: Options as they are typed behind the request.
        deployment: The changed deployment.
        options: The changed options.
        sequences: Sequences that fit.
        quality: What is known of a smaller format's quality, or "".
    """

    words: tuple[str, ...]
    deployment: TimedDeployment
    options: FitOptions
    sequences: int
    quality: str = ""


class Advice(NamedTuple):
    """What to do if something does not fit.

    Attributes:
        missing: What is missing, in words.
        num_fitting: Sequences of the requested length that fit.
        fixes: Options to type for each change.
        changes: The changes that make the request fit, each tried.
        num_gpus: GPUs of the request.
    """

    missing: str
    num_fitting: int
    fixes: tuple[str, ...]
    changes: tuple[ConfigChange, ...]
    num_gpus: int

    @property
    def quality(self) -> str:
        """What is known of the quality of the formats that are named, or ""."""
        return "; ".join(change.quality for change in self.changes if change.quality)

    @property
    def said(self) -> str:
        """What is missing, and the changes that help."""
        count = self.num_fitting
        num_fitting = f"{count:,} fit{'s' * (count == 1)}" if count else ""
        fixes = []
        for words, change in zip(self.fixes, self.changes, strict=True):
            gpus = change.deployment.parallelism.gpus
            fixes.append(f"`{words}`" + (f" ({gpus:,} GPUs)" if gpus != self.num_gpus else ""))
        listed = " or ".join(filter(None, [", ".join(fixes[:-1]), *fixes[-1:]]))
        fits = f"it fits with {listed}" if fixes else NO_FIX
        return "; ".join(filter(None, [self.missing, num_fitting, fits]))


def small_cache(found: Fit) -> ConfigChange | None:
    """The same with a cache of 8 bits; None where the GPU or the engine has none, or it holds no
    more.

    fp8 takes a GPU that has it.
    """
    dtype = next(
        name
        for name in EIGHT_BITS
        if found.engine.dtypes is None or name in found.engine.dtypes
    )
    if dtype == "fp8" and "fp8" not in found.gpu.flops_per_s:
        return None
    quality = f"cache in {dtype}: {loss_of('cache', dtype)}"
    if found.options.cache_type_k or found.options.cache_type_v:
        options = msgspec.structs.replace(found.options, cache_type_k=dtype, cache_type_v=dtype)
        types = ("--cache-type-k", dtype, "--cache-type-v", dtype)
        change = _tried(found, types, found.asked, options, quality)
    else:
        precision = msgspec.structs.replace(found.asked.precision, kv_cache_dtype=dtype)
        deployment = msgspec.structs.replace(found.asked, precision=precision)
        change = _tried(found, ("--kv-cache-dtype", dtype), deployment, found.options, quality)
    return change if change.sequences > found.sequences else None


def without_sharing(found: Fit) -> int:
    """Sequences that fit where each keeps all of its tokens."""
    return _held(found, found.asked, msgspec.structs.replace(found.options, shared_prefix=0))


def advice(
    found: Fit, named: str = "", as_command: bool = False, all_experts: bool = False
) -> Advice | None:
    """Return what is missing and what would mend it; None if the request fits.

    Args:
        found: The answer to a request.
        named: The model as it was typed.
        as_command: Whether the request is an engine's command line. The changes are then the
            engine's own flags.
        all_experts: Whether the request has `--enable-expert-parallel`, which excludes `--ep`.
    """
    if found.fits:
        return None
    fixes = {}
    for change in changes(found, all_experts):
        words = _as_flags(found, change, named) if as_command else shlex.join(change.words)
        if words:
            fixes[words] = change
    missing = _missing(found)
    return Advice(missing, found.sequences, (*fixes,), (*fixes.values(),), found.ranks.gpus)


def _as_flags(found: Fit, change: ConfigChange, named: str) -> str:
    """Return the engine's flags that are new with a change; "" if flags alone cannot tell it."""
    before = flags_of(found.asked, found.options, named)
    after = flags_of(change.deployment, change.options, named)
    if (
        before is None
        or after is None
        or before.model != after.model
        or before.beside != after.beside
    ):
        return ""
    return shlex.join(
        word
        for name, words in after.words.items()
        if words != before.words.get(name)
        for word in words
    )


def _missing(found: Fit) -> str:
    if found.shortage and not found.given:
        budget = found.end_budget
        if budget.weights_fit:
            return f"weights, activations and overhead are {format_bytes(found.shortage)} over"
        return f"weights alone are {format_bytes(budget.weights - budget.share)} over"
    need, there = (
        format_bytes(found.needed.cache),
        format_bytes(found.plan.pool(found.kv_budget)),
    )
    return f"needs {need} of KV cache, has {there}"


def changes(found: Fit, all_experts: bool = False) -> Iterator[ConfigChange]:
    """Yield what holds all that is requested: the smallest change on these GPUs, the fewest GPUs,
    the longest context."""
    wanted = found.options.wanted
    small = next((change for change in _same_gpus(found) if change.sequences >= wanted), None)
    for change in (small, _more_gpus(found, all_experts), _shorter(found)):
        if change and change.sequences >= wanted:
            yield change


def _same_gpus(found: Fit) -> Iterator[ConfigChange]:
    """A share, a cache, weights: the smallest change first."""
    share = found.needed.utilization
    if share and found.utilization < share <= LARGEST_SHARE and not found.given:
        options = msgspec.structs.replace(found.options, gpu_memory_utilization=share)
        yield _tried(found, ("--gpu-memory-utilization", f"{share:g}"), found.asked, options)
    if cache := small_cache(found):
        yield cache
    precision = found.asked.precision
    is_gguf = any(q.label == "gguf" or mix_of(q.label) for q in found.model.quantization)
    if canonical(precision.dtype) == "fp8" or (is_gguf and found.options.engine != "llama.cpp"):
        return
    before = weight_bytes(found.model, precision)
    for name in found.engine.smaller_weights:
        if name == "fp8" and ("fp8" not in found.gpu.flops_per_s or found.model.quantization):
            continue
        smaller = msgspec.structs.replace(precision, quantization=name)
        if _weight_bytes(found, smaller) <= SMALLER_WEIGHTS * before:
            deployment = msgspec.structs.replace(found.asked, precision=smaller)
            quality = f"weights in {name}: {loss_of('weights', name)}"
            yield _tried(found, ("--quantization", name), deployment, found.options, quality)


def _weight_bytes(found: Fit, precision: object) -> float:
    """Return the bytes of the model's weights; infinite if it cannot be stored so."""
    try:
        return weight_bytes(found.model, precision)  # type: ignore[arg-type]
    except UserError:
        return float("inf")


def _more_gpus(found: Fit, all_experts: bool) -> ConfigChange | None:
    """Return the fewest GPUs that hold the request, doubling one kind of ranks; None if LARGEST_TP
    of a kind do not."""
    for wider, words in _wider(found, all_experts):
        change = _tried(
            found,
            words,
            msgspec.structs.replace(found.asked, parallelism=wider),
            found.options,
        )
        if change.sequences >= found.options.wanted:
            return change
    return None


def _wider(found: Fit, all_experts: bool) -> Iterator[tuple[Parallelism, tuple[str, ...]]]:
    """Yield more tensor-parallel ranks and then more pipeline stages. llama.cpp shares layers
    unless asked for tensors."""
    ranks = found.ranks
    kinds: tuple[str, ...] = ("tp", "pp")
    if found.options.engine == "llama.cpp":
        kinds = ("tp",) if ranks.tp > 1 else ("pp",)
    for kind in kinds:
        size = getattr(ranks, kind)
        while size < LARGEST_TP:
            size *= 2
            words: tuple[str, ...] = (f"--{kind}", str(size))
            experts = ranks.ep
            if kind == "tp" and 1 < ranks.ep == ranks.tp * ranks.dp:
                experts = size * ranks.dp
                words += () if all_experts else ("--ep", str(experts))
            try:
                yield msgspec.structs.replace(ranks, ep=experts, **{kind: size}), words
            except UserError:
                break


def _shorter(found: Fit) -> ConfigChange | None:
    """Return the longest context that fits; None if not a single token does, or fewer sequences of
    the length fit."""
    if not found.longest or found.sequences:
        return None
    options = msgspec.structs.replace(found.options, max_model_len=found.longest)
    return _tried(found, ("--max-model-len", str(found.longest)), found.asked, options)


def _tried(
    found: Fit,
    words: tuple[str, ...],
    deployment: TimedDeployment,
    options: FitOptions,
    quality: str = "",
) -> ConfigChange:
    return ConfigChange(words, deployment, options, _held(found, deployment, options), quality)


def _held(found: Fit, deployment: TimedDeployment, options: FitOptions) -> int:
    """Return the sequences that fit so; 0 if it is no possible request, or the engine cannot be
    started so."""
    try:
        _ = deployment.ranks if deployment.nodes else None
        if (
            options.engine in DIALECTS
            and flags_of(found.asked, found.options)
            and not flags_of(deployment, options)
        ):
            return 0
        return most_sequences(deployment, options)
    except UserError:
        return 0
