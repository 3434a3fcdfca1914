"""Files that people hand over, and those that they ask for.

What is no small regular text file is refused before it is read, and what is wrong in one is said with its line. What is
written is there in full or not at all.

YAML is read from PyYAML's event stream by the core schema of YAML 1.2: `989e12` is a number, `no` is a string. Nesting
is limited, duplicate keys and aliases are refused, and nothing is ever built that the text does not spell out.
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

MOST_YAML, MOST_JSON = 4 << 20, 16 << 20
MOST_LINE = 1 << 20  # characters of a line, of files that are read by lines
MOST_DEPTH = 32
_HELD = 1 << 20  # bytes of what is to be printed that are held in memory
_OPEN_FILES = ("/dev/fd/", "/proc/")  # where a name stands for a file that a process holds open
_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "true": True, "True": True, "false": False, "False": False}

Lines = dict[tuple[str | int, ...], int]


def read_text(path: Path, most_bytes: int) -> str:
    """The UTF-8 text of a regular file of at most `most_bytes`. Raises UserError for anything else, before reading it."""
    check_readable(path, most_bytes)
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1).decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(error, path) from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text (byte {error.start:,})", str(path)) from None


def read_lines(path: Path, most_bytes: int) -> Iterator[str]:
    """The lines of such a text, one by one, each with the end that it has. Raises UserError also on one beyond MOST_LINE."""
    check_readable(path, most_bytes)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MOST_LINE):
                if len(line) == MOST_LINE and line[-1] not in "\r\n":
                    raise UserError(f"has a line of more than {MOST_LINE:,} characters", str(path))
                yield line
    except OSError as error:
        raise _unreadable(error, path) from None
    except UnicodeDecodeError:
        raise UserError(f"is not UTF-8 text (byte {_first_bad(path):,})", str(path)) from None


def check_readable(path: Path, most_bytes: int) -> None:
    """Raises UserError for what is no regular file of at most `most_bytes`."""
    where = str(path)
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(error, path) from None
    if stat.S_ISDIR(found.st_mode):
        raise UserError("is a folder, not a file", where)
    if not stat.S_ISREG(found.st_mode):
        raise UserError("is not a regular file", where)
    if found.st_size > most_bytes:
        raise UserError(f"has {found.st_size:,} bytes; more than {most_bytes:,} are not read", where)


def _unreadable(error: OSError | ValueError, path: Path) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
    return UserError(f"cannot be read: {reason.lower()}", str(path))


def _first_bad(path: Path) -> int:
    """The place of the first byte that is no UTF-8; no character spans two lines."""
    at = 0
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return at + error.start
            at += len(line)
    return at


def parse_yaml(text: str, where: str) -> tuple[dict[str, Any], Lines]:
    """The mapping in `text`, and the line of each key by its path. Raises UserError naming `where` and the line."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(where)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"is not YAML: {getattr(error, 'problem', None) or error}", where + line) from None
    if not isinstance(builder.root, dict):
        raise UserError("holds no mapping of keys to values", where)
    return builder.root, builder.lines


class _Builder:
    """Builds plain dicts, lists and scalars out of YAML events."""

    def __init__(self, where: str) -> None:
        self.where, self.root = where, None
        self.lines: Lines = {}
        self.stack: list[Any] = []  # containers that are open
        self.paths: list[tuple[str | int, ...]] = []  # and where each of them stands
        self.keys: list[str | None] = []  # and the key that awaits its value
        self.documents = 0

    def fail(self, text: str, event: Any) -> UserError:
        return UserError(text, f"{self.where}, line {event.start_mark.line + 1}")

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
                raise self.fail(f"key {event.value!r} stands twice", event)
            self.keys[-1] = event.value
            self.lines[(*self.paths[-1], event.value)] = event.start_mark.line + 1
            return
        plain = event.implicit[0] and event.style in (None, "")
        try:
            self._add(scalar(event.value) if plain else event.value, event)
        except (ValueError, OverflowError):
            raise self.fail(f"{event.value[:40]!r} is not a usable number", event) from None

    def _add(self, value: Any, event: Any) -> tuple[str | int, ...]:
        """Put a value where it belongs, note its line, and return its path."""
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
    """A plain scalar by YAML 1.2: null, a boolean, a whole or decimal number, else the text itself."""
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


def write_text(target: str | Path, content: str | bytes | Iterable[str]) -> None:
    """Write a whole file or none: a temporary neighbour takes its place when it is complete. Raises UserError.

    Links are followed, and a file that was there keeps its mode. What is no regular file (a device, a named pipe), and what
    this process prints to (`-`, /dev/stdout), is written through; OSError where what it prints to cannot be written. Content
    that comes in pieces is never held whole, and is printed when the last has come.
    """
    pieces = _encoded([content] if isinstance(content, str | bytes) else content)
    if str(target) == "-":
        return _print(sys.stdout, pieces)
    path, there = destination(target)
    stream = _own_stream(there) if there else None
    if stream:
        return _print(stream, pieces)
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
    """The same pieces, once the last of them is there."""
    import tempfile

    with tempfile.SpooledTemporaryFile(_HELD) as whole:
        whole.writelines(pieces)
        whole.seek(0)
        while piece := whole.read(_HELD):
            yield piece


def destination(target: str | Path) -> tuple[Path, os.stat_result | None]:
    """Where the file `target` will lie, links followed, and what is there now. Raises UserError where no file can be."""
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
    if path.is_symlink() and (not there or stat.S_ISREG(there.st_mode)):  # a pipe has no name to follow to
        path = Path(os.path.realpath(path))
    if not there and not os.path.isdir(path.parent):  # noqa: PTH112 (Path.is_dir raises where it may not look)
        raise UserError("cannot be written: no such folder", name)
    if there and not os.access(path, os.W_OK):
        raise UserError("cannot be written: permission denied", name)
    return path, there


def _own_stream(there: os.stat_result) -> TextIO | None:
    """Standard output or standard error, where the file is the one that it goes to."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a stream may be closed, or none of the system's
            if os.path.samestat(os.fstat(stream.fileno()), there):
                return stream
    return None


def _print(stream: TextIO, pieces: Iterable[bytes]) -> None:
    """Behind what is printed already, as it is."""
    for piece in _complete(pieces):
        stream.flush()
        stream.buffer.write(piece)
    stream.flush()


def _replace(path: Path, pieces: Iterable[bytes], there: os.stat_result | None) -> None:
    temporary = path.with_name(f".{os.urandom(4).hex()}.part")
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
        if there:
            with suppress(OSError, AttributeError):  # only the superuser gives files away
                os.chown(temporary, there.st_uid, there.st_gid)
            temporary.chmod(stat.S_IMODE(there.st_mode))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _unwritable(error: OSError | ValueError, target: str | Path) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
    return UserError(f"cannot be written: {reason.lower()}", str(target))


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be made: {(error.strerror or 'error').lower()}", str(path)) from None
