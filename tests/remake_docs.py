"""Replace the output below each `$ kvcalc` line of the documents with what the command prints now.

    python tests/remake_docs.py                        all documents, the generated references and the notebook
    python tests/remake_docs.py docs/how-to/plan.md    only these documents
    python tests/remake_docs.py --references           only the generated references, in a second
    python tests/remake_docs.py --pictures             all documents and the pictures of the gallery

Read the difference before you commit it: the text around an output may be wrong now.
"""

import os
import re
import shlex
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

from notebook_cells import remake
from references import PAGES
from test_docs import _FENCE, DOCUMENTS, LEFT_OUT, ROOT, is_shown, width_of


def printed(command: str, width: int) -> str:
    """Return what a command of the documents prints: its answer, or its message if it refuses the request."""
    words = [sys.executable, "-m", "kvcalc", *shlex.split(command.removeprefix("kvcalc "))]
    environment = os.environ | {"COLUMNS": str(width)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode > 2:
        raise SystemExit(f"{command}: {done.stderr}")
    return (done.stderr if done.returncode == 2 else done.stdout).rstrip("\n") + "\n"


def abridged(printed: str, shown: str) -> str:
    """Return `printed` with the same gaps as `shown`.

    A part that ends with a blank line ends with the same blank line of `printed`, however long its paragraphs are. After a
    gap, a part begins with the line that resembles its first line most.
    """
    if is_shown(printed, shown):
        return shown.rstrip("\n") + "\n"
    lines, found, after = printed.splitlines(), [], 0
    parts = LEFT_OUT.split(shown.rstrip("\n") + "\n")
    for number, part in enumerate(parts):
        kept = part.splitlines()
        if number and kept:
            after = max(range(after, len(lines)), key=lambda i: SequenceMatcher(None, lines[i], kept[0]).ratio(), default=after)
        until = len(lines) if kept and part is parts[-1] else after + len(kept)
        if kept and not kept[-1]:
            blank_lines = [i for i in range(after, len(lines)) if not lines[i]]
            until = blank_lines[kept.count("") - 1] + 1 if len(blank_lines) >= kept.count("") else len(lines)
        found.append("".join(f"{line}\n" for line in lines[after:until]))
        after = until
    return "…\n".join(found)


def remade(path: Path) -> str:
    """Return the document with the current output of each command."""

    def block(match: "re.Match[str]") -> str:
        parts = []
        for part in re.split(r"^\$ ", match[1], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            blank = "\n" if output.endswith("\n\n") else ""
            if command.startswith("kvcalc "):
                now = printed(command, width_of(path.name))
                output = (abridged(now, output) if LEFT_OUT.search(output) else now) + blank
            parts.append(f"$ {command}\n{output}")
        return "```console\n" + "".join(parts) + "```"

    return _FENCE.sub(block, path.read_text(encoding="utf-8"))


GALLERY = {
    "attention": "roofline --gpu h100 --context 32k",
    "roofline": "plot roofline",
    "cache-vs-context": "plot cache-vs-context",
    "cache-vs-parameters": "plot cache-vs-parameters",
    "no-cache": "plot no-cache --context 64k",
    "memory": "plot memory --context 8k --batch-size 16",
    "dsa-vs-mla": "plot dsa-vs-mla",
    "serving-load": "serve llama-3.1-8b --rate 1,2,3,4,6,8,16,24 --num-prompts 400 --input-len lognormal:600,3000 "
    "--output-len lognormal:200,1000 --max-num-seqs 64 --policy static,continuous",
    "serving-contiguous": "serve llama-3.1-8b --max-concurrency 128 --num-prompts 300 --input-len lognormal:600,3000 "
    "--output-len lognormal:200,1000 --max-model-len 8k --cache contiguous",
}

if "--pictures" in sys.argv:
    for name, line in GALLERY.items():
        target = ROOT / "docs" / "images" / f"{name}.png"
        subprocess.run(
            [sys.executable, "-m", "kvcalc", *shlex.split(line), "--plot", str(target)], check=True, stdout=subprocess.DEVNULL
        )
for page, made in PAGES.items():
    (ROOT / "docs" / page).write_text(made(), encoding="utf-8")
if "--references" in sys.argv:
    sys.exit()
requested = [Path(word).resolve() for word in sys.argv[1:] if word.endswith(".md")]
for document in requested or DOCUMENTS:
    document.write_text(remade(document), encoding="utf-8")
if not requested:
    remake()
