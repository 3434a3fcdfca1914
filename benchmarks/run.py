"""All benchmarks as ratios in one run: `python benchmarks/run.py`, some minutes. Names run some alone, as `run.py size serve`.

With `--write` the table goes into benchmarks/README.md. Exit status 1 where a ratio is above the most that it may be.
"""

import platform
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy
from bench import Line

from kvcalc import __version__

ALL = ("startup", "size", "forward", "serve", "validate", "plan")
HEAD = ["what", "takes", "yardstick", "takes", "ratio", "at most"]
README = Path(__file__).with_name("README.md")
RECORDED = re.compile(r"(?<=<!-- recorded -->\n).*(?=<!-- end -->)", re.DOTALL)


def table(lines: list[Line]) -> str:
    """The lines in Markdown, and what they were taken with."""
    rows = [HEAD, ["---", "---:", "---", "---:", "---:", "---:"], *(line.cells() for line in lines)]
    versions = f"kvcalc {__version__}, Python {platform.python_version()}, NumPy {numpy.__version__}, {platform.machine()}"
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{versions}\n"


def main(words: list[str]) -> int:
    names = [word for word in words if word != "--write"] or ALL
    if unknown := set(names) - {*ALL}:
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    lines: list[Line] = []
    for name in names:
        for line in import_module(name).lines():
            print(("      " if line.good else "SLOW  ") + ", ".join(line.cells()), flush=True)
            lines.append(line)
    if "--write" in words:
        README.write_text(RECORDED.sub(lambda _: table(lines), README.read_text(encoding="utf-8")), encoding="utf-8")
    return int(not all(line.good for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
