"""Read the header of a GGUF file: its metadata and tensor list.

The reader checks bounds and ignores everything after the header. Layout (ggml's docs/gguf.md):
`GGUF`, version, number of tensors, number of metadata entries. Each entry is a key, a type and
a value. Each tensor is a name, its dimensions (row first), a type and an offset. All numbers
are little-endian. A file may be one of several splits, `…-00001-of-00003.gguf`; all splits are
read together.
"""

import mmap
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError, printable
from kvcalc.storage.gguf import BLOCKS, TYPES, tensor_bytes

MOST_HEADER, MOST_ENTRIES, MOST_TENSORS, MOST_SPLITS = 256 << 20, 100_000, 200_000, 1000
MOST_KEY, MOST_TEXT, MOST_KEPT, MOST_NESTED, MOST_ITEMS = 1024, 16 << 20, 4096, 4, 4_000_000
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


class TensorInfo(NamedTuple):
    """A tensor: its name, its dimensions (row first) and its ggml type."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def elements(self) -> int:
        found = 1
        for n in self.shape:
            found *= n
        return found

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.type, self.shape[0], self.elements // self.shape[0])


class Header(NamedTuple):
    """The metadata by key and the tensors by name.

    For a long list or a list of texts, the metadata contain only its length.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class Length(int):
    """Number of entries of a metadata list whose values are not stored."""


def read_header(path: Path) -> Header:
    """Return the header of a file, or the merged header if the file is one of several splits.

    Raises:
        UserError: The header is invalid. The message names the file and the problem.
    """
    found = _read(path)
    count = found.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return found
    match = _SPLIT.fullmatch(path.name)
    if not match or int(match[3]) != count or count > MOST_SPLITS:
        raise UserError(f"is one of {count} splits, but is not called so", str(path), "Names end in -00001-of-00003.gguf")
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for n in range(count, 0, -1):
        part = _read(path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf"))
        if tensors.keys() & part.tensors.keys():
            raise UserError("holds a tensor that another split holds too", str(path))
        metadata, tensors = metadata | part.metadata, part.tensors | tensors
    return Header(metadata, tensors)


def _read(path: Path) -> Header:
    where = str(path)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise UserError("is a folder, not a file" if stat.S_ISDIR(info.st_mode) else "is not a regular file", where)
        if info.st_size < 24:
            raise UserError("is no GGUF file: it is too short", where)
        with path.open("rb") as file, _mapped(file.fileno(), info.st_size) as data:
            return _Reader(data, where).header()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
        raise UserError(f"cannot be read: {reason.lower()}", where) from None


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, min(size, MOST_HEADER, os.fstat(descriptor).st_size), access=mmap.ACCESS_READ)


class _Reader:
    """A sequential reader of a header; each step checks that the file is long enough."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data, self.where, self.at, self.size = data, where, 0, len(data)
        self.items = MOST_ITEMS  # list entries that the reader may still visit

    def fail(self, text: str) -> UserError:
        return UserError(f"is no usable GGUF file: {text}", self.where)

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise UserError("is no GGUF file: it does not begin with GGUF", self.where)
        self.at = 4
        version = self.number("<I")
        if version not in (2, 3):
            other = "it is big-endian" if version & 0xFFFF == 0 else f"version {version} (2 and 3 are read)"
            raise self.fail(other)
        tensors, entries = self.count(MOST_TENSORS, "tensors"), self.count(MOST_ENTRIES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self.text(MOST_KEY, "key")
            if key in metadata:
                raise self.fail(f"key {printable(key, 60)!r} stands twice")
            metadata[key] = self.value(self.number("<I"), key)
        found: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            info = self.tensor()
            if info.name in found:
                raise self.fail(f"tensor {printable(info.name, 60)!r} stands twice")
            found[info.name] = info
        return Header(metadata, found)

    def skip(self, count: int) -> int:
        """Advance by a number of bytes and return the position of the first skipped byte."""
        start = self.at
        if count > self.size - start:
            more = f"; more than {MOST_HEADER:,} bytes of header are not read" if self.size == MOST_HEADER else ""
            raise self.fail(f"it ends in the middle of its header{more}")
        self.at = start + count
        return start

    def number(self, format_: str) -> Any:
        return struct.unpack_from(format_, self.data, self.skip(struct.calcsize(format_)))[0]

    def count(self, most: int, what: str) -> int:
        found: int = self.number("<Q")
        if found > most:
            raise self.fail(f"{found:,} {what}; more than {most:,} are not read")
        return found

    def text(self, most: int, what: str) -> str:
        length = self.count(most, f"bytes of a {what}")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"a {what} is not UTF-8 text") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """Return a value; for an array of texts or of more than MOST_KEPT numbers, only its length."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text(MOST_TEXT, "value")
        if kind != _ARRAY or depth >= MOST_NESTED:
            raise self.fail(f"key {printable(key, 60)!r} has a value of unknown type {kind}")
        inner, length = self.number("<I"), self.number("<Q")
        if inner in _NUMBERS:
            width = struct.calcsize(_NUMBERS[inner])
            start = self.skip(length * width)
            if length > MOST_KEPT:
                return Length(length)
            return [struct.unpack_from(_NUMBERS[inner], self.data, start + n * width)[0] for n in range(length)]
        self.items -= length
        if self.items < 0:
            raise self.fail(f"its lists have more than {MOST_ITEMS:,} entries")
        if inner == _STRING:
            self.texts(length)
        else:
            for _ in range(length):
                self.value(inner, key, depth + 1)
        return Length(length)

    def texts(self, count: int) -> None:
        """Skip a number of texts."""
        at, last, unpack = self.at, self.size - 8, _LENGTH.unpack_from
        for _ in range(count):
            if at > last:
                self.skip(self.size)  # raises: the file is too short
            at += 8 + unpack(self.data, at)[0]
        self.skip(at - self.at)

    def tensor(self) -> TensorInfo:
        name = self.text(MOST_KEY, "tensor's name")
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
        if not all(1 <= n <= 10**12 for n in shape) or info.elements > 10**15 or shape[0] % BLOCKS[type_][0]:
            raise self.fail(f"tensor {printable(name, 60)!r} cannot have the shape {list(shape)} in {type_}")
        return info
