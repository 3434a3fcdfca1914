"""Read a GGUF file as a model: layers from tensors, block by block, and the rest from metadata.

A file with a tensor that is not understood is refused. Parameters and bytes are therefore
exactly the sums over its tensors. Names follow llama.cpp's gguf-py/gguf/constants.py.
"""

from pathlib import Path
from typing import Any

import msgspec

from kvcalc.errors import printable
from kvcalc.library.gguf_header import Fields, Header, TensorInfo, read_header
from kvcalc.library.gguf_tensors import (
    GgufBlock,
    delta,
    dense,
    experts,
    grouped,
    latent,
    mamba,
    short_conv,
)
from kvcalc.model.gguf_layout import split
from kvcalc.model.memory import weight_bytes
from kvcalc.model.model import Layer, Model, Norm
from kvcalc.records import JsonObject
from kvcalc.storage.ggml import FILE_TYPES

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
