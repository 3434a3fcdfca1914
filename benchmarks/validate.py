"""Time `validate` on a CSV file of 50,000 measured products of random shapes, with bounds and predictions.

The yardstick reads the same file with csv.DictReader and converts every number to a float.
"""

import csv
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import Line, cpu_seconds

from kvcalc.serving.validation import error_records, validate
from kvcalc.timing.rows import read_rows

ROWS = 50_000
HEAD = "op,gpu,framework,version,dtype,m,n,k,time_us\n"


def validated(path: Path) -> int:
    """Return the number of rows of the file that have a prediction."""
    return sum(record["predicted_rows"] for record in error_records(validate([read_rows(path)]), ["op"]))


def read(path: Path) -> float:
    """Run the yardstick, and return the sum of all numbers in the file."""
    with path.open(encoding="utf-8", newline="") as file:
        return sum(float(row["m"]) + float(row["n"]) + float(row["k"]) + float(row["time_us"]) for row in csv.DictReader(file))


def lines() -> Iterator[Line]:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        rows = (f"{chance.randint(1, 8192)},{64 * chance.randint(1, 200)},{64 * chance.randint(1, 200)}" for _ in range(ROWS))
        path.write_text(HEAD + "".join(f"gemm,h100-sxm,vllm,0.14.0,bfloat16,{row},50\n" for row in rows), encoding="utf-8")
        ours, plain = cpu_seconds(lambda: validated(path), repeat=3), cpu_seconds(lambda: read(path), repeat=3)
    yield Line(f"`validate` of {ROWS:,} rows", ours, "csv.DictReader of the same", plain, 40)
