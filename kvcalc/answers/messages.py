"""Print texts on stdout, notes on stderr, and files."""

import shutil
import sys
from collections.abc import Iterable

from kvcalc.errors import printable, visible


def say(text: str) -> None:
    """Print lines on stdout. A terminal gets lines of its width, a pipe gets whole lines."""
    output = visible(text)
    if sys.stdout.isatty():
        lines = []
        for line in output.split("\n"):
            indent = " " * (len(line) - len(line.lstrip()))
            lines += [indent + part for part in _wrapped(line, len(indent))]
        output = "\n".join(lines)
    print(output)


def _wrapped(line: str, indent: int = 0) -> list[str]:
    from kvcalc.report.text.table_layout import wrapped

    return wrapped(line, max(20, shutil.get_terminal_size().columns - indent), "  ")


def say_yaml(text: str) -> None:
    """Write YAML on stdout."""
    sys.stdout.write(visible(text))


def note(text: str) -> None:
    """Print a note on stderr."""
    print_to_stderr(f"note: {printable(text, 1000)}")


def print_to_stderr(line: str) -> None:
    """Print a line on stderr, wrapped on a terminal."""
    print("\n".join(_wrapped(line)) if sys.stderr.isatty() else line, file=sys.stderr)


def save_text(target: str, content: str | Iterable[str]) -> None:
    """Write a file and report it on stderr; `-` is stdout."""
    from kvcalc.library.files import write_text

    write_text(target, content)
    if target != "-":
        print(f"wrote {printable(target, 1000)}", file=sys.stderr)
