"""Storage formats of cache rows: bytes per row, including scales.

A format has bits per element and one scale for every `group` elements. Per-tensor scales are not in
the cache and count 0 bytes. Block formats (GGUF) store only whole blocks. The dtype of computations
is a separate property.
"""

from functools import lru_cache
from typing import TypeVar

import msgspec

from kvcalc.errors import UserError, nearest

ROW = -1  # a `group` that spans the row: one scale per token and head
Format = TypeVar("Format", bound=msgspec.Struct)


class RowFormat(msgspec.Struct, frozen=True):
    """Storage format of a row of the KV cache, such as the key of one token and head.

    A row is its elements and, in some formats, scales.

    Attributes:
        name: Name, such as fp8.
        bits: Bits per element, without scales.
        group: Elements that share a scale; 0 for no scale, ROW (−1) for one scale per row.
        scale_bytes: Bytes of each scale.
        whole_groups: Whether a partial last group takes the space of a full group, as in the blocks
            of GGUF formats.
    """

    name: str
    bits: int
    group: int = 0
    scale_bytes: int = 0
    whole_groups: bool = False

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one row, with its scales.

        They are ⌈width · bits/8⌉ + ⌈width/group⌉ · scale_bytes. Example: 128 elements of q8_0 (8
        bits, a 2-byte scale for 32 elements) take 136 bytes. With `whole_groups`, the width is
        first rounded up to whole groups.

        Args:
            width: Elements of the row.
        """
        groups = 0 if not self.group else 1 if self.group == ROW else -(-width // self.group)
        elements = groups * self.group if self.whole_groups else width
        return -(-elements * self.bits // 8) + groups * self.scale_bytes


# Sources: OCP Microscaling Formats v1.0 §5 (mxfp4: 32 elements, one E8M0 scale); NVIDIA's NVFP4 (16
# elements, one E4M3 scale); ggml-common.h (block_q8_0 34 bytes … block_q4_0 18 bytes, 32 elements
# each); vLLM's cache dtypes for the per-token-head formats (one fp32 scale per token and head) and
# TurboQuant (an fp16 norm per key, an fp16 scale and zero point per value; arXiv 2504.19874).
_FORMAT_TABLE = """
    name                bits group scale_bytes whole_groups
    fp64                64   0     0           0
    fp32                32   0     0           0
    bf16                16   0     0           0
    fp16                16   0     0           0
    fp8                 8    0     0           0
    int8                8    0     0           0
    int4                4    32    2           0
    nvfp4               4    16    1           0
    mxfp4               4    32    1           0
    mxfp8               8    32    1           0
    fp8_per_token_head  8    -1    4           0
    int8_per_token_head 8    -1    4           0
    int4_per_token_head 4    -1    4           0
    fp8_block128        8    128   4           0
    turboquant_key4     4    -1    2           0
    turboquant_key3     3    -1    2           0
    turboquant_value4   4    -1    4           0
    turboquant_value3   3    -1    4           0
    q8_0                8    32    2           1
    q5_1                5    32    4           1
    q5_0                5    32    2           1
    q4_1                4    32    4           1
    q4_0                4    32    2           1
    iq4_nl              4    32    2           1
"""


def table_rows(table: str) -> list[list[str]]:
    """Return the words of each line of a text table: `a b` and `c d` give [["a", "b"], ["c", "d"]].

    kvcalc's code lists the storage formats in such tables.
    """
    return [line.split() for line in table.strip().splitlines()]


def read_shapes(text: str) -> list[tuple[int, ...]]:
    """Return the shapes in a text. Example: `8x4 2x1` gives [(8, 4), (2, 1)]."""
    return [tuple(map(int, shape.split("x"))) for shape in text.split()]


def first_words(table: str) -> dict[str, str]:
    """Return the first word of a line for each of the other words of the line.

    Example: the line `fp16 half f16` gives {"half": "fp16", "f16": "fp16"}.

    Args:
        table: Lines of words. A word may be on several lines only as the first word.
    """
    return {word: first for first, *words in table_rows(table) for word in words}


def read_table(table: str, spec: type[Format]) -> dict[str, Format]:
    """Parse a text table of storage formats, and return the formats by name.

    Args:
        table: Lines of words. The first line has names of fields of `spec`. Each further line has
            the values of one format.
        spec: Class of the formats, such as `RowFormat`.
    """
    header, *rows = table_rows(table)
    fields = [dict(zip(header, row, strict=False)) for row in rows]
    return {row["name"]: msgspec.convert(row, spec, strict=False) for row in fields}


FORMATS = read_table(_FORMAT_TABLE, RowFormat)

# A name, and other spellings of it.
_SPELLINGS = first_words("""
    fp64   float64 double f64
    fp32   float32 float f32 torch.float32
    bf16   bfloat16 torch.bfloat16
    fp16   float16 half f16 torch.float16
    fp8    fp8_e4m3 fp8_e5m2 float8_e4m3fn float8_e5m2 fp8_inc
    nvfp4  fp4_e2m1
""")

# Cache layouts (vLLM's strings), each with a format for every role of the cache. The index
# key is one fp8 row with one fp32 scale per 128 elements whenever the cache is quantised to 8 bits:
# 132 bytes at 128 wide.
# In `turboquant` layouts, which store only keys and values, two things do not count: vLLM's padding
# of a slot to an even size, and layers that it leaves unquantised.
_ROLES = ("k", "v", "latent", "rope_key", "index_key")
_LAYOUT_TABLE = """
    fp8                 fp8              fp8                fp8           fp8   fp8_block128
    int8                int8             int8               int8          int8  fp8_block128
    fp8_ds_mla          fp8              fp8                fp8_block128  bf16  fp8_block128
    nvfp4_ds_mla        nvfp4            nvfp4              nvfp4         fp8   fp8_block128
    turboquant_k8v4     fp8              turboquant_value4
    turboquant_4bit_nc  turboquant_key4  turboquant_value4
    turboquant_k3v4_nc  turboquant_key3  turboquant_value4
    turboquant_3bit_nc  turboquant_key3  turboquant_value3
"""
_LAYOUTS = {
    name: dict(zip(_ROLES, formats, strict=False))
    for name, *formats in table_rows(_LAYOUT_TABLE)
}
LATENT_ONLY = ("fp8_ds_mla", "nvfp4_ds_mla")
KEYS_AND_VALUES_ONLY = tuple(n for n, layout in _LAYOUTS.items() if "latent" not in layout)
# Beginnings of formats that are no cache dtypes.
_ROLE_FORMATS = ("fp8_block128", "turboquant_")
COMPUTE = ("bf16", "fp16", "fp32", "fp64", "fp8")


def canonical(name: str) -> str:
    """Return kvcalc's name of a dtype or KV cache format: `float16` and `half` become `fp16`.

    Names without another spelling are returned in lower case, without outer blanks. The result may
    be an unknown name.

    Args:
        name: Name in any spelling.
    """
    low = name.strip().lower()
    return _SPELLINGS.get(low, low)


def cache_dtypes() -> tuple[str, ...]:
    """Return all names that `--kv-cache-dtype` accepts, except `auto`."""
    return (
        *(n for n in FORMATS if not n.startswith(_ROLE_FORMATS)),
        *LATENT_ONLY,
        *KEYS_AND_VALUES_ONLY,
    )


@lru_cache(64)
def cache_layout(name: str) -> dict[str, RowFormat]:
    """Return the storage format of each kind of cached row, for a value of `--kv-cache-dtype`.

    The result is role → format. Roles are k, v, latent, rope_key and index_key, or only k and v for
    the TurboQuant formats. Recurrent states are not included, because the option does not affect
    their dtype.

    Args:
        name: Name of the KV cache format in any spelling, such as `fp8` or `fp8_ds_mla`.

    Raises:
        UserError: The name is unknown. The message names near matches.
    """
    plain = canonical(name)
    if plain not in cache_dtypes():
        raise UserError(
            f"unknown KV-cache dtype {name!r}",
            nearest(plain, [*cache_dtypes(), "auto"])
            or "Common: auto, bf16, fp8, int8, nvfp4, q8_0",
        )
    layout = _LAYOUTS.get(plain) or dict.fromkeys(_ROLES, plain)
    return {role: FORMATS[format_] for role, format_ in layout.items()}
