"""GGUF: bytes of ggml types, names of file types, and the type of each tensor in a file type.

A file type such as Q4_K_M is a mixture. llama.cpp's quantiser starts from one type and raises or
lowers it for each tensor, according to its role, its layer and the model. Sources in llama.cpp:
ggml.h (`ggml_type`), ggml-common.h (block sizes), llama.h (`llama_ftype`), src/llama-quant.cpp
(`llama_ftype_get_default_type`, `llama_tensor_get_type_impl`, `tensor_type_fallback`).
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvcalc.storage.formats import first_words, table_rows

# Number in a file's header, name, elements of a block along a row, bytes of a block.
_TYPE_ROWS = table_rows("""
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
""")
# Number in a file's metadata, name, the ggml type that the quantiser starts from, and `imatrix` if
# some of the types need an importance matrix.
_FILE_TYPE_ROWS = table_rows("""
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
""")

BLOCKS = {row[1]: (int(row[2]), int(row[3])) for row in _TYPE_ROWS}
TYPES = {int(row[0]): row[1] for row in _TYPE_ROWS}
MIXES = {row[1]: row[2] for row in _FILE_TYPE_ROWS}
FILE_TYPES = {int(row[0]): row[1] for row in _FILE_TYPE_ROWS} | {32: "bf16"}
IMATRIX = "+imatrix"
_ALIASES = first_words("""
    q3_k_m  q3_k
    q4_k_m  q4_k
    q5_k_m  q5_k
""")
_NEED_IMATRIX = {row[1] for row in _FILE_TYPE_ROWS if row[-1] == "imatrix"}


def mix_of(name: str) -> tuple[str, bool] | None:
    """Return the GGUF file type that a name means, and whether it uses an importance matrix.

    `Q4_K` gives ("q4_k_m", False), and `q4_k_m+imatrix` gives ("q4_k_m", True). File types that
    llama.cpp makes only with an importance matrix always give True. The result is None if the name
    is not a GGUF file type.

    Args:
        name: Name in any spelling, as `--quantization` accepts it.
    """
    low = name.strip().lower()
    plain = low.removesuffix(IMATRIX)
    plain = _ALIASES.get(plain, plain)
    return (plain, low.endswith(IMATRIX) or plain in _NEED_IMATRIX) if plain in MIXES else None


def tensor_bytes(type_: str, row: int, rows: int) -> int:
    """Return the bytes of one tensor in a ggml type.

    ggml stores each row in blocks of a fixed number of elements. A partial last block counts as a
    whole block.

    Args:
        type_: Name of the ggml type, such as `q4_k`.
        row: Elements of a row.
        rows: Number of rows.
    """
    block_elements, block_bytes = BLOCKS[type_]
    return rows * -(-row // block_elements) * block_bytes


def joined_format(pieces: Sequence[tuple[str, int, int]], missing: int = 0) -> str:
    """Return a format name for a weight whose elements are in one or several GGUF tensors.

    The name is a ggml type if all elements have it. Otherwise it is `types@bytes/elements`:
    `q4_k_q6_k@5/8` means types q4_k and q6_k, and 5 bytes for 8 elements. `load_weight_format`
    gives the format with these bytes for this name.

    Args:
        pieces: (ggml type, elements of a row, number of the tensor's rows that belong to the
            weight) for each tensor.
        missing: Number of the weight's elements that no tensor stores.
    """
    types = list(dict.fromkeys(type_ for type_, *_ in pieces))
    if len(types) == 1 and not missing:
        return types[0]
    elements = missing + sum(row * rows for _, row, rows in pieces)
    return f"{'_'.join(types)}@{sum(tensor_bytes(*piece) for piece in pieces)}/{elements}"


_ONE_BIT = ("iq1_s", "iq1_m")
_TWO_BITS = ("iq2_s", "iq2_m")
_LOWEST = (*_ONE_BIT, "iq2_xxs", "iq2_xs", *_TWO_BITS)
# The replacement of the types behind it, if a row is not a whole number of their blocks.
_FALLBACKS = first_words("""
    iq4_nl  iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs
    q4_0    q2_k q3_k tq1_0 tq2_0
    q5_0    q4_k
    q5_1    q5_k
    q8_0    q6_k
""")
# Type of the values if at least four query heads share them, and its file types.
_SHARED_VALUES = first_words("""
    q4_k  q2_k q2_k_s iq3_xxs iq3_xs iq3_s
    q5_k  iq4_nl iq4_xs
""")
_QUERIES = {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}
# Type of the attention output, and its file types.
_OUTPUTS = first_words("""
    q3_k   q2_k
    iq3_s  iq3_xxs
    q4_k   q3_k_m iq3_m
    q5_k   q3_k_l
""")
# The same for models with eight experts.
_EIGHT_EXPERTS_OUTPUTS = first_words("""
    q5_k  q2_k iq3_xs iq3_xxs q3_k_s q3_k_m iq4_nl q4_k_s q4_k_m iq3_s iq3_m iq4_xs
""")


class Use(StrEnum):
    """What a tensor is for in a model, such as values or the FFN's down matrix.

    The value is the tensor's name in llama.cpp. A GGUF file type such as Q4_K_M has rules that give
    a tensor its ggml type by this role.

    Attributes:
        EMBEDDING: Embedding table.
        HEAD: LM head.
        QKV: Joined projection of queries, keys and values.
        KV_UP: MLA's matrix from latents to keys and values.
        V: Projection of values.
        K: Projection of keys.
        Q: Projection of queries.
        O: Output projection of attention.
        UP: The FFN's up matrix.
        GATE: The FFN's gate matrix.
        DOWN: The FFN's down matrix.
        OTHER: Any other use. The tensor has the file type's basic type.
    """

    EMBEDDING = "token_embd"
    HEAD = "output"
    QKV = "attn_qkv"
    KV_UP = "attn_kv_b"
    V = "attn_v"
    K = "attn_k"
    Q = "attn_q"
    O = "attn_output"  # noqa: E741 (the name of the field)
    UP = "ffn_up"
    GATE = "ffn_gate"
    DOWN = "ffn_down"
    OTHER = "other"


VALUES = (Use.V, Use.QKV, Use.KV_UP)


class Tensor(NamedTuple):
    """A tensor of a GGUF file that may be quantised.

    Attributes:
        use: What the tensor is for, which affects its ggml type.
        row: Elements of a row, which are the inputs of a matrix; the first dimension in ggml.
        layer: Index of the layer; −1 for tensors outside the layers.
        stacked: Whether the tensor has one matrix per expert.
        name: Name in llama.cpp without the layer's prefix `blk.N.`; may be ''.
        weights: (kvcalc's name, rows of all experts together) of each weight that the tensor
            stores, such as ("q", 4096).
    """

    use: Use
    row: int
    layer: int = -1
    stacked: bool = False
    name: str = ""
    weights: tuple[tuple[str, int], ...] = ()


class ModelFacts(NamedTuple):
    """Properties of a model that affect which ggml types its tensors have.

    Attributes:
        layers: Number of layers.
        experts: Maximum number of routed experts in a layer; 0 without experts.
        queries_per_kv: Query heads per KV head in the first layer.
        seventy: Whether llama.cpp applies its rules for 70B models, which have 80 layers.
        falcon: Whether llama.cpp applies its rules for the architecture `falcon`.
        tied: Whether the LM head uses the weights of the embedding, so there is no tensor for it.
    """

    layers: int
    experts: int = 0
    queries_per_kv: int = 1
    seventy: bool = False
    falcon: bool = False
    tied: bool = False


def mixed_types(
    tensors: Sequence[Tensor], mix: str, imatrix: bool, facts: ModelFacts
) -> list[str]:
    """Return the ggml type that llama.cpp selects for each tensor of a model in a GGUF file type.

    Example: `q4_k_m` gives most tensors `q4_k`, and some `q6_k`. The result is in the order of
    `tensors`.

    Args:
        tensors: Tensors in llama.cpp's order. Some rules depend on the number of earlier tensors of
            the same role.
        mix: GGUF file type, such as `q4_k_m`.
        imatrix: Whether the file was made with an importance matrix.
        facts: Properties of the model that affect the types.
    """
    start = MIXES[mix]
    if start in ("f32", "f16"):
        return [start] * len(tensors)
    mixture = _Mixture(mix, imatrix, facts, sum(t.use in VALUES for t in tensors))
    ordinals: Counter[Use] = Counter()
    types = []
    for tensor in tensors:
        use = Use.V if tensor.use in VALUES else tensor.use
        selected = mixture.type_of(tensor, use, ordinals[use]) or start
        ordinals[use] += 1
        types.append(type_for_row(selected, tensor.row))
    return types


def type_for_row(type_: str, row: int) -> str:
    """Return the ggml type that llama.cpp uses if a type's blocks do not fit a row.

    A row must be a whole number of blocks. If it is not, llama.cpp uses a replacement with smaller
    blocks, such as `q8_0` for `q6_k`, or f16 if the replacement does not fit either. If the row
    fits, the result is `type_`.

    Args:
        type_: Name of the ggml type that the file type selects.
        row: Elements of a row.
    """
    for candidate in (type_, _FALLBACKS.get(type_, type_)):
        if row % BLOCKS[candidate][0] == 0:
            return candidate
    return "f16"


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a file type such as Q4_K_M stores some tensors of a layer with more bits.

    It does in the first and last eighth of the layers, and in every third layer between them.
    Example: `q4_k_m` stores the value projection and the FFN's down matrix of these layers as
    `q6_k`, and most other matrices as `q4_k`.

    Args:
        layer: Index of the layer, from 0.
        layers: Number of layers in the model.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


class _Mixture(NamedTuple):
    """The rules of one file type for one model.

    Attributes:
        values: Number of tensors with values.
    """

    mix: str
    imatrix: bool
    facts: ModelFacts
    values: int

    def type_of(self, tensor: Tensor, use: Use, ordinal: int) -> str | None:
        """Return the ggml type that a file type gives to a tensor, before the row length is
        checked.

        None means the basic type of the file type.

        Args:
            tensor: The tensor.
            use: Role of the tensor; V for all tensors with values.
            ordinal: Number of earlier tensors with this role.
        """
        if use is Use.HEAD or (use is Use.EMBEDDING and self.facts.tied):
            return self._head(tensor.row)
        if self.mix == "mxfp4_moe":
            return "mxfp4_ggml" if tensor.stacked else "q8_0"
        if use is Use.EMBEDDING:
            return self._embedding()
        if self.mix in _LOWEST:
            return self._low(use, ordinal)
        if use is Use.V:
            return self._value(ordinal)
        layer = ordinal
        if self.facts.experts > 1 and use in (Use.UP, Use.GATE, Use.DOWN):
            layer = tensor.layer
        if use is Use.DOWN:
            return self._down(layer)
        if use is Use.O:
            return self._output()
        if use is Use.K and self.has_eight_experts:
            return "q8_0"
        if use in (Use.K, Use.Q):
            return _QUERIES.get(self.mix)
        layers = self.facts.layers
        is_inner = layers // 8 <= layer < 7 * layers // 8
        is_wide = use in (Use.UP, Use.GATE)
        return "iq3_xxs" if is_wide and is_inner and self.mix == "iq3_xs" else None

    def _head(self, row: int) -> str:
        start = MIXES[self.mix]
        if start == "q8_0" or self.mix == "mxfp4_moe":
            return "q8_0"
        if self.facts.falcon or row % BLOCKS[start][0]:
            return "q8_0"
        return "q5_k" if self.mix in (*_LOWEST, "iq3_xxs") else "q6_k"

    def _embedding(self) -> str | None:
        if self.mix in (*_TWO_BITS, "iq3_xxs"):
            return "iq3_s"
        if self.mix in _LOWEST:
            return "q2_k"
        return "q4_k" if self.mix in ("tq1_0", "tq2_0") else None

    @property
    def has_eight_experts(self) -> bool:
        return self.facts.experts == 8

    @property
    def shares_values(self) -> bool:
        return self.facts.queries_per_kv >= 4

    def _low(self, use: Use, ordinal: int) -> str | None:
        """Return the type of a tensor in a file type of one or two bits."""
        more = "iq3_s" if self.mix in _TWO_BITS else "q2_k"
        if use is Use.V:
            return "q4_k" if self.shares_values or self.facts.experts >= 4 else more
        if use is Use.DOWN and ordinal < self.facts.layers // 8:
            return more
        if use is Use.K and self.has_eight_experts:
            return "q4_k"
        if use is not Use.O:
            return None
        if self.has_eight_experts:
            return "q5_k"
        if self.mix in _ONE_BIT:
            return "iq2_xxs"
        return more if self.mix in _TWO_BITS else None

    def _value(self, ordinal: int) -> str:
        if self.has_eight_experts:
            return "q8_0"
        by_mix = {
            "q2_k": "q3_k",
            "iq3_xxs": "iq3_xxs" if self.imatrix else "iq3_s",
            "iq3_m": "q4_k",
            "q3_k_m": "q5_k" if ordinal < 2 else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_s": "q5_k" if ordinal < 4 else "",
            **dict.fromkeys(
                ("q4_k_m", "q5_k_m"), "q6_k" if has_more_bits(ordinal, self.values) else ""
            ),
        }
        if self.shares_values:
            by_mix |= _SHARED_VALUES
        selected = by_mix.get(self.mix) or MIXES[self.mix]
        return "q5_k" if self.facts.seventy and selected in ("q3_k", "q4_k") else selected

    def _down(self, layer: int) -> str | None:
        layers, falcon = self.facts.layers, self.facts.falcon
        first, more = layer < layers // 8, has_more_bits(layer, layers)
        if self.mix == "q4_k_m" and falcon:
            return "q6_k" if layer < layers // 16 else "q5_k" if more else None
        if self.mix == "q3_k_m":
            return "q5_k" if layer < layers // 16 else "q4_k" if more or not falcon else None
        by_mix = {
            "q2_k": "q3_k",
            "iq3_xxs": None if self.imatrix else "q4_k" if first else "q3_k",
            "iq3_m": "q4_k" if first or (self.has_eight_experts and more) else None,
            "q3_k_l": "q4_k" if falcon else "q5_k",
        }
        if more:
            by_mix |= {"q4_k_m": "q6_k", "q5_k_m": "q6_k"}
        if first:
            by_mix |= {"q2_k_s": "q4_k"}
            by_mix |= {} if falcon else {"q4_k_s": "q5_k"}
            by_mix |= (
                {"q4_0": "q4_1", "q5_0": "q5_1"}
                if self.imatrix
                else {"iq4_nl": "q5_k", "iq4_xs": "q5_k"}
            )
        return by_mix.get(self.mix)

    def _output(self) -> str | None:
        if self.facts.falcon:
            return "q4_k" if self.mix == "q3_k_l" else None
        if self.has_eight_experts:
            return _EIGHT_EXPERTS_OUTPUTS.get(self.mix)
        return _OUTPUTS.get(self.mix)
