"""Read a GGUF file as a model: layers from tensors, block by block, and the rest from metadata.

Each tensor is consumed once, with its expected shape. A file with a tensor that is not understood is
refused. Parameters and bytes are therefore exactly the sums over its tensors. Names follow
llama.cpp's gguf-py/gguf/constants.py.
"""

from pathlib import Path
from typing import Any

import msgspec

from kvcalc.errors import printable
from kvcalc.layers.attention import Grouped, Latent
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.layers.recurrent import GatedDeltaNet, Mamba, Mamba2, ShortConv
from kvcalc.library.gguf_header import Fields, Header, TensorInfo, read_header
from kvcalc.model.gguf_layout import split
from kvcalc.model.memory import weight_bytes
from kvcalc.model.model import Layer, Model, Norm
from kvcalc.records import JsonObject
from kvcalc.storage.ggml import FILE_TYPES, tensor_bytes


class GgufBlock:
    """The remaining tensors of a block, and the format of each weight built from the others.

    Raises:
        UserError: A tensor is missing, or its shape differs from the metadata.
    """

    def __init__(self, fields: Fields, number: int, tensors: dict[str, TensorInfo]) -> None:
        self.fields, self.number, self.remaining = fields, number, dict(tensors)
        self.formats: list[tuple[str, str]] = []

    def size(self, key: str, default: int | None = None) -> int:
        """Return a number from the metadata for this block, at least 1."""
        result = self.fields.size(key, default, self.number)
        if not result:
            raise self.fields.fail(f"block {self.number}: {key} is 0")
        return result

    def take(self, name: str, *shape: int) -> TensorInfo:
        """Consume a required tensor of this shape; 0 accepts any length."""
        result = self.remaining.pop(f"{name}.weight", None)
        if result is None:
            raise self.fields.fail(f"tensor blk.{self.number}.{name}.weight is missing")
        if shape and (
            len(shape) != len(result.shape)
            or any(n and n != m for n, m in zip(shape, result.shape, strict=True))
        ):
            expected = ", ".join(str(n or "any") for n in shape)
            raise self.fields.fail(
                f"tensor {result.name} has the shape {list(result.shape)}, not [{expected}]"
            )
        return result

    def matrix(self, weight: str, name: str, *shape: int) -> TensorInfo:
        """Consume a tensor that is one weight."""
        result = self.take(name, *shape)
        self.formats.append((weight, result.type))
        return result

    def pieces(self, weight: str, *pieces: tuple[TensorInfo, int]) -> None:
        """Record a weight that consists of rows of several tensors, as (tensor, number of rows)."""
        types = list(dict.fromkeys(tensor.type for tensor, _ in pieces))
        stored_bytes = sum(
            tensor_bytes(tensor.type, tensor.shape[0], rows) for tensor, rows in pieces
        )
        elements = sum(tensor.shape[0] * rows for tensor, rows in pieces)
        self.formats.append(
            (
                weight,
                types[0] if len(types) == 1 else f"{'_'.join(types)}@{stored_bytes}/{elements}",
            )
        )

    def has(self, name: str) -> bool:
        """Return whether a tensor has not been consumed."""
        return f"{name}.weight" in self.remaining

    def bias(self, name: str) -> bool:
        """Return whether a tensor has a bias, and consume the bias."""
        return self.remaining.pop(f"{name}.bias", None) is not None

    def have_biases(self, *names: str) -> bool:
        """Return whether these tensors have biases, and consume the biases.

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
        """Consume a vector and return its number of elements; 0 if it is absent."""
        result = self.remaining.pop(f"{name}.weight", None) or self.remaining.pop(name, None)
        return result.elements if result else 0


def delta(b: GgufBlock) -> GatedDeltaNet:
    """Return the gated delta net of Qwen3-Next and Qwen3.5.

    Queries, keys and values are one tensor, and their gate is another tensor.
    """
    width, kh, vh = (
        b.fields.width,
        b.size("ssm.group_count"),
        b.size("ssm.time_step_rank"),
    )
    dk, values, kernel = (
        b.size("ssm.state_size"),
        b.size("ssm.inner_size"),
        b.size("ssm.conv_kernel"),
    )
    keys = kh * dk
    joined, gate = (
        b.take("attn_qkv", width, 2 * keys + values),
        b.take("attn_gate", width, values),
    )
    b.formats.append(("qk", joined.type))
    b.pieces("v_gate", (joined, values), (gate, values))
    if b.has("ssm_ba"):
        b.matrix("step_decay", "ssm_ba", width, 2 * vh)
    else:
        b.pieces(
            "step_decay",
            (b.take("ssm_alpha", width, vh), vh),
            (b.take("ssm_beta", width, vh), vh),
        )
    b.take("ssm_conv1d", kernel, 2 * keys + values)
    for name in ("ssm_a", "ssm_dt.bias", "ssm_norm"):
        b.vector(name)
    b.matrix("out", "ssm_out", values, width)
    return GatedDeltaNet(
        linear_num_key_heads=kh,
        linear_num_value_heads=vh,
        linear_key_head_dim=dk,
        linear_value_head_dim=values // vh,
        linear_conv_kernel_dim=kernel,
        conv_bias=b.bias("ssm_conv1d"),
    )


def mamba(b: GgufBlock) -> Mamba | Mamba2:
    """Return Mamba if the time step has a separate projection, and Mamba-2 otherwise."""
    width, inner, states = (
        b.fields.width,
        b.size("ssm.inner_size"),
        b.size("ssm.state_size"),
    )
    rank, kernel = b.size("ssm.time_step_rank"), b.size("ssm.conv_kernel")
    step = b.has("ssm_x")
    groups = 0 if step else b.size("ssm.group_count", 1)
    projected = b.matrix(
        "in",
        "ssm_in",
        width,
        2 * inner if step else 2 * inner + 2 * groups * states + rank,
    )
    b.take("ssm_conv1d", kernel, inner if step else inner + 2 * groups * states)
    b.matrix("out", "ssm_out", inner, width)
    conv_bias, proj_bias = b.bias("ssm_conv1d"), b.have_biases("ssm_in", "ssm_out")
    for name in ("ssm_a", "ssm_d", "ssm_dt.bias"):
        b.vector(name)
    if step:
        b.matrix("x", "ssm_x", inner, rank + 2 * states)
        b.matrix("dt", "ssm_dt", rank, inner)
        normed = [b.vector(f"ssm_{name}_norm") for name in ("dt", "b", "c")]
        return Mamba(
            intermediate_size=inner,
            state_size=states,
            time_step_rank=rank,
            conv_kernel=kernel,
            conv_bias=conv_bias,
            proj_bias=proj_bias,
            inner_norms=any(normed),
        )
    b.formats.append(("in_bc", projected.type))
    return Mamba2(
        num_heads=rank,
        head_dim=inner // rank,
        state_size=states,
        n_groups=groups,
        conv_kernel=kernel,
        conv_bias=conv_bias,
        proj_bias=proj_bias,
        gate_norm=bool(b.vector("ssm_norm")),
    )


def short_conv(b: GgufBlock) -> ShortConv:
    """Return LFM2's convolution between two gates."""
    width, kernel = b.fields.width, b.size("shortconv.l_cache")
    b.matrix("in", "shortconv.in_proj", width, 3 * width)
    b.take("shortconv.conv", kernel, width)
    b.matrix("out", "shortconv.out_proj", width, width)
    return ShortConv(
        width=width,
        conv_kernel=kernel,
        bias=b.have_biases("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj"),
    )


def grouped(b: GgufBlock) -> Grouped:
    """Return attention with heads of keys and values.

    The projections may be one tensor. Queries with a gate are twice as wide.
    """
    width, heads = b.fields.width, b.size("attention.head_count")
    if not b.fields.has("attention.key_length") and width % heads:
        raise b.fields.fail(f"block {b.number}: {heads} heads do not divide {width}")
    key = b.size("attention.key_length", width // heads)
    value = b.size("attention.value_length", key)
    groups = b.fields.size("attention.head_count_kv", heads, b.number)
    if not groups and b.has("attn_k"):  # some hybrids' lists say 0 of every layer
        groups = b.remaining["attn_k.weight"].elements // (width * key) or 1
    options: JsonObject = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": key,
    }
    options |= {"v_head_dim": value} if value != key else {}
    if b.has("attn_qkv"):
        joined = b.take("attn_qkv", width, (heads + groups) * key + groups * value)
        b.formats += [(name, joined.type) for name in ("q", "k", "v")]
        options |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), b.bias("attn_qkv"))
    else:
        options |= _queries(b, heads * key) | {"q_bias": b.bias("attn_q")}
        for name, outputs in (("k", groups * key), ("v", groups * value)):
            b.matrix(name, f"attn_{name}", width, outputs)
            options[f"{name}_bias"] = b.bias(f"attn_{name}")
    if b.has("attn_gate"):
        gate = b.matrix("gate", "attn_gate", width, 0)
        if gate.shape[1] not in (heads, heads * value):
            raise b.fields.fail(
                f"tensor {gate.name} gates {gate.shape[1]:,} channels of {heads:,} heads of "
                f"{value:,}"
            )
        options["output_gate"] = "full" if gate.shape[1] == heads * value else "head"
    b.matrix("o", "attn_output", heads * value, width)
    options |= {"o_bias": b.bias("attn_output"), "sinks": bool(b.vector("attn_sinks"))}
    options |= _head_norms(b, heads, groups, key)
    if window := b.fields.window(b.number):
        options["attention_chunk_size" if b.fields.family == "llama4" else "sliding_window"] = (
            window
        )
    return Grouped(**options)


def _queries(b: GgufBlock, outputs: int) -> JsonObject:
    """Consume the query projection; return `output_gate` if it also has the gates."""
    queries = b.matrix("q", "attn_q", b.fields.width, 0)
    if queries.shape[1] == 2 * outputs:
        b.formats.append(("gate", queries.type))
        return {"output_gate": "full"}
    if queries.shape[1] != outputs:
        raise b.fields.fail(
            f"tensor {queries.name} has the shape {list(queries.shape)}, not [{b.fields.width}, "
            f"{outputs}]"
        )
    return {}


def _head_norms(b: GgufBlock, heads: int, groups: int, width: int) -> JsonObject:
    """Consume the norms of queries and keys; return the kind of norm."""
    queries, keys = b.vector("attn_q_norm"), b.vector("attn_k_norm")
    if not queries and not keys:
        return {}
    if (queries, keys) not in ((width, width), (heads * width, groups * width)):
        raise b.fields.fail(
            f"block {b.number} norms queries and keys of {queries:,} and {keys:,} elements"
        )
    return {
        "qk_norm": "head" if queries == width else "full",
        "qk_norm_bias": b.have_biases("attn_q_norm", "attn_k_norm"),
    }


def latent(b: GgufBlock) -> Latent:
    """Return MLA. Its kv_up is one tensor, or two: [dn, r] and [r, dv] for each head."""
    width, heads, rank = (
        b.fields.width,
        b.size("attention.head_count"),
        b.size("attention.kv_lora_rank"),
    )
    down = b.matrix("kv_down", "attn_kv_a_mqa", width, 0)
    rope = down.shape[1] - rank
    q_rank = b.matrix("q_down", "attn_q_a", width, 0).shape[1] if b.has("attn_q_a") else 0
    queries = b.matrix(
        "q_up" if q_rank else "q",
        "attn_q_b" if q_rank else "attn_q",
        q_rank or width,
        0,
    )
    out = b.matrix("o", "attn_output", 0, width)
    if rope < 0 or queries.shape[1] % heads or out.shape[0] % heads:
        raise b.fields.fail(f"block {b.number} has latents and heads that do not fit")
    nope, value = queries.shape[1] // heads - rope, out.shape[0] // heads
    is_joined = b.has("attn_kv_b")
    if is_joined:
        b.matrix("kv_up", "attn_kv_b", rank, heads * (nope + value))
    else:
        keys, values = (
            b.take("attn_k_b", nope, rank, heads),
            b.take("attn_v_b", rank, value, heads),
        )
        b.pieces("kv_up", (keys, rank * heads), (values, value * heads))
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
    """Return a dense FFN: up, down and an optional gate.

    The gate is a separate tensor or the other half of up.
    """
    gate, up, down = (names.format(name) for name in ("gate", "up", "down"))
    inner = b.matrix(f"{group}down", down, 0, b.fields.width).shape[0]
    joined = not b.has(gate) and b.has(up) and b.remaining[f"{up}.weight"].shape[1] == 2 * inner
    gated = joined or b.has(gate)
    wide = b.matrix(f"{group}up", up, b.fields.width, 2 * inner if joined else inner)
    if joined:
        b.formats.append((f"{group}gate", wide.type))
    elif gated:
        b.matrix(f"{group}gate", gate, b.fields.width, inner)
    bias, below = (
        b.have_biases(*((gate, up) if gated and not joined else (up,))),
        b.bias(down),
    )
    return Dense(
        intermediate_size=inner,
        gated=gated,
        bias=bias,
        down_bias=None if below == bias else below,
    )


def experts(b: GgufBlock) -> Moe:
    """Return the experts of a block: a router, stacked experts, and shared experts if it has any."""
    width = b.fields.width
    count = b.matrix("router", "ffn_gate_inp", width, 0).shape[1]
    inner = b.matrix("experts.down", "ffn_down_exps", 0, width, count).shape[0]
    names = ["ffn_down_exps"]
    gated = b.has("ffn_gate_up_exps") or b.has("ffn_gate_exps")
    if b.has("ffn_gate_up_exps"):
        joined = b.take("ffn_gate_up_exps", width, 2 * inner, count)
        b.formats += [("experts.gate", joined.type), ("experts.up", joined.type)]
        names.append("ffn_gate_up_exps")
    else:
        for name in ("gate", "up") if gated else ("up",):
            b.matrix(f"experts.{name}", f"ffn_{name}_exps", width, inner, count)
            names.append(f"ffn_{name}_exps")
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
        }
        options["shared_bias"] = shared.bias
    if b.has("ffn_gate_inp_shexp"):
        b.matrix("shared.weight", "ffn_gate_inp_shexp")
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


def read_gguf(path: Path) -> Model:
    """Return the model of a .gguf file or of its splits, with its storage formats.

    Raises:
        UserError: Part of the file is not understood. The message names it.
    """
    header = read_header(path)
    return _File(header, str(path), path.name[: -len(".gguf")]).model()


class _File:
    """The tensors of a file, sorted into blocks and outside tensors."""

    def __init__(self, header: Header, file_name: str, name: str) -> None:
        self.fields, self.name = (
            Fields(header.metadata, file_name),
            printable(name, 80) or "gguf",
        )
        self.file_bytes = sum(tensor.bytes for tensor in header.tensors.values())
        self.outer: dict[str, TensorInfo] = {}
        self.blocks: list[dict[str, TensorInfo]] = [{} for _ in range(self.fields.layers)]
        self.buffers = 0
        self.biased: set[bool] = set()  # whether norms of the layers have biases
        for tensor in header.tensors.values():
            self._place(tensor)

    def _place(self, tensor: TensorInfo) -> None:
        """Sort a tensor into its block or among the outside tensors.

        Blocks after the last layer predict further tokens and do not count as parameters.
        """
        head, _, tail = tensor.name.partition(".")
        number, _, name = tail.partition(".")
        if head != "blk" or not (number.isascii() and number.isdigit() and len(number) < 6):
            number, name = "", tensor.name
        if name in BUFFERS or (number and int(number) >= len(self.blocks)):
            self.buffers += tensor.bytes
        else:
            (self.blocks[int(number)] if number else self.outer)[name] = tensor

    def model(self) -> Model:
        """Return the model if every tensor belongs to it."""
        f = self.fields
        vectors = self._vectors()
        blocks = [GgufBlock(f, n, tensors) for n, tensors in enumerate(self.blocks)]
        layers = [self._layer(block) for block in blocks]
        biased, outside, outer_formats = self._outside()
        keys = [msgspec.json.encode(layer) for layer in layers]
        distinct = list(dict.fromkeys(keys))
        names = {
            key: f"layer_{n + 1}" if len(distinct) > 1 else "layer"
            for n, key in enumerate(distinct)
        }
        result = Model(
            name=self.name,
            family=f.family,
            model_type=f.family,
            hidden_size=f.width,
            layers=f.layers,
            pattern=tuple(names[key] for key in keys),
            kinds={names[key]: layer for key, layer in zip(keys, layers, strict=True)},
            norm=self._norm(biased | self.biased),
            dtype="fp16",
            max_context=f.size("context_length", 0) or None,
            buffers=self.buffers,
            **outside,
        )
        key, problem = result.problem()
        if problem:
            raise f.fail(f"{key}: {problem}")
        stated = f.metadata.get("general.file_type")
        label = FILE_TYPES.get(stated, "gguf") if isinstance(stated, int) else "gguf"
        formats = {n: tuple(block.formats) for n, block in enumerate(blocks)} | {
            -1: outer_formats
        }
        return self._checked(split(result, formats, label, vectors, self.buffers), label)

    def _layer(self, b: GgufBlock) -> Layer:
        """Return the layer that a block's tensors form.

        Raises:
            UserError: A tensor of the block is not understood.
        """
        results: list[Any] = []
        if b.has("attn_kv_a_mqa"):
            results.append(latent(b))
        elif b.has("attn_gate") and b.has("attn_qkv"):
            results.append(delta(b))
        elif b.has("attn_q") or b.has("attn_qkv"):
            results.append(grouped(b))
        results += (
            [mamba(b)]
            if b.has("ssm_in")
            else [short_conv(b)]
            if b.has("shortconv.in_proj")
            else []
        )
        results += (
            [experts(b)] if b.has("ffn_gate_inp") else [dense(b)] if b.has("ffn_up") else []
        )
        norms = self._norms(b)
        self.fields.refuse(b.remaining.values())
        if not results:
            raise self.fields.fail(f"block {b.number} holds no matrices")
        return Layer(parts=tuple(results), norms=None if norms == len(results) else norms)

    def _norms(self, b: GgufBlock) -> int:
        """Return the number of remaining norms of the residual's width; these belong to the
        layer."""
        names = [
            name
            for name, t in b.remaining.items()
            if "norm" in name and not name.endswith(".bias") and t.shape == (b.fields.width,)
        ]
        for name in names:
            del b.remaining[name]
            self.biased.add(b.bias(name.removesuffix(".weight")))
        return len(names)

    def _outside(self) -> tuple[set[bool], JsonObject, tuple[tuple[str, str], ...]]:
        """Return whether outside norms have biases, model fields, and formats of outside
        tensors."""
        f, outer = self.fields, dict(self.outer)
        table, head, positions = (
            outer.pop(f"{n}.weight", None) for n in ("token_embd", "output", "position_embd")
        )
        if table is None or len(table.shape) != 2 or table.shape[0] != f.width:
            raise f.fail("it has no token_embd.weight of the width that its metadata give")
        if head is not None and head.shape != table.shape:
            raise f.fail("output.weight has another shape than token_embd.weight")
        if positions is not None and (
            len(positions.shape) != 2 or positions.shape[0] != f.width
        ):
            raise f.fail("position_embd.weight has another width than token_embd.weight")
        norms = {
            name: outer.pop(f"{name}.weight", None) is not None
            for name in ("output_norm", "token_embd_norm")
        }
        biased = {
            outer.pop(f"{name}.bias", None) is not None
            for name, exists in norms.items()
            if exists
        }
        fields = {
            "vocab_size": table.shape[1],
            "tie_word_embeddings": head is None,
            "position_embeddings": positions.shape[1] if positions is not None else 0,
            "final_norm": norms["output_norm"],
            "embedding_norm": norms["token_embd_norm"],
            "lm_head_bias": outer.pop("output.bias", None) is not None,
        }
        f.refuse(outer.values())
        tensors = (
            ("embedding", table),
            ("lm_head", head),
            ("position_embedding", positions),
        )
        return (
            biased,
            fields,
            tuple((name, tensor.type) for name, tensor in tensors if tensor is not None),
        )

    def _norm(self, biased: set[bool]) -> Norm:
        if len(biased) > 1:
            raise self.fields.fail("some of its norms have biases and some have none")
        rms = self.fields.has("attention.layer_norm_rms_epsilon")
        return (
            "none"
            if not biased
            else "layer"
            if biased == {True}
            else "rms"
            if rms
            else "layer_no_bias"
        )

    def _vectors(self) -> str:
        """Return the format of norms and biases; a file stores all of them in the same format."""
        tensors = [t for place in (self.outer, *self.blocks) for t in place.values()]
        types = {t.type for t in tensors if len(t.shape) == 1 or t.name.endswith(".bias")} or {
            "f32"
        }
        if len(types) > 1 or not types <= _VECTOR_TYPES.keys():
            raise self.fields.fail(
                f"its norms and biases are stored as {', '.join(sorted(types))}; one plain type "
                "is read"
            )
        return _VECTOR_TYPES[types.pop()]

    def _checked(self, model: Model, label: str) -> Model:
        """Return the model if its bytes equal the bytes of the tensors."""
        if (understood := weight_bytes(model)) != self.file_bytes:
            raise self.fields.fail(
                f"its tensors take {self.file_bytes:,} bytes, but {understood:,} are understood"
            )
        return msgspec.structs.replace(
            model, notes=(f"read from the header of a GGUF file ({label})",)
        )
