"""The memory that vLLM allocates outside its cache: the peak of its profile run, and later buffers.

The profile runs one pass of max_num_batched_tokens, then a sample for max_num_seqs dummy requests.
T is the tokens of a pass, n the requests (never more than T), V the vocabulary, D the hidden size,
e the bytes of an activation.

`Available KV cache memory` = ⌈total · utilization⌉ − the sum of all terms, on the pipeline stage
with the least (gpu_worker.py: determine_available_memory). The middle of the range is a first start
with the sampler of the documentation. The ends add the known differences between starts, and a
margin.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple

from kvcalc.arithmetic import at_least, by_number, doublings, floor_div, maximum, minimum
from kvcalc.capacity.engines.vllm_versions import Release, has_states, takes_runner_v2
from kvcalc.capacity.engines.vllm_weights import (
    LOGITS_BYTES,
    attention_peak,
    compressed_attention,
    is_data_centre_blackwell,
    weights,
)
from kvcalc.capacity.memory_budget import GIB, MIB, EngineStartup, MemoryBreakdown, nonzero
from kvcalc.layers.attention import Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.weights import Formats, WeightKind
from kvcalc.model.model import Model, kept
from kvcalc.model.pipeline import stages
from kvcalc.storage.quantization import WeightFormat, family

WAITING = 3.8  # residual streams that stay with a layer's widest part: fitted on one log of two
# bytes of the sampler per request and entry of the vocabulary
SORT, SORT_FEW, KERNEL = 38, 50, 14
MLA_WORKSPACE = 65536  # tokens (attention/backends/mla/common.py, 0.11)
L2_BYTES = 50 * MIB
# first release that runs experts with DeepGEMM, and first release without
DEEP_GEMM = (0, 11, 0), (0, 17, 0)
SHARED_WORKSPACE = (0, 14, 0)  # first release in which the workspace of experts stays
MAX_IMAGES = 999  # in a prompt without a limit (config/multimodal.py)
# bytes per 8 requests and entry of the vocabulary: counts in int32, a bit mask
# (gpu/sample/penalties.py, 0.28)
PENALTIES = 33
SMS = 128  # if the GPU's preset has no number
# part of the memory, at the low end, for models that compress tokens: the source shows 6.7 of
# 10.1 GiB
UNSEEN = 0.03


class Constants(NamedTuple):
    """Constants without a source, fitted on published start-ups (docs/reference/vllm-startups.md),
    for one end of the range. In GiB unless stated.

    Attributes:
        libraries: Memory of libraries outside torch.
        states: Added for models with recurrent states.
        collectives: Buffers of 1, 2, 4 and 8 GPUs.
        pcie: Share of them if no link joins the GPUs.
        graphs, per_width: Estimate of CUDA graphs, and its part per 1024 of D/tp.
        per_layer: MiB of a captured graph per layer, in the first runner, if that is above one.
        margin: Share of the GPU's memory beyond all terms.
    """

    libraries: float = 0.13
    states: float = 0.35
    collectives: tuple[float, float, float, float] = (0.0, 0.42, 1.2, 1.7)
    pcie: float = 0.5
    graphs: float = 0.07
    per_width: float = 0.11
    per_layer: float = 0.0
    margin: float = 0.0


CONSTANTS = {
    "low": Constants(
        libraries=0.25,
        collectives=(0.0, 0.63, 1.8, 2.55),
        pcie=0.8,
        graphs=0.22,
        per_layer=0.25,
        margin=0.02,
    ),
    "middle": Constants(),
    "high": Constants(
        libraries=0.02,
        collectives=(0.0, 0.252, 0.72, 1.02),
        pcie=0.0,
        graphs=0.0,
        margin=-0.015,
    ),
}


def memory(start: EngineStartup, estimate: str) -> MemoryBreakdown:
    """Return the memory of one stage outside the cache, for one estimate of the range.

    The low end has more of each constant. The high end has less, a compilation cache, and
    FlashInfer's sampler.
    """
    constants, is_best = CONSTANTS[estimate], estimate == "high"
    activation, step = peak(start, has_kernels=is_best, is_first_start=not is_best)
    num_gpus = start.ranks.tp * start.ranks.pp  # that exchange activations
    collectives = constants.collectives[min(3, doublings(num_gpus))] * GIB
    if not start.gpu.link_bytes_per_s:
        collectives *= constants.pcie
    libraries = constants.libraries + constants.states * kept(start.model, has_states)
    overhead = {
        "libraries": int(libraries * GIB),
        "collectives": int(collectives),
        "sampler's buffers": sampler_buffers(start),
        "CUDA graphs": graphs(start, constants),
    }
    language, extra, host = weights(start)
    is_uncertain = estimate == "low" and compressed_attention(start)
    return MemoryBreakdown(
        language=language,
        extra=extra,
        activation=activation,
        overhead=nonzero(overhead),
        margin=constants.margin + (UNSEEN if is_uncertain else 0),
        peak=step,
        host=host,
    )


def memory_key(start: EngineStartup) -> object:
    """Return the GPU properties that affect `memory`.

    The number of SMs and the size of the L2 cache count only if the sampler or the compiler sizes a
    buffer by them.
    """
    gpu = start.gpu
    return (
        gpu.architecture == "Hopper",
        is_data_centre_blackwell(start),
        bool(gpu.link_bytes_per_s),
        start.release.sampler == "kernels" and not _has_runner_v2(start) and gpu.sms,
        _compiles(start) and gpu.l2_bytes,
    )


def _has_runner_v2(start: EngineStartup) -> bool:
    return takes_runner_v2(start.release, start.model, start.formats)


def _is_large(start: EngineStartup) -> bool:
    """Return whether the GPU is a Hopper or a data-centre Blackwell."""
    return start.gpu.architecture == "Hopper" or is_data_centre_blackwell(start)


def peak(
    start: EngineStartup, has_kernels: bool = False, is_first_start: bool = True
) -> tuple[Any, str]:
    """Return the peak in bytes and the step that reaches it: the workspace of GEMMs, and the
    largest of four.

    Args:
        has_kernels: FlashInfer's kernels are installed, for releases that then use them.
        is_first_start: Nothing is compiled yet.
    """
    outputs, workspace = image_outputs(start), experts_workspace(start)
    steps = {
        "forward pass": forward(start, workspace) + outputs,
        "sampler": sample(start, has_kernels) + outputs + workspace if start.layers.last else 0,
        "vision encoder": encoder(start),
        "compilation": compilation(start) if is_first_start else 0,
    }
    largest: Any = 0
    name = ""
    for step, size in steps.items():
        if isinstance(size, int) and isinstance(largest, int) and size > largest:
            name = step
        largest = maximum(largest, size)
    # cuBLAS: torch's CUDABlas.cpp
    return (32 if _is_large(start) else 8) * MIB + largest, name


def sample(start: EngineStartup, has_kernels: bool = False) -> Any:
    """Return the bytes of the hidden states of T tokens, the logits of n requests, and the work of
    sampling.

    First runner: T·D·e + 2·n·D·e + n·V·b. b is 38 if fp32 logits are sorted (50 from 2 to 127
    requests), 14 if kernels need no sort (gpu_model_runner.py: _dummy_sampler_run, 0.11). Second
    runner: T·D·e + n·V·b, b by release.
    """
    rules, model, count = start.release, start.model, start.sequences
    row = model.hidden_size * start.formats.element_bytes
    if _has_runner_v2(start):
        return start.tokens * row + count * model.vocab_size * rules.sampler_v2
    logit: Any = KERNEL
    if rules.sampler == "sort" or (rules.sampler == "flashinfer" and not has_kernels):
        logit = SORT + (at_least(count, 2) - at_least(count, 128)) * (SORT_FEW - SORT)
    return (start.tokens + 2 * count) * row + count * model.vocab_size * logit


def forward(start: EngineStartup, workspace: int) -> int:
    """Return T·e·(widest part + 3.8·D), and the projections of latent attention: 65,536 · heads/tp
    · (nope + v) · 2.

    An indexer's logits replace the projections if they are larger (layers/sparse_attn_indexer.py,
    0.22). A model that compresses tokens has the peak of its attention instead. The experts'
    workspace adds to it if it stays from the first layer on.
    """
    if compressed_peak := attention_peak(start):
        return compressed_peak + workspace
    model = start.model
    experts, widest = _part_widths(start)
    if not workspace:
        widest = max(widest, experts)
    latent = 2 * MLA_WORKSPACE * kept(model, latent_width, start.ranks)
    if start.release.since >= (0, 22, 0) and kept(model, has_indexer):
        latent = max(latent, LOGITS_BYTES)
    elements = start.tokens * (widest + WAITING * model.hidden_size)
    return int(elements * start.formats.element_bytes) + latent + workspace


def has_indexer(model: Model) -> bool:
    """Return whether an indexer selects cached tokens."""
    return any(e.role == "index_key" for layer in model.kinds.values() for e in layer.entries)


def latent_width(model: Model, ranks: Parallelism) -> int:
    """Return the elements per token that the widest latent attention projects on one rank."""
    widths = [
        ranks.share(part.num_attention_heads) * (part.qk_nope_head_dim + part.v_head_dim)
        for layer in model.kinds.values()
        for part in layer.parts
        if isinstance(part, Latent)
    ]
    return max(widths, default=0)


def expert_formats(model: Model, formats: Formats) -> list[WeightFormat]:
    """Return the formats of all matrices of experts."""
    return [formats.weight_format(n, weight) for n, weight, _ in model.walk() if weight.expert]


def experts_workspace(start: EngineStartup) -> int:
    """Return the bytes of the experts' workspace if it stays from the first layer on, also during
    the sample; else 0.

    T·e·rows·(max(2·I, D) + max(I, D)). It stays for experts in 8 or 16 bits from 0.14 on, and for
    DeepSeek-V4's (v1/worker/workspace.py). The rows that a prefill of very long sequences gathers
    there do not count. Kernels of 4 bits mostly allocate their own (fused_moe/modular_kernel.py).
    """
    stored_formats = kept(start.model, expert_formats, start.formats)
    is_old = start.release.since < SHARED_WORKSPACE
    if not compressed_attention(start) and (is_old or any(f.bits < 8 for f in stored_formats)):
        return 0
    return int(start.tokens * _part_widths(start)[0] * start.formats.element_bytes)


def _part_widths(start: EngineStartup) -> tuple[float, float]:
    """Return `part_widths` of a stage.

    DeepGEMM runs block-wise fp8 experts on Hopper and data-centre Blackwell from 0.11 to 0.16
    (fused_moe/deep_gemm_moe.py). Then Triton and FlashInfer come first (fused_moe/oracle/fp8.py,
    0.17.1).
    """
    first, end = DEEP_GEMM
    is_deep_gemm = (
        first <= start.release.since < end
        and _is_large(start)
        and any(
            family(stored_format.name) == "fp8_block128"
            for stored_format in kept(start.model, expert_formats, start.formats)
        )
    )
    tokens = start.tokens if is_deep_gemm else 0
    return kept(start.model, part_widths, start.ranks, start.stage, tokens)


def part_widths(
    model: Model, ranks: Parallelism, stage: int, padded_tokens: int
) -> tuple[float, float]:
    """Return elements per token on one rank, for the experts' two workspaces in the stage's widest
    layer and for the widest other part.

    Workspaces have rows·(max(2·I, D) + max(I, D)). Rows are top-k. A gated FFN has 3·I elements,
    another 2·I, attention the sum of its projections.

    Args:
        padded_tokens: Tokens whose rows DeepGEMM pads to 128 per expert; 0 for other kernels.
    """
    experts, other = 0.0, 0.0
    for kind, count in stages(model, ranks.pp)[stage].counts.items():
        layer = model.kinds[kind]
        for part in (*layer.parts, *layer.shared) if count else ():
            local = {w.name: w.local(ranks) for w in part.weights(model.hidden_size)}
            if up := local.get("experts.up"):
                padding = up.copies * 127 / padded_tokens if padded_tokens else 0
                hidden = up.outputs * (2 if "experts.gate" in local else 1)
                row = max(hidden, up.inputs) + max(up.outputs, up.inputs)
                experts = max(experts, (up.active + padding) * row)
                width = 3 * local["shared.up"].outputs if "shared.up" in local else 0
            elif up := local.get("up"):
                width = up.outputs * (3 if "gate" in local else 2)
            else:
                matrices = (w for w in local.values() if w.kind is WeightKind.MATRIX)
                width = sum(w.outputs for w in matrices if not w.rows_in)
            other = max(other, width)
    return experts, other


def _images(start: EngineStartup) -> Any:
    """Return the images of the largest size in one batch of the encoder.

    The encoder's token budget and the images of n requests limit it
    (v1/worker/gpu_model_runner.py: profile_run, 0.8.5; multimodal/encoder_budget.py, 0.28).
    """
    vision = start.model.vision
    if not vision or start.stage or start.images == 0:
        return 0
    requested = start.sequences * (start.images or MAX_IMAGES)
    return maximum(1, minimum(max(start.tokens, vision.tokens) // vision.tokens, requested))


def image_outputs(start: EngineStartup) -> Any:
    """Return the bytes that stay after the encoder's run: its outputs and the pixels."""
    vision = start.model.vision
    if not vision:
        return 0
    outputs = vision.tokens * start.model.hidden_size * start.formats.element_bytes
    return _images(start) * (outputs + 2 * vision.patches * vision.values)


def encoder(start: EngineStartup) -> Any:
    """Return the bytes of the encoder's run: pixels, and per patch four streams of the tower's
    width and two of its MLP's share, in 2 bytes."""
    vision = start.model.vision
    if not vision:
        return 0
    mlp = 2 * vision.mlp // (start.ranks.tp if vision.sharded else 1)
    return 2 * _images(start) * vision.patches * (vision.values + 4 * vision.width + mlp)


def _compiles(start: EngineStartup) -> bool:
    """Return whether the compilation of a first start takes memory on this stage."""
    is_excluded = start.eager or start.stage or start.model.vision
    return bool(start.release.combo_kernels and not is_excluded)


def compilation(start: EngineStartup) -> Any:
    """Return the bytes that torch 2.9 takes to time kernels in a first start.

    They are a copy of the token table, scratch of the size of the L2 cache, and the input of the
    pass. This is inferred from pairs of starts. It needs an empty compilation cache and a model
    without a vision tower.
    """
    if not _compiles(start):
        return 0
    model = start.model
    table = (model.embedding_size or model.hidden_size) * start.ranks.share(model.vocab_size)
    elements: int = table + start.tokens * model.hidden_size
    return elements * start.formats.element_bytes + (start.gpu.l2_bytes or L2_BYTES)


def sampler_buffers(start: EngineStartup) -> Any:
    """Return the bytes that the dummy sample leaves.

    First runner from 0.17 on: Triton's buffer of min(2^⌈log2 min(SMs, n)⌉, SMs) · V · 4
    (v1/sample/ops/topk_topp_triton.py). Second runner: tables of penalties, in releases that count
    all consumed memory.
    """
    rules: Release = start.release
    vocabulary, sms = start.model.vocab_size, start.gpu.sms or SMS
    if not start.layers.last:
        return 0
    if _has_runner_v2(start):
        entries = start.sequences * vocabulary
        return floor_div(entries * PENALTIES, 8) if rules.counts_consumed else 0
    if rules.sampler != "kernels":
        return 0

    def num_programs(count: int) -> int:
        return min(1 << (max(1, min(sms, count)) - 1).bit_length(), sms)

    return by_number(start.sequences, num_programs) * vocabulary * 4


def graphs(start: EngineStartup, constants: Constants) -> Any:
    """Return the estimate of CUDA graphs that a release subtracts: 1 MiB per captured graph, and
    fitted constants.

    The first runner takes each graph for as large as the second that it tries, at least 1 MiB. It
    captures pieces as a pass without a cache, with an indexer's logits (gpu_model_runner.py:
    profile_cudagraph_memory, 0.22).
    """
    rules, is_v2 = start.release, _has_runner_v2(start)
    if start.eager or not (rules.graphs_v2 if is_v2 else rules.graphs_v1):
        return 0
    count = by_number(start.sequences, partial(count_graphs, start.tokens))
    width = start.model.hidden_size / 1024 / start.ranks.tp
    shared = int((constants.graphs + constants.per_width * width) * GIB)
    if is_v2:
        return count * MIB + shared
    graph = int(MIB * max(1, constants.per_layer * start.model.layers / start.ranks.pp))
    return count * graph + shared + LOGITS_BYTES * kept(start.model, has_indexer)


@lru_cache(1 << 14)
def count_graphs(tokens: int, sequences: int) -> int:
    """Return the number of captured graphs of an engine, by its tokens of a pass and its sequences.

    Sizes are 1, 2, 4, then by 8 below 256 and by 16 up to min(2·n, 512, T) (config/vllm.py:
    _set_cudagraph_sizes). Each is captured in pieces. Sizes up to n are captured as one graph too.
    """
    largest = min(2 * sequences, 512, tokens)
    sizes = [s for s in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if s <= largest]
    return len(sizes) + len([s for s in sizes if s <= sequences])


def warning(rules: Release, model: Model, formats: Formats, ranks: Parallelism) -> str:
    """Return a warning on releases that take every graph for as large as the second, with experts
    over data-parallel ranks (issue 45178); "" for other starts."""
    is_affected = rules.graphs_v1 and not takes_runner_v2(rules, model, formats)
    if not is_affected or ranks.dp == 1 or not kept(model, expert_formats, formats):
        return ""
    return (
        f"vLLM {'.'.join(map(str, rules.since[:2]))} may set tens of GiB aside for CUDA graphs "
        "with experts over dp ranks, not counted here; "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 stops it"
    )
