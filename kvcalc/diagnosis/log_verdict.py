"""Summarise a diagnosis: the memory of each item, the changes of flags that help, and the records.

Each change is tried before it is printed: with the engine's rules, and with the rules corrected by
the log.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.capacity import Fit, fit
from kvcalc.capacity.command_line import command_of
from kvcalc.capacity.fit_records import command_lines
from kvcalc.capacity.memory_budget import LogCorrections
from kvcalc.capacity.suggested_fixes import (
    MAX_SHARE,
    ConfigChange,
    first_fitting_changes,
    join_with_or,
    smaller_cache,
    smaller_weights,
    wider_requests,
)
from kvcalc.diagnosis.diagnosis import ITEM_NAMES, Diagnosis, MemoryItem
from kvcalc.diagnosis.log_reader import Boot, find_gpu
from kvcalc.errors import UserError, printable
from kvcalc.question.fit_question import TypedWords
from kvcalc.records.plan import AdviceRecord, DiagnoseRecord
from kvcalc.units import format_bytes

MIN_TOKENS, MIN_SEQUENCES, MAX_CHANGES = 512, 8, 5
FAILURES = {
    "no_blocks": "nothing is left for the KV cache",
    "occupied": "less memory is free than the engine's share",
    "too_long": "one request of the maximum length does not fit",
    "out_of_memory": "an allocation ran out of memory",
    "weights": "the weights do not fit",
}
V0_ITEMS = "memory share weights activations libraries graphs cache"


class Adviser(NamedTuple):
    """Finds command-line flags to change, so that a logged engine start works and all users fit.

    Attributes:
        diagnosis: The logged start and its prediction.
        users: Number of concurrent users that must fit in the replica.
        tokens: Tokens of each user's sequence.
    """

    diagnosis: Diagnosis
    users: int
    tokens: int

    @property
    def start(self) -> ConfigChange:
        """Return the logged start as a `ConfigChange` (deployment and options) without changes.

        Changes can be added to it. Its GPU has the memory of the GPU preset, not the memory that
        the log states.
        """
        diagnosis = self.diagnosis
        return ConfigChange(diagnosis.predicted, diagnosis.plain, diagnosis.options)

    def with_users(self, change: ConfigChange, users: int, tokens: int) -> ConfigChange:
        """Return a copy of a changed start that requires this number of users of this length.

        Only its options `users` and `max_model_len` differ, so its `fits` answers whether these
        users fit. With llama.cpp, the number is at least the slots of the start, because llama.cpp
        allocates all slots when it starts.

        Args:
            change: The changed start.
            users: Number of concurrent users in the replica.
            tokens: Tokens of each user's sequence.
        """
        options = change.options
        if options.engine == "llama.cpp":
            users = max(users, options.max_num_seqs or 1)
        return change.changed(users=users, max_model_len=tokens)

    def fits(self, change: ConfigChange) -> bool:
        """Return whether the engine starts with the changed flags and the required users fit.

        This must be true for the predicted memory, and for the prediction plus the differences
        between log and prediction. With these differences, one sequence of the start's
        max_model_len must fit too. The result is False if flags cannot express the change.

        Args:
            change: The changed start.
        """
        corrections = self.diagnosis.corrections
        deployment = replace(change.deployment, gpu=self.diagnosis.deployment.gpu)
        options = replace(change.options, from_log=corrections)
        logged = replace(change, deployment=deployment, options=options)
        corrected = self.with_users(logged, self.users, self.tokens)
        checks = (
            self.with_users(change, self.users, self.tokens),
            corrected,
            self.with_users(logged, 1, options.max_model_len),
        )
        if not (change.flags() and all(check.fits for check in checks) and corrected.result):
            return False
        is_total = corrections.others_bytes and corrected.result.utilization_basis == "total"
        free_bytes = corrections.memory_bytes - corrections.others_bytes
        return not is_total or corrected.result.budget.share <= free_bytes

    def advice(self, change: ConfigChange) -> AdviceRecord:
        """Return the record (dict) of a change that helps, as `kvcalc diagnose` prints it.

        It has the flags, the disadvantage of the change as text (`cost`), the command lines of
        engine and kvcalc, and the users that then fit in the replica (`holds`). If the required
        users do not fit at the start's max_model_len, the flags also lower it.

        Args:
            change: A change with which the required users fit.
        """
        predicted, tokens, flags = self.diagnosis.predicted, self.tokens, change.flags()
        started = self.with_users(change, self.users, max(predicted.length, tokens))
        if not started.fits:
            flags = change.changed(max_model_len=tokens).flags()
            started = self.with_users(change, self.users, tokens)
        assert started.result
        words = TypedWords({started.result.model.name: self.diagnosis.command.model_words})
        command, kvcalc_command = command_lines(started.result, words)
        return {
            "flags": flags,
            "cost": change.cost,
            "command": command,
            "kvcalc_command": kvcalc_command,
            "holds": self.with_users(change, self.users, tokens).sequences,
        }

    def find_changes(self) -> list[AdviceRecord]:
        """Return records of up to five changes of the command line with which all users fit.

        Each is the smallest change of its kind that is enough. Kinds are, for example, fewer tokens
        per pass or more GPUs. Changes of one flag come first. If none helps, each kind is combined
        with a larger gpu_memory_utilization.
        """
        alone = chain([self.larger_shares(self.start)], self.changes())
        changes = [*first_fitting_changes(alone, self.fits)]
        if not changes:
            combined = (
                chain.from_iterable(map(self.larger_shares, kind)) for kind in self.changes()
            )
            changes = [*first_fitting_changes(combined, self.fits)]
        return [*map(self.advice, changes[:MAX_CHANGES])]

    def _first_that_fits(self, changes: Sequence[ConfigChange]) -> Sequence[ConfigChange]:
        """Return a list with the first change that fits, if all later changes fit too. It is empty
        if no change fits."""
        first = bisect_left(changes, True, key=self.fits)
        return changes[first : first + 1]

    def larger_shares(self, start: ConfigChange) -> Sequence[ConfigChange]:
        """Return a list with at most one change: the smallest gpu_memory_utilization that suffices.

        With it all required users fit. The values are multiples of 0.01 above the current value, up
        to the share of the memory that other processes leave free. If other processes made the
        start fail, the change is instead to the next smaller value, because the engine then needs
        less free memory. The list is empty if no value is enough, with llama.cpp, and if the start
        has a cache size in bytes.

        Args:
            start: The logged start, possibly with earlier changes.
        """
        options = start.options
        if options.engine == "llama.cpp" or options.kv_cache_memory_bytes:
            return []
        corrections, used = self.diagnosis.corrections, self.diagnosis.predicted.utilization
        free = min(MAX_SHARE, 1 - corrections.others_bytes / corrections.memory_bytes)
        shares = [hundredths / 100 for hundredths in range(1, int(free * 100) + 1)]
        if self.diagnosis.boot.failure == "occupied":
            shares = [share for share in shares if share < used][-1:]
            return [start.changed(gpu_memory_utilization=share) for share in shares]
        return self._first_that_fits(
            [start.changed(gpu_memory_utilization=share) for share in shares if share > used]
        )

    def changes(self) -> Iterator[Iterable[ConfigChange]]:
        """Yield alternative changes of the start: one iterable per kind, the smallest change first.

        First come kinds that need less memory outside the KV cache, such as fewer tokens per pass.
        Kinds that change the deployment follow: cache format, layers on the host, GPUs, and weight
        format. The changes are not checked yet.
        """
        start, options, deployment = self.start, self.start.options, self.start.deployment
        is_vllm, is_llama_cpp = options.engine == "vllm", options.engine == "llama.cpp"
        tokens = self.diagnosis.predicted.settings.max_num_batched_tokens
        yield (
            start.changed("longer prompts take more passes", max_num_batched_tokens=count)
            for count in _halves(tokens, 64 if is_llama_cpp else MIN_TOKENS)
        )
        if is_vllm:
            yield (
                start.changed("fewer concurrent requests", max_num_seqs=count)
                for count in _halves(
                    options.max_num_seqs or 1024, max(self.users, MIN_SEQUENCES)
                )
            )
        if not is_llama_cpp and not options.enforce_eager:
            yield [start.changed("slower steps", enforce_eager=True)]
        if is_vllm and deployment.model.vision and options.max_images != 0:
            limits = '{"image": 0, "video": 0}'
            yield [start.changed("no images or videos", limit_mm_per_prompt=limits)]
        yield filter(None, [smaller_cache(start)])
        if is_llama_cpp:
            layers = options.n_gpu_layers
            if layers < 0:
                layers = deployment.model.layers + 1
            layer_counts = range(layers - 1, 1, -1) if deployment.gpu.per != "SoC" else ()
            cost = "the other layers run on the host, slower"
            yield self._first_that_fits(
                [start.changed(cost, n_gpu_layers=count) for count in layer_counts]
            )
            return
        yield (
            wider.changed(f"{wider.deployment.parallelism.gpus} GPUs")
            for wider in wider_requests(start, "tp")
        )
        yield smaller_weights(start)

    def longest_flag(self) -> str:
        """Return the flag with the longest max_model_len at which one sequence fits.

        Example: "--max-model-len 8192". The length is a multiple of 256 tokens. The sequence must
        fit by the predicted memory, and by the prediction corrected with the log's bytes. The
        result is "" if no length fits, or if the present max_model_len fits already.
        """
        diagnosis = self.diagnosis
        length = diagnosis.options.max_model_len
        one_user = self.with_users(self.start, 1, length).options
        corrected = replace(one_user, from_log=diagnosis.corrections)
        fits = fit(diagnosis.plain, one_user), fit(diagnosis.deployment, corrected)
        limits = [fitted.needed.length for fitted in fits]
        lengths = [length for length in limits if length is not None]
        tokens = min(lengths, default=0) // 256 * 256
        if not 0 < tokens < diagnosis.predicted.length:
            return ""
        shorter = self.start.changed(max_model_len=tokens)
        return shorter.flags() if self._replace(users=1, tokens=tokens).fits(shorter) else ""


def _halves(value: int, minimum: int) -> Iterator[int]:
    """Yield half of a value, a quarter and so on, down to a minimum."""
    while value // 2 >= minimum:
        value //= 2
        yield value


class DiagnosisSummary(NamedTuple):
    """What `kvcalc diagnose` prints about an engine start in a log: sentences and records.

    Attributes:
        boot: The logged start.
        model: Name of the model.
        gpu: Name of the GPU model.
        gpus: Number of GPUs.
        items: Logged and predicted bytes of one GPU, by memory item, such as "weights".
        outcome: Sentence: whether the engine started, and its KV cache or the missing memory.
        capacity: Text such as "users of 4,096 tokens: 13 logged, 14 predicted". Both count the
            sequences that fit in the replica.
        fits: Whether the required users fit; None without a prediction.
        max_num_seqs: Sequences that fit in the replica with the corrections of the log; None
            without a prediction.
        command: The engine's command line; None without a prediction, or if flags cannot express
            the deployment.
        remedy: Sentence with the flags that help; "" if none is needed.
        changes: Records (dicts) of the changes of flags that help.
        corrections: Logged minus predicted bytes of one GPU; None without a prediction.
    """

    boot: Boot
    model: str
    gpu: str
    gpus: int
    items: Mapping[str, MemoryItem]
    outcome: str
    capacity: str
    fits: bool | None = None
    max_num_seqs: int | None = None
    command: str | None = None
    remedy: str = ""
    changes: Sequence[AdviceRecord] = ()
    corrections: LogCorrections | None = None

    @property
    def basis(self) -> str:
        """Return model, GPUs and engine as text, such as "llama-3.1-8b on 1× l4, vllm 0.11.0"."""
        engine = f"{self.boot.engine} {printable(self.boot.version, 40)}".strip()
        return f"{self.model} on {self.gpus}× {self.gpu}, {engine}"

    def records(self, log: str = "", number: int = 1) -> list[DiagnoseRecord]:
        """Return one record (dict) per memory item, with logged and predicted bytes of one GPU.

        The last record also has what fits: the outcome, the sequences and the changes that help.

        Args:
            log: Name of the log file, which each record repeats.
            number: Position of the start among the starts of the file, from 1, which each record
                repeats.
        """
        boot = self.boot
        items = {ITEM_NAMES[key]: item for key, item in self.items.items()}
        items["what fits"] = self.items.get("cache", MemoryItem(None, None))
        empty: Any = dict.fromkeys(DiagnoseRecord.__annotations__)
        records: list[DiagnoseRecord] = [
            empty
            | {
                "log": log,
                "boot": number,
                "engine": boot.engine,
                "engine_version": printable(boot.version, 40) or None,
                "model": self.model,
                "gpu": self.gpu,
                "gpus": self.gpus,
                "term": name,
                "logged_bytes": item.logged,
                "predicted_bytes": item.predicted,
                "difference_bytes": item.difference,
            }
            for name, item in items.items()
        ]
        records[-1].update(
            {
                "fits": self.fits,
                "failure": boot.failure or None,
                "tokens": boot.counts.get("tokens"),
                "max_num_seqs": self.max_num_seqs,
                "command": self.command,
                "taken": self.outcome,
                "change": self.remedy or None,
                "advice": None if self.fits is None else [*self.changes],
            }
        )
        return records


def summarize_v0(boot: Boot, model: str, gpu: str) -> DiagnosisSummary:
    """Return the summary of a start of vLLM's V0 engine: logged sizes without a prediction.

    Args:
        boot: The logged start.
        model: Name that replaces the model's name in the log; "" for none.
        gpu: Name that replaces the GPU's name in the log; "" for none.
    """
    gpu_name = gpu or printable(boot.gpu, 80)
    with suppress(UserError):  # none or several GPUs have this memory
        gpu_name = gpu or find_gpu(boot.gpu, boot.memory)[0].name
    cache = boot.size("cache")
    outcome = (
        f"The engine started{f' with {format_bytes(cache)} of KV cache' if cache else ''}."
    )
    if boot.failure:
        outcome = f"Failed: {FAILURES[boot.failure]}."
    gpus = prod(int(boot.flags.get(ranks) or 1) for ranks in ("tp", "pp", "dp"))
    sizes = {key: boot.size(key) for key in V0_ITEMS.split()} | {"memory": boot.memory}
    return DiagnosisSummary(
        boot=boot,
        model=printable(model or boot.model, 80),
        gpu=gpu_name,
        gpus=gpus,
        items={k: MemoryItem(size, None) for k, size in sizes.items() if (size or -1) >= 0},
        outcome=outcome,
        capacity="vLLM's V0 engine is not predicted",
    )


def summarize_diagnosis(diagnosis: Diagnosis, users: int, context: int) -> DiagnosisSummary:
    """Return the summary of a logged start, with flags that help if it failed or users do not fit.

    Args:
        diagnosis: The logged start and its prediction.
        users: Number of concurrent users that must fit; 0 for one.
        context: Tokens of each user's sequence; 0 for the start's max_model_len.
    """
    boot, predicted, options = diagnosis.boot, diagnosis.predicted, diagnosis.options
    tokens = context or predicted.length
    adviser = Adviser(diagnosis, max(1, users), tokens)
    corrected = replace(
        options, from_log=diagnosis.corrections, users=adviser.users, max_model_len=tokens
    )
    logged = fit(diagnosis.deployment, corrected)
    per_rank = predicted.plan.max_sequences(predicted.budget_at(predicted.estimate), tokens)
    sequences = [logged.sequences, per_rank * predicted.ranks.dp]
    if "cells" in boot.counts:  # llama.cpp allocates its slots when it starts
        is_long = tokens > predicted.length and not options.kv_unified
        slots = 0 if is_long else options.max_num_seqs or 1
        sequences = [min(slots, number, boot.counts["cells"] // tokens) for number in sequences]
    is_requested = bool(users or context)
    is_running = not boot.failure or (is_requested and boot.has_started)
    fits = logged.fits and is_running
    changes = [] if fits else adviser.find_changes()
    remedy = ""
    if not fits:
        flags = [change["flags"] for change in changes]
        if not is_requested:
            flags.append(adviser.longest_flag())
        remedy = "No change of one or two flags helps on this GPU."
        if words := [f"`{flag}`" for flag in flags if flag]:
            remedy = f"It fits with {join_with_or(words)}."
        if boot.failure == "occupied":
            remedy = f"Stop the processes that use the memory. {remedy}"

    cells = boot.counts.get("tokens") or boot.counts.get("cells")
    counts = f"{sequences[0]:,} logged, {sequences[1]:,} predicted"
    note = f", the cache stores {cells:,} tokens" if cells else ""
    extra = diagnosis.corrections.beside_beyond_bytes
    is_cause = "rest" in diagnosis.items and sequences[0] < sequences[1]
    if is_cause and extra > diagnosis.corrections.weights_beyond_bytes:
        note = f", because other memory is {format_bytes(extra)} larger than predicted"
    written = command_of(diagnosis.deployment, options, diagnosis.command.model_words)
    return DiagnosisSummary(
        boot=boot,
        model=logged.model.name,
        gpu=logged.gpu.name,
        gpus=logged.ranks.gpus,
        items=diagnosis.items,
        outcome=_outcome(diagnosis, logged, tokens, sequences[0]),
        capacity=f"users of {tokens:,} tokens: {counts}{note}",
        fits=fits,
        max_num_seqs=sequences[0],
        command=written.line if written else None,
        remedy=remedy,
        changes=changes,
        corrections=diagnosis.corrections,
    )


def _outcome(diagnosis: Diagnosis, logged: Fit, tokens: int, sequences: int) -> str:
    """Return a sentence: whether the engine started, and the tokens that the KV cache stores or the
    missing memory."""
    boot, cache = diagnosis.boot, diagnosis.logged("cache")
    count = logged.options.requested_num_seqs
    if boot.failure == "occupied":
        free_bytes = boot.size("free") or 0
        free, share = format_bytes(free_bytes), format_bytes(boot.size("desired_share") or 0)
        in_use = f"{format_bytes(boot.memory - free_bytes)} were in use before the start"
        return f"Failed: {in_use}, {free} are free, the engine needs {share}."
    if boot.failure == "too_long" and cache:
        needed = format_bytes(logged.needed.cache)
        remaining = format_bytes(cache)
        load = f"{count:,} users of {tokens:,} tokens" if count > 1 else f"{tokens:,} tokens"
        return f"Failed: {load} need {needed} of KV cache, {remaining} are left."
    budget = diagnosis.predicted.budget
    if boot.failure in ("out_of_memory", "weights") and budget.weights > budget.memory:
        weights, memory = format_bytes(budget.weights), format_bytes(budget.memory)
        return f"Failed: the weights need {weights} of one GPU, which has {memory}."
    if boot.failure:
        short = diagnosis.logged("short")
        missing = f", {format_bytes(short)} are missing" if short else ""
        return f"Failed: {FAILURES[boot.failure]}{missing}."
    if cache is None:
        return "The engine started, the log has no size of the KV cache."
    users = f"{sequences:,} user{'s' * (sequences != 1)} of {tokens:,} tokens"
    missed = f", not {count:,}" if count > max(1, sequences) else ""
    return f"The engine started: {format_bytes(cache)} of KV cache fit {users}{missed}."
