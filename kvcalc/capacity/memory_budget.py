"""From a GPU's memory to the KV cache budget: share − weights − activation − overhead.

Nothing here depends on an engine's pages. The file also has the corrections that a start-up log
gives, the weights that several GPUs store twice, and the time to load weights.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcalc.arithmetic import maximum, minimum, rounded_down, rounded_up
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch, Parallelism, Sequences
from kvcalc.layers.weights import Formats, matrix, vector
from kvcalc.library.files import MOST_YAML, read_text
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.model.forward_pass import forward
from kvcalc.model.memory import stage_weight_bytes, weight_bytes
from kvcalc.model.model import NORM_VECTORS, Model, kept
from kvcalc.model.pipeline import Stage, stages
from kvcalc.model.precision import Precision, formats_of
from kvcalc.records import Record

ENDS = ("low", "middle", "high")  # of the range of a budget
SHARES = ("total", "free", "remaining")  # memory that a share is taken of
MIB, GIB = 1 << 20, 1 << 30
MAX_BYTES = 1 << 50  # of a figure in a file of corrections
BEYOND = "beyond the rules, as logged"
# Published measurements; docs/reference/engine-trtllm.md lists the sources. CUDA context: an H100
# of 79.18 GiB has 78.48 free before weights (SGLang's start-up log)
CONTEXT_BYTES = 7 * GIB // 10
# what libraries take outside torch (vLLM's log: "0.13 GiB for non-torch memory")
LIBRARY_BYTES = 13 * GIB // 100
# CUDA graphs (vLLM's log: "Estimated CUDA graph memory: 0.36 GiB total")
GRAPH_BYTES = 36 * GIB // 100
# buffers of the collectives of several GPUs (SGLang's log at tp 8: 2.01 GB)
COLLECTIVE_BYTES = 2 * GIB


class EngineStartup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One GPU of a server at its start: everything that decides the memory outside the cache.

    Attributes:
        stage: Number of the pipeline stage.
        of: Memory that the engine's share is taken of, from SHARES.
        tokens: Tokens of one pass.
        sequences: Sequences of one dp rank that the engine is set up for; an int or an array.
        prompts: Sequences of one dp rank that have to fit; an int or an array.
        release: The engine's version, in its own terms.
        loras: LoRA slots, of rank `lora_rank`.
        gpu_layers: Layers that llama.cpp puts on the GPU; -1 for all.
        cpu_experts: First layers whose experts llama.cpp leaves in host memory.
        images: Images of a prompt. 0 leaves out the vision tower; None for no limit.
        tables_on_host: Whether tables of hashed n-grams stay in host memory.
        context: Tokens of one cache of llama.cpp; 0 for other engines.
        extra: Bytes of draft and prediction layers on this stage, by name.
    """

    model: Model
    precision: Precision
    ranks: Parallelism
    gpu: Gpu
    stage: int
    of: str
    tokens: int
    sequences: Any
    prompts: Any = 1
    release: Any = None
    eager: bool = False
    loras: int = 0
    lora_rank: int = 16
    gpu_layers: int = -1
    cpu_experts: int = 0
    images: int | None = None
    tables_on_host: bool = True
    context: Any = 0
    extra: dict[str, int] = {}

    @cached_property
    def formats(self) -> Formats:
        return formats_of(self.model, self.precision)

    @cached_property
    def share(self) -> tuple[Formats, Parallelism, int]:
        """What decides this GPU's part of the weights: the key of rules that `kept` stores."""
        return self.formats, self.ranks, self.stage

    @cached_property
    def layers(self) -> Stage:
        """The layers of this stage."""
        return stages(self.model, self.ranks.pp)[self.stage]

    @property
    def stored_weights(self) -> int:
        """Bytes of the model's own weights as stored."""
        return stage_weight_bytes(self.model, self.layers, self.formats, self.ranks)


class MemoryBreakdown(NamedTuple):
    """Bytes of one GPU outside its cache.

    Attributes:
        language: The model's own weights as stored.
        extra: Other loaded bytes, by name.
        activation: Peak of a pass, in the step that `peak` names.
        overhead: By name.
        startup: Taken before a share of free memory, by name.
        margin: Part of the GPU's memory that an end of the range adds to its terms. It is negative
            at the high end.
        host: Weights in host memory.
    """

    language: int
    extra: dict[str, int]
    activation: Any
    overhead: Record
    startup: dict[str, int] = {}
    margin: float = 0.0
    peak: str = ""
    host: int = 0

    @property
    def weights(self) -> int:
        return self.language + sum(self.extra.values())

    @property
    def taken(self) -> int:
        """Return the bytes taken before a share of free memory."""
        return sum(self.startup.values())


class Budget(NamedTuple):
    """Memory of one GPU, term by term: cache = share − weights − activation − overhead.

    Attributes:
        share: Bytes that the process may use.
        outside: Activation and overhead are outside the share (SGLang), so nothing subtracts them.
    """

    memory: int
    share: int
    weights: int
    activation: int
    overhead: int
    outside: bool = False

    @property
    def cache(self) -> int:
        """Bytes of the KV cache; negative if the terms exceed the share."""
        return (
            self.share - self.weights - (0 if self.outside else self.activation + self.overhead)
        )

    @property
    def weights_fit(self) -> bool:
        """Whether the share holds the weights."""
        return self.weights <= self.share


def budget(
    memory: int,
    utilization: float,
    weights: int,
    activation: int,
    overhead: int,
    of: str = "total",
    taken: int = 0,
    outside: bool = False,
) -> Budget:
    """Return the budget of one GPU of `memory` bytes. Terms are ints, or arrays that broadcast.

    Of total: share = ⌈memory · utilization⌉ (vLLM). Of free: share = ⌊(memory − taken) ·
    utilization⌋. `taken` is the memory in use before the weights load (context, collectives). Of
    remaining: the terms, and ⌊rest · utilization⌋ of the bytes that they leave of memory − taken.
    """
    terms = weights + (0 if outside else activation + overhead)
    share: Any
    if of == "total":
        share = rounded_up(memory * utilization)
    elif of == "free":
        share = rounded_down(maximum(0, memory - taken) * utilization)
    else:
        rest = memory - taken - terms
        share = terms + minimum(
            rounded_down(rest * utilization), rest
        )  # the whole of a shortage
    return Budget(memory, share, weights, activation, overhead, outside)


def stated(start: EngineStartup, end: str, graphs: bool = True) -> MemoryBreakdown:
    """Return the model's own weights, the need of a pass, and the stated constants, without a
    range."""
    overhead, startup = stated_overhead(graphs and not start.eager, start.ranks, start.of)
    peak = activation_peak(
        start.model,
        start.precision,
        start.ranks,
        start.tokens,
        start.prompts,
        start.stage,
    )
    return MemoryBreakdown(start.stored_weights, start.extra, peak, overhead, startup)


def collective_bytes(ranks: Parallelism) -> int:
    """Return the bytes of the buffers of collectives: none on one GPU."""
    return COLLECTIVE_BYTES if ranks.gpus > 1 else 0


def nonzero(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes that are not 0."""
    return {name: size for name, size in sizes.items() if size}


def stated_overhead(
    graphs: bool, ranks: Parallelism, of: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Return two dicts of bytes by name: what a budget subtracts, and what is taken before a share
    of free memory.

    A share of the total memory includes the collectives. It leaves out the CUDA context.
    """
    inside = {"libraries": LIBRARY_BYTES, "CUDA graphs": GRAPH_BYTES * graphs}
    collectives = {"collectives": collective_bytes(ranks)}
    if of == "total":
        return nonzero(inside | collectives), {}
    return nonzero(inside), nonzero({"CUDA context": CONTEXT_BYTES} | collectives)


def activation_peak(
    model: Model,
    precision: Precision,
    ranks: Parallelism,
    tokens: int,
    sequences: int = 1,
    stage: int = 0,
) -> int:
    """Return the peak activation bytes of one rank in a prefill of `tokens` tokens, from
    `sequences` prompts.

    The peak has the inputs and outputs of the largest operator (for experts, of the largest GEMM),
    and the residual stream. Allocators and workspaces of an engine need more, so use a measured
    figure instead if there is one.
    """
    keys = [s.held for s in stages(model, ranks.pp)]
    return kept(
        model,
        _activation_peak,
        precision,
        ranks,
        tokens,
        max(1, min(sequences, tokens)),
        keys.index(keys[stage]),  # stages with equal layers share one result
    )


def _activation_peak(
    model: Model,
    precision: Precision,
    ranks: Parallelism,
    tokens: int,
    count: int,
    stage: int,
) -> int:
    length, longer = divmod(tokens, count)
    groups = [Sequences((count - longer) * ranks.dp, length, 0)]
    if longer:
        groups.append(Sequences(longer * ranks.dp, length + 1, 0))
    operators = forward(
        model,
        Batch(tuple(groups)),
        precision,
        ranks,
        stage=stage if ranks.pp > 1 else None,
    )
    peak = 0
    for operator in operators:
        costs = (
            [c for _, c in operator.parts] if operator.kind == "experts" else [operator.cost]
        )
        peak = max([peak, *(int(cost.activation_bytes) for cost in costs)])
    return peak + tokens * model.hidden_size * formats_of(model, precision).element_bytes


def mtp_weights(model: Model, formats: Formats, ranks: Parallelism) -> int:
    """Return the bytes of the multi-token-prediction layers on one rank.

    Each has a layer, a projection [2·D, D] that is not sharded, and three norms. Embedding and head
    are the model's own.

    Raises:
        UserError: The model has no such layers.
    """
    if not model.mtp:
        raise UserError(f"{model.name} has no multi-token-prediction layers")
    kind, width = model.mtp.kind, model.hidden_size
    layer = sum(
        formats.weight_bytes(f"{kind}.{w.name}", w.local(ranks))
        for w in model.layer_weights(kind)
    )
    join = formats.weight_bytes("mtp.projection", matrix("projection", 2 * width, width))
    norms = formats.weight_bytes(
        "mtp.norms", vector("norms", 3 * NORM_VECTORS[model.norm] * width)
    )
    return model.mtp.layers * (layer + join + norms)


def draft_weights(draft: Model, precision: Precision, ranks: Parallelism) -> int:
    """Return the weight bytes of a draft model on one rank of the last stage, sharded as its
    target."""
    ep = ranks.tp * ranks.dp if ranks.ep > 1 else 1
    return weight_bytes(draft, precision, Parallelism(ranks.tp, 1, ranks.dp, ep))


class LogCorrections(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections for one GPU, from a start-up log.

    Attributes:
        weights_beyond_bytes: Logged bytes minus predicted bytes. They hold for the same model,
            formats and split.
        beside_beyond_bytes: The same difference for activation and overhead.
        others_bytes: Memory of other processes.
    """

    engine: str
    gpu: str
    memory_bytes: int
    model: str
    parameters: int
    weights_in: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    version: str = ""
    weights_beyond_bytes: int = 0
    beside_beyond_bytes: int = 0
    others_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (
            "memory_bytes",
            "weights_beyond_bytes",
            "beside_beyond_bytes",
            "others_bytes",
        ):
            if abs(getattr(self, name)) > MAX_BYTES:
                raise UserError(f"{name} {getattr(self, name)!r} are no bytes of a GPU")

    def applied(
        self,
        terms: MemoryBreakdown,
        parameters: int,
        weights_in: str,
        ranks: Parallelism,
    ) -> MemoryBreakdown:
        """Return an engine's terms with the corrections; never below 0.

        A model is the logged one if it has as many parameters, whatever its file is called.
        """
        logged = self.parameters, self.weights_in, self.tensor_parallel_size
        same = (*logged, self.pipeline_parallel_size) == (
            parameters,
            weights_in,
            ranks.tp,
            ranks.pp,
        )
        correction = max(
            -terms.activation - sum(terms.overhead.values()), self.beside_beyond_bytes
        )
        return terms._replace(
            language=max(0, terms.language + self.weights_beyond_bytes * same),
            overhead=terms.overhead | nonzero({BEYOND: correction}),
        )

    def text(self) -> str:
        """Return the file that `read_learned` reads."""
        lines = [
            "# What one start-up taught: bytes of one GPU, logged less those by the rules."
        ]
        for name, value in msgspec.structs.asdict(self).items():
            quoted = str(value).replace("'", "''")
            lines.append(
                f"{name}: '{quoted}'" if isinstance(value, str) else f"{name}: {value}"
            )
        return "\n".join([*lines, ""])


def read_learned(path: str, what: str = "") -> LogCorrections:
    """Read the file of `diagnose --save`. Raises UserError naming the file for another text."""
    data, _ = parse_yaml(read_text(Path(path), MOST_YAML), path)
    try:
        return msgspec.convert(data, LogCorrections)
    except msgspec.ValidationError as error:
        raise UserError(f"is not what diagnose --save writes: {error}", path) from None


class Replicas(NamedTuple):
    """What several of a group of GPUs store.

    Attributes:
        weights: Bytes of one GPU by the weight's name, largest first.
        cache: (role, units, GPUs with the same unit) of each kind of row.
    """

    weights: dict[str, int]
    cache: list[tuple[str, int, int]]


def replicas(model: Model, formats: Formats, ranks: Parallelism) -> Replicas:
    """Return what a pipeline stage's group of tp GPUs stores more than once.

    Decode-context parallelism spreads a row's copies over tokens again.
    """
    return kept(model, _replicas, formats, ranks)


def _replicas(model: Model, formats: Formats, ranks: Parallelism) -> Replicas:
    weights: dict[str, int] = {}
    for name, weight, count in model.walk() if ranks.tp > 1 else ():
        local = weight.local(ranks)
        # a padded vocabulary is less
        if local.elements * ranks.tp >= 2 * weight.elements and not weight.expert:
            short = name.rpartition(".")[2]
            weights[short] = weights.get(short, 0) + count * formats.weight_bytes(name, local)
    copies: dict[tuple[str, int, bool], int] = {}
    for layer in model.kinds.values():
        for entry in () if layer.shares_cache else layer.entries:
            whole = bool(entry.grows and not entry.limit)
            if not entry.is_stored_by_other_layer:
                copies[entry.role, entry.heads, whole] = (
                    ranks.share(entry.heads)
                    * ranks.tp
                    // entry.heads
                    // (ranks.dcp if whole else 1)
                )
    return Replicas(
        dict(sorted(weights.items(), key=lambda item: -item[1])),
        [(role, heads, count) for (role, heads, _), count in copies.items() if count > 1],
    )


class Loading(NamedTuple):
    """Seconds to load the weights. A rate that is not known gives None.

    Attributes:
        disk_s: From disk to host, each byte once.
        link_s: From host to GPU, all GPUs over their own links.
    """

    checkpoint_bytes: int
    disk_s: float | None
    link_s: float | None

    @property
    def min_s(self) -> float | None:
        """Return the slower of the two, for a load that overlaps them."""
        return max((s for s in (self.disk_s, self.link_s) if s is not None), default=None)


def loading(
    model: Model, precision: Precision, gpu: Gpu, gpu_bytes: int, disk_bytes_per_s: int
) -> Loading:
    """Return the loading time of a model with `gpu_bytes` on one GPU; a disk rate of 0 is not
    known."""
    checkpoint, link = weight_bytes(model, precision), gpu.host_link_bytes_per_s
    return Loading(
        checkpoint,
        checkpoint / disk_bytes_per_s if disk_bytes_per_s else None,
        gpu_bytes / link if link else None,
    )


def offloaded_bytes(
    model: Model, formats: Formats, ranks: Parallelism, stage: int, gib: float
) -> int:
    """Return the bytes of a GPU's weights that vLLM's --cpu-offload-gb moves to host memory.

    The setting counts in GiB. vLLM moves only weights of layers; embedding and LM head stay on the
    GPU (vLLM, model_executor/models/utils.py, make_layers).
    """
    if not gib:
        return 0
    layers = stage_weight_bytes(
        model, stages(model, ranks.pp)[stage], formats, ranks, only_layers=True
    )
    return min(layers, round(gib * GIB))
