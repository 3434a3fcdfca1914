"""A model as llama.cpp stores it: tensors, their ggml types, and the resulting kinds of layer.

A mixture such as Q4_K_M gives layers of one kind different types, so a kind is split by its storage. The
tensors are those that llama.cpp's converter writes: experts are stacked, Q, K and V are one tensor if the
model has one, and kv_up of MLA is two tensors. Norms, biases, routers and learned positions are float32.
Sources: conversion/*.py in llama.cpp (names, float32 tensors), src/llama-quant.cpp (types).
"""

from collections import Counter
from collections.abc import Iterator
from string import ascii_lowercase
from typing import NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.ffn import Dense, Moe
from kvcalc.layers.part import Part
from kvcalc.model.spec import Model
from kvcalc.storage.gguf import tensor_bytes
from kvcalc.storage.gguf_mix import Facts, Tensor, Use, mixed_types, ordered
from kvcalc.storage.quantization import Quantization

WAY_ROUND = "A .gguf file itself is read exactly; --dtype bf16 counts the weights unquantised"
_PLAIN = {
    "llama", "mistral", "ministral", "mixtral", "smollm3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "llama4_text", "olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2", "starcoder2",
    "granite", "granitemoe", "granitemoehybrid", "exaone4", "gpt_oss", "minimax_m2", "phimoe", "stablelm", "deepseek",
    "deepseek_v2", "deepseek_v3", "nemotron", "ernie4_5", "hunyuan_v1_dense", "seed_oss", "ministral3", "arcee", "glm4",
    "glm",
}  # fmt: skip
_FUSED = {"gpt2", "gpt_bigcode", "bloom", "falcon", "mpt", "gpt_neox", "phi", "phi3"}
_SEVENTY = {"llama", "qwen2", "olmo"}  # whose 80 layers llama.cpp calls 70B
# Its embedding has 64 rows without a token, which the converter leaves out (tests/snapshots/gemma-3-4b-it.schema).
_VOCABULARIES = {("gemma3_text", 262_208): 262_144}
_FLOAT32 = ("router", "shared.weight")  # matrices that the converter and the quantiser leave in float32
# Whose routers have a bias for each expert that no gradient touches, so that it is no parameter (DeepSeek-V3 §2.1.2).
_BIASED_ROUTERS = {"deepseek_v3", "minimax_m2"}
_USES = {"q": Use.Q, "k": Use.K, "v": Use.V, "o": Use.O, "gate": Use.GATE, "up": Use.UP, "down": Use.DOWN}


Stored = tuple[str, tuple[tuple[str, str], ...]]  # a kind of layer, and the format of each of its matrices


class Held(NamedTuple):
    """A tensor: its name in llama.cpp, the weights in it, its rows, and its role."""

    name: str
    weights: tuple[str, ...]
    tensor: Tensor
    rows: int


def mixed(model: Model, mix: str, imatrix: bool) -> Model:
    """Return `model` with every weight stored as llama.cpp's quantiser stores it.

    `mix` is a file type such as `q4_k_m`. The result is computed once per model. Raises UserError if
    llama.cpp's tensors of the model are unknown.
    """
    label = mix + ("+imatrix" if imatrix else "")
    if any(s.label == label for s in model.quantization):
        return model
    known: dict[str, Model] = model.__dict__.setdefault("mixed", {})
    if label not in known:
        known[label] = _mixed(model, mix, imatrix, label)
    return known[label]


def _mixed(model: Model, mix: str, imatrix: bool, label: str) -> Model:
    fused = _fused(model)
    held = [tensor for n, kind in enumerate(model.order) for tensor in _layer(model, kind, n, fused)] + _outer(model)
    named = ordered((f"{h.tensor.layer}.{h.name}", h.tensor) for h in held)
    types = dict(zip((n for n, _ in named), mixed_types([t for _, t in named], mix, imatrix, _facts(model)), strict=True))
    stored: dict[int, list[tuple[str, str]]] = {n: [] for n in range(-1, model.layers)}
    pieces: dict[tuple[int, str], list[tuple[str, Held]]] = {}
    for h in held:
        for weight in h.weights:
            pieces.setdefault((h.tensor.layer, weight), []).append((types[f"{h.tensor.layer}.{h.name}"], h))
    for (layer, weight), parts in pieces.items():
        stored[layer].append((weight, _format(model, weight, parts)))
    buffers = 4 * (model.rope_factors + _routing_biases(model))
    return split(model, {n: tuple(pairs) for n, pairs in stored.items()}, label, "fp32", buffers)


def _format(model: Model, weight: str, parts: list[tuple[str, Held]]) -> str:
    """Return the format of a weight: a ggml type, or bytes per elements if its tensors differ in type."""
    (first, h), *others = parts
    if weight == "embedding" and h.rows != model.vocab_size:
        return f"{first}@{tensor_bytes(first, h.tensor.row, h.rows)}/{h.tensor.row * model.vocab_size}"
    if not others:
        return first
    held = sum(tensor_bytes(type_, h.tensor.row, h.rows) for type_, h in parts)
    names = "_".join(dict.fromkeys(type_ for type_, _ in parts))
    return f"{names}@{held}/{sum(h.tensor.row * h.rows for _, h in parts)}"


def _layer(model: Model, kind: str, layer: int, fused: bool) -> Iterator[Held]:
    """Return the tensors of a layer that may be quantised."""
    spec = model.kinds[kind]
    for part in spec.parts:
        if isinstance(part, Latent):
            yield from _latent(part, model.hidden_size, layer)
            continue
        weights = [w for w in part.weights(model.hidden_size) if w.kind == "matrix" and w.name not in _FLOAT32]
        joined = [w for w in weights if fused and isinstance(part, Grouped) and w.name in ("q", "k", "v")]
        if joined:
            tensor = Tensor(Use.QKV, joined[0].inputs, layer)
            yield Held("attn_qkv", tuple(w.name for w in joined), tensor, sum(w.outputs for w in joined))
        for w in weights:
            if w in joined:
                continue
            use = _USES.get(w.name.rpartition(".")[2], Use.OTHER)
            name = use + ("_exps" if w.expert else "_shexp" if w.name.startswith("shared.") else "")
            if isinstance(part, Grouped) and w.name == "gate":
                use, name = Use.OTHER, "attn_gate"
            yield Held(name, (w.name,), Tensor(use, w.inputs, layer, stacked=w.copies > 1), w.outputs * w.copies)


def _latent(part: Latent, hidden_size: int, layer: int) -> Iterator[Held]:
    """Return the tensors of MLA. kv_up is [dn, r] (transposed) and [r, dv] for each head."""
    names = {"q": "attn_q", "q_down": "attn_q_a", "q_up": "attn_q_b", "kv_down": "attn_kv_a_mqa", "o": "attn_output"}
    heads = part.num_attention_heads
    for w in part.weights(hidden_size):
        if w.name == "kv_up":
            rank, nope, value = part.kv_lora_rank, part.qk_nope_head_dim, part.v_head_dim
            yield Held("attn_k_b", ("kv_up",), Tensor(Use.OTHER, nope, layer, stacked=True), heads * rank)
            yield Held("attn_v_b", ("kv_up",), Tensor(Use.OTHER, rank, layer, stacked=True), heads * value)
        elif w.kind == "matrix":
            use = {"q": Use.Q, "o": Use.O}.get(w.name, Use.OTHER)
            yield Held(names[w.name], (w.name,), Tensor(use, w.inputs, layer), w.outputs)


def _outer(model: Model) -> list[Held]:
    width = model.hidden_size
    rows = _VOCABULARIES.get((model.model_type, model.vocab_size), model.vocab_size)
    found = [Held("token_embd", ("embedding",), Tensor(Use.EMBEDDING, width), rows)]
    if not model.tie_word_embeddings:
        found.append(Held("output", ("lm_head",), Tensor(Use.HEAD, width), model.vocab_size))
    return found


def _facts(model: Model) -> Facts:
    mixers = [part for layer in model.kinds.values() for part in layer.parts if isinstance(part, Grouped | Latent)]
    first = next(p for p in model.kinds[model.order[0]].parts if p in mixers)
    experts = max((p.num_experts for k in model.kinds.values() for p in k.parts if isinstance(p, Moe)), default=0)
    heads = first.num_attention_heads
    groups = first.num_key_value_heads if isinstance(first, Grouped) else 1  # the latent is one head of all
    seventy = model.layers == 80 and model.model_type in _SEVENTY
    seventy = seventy and (heads != groups or model.model_type == "qwen2")
    falcon = model.model_type == "falcon"
    return Facts(model.layers, experts, heads // groups, seventy, falcon, model.tie_word_embeddings)


def _fused(model: Model) -> bool:
    """Return whether Q, K and V are one tensor. Raises UserError if llama.cpp's tensors are unknown."""
    fused = model.model_type in _FUSED
    known = fused or model.model_type in _PLAIN
    if problem := _problem(model) or ("" if known else f"its model_type {model.model_type!r}"):
        text = f"it is not known which tensors llama.cpp makes of {model.name}: {problem}"
        raise UserError(text, hint=WAY_ROUND)
    return fused


def _problem(model: Model) -> str:
    """Return the part of the model whose tensors in llama.cpp are unknown, or ''."""
    if model.extra or model.tables or model.type_embeddings or (model.embedding_size or model.hidden_size) != model.hidden_size:
        return "it has tables or projections beside its layers"
    for name, layer in model.kinds.items():
        strange = [p for p in layer.parts if not _known(p)]
        if strange or layer.shared:
            what = strange[0].label or str(strange[0].__struct_config__.tag) if strange else "weights shared between layers"
            return f"{what} (layers {name})"
    if model.mtp and not all(isinstance(p, Latent | Dense | Moe) for layer in model.kinds.values() for p in layer.parts):
        return "its multi-token-prediction layers"
    return ""


def _known(part: Part) -> bool:
    if isinstance(part, Sparse):
        return False
    if isinstance(part, Latent):
        return not (part.output_gate or part.sinks)
    if isinstance(part, Moe):
        return not (part.moe_latent_size or part.router_width or part.router_outputs or part.zero_experts)
    return type(part) in (Grouped, Dense)


def split(model: Model, stored: dict[int, tuple[tuple[str, str], ...]], label: str, vectors: str, buffers: int) -> Model:
    """Return the model with one kind per storage, and one scheme for every format.

    Args:
        stored: (weight, format) by layer; −1 for weights outside the layers.
        vectors: Format of norms, biases, and of routers and tables that `stored` does not list.
        buffers: Bytes in addition to the parameters.
        label: Printed name of the scheme.
    """
    names = _names([(kind, stored[n]) for n, kind in enumerate(model.order)])
    order = tuple(names[kind, stored[n]] for n, kind in enumerate(model.order))
    covers: dict[str, list[str]] = {}
    for (_, pairs), kind in names.items():
        for weight, format_ in pairs:
            covers.setdefault(format_, []).append(f"{kind}.{weight}")
    for weight, format_ in stored[-1]:
        covers.setdefault(format_, []).append(weight)
        if weight == "embedding" and model.tie_word_embeddings:
            covers[format_].append("lm_head")
    schemes = [Quantization(f, tuple(found), (), ("matrix", "table"), label) for f, found in covers.items()]
    schemes.append(Quantization(vectors, tuple(f"*.{name}" for name in _FLOAT32), (), ("matrix",), label))
    schemes.append(Quantization(vectors, ("*",), (), ("vector", "table"), label))
    kinds = {name: model.kinds[kind] for (kind, _), name in names.items()}
    mtp = msgspec.structs.replace(model.mtp, kind=order[-1]) if model.mtp else None
    fields = {"kinds": kinds, "buffers": buffers, "pattern": order, "mtp": mtp, "quantization": tuple(schemes)}
    return msgspec.structs.replace(model, **fields)


def _routing_biases(model: Model) -> int:
    """Return the number of routing biases in the file that are not parameters."""
    experts = {k: sum(p.num_experts for p in layer.parts if isinstance(p, Moe)) for k, layer in model.kinds.items()}
    biased = model.model_type in _BIASED_ROUTERS
    return sum(count * experts[kind] for kind, count in model.counts.items()) if biased else 0


def _names(keys: list[Stored]) -> dict[Stored, str]:
    """Return a name for each kind: its own if it has one storage, otherwise with a letter appended."""
    distinct = list(dict.fromkeys(keys))
    count = Counter(kind for kind, _ in distinct)
    letters = {kind: iter(ascii_lowercase) for kind in count}
    return {key: f"{key[0]}-{next(letters[key[0]])}" if count[key[0]] > 1 else key[0] for key in distinct}
