"""Run all benchmarks and print their ratios: `python benchmarks/run.py`, some minutes.

Names select benchmarks: `python benchmarks/run.py size serve`. `--write` writes the table into
benchmarks/README.md. The exit status is 1 if a ratio is above its maximum.
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
    """Return the lines as a Markdown table, followed by the versions that were measured."""
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
