"""YAML in a terminal: lines folded so that none is longer than it is wide, and still the same YAML."""

import re

from kvcalc.report.layout import wrapped

_COMMENT = re.compile(r"(^|\s)#.*$")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def folded(text: str, width: int) -> str:
    """`text` with long lines folded at spaces; a word that is longer, as an address, stays whole."""
    return "".join(line + "\n" for whole in text.splitlines() for line in _folded(whole, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    data, remark = _parted(line)
    lead = " " * (len(line) - len(line.lstrip()))
    if not remark:
        return _lines(data.split(" "), lead + "    ", width)
    marked = [f"{lead}# {part}" for part in wrapped(remark, max(20, width - len(lead) - 2))]
    return [*marked, *(_folded(data, width) if data.strip() else [])]  # a remark stands above what it is about


def _parted(line: str) -> tuple[str, str]:
    """What a line says, and its comment; a mark inside quotes begins none."""
    blank = _QUOTED.sub(lambda match: "_" * len(match[0]), line)
    found = _COMMENT.search(blank)
    return (line[: found.start()].rstrip(), line[found.start() :].strip().lstrip("#").strip()) if found else (line, "")


def _lines(words: list[str], indent: str, width: int) -> list[str]:
    lines, line = [], words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) > width and line.strip():
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}"
    return [*lines, line]
