"""All checks in one command: `python tests/check.py`. `python tests/check.py lint` leaves out the tests and takes seconds.

Each check runs whatever the others say; the exit status is 1 where one fails.
"""

import subprocess
import sys
from pathlib import Path

ROOMS = ("kvcalc", "tests", "benchmarks")
LINTERS = (("ruff", "check", *ROOMS), ("ruff", "format", "--check", *ROOMS), ("mypy",))
TESTS = (("pytest",),)


def main(words: list[str]) -> int:
    """Run the checks and say which failed."""
    if words not in ([], ["lint"]):
        sys.exit("usage: python tests/check.py [lint]")
    failed = []
    for check in LINTERS if words else LINTERS + TESTS:
        print(f"$ {' '.join(check)}", flush=True)
        if subprocess.run([sys.executable, "-m", *check], cwd=Path(__file__).parent.parent, check=False).returncode:
            failed.append(check[0])
    print(f"failed: {', '.join(failed)}" if failed else "all checks pass")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
