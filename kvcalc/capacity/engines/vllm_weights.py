"""Bytes that vLLM loads on one GPU in addition to the language model as stored: padding, rotary
tables, a vision tower, LoRA slots, and the buffers of models that compress tokens (DeepSeek-V4).

"Model loading took" in its log is torch's count of allocated bytes, so the rounding of its caching
allocator counts too. T is the tokens of a pass, D the hidden size, S the streams of the residual
(hc_mult · D), e the bytes of an element. Source of DeepSeek-V4's:
models/deepseek_v4/{attention,compressor}.py, nvidia/{model,flashmla}.py and
layers/sparse_attn_indexer.py of vLLM 0.22 and 0.31.
"""

from typing import NamedTuple

import msgspec

from kvcalc.capacity.engines.vllm_versions import Release, listed_family
from kvcalc.capacity.memory_budget import GIB, MIB, EngineStartup, nonzero
from kvcalc.layers.attention import Compressed, Grouped, Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.weights import Formats, Weight, WeightKind
from kvcalc.model.memory import walk_stage
from kvcalc.model.model import Model, kept
from kvcalc.model.pipeline import stages

# that a pass without a cache keeps free for an indexer (envs.py: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
LOGITS_BYTES = 512 * MIB
# heads of a rank that the kernel takes (nvidia/flashmla.py: get_padded_num_q_heads)
PADDED_HEADS = (64, 128)
# before: the last streams are always stored for prediction layers; since then only with such layers
OPTIONAL_STREAMS = (0, 27, 0)
# torch: CUDACachingAllocator.cpp
STEP, SEGMENT, LARGE, SPLIT = 512, 2 * MIB, 10 * MIB, MIB
# Matrices that vLLM stores as one tensor (models' packed_modules_mapping, fused_moe/layer.py), by
# the name of the first in the alphabet
FUSED = {
    "q": "k",
    "v": "k",
    "up": "gate",
    "shared.up": "shared.gate",
    "experts.up": "experts.gate",
}
# Share of int4 matrices that repacking leaves in the allocator; fitted, −0.7 to 2.2 % in starts
REPACKED = 0.008
# First version that loads bitsandbytes' scales without quantising them
PLAIN_SCALES = (0, 10, 0)
INT4 = ("awq", "gptq", "int4")
NGRAM_TABLES, TABLES_ON_HOST = ("ngram_table", "engram_table"), (0, 30, 0)
HOPPER_LAYOUT = (0, 0)


class LoadedWeights(NamedTuple):
    """Bytes of a pipeline stage's weights on one GPU.

    Attributes:
        allocated: Matrices and vectors, fused, and padded for kernels.
        int4: Matrices in int4 (AWQ, GPTQ, Marlin), which vLLM repacks. Experts do not count,
            because they are too large to leave much in the allocator.
        absorbed: Quantized kv_up matrices in 16 bits, for products in latent space. A matrix that
            is not quantized is shared. MiniCPM3 multiplies by kv_up directly. Source:
            process_weights_after_loading: W_UV, W_UK_T (v1/attention/backends/mla/common.py to
            0.14, then attention/mla_attention.py).
        ngram_tables: Tables of hashed n-grams.
    """

    allocated: int
    int4: int
    absorbed: int
    ngram_tables: int


def load_weights(
    model: Model,
    formats: Formats,
    ranks: Parallelism,
    stage: int,
    padding: tuple[int, int] | None,
    has_plain_scales: bool,
) -> LoadedWeights:
    """Return the bytes of a stage's weights.

    Args:
        padding: See `mxfp4_padding`.
        has_plain_scales: Whether quantized scales are fp32 once loaded
            (model_loader/bitsandbytes_loader.py: _dequantize_dq).
    """
    vectors = int4 = absorbed = ngram_tables = 0
    tensors: dict[tuple[str, str], tuple[int, int]] = {}
    for name, weight, count in walk_stage(model, stages(model, ranks.pp)[stage]):
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
        if padding and ".experts." in name and stored_format.name.startswith("mxfp4"):
            size = _padded_bytes(padding, weight, local)
        elif stored_format.nested and has_plain_scales:
            plain = msgspec.structs.replace(stored_format, scale_bytes=4, nested=0)
            matrix = plain.matrix_bytes(local.inputs, local.outputs)
            size = local.copies * (matrix + local.bias * formats.vector_bytes)
        if weight.kind is WeightKind.VECTOR:
            vectors += count * size
        else:
            key = kind, FUSED.get(short, short)
            tensors[key] = count, tensors.get(key, (0, 0))[1] + size
    matrices = sum(count * allocated(size) for count, size in tensors.values())
    return LoadedWeights(vectors + matrices, int4, absorbed, ngram_tables)


def allocated(size: int) -> int:
    """Return the bytes that the allocator counts for a tensor.

    It takes multiples of 512. From 10 MiB it adds the rest of a segment, if that is up to 1 MiB.
    """
    size = -(-size // STEP) * STEP
    segment = -(-size // SEGMENT) * SEGMENT
    return segment if size >= LARGE and segment - size <= SPLIT else size


def mxfp4_padding(start: EngineStartup) -> tuple[int, int] | None:
    """Return the multiples of (hidden, intermediate) width to which vLLM pads MXFP4 experts.

    HOPPER_LAYOUT names Triton's layout. None: no such experts. Source: quantization/mxfp4.py to
    0.19, fused_moe/oracle/mxfp4.py since.
    """
    if not any(scheme.format.startswith("mxfp4") for scheme in start.formats.schemes):
        return None
    if start.gpu.architecture == "Hopper":
        return HOPPER_LAYOUT
    is_old = is_data_centre_blackwell(start) and start.release.since < (0, 20, 0)
    return 256, 256 if is_old else 128


def is_data_centre_blackwell(start: EngineStartup) -> bool:
    is_blackwell = start.gpu.architecture.startswith("Blackwell")
    return is_blackwell and start.gpu.memory_bytes >= 150 * GIB


def _padded_bytes(padding: tuple[int, int], weight: Weight, local: Weight) -> int:
    """Return the bytes of MXFP4 experts: 17 bytes for 32 values, biases in bf16.

    Triton's layout on Hopper pads values to 64 packed rows by 256 columns, scales to 256 columns,
    and stores biases in fp32. Gate and up are one matrix, so each counts half of it.
    """
    if padding == HOPPER_LAYOUT:
        halves = 1 if weight.rows_in else 2
        columns = -(-local.outputs * halves // 256) * 256 // halves
        rows = -(-local.inputs // 128) * 64 + -(-local.inputs // 32)
        return local.copies * (rows * columns + local.bias * 4)
    input_unit, output_unit = reversed(padding) if weight.rows_in else padding
    inputs = -(-local.inputs // input_unit) * input_unit
    outputs = -(-local.outputs // output_unit) * output_unit
    return local.copies * (inputs * outputs * 17 // 32 + (2 * outputs if local.bias else 0))


def weights(start: EngineStartup) -> tuple[int, dict[str, int], int]:
    """Return the bytes of the model on the GPU, other loaded bytes by name, and the bytes in host
    memory.

    Tables of hashed n-grams are in pinned host memory, the default from 0.30 on
    (config/engram.py: cpu_offload).
    """
    model, since = start.model, start.release.since
    share = start.formats, start.ranks, start.stage
    loaded = kept(model, load_weights, *share, mxfp4_padding(start), since >= PLAIN_SCALES)
    host = loaded.ngram_tables if start.tables_on_host and since >= TABLES_ON_HOST else 0
    # rotary tables of compressed attention are in fp32: one for layers that compress, one for
    # others
    parts = compressed_attention(start)
    widths = {bool(part.compress_ratio): part.qk_rope_head_dim for part in parts}
    compressed_tables = 4 * (model.max_context or 0) * sum(widths.values())
    extra = {
        "padding and rounding": loaded.allocated - start.stored_weights,
        "repacked matrices": int(REPACKED * loaded.int4),
        "absorbed projections": loaded.absorbed,
        "rotary tables": compressed_tables or kept(model, rope_tables),
        "buffers of a pass": _pass_buffers(start),
        "vision tower": tower(start),
        "LoRA slots": lora_slots(start),
        **start.extra,
    }
    return start.stored_weights - host, nonzero(extra), host


def compressed_parts(model: Model, pp: int, stage: int) -> list[Compressed]:
    """Return the attention of each kind of layer on a stage; empty if the model does not compress
    tokens."""
    counts = stages(model, pp)[stage].counts
    parts = [
        part
        for kind, count in counts.items()
        for part in model.kinds[kind].parts
        if count and isinstance(part, Compressed)
    ]
    return parts if any(part.compress_ratio for part in parts) else []


def compressed_attention(start: EngineStartup) -> list[Compressed]:
    """Return `compressed_parts` of the stage of a start."""
    return kept(start.model, compressed_parts, start.ranks.pp, start.stage)


def _pass_buffers(start: EngineStartup) -> int:
    """Return the bytes of buffers that load with a model that compresses tokens.

    T·index_topk·4 for the selected entries. The last stage adds T·S·e, which prediction layers
    read.
    """
    parts = compressed_attention(start)
    if not parts:
        return 0
    row = 4 * max(part.index_topk for part in parts)
    if start.layers.last and (start.release.since < OPTIONAL_STREAMS or "mtp" in start.extra):
        row += kept(start.model, residual_width) * start.formats.element_bytes
    return start.tokens * row


def residual_width(model: Model) -> int:
    """Return the elements of a token's residual: the input of the mixers of the streams, or the
    hidden size."""
    widths = (w.inputs for name, w, _ in model.walk() if name.endswith("_streams"))
    return max(widths, default=model.hidden_size)


def attention_peak(start: EngineStartup) -> int:
    """Return the peak bytes around an attention that compresses tokens; 0 for another model.

    The peak has the streams and the layer's input, the output and queries at padded heads, and the
    projections (of compressors in fp32). It also has the larger of two: the queries before their
    padding, or an indexer's queries (in fp8 too) with its logits.
    """
    peak, element = 0, start.formats.element_bytes
    for part in compressed_attention(start):
        heads = start.ranks.share(part.num_attention_heads)
        padded = next(n for n in (*PADDED_HEADS, heads) if n >= heads)
        index_dim = part.index_head_dim if part.index_topk else 0
        width = kept(start.model, residual_width) + start.model.hidden_size
        width += (2 * padded + 1) * part.head_dim + part.q_lora_rank
        if part.compress_ratio:
            width += 4 * (2 if part.overlap else 1) * (part.head_dim + index_dim)
        queries = heads * part.head_dim * element * start.tokens
        index = part.index_n_heads * index_dim * (element + 1) * start.tokens
        index += LOGITS_BYTES if index_dim else 0
        peak = max(peak, width * element * start.tokens + max(queries, index))
    return peak


def rope_tables(model: Model) -> int:
    """Return the bytes of rotary tables: positions · width · 2 for each distinct table
    (rotary_embedding/base.py, 0.20)."""
    if model.rope_tables:
        return sum(2 * positions * width for positions, width in model.rope_tables)
    widths = [0]
    for part in (part for layer in model.kinds.values() for part in layer.parts):
        if isinstance(part, Latent | Compressed):
            widths.append(part.qk_rope_head_dim)
        elif isinstance(part, Grouped):
            widths.append(part.head_dim)
    return 2 * (model.max_context or 0) * max(widths)


def tower(start: EngineStartup) -> int:
    """Return the bytes of the vision tower: on the first stage, split over tp, none without images
    (models/interfaces.py, 0.28)."""
    vision = start.model.vision
    if not vision or start.stage or start.images == 0:
        return 0
    return 2 * vision.parameters // (start.ranks.tp if vision.sharded else 1)


def lora_slots(start: EngineStartup) -> int:
    """Return slots · rank · (inputs + outputs) · 2 of each matrix of a layer
    (lora/layers/base_linear.py, 0.28).

    Experts have slots from 0.11.1 on (lora/layers/fused_moe.py). In some models, token table and
    head have slots too: V + D each, in full on every rank (lora/layers/vocal_parallel_embedding.py,
    logits_processor.py, 0.28). Other engines have neither.
    """
    if not start.loras:
        return 0
    model, elements = start.model, 0
    since = start.release.since if isinstance(start.release, Release) else ()
    for kind, count in start.layers.counts.items():
        for weight in model.layer_weights(kind):
            if weight.kind is WeightKind.MATRIX and (not weight.expert or since >= (0, 11, 1)):
                local = weight.local(start.ranks)
                elements += count * local.copies * (local.inputs + local.outputs)
    family = listed_family(model)
    if (family in ("llama", "mistral") and since) or (family == "qwen3" and since >= (0, 22)):
        num_tables = start.layers.first + start.layers.last
        elements += num_tables * (model.vocab_size + model.hidden_size)
    return 2 * start.loras * start.lora_rank * elements
