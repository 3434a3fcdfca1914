"""A file that grows while something runs, and takes its place when that ends."""

import os
import sys
from pathlib import Path
from typing import TextIO

from kvcalc.errors import UserError
from kvcalc.library.writing import destination


class Growing:
    """Text written piece by piece into a neighbour of the file, which takes its place when it is closed; `-` is standard output.

    Raises UserError where there can be no such file, or no more of it.
    """

    def __init__(self, target: str) -> None:
        self.target, self._temporary = target, None if target == "-" else _neighbour(target)
        self._file: TextIO = sys.stdout
        if self._temporary:
            try:
                self._file = self._temporary.open("x", encoding="utf-8", newline="")
            except OSError as error:
                raise self._failed(error) from None

    def write(self, text: str) -> None:
        """Put text behind what is there."""
        try:
            self._file.write(text)
        except OSError as error:
            if self._temporary is None:
                raise
            raise self._failed(error) from None

    def close(self, keep: bool) -> None:
        """End the file; only where it is kept does it take its place."""
        if self._temporary is None:
            return
        try:
            self._file.close()
            if keep:
                self._temporary.replace(destination(self.target)[0])
        except OSError as error:
            raise self._failed(error) from None
        finally:
            self._temporary.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> UserError:
        return UserError(f"cannot be written: {(error.strerror or 'error').lower()}", self.target)


def _neighbour(target: str) -> Path:
    return destination(target)[0].with_name(f".{os.urandom(4).hex()}.part")
