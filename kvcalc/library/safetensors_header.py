"""Read the headers of safetensors files: the bytes of each tensor, and nothing after the header.

Layout (README.md of huggingface/safetensors): 8 bytes with the length of the header, little-endian,
then the header as JSON. Its `data_offsets` are the begin and the end of each tensor. The tensors
follow one another without gaps.
"""

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError
from kvcalc.library.files import check_readable
from kvcalc.model.memory import weight_bytes
from kvcalc.model.model import Model

# Returns `count` bytes of a file from a position on, or a whole small file if `count` is 0.
ReadBytes = Callable[[str, int, int], bytes]

MAX_HEADER = 100_000_000  # bytes; the limit of safetensors (safetensors/src/tensor.rs)
MAX_INDEX, READERS = 32 << 20, 8
_FILE_NAME = re.compile(r"(?!.*\.\.)\w[\w./\-]{0,200}\.safetensors", re.ASCII)
# Tensors that `Model.parameters` excludes: towers of images and sounds, and layers that predict
# further tokens. The number is of a layer, for models whose last layers predict.
_OTHER_PART = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|vit\w*|vpm|audio\w*|\w*projector|resampler|mtp\w*)\."
    r"|^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d{1,6})\."
)


class MissingFileError(UserError):
    """Raised by a function that reads files of a checkpoint if the checkpoint has no such file."""


class _TensorEntry(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, -1)  # of `__metadata__`, which is no tensor


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_from(folder: Path) -> ReadBytes:
    """Return a function that reads bytes of the files in a folder.

    The function takes a file name, the position of the first byte, and a number of bytes. The
    number 0 means the bytes up to the end of the file, but at most 32 MiB.

    Args:
        folder: The folder of a checkpoint.

    Raises:
        MissingFileError: Raised by the returned function if the file does not exist.
        UserError: Raised by the returned function if the file cannot be read.
    """

    def read(name: str, start: int, count: int) -> bytes:
        path = folder / name
        if not path.exists():
            raise MissingFileError("cannot be read: no such file or directory", where=str(path))
        check_readable(path, 1 << 62)
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(count or MAX_INDEX)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None

    return read


def with_file_bytes(model: Model, read: ReadBytes, place: str) -> Model:
    """Return the model with byte counts from the headers of its safetensors files.

    The field `uncounted_bytes` becomes the bytes of the files' tensors minus the bytes that kvcalc
    computed. The field `other_part_bytes` becomes the bytes of vision or audio towers and of
    multi-token-prediction layers. A note is added. Without safetensors files, the model is
    unchanged.

    Args:
        model: The model of the checkpoint's config.json.
        read: Function of (file name, first byte, number of bytes) that returns bytes of a file of
            the checkpoint.
        place: Name of the checkpoint in error messages.

    Raises:
        UserError: A header is malformed.
    """
    name = "model.safetensors"
    try:
        sizes = [_tensors(read, name)]
    except MissingFileError:
        name += ".index.json"
        try:
            files = {*msgspec.json.decode(read(name, 0, 0), type=_Index).weight_map.values()}
        except MissingFileError:
            return model
        except ValueError:
            files = set()
        if not files or not all(map(_FILE_NAME.fullmatch, files)):
            raise UserError(f"{name} names no usable safetensors files", where=place) from None
        with ThreadPoolExecutor(READERS) as pool:
            sizes = list(pool.map(lambda file: _tensors(read, file), sorted(files)))
    bytes_by_part = Counter[bool]()
    for part in sizes:
        for tensor, size in part.items():
            match = _OTHER_PART.search(tensor)
            bytes_by_part[match is not None and int(match[1] or 10**6) >= model.layers] += size
    note = (
        f"the headers of its safetensors files give {bytes_by_part.total():,} bytes of weights"
    )
    return replace(
        model,
        other_part_bytes=bytes_by_part[True],
        uncounted_bytes=bytes_by_part[False] - weight_bytes(model),
        notes=(*model.notes, note),
    )


def _tensors(read: ReadBytes, file: str) -> dict[str, int]:
    """Return the bytes of each tensor of a file."""
    try:
        length = int.from_bytes(read(file, 0, 8), "little")
        if not 2 <= length <= MAX_HEADER:
            raise ValueError
        entries = msgspec.json.decode(read(file, 8, length), type=dict[str, _TensorEntry])
        entries.pop("__metadata__", None)
        spans = [entry.data_offsets for entry in entries.values()]
        sizes = [end - begin for begin, end in spans]
        if min(sizes, default=0) < 0 or sum(sizes) != max((end for _, end in spans), default=0):
            raise ValueError
    except ValueError:  # msgspec's errors are ValueErrors
        raise UserError("has a malformed safetensors header", where=file) from None
    return dict(zip(entries, sizes))
