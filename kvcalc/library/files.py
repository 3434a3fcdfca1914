"""Read and write files, and parse YAML from users.

An output file is written completely or not at all. An input file must be a small regular text
file. YAML is read by the core schema of YAML 1.2: `989e12` is a number, `no` is a string. Nesting
is limited, duplicate keys and aliases are refused, and every error names its line.
"""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from kvcalc.errors import UserError
from kvcalc.records import JsonObject

MOST_DEPTH = 32
_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "true": True,
    "True": True,
    "false": False,
    "False": False,
}

Lines = dict[tuple[str | int, ...], int]


def parse_yaml(text: str, file_name: str) -> tuple[JsonObject, Lines]:
    """Return the mapping in `text`, and the line of each key by its path.

    Raises:
        UserError: The text is invalid. The message names `where` and the line.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(file_name)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error)
        too_deep = "nesting depth" in problem  # PyYAML 6.0.4 also has a limit
        text = (
            f"nests deeper than {MOST_DEPTH} levels" if too_deep else f"is not YAML: {problem}"
        )
        raise UserError(text, file_name + line) from None
    if not isinstance(builder.root, dict):
        raise UserError("holds no mapping of keys to values", file_name)
    return builder.root, builder.lines


class _Builder:
    """A builder of plain dicts, lists and scalars from YAML events."""

    def __init__(self, file_name: str) -> None:
        self.file_name, self.root = file_name, None
        self.lines: Lines = {}
        self.stack: list[Any] = []  # open containers
        self.paths: list[tuple[str | int, ...]] = []  # path of each open container
        self.keys: list[str | None] = []  # key without a value yet, per container
        self.documents = 0

    def fail(self, text: str, event: Any) -> UserError:
        return UserError(text, f"{self.file_name}, line {event.start_mark.line + 1}")

    def take(self, event: Any) -> None:
        name = type(event).__name__
        if name == "ScalarEvent":
            self._scalar(event)
        elif name in ("MappingStartEvent", "SequenceStartEvent"):
            if len(self.stack) >= MOST_DEPTH:
                raise self.fail(f"nests deeper than {MOST_DEPTH} levels", event)
            container: Any = {} if name == "MappingStartEvent" else []
            self.paths.append(self._add(container, event))
            self.stack.append(container)
            self.keys.append(None)
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            for pile in (self.stack, self.paths, self.keys):
                pile.pop()
        elif name == "AliasEvent":
            raise self.fail("uses an alias (*name); write the value out", event)
        elif name == "DocumentStartEvent":
            self.documents += 1
            if self.documents > 1:
                raise self.fail("holds a second document", event)

    def _scalar(self, event: Any) -> None:
        if self.stack and isinstance(self.stack[-1], dict) and self.keys[-1] is None:
            if event.value in self.stack[-1]:
                raise self.fail(f"key {event.value!r} occurs twice", event)
            self.keys[-1] = event.value
            self.lines[(*self.paths[-1], event.value)] = event.start_mark.line + 1
            return
        plain = event.implicit[0] and event.style in (None, "")
        try:
            self._add(scalar(event.value) if plain else event.value, event)
        except (ValueError, OverflowError):
            raise self.fail(f"{event.value[:40]!r} is not a usable number", event) from None

    def _add(self, value: Any, event: Any) -> tuple[str | int, ...]:
        """Add a value to the open container, record its line, and return its path."""
        if not self.stack:
            self.root = value
            return ()
        parent, key = self.stack[-1], self.keys[-1]
        if isinstance(parent, list):
            path: tuple[str | int, ...] = (*self.paths[-1], len(parent))
            parent.append(value)
        elif key is None:
            raise self.fail("a key must be a single word or number", event)
        else:
            path = (*self.paths[-1], key)
            parent[key] = value
            self.keys[-1] = None
        self.lines.setdefault(path, event.start_mark.line + 1)
        return path


def scalar(text: str) -> Any:
    """Return a plain scalar by YAML 1.2: null, a boolean, a number, or otherwise the text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if abs(value) == float("inf"):
            raise OverflowError
        return value
    return text


_BUFFER_BYTES = 1 << 20  # bytes of output that are buffered in memory
_OPEN_FILES = ("/dev/", "/proc/")  # names of a process's open files


def write_text(target: str | Path, content: str | bytes | Iterable[str]) -> None:
    """Write a whole file or none: a temporary neighbour takes its place when it is complete. Raises
    UserError.

    Links are followed, and an existing file keeps its mode. Devices, named pipes and standard
    output (`-` or /dev/stdout) are written directly, after the last piece of the content has
    arrived. Content in pieces is never in memory as a whole. If standard output cannot be written,
    the OSError is raised unchanged.
    """
    pieces = _encoded([content] if isinstance(content, str | bytes) else content)
    if str(target) in ("-", "/dev/stdout"):
        return _print(sys.stdout, pieces)
    path, status = destination(target)
    try:
        if status and (not stat.S_ISREG(status.st_mode) or str(target).startswith(_OPEN_FILES)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as file:
                file.writelines(_complete(pieces))
        else:
            _replace(path, pieces, status)
    except OSError as error:
        raise _file_error("written", error, target) from None


def _encoded(pieces: Iterable[str | bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece.encode(errors="replace") if isinstance(piece, str) else piece


def _complete(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a content, the first one after the last one has arrived."""
    import tempfile

    with tempfile.SpooledTemporaryFile(_BUFFER_BYTES) as buffer:
        buffer.writelines(pieces)
        buffer.seek(0)
        while piece := buffer.read(_BUFFER_BYTES):
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
        status = path.stat()
    except FileNotFoundError:
        status = None
    except (OSError, ValueError) as error:
        raise _file_error("written", error, target) from None
    if name.endswith(("/", os.sep)) or (status and stat.S_ISDIR(status.st_mode)):
        raise UserError("cannot be written: is a folder, not a file", name)
    # a pipe has no link target
    if path.is_symlink() and (not status or stat.S_ISREG(status.st_mode)):
        path = Path(os.path.realpath(path))
    if not status and not os.path.isdir(path.parent):  # noqa: PTH112 (never raises)
        raise UserError("cannot be written: no such folder", name)
    if status and not os.access(path, os.W_OK):
        raise UserError("cannot be written: permission denied", name)
    return path, status


def _print(stream: TextIO, pieces: Iterable[bytes]) -> None:
    """Append the text, unchanged, to the output printed so far."""
    for piece in _complete(pieces):
        stream.flush()
        stream.buffer.write(piece)
    stream.flush()


def neighbour(path: Path) -> Path:
    """Return the path of a new temporary file in the same folder."""
    return path.with_name(f".{os.urandom(4).hex()}.part")


def take_place(temporary: Path, path: Path, status: os.stat_result | None) -> None:
    """Replace a file with its complete temporary file, keeping the old file's mode and owner."""
    if status:
        with suppress(OSError, AttributeError):  # only the superuser may change the owner
            os.chown(temporary, status.st_uid, status.st_gid)
        temporary.chmod(stat.S_IMODE(status.st_mode))
    temporary.replace(path)


def _replace(path: Path, pieces: Iterable[bytes], status: os.stat_result | None) -> None:
    temporary = neighbour(path)
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
        take_place(temporary, path, status)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _file_error(action: str, error: OSError | ValueError, path: str | Path) -> UserError:
    """Return the error about a file that cannot be `read`, `written` or `made`."""
    reason = getattr(error, "strerror", None) or "not a usable path"
    return UserError(f"cannot be {action}: {reason.lower()}", str(path))


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _file_error("made", error, path) from None


class Growing:
    """A temporary file next to the target, written piece by piece; closing it replaces the target.

    `-` is standard output. A device or a named pipe is written directly.

    Raises:
        UserError: The file cannot be created, or writing fails.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._temporary: Path | None = None
        self._file: TextIO = sys.stdout
        if target != "-":
            self._path, self._status = destination(target)
            try:
                self._file = self._opened()
            except OSError as error:
                raise _file_error("written", error, self.target) from None

    def _opened(self) -> TextIO:
        if self._status and not stat.S_ISREG(self._status.st_mode):
            return os.fdopen(
                os.open(self._path, os.O_WRONLY | os.O_APPEND),
                "w",
                encoding="utf-8",
                newline="",
            )
        self._temporary = neighbour(self._path)
        return self._temporary.open("x", encoding="utf-8", newline="")

    def write(self, text: str) -> None:
        """Append text."""
        try:
            self._file.write(text)
        except OSError as error:
            if self.target == "-":
                raise
            raise _file_error("written", error, self.target) from None

    def close(self, keep: bool) -> None:
        """Close the file; it replaces the target only if it is kept."""
        if self.target == "-":
            return
        try:
            self._file.close()
            if keep and self._temporary:
                take_place(self._temporary, self._path, self._status)
        except OSError as error:
            raise _file_error("written", error, self.target) from None
        finally:
            if self._temporary:
                self._temporary.unlink(missing_ok=True)


MOST_YAML, MOST_JSON = 4 << 20, 16 << 20
MOST_LINE = 1 << 20  # characters of a line, for files that are read line by line


def read_text(path: Path, most_bytes: int) -> str:
    """Return the UTF-8 text of a regular file of at most `most_bytes` bytes.

    Raises:
        UserError: The file is of another kind or too large. The check happens before reading.
    """
    check_readable(path, most_bytes)
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1).decode("utf-8-sig")
    except OSError as error:
        raise _file_error("read", error, path) from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text (byte {error.start:,})", str(path)) from None


def read_lines(path: Path, most_bytes: int) -> Iterator[str]:
    """Yield the lines of a text file, each with its line ending.

    Raises:
        UserError: As in `read_text`, or a line is longer than MOST_LINE characters.
    """
    check_readable(path, most_bytes)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MOST_LINE):
                if len(line) == MOST_LINE and line[-1] not in "\r\n":
                    raise UserError(
                        f"has a line of more than {MOST_LINE:,} characters", str(path)
                    )
                yield line
    except OSError as error:
        raise _file_error("read", error, path) from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", str(path)) from None


def check_readable(path: Path, most_bytes: int) -> None:
    """Raise UserError unless the path is a regular file of at most `most_bytes` bytes."""
    file_name = str(path)
    try:
        result = path.stat()
    except (OSError, ValueError) as error:
        raise _file_error("read", error, path) from None
    if stat.S_ISDIR(result.st_mode):
        raise UserError("is a folder, not a file", file_name)
    if not stat.S_ISREG(result.st_mode):
        raise UserError("is not a regular file", file_name)
    if result.st_size > most_bytes:
        raise UserError(
            f"has {result.st_size:,} bytes; more than {most_bytes:,} are not read",
            file_name,
        )
