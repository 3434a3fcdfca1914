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
from kvcalc.capacity.memory_budget import LogCorrections
from kvcalc.diagnosis.diagnosis import ITEM_NAMES, Diagnosis, MemoryItem
from kvcalc.diagnosis.startup import Boot, find_gpu
from kvcalc.errors import UserError, printable
from kvcalc.layers.batch import Parallelism
from kvcalc.records.diagnose import AdviceRecord, DiagnoseRecord
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

    def changed(
        self, cost: str = "", deployment: Mapping[str, Any] = {}, **options: Any
    ) -> "ChangeCandidate":
        """Return a candidate with changed options and fields of the deployment, and its flags."""
        candidate = self._replace(
            deployment=msgspec.structs.replace(self.deployment, **deployment),
            options=msgspec.structs.replace(self.options, **options),
        )
        old = command_of(self.deployment, self.options)
        new = command_of(candidate.deployment, candidate.options)
        words = [self.flags] if self.flags else []
        if old and new:
            for name, flag_words in new.words.items():
                if flag_words != old.words.get(name):
                    words.append(shlex.join(flag_words))
        return candidate._replace(flags=" ".join(words), cost=self.cost or cost)

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
        candidate = self.changed(max_model_len=longest)._replace(flags=self.flags)
        options = msgspec.structs.replace(candidate.options, users=self.required_users)
        fitted = fit(self.deployment, options)
        if not fitted.fits:
            candidate = candidate.changed(max_model_len=self.tokens)
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
    for is_combined in (False, True):
        kinds = [_larger_shares(start), *_option_changes(start), *_deployment_changes(start)]
        for candidates in kinds[is_combined:]:
            if is_combined:
                candidates = chain.from_iterable(map(_larger_shares, candidates))
            tried = (candidate.advice() for candidate in candidates)
            advice += islice(filter(None, tried), 1)
        if advice:
            break
    return advice[:MAX_CHANGES]


def _first_that_fits(candidates: Sequence[ChangeCandidate]) -> Sequence[ChangeCandidate]:
    """Return the first candidate that fits, if all after it fit too. Empty if none does."""
    first = bisect_left(candidates, True, key=lambda candidate: bool(candidate.fit()))
    return candidates[first : first + 1]


def _larger_shares(start: ChangeCandidate) -> Iterable[ChangeCandidate]:
    """Return the smallest share of the memory that fits, in hundredths, below the free share.

    If other processes occupy the share, return the next smaller share.
    """
    diagnosis = start.diagnosis
    if start.options.engine == "llama.cpp" or start.options.kv_cache_memory_bytes:
        return []
    corrections, used = diagnosis.corrections, diagnosis.predicted.utilization
    free = min(MAX_UTILIZATION, 1 - corrections.others_bytes / corrections.memory_bytes)
    shares = [hundredths / 100 for hundredths in range(1, int(free * 100) + 1)]
    if diagnosis.boot.failure == "occupied":
        lower = [share for share in shares if share < used]
        return [start.changed(gpu_memory_utilization=share) for share in lower[-1:]]
    higher = [share for share in shares if share > used]
    return _first_that_fits([start.changed(gpu_memory_utilization=share) for share in higher])


def _halves(value: int, minimum: int) -> Iterator[int]:
    """Yield the half of a value, the quarter and so on, down to a minimum."""
    while value // 2 >= minimum:
        value //= 2
        yield value


def _option_changes(start: ChangeCandidate) -> Iterator[Iterable[ChangeCandidate]]:
    """Yield changes of each kind that need less memory outside the cache: fewer tokens per pass,
    fewer sequences, no CUDA graphs, no images."""
    options, engine = start.options, start.options.engine
    tokens = start.diagnosis.predicted.settings.max_num_batched_tokens
    cost = "longer prompts take more passes"
    yield (
        start.changed(cost, max_num_batched_tokens=count)
        for count in _halves(tokens, 64 if engine == "llama.cpp" else MIN_TOKENS)
    )
    if engine == "vllm":
        min_count = max(start.users, MIN_SEQUENCES)
        yield (
            start.changed("no more at once", max_num_seqs=count)
            for count in _halves(options.max_num_seqs or 1024, min_count)
        )
    if engine != "llama.cpp" and not options.enforce_eager:
        yield [start.changed("slower steps", enforce_eager=True)]
    if engine == "vllm" and start.deployment.model.vision and options.images != 0:
        limits = '{"image": 0, "video": 0}'
        yield [start.changed("text alone", limit_mm_per_prompt=limits)]


def _deployment_changes(start: ChangeCandidate) -> Iterator[Iterable[ChangeCandidate]]:
    """Yield changes of each kind of the deployment: an 8-bit cache, layers on the host, more GPUs,
    8-bit weights. fp8 needs a GPU that computes in it."""
    deployment, precision = start.deployment, start.deployment.precision
    ranks = deployment.parallelism
    is_llama_cpp = start.options.engine == "llama.cpp"
    has_fp8 = "fp8" in deployment.gpu.flops_per_s
    dtype = "q8_0" if is_llama_cpp else "fp8"
    if (is_llama_cpp or has_fp8) and deployment.formats.kv_cache_dtype not in SMALL_CACHES:
        smaller = msgspec.structs.replace(precision, kv_cache_dtype=dtype)
        yield [start.changed(loss_of("cache", dtype), {"precision": smaller})]
    if is_llama_cpp:
        layers = start.options.n_gpu_layers
        if layers < 0:
            layers = deployment.model.layers + 1
        counts = range(layers - 1, 1, -1) if deployment.gpu.per != "SoC" else ()
        cost = "the other layers run on the host, slower"
        yield _first_that_fits([start.changed(cost, n_gpu_layers=n) for n in counts])
        return
    wider = []
    tp = ranks.tp
    while tp < MAX_TP:
        tp *= 2
        ep = tp * ranks.dp if ranks.ep > 1 else 1
        wider.append(Parallelism(tp, ranks.pp, ranks.dp, ep, ranks.dcp))
    yield (start.changed(f"{ranks.gpus} GPUs", {"parallelism": ranks}) for ranks in wider)
    is_quantized = precision.quantization or deployment.model.quantization
    if has_fp8 and not is_quantized and precision.dtype != "fp8":
        narrower = msgspec.structs.replace(precision, dtype="auto", quantization="fp8")
        yield [start.changed(loss_of("weights", "fp8"), {"precision": narrower})]


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
    shorter = start._replace(users=1, tokens=tokens).changed(max_model_len=tokens)
    return shorter.flags if shorter.fit() else ""


class DiagnosisSummary(NamedTuple):
    """The sentences and records of a diagnosis.

    Attributes:
        boot: The engine start.
        model: The model's name.
        gpu: The GPU's name; '' if unknown.
        gpus: Number of GPUs.
        items: Memory items by their keys in ITEM_NAMES.
        outcome: Whether the engine started, and its KV cache or the missing memory.
        capacity: The users that fit, as logged and as predicted.
        remedy: The changes that help; '' if none is needed.
        changes: The changes that help.
        corrections: Corrections for later fits; None if the start is not predicted.
        answers: Further keys of the last record, by name.
    """

    boot: Boot
    model: str
    gpu: str
    gpus: int
    items: Mapping[str, MemoryItem]
    outcome: str
    capacity: str
    remedy: str = ""
    changes: Sequence[AdviceRecord] = ()
    corrections: LogCorrections | None = None
    answers: dict[str, Any] = {}

    @property
    def basis(self) -> str:
        """Model, GPUs and engine."""
        gpus = f"{self.gpus}× {self.gpu}" if self.corrections else self.gpu or "an unknown GPU"
        engine = f"{self.boot.engine} {printable(self.boot.version, 40)}".strip()
        return f"{self.model} on {gpus}, {engine}"

    def records(self, log: str = "", number: int = 1) -> list[DiagnoseRecord]:
        """Return one record per memory item, and last the summary.

        Args:
            log: Name of the file.
            number: Number of the start in the file.
        """
        cache = self.items.get("cache", MemoryItem(None, None))
        records: list[Any] = []
        for key, (logged, predicted) in [*self.items.items(), ("", cache)]:
            difference = None
            if logged is not None and predicted is not None:
                difference = logged - predicted
            records.append(
                {
                    "log": log,
                    "boot": number,
                    "engine": self.boot.engine,
                    "engine_version": printable(self.boot.version, 40) or None,
                    "model": self.model,
                    "gpu": self.gpu,
                    "gpus": self.gpus,
                    "term": ITEM_NAMES.get(key, "what fits"),
                    "logged_bytes": logged,
                    "predicted_bytes": predicted,
                    "difference_bytes": difference,
                    **dict.fromkeys(SUMMARY_KEYS.split()),
                }
            )
        records[-1] |= {
            "failure": self.boot.failure or None,
            "tokens": self.boot.counts.get("tokens"),
            "taken": self.outcome,
            "change": self.remedy or None,
            "advice": [*self.changes],
            **self.answers,
        }
        return records


def summarize_diagnosis(
    diagnosis: Diagnosis, users: int = 0, context: int = 0
) -> DiagnosisSummary:
    """Return the summary of a predicted start.

    Args:
        users: Users that must fit; 0 for one.
        context: Tokens of each user; 0 for the maximum of the start.
    """
    boot, predicted, options = diagnosis.boot, diagnosis.predicted, diagnosis.options
    users_needed, tokens = max(1, users), context or predicted.length
    start = ChangeCandidate(diagnosis, users_needed, tokens, diagnosis.plain, options)
    corrected = msgspec.structs.replace(
        options, from_log=diagnosis.corrections, users=users_needed, max_model_len=tokens
    )
    logged = fit(diagnosis.deployment, corrected)
    is_requested = bool(users or context)
    is_running = not boot.failure or (is_requested and boot.has_started)
    holds = logged.fits and is_running
    changes = [] if holds else find_changes(start)
    remedy = ""
    if not holds:
        remedy = _remedy(boot, changes, "" if is_requested else _longest_flag(start))

    cells = boot.counts.get("tokens") or boot.counts.get("cells")
    cells_text = f", the cache stores {cells:,} tokens" if cells else ""
    per_rank = predicted.plan.max_sequences(predicted.budget_at(predicted.estimate), tokens)
    count = f"{logged.sequences:,} logged, {per_rank * predicted.ranks.dp:,} predicted"
    written = command_of(diagnosis.deployment, options, diagnosis.command.named)
    return DiagnosisSummary(
        boot=boot,
        model=predicted.model.name,
        gpu=diagnosis.deployment.gpu.name,
        gpus=predicted.ranks.gpus,
        items=diagnosis.items,
        outcome=_outcome(diagnosis, logged, tokens),
        capacity=f"users of {tokens:,} tokens: {count}{cells_text}",
        remedy=remedy,
        changes=changes,
        corrections=diagnosis.corrections,
        answers={
            "fits": holds,
            "max_num_seqs": logged.sequences,
            "command": written.line if written else None,
        },
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
        return f"Failed: {tokens:,} tokens need {needed} of KV cache, {format_bytes(cache)} are left."
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


def summarize_v0(boot: Boot, model: str = "", gpu: str = "") -> DiagnosisSummary:
    """Return the figures of a log of vLLM's V0 engine, without a prediction.

    Args:
        model: A name instead of the log's.
        gpu: A name instead of the log's.
    """
    try:
        preset = None if gpu else find_gpu(boot.gpu, boot.memory)[0]
    except UserError:  # several GPUs have this memory
        preset = None
    cache, tokens = boot.size("cache"), boot.counts.get("tokens")
    cache_text = f" with {format_bytes(cache)} of KV cache" if cache else ""
    outcome = f"The engine started{cache_text}."
    if boot.failure:
        outcome = f"Failed: {FAILURES[boot.failure]}."
    cells_text = f"the cache stores {tokens:,} tokens, " if tokens else ""
    sizes = {key: boot.size(key) for key in V0_ITEMS.split()} | {"memory": boot.memory or None}
    return DiagnosisSummary(
        boot=boot,
        model=printable(model or boot.model, 80),
        gpu=gpu or (preset.name if preset else printable(boot.gpu, 80)),
        gpus=prod(int(boot.flags.get(ranks) or 1) for ranks in ("tp", "pp", "dp")),
        items={
            key: MemoryItem(logged, None)
            for key, logged in sizes.items()
            if logged is not None and logged >= 0
        },
        outcome=outcome,
        capacity=f"{cells_text}vLLM's V0 engine is not predicted",
    )
