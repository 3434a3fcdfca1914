"""A model as llama.cpp stores it: tensors, their ggml types, and the resulting kinds of layer.

A file type such as Q4_K_M gives layers of one kind different tensor types, so a kind is split by
its storage. The tensors are the tensors that llama.cpp's converter writes: experts are stacked, Q,
K and V are one tensor if the checkpoint has one tensor, and kv_up of MLA is two tensors. Norms,
biases, routers, short convolutions and learned positions are float32. A layer that predicts further
tokens and a vision tower, which is in another file, are not counted. Sources: conversion/*.py in
llama.cpp (names, float32 tensors), src/models (`load_arch_tensors`), src/llama-quant.cpp (types).

A gated delta net has Q, K and V in `attn_qkv` and their gate in `attn_gate`. `ssm_ba`, or
`ssm_alpha` and `ssm_beta`, have the step sizes and decays, and `ssm_out` the output projection.
llama-quant.cpp matches names, so `attn_qkv` has the types of values, and the other tensors have the
basic type. Sources: src/models/qwen3next.cpp, qwen35.cpp, qwen35moe.cpp; tests/snapshots has the
types of qwen3-coder-next and qwen3.5-27b in each file type. Kimi delta attention has `attn_q`,
`attn_k`, `attn_v`, `attn_output`, and `ssm_*` tensors of the basic type (src/models/
kimi-linear.cpp). The matrices of Mamba-2 (`ssm_in`, `ssm_out`) and of short convolutions have the
basic type (tests/snapshots/nemotron-nano-3-30b-a3b.schema, conversion/lfm2.py).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.layers.part import Sublayer
from kvcalc.layers.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConv
from kvcalc.layers.weights import Weight
from kvcalc.model.model import Model, memoized
from kvcalc.storage.ggml import ModelFacts, Tensor, Use, joined_format, mixed_types
from kvcalc.storage.quantization import Quantization

GGUF_HINT = "A .gguf file itself is read exactly; --dtype bf16 counts the weights unquantised"
# Model types with known tensors: with separate Q, K and V, and with Q, K and V in one tensor.
_SEPARATE_QKV = """
    llama mistral ministral mixtral smollm3 qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2
    gemma3_text gemma4_text llama4_text olmo olmo2 olmo3 olmoe cohere cohere2 starcoder2 granite
    granitemoe granitemoehybrid exaone4 gpt_oss minimax_m2 phimoe stablelm deepseek deepseek_v2
    deepseek_v3 nemotron ernie4_5 hunyuan_v1_dense seed_oss ministral3 arcee glm4 glm qwen3_next
    qwen3_5_text qwen3_5_moe_text kimi_linear qwen2_vl_text qwen2_5_vl_text qwen3_vl_text
    qwen3_vl_moe_text glm4_moe glm4v_moe_text nemotron_h lfm2 lfm2_moe falcon_h1
"""
_FUSED_QKV = "gpt2 gpt_bigcode bloom falcon mpt gpt_neox phi phi3"
_TYPES_WITH_70B = {"llama", "qwen2", "olmo"}  # llama.cpp treats 80 layers as a 70B model
# 64 rows of this embedding have no token, and the converter leaves them out
# (tests/snapshots/gemma-3-4b-it.schema).
_VOCABULARIES = {("gemma3_text", 262_208): 262_144}
# Matrices that the converter and the quantiser leave in float32
_FLOAT32 = ("router", "shared.weight")
# Model types with a routing bias per expert that is not trained by gradients, so it is not a
# parameter (DeepSeek-V3 §2.1.2).
_BIASED_ROUTERS = """
    deepseek_v3 minimax_m2 kimi_linear glm4_moe glm4v_moe_text nemotron_h lfm2_moe
"""
_QKV = ("q", "k", "v")
_LATENT_NAMES = {"q_down": "attn_q_a", "q_up": "attn_q_b", "kv_down": "attn_kv_a_mqa"}


MatrixFormats = tuple[tuple[str, str], ...]  # (matrix, format) of one layer
Stored = tuple[str, MatrixFormats]  # a kind of layer, and the formats of its matrices


def stored_by_mix(model: Model, mix: str, imatrix: bool) -> Model:
    """Return `model` with every weight stored as llama.cpp's quantiser stores it.

    llama.cpp gives the tensors of one file different types, which depend on tensor and layer. The
    result has these types as its quantisation schemes. A model that is already stored in this file
    type is returned unchanged.

    Args:
        model: A model of an architecture whose tensors in llama.cpp are known to kvcalc.
        mix: A GGUF file type such as `q4_k_m`, which mixes tensor types.
        imatrix: Whether the file was made with an importance matrix, which changes some types.

    Raises:
        UserError: llama.cpp's tensors of the model are unknown.
    """
    label = mix + ("+imatrix" if imatrix else "")
    if any(scheme.label == label for scheme in model.quantization):
        return model
    return memoized(model, _stored_by_mix, mix, imatrix, label)


def _stored_by_mix(model: Model, mix: str, imatrix: bool, label: str) -> Model:
    is_fused = _has_fused_qkv(model)
    layers = enumerate(model.order)
    tensors = [t for layer, kind in layers for t in _layer(model, kind, layer, is_fused)]
    tensors += _outer(model)

    tensors.sort(key=lambda tensor: (tensor.layer, tensor.name))  # llama.cpp's order
    types = mixed_types(tensors, mix, imatrix, _facts(model))
    pieces = defaultdict(list)  # (layer, weight) → types, row lengths and rows of its tensors
    for type_, tensor in zip(types, tensors):
        for weight, rows in tensor.weights:
            pieces[tensor.layer, weight].append((type_, tensor.row, rows))

    stored: dict[int, MatrixFormats] = defaultdict(tuple)
    for (layer, weight), parts in pieces.items():
        missing = 0
        if weight == "embedding":
            missing = model.hidden_size * (model.vocab_size - _token_rows(model))
        stored[layer] += ((weight, joined_format(parts, missing)),)
    buffers = 4 * (model.rope_factors + _routing_biases(model))
    return with_stored_formats(model, stored, label, "fp32", buffers)


def _layer(model: Model, kind: str, layer: int, is_fused: bool) -> Iterator[Tensor]:
    """Yield the tensors of a layer that may be quantised."""
    for part in model.kinds[kind].parts:
        weights = part.weights(model.hidden_size)
        matrices = [w for w in weights if w.kind == "matrix" and w.name not in _FLOAT32]
        width = matrices[0].inputs
        joined: tuple[tuple[str, int], ...] = ()
        if isinstance(part, GatedDeltaNet):
            queries, values, *matrices = matrices
            gate = ("v_gate", values.outputs // 2)
            joined = ("qk", queries.outputs), gate
            yield Tensor(Use.OTHER, width, layer, False, "attn_gate", (gate,))
        elif is_fused and isinstance(part, Grouped):
            joined = tuple((w.name, w.outputs) for w in matrices if w.name in _QKV)
            matrices = [w for w in matrices if w.name not in _QKV]
        if joined:
            yield Tensor(Use.QKV, width, layer, False, "attn_qkv", joined)
        for w in matrices:
            yield from _tensors(part, w, layer)


def _tensors(part: Sublayer, w: Weight, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a matrix. kv_up of MLA is [dn, r] (transposed) and [r, dv] per head."""
    if isinstance(part, Latent) and w.name == "kv_up":
        heads = part.num_attention_heads
        rank = part.kv_lora_rank
        for name, row, rows in (
            ("attn_k_b", part.qk_nope_head_dim, rank),
            ("attn_v_b", rank, part.v_head_dim),
        ):
            yield Tensor(Use.OTHER, row, layer, True, name, (("kv_up", heads * rows),))
        return
    use = Use.__members__.get(w.name.rpartition(".")[2].upper(), Use.OTHER)
    if isinstance(part, Grouped) and w.name == "gate":  # further rows of attn_q
        use = Use.Q
    elif isinstance(part, KimiDeltaAttention) and w.name == "out":
        use = Use.O
    name = use + ("_exps" if w.expert else "_shexp" if w.name.startswith("shared.") else "")
    name = _LATENT_NAMES.get(w.name, name)
    rows = w.outputs * w.copies
    yield Tensor(use, w.inputs, layer, w.copies > 1, name, ((w.name, rows),))


def _token_rows(model: Model) -> int:
    """Return the number of rows of the embedding in the file."""
    return _VOCABULARIES.get((model.model_type, model.vocab_size), model.vocab_size)


def _outer(model: Model) -> list[Tensor]:
    outer = [(Use.EMBEDDING, "embedding", _token_rows(model))]
    if not model.tie_word_embeddings:
        outer.append((Use.HEAD, "lm_head", model.vocab_size))
    return [
        Tensor(use, model.hidden_size, name=use, weights=((weight, rows),))
        for use, weight, rows in outer
    ]


def _facts(model: Model) -> ModelFacts:
    parts = [
        part for kind in (model.order[0], *model.kinds) for part in model.kinds[kind].parts
    ]
    first = next(part for part in parts if isinstance(part, Grouped | Latent))
    heads = first.num_attention_heads
    # the latent is one head of all
    groups = first.num_key_value_heads if isinstance(first, Grouped) else 1
    is_seventy = model.layers == 80 and model.model_type in _TYPES_WITH_70B
    # llama.cpp's `n_gqa` is of layer 0. In files of most hybrids, recurrent layers have 0 KV heads.
    has_kv_heads = any(
        isinstance(part, Grouped | Latent | GatedDeltaNet)
        for part in model.kinds[model.order[0]].parts
    )
    return ModelFacts(
        layers=model.layers,
        experts=max((part.num_experts for part in parts if isinstance(part, Moe)), default=0),
        queries_per_kv=heads // groups * has_kv_heads,
        seventy=is_seventy and (heads != groups or model.model_type == "qwen2"),
        falcon=model.model_type == "falcon",
        tied=model.tie_word_embeddings,
    )


def _has_fused_qkv(model: Model) -> bool:
    """Return whether Q, K and V are one tensor. Raises UserError if llama.cpp's tensors are
    unknown."""
    is_fused = model.model_type in _FUSED_QKV.split()
    problem = _problem(model)
    if not problem and not is_fused and model.model_type not in _SEPARATE_QKV.split():
        problem = f"its model_type {model.model_type!r}"
    if problem:
        text = f"the tensors of {model.name} in llama.cpp are not known: {problem}"
        raise UserError(text, GGUF_HINT)
    return is_fused


def _problem(model: Model) -> str:
    """Return the name of a part of the model whose tensors in llama.cpp are unknown, or ''."""
    width = model.embedding_size or model.hidden_size
    if model.extra or model.tables or model.type_embeddings or width != model.hidden_size:
        return "it has tables or projections outside its layers"
    for name, layer in model.kinds.items():
        for part in layer.parts:
            if not _is_known(part):
                return f"{part.label or part.__struct_config__.tag} (layers {name})"
        if layer.shared:
            return f"weights shared between layers (layers {name})"
    return ""


def _is_known(part: Sublayer) -> bool:
    if type(part) is Latent:
        return not (part.output_gate or part.sinks)
    if isinstance(part, Moe):
        return not (
            part.moe_latent_size
            or part.router_width
            or part.router_outputs
            or part.zero_experts
        )
    known = Grouped, Dense, GatedDeltaNet, KimiDeltaAttention, Mamba2, ShortConv
    return type(part) in known


def with_stored_formats(
    model: Model, stored: dict[int, MatrixFormats], label: str, vectors: str, buffers: int
) -> Model:
    """Return the model with a given storage format for each weight in each layer.

    If layers of one kind store their weights in different formats, the result has several kinds in
    place of this kind. The field `quantization` of the result has one scheme for each format, so
    its weight bytes are those of the GGUF file.

    Args:
        model: The model.
        stored: Index of a layer → (weight name, format name) pairs, such as ("q", "q4_k"). Index −1
            has the weights outside the layers.
        label: Printed name of the storage, such as `q4_k_m`.
        vectors: Name of the format of norms and biases, and of routers and tables that `stored`
            does not list.
        buffers: Bytes that the file has in addition to its parameters, such as rotary factors.
    """
    keys = [(kind, stored[layer]) for layer, kind in enumerate(model.order)]
    names = _names(keys)
    order = tuple(names[key] for key in keys)
    covers = defaultdict(list)  # format → names of its weights
    for (_, pairs), kind in names.items():
        for weight, format_ in pairs:
            covers[format_].append(f"{kind}.{weight}")
    for weight, format_ in stored[-1]:
        covers[format_].append(weight)
        if weight == "embedding" and model.tie_word_embeddings:
            covers[format_].append("lm_head")

    float32 = tuple(f"*.{name}" for name in _FLOAT32)
    scheme = partial(Quantization, except_for=(), label=label)
    schemes = [
        scheme(format_, tuple(weights), kinds=("matrix", "table"))
        for format_, weights in covers.items()
    ]
    schemes += [scheme(vectors, float32), scheme(vectors, kinds=("vector", "table"))]
    return replace(
        model,
        kinds={name: model.kinds[kind] for (kind, _), name in names.items()},
        buffers=buffers,
        uncounted_bytes=0,
        other_part_bytes=0,
        pattern=order,
        mtp=replace(model.mtp, kind=order[-1]) if model.mtp else None,
        quantization=tuple(schemes),
    )


def _routing_biases(model: Model) -> int:
    """Return the number of routing biases in the file that are not parameters."""
    if model.model_type not in _BIASED_ROUTERS.split():
        return 0
    return sum(
        count * part.num_experts
        for kind, count in model.counts.items()
        for part in model.kinds[kind].parts
        if isinstance(part, Moe)
    )


def _names(keys: list[Stored]) -> dict[Stored, str]:
    """Return a name for each kind: its own name, with an appended letter if it has several
    storages."""
    distinct = list(dict.fromkeys(keys))
    count = Counter(kind for kind, _ in distinct)
    letters = {kind: iter("abcdefghijklmnopqrstuvwxyz") for kind in count}
    return {
        key: f"{key[0]}-{next(letters[key[0]])}" if count[key[0]] > 1 else key[0]
        for key in distinct
    }
