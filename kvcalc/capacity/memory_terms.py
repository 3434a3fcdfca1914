"""From a GPU's memory to bytes for the cache: share − weights − activations − overhead. Knows no engine's pages."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch, Sequences
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.layers.weights import matrix, vector
from kvcalc.model.memory import stage_weight_bytes, weight_bytes
from kvcalc.model.operators import forward
from kvcalc.model.pipeline import stages
from kvcalc.model.precision import Precision, formats_of
from kvcalc.model.spec import NORM_VECTORS, Model
from kvcalc.units import maximum, minimum, rounded_down, rounded_up

Figure = TypeVar("Figure")
ENDS = ("low", "middle", "high")  # of the range in which a budget lies
SHARES = ("total", "free", "remaining")  # what memory a share is taken of
MIB, GIB = 1 << 20, 1 << 30
MOST_PEAKS = 1 << 12  # of passes that a model keeps
# Measured by others, not derived; sources in docs/engines.md. A given overhead replaces the three that a budget subtracts.
CONTEXT_BYTES = 7 * GIB // 10  # CUDA context: an H100 of 79.18 GiB has 78.48 free before weights (SGLang's start-up log)
LIBRARY_BYTES = 13 * GIB // 100  # what libraries take outside torch (vLLM's log: "0.13 GiB for non-torch memory")
GRAPH_BYTES = 36 * GIB // 100  # CUDA graphs (vLLM's log: "Estimated CUDA graph memory: 0.36 GiB total")
COLLECTIVE_BYTES = 2 * GIB  # buffers of the collectives of several GPUs (SGLang's log at tp 8: 2.01 GB)


class Start(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One GPU of a server as it starts: what decides the bytes that stand beside the cache.

    stage: its pipeline stage. of: what memory the share is of. tokens: of one pass. sequences: that the engine is set up for,
    asked: that have to fit, both of one dp rank; ints, or arrays for engines that take them. release: the engine's version, in
    its own terms. loras: slots, of rank lora_rank. gpu_layers, cpu_experts: of llama.cpp, layers on the GPU (−1: all) and first
    layers whose experts are not. images: that a prompt may have, 0 leaves the tower out. tables_on_host: of hashed n-grams.
    beside: bytes of a draft or of prediction layers, by name, on this stage. context: tokens of one cache of llama.cpp, of a
    sequence or of all of them together; 0 for engines whose buffers do not grow with it.
    """

    model: Model
    precision: Precision
    ranks: Parallelism
    gpu: Gpu
    stage: int
    of: str
    tokens: int
    sequences: Any
    asked: Any = 1
    release: Any = None
    eager: bool = False
    loras: int = 0
    lora_rank: int = 16
    gpu_layers: int = -1
    cpu_experts: int = 0
    images: int | None = None
    tables_on_host: bool = True
    context: int = 0
    beside: dict[str, int] = {}

    @cached_property
    def formats(self) -> Formats:
        return formats_of(self.model, self.precision)

    @cached_property
    def language(self) -> int:
        """Bytes of the model's own weights as stored."""
        return stage_weights(self.model, self.formats, self.ranks, self.stage)

    @cached_property
    def _known(self) -> dict[object, Any]:
        """What the model knows of stages that hold the same layers and the same share of each weight."""
        held = stages(self.model, self.ranks.pp)[self.stage].held
        found: dict[object, Any] = self.model.known.setdefault(("stage", held, self.ranks.of_a_stage, self.formats), {})
        return found

    @property
    def alike(self) -> tuple[object, ...]:
        """What tells starts of one model apart, but for the context."""
        return (*msgspec.structs.astuple(self)[1:-2], *self.beside.items())

    @property
    def last(self) -> bool:
        """Whether the head is on this stage."""
        return self.stage == self.ranks.pp - 1

    def once(self, rule: Callable[["Start"], Figure], *also: object) -> Figure:
        """What a rule says of the weights of this stage, computed once for all starts alike in these and in `also`."""
        key = rule.__name__, also
        if key not in self._known:
            self._known[key] = rule(self)
        found: Figure = self._known[key]
        return found


class Weights(NamedTuple):
    """Bytes of what a GPU loads: the first, second and last of `Terms`."""

    language: int
    extra: dict[str, int]
    host: int = 0


class Terms(NamedTuple):
    """Bytes of one GPU beside its cache.

    language: the model's own weights as stored. extra: what else is loaded, by name. activation: the peak of a pass, of the
    step named in `peak`. overhead: by name. startup: by name, what stands before a share of free memory. margin: share of
    the memory by which the end of a range goes beyond its terms, negative at the high end. host: bytes of weights in the host's
    memory.
    """

    language: int
    extra: dict[str, int]
    activation: int
    overhead: dict[str, int]
    startup: dict[str, int] = {}
    margin: float = 0.0
    peak: str = ""
    host: int = 0

    @property
    def weights(self) -> int:
        return self.language + sum(self.extra.values())

    @property
    def taken(self) -> int:
        """Return the bytes that stand before a share of free memory."""
        return sum(self.startup.values())


class Budget(NamedTuple):
    """Memory of one GPU, term by term: cache = share − weights − activation − overhead.

    share: what the process may use. outside: activation and overhead lie outside the share (SGLang), and are not subtracted.
    """

    memory: int
    share: int
    weights: int
    activation: int
    overhead: int
    outside: bool = False

    @property
    def cache(self) -> int:
        """Bytes left for the cache; negative where there are too few."""
        return self.share - self.weights - (0 if self.outside else self.activation + self.overhead)

    @property
    def weights_fit(self) -> bool:
        """Whether the weights are within the share."""
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
    """The budget of one GPU of `memory` bytes, from its terms.

    Of total: share = ⌈memory · utilization⌉ (vLLM). Of free: share = ⌊(memory − taken) · utilization⌋, with `taken` what
    stands before the weights: context and collectives. Of remaining: the terms, and ⌊left · utilization⌋ of the bytes that
    they leave of memory − taken. Ints, or arrays of them that broadcast.
    """
    terms = weights + (0 if outside else activation + overhead)
    share: Any
    if of == "total":
        share = rounded_up(memory * utilization)
    elif of == "free":
        share = rounded_down(maximum(0, memory - taken) * utilization)
    else:
        left = memory - taken - terms
        share = terms + minimum(rounded_down(left * utilization), left)  # what is missing is missing whole
    return Budget(memory, share, weights, activation, overhead, outside)


def stated(start: Start, end: str, graphs: bool = True) -> Terms:
    """The model's own weights, what a pass needs, and the stated constants: no engine's own rules, and no range."""
    overhead, startup = stated_overhead(graphs and not start.eager, start.ranks, start.of)
    language, beside, _ = stated_weights(start)
    peak = activation_peak(start.model, start.precision, start.ranks, start.tokens, start.asked, start.stage)
    return Terms(language, beside, peak, overhead, startup)


def stated_weights(start: Start) -> Weights:
    """The model's own weights, and those of a draft or of prediction layers."""
    return Weights(start.language, start.beside)


def collective_bytes(ranks: Parallelism) -> int:
    """Buffers of the collectives, where there are several GPUs."""
    return COLLECTIVE_BYTES if ranks.gpus > 1 else 0


def stated_overhead(graphs: bool, ranks: Parallelism, of: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return two dicts of bytes by name: what a budget subtracts, and what stands before a share of free memory.

    A share of the total memory leaves the CUDA context outside it, and has the collectives inside.
    """
    inside = {"libraries": LIBRARY_BYTES, "CUDA graphs": GRAPH_BYTES * graphs}
    collectives = {"collectives": collective_bytes(ranks)}
    startup = {} if of == "total" else {"CUDA context": CONTEXT_BYTES} | collectives
    inside |= collectives if of == "total" else {}
    return {name: size for name, size in inside.items() if size}, {name: size for name, size in startup.items() if size}


def overhead_bytes(graphs: bool, ranks: Parallelism, of: str) -> tuple[int, int]:
    """Return the bytes that a budget subtracts, and those before a share of free memory, as in `stated_overhead`."""
    inside, startup = stated_overhead(graphs, ranks, of)
    return sum(inside.values()), sum(startup.values())


def activation_peak(
    model: Model, precision: Precision, ranks: Parallelism, tokens: int, sequences: int = 1, stage: int = 0
) -> int:
    """The most activation bytes that stand at once in a prefill of `tokens` tokens on one rank, from `sequences` prompts.

    The largest operator's inputs and outputs (of experts, the largest product's), and the residual stream that waits beside
    it: what the pass needs. An engine's allocator and its kernels' workspaces take more, so a measured figure should replace
    it where there is one. Kept for whoever asks again: searches do, and stages alike.
    """
    count, part = max(1, min(sequences, tokens)), stages(model, ranks.pp)[stage]
    alike = tuple(kind for kind, layers in part.counts.items() if layers), part.first, part.last
    kept: dict[object, int] = model.known.setdefault("peaks", {})
    key = precision, ranks, tokens, count, alike
    if key not in kept:
        if len(kept) == MOST_PEAKS:
            kept.clear()
        kept[key] = _activation_peak(model, precision, ranks, tokens, count, stage)
    return kept[key]


def _activation_peak(model: Model, precision: Precision, ranks: Parallelism, tokens: int, count: int, stage: int) -> int:
    each, longer = divmod(tokens, count)
    groups = [Sequences((count - longer) * ranks.dp, each, 0)]
    groups += [Sequences(longer * ranks.dp, each + 1, 0)] if longer else []
    operators = forward(model, Batch(tuple(groups)), precision, ranks, stage=stage if ranks.pp > 1 else None)
    residual = tokens * model.hidden_size * formats_of(model, precision).element_bytes
    costs = [cost for o in operators for cost in ([c for _, c in o.parts] if o.kind == "experts" else [o.cost])]
    return residual + max((int(cost.activation_bytes) for cost in costs), default=0)


def stage_weights(model: Model, formats: Formats, ranks: Parallelism, stage: int) -> int:
    """Weights of one pipeline stage on one rank."""
    return stage_weight_bytes(model, stages(model, ranks.pp)[stage], formats, ranks)


def mtp_weights(model: Model, formats: Formats, ranks: Parallelism) -> int:
    """Weights of the multi-token-prediction layers on one rank: each a layer, its projection [2·D, D], three norms.

    The projection is not sharded; embedding and head are the model's own. Raises UserError for a model without them.
    """
    if not model.mtp:
        raise UserError(f"{model.name} has no multi-token-prediction layers")
    kind, width = model.mtp.kind, model.hidden_size
    layer = sum(formats.weight_bytes(f"{kind}.{w.name}", w.local(ranks)) for w in model.layer_weights(kind))
    join = formats.weight_bytes("mtp.projection", matrix("projection", 2 * width, width))
    norms = formats.weight_bytes("mtp.norms", vector("norms", 3 * NORM_VECTORS[model.norm] * width))
    return model.mtp.layers * (layer + join + norms)


def draft_weights(draft: Model, precision: Precision, ranks: Parallelism) -> int:
    """Weights of a draft model on one rank of the last stage, sharded as the model beside it."""
    return weight_bytes(draft, precision, Parallelism(ranks.tp, 1, ranks.dp, ranks.tp * ranks.dp if ranks.ep > 1 else 1))
