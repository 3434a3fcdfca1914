"""Summarise a diagnosis: what took the memory, which changes of flags help, and the records.

Each change is tried before it is printed: with the engine's rules, and with the rules corrected by
the log.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.fit_records import Typed, fit_record
from kvcalc.diagnosis.diagnosis import SHORT, Diagnosis, as_logged
from kvcalc.diagnosis.startup import Boot, card_of
from kvcalc.errors import UserError, printable
from kvcalc.layers.batch import Parallelism
from kvcalc.storage.quantization import loss_of
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

MAX_SHARE = 0.97
MIN_TOKENS, MIN_SEQUENCES, MAX_TP = 512, 8, 64
MAX_CHANGES = 5
# Flags of engines by setting; llama.cpp has others or none.
LENGTH_FLAGS = {
    "vllm": "--max-model-len",
    "sglang": "--context-length",
    "trtllm": "--max_seq_len",
}
SHARE_FLAGS = {
    "vllm": "--gpu-memory-utilization",
    "sglang": "--mem-fraction-static",
    "trtllm": "--free_gpu_memory_fraction",
}
TOKENS_FLAGS = {
    "vllm": "--max-num-batched-tokens",
    "sglang": "--chunked-prefill-size",
    "trtllm": "--max_num_tokens",
    "llama.cpp": "--ubatch-size",
}
EAGER_FLAGS = {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}
CACHE_FLAGS = {
    "vllm": "--kv-cache-dtype fp8",
    "trtllm": "--kv-cache-dtype fp8",
    "sglang": "--kv-cache-dtype fp8_e4m3",
    "llama.cpp": "--cache-type-k q8_0 --cache-type-v q8_0",
}
SMALL_CACHES = ("fp8", "fp8_ds_mla", "q8_0", "q4_0", "nvfp4")

Record: TypeAlias = dict[str, Any]


class RequiredCapacity(NamedTuple):
    """The users that must fit, and the tokens of each."""

    users: int
    tokens: int


class LogAdvice(NamedTuple):
    """A change of flags that helps.

    Attributes:
        flags: The flags to type.
        cost: What the change costs, in words; '' for nothing.
        command: The engine's command line with the change.
        kvcalc_command: The `kvcalc fit` command of the changed deployment.
        holds: Users that fit after the change.
    """

    flags: str
    cost: str
    command: str | None
    kvcalc_command: str | None
    holds: int


class ChangeCandidate(NamedTuple):
    """A change to try: its flags, its cost in words, and the deployment with it."""

    flags: str
    cost: str
    deployment: TimedDeployment
    options: FitOptions

    def with_options(self, flags: str, cost: str = "", **fields: Any) -> "ChangeCandidate":
        """Return a candidate with changed options."""
        options = msgspec.structs.replace(self.options, **fields)
        return ChangeCandidate(flags, cost, self.deployment, options)

    def with_deployment(self, flags: str, cost: str = "", **fields: Any) -> "ChangeCandidate":
        """Return a candidate with a changed deployment."""
        deployment = msgspec.structs.replace(self.deployment, **fields)
        return ChangeCandidate(flags, cost, deployment, self.options)


def find_changes(diagnosis: Diagnosis, need: RequiredCapacity) -> list[LogAdvice]:
    """Return up to MAX_CHANGES changes that give the needed capacity, the smallest of each kind.

    Changes of one flag come first. If none helps, each is combined with a change of the memory
    share.
    """
    start = ChangeCandidate("", "", diagnosis.plain, diagnosis.options)
    advice: list[LogAdvice] = []
    for propose in CHANGES:
        tried = (_advise(diagnosis, need, one) for one in propose(diagnosis, need, start))
        advice += [one for one in [next(filter(None, tried), None)] if one]
    if advice:
        return advice[:MAX_CHANGES]
    for propose in CHANGES[1:]:
        both = (
            _advise(
                diagnosis,
                need,
                more._replace(flags=f"{one.flags} {more.flags}"),
                one.cost,
            )
            for one in propose(diagnosis, need, start)
            for more in _change_share(diagnosis, need, one)
        )
        advice += [one for one in [next(filter(None, both), None)] if one]
    return advice[:MAX_CHANGES]


def fit_after(
    diagnosis: Diagnosis, need: RequiredCapacity, candidate: ChangeCandidate
) -> Fit | None:
    """Return the fit of a change by the engine's rules; None if the need does not fit by the rules
    or as logged."""
    options = candidate.options
    needed = msgspec.structs.replace(
        options, users=required_users(options, need.users), max_model_len=need.tokens
    )
    one_user = msgspec.structs.replace(options, users=required_users(options, 1))
    corrections = diagnosis.learned
    logged = msgspec.structs.replace(candidate.deployment, gpu=diagnosis.deployment.gpu)
    try:
        by_rules = fit(candidate.deployment, needed)
        corrected = fit(logged, msgspec.structs.replace(needed, from_log=corrections))
        started = fit(logged, msgspec.structs.replace(one_user, from_log=corrections))
    except UserError:
        return None
    free_bytes = corrections.memory_bytes - corrections.others_bytes
    if (
        corrections.others_bytes
        and corrected.of == "total"
        and corrected.budget.share > free_bytes
    ):
        return None
    return by_rules if by_rules.fits and corrected.fits and started.fits else None


def _advise(
    diagnosis: Diagnosis, need: RequiredCapacity, candidate: ChangeCandidate, cost: str = ""
) -> LogAdvice | None:
    """Return the advice of a candidate; None if it does not help."""
    after = fit_after(diagnosis, need, candidate)
    if after is None:
        return None
    flags, options = candidate.flags, candidate.options
    users = required_users(options, need.users)
    longest = max(options.max_model_len or diagnosis.length, need.tokens)
    options = msgspec.structs.replace(options, users=users, max_model_len=longest)
    shown = fit(candidate.deployment, options)
    if not shown.fits:
        flags = f"{flags} {length_flag(options, need.tokens)}"
        options = msgspec.structs.replace(options, max_model_len=need.tokens)
        shown = fit(candidate.deployment, options)
    record = fit_record(shown, typed=Typed(model=diagnosis.command.named))
    return LogAdvice(
        flags,
        cost or candidate.cost,
        record["command"],
        record["kvcalc_command"],
        after.sequences,
    )


def required_users(options: FitOptions, users: int) -> int:
    """Return the sequences that must fit for `users`. llama.cpp allocates all slots at its
    start."""
    return max(users, options.max_num_seqs or 1) if options.engine == "llama.cpp" else users


def length_flag(options: FitOptions, tokens: int) -> str:
    """Return the flag that limits a sequence to `tokens`. llama.cpp's flag counts all slots."""
    if options.engine == "llama.cpp":
        return f"--ctx-size {tokens * max(1, options.max_num_seqs or 1)}"
    return f"{LENGTH_FLAGS[options.engine]} {tokens}"


def _first_that_fits(
    diagnosis: Diagnosis, need: RequiredCapacity, candidates: Sequence[ChangeCandidate]
) -> Sequence[ChangeCandidate]:
    """Return the first candidate that fits, by bisection: after it, all fit. Empty if none does."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fit_after(diagnosis, need, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low : low + 1]


ChangeCandidates: TypeAlias = Iterator[ChangeCandidate]


def _change_share(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    """Yield the smallest share of the memory that fits, in hundredths, below what is free."""
    flag = SHARE_FLAGS.get(start.options.engine)
    if flag is None or start.options.kv_cache_memory_bytes:
        return
    corrections, used = diagnosis.learned, diagnosis.predicted.utilization
    free = MAX_SHARE
    if corrections.others_bytes:
        free = min(free, 1 - corrections.others_bytes / corrections.memory_bytes)
    shares = [hundredths / 100 for hundredths in range(1, int(free * 100) + 1)]
    failure = diagnosis.boot.failure
    if failure and failure.kind == "occupied":
        lower = [share for share in shares if share < used]
        tried = [
            start.with_options(f"{flag} {s:g}", gpu_memory_utilization=s) for s in lower[-1:]
        ]
        yield from tried
        return
    higher = [share for share in shares if share > used]
    tried = [start.with_options(f"{flag} {s:g}", gpu_memory_utilization=s) for s in higher]
    yield from _first_that_fits(diagnosis, need, tried)


def _change_tokens(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    """Yield fewer tokens per pass, which need less activation memory."""
    engine = start.options.engine
    tokens = diagnosis.predicted.settings.max_num_batched_tokens
    min_tokens = 64 if engine == "llama.cpp" else MIN_TOKENS
    while tokens // 2 >= min_tokens:
        tokens //= 2
        flags = f"{TOKENS_FLAGS[engine]} {tokens}"
        cost = "longer prompts take more passes"
        yield start.with_options(flags, cost, max_num_batched_tokens=tokens)


def _change_sequences(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    """Yield fewer sequences, which need smaller sampler buffers and fewer CUDA graphs."""
    count = start.options.max_num_seqs or 1024
    while start.options.engine == "vllm" and count // 2 >= max(need.users, MIN_SEQUENCES):
        count //= 2
        yield start.with_options(
            f"--max-num-seqs {count}", "no more at once", max_num_seqs=count
        )


def _change_eager(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    flag = EAGER_FLAGS.get(start.options.engine)
    if flag and not start.options.enforce_eager:
        yield start.with_options(flag, "slower steps", enforce_eager=True)


def _change_images(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    options = start.options
    if options.engine == "vllm" and start.deployment.model.vision and options.images != 0:
        limits = '{"image": 0, "video": 0}'
        flags = f"--limit-mm-per-prompt '{limits}'"
        yield start.with_options(flags, "text alone", limit_mm_per_prompt=limits)


def _change_cache(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    """Yield an 8-bit cache, if the GPU computes in fp8."""
    deployment, engine = start.deployment, start.options.engine
    dtype = "q8_0" if engine == "llama.cpp" else "fp8"
    is_supported = dtype != "fp8" or "fp8" in deployment.gpu.flops_per_s
    if is_supported and deployment.formats.kv_cache_dtype not in SMALL_CACHES:
        precision = msgspec.structs.replace(deployment.precision, kv_cache_dtype=dtype)
        cost = loss_of("cache", dtype)
        yield start.with_deployment(CACHE_FLAGS[engine], cost, precision=precision)


def _change_layers(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    """Yield the most llama.cpp layers that fit on the GPU; the host computes the others."""
    if start.options.engine != "llama.cpp" or start.deployment.gpu.per == "SoC":
        return
    layers = start.options.n_gpu_layers
    if layers < 0:
        layers = start.deployment.model.layers + 1
    cost = "the other layers run on the host, slower"
    fewer = [
        start.with_options(f"--n-gpu-layers {count}", cost, n_gpu_layers=count)
        for count in range(layers - 1, 1, -1)
    ]
    yield from _first_that_fits(diagnosis, need, fewer)


def _change_gpus(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    if start.options.engine == "llama.cpp":
        return
    flag = "--tp_size" if start.options.engine == "trtllm" else "--tensor-parallel-size"
    ranks = start.deployment.parallelism
    tp = ranks.tp
    while tp < MAX_TP:
        tp *= 2
        ep = tp * ranks.dp if ranks.ep > 1 else 1
        more = Parallelism(tp, ranks.pp, ranks.dp, ep, ranks.dcp)
        yield start.with_deployment(f"{flag} {tp}", f"{more.gpus} GPUs", parallelism=more)


def _change_weights(
    diagnosis: Diagnosis, need: RequiredCapacity, start: ChangeCandidate
) -> ChangeCandidates:
    deployment, precision = start.deployment, start.deployment.precision
    is_quantized = (
        precision.quantization or deployment.model.quantization or precision.dtype == "fp8"
    )
    is_supported = (
        start.options.engine in ("vllm", "sglang") and "fp8" in deployment.gpu.flops_per_s
    )
    if is_supported and not is_quantized:
        stored = msgspec.structs.replace(precision, dtype="auto", quantization="fp8")
        cost = loss_of("weights", "fp8")
        yield start.with_deployment("--quantization fp8", cost, precision=stored)


CHANGES: tuple[
    Callable[[Diagnosis, RequiredCapacity, ChangeCandidate], ChangeCandidates], ...
] = (
    _change_share,
    _change_tokens,
    _change_sequences,
    _change_eager,
    _change_images,
    _change_cache,
    _change_layers,
    _change_gpus,
    _change_weights,
)


def longest_length(diagnosis: Diagnosis) -> int:
    """Return the longest max_model_len with which one sequence fits, by the rules and as logged.

    0 if there is none, or if the logged maximum fits.
    """
    options = diagnosis.options
    one_user = msgspec.structs.replace(options, users=required_users(options, 1))
    corrected = msgspec.structs.replace(one_user, from_log=diagnosis.learned)
    fits = fit(diagnosis.plain, one_user), fit(diagnosis.deployment, corrected)
    lengths = [one.needed.length for one in fits if one.needed.length is not None]
    tokens = min(lengths, default=0) // 256 * 256
    start = ChangeCandidate("", "", diagnosis.plain, options).with_options(
        "", max_model_len=tokens
    )
    fits_length = 0 < tokens < diagnosis.length and fit_after(
        diagnosis, RequiredCapacity(1, tokens), start
    )
    return tokens if fits_length else 0


_ENDED = {
    "no_blocks": "nothing is left for the KV cache",
    "occupied": "less memory is free than the engine's share",
    "too_long": "one request of the maximum length does not fit",
    "out_of_memory": "an allocation ran out of memory",
    "weights": "the weights do not fit",
}


class DiagnosisSummary:
    """The sentences and records of a diagnosis.

    Attributes:
        found: The diagnosis.
        need: The requested users and tokens, by default one user of the maximum length.
        holds: Whether the need fits as logged.
        changes: Changes that help if it does not.
        shorter: Maximum length that fits if the logged one does not; 0 if there is none.
    """

    def __init__(self, found: Diagnosis, users: int = 0, context: int = 0) -> None:
        self.found, self.boot = found, found.boot
        is_requested = bool(users or context)
        self.model = found.predicted.model.name
        self.need = RequiredCapacity(max(1, users), context or found.length)
        self.logged: Fit = as_logged(
            found, users=self.need.users, max_model_len=self.need.tokens
        )
        is_running = not found.boot.failure or (is_requested and found.boot.started)
        self.holds = self.logged.fits and is_running
        self.changes: list[LogAdvice] = [] if self.holds else find_changes(found, self.need)
        self.shorter = 0 if self.holds or is_requested else longest_length(found)

    def basis(self) -> str:
        """Return the model, GPUs and engine."""
        gpus = f"{self.found.predicted.ranks.gpus}× {self.found.deployment.gpu.name}"
        return f"{self.model} on {gpus}, {_engine_of(self.boot)}"

    def taken(self) -> str:
        """Return whether the engine started and what the KV cache stores, or what is missing."""
        result, failure = self.found, self.found.boot.failure
        if failure and failure.kind == "occupied":
            free, share = (format_bytes(failure.figures[key]) for key in ("free", "share"))
            used = format_bytes(failure.figures["total"] - failure.figures["free"])
            return (
                f"Failed: {used} were in use before the start, {free} are free, the engine "
                f"needs {share}."
            )
        cache = result.logged("cache")
        if failure and failure.kind == "too_long" and cache:
            needed, left = format_bytes(self.logged.needed.cache), format_bytes(cache)
            tokens = self.need.tokens
            return f"Failed: {tokens:,} tokens need {needed} of KV cache, {left} are left."
        if failure:
            short = result.logged(SHORT)
            missing = f", {format_bytes(short)} are missing" if short else ""
            return f"Failed: {_ENDED[failure.kind]}{missing}."
        if cache is None:
            return "The engine started, the log has no size of the KV cache."
        count = self.logged.sequences
        users = f"{count:,} user{'s' * (count != 1)} of {self.need.tokens:,} tokens"
        return f"The engine started: {format_bytes(cache)} of KV cache fit {users}."

    def holding(self) -> str:
        """Return the users that fit, as logged and as predicted."""
        cells = self.boot.counts.get("tokens") or self.boot.counts.get("cells")
        stored = f", the cache stores {cells:,} tokens" if cells else ""
        users = f"{self.logged.sequences:,} logged, {self.predicted_sequences:,} predicted"
        return f"users of {self.need.tokens:,} tokens: {users}{stored}"

    @property
    def predicted_sequences(self) -> int:
        plain = self.found.predicted
        per_rank = plain.plan.most_sequences(plain.budget_at(plain.end), self.need.tokens)
        return per_rank * plain.ranks.dp

    def mending(self) -> str:
        """Return the changes that help, '' if none is needed."""
        if self.holds:
            return ""
        fixes = [f"`{change.flags}`" for change in self.changes]
        if self.shorter:
            fixes.append(f"`{length_flag(self.found.options, self.shorter)}`")
        text = "No change of one or two flags helps on this GPU."
        if fixes:
            *others, last = fixes
            listed = f"{', '.join(others)} or {last}" if others else last
            text = f"It fits with {listed}."
        failure = self.boot.failure
        if failure and failure.kind == "occupied":
            return f"Stop the processes that use the memory. {text}"
        return text

    def records(self, log: str = "", number: int = 1) -> list[Record]:
        """Return one record per memory item, and last the summary."""
        result = self.found
        place = self.model, result.deployment.gpu.name, result.predicted.ranks.gpus
        terms = [(term.name, term.logged, term.predicted) for term in result.terms]
        cache = next((term for term in terms if term[0] == "cache"), ("cache", None, None))
        summary = {
            "fits": self.holds,
            "max_num_seqs": self.logged.sequences,
            "command": self._command(),
            "taken": self.taken(),
            "change": self.mending() or None,
            "advice": [change._asdict() for change in self.changes],
        }
        return _records(
            self.boot, log, number, place, [*terms, ("what fits", *cache[1:])], summary
        )

    def _command(self) -> str | None:
        from kvcalc.capacity.command_line import command_of

        written = command_of(
            self.found.deployment, self.found.options, self.found.command.named
        )
        return written.line if written else None


# Figures in a log of V0, with their names in records.
_LOGGED = {
    "share": "share that the engine takes",
    "weights": "weights",
    "activations": "activations",
    "libraries": "libraries and collectives",
    "graphs": "CUDA graphs",
    "cache": "cache",
}


class LoggedSummary:
    """The figures of a log of vLLM's V0 engine, without a prediction.

    It has the methods of `DiagnosisSummary`.
    """

    changes: tuple[LogAdvice, ...] = ()

    def __init__(self, boot: Boot, model: str = "", gpu: str = "") -> None:
        self.boot, self.model = boot, printable(model or boot.named, 80)
        try:
            card = None if gpu else card_of(boot.gpu, boot.memory)[0]
        except UserError:  # several GPUs have this memory
            card = None
        self.gpu = gpu or (card.name if card else printable(boot.gpu, 80))

    def basis(self) -> str:
        """Return the model, GPU and engine."""
        return f"{self.model} on {self.gpu or 'an unknown GPU'}, {_engine_of(self.boot)}"

    def taken(self) -> str:
        """Return whether the engine started, and its KV cache."""
        if self.boot.failure:
            return f"Failed: {_ENDED[self.boot.failure.kind]}."
        cache = self.boot.figures.get("cache")
        size = f" with {format_bytes(cache)} of KV cache" if cache else ""
        return f"The engine started{size}."

    def holding(self) -> str:
        """Return the tokens of the KV cache."""
        tokens = self.boot.counts.get("tokens")
        stored = f"the cache stores {tokens:,} tokens, " if tokens else ""
        return f"{stored}vLLM's V0 engine is not predicted"

    def mending(self) -> str:
        return ""

    def records(self, log: str = "", number: int = 1) -> list[Record]:
        """Return one record per logged figure, and last the summary; the predictions are None."""
        figures = self.boot.figures
        logged = [(name, figures[key], None) for key, name in _LOGGED.items() if key in figures]
        terms: list[tuple[str, int | None, int | None]] = [
            ("memory of the GPU", self.boot.memory or -1, None),
            *logged,
        ]
        terms = [term for term in terms if term[1] is not None and term[1] >= 0]
        gpus = prod(int(self.boot.told.get(size) or 1) for size in ("tp", "pp", "dp"))
        summary: Record = {"taken": self.taken(), "advice": []}
        last = ("what fits", figures.get("cache"), None)
        place = self.model, self.gpu, gpus
        return _records(self.boot, log, number, place, [*terms, last], summary)


def _engine_of(boot: Boot) -> str:
    """Return the engine with its version."""
    return f"{boot.engine} {printable(boot.version, 40)}".strip()


_SUMMARY_KEYS = (
    "fits",
    "failure",
    "tokens",
    "max_num_seqs",
    "command",
    "taken",
    "change",
    "advice",
)


def _records(
    boot: Boot,
    log: str,
    number: int,
    place: tuple[str, str, int],
    terms: Sequence[tuple[str, int | None, int | None]],
    summary: Record,
) -> list[Record]:
    """Return one record per term; the last term has the summary.

    Args:
        place: Model, GPU and number of GPUs.
        terms: Name, logged bytes and predicted bytes of each term.
    """
    model, gpu, gpus = place
    records = []
    for name, logged, predicted in terms:
        is_known = logged is not None and predicted is not None
        record: Record = {
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
            "difference_bytes": (logged or 0) - (predicted or 0) if is_known else None,
        }
        records.append(record | dict.fromkeys(_SUMMARY_KEYS))
    failure = boot.failure.kind if boot.failure else None
    records[-1] |= {"failure": failure, "tokens": boot.counts.get("tokens")} | summary
    return records
