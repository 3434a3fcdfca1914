"""From a GPU's memory to the KV cache budget: share − weights − activation − overhead.

No rule here depends on an engine's pages. The module also has corrections from a start-up log, and
the weights that several GPUs store in full.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.arithmetic import by_number, is_any, maximum, minimum, rounded_down, rounded_up
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch, Parallelism, Sequences
from kvcalc.layers.weights import Formats, matrix, vector
from kvcalc.library.files import MAX_YAML_BYTES, parse_yaml, read_text
from kvcalc.model.forward_pass import forward
from kvcalc.model.memory import stage_weight_bytes, weight_bytes
from kvcalc.model.model import NORM_VECTORS, Model, Vision, memoized
from kvcalc.model.pipeline import Stage, stages
from kvcalc.model.precision import Precision, formats_of

ESTIMATES = ("low", "middle", "high")  # names of the range of a budget
MIB, GIB = 1 << 20, 1 << 30
MAX_BYTES = 1 << 50  # largest figure in a file of corrections
# Published measurements; docs/reference/engine-trtllm.md lists the sources. CUDA context: an H100
# of 79.18 GiB has 78.48 free before weights (SGLang's start-up log)
CONTEXT_BYTES = 7 * GIB // 10
# libraries outside torch (vLLM's log: "0.13 GiB for non-torch memory")
LIBRARY_BYTES = 13 * GIB // 100
# CUDA graphs (vLLM's log: "Estimated CUDA graph memory: 0.36 GiB total")
GRAPH_BYTES = 36 * GIB // 100
# buffers of the collectives of several GPUs (SGLang's log at tp 8: 2.01 GB)
COLLECTIVE_BYTES = 2 * GIB


class EngineStartup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One GPU when the engine starts, with all inputs that determine the memory outside the cache.

    Attributes:
        stage: Index of the pipeline stage.
        utilization_basis: Memory to which the engine's share refers: total, free or remaining.
        tokens: Tokens of one pass.
        sequences: Sequences of one dp rank for which the engine is set up; an int or an array.
        prompts: Sequences of one dp rank that must fit; an int or an array.
        release: The rules of the engine's version, in a type of this engine.
        options: The `FitOptions` of the request.
        cpu_experts: First layers whose experts llama.cpp leaves in host memory.
        context: Tokens of one cache of llama.cpp, an int or an array; 0 for other engines.
        extra: Bytes of draft and prediction layers on this stage, by name.
    """

    model: Model
    precision: Precision
    ranks: Parallelism
    gpu: Gpu
    stage: int
    utilization_basis: str
    tokens: int
    sequences: Any
    options: Any
    prompts: Any = 1
    release: Any = None
    cpu_experts: int = 0
    context: Any = 0
    extra: dict[str, int] = {}

    @cached_property
    def formats(self) -> Formats:
        return formats_of(self.model, self.precision)

    @cached_property
    def layers(self) -> Stage:
        """Return the pipeline stage with its layers."""
        return stages(self.model, self.ranks.pp)[self.stage]

    @cached_property
    def vision(self) -> Vision | None:
        """Return the vision tower, with the patches and tokens of the images of the request."""
        tower = self.model.vision
        if not tower:
            return None
        tokens = tower.image_tokens(*self.options.image_size)
        patches = max(1, tower.patches * tokens // tower.tokens)
        return replace(tower, tokens=tokens, patches=patches)

    @property
    def stored_weights(self) -> int:
        """Return the bytes of the model's own weights as stored."""
        return stage_weight_bytes(self.model, self.layers, self.formats, self.ranks)


class MemoryBreakdown(NamedTuple):
    """Bytes of one GPU outside its cache.

    Attributes:
        language: The model's own weights as stored.
        extra: Other loaded bytes, by name.
        activation: Peak of a pass, in the step that `peak` names.
        overhead: Other memory of the engine, by name.
        startup: Memory in use before the engine measures the free memory, by name.
        margin: Share of the GPU's memory that an estimate adds; negative in the high estimate.
        host: Weights in host memory.
    """

    language: int
    extra: dict[str, int]
    activation: Any
    overhead: dict[str, Any]
    startup: dict[str, int] = {}
    margin: float = 0.0
    peak: str = ""
    host: int = 0

    @property
    def extra_bytes(self) -> int:
        return sum(self.extra.values())

    @property
    def weights(self) -> int:
        return self.language + self.extra_bytes

    @property
    def startup_bytes(self) -> int:
        """Return the bytes in use before the engine measures the free memory."""
        return sum(self.startup.values())

    @property
    def working_bytes(self) -> Any:
        """Return the bytes of activation and overhead together."""
        return self.activation + sum(self.overhead.values())


class Budget(NamedTuple):
    """Memory of one GPU: cache = share − weights − activation − overhead.

    Attributes:
        share: Bytes that the process may use.
        excludes_activations: Whether activation and overhead are outside the share (SGLang). They
            are then not subtracted from the share.
    """

    memory: Any
    share: Any
    weights: int
    activation: Any
    overhead: Any
    excludes_activations: bool = False

    @property
    def cache(self) -> Any:
        """Return the bytes of the KV cache; negative if weights and the rest exceed the share."""
        working = 0 if self.excludes_activations else self.activation + self.overhead
        return self.share - self.weights - working

    @property
    def weights_fit(self) -> bool:
        """Return whether the share is at least the weights."""
        return bool(self.weights <= self.share)


def budget(
    memory: Any,
    utilization: Any,
    terms: MemoryBreakdown,
    basis: str = "total",
    excludes_activations: bool = False,
) -> Budget:
    """Return the budget of one GPU in bytes, or of an array of GPUs.

    With the basis "total", the share is ⌈memory · utilization⌉ (vLLM), and at most memory −
    startup. With "free", it is ⌊(memory − startup) · utilization⌋; startup is the memory in use
    before the weights load. With "remaining", it is all terms and ⌊rest · utilization⌋; rest is
    memory − startup − terms.

    Args:
        memory: Bytes of the GPU.
        terms: Bytes outside the cache.
        basis: Memory to which the share refers: total, free or remaining.
    """
    free = memory - terms.startup_bytes
    if basis == "total":
        share = minimum(rounded_up(memory * utilization), free)
    elif basis == "free":
        share = rounded_down(maximum(0, free) * utilization)
    else:
        used = terms.weights + (0 if excludes_activations else terms.working_bytes)
        rest = free - used
        share = used + minimum(rounded_down(rest * utilization), rest)  # all of a shortage
    overhead = sum(terms.overhead.values())
    return Budget(
        memory, share, terms.weights, terms.activation, overhead, excludes_activations
    )


def stated_memory(
    start: EngineStartup, estimate: str, has_graphs: bool = True
) -> MemoryBreakdown:
    """Return the bytes of memory outside the cache from weights, activations and documented
    constants, without a range.

    If the share refers to the total memory, it includes collectives, but not the CUDA context.
    """
    overhead = {"libraries": LIBRARY_BYTES}
    if has_graphs and not start.options.enforce_eager:
        overhead["CUDA graphs"] = GRAPH_BYTES
    startup = {"CUDA context": CONTEXT_BYTES}
    collectives = nonzero({"collectives": collective_bytes(start.ranks)})
    if start.utilization_basis == "total":
        overhead, startup = overhead | collectives, {}
    inputs = start.precision, start.ranks, start.tokens
    activation = by_number(
        start.prompts,
        lambda prompts: memoized(start.model, activation_peak, *inputs, prompts, start.stage),
    )
    startup = startup | collectives if startup else {}
    return MemoryBreakdown(start.stored_weights, start.extra, activation, overhead, startup)


def collective_bytes(ranks: Parallelism) -> int:
    """Return the bytes of the buffers of collectives; 0 on one GPU."""
    return COLLECTIVE_BYTES if ranks.gpus > 1 else 0


def nonzero(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that are not 0."""
    return {name: size for name, size in sizes.items() if is_any(size)}


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

    The peak has the inputs and outputs of the largest operator (the largest GEMM for experts), and
    the residual stream. Allocators and workspaces of an engine need more, so prefer a measured
    figure.
    """
    sequences = max(1, min(sequences, tokens))
    length, num_longer = divmod(tokens, sequences)
    groups = [Sequences((sequences - num_longer) * ranks.dp, length, 0)]
    if num_longer:
        groups.append(Sequences(num_longer * ranks.dp, length + 1, 0))
    batch = Batch(tuple(groups))
    peak = 0
    for operator in forward(
        model, batch, precision, ranks, stage=stage if ranks.pp > 1 else None
    ):
        is_experts = operator.kind == "experts"
        costs = [cost for _, cost in operator.parts] if is_experts else [operator.cost]
        peak = max([peak, *(int(cost.activation_bytes) for cost in costs)])
    return peak + tokens * model.hidden_size * formats_of(model, precision).element_bytes


def mtp_weights(model: Model, formats: Formats, ranks: Parallelism) -> int:
    """Return the bytes of the multi-token-prediction layers on one rank.

    Each prediction layer has a decoder layer, a projection [2·D, D] that is not sharded, and three
    norms. Embedding and head are the model's own.

    Raises:
        UserError: The model has no such layers.
    """
    if not model.mtp:
        raise UserError(f"{model.name} has no multi-token-prediction layers")
    kind, width = model.mtp.kind, model.hidden_size
    # attention and network may both have a matrix named gate
    weights = [(f"{kind}.{w.name}", w.local(ranks)) for w in model.layer_weights(kind)]
    weights.append(("mtp.projection", matrix("projection", 2 * width, width)))
    weights.append(("mtp.norms", vector("norms", 3 * NORM_VECTORS[model.norm] * width)))
    sizes = (formats.weight_bytes(name, weight) for name, weight in weights)
    return model.mtp.layers * sum(sizes)


def draft_weights(draft: Model, precision: Precision, ranks: Parallelism) -> int:
    """Return the weight bytes of a draft model on one rank of the last stage, sharded as its
    target."""
    ep = ranks.stage_gpus if ranks.ep > 1 else 1
    return weight_bytes(draft, precision, Parallelism(ranks.tp, 1, ranks.dp, ep))


Correction = Annotated[int, msgspec.Meta(ge=-MAX_BYTES, le=MAX_BYTES)]


class LogCorrections(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections for one GPU, from a start-up log.

    Attributes:
        weights_beyond_bytes: Logged bytes minus predicted bytes. The difference applies only to a
            start of the logged model with the logged formats and ranks.
        beside_beyond_bytes: Logged minus predicted bytes of activation and overhead.
        others_bytes: Memory of other processes.
    """

    engine: str
    gpu: str
    memory_bytes: Correction
    model: str
    parameters: int
    weights_in: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    version: str = ""
    weights_beyond_bytes: Correction = 0
    beside_beyond_bytes: Correction = 0
    others_bytes: Correction = 0

    def apply(self, terms: MemoryBreakdown, start: EngineStartup) -> MemoryBreakdown:
        """Return an engine's terms with the corrections; never below 0.

        A model with as many parameters as the logged model is taken for the logged model, whatever
        its file is called.
        """
        is_same = (
            self.parameters == start.model.parameters
            and self.weights_in == start.formats.weights_label
            and self.tensor_parallel_size == start.ranks.tp
            and self.pipeline_parallel_size == start.ranks.pp
        )
        correction = maximum(-terms.working_bytes, self.beside_beyond_bytes)
        return terms._replace(
            language=max(0, terms.language + self.weights_beyond_bytes * is_same),
            overhead=terms.overhead | nonzero({"beyond the rules, as logged": correction}),
        )

    def text(self) -> str:
        """Return the file that `read_learned` reads."""
        lines = ["# Corrections from one start-up: bytes of one GPU, logged minus predicted."]
        for name, value in msgspec.structs.asdict(self).items():
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")  # JSON is YAML
        return "\n".join([*lines, ""])


def read_learned(path: str) -> LogCorrections:
    """Read the file of `diagnose --save`. Raises UserError if the file has another content."""
    data, _ = parse_yaml(read_text(Path(path), MAX_YAML_BYTES), path)
    try:
        return msgspec.convert(data, LogCorrections)
    except msgspec.ValidationError as error:
        raise UserError(f"is not what diagnose --save writes: {error}", where=path) from None


def replicated_data(
    model: Model, formats: Formats, ranks: Parallelism
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weights and cache rows of which several GPUs of a pipeline stage store a full
    copy.

    With decode-context parallelism, each GPU stores the rows of other tokens, so there are fewer
    copies of a row.

    Returns:
        Bytes on one GPU of each replicated weight, by name. Number of GPUs that store the same row,
        by the role of the row.
    """
    weights: dict[str, int] = {}
    for name, weight, count in model.walk() if ranks.tp > 1 else ():
        local = weight.local(ranks)
        # a padded vocabulary has fewer copies
        if local.elements * ranks.tp >= 2 * weight.elements and not weight.expert:
            short = name.rpartition(".")[2]
            weights[short] = weights.get(short, 0) + count * formats.weight_bytes(name, local)
    copies: dict[str, int] = {}
    for layer in model.kinds.values():
        for entry in () if layer.shares_cache else layer.entries:
            is_spread = entry.grows and not entry.limit
            num_ranks = ranks.tp // (ranks.dcp if is_spread else 1)
            count = ranks.share(entry.heads) * num_ranks // entry.heads
            if count > 1 and not entry.is_stored_by_other_layer:
                copies[entry.role] = max(count, copies.get(entry.role, 0))
    return weights, copies


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
