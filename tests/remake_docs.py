"""Puts what the commands print now under every `$ kvcalc` line of the documents: `python tests/remake_docs.py`.

The pages of references are made anew too; with `--references` they alone, which takes a second.

With `--pictures` it draws the gallery anew as well. Read the difference before it is committed: what a document says around
its output may no longer hold.
"""

import re
import shlex
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

from notebook_cells import remake
from references import PAGES
from test_docs import _FENCE, DOCUMENTS, LEFT_OUT, is_shown, width_of

PROGRAM = "import sys; from kvcalc.report import layout; layout.WIDTH = int(sys.argv.pop(1)); "
PROGRAM += "sys.argv[0] = 'kvcalc'; from kvcalc.__main__ import main; main()"


def printed(command: str, width: int) -> str:
    """The standard output of a command of the documents, whose exit status is 0, or 1 if its answer is no."""
    words = [sys.executable, "-c", PROGRAM, str(width), *shlex.split(command.removeprefix("kvcalc "))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise SystemExit(f"{command}: {done.stderr}")
    return done.stdout.rstrip("\n") + "\n"


def abridged(printed: str, shown: str) -> str:
    """`printed` with the lines left out that `shown` leaves out: after a gap from the line most like the one there."""
    if is_shown(printed, shown):
        return shown.rstrip("\n") + "\n"
    lines, found, after = printed.splitlines(), [], 0
    parts = LEFT_OUT.split(shown.rstrip("\n") + "\n")
    for number, part in enumerate(parts):
        kept = part.splitlines()
        if number and kept:
            after = max(range(after, len(lines)), key=lambda i: SequenceMatcher(None, lines[i], kept[0]).ratio(), default=after)
        until = len(lines) if kept and part is parts[-1] else after + len(kept)
        found.append("".join(f"{line}\n" for line in lines[after:until]))
        after = until
    return "…\n".join(found)


def remade(path: Path) -> str:
    """The document with the output of each of its commands as it is now."""

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
    "cost-vs-context": "plot cost-vs-context",
    "serving-load": "serve llama-3.1-8b --rate 1,2,3,4,6,8,16,24 --num-prompts 400 --input-len lognormal:600,3000 "
    "--output-len lognormal:200,1000 --max-num-seqs 64 --policy static,continuous",
    "serving-contiguous": "serve llama-3.1-8b --max-concurrency 128 --num-prompts 300 --input-len lognormal:600,3000 "
    "--output-len lognormal:200,1000 --max-model-len 8k --cache contiguous",
}

if "--pictures" in sys.argv:
    for name, line in GALLERY.items():
        target = Path(__file__).parent.parent / "docs" / "images" / f"{name}.png"
        subprocess.run(
            [sys.executable, "-m", "kvcalc", *shlex.split(line), "--plot", str(target)], check=True, stdout=subprocess.DEVNULL
        )
for page, made in PAGES.items():
    (Path(__file__).parent.parent / "docs" / page).write_text(made(), encoding="utf-8")
if "--references" in sys.argv:
    sys.exit()
for document in DOCUMENTS:
    document.write_text(remade(document), encoding="utf-8")
remake()
