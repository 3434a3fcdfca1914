"""How weights are stored: bits, scales and zero points of a matrix, and which matrices of a model a scheme covers.

Storage only. A weight-only scheme (int4, mxfp4…) is computed in bf16; `fp8` as W8A8 computes in fp8.
"""

import re
from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from kvcalc.errors import UserError, nearest


class WeightFormat(msgspec.Struct, frozen=True):
    """Storage of a matrix [inputs, outputs]: `bits` per element, and a scale for every block of rows × columns.

    rows, columns: elements of a block along inputs and outputs; 0 spans the whole matrix.
    scale_bytes: per block. zero_bits: per block, packed along the outputs. tensor_bytes: once per matrix.
    computes: the dtype of the products; '' means the model's own.
    """

    name: str
    bits: int
    rows: int = 0
    columns: int = 0
    scale_bytes: int = 0
    zero_bits: int = 0
    tensor_bytes: int = 0
    computes: str = ""

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of one matrix of inputs × outputs elements, scales and zero points included."""
        if not inputs * outputs:
            return 0
        blocks = -(-inputs // (self.rows or inputs)) * -(-outputs // (self.columns or outputs))
        zeros = -(-blocks * self.zero_bits // 8)
        scales = blocks * self.scale_bytes if self.scale_bytes else 0
        return -(-inputs * outputs * self.bits // 8) + scales + zeros + self.tensor_bytes


# Sources: DeepSeek-V3's release notes on its fp8 weights (128×128 blocks, fp32 scale); AutoAWQ and GPTQModel (groups of
# 128 along the inputs, fp16 scale, packed 4-bit zero; GPTQ's act-order index is not counted); OCP MX v1.0; NVIDIA
# ModelOpt (nvfp4: e4m3 scale per 16, one fp32 per matrix); bitsandbytes (nf4: blocks of 64, fp32 absmax).
WEIGHT_FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("fp64", 64),
        WeightFormat("fp32", 32),
        WeightFormat("bf16", 16),
        WeightFormat("fp16", 16),
        WeightFormat("fp8", 8, tensor_bytes=4, computes="fp8"),
        WeightFormat("fp8_per_channel", 8, columns=1, scale_bytes=4, computes="fp8"),
        WeightFormat("fp8_block128", 8, 128, 128, 4, computes="fp8"),
        WeightFormat("int8", 8, columns=1, scale_bytes=4, computes="int8"),
        WeightFormat("int8_weight_only", 8, columns=1, scale_bytes=2),
        WeightFormat("awq", 4, 128, 1, 2, zero_bits=4),
        WeightFormat("gptq", 4, 128, 1, 2, zero_bits=4),
        WeightFormat("int4", 4, 128, 1, 2),
        WeightFormat("int4_group32", 4, 32, 1, 2),
        WeightFormat("nf4", 4, 64, 1, 4),
        WeightFormat("mxfp4", 4, 32, 1, 1),
        WeightFormat("mxfp8", 8, 32, 1, 1, computes="fp8"),
        WeightFormat("nvfp4", 4, 16, 1, 1, tensor_bytes=4),
    )
}
_INTEGER = re.compile(r"int([2-8])_g(\d{1,6})(_zp)?")
_BLOCKS = re.compile(r"fp8_([1-9]\d{0,5})x([1-9]\d{0,5})")
_SPELLINGS = {
    "bitsandbytes": "nf4", "modelopt_fp4": "nvfp4", "modelopt": "fp8", "fp8_block": "fp8_block128",
    "w8a8": "int8", "w4a16": "int4", "none": "bf16", "gptq_marlin": "gptq", "awq_marlin": "awq",
}  # fmt: skip


def _integer_format(name: str) -> WeightFormat | None:
    """`int4_g32`: 4 bits, an fp16 scale per 32 inputs (0: per output); `_zp` adds a packed zero point per scale."""
    match = _INTEGER.fullmatch(name)
    if not match:
        return None
    bits, group = int(match[1]), int(match[2])
    return WeightFormat(name, bits, group, 1, 2, zero_bits=bits if match[3] else 0)


def _block_format(name: str) -> WeightFormat | None:
    """`fp8_64x128`: fp8 with an fp32 scale for every block of 64 inputs × 128 outputs."""
    match = _BLOCKS.fullmatch(name)
    return WeightFormat(name, 8, int(match[1]), int(match[2]), 4, computes="fp8") if match else None


def load_weight_format(name: str, what: str = "quantization") -> WeightFormat:
    """The weight format called `name`. Raises UserError naming near matches."""
    from kvcalc.storage.dtypes import canonical

    low = canonical(name)
    found = WEIGHT_FORMATS.get(_SPELLINGS.get(low, low)) or _integer_format(low) or _block_format(low)
    if found is None:
        raise UserError(f"unknown {what} {name!r}", hint=nearest(low, [*WEIGHT_FORMATS, "bitsandbytes", "modelopt"]))
    return found


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint stores in another format than its dtype: `format` for every matrix that `covers` matches.

    Names are those of `weights.Weight` behind the layer kind's name: `moe.experts.up`, `dense.q`, `embedding`, `lm_head`.
    Patterns are shell wildcards. Embeddings, vectors and whatever `except_for` matches stay in the model's dtype.
    """

    format: str
    covers: tuple[str, ...] = ("*",)
    except_for: tuple[str, ...] = ("embedding", "lm_head", "*.router")

    def weight_format(self, name: str) -> WeightFormat | None:
        """The format that this scheme stores matrix `name` in, or None where the matrix keeps the model's dtype."""
        return _covered(self, name)


@lru_cache(4096)
def _covered(scheme: Quantization, name: str) -> WeightFormat | None:
    if any(fnmatchcase(name, p) for p in scheme.except_for) or not any(fnmatchcase(name, p) for p in scheme.covers):
        return None
    return load_weight_format(scheme.format)
