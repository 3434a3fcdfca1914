"""Puts what the commands print now under every `$ kvcalc` line of the documents: `python tests/remake_docs.py`.

Read the difference before it is committed: what a document says around its output may no longer hold.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from test_docs import _FENCE, DOCUMENTS, LEFT_OUT, width_of

PROGRAM = "import sys; from kvcalc.report import layout; layout.WIDTH = int(sys.argv.pop(1)); "
PROGRAM += "sys.argv[0] = 'kvcalc'; from kvcalc.__main__ import main; main()"


def printed(command: str, width: int, before: str) -> str:
    """The standard output of a command of the documents; as many lines of it as before where the rest was left out."""
    words = [sys.executable, "-c", PROGRAM, str(width), *shlex.split(command.removeprefix("kvcalc "))]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.rstrip("\n").split("\n")
    kept = before.rstrip("\n").split("\n")
    if kept[-1] == LEFT_OUT:
        lines = [*lines[: len(kept) - 1], LEFT_OUT]
    return "\n".join(lines) + "\n"


def remade(path: Path) -> str:
    """The document with the output of each of its commands as it is now."""

    def block(match: "re.Match[str]") -> str:
        parts = []
        for part in re.split(r"^\$ ", match[1], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            blank = "\n" if output.endswith("\n\n") else ""
            parts.append(
                f"$ {command}\n"
                + (printed(command, width_of(path.name), output) + blank if command.startswith("kvcalc ") else output)
            )
        return "```console\n" + "".join(parts) + "```"

    return _FENCE.sub(block, path.read_text(encoding="utf-8"))


for document in DOCUMENTS:
    document.write_text(remade(document), encoding="utf-8")
