"""Write output files completely or not at all."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from kvcalc.errors import UserError

_HELD = 1 << 20  # bytes of output that are buffered in memory
_OPEN_FILES = ("/dev/", "/proc/")  # names of a process's open files


def write_text(target: str | Path, content: str | bytes | Iterable[str]) -> None:
    """Write a whole file or none: a temporary neighbour takes its place when it is complete. Raises UserError.

    Links are followed, and an existing file keeps its mode. Devices, named pipes and standard
    output (`-` or /dev/stdout) are written directly, after the last piece of the content has
    arrived. Content in pieces is never in memory as a whole. If standard output cannot be
    written, the OSError is raised unchanged.
    """
    pieces = _encoded([content] if isinstance(content, str | bytes) else content)
    if str(target) in ("-", "/dev/stdout"):
        return _print(sys.stdout, pieces)
    path, there = destination(target)
    try:
        if there and (not stat.S_ISREG(there.st_mode) or str(target).startswith(_OPEN_FILES)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
                file.writelines(_complete(pieces))
        else:
            _replace(path, pieces, there)
    except OSError as error:
        raise _unwritable(error, target) from None


def _encoded(pieces: Iterable[str | bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece.encode(errors="replace") if isinstance(piece, str) else piece


def _complete(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Return the same pieces after the last piece has arrived."""
    import tempfile

    with tempfile.SpooledTemporaryFile(_HELD) as whole:
        whole.writelines(pieces)
        whole.seek(0)
        while piece := whole.read(_HELD):
            yield piece


def destination(target: str | Path) -> tuple[Path, os.stat_result | None]:
    """Return the path of the file `target` with links resolved, and the status of an existing file.

    Raises:
        UserError: No file can be written there.
    """
    name = str(target)
    if not name:
        raise UserError("cannot be written: the file's name is empty")
    path = Path(name)
    try:
        there = path.stat()
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise _unwritable(error, target) from None
    if name.endswith(("/", os.sep)) or (there and stat.S_ISDIR(there.st_mode)):
        raise UserError("cannot be written: is a folder, not a file", name)
    if path.is_symlink() and (not there or stat.S_ISREG(there.st_mode)):  # a pipe has no link target
        path = Path(os.path.realpath(path))
    if not there and not os.path.isdir(path.parent):  # noqa: PTH112 (Path.is_dir raises where it may not look)
        raise UserError("cannot be written: no such folder", name)
    if there and not os.access(path, os.W_OK):
        raise UserError("cannot be written: permission denied", name)
    return path, there


def _print(stream: TextIO, pieces: Iterable[bytes]) -> None:
    """Append the text, unchanged, to the output printed so far."""
    for piece in _complete(pieces):
        stream.flush()
        stream.buffer.write(piece)
    stream.flush()


def neighbour(path: Path) -> Path:
    """Return the path of a new temporary file in the same folder."""
    return path.with_name(f".{os.urandom(4).hex()}.part")


def take_place(temporary: Path, path: Path, there: os.stat_result | None) -> None:
    """Replace a file with its complete temporary file, keeping the old file's mode and owner."""
    if there:
        with suppress(OSError, AttributeError):  # only the superuser may change the owner
            os.chown(temporary, there.st_uid, there.st_gid)
        temporary.chmod(stat.S_IMODE(there.st_mode))
    temporary.replace(path)


def _replace(path: Path, pieces: Iterable[bytes], there: os.stat_result | None) -> None:
    temporary = neighbour(path)
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
        take_place(temporary, path, there)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _unwritable(error: OSError | ValueError, target: str | Path) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
    return UserError(f"cannot be written: {reason.lower()}", str(target))


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be made: {(error.strerror or 'error').lower()}", str(path)) from None
