"""Write GGUF headers by hand, as ggml's docs/gguf.md describes them. No library is used."""

import struct
from pathlib import Path
from typing import Any

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 8, 12, 14, 30
Tensors = dict[str, tuple[tuple[int, ...], int]]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """Return a type and a value: bool, u32, f32, text, or a list of texts or of i32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def header(metadata: dict[str, Any], tensors: Tensors, version: int = 3) -> bytes:
    """Return a header: magic, version and counts, each entry, and each tensor with its dimensions, type and a dummy offset."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + typed(value) for key, value in metadata.items()]
    for name, (shape, kind) in tensors.items():
        parts.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0))
    return b"".join(parts)


def write(path: Path, metadata: dict[str, Any], tensors: Tensors, version: int = 3) -> Path:
    path.write_bytes(header(metadata, tensors, version))
    return path


def llama(layers: int = 3, **more: Any) -> dict[str, Any]:
    """Return the metadata of a Llama of width 256 with 4 query heads and 2 KV heads of 64, an FFN of 512, and a few tokens."""
    return {
        "general.architecture": "llama", "general.file_type": 15, "llama.block_count": layers, "llama.context_length": 4096,
        "llama.embedding_length": 256, "llama.feed_forward_length": 512, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": ["a", "bc", ""], "tokenizer.ggml.token_type": [1] * 5000,
    } | more  # fmt: skip


def llama_tensors(layers: int = 3, down: int = Q4_K, kind: int = Q4_K) -> Tensors:
    """Return the tensors of `llama`: matrices in `kind`, the FFN's down of layer 0 in `down`, the head in Q6_K, norms in F32."""
    found: Tensors = {
        "token_embd.weight": ((256, 1000), kind), "output.weight": ((256, 1000), Q6_K), "output_norm.weight": ((256,), F32),
        "rope_freqs.weight": ((32,), F32),
    }  # fmt: skip
    for n in range(layers):
        block = {
            "attn_norm": ((256,), F32), "ffn_norm": ((256,), F32), "attn_q": ((256, 256), kind), "attn_k": ((256, 128), kind),
            "attn_v": ((256, 128), kind), "attn_output": ((256, 256), kind), "ffn_gate": ((256, 512), kind),
            "ffn_up": ((256, 512), kind), "ffn_down": ((512, 256), kind if n else down),
        }  # fmt: skip
        found |= {f"blk.{n}.{name}.weight": tensor for name, tensor in block.items()}
    return found
