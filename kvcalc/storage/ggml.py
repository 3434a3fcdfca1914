"""GGUF: bytes of ggml types, and names of file types.

Sources in llama.cpp: ggml.h (`ggml_type`), ggml-common.h (block sizes), llama.h (`llama_ftype`),
src/llama-quant.cpp (`llama_ftype_get_default_type`).
"""

# Number in a file's header, name, elements of a block along a row, bytes of a block.
_TYPE_TABLE = """
    0   f32          1    4
    1   f16          1    2
    2   q4_0         32   18
    3   q4_1         32   20
    6   q5_0         32   22
    7   q5_1         32   24
    8   q8_0         32   34
    10  q2_k         256  84
    11  q3_k         256  110
    12  q4_k         256  144
    13  q5_k         256  176
    14  q6_k         256  210
    16  iq2_xxs      256  66
    17  iq2_xs       256  74
    18  iq3_xxs      256  98
    19  iq1_s        256  50
    20  iq4_nl       32   18
    21  iq3_s        256  110
    22  iq2_s        256  82
    23  iq4_xs       256  136
    24  i8           1    1
    25  i16          1    2
    26  i32          1    4
    27  i64          1    8
    28  f64          1    8
    29  iq1_m        256  56
    30  bf16         1    2
    34  tq1_0        256  54
    35  tq2_0        256  66
    39  mxfp4_ggml   32   17
    40  nvfp4_ggml   64   36
    41  q1_0         128  18
"""
# Number in a file's metadata, name, the ggml type that the quantiser starts from, and `imatrix` if
# some of the types need an importance matrix.
_FILE_TYPE_TABLE = """
    0   f32        f32
    1   f16        f16
    2   q4_0       q4_0
    3   q4_1       q4_1
    7   q8_0       q8_0
    8   q5_0       q5_0
    9   q5_1       q5_1
    10  q2_k       q2_k
    11  q3_k_s     q3_k
    12  q3_k_m     q3_k
    13  q3_k_l     q3_k
    14  q4_k_s     q4_k
    15  q4_k_m     q4_k
    16  q5_k_s     q5_k
    17  q5_k_m     q5_k
    18  q6_k       q6_k
    19  iq2_xxs    iq2_xxs    imatrix
    20  iq2_xs     iq2_xs     imatrix
    21  q2_k_s     q2_k       imatrix
    22  iq3_xs     iq3_s      imatrix
    23  iq3_xxs    iq3_xxs    imatrix
    24  iq1_s      iq1_s      imatrix
    25  iq4_nl     iq4_nl
    26  iq3_s      iq3_s
    27  iq3_m      iq3_s
    28  iq2_s      iq2_xs     imatrix
    29  iq2_m      iq2_s      imatrix
    30  iq4_xs     iq4_xs
    31  iq1_m      iq1_m      imatrix
    36  tq1_0      tq1_0
    37  tq2_0      tq2_0
    38  mxfp4_moe  mxfp4_ggml
"""
_TYPE_ROWS = [line.split() for line in _TYPE_TABLE.strip().splitlines()]
_FILE_TYPE_ROWS = [line.split() for line in _FILE_TYPE_TABLE.strip().splitlines()]

BLOCKS = {row[1]: (int(row[2]), int(row[3])) for row in _TYPE_ROWS}
TYPES = {int(row[0]): row[1] for row in _TYPE_ROWS}
MIXES = {row[1]: row[2] for row in _FILE_TYPE_ROWS}
FILE_TYPES = {int(row[0]): row[1] for row in _FILE_TYPE_ROWS} | {32: "bf16"}
IMATRIX = "+imatrix"
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
_NEED_IMATRIX = {row[1] for row in _FILE_TYPE_ROWS if row[-1] == "imatrix"}


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
    block_elements, block_bytes = BLOCKS[type_]
    return rows * -(-row // block_elements) * block_bytes
