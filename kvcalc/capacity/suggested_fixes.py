"""Advice for a request that does not fit: the missing memory, and the smallest changes that help.

Each change is tried before it is named.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from math import floor
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.capacity.command_line import command_of, option_words, with_values
from kvcalc.capacity.deployment_fit import Fit, fit
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.errors import UserError, join_words
from kvcalc.model.memory import weight_bytes, windows
from kvcalc.model.model import Model
from kvcalc.storage.quantization import loss_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

MAX_RANKS = 64
# of the memory: a larger share leaves nothing to other processes and to unpredicted memory
MAX_SHARE = 0.97
# of the bytes before: a format that saves less is not worth another checkpoint
SMALLER_WEIGHTS = 0.9
# A context of the low estimate replaces the middle one if it has this share of its tokens.
MIN_LOW_SHARE = 0.25
# Below this context, llama-server moves layers to the host instead of shortening the context.
# https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (--fit-ctx), 2026-11-27
FIT_CONTEXT = 4096
# vLLM's default on GPUs with less than 70 GiB; smaller passes would make prefill slow
SMALL_BATCH = 2048
MIN_BATCH_GAIN = 1.1  # of the sequences before
MAX_FIXES = 65  # characters of the suggested fixes, so that their footnote takes one line
NO_FIX = "none of the tried formats and parallel sizes helps"
# a cache of half the bytes, by the engines' names
EIGHT_BITS = ("fp8", "q8_0")
SMALL_CACHES = (*EIGHT_BITS, "fp8_ds_mla", "q4_0", "nvfp4")


class ConfigChange(msgspec.Struct, frozen=True, dict=True):
    """A request with changes that may make it fit, such as a smaller cache format or more GPUs.

    Attributes:
        request: The capacity of the unchanged request.
        deployment: The changed deployment.
        options: The changed options of `fit`.
        words: kvcalc options to type after the request, such as ("--tp", "4").
        cost: The disadvantage of the change as text, such as the published quality of a weight
            format. "" for none.
    """

    request: Fit
    deployment: TimedDeployment
    options: FitOptions
    words: tuple[str, ...] = ()
    cost: str = ""

    @classmethod
    def of(cls, request: Fit) -> "ConfigChange":
        """Return the request without any change. Call `changed` on the result to add changes.

        Args:
            request: The capacity of the request.
        """
        return cls(request, request.requested, request.options)

    def changed(self, cost: str = "", **values: Any) -> "ConfigChange":
        """Return this request with further changes.

        Example: `changed(tp=4)` doubles the GPUs of a request with tp 2.

        Args:
            cost: The disadvantage of the changes as text; "" keeps that of earlier changes.
            values: New values by name: parallelism (`tp`), formats (`kv_cache_dtype`) or options of
                `fit`.

        Raises:
            UserError: The values are invalid together.
        """
        deployment = replace(
            self.deployment,
            precision=with_values(self.deployment.precision, values),
            parallelism=with_values(self.deployment.parallelism, values),
        )
        words = [word for name, value in values.items() for word in option_words(name, value)]
        return ConfigChange(
            request=self.request,
            deployment=deployment,
            options=with_values(self.options, values),
            words=(*self.words, *words),
            cost=cost or self.cost,
        )

    @cached_property
    def result(self) -> Fit | None:
        """Return the capacity of the changed request; None if the engine cannot start with it.

        None is also the result if weights and working memory exceed the engine's share of the
        memory, or if the engine's command line cannot express the change although it expresses the
        request.
        """
        had_flags = command_of(self.request.requested, self.request.options)
        try:
            if self.deployment.nodes:
                _ = self.deployment.ranks
            if had_flags and not command_of(self.deployment, self.options):
                return None
            changed = fit(self.deployment, self.options)
        except UserError:
            return None
        return None if changed.lacks_memory and not self.options.has_given_cache else changed

    @property
    def sequences(self) -> int:
        """Return how many sequences fit in the replica with the change; 0 if it cannot start."""
        return self.result.sequences if self.result else 0

    @property
    def fits(self) -> bool:
        """Return whether all requested sequences fit with the change; False if it cannot start."""
        return self.sequences >= self.options.requested_num_seqs

    def flags(self, model_name: str = "") -> str:
        """Return the flags to add to or change in the engine's command line, as one text.

        Example: "--tensor-parallel-size 4". The text is "" if flags cannot express the change, for
        example because another checkpoint is needed.

        Args:
            model_name: The user's word for the model; "" if unknown. The flags do not contain it.
                It tells whether the change needs another checkpoint.
        """
        before = command_of(self.request.requested, self.request.options, model_name)
        after = command_of(self.deployment, self.options, model_name)
        if not before or not after:
            return ""
        if (before.model, before.options) != (after.model, after.options):
            return ""
        changed = [w for name, w in after.words.items() if w != before.words.get(name)]
        return shlex.join(word for words in changed for word in words)


ConfigChanges = Iterator[ConfigChange]


class Advice(NamedTuple):
    """Advice for a request that does not fit.

    Attributes:
        missing: The missing memory, as a text such as "has 1.50 GiB of KV cache of the
            80.00 GiB needed".
        num_fitting: Sequences of the requested length that fit in the replica without a change.
        fixes: Changes with which the request fits, each of them tried. The keys are the words to
            type: kvcalc's options, such as "--tp 4", or the engine's flags.
        num_gpus: GPUs of the request.
    """

    missing: str
    num_fitting: int
    fixes: dict[str, ConfigChange]
    num_gpus: int

    @property
    def text(self) -> str:
        """Return the advice as one text: the missing memory and the changes that help."""
        parts = [self.missing]
        if self.num_fitting:
            parts.append(f"{self.num_fitting:,} fit{'s' * (self.num_fitting == 1)}")
        fixes = []
        for words, change in self.fixes.items():
            gpus = change.deployment.parallelism.gpus
            fixes.append(f"`{words}`{f' ({gpus:,} GPUs)' * (gpus != self.num_gpus)}")
        parts.append(f"it fits with {join_with_or(fixes)}" if fixes else NO_FIX)
        return "; ".join(parts)


def join_with_or(words: Sequence[str]) -> str:
    """Return the words as one text: "a, b or c".

    Of a text that does not fit in one line of a footnote, only the first and last words remain.
    """
    text = join_words(words, " or ")
    if len(text) <= MAX_FIXES or len(words) < 3:
        return text
    return f"{words[0]} or {words[-1]}"


def smaller_cache(start: ConfigChange) -> ConfigChange | None:
    """Return the request with an 8-bit KV cache: fp8, or q8_0 with llama.cpp. None if impossible.

    The result is None if the GPU has no fp8 matrix units and the engine needs fp8. It is also None
    if the cache already has at most 8 bits. But if the options state separate data types of keys
    and values, both are changed, whatever their bits.

    Args:
        start: The request, possibly with earlier changes.
    """
    options, deployment = start.options, start.deployment
    dtypes = options.rules.dtypes or EIGHT_BITS
    dtype = next(name for name in EIGHT_BITS if name in dtypes)
    if dtype == "fp8" and "fp8" not in deployment.gpu.flops_per_s:
        return None
    names = ["kv_cache_dtype"]
    if options.cache_type_k or options.cache_type_v:
        names = ["cache_type_k", "cache_type_v"]
    elif deployment.formats.kv_cache_dtype in SMALL_CACHES:
        return None
    return start.changed(
        f"cache in {dtype}: {loss_of('cache', dtype)}", **dict.fromkeys(names, dtype)
    )


def small_cache(result: Fit) -> ConfigChange | None:
    """Return the request with an 8-bit KV cache, if more sequences fit with it; otherwise None.

    Args:
        result: The capacity of the request.
    """
    change = smaller_cache(ConfigChange.of(result))
    return change if change and change.sequences > result.sequences else None


def smaller_batch(result: Fit) -> ConfigChange | None:
    """Return the request with 2,048 tokens per pass, if clearly more sequences fit with it;
    otherwise None.

    In a layer with a sliding window, vLLM reserves the tokens of a pass for each sequence. Example:
    gemma-3-27b on one H100 stores 1 sequence of 32,768 tokens with passes of 8,192 tokens, and 3
    with passes of 2,048.

    Args:
        result: The capacity of the request.
    """
    options = result.options
    is_fixed = options.engine != "vllm" or options.max_num_batched_tokens
    if is_fixed or not any(windows(result.model)):
        return None
    change = ConfigChange.of(result).changed(max_num_batched_tokens=SMALL_BATCH)
    return change if change.sequences > MIN_BATCH_GAIN * result.sequences else None


def smaller_weights(start: ConfigChange) -> ConfigChanges:
    """Yield the request with each smaller weight format that the engine can load, largest first.

    A format must save at least 10% of the weights' bytes. fp8 is left out if the GPU has no fp8
    matrix units. Nothing is yielded if the weights are quantized already, except for llama.cpp.

    Args:
        start: The request, possibly with earlier changes.
    """
    deployment, options = start.deployment, start.options
    model, precision = deployment.model, deployment.precision
    if options.engine != "llama.cpp" and (precision.quantization or model.quantization):
        return
    limit = SMALLER_WEIGHTS * weight_bytes(model, precision)
    for name in options.rules.smaller_weights:
        if name == "fp8" and "fp8" not in deployment.gpu.flops_per_s:
            continue
        cost = f"weights in {name}: {loss_of('weights', name)}"
        change = start.changed(cost, quantization=name)
        with suppress(UserError):  # the model cannot have this format
            if weight_bytes(model, change.deployment.precision) <= limit:
                yield change


def first_fitting_changes(
    kinds: Iterable[Iterable[ConfigChange]], fits: Callable[[ConfigChange], Any]
) -> ConfigChanges:
    """Yield from each group of changes the first change that fits, so that advice stays short.

    A group without such a change yields nothing.

    Args:
        kinds: Groups of alternative changes, such as smaller formats or more GPUs. Each group
            begins with the change to prefer.
        fits: Function that takes a change and returns whether it fits.
    """
    for changes in kinds:
        yield from islice(filter(fits, changes), 1)


def advice(result: Fit, all_experts: bool = False, model_name: str = "") -> Advice | None:
    """Return the missing memory and the changes that help; None if the request fits.

    Args:
        result: The capacity of the request.
        all_experts: Whether the request has `--enable-expert-parallel`. Changes then state no
            `--ep`.
        model_name: The model in an engine's command line; "" without one. The advice then names
            flags of the engine instead of kvcalc's options, if any flags help.
    """
    if result.fits:
        return None
    fixes = {}
    kinds = [_same_gpus(result), _more_gpus(result, all_experts), _shorter_context(result)]
    if (model_name or result.lacks_memory) and not result.options.max_model_len:
        kinds.reverse()  # no length was requested
    for change in first_fitting_changes(kinds, lambda change: change.fits):
        words = change.flags(model_name) if model_name else shlex.join(change.words)
        if words:
            fixes[words] = change
    if model_name and not fixes:
        return advice(result, all_experts)
    missing = _missing(result)
    for change in fixes.values():
        changed, layers = change.options, result.model.layers
        if changed.n_gpu_layers > result.options.n_gpu_layers:
            missing = f"only {changed.n_gpu_layers} of {layers + 1} layers fit"
        elif changed.n_cpu_moe > result.options.n_cpu_moe:
            missing = f"the experts of {changed.n_cpu_moe} of {layers} layers need CPU memory"
    return Advice(missing, result.sequences, fixes, result.ranks.gpus)


def _missing(result: Fit) -> str:
    """Return the missing memory in words."""
    if missing := result.missing_free_bytes:
        return (
            f"{result.engine.title} needs {format_bytes(missing)} more free memory next to "
            "other processes"
        )
    per_gpu = " per GPU" * (result.ranks.gpus > 1)
    if result.shortage_bytes and not result.has_given_cache:
        budget = result.estimate_budget
        if budget.weights_fit:
            return (
                "weights, activations and overhead need "
                f"{format_bytes(result.shortage_bytes)} more{per_gpu}"
            )
        excess = format_bytes(budget.weights - budget.share)
        return f"weights exceed the engine's share by {excess}{per_gpu}"
    available = format_bytes(result.plan.pool(result.kv_budget))
    needed = format_bytes(result.needed.cache)
    return f"has {available} of KV cache{per_gpu} of the {needed} needed"


def _same_gpus(result: Fit) -> ConfigChanges:
    """Yield changes on the same GPUs: llama.cpp's division of layers, fewer sequences of the
    engine, a larger share, a smaller cache format and smaller weights, the smallest change first.

    Fewer sequences help because the engine reserves working memory for each.

    If other processes leave less free memory than the share, yield the largest share that is free.
    """
    request, share = ConfigChange.of(result), at_low_estimate(result).needed.utilization
    if missing := result.missing_free_bytes:
        free_share = floor((result.utilization - missing / result.gpu.usable_bytes) * 100) / 100
        if free_share > 0:
            yield request.changed(gpu_memory_utilization=free_share)
        return
    if result.options.engine == "llama.cpp" and result.ranks.tp > 1:
        yield request.changed(tp=1, pp=result.ranks.gpus)  # its default: it divides layers
    num_seqs = result.options.requested_num_seqs
    if num_seqs > 1 and not result.options.max_num_seqs:
        yield request.changed(max_num_seqs=num_seqs)
    if result.options.flash_attn == "off":
        yield request.changed(flash_attn="on")
    is_larger = share and result.utilization < share <= MAX_SHARE
    if is_larger and not result.has_given_cache:
        yield request.changed(gpu_memory_utilization=share)
    if cache := smaller_cache(request):
        yield cache
    yield from smaller_weights(request)
    if result.options.engine == "llama.cpp" and result.options.n_gpu_layers < 0:
        yield from host_layers(request, result.model)


def host_layers(request: ConfigChange, model: Model) -> ConfigChanges:
    """Yield more and more layers in host memory, of a mixture of experts only their experts.

    Args:
        request: The request, possibly with earlier changes.
        model: Its model.
    """
    for count in range(1, model.layers + 1):
        if model.has_experts:
            yield request.changed(n_cpu_moe=count)
        else:
            yield request.changed(n_gpu_layers=model.layers + 1 - count)


def _more_gpus(result: Fit, all_experts: bool) -> ConfigChanges:
    """Yield changes that double the tensor-parallel ranks, then changes that double the pipeline
    stages.

    llama.cpp splits layers over GPUs unless the request splits tensors.
    """
    names = ["tp", "pp"]
    if result.options.engine == "llama.cpp":
        names = names[:1] if result.ranks.tp > 1 else names[1:]
    for name in names:
        yield from wider_requests(ConfigChange.of(result), name, all_experts)


def wider_requests(
    request: ConfigChange, name: str, all_experts: bool = False
) -> ConfigChanges:
    """Yield the request with 2, 4, 8 … times its tensor-parallel ranks or pipeline stages.

    The last number is the first that is 64 or more. llama.cpp splits its layers over any number of
    GPUs, so each number up to 8 is tried; beyond it only doubled numbers, which keeps the search
    short. If experts are spread over all GPUs of a stage, the new GPUs get experts too.

    Args:
        request: The request, possibly with earlier changes.
        name: "tp" or "pp", the number to multiply.
        all_experts: Whether the request has `--enable-expert-parallel`. Changes then state no
            `--ep`.
    """
    ranks = request.deployment.parallelism
    covers_all = 1 < ranks.ep == ranks.stage_gpus
    size = getattr(ranks, name)
    is_layers = name == "pp" and request.options.engine == "llama.cpp"
    while size < MAX_RANKS:
        size += 1 if is_layers and size < 8 else size
        values = {name: size}
        if name == "tp" and covers_all:
            values["ep"] = size * ranks.dp
        try:
            wider = request.changed(**values)
        except UserError:
            return
        if all_experts:
            wider = replace(wider, words=wider.words[:2])
        yield wider


def _shorter_context(result: Fit) -> ConfigChanges:
    """Yield the change to the longest context that fits, then to the longest with MAX_SHARE.

    A change is left out if not even one token fits, or if some sequences of the requested length
    fit.
    """
    request = ConfigChange.of(result)
    for start in (request, request.changed(gpu_memory_utilization=MAX_SHARE)):
        tried = start.result
        length = tried and with_surest_length(tried).longest_length
        if length and not start.sequences:
            yield start.changed(max_model_len=length)


def at_low_estimate(result: Fit) -> Fit:
    """Return the capacity in the low estimate of the KV cache budget.

    If the request selects an estimate, or if the engine has only one, that estimate counts.

    Args:
        result: The capacity in any estimate.
    """
    budget = result.options.budget or "low" * result.engine.has_memory_range
    return fit(result.requested, replace(result.options, budget=budget))


def with_surest_length(result: Fit) -> Fit:
    """Return the capacity in the estimate whose longest length is suggested.

    It is the low estimate, with which the engine surely starts. If the low estimate fits less than
    MIN_LOW_SHARE of the tokens of the requested estimate, it is the requested estimate.

    Args:
        result: The capacity in any estimate.
    """
    low = at_low_estimate(result)
    smallest = (result.longest_length or 0) * MIN_LOW_SHARE
    return low if (low.longest_length or 0) > smallest else result


def at_longest_length(result: Fit) -> Fit:
    """Return the capacity at the longest context that fits, if the request states no context.

    This context replaces the model's maximum. It fits in the low estimate of the KV cache budget,
    so that the engine starts with it. If the low estimate fits less than MIN_LOW_SHARE of the
    tokens of the requested estimate, the requested estimate counts. If `max_num_seqs` sequences
    would have less than FIT_CONTEXT tokens each, this number is only a limit, and the context is
    the longest of one sequence. If no token fits, llama.cpp moves layers to the host for
    FIT_CONTEXT tokens. Return `result` unchanged if a context was requested, if no token fits with
    another engine, or if the request fits and the estimate that counts fits at least one sequence.

    Args:
        result: The capacity at the model's maximum, or at the requested context.
    """
    options = result.options
    if options.max_model_len:
        return result
    tried = with_surest_length(result)
    length = tried.longest_length
    if options.engine == "llama.cpp":
        if not (length or result.fits):
            length = min(result.length, FIT_CONTEXT)
    elif options.max_num_seqs and not options.users and (length or 0) < FIT_CONTEXT:
        return at_longest_length(fit(result.requested, replace(options, users=1)))
    if (result.fits and tried.sequences) or not length:
        return result
    chosen = fit(result.requested, replace(options, max_model_len=length))
    return replace(chosen, has_chosen_length=True)
