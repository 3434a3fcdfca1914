"""GGUF: bytes of ggml types, and names of file types.

Sources in llama.cpp: ggml-common.h (block sizes), src/llama-quant.cpp (`llama_ftype_get_default_type`).
"""

# ggml type → (elements of a block along a row, bytes of a block)
BLOCKS: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "f64": (1, 8), "i8": (1, 1), "i16": (1, 2), "i32": (1, 4), "i64": (1, 8),
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "iq4_nl": (32, 18),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82),
    "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq4_xs": (256, 136), "tq1_0": (256, 54), "tq2_0": (256, 66),
    "mxfp4_ggml": (32, 17), "nvfp4_ggml": (64, 36), "q1_0": (128, 18),
}  # fmt: skip
# What a file's header calls them (enum ggml_type in ggml.h).
TYPES: dict[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k",
    13: "q5_k", 14: "q6_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s",
    23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0",
    39: "mxfp4_ggml", 40: "nvfp4_ggml", 41: "q1_0",
}  # fmt: skip
# File type → the type that it starts from.
MIXES: dict[str, str] = {
    "f32": "f32", "f16": "f16", "q4_0": "q4_0", "q4_1": "q4_1", "q5_0": "q5_0", "q5_1": "q5_1", "q8_0": "q8_0",
    "q2_k": "q2_k", "q2_k_s": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_k_s": "q4_k",
    "q4_k_m": "q4_k", "q5_k_s": "q5_k", "q5_k_m": "q5_k", "q6_k": "q6_k", "tq1_0": "tq1_0", "tq2_0": "tq2_0",
    "iq1_s": "iq1_s", "iq1_m": "iq1_m", "iq2_xxs": "iq2_xxs", "iq2_xs": "iq2_xs", "iq2_s": "iq2_xs", "iq2_m": "iq2_s",
    "iq3_xxs": "iq3_xxs", "iq3_xs": "iq3_s", "iq3_s": "iq3_s", "iq3_m": "iq3_s", "iq4_nl": "iq4_nl", "iq4_xs": "iq4_xs",
    "mxfp4_moe": "mxfp4_ggml",
}  # fmt: skip
# What a file's metadata call them (enum llama_ftype in llama.h).
FILE_TYPES: dict[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s", 12: "q3_k_m",
    13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k", 19: "iq2_xxs", 20: "iq2_xs",
    21: "q2_k_s", 22: "iq3_xs", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl", 26: "iq3_s", 27: "iq3_m", 28: "iq2_s",
    29: "iq2_m", 30: "iq4_xs", 31: "iq1_m", 32: "bf16", 36: "tq1_0", 37: "tq2_0", 38: "mxfp4_moe",
}  # fmt: skip
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
IMATRIX = "+imatrix"
# Made with an importance matrix only, because some of their types need one.
_NEED_IMATRIX = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"}


def mix_of(name: str) -> tuple[str, bool] | None:
    """Return (file type, whether an importance matrix was used), or None for other names.

    Accepts `q4_k_m`, `Q4_K` and `iq4_xs+imatrix`.
    """
    low = name.strip().lower()
    plain = low.removesuffix(IMATRIX)
    plain = _ALIASES.get(plain, plain)
    return (plain, low.endswith(IMATRIX) or plain in _NEED_IMATRIX) if plain in MIXES else None


def tensor_bytes(type_: str, row: int, rows: int) -> int:
    """Return the bytes of `rows` rows of `row` elements, in whole blocks."""
    elements, held = BLOCKS[type_]
    return rows * -(-row // elements) * held
