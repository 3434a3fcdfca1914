"""Read and write files, and parse YAML from users.

An output file is written completely or not at all. An input file must be a small regular text
file. YAML is read by the core schema of YAML 1.2: `989e12` is a number, `no` is a string. Nesting
is limited, duplicate keys and aliases are refused, and every error names its line.
"""

import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

from kvcalc.errors import UserError
from kvcalc.records import JsonObject
from kvcalc.units import plain

MAX_DEPTH = 32
TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels"
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

KeyPath = tuple[str | int, ...]  # keys and positions in lists that lead to a value
Lines = dict[KeyPath, int]


def parse_yaml(text: str, file_name: str) -> tuple[JsonObject, Lines]:
    """Return the mapping in a YAML text, and the line number of each key for error messages.

    The line numbers are stored by the path of a key: a tuple of keys and list indices, such as
    ("kinds", "full", "parts", 0).

    Args:
        text: The YAML text.
        file_name: Name of the file in error messages.

    Raises:
        UserError: The text is invalid. The message names the file and the line.
    """
    reader = YamlReader(file_name)
    documents = reader.documents(text)
    root = documents[0] if documents else None
    if not isinstance(root, dict):
        raise UserError("holds no mapping of keys to values", where=file_name)
    return root, reader.lines


class YamlReader:
    """Reads YAML as plain dicts, lists and scalars.

    Attributes:
        file_name: Name of the file in error messages.
        lines: Line of each key by its path.
        is_stream: Whether the text may have several documents, and aliases.
        values: Values of the nodes already read in this document.
    """

    def __init__(self, file_name: str, is_stream: bool = False) -> None:
        self.file_name = file_name
        self.lines: Lines = {}
        self.is_stream = is_stream
        self.values: dict[int, Any] = {}

    def fail(self, text: str, mark: Any) -> UserError:
        """Return an error with the file and the line of a mark of PyYAML; no line for None."""
        line = f", line {mark.line + 1}" if mark else ""
        return UserError(text, where=self.file_name + line)

    def documents(self, text: str) -> list[Any]:
        """Return the value of each YAML document in a text. Lines of `---` separate documents.

        Args:
            text: The YAML text.

        Raises:
            UserError: The text is invalid. The message names the file and the line.
        """
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents: list[Any] = []
        try:
            for root in yaml.compose_all(text, Loader=loader):
                if documents and not self.is_stream:
                    raise self.fail("holds a second document", root.start_mark)
                self.values.clear()
                documents.append(self.value(root, ()))
        except yaml.YAMLError as error:
            problem = str(getattr(error, "problem", None) or error)
            message = f"is not YAML: {problem}"
            if "nesting depth" in problem:  # PyYAML 6.0.4 also has a limit
                message = TOO_DEEP
            raise self.fail(message, getattr(error, "problem_mark", None)) from None
        except RecursionError:
            raise self.fail(TOO_DEEP, None) from None
        return documents

    def value(self, node: Any, path: KeyPath) -> Any:
        """Return the value of a YAML node, and record the line number of each key in it.

        Args:
            node: Node that the YAML library parsed.
            path: Keys and list indices that lead to the node.
        """
        if id(node) in self.values:
            if not self.is_stream:
                raise self.fail("has an alias; write the value out", node.start_mark)
            return self.values[id(node)]
        self.lines.setdefault(path, node.start_mark.line + 1)
        value: Any
        if isinstance(node.value, str):
            value = self.scalar(node)
        elif len(path) >= MAX_DEPTH:
            raise self.fail(TOO_DEEP, node.start_mark)
        elif node.id == "sequence":
            value = [self.value(item, (*path, n)) for n, item in enumerate(node.value)]
        else:
            value = {}
            for key, item in node.value:
                if not isinstance(key.value, str):
                    raise self.fail("a key must be a single word or number", key.start_mark)
                if key.value in value:
                    raise self.fail(f"key {key.value!r} occurs twice", key.start_mark)
                self.lines[*path, key.value] = key.start_mark.line + 1
                value[key.value] = self.value(item, (*path, key.value))
        self.values[id(node)] = value
        return value

    def scalar(self, node: Any) -> Any:
        try:
            return node.value if node.style else scalar(node.value)
        except (ValueError, OverflowError):
            raise self.fail(
                f"{node.value[:40]!r} is not a usable number", node.start_mark
            ) from None


def scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar by YAML 1.2.

    A scalar is one value that is not a list or a mapping. The result is None, a boolean, a number,
    or otherwise the text. Examples: `4` gives 4, `64e9` gives 64000000000, and `yes` gives 'yes'.

    Args:
        text: The scalar as it is written in the file.

    Raises:
        OverflowError: The number is too large for a float.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if abs(value) == float("inf"):
            raise OverflowError
        return plain(value) if "e" in text.lower() else value
    return text


def write_text(target: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all.

    Args:
        target: Path of the file. `-` is standard output.
        content: The complete content.

    Raises:
        UserError: The file cannot be written.
        OSError: Standard output cannot be written.
    """
    file = OutputFile(str(target))
    try:
        file.write(content)
    except BaseException:
        file.close(keep=False)
        raise
    file.close(keep=True)


def destination(target: str | Path) -> tuple[Path, os.stat_result | None]:
    """Return the path of an output file with links resolved, and its `os.stat` result.

    It is called before a long computation, so that an unusable path is reported first. The second
    value is None if the file does not exist yet.

    Args:
        target: Path that the user typed.

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
        raise file_error("written", error, target) from None
    if name.endswith(("/", os.sep)) or (status and stat.S_ISDIR(status.st_mode)):
        raise UserError("cannot be written: is a folder, not a file", where=name)
    # a pipe has no link target
    if path.is_symlink() and (not status or stat.S_ISREG(status.st_mode)):
        path = Path(os.path.realpath(path))
    if not status and not os.path.isdir(path.parent):  # noqa: PTH112 (never raises)
        raise UserError("cannot be written: no such folder", where=name)
    if status and not os.access(path, os.W_OK):
        raise UserError("cannot be written: permission denied", where=name)
    return path, status


def file_error(action: str, error: OSError | ValueError, path: str | Path) -> UserError:
    """Return the error about a file that cannot be `read`, `written` or `made`.

    Args:
        action: What failed, such as `read`.
        error: Error of the operating system.
        path: Path of the file.
    """
    reason = getattr(error, "strerror", None) or "not a usable path"
    return UserError(f"cannot be {action}: {reason.lower()}", where=str(path))


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. An existing folder is left as it is.

    Raises:
        UserError: The folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("made", error, path) from None


class OutputFile:
    """An output file that is complete after `close`, or does not change.

    Text goes into a temporary file in the same folder. `close` replaces the target with it. Links
    are followed, and an existing file keeps its mode. Devices, named pipes and standard output (`-`
    or /dev/stdout) are written directly.

    Args:
        target: Path that the user typed, or `-` for standard output.

    Raises:
        UserError: The file cannot be created, or writing fails.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._temporary: Path | None = None
        self._file: BinaryIO | None = None
        if target in ("-", "/dev/stdout"):
            return
        self._path, self._status = destination(target)
        if not self._status or stat.S_ISREG(self._status.st_mode):
            self._temporary = self._path.with_name(f".{os.urandom(4).hex()}.part")
        try:
            self._file = (self._temporary or self._path).open("ab")
        except OSError as error:
            raise file_error("written", error, target) from None

    def write(self, content: str | bytes) -> None:
        """Append text, as UTF-8, or bytes to the temporary file.

        If the target is standard output, a pipe or a device, they are written there directly.

        Args:
            content: Text or bytes.
        """
        data = content.encode(errors="replace") if isinstance(content, str) else content
        if not self._file:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            return
        try:
            self._file.write(data)
        except OSError as error:
            raise file_error("written", error, self.target) from None

    def close(self, keep: bool) -> None:
        """Close the file, and put the written content in the place of the target or discard it.

        Args:
            keep: Whether the temporary file replaces the target. If not, it is deleted, and the
                target stays as it was. It has no effect on a device, pipe or standard output.
        """
        if not self._file:
            return
        try:
            self._file.close()
            if keep and self._temporary:
                if self._status:
                    self._temporary.chmod(stat.S_IMODE(self._status.st_mode))
                self._temporary.replace(self._path)
        except OSError as error:
            raise file_error("written", error, self.target) from None
        finally:
            if self._temporary:
                self._temporary.unlink(missing_ok=True)


MAX_YAML_BYTES, MAX_JSON_BYTES = 4 << 20, 16 << 20


def read_text(path: Path, max_bytes: int) -> str:
    """Return the UTF-8 text of a regular file.

    Args:
        path: The file.
        max_bytes: Maximum size of the file in bytes.

    Raises:
        UserError: The file is not a regular file, or is too large. Both are checked before reading.
    """
    check_readable(path, max_bytes)
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1).decode("utf-8-sig")
    except OSError as error:
        raise file_error("read", error, path) from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text (byte {error.start:,})", where=str(path)) from None


def check_readable(path: Path, max_bytes: int) -> None:
    """Check that a path is a regular file of limited size, without reading it.

    Args:
        path: The file.
        max_bytes: Maximum size of the file in bytes.

    Raises:
        UserError: The path is not a regular file, or the file is too large.
    """
    file_name = str(path)
    try:
        result = path.stat()
    except (OSError, ValueError) as error:
        raise file_error("read", error, path) from None
    if stat.S_ISDIR(result.st_mode):
        raise UserError("is a folder, not a file", where=file_name)
    if not stat.S_ISREG(result.st_mode):
        raise UserError("is not a regular file", where=file_name)
    if result.st_size > max_bytes:
        raise UserError(
            f"has {result.st_size:,} bytes; more than {max_bytes:,} are not read",
            where=file_name,
        )
