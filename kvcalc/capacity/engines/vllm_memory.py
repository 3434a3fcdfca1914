"""The memory that vLLM allocates outside its cache: the peak of its profile run, and later buffers.

The profile runs one pass of max_num_batched_tokens, then a sample for max_num_seqs dummy requests.
T is the number of tokens of a pass, n the number of requests (at most T), V the vocabulary size, D
the hidden size, e the bytes of an activation.

`Available KV cache memory` = ⌈total · utilization⌉ − the sum of all terms, on the pipeline stage
with the least (gpu_worker.py: determine_available_memory). The middle of the range is a first start
with the sampler of the documentation. The two ends of the range add the known differences between
starts, and a margin.

The first part has the bytes that vLLM loads on one GPU in addition to the language model as stored:
padding, rotary
tables, a vision tower, LoRA slots, and the buffers of models that compress tokens (DeepSeek-V4).

"Model loading took" in its log is torch's count of allocated bytes, so the rounding of its caching
allocator counts too. T is the tokens of a pass, D the hidden size, S the streams of the residual
(hc_mult · D), e the bytes of an element. Source of DeepSeek-V4's:
models/deepseek_v4/{attention,compressor}.py, nvidia/{model,flashmla}.py and
layers/sparse_attn_indexer.py of vLLM 0.22 and 0.31.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.arithmetic import at_least, by_number, doublings, floor_div, maximum, minimum
from kvcalc.capacity.engines.engine import rope_table_bytes, vision_tower_bytes
from kvcalc.capacity.engines.vllm_versions import (
    Release,
    has_states,
    listed_family,
    takes_runner_v2,
)
from kvcalc.capacity.memory_budget import (
    GIB,
    MIB,
    EngineStartup,
    MemoryBreakdown,
    SizesByName,
    nonzero,
)
from kvcalc.layers.attention import Compressed, Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.weights import Formats, Weight, WeightKind
from kvcalc.model.memory import checkpoint_share, walk_stage
from kvcalc.model.model import Model, memoized
from kvcalc.model.pipeline import stages
from kvcalc.storage.formats import first_words, read_table
from kvcalc.storage.quantization import WeightFormat

# that a pass without a cache keeps free for an indexer (envs.py: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
LOGITS_BYTES = 512 * MIB
# heads of a rank that the kernel takes (nvidia/flashmla.py: get_padded_num_q_heads)
PADDED_HEADS = (64, 128)
# before: the last streams are always stored for prediction layers; since then only with such layers
OPTIONAL_STREAMS = (0, 27, 0)
# torch: CUDACachingAllocator.cpp
ALLOCATION_STEP, SEGMENT_BYTES, LARGE_BYTES, SPLIT_BYTES = 512, 2 * MIB, 10 * MIB, MIB
# Matrices that vLLM stores as one tensor (models' packed_modules_mapping, fused_moe/layer.py), by
# the name of the first in the alphabet
FUSED_MATRICES = first_words("""
    k             q v
    gate          up
    shared.gate   shared.up
    experts.gate  experts.up
""")
# Share of int4 matrices that repacking leaves in the allocator; fitted, −0.7 to 2.2 % in starts
REPACKED_SHARE = 0.008
INT4 = ("awq", "gptq", "int4")
NGRAM_TABLES = ("ngram_table", "engram_table")
# multiples of (hidden, intermediate) width to which vLLM pads MXFP4 experts, except on Hopper
# (fused_moe/oracle/mxfp4.py)
MXFP4_UNITS = (256, 128)


class LoadedWeights(NamedTuple):
    """Bytes of one GPU's weights on a pipeline stage, as vLLM loads them.

    Attributes:
        allocated: Matrices and vectors, fused, and padded for kernels.
        int4: Matrices in int4 (AWQ, GPTQ, Marlin) without experts; already part of `allocated`.
            vLLM repacks them, and a small part of their bytes stays allocated in addition.
        absorbed: 16-bit copies of quantized kv_up matrices (MLA), for products in latent space. A
            matrix that is not quantized needs no copy. MiniCPM3 multiplies by kv_up directly.
            Source: process_weights_after_loading: W_UV, W_UK_T (v1/attention/backends/mla/common.py
            to 0.14, then attention/mla_attention.py).
        ngram_tables: Tables of hashed n-grams, which are in host memory.
    """

    allocated: int
    int4: int
    absorbed: int
    ngram_tables: int


def load_weights(
    model: Model, formats: Formats, ranks: Parallelism, stage: int, is_hopper: bool
) -> LoadedWeights:
    """Return the bytes of one GPU's weights on a pipeline stage, as vLLM loads them.

    They differ from the checkpoint: vLLM fuses and pads matrices, and copies some. It loads the
    scales of nf4 with quantized scales as fp32 (model_loader/bitsandbytes_loader.py:
    _dequantize_dq).

    Args:
        model: The model.
        formats: Formats of the weights.
        ranks: The parallelism.
        stage: Index of the pipeline stage.
        is_hopper: Whether the GPU is a Hopper, on which MXFP4 experts are padded for Triton.
    """
    part = stages(model, ranks.pp)[stage]
    vectors = checkpoint_share(model, model.uncounted_bytes, part, formats, ranks)
    int4 = absorbed = ngram_tables = 0
    tensors: dict[tuple[str, str], tuple[int, int]] = {}
    for name, weight, count in walk_stage(model, part):
        kind, _, short = name.partition(".")
        local, stored_format = weight.local(ranks), formats.weight_format(name, weight)
        size = formats.weight_bytes(name, local)
        if short and not weight.expert and stored_format.name.startswith(INT4):
            int4 += count * size
        if (
            weight.name == "kv_up"
            and model.model_type != "minicpm3"
            and stored_format.bits < 16
        ):
            absorbed += count * 2 * local.elements
        if short and weight.name in NGRAM_TABLES:
            ngram_tables += count * size
        if ".experts." in name and stored_format.name.startswith("mxfp4"):
            size = _padded_bytes(is_hopper, weight, local)
        elif stored_format.nested:
            plain = replace(stored_format, scale_bytes=4, nested=0)
            matrix = plain.matrix_bytes(local.inputs, local.outputs)
            size = local.copies * (matrix + local.bias * formats.vector_bytes)
        if weight.kind is WeightKind.VECTOR:
            vectors += count * size
        else:
            key = kind, FUSED_MATRICES.get(short, short)
            tensors[key] = count, tensors.get(key, (0, 0))[1] + size
    matrices = sum(count * allocated(size) for count, size in tensors.values())
    return LoadedWeights(vectors + matrices, int4, absorbed, ngram_tables)


def allocated(size: int) -> int:
    """Return the bytes that torch's caching allocator counts for a tensor of `size` bytes.
    The allocator rounds up to multiples of 512 bytes. From 10 MiB on, it takes segments of 2 MiB.
    It then also counts the rest of the last segment if this rest is at most 1 MiB. Example: 100
    bytes count as 512."""
    size = -(-size // ALLOCATION_STEP) * ALLOCATION_STEP
    segment = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
    return segment if size >= LARGE_BYTES and segment - size <= SPLIT_BYTES else size


def is_data_centre_blackwell(start: EngineStartup) -> bool:
    """Return whether the GPU is a Blackwell from 150 GiB on (B200), with more GEMM workspace."""
    return (
        start.gpu.architecture.startswith("Blackwell") and start.gpu.memory_bytes >= 150 * GIB
    )


def _padded_bytes(is_hopper: bool, weight: Weight, local: Weight) -> int:
    """Return the bytes of MXFP4 experts: 17 bytes for 32 values, biases in bf16.

    Triton's layout on Hopper pads values to 64 packed rows by 256 columns, scales to 256 columns,
    and stores biases in fp32. Gate and up are one matrix, so each counts half of it.
    """
    if is_hopper:
        halves = 1 if weight.rows_in else 2
        columns = -(-local.outputs * halves // 256) * 256 // halves
        rows = -(-local.inputs // 128) * 64 + -(-local.inputs // 32)
        return local.copies * (rows * columns + local.bias * 4)
    input_unit, output_unit = reversed(MXFP4_UNITS) if weight.rows_in else MXFP4_UNITS
    inputs = -(-local.inputs // input_unit) * input_unit
    outputs = -(-local.outputs // output_unit) * output_unit
    return local.copies * (inputs * outputs * 17 // 32 + (2 * outputs if local.bias else 0))


def weights(start: EngineStartup) -> tuple[int, SizesByName, int]:
    """Return the bytes of one GPU's weights, in three parts: own, added and host weights.

    Returns:
        The model's own weights on the GPU. Other bytes loaded on the GPU, by name, such as "LoRA
        slots". Weights in pinned host memory: tables of hashed n-grams (config/engram.py:
        cpu_offload).
    """
    model = start.model
    share = start.formats, start.ranks, start.stage
    loaded = memoized(model, load_weights, *share, start.gpu.architecture == "Hopper")
    # rotary tables of compressed attention are in fp32: one for layers that compress, one for
    # others
    parts = compressed_attention(start)
    widths = {bool(part.compress_ratio): part.qk_rope_head_dim for part in parts}
    compressed_tables = 4 * (model.max_context or 0) * sum(widths.values())
    extra = {
        "padding and rounding": loaded.allocated - start.stored_weights,
        "repacked matrices": int(REPACKED_SHARE * loaded.int4),
        "absorbed projections": loaded.absorbed,
        "rotary tables": compressed_tables or memoized(model, rope_table_bytes),
        "buffers of a pass": _pass_buffers(start),
        "vision tower": vision_tower_bytes(start),
        "LoRA slots": lora_slots(start),
        **start.extra,
    }
    return start.stored_weights - loaded.ngram_tables, nonzero(extra), loaded.ngram_tables


def compressed_attention(start: EngineStartup) -> list[Compressed]:
    """Return the attention sublayers of a stage whose model compresses tokens, one per layer kind.

    vLLM allocates buffers for them. The list is empty unless the model compresses the latents of
    several tokens into one row, as DeepSeek-V4. Its layers without compression are in the list too.
    """
    parts = [
        part
        for kind, count in start.layers.counts.items()
        for part in start.model.kinds[kind].parts
        if count and isinstance(part, Compressed)
    ]
    return parts if any(part.compress_ratio for part in parts) else []


def _pass_buffers(start: EngineStartup) -> int:
    """Return the bytes of buffers that vLLM allocates with the weights of a model that compresses
    tokens.

    T·index_topk·4 for the selected entries. The last stage adds T·S·e, which prediction layers
    read.
    """
    parts = compressed_attention(start)
    if not parts:
        return 0
    row = 4 * max(part.index_topk for part in parts)
    if start.layers.last and (
        start.release.since < OPTIONAL_STREAMS or "MTP weights" in start.extra
    ):
        row += memoized(start.model, residual_width) * start.formats.element_bytes
    return start.tokens * row


def residual_width(model: Model) -> int:
    """Return the elements of one token's residual: hidden size · number of residual streams.
    Most models have one stream. Models with hyper-connections, such as DeepSeek-V4, have
    several."""
    widths = (w.inputs for name, w, _ in model.walk() if name.endswith("_streams"))
    return max(widths, default=model.hidden_size)


def attention_peak(start: EngineStartup) -> int:
    """Return the peak bytes of one GPU around an attention that compresses tokens; otherwise 0.

    The peak, as in DeepSeek-V4, is the sum of these tensors for all tokens of the forward pass:

    - The residual streams and the layer's input.
    - The output and the queries, at the padded number of heads.
    - The projections, for compressors in fp32.
    - The larger of the unpadded queries, and an indexer's queries (also in fp8) with its logits.
    """
    peak, element = 0, start.formats.element_bytes
    for part in compressed_attention(start):
        heads = start.ranks.share(part.num_attention_heads)
        padded = next(n for n in (*PADDED_HEADS, heads) if n >= heads)
        index_dim = part.index_head_dim if part.index_topk else 0
        width = memoized(start.model, residual_width) + start.model.hidden_size
        width += (2 * padded + 1) * part.head_dim + part.q_lora_rank
        if part.compress_ratio:
            width += 4 * (2 if part.overlap else 1) * (part.head_dim + index_dim)
        queries = heads * part.head_dim * element * start.tokens
        index = part.index_n_heads * index_dim * (element + 1) * start.tokens
        index += LOGITS_BYTES if index_dim else 0
        peak = max(peak, width * element * start.tokens + max(queries, index))
    return peak


def lora_slots(start: EngineStartup) -> int:
    """Return the bytes of the slots for LoRA adapters on one GPU; 0 without adapters.

    Each matrix of a layer has slots · rank · (inputs + outputs) · 2 bytes, with slots = `max_loras`
    and rank = `max_lora_rank` (lora/layers/base_linear.py, 0.28). With vLLM, experts have slots too
    (lora/layers/fused_moe.py). In some models, token table and LM head also have slots, in full on
    every GPU: rank · (vocabulary size + hidden size) elements per slot
    (lora/layers/vocal_parallel_embedding.py, logits_processor.py, 0.28). Other engines have no
    slots for experts, token table and head.
    """
    if not start.options.max_loras:
        return 0
    model, elements = start.model, 0
    since = start.release.since if isinstance(start.release, Release) else ()
    for kind, count in start.layers.counts.items():
        for weight in model.layer_weights(kind):
            if weight.kind is WeightKind.MATRIX and (not weight.expert or since):
                local = weight.local(start.ranks)
                elements += count * local.copies * (local.inputs + local.outputs)
    family = listed_family(model)
    if (family in ("llama", "mistral") and since) or (family == "qwen3" and since >= (0, 22)):
        num_tables = start.layers.first + start.layers.last
        elements += num_tables * (model.vocab_size + model.hidden_size)
    slots: int = start.options.max_loras * start.options.max_lora_rank
    return 2 * slots * elements


# residual streams that stay with a layer's widest part: fitted on one log of two
WAITING_STREAMS = 3.8
# bytes of the sampler per request and entry of the vocabulary
SORT_BYTES, SMALL_SORT_BYTES, KERNEL_BYTES = 38, 50, 14
MLA_WORKSPACE = 65536  # tokens (attention/backends/mla/common.py, 0.11)
DEFAULT_L2_BYTES = 50 * MIB
MAX_IMAGES = 999  # in a prompt without a limit (config/multimodal.py)
# bytes per 8 requests and entry of the vocabulary: counts in int32, a bit mask
# (gpu/sample/penalties.py, 0.28)
PENALTY_BYTES = 33
DEFAULT_SMS = 128  # if the GPU's preset has no number
# part of the memory, at the low end, for models that compress tokens: the source shows 6.7 of
# 10.1 GiB
UNSEEN_SHARE = 0.03


class Constants(msgspec.Struct, frozen=True):
    """Fitted constants of one estimate of vLLM's memory per GPU. They are GiB unless stated.

    There is one set for each of the estimates "low", "middle" and "high". The constants have no
    source, but are fitted to published starts (docs/reference/vllm-startups.md).

    Attributes:
        name: The estimate.
        libraries: Memory of libraries outside torch's allocator.
        states: Added to `libraries` for models with recurrent states.
        two_gpus: Buffers of collectives on two GPUs.
        four_gpus: Buffers of collectives on four GPUs.
        eight_gpus: Buffers of collectives on eight GPUs.
        pcie: Share of the buffers of collectives that counts if no fast link joins the GPUs, from 0
            to 1.
        graphs: Constant part of the estimate of CUDA graphs.
        per_width: Part of the estimate of CUDA graphs per 1024 of hidden size ÷ tensor-parallel
            ranks.
        per_layer: MiB per layer of a captured graph in the first model runner; a graph has at least
            1 MiB.
        margin: Share of the GPU's memory that is subtracted from the KV cache in addition; negative
            in the high estimate.
    """

    name: str
    libraries: float
    states: float
    two_gpus: float
    four_gpus: float
    eight_gpus: float
    pcie: float
    graphs: float
    per_width: float
    per_layer: float
    margin: float


_CONSTANTS_TABLE = """
    name    libraries states two_gpus four_gpus eight_gpus pcie graphs per_width per_layer margin
    low     0.25      0.35   0.63     1.8       2.55       0.8  0.22   0.11      0.25      0.02
    middle  0.13      0.35   0.42     1.2       1.7        0.5  0.07   0.11      0         0
    high    0.02      0.35   0.252    0.72      1.02       0    0      0.11      0         -0.015
"""
CONSTANTS = read_table(_CONSTANTS_TABLE, Constants)


def memory(start: EngineStartup, estimate: str) -> MemoryBreakdown:
    """Return the bytes of one GPU that vLLM uses outside the KV cache.

    The low estimate of the KV cache budget assumes larger constants. The high estimate assumes
    smaller constants, a compilation cache from an earlier start, and FlashInfer's sampler.

    Args:
        start: The GPU when the engine starts.
        estimate: "low", "middle" or "high" estimate of the KV cache budget.
    """
    constants, is_best = CONSTANTS[estimate], estimate == "high"
    activation, step = peak(start, is_best)
    num_gpus = start.ranks.tp * start.ranks.pp  # that exchange activations
    buffers = 0, constants.two_gpus, constants.four_gpus, constants.eight_gpus
    collectives = buffers[min(3, doublings(num_gpus))] * GIB
    if not start.gpu.link_bytes_per_s:
        collectives *= constants.pcie
    libraries = constants.libraries + constants.states * memoized(start.model, has_states)
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
        margin=constants.margin + (UNSEEN_SHARE if is_uncertain else 0),
        peak=step,
        host=host,
    )


def memory_key(start: EngineStartup) -> object:
    """Return the GPU properties that affect `memory`. GPUs with equal keys have equal memory.

    The caller computes the memory once for such GPUs. The number of SMs counts only if the sampler
    sizes a buffer by it. The L2 size counts only if the compiler does.
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


def peak(start: EngineStartup, is_best: bool) -> tuple[Any, str]:
    """Return the peak bytes of one GPU in vLLM's profile run, and the step that reaches the peak.

    The peak is the workspace of GEMMs plus the largest of four steps: forward pass, sampler, vision
    encoder and compilation. If `start.sequences` is an array, the bytes are an array and the name
    of the step is not reliable.

    Args:
        start: The GPU when the engine starts.
        is_best: Whether FlashInfer's sampling kernels are installed, with which the sampler needs
            less memory in some releases, and compilation counts as 0 because an earlier start has
            filled its cache.
    """
    outputs, encoder = vision_peaks(start)
    workspace = experts_workspace(start)
    sampler = sampler_peak(start, is_best) + outputs + workspace if start.layers.last else 0
    steps = {
        "forward pass": forward_peak(start, workspace) + outputs,
        "sampler": sampler,
        "vision encoder": encoder,
        "compilation": 0 if is_best else compilation(start),
    }
    largest = 0
    name = ""
    for step, size in steps.items():
        if isinstance(size, int) and isinstance(largest, int) and size > largest:
            name = step
        largest = maximum(largest, size)
    # cuBLAS: torch's CUDABlas.cpp
    is_large = start.gpu.architecture == "Hopper" or is_data_centre_blackwell(start)
    return (32 if is_large else 8) * MIB + largest, name


def sampler_peak(start: EngineStartup, has_kernels: bool) -> Any:
    """Return the peak bytes of one GPU when the profile run samples for dummy requests.

    vLLM's first model runner needs T·D·e + 2·n·D·e + n·V·b (v1/worker/gpu_model_runner.py:
    _dummy_sampler_run, 0.11). The second (v1/worker/gpu/model_runner.py) needs T·D·e + n·V·b. T is
    the tokens of the pass, n the requests (an int or array), D the hidden size, V the vocabulary
    size and e the bytes of an activation. b depends on the release in the second runner. In the
    first, it is 38 bytes if fp32 logits are sorted (50 for 2 to 127 requests), 14 without a sort.

    Args:
        start: The GPU when the engine starts.
        has_kernels: Whether FlashInfer's kernels are installed. Some releases then do not sort.
    """
    rules, model, count = start.release, start.model, start.sequences
    row = model.hidden_size * start.formats.element_bytes
    if _has_runner_v2(start):
        return start.tokens * row + count * model.vocab_size * rules.sampler_v2
    logit: Any = KERNEL_BYTES
    if rules.sampler == "sort" or (rules.sampler == "flashinfer" and not has_kernels):
        is_small = at_least(count, 2) - at_least(count, 128)
        logit = SORT_BYTES + is_small * (SMALL_SORT_BYTES - SORT_BYTES)
    return (start.tokens + 2 * count) * row + count * model.vocab_size * logit


def forward_peak(start: EngineStartup, workspace: int) -> int:
    """Return the peak bytes of one GPU in the layers of the profile run.

    The peak is T·e·(w + 3.8·D). T is the tokens of the pass, e the bytes of an activation, w the
    elements per token of the widest sublayer, and D the hidden size. 3.8 is fitted. Latent
    attention adds its projections: 65,536 · heads/tp · (nope + v) · 2, with the head widths nope
    and v. An indexer's logits replace the projections if they are larger
    (layers/sparse_attn_indexer.py, 0.22). A model that compresses tokens has `attention_peak`
    instead.

    Args:
        start: The GPU when the engine starts.
        workspace: Bytes of the experts' workspace, if it stays allocated; it is added.
    """
    if compressed_peak := attention_peak(start):
        return compressed_peak + workspace
    model = start.model
    experts, widest = _part_widths(start)
    if not workspace:
        widest = max(widest, experts)
    latent = 2 * MLA_WORKSPACE * memoized(model, latent_width, start.ranks)
    if memoized(model, has_indexer):
        latent = max(latent, LOGITS_BYTES)
    elements = start.tokens * (widest + WAITING_STREAMS * model.hidden_size)
    return int(elements * start.formats.element_bytes) + latent + workspace


def has_indexer(model: Model) -> bool:
    """Return whether an indexer of sparse attention (DSA) selects the tokens to read."""
    return "index_key" in model.roles


def latent_width(model: Model, ranks: Parallelism) -> int:
    """Return the elements per token that the widest latent attention (MLA) projects on one GPU.
    They are heads on the GPU · (width of unrotated keys + width of values). 0 means no latent
    attention."""
    widths = [
        ranks.share(part.num_attention_heads) * (part.qk_nope_head_dim + part.v_head_dim)
        for part in model.parts
        if isinstance(part, Latent)
    ]
    return max(widths, default=0)


def expert_formats(model: Model, formats: Formats) -> list[WeightFormat]:
    """Return the formats of the expert matrices, one per matrix of a layer kind; [] if none."""
    return [formats.weight_format(n, weight) for n, weight, _ in model.walk() if weight.expert]


def experts_workspace(start: EngineStartup) -> int:
    """Return the bytes of the experts' workspace on one GPU if it stays allocated; else 0.
    It has T·e·k·(max(2·I, D) + max(I, D)) bytes. T is the tokens of the pass, e the bytes of an
    activation, k the active experts of a token, I their width on the GPU, and D the hidden size. It
    stays from the first layer on for experts in 8 or 16 bits and for the experts of DeepSeek-V4
    (v1/worker/workspace.py). Rows that a prefill of very long sequences gathers do not count.
    Kernels of 4 bits mostly allocate another workspace (fused_moe/modular_kernel.py)."""
    stored_formats = memoized(start.model, expert_formats, start.formats)
    if not compressed_attention(start) and any(f.bits < 8 for f in stored_formats):
        return 0
    return int(start.tokens * _part_widths(start)[0] * start.formats.element_bytes)


def _part_widths(start: EngineStartup) -> tuple[float, float]:
    """Return `part_widths` for the stage of a start."""
    return memoized(start.model, part_widths, start.ranks, start.stage)


def part_widths(model: Model, ranks: Parallelism, stage: int) -> tuple[float, float]:
    """Return the largest elements per token on one GPU of a stage: of experts, and of the rest.

    Both numbers size vLLM's activations. The first is the largest workspace of experts: k·(max(2·I,
    D) + max(I, D)). k is the active experts of a token, I their width on the GPU, and D the hidden
    size. The second is the widest other sublayer: a gated FFN has 3·I elements, an FFN without a
    gate 2·I (I is its width), and attention the sum of its projections.

    Args:
        model: The model.
        ranks: The parallelism.
        stage: Index of the pipeline stage.
    """
    experts, other = 0.0, 0.0
    for kind, count in stages(model, ranks.pp)[stage].counts.items():
        layer = model.kinds[kind]
        for part in layer.all_parts if count else ():
            local = {w.name: w.local(ranks) for w in part.weights(model.hidden_size)}
            if up := local.get("experts.up"):
                hidden = up.outputs * (2 if "experts.gate" in local else 1)
                row = max(hidden, up.inputs) + max(up.outputs, up.inputs)
                experts = max(experts, up.active * row)
                width = 3 * local["shared.up"].outputs if "shared.up" in local else 0
            elif up := local.get("up"):
                width = up.outputs * (3 if "gate" in local else 2)
            else:
                matrices = (w for w in local.values() if w.kind is WeightKind.MATRIX)
                width = sum(w.outputs for w in matrices if not w.rows_in)
            other = max(other, width)
    return experts, other


def vision_peaks(start: EngineStartup) -> tuple[Any, Any]:
    """Return bytes of one GPU for the vision encoder: kept after its profile run, and during it.

    The kept bytes are the encoder's outputs and the pixels of the batch of images in this run.
    During it, 2 bytes are needed for each element of a patch of all images: its pixel values, four
    rows of the encoder's width and two of its MLP's width on this GPU. Both are 0 without a vision
    encoder on this GPU, and arrays if `start.sequences` is an array.

    The encoder's token budget and the images of n requests limit the number of images
    (v1/worker/gpu_model_runner.py: profile_run, 0.8.5; multimodal/encoder_budget.py, 0.28).
    """
    vision = start.vision
    if not vision or start.stage or start.options.max_images == 0:
        return 0, 0
    requested = start.sequences * (start.options.max_images or MAX_IMAGES)
    budget = max(start.tokens, vision.tokens) // vision.tokens
    images = maximum(1, minimum(budget, requested))
    outputs = vision.tokens * start.model.hidden_size * start.formats.element_bytes
    mlp = 2 * vision.mlp // (start.ranks.tp if vision.sharded else 1)
    elements = vision.patches * (vision.values + 4 * vision.width + mlp)
    return images * (outputs + 2 * vision.patches * vision.values), 2 * images * elements


def _compiles(start: EngineStartup) -> bool:
    """Return whether the compilation of a first start takes memory on this stage."""
    is_excluded = start.options.enforce_eager or start.stage or start.model.vision
    return bool(start.release.combo_kernels and not is_excluded)


def compilation(start: EngineStartup) -> Any:
    """Return the bytes of one GPU that torch 2.9 takes to time fused kernels in a first start.

    torch needs a copy of the token table, scratch of the size of the L2 cache, and the input of the
    forward pass. These three sizes are inferred from pairs of starts. The result is 0 without
    compilation, on later pipeline stages, and for models with a vision tower.
    """
    if not _compiles(start):
        return 0
    model = start.model
    table = (model.embedding_size or model.hidden_size) * start.ranks.share(model.vocab_size)
    elements = table + start.tokens * model.hidden_size
    return elements * start.formats.element_bytes + (start.gpu.l2_bytes or DEFAULT_L2_BYTES)


def sampler_buffers(start: EngineStartup) -> Any:
    """Return the bytes of one GPU's sampling buffers that stay allocated after the profile run.

    In the first model runner from 0.17 on, Triton's buffer has min(2^⌈log2 min(SMs, n)⌉, SMs) · V ·
    4 bytes (v1/sample/ops/topk_topp_triton.py). SMs is the GPU's number of SMs, n the requests, and
    V the vocabulary size. In the second model runner, tables of sampling penalties stay, but only
    some releases count them. The result is 0 on all but the last stage, and an array if n is.
    """
    rules = start.release
    vocabulary, sms = start.model.vocab_size, start.gpu.sms or DEFAULT_SMS
    if not start.layers.last:
        return 0
    if _has_runner_v2(start):
        entries = start.sequences * vocabulary
        return floor_div(entries * PENALTY_BYTES, 8) if rules.counts_consumed else 0
    if rules.sampler != "kernels":
        return 0

    programs = by_number(
        start.sequences, lambda n: min(1 << (max(1, min(sms, n)) - 1).bit_length(), sms)
    )
    return programs * vocabulary * 4


def graphs(start: EngineStartup, constants: Constants) -> Any:
    """Return the bytes of one GPU that vLLM reserves for CUDA graphs instead of the KV cache.

    The bytes are 1 MiB per captured graph, plus fitted constants. In the first model runner
    (v1/worker/gpu_model_runner.py), many layers make a graph larger than 1 MiB, and logits of an
    indexer are added (profile_cudagraph_memory, 0.22). The result is 0 without CUDA graphs, and for
    releases that do not reserve memory for them. It is an array if `start.sequences` is an array.

    Args:
        start: The GPU when the engine starts.
        constants: Fitted constants of one estimate: low, middle or high.
    """
    rules, is_v2 = start.release, _has_runner_v2(start)
    if start.options.enforce_eager or not (rules.graphs_v2 if is_v2 else rules.graphs_v1):
        return 0
    count = by_number(start.sequences, partial(count_graphs, start.tokens))
    width = start.model.hidden_size / 1024 / start.ranks.tp
    shared = int((constants.graphs + constants.per_width * width) * GIB)
    if is_v2:
        return count * MIB + shared
    graph = int(MIB * max(1, constants.per_layer * start.model.layers / start.ranks.pp))
    return count * graph + shared + LOGITS_BYTES * memoized(start.model, has_indexer)


@lru_cache(1 << 14)
def count_graphs(tokens: int, sequences: int) -> int:
    """Return the number of CUDA graphs that vLLM captures.

    Sizes in tokens are 1, 2, 4, then by 8 below 256, by 16 up to min(2 · sequences, 512, tokens)
    (config/vllm.py: _set_cudagraph_sizes). Each size counts once for its piecewise capture, however
    many pieces it has. Sizes up to `sequences` count once more, for a capture of the full pass.

    Args:
        tokens: Maximum tokens of a pass.
        sequences: Value of max_num_seqs on one dp rank.
    """
    largest = min(2 * sequences, 512, tokens)
    sizes = [s for s in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if s <= largest]
    return len(sizes) + len([s for s in sizes if s <= sequences])
