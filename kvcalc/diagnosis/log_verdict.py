"""Summarise a diagnosis: the memory of each item, which changes of flags help, and the records.

Each change is tried before it is printed: with the engine's rules, and with the rules corrected by
the log.
"""

import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple, cast

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.command_line import command_of
from kvcalc.capacity.fit_records import Typed, fit_record
from kvcalc.capacity.memory_budget import LogCorrections
from kvcalc.diagnosis.diagnosis import ITEM_NAMES, Diagnosis
from kvcalc.diagnosis.startup import Boot, find_gpu
from kvcalc.errors import UserError, printable
from kvcalc.layers.batch import Parallelism
from kvcalc.records import Record
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

    def with_options(self, cost: str = "", **fields: Any) -> "ChangeCandidate":
        """Return a candidate with changed options."""
        options = msgspec.structs.replace(self.options, **fields)
        return self._changed(cost, self._replace(options=options))

    def with_deployment(self, cost: str = "", **fields: Any) -> "ChangeCandidate":
        """Return a candidate with a changed deployment."""
        deployment = msgspec.structs.replace(self.deployment, **fields)
        return self._changed(cost, self._replace(deployment=deployment))

    def _changed(self, cost: str, changed: "ChangeCandidate") -> "ChangeCandidate":
        """Return a changed candidate with the flags that this one does not have."""
        old = command_of(self.deployment, self.options)
        new = command_of(changed.deployment, changed.options)
        words = [self.flags] if self.flags else []
        if old and new:
            for name, flag_words in new.words.items():
                if flag_words != old.words.get(name):
                    words.append(shlex.join(flag_words))
        return changed._replace(flags=" ".join(words), cost=self.cost or cost)

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
        candidate = self.with_options(max_model_len=longest)._replace(flags=self.flags)
        options = msgspec.structs.replace(candidate.options, users=self.required_users)
        fitted = fit(self.deployment, options)
        if not fitted.fits:
            candidate = candidate.with_options(max_model_len=self.tokens)
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
        for propose in CHANGES[is_combined:]:
            candidates = propose(start)
            if is_combined:
                candidates = chain.from_iterable(map(_change_share, candidates))
            tried = (candidate.advice() for candidate in candidates)
            advice += islice(filter(None, tried), 1)
        if advice:
            break
    return advice[:MAX_CHANGES]


def _first_that_fits(candidates: Sequence[ChangeCandidate]) -> Sequence[ChangeCandidate]:
    """Return the first candidate that fits, if all after it fit too. Empty if none does."""
    first = bisect_left(candidates, True, key=lambda candidate: bool(candidate.fit()))
    return candidates[first : first + 1]


def _change_share(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield the smallest share of the memory that fits, in hundredths, below the free share."""
    diagnosis = start.diagnosis
    if start.options.engine == "llama.cpp" or start.options.kv_cache_memory_bytes:
        return
    corrections, used = diagnosis.corrections, diagnosis.predicted.utilization
    free = 1 - corrections.others_bytes / corrections.memory_bytes
    shares = [
        hundredths / 100 for hundredths in range(1, int(min(MAX_UTILIZATION, free) * 100) + 1)
    ]
    if diagnosis.boot.failure == "occupied":
        lower = [share for share in shares if share < used]
        yield from (start.with_options(gpu_memory_utilization=share) for share in lower[-1:])
        return
    higher = [share for share in shares if share > used]
    yield from _first_that_fits(
        [start.with_options(gpu_memory_utilization=share) for share in higher]
    )


def _change_tokens(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield fewer tokens per pass, which need less activation memory."""
    tokens = start.diagnosis.predicted.settings.max_num_batched_tokens
    min_tokens = 64 if start.options.engine == "llama.cpp" else MIN_TOKENS
    while tokens // 2 >= min_tokens:
        tokens //= 2
        cost = "longer prompts take more passes"
        yield start.with_options(cost, max_num_batched_tokens=tokens)


def _change_sequences(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield fewer sequences, which need smaller sampler buffers and fewer CUDA graphs."""
    count = start.options.max_num_seqs or 1024
    min_count = max(start.users, MIN_SEQUENCES)
    while start.options.engine == "vllm" and count // 2 >= min_count:
        count //= 2
        yield start.with_options("no more at once", max_num_seqs=count)


def _change_graphs(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield steps without CUDA graphs."""
    if start.options.engine != "llama.cpp" and not start.options.enforce_eager:
        yield start.with_options("slower steps", enforce_eager=True)


def _change_images(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield a server of text only."""
    options = start.options
    if options.engine == "vllm" and start.deployment.model.vision and options.images != 0:
        limits = '{"image": 0, "video": 0}'
        yield start.with_options("text alone", limit_mm_per_prompt=limits)


def _change_cache(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield an 8-bit cache, if the GPU computes in fp8."""
    deployment = start.deployment
    dtype = "q8_0" if start.options.engine == "llama.cpp" else "fp8"
    is_supported = dtype != "fp8" or "fp8" in deployment.gpu.flops_per_s
    if is_supported and deployment.formats.kv_cache_dtype not in SMALL_CACHES:
        precision = msgspec.structs.replace(deployment.precision, kv_cache_dtype=dtype)
        yield start.with_deployment(loss_of("cache", dtype), precision=precision)


def _change_layers(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield the most llama.cpp layers that fit on the GPU; the host computes the others."""
    if start.options.engine != "llama.cpp" or start.deployment.gpu.per == "SoC":
        return
    layers = start.options.n_gpu_layers
    if layers < 0:
        layers = start.deployment.model.layers + 1
    cost = "the other layers run on the host, slower"
    yield from _first_that_fits(
        [start.with_options(cost, n_gpu_layers=count) for count in range(layers - 1, 1, -1)]
    )


def _change_gpus(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield larger tensor-parallel sizes."""
    ranks = start.deployment.parallelism
    tp = ranks.tp
    while tp < MAX_TP and start.options.engine != "llama.cpp":
        tp *= 2
        ep = tp * ranks.dp if ranks.ep > 1 else 1
        wider = Parallelism(tp, ranks.pp, ranks.dp, ep, ranks.dcp)
        yield start.with_deployment(f"{wider.gpus} GPUs", parallelism=wider)


def _change_weights(start: ChangeCandidate) -> Iterator[ChangeCandidate]:
    """Yield fp8 weights, if the weights are not quantized and the GPU computes in fp8."""
    deployment, precision = start.deployment, start.deployment.precision
    is_quantized = (
        precision.quantization or deployment.model.quantization or precision.dtype == "fp8"
    )
    has_fp8 = start.options.engine != "llama.cpp" and "fp8" in deployment.gpu.flops_per_s
    if has_fp8 and not is_quantized:
        narrower = msgspec.structs.replace(precision, dtype="auto", quantization="fp8")
        yield start.with_deployment(loss_of("weights", "fp8"), precision=narrower)


CHANGES = (
    _change_share,
    _change_tokens,
    _change_sequences,
    _change_graphs,
    _change_images,
    _change_cache,
    _change_layers,
    _change_gpus,
    _change_weights,
)


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
    shorter = start._replace(users=1, tokens=tokens).with_options(max_model_len=tokens)
    return shorter.flags if shorter.fit() else ""


class DiagnosisSummary(NamedTuple):
    """The sentences and records of a diagnosis.

    Attributes:
        boot: The engine start.
        model: The model's name.
        basis: Model, GPUs and engine.
        outcome: Whether the engine started, and its KV cache or the missing memory.
        capacity: The users that fit, as logged and as predicted.
        remedy: The changes that help; '' if none is needed.
        changes: The changes that help.
        corrections: Corrections for later fits; None if the start is not predicted.
        rows: A record for each memory item and for the summary, without the log and the boot.
    """

    boot: Boot
    model: str
    basis: str
    outcome: str
    capacity: str
    remedy: str
    changes: Sequence[AdviceRecord]
    corrections: LogCorrections | None
    rows: list[Record]

    def records(self, log: str = "", number: int = 1) -> list[DiagnoseRecord]:
        """Return one record per memory item, and last the summary."""
        place = {"log": log, "boot": number}
        return [cast("DiagnoseRecord", place | row) for row in self.rows]


def summarize_diagnosis(
    diagnosis: Diagnosis, users: int = 0, context: int = 0
) -> DiagnosisSummary:
    """Return the summary of a predicted start.

    Args:
        users: Users that must fit; 0 for one.
        context: Tokens of each user; 0 for the maximum of the start.
    """
    boot, predicted, options = diagnosis.boot, diagnosis.predicted, diagnosis.options
    start = ChangeCandidate(
        diagnosis=diagnosis,
        users=max(1, users),
        tokens=context or predicted.length,
        deployment=diagnosis.plain,
        options=options,
    )
    tokens = start.tokens
    changes = {"users": start.users, "max_model_len": tokens}
    corrected = msgspec.structs.replace(options, from_log=diagnosis.corrections, **changes)
    logged = fit(diagnosis.deployment, corrected)
    is_requested = bool(users or context)
    is_running = not boot.failure or (is_requested and boot.has_started)
    holds = logged.fits and is_running
    advice = [] if holds else find_changes(start)
    remedy = (
        "" if holds else _remedy(boot, advice, "" if is_requested else _longest_flag(start))
    )

    cells = boot.counts.get("tokens") or boot.counts.get("cells")
    cells_text = f", the cache stores {cells:,} tokens" if cells else ""
    per_rank = predicted.plan.max_sequences(predicted.budget_at(predicted.estimate), tokens)
    count = f"{logged.sequences:,} logged, {per_rank * predicted.ranks.dp:,} predicted"
    written = command_of(diagnosis.deployment, options, diagnosis.command.named)
    outcome = _outcome(diagnosis, logged, tokens)
    cache = diagnosis.items.get("cache", (None, None))
    items = {ITEM_NAMES[key]: item for key, item in diagnosis.items.items()}
    gpu, gpus = diagnosis.deployment.gpu.name, predicted.ranks.gpus
    return DiagnosisSummary(
        boot=boot,
        model=predicted.model.name,
        basis=f"{predicted.model.name} on {gpus}× {gpu}, {_engine(boot)}",
        outcome=outcome,
        capacity=f"users of {tokens:,} tokens: {count}{cells_text}",
        remedy=remedy,
        changes=advice,
        corrections=diagnosis.corrections,
        rows=_rows(
            boot,
            {"model": predicted.model.name, "gpu": gpu, "gpus": gpus},
            items | {"what fits": cache},
            {
                "fits": holds,
                "max_num_seqs": logged.sequences,
                "command": written.line if written else None,
                "taken": outcome,
                "change": remedy or None,
                "advice": advice,
            },
        ),
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
    model = printable(model or boot.model, 80)
    try:
        preset = None if gpu else find_gpu(boot.gpu, boot.memory)[0]
    except UserError:  # several GPUs have this memory
        preset = None
    gpu = gpu or (preset.name if preset else printable(boot.gpu, 80))
    cache, tokens = boot.size("cache"), boot.counts.get("tokens")
    cache_text = f" with {format_bytes(cache)} of KV cache" if cache else ""
    outcome = f"The engine started{cache_text}."
    if boot.failure:
        outcome = f"Failed: {FAILURES[boot.failure]}."
    cells_text = f"the cache stores {tokens:,} tokens, " if tokens else ""
    sizes = {key: boot.size(key) for key in V0_ITEMS.split()} | {"memory": boot.memory or None}
    items = {
        ITEM_NAMES[key]: (logged, None)
        for key, logged in sizes.items()
        if logged is not None and logged >= 0
    }
    gpus = prod(int(boot.flags.get(ranks) or 1) for ranks in ("tp", "pp", "dp"))
    return DiagnosisSummary(
        boot=boot,
        model=model,
        basis=f"{model} on {gpu or 'an unknown GPU'}, {_engine(boot)}",
        outcome=outcome,
        capacity=f"{cells_text}vLLM's V0 engine is not predicted",
        remedy="",
        changes=(),
        corrections=None,
        rows=_rows(
            boot,
            {"model": model, "gpu": gpu, "gpus": gpus},
            items | {"what fits": (cache, None)},
            {"taken": outcome, "advice": []},
        ),
    )


def _engine(boot: Boot) -> str:
    """Return the engine with its version."""
    return f"{boot.engine} {printable(boot.version, 40)}".strip()


def _rows(
    boot: Boot,
    deployment: Record,
    items: Mapping[str, tuple[int | None, int | None]],
    summary: Record,
) -> list[Record]:
    """Return one record per memory item; the last one has the summary.

    Args:
        deployment: Model, GPU and number of GPUs.
        items: Logged and predicted bytes by name.
    """
    rows: list[Record] = []
    for name, (logged, predicted) in items.items():
        is_known = logged is not None and predicted is not None
        sizes = {"logged_bytes": logged, "predicted_bytes": predicted}
        rows.append(
            {
                "engine": boot.engine,
                "engine_version": printable(boot.version, 40) or None,
                **deployment,
                "term": name,
                **sizes,
                "difference_bytes": (logged or 0) - (predicted or 0) if is_known else None,
                **dict.fromkeys(SUMMARY_KEYS.split()),
            }
        )
    rows[-1] |= {"failure": boot.failure or None, "tokens": boot.counts.get("tokens")} | summary
    return rows
