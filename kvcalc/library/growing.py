"""Write a file that grows during a run and replaces its target at the end."""

import os
import stat
import sys
from pathlib import Path
from typing import TextIO

from kvcalc.errors import UserError
from kvcalc.library.writing import destination, neighbour, take_place


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
            self._path, self._there = destination(target)
            try:
                self._file = self._opened()
            except OSError as error:
                raise self._failed(error) from None

    def _opened(self) -> TextIO:
        if self._there and not stat.S_ISREG(self._there.st_mode):
            return os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8", newline="")
        self._temporary = neighbour(self._path)
        return self._temporary.open("x", encoding="utf-8", newline="")

    def write(self, text: str) -> None:
        """Append text."""
        try:
            self._file.write(text)
        except OSError as error:
            if self.target == "-":
                raise
            raise self._failed(error) from None

    def close(self, keep: bool) -> None:
        """Close the file; it replaces the target only if it is kept."""
        if self.target == "-":
            return
        try:
            self._file.close()
            if keep and self._temporary:
                take_place(self._temporary, self._path, self._there)
        except OSError as error:
            raise self._failed(error) from None
        finally:
            if self._temporary:
                self._temporary.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> UserError:
        return UserError(f"cannot be written: {(error.strerror or 'error').lower()}", self.target)
