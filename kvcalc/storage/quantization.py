"""Storage formats of weights, the matrices to which a scheme applies, and published quality losses.

A weight-only scheme (int4, awq, `nvfp4_weight_only` …) computes in the model's dtype. `fp8` (W8A8)
computes in fp8, `nvfp4` and `mxfp4` (4-bit activations) in fp4, and GGUF's blocks in int8. The
bytes of a matrix include packed values, scales, zero points, indices and codebooks. They do not
include values that all matrices share, such as the 16 levels of NF4.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError, nearest
from kvcalc.storage.formats import canonical, first_words, read_table
from kvcalc.storage.ggml import BLOCKS, MIXES


class WeightFormat(msgspec.Struct, frozen=True):
    """Storage format of a matrix [inputs, outputs].

    A block is a part of the matrix whose elements share one scale. The bytes of a matrix follow
    from these fields.

    Attributes:
        name: Name, such as awq.
        bits: Bits per element, without scales and zero points.
        rows: Elements of a block along the inputs; 0 for all inputs.
        columns: Elements of a block along the outputs; 0 for all outputs.
        scale_bytes: Bytes of the scale of each block.
        zero_bits: Bits of the zero point of each block, packed along the outputs.
        tensor_bytes: Bytes that each matrix has in addition, such as 4 for one scale per matrix.
        computes: Dtype of the matrix products; '' for the model's dtype, into which weights are
            then converted. `fp4/int8` is fp4 on GPUs with fp4 units, else int8.
        flat: Whether blocks of `rows` elements run over the flattened matrix, as in bitsandbytes,
            and not over each row.
        nested: Number of blocks whose scales share one fp32 scale; 0 for none.
        input_bytes: Bytes that each input adds, such as 4 for GPTQ's int32 index.
        measured: (bytes, elements) of the matrix in its file. Bytes per element then follow from
            this ratio, and the other sizes are not used. None for no such ratio.
    """

    name: str
    bits: int
    rows: int = 0
    columns: int = 0
    scale_bytes: int = 0
    zero_bits: int = 0
    tensor_bytes: int = 0
    computes: str = ""
    flat: bool = False
    nested: int = 0
    input_bytes: int = 0
    measured: tuple[int, int] | None = None

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes of one matrix [inputs, outputs], with scales, zero points and indices.

        Args:
            inputs: Number of rows of the matrix, which are inputs of the product.
            outputs: Number of columns of the matrix, which are its outputs.
        """
        elements = inputs * outputs
        if not elements:
            return 0
        if self.measured:
            return -(-elements * self.measured[0] // self.measured[1])
        blocks = -(-inputs // (self.rows or inputs)) * -(-outputs // (self.columns or outputs))
        if self.flat:
            blocks = -(-elements // self.rows)
        scale_bytes = blocks * self.scale_bytes
        if self.nested:
            scale_bytes += 4 * -(-blocks // self.nested)
        element_bytes = -(-elements * self.bits // 8)
        zero_bytes = -(-blocks * self.zero_bits // 8)
        other_bytes = inputs * self.input_bytes + self.tensor_bytes
        return element_bytes + scale_bytes + zero_bytes + other_bytes


# Sources: DeepSeek-V3's release notes on its fp8 weights (128×128 blocks, fp32 scale) and V4.1's
# tensors (32×32, a byte); AutoAWQ and GPTQModel (groups of 128 along the inputs, fp16 scale, packed
# 4-bit zero); OCP MX v1.0; NVIDIA ModelOpt (nvfp4: e4m3 scale per 16, one fp32 per matrix);
# bitsandbytes/functional.py (nf4, fp4: blocks of 64 of the flattened matrix, fp32 absmax; with
# double quantisation an int8 absmax and an fp32 for 256 of them, QLoRA, arXiv 2305.14314 §3).
_FORMAT_TABLE = """
    name                 bits rows columns scale_bytes zero_bits tensor_bytes flat nested computes
    fp64                 64   0    0       0           0         0            0    0
    fp32                 32   0    0       0           0         0            0    0
    bf16                 16   0    0       0           0         0            0    0
    fp16                 16   0    0       0           0         0            0    0
    fp8                  8    0    0       0           0         4            0    0      fp8
    fp8_per_channel      8    0    1       4           0         0            0    0      fp8
    fp8_block128         8    128  128     4           0         0            0    0      fp8
    fp8_block32          8    32   32      1           0         0            0    0      fp8
    int8                 8    0    1       4           0         0            0    0      int8
    int8_weight_only     8    0    1       2           0         0            0    0
    fp8_weight_only      8    0    1       2           0         0            0    0
    awq                  4    128  1       2           4         0            0    0
    gptq                 4    128  1       2           4         0            0    0
    int4                 4    128  1       2           0         0            0    0
    int4_group32         4    32   1       2           0         0            0    0
    nf4                  4    64   0       4           0         0            1    0
    fp4                  4    64   0       4           0         0            1    0
    nf4_double           4    64   0       1           0         0            1    256
    fp4_double           4    64   0       1           0         0            1    256
    mxfp4                4    32   1       1           0         0            0    0      fp4
    mxfp4_weight_only    4    32   1       1           0         0            0    0
    mxfp8                8    32   1       1           0         0            0    0      fp8
    nvfp4                4    16   1       1           0         4            0    0      fp4
    nvfp4_weight_only    4    16   1       1           0         4            0    0
"""
WEIGHT_FORMATS = read_table(_FORMAT_TABLE, WeightFormat)
# Dtypes in which products of GGUF types compute; '' is the model's own. llama.cpp multiplies f16
# with fp16 accumulators (CUBLAS_COMPUTE_16F in ggml-cuda.cu). Other types compute in int8
# (ggml-cuda/mmq.cu), 4-bit floats in fp4 on Blackwell.
_FLOATS = {"f32": "", "f16": "fp16", "f64": ""}


_BLOCK_FORMATS = {
    name: WeightFormat(
        name,
        0,
        rows,
        1,
        block_bytes,
        computes=_FLOATS.get(name, "fp4/int8" if name.endswith("fp4_ggml") else "int8"),
    )
    for name, (rows, block_bytes) in BLOCKS.items()
    if name not in WEIGHT_FORMATS
}
# A format, and other names for it.
_SPELLINGS = first_words("""
    nf4               bitsandbytes bnb bnb-4bit
    nf4_double        bnb-nf4
    fp4_double        bnb-fp4
    nvfp4             modelopt_fp4
    fp8               modelopt
    fp8_block128      fp8_block
    int8              w8a8
    int4              w4a16
    bf16              none
    gptq              gptq_marlin
    awq               awq_marlin
    int8_weight_only  eetq
""")


def _integers(
    name: str, bits: str, group: str, zero: str | None, index: str | None
) -> WeightFormat:
    rows = max(int(group), 0)
    zero_bits = int(bits) if zero else 0
    return WeightFormat(name, int(bits), rows, 1, 2, zero_bits, input_bytes=4 if index else 0)


def _blocks(name: str, rows: str, columns: str) -> WeightFormat:
    return WeightFormat(name, 8, int(rows), int(columns), 4, computes="fp8")


def _scale16(name: str, base: str, zero: str | None) -> WeightFormat:
    wide = stored_format(base)
    return replace(
        wide,
        name=name,
        scale_bytes=min(wide.scale_bytes, 2),
        tensor_bytes=min(wide.tensor_bytes, 2),
        zero_bits=8 if zero else 0,
    )


def family(name: str) -> str:
    """Return the name of a weight format without the suffix for 16-bit scales.

    `fp8_scale16` and `fp8_scale16_zp` give `fp8`; a name without this suffix is unchanged. Kernels
    and published scores do not distinguish formats by the width of their scales.

    Args:
        name: Name of a weight format.
    """
    match = re.fullmatch(_SCALE16, name)
    return match[1] if match else name


def _measured(name: str, block_bytes: str, elements: str) -> WeightFormat:
    computes = next(
        (f.computes for block, f in _BLOCK_FORMATS.items() if name.startswith(block)), ""
    )
    return WeightFormat(name, 0, measured=(int(block_bytes), int(elements)), computes=computes)


# Names that carry their numbers. `int4_g32`: 4 bits, an fp16 scale per 32 inputs (0 or -1: per
# output), `_zp` a packed zero point per scale, `_index` the int32 per input of GPTQ's activation
# order. `fp8_64x128`: an fp32 scale for 64 inputs × 128 outputs. `q4_k@5/8`: 5 bytes for 8 elements
# of one matrix.
# `fp8_scale16`, `int8_scale16_zp`: fp8 and int8 with scales of 16 bits in place of fp32, and `_zp`
# a zero point of one byte for each. compressed-tensors gives scales the dtype of the weights.
_SCALE16 = r"(int8|fp8(?:_per_channel|_block128|_[1-9]\d{0,5}x[1-9]\d{0,5})?)_scale16(_zp)?"
_NAME_PATTERNS: dict[str, Callable[..., WeightFormat]] = {
    r"int([2-8])_g(\d{1,6}|-1)(_zp)?(_index)?": _integers,
    r"fp8_([1-9]\d{0,5})x([1-9]\d{0,5})": _blocks,
    _SCALE16: _scale16,
    r"[a-z0-9_]{1,60}@(\d{1,15})/([1-9]\d{0,14})": _measured,
}


COMMON_FORMATS = "Common: fp8, int8, awq, gptq, nvfp4, mxfp4, q4_k_m, q8_0"
FORMATS_OF_BITS = {  # formats by the width that users may type
    "4bit": "4-bit formats: int4, awq, gptq, nvfp4, mxfp4 and GGUF's q4_k_m",
    "8bit": "8-bit formats: fp8, int8 and GGUF's q8_0",
}


def find_format(name: str) -> WeightFormat | None:
    """Return the weight format with this canonical name, or None."""
    plain = _SPELLINGS.get(name, name)
    if result := WEIGHT_FORMATS.get(plain) or _BLOCK_FORMATS.get(plain):
        return result
    for pattern, build in _NAME_PATTERNS.items():
        if match := re.fullmatch(pattern, name):
            return build(name, *match.groups())
    return None


def load_weight_format(name: str) -> WeightFormat:
    """Return the weight format for a name that the user typed, such as `awq` or `q4_k`.

    The bytes of a matrix follow from the result.

    Args:
        name: The name, in any spelling.

    Raises:
        UserError: The name is unknown. The message names near matches.
    """
    low = canonical(name)
    result = find_format(low)
    if result is None:
        near = nearest(low, [*WEIGHT_FORMATS, *MIXES, "bitsandbytes", "modelopt"])
        raise UserError(
            f"unknown quantization {name!r}",
            FORMATS_OF_BITS.get(low.replace("-", "").replace("_", ""), near or COMMON_FORMATS),
        )
    return result


@lru_cache(1024)
def stored_format(name: str) -> WeightFormat:
    """Return the weight format for a name that kvcalc read from a checkpoint.

    Only its error message differs from that of `load_weight_format`, because no user typed the
    name.

    Args:
        name: Name of the format, as in `Quantization.format`.

    Raises:
        UserError: The bytes of the format are unknown. The message suggests `--dtype bf16`.
    """
    result = find_format(name)
    if result is None:
        text = (
            f"the checkpoint stores its weights as {name!r}, whose bytes do not follow from "
            "its config"
        )
        raise UserError(text, "--dtype bf16 counts them unquantised")
    return result


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quantisation scheme: which weights a checkpoint stores in one format other than its dtype.

    Weight names are `kind.weight` with the name of a kind of layer, such as `moe.experts.up` or
    `dense.q`, or `embedding` or `lm_head`. Patterns are shell wildcards: `*.router` covers every
    router.

    Attributes:
        format: Name of the weight format.
        covers: Patterns of weight names in this format.
        except_for: Patterns of weight names that stay in the dtype of the model.
        kinds: Kinds of weight that the scheme may cover: `matrix`, `table` (lookup tables such as
            the embedding), `vector` (norms, and all biases).
        label: Printed name of the whole quantisation if it has several schemes, such as the GGUF
            file type `q4_k_m`; '' to print `format`.
    """

    format: str
    covers: tuple[str, ...] = ("*",)
    except_for: tuple[str, ...] = ("embedding", "lm_head", "*.router")
    kinds: tuple[str, ...] = ("matrix",)
    label: str = ""

    def covering(self, name: str, kind: str) -> bool:
        """Return whether this scheme's format applies to a weight.

        It does if the scheme covers this kind of weight, and the name matches a pattern of `covers`
        and none of `except_for`.

        Args:
            name: Full name `kind.weight`, such as `dense.q`.
            kind: Kind of the weight: `matrix`, `table` or `vector`.
        """
        return kind in self.kinds and _covers(self, name)

    def weight_format(self, name: str, kind: str) -> WeightFormat | None:
        """Return the format in which the scheme stores a weight; None if it does not cover it.

        Args:
            name: Full name `kind.weight`, such as `dense.q`.
            kind: Kind of the weight: `matrix`, `table` or `vector`.
        """
        return stored_format(self.format) if self.covering(name, kind) else None


@lru_cache(65536)
def _covers(scheme: Quantization, name: str) -> bool:
    left_out = any(fnmatchcase(name, p) for p in scheme.except_for)
    return not left_out and any(fnmatchcase(name, p) for p in scheme.covers)


class Score(msgspec.Struct, frozen=True):
    """A published benchmark score of a model with quantised weights or cache, and the reference.

    The pair shows how much quality a storage format costs.

    Attributes:
        value: Score of the model with weights or KV cache in the format, in the benchmark's unit.
        full: Reference score of the same model: in 16 bits, or with plain multi-head attention if
            the score is of a changed attention.
        noun: Benchmark and model, such as `AIME25, DeepSeek-R1`.
        source: Document with the scores.
    """

    value: float
    full: float
    noun: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} against {self.full:g} in {self.noun}"


class Loss(msgspec.Struct, frozen=True):
    """The published quality loss of storing weights or KV cache in one format.

    Attributes:
        note: A published finding in words, such as 'almost lossless'.
        source: Document with the finding; '' if it is the document with the scores.
        scores: Published scores. Printed text shows the first.
    """

    note: str
    source: str = ""
    scores: tuple[Score, ...] = ()

    @property
    def finding(self) -> str:
        """Return the published finding in words, followed by its source in parentheses.

        Example: `effectively lossless for Llama-3.1 of all sizes (the abstract of arXiv
        2411.02355)`. Without a source, the result is only the finding.
        """
        return f"{self.note} ({self.source})" if self.source else self.note

    def __str__(self) -> str:
        """Return one measurement with its source: the first score, or the finding."""
        return (
            f"published score {self.scores[0]}, by {self.scores[0].source}"
            if self.scores
            else f"{self.note}, by {self.source}"
        )


# By what is stored (weights or cache) and its format. Abstracts, pages and their tables as they
# stood on 2026-11-22.
LOSSES = msgspec.json.decode(
    Path(__file__).with_name("losses.json").read_bytes(), type=dict[str, dict[str, Loss]]
)
UNKNOWN_LOSS = "no published measurement of its quality is noted here"
_SAME_LOSS = first_words("""
    int4  awq gptq int4_group32
    fp8   fp8_block128 fp8_per_channel
""")
_CACHES = first_words("""
    fp8   fp8
    int8  int8
    int4  int4
    fp4   nvfp4 mxfp4
""")


def cache_family(format_: str) -> str:
    """Return the group of a KV cache format whose published scores apply: fp8, int8, int4 or fp4.

    Scores are published per group, not per layout. Examples: `fp8_ds_mla` gives fp8, and `nvfp4`
    gives fp4. The result is '' if no score is published for the format.

    Args:
        format_: Name of the KV cache format.
    """
    return next(
        (family for prefix, family in _CACHES.items() if canonical(format_).startswith(prefix)),
        "",
    )


def loss_of(part: str, format_: str) -> str:
    """Return a phrase with the published quality loss of a storage format, and its source.

    Example: `rivals 8-bit weights for Llama-3.1 of all sizes, by the abstract of arXiv 2411.02355`.
    If no loss is published, the phrase states this.

    Args:
        part: What is stored in the format: `weights` or `cache`.
        format_: Name of the weight format or KV cache format.
    """
    plain = family(format_)
    like = cache_family(format_) if part == "cache" else _SAME_LOSS.get(plain, plain)
    return str(LOSSES[part].get(like, UNKNOWN_LOSS))
