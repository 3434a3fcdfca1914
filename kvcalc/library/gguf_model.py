"""Read a GGUF file as a model: layers from tensors, block by block, and the rest from metadata.

Each tensor is consumed once: a reader takes it and checks its shape. A file with a remaining tensor
is refused. Parameters and bytes are therefore exactly the sums over its tensors. Names follow
llama.cpp's gguf-py/gguf/constants.py.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvcalc.errors import printable
from kvcalc.layers.attention import Grouped, Latent
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv
from kvcalc.library.gguf_header import Fields, Header, TensorInfo, read_header
from kvcalc.library.safetensors_header import ReadBytes, read_from
from kvcalc.model.gguf_layout import with_stored_formats
from kvcalc.model.memory import weight_bytes
from kvcalc.model.model import Layer, Model, Norm
from kvcalc.records import JsonObject
from kvcalc.storage.ggml import FILE_TYPES, joined_format


class GgufBlock:
    """The tensors of one block (layer) of a GGUF file, while readers turn them into parts.

    A part is an attention or recurrent mixer, or an FFN. A reader is a function that returns a
    part, and consumes its tensors: it removes them from `remaining`. Tensors that remain after all
    readers are an error, so that no bytes are forgotten.

    Attributes:
        fields: Metadata of the file.
        number: Index of the block; −1 for the tensors outside the blocks.
        width: Width of the residual stream (hidden size).
        remaining: Name without `blk.N.` → tensor, for the tensors that no reader has consumed yet.
        formats: (weight name, ggml type) for each weight of the consumed tensors.
        norm_biases: Whether each consumed norm of the residual stream has a bias, as a set of
            bools.

    Raises:
        UserError: A tensor is missing, or its shape differs from the metadata.
    """

    def __init__(self, fields: Fields, number: int) -> None:
        self.fields, self.number, self.width = fields, number, fields.width
        self.remaining: dict[str, TensorInfo] = {}
        self.formats: list[tuple[str, str]] = []
        self.norm_biases: set[bool] = set()

    def size(self, key: str, default: int | None = None) -> int:
        """Return the whole number, at least 1, under a metadata key for this block.

        Args:
            key: Name of the key without the architecture: `attention.head_count` means
                `llama.attention.head_count`. If its value is a list, the entry of this block
                counts.
            default: Result if the key is missing; None if the key is required.
        """
        result = self.fields.size(key, default, self.number)
        if not result:
            raise self.fields.fail(f"block {self.number}: {key} is 0")
        return result

    def take(self, weights: str, name: str, *shape: int) -> TensorInfo:
        """Consume a required tensor of this block, record its format, and return it.

        Consuming removes the tensor from `remaining`, so that the file is not refused because of
        it.

        Args:
            weights: Names in kvcalc of the weights that the tensor stores, separated by blanks,
                such as `q k v`; may be empty.
            name: Name of the tensor in the block, such as `attn_q`.
            shape: Expected shape; 0 accepts any length, and no shape accepts every shape.
        """
        prefix = f"blk.{self.number}." if self.number >= 0 else ""
        result = self.remaining.pop(f"{name}.weight", None)
        if result is None:
            raise self.fields.fail(f"tensor {prefix}{name}.weight is missing")
        actual = tuple(m if n else 0 for n, m in zip(shape, result.shape, strict=False))
        if shape and (len(shape) != len(result.shape) or actual != shape):
            raise self.fields.fail(
                f"tensor {result.name} has the shape {list(result.shape)}, not "
                f"[{', '.join(str(n or 'any') for n in shape)}]"
            )
        self.formats += [(weight, result.type) for weight in weights.split()]
        return result

    def join(self, weight: str, *pieces: tuple[TensorInfo, int]) -> None:
        """Record the storage format of a weight that consists of rows of several tensors.

        It is their ggml type. If the types differ, it is a mixed format with the sum of their
        bytes.

        Args:
            weight: Name of the weight in kvcalc, such as `qk`.
            pieces: (tensor, number of the tensor's rows that belong to the weight) for each tensor.
        """
        parts = [(tensor.type, tensor.shape[0], rows) for tensor, rows in pieces]
        self.formats.append((weight, joined_format(parts)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of this block that no reader has consumed yet; () if none.

        Args:
            name: Name of the tensor in the block, such as `attn_q`.
        """
        tensor = self.remaining.get(f"{name}.weight")
        return tensor.shape if tensor else ()

    def has(self, name: str) -> bool:
        """Return whether the block has a tensor with this name that no reader has consumed.

        Args:
            name: Name of the tensor in the block, such as `attn_q`.
        """
        return bool(self.shape(name))

    def bias(self, name: str) -> bool:
        """Return whether a tensor of this block has a bias tensor.

        The bias tensor is consumed: it is removed from `remaining`, because it is understood.

        Args:
            name: Name of the tensor in the block, such as `attn_q` for the bias tensor
                `attn_q.bias`.
        """
        return self.remaining.pop(f"{name}.bias", None) is not None

    def have_biases(self, *names: str) -> bool:
        """Return whether all these tensors of this block have bias tensors; False if none has.

        The bias tensors are consumed: they are removed from `remaining`, because they are
        understood.

        Args:
            names: Names of the tensors in the block, such as `attn_q`.

        Raises:
            UserError: Only some of the tensors have a bias.
        """
        results = {self.bias(name) for name in names}
        if len(results) > 1:
            raise self.fields.fail(
                f"block {self.number} has a bias on only some of {', '.join(names)}"
            )
        return results.pop()

    def vector(self, name: str) -> int:
        """Consume a vector and return its number of elements; 0 if the block has no such vector.

        Consuming removes the tensor from `remaining`.

        Args:
            name: Name of the tensor in the block.
        """
        result = self.remaining.pop(f"{name}.weight", None) or self.remaining.pop(name, None)
        return result.elements if result else 0

    def norms(self) -> int:
        """Consume this block's remaining norms of the residual stream, and return their number.

        These are the norm tensors with as many elements as the residual stream is wide. Whether
        they have biases is recorded in `norm_biases`.
        """
        names = [
            name.removesuffix(".weight")
            for name, tensor in self.remaining.items()
            if "norm" in name and not name.endswith(".bias") and tensor.shape == (self.width,)
        ]
        for name in names:
            self.vector(name)
            self.norm_biases.add(self.bias(name))
        return len(names)


def delta(b: GgufBlock) -> GatedDeltaNet:
    """Return the gated delta net of a Qwen3-Next or Qwen3.5 block, with sizes from its tensors.

    Queries, keys and values are one tensor, and their gate is another tensor. All are removed from
    `b.remaining`.
    """
    key_heads, value_heads = b.size("ssm.group_count"), b.size("ssm.time_step_rank")
    key, values = b.size("ssm.state_size"), b.size("ssm.inner_size")
    kernel = b.size("ssm.conv_kernel")
    channels = 2 * key_heads * key + values
    joined = b.take("qk", "attn_qkv", b.width, channels)
    b.join("v_gate", (joined, values), (b.take("", "attn_gate", b.width, values), values))
    if b.has("ssm_ba"):
        b.take("step_decay", "ssm_ba", b.width, 2 * value_heads)
    else:
        pieces = [b.take("", name, b.width, value_heads) for name in ("ssm_alpha", "ssm_beta")]
        b.join("step_decay", *((piece, value_heads) for piece in pieces))
    b.take("", "ssm_conv1d", kernel, channels)
    for name in ("ssm_a", "ssm_dt.bias", "ssm_norm"):
        b.vector(name)
    b.take("out", "ssm_out", values, b.width)
    return GatedDeltaNet(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key,
        linear_value_head_dim=values // value_heads,
        linear_conv_kernel_dim=kernel,
        conv_bias=b.bias("ssm_conv1d"),
    )


def mamba(b: GgufBlock) -> Mamba2:
    """Return the Mamba-2 mixer of a block, with sizes from its tensors.

    The tensors are removed from `b.remaining`. Mamba-1, with separate projections of the time step,
    is not supported.
    """
    inner, states = b.size("ssm.inner_size"), b.size("ssm.state_size")
    heads, kernel = b.size("ssm.time_step_rank"), b.size("ssm.conv_kernel")
    groups = b.size("ssm.group_count", 1)
    channels = inner + 2 * groups * states
    b.take("in in_bc", "ssm_in", b.width, inner + channels + heads)
    b.take("", "ssm_conv1d", kernel, channels)
    b.take("out", "ssm_out", inner, b.width)
    for name in ("ssm_a", "ssm_d", "ssm_dt.bias"):
        b.vector(name)
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        n_groups=groups,
        state_size=states,
        conv_kernel=kernel,
        conv_bias=b.bias("ssm_conv1d"),
        proj_bias=b.have_biases("ssm_in", "ssm_out"),
        gate_norm=bool(b.vector("ssm_norm")),
    )


def short_conv(b: GgufBlock) -> ShortConv:
    """Return LFM2's gated short convolution of a block, with sizes from its tensors.

    The tensors are removed from `b.remaining`.
    """
    kernel = b.size("shortconv.l_cache")
    b.take("in", "shortconv.in_proj", b.width, 3 * b.width)
    b.take("", "shortconv.conv", kernel, b.width)
    b.take("out", "shortconv.out_proj", b.width, b.width)
    bias = b.have_biases("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj")
    return ShortConv(width=b.width, conv_kernel=kernel, bias=bias)


def grouped(b: GgufBlock) -> Grouped:
    """Return the attention of a block (MHA, GQA or MQA), with sizes from its tensors.

    The projections of queries, keys and values may be one tensor. If the attention has an output
    gate, the query tensor contains it and is twice as wide. The tensors are removed from
    `b.remaining`.
    """
    width, heads = b.width, b.size("attention.head_count")
    if not b.fields.has("attention.key_length") and width % heads:
        raise b.fields.fail(f"block {b.number}: {heads} heads do not divide {width}")
    key = b.size("attention.key_length", width // heads)
    value = b.size("attention.value_length", key)
    groups = b.fields.size("attention.head_count_kv", heads, b.number)
    if not groups and b.has("attn_k"):  # some hybrids' lists say 0 of every layer
        groups = b.shape("attn_k")[-1] // key or 1
    options: JsonObject = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": key,
        "v_head_dim": value if value != key else None,
    }
    sizes = {"q": heads * key, "k": groups * key, "v": groups * value}
    if b.has("attn_qkv"):
        b.take("q k v", "attn_qkv", width, sum(sizes.values()))
        options |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), b.bias("attn_qkv"))
    else:
        weights = "q"
        if b.shape("attn_q") == (width, 2 * sizes["q"]):
            options["output_gate"] = "full"
            sizes["q"] *= 2
            weights = "q gate"
        for name, outputs in sizes.items():
            b.take(weights if name == "q" else name, f"attn_{name}", width, outputs)
            options[f"{name}_bias"] = b.bias(f"attn_{name}")
    if b.has("attn_gate"):
        is_per_head = b.shape("attn_gate") == (width, heads)
        b.take("gate", "attn_gate", width, heads if is_per_head else heads * value)
        options["output_gate"] = "head" if is_per_head else "full"
    b.take("o", "attn_output", heads * value, width)
    options |= {"o_bias": b.bias("attn_output"), "sinks": bool(b.vector("attn_sinks"))}
    norms = b.vector("attn_q_norm"), b.vector("attn_k_norm")
    if any(norms):
        if norms not in ((key, key), (heads * key, groups * key)):
            raise b.fields.fail(
                f"block {b.number} norms queries and keys of {norms[0]:,} and {norms[1]:,} elements"
            )
        options["qk_norm"] = "head" if norms[0] == key else "full"
        options["qk_norm_bias"] = b.have_biases("attn_q_norm", "attn_k_norm")
    if window := b.fields.window(b.number):
        is_chunk = b.fields.family == "llama4"
        options["attention_chunk_size" if is_chunk else "sliding_window"] = window
    return Grouped(**options)


def latent(b: GgufBlock) -> Latent:
    """Return the multi-head latent attention of a block, with sizes from its tensors.

    The matrix kv_up expands a latent to keys and values. It is one tensor, or two tensors per head:
    [qk_nope_head_dim, kv_lora_rank] and [kv_lora_rank, v_head_dim]. The tensors are removed from
    `b.remaining`.
    """
    heads, rank = b.size("attention.head_count"), b.size("attention.kv_lora_rank")
    rope = b.take("kv_down", "attn_kv_a_mqa", b.width, 0).shape[1] - rank
    q_rank = b.take("q_down", "attn_q_a", b.width, 0).shape[1] if b.has("attn_q_a") else 0
    names = ("q_up", "attn_q_b") if q_rank else ("q", "attn_q")
    queries = b.take(*names, q_rank or b.width, 0).shape[1]
    outputs = b.take("o", "attn_output", 0, b.width).shape[0]
    if rope < 0 or queries % heads or outputs % heads:
        raise b.fields.fail(f"block {b.number} has latents and heads that do not fit")
    nope, value = queries // heads - rope, outputs // heads
    is_joined = b.has("attn_kv_b")
    if is_joined:
        b.take("kv_up", "attn_kv_b", rank, heads * (nope + value))
    else:
        keys = b.take("", "attn_k_b", nope, rank, heads)
        values = b.take("", "attn_v_b", rank, value, heads)
        b.join("kv_up", (keys, rank * heads), (values, value * heads))
    return Latent(
        num_attention_heads=heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        q_lora_rank=q_rank or None,
        q_norm=bool(b.vector("attn_q_a_norm")),
        kv_norm=bool(b.vector("attn_kv_a_norm")),
        sliding_window=b.fields.window(b.number) or None,
        heads_cached=is_joined,
    )


def dense(b: GgufBlock, group: str = "", names: str = "ffn_{}") -> Dense:
    """Return a dense FFN of a block, with sizes from its tensors: up, down and an optional gate.

    The gate is a separate tensor, or one half of the tensor of up. The tensors are removed from
    `b.remaining`.

    Args:
        b: The block.
        group: Prefix of the names under which the weights' formats are recorded, such as `shared.`
            for shared experts (`shared.up`); '' for an FFN without experts.
        names: Pattern of tensor names, in which {} is up, gate or down.
    """
    gate, up, down = (names.format(name) for name in ("gate", "up", "down"))
    inner = b.take(f"{group}down", down, 0, b.width).shape[0]
    is_gated = b.has(gate)
    if not is_gated and b.shape(up) == (b.width, 2 * inner):
        b.take(f"{group}up {group}gate", up)
        bias, gated = b.bias(up), True
    else:
        b.take(f"{group}up", up, b.width, inner)
        if is_gated:
            b.take(f"{group}gate", gate, b.width, inner)
        bias, gated = b.have_biases(*((gate, up) if is_gated else (up,))), is_gated
    down_bias = b.bias(down)
    return Dense(
        intermediate_size=inner,
        gated=gated,
        bias=bias,
        down_bias=None if down_bias == bias else down_bias,
    )


def experts(b: GgufBlock) -> Moe:
    """Return the mixture of experts of a block, with sizes from its tensors.

    The tensors are a router, stacked experts, and shared experts if the block has any. They are
    removed from `b.remaining`.
    """
    count = b.take("router", "ffn_gate_inp", b.width, 0).shape[1]
    inner = b.take("experts.down", "ffn_down_exps", 0, b.width, count).shape[0]
    is_joined = b.has("ffn_gate_up_exps")
    gated = is_joined or b.has("ffn_gate_exps")
    names = ["ffn_down_exps"]
    if is_joined:
        names.append("ffn_gate_up_exps")
        b.take("experts.gate experts.up", names[-1], b.width, 2 * inner, count)
    else:
        for name in ("gate", "up") if gated else ("up",):
            names.append(f"ffn_{name}_exps")
            b.take(f"experts.{name}", names[-1], b.width, inner, count)
    options: JsonObject = {
        "router_bias": b.bias("ffn_gate_inp"),
        "bias": b.have_biases(*names),
        "gated": gated,
    }
    if b.has("ffn_down_shexp"):
        shared = dense(b, "shared.", "ffn_{}_shexp")
        options |= {
            "shared_expert_intermediate_size": shared.intermediate_size,
            "shared_gated": shared.gated,
            "shared_bias": shared.bias,
        }
    if b.has("ffn_gate_inp_shexp"):
        b.take("shared.weight", "ffn_gate_inp_shexp")
        options["shared_expert_gate"] = True
    return Moe(
        num_experts=count,
        num_experts_per_tok=b.size("expert_used_count"),
        moe_intermediate_size=inner,
        **options,
    )


# Tensors that do not count as parameters: rotary frequency factors and untrained routing biases.
BUFFERS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "exp_probs_b.bias",
)
_VECTOR_TYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}


def read_gguf(path: Path, read: ReadBytes | None = None) -> Model:
    """Return the model of a .gguf file or of its splits, with the storage format of each weight.

    Only the header is read. Blocks after the last layer are for multi-token prediction: their bytes
    count, but they are no parameters.

    Args:
        path: The file, or its first split.
        read: Function of (file name, first byte, number of bytes) that returns bytes of a file on a
            server; None for a file on this machine.

    Raises:
        UserError: Part of the file is not understood. The message names the part.
    """
    header = read_header(path.name, read or read_from(path.parent), str(path))
    f = Fields(header.metadata, str(path))
    blocks = [GgufBlock(f, n) for n in range(-1, f.layers)]
    buffers, vectors = _sort_tensors(header, blocks)

    layers = [_layer(block) for block in blocks[1:]]
    keys = [msgspec.json.encode(layer) for layer in layers]
    names = {key: f"layer_{n}" for n, key in enumerate(dict.fromkeys(keys), 1)}
    if len(names) == 1:
        names = {keys[0]: "layer"}
    model = Model(
        name=printable(re.sub(r"\.gguf$", "", path.name, flags=re.IGNORECASE), 80) or "gguf",
        family=f.family,
        model_type=f.family,
        hidden_size=f.width,
        layers=f.layers,
        pattern=tuple(names[key] for key in keys),
        kinds={names[key]: layer for key, layer in zip(keys, layers)},
        norm=_norm(blocks),
        dtype="fp16",
        max_context=f.size("context_length", 0) or None,
        buffers=buffers,
        **_outside(blocks[0]),
    )
    model.checked(f.file_name)
    stated = f.metadata.get("general.file_type")
    label = FILE_TYPES.get(stated, "gguf") if isinstance(stated, int) else "gguf"
    formats = {block.number: tuple(block.formats) for block in blocks}
    model = with_stored_formats(model, formats, label, vectors, buffers)
    file_bytes = sum(tensor.bytes for tensor in header.tensors.values())
    if (model_bytes := weight_bytes(model)) != file_bytes:
        raise f.fail(
            f"its tensors take {file_bytes:,} bytes, but {model_bytes:,} are understood"
        )
    return replace(model, notes=(f"read from the header of a GGUF file ({label})",))


def _sort_tensors(header: Header, blocks: list[GgufBlock]) -> tuple[int, str]:
    """Assign each tensor to its block. The first block has the tensors outside the layers.

    Returns:
        The bytes of buffers and of layers that predict further tokens, and the format of vectors.
    """
    buffers = 0
    vector_types = set()
    for tensor in header.tensors.values():
        match = re.fullmatch(r"blk\.([0-9]{1,5})\.(.*)", tensor.name)
        number, name = (int(match[1]), match[2]) if match else (-1, tensor.name)
        if name in BUFFERS or number >= len(blocks) - 1:
            buffers += tensor.bytes
            continue
        blocks[number + 1].remaining[name] = tensor
        if len(tensor.shape) == 1 or name.endswith(".bias"):
            vector_types.add(tensor.type)
    if len(vector_types) > 1 or not vector_types <= _VECTOR_TYPES.keys():
        raise blocks[0].fields.fail(
            f"its norms and biases are stored as {', '.join(sorted(vector_types))}; "
            "one plain type is read"
        )
    return buffers, _VECTOR_TYPES[vector_types.pop()] if vector_types else "fp32"


def _layer(b: GgufBlock) -> Layer:
    """Return the layer that a block's tensors form.

    Raises:
        UserError: A tensor of the block is not understood.
    """
    parts: list[Any] = []
    if b.has("attn_kv_a_mqa"):
        parts.append(latent(b))
    elif b.has("attn_gate") and b.has("attn_qkv"):
        parts.append(delta(b))
    elif b.has("attn_q") or b.has("attn_qkv"):
        parts.append(grouped(b))
    if b.has("ssm_in"):
        parts.append(mamba(b))
    elif b.has("shortconv.in_proj"):
        parts.append(short_conv(b))
    if b.has("ffn_gate_inp"):
        parts.append(experts(b))
    elif b.has("ffn_up"):
        parts.append(dense(b))
    norms = b.norms()
    b.fields.refuse(b.remaining.values())
    if not parts:
        raise b.fields.fail(f"block {b.number} holds no matrices")
    return Layer(parts=tuple(parts), norms=None if norms == len(parts) else norms)


def _outside(b: GgufBlock) -> JsonObject:
    """Consume the tensors outside the blocks, and return fields of the model."""
    table = b.take("embedding", "token_embd", b.width, 0).shape
    has_head, positions = b.has("output"), 0
    if has_head:
        b.take("lm_head", "output", *table)
    if b.has("position_embd"):
        positions = b.take("position_embedding", "position_embd", b.width, 0).shape[1]
    fields = {
        "vocab_size": table[1],
        "tie_word_embeddings": not has_head,
        "position_embeddings": positions,
        "final_norm": b.has("output_norm"),
        "embedding_norm": b.has("token_embd_norm"),
        "lm_head_bias": b.bias("output"),
    }
    b.norms()
    b.fields.refuse(b.remaining.values())
    return fields


def _norm(blocks: list[GgufBlock]) -> Norm:
    """Return the norm of the model."""
    biases = set().union(*(block.norm_biases for block in blocks))
    fields = blocks[0].fields
    if len(biases) > 1:
        raise fields.fail("some of its norms have biases and some have none")
    if not biases:
        return "none"
    if True in biases:
        return "layer"
    return "rms" if fields.has("attention.layer_norm_rms_epsilon") else "layer_no_bias"
