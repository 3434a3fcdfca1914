"""Summarise a diagnosis: the memory of each item, the changes of flags that help, and the records.

Each change is tried before it is printed: with the engine's rules, and with the rules corrected by
the log.
"""

import re
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
from kvcalc.capacity.memory_budget import GIB, GRAPH_BYTES, LogCorrections
from kvcalc.capacity.suggested_fixes import (
    MAX_SHARE,
    ConfigChange,
    first_fitting_changes,
    host_layers,
    join_with_or,
    smaller_cache,
    smaller_weights,
    wider_requests,
)
from kvcalc.diagnosis.diagnosis import (
    ITEM_NAMES,
    TOLERANCE,
    Diagnosis,
    MemoryItem,
    find_gpu,
)
from kvcalc.diagnosis.log_reader import BLOCK_TOKENS, Boot
from kvcalc.errors import UserError, printable
from kvcalc.library.load import load_gpu
from kvcalc.model.memory import cache_size
from kvcalc.question.fit_question import TypedWords
from kvcalc.records.plan import AdviceRecord, DiagnoseRecord
from kvcalc.units import format_bytes

MIN_TOKENS, MIN_SEQUENCES, MAX_CHANGES = 512, 8, 5
# What happened, by failure. The first sentence counts whose fields are all known.
OUTCOMES = """
    : The engine started: its KV cache stores {tokens:,} tokens in {cache}.
    : The engine started: its KV cache stores {tokens:,} tokens.
    : The engine started: its KV cache stores {cells:,} tokens in {cache}.
    : The engine started with {cache} of KV cache.
    : The engine has {running} running and {waiting} waiting requests.
    : The engine started, the log has no size of the KV cache.
    occupied: Failed: the engine needs {desired_share}, {free} are free, {in_use} were in use \
        before.
    too_long: Failed: {max_model_len:,} tokens need {needed} of KV cache, {cache} are left for \
        {longest:,} tokens.
    too_long: Failed: {max_model_len:,} tokens need {needed} of KV cache, {cache} are left for \
        about {estimate:,} tokens.
    too_long: Failed: one request needs {max_model_len:,} tokens of KV cache, {longest:,} are left.
    too_long: Failed: one request of the maximum length does not fit.
    no_blocks: Failed: {allocation} of KV cache did not fit on a GPU of {memory}.
    no_blocks: Failed: {allocation} of KV cache did not fit.
    no_blocks: Failed: nothing is left for the KV cache, {short} are missing.
    no_blocks: Failed: nothing is left for the KV cache.
    outside_share: Failed: {allocation} outside the engine's share did not fit, {unused} of \
        {memory} are free.
    outside_share: Failed: nothing is left outside the engine's share of the memory.
    out_of_memory: Failed: the weights need {large_weights} of one GPU, which has {memory}.
    out_of_memory: Failed: {allocation} of memory did not fit, {unused} of {memory} are free.
    out_of_memory: Failed: {allocation} of memory did not fit on a GPU of {memory}.
    out_of_memory: Failed: {allocation} of memory did not fit.
    out_of_memory: Failed: an allocation ran out of memory.
    weights: Failed: the weights need {large_weights} of one GPU, which has {memory}.
    weights: Failed: {allocation} of weights did not fit on a GPU of {memory}.
    weights: Failed: the weights do not fit.
"""
# What helps if nothing is predicted.
REMEDIES = """
    too_long: It fits with `--max-model-len {longest}` or a larger `--gpu-memory-utilization`.
    too_long: Try `--max-model-len {estimate}` or a larger `--gpu-memory-utilization`.
    too_long: Use a smaller `--max-model-len` or a larger `--gpu-memory-utilization`.
    occupied: Stop other processes or use a smaller share.
    no_blocks: Use a shorter context or smaller weights or more GPUs or a larger share of memory.
    outside_share: Use a smaller `--max-num-seqs` or a smaller share.
    out_of_memory: Use shorter inputs or smaller batches or smaller weights or more GPUs.
    weights: Use smaller weights or more GPUs.
"""
ROUNDING = 0.01  # users; a log rounds its sizes
# kvcalc's options that change neither weights nor activations
CACHE_OPTIONS = {"--gpu-memory-utilization", "--max-model-len", "--kv-cache-dtype"}


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
        """Return the logged start as a `ConfigChange` (deployment and options), to add changes.

        A longer max_model_len is set if the users need it. llama.cpp gets flash attention, and a
        slot of the required length for each user.
        """
        predicted = self.diagnosis.predicted
        # an engine's command line for one user has no option of kvcalc for the users
        options = replace(predicted.options, users=self.users * (self.users > 1))
        start = ConfigChange.of(replace(predicted, options=options))
        if options.flash_attn == "off":
            start = start.changed(flash_attn="on")
        if options.engine == "llama.cpp":
            start = start.changed(max_num_seqs=max(self.users, options.max_num_seqs or 1))
        elif self.tokens <= predicted.length:
            return start
        return start.changed(max_model_len=self.tokens)

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

    def logged(self, change: ConfigChange, users: int, tokens: int) -> ConfigChange:
        """Return what `with_users` returns, with the corrections of the log.

        Args:
            change: The changed start.
            users: Number of concurrent users in the replica.
            tokens: Tokens of each user's sequence.
        """
        return self.with_users(change, users, tokens).changed(
            from_log=self.diagnosis.corrections
        )

    def is_logged(self, change: ConfigChange) -> bool:
        """Return whether the log alone decides if a change helps, without the prediction.

        The log must state the size of the cache, and the change must not affect the memory outside
        the cache.

        Args:
            change: The changed start.
        """
        boot = self.diagnosis.boot
        is_safe = boot.failure == "outside_share" or {*change.words[::2]} <= CACHE_OPTIONS
        return is_safe and "cache" in boot.figures

    def fits(self, change: ConfigChange) -> bool:
        """Return whether the engine starts with the changed flags and the required users fit.

        This must be true for the prediction plus the differences between log and prediction, and
        one sequence of the start's max_model_len must fit too. If the log alone does not decide, it
        must also be true for the predicted memory. The result is False if flags cannot express the
        change. If the start failed outside its share and the log has no size of the cache, the
        cache did fit, so fewer sequences always help.

        Args:
            change: The changed start.
        """
        corrections, boot = self.diagnosis.corrections, self.diagnosis.boot
        has_fitted = boot.failure == "outside_share" and not boot.size("cache")
        if has_fitted and change.words[0] == "--max-num-seqs":
            return True
        corrected = self.logged(change, self.users, self.tokens)
        checks = [corrected, self.logged(change, 1, change.options.max_model_len)]
        if not self.is_logged(change):
            checks.append(self.with_users(change, self.users, self.tokens))
        if not (change.flags() and all(check.fits for check in checks) and corrected.result):
            return False
        is_total = corrected.result.utilization_basis == "total"
        free_bytes = corrections.memory_bytes - corrections.others_bytes
        return not is_total or corrected.result.budget.share <= free_bytes

    def advice(self, change: ConfigChange) -> AdviceRecord:
        """Return the record (dict) of a change that helps, as `kvcalc diagnose` prints it.

        It has the flags, the disadvantage of the change as text (`cost`), the command lines of
        engine and kvcalc, and the users that then fit in the replica (`holds`). If the required
        users do not fit at the start's max_model_len, the flags also lower it. If more users fit
        than the engine's default max_num_seqs, the command states this default or the required
        users, whichever is larger.

        Args:
            change: A change with which the required users fit.
        """
        length = change.options.max_model_len or self.diagnosis.predicted.length
        if length != self.tokens and not self.logged(change, self.users, length).fits:
            length = self.tokens
            change = change.changed(max_model_len=length)
        started = self.with_users(change, self.users, length)
        default = self.diagnosis.predicted.max_num_seqs * started.deployment.parallelism.dp
        if self.users > 1 and started.sequences > default:
            started = started.changed(max_num_seqs=max(self.users, default))
        result = fit(started.deployment, started.options)
        words = TypedWords({result.model.name: self.diagnosis.command.model_words})
        command, kvcalc_command = command_lines(result, words)
        return {
            "flags": change.flags(),
            "cost": change.cost,
            "command": command,
            "kvcalc_command": kvcalc_command,
            "holds": self.logged(change, self.users, self.tokens).sequences,
        }

    def find_changes(self) -> list[AdviceRecord]:
        """Return records of up to five changes of the command line with which all users fit.

        Each is the smallest change of its kind that is enough. Kinds are, for example, fewer tokens
        per pass or more GPUs. Changes of one flag come first. If none helps, each kind is combined
        with a larger gpu_memory_utilization.
        """
        changes = [*first_fitting_changes(self.changes(), self.fits)]
        if not changes:
            combined = (chain.from_iterable(map(self.shares, kind)) for kind in self.changes())
            changes = [*first_fitting_changes(combined, self.fits)]
        return [*map(self.advice, changes[:MAX_CHANGES])]

    def shares(self, start: ConfigChange) -> Sequence[ConfigChange]:
        """Return a list with at most one change: the smallest gpu_memory_utilization that suffices.

        With it all required users fit. The values are multiples of 0.01 above the current value, up
        to the share of the memory that other processes leave free. If the start failed outside its
        share, the change is instead to the next value that leaves enough memory: to other
        processes, or to the failed allocation and to CUDA graphs. The list is empty if no value is
        enough, with llama.cpp, and if the start has a cache size in bytes.

        Args:
            start: The logged start, possibly with earlier changes.
        """
        options, boot = start.options, self.diagnosis.boot
        if options.engine == "llama.cpp" or options.kv_cache_memory_bytes:
            return []
        corrections, used = self.diagnosis.corrections, self.diagnosis.predicted.utilization
        free = min(MAX_SHARE, 1 - corrections.others_bytes / corrections.memory_bytes)
        if is_outside := boot.failure == "outside_share":
            missing = boot.size("allocation") - boot.size("unused") + GRAPH_BYTES
            free = min(free, used - missing / corrections.memory_bytes)
        shares = [hundredths / 100 for hundredths in range(1, int(free * 100) + 1)]
        is_smaller = is_outside or boot.failure == "occupied"
        changes = [
            start.changed(gpu_memory_utilization=share)
            for share in shares
            if (share < used if is_smaller else share > used)
        ]
        # if a share is enough, larger shares are enough too
        first = -1 if is_smaller else bisect_left(changes, True, key=self.fits)
        return changes[first:][:1]

    def changes(self) -> Iterator[Iterable[ConfigChange]]:
        """Yield alternative changes of the start: one iterable per kind, the smallest change first.

        First come the required length and kinds that need less memory outside the KV cache, such as
        fewer tokens per pass. Kinds that change the deployment follow: cache format, layers on the
        host, GPUs, and weight format. If the start failed outside its share, only fewer sequences
        help, in proportion to the failed allocation. The changes are not checked yet.
        """
        start, options, deployment = self.start, self.start.options, self.start.deployment
        is_vllm, is_llama_cpp = options.engine == "vllm", options.engine == "llama.cpp"
        boot, predicted = self.diagnosis.boot, self.diagnosis.predicted
        is_outside = boot.failure == "outside_share"
        max_num_seqs = boot.counts.get("dummy_requests", predicted.max_num_seqs)
        if not is_outside and self.fits(start):
            yield [start]
            return
        if self.tokens < predicted.length and boot.failure and not is_outside:
            yield [start.changed(max_model_len=self.tokens)]
        yield self.shares(start)
        allocation, unused = boot.size("allocation"), boot.size("unused")
        if is_vllm or is_outside:
            yield (
                start.changed("fewer concurrent requests", max_num_seqs=count, users=self.users)
                for count in _halves(max_num_seqs, max(self.users, MIN_SEQUENCES))
                if count * allocation <= max_num_seqs * unused
            )
        if is_outside:
            return
        tokens = predicted.settings.max_num_batched_tokens
        yield (
            start.changed("longer prompts take more passes", max_num_batched_tokens=count)
            for count in _halves(tokens, 64 if is_llama_cpp else MIN_TOKENS)
        )
        if not is_llama_cpp and not options.enforce_eager:
            yield [start.changed("slower steps", enforce_eager=True)]
        if is_vllm and deployment.model.vision and options.max_images != 0:
            limits = '{"image": 0, "video": 0}'
            yield [start.changed("no images or videos", limit_mm_per_prompt=limits)]
        yield filter(None, [smaller_cache(start)])
        if is_llama_cpp:
            if deployment.gpu.per != "SoC":
                cost = "the other layers run on the host, slower"
                yield (change.changed(cost) for change in host_layers(start, deployment.model))
            return
        yield (
            wider.changed(f"{wider.deployment.parallelism.gpus} GPUs")
            for wider in wider_requests(start, "tp")
        )
        yield smaller_weights(start)

    def shorter_contexts(self) -> list[AdviceRecord]:
        """Return a list with the record of the longest max_model_len at which one sequence fits.

        This is a multiple of 16 tokens, at most the length that the log names. If no length fits,
        the largest share of the memory is tried too. The list is empty if none fits then, or if the
        present max_model_len fits already.
        """
        boot = self.diagnosis.boot
        for start in (self.start, self.start.changed(gpu_memory_utilization=MAX_SHARE)):
            starts = [start.changed(from_log=self.diagnosis.corrections)]
            if not self.is_logged(start):
                starts.append(start)
            lengths = [tried.result.longest_length or 0 for tried in starts if tried.result]
            if longest := boot.counts.get("longest", boot.counts.get("estimate")):
                lengths += [longest]
            tokens = min(lengths, default=0) // BLOCK_TOKENS * BLOCK_TOKENS
            shorter = start.changed(max_model_len=tokens)
            adviser = self._replace(users=1, tokens=tokens)
            if boot.failure == "outside_share" or tokens >= self.diagnosis.predicted.length:
                return []
            if tokens and adviser.fits(shorter):
                return [adviser.advice(shorter)]
        return []


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
        capacity: Text such as "users of 4,096 tokens that fit: 13 by the log, 14 predicted". Both
            count the sequences that fit in the replica. "logged" instead of "by the log" means that
            the log states a maximum concurrency at this context.
        fits: Whether the required users fit; None without a prediction.
        max_num_seqs: Sequences that fit in the replica: the logged concurrency, else those that
            fit in the logged cache. After a failed start, those that fit with the corrections of
            the log. None without a prediction.
        command: The engine's command line; None without a prediction, or if flags cannot express
            the deployment.
        remedy: Sentence with the flags of the first two changes that help; "" if none is needed.
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
        gpu = self.gpu or "unnamed GPU"
        return f"{self.model or 'unnamed model'} on {self.gpus}× {gpu}, {engine}"

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
        records = [
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
        records[-1] |= {
            "fits": self.fits,
            "failure": boot.failure or None,
            "tokens": boot.counts.get("tokens"),
            "max_num_seqs": self.max_num_seqs,
            "command": self.command,
            "taken": self.outcome,
            "change": self.remedy or None,
            "advice": None if self.fits is None else [*self.changes],
        }
        return records


def summarize_log(
    boot: Boot, model: str, gpu: str, problem: str, users: int, context: int
) -> DiagnosisSummary:
    """Return the summary of a start that is not predicted: the logged sizes, and what helps.

    Args:
        boot: The logged start.
        model: Name that replaces the model's name in the log; "" for none.
        gpu: Name that replaces the GPU's name in the log; "" for none.
        problem: Sentence: why the start is not predicted.
        users: Number of concurrent users that must fit; 0 for one.
        context: Tokens of each user's sequence; 0 for the start's max_model_len.
    """
    gpu_name = load_gpu(gpu).name if gpu else printable(boot.gpu, 80)
    with suppress(UserError):  # none or several GPUs have this memory
        if not gpu and (boot.gpu or boot.memory):
            gpu_name = find_gpu(boot)[0].name
    known = {"memory": boot.memory, "cache": boot.cache_bytes}
    sizes = known | boot.figures
    outcome = choose_sentence(OUTCOMES, boot, known)
    logged_context = int(boot.flags.get("max_model_len", 0))
    context, tokens = context or logged_context, boot.counts.get("tokens", 0)
    is_stated = boot.concurrency and context == logged_context
    # windows or states: the logged tokens hold only at the logged context
    is_hybrid = boot.concurrency * logged_context > 1.02 * tokens
    if context and tokens and not boot.failure and (is_stated or not is_hybrid):
        count = int(boot.concurrency) if is_stated else tokens // context
        enough = _users(boot, count, context, max(1, users), logged_context or context)
        outcome = f"{outcome[:-1]}, enough for {enough}."
    return DiagnosisSummary(
        boot=boot,
        model=printable(model or boot.model, 80),
        gpu=gpu_name,
        gpus=prod(int(boot.flags.get(ranks) or 1) for ranks in ("tp", "pp", "dp")),
        items={
            name: MemoryItem(sizes[name], None) for name in ITEM_NAMES if sizes.get(name, 0) > 0
        },
        outcome=outcome,
        capacity=problem,
        remedy=choose_sentence(REMEDIES, boot, known),
    )


def choose_sentence(sentences: str, boot: Boot, known: dict[str, int]) -> str:
    """Return the first sentence about a start whose fields are all known; "" if there is none.

    Args:
        sentences: A failure, such as "weights", and a sentence with named fields in each line. A
            field is a flag, a count or a size of the start.
        boot: The logged start.
        known: More fields, in bytes. 0 means unknown.
    """
    in_use = known["memory"] - boot.size("free")
    sizes = boot.figures | known | {"short": -boot.size("cache"), "in_use": in_use}
    texts = {name: format_bytes(size) for name, size in sizes.items() if size > 0}
    fields = boot.flags | boot.counts | texts
    for failure, sentence in re.findall(r"(\w*): (.+)", re.sub("  +", " ", sentences)):
        if failure == boot.failure:
            with suppress(KeyError):
                return str(sentence.format_map(fields))
    return ""


def summarize_diagnosis(diagnosis: Diagnosis, users: int, context: int) -> DiagnosisSummary:
    """Return the summary of a logged start, with flags that help if it failed or users do not fit.

    Args:
        diagnosis: The logged start and its prediction.
        users: Number of concurrent users that must fit; 0 for one.
        context: Tokens of each user's sequence; 0 for the start's max_model_len.
    """
    boot, predicted = diagnosis.boot, diagnosis.predicted
    options = predicted.options
    tokens = context or predicted.length
    adviser = Adviser(diagnosis, max(1, users), tokens)
    is_unallocated = boot.failure in ("no_blocks", "out_of_memory", "weights")
    cache_bytes = 0 if is_unallocated else max(0, boot.size("cache"))
    corrected = replace(
        options,
        from_log=diagnosis.corrections,
        users=adviser.users,
        max_model_len=tokens,
        kv_cache_memory_bytes=cache_bytes or options.kv_cache_memory_bytes,
    )
    logged = fit(predicted.requested, corrected)
    num_users, capacity = _count_users(diagnosis, logged, tokens)
    is_requested = bool(users or context)
    is_running = not boot.failure or (is_requested and boot.has_started)
    fits = is_running and num_users >= adviser.users and tokens <= predicted.length
    changes, remedy = [], ""
    if is_unallocated and logged.fits:
        remedy = choose_sentence(REMEDIES, boot, {"memory": boot.memory})
        available = boot.size("available") or boot.size("free")
        if 0 < available < predicted.gpu.usable_bytes - GIB:  # a CUDA context needs less
            remedy = "By prediction it fits: stop other processes."
    elif not fits:
        changes = adviser.find_changes()
        if not is_requested:
            # a shorter context comes before changes that cost something
            is_free = bool(changes) and not changes[0]["cost"]
            changes[is_free:is_free] = adviser.shorter_contexts()
        remedy = "No change of up to two flags helps on this GPU."
        if words := [f"`{change['flags']}`" for change in changes[:2]]:
            verb = (
                "Stop other processes or use" if boot.failure == "occupied" else "It fits with"
            )
            remedy = f"{verb} {join_with_or(words)}."
    written = command_of(predicted.requested, options, diagnosis.command.model_words)
    return DiagnosisSummary(
        boot=boot,
        model=logged.model.name,
        gpu=logged.gpu.name,
        gpus=logged.ranks.gpus,
        items=diagnosis.items,
        outcome=_outcome(diagnosis, logged, adviser.users, num_users),
        capacity=capacity,
        fits=fits,
        max_num_seqs=num_users,
        command=written.line if written else None,
        remedy=remedy,
        changes=changes,
        corrections=diagnosis.corrections,
    )


def _count_users(diagnosis: Diagnosis, logged: Fit, tokens: int) -> tuple[int, str]:
    """Return how many users of `tokens` tokens fit in the replica by the log, and a text.

    The text also has the predicted users and the logged tokens. vLLM before 0.21 logs blocks ÷
    groups of layers as tokens, as if each layer stored all tokens. A hybrid model then fits more
    users than tokens ÷ context. Example of 4 groups, 3 of them with one block of state per user:
    1,487 blocks of 784 tokens are 371 · 784 = 290,864 tokens. A user of 32,768 tokens needs 42 + 3
    blocks, so 33 users fit.

    Args:
        diagnosis: The logged start and its prediction.
        logged: The capacity with the sizes from the log.
        tokens: Tokens of each user's sequence.
    """
    boot, predicted = diagnosis.boot, diagnosis.predicted
    per_rank = predicted.plan.max_sequences(predicted.budget_at(predicted.estimate), tokens)
    sequences = [logged.sequences, per_rank * predicted.ranks.dp]
    stated = boot.concurrency * (tokens == predicted.length)
    if logged.has_given_cache:
        # like vLLM's own figure, without subtracting a placeholder block
        computed = logged.plan.concurrency(logged.kv_budget, tokens) + ROUNDING
        if "tokens" in boot.counts and not cache_size(predicted.model, tokens).fixed:
            block = logged.plan.block_size or 1
            computed = boot.counts["tokens"] / (tokens + -tokens % block)  # whole blocks
        sequences[0] = int(stated or computed) * predicted.ranks.dp
    if "cells" in boot.counts:  # llama.cpp allocates its slots when it starts
        is_long = tokens > predicted.length and not predicted.options.kv_unified
        slots = 0 if is_long else predicted.options.max_num_seqs or 1
        sequences = [min(slots, number, boot.counts["cells"] // tokens) for number in sequences]

    basis = "logged" if stated else "by the log"
    text = (
        f"{sequences[0]:,} {basis}, " * logged.has_given_cache + f"{sequences[1]:,} predicted"
    )
    if cells := boot.counts.get("tokens") or boot.counts.get("cells"):
        is_hybrid = boot.concurrency * predicted.length > 1.02 * cells
        place = "as vLLM counts hybrid layers" if is_hybrid else "in the cache"
        text += f", {cells:,} tokens {place}"
    return sequences[0], f"users of {tokens:,} tokens that fit: {text}"


def _outcome(diagnosis: Diagnosis, logged: Fit, count: int, sequences: int) -> str:
    """Return a sentence: whether the engine started, and the users that fit or the missing memory.

    Args:
        diagnosis: The logged start and its prediction.
        logged: The capacity with the sizes from the log.
        count: Required users.
        sequences: Users that fit by the log.
    """
    boot, predicted, tokens = diagnosis.boot, diagnosis.predicted, logged.length
    if boot.failure or not boot.size("cache"):
        budget = predicted.budget
        large_weights = budget.weights * (budget.weights > budget.memory)
        return choose_sentence(
            OUTCOMES, boot, {"memory": budget.memory, "large_weights": large_weights}
        )
    about = "about " * ("computed_cache" in boot.figures)
    cache = f"{about}{format_bytes(boot.cache_bytes)} of KV cache"
    cache += " per GPU" * (predicted.ranks.gpus > 1 and boot.engine != "llama.cpp")
    memory = predicted.budget.memory
    is_hybrid = cache_size(predicted.model, tokens).fixed
    if boot.size("cache") > memory and "add --gpu" not in str(diagnosis.remarks):
        return f"By the log, {cache} exceed the {format_bytes(memory)} of {predicted.gpu.name}."
    if not sequences and logged.headroom_bytes < 0:
        lacking = f"{format_bytes(-logged.headroom_bytes)} too small for {tokens:,} tokens"
        if is_hybrid:
            return f"By the log, {cache} is {lacking}."
        return (
            f"{boot.counts.get('tokens', logged.plan.tokens(boot.size('cache'), tokens)):,} tokens "
            f"fill {cache}, {lacking}."
        )
    users = _users(boot, sequences, tokens, count, predicted.length)
    if "tokens" in boot.counts and not is_hybrid:
        size = boot.size("cache") / boot.counts["tokens"]
        expected = logged.plan.needed(1, 1_000_000) / 1e6  # whole blocks
        if abs(size / expected - 1) > TOLERANCE:
            users = (
                f"{users.partition(' tokens')[0]} tokens, at {format_bytes(round(size))} per "
                f"token, not the {format_bytes(round(expected))} of "
                f"{predicted.formats.kv_cache_dtype}"
            )
    return f"The engine started: {cache} fit {users}."


def _users(boot: Boot, count: int, tokens: int, required: int, maximum: int) -> str:
    """Return a number of users as text, with the required number if it is larger, or with the
    engine's maximum length or number."""
    end, limit = "", boot.flags.get("max_num_seqs", 0)
    if required > count:
        end = f", not {required:,}"
    elif tokens > maximum:
        end = f", above the engine's maximum of {maximum:,}"
    elif 0 < limit < count:
        end = f", but the engine runs at most {limit:,}"
    elif not boot.is_full:
        end = (
            f"{', or more with shorter requests' * (boot.engine != 'llama.cpp' and limit != count)}"
            "; others wait"
        )
    return f"{count:,} user{'s' * (count != 1)} of {tokens:,} tokens{end}"
