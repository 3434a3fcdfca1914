"""Makes all that rests on measured servers again, after a law, an engine's order of passes or a published run's script changed.

    python benchmarks/served.py e2e_dense.csv e2e_moe.csv

In turn: what engines add to their kernels (engine_terms.py), the errors that calibrations carry (serving_errors.py), the tables
of servers in docs/reference (accuracy.py, held_out.py), and what commands print in the documents (tests/remake_docs.py).
Minutes; the same rows give the same bytes.
"""

import subprocess
import sys
from pathlib import Path

from kvcalc.timing.rows import SERVING

HERE = Path(__file__).parent


def main(paths: list[str]) -> None:
    if sorted(Path(path).stem for path in paths) != sorted(SERVING):
        sys.exit(f"needs {' and '.join(f'{name}.csv' for name in SERVING)}")
    steps = (
        ("engine_terms.py", *paths, "--write"),
        ("serving_errors.py", *paths),
        ("accuracy.py", *paths, "--write"),
        ("held_out.py", *paths, "--write"),
    )
    for name, *words in steps:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, str(HERE / name), *words], check=True)
    subprocess.run([sys.executable, str(HERE.parent / "tests" / "remake_docs.py")], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
