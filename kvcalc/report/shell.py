"""Command lines in what is shown: broken so that a shell takes them as one, in whatever width."""

import re


class CommandLine(str):
    """A line to be typed: never folded as text is."""

    __slots__ = ()


def shell_lines(command: str, width: int) -> list[str]:
    """A command line over several lines of at most `width`, broken before flags, each but the last behind a backslash.

    A flag with its value that is longer is broken at spaces; inside quotes, which hold JSON, a line ends without a mark. A
    single word that is longer stays whole.
    """
    lines: list[str] = []
    line = ""
    for piece in re.split(r" (?=--?[A-Za-z])", command):
        for word in [piece] if len(piece) + 4 <= width or '"\'"' in piece else piece.split(" "):
            if line and len(line) + 1 + len(word) > width - 2:
                lines.append(line if _quoting([*lines, line]) else line + " \\")
                line = " "
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _quoting(lines: list[str]) -> bool:
    """Whether a quotation is still open at the end of these lines."""
    return sum(line.count("'") for line in lines) % 2 == 1
