"""Remake everything that depends on measured servers, after a change of a time model, of an engine's scheduling
or of a run's settings.

    python benchmarks/served.py e2e_dense.csv e2e_moe.csv

The steps are: the engines' overheads (engine_terms.py), the errors in the calibrations (serving_errors.py),
the tables of servers in docs/reference (accuracy.py, held_out.py), and the output of commands in the
documents (tests/remake_docs.py). This takes minutes. The same rows give the same bytes.
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
