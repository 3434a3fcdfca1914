"""A boot beside its prediction: where each GiB went, term by term, and what was learned of the machine."""

import re
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.commands import Command, settled_command
from kvcalc.capacity.dialects import DIALECTS
from kvcalc.capacity.learned import Learned
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.checkpoints import checkpoint
from kvcalc.library.load import load_gpu
from kvcalc.planning.startup import Boot
from kvcalc.planning.startup.cards import USUAL, card_of, check_alone, machine_of
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes

LIKELY = 0.03
SHORT = "short of any cache"
BESIDE = ("activations", "libraries", "graphs")


class Term(NamedTuple):
    """Bytes of one GPU, as logged and by the rules; None where one of them does not say."""

    name: str
    logged: int | None
    predicted: int | None


class Diagnosis(NamedTuple):
    """One boot, read. deployment: on the GPU with the memory that the log gives it. plain: on the preset. predicted: by the
    rules. terms: each beside what was logged; learned: their differences.
    """

    boot: Boot
    command: Command
    deployment: Deployment
    plain: Deployment
    options: FitOptions
    predicted: Fit
    terms: tuple[Term, ...]
    learned: Learned
    remarks: tuple[str, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence that the engine was started for."""
        return self.predicted.length

    def logged(self, name: str) -> int | None:
        return next((t.logged for t in self.terms if t.name == name), None)


class Given(NamedTuple):
    """What stands for what a log says, or says instead of it; '' for nothing."""

    model: str = ""
    gpu: str = ""
    precision: dict[str, str] = {}
    tp: int = 0


def diagnose(boot: Boot, given: Given = Given()) -> Diagnosis:  # noqa: B008 (a constant)
    """A boot beside the prediction. Raises UserError where model or GPU are not in the log and not given."""
    told = {n: v for n, v in boot.told.items() if n not in given.precision}
    if boot.counts.get("devices", 1) > 1:
        told.setdefault("tensor_split", ",".join("1" * boot.counts["devices"]))
    command = settled_command(DIALECTS[boot.engine], _named(boot, given.model), told)
    known = command.given | given.precision | ({"tp": given.tp} if given.tp else {})
    command = command._replace(given=known)
    options = _options(command, boot)
    gpu, remark = (load_gpu(given.gpu), "") if given.gpu else card_of(boot.gpu, boot.memory)
    if gpu is None and not boot.gpu:
        gpu, remark = _likely(boot, command, options)
    if gpu is None:
        what = f"calls its GPU {boot.gpu!r}, of which no preset is known" if boot.gpu else "names no GPU"
        raise UserError(f"the log {what}", hint="Give it with --gpu")
    if gpu.usable_share and not boot.memory and "free" in boot.figures:
        boot.memory = machine_of(gpu, boot.figures["free"])
        remark = f"a machine of {boot.memory >> 30} GiB, as {boot.figures['free'] / 2**30:.2f} GiB are free for its GPU"
    card = msgspec.structs.replace(gpu, memory_bytes=boot.memory) if boot.memory else gpu
    run = Deployment(command.model, card, command.precision, command.parallelism)
    predicted = fit(run, options)
    terms = _terms(boot, predicted)
    remarks = (*command.remarks, *filter(None, [remark, _contradicted(boot, predicted, terms)]))
    plain = msgspec.structs.replace(run, gpu=load_gpu(given.gpu or gpu.name))
    return Diagnosis(boot, command, run, plain, options, predicted, terms, _learned(boot, predicted, terms, gpu), remarks)


def served_by(named: str, given: Given) -> tuple[Deployment, tuple[str, ...]]:
    """The deployment of a running server that tells its model at most, and remarks. Raises UserError without a GPU."""
    name = given.model or named
    if not name or not given.gpu:
        missing = "no model" if not name else "no GPU"
        raise UserError(f"the metrics name {missing}", hint=f"Give it with --{'gpu' if name else 'model'}")
    told = dict(given.precision) | ({"tp": given.tp} if given.tp else {})
    command = settled_command(DIALECTS["vllm"], name, told)
    run = Deployment(command.model, load_gpu(given.gpu), command.precision, command.parallelism)
    return run.under(), command.remarks


def _named(boot: Boot, given: str) -> str:
    """The model as it is called: given, else by the log's path, else by the title and the type that a file states."""
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
        raise UserError(f"the log calls its model {boot.named!r}, which tells nothing of it", hint="Give it with --model")
    return boot.named


def _likely(boot: Boot, command: Command, options: FitOptions) -> tuple[Gpu | None, str]:
    """The one usual GPU whose memory explains weights and cache to within LIKELY of it. Raises UserError where several do."""
    cache, weights = boot.figures.get("cache"), boot.figures.get("weights")
    if cache is None or weights is None or boot.engine != "vllm":
        return None, ""
    errors = []
    for gpu in map(load_gpu, USUAL):
        found = fit(Deployment(command.model, gpu, command.precision, command.parallelism), options)
        errors.append((abs(found.left["middle"] + found.budget.weights - weights - cache) / gpu.memory_bytes, gpu))
    near = [gpu for error, gpu in errors if error <= LIKELY]
    check_alone(near, "its weights and cache")
    if not near:
        return None, ""
    return near[0], f"the log names no GPU: {near[0].name} alone explains its weights and cache; --gpu says which"


def _options(command: Command, boot: Boot) -> FitOptions:
    """The engine's options, of the version that the log names where versions are told apart."""
    match = re.match(r"\d+\.\d+(?:\.\d+)?", boot.version)
    version = {"engine_version": match[0]} if match and boot.engine in ("vllm", "sglang") else {}
    return command._replace(given=command.given | version).options


def _terms(boot: Boot, predicted: Fit) -> tuple[Term, ...]:
    """Every term that one of both knows, in the order in which memory is taken."""
    figures, budget, overhead = dict(boot.figures), predicted.budget, dict(predicted.terms.overhead)
    if "free" in figures and boot.memory:
        figures["before"] = predicted.gpu.usable_bytes - figures["free"]
    if "share" not in figures and boot.engine == "vllm":
        figures["share"] = budget.share
    graphs = overhead.pop("CUDA graphs", 0)
    known = {"share", "weights", "cache", *BESIDE}
    if boot.engine == "vllm" and {"share", "weights", "cache"} <= figures.keys() and not {*BESIDE[:2]} <= figures.keys():
        told = sum(figures.get(name, 0) for name in BESIDE[:2])
        figures["rest"] = figures["share"] - figures["weights"] - figures["cache"] - told
    if figures.get("cache", 0) < 0:  # as vLLM says before it gives up
        figures |= {"short": -figures["cache"], "cache": 0}
    figures = {name: value for name, value in figures.items() if value >= 0}  # a difference below 0 is of another GPU
    rows = (
        ("memory of the GPU", boot.memory or None, budget.memory),
        ("taken before the start", figures.get("before"), None),
        ("share that the engine takes", figures.get("share"), budget.share if boot.engine != "llama.cpp" else None),
        ("weights", figures.get("weights"), budget.weights),
        ("activations", figures.get("activations"), budget.activation),
        ("libraries and collectives", figures.get("libraries"), sum(overhead.values())),
        ("CUDA graphs", figures.get("graphs"), graphs),
        ("beside weights and cache, not told apart", figures.get("rest"), None),
        ("cache", figures.get("cache"), _cache(boot, predicted)),
        (SHORT, figures.get("short"), max(0, -budget.cache) or None),
        ("left free", figures.get("left"), None),
        ("in the host's memory: weights", figures.get("host_weights"), predicted.terms.host or None),
        ("in the host's memory: cache", figures.get("host_cache"), None),
    )
    shown = known if boot.engine == "vllm" else ()
    return tuple(Term(*row) for row in rows if row[1] is not None or (row[2] is not None and (shown or row[2])))


def _contradicted(boot: Boot, predicted: Fit, terms: tuple[Term, ...]) -> str:
    """Where the log's weights and cache cannot lie in the share of this GPU; '' where they can."""
    logged = {t.name: t.logged or 0 for t in terms}
    share, held = logged.get("share that the engine takes", 0), logged.get("weights", 0) + logged.get("cache", 0)
    if boot.engine != "vllm" or held <= share:
        return ""
    there = f"the {format_bytes(share)} of {predicted.gpu.name}"
    return f"the log's weights and cache, {format_bytes(held)}, are more than {there}: --gpu names another"


def _cache(boot: Boot, predicted: Fit) -> int:
    """Bytes of the cache by the rules: what is left, and of llama.cpp what is allocated."""
    if boot.engine != "llama.cpp":
        return predicted.budget_at("middle")
    plan, length = predicted.plan, predicted.length
    return plan.needed(predicted.per_rank, length)


def _learned(boot: Boot, predicted: Fit, terms: tuple[Term, ...], gpu: Gpu) -> Learned:
    by_name = {t.name: t for t in terms}
    weights = by_name["weights"]
    logged = [by_name[n] for n in ("activations", "libraries and collectives", "CUDA graphs") if n in by_name]
    rest = by_name.get("beside weights and cache, not told apart")
    by_rules = predicted.terms.activation + sum(predicted.terms.overhead.values())
    share, cache = by_name.get("share that the engine takes"), boot.figures.get("cache")
    beyond = 0
    if boot.engine == "vllm" and weights.logged and cache is not None and share and share.logged:
        beyond = share.logged - weights.logged - cache - by_rules
    elif rest is None and logged and all(t.logged is not None for t in logged) and boot.engine == "vllm":
        beyond = sum(t.logged or 0 for t in logged) - by_rules
    before = by_name.get("taken before the start")
    ranks: Parallelism = predicted.ranks
    return Learned(
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
    """What fits with what the log taught."""
    return fit(found.deployment, msgspec.structs.replace(found.options, from_log=found.learned, **changes))
