"""What vLLM loads on one GPU beside the language model as stored: padding, rotary tables, a vision tower, LoRA slots.

"Model loading took" in its log is torch's count of allocated bytes, so what its caching allocator rounds up counts too.
"""

from collections.abc import Callable

import msgspec

from kvcalc.capacity.engines.vllm_compressed_memory import buffers, tables
from kvcalc.capacity.engines.vllm_versions import Release, listed_family
from kvcalc.capacity.memory_terms import GIB, MIB, Start
from kvcalc.layers.attention import Compressed, Grouped, Latent
from kvcalc.layers.part import Part
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.model.pipeline import stages
from kvcalc.model.spec import Model
from kvcalc.units import ceil_div

STEP, SEGMENT, LARGE, SPLIT = 512, 2 * MIB, 10 * MIB, MIB  # torch: CUDACachingAllocator.cpp
# Matrices that vLLM keeps as one tensor (models' packed_modules_mapping, fused_moe/layer.py).
FUSED = ({"q", "k", "v"}, {"gate", "up"}, {"shared.gate", "shared.up"}, {"experts.gate", "experts.up"})
REPACKED = 0.008  # of matrices in int4: what repacking leaves in the allocator; fitted, -0.7 to 2.2 % in starts
PLAIN_SCALES = (0, 10, 0)  # the version from which bitsandbytes' scales are no longer quantised once loaded
INT4 = ("awq", "gptq", "int4")
NGRAM_TABLES, TABLES_ON_HOST = ("ngram_table", "engram_table"), (0, 30, 0)

Padding = Callable[[Weight, Weight], int]


def allocated(size: int) -> int:
    """Bytes that the allocator counts for a tensor: whole steps of 512, and from 10 MiB a segment's rest of up to 1 MiB."""
    size = -(-size // STEP) * STEP
    segment = -(-size // SEGMENT) * SEGMENT
    return segment if size >= LARGE and segment - size <= SPLIT else size


def loaded(start: Start) -> int:
    """Bytes of a stage's matrices and vectors as the allocator counts them, fused, and padded where kernels ask for it."""
    model, formats, stage = start.model, start.formats, stages(start.model, start.ranks.pp)[start.stage]
    pad = _mxfp4_padding(start)
    vectors, tensors = 0, dict[tuple[str, str], tuple[int, int]]()
    for name, weight, count in model.walk():
        kind, _, short = name.partition(".")
        if kind in stage.counts:
            held = min(stage.counts[kind], count)
        elif name == "embedding":
            held = int(stage.first or (stage.last and model.tie_word_embeddings))
        else:
            held = int(stage.last if name.startswith(("lm_head", "final_norm")) else stage.first)
        local = weight.local(start.ranks)
        packed = pad and ".experts." in name and formats.weight_format(name, weight).name.startswith("mxfp4")
        size = pad(weight, local) if pad and packed else _unpacked(start, name, local)
        if weight.kind is WeightKind.VECTOR:
            vectors += held * size
            continue
        key = kind, next((min(names) for names in FUSED if short in names), short)
        tensors[key] = held, tensors.get(key, (0, 0))[1] + size
    return vectors + sum(held * allocated(size) for held, size in tensors.values())


def _unpacked(start: Start, name: str, weight: Weight) -> int:
    """Bytes of a weight as stored, but scales that are quantised themselves are fp32 once loaded from 0.10 on.

    model_loader/bitsandbytes_loader.py: _dequantize_dq.
    """
    stored = start.formats.weight_format(name, weight)
    if not stored.nested or start.release.since < PLAIN_SCALES:
        return start.formats.weight_bytes(name, weight)
    plain = msgspec.structs.replace(stored, scale_bytes=4, nested=0)
    return weight.copies * (plain.matrix_bytes(weight.inputs, weight.outputs) + weight.bias * start.formats.vector_bytes)


def _mxfp4_padding(start: Start) -> Padding | None:
    """How the backend that vLLM picks for MXFP4 experts pads them; None where there are none, or it does not.

    quantization/mxfp4.py to 0.19, fused_moe/oracle/mxfp4.py since: hidden and intermediate widths are rounded up.
    """
    if not any(s.format.startswith("mxfp4") for s in start.formats.schemes):
        return None
    gpu, rules = start.gpu, start.release
    if gpu.architecture == "Hopper":
        return _hopper
    if data_centre_blackwell(start):
        return _rounded(256, 256 if rules.since < (0, 20, 0) else 128)
    return _rounded(256, 128)


def data_centre_blackwell(start: Start) -> bool:
    return start.gpu.architecture.startswith("Blackwell") and start.gpu.memory_bytes >= 150 * GIB


def _rounded(hidden: int, intermediate: int) -> Padding:
    """Both widths up to multiples: 17 bytes for 32 values, biases in bf16."""

    def padded(weight: Weight, local: Weight) -> int:
        inputs, outputs = (intermediate, hidden) if weight.rows_in else (hidden, intermediate)
        wide, tall = ceil_div(local.inputs, inputs) * inputs, ceil_div(local.outputs, outputs) * outputs
        return int(local.copies * (wide * tall * 17 // 32 + (2 * tall if local.bias else 0)))

    return padded


def _hopper(weight: Weight, local: Weight) -> int:
    """Triton's swizzled layout: values to 64 packed rows by 256 columns, scales to 256 columns, biases in fp32.

    Gate and up are one matrix, of which a half is counted here.
    """
    halves = 1 if weight.rows_in else 2
    columns = -(-local.outputs * halves // 256) * 256 // halves
    rows = -(-local.inputs // 128) * 64
    return local.copies * (rows * columns + -(-local.inputs // 32) * columns + local.bias * 4)


def extra_weights(start: Start) -> dict[str, int]:
    """Bytes loaded beside the language model as stored, by name; what is 0 is left out."""
    kind = start.gpu.architecture == "Hopper", data_centre_blackwell(start), start.release.since
    packed = kind if _mxfp4_padding(start) else ()
    found = {
        "padding and rounding": start.once(loaded, packed, start.release.since < PLAIN_SCALES) - start.language,
        "repacked matrices": start.once(repacked),
        "absorbed projections": start.once(absorbed),
        "rotary tables": tables(start) or rope_tables(start.model),
        "buffers of a pass": buffers(start),
        "vision tower": tower(start),
        "LoRA slots": lora_slots(start),
        **start.beside,
    }
    return {name: size for name, size in found.items() if size}


def repacked(start: Start) -> int:
    """What is left of matrices in int4 (AWQ, GPTQ, Marlin) once they are repacked; experts' are too large to leave much."""
    model, formats, counts = start.model, start.formats, stages(start.model, start.ranks.pp)[start.stage].counts
    total = 0
    for name, weight, count in model.walk():
        kind = name.partition(".")[0]
        if kind in counts and not weight.expert and formats.weight_format(name, weight).name.startswith(INT4):
            total += min(counts[kind], count) * formats.weight_bytes(name, weight.local(start.ranks))
    return int(REPACKED * total)


def absorbed(start: Start) -> int:
    """Of latents, a quantised kv_up once more in 16 bits, for the products in latent space; a plain one is shared.

    MiniCPM3 multiplies by kv_up as it is.
    process_weights_after_loading: W_UV, W_UK_T (v1/attention/backends/mla/common.py to 0.14, then attention/mla_attention.py).
    """
    total, held = 0, stages(start.model, start.ranks.pp)[start.stage].counts
    for kind, count in held.items() if start.model.model_type != "minicpm3" else ():
        for weight in start.model.layer_weights(kind):
            if weight.name == "kv_up" and start.formats.weight_format(f"{kind}.kv_up", weight).bits < 16:
                total += count * 2 * weight.local(start.ranks).elements
    return total


def host_tables(start: Start) -> int:
    """Tables of hashed n-grams, which stay in pinned host memory by default from 0.30 on (config/engram.py: cpu_offload)."""
    return start.once(ngram_tables) if start.tables_on_host and start.release.since >= TABLES_ON_HOST else 0


def ngram_tables(start: Start) -> int:
    """Bytes of the tables of hashed n-grams on this stage."""
    held = stages(start.model, start.ranks.pp)[start.stage].counts
    return sum(
        count * start.formats.weight_bytes(f"{kind}.{weight.name}", weight.local(start.ranks))
        for kind, count in held.items()
        for weight in start.model.layer_weights(kind)
        if weight.name in NGRAM_TABLES
    )


def rope_tables(model: Model) -> int:
    """Positions · rotary width in the model's dtype, for each distinct table (rotary_embedding/base.py, 0.20)."""
    if model.rope_tables:
        return sum(2 * positions * width for positions, width in model.rope_tables)
    width = max((rotated(part) for layer in model.kinds.values() for part in layer.parts), default=0)
    return 2 * (model.max_context or 0) * width


def rotated(part: Part) -> int:
    """Elements of a head that a rotary table holds; 0 for what does not attend."""
    if isinstance(part, Latent | Compressed):
        return part.qk_rope_head_dim
    return part.head_dim if isinstance(part, Grouped) else 0


def tower(start: Start) -> int:
    """The vision tower, on the first stage and split over tp, unless no image may come (models/interfaces.py, 0.28)."""
    if not start.model.vision or start.stage or start.images == 0:
        return 0
    return 2 * start.model.vision.parameters // (start.ranks.tp if start.model.vision.sharded else 1)


def lora_slots(start: Start) -> int:
    """Slots · rank · (inputs + outputs) of every matrix of a layer, in 2 bytes (lora/layers/base_linear.py, 0.28).

    Of token table and head, V + D each, in some models (lora/layers/vocal_parallel_embedding.py, logits_processor.py, 0.28).

    Experts have slots from 0.11.1 on (lora/layers/fused_moe.py); another engine's are not counted.
    """
    if not start.loras:
        return 0
    experts = isinstance(start.release, Release) and start.release.since >= (0, 11, 1)
    held = stages(start.model, start.ranks.pp)[start.stage].counts
    total = 0
    for kind, count in held.items():
        for weight in start.model.layer_weights(kind):
            if weight.kind is WeightKind.MATRIX and (not weight.expert or experts):
                local = weight.local(start.ranks)
                total += count * local.copies * (local.inputs + local.outputs)
    tables = ((start.stage == 0) + start.last) * _adapts_tables(start)
    total += tables * (start.model.vocab_size + start.model.hidden_size)
    return 2 * start.loras * start.lora_rank * total


def _adapts_tables(start: Start) -> bool:
    """Whether token table and head have slots too, whole on every rank: models whose class names embedding_modules."""
    name = listed_family(start.model)
    return isinstance(start.release, Release) and (
        name in ("llama", "mistral") or (name == "qwen3" and start.release.since >= (0, 22))
    )
