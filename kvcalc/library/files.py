"""Read files from users; anything except a small regular text file is refused before reading."""

import stat
from collections.abc import Iterator
from pathlib import Path

from kvcalc.errors import UserError

MOST_YAML, MOST_JSON = 4 << 20, 16 << 20
MOST_LINE = 1 << 20  # characters of a line, of files that are read by lines


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
        raise _unreadable(error, path) from None
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
                    raise UserError(f"has a line of more than {MOST_LINE:,} characters", str(path))
                yield line
    except OSError as error:
        raise _unreadable(error, path) from None
    except UnicodeDecodeError:
        raise UserError(f"is not UTF-8 text (byte {_first_bad(path):,})", str(path)) from None


def check_readable(path: Path, most_bytes: int) -> None:
    """Raise UserError unless the path is a regular file of at most `most_bytes` bytes."""
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
    """Return the position of the first byte that is not valid UTF-8.

    No character spans two lines.
    """
    at = 0
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return at + error.start
            at += len(line)
    return at
