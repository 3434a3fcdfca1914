"""From a GPU's memory to the KV cache budget: share − weights − activation − overhead.

No rule here depends on an engine's pages. The module also has corrections from a start-up log, and
the weights that several GPUs store in full.
"""

import json
from collections import Counter
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


SizesByName = dict[str, int]  # bytes


class EngineStartup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The state of one GPU when the engine starts, which determines its memory outside the cache.

    Attributes:
        model: The model.
        precision: Formats of weights, activations and cache.
        ranks: The parallelism.
        gpu: GPU model.
        stage: Index of the GPU's pipeline stage.
        utilization_basis: Memory to which the engine's share refers: "total"; "free", without the
            memory in use before the weights load; or "remaining", the memory that all other parts
            leave.
        tokens: Maximum tokens of one forward pass.
        sequences: Maximum sequences of one data-parallel (dp) rank in a forward pass: max_num_seqs,
            but at most `tokens`. An int or an integer array.
        options: The `FitOptions` of the request.
        prompts: Sequences of one dp rank that must fit; an int or an integer array.
        release: The rules of the engine's version, in a class of this engine. None if the engine
            has no versions.
        cpu_experts: Number of first layers whose experts llama.cpp leaves in host memory.
        context: Tokens that one llama.cpp cache stores: of one slot, or of all slots if they share
            a cache. An int or an integer array; 0 for other engines.
        extra: Bytes of draft and prediction layers on this GPU, by name: "draft weights" or
            "MTP weights".
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
    extra: SizesByName = {}

    @cached_property
    def formats(self) -> Formats:
        return formats_of(self.model, self.precision)

    @cached_property
    def layers(self) -> Stage:
        """Return the GPU's pipeline stage, with its number of layers of each kind.

        It also tells whether the stage is the first or the last.
        """
        return stages(self.model, self.ranks.pp)[self.stage]

    @cached_property
    def vision(self) -> Vision | None:
        """Return the vision tower for images of the requested size; None if the model has none.

        Its numbers of patches and tokens are for one such image.
        """
        tower = self.model.vision
        if not tower:
            return None
        tokens = tower.image_tokens(*self.options.image_size)
        patches = max(1, tower.patches * tokens // tower.tokens)
        return replace(tower, tokens=tokens, patches=patches)

    @property
    def stored_weights(self) -> int:
        """Return the bytes of the model's own weights on one GPU, in the formats of the checkpoint.

        Draft and prediction layers do not count, nor padding and copies that an engine makes when
        it loads the weights.
        """
        return stage_weight_bytes(self.model, self.layers, self.formats, self.ranks)


class MemoryBreakdown(NamedTuple):
    """Bytes of one GPU outside its KV cache, by their use.

    Fields of type Any are ints, or integer arrays with one element per evaluated case.

    Attributes:
        language: The model's own weights, in the formats of the checkpoint.
        extra: Other bytes loaded with the weights, by name, such as "vision tower".
        activation: Peak of a forward pass.
        overhead: Other memory of the engine, by name, such as "CUDA graphs".
        startup: Memory in use before the engine measures the free memory, by name, such as "CUDA
            context".
        margin: Safety margin of the estimate, as a share of the GPU's memory. It is subtracted from
            the KV cache budget; for the high estimate it is negative.
        peak: Name of the start-up step that reaches `activation`, such as "sampler"; "" if unknown.
        host: Bytes of weights in host memory. No other field includes them.
    """

    language: int
    extra: SizesByName
    activation: Any
    overhead: dict[str, Any]
    startup: SizesByName = {}
    margin: float = 0.0
    peak: str = ""
    host: int = 0

    @property
    def extra_bytes(self) -> int:
        return sum(self.extra.values())

    @property
    def weights(self) -> int:
        """Return all bytes that are loaded on the GPU as weights: `language` and `extra`."""
        return self.language + self.extra_bytes

    @property
    def startup_bytes(self) -> int:
        """Return the bytes in use on the GPU before the engine measures the free memory."""
        return sum(self.startup.values())

    @property
    def working_bytes(self) -> Any:
        """Return the bytes of activations and other memory of the engine, such as CUDA graphs.

        The result is an int, or an integer array.
        """
        return self.activation + sum(self.overhead.values())


class Budget(NamedTuple):
    """How the memory of one GPU is divided: KV cache = share − weights − activation − overhead.

    All fields are bytes, except the last. Fields of type Any are ints, or integer arrays with one
    element per evaluated case.

    Attributes:
        memory: Memory of the GPU.
        share: Memory that the engine's process may use.
        weights: All loaded weights.
        activation: Peak of a forward pass.
        overhead: Other memory of the engine, such as CUDA graphs.
        excludes_activations: Whether activation and overhead are outside the share, as in SGLang.
            They are then not subtracted.
    """

    memory: Any
    share: Any
    weights: int
    activation: Any
    overhead: Any
    excludes_activations: bool = False

    @property
    def cache(self) -> Any:
        """Return the bytes of one GPU for the KV cache: share − weights − activation − overhead.

        The result is negative if weights and other memory exceed the engine's share.
        """
        working = 0 if self.excludes_activations else self.activation + self.overhead
        return self.share - self.weights - working

    @property
    def weights_fit(self) -> bool:
        """Return whether one GPU's weights alone fit in the memory that the engine may use."""
        return bool(self.weights <= self.share)


def budget(
    memory: Any,
    utilization: Any,
    terms: MemoryBreakdown,
    basis: str = "total",
    excludes_activations: bool = False,
) -> Budget:
    """Return how the memory of one GPU is divided, in bytes. Arrays of memories give arrays.

    The share of the memory that the process may use depends on the basis:

    - "total" (vLLM): ⌈memory · utilization⌉, but at most memory − startup.
    - "free" (SGLang): ⌊(memory − startup) · utilization⌋.
    - "remaining" (TensorRT-LLM): the bytes of `terms`, plus ⌊rest · utilization⌋ for the cache. The
      rest is memory − startup − terms.

    startup is the memory in use before the weights load, such as the CUDA context.

    Args:
        memory: Bytes of GPU memory; an int or an integer array.
        utilization: Fraction of the memory that the engine may use, from 0 to 1.
        terms: Bytes outside the KV cache.
        basis: Memory to which the utilization refers: "total", "free" or "remaining".
        excludes_activations: Whether activation and overhead are outside the share. They then do
            not reduce the KV cache.
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
    """Return the bytes of one GPU outside the KV cache, from documented constants.

    Engines without their own rule use this function as `Engine.memory`; others refine its result.
    Weights and activations of a forward pass are computed. Libraries, CUDA graphs, CUDA context and
    the buffers of collectives are constants. If the engine's memory share (such as
    `gpu_memory_utilization`) is a share of the GPU's total memory, the CUDA context is left out,
    because the engine does not count it in its share.

    Args:
        start: The GPU when the engine starts.
        estimate: Ignored: the result is the same for "low", "middle" and "high".
        has_graphs: Whether the engine captures CUDA graphs.
    """
    overhead = {"libraries": LIBRARY_BYTES}
    if has_graphs and not start.options.enforce_eager:
        overhead["CUDA graphs"] = GRAPH_BYTES
    collectives = nonzero({"collectives": collective_bytes(start.ranks)})
    startup = {"CUDA context": CONTEXT_BYTES} | collectives
    if start.utilization_basis == "total":
        overhead, startup = overhead | collectives, {}
    inputs = start.precision, start.ranks, start.tokens
    activation = by_number(
        start.prompts,
        lambda prompts: memoized(start.model, activation_peak, *inputs, prompts, start.stage),
    )
    return MemoryBreakdown(start.stored_weights, start.extra, activation, overhead, startup)


def collective_bytes(ranks: Parallelism) -> int:
    """Return the bytes per GPU of the buffers of collectives (NCCL): 2 GiB, or 0 on one GPU."""
    return COLLECTIVE_BYTES if ranks.gpus > 1 else 0


def nonzero(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the named sizes that are not 0. An array stays if any element is not 0."""
    return {name: size for name, size in sizes.items() if is_any(size)}


def activation_peak(
    model: Model,
    precision: Precision,
    ranks: Parallelism,
    tokens: int,
    sequences: int = 1,
    stage: int = 0,
) -> int:
    """Return the peak activation bytes of one GPU in a prefill.

    The peak is the inputs and outputs of the largest operator, plus the residual stream. For
    experts, the largest GEMM counts instead of the operator. Allocators and workspaces of an engine
    need more, so a measured size is better if there is one.

    Args:
        model: The model.
        precision: Formats of weights and activations.
        ranks: The parallelism.
        tokens: Tokens of the prefill on one data-parallel rank.
        sequences: Prompts on one data-parallel rank, among which these tokens are divided equally.
        stage: Index of the pipeline stage.
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
    """Return the bytes of all multi-token-prediction (MTP) layers on one GPU.

    Each prediction layer has a decoder layer, a projection [2·D, D] and three norms. D is the
    hidden size. The projection is not sharded. Embedding and LM head are the model's own and do not
    count.

    Args:
        model: The model.
        formats: Formats of the weights.
        ranks: The parallelism.

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
    return model.mtp.layers * sum(
        formats.weight_bytes(name, weight) for name, weight in weights
    )


def draft_weights(draft: Model, precision: Precision, ranks: Parallelism) -> int:
    """Return the weight bytes of a draft model on one GPU of the last pipeline stage.

    The draft has the tensor parallelism of its target model. If the target spreads its experts, the
    draft spreads its experts over all GPUs of the stage.

    Args:
        draft: The draft model.
        precision: Formats of the draft's weights.
        ranks: The parallelism of the target model.
    """
    ep = ranks.stage_gpus if ranks.ep > 1 else 1
    return weight_bytes(draft, precision, Parallelism(ranks.tp, 1, ranks.dp, ep))


Correction = Annotated[int, msgspec.Meta(ge=-MAX_BYTES, le=MAX_BYTES)]


class LogCorrections(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections to the predicted memory of one GPU, from an engine's start-up log.

    `diagnose --save` writes them to a file, and `fit --from-log` applies them.

    Attributes:
        engine: Name of the logged engine.
        gpu: Name of the logged GPU model.
        memory_bytes: Total memory of the GPU in the log.
        model: Name of the logged model.
        parameters: Number of the model's parameters, by which the model is recognized.
        weights_in: Label of the weight format, such as "fp8".
        tensor_parallel_size: Tensor-parallel ranks of the logged start.
        pipeline_parallel_size: Pipeline stages of the logged start.
        version: The engine's version in the log; "" if not stated.
        weights_beyond_bytes: Logged minus predicted bytes of the weights. The difference applies
            only to the logged model with equal weight format and ranks.
        beside_beyond_bytes: Logged minus predicted bytes of activation and overhead together. For
            SGLang, predicted minus logged bytes of weights and cache.
        others_bytes: Memory of other processes on the GPU.
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
        """Return the predicted memory with the corrections of the log. No size becomes negative.

        The correction of the weights applies only if the number of parameters, the weight format,
        and the tensor- and pipeline-parallel sizes are those of the log. Names of models are not
        compared.

        Args:
            terms: The predicted bytes outside the KV cache.
            start: The GPU for which they were predicted.
        """
        is_same = (
            self.parameters == start.model.parameters
            and self.weights_in == start.formats.weights_label
            and self.tensor_parallel_size == start.ranks.tp
            and self.pipeline_parallel_size == start.ranks.pp
        )
        correction = maximum(-terms.working_bytes, self.beside_beyond_bytes)
        language = terms.language + self.weights_beyond_bytes * is_same
        if self.engine == "sglang":  # other memory does not reduce its cache
            language += self.beside_beyond_bytes
            correction = 0
        return terms._replace(
            language=max(0, language),
            overhead=terms.overhead | nonzero({"beyond the rules, as logged": correction}),
        )

    def text(self) -> str:
        """Return the corrections as text in YAML, which `read_learned` can parse from a file."""
        about = "# Corrections from one start-up: bytes of one GPU, logged minus predicted."
        lines = [
            f"{name}: {json.dumps(value, ensure_ascii=False)}"  # JSON is YAML
            for name, value in msgspec.structs.asdict(self).items()
        ]
        return "\n".join([about, *lines, ""])


def read_learned(path: str) -> LogCorrections:
    """Parse the YAML file of memory corrections that `diagnose --save` writes.

    Raises:
        UserError: The file has another content.
    """
    data, _ = parse_yaml(read_text(Path(path), MAX_YAML_BYTES), path)
    try:
        return msgspec.convert(data, LogCorrections)
    except msgspec.ValidationError as error:
        raise UserError(f"is not what diagnose --save writes: {error}", where=path) from None


def replicated_data(
    model: Model, formats: Formats, ranks: Parallelism
) -> tuple[SizesByName, dict[str, int]]:
    """Return the weights and cached rows of which several GPUs of a stage store a full copy.

    An example is a KV head if there are fewer KV heads than tensor-parallel ranks. With
    decode-context parallelism, the GPUs store the rows of different tokens, so a row has fewer
    copies.

    Args:
        model: The model.
        formats: Formats of the weights.
        ranks: The parallelism.

    Returns:
        Two dicts. The first is the bytes on one GPU of each replicated weight, by its name. The
        second is the number of GPUs that store the same cached row, by the row's role, such as "k"
        or "latent"; roles without copies are left out.
    """
    weights = Counter[str]()
    for name, weight, count in model.walk() if ranks.tp > 1 else ():
        local = weight.local(ranks)
        # a padded vocabulary has fewer copies
        if local.elements * ranks.tp >= 2 * weight.elements and not weight.expert:
            short = name.rpartition(".")[2]
            weights[short] += count * formats.weight_bytes(name, local)
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
    """Return the bytes of one GPU's weights that vLLM's --cpu-offload-gb moves to host memory.

    vLLM moves only weights of layers. Embedding and LM head stay on the GPU (vLLM,
    model_executor/models/utils.py, make_layers).

    Args:
        model: The model.
        formats: Formats of the weights.
        ranks: The parallelism.
        stage: Index of the pipeline stage.
        gib: Value of --cpu-offload-gb in GiB per GPU, which is the maximum of the result; 0 moves
            nothing.
    """
    if not gib:
        return 0
    layers = stage_weight_bytes(
        model, stages(model, ranks.pp)[stage], formats, ranks, only_layers=True
    )
    return min(layers, round(gib * GIB))
