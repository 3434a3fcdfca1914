"""Read the header of a GGUF file: its metadata and tensor list.

The reader checks that every value is inside the file, and ignores everything after the header.
Layout (ggml's docs/gguf.md): `GGUF`, version, number of tensors, number of metadata entries. Each
entry is a key, a type and a value. Each tensor is a name, its dimensions (row first), a type and an
offset. All numbers are little-endian. A file may be one of several splits, `…-00001-of-00003.gguf`;
all splits are read together.
"""

import re
import struct
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from kvcalc.errors import UserError, printable
from kvcalc.library.safetensors_header import ReadBytes
from kvcalc.records import JsonObject
from kvcalc.storage.formats import first_words
from kvcalc.storage.ggml import BLOCKS, TYPES, tensor_bytes

MAX_HEADER, MAX_ENTRIES, MAX_TENSORS, MAX_SPLITS = 64 << 20, 100_000, 200_000, 1000
MAX_KEY, MAX_TEXT, MAX_VALUES, MAX_ITEMS = 1024, 16 << 20, 4096, 4_000_000
FIRST_PIECE, LAST_PIECE = 64 << 10, 4 << 20  # bytes of the smallest and the largest piece
_NUMBERS = {n: f"<{code}" for n, code in enumerate("BbHhIif?--Qqd") if code != "-"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


class TensorInfo(NamedTuple):
    """A tensor that the header of a GGUF file lists.

    Attributes:
        name: Name, such as `blk.0.attn_q.weight`.
        shape: Number of elements in each dimension. The first is the length of a row.
        type: Name of the ggml type, such as q4_k.
    """

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def elements(self) -> int:
        """Return the number of elements of the tensor."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensor in the file."""
        return tensor_bytes(self.type, self.shape[0], self.elements // self.shape[0])


class Header(NamedTuple):
    """The header of a GGUF file, or the merged headers of its splits.

    Attributes:
        metadata: Key, such as `llama.block_count` → value. To save memory, a list of texts or a
            long list of numbers is replaced by its length.
        tensors: Name of a tensor → its name, shape and type.
    """

    metadata: JsonObject
    tensors: dict[str, TensorInfo]


class ShortHeaderError(UserError):
    """Raised if the bytes read so far of a GGUF file end in the middle of its header.

    The caller then reads more bytes.
    """


def read_header(name: str, read: ReadBytes, place: str) -> Header:
    """Return the header of a GGUF file. If the file is one of several splits, merge their headers.

    Args:
        name: Name of the file, or of any of its splits such as `model-00001-of-00003.gguf`.
        read: Function of (file name, first byte, number of bytes) that returns bytes of the file or
            of its other splits.
        place: Path or address of the file in error messages.

    Raises:
        UserError: The header is invalid. The message names the file and the problem.
    """
    result = _read(name, read, place)
    count = result.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return result
    match = _SPLIT.fullmatch(name)
    if not match or int(match[3]) != count or count > MAX_SPLITS:
        raise UserError(
            f"is one of {count} splits, but is not called so",
            "Names end in -00001-of-00003.gguf",
            place,
        )
    metadata: JsonObject = {}
    tensors: dict[str, TensorInfo] = {}
    for n in range(count, 0, -1):
        part = _read(f"{match[1]}-{n:05}-of-{count:05}.gguf", read, place)
        metadata, tensors = metadata | part.metadata, part.tensors | tensors
    return Header(metadata, tensors)


def _read(name: str, read: ReadBytes, place: str) -> Header:
    """Return the header of one file.

    A header does not state its length. It is read in pieces, and each piece is as long as all
    earlier pieces together.
    """
    data = b""
    while True:
        count = min(max(len(data), FIRST_PIECE), LAST_PIECE)
        piece = read(name, len(data), count)
        data += piece
        try:
            return _Reader(data, place).header()
        except ShortHeaderError:
            if len(piece) < count or len(data) > MAX_HEADER:
                raise


class _Reader:
    """A sequential reader of a header; each step checks that the file is long enough."""

    def __init__(self, data: bytes, file_name: str) -> None:
        self.data, self.file_name, self.position, self.size = data, file_name, 0, len(data)

    def fail(self, text: str) -> UserError:
        return UserError(f"is no usable GGUF file: {text}", where=self.file_name)

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise UserError(
                "is no GGUF file: it does not begin with GGUF", where=self.file_name
            )
        self.position = 4
        version = self.number("<I")
        if version not in (2, 3):
            raise self.fail(f"version {version}, but 2 and 3 (little-endian) are read")
        tensors = self.count(MAX_TENSORS, "tensors")
        entries = self.count(MAX_ENTRIES, "metadata entries")
        metadata = {}
        for _ in range(entries):
            key = self.text(MAX_KEY, "key")
            metadata[key] = self.value(self.number("<I"), key)
        infos = [self.tensor() for _ in range(tensors)]
        return Header(metadata, {info.name: info for info in infos})

    def skip(self, count: int) -> int:
        """Move forward in the header, and return the position before the move.

        Args:
            count: Number of bytes to move.

        Raises:
            UserError: The header has fewer bytes.
        """
        start = self.position
        if count > self.size - start:
            kind = ShortHeaderError if count < MAX_HEADER else UserError
            raise kind(
                "is no usable GGUF file: it ends in the middle of its header, or is too long",
                where=self.file_name,
            )
        self.position = start + count
        return start

    def number(self, format_: str) -> Any:
        return struct.unpack_from(format_, self.data, self.skip(struct.calcsize(format_)))[0]

    def count(self, max_value: int, noun: str) -> int:
        result: int = self.number("<Q")
        if result > max_value:
            raise self.fail(f"{result:,} {noun}; more than {max_value:,} are not read")
        return result

    def text(self, max_value: int, noun: str) -> str:
        length = self.count(max_value, f"bytes of a {noun}")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"a {noun} is not UTF-8 text") from None

    def value(self, kind: int, key: str) -> Any:
        """Return the next metadata value of the header.

        For an array of texts, or of more than MAX_VALUES numbers, the result is its length.

        Args:
            kind: Number of the value's GGUF type.
            key: Key of the value, for error messages.
        """
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text(MAX_TEXT, "value")
        length = 0
        if kind == _ARRAY:
            kind, length = self.number("<I"), self.number("<Q")
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            start = self.skip(length * struct.calcsize(code))
            if length > MAX_VALUES:
                return length
            return list(struct.unpack_from(f"<{length}{code[1]}", self.data, start))
        if kind != _STRING:
            raise self.fail(f"key {printable(key, 60)!r} has a value of unknown type {kind}")
        if length > MAX_ITEMS:
            raise self.fail(f"its lists have more than {MAX_ITEMS:,} entries")
        position, last, unpack = self.position, self.size - 8, _LENGTH.unpack_from
        for _ in range(length):
            if position > last:
                self.skip(self.size)  # raises: the file is too short
            position += 8 + unpack(self.data, position)[0]
        self.skip(position - self.position)
        return length

    def tensor(self) -> TensorInfo:
        name = self.text(MAX_KEY, "tensor's name")
        dimensions = self.number("<I")
        if not 1 <= dimensions <= 4:
            raise self.fail(f"tensor {printable(name, 60)!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        kind = self.number("<I")
        self.skip(8)  # offset of the tensor
        type_ = TYPES.get(kind)
        if type_ is None:
            raise self.fail(f"tensor {printable(name, 60)!r} has the unknown type {kind}")
        info = TensorInfo(name, shape, type_)
        if (
            not all(1 <= n <= 10**12 for n in shape)
            or info.elements > 10**15
            or shape[0] % BLOCKS[type_][0]
        ):
            raise self.fail(
                f"tensor {printable(name, 60)!r} cannot have the shape {list(shape)} in {type_}"
            )
        return info


MAX_SIZE, MAX_LAYERS = 10**8, 2_000
# Period of full-attention layers, and the families with this period. With 6, layers 0-4 use a
# sliding window and layer 5 does not. With 0, no layer uses a window, even if the file has the key.
# Source: llama.cpp's src/models/*.cpp (`load_swa_pattern`). exaone4 uses windows only with 64
# layers (`load_arch_hparams` there).
_PERIOD_TABLE = """
    0  phi3 phimoe
    2  gemma2 gpt-oss
    4  cohere2 exaone4 exaone-moe olmo2 llama4 afmoe mellum
    5  gemma3n
    6  gemma3
    8  plamo3
"""
_PERIODS = {family: int(period) for family, period in first_words(_PERIOD_TABLE).items()}
_CHUNK = 8192  # tokens, for llama4; no key contains it


class Fields:
    """The metadata (key → value) of one GGUF file, with methods that check the values they return.

    Attributes:
        metadata: Key → value, as the header states them.
        file_name: Name of the file in error messages.
        family: Value of `general.architecture`, such as `llama`, with which most keys begin.
        layers: Number of layers, without layers of multi-token prediction.
        width: Width of the residual stream (hidden size).

    Raises:
        UserError: The architecture, number of layers or width is missing or unusable.
    """

    def __init__(self, metadata: JsonObject, file_name: str) -> None:
        self.metadata, self.file_name = metadata, file_name
        family = metadata.get("general.architecture")
        if not isinstance(family, str) or not family.isprintable() or not 0 < len(family) <= 60:
            raise self.fail("its metadata have no usable general.architecture")
        self.family = family
        self.layers = self.size("block_count", max_value=MAX_LAYERS) - self.size(
            "nextn_predict_layers", 0
        )
        self.width = self.size("embedding_length")
        if self.layers < 1 or self.width < 1:
            raise self.fail("it has no layers, or none of any width")

    def fail(self, text: str, hint: str = "") -> UserError:
        """Return, without raising it, a UserError whose message begins with the name of this file.

        Args:
            text: The problem.
            hint: What the user can do.
        """
        return UserError(text, hint, self.file_name)

    def has(self, key: str) -> bool:
        """Return whether the metadata contain a key.

        Args:
            key: Name of the key without the architecture, such as `context_length`.
        """
        return f"{self.family}.{key}" in self.metadata

    def size(
        self, key: str, default: int | None = None, layer: int = -1, max_value: int = MAX_SIZE
    ) -> int:
        """Return the whole number under a metadata key.

        Args:
            key: Name of the key without the architecture: `block_count` means `llama.block_count`.
            default: Result if the key is missing; None if the key is required.
            layer: Index of the layer. If the value is a list, its entry for this layer is the
                result. −1 for a value that is not a list.
            max_value: Largest allowed number. The smallest is 0.

        Raises:
            UserError: The key is missing and has no default, or its value is not such a number.
        """
        full = f"{self.family}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise self.fail(f"its metadata have no {full}")
        if isinstance(value, list) and 0 <= layer < len(value):
            value = value[layer]
        if type(value) is not int or not 0 <= value <= max_value:
            raise self.fail(
                f"{full}: {printable(str(value), 40)} is no whole number from 0 to {max_value:,}"
            )
        return value

    def window(self, layer: int) -> int:
        """Return the sliding window or chunk of a layer in tokens; 0 for full attention.

        Args:
            layer: Index of the layer.

        Raises:
            UserError: The file has a window, but it is unknown which layers use it.
        """
        if self.family == "exaone4" and self.layers != 64:
            return 0
        default = {"gemma2": 4096, "exaone4": 4096}.get(self.family, 0)
        tokens = _CHUNK
        if self.family != "llama4":
            tokens = self.size("attention.sliding_window", default)
        if not tokens:
            return 0
        pattern = self.metadata.get(
            f"{self.family}.attention.sliding_window_pattern", _PERIODS.get(self.family)
        )
        if isinstance(pattern, list) and layer < len(pattern):
            return tokens if pattern[layer] else 0
        if type(pattern) is not int or pattern < 0:
            raise self.fail(
                f"it is not known which layers of {self.family!r} have the window of {tokens:,} "
                "tokens"
            )
        return tokens if pattern and layer % pattern < pattern - 1 else 0

    def refuse(self, tensors: Iterable[TensorInfo]) -> None:
        """Raise UserError if a GGUF file has tensors that no reader understood.

        Without this check, the sizes of the model would silently lack these tensors.

        Args:
            tensors: Tensors that remain after all readers; an empty list raises nothing.
        """
        names = [printable(tensor.name, 60) for tensor in tensors]
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            raise self.fail(
                f"tensors of {self.family!r} are not understood: {', '.join(names[:3])}{more}",
                "Its config.json, or a preset of the same model, may be read instead",
            )
