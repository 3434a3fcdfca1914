"""Summarise a diagnosis: the memory of each item, which changes of flags help, and the records.

Each change is tried before it is printed: with the engine's rules, and with the rules corrected by
the log.
"""

import shlex
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.command_line import command_of
from kvcalc.capacity.fit_records import Typed, fit_record
from kvcalc.diagnosis.diagnosis import ITEM_NAMES, Diagnosis, MemoryItem
from kvcalc.diagnosis.log_reader import Boot, find_gpu
from kvcalc.errors import UserError, printable
from kvcalc.layers.batch import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.records.plan import AdviceRecord, DiagnoseRecord
from kvcalc.storage.quantization import loss_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

MAX_UTILIZATION = 0.97
MIN_TOKENS, MIN_SEQUENCES, MAX_TP, MAX_CHANGES = 512, 8, 64, 5
SMALL_CACHES = ("fp8", "fp8_ds_mla", "q8_0", "q4_0", "nvfp4")
FAILURES = {
    "no_blocks": "nothing is left for the KV cache",
    "occupied": "less memory is free than the engine's share",
    "too_long": "one request of the maximum length does not fit",
    "out_of_memory": "an allocation ran out of memory",
    "weights": "the weights do not fit",
}
V0_ITEMS = "memory share weights activations libraries graphs cache"
SUMMARY_KEYS = "fits failure tokens max_num_seqs command taken change advice"


class ChangeCandidate(NamedTuple):
    """A deployment to try, and the users and tokens that must fit on it.

    Attributes:
        users: Users that must fit.
        tokens: Tokens of each user.
        flags: The changed flags.
        cost: The disadvantage of the change, in words.
    """

    diagnosis: Diagnosis
    users: int
    tokens: int
    deployment: TimedDeployment
    options: FitOptions
    flags: str = ""
    cost: str = ""

    def changed(self, values: Mapping[str, Any], cost: str = "") -> "ChangeCandidate":
        """Return a candidate with other values of options, formats or `parallelism`, and its
        flags."""
        formats: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in values.items():
            (formats if name in Precision.__struct_fields__ else others)[name] = value
        ranks = others.pop("parallelism", self.deployment.parallelism)
        precision = msgspec.structs.replace(self.deployment.precision, **formats)
        deployment = msgspec.structs.replace(
            self.deployment, precision=precision, parallelism=ranks
        )
        options = msgspec.structs.replace(self.options, **others)
        old, new = command_of(self.deployment, self.options), command_of(deployment, options)
        flags = [self.flags] if self.flags else []
        for name, words in new.words.items() if old and new else ():
            if old and words != old.words.get(name):
                flags.append(shlex.join(words))
        return self._replace(
            deployment=deployment,
            options=options,
            flags=" ".join(flags),
            cost=self.cost or cost,
        )

    @property
    def required_users(self) -> int:
        """The sequences that must fit for the users. llama.cpp allocates all slots at its start."""
        return _required_users(self.options, self.users)

    def fit(self) -> Fit | None:
        """Return the fit by the engine's rules; None if the users do not fit by the rules or as
        logged."""
        needed = msgspec.structs.replace(
            self.options, users=self.required_users, max_model_len=self.tokens
        )
        users = _required_users(self.options, 1)
        one_user = msgspec.structs.replace(self.options, users=users)
        corrections = self.diagnosis.corrections
        gpu = self.diagnosis.deployment.gpu
        logged = msgspec.structs.replace(self.deployment, gpu=gpu)
        try:
            by_rules = fit(self.deployment, needed)
            corrected, started = (
                fit(logged, msgspec.structs.replace(options, from_log=corrections))
                for options in (needed, one_user)
            )
        except UserError:
            return None
        free_bytes = corrections.memory_bytes - corrections.others_bytes
        is_total = corrections.others_bytes and corrected.utilization_basis == "total"
        if is_total and corrected.budget.share > free_bytes:
            return None
        can_fit = by_rules.fits and corrected.fits and started.fits
        return by_rules if can_fit else None

    def advice(self) -> AdviceRecord | None:
        """Return the advice of the change; None if it does not help."""
        after = self.fit()
        if after is None:
            return None
        longest = max(
            self.options.max_model_len or self.diagnosis.predicted.length, self.tokens
        )
        candidate = self.changed({"max_model_len": longest})._replace(flags=self.flags)
        options = msgspec.structs.replace(candidate.options, users=self.required_users)
        fitted = fit(self.deployment, options)
        if not fitted.fits:
            candidate = candidate.changed({"max_model_len": self.tokens})
            options = msgspec.structs.replace(options, max_model_len=self.tokens)
            fitted = fit(self.deployment, options)
        record = fit_record(fitted, typed=Typed(model=self.diagnosis.command.named))
        return {
            "flags": candidate.flags,
            "cost": self.cost,
            "command": record["command"],
            "kvcalc_command": record["kvcalc_command"],
            "holds": after.sequences,
        }


def _required_users(options: FitOptions, users: int) -> int:
    return max(users, options.max_num_seqs or 1) if options.engine == "llama.cpp" else users


def find_changes(start: ChangeCandidate) -> list[AdviceRecord]:
    """Return up to MAX_CHANGES changes that make the users fit, the smallest of each kind.

    Changes of one flag come first. If none helps, each is combined with a change of the memory
    share.
    """
    advice: list[AdviceRecord] = []
    for candidates in chain([_larger_shares(start)], _changes(start)):
        advice += _first_advice(candidates)
    for candidates in () if advice else _changes(start):
        advice += _first_advice(chain.from_iterable(map(_larger_shares, candidates)))
    return advice[:MAX_CHANGES]


def _first_advice(candidates: Iterable[ChangeCandidate]) -> Iterator[AdviceRecord]:
    return islice(filter(None, (candidate.advice() for candidate in candidates)), 1)


def _first_that_fits(candidates: Sequence[ChangeCandidate]) -> Sequence[ChangeCandidate]:
    """Return the first candidate that fits, if all after it fit too. Empty if none does."""
    first = bisect_left(candidates, True, key=lambda candidate: bool(candidate.fit()))
    return candidates[first : first + 1]


def _larger_shares(start: ChangeCandidate) -> Sequence[ChangeCandidate]:
    """Return the smallest share of the memory that fits, in hundredths, below the free share.

    If other processes occupy the share, return the next smaller share.
    """
    diagnosis, options = start.diagnosis, start.options
    if options.engine == "llama.cpp" or options.kv_cache_memory_bytes:
        return []
    corrections, used = diagnosis.corrections, diagnosis.predicted.utilization
    free = min(MAX_UTILIZATION, 1 - corrections.others_bytes / corrections.memory_bytes)
    shares = [hundredths / 100 for hundredths in range(1, int(free * 100) + 1)]
    if diagnosis.boot.failure == "occupied":
        lower = [share for share in shares if share < used]
        return [start.changed({"gpu_memory_utilization": share}) for share in lower[-1:]]
    higher = [share for share in shares if share > used]
    return _first_that_fits(
        [start.changed({"gpu_memory_utilization": share}) for share in higher]
    )


def _halves(value: int, minimum: int) -> Iterator[int]:
    """Yield the half of a value, the quarter and so on, down to a minimum."""
    while value // 2 >= minimum:
        value //= 2
        yield value


def _changes(start: ChangeCandidate) -> Iterator[Iterable[ChangeCandidate]]:
    """Yield the candidates of each kind of change, the smallest change first.

    First are changes that need less memory outside the cache, then changes of the deployment. fp8
    needs a GPU that computes in it.
    """
    options, deployment = start.options, start.deployment
    model, ranks, precision = deployment.model, deployment.parallelism, deployment.precision
    is_vllm, is_llama_cpp = options.engine == "vllm", options.engine == "llama.cpp"
    has_fp8 = "fp8" in deployment.gpu.flops_per_s
    is_narrow = deployment.formats.kv_cache_dtype in SMALL_CACHES
    is_quantized = precision.quantization or model.quantization or precision.dtype == "fp8"
    cache_dtype = "q8_0" if is_llama_cpp else "fp8"
    tokens = start.diagnosis.predicted.settings.max_num_batched_tokens
    token_counts = _halves(tokens, 64 if is_llama_cpp else MIN_TOKENS)
    counts = _halves(options.max_num_seqs or 1024, max(start.users, MIN_SEQUENCES))
    # condition, name of the changed field, its values, and the cost in words
    kinds: tuple[tuple[Any, str, Iterable[Any], str], ...] = (
        (True, "max_num_batched_tokens", token_counts, "longer prompts take more passes"),
        (is_vllm, "max_num_seqs", counts, "no more at once"),
        (
            not is_llama_cpp and not options.enforce_eager,
            "enforce_eager",
            [True],
            "slower steps",
        ),
        (
            is_vllm and model.vision and options.images != 0,
            "limit_mm_per_prompt",
            ['{"image": 0, "video": 0}'],
            "text alone",
        ),
        (
            (is_llama_cpp or has_fp8) and not is_narrow,
            "kv_cache_dtype",
            [cache_dtype],
            loss_of("cache", cache_dtype),
        ),
    )
    for applies, name, values, cost in kinds:
        if applies:
            yield (start.changed({name: value}, cost) for value in values)
    if is_llama_cpp:
        layers = options.n_gpu_layers if options.n_gpu_layers >= 0 else model.layers + 1
        layer_counts = range(layers - 1, 1, -1) if deployment.gpu.per != "SoC" else ()
        cost = "the other layers run on the host, slower"
        yield _first_that_fits(
            [start.changed({"n_gpu_layers": count}, cost) for count in layer_counts]
        )
        return
    wider = []
    tp = ranks.tp
    while tp < MAX_TP:
        tp *= 2
        ep = tp * ranks.dp if ranks.ep > 1 else 1
        wider.append(Parallelism(tp, ranks.pp, ranks.dp, ep, ranks.dcp))
    yield (start.changed({"parallelism": ranks}, f"{ranks.gpus} GPUs") for ranks in wider)
    if has_fp8 and not is_quantized:
        formats = {"dtype": "auto", "quantization": "fp8"}
        yield [start.changed(formats, loss_of("weights", "fp8"))]


def _longest_flag(start: ChangeCandidate) -> str:
    """Return the flag of the longest max_model_len with which one sequence fits, by the rules and
    as logged. Return '' if there is none, or if the logged maximum fits."""
    diagnosis = start.diagnosis
    users = _required_users(start.options, 1)
    one_user = msgspec.structs.replace(start.options, users=users)
    corrected = msgspec.structs.replace(one_user, from_log=diagnosis.corrections)
    fits = fit(diagnosis.plain, one_user), fit(diagnosis.deployment, corrected)
    limits = [fitted.needed.length for fitted in fits]
    lengths = [length for length in limits if length is not None]
    tokens = min(lengths, default=0) // 256 * 256
    if not 0 < tokens < diagnosis.predicted.length:
        return ""
    shorter = start._replace(users=1, tokens=tokens).changed({"max_model_len": tokens})
    return shorter.flags if shorter.fit() else ""


class DiagnosisSummary(NamedTuple):
    """The sentences and records of a diagnosis.

    Attributes:
        logged: The fit with the corrections of the log.
        fits: Whether the users fit.
        outcome: Whether the engine started, and its KV cache or the missing memory.
        capacity: The users that fit, as logged and as predicted.
        remedy: The changes that help in a sentence; '' if none is needed.
        changes: The changes that help.
    """

    diagnosis: Diagnosis
    logged: Fit
    fits: bool
    outcome: str
    capacity: str
    remedy: str
    changes: Sequence[AdviceRecord]

    @property
    def boot(self) -> Boot:
        """The start that the log describes."""
        return self.diagnosis.boot

    @property
    def basis(self) -> str:
        """Model, GPUs and engine."""
        fitted, boot = self.logged, self.diagnosis.boot
        engine = f"{boot.engine} {printable(boot.version, 40)}".strip()
        return f"{fitted.model.name} on {fitted.ranks.gpus}× {fitted.gpu.name}, {engine}"

    def records(self, log: str = "", number: int = 1) -> list[DiagnoseRecord]:
        """Return one record per memory item, and last the summary.

        Args:
            log: Name of the file.
            number: Number of the start in the file.
        """
        diagnosis, fitted, boot = self.diagnosis, self.logged, self.diagnosis.boot
        names = fitted.model.name, fitted.gpu.name, fitted.ranks.gpus
        records = _item_records(boot, names, diagnosis.items, log, number)
        written = command_of(diagnosis.deployment, diagnosis.options, diagnosis.command.named)
        records[-1] |= {
            "fits": self.fits,
            "failure": boot.failure or None,
            "tokens": boot.counts.get("tokens"),
            "max_num_seqs": fitted.sequences,
            "command": written.line if written else None,
            "taken": self.outcome,
            "change": self.remedy or None,
            "advice": [*self.changes],
        }
        return records


class V0Summary(NamedTuple):
    """The figures of a log of vLLM's V0 engine, which is not predicted.

    Attributes:
        names: Model, GPU and number of GPUs.
    """

    boot: Boot
    names: tuple[str, str, int]
    outcome: str
    capacity: str = "vLLM's V0 engine is not predicted"
    remedy: str = ""
    changes: Sequence[AdviceRecord] = ()

    @property
    def basis(self) -> str:
        """Model, GPUs and engine."""
        model, gpu, gpus = self.names
        return f"{model} on {gpus}× {gpu}, vllm {printable(self.boot.version, 40)}"

    def records(self, log: str = "", number: int = 1) -> list[DiagnoseRecord]:
        """Return one record per memory item, and last the summary."""
        boot = self.boot
        sizes = {key: boot.size(key) for key in V0_ITEMS.split()} | {"memory": boot.memory}
        items = {
            key: MemoryItem(size, None) for key, size in sizes.items() if (size or -1) >= 0
        }
        records = _item_records(boot, self.names, items, log, number)
        records[-1] |= {
            "failure": boot.failure or None,
            "tokens": boot.counts.get("tokens"),
            "taken": self.outcome,
        }
        return records


def _item_records(
    boot: Boot,
    names: tuple[str, str, int],
    items: Mapping[str, MemoryItem],
    log: str,
    number: int,
) -> list[Any]:
    """Return one record per memory item, and last one for the KV cache, without the summary."""
    named = {ITEM_NAMES[key]: item for key, item in items.items()}
    named["what fits"] = items.get("cache", MemoryItem(None, None))
    model, gpu, gpus = names
    return [
        {
            "log": log,
            "boot": number,
            "engine": boot.engine,
            "engine_version": printable(boot.version, 40) or None,
            "model": model,
            "gpu": gpu,
            "gpus": gpus,
            "term": name,
            "logged_bytes": logged,
            "predicted_bytes": predicted,
            "difference_bytes": None
            if logged is None or predicted is None
            else logged - predicted,
            **dict.fromkeys(SUMMARY_KEYS.split()),
        }
        for name, (logged, predicted) in named.items()
    ]


def summarize_v0(boot: Boot, model: str = "", gpu: str = "") -> V0Summary:
    """Return the figures of a log of vLLM's V0 engine, without a prediction.

    Args:
        model: A name instead of the log's.
        gpu: A name instead of the log's.
    """
    try:
        preset = None if gpu else find_gpu(boot.gpu, boot.memory)[0]
    except UserError:  # several GPUs have this memory
        preset = None
    cache = boot.size("cache")
    outcome = (
        f"The engine started{f' with {format_bytes(cache)} of KV cache' if cache else ''}."
    )
    if boot.failure:
        outcome = f"Failed: {FAILURES[boot.failure]}."
    gpu_name = gpu or (preset.name if preset else printable(boot.gpu, 80))
    gpus = prod(int(boot.flags.get(ranks) or 1) for ranks in ("tp", "pp", "dp"))
    return V0Summary(boot, (printable(model or boot.model, 80), gpu_name, gpus), outcome)


def summarize_diagnosis(
    diagnosis: Diagnosis, users: int = 0, context: int = 0
) -> DiagnosisSummary:
    """Return the summary of a start.

    Args:
        users: Users that must fit; 0 for one.
        context: Tokens of each user; 0 for the maximum of the start.
    """
    boot, predicted, options = diagnosis.boot, diagnosis.predicted, diagnosis.options
    tokens = context or predicted.length
    start = ChangeCandidate(diagnosis, max(1, users), tokens, diagnosis.plain, options)
    corrected = msgspec.structs.replace(
        options, from_log=diagnosis.corrections, users=start.users, max_model_len=tokens
    )
    logged = fit(diagnosis.deployment, corrected)
    is_requested = bool(users or context)
    is_running = not boot.failure or (is_requested and boot.has_started)
    fits = logged.fits and is_running
    changes = [] if fits else find_changes(start)
    remedy = ""
    if not fits:
        remedy = _remedy(boot, changes, "" if is_requested else _longest_flag(start))

    cells = boot.counts.get("tokens") or boot.counts.get("cells")
    cells_text = f", the cache stores {cells:,} tokens" if cells else ""
    per_rank = predicted.plan.max_sequences(predicted.budget_at(predicted.estimate), tokens)
    count = f"{logged.sequences:,} logged, {per_rank * predicted.ranks.dp:,} predicted"
    return DiagnosisSummary(
        diagnosis=diagnosis,
        logged=logged,
        fits=fits,
        outcome=_outcome(diagnosis, logged, tokens),
        capacity=f"users of {tokens:,} tokens: {count}{cells_text}",
        remedy=remedy,
        changes=changes,
    )


def _outcome(diagnosis: Diagnosis, logged: Fit, tokens: int) -> str:
    """Return whether the engine started and what the KV cache stores, or what is missing."""
    boot, cache = diagnosis.boot, diagnosis.logged("cache")
    if boot.failure == "occupied":
        free_bytes = boot.size("free") or 0
        free, share = format_bytes(free_bytes), format_bytes(boot.size("desired_share") or 0)
        used = format_bytes(boot.memory - free_bytes)
        in_use = f"{used} were in use before the start"
        return f"Failed: {in_use}, {free} are free, the engine needs {share}."
    if boot.failure == "too_long" and cache:
        needed = format_bytes(logged.needed.cache)
        remaining = format_bytes(cache)
        return f"Failed: {tokens:,} tokens need {needed} of KV cache, {remaining} are left."
    if boot.failure:
        short = diagnosis.logged("short")
        missing = f", {format_bytes(short)} are missing" if short else ""
        return f"Failed: {FAILURES[boot.failure]}{missing}."
    if cache is None:
        return "The engine started, the log has no size of the KV cache."
    count = logged.sequences
    users = f"{count:,} user{'s' * (count != 1)} of {tokens:,} tokens"
    return f"The engine started: {format_bytes(cache)} of KV cache fit {users}."


def _remedy(boot: Boot, changes: Sequence[AdviceRecord], length_flag: str) -> str:
    """Return the changes that help."""
    flags = [*(change["flags"] for change in changes), length_flag]
    *others, last = [f"`{words}`" for words in flags if words] or [""]
    text = "No change of one or two flags helps on this GPU."
    if last:
        text = f"It fits with {', '.join(others)}{' or ' if others else ''}{last}."
    is_occupied = boot.failure == "occupied"
    return f"Stop the processes that use the memory. {text}" if is_occupied else text
