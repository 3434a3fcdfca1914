"""How much CPU time `kvcalc size llama-3.1-8b` takes, against the least that a command line in Python can be.

The yardstick is a typer program that parses a 40-line YAML file and prints one rich table, in the same environment. Both
run in turn, each in a process of its own; CPU time (user and system) is compared, not wall time, which other work on the
machine disturbs. Then how long a shell waits for completion, in CPU time too. Exit status 1 when the median ratio or the time
of a completion is above its target.

    python benchmarks/startup.py [RUNS]
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as it is once installed
TARGET, COMPLETION_TARGET = 1.4, 0.150
COMPLETION = {"_KVCALC_COMPLETE": "complete_bash", "COMP_WORDS": "kvcalc size llama-3.1", "COMP_CWORD": "2"}
YARDSTICK = """\
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def show(path: Annotated[Path, typer.Argument(help="A YAML file.")], width: int = 100) -> None:
    data = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    table = Table("key", "value")
    for key, value in data.items():
        table.add_row(key, str(value))
    Console(width=width).print(table)


app()
"""
KVCALC = "from kvcalc.cli.app import main; main()"


def cpu_seconds(words: list[str], **environment: str) -> float:
    """CPU time of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT | environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as folder:
        program, data = Path(folder) / "yardstick.py", Path(folder) / "forty.yaml"
        program.write_text(YARDSTICK, encoding="utf-8")
        data.write_text("".join(f"key_{i}: {{value: {i}, list: [1, 2, 3]}}\n" for i in range(40)), encoding="utf-8")
        least = [sys.executable, str(program), str(data)]
        ours = [sys.executable, "-c", KVCALC, "size", "llama-3.1-8b"]
        for words in (least, ours):
            cpu_seconds(words)  # writes the bytecode
        pairs = [(cpu_seconds(least), cpu_seconds(ours)) for _ in range(runs)]
    ratio = statistics.median(b / a for a, b in pairs)
    yardstick, kvcalc = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
    print(f"CPU: yardstick {yardstick:.0f} ms, kvcalc size {kvcalc:.0f} ms")
    print(f"median ratio of {runs} pairs {ratio:.2f}, target {TARGET}")
    completion = statistics.median(cpu_seconds(ours[:3], **COMPLETION) for _ in range(runs))
    print(f"CPU: completion {completion * 1000:.0f} ms, target {COMPLETION_TARGET * 1000:.0f} ms")
    return int(ratio > TARGET or completion > COMPLETION_TARGET)


if __name__ == "__main__":
    sys.exit(main())
