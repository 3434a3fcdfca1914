"""Time the start-up of commands and of shell completion, compared with a minimal command-line program in Python.

The yardstick is a typer program that parses a 40-line YAML file and prints one rich table, in the same
environment. All programs run in turn, each in a separate process. A time is the median CPU time (user and
system).
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import Line

RUNS = 11
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as after installation
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
QUESTIONS = {  # command → maximum time as a multiple of the yardstick
    "size llama-3.1-8b": 1.2,
    "fit llama-3.1-8b --gpu h100": 1.2,
    "compare llama-3.1-8b --gpu h100": 1.4,
    "roofline llama-3.1-8b --gpu h100": 1.4,
    "latency llama-3.1-8b --gpu h100": 1.4,
}
KVCALC = [sys.executable, "-c", "from kvcalc.cli.app import main; main()"]


def process_seconds(words: list[str], **environment: str) -> float:
    """Return the CPU seconds of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT | environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lines() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        program, data = Path(folder) / "yardstick.py", Path(folder) / "forty.yaml"
        program.write_text(YARDSTICK, encoding="utf-8")
        data.write_text("".join(f"key_{i}: {{value: {i}, list: [1, 2, 3]}}\n" for i in range(40)), encoding="utf-8")
        least = [sys.executable, str(program), str(data)]
        asked = [[*KVCALC, *line.split()] for line in QUESTIONS]
        for words in (least, *asked):
            process_seconds(words)  # compiles the bytecode
        rounds = []
        for _ in range(RUNS):
            commands = [process_seconds(words) for words in asked]
            rounds.append((process_seconds(least), process_seconds(KVCALC, **COMPLETION), *commands))
    least_s, completion_s, *command_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    for (line, limit), seconds in zip(QUESTIONS.items(), command_s, strict=True):
        yield Line(f"`kvcalc {line}`, start to end", seconds, "a typer program that prints a table", least_s, limit)
    yield Line("completion of a model's name", completion_s, "the same program", least_s, 1.0)
