"""Compare the memory of a logged engine start with the prediction, item by item."""

import re
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.command_line import Command, interpret_flags
from kvcalc.capacity.dialects import DIALECTS
from kvcalc.capacity.memory_budget import LogCorrections
from kvcalc.diagnosis.startup import USUAL, Boot, card_of, check_alone, machine_of
from kvcalc.errors import UnpredictedRelease, UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.library.checkpoints import checkpoint
from kvcalc.library.load import load_gpu
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import format_bytes

MAX_DIFFERENCE = 0.03  # of a GPU's memory, up to which it may be the GPU of a log
SHORT = "short of any cache"
OUTSIDE_CACHE = ("activations", "libraries", "graphs")


class MemoryItem(NamedTuple):
    """Bytes of one GPU, logged and predicted; None if unknown."""

    name: str
    logged: int | None
    predicted: int | None


class Diagnosis(NamedTuple):
    """A logged engine start and its prediction.

    Attributes:
        deployment: On the GPU with the memory that the log states.
        plain: On the GPU preset.
        predicted: The fit by the engine's rules.
        terms: Memory items, logged and predicted.
        learned: Their differences, as corrections for later fits.
        remarks: Sentences to print.
    """

    boot: Boot
    command: Command
    deployment: TimedDeployment
    plain: TimedDeployment
    options: FitOptions
    predicted: Fit
    terms: tuple[MemoryItem, ...]
    learned: LogCorrections
    remarks: tuple[str, ...]

    @property
    def length(self) -> int:
        """The max_model_len of the start."""
        return self.predicted.length

    def logged(self, name: str) -> int | None:
        return next((t.logged for t in self.terms if t.name == name), None)


class DiagnosisInputs(NamedTuple):
    """Values that replace those of a log; '' for none."""

    model: str = ""
    gpu: str = ""
    precision: dict[str, str] = {}
    tp: int = 0


def diagnose(boot: Boot, given: DiagnosisInputs = DiagnosisInputs()) -> Diagnosis:  # noqa: B008
    """Compare a boot with the prediction.

    Raises:
        UnpredictedRelease: vLLM ran its V0 engine.
        UserError: Model or GPU are neither in the log nor given.
    """
    if boot.words.get("runner") == "V0":
        raise UnpredictedRelease(
            f"vLLM {boot.version} ran its V0 engine, which is not predicted"
        )
    stated = {n: v for n, v in boot.told.items() if n not in given.precision}
    if boot.counts.get("devices", 1) > 1:
        stated.setdefault("tensor_split", ",".join("1" * boot.counts["devices"]))
    command = interpret_flags(DIALECTS[boot.engine], _named(boot, given.model), stated)
    known = command.given | given.precision | ({"tp": given.tp} if given.tp else {})
    command = command._replace(given=known)
    options = _options(command, boot)
    gpu, remark = (load_gpu(given.gpu), "") if given.gpu else card_of(boot.gpu, boot.memory)
    if gpu is None and not boot.gpu:
        gpu, remark = _likely(boot, command, options)
    if gpu is None:
        what = f"names GPU {boot.gpu!r}, which is not a preset" if boot.gpu else "names no GPU"
        raise UserError(f"the log {what}", hint="Give it with --gpu")
    if gpu.usable_share and not boot.memory and "free" in boot.figures:
        boot.memory = machine_of(gpu, boot.figures["free"])
        free = boot.figures["free"] / 2**30
        remark = f"a machine of {boot.memory >> 30} GiB: {free:.2f} GiB are free for its GPU"
    card = msgspec.structs.replace(gpu, memory_bytes=boot.memory) if boot.memory else gpu
    run = command.deployment(card)
    predicted = fit(run, options)
    terms = _terms(boot, predicted)
    remarks = (
        *command.remarks,
        *filter(None, [remark, _contradicted(boot, predicted, terms)]),
    )
    plain = msgspec.structs.replace(run, gpu=load_gpu(given.gpu or gpu.name))
    return Diagnosis(
        boot,
        command,
        run,
        plain,
        options,
        predicted,
        terms,
        _learned(boot, predicted, terms, gpu),
        remarks,
    )


def served_by(named: str, given: DiagnosisInputs) -> tuple[TimedDeployment, tuple[str, ...]]:
    """Return the deployment of a running server and remarks. Raises UserError without model or
    GPU."""
    name = given.model or named
    if not name:
        raise UserError("the metrics name no model", hint="Give it with --model")
    if not given.gpu:
        raise UserError("the metrics name no GPU", hint="Give it with --gpu")
    stated = dict(given.precision) | ({"tp": given.tp} if given.tp else {})
    command = interpret_flags(DIALECTS["vllm"], name, stated)
    return command.deployment(load_gpu(given.gpu)).under(), command.remarks


def _named(boot: Boot, given: str) -> str:
    """Return the model's name: given, else of the log's path, else of the title and type in a GGUF
    file."""
    if given:
        return given
    title, kind = boot.words.get("title", ""), boot.words.get("type", "")
    names = [boot.named]
    if title:
        match = re.match(r"(?:all )?([A-Z]+[0-9]*[A-Z0-9_]*)(?: - (Small|Medium|Large))?", kind)
        type_ = (match[1] + ("_" + match[2][0] if match[2] else "")).lower() if match else ""
        names.append("-".join(filter(None, (re.sub(r"\s+", "-", title.strip()), type_))))
    for name in filter(None, names):
        try:
            if "/" not in checkpoint(name).name:
                return name
        except UserError:
            continue
    if not boot.named:
        raise UserError("the log names no model", hint="Give it with --model")
    if boot.named.startswith(("/", ".", "~")) or boot.engine == "llama.cpp":
        raise UserError(
            f"the log's model {boot.named!r} is not a known model",
            hint="Give it with --model",
        )
    return boot.named


def _likely(boot: Boot, command: Command, options: FitOptions) -> tuple[Gpu | None, str]:
    """Return the one usual GPU whose memory matches weights and cache, with a remark.

    Raises UserError if several match.
    """
    cache, weights = boot.figures.get("cache"), boot.figures.get("weights")
    if cache is None or weights is None or boot.engine != "vllm":
        return None, ""
    errors = []
    for gpu in map(load_gpu, USUAL):
        result = fit(command.deployment(gpu), options)
        errors.append(
            (
                abs(result.left["middle"] + result.budget.weights - weights - cache)
                / gpu.memory_bytes,
                gpu,
            )
        )
    near = [gpu for error, gpu in errors if error <= MAX_DIFFERENCE]
    check_alone(near, "its weights and cache")
    if not near:
        return None, ""
    return (
        near[0],
        f"the log names no GPU: only {near[0].name} matches its weights and cache; --gpu "
        "overrides it",
    )


def _options(command: Command, boot: Boot) -> FitOptions:
    """Return the engine's options, with the version of the log if rules depend on it."""
    match = re.match(r"\d+\.\d+(?:\.\d+)?", boot.version)
    version = (
        {"engine_version": match[0]} if match and boot.engine in ("vllm", "sglang") else {}
    )
    return command._replace(given=command.given | version).options


def _terms(boot: Boot, predicted: Fit) -> tuple[MemoryItem, ...]:
    """Return the known memory items in the order in which the engine takes memory."""
    figures, budget, overhead = (
        dict(boot.figures),
        predicted.budget,
        dict(predicted.terms.overhead),
    )
    if "free" in figures and boot.memory:
        figures["before"] = predicted.gpu.usable_bytes - figures["free"]
    if "share" not in figures and boot.engine == "vllm":
        figures["share"] = budget.share
    graphs = overhead.pop("CUDA graphs", 0)
    known = {"share", "weights", "cache", *OUTSIDE_CACHE}
    if (
        boot.engine == "vllm"
        and {"share", "weights", "cache"} <= figures.keys()
        and not {*OUTSIDE_CACHE[:2]} <= figures.keys()
    ):
        stated = sum(figures.get(name, 0) for name in OUTSIDE_CACHE[:2])
        figures["rest"] = figures["share"] - figures["weights"] - figures["cache"] - stated
    if figures.get("cache", 0) < 0:  # vLLM logs this before it stops
        figures |= {"short": -figures["cache"], "cache": 0}
    # A negative difference shows that the log is of another GPU.
    figures = {name: value for name, value in figures.items() if value >= 0}
    rows = (
        ("memory of the GPU", boot.memory or None, budget.memory),
        ("taken before the start", figures.get("before"), None),
        (
            "share that the engine takes",
            figures.get("share"),
            budget.share if boot.engine != "llama.cpp" else None,
        ),
        ("weights", figures.get("weights"), budget.weights),
        ("activations", figures.get("activations"), budget.activation),
        ("libraries and collectives", figures.get("libraries"), sum(overhead.values())),
        ("CUDA graphs", figures.get("graphs"), graphs),
        ("beside weights and cache, not told apart", figures.get("rest"), None),
        ("cache", figures.get("cache"), _cache(boot, predicted)),
        (SHORT, figures.get("short"), max(0, -budget.cache) or None),
        ("left free", figures.get("left"), None),
        (
            "in the host's memory: weights",
            figures.get("host_weights"),
            predicted.terms.host or None,
        ),
        ("in the host's memory: cache", figures.get("host_cache"), None),
    )
    shown = known if boot.engine == "vllm" else ()
    return tuple(
        MemoryItem(*row)
        for row in rows
        if row[1] is not None or (row[2] is not None and (shown or row[2]))
    )


def _contradicted(boot: Boot, predicted: Fit, terms: tuple[MemoryItem, ...]) -> str:
    """Return a sentence if the log's weights and cache exceed the share of this GPU, else ''."""
    logged = {t.name: t.logged or 0 for t in terms}
    share = logged.get("share that the engine takes", 0)
    used_bytes = logged.get("weights", 0) + logged.get("cache", 0)
    if boot.engine != "vllm" or used_bytes <= share:
        return ""
    share_text = f"the {format_bytes(share)} of {predicted.gpu.name}"
    used = format_bytes(used_bytes)
    return f"the log's weights and cache, {used}, exceed {share_text}: name the GPU with --gpu"


def _cache(boot: Boot, predicted: Fit) -> int:
    """Return the predicted bytes of the cache: the budget, or llama.cpp's allocation."""
    if boot.engine != "llama.cpp":
        return predicted.budget_at("middle")
    plan, length = predicted.plan, predicted.length
    return plan.needed(predicted.per_rank, length)


def _learned(
    boot: Boot, predicted: Fit, terms: tuple[MemoryItem, ...], gpu: Gpu
) -> LogCorrections:
    by_name = {t.name: t for t in terms}
    weights = by_name["weights"]
    logged = [
        by_name[n]
        for n in ("activations", "libraries and collectives", "CUDA graphs")
        if n in by_name
    ]
    rest = by_name.get("beside weights and cache, not told apart")
    by_rules = predicted.terms.activation + sum(predicted.terms.overhead.values())
    share, cache = by_name.get("share that the engine takes"), boot.figures.get("cache")
    beyond = 0
    if (
        boot.engine == "vllm"
        and weights.logged
        and cache is not None
        and share
        and share.logged
    ):
        beyond = share.logged - weights.logged - cache - by_rules
    elif (
        rest is None
        and logged
        and all(t.logged is not None for t in logged)
        and boot.engine == "vllm"
    ):
        beyond = sum(t.logged or 0 for t in logged) - by_rules
    before = by_name.get("taken before the start")
    ranks: Parallelism = predicted.ranks
    return LogCorrections(
        engine=boot.engine,
        gpu=gpu.name,
        memory_bytes=boot.memory or gpu.memory_bytes,
        model=predicted.model.name,
        parameters=predicted.model.parameters,
        weights_in=predicted.formats.weights_label,
        tensor_parallel_size=ranks.tp,
        pipeline_parallel_size=ranks.pp,
        version=boot.version[:40],
        weights_beyond_bytes=weights.logged - predicted.budget.weights if weights.logged else 0,
        beside_beyond_bytes=beyond,
        others_bytes=max(0, before.logged or 0) if before else 0,
    )


def as_logged(found: Diagnosis, **changes: Any) -> Fit:
    """Return the fit with the corrections of the log."""
    return fit(
        found.deployment,
        msgspec.structs.replace(found.options, from_log=found.learned, **changes),
    )
